//! `LOCK.ACQUIRE` and the path of a request that may wait, which `LOCK.MACQUIRE` shares.

use super::args::{self, Options, Word};
use crate::books::owed::{OnBehalf, Purpose};
use crate::books::{self, Answer, Terms};
use crate::holding::{self, Grantee, WRONGTYPE};
use crate::keyspace::{Allowance, Lock};
use crate::lock::cycle::Candidate;
use crate::lock::{Ahead, Decision, LockKey, decide};
use crate::searching;
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, TextRef};
use crate::serving::{refusal, too_many_holders};
use crate::stats::count;
use crate::undo;
use crate::waiting::{self, Request, Wait};
use std::cell::OnceCell;
use std::ffi::{CStr, c_int};
use std::rc::Rc;

/// `LOCK.ACQUIRE`
#[derive(Debug)]
pub struct Acquire;

impl Command for Acquire {
    const NAME: &'static CStr = c"lock.acquire";
    const FLAGS: &'static CStr = c"write deny-oom blocking";
    const CATEGORIES: &'static str = "write slow blocking";
    const KEYS: Keys = Keys::First(Access::Update);
    const ARITY: c_int = -3;
    const DOCS: Docs = Docs {
        summary: c"Acquires a lock, or waits for it: returns a fencing token, or null.",
        complexity: c"O(log N) with N holders and waiters of the lock.",
        args: &[
            Arg::key(),
            Arg::text(c"owner"),
            Word::Lease.option(),
            Word::Wait.option(),
            Arg::one_of(c"limit", &[Word::Limit.arg(), Word::Shared.arg()]),
            Word::Holds.option(),
            Word::Watchdog.option(),
            Word::Ephemeral.option(),
            Word::Replicas.option(),
            Word::Session.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (name, owner) = args::of_one::<Self>(call, &mut options)?;
        let asker = args::asker(call, &options)?;
        let asking = Asking::new(call.ctx, owner.as_text(), asker, &options);
        if let Some(replied) = asking.repeated(&[name])? {
            return Ok(replied);
        }
        let (ahead, now) = (ahead(call.ctx, name), asking.now.millis());
        let mut lock = match ahead {
            Ahead::Nobody => Lock::look(call.ctx, name, owner.as_text(), now).map_err(|_| WRONGTYPE)?,
            Ahead::Somebody => {
                match Lock::look_if_held(call.ctx, name, owner.as_text(), now, &mut Allowance::default()) {
                    Ok(Some(lock)) => lock,
                    // An owner that holds nothing here queues behind the others, whatever else is in the key.
                    Ok(None) => return asking.queue(&[name], &[]),
                    Err(_) => return Err(WRONGTYPE.into()),
                }
            }
        };
        let decision = decide(&lock.standing(), &asking.terms.demand, ahead, now);
        asking.carry_out(std::slice::from_mut(&mut lock), &[decision])
    }
}

/// Whether a newcomer has to queue behind others.
pub(super) fn ahead(ctx: Ctx, name: TextRef) -> Ahead {
    let contended = books::with(|books| books.is_contended(ctx.db(), name.bytes()));
    if contended { Ahead::Somebody } else { Ahead::Nobody }
}

/// A request for one lock or several, in progress.
pub(super) struct Asking<'a> {
    ctx: Ctx<'a>,
    owner: TextRef<'a>,
    client: u64,
    on_behalf: OnBehalf,
    wait: Wait,
    pub(super) terms: Terms,
    pub(super) now: Now,
    /// Made once, when it is needed.
    request: OnceCell<Request>,
}

impl<'a> Asking<'a> {
    pub(super) fn new(
        ctx: Ctx<'a>,
        owner: TextRef<'a>,
        (client, on_behalf): (u64, OnBehalf),
        options: &Options,
    ) -> Self {
        let (terms, wait) = (options.terms(), options.wait());
        Self { ctx, owner, client, on_behalf, wait, terms, now: Now::read(), request: OnceCell::new() }
    }

