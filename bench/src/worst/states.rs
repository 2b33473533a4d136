//! The states, and the step in each.
//!
//! The same name for the module and for a server without it means the same number of clients, keys or elements.

use std::iter;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use support::resp;

use super::stage::Stage;

/// Longer than any state, in milliseconds.
const LEASE: u32 = 600_000;
/// For work that is done in slices.
const LONG_AFTERMATH: Duration = Duration::from_secs(1);

/// A state and a step, on one kind of server.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Builds the state.
    pub build: fn(&mut Stage) -> Result<()>,
    /// Runs the step and waits until it is complete. Returns the reply.
    pub step: fn(&mut Stage) -> Result<String>,
}

/// A line of the table.
pub struct State {
    /// The state and the step.
    pub name: &'static str,
    /// With the module.
    pub module: Scenario,
    /// The comparison on a server without the module, and its name, if there is one.
    pub plain: Option<(&'static str, Scenario)>,
    /// Whether the state has a goal of its own: its work grows with what a client can build up.
    pub is_judged: bool,
}

/// An idle server.
pub const IDLE: Scenario = Scenario { build: |_| Ok(()), step: |stage| Ok(stage.wait_for(LONG_AFTERMATH)) };

/// All states.
pub fn all() -> Vec<State> {
    [several_keys(), searches(), many_waiters(), sessions(), ends(), reads(), large()].into_iter().flatten().collect()
}

fn state(name: &'static str, module: Scenario) -> State {
    State { name, module, plain: None, is_judged: false }
}

impl State {
    fn beside(self, name: &'static str, plain: Scenario) -> Self {
        Self { plain: Some((name, plain)), ..self }
    }

