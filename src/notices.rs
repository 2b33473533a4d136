//! What the server reports while the module is at work: a key that turns out to have expired when the module opens it,
//! a client whose connection the module itself closes. The state is borrowed meanwhile, so the module queues such a
//! notice. It applies the notice when the work asks for it, at the latest when the work ends.

use crate::holds;
use crate::lock::LockKey;
use crate::lock::serve::Change;
use crate::replies;
use crate::server::callbacks::{Ticket, Touch};
use crate::server::{Ctx, MainThread};
use crate::state::{self, Expiry, LossReason, State};
use std::collections::VecDeque;

/// A report of the server about a key or client other than the one it is serving. Applying it writes nothing to the
/// keyspace.
#[derive(Debug)]
pub enum Notice {
    /// A key was touched, but not by this module.
    Touched {
        /// The key.
        key: LockKey,
        /// How it was touched.
        touch: Touch,
        /// The number of holders until then.
        holders: usize,
    },
    /// A blocked client is gone.
    Gone(Ticket),
    /// A connection has ended.
    ConnectionEnded(u64),
}

static QUEUED: MainThread<VecDeque<Notice>> = MainThread::new();

/// Applies a notice now, or queues it if the state is borrowed by the work that caused it. Returns whether it was
/// applied.
pub fn receive(notice: Notice) -> bool {
    let mut notice = Some(notice);
    state::try_with(|state| notice.take().into_iter().for_each(|notice| note(state, notice)));
    let is_applied = notice.is_none();
    QUEUED.with(|it| it.extend(notice));
    is_applied
}

/// Applies the queued notices; usually there are none. The caller does this before it decides anything by the effects
/// of its own work.
#[inline]
pub fn apply(state: &mut State, ctx: Ctx) {
    if QUEUED.with(|notices| !notices.is_empty()) {
        apply_all(state, ctx);
    }
}

fn apply_all(state: &mut State, ctx: Ctx) {
    while let Some(notice) = QUEUED.with(VecDeque::pop_front) {
        if let Notice::Touched { touch: Touch::Expired, .. } = notice {
            holds::begin(state, ctx);
        }
        note(state, notice);
    }
}

fn note(state: &mut State, notice: Notice) {
    match notice {
        Notice::Touched { key, touch, holders } => note_touch(state, key, touch, holders),
        Notice::Gone(ticket) => replies::gone(state, ticket),
        Notice::ConnectionEnded(client) => replies::connection_ended(state, client),
    }
}

fn note_touch(state: &mut State, key: LockKey, touch: Touch, holders: usize) {
    let expiry = match touch {
        Touch::Expired => Some(Expiry::Key { holders }),
        Touch::FieldsExpired => Some(Expiry::Fields { holders }),
        Touch::Changed => None,
    };
    let why = if expiry.is_some() { LossReason::Expired } else { LossReason::Changed };
    state.bindings.mark_unverified(key.db, &key.name, why);
    state.expired.extend(expiry.map(|expiry| (key.clone(), expiry)));
    state.agenda.note(key, Change::Foreign);
}

/// Clears all notices: the module is about to be unloaded.
pub fn clear() {
    QUEUED.with(VecDeque::clear);
}
