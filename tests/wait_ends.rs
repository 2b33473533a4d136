//! Everything that ends a wait.

mod deadline;
mod departure;
mod freed;
mod replaced;
mod server;
mod way;

/// Until a deadline comes, in milliseconds: for that long the machine may stand still while a test does what must be done
/// before.
const AHEAD: u64 = 1500;