    fn judged(self) -> Self {
        Self { is_judged: true, ..self }
    }
}

/// One request for many keys waits because of one of them, or many such requests do.
fn several_keys() -> Vec<State> {
    let one = |step| Scenario { build: one_request, step };
    let apart = |step| Scenario { build: requests_apart, step };
    let alike = |step| Scenario { build: requests_alike, step };
    let lists = |step| Scenario { build: one_pop, step };
    vec![
        state(
            "MACQUIRE of many keys waits: ACQUIRE of one of them",
            one(|stage| stage.step("LOCK.ACQUIRE hot v WAIT 1")),
        )
        .beside("BLPOP of as many waits: BLPOP of one", lists(|stage| stage.step("BLPOP hot 0.001"))),
        state("the same: RELEASE of one of them", one(|stage| stage.step("LOCK.RELEASE hot holder")))
            .beside("the same: RPUSH to one of them", lists(|stage| stage.step("RPUSH hot v"))),
        state("the same: FORCE of one of them", one(|stage| stage.step("LOCK.FORCE app:1"))),
        state("the same: another client's HSET on one of them", one(|stage| stage.step("HSET app:1 stranger 1")))
            .beside("BLPOP of as many waits: HSET on one of them", lists(|stage| stage.step("HSET app:1 stranger 1"))),
        state("the same: LOCK.TOP", one(|stage| stage.step("LOCK.TOP"))),
        state(
            "MACQUIREs of 128 keys wait for one: ACQUIRE of it",
            apart(|stage| stage.step("LOCK.ACQUIRE hot v WAIT 1")),
        ),
        state("the same: RELEASE of it", apart(|stage| stage.step("LOCK.RELEASE hot holder"))),
        state("MACQUIREs of the same 128 keys: ACQUIRE of one", alike(|stage| stage.step("LOCK.ACQUIRE hot v WAIT 1"))),
        state("the same: RELEASE of one", alike(|stage| stage.step("LOCK.RELEASE hot holder"))),
        state("MACQUIRE of many keys, all free", Scenario { build: |_| Ok(()), step: take_free_keys })
            .beside("MSET of as many", Scenario { build: |_| Ok(()), step: set_keys }),
        state("MRELEASE of many keys, each waited for", Scenario { build: keys_waited_for, step: release_keys })
            .beside(
                "a script that pushes to as many lists with BLPOP",
                Scenario { build: pops_apart, step: push_apart },
            ),
    ]
}

/// Long searches for cycles.
fn searches() -> Vec<State> {
    let chain = |step| Scenario { build: chain, step };
    vec![
        state(
            "holders of two locks wait, each for its own: ACQUIRE of one of the two",
            Scenario { build: wide, step: |stage| stage.step("LOCK.ACQUIRE T c WAIT 1") },
        ),
        state("a chain of waiting holders: ACQUIRE at its end", chain(|stage| stage.step("LOCK.ACQUIRE c:0 v WAIT 1"))),
        state(
            "the same: ACQUIRE that closes it",
            chain(|stage| stage.step(&format!("LOCK.ACQUIRE c:0 o:{} WAIT 1", stage.size.clients))),
        ),
        state(
            "contended locks, and a MACQUIRE of two of them waits: many requests of a session for another lock",
            Scenario { build: request_among_contended, step: session_queues },
        ),
    ]
}

/// Many waiting clients get their replies at once.
fn many_waiters() -> Vec<State> {
    let readers = |step| Scenario { build: readers, step };
    let apart = |step| Scenario { build: waiters_apart, step };
    let pops = |step| Scenario { build: pops, step };
    vec![
        state("many readers wait: RELEASE", readers(|stage| after(stage, "LOCK.RELEASE hot holder"))).beside(
            "many clients in BLPOP: a script pushes for all",
            pops(|stage| {
                stage.script(PUSH, "hot", stage.size.clients)?;
                stage.read_all_replies()
            }),
        ),
        state("the same: DEL", readers(|stage| after(stage, "DEL hot"))),
        state(
            "the same: RELEASE, followed immediately by MRENEW of 128 other keys",
            Scenario { build: readers_and_keys, step: let_in_and_renew },
        ),
        state(
            "the same: the lease ends",
            readers(|stage| {
                stage.run_ok("PEXPIRE hot 100")?;
                stage.read_all_replies()
            }),
        ),
        state("locks with a waiter each: FLUSHALL", apart(|stage| after(stage, "FLUSHALL"))).beside(
            "streams with an XREADGROUP each: FLUSHALL",
            Scenario { build: groups_apart, step: |stage| after(stage, "FLUSHALL") },
        ),
        state(
            "the same: a script releases all",
            apart(|stage| {
                stage.script(RELEASE_EACH, "hot:", stage.size.clients)?;
                stage.read_all_replies()
            }),
        )
        .beside("lists with a BLPOP each: a script pushes to all", Scenario { build: pops_apart, step: push_apart }),
        state("the same: one DEL of all", apart(delete_all)),
        state(
            "the same waiters with one owner: a script releases all",
            Scenario {
                build: waiters_of_one_owner,
                step: |stage| {
                    stage.script(RELEASE_EACH, "hot:", stage.size.clients)?;
                    stage.read_all_replies()
                },
            },
        ),
        state("many waits time out together", Scenario { build: short_waits, step: waits_end })
            .beside("many BLPOPs time out together", Scenario { build: short_pops, step: waits_end }),
        state("many waiting connections end together", Scenario { build: waits_of_a_user, step: user_goes })
            .beside("many in BLPOP do", Scenario { build: pops_of_a_user, step: user_goes }),
        state(
            "many clients wait: the server becomes a replica",
            readers(|stage| after(stage, "REPLICAOF 127.0.0.1 1")),
        )
        .beside("the same with BLPOP", pops(|stage| after(stage, "REPLICAOF 127.0.0.1 1"))),
    ]
}

/// One connection waits for many locks, or holds them.
fn sessions() -> Vec<State> {
    let waits = |step| Scenario { build: session_that_waits, step };
    let holds = |step| Scenario { build: session_that_holds, step };
    let keys = |step| Scenario { build: many_hashes, step };
    vec![
        state("a session joins the queues of many locks", Scenario { build: many_locks, step: join_all }),
        state("it waits for all of them: its connection ends", waits(leave)).beside(
            "a connection with as many subscriptions ends",
            Scenario { build: subscribed, step: connection_ends },
        ),
        state("the same: all become free at once (FLUSHALL)", waits(flush_and_read_grants))
            .beside("FLUSHALL of as many hashes", keys(|stage| stage.step("FLUSHALL"))),
        state(
            "three sessions wait for the same many locks, as one actor: their connections end",
            Scenario { build: sessions_that_wait_as_one, step: leave },
        )
        .judged(),
        state(
            "a session has many waits of 128 keys: its connection ends",
            Scenario { build: session_that_waits_for_several, step: leave },
        )
        .judged(),
        state("a session has many unread events: its connection ends", Scenario { build: unread_events, step: leave })
            .judged(),
        state("the same, each of 128 keys", Scenario { build: unread_events_of_many_keys, step: leave }).judged(),
        state(
            "a session's requests for 1,024 keys are ahead of many others: RELEASE ALL of these keys",
            Scenario { build: owner_ahead, step: withdraw_all },
        )
        .judged(),
        state(
            "the same, once they are granted and before that is read",
            Scenario { build: owner_with_unread_grants, step: withdraw_all },
        )
        .judged(),
        state(
            "all waits of a session time out together",
            Scenario { build: session_whose_waits_end, step: all_waits_end },
        )
        .judged(),
        state(
            "a session reads many grants, and all connections of a user are killed in the same iteration",
            Scenario { build: session_with_grants_and_a_user, step: read_and_kill_user },
        )
        .beside(
            "many in BLPOP are killed in the iteration of a FLUSHALL",
            Scenario { build: hashes_and_pops_of_a_user, step: read_and_kill_user },
        ),
        state("a session holds many locks: all are lost at once (FLUSHALL)", holds(flush_and_read_losses)),
        state("the same: all expire at once", Scenario { build: session_whose_holds_expire, step: expire })
            .beside("as many keys expire", Scenario { build: keys_that_expire, step: expire }),
    ]
}

/// Many holds end, or are renewed, at once.
fn ends() -> Vec<State> {
    vec![
        state("one lock's many holders expire together", Scenario { build: holders_that_expire, step: expire }),
        state("the same, waited for", Scenario { build: holders_that_expire_waited_for, step: expire }),
        state("many locks expire together", Scenario { build: locks_that_expire, step: expire })
            .beside("as many keys do", Scenario { build: keys_that_expire, step: expire }),
        state(
            "holders past their deadline on keys without expiry: LOCK.INFO of each",
            Scenario { build: persisted, step: read_each },
        ),
        state(
            "many locks are watched",
            Scenario { build: |stage| watched(stage, stage.size.many, 3_000), step: renewed },
        ),
        state(
            "2,500 locks with LEASE 30 are watched",
            Scenario { build: |stage| watched(stage, 2_500.min(stage.size.many), 30), step: renewed },
        ),
        state("a connection with many EPHEMERAL holds ends", Scenario { build: ephemeral, step: connection_ends })
            .beside("one with as many subscriptions does", Scenario { build: subscribed, step: connection_ends }),
        state("the same, many of them waited for", Scenario { build: ephemeral_waited_for, step: connection_ends }),
    ]
}

/// Commands that read holders and waiters.
fn reads() -> Vec<State> {
    let holders = |step| Scenario { build: |stage| shared(stage, "big", LEASE), step };
    let fields = |step| Scenario { build: fields, step };
    let readers = |step| Scenario { build: readers, step };
    let apart = |step| Scenario { build: waiters_apart, step };
    vec![
        state("a lock with many holders: LOCK.INFO", holders(|stage| stage.step("LOCK.INFO big")))
            .beside("a hash with as many fields: HGETALL", fields(|stage| stage.step("HGETALL big"))),
        state(
            "the same: ACQUIRE after another client's HSET",
            holders(|stage| touch(stage, "LOCK.ACQUIRE big v SHARED")),
        )
        .beside("the same: HGETALL after HSET", fields(|stage| touch(stage, "HGETALL big"))),
        state(
            "the same: a holder's RELEASE after another client's HSET",
            holders(|stage| touch(stage, "LOCK.RELEASE big h2")),
        ),
        state(
            "three such locks, waited for: LOCK.TOP",
            Scenario { build: three_with_holders, step: |stage| stage.step("LOCK.TOP") },
        ),
        state("many clients wait for one lock: LOCK.WAITERS", readers(|stage| stage.step("LOCK.WAITERS hot"))).beside(
            "many clients in BLPOP: CLIENT LIST",
            Scenario { build: pops, step: |stage| stage.step("CLIENT LIST") },
        ),
        state("the same: LOCK.WAITERS COUNT 1000000", readers(|stage| stage.step("LOCK.WAITERS hot COUNT 1000000"))),
        state("locks with a waiter each: LOCK.TOP COUNT 1000000", apart(|stage| stage.step("LOCK.TOP COUNT 1000000"))),
    ]
}

/// Large locks, keys and fields that other clients wrote.
fn large() -> Vec<State> {
    let many_waiters = |step| Scenario { build: large_locks, step };
    let long = |step| Scenario { build: long_hash, step };
    vec![
        state(
            "a hundred locks with many holders each, written by other clients: MACQUIRE",
            many_waiters(|stage| {
                let keys = numbered("large", LARGE_LOCKS);
                stage.step(&format!("LOCK.MACQUIRE {LARGE_LOCKS} {keys} v"))
            }),
        )
        .beside(
            "the same hashes: a script with HGETALL of each",
            many_waiters(|stage| Ok(format!("{:?}", stage.script(READ_EACH, "large:", LARGE_LOCKS)?))),
        ),
        state(
            "the same, each waited for: LOCK.TOP COUNT 1000",
            Scenario { build: contended_large_locks, step: top_of_all },
        ),
        state(
            "ACQUIRE of a key of 10 MB",
            Scenario { build: |_| Ok(()), step: |stage| long_key(stage, "LOCK.ACQUIRE # v") },
        )
        .beside("SET of one", Scenario { build: |_| Ok(()), step: |stage| long_key(stage, "SET # v") }),
        state("a lock with a foreign field of 10 MB: LOCK.INFO", long(|stage| stage.step("LOCK.INFO long")))
            .beside("such a hash: HGETALL", long(|stage| stage.step("HGETALL long"))),
    ]
}

/// How many locks with many holders other clients have written.
const LARGE_LOCKS: usize = 100;
/// Holders of each: the default maximum.
const WRITTEN: usize = 2_500;
/// The length of long keys and fields.
const LONG: usize = 10 << 20;

const WRITE_HOLDERS: &str = "redis.call('hset', KEYS[1], '#limit', 100000) \
     for i = 1, tonumber(ARGV[1]) do redis.call('hset', KEYS[1], 'h' .. i, 1, '#@h' .. i, '9223372036854775807:1') end";
const READ_EACH: &str = "for i = 0, ARGV[1] - 1 do redis.call('hgetall', KEYS[1] .. i) end return ARGV[1]";
const PUSH: &str = "for i = 1, tonumber(ARGV[1]) do redis.call('rpush', KEYS[1], i) end";
const PUSH_EACH: &str = "for i = 0, ARGV[1] - 1 do redis.call('rpush', KEYS[1] .. i, i) end";
const RELEASE_EACH: &str = "for i = 0, ARGV[1] - 1 do redis.call('lock.release', KEYS[1] .. i, 'holder') end";
const SET_FIELDS: &str =
    "for i = 1, tonumber(ARGV[1]) do redis.call('hset', KEYS[1], 'h' .. i, 1, '#@h' .. i, '1764000000000:1') end";

/// Runs the step, and then reads the replies of all waiting clients.
fn after(stage: &mut Stage, step: &str) -> Result<String> {
    stage.step(step)?;
    stage.read_all_replies()
}

/// The maximum number of keys in one request.
const KEYS: usize = 128;

/// The maximum number of keys, and their names, the last of which is `hot`.
fn keys() -> String {
    format!("{KEYS} {} hot", numbered("app", KEYS - 1))
}

fn numbered(name: &str, count: usize) -> String {
    (0..count).map(|number| format!("{name}:{number}")).collect::<Vec<_>>().join(" ")
}

fn one_request(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    stage.connect_all(iter::once(format!("LOCK.MACQUIRE {} x WAIT 0", keys())))
}

fn one_pop(stage: &mut Stage) -> Result<()> {
    stage.connect_all(iter::once(format!("BLPOP {} hot 0", numbered("app", KEYS - 1))))
}

/// Each request has its own keys, except for one.
fn requests_apart(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    stage.connect_all((0..stage.size.requests).map(|request| {
        format!("LOCK.MACQUIRE {KEYS} {} hot x:{request} WAIT 0", numbered(&format!("app:{request}"), KEYS - 1))
    }))
}

fn requests_alike(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    let keys = keys();
    stage.connect_all((0..stage.size.requests).map(|request| format!("LOCK.MACQUIRE {keys} x:{request} WAIT 0")))
}

fn take_free_keys(stage: &mut Stage) -> Result<String> {
    stage.step(&format!("LOCK.MACQUIRE {} x", keys()))
}

fn set_keys(stage: &mut Stage) -> Result<String> {
    let pairs: Vec<String> = (0..KEYS).map(|key| format!("app:{key} 1")).collect();
    stage.step(&format!("MSET {}", pairs.join(" ")))
}

fn keys_waited_for(stage: &mut Stage) -> Result<()> {
    let keys = keys();
    stage.run_ok(&format!("LOCK.MACQUIRE {keys} x LEASE {LEASE}"))?;
    let names: Vec<&str> = keys.split(' ').skip(1).collect();
    stage.connect_all(names.iter().map(|key| format!("LOCK.ACQUIRE {key} v:{key} WAIT 0")))
}

fn release_keys(stage: &mut Stage) -> Result<String> {
    let keys = keys();
    after(stage, &format!("LOCK.MRELEASE {keys} x"))
}

fn pops(stage: &mut Stage) -> Result<()> {
    stage.connect_all((0..stage.size.clients).map(|_| "BLPOP hot 0".to_owned()))
}

fn pops_apart(stage: &mut Stage) -> Result<()> {
    stage.connect_all((0..stage.size.clients).map(|client| format!("BLPOP hot:{client} 0")))
}

/// Unlike with `BLPOP`, the keys exist.
fn groups_apart(stage: &mut Stage) -> Result<()> {
    let count = stage.size.clients;
    stage.run_all((0..count).map(|key| format!("XGROUP CREATE hot:{key} readers $ MKSTREAM")))?;
    stage.connect_all((0..count).map(|key| format!("XREADGROUP GROUP readers r BLOCK 0 STREAMS hot:{key} >")))
}

fn push_apart(stage: &mut Stage) -> Result<String> {
    stage.script(PUSH_EACH, "hot:", stage.size.clients)?;
    stage.read_all_replies()
}

/// All clients hold `T` and `S`, and each waits for its own lock. One waits for such a lock and for `S`.
fn wide(stage: &mut Stage) -> Result<()> {
    let count = stage.limit("holdfast.max-holders", stage.size.clients - 1)?;
    stage.run_all((0..count).flat_map(|owner| {
        [
            format!("LOCK.ACQUIRE T o:{owner} SHARED LEASE {LEASE}"),
            format!("LOCK.ACQUIRE S o:{owner} SHARED LEASE {LEASE}"),
            format!("LOCK.ACQUIRE k:{owner} h LEASE {LEASE}"),
        ]
    }))?;
    let waiting = (0..count).map(|owner| format!("LOCK.ACQUIRE k:{owner} o:{owner} WAIT 0"));
    stage.connect_all(waiting.chain(iter::once("LOCK.MACQUIRE 2 k:0 S z WAIT 0".into())))
}

/// Each client holds a lock and waits for the next one's.
fn chain(stage: &mut Stage) -> Result<()> {
    let count = stage.size.clients;
    stage.run_all((0..=count).map(|owner| format!("LOCK.ACQUIRE c:{owner} o:{owner} LEASE {LEASE}")))?;
    stage.connect_all((0..count).map(|owner| format!("LOCK.ACQUIRE c:{} o:{owner} WAIT 0", owner + 1)))
}

/// One request for several keys waits. The later requests wait for other locks.
fn request_among_contended(stage: &mut Stage) -> Result<()> {
    const LOCKS: usize = 60;
    let locks = iter::once("hot".to_owned()).chain((0..LOCKS).map(|lock| format!("k:{lock}")));
    stage.run_all(locks.map(|lock| format!("LOCK.ACQUIRE {lock} holder:{lock} LEASE {LEASE}")))?;
    let waiting = (0..LOCKS).map(|lock| format!("LOCK.ACQUIRE k:{lock} v:{lock} WAIT 0"));
    stage.connect_all(waiting.chain(iter::once("LOCK.MACQUIRE 2 k:0 k:1 z WAIT 0".into())))
}

fn session_queues(stage: &mut Stage) -> Result<String> {
    let (session, count) = (stage.session()?, stage.size.clients);
    stage.run_all((0..count).map(|owner| format!("LOCK.ACQUIRE hot o:{owner} WAIT 0 SESSION {session}")))?;
    Ok(String::new())
}

fn readers_and_keys(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.MACQUIRE {KEYS} {} x LEASE {LEASE}", numbered("app", KEYS)))?;
    readers(stage)
}

/// Sends both commands in one packet, so that the grants are pending while the keys are renewed.
fn let_in_and_renew(stage: &mut Stage) -> Result<String> {
    let renewal = format!("LOCK.MRENEW {KEYS} {} x LEASE {LEASE}", numbered("app", KEYS));
    stage.run_all(["LOCK.RELEASE hot holder".to_owned(), renewal].into_iter())?;
    stage.read_all_replies()
}

fn readers(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    stage.connect_all((0..stage.size.clients).map(|owner| format!("LOCK.ACQUIRE hot o:{owner} SHARED WAIT 0")))
}

fn waiters_apart(stage: &mut Stage) -> Result<()> {
    waiters_under(stage, |key| format!("v:{key}"))
}

fn delete_all(stage: &mut Stage) -> Result<String> {
    after(stage, &format!("DEL {}", numbered("hot", stage.size.clients)))
}

fn waiters_of_one_owner(stage: &mut Stage) -> Result<()> {
    waiters_under(stage, |_| "v".to_owned())
}

fn waiters_under(stage: &mut Stage, owner: fn(usize) -> String) -> Result<()> {
    let count = stage.size.clients;
    stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE hot:{key} holder LEASE {LEASE}")))?;
    stage.connect_all((0..count).map(|key| format!("LOCK.ACQUIRE hot:{key} {} WAIT 0", owner(key))))
}

fn short_waits(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    let end = Instant::now() + stage.size.build;
    stage.set_due(end);
    stage.connect_all((0..stage.size.clients).map(|owner| {
        let wait = end.saturating_duration_since(Instant::now()).as_millis().max(1);
        format!("LOCK.ACQUIRE hot o:{owner} WAIT {wait}")
    }))
}

fn short_pops(stage: &mut Stage) -> Result<()> {
    let end = Instant::now() + stage.size.build;
    stage.set_due(end);
    stage.connect_all((0..stage.size.clients).map(|_| {
        let wait = end.saturating_duration_since(Instant::now()).as_secs_f64().max(0.001);
        format!("BLPOP hot {wait:.3}")
    }))
}

fn waits_end(stage: &mut Stage) -> Result<String> {
    stage.wait_until_due()?;
    stage.read_all_replies()
}

fn waits_of_a_user(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    stage.run_ok("ACL SETUSER bench on >bench ~* &* +@all")?;
    stage.connect_all(
        (0..stage.size.clients).map(|owner| format!("AUTH bench bench\nLOCK.ACQUIRE hot o:{owner} WAIT 0")),
    )
}

fn pops_of_a_user(stage: &mut Stage) -> Result<()> {
    stage.run_ok("ACL SETUSER bench on >bench ~* &* +@all")?;
    stage.connect_all((0..stage.size.clients).map(|_| "AUTH bench bench\nBLPOP hot 0".to_owned()))
}

fn user_goes(stage: &mut Stage) -> Result<String> {
    let reply = stage.step("ACL DELUSER bench")?;
    stage.wait_for(LONG_AFTERMATH);
    Ok(reply)
}

/// The maximum number of holders of a lock, all with the same deadline.
fn shared(stage: &mut Stage, key: &str, lease: u32) -> Result<()> {
    let count = stage.limit("holdfast.max-holders", stage.size.many)?;
    let script = format!(
        "for i = 1, tonumber(ARGV[1]) do redis.call('lock.acquire', KEYS[1], 'h' .. i, 'SHARED', 'LEASE', {lease}) end"
    );
    stage.script(&script, key, count)?;
    Ok(())
}

fn holders_that_expire(stage: &mut Stage) -> Result<()> {
    let build = stage.size.build;
    stage.set_due(Instant::now() + build);
    shared(stage, "big", u32::try_from(build.as_millis())?)
}

fn holders_that_expire_waited_for(stage: &mut Stage) -> Result<()> {
    holders_that_expire(stage)?;
    stage.connect_all((0..10).map(|owner| format!("LOCK.ACQUIRE big v:{owner} WAIT 0")))
}

fn large_locks(stage: &mut Stage) -> Result<()> {
    let count = WRITTEN.min(stage.size.many);
    (0..LARGE_LOCKS).try_for_each(|lock| stage.script(WRITE_HOLDERS, &format!("large:{lock}"), count).map(drop))
}

fn contended_large_locks(stage: &mut Stage) -> Result<()> {
    large_locks(stage)?;
    stage.connect_all((0..LARGE_LOCKS).map(|lock| format!("LOCK.ACQUIRE large:{lock} v WAIT 0")))?;
    (0..LARGE_LOCKS).try_for_each(|lock| stage.run_ok(&format!("HSET large:{lock} h1 2")).map(drop))
}

fn top_of_all(stage: &mut Stage) -> Result<String> {
    stage.step("LOCK.TOP COUNT 1000")
}

fn long_key(stage: &mut Stage, line: &str) -> Result<String> {
    stage.step(&line.replace('#', &"k".repeat(LONG)))
}

fn long_hash(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("HSET long h 1 #mark {}", "x".repeat(LONG))).map(drop)
}

