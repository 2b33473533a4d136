//! `LOCK.CANCEL`

use super::args::{self, Options, Word};
use crate::holding;
use crate::lock::LockKey;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::waiting;
use std::ffi::{CStr, c_int};

/// `LOCK.CANCEL`
#[derive(Debug)]
pub struct Cancel;

impl Command for Cancel {
    const NAME: &'static CStr = c"lock.cancel";
    const SINCE: &'static CStr = c"0.2.0";
    /// No `write`: the wait and the ties go also where the server would refuse a write.
    const FLAGS: &'static CStr = c"";
    const CATEGORIES: &'static str = "write slow";
    const KEYS: Keys = Keys::First(Access::Delete);
    const ARITY: c_int = -3;
    const DOCS: Docs = Docs {
        summary: c"Gives up an acquisition on behalf of a session, however far it got: returns 1 if there was anything to take back.",
        complexity: c"O(K log N) with K keys that were asked for together and N waiters.",
        args: &[Arg::key(), Arg::text(c"owner"), Word::Session.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (name, owner) = args::of_one::<Self>(call, &mut options)?;
        let session = args::session(call, &options)?;
        let key = LockKey::new(call.ctx.db(), name.bytes());
        let any = waiting::cancel(call.ctx, session, owner.as_text(), &key, holding::begin(call.ctx));
        Ok(call.ctx.reply_integer(u64::from(any)))
    }
}
