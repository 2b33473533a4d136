//! Runs from seeds: the kinds of events in a run, and their order, follow from a number.
//!
//! Each run draws a few kinds of events, and a frequency for each. A fault that only two rare events show together
//! would otherwise be lost among the others ("swarm testing", Groce et al., 2012). A run has only a few keys, owners
//! and clients, so that they interact.

use crate::random::Random;
use crate::redis::Generation;
use crate::scenarios;
use crate::script::{Line, Name, SlotChange};

/// The most lines that a run has.
const LINES: usize = 160;

/// A run.
#[derive(Clone, Debug)]
pub struct SeededRun {
    /// The servers whose behaviour it simulates.
    pub generation: Generation,
    /// The script.
    pub lines: Vec<Line>,
}

/// A kind of line.
type Kind = fn(&mut World) -> Line;

/// The kinds of lines and their relative frequencies. The first ones are part of every run.
const ALWAYS: [(usize, Kind); 4] = [(20, acquire), (8, release), (24, pass), (4, session_next)];
const SOMETIMES: [(usize, Kind); 46] = [
    (10, acquire_again),
    (6, renew),
    (6, session_acquire),
    (12, session_acquire),
    (4, macquire),
    (6, macquire),
    (4, release_exactly),
    (3, raise_fence),
    (3, watch_shared),
    (3, mrelease),
    (3, mrenew),
    (4, withdraw),
    (3, force),
    (4, end),
    (4, kill),
    (2, vanish),
    (3, unblock),
    (2, del),
    (2, del_many),
    (1, flush),
    (1, swap),
    (2, rename),
    (1, move_key),
    (2, pexpire),
    (2, persist),
    (2, handwritten_lock),
    (1, overwrite),
    (1, restore),
    (3, role),
    (3, roles),
    (2, replicas),
    (3, min_replicas),
    (2, misconf),
    (2, pause),
    (2, unpause),
    (2, clock),
    (2, busy),
    (3, transaction),
    (2, script),
    (2, rights),
    (2, slot),
    (1, stop_reading),
    (2, look),
    (3, select),
    (6, long_wait),
    (2, replace),
];

struct World {
    random: Random,
    keys: usize,
    owners: usize,
    clients: usize,
    sessions: usize,
    /// Leases are long in some runs, short in others.
    leases: &'static [u64],
    replicates: bool,
    bindings: bool,
    limits: bool,
    databases: bool,
}

/// The run of a seed.
pub fn from_seed(seed: u64) -> SeededRun {
    let mut random = Random::new(seed);
    let generation = *random.of(&Generation::ALL);
    let mut kinds: Vec<(usize, Kind)> = ALWAYS.to_vec();
    let share = 2 + random.below(6);
    kinds.extend(SOMETIMES.iter().filter(|_| random.one_in(share)));
    // Slots concern a whole run: it is one in a cluster.
    let mut world = World {
        keys: 1 + random.below(4),
        owners: 2 + random.below(3),
        clients: 2 + random.below(4),
        sessions: random.below(3),
        leases: random.of::<&[u64]>(&[&[30_000, 3_600_001][..], &[50, 400, 2_000], &[50, 30_000], &[7_200_000]]),
        replicates: random.one_in(3),
        bindings: !random.one_in(3),
        limits: random.one_in(2),
        databases: random.one_in(6),
        random,
    };
    let mut lines = Vec::new();
    if world.replicates {
        lines.push(replicas(&mut world));
    }
    let total: usize = kinds.iter().map(|(weight, _)| weight).sum();
    let count = 10 + world.random.below(LINES);
    while lines.len() < count {
        let mut at = world.random.below(total);
        let kind = kinds.iter().find(|(weight, _)| {
            let is_it = at < *weight;
            at = at.saturating_sub(*weight);
            is_it
        });
        if let Some((_, kind)) = kind {
            let line = kind(&mut world);
            // Lines that make sense only together come together.
            lines.extend(prelude(&mut world, &line));
            lines.push(line);
        }
    }
    if lines.iter().any(|line| matches!(line, Line::Slot(..))) {
        // Known limitation: a check that is postponed while a slot migrates comes later by the length of a clock step
        // backwards.
        lines.retain(|line| !matches!(line, Line::Clock(..0)));
        // The keys of a slot move with it. (Known limitation: Redis 7.0 does not report this, so a wait may outlive a
        // slot that leaves and returns.)
        if generation != Generation::Redis70 {
            for line in &mut lines {
                if let Line::Slot(_, moves @ SlotChange::Moves) = line {
                    *moves = SlotChange::Goes;
                }
            }
        }
    }
    keep(seed, &mut lines);
    fail(seed, &mut lines);
    scenarios::add(seed, &mut lines);
    SeededRun { generation, lines }
}

