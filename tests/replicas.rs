//! `REPLICAS n`: grants and renewals that count once enough replicas have confirmed them.

mod confirmed;
mod departure;
pub(crate) mod group;
mod many;
mod outage;
mod refused;
mod role;
mod watchdog;
