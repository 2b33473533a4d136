//! Clients that wait for their reply.

use super::callbacks::Ticket;
use super::reply::Replied;
use super::text::{Text, TextRef};
use super::{Ctx, calls, events};
use crate::node::{Block, node};

/// A client that this module blocked.
#[derive(Debug)]
pub struct Blocked {
    client: u64,
    ticket: Ticket,
    on: On,
}

#[derive(Debug)]
enum On {
    /// Keys; in a cluster also the first of them.
    Keys(Option<Text>),
    /// Nothing that the server knows.
    Nothing,
}

/// Blocks the calling client on `keys` without a timeout.
pub fn block(ctx: Ctx, keys: &[TextRef], ticket: Ticket) -> Option<(Blocked, Replied)> {
    let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.bytes().to_vec()).collect();
    let first = keys.first().filter(|_| ctx.flags().cluster()).map(|key| Text::new(key));
    node(|node| node.block(ctx.client_id(), Block { ticket: ticket.0, keys: Some(keys), is_answered: false }));
    Some((Blocked { client: ctx.client_id(), ticket, on: On::Keys(first) }, Replied::later()))
}

/// The same for a client that waits for no key, and that the server never redirects.
pub fn block_for_events(ctx: Ctx, ticket: Ticket) -> Option<(Blocked, Replied)> {
    node(|node| node.block(ctx.client_id(), Block { ticket: ticket.0, keys: None, is_answered: false }));
    Some((Blocked { client: ctx.client_id(), ticket, on: On::Nothing }, Replied::later()))
}

impl Blocked {
    /// Whether the client has the default user.
    pub fn is_of_default_user(&self) -> bool {
        node(|node| node.clients.get(&self.client).is_some_and(|client| client.user == "default"))
    }

    /// Whether the server may still end the wait itself in this event-loop iteration: its cron may redirect the client. (No
    /// user is deleted here.)
    pub fn may_be_ended_by_server(&self, ctx: Ctx) -> bool {
        let key = match &self.on {
            On::Keys(key) if !events::iteration_end_precedes_unblock() => key.as_ref(),
            _ => None,
        };
        key.is_some_and(|key| !ctx.serves(key))
    }

    /// Ends the wait. `Callbacks::answer` is called before this returns or, if the client waits for no key, before the
    /// server does anything else for it.
    pub fn answer(self) {
        if let On::Nothing = self.on {
            node(|node| node.handles -= 1);
        }
        calls::unblock(self.client, self.ticket);
    }

    /// The wait ended without the module: lets the server free its handle.
    pub fn has_ended(self) {
        if let On::Nothing = self.on {
            node(|node| node.handles -= 1);
        }
    }
}
