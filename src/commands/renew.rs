//! `LOCK.RENEW`, and the renewal of several locks, which `LOCK.MRENEW` shares.

use super::args::{self, Options, Word};
use crate::config;
use crate::event_loop;
use crate::holds::{self, Grantee, look_all};
use crate::keyspace::{self, Lock, Name};
use crate::lock::{Deadline, Demand, Hold, Limit, LockKey, Millis, Token};
use crate::replies;
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, TextRef};
use crate::serving::deadline_moved;
use crate::state::pending::OnBehalf;
use crate::state::{Answer, Basis, GrantedHold, Renewal, State, Terms, TokenForm};
use crate::stats::count;
use crate::waiting::{self, Request};
use std::ffi::{CStr, c_int};

/// `LOCK.RENEW`
#[derive(Debug)]
pub struct Renew;

impl Command for Renew {
    const NAME: &'static CStr = c"lock.renew";
    const FLAGS: &'static CStr = c"write fast blocking";
    const CATEGORIES: &'static str = "write fast blocking";
    const KEYS: Keys = Keys::First(Access::Update);
    const ARITY: c_int = -3;
    const DOCS: Docs = Docs {
        summary: c"Renews the lease of a held lock: returns its fencing token, or null if it is lost.",
        complexity: c"O(log N) with N holders of the lock.",
        args: &[
            Arg::key(),
            Arg::text(c"owner"),
            Word::Lease.option(),
            Word::Token.option(),
            Word::Watchdog.option(),
            Word::Ephemeral.option(),
            Word::Replicas.option(),
            Word::Fence.option(),
            Word::Unbind.option(),
            Word::Contention.option(),
            Word::Session.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (name, owner) = args::read_one::<Self>(call, &mut options)?;
        let answer = |renewed: &[Option<Renewed>]| Some(Answer::Token(renewed.first().copied().flatten()?.token));
        let renewed = &mut [None];
        event_loop::run(call.ctx, |state, now| {
            renew_all(state, call, (&[name], renewed), owner.as_text(), &options, answer, now)
        })
    }
}

/// A renewed hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Renewed {
    /// Its token.
    pub(super) token: Token,
    deadline: Deadline,
}

/// Renews the owner's holds of these locks. Stores in `renewed` the outcome for each: `None` if the owner does not hold
/// the lock. `answer` makes the reply from that; `None` is a null reply.
pub(super) fn renew_all(
    state: &mut State,
    call: Call,
    (names, renewed): (&[TextRef], &mut [Option<Renewed>]),
    owner: TextRef,
    options: &Options,
    answer: impl FnOnce(&[Option<Renewed>]) -> Option<Answer>,
    now: Now,
) -> Result<Replied, String> {
    let (client, on_behalf) = args::requester(state, call, options)?;
    let (ctx, terms, owner) = (call.ctx, options.terms(), Name::from(owner));
    let request = || {
        let keys = names.iter().map(|name| LockKey::new(ctx.db(), name.bytes())).collect();
        let renewal = Some(Renewal { token: options.token, fence: options.fence });
        Request { client, on_behalf, terms, renewal, keys, owner: owner.kept(), form: TokenForm::Alone, reserved: 0 }
    };
    let request = (terms.replicas > 0).then(request);
    if let Some(request) = request.as_ref().filter(|_| on_behalf == OnBehalf::Session)
        && let Some(replied) = waiting::repeated(state, ctx, request)
    {
        return Ok(replied);
    }
    if let Some(fence) = options.fence {
        keyspace::check_fence(fence, now)?;
    }
    let mut locks = look_all(state, ctx, names, owner.text(), now)?;
    let locks = locks.all();
    holds::one_at_a_time(state, ctx.db(), names.iter().copied(), owner.text())?;
    let allows_several = |lock: &Lock| lock.held().is_some() && lock.limit() != Some(Limit::MUTEX);
    if terms.flags.contention && locks.iter().any(allows_several) {
        return Err(args::NOT_A_MUTEX.into());
    }
    let grantee = Grantee { owner: &owner, client, on_behalf, terms: &terms };
    let held = locks.iter().filter(|lock| lock.own().is_some());
    let reserved = waiting::bytes_to_grant(state, held, grantee, holds::renewal_binds(on_behalf, &terms))?;
    for (lock, renewed) in locks.iter_mut().zip(renewed.iter_mut()) {
        *renewed = prolong(state, lock, grantee, options, now);
    }
    let awaited = request.map(|request| (Request { reserved, ..request }, renewed_holds(locks, renewed)));
    let awaited = awaited.filter(|(_, holds)| !holds.is_empty());
    let Some(answer) = answer(renewed) else { return Ok(ctx.reply_null()) };
    let Some((request, holds)) = awaited else {
        if terms.flags.contention {
            holds::notify_if_contended(state, ctx.db(), names.iter().map(|name| name.bytes()));
        }
        return Ok(replies::reply(ctx, &answer));
    };
    waiting::confirm(state, ctx, request, names, answer, (grantee, (Basis::Renewal, holds)), now)
}

