//! One suite for every client of Holdfast. Scenarios (`scenarios/`) are played to a client through a driver
//! (`drivers/`), with faults between any two messages. The reports of the server and of the client are checked, never a
//! client's internals.
#![forbid(unsafe_code)]

pub mod clock;
pub mod driver;
pub mod fault;
pub mod golden;
pub mod history;
pub mod left;
pub mod newer;
pub mod play;
pub mod random;
pub mod rules;
pub mod scenario;
pub mod servers;
pub mod superseded;
pub mod table;
