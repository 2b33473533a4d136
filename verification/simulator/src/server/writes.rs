//! Whether the server takes writes.

use super::{Ctx, Role};
use crate::node::node;

/// Whether this server may change locks now.
pub fn are_possible(_: Ctx) -> bool {
    node(|node| node.role == Role::Primary && !node.is_paused())
}

/// Whether the server would refuse a client's write now.
pub fn are_refused(_: Ctx) -> bool {
    super::open_keys::check_none_open();
    node(|node| node.refuses_writes().is_some() || node.slots.as_ref().is_some_and(|slots| slots.is_down))
}