fn locks_that_expire(stage: &mut Stage) -> Result<()> {
    let count = stage.size.many;
    stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE l:{key} holder LEASE {LEASE}")))?;
    expires_together(stage, "l", count)
}

fn keys_that_expire(stage: &mut Stage) -> Result<()> {
    let count = stage.size.many;
    stage.run_all((0..count).map(|key| format!("SET k:{key} 1")))?;
    expires_together(stage, "k", count)
}

fn expires_together(stage: &mut Stage, name: &str, count: usize) -> Result<()> {
    let build = stage.size.build;
    stage.set_due(Instant::now() + build);
    let end = now_in_milliseconds(stage)? + build.as_millis() as i64;
    stage.run_all((0..count).map(|key| format!("PEXPIREAT {name}:{key} {end}")))
}

fn now_in_milliseconds(stage: &mut Stage) -> Result<i64> {
    match stage.run_ok("TIME")? {
        resp::Value::Array(parts) if parts.len() == 2 => {
            let (seconds, micros): (i64, i64) = (resp::text(&parts[0])?.parse()?, resp::text(&parts[1])?.parse()?);
            Ok(seconds * 1_000 + micros / 1_000)
        }
        other => bail!("TIME replied {other:?}"),
    }
}

fn expire(stage: &mut Stage) -> Result<String> {
    stage.wait_until_due()?;
    Ok(stage.wait_for(LONG_AFTERMATH))
}

