//! What whoever may use a server could do to the others on it: stop it, look where it may not, keep what it has lost.

mod bounds;
mod crowds;
mod far_deadlines;
mod field_expiry;
mod first_replica;
mod long;
mod purged;
mod reading;
mod secrets;
mod starving;
mod taken_rights;
mod watchdogs;
