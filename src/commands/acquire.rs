//! `LOCK.ACQUIRE`, and the handling of a request that may wait, which `LOCK.MACQUIRE` shares.

use super::args::{self, Options, Word};
use crate::event_loop;
use crate::holds::{self, Grantee, WRONGTYPE};
use crate::keyspace::{Lock, Name};
use crate::lock::{Ahead, Decision, LockKey, Millis, all_or_none, decide};
use crate::replies;
use crate::server::clock::{Now, steady_millis};
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, TextRef};
use crate::serving::refusal;
use crate::state::pending::OnBehalf;
use crate::state::{State, Terms, TokenForm};
use crate::stats::count;
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
            Word::Waited.option(),
            Arg::one_of(c"limit", &[Word::Limit.arg(), Word::Shared.arg()]),
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
        let (name, owner) = args::read_one::<Self>(call, &mut options)?;
        event_loop::run(call.ctx, |state, now| {
            let requester = args::requester(state, call, &options)?;
            let mut acquisition = Acquisition::new(state, call.ctx, owner.as_text(), requester, &options, now);
            if let Some(replied) = acquisition.repeated(&[name]) {
                return Ok(replied);
            }
            holds::end_orphaned(acquisition.state, call.ctx, name, now);
            let (ahead, now) = (ahead(acquisition.state, call.ctx, name), now.millis());
            let mut lock = match ahead {
                Ahead::NoRequest => Lock::look(call.ctx, name, owner.as_text(), now).map_err(|_| WRONGTYPE)?,
                Ahead::Requests => {
                    match Lock::look_if_held(call.ctx, name, owner.as_text(), now) {
                        Ok(Some(lock)) => lock,
                        // An owner without a hold queues behind the other requests, whatever else the key contains.
                        Ok(None) => return acquisition.queue(&[name], &mut []),
                        Err(_) => return Err(WRONGTYPE.into()),
                    }
                }
            };
            let decision = decide(&lock.standing(), &acquisition.terms.demand, ahead, now);
            acquisition.carry_out(std::slice::from_mut(&mut lock), &[decision])
        })
    }
}

/// Whether a new request has to queue behind others.
pub(super) fn ahead(state: &State, ctx: Ctx, name: TextRef) -> Ahead {
    // Normally no request waits for anything, and the server need not be asked for the database or the bytes of the
    // key.
    let is_contended = !state.queue.is_empty() && state.is_contended(ctx.db(), name.bytes());
    if is_contended { Ahead::Requests } else { Ahead::NoRequest }
}

/// A request for one lock or several, while its command runs.
pub(super) struct Acquisition<'a, 'b> {
    pub(super) state: &'b mut State,
    ctx: Ctx<'a>,
    owner: Name<'a>,
    client: u64,
    on_behalf: OnBehalf,
    wait: Wait,
    form: TokenForm,
    /// How long the client had waited before it sent this request (`WAITED`).
    waited: Millis,
    pub(super) terms: Terms,
    now: Now,
    /// Made at its first use.
    request: OnceCell<Request>,
}

impl<'a, 'b> Acquisition<'a, 'b> {
    pub(super) fn new(
        state: &'b mut State,
        ctx: Ctx<'a>,
        owner: TextRef<'a>,
        (client, on_behalf): (u64, OnBehalf),
        options: &Options,
        now: Now,
    ) -> Self {
        let (terms, wait) = (options.terms(), options.wait());
        Self {
            state,
            ctx,
            owner: owner.into(),
            client,
            on_behalf,
            wait,
            form: options.form,
            waited: options.waited(),
            terms,
            now,
            request: OnceCell::new(),
        }
    }

    /// The reply to a session's request that replicas are confirming already; `None` if the request is new.
    pub(super) fn repeated(&self, names: &[TextRef]) -> Option<Replied> {
        match self.on_behalf {
            OnBehalf::Session if !self.state.undelivered.is_empty() => {
                waiting::repeated(self.state, self.ctx, self.request(names))
            }
            _ => None,
        }
    }

