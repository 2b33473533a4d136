//! What the server reports to the module.

use super::{Ctx, callbacks};
use crate::redis::{Generation, node};

/// From now on, reports each touched key and each turn of the event loop.
pub fn watch_keys(_: Ctx) {
    node(|node| node.is_watched = true);
}

/// Whether the end of a turn of the event loop comes before the server ends the blocks of clients that were answered:
/// before Redis 7.2.
pub fn turn_end_precedes_unblock() -> bool {
    node(|node| node.generation == Generation::Redis70)
}

/// Requests a call of `after_touch` after the command that touched a key, in the same step.
pub fn request_after_touch(_: Ctx) -> bool {
    node(|node| {
        let can = node.generation != Generation::Redis70;
        node.jobs += usize::from(can);
        node.most_jobs = node.most_jobs.max(node.jobs);
        can
    })
}

/// Lets the event loop make another turn before it sleeps, if it is about to.
pub fn go_round_again() {
    node(|node| {
        if node.generation == Generation::Redis70 && node.turn_is_over {
            node.goes_round_again = true;
        }
    });
}

/// What the module has given the server to call.
pub(crate) fn callbacks() -> Option<&'static callbacks::Callbacks> {
    callbacks::get()
}
