//! Tests that need no server.

#[path = "failover_model.rs"]
mod failover_model;
#[path = "generated.rs"]
mod generated;
#[path = "redlock_model.rs"]
mod redlock_model;
#[path = "teeth.rs"]
mod teeth;
#[path = "written.rs"]
mod written;
