//! What the Rust client's core does: in simulation runs, and step by step.

mod runs;
mod steps;
