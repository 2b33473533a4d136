//! A lock that is handed on among waiting clients.
//!
//! The rule is the same for all contenders: a client that has released the lock requests it again when the next one has it. The next
//! release comes when that request waits. So every release is a hand-off to a waiter, and the number of waiters is constant.

use std::time::Instant;

use crate::client_pool::ClientEvent;

/// The state of one lock.
#[derive(Default)]
pub struct Relay {
    holder: Option<usize>,
    leaver: Option<Leaver>,
    returning: Option<usize>,
}

struct Leaver {
    client: usize,
    since: Instant,
    confirmed: bool,
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This client, which has released the lock, requests it again.
    Return(usize),
    /// This client holds the lock and may release it.
    Leave(usize),
}

impl Relay {
    /// The holder releases the lock now.
    pub fn leave(&mut self, client: usize) {
        self.holder = None;
        self.leaver = Some(Leaver { client, since: Instant::now(), confirmed: false });
    }

    /// The time of a release whose next holder has no reply yet.
    pub fn left_at(&self) -> Option<Instant> {
        self.leaver.as_ref().map(|leaver| leaver.since)
    }

    /// Handles an outcome of one of the clients. The replies to the release and to the next holder may be read in either order.
    pub fn handle(&mut self, event: ClientEvent) -> Option<Next> {
        match event {
            ClientEvent::Granted(client, _) => self.holder = Some(client),
            ClientEvent::Released(_) => {
                if let Some(leaver) = &mut self.leaver {
                    leaver.confirmed = true;
                }
            }
            ClientEvent::Waits(client) if self.returning == Some(client) => {
                self.returning = None;
                return self.holder.map(Next::Leave);
            }
            ClientEvent::Waits(_) => return None,
        }
        let holder = self.holder?;
        let Some(leaver) = &self.leaver else { return Some(Next::Leave(holder)) };
        if !leaver.confirmed {
            return None;
        }
        self.returning = self.leaver.take().map(|leaver| leaver.client);
        self.returning.map(Next::Return)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(client: usize) -> ClientEvent {
        ClientEvent::Granted(client, Instant::now())
    }

    #[test]
    fn client_rejoins_when_both_replies_arrived_in_any_order() {
        let mut relay = Relay::default();
        assert_eq!(relay.handle(granted(0)), Some(Next::Leave(0)));
        relay.leave(0);
        assert_eq!(relay.handle(ClientEvent::Released(0)), None);
        assert_eq!(relay.handle(granted(1)), Some(Next::Return(0)));
        assert_eq!(relay.handle(ClientEvent::Waits(0)), Some(Next::Leave(1)));
        relay.leave(1);
        assert_eq!(relay.handle(granted(2)), None);
        assert_eq!(relay.handle(ClientEvent::Released(1)), Some(Next::Return(1)));
    }

    #[test]
    fn holder_stays_until_previous_one_waits_again() {
        let mut relay = Relay::default();
        relay.handle(granted(0));
        relay.leave(0);
        relay.handle(granted(1));
        relay.handle(ClientEvent::Released(0));
        assert_eq!(relay.handle(ClientEvent::Waits(7)), None);
        assert_eq!(relay.handle(ClientEvent::Waits(0)), Some(Next::Leave(1)));
    }
}