/// In some cluster runs, the cluster is down for a while, or no node owns some slots.
fn fail(seed: u64, lines: &mut [Line]) {
    let mut random = Random::new(seed ^ 0x5eed_c105);
    if !lines.iter().any(|line| matches!(line, Line::Slot(..))) || !random.one_in(2) {
        return;
    }
    for line in lines {
        match line {
            Line::Misconf(state) => *line = Line::Cluster(!*state),
            Line::Slot(_, moves) if random.one_in(3) => *moves = SlotChange::Unowned,
            _ => {}
        }
    }
}

/// In some runs, sessions ask to be notified of contention.
fn keep(seed: u64, lines: &mut [Line]) {
    let mut random = Random::new(seed ^ u64::from(u32::MAX));
    if !random.one_in(4) {
        return;
    }
    for line in lines {
        let Line::Request(_, words) = line else { continue };
        let has = |word: &str| words.iter().any(|it| it == word);
        let may = has("SESSION") && !["SHARED", "LIMIT"].into_iter().any(has);
        if may && random.one_in(2) {
            words.push("CONTENTION".into());
        }
    }
}

/// The lines before a line that make it meaningful.
fn prelude(world: &mut World, line: &Line) -> Vec<Line> {
    let mut before = Vec::new();
    if let Line::Request(name, words) = line {
        if words[0] == "EXEC" {
            before.push(Line::request(*name, "MULTI"));
            for _ in 0..1 + world.random.below(3) {
                let other = *world.random.of(&[acquire as Kind, release, renew, force, session_acquire]);
                if let Line::Request(_, words) = other(world) {
                    before.push(Line::Request(*name, words));
                }
            }
        }
        if words[0] == "ACL" && words.last().is_some_and(|rule| rule == "-lock.acquire") && world.random.one_in(2) {
            // The user loses the right while two requests wait, one behind the other.
            let (client, key) = (world.client(), world.key());
            before.push(Line::request(*name, "ACL SETUSER guest on nopass +@all ~*"));
            before.push(Line::request(*name, &format!("LOCK.ACQUIRE {key} o0 LEASE {}", world.leases[0])));
            before.push(Line::request(client, "AUTH guest x"));
            for (client, owner) in [(client, "o1"), (world.client(), "o2")] {
                before.push(Line::request(client, &format!("LOCK.ACQUIRE {key} {owner} WAIT 0")));
            }
            before.push(Line::Pass(1));
        } else if words[0] == "ACL" && world.random.one_in(2) {
            let client = world.client();
            before.push(Line::request(client, "AUTH guest x"));
        }
        if words[0] == "DEBUG" && world.limits && world.sessions > 0 && world.random.one_in(2) {
            // One of three leases expires while the server is busy. The next release notices it.
            let (key, session, other) = (world.key(), world.session(), world.client());
            before.push(Line::request(*name, &format!("LOCK.ACQUIRE {key} o0 LEASE 20 SHARED SESSION ${session}")));
            for owner in ["o1", "o3"] {
                before.push(Line::request(*name, &format!("LOCK.ACQUIRE {key} {owner} SHARED LEASE 30000")));
            }
            before.push(Line::request(other, &format!("LOCK.ACQUIRE {key} o2 WAIT 0")));
            before.push(Line::Pass(1));
            before.push(Line::request(*name, "DEBUG SLEEP 0.03"));
            before.push(Line::request(*name, &format!("LOCK.RELEASE {key} o1")));
        }
        if words[0] == "CLIENT" && words[1] == "KILL" && world.random.one_in(3) {
            let key = world.key();
            match words[3].chars().nth(1) {
                // The client releases a re-entry, and is then disconnected.
                Some(other) if other == *name && world.replicates => {
                    let holder = world.client();
                    before.push(Line::request(holder, &format!("LOCK.ACQUIRE {key} o0 LEASE 60000")));
                    before.push(Line::Pass(1));
                    before.push(Line::request(*name, &format!("LOCK.ACQUIRE {key} o0 LEASE 60000 REPLICAS 1")));
                    before.push(Line::request(*name, &format!("LOCK.RELEASE {key} o0")));
                }
                // The client's ephemeral hold ends with it, at the end of the iteration.
                Some(other) if other == *name => {
                    before.push(Line::request(*name, &format!("LOCK.ACQUIRE {key} o0 LEASE 60000 EPHEMERAL")));
                    before.push(Line::Pass(1));
                }
                // A client is granted a lock, but disconnected before it can read the reply.
                other => {
                    before.push(Line::request(*name, &format!("LOCK.FORCE {key}")));
                    let session = other.filter(|other| *other >= 's');
                    before.extend(session.map(|session| Line::request(session, "LOCK.EVENTS")));
                }
            }
        }
        if words[0] == "PEXPIRE" && world.limits && world.random.one_in(2) {
            // One of several holds has no expiry, until the key gets one again.
            let (key, owner, lease) = (&words[1], world.owner(), world.leases[0]);
            let acquire = format!("LOCK.ACQUIRE {key} {owner} SHARED LEASE {lease}");
            before.extend([&acquire, &format!("PERSIST {key}"), &acquire].map(|words| Line::request(*name, words)));
        }
        if words[0] == "REPLICAOF" && words[1] == "NO" && world.random.one_in(2) {
            before.push(Line::request(*name, "REPLICAOF 127.0.0.1 1"));
        }
    }
    before
}

