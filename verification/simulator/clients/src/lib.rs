//! Simulation runs of many clients and one server, each reproducible from a seed: the core of `clients/core`, a network
//! that cuts, delays, drops and refuses, and the module.
//!
//! [`mod@plan`] makes a run from a number, [`network`] carries requests and replies, [`program`] uses the core, and [`run`] plays and
//! checks it all. [`text`] prints the core's steps, and reads them.

pub mod network;
pub mod plan;
pub mod program;
pub mod run;
pub mod text;

pub use plan::{Plan, plan};
pub use run::{RunResult, play};
