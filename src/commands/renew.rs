//! `LOCK.RENEW`, and the renewal of locks, which `LOCK.MRENEW` shares.

use super::args::{self, Options, Word};
use crate::answering;
use crate::books::owed::Purpose;
use crate::books::{Answer, Terms, Undo};
use crate::holding::{self, Grantee, look_all};
use crate::keyspace::{self, Lock};
use crate::lock::{Deadline, Hold, LockKey, Token};
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, TextRef};
use crate::serving::deadline_moved;
use crate::stats::count;
use crate::undo;
use crate::waiting::{self, Request};
use std::ffi::{CStr, c_int};

/// `LOCK.RENEW`
#[derive(Debug)]
pub struct Renew;

impl Command for Renew {
    const NAME: &'static CStr = c"lock.renew";
    const FLAGS: &'static CStr = c"write fast";
    const CATEGORIES: &'static str = "write fast";
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
    let (ctx, now, terms) = (call.ctx, Now::read(), options.terms());
    if let Some(fence) = options.fence {
        keyspace::check_fence(fence, now)?;
    }
    let mut locks = look_all(ctx, names, owner, now)?;
    let grantee = Grantee { owner, client, terms: &terms };
    let undo = way_back(&locks, grantee, now);
    let tokens: Vec<Option<Token>> = locks.iter_mut().map(|lock| prolong(lock, grantee, options, now)).collect();
    let undo = undo.filter(|_| tokens.iter().any(Option::is_some)).map(|undo| {
        undo.under_each(|name| {
            let mut of_name = locks.iter().zip(&tokens).filter(|(lock, _)| lock.name().bytes() == name);
            of_name.next().and_then(|(_, token)| *token)
        })
    });
    if undo.is_none() {
        for (lock, _) in locks.iter().zip(&tokens).filter(|(_, token)| token.is_some()) {
            undo::acknowledge(lock, owner, lock.own().map_or(0, |own| own.holds));
        }
    }
    let Some(answer) = answer(tokens) else { return Ok(ctx.reply_null()) };
    let Some(undo) = undo else { return Ok(answering::reply(ctx, &answer)) };
    let keys = names.iter().map(|name| LockKey::new(ctx.db(), name.bytes())).collect();
    let request = Request { client, on_behalf, purpose: Purpose::Renew, keys, owner: owner.bytes().into() };
    waiting::confirm(ctx, &request, names, answer, undo, options.replicas, now)
}

/// Renews a lock that the owner holds (under the token asked for). Returns its token; `None` if it is not held.
///
/// A hold that another client made gets its token here, and so does one whose token is to be raised.
fn prolong(lock: &mut Lock, grantee: Grantee, options: &Options, now: Now) -> Option<Token> {
    let held = lock.own().filter(|own| options.token.is_none() || own.token == options.token);
    let Some(own) = held else {
        count(|it| &mut it.renewals_lost);
        return None;
    };
    count(|it| &mut it.renewals);
    let token = own.token.unwrap_or_else(|| keyspace::next_token(now)).max(options.fence.unwrap_or(0));
    if options.fence.is_some() {
        keyspace::raise_fence(token, now);
    }
    let deadline = deadline(grantee.terms, now);
    holding::change(lock, grantee.owner, &own, &Hold { token: Some(token), deadline, ..own }, now);
    deadline_moved(lock, now);
    holding::bind(lock, deadline, token, grantee, now);
    Some(token)
}

fn deadline(terms: &Terms, now: Now) -> Deadline {
    Deadline::after(now.millis(), terms.demand.lease)
}

/// How to roll back a renewal of `locks` that is about to be made, if it needs replicas.
fn way_back(locks: &[Lock], grantee: Grantee, now: Now) -> Option<Undo> {
    let needed = grantee.terms.replicas > 0;
    needed.then(|| undo::before_renewal(locks, (grantee.owner, grantee.client), deadline(grantee.terms, now)))
}
