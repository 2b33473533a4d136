//! `LOCK.MRELEASE`

use super::args::{self, Options, Word};
use super::release::{release_all, reply_left};
use crate::event_loop;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
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
        let (names, owner) = args::read_several::<Self>(call, &mut options)?;
        event_loop::run(call.ctx, |state, now| {
            let mut left = vec![None; names.len()];
            let withdrawn = release_all(state, call.ctx, &names, owner.as_text(), &options, &mut left, now)?;
            let array = call.ctx.reply_array(left.len());
            let of_each = left.into_iter().zip(&names);
            Ok(of_each.fold(array, |_, (left, name)| reply_left(call.ctx, left, withdrawn.contains(*name))))
        })
    }
}
