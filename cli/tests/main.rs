//! Tests of `holdfast` with processes, signals and terminals.

mod addresses;
mod common;
mod looks;
mod metrics;
mod night;
mod readme;
mod rights;
mod run;
mod schema;
mod terminal;
mod top;