    /// The answer to a session's request that was cancelled, or is waiting already.
    pub(super) fn repeated(&self, names: &[TextRef]) -> Result<Option<Replied>, String> {
        match self.on_behalf {
            OnBehalf::Itself => Ok(None),
            OnBehalf::Session => waiting::repeated(self.ctx, self.request(names), &self.terms, self.wait, self.now),
        }
    }

    /// Carries out what was decided about each of the locks: grants all of them, waits, or refuses.
    pub(super) fn carry_out(&self, locks: &mut [Lock], decisions: &[Decision]) -> Result<Replied, String> {
        let contradicts = |it: &&Decision| matches!(it, Decision::OtherLimit(_) | Decision::TooManyHolds);
        if let Some(decision) = decisions.iter().find(contradicts) {
            return Err(refusal(*decision));
        }
        if decisions.contains(&Decision::Wait) {
            let names: Vec<TextRef> = locks.iter().map(Lock::name).collect();
            return self.queue(&names, locks);
        }
        let granted = |(_, decision): &(&Lock, &Decision)| matches!(decision, Decision::Grant(..));
        if let Some((full, _)) = locks.iter().zip(decisions).filter(granted).find(|(lock, _)| lock.is_full()) {
            return Err(too_many_holders(full));
        }
        self.grant(locks, decisions)
    }

    fn grant(&self, locks: &mut [Lock], decisions: &[Decision]) -> Result<Replied, String> {
        let Self { ctx, now, .. } = *self;
        let replicas = self.terms.replicas;
        let grantee = Grantee { owner: self.owner, client: self.client, terms: &self.terms };
        let undo = (replicas > 0).then(|| undo::before_grant(locks, decisions, grantee));
        if undo.is_none() {
            locks
                .iter()
                .zip(decisions)
                .for_each(|(lock, decision)| undo::acknowledge_re_entry(lock, decision, grantee));
        }
        let token = holding::grant(locks, decisions, grantee, now);
        count(|it| &mut it.granted_at_once);
        if undo.is_none() && (self.on_behalf == OnBehalf::Itself || locks.len() == 1) {
            return Ok(ctx.reply_integer(token));
        }
        let names: Vec<TextRef> = locks.iter().map(Lock::name).collect();
        let request = self.request(&names);
        match undo {
            None => {
                books::with(|books| books.sessions.granted(self.client, &request.owner, &request.keys));
                Ok(ctx.reply_integer(token))
            }
            Some(undo) => {
                waiting::confirm(ctx, request, &names, Answer::Token(token), undo.under(token), replicas, now)
            }
        }
    }

    /// Lets the request wait for the locks of these names, if it may, if there is room, and if that closes no cycle
    /// of waits. The locks that were read (`locks`) are looked at again when one of their leases ends.
    fn queue(&self, names: &[TextRef], locks: &[Lock]) -> Result<Replied, String> {
        let Self { ctx, now, wait, .. } = *self;
        let blocks = self.on_behalf == OnBehalf::Itself;
        if wait == Wait::No || (blocks && !ctx.flags().may_block()) {
            count(|it| &mut it.refusals);
            return Ok(ctx.reply_null());
        }
        let request = self.request(names);
        waiting::has_room(request)?;
        let candidate = Candidate { owner: &request.owner, keys: &request.keys, limit: self.terms.demand.limit };
        let search = searching::begin(ctx, self.client, candidate, now)?;
        let (id, replied) = waiting::wait(ctx, request.clone(), (names, locks), &self.terms, wait, now)?;
        searching::go_on(ctx, id, search);
        Ok(replied)
    }

    /// The request for the locks of these names, which are those that it is about.
    fn request(&self, names: &[TextRef]) -> &Request {
        self.request.get_or_init(|| {
            let db = self.ctx.db();
            let keys: Rc<[LockKey]> = names.iter().map(|name| LockKey::new(db, name.bytes())).collect();
            let (client, on_behalf, owner) = (self.client, self.on_behalf, self.owner.bytes().into());
            Request { client, on_behalf, purpose: Purpose::Acquire, keys, owner }
        })
    }
}
