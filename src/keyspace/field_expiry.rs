//! Fields with an expiry of their own (`HPEXPIRE`: Redis 7.4 and later, Valkey 9 and later).
//!
//! Such a field goes although the lock's deadline has not come: the owner's, and the hold is over; `#limit`, and the hash
//! is no lock any more. Whoever promises a deadline must therefore write these fields anew, by which they lose their
//! expiry, on replicas and in the append-only file as well.

use crate::server::commands::exists;
use crate::server::{Ctx, MainThread};

static POSSIBLE: MainThread<bool> = MainThread::new();

/// Learns, at load, whether the server knows such fields.
pub fn start(ctx: Ctx) {
    let possible = exists(ctx, c"HPEXPIRE");
    POSSIBLE.with(|it| *it = possible);
}

/// Whether the server knows such fields.
pub fn is_possible() -> bool {
    POSSIBLE.with(|possible| *possible)
}
