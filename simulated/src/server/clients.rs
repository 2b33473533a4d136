//! The connections of clients.

use super::Ctx;
use crate::redis::turn::disconnect;

/// Ends a connection other than the caller's, at once.
pub fn end(_: Ctx, client: u64) -> bool {
    disconnect(client);
    true
}