    /// Carries out the decisions about all locks: grants them, waits, or refuses.
    pub(super) fn carry_out(&mut self, locks: &mut [Lock<'a>], decisions: &[Decision]) -> Result<Replied, String> {
        let names = || locks.iter().map(|lock| lock.name().text());
        if let Err(error) = holds::one_at_a_time(self.state, self.ctx.db(), names(), self.owner.text()) {
            let names: Vec<TextRef> = names().collect();
            return if self.may_wait() { self.queue(&names, locks) } else { Err(error) };
        }
        match all_or_none(decisions) {
            Ok(()) => {}
            Err(Decision::Wait) => {
                let names: Vec<TextRef> = names().collect();
                return self.queue(&names, locks);
            }
            Err(Decision::NotNew) => {
                count(|it| &mut it.refusals);
                return Ok(self.ctx.reply_null());
            }
            Err(refused) => return Err(refusal(refused)),
        }
        holds::have_room_for_holder(locks, decisions)?;
        self.grant(locks, decisions)
    }

    /// Whether the request waits if the locks are not granted at once.
    fn may_wait(&self) -> bool {
        self.wait != Wait::No && (self.on_behalf == OnBehalf::Session || self.ctx.flags().may_block())
    }

    fn grant(&mut self, locks: &mut [Lock<'a>], decisions: &[Decision]) -> Result<Replied, String> {
        let names = |locks: &[Lock<'a>]| locks.iter().map(|lock| lock.name().text()).collect::<Vec<TextRef>>();
        let Self { ctx, now, client, on_behalf, .. } = *self;
        let grantee = Grantee { owner: &self.owner, client, on_behalf, terms: &self.terms };
        let reserved = waiting::bytes_to_grant(self.state, locks.iter(), grantee, true)?;
        let request = (self.terms.replicas > 0).then(|| Request { reserved, ..self.request(&names(locks)).clone() });
        let token = holds::grant(self.state, locks, decisions, grantee, now);
        count(|it| &mut it.granted_at_once);
        let answer = self.form.answer(token, 0);
        let Some(request) = request else {
            holds::keep_relied_on(self.state, locks, decisions, grantee);
            if self.terms.flags.contention {
                holds::notify_if_contended(self.state, ctx.db(), locks.iter().map(|lock| lock.name().bytes()));
            }
            return Ok(replies::reply(ctx, &answer));
        };
        let granted = holds::granted_holds(self.state, locks, decisions, grantee, token);
        waiting::confirm(self.state, ctx, request, &names(locks), answer, (grantee, granted), now)
    }

    /// Queues the request for the locks of these names, if it may wait, if there is room, and if that closes no cycle
    /// of waits. Schedules the locks that were read (`locks`) to be examined when one of their leases ends.
    fn queue(&mut self, names: &[TextRef], locks: &mut [Lock]) -> Result<Replied, String> {
        let Self { ctx, now, wait, .. } = *self;
        names.iter().for_each(|name| self.state.contended(ctx.db(), name.bytes()));
        if !self.may_wait() {
            count(|it| &mut it.refusals);
            return Ok(ctx.reply_null());
        }
        let request = self.request(names).clone();
        if let Some(id) = waiting::place_of(self.state, &request, self.terms.demand.limit)? {
            return waiting::take_over(self.state, ctx, id, request, names, wait, now);
        }
        waiting::has_room(self.state, &request)?;
        let arrived = steady_millis().saturating_sub(self.waited);
        waiting::wait(self.state, ctx, request, (names, locks), (arrived, wait), now)
    }

    /// The request as it is queued. `names` are always the names of all its locks.
    fn request(&self, names: &[TextRef]) -> &Request {
        self.request.get_or_init(|| {
            let db = self.ctx.db();
            let key = |name: &TextRef| self.state.queue.contended_key(db, name.bytes());
            let keys: Rc<[LockKey]> =
                names.iter().map(|name| key(name).unwrap_or_else(|| LockKey::new(db, name.bytes()))).collect();
            let (client, on_behalf, owner) = (self.client, self.on_behalf, self.owner.kept());
            Request { client, on_behalf, terms: self.terms, renewal: None, keys, owner, form: self.form, reserved: 0 }
        })
    }
}
