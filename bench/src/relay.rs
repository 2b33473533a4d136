//! A lock that goes round among waiting clients.
//!
//! The rule is the same for everybody who is measured: who gave the lock back asks for it again as soon as the next one
//! has it, and the next release comes when that one waits. So every release is a hand-off to somebody who waited, and the
//! number of waiters stays what it is.

use std::time::Instant;

use crate::crowd::Happened;

/// Where one lock is.
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

/// What the rule asks for next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This client, who gave the lock back, asks for it again.
    Return(usize),
    /// This client holds the lock and may release it.
    Leave(usize),
}

impl Relay {
    /// The holder gives the lock back now.
    pub fn leave(&mut self, client: usize) {
        self.holder = None;
        self.leaver = Some(Leaver { client, since: Instant::now(), confirmed: false });
    }

    /// When the lock was released whose next holder has not answered yet.
    pub fn left_at(&self) -> Option<Instant> {
        self.leaver.as_ref().map(|leaver| leaver.since)
    }

    /// Takes in what happened to one of the clients. The replies to the one who leaves and to the next holder may be read
    /// in either order.
    pub fn happened(&mut self, happened: Happened) -> Option<Next> {
        match happened {
            Happened::Granted(client, _) => self.holder = Some(client),
            Happened::Released(_) => {
                if let Some(leaver) = &mut self.leaver {
                    leaver.confirmed = true;
                }
            }
            Happened::Waits(client) if self.returning == Some(client) => {
                self.returning = None;
                return self.holder.map(Next::Leave);
            }
            Happened::Waits(_) => return None,
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

    fn granted(client: usize) -> Happened {
        Happened::Granted(client, Instant::now())
    }

    #[test]
    fn client_rejoins_when_both_replies_arrived_in_any_order() {
        let mut relay = Relay::default();
        assert_eq!(relay.happened(granted(0)), Some(Next::Leave(0)));
        relay.leave(0);
        assert_eq!(relay.happened(Happened::Released(0)), None);
        assert_eq!(relay.happened(granted(1)), Some(Next::Return(0)));
        assert_eq!(relay.happened(Happened::Waits(0)), Some(Next::Leave(1)));
        relay.leave(1);
        assert_eq!(relay.happened(granted(2)), None);
        assert_eq!(relay.happened(Happened::Released(1)), Some(Next::Return(1)));
    }

    #[test]
    fn holder_stays_until_previous_one_waits_again() {
        let mut relay = Relay::default();
        relay.happened(granted(0));
        relay.leave(0);
        relay.happened(granted(1));
        relay.happened(Happened::Released(0));
        assert_eq!(relay.happened(Happened::Waits(7)), None);
        assert_eq!(relay.happened(Happened::Waits(0)), Some(Next::Leave(1)));
    }
}