/// Holders of locks without a limit, whose deadlines have passed although their keys have none.
fn persisted(stage: &mut Stage) -> Result<()> {
    stage.run_all(
        (0..stage.size.many / 10)
            .flat_map(|key| [format!("LOCK.ACQUIRE p:{key} holder SHARED LEASE 50"), format!("PERSIST p:{key}")]),
    )?;
    stage.wait_for(Duration::from_millis(60));
    Ok(())
}

fn read_each(stage: &mut Stage) -> Result<String> {
    stage.run_all((0..stage.size.many / 10).map(|key| format!("LOCK.INFO p:{key}")))?;
    Ok(stage.wait_for(LONG_AFTERMATH))
}

fn watched(stage: &mut Stage, count: usize, lease: u32) -> Result<()> {
    let session = stage.session()?;
    stage.join((0..count).map(|key| format!("LOCK.ACQUIRE w:{key} holder WATCHDOG LEASE {lease} SESSION {session}")))
}

/// Waits long enough for each of them to be renewed. Returns how many are left.
fn renewed(stage: &mut Stage) -> Result<String> {
    stage.wait_for(2 * LONG_AFTERMATH);
    Ok(format!("{} are held", stage.step("DBSIZE")?))
}

fn ephemeral(stage: &mut Stage) -> Result<()> {
    stage.join((0..stage.size.many).map(|key| format!("LOCK.ACQUIRE e:{key} holder EPHEMERAL LEASE {LEASE}")))
}

