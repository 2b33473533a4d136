//! `LOCK.RENEW`, and the renewal of locks, which `LOCK.MRENEW` shares.

use super::args::{self, Options, Word};
use crate::answering;
use crate::holding::{self, Grantee, look_all};
use crate::keyspace::{self, Lock, Name};
use crate::lock::{Deadline, Hold, Limit, LockKey, Token};
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, TextRef};
use crate::serving::deadline_moved;
use crate::state::owed::{OnBehalf, Purpose};
use crate::state::sessions::MOST_UNREAD;
use crate::state::{self, Answer, GrantedHold, TakeBack, Terms};
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
            Word::Contention.option(),
            Word::Session.option(),
        ],
    };

    fn run(call: Call) -> Result<Replied, String> {
        let mut options = Options::default();
        let (name, owner) = args::of_one::<Self>(call, &mut options)?;
        renew_all(call, &[name], owner.as_text(), &options, |tokens| match tokens.first() {
            Some(Some(token)) => Some(Answer::Token(*token)),
            _ => None,
        })
    }
}

/// Renews what the owner holds of several locks. `answer` is the reply; `None`: null.
pub(super) fn renew_all(
    call: Call,
    names: &[TextRef],
    owner: TextRef,
    options: &Options,
    answer: impl FnOnce(Vec<Option<Token>>) -> Option<Answer>,
) -> Result<Replied, String> {
    let (client, on_behalf) = args::asker(call, options)?;
    let (ctx, now, terms, owner) = (call.ctx, holding::begin(call.ctx), options.terms(), Name::from(owner));
    let request = || {
        let keys = names.iter().map(|name| LockKey::new(ctx.db(), name.bytes())).collect();
        let purpose = Purpose::Renew { terms, token: options.token, fence: options.fence };
        Request { client, on_behalf, purpose, keys, owner: owner.kept() }
    };
    if on_behalf == OnBehalf::Session && state::with(|state| state.sessions.unread(client)) >= MOST_UNREAD {
        waiting::admit(&request())?;
    }
    let request = (terms.replicas > 0).then(request);
    if let Some(request) = request.as_ref().filter(|_| on_behalf == OnBehalf::Session)
        && let Some(replied) = waiting::repeated(ctx, request)?
    {
        return Ok(replied);
    }
    if let Some(fence) = options.fence {
        keyspace::check_fence(fence, now)?;
    }
    let mut locks = look_all(ctx, names, owner.text(), now)?;
    holding::one_at_a_time(ctx, names.iter().copied(), owner.text(), Some(ctx.client_id()))?;
    let is_one_of_several = |lock: &Lock| lock.held().is_some() && lock.limit() != Some(Limit::MUTEX);
    if terms.tying.contention && locks.iter().any(is_one_of_several) {
        return Err(args::NOT_OF_ONE.into());
    }
    let grantee = Grantee { owner: &owner, client, on_behalf, terms: &terms };
    let tokens: Vec<Option<Token>> = locks.iter_mut().map(|lock| prolong(lock, grantee, options, now)).collect();
    let name = |(lock, token): (&Lock, &Option<Token>)| {
        let (name, deadline) = (lock.name().kept(), deadline(&terms, now));
        token.map(|token| GrantedHold { name, token, deadline })
    };
    let holds = || locks.iter().zip(&tokens).filter_map(name).collect::<Vec<GrantedHold>>();
    let awaited = request.map(|request| (request, holds())).filter(|(_, holds)| !holds.is_empty());
    let Some(answer) = answer(tokens) else { return Ok(ctx.reply_null()) };
    let Some((request, holds)) = awaited else {
        if terms.tying.contention {
            holding::tell_if_contended(ctx, ctx.db(), names.iter().map(|name| name.bytes()));
        }
        return Ok(answering::reply(ctx, &answer));
    };
    waiting::confirm(ctx, &request, names, answer, (grantee, TakeBack::Nothing, holds), now)
}

/// Renews a lock that the owner holds (under the token asked for). Returns its token; `None` if it is not held.
///
/// A hold that another client made gets its token here, and so does one whose token is to be raised.
fn prolong(lock: &mut Lock, grantee: Grantee, options: &Options, now: Now) -> Option<Token> {
    let owner = grantee.owner.text();
    let held = lock.own().filter(|own| holding::is_meant(lock, owner, own.token, options.token));
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
    let deadline = deadline(grantee.terms, now);
    holding::change(lock, owner, &own, &Hold { token: Some(token), deadline, ..own }, now);
    deadline_moved(lock, now);
    holding::note_raise(lock, owner, before, token);
    // A tie that is new does not know what else was granted under this token.
    let granted = holding::first_token(lock, owner, token);
    holding::bind_now(lock, (deadline, token), Some(granted), grantee, now);
    Some(token)
}

fn deadline(terms: &Terms, now: Now) -> Deadline {
    Deadline::after(now.millis(), terms.demand.lease)
}
