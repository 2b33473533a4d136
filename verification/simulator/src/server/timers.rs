//! The server's own timers, as `timer.rs` uses them.

use super::Ctx;
use super::calls::context;
use crate::lock::Millis;
use crate::node::{TimerId, node};

pub(super) type Id = TimerId;

/// What a timer does.
pub(super) trait Fires {
    /// The timer is due.
    fn fire(ctx: Ctx);
}

/// Makes a timer that fires once: in `period` ms, or in this event-loop iteration if there is none.
pub(super) fn create<F: Fires>(_: Ctx, period: Option<Millis>) -> Id {
    node(|node| node.timers.create(&node.clock, period.unwrap_or(0), || F::fire(context(0, 0))))
}

/// Cancels a timer. The server ignores one that is no longer pending.
pub(super) fn cancel(_: Ctx, id: Id) {
    node(|node| node.timers.cancel(id));
}
