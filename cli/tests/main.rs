//! `holdfast` as its users have it: processes, signals, terminals.

mod addresses;
mod common;
mod looks;
mod readme;
mod run;
mod terminal;
mod top;