fn ephemeral_waited_for(stage: &mut Stage) -> Result<()> {
    ephemeral(stage)?;
    let count = stage.size.clients.min(stage.size.many);
    stage.connect_all((0..count).map(|key| format!("LOCK.ACQUIRE e:{key} v:{key} WAIT 0")))
}

fn subscribed(stage: &mut Stage) -> Result<()> {
    stage.join((0..stage.size.many).map(|channel| format!("SUBSCRIBE c:{channel}")))
}

fn connection_ends(stage: &mut Stage) -> Result<String> {
    stage.close_guests();
    stage.read_all_replies()?;
    Ok(stage.wait_for(LONG_AFTERMATH))
}

/// Hashes that expire: to the server, they are the same as many locks.
fn many_hashes(stage: &mut Stage) -> Result<()> {
    let count = stage.size.many;
    stage.run_all(
        (0..count).flat_map(|key| {
            [format!("HSET k:{key} holder 1 #fence 1763632800000000"), format!("PEXPIRE k:{key} {LEASE}")]
        }),
    )
}

fn many_locks(stage: &mut Stage) -> Result<()> {
    let count = stage.size.many;
    stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE s:{key} holder LEASE {LEASE}")))
}

fn join_all(stage: &mut Stage) -> Result<String> {
    let (session, count) = (stage.session()?, stage.size.many);
    stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE s:{key} v:{key} WAIT 0 SESSION {session}")))?;
    Ok(String::new())
}

