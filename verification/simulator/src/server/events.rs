//! What the server reports to the module.

use super::Ctx;
use crate::node::{Generation, node};

/// From now on, reports each written key and each event-loop iteration.
pub fn watch_keys(_: Ctx) {
    node(|node| node.is_watched = true);
}

/// Whether the end of an iteration comes before the server unblocks clients: before Redis 7.2.
pub fn iteration_end_precedes_unblock() -> bool {
    node(|node| node.generation == Generation::Redis70)
}

/// Whether a client that waits for no key may be unblocked before the end of an iteration. (Redis 7.2 crashes if another
/// command ends the wait in between.)
pub fn may_unblock_early() -> bool {
    !iteration_end_precedes_unblock()
}

/// Requests a call of `after_touch` after the command that wrote a key, in the same unit.
pub fn request_after_touch(_: Ctx) -> bool {
    node(|node| {
        let can = node.generation != Generation::Redis70;
        node.jobs += usize::from(can);
        node.most_jobs = node.most_jobs.max(node.jobs);
        can
    })
}

/// Lets the event loop run another iteration before it sleeps, if it is about to.
pub fn request_iteration() {
    node(|node| {
        if node.generation == Generation::Redis70 && node.iteration_is_over {
            node.runs_again = true;
        }
    });
}
