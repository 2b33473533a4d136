//! Lives of many clients and one server: the core of `clients/core`, a network that cuts, delays, swallows and refuses, and
//! the module, from one seed.
//!
//! [`mod@plan`] makes a life from a number, [`network`] carries bytes, [`program`] is who uses the core, and [`life`] plays it
//! all and judges it.

pub mod life;
pub mod network;
pub mod plan;
pub mod program;

pub use life::{Lived, live};
pub use plan::{Plan, plan};
