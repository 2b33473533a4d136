//! What one client could do to the others of its server: delay them, read keys without the right to, keep a lost lock.

mod bounds;
mod far_deadlines;
mod field_expiry;
mod first_replica;
mod long;
mod many_requests;
mod purged;
mod reading;
mod secrets;
mod starving;
mod taken_rights;
mod watchdogs;
