//! What happens to the holds of a client, for metrics and logs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use crate::error::LossReason;
use crate::names::Keys;
use crate::seen::HoldStatus;

/// How many events a slow reader may be behind. Then it loses the oldest.
const BUFFERED: usize = 256;

/// Something that happened to a hold of this client.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A lock was acquired.
    Acquired {
        /// Its keys.
        keys: Keys,
        /// The time since it was requested.
        waited: Duration,
    },
    /// A hold was released: by its guard, or because a cached lock was no longer used.
    Released {
        /// Its keys.
        keys: Keys,
        /// For how long it was held.
        held: Duration,
    },
    /// A hold was lost.
    Lost {
        /// Its keys.
        keys: Keys,
        /// Why.
        why: LossReason,
    },
}

/// The channel of a client.
pub(crate) fn sender() -> broadcast::Sender<Event> {
    broadcast::Sender::new(BUFFERED)
}

/// One hold. It sends an event when it begins, and one when it is dropped.
pub(crate) struct Span {
    keys: Keys,
    since: Instant,
    status: Arc<HoldStatus>,
    events: broadcast::Sender<Event>,
}

impl Span {
    /// A hold that was requested at `asked`, and begins now.
    pub(crate) fn begin(
        events: &broadcast::Sender<Event>,
        (keys, asked): (Keys, Instant),
        status: Arc<HoldStatus>,
    ) -> Self {
        let since = Instant::now();
        // An error means that nobody reads.
        let _ = events.send(Event::Acquired { keys: keys.clone(), waited: since.duration_since(asked) });
        Self { keys, since, status, events: events.clone() }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let keys = self.keys.clone();
        let _ = self.events.send(match self.status.lost.get() {
            Some(why) => Event::Lost { keys, why: *why },
            None => Event::Released { keys, held: self.since.elapsed() },
        });
    }
}