impl World {
    fn key(&mut self) -> String {
        format!("k{}", self.random.below(self.keys))
    }

    fn owner(&mut self) -> String {
        format!("o{}", self.random.below(self.owners))
    }

    /// A client that sends requests.
    fn client(&mut self) -> Name {
        (b'a' + self.random.below(self.clients) as u8) as Name
    }

    /// A client that is a session, and usually reads its events.
    fn session(&mut self) -> Name {
        (b's' + self.random.below(self.sessions.max(1)) as u8) as Name
    }

    fn flag(&mut self, times: usize, word: &str) -> String {
        if self.random.one_in(times) { format!(" {word}") } else { String::new() }
    }

    fn terms(&mut self) -> String {
        let lease = *self.random.of(self.leases);
        let mut terms = format!(" LEASE {lease}");
        if self.limits {
            terms += *self.random.of(&["", "", " LIMIT 2", " SHARED", " LIMIT 3"]);
        }
        terms += *self.random.of(&["", "", "", " HOLDS 1", " NEW"]);
        if self.bindings {
            terms += &self.flag(4, "EPHEMERAL");
        }
        if self.replicates {
            terms += &self.flag(3, "REPLICAS 1");
        }
        terms
    }

    /// The options of a request on behalf of a session.
    fn session_terms(&mut self) -> String {
        let watchdog = if self.bindings { self.flag(3, "WATCHDOG") } else { String::new() };
        self.terms() + &watchdog
    }

    /// Names a session, and usually asks for its watchdog. Sometimes the option is on the client's own connection,
    /// which is then a session from its start.
    fn watchdog(&mut self, times: usize) -> String {
        if self.sessions > 0 && self.random.one_in(2) {
            let session = self.session();
            return format!("{} SESSION ${session}", self.flag(times, "WATCHDOG"));
        }
        self.flag(times * 12, "WATCHDOG")
    }

    fn wait(&mut self) -> String {
        let wait = self.random.word(&["", " WAIT 0", " WAIT 0", " WAIT 20", " WAIT 300"]);
        let waited = *self.random.of(&["", "", "", " WAITED 5", " WAITED 300", " WAITED 60000"]);
        if wait.is_empty() { String::new() } else { format!("{wait}{waited}") }
    }
}

