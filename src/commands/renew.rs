//! `LOCK.RENEW` and the renewal of locks, which `LOCK.MRENEW` shares.

use super::args::{self, Options, Word};
use crate::holding::{Grantee, Terms};
use crate::keyspace::{self, Lock};
use crate::lock::{Deadline, Hold, Limit, Raise, Request, Token};
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call};
use crate::stats::count;
use crate::ties::{self, Tying};
use crate::undo::Undo;
use crate::waiting::{self, Answer, Unconfirmed, WRONGTYPE};
use std::ffi::{CStr, c_int};

/// `LOCK.RENEW key owner [LEASE ms] [TOKEN t] [WATCHDOG] [EPHEMERAL] [REPLICAS n]`
#[derive(Debug)]
pub struct Renew;

pub(super) const OPTIONS: [Word; 5] = [Word::Lease, Word::Token, Word::Watchdog, Word::Ephemeral, Word::Replicas];

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
            Arg::option(c"LEASE", c"lease-ms"),
            Arg::option(c"TOKEN", c"token"),
            Arg::flag(c"watchdog", c"WATCHDOG"),
            Arg::flag(c"ephemeral", c"EPHEMERAL"),
            Arg::option(c"REPLICAS", c"replicas"),
        ],
    };

    fn run(call: Call) -> Replied {
        renew(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn renew(call: Call) -> Result<Replied, String> {
    let name = args::key(call, 1)?;
    let owner = args::owner(call, 2)?;
    let options = args::options(call, 3, &OPTIONS)?;
    args::fit_for(call, &options)?;

    let now = Now::read();
    let ctx = call.ctx;
    let mut lock = Lock::look(ctx, name, owner.as_text(), now.millis()).map_err(|_| WRONGTYPE)?;
    let terms = terms(&options);
    let grantee = Grantee { owner: owner.as_text(), client: ctx.client_id(), terms: &terms };
    let undo = way_back(std::slice::from_ref(&lock), grantee, now);
    let token = prolong(&mut lock, grantee, &options, now);
    let (Some(token), Some(undo)) = (token, undo) else { return Ok(ctx.reply_token(token)) };
    let (client, answer, replicas) = (grantee.client, Answer::Token(token), options.replicas);
    Ok(waiting::confirm(ctx, &[name], Unconfirmed { client, answer, undo: undo.under(token), replicas }, now))
}

/// What a renewal asks for, in the words of a grant.
pub(super) fn terms(options: &Options) -> Terms {
    let request = Request { limit: Limit::MUTEX, raise: Raise::ByOne, lease: options.lease_or_default() };
    Terms { request, tying: options.tying, replicas: options.replicas }
}

/// Renews a lock that the owner holds (under the token asked for); its token, `None` if it is not held.
///
/// A hold that another client made gets its token here.
pub(super) fn prolong(lock: &mut Lock, grantee: Grantee, options: &Options, now: Now) -> Option<Token> {
    let held = lock.standing.own.filter(|own| options.token.is_none() || own.token == options.token);
    let Some(own) = held else {
        count(|it| &mut it.renewals_lost);
        return None;
    };
    count(|it| &mut it.renewals);
    let token = own.token.unwrap_or_else(|| keyspace::next_token(now));
    let deadline = deadline(grantee.terms, now);
    lock.update(grantee.owner, &own, &Hold { token: Some(token), deadline, ..own });
    waiting::deadline_moved(lock, grantee.owner, deadline, now);
    if options.tying != Tying::NONE {
        ties::tie(lock, token, grantee, now);
    }
    Some(token)
}

fn deadline(terms: &Terms, now: Now) -> Deadline {
    Deadline::after(now.millis(), terms.request.lease)
}

/// The way back from a renewal of `locks` that is about to be made, if it needs replicas.
pub(super) fn way_back(locks: &[Lock], grantee: Grantee, now: Now) -> Option<Undo> {
    let needed = grantee.terms.replicas > 0;
    needed.then(|| Undo::before_renewal(locks, grantee.owner, deadline(grantee.terms, now)))
}
