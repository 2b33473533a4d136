//! `LOCK.MACQUIRE`

use super::acquire::{Acquisition, ahead};
use super::args::{self, Options, Word};
use crate::event_loop;
use crate::holds::look_all;
use crate::keyspace::Lock;
use crate::lock::decide;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use std::ffi::{CStr, c_int};

/// `LOCK.MACQUIRE`
///
/// Acquires all of the locks or none. A waiting request holds none of them, but has a position in the queue of each.
/// Later requests wait until it has been served or has left, even for a lock that is free meanwhile.
#[derive(Debug)]
pub struct Macquire;

impl Command for Macquire {
    const NAME: &'static CStr = c"lock.macquire";
    const FLAGS: &'static CStr = c"write deny-oom blocking getkeys-api";
    const CATEGORIES: &'static str = "write slow blocking";
    const KEYS: Keys = Keys::Counted(Access::Update);
    const ARITY: c_int = -4;
    const DOCS: Docs = Docs {
        summary: c"Acquires several locks in one step, all or none, or waits for them without holding any.",
        complexity: c"O(K log N) with K keys and N waiters.",
        args: &[
            Arg::integer(c"numkeys"),
            Arg::keys(),
            Arg::text(c"owner"),
            Word::Lease.option(),
            Word::Wait.option(),
            Word::Waited.option(),
            Arg::one_of(c"re-entry", &[Word::Holds.arg(), Word::New.arg()]),
            Word::Watchdog.option(),
            Word::Ephemeral.option(),
            Word::Replicas.option(),
            Word::WithWaited.option(),
            Word::Contention.option(),
            Word::Session.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (names, owner) = args::read_several::<Self>(call, &mut options)?;
        event_loop::run(call.ctx, |state, now| {
            let requester = args::requester(state, call, &options)?;
            let mut acquisition = Acquisition::new(state, call.ctx, owner.as_text(), requester, &options, now);
            if let Some(replied) = acquisition.repeated(&names) {
                return Ok(replied);
            }
            let mut locks = look_all(acquisition.state, call.ctx, &names, owner.as_text(), now)?;
            let locks = locks.all();
            let ahead = |lock: &Lock| ahead(acquisition.state, call.ctx, lock.name().text());
            let decide = |lock| decide(&Lock::standing(lock), &acquisition.terms.demand, ahead(lock), now.millis());
            let decisions: Vec<_> = locks.iter().map(decide).collect();
            acquisition.carry_out(locks, &decisions)
        })
    }
}