fn session_that_waits(stage: &mut Stage) -> Result<()> {
    many_locks(stage)?;
    join_all(stage).map(drop)
}

fn sessions_that_wait_as_one(stage: &mut Stage) -> Result<()> {
    many_locks(stage)?;
    let count = stage.size.many;
    stage.run_ok("CONFIG SET holdfast.detect-deadlocks no")?;
    (1..=3).try_for_each(|number| {
        let session = stage.session()?;
        stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE s:{key} one##{number} WAIT 0 SESSION {session}")))
    })
}

/// Requests of 128 keys whose events a session may leave unread: the default of `holdfast.max-session-bytes`.
const MOST_UNREAD: usize = 18_000;

fn unread_events(stage: &mut Stage) -> Result<()> {
    unread(stage, "LOCK.ACQUIRE hot", stage.size.many)
}

fn unread_events_of_many_keys(stage: &mut Stage) -> Result<()> {
    unread(stage, &format!("LOCK.MACQUIRE {}", keys()), MOST_UNREAD.min(stage.size.many))
}

/// A session has not read how its waits ended.
fn unread(stage: &mut Stage, request: &str, count: usize) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    let session = stage.session_that_reads_nothing()?;
    stage.run_all((0..count).flat_map(|owner| {
        [format!("{request} o:{owner} WAIT 0 SESSION {session}"), format!("LOCK.RELEASE hot o:{owner} ALL")]
    }))?;
    let unread = stage.server.control.info("holdfast", "holdfast_undelivered_events")?;
    if unread != count.to_string() {
        bail!("{unread} events are unread instead of {count}");
    }
    Ok(())
}

