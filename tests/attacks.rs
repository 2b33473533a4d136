//! What a client could do to others of the same server: stop it, read what it may not, keep what it has lost.

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
