//! How the server calls the module, and what it does around that.

use super::Ctx;
use super::callbacks::{self, Event, Ticket, Touch};
use crate::node::client::State;
use crate::node::{Block, Client, LogEntry, Place, Role, node};
use std::marker::PhantomData;

/// The context of a callback.
pub fn context<'a>(client: u64, db: i32) -> Ctx<'a> {
    Ctx { client, db, place: Place::Alone, lifetime: PhantomData }
}

/// Reports an event to the module.
pub fn report(event: Event) {
    if let Some(callbacks) = callbacks::get() {
        (callbacks.event)(context(0, 0), event);
    }
}

/// Reports a keyspace notification to the module.
pub fn notify(db: i32, key: &[u8], touch: Touch) {
    if node(|node| node.is_watched)
        && let Some(callbacks) = callbacks::get()
    {
        (callbacks.key_touched)(context(0, db), touch, key);
    }
}

/// What the server does after a command or a callback: it runs the jobs that notifications requested, then propagates
/// the writes.
pub fn end_of_step() {
    while node(|node| std::mem::take(&mut node.jobs)) > 0 {
        if let Some(callbacks) = callbacks::get() {
            (callbacks.after_touch)(context(0, 0));
        }
    }
    node(|node| node.stream.end_step());
}

/// Removes an expired key if this server may: a replica and a paused primary only hide it.
pub fn expire_if_needed(db: i32, key: &[u8]) {
    let removed = node(|node| {
        let expired = node.stored(db, key).is_some_and(|entry| entry.has_expired(node.clock.millis()));
        if !expired || node.role == Role::Replica || node.is_paused() {
            return false;
        }
        node.remove(db, key);
        node.log.push(LogEntry::Written { db, key: key.to_vec(), expired: true });
        true
    });
    if removed {
        notify(db, key, Touch::Expired);
        node(|node| node.stream.note(db, vec![b"DEL".to_vec(), key.to_vec()]));
    }
}

/// Whether a key exists.
pub fn exists(db: i32, key: &[u8]) -> bool {
    expire_if_needed(db, key);
    node(|node| node.get(db, key).is_some())
}

/// The module unblocks a client. One that is blocked on keys gets its reply immediately.
pub fn unblock(client: u64, ticket: Ticket) {
    let at_once = node(|node| {
        let block = node.clients.get_mut(&client).and_then(Client::blocked).filter(|block| block.ticket == ticket.0);
        let Some(block) = block else { return false };
        block.is_answered = true;
        let block = block.clone();
        let at_once = block.keys.is_some();
        node.unblocked.push_back((client, block));
        at_once
    });
    if at_once {
        answer(client, ticket);
    }
}

/// Lets the module write the reply of a blocked client.
pub fn answer(client: u64, ticket: Ticket) {
    let db = node(|node| node.clients.get(&client).map_or(0, |client| client.db));
    if let Some(callbacks) = callbacks::get() {
        (callbacks.answer)(context(client, db), ticket);
    }
}

/// A client was unblocked without the module.
fn notify_end(client: u64, ticket: Ticket) {
    if let Some(callbacks) = callbacks::get() {
        (callbacks.gone)(context(client, 0), ticket);
    }
}

/// Closes a connection: first the event, then, if it was blocked, the module's callback.
pub fn disconnect(client: u64) {
    let Some(unsent) = node(|node| node.clients.get(&client).map(|client| client.output.clone())) else { return };
    node(|node| node.log.push(LogEntry::Disconnected(client, unsent)));
    report(Event::ClientGone(client));
    let closed = node(|node| {
        let closed = node.clients.remove(&client)?;
        node.final_output.insert(client, closed.sent.clone());
        Some(closed)
    });
    if let Some(State::Blocked(block)) = closed.map(|client| client.state)
        && block.may_end_without_module()
    {
        notify_end(client, Ticket(block.ticket));
    }
}

/// Unblocks a client without the module.
pub fn force_unblock(client: u64) {
    let block = node(|node| {
        let it = node.clients.get_mut(&client)?;
        let block = it.blocked()?.clone();
        it.state = State::Ready;
        node.resumed.push_back(client);
        node.log.push(LogEntry::Unblocked(client));
        Some(block)
    });
    if let Some(block) = block.filter(Block::may_end_without_module) {
        notify_end(client, Ticket(block.ticket));
    }
}
