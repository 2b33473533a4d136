//! The server's own timers, as `timer.rs` uses them.

use super::Ctx;
use crate::lock::Millis;
use crate::redis::{TimerId, context, node};

pub(super) type Id = TimerId;

/// What a timer does.
pub(super) trait Fires {
    /// Its time has come.
    fn fire(ctx: Ctx);
}

/// Makes a timer that fires once, in `period` ms.
pub(super) fn create<F: Fires>(_: Ctx, period: Millis) -> Id {
    node(|node| node.timers.create(&node.clock, period, || F::fire(context(0, 0))))
}

/// Stops a timer; one that is not pending any more is refused by the server, which does no harm.
pub(super) fn cancel(_: Ctx, id: Id) {
    node(|node| node.timers.cancel(id));
}
