//! Everything that ends a wait.

mod deadline;
mod departure;
mod freed;
mod replaced;
mod server;
mod way;

/// Milliseconds until a deadline: a machine may pause for that long while a test does what has to precede the deadline.
const AHEAD: u64 = 1500;
