//! Fields with their own expiry (`HPEXPIRE`: Redis 7.4 and later, Valkey 9 and later).
//!
//! Such a field can vanish before the lock's deadline. If it is the owner's, the hold is over; if it is `#limit`, the
//! hash is no longer a lock. So code that promises a deadline must rewrite these fields. That removes their expiry, on
//! replicas and in the append-only file as well.

use super::known::known;
use crate::server::{Ctx, commands, key};

/// Asks the server whether it supports such fields.
pub fn exists(ctx: Ctx) -> bool {
    commands::exists(ctx, c"HPEXPIRE")
}

/// Whether the server supports such fields, as found out at load.
pub fn is_possible() -> bool {
    known(|it| it.has_field_expiry)
}

/// Whether the server reports such fields without running a command. Where it does not (as on Valkey 9), the query
/// costs as much as the rest of a renewal.
pub fn is_cheap_to_ask() -> bool {
    key::reports_field_expiry()
}
