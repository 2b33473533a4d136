//! `LOCK.ACQUIRE` and the way of a request that may wait, which `LOCK.MACQUIRE` shares.

use super::args::{self, Options, Wait, Word};
use crate::config;
use crate::holding::{self, Grantee, Terms};
use crate::keyspace::{Detail, Lock};
use crate::lock::cycle::{Because, Candidate, Link, Progress, Search, Visible};
use crate::lock::serve::View;
use crate::lock::{Ahead, Deadline, Decision, Limit, LockKey, Millis, Owner, Raise, Request, Standing, decide};
use crate::server::clock::Now;
use crate::server::commands::{Access, Arg, Command, Docs, Keys};
use crate::server::reply::Replied;
use crate::server::{AsText, Call, Ctx, Text, TextRef};
use crate::stats::count;
use crate::undo::Undo;
use crate::waiting::{self, Answer, Keyspace, Unconfirmed, WRONGTYPE, Wish};
use std::ffi::{CStr, c_int};

/// `LOCK.ACQUIRE key owner [LEASE ms] [WAIT ms] [LIMIT n | SHARED] [HOLDS n] [WATCHDOG] [EPHEMERAL] [REPLICAS n]`
#[derive(Debug)]
pub struct Acquire;

const OPTIONS: [Word; 8] =
    [Word::Lease, Word::Wait, Word::Limit, Word::Shared, Word::Holds, Word::Watchdog, Word::Ephemeral, Word::Replicas];

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
            Arg::option(c"LEASE", c"lease-ms"),
            Arg::option(c"WAIT", c"wait-ms"),
            Arg::one_of(c"limit", &[Arg::choice(c"LIMIT", c"holders"), Arg::word(c"shared", c"SHARED")]),
            Arg::option(c"HOLDS", c"holds"),
            Arg::flag(c"watchdog", c"WATCHDOG"),
            Arg::flag(c"ephemeral", c"EPHEMERAL"),
            Arg::option(c"REPLICAS", c"replicas"),
        ],
    };

    fn run(call: Call) -> Replied {
        acquire(call).unwrap_or_else(|error| call.ctx.reply_error(&error))
    }
}

fn acquire(call: Call) -> Result<Replied, String> {
    let name = args::key(call, 1)?;
    let owner = args::owner(call, 2)?;
    let options = args::options(call, 3, &OPTIONS)?;
    args::fit_for(call, &options)?;
    let terms = terms(&options);

    let now = Now::read();
    let ctx = call.ctx;
    let owner = owner.as_text();
    let ahead = ahead(ctx, name);
    let detail = if ahead == Ahead::Somebody { Detail::Own } else { Detail::All };
    let mut lock = Lock::look_for(ctx, name, owner, now.millis(), detail).map_err(|_| WRONGTYPE)?;
    let decision = decide(&lock.standing, &terms.request, ahead, now.millis());
    let grantee = Grantee { owner, client: ctx.client_id(), terms: &terms };
    settle(ctx, std::slice::from_mut(&mut lock), &[decision], grantee, options.wait(), now)
}

/// What the options ask for.
pub(super) fn terms(options: &Options) -> Terms {
    Terms {
        request: Request {
            limit: options.limit.unwrap_or(Limit::MUTEX),
            raise: options.holds.map_or(Raise::ByOne, Raise::To),
            lease: options.lease_or_default(),
        },
        tying: options.tying,
        replicas: options.replicas,
    }
}

/// Whether a newcomer has to queue behind others.
pub(super) fn ahead(ctx: Ctx, name: TextRef) -> Ahead {
    if waiting::is_contended(ctx.db(), name.bytes()) { Ahead::Somebody } else { Ahead::Nobody }
}

/// Carries out what was decided of each of the locks: grants all, waits, or refuses.
pub(super) fn settle(
    ctx: Ctx,
    locks: &mut [Lock],
    decisions: &[Decision],
    grantee: Grantee,
    wait: Wait,
    now: Now,
) -> Result<Replied, String> {
    for decision in decisions {
        if let Decision::OtherLimit(_) | Decision::TooManyHolds = decision {
            return Err(waiting::refusal(*decision));
        }
    }
    if decisions.contains(&Decision::Wait) {
        return match wait {
            Wait::No => Ok(refuse(ctx)),
            Wait::For(ms) => queue(ctx, locks, grantee, Some(ms), now),
            Wait::Forever => queue(ctx, locks, grantee, None, now),
        };
    }
    let replicas = grantee.terms.replicas;
    let undo = (replicas > 0).then(|| Undo::before_grant(locks, decisions, grantee.owner));
    let token = holding::grant(locks, decisions, grantee, now);
    count(|it| &mut it.granted_at_once);
    let Some(undo) = undo else { return Ok(ctx.reply_integer(token)) };
    let names: Vec<TextRef> = locks.iter().map(Lock::name).collect();
    let reply = Unconfirmed { client: grantee.client, answer: Answer::Token(token), undo: undo.under(token), replicas };
    Ok(waiting::confirm(ctx, &names, reply, now))
}

