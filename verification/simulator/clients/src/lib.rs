//! Runs of many clients and one server: the core of `clients/core`, a network that cuts, delays, swallows and refuses, and
//! the module, from one seed.
//!
//! [`mod@plan`] makes a run from a number, [`network`] carries bytes, [`program`] is who uses the core, and [`run`] plays it
//! all and judges it.

pub mod network;
pub mod plan;
pub mod program;
pub mod run;

pub use plan::{Plan, plan};
pub use run::{RunResult, play};