/// The holds that replicas have to confirm for a renewal.
fn renewed_holds(locks: &[Lock], renewed: &[Option<Renewed>]) -> Vec<GrantedHold> {
    let held = locks.iter().zip(renewed).filter_map(|(lock, hold)| Some((lock, (*hold)?)));
    let holds = held.map(|(lock, Renewed { token, deadline })| {
        let name = lock.name().kept();
        GrantedHold { name, token, deadline, undo: 0, binding: None }
    });
    holds.collect()
}

/// Renews the owner's hold of a lock. With `TOKEN`, the hold must have that token, or the one that `FENCE` names.
/// Returns `None` if the owner has no such hold.
///
/// Issues a token for a hold that another client wrote, and raises the token to `FENCE`.
fn prolong(state: &mut State, lock: &mut Lock, grantee: Grantee, options: &Options, now: Now) -> Option<Renewed> {
    let owner = grantee.owner.text();
    let is_meant = |own: &Hold| match (options.token, options.fence) {
        (None, _) => true,
        (named, None) => own.token == named,
        (named, fence) => own.token == named || own.token == fence,
    };
    let held = lock.own().filter(is_meant);
    let Some(own) = held else {
        count(|it| &mut it.renewals_lost);
        return None;
    };
    count(|it| &mut it.renewals);
    let before = own.token.unwrap_or_else(|| keyspace::next_token(now));
    let token = before.max(options.fence.unwrap_or(0));
    if options.fence.is_some() {
        keyspace::raise_fence(token, now);
    }
    let lease = options.lease.unwrap_or_else(|| lease_of(state, lock, owner, own.token));
    let asked = Deadline::after(now.millis(), lease);
    let deadline = if options.lease.is_some() { asked } else { asked.max(own.deadline) };
    holds::change(state, lock, owner, &own, &Hold { token: Some(token), deadline, ..own }, now);
    deadline_moved(state, lock, now);
    if options.unbind {
        state.bindings.unbind(lock.db(), lock.name().bytes(), owner.bytes());
    }
    holds::limit_undo(state, lock, owner, 0);
    let terms = Terms { demand: Demand { lease, ..grantee.terms.demand }, ..*grantee.terms };
    if holds::renewal_binds(grantee.on_behalf, &terms) {
        holds::bind_now(state, lock, (deadline, token), Grantee { terms: &terms, ..grantee }, now);
    }
    Some(Renewed { token, deadline })
}

/// The lease of a renewal without `LEASE`: that of the hold's binding, or the default.
fn lease_of(state: &State, lock: &Lock, owner: TextRef, token: Option<Token>) -> Millis {
    let bound = state.bindings.of(lock.db(), lock.name().bytes(), owner.bytes(), token);
    bound.map_or_else(config::default_lease, |binding| binding.lease)
}
