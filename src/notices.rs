//! What the server reports while the module is at work: a key that turns out to have expired when it is opened, a client
//! whose connection the module itself closes. The state is lent to the work meanwhile, so such a notice is put aside, and
//! applied as soon as the work asks for it, at the latest when it ends.

use crate::holds;
use crate::lock::LockKey;
use crate::lock::serve::Change;
use crate::replies;
use crate::server::callbacks::{Ticket, Touch};
use crate::server::{Ctx, MainThread};
use crate::state::{self, Expiry, State, Why};
use std::collections::VecDeque;

/// Something that the server reports about others than the one it is working for. Noting it writes nothing.
#[derive(Debug)]
pub enum Notice {
    /// A key was touched, though not by this module.
    Touched {
        /// The key.
        key: LockKey,
        /// How.
        touch: Touch,
        /// How many held the lock until then.
        holders: usize,
    },
    /// A blocked client is gone.
    Gone(Ticket),
    /// A connection has ended.
    ConnectionEnded(u64),
}

static PUT_ASIDE: MainThread<VecDeque<Notice>> = MainThread::new();

/// Applies a notice now, or puts it aside if the state is lent to the work that caused it. Returns whether it was applied.
pub fn receive(notice: Notice) -> bool {
    let mut notice = Some(notice);
    state::try_with(|state| notice.take().into_iter().for_each(|notice| note(state, notice)));
    let is_applied = notice.is_none();
    PUT_ASIDE.with(|it| it.extend(notice));
    is_applied
}

/// Applies what was put aside: mostly nothing. To be called before something is decided by what the work has just caused.
#[inline]
pub fn apply(state: &mut State, ctx: Ctx) {
    if PUT_ASIDE.with(|notices| !notices.is_empty()) {
        apply_all(state, ctx);
    }
}

fn apply_all(state: &mut State, ctx: Ctx) {
    while let Some(notice) = PUT_ASIDE.with(VecDeque::pop_front) {
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
    let why = if expiry.is_some() { Why::Expired } else { Why::Changed };
    state.bindings.doubt(key.db, &key.name, why);
    state.expired.extend(expiry.map(|expiry| (key.clone(), expiry)));
    state.agenda.note(key, Change::Foreign);
}

/// Forgets everything; the module is about to be unloaded.
pub fn clear() {
    PUT_ASIDE.with(VecDeque::clear);
}
