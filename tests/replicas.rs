//! Grants and renewals that count only once enough replicas have them: `REPLICAS n`.

mod confirmed;
mod crowd;
mod departure;
pub(crate) mod group;
mod outage;
mod refused;
mod role;
mod watchdog;
