//! `LOCK.EVENTS`

use super::args::{self, Word};
use super::session;

use crate::event_loop;
use crate::server::Call;
use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::state::Reading;
use crate::waiting;
use std::ffi::{CStr, c_int};

/// How many events are returned without `COUNT`.
const SHOWN: usize = 1000;

/// `LOCK.EVENTS`
#[derive(Debug)]
pub struct Events;

impl Command for Events {
    const NAME: &'static CStr = c"lock.events";
    const SINCE: &'static CStr = c"0.2.0";
    const FLAGS: &'static CStr = c"blocking allow-loading allow-stale";
    const CATEGORIES: &'static str = "slow blocking connection";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = -1;
    const DOCS: Docs = Docs {
        summary: c"Returns the next events of this connection's session, or waits for one: null if there is none; with HEARTBEAT, a heartbeat at the end.",
        complexity: c"O(N) with N events returned.",
        args: &[Word::Wait.option(), Word::Count.option(), Word::Heartbeat.option()],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let options = args::options(call, 1, Self::DOCS.args)?;
        let ctx = call.ctx;
        if !session::is_connection(ctx) {
            return Err("ERR LOCK.EVENTS reads the events of a connection, and a script has none of its own".into());
        }
        event_loop::run(ctx, |state, now| {
            let session = session::of_connection(state, ctx)?;
            let (most, asked) = (options.count.unwrap_or(SHOWN), now.millis());
            let reading = Reading { most, signs: options.signs, asked, until: None };
            waiting::read_next(state, ctx, session, reading, options.wait(), now)
        })
    }
}