fn acquire(world: &mut World) -> Line {
    if world.sessions > 0 && world.random.one_in(3) {
        return session_acquire(world);
    }
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let words = format!("LOCK.ACQUIRE {key} {owner}{}{}", world.terms(), world.wait());
    Line::request(client, &words)
}

/// A request for a lock that the owner may already hold.
fn acquire_again(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    Line::request(client, &format!("LOCK.ACQUIRE {key} {owner} HOLDS 1 LEASE {}", world.leases[0]))
}

fn session_acquire(world: &mut World) -> Line {
    let (client, session, key, owner) = (world.client(), world.session(), world.key(), world.owner());
    let words = format!("LOCK.ACQUIRE {key} {owner}{}{}", world.session_terms(), world.wait());
    // Sometimes over the session's own connection, which gets the reply itself, or with `*`.
    match world.random.below(8) {
        0 => Line::request(session, &words),
        1 => Line::request(session, &format!("{words} SESSION *")),
        _ => Line::request(client, &format!("{words} SESSION ${session}")),
    }
}

fn long_wait(world: &mut World) -> Line {
    let (client, session, key, owner) = (world.client(), world.session(), world.key(), world.owner());
    Line::request(client, &format!("LOCK.ACQUIRE {key} {owner} LEASE 7200000 WAIT 0 SESSION ${session}"))
}

fn session_next(world: &mut World) -> Line {
    let session = world.session();
    Line::request(
        session,
        world.random.word(&[
            "LOCK.EVENTS WAIT 0",
            "LOCK.EVENTS WAIT 0 HEARTBEAT",
            "LOCK.EVENTS",
            "LOCK.EVENTS WAIT 50",
        ]),
    )
}

fn release(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let how = *world.random.of(&["", "", " ALL", " HOLDS 1", " LEASE 100"]);
    Line::request(client, &format!("LOCK.RELEASE {key} {owner}{how}"))
}

/// A release that names a remaining count, a new lease, or the last token that some client received.
fn release_exactly(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let mut words = format!("LOCK.RELEASE {key} {owner}");
    if world.random.one_in(2) {
        words += &format!(" TOKEN @{}", world.client());
    }
    words += *world.random.of(&["", " HOLDS 0", " HOLDS 1", " HOLDS 2", " ALL"]);
    words += *world.random.of(&["", "", " LEASE 30", " LEASE 100", " LEASE 60000"]);
    Line::request(client, &words)
}

/// A token from another server: current, or further ahead than the run lasts.
fn raise_fence(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let ahead = *world.random.of(&[500_000, 60_000_000, 1_200_000_000]);
    let fence = 1_800_000_000_000_007 + ahead + world.random.below(1_000_000);
    let mut words = format!("LOCK.RENEW {key} {owner} LEASE {} FENCE {fence}", world.random.of(world.leases));
    words += &world.watchdog(3);
    Line::request(client, &words)
}

/// Several watched holders of one lock that other commands write.
fn watch_shared(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let lease = *world.random.of(world.leases);
    let mut words = format!("LOCK.ACQUIRE {key} {owner} LEASE {lease} SHARED");
    words += &world.watchdog(2);
    Line::request(client, &words)
}

fn renew(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let mut words = format!("LOCK.RENEW {key} {owner} LEASE {}", world.random.of(world.leases));
    words += &world.flag(4, "EPHEMERAL");
    if world.random.one_in(4) {
        words += &format!(" TOKEN @{}", world.client());
    }
    if world.replicates {
        words += &world.flag(2, "REPLICAS 1");
    }
    words += &world.watchdog(3);
    Line::request(client, &words)
}

fn several(world: &mut World) -> String {
    let mut keys: Vec<String> = (0..2 + world.random.below(2)).map(|_| world.key()).collect();
    keys.sort();
    keys.dedup();
    if world.random.one_in(2) {
        keys.reverse();
    }
    format!("{} {} {}", keys.len(), keys.join(" "), world.owner())
}

