//! `holdfast` as its users have it: processes, signals, terminals.

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
