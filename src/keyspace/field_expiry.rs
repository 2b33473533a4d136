//! Fields with an expiry of their own (`HPEXPIRE`: Redis 7.4 and later, Valkey 9 and later).
//!
//! Such a field can vanish before the lock's deadline: if it is the owner's, the hold is over; if it is `#limit`, the
//! hash is no lock any more. So code that promises a deadline must write these fields anew, which removes their expiry
//! on replicas and in the append-only file as well.

use super::known::known;
use crate::server::{Ctx, commands, key};

/// Asks whether the server has such fields.
pub fn exists(ctx: Ctx) -> bool {
    commands::exists(ctx, c"HPEXPIRE")
}

/// Whether the server has such fields.
pub fn is_possible() -> bool {
    known(|it| it.has_field_expiry)
}

/// Whether the server reports them without a command being run. Where it does not (Valkey 9), asking costs as much as
/// the rest of a renewal.
pub fn is_cheap_to_ask() -> bool {
    key::tells_of_field_expiry()
}