fn macquire(world: &mut World) -> Line {
    let (client, keys) = (world.client(), several(world));
    let mut words = format!("LOCK.MACQUIRE {keys} LEASE {}{}", world.random.of(world.leases), world.wait());
    words += &world.flag(6, "NEW");
    words += &world.flag(5, "EPHEMERAL");
    words += &world.watchdog(4);
    Line::request(client, &words)
}

fn mrelease(world: &mut World) -> Line {
    let (client, keys) = (world.client(), several(world));
    Line::request(client, &format!("LOCK.MRELEASE {keys}{}", world.flag(2, "ALL")))
}

fn mrenew(world: &mut World) -> Line {
    let (client, keys) = (world.client(), several(world));
    let mut words = format!("LOCK.MRENEW {keys} LEASE {}", world.random.of(world.leases));
    if world.replicates {
        words += &world.flag(2, "REPLICAS 1");
    }
    if world.sessions > 0 && world.random.one_in(2) {
        words += &format!(" SESSION ${}", world.session());
    }
    Line::request(client, &words)
}

/// An owner withdraws its requests and releases its holds, over any connection.
fn withdraw(world: &mut World) -> Line {
    let client = world.client();
    if world.random.one_in(4) {
        let keys = several(world);
        return Line::request(client, &format!("LOCK.MRELEASE {keys} ALL"));
    }
    let (key, owner) = (world.key(), world.owner());
    Line::request(client, &format!("LOCK.RELEASE {key} {owner} ALL"))
}

fn force(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("LOCK.FORCE {key}"))
}

fn any_client(world: &mut World) -> Name {
    if world.sessions > 0 && world.random.one_in(2) { world.session() } else { world.client() }
}

fn end(world: &mut World) -> Line {
    Line::End(any_client(world))
}

fn vanish(world: &mut World) -> Line {
    Line::Vanish(any_client(world))
}

fn stop_reading(world: &mut World) -> Line {
    let name = any_client(world);
    if world.random.one_in(2) { Line::StopReading(name) } else { Line::ResumeReading(name) }
}

fn kill(world: &mut World) -> Line {
    let (client, other) = (world.client(), any_client(world));
    let oneself = if client == other { " SKIPME no" } else { "" };
    Line::request(client, &format!("CLIENT KILL ID #{other}{oneself}"))
}

/// A connection replaces another one.
fn replace(world: &mut World) -> Line {
    let (client, other) = (world.client(), any_client(world));
    let other = if other == client { world.session() } else { other };
    Line::request(client, &format!("LOCK.SESSION REPLACES ${other}"))
}

fn unblock(world: &mut World) -> Line {
    let (client, other, how) = (world.client(), any_client(world), *world.random.of(&["", " TIMEOUT", " ERROR"]));
    Line::request(client, &format!("CLIENT UNBLOCK #{other}{how}"))
}

fn del(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("DEL {key}"))
}

fn del_many(world: &mut World) -> Line {
    let client = world.client();
    let keys: Vec<String> = (0..world.keys).map(|key| format!("k{key}")).collect();
    Line::request(client, &format!("DEL {}", keys.join(" ")))
}

fn flush(world: &mut World) -> Line {
    let client = world.client();
    Line::request(client, world.random.word(&["FLUSHALL", "FLUSHDB"]))
}

fn swap(world: &mut World) -> Line {
    let client = world.client();
    Line::request(client, "SWAPDB 0 1")
}

fn select(world: &mut World) -> Line {
    let client = world.client();
    let db = if world.databases { world.random.below(2) } else { 0 };
    Line::request(client, &format!("SELECT {db}"))
}

fn rename(world: &mut World) -> Line {
    let (client, from, to) = (world.client(), world.key(), world.key());
    Line::request(client, &format!("RENAME {from} {to}"))
}

fn move_key(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("MOVE {key} 1"))
}

fn pexpire(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("PEXPIRE {key} {}", world.random.of(&[1, 30, 100_000])))
}

fn persist(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("PERSIST {key}"))
}

