//! The connections of clients.

use super::Ctx;
use super::calls::disconnect;
use crate::node::client::State;
use crate::node::node;

/// Closes a connection other than the caller's, immediately.
pub fn end(_: Ctx, client: u64) -> bool {
    disconnect(client);
    true
}

/// Whether a connection is blocked in a command.
pub fn is_blocked(client: u64) -> bool {
    node(|node| node.clients.get(&client).is_some_and(|it| matches!(it.state, State::Blocked(_))))
}
