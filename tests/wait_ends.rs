//! Everything that ends a wait.

mod deadline;
mod departure;
mod freed;
mod replaced;
mod server;
mod way;