fn handwritten_lock(world: &mut World) -> Line {
    let (client, key, owner) = (world.client(), world.key(), world.owner());
    let what = match world.random.below(4) {
        0 => format!("HSET {key} {owner} 2"),
        1 => format!("HDEL {key} {owner}"),
        2 => format!("HSET {key} {owner} 1 #fence 7"),
        _ => format!("HDEL {key} #fence"),
    };
    Line::request(client, &what)
}

fn overwrite(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    Line::request(client, &format!("SET {key} x"))
}

/// The lock `o0` with one hold under token 1700000000000000, as `DUMP` returns it.
fn restore(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    let dump = "\\x10\\x40\\x1f\\x1f\\x00\\x00\\x00\\x04\\x00\\x82o0\\x03\\x01\\x01\\x86#fence\\x07\\xf4\\x00@\\x1e\\x18$\\x0a\\x06\\x00\\x09\\xff\\x0a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00";
    Line::request(client, &format!("RESTORE {key} 400 {dump} REPLACE"))
}

fn role(world: &mut World) -> Line {
    let client = world.client();
    Line::request(client, world.random.word(&["REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "REPLICAOF NO ONE"]))
}

fn roles(world: &mut World) -> Line {
    let client = world.client();
    Line::request(client, "REPLICAOF NO ONE")
}

fn replicas(world: &mut World) -> Line {
    let delays = (0..world.random.below(4)).map(|_| *world.random.of(&[Some(0), Some(20), Some(2_000), None]));
    Line::Replicas(delays.collect())
}

fn min_replicas(world: &mut World) -> Line {
    if world.random.one_in(3) {
        return Line::Good(world.random.below(2));
    }
    let client = world.client();
    let count = world.random.below(2);
    Line::request(client, &format!("CONFIG SET min-replicas-to-write {count}"))
}

fn misconf(world: &mut World) -> Line {
    Line::Misconf(world.random.one_in(3))
}

fn pause(world: &mut World) -> Line {
    let client = world.client();
    let ms = *world.random.of(&[5, 50, 1_000]);
    Line::request(client, &format!("CLIENT PAUSE {ms} WRITE"))
}

fn unpause(world: &mut World) -> Line {
    Line::request(world.client(), "CLIENT UNPAUSE")
}

fn clock(world: &mut World) -> Line {
    Line::Clock(*world.random.of(&[-60_000, -200, 200, 60_000]))
}

fn busy(world: &mut World) -> Line {
    let client = world.client();
    let seconds = *world.random.of(&["0.002", "0.03", "0.5", "3"]);
    Line::request(client, &format!("DEBUG SLEEP {seconds}"))
}

fn transaction(world: &mut World) -> Line {
    Line::request(world.client(), "EXEC")
}

fn script(world: &mut World) -> Line {
    let inner = *world.random.of(&[acquire as Kind, release, session_acquire, force]);
    match inner(world) {
        Line::Request(name, words) => {
            Line::request(name, &format!("EVAL return_redis.call(unpack(ARGV)) 0 {}", words.join(" ")))
        }
        line => line,
    }
}

fn rights(world: &mut World) -> Line {
    let client = world.client();
    let rule = *world.random.of(&["-lock.acquire", "+@all ~*", "resetkeys ~k0", "-lock.events", "+@all ~*"]);
    if world.random.one_in(3) {
        return Line::request(world.client(), "AUTH guest x");
    }
    Line::request(client, &format!("ACL SETUSER guest on nopass {rule}"))
}

fn slot(world: &mut World) -> Line {
    let key = world.key();
    Line::Slot(key, *world.random.of(&[SlotChange::Moves, SlotChange::Migrates, SlotChange::Comes, SlotChange::Comes]))
}

fn look(world: &mut World) -> Line {
    let (client, key) = (world.client(), world.key());
    let words = match world.random.below(4) {
        0 => format!("LOCK.INFO {key}"),
        1 => format!("LOCK.WAITERS {key}"),
        2 => "LOCK.TOP".into(),
        _ => format!("HGETALL {key}"),
    };
    Line::request(client, &words)
}

fn pass(world: &mut World) -> Line {
    Line::Pass(*world.random.of(&[0, 0, 0, 1, 3, 20, 120, 400, 1_200]))
}