/// Requests of one owner for 128 keys each: as many as one command can withdraw.
const WITHDRAWN: usize = 8;

/// The requests of one owner of a session are at the head of all queues, and a hundred others behind each of them.
fn owner_ahead(stage: &mut Stage) -> Result<()> {
    stage.run_all((0..WITHDRAWN).map(|group| format!("LOCK.ACQUIRE k:{group}:0 holder LEASE {LEASE}")))?;
    let session = stage.session_that_reads_nothing()?;
    stage.run_ok("CONFIG SET holdfast.detect-deadlocks no")?;
    stage.run_ok(MORE_BYTES)?;
    stage.run_all((0..WITHDRAWN).flat_map(|group| {
        let keys = numbered(&format!("k:{group}"), KEYS);
        let owners = iter::once("me".to_owned()).chain((0..100).map(|owner| format!("o:{owner}")));
        let session = session.clone();
        owners.map(move |owner| format!("LOCK.MACQUIRE {KEYS} {keys} {owner} WAIT 0 SESSION {session}"))
    }))
}

fn owner_with_unread_grants(stage: &mut Stage) -> Result<()> {
    owner_ahead(stage)?;
    stage.run_ok(&format!("LOCK.MRELEASE {WITHDRAWN} {} holder", first_of_each()))?;
    stage.wait_for_keys(WITHDRAWN * KEYS)
}

