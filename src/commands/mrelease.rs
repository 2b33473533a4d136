//! `LOCK.MRELEASE`

use super::args::{self, Options, Word};
use super::release::{give_back, refuse_part, reply_left, withdraw_pending};
use crate::holding::{self, look_all};
use crate::lock::LockKey;
use crate::lock::serve::Change;
use crate::server::clock::Slice;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::serving::serve;
use crate::state;
use std::ffi::{CStr, c_int};

/// `LOCK.MRELEASE`
#[derive(Debug)]
pub struct Mrelease;

impl Command for Mrelease {
    const NAME: &'static CStr = c"lock.mrelease";
    const FLAGS: &'static CStr = c"write getkeys-api";
    const CATEGORIES: &'static str = "write slow";
    const KEYS: Keys = Keys::Counted(Access::Delete);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary:
            c"Releases one hold of each of several locks, or all of them: returns an array of what RELEASE would return.",
        complexity: c"O(K log N) with K keys and N waiters.",
        args: &[Arg::integer(c"numkeys"), Arg::keys(), Arg::text(c"owner"), Word::Token.option(), Word::All.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (names, owner) = args::of_several::<Self>(call, &mut options)?;

        let now = holding::begin(call.ctx);
        let ctx = call.ctx;
        let mut locks = look_all(ctx, &names, owner.as_text(), now)?;
        refuse_part(ctx, &locks, owner.as_text(), &options)?;
        let withdrawn = withdraw_pending(ctx, &names, owner.as_text(), &options, now);
        let left: Vec<_> = locks.iter_mut().map(|lock| give_back(lock, owner.as_text(), &options, now)).collect();
        let db = ctx.db();
        drop(locks);
        state::with(|state| {
            for (name, _) in names.iter().zip(&left).filter(|(_, left)| **left == Some(0)) {
                if state.is_contended(db, name.bytes()) {
                    state.agenda.note(LockKey::new(db, name.bytes()), Change::Freed);
                }
            }
        });
        serve(ctx, now, &Slice::of_command());

        let array = ctx.reply_array(left.len());
        let of_each = left.into_iter().zip(&names);
        Ok(of_each.fold(array, |_, (left, name)| reply_left(ctx, left, withdrawn.is_of(*name))))
    }
}
