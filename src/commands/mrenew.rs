//! `LOCK.MRENEW`

use super::args::{self, Options, Word};
use super::renew::{Renewed, renew_all};
use crate::event_loop;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::state::Answer;
use std::ffi::{CStr, c_int};

/// `LOCK.MRENEW`
#[derive(Debug)]
pub struct Mrenew;

impl Command for Mrenew {
    const NAME: &'static CStr = c"lock.mrenew";
    const FLAGS: &'static CStr = c"write blocking getkeys-api";
    const CATEGORIES: &'static str = "write slow blocking";
    const KEYS: Keys = Keys::Counted(Access::Update);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary: c"Renews the leases of several locks: returns an array of what RENEW would return.",
        complexity: c"O(K) with K keys.",
        args: &[
            Arg::integer(c"numkeys"),
            Arg::keys(),
            Arg::text(c"owner"),
            Word::Lease.option(),
            Word::Token.option(),
            Word::Watchdog.option(),
            Word::Ephemeral.option(),
            Word::Replicas.option(),
            Word::Unbind.option(),
            Word::Contention.option(),
            Word::Session.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (names, owner) = args::read_several::<Self>(call, &mut options)?;
        let token = |renewed: &Option<Renewed>| renewed.map(|renewed| renewed.token);
        let answer = |renewed: &[Option<Renewed>]| Some(Answer::Tokens(renewed.iter().map(token).collect()));
        let mut of_each = vec![None; names.len()];
        event_loop::run(call.ctx, |state, now| {
            renew_all(state, call, (&names, &mut of_each), owner.as_text(), &options, answer, now)
        })
    }
}