fn withdraw_all(stage: &mut Stage) -> Result<String> {
    stage.step(&format!("LOCK.MRELEASE {WITHDRAWN} {} me ALL", first_of_each()))
}

/// One key of each request.
fn first_of_each() -> String {
    (0..WITHDRAWN).map(|group| format!("k:{group}:0")).collect::<Vec<_>>().join(" ")
}

/// With the default, a session may have fewer requests for 128 keys each.
const MORE_BYTES: &str = "CONFIG SET holdfast.max-session-bytes 1000000000";

fn session_that_waits_for_several(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    let (session, keys) = (stage.session()?, keys());
    stage.run_ok("CONFIG SET holdfast.detect-deadlocks no")?;
    stage.run_ok(MORE_BYTES)?;
    let count = stage.size.many.min(5_000);
    stage.run_all((0..count).map(|request| format!("LOCK.MACQUIRE {keys} x:{request} WAIT 0 SESSION {session}")))
}

/// A session whose waits end. They are all for one lock, because its waiters can be counted.
fn session_whose_waits_end(stage: &mut Stage) -> Result<()> {
    stage.run_ok(&format!("LOCK.ACQUIRE hot holder LEASE {LEASE}"))?;
    let session = stage.session()?;
    let (build, count) = (stage.size.build, stage.size.many.min(50_000));
    let end = Instant::now() + build;
    stage.set_due(end);
    stage.run_all((0..count).map(|owner| {
        let wait = end.saturating_duration_since(Instant::now()).as_millis().max(1);
        format!("LOCK.ACQUIRE hot o:{owner} WAIT {wait} SESSION {session}")
    }))
}

/// Measures how long after its timeout the last wait ends.
fn all_waits_end(stage: &mut Stage) -> Result<String> {
    stage.wait_until_due()?;
    let begin = Instant::now();
    while !matches!(stage.run_ok("LOCK.WAITERS hot COUNT 1")?, resp::Value::Array(waiters) if waiters.is_empty()) {
        if begin.elapsed() > LONG_AFTERMATH * 10 {
            bail!("waits do not end");
        }
    }
    stage.delay = Some(begin.elapsed());
    Ok(String::new())
}

fn session_with_grants_and_a_user(stage: &mut Stage) -> Result<()> {
    waits_of_a_user(stage)?;
    session_that_waits(stage)
}

fn hashes_and_pops_of_a_user(stage: &mut Stage) -> Result<()> {
    many_hashes(stage)?;
    pops_of_a_user(stage)
}

/// Sends both commands in one packet, so that the grants are read in the event-loop iteration in which the connections
/// end.
fn read_and_kill_user(stage: &mut Stage) -> Result<String> {
    stage.run_all(["FLUSHALL".to_owned(), "CLIENT KILL USER bench".to_owned()].into_iter())?;
    Ok(stage.wait_for(LONG_AFTERMATH))
}

fn session_that_holds(stage: &mut Stage) -> Result<()> {
    let (session, count) = (stage.session()?, stage.size.many);
    stage.run_all((0..count).map(|key| format!("LOCK.ACQUIRE s:{key} h LEASE {LEASE} EPHEMERAL SESSION {session}")))
}

fn session_whose_holds_expire(stage: &mut Stage) -> Result<()> {
    session_that_holds(stage)?;
    let count = stage.size.many;
    expires_together(stage, "s", count)
}

fn leave(stage: &mut Stage) -> Result<String> {
    stage.close_guests();
    Ok(stage.wait_for(LONG_AFTERMATH))
}

fn flush_and_read_grants(stage: &mut Stage) -> Result<String> {
    let reply = stage.step("FLUSHALL")?;
    stage.wait_for_keys(stage.size.many)?;
    Ok(reply)
}

fn flush_and_read_losses(stage: &mut Stage) -> Result<String> {
    let reply = stage.step("FLUSHALL")?;
    stage.wait_for(LONG_AFTERMATH);
    Ok(reply)
}

fn fields(stage: &mut Stage) -> Result<()> {
    stage.script(SET_FIELDS, "big", stage.size.many)?;
    Ok(())
}

fn three_with_holders(stage: &mut Stage) -> Result<()> {
    (0..3).try_for_each(|lock| shared(stage, &format!("big:{lock}"), LEASE))?;
    stage.connect_all((0..3).map(|lock| format!("LOCK.ACQUIRE big:{lock} v WAIT 0")))
}

/// Another client changes a holder's count by hand, so the module must read the lock again.
fn touch(stage: &mut Stage, look: &str) -> Result<String> {
    stage.run_ok("HSET big h1 2")?;
    stage.step(look)
}