fn refuse(ctx: Ctx) -> Replied {
    count(|it| &mut it.refusals);
    ctx.reply_null()
}

fn queue(ctx: Ctx, locks: &[Lock], grantee: Grantee, wait: Option<Millis>, now: Now) -> Result<Replied, String> {
    if !ctx.flags().may_block() {
        return Ok(refuse(ctx));
    }
    let keys: Box<[LockKey]> = locks.iter().map(|lock| LockKey::new(lock.db(), lock.name().bytes())).collect();
    let owner: Owner = grantee.owner.bytes().into();
    has_room(&keys)?;
    if config::DETECT_DEADLOCKS.is_on() && !waiting::is_idle() {
        let candidate = Candidate { owner: &owner, keys: &keys, limit: grantee.terms.request.limit };
        find_deadlock(ctx, candidate, now)?;
    }
    let Grantee { client, terms, .. } = grantee;
    Ok(waiting::wait(ctx, Wish { locks, keys, owner, client, terms, wait }, now))
}

fn has_room(keys: &[LockKey]) -> Result<(), String> {
    let most = config::MAX_WAITERS.get();
    let full = |key: &LockKey| waiting::with_queue(|queue| queue.waiting(key.db, &key.name)) as u64 >= most;
    match keys.iter().find(|key| most > 0 && full(key)) {
        Some(key) => {
            Err(format!("ERR too many waiters for '{}': holdfast.max-waiters is {most}", args::show(&key.name)))
        }
        None => Ok(()),
    }
}

fn find_deadlock(ctx: Ctx, candidate: Candidate, now: Now) -> Result<(), String> {
    let mut locks = Seen(Keyspace { ctx, now });
    let progress = waiting::with_queue(|queue| Search::new(candidate).advance(queue, &mut locks, SEARCH_AT_ONCE));
    match progress {
        Progress::Cycle(cycle) => {
            count(|it| &mut it.deadlocks);
            Err(describe(&cycle))
        }
        Progress::None | Progress::More => Ok(()),
    }
}

/// How much of a search for cycles a command does itself, in units of about 100 ns.
const SEARCH_AT_ONCE: usize = 10_000;

/// The locks as the search for cycles sees them.
struct Seen<'a>(Keyspace<'a>);

impl Visible for Seen<'_> {
    fn may_read(&mut self, _: &LockKey) -> bool {
        true
    }

    fn look(&mut self, key: &LockKey, owner: &Owner) -> Option<Standing> {
        self.0.look(key, owner).ok()
    }

    fn holders(&mut self, key: &LockKey, after: Option<&(Deadline, Owner)>, most: usize) -> Vec<(Deadline, Owner)> {
        let now = self.0.now.millis();
        let all = self.0.ctx.in_db(key.db, |ctx| {
            let name = Text::new(&key.name);
            Lock::look_around(ctx, name.as_text(), now).map_or(Vec::new(), |lock| lock.holders(now))
        });
        let mut all: Vec<(Deadline, Owner)> = all.into_iter().map(|(owner, hold)| (hold.deadline, owner)).collect();
        all.retain(|it| after.is_none_or(|after| it > after));
        all.sort_unstable();
        all.truncate(most);
        all
    }
}

fn describe(cycle: &[Link]) -> String {
    let next = cycle.iter().cycle().skip(1);
    let waits = cycle.iter().zip(next).map(|(link, next)| {
        let why = match link.because {
            Because::Holds => "held by",
            Because::Ahead => "waited for ahead of it by",
        };
        let (owner, key, next) = (config::show(&link.owner), config::show(&link.key.name), config::show(&next.owner));
        format!("owner '{owner}' waits for '{key}' {why} '{next}'")
    });
    format!("DEADLOCK {}", waits.collect::<Vec<_>>().join(", "))
}
