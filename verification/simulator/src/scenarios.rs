//! Scenarios: lines that show something only together and in this order. Random lines form such a sequence once in a
//! million runs, so some runs contain a scenario, between their own lines.
//!
//! A scenario has keys, owners and clients of its own, and starts from a server in normal operation. Therefore each
//! reply is known, and the scenario names it (`a !expect …`). The expected replies are those that `docs/guarantees.md`
//! and `docs/reference.md` promise. One of the alternatives in braces is chosen.

use crate::random::Random;
use crate::rules::{CONFIRMED, CONTENTION, CYCLES, HELD, LEASE, LIMIT, UNDELIVERED};
use crate::script::{Line, Name, parse};
use std::collections::BTreeSet;

/// A script with expected replies.
pub const EXPECTED: &str = "every client receives the reply that the script expects";
/// `FENCE`.
pub const RAISE_REPEATED: &str = "a raise by FENCE can be repeated, and nothing else finds a hold by its old token";
/// `LOCK.RELEASE … ALL`.
pub const WITHDRAWN: &str = "an owner withdraws its request over any connection, and its client gets a reply";
/// Repeated requests in the queue.
pub const SUPERSEDED: &str = "a repeated request takes over its owner's position in the queue";
/// `HOLDS`.
pub const REPEATED: &str = "a request with HOLDS can be repeated under a smaller limit, and never raises the limit";
/// Repeated renewals.
pub const SAME_TERMS: &str = "a renewal that is repeated with other options is refused";
/// Grants whose event was read.
pub const DELIVERED: &str = "a grant stands once the reply that carries its event has been composed";
/// `UNBIND`.
pub const UNBOUND: &str = "an unbound hold is not renewed, and no session is notified of it";
/// Sessions that stop reading.
pub const SILENT: &str = "a session that was promised a heartbeat and does not read is closed";

/// A scenario.
struct Scenario {
    name: &'static str,
    /// The invariant that it shows.
    rule: &'static str,
    lines: &'static str,
}

/// Normal operation: all other clients have disconnected, and nothing is paused or refused.
const BEGIN: &str = "+1
    a !end
    b !end
    c !end
    d !end
    e !end
    s !end
    t !end
    +1
    z REPLICAOF NO ONE
    z CLIENT UNPAUSE
    z CONFIG SET min-replicas-to-write 0
    !misconf off
    !cluster ok
    +400";

const SCENARIOS: [Scenario; 29] = [
    Scenario {
        name: "raised",
        rule: RAISE_REPEATED,
        lines: "f LOCK.ACQUIRE x ann {|WATCHDOG SESSION $p|SHARED|LIMIT 2|SESSION $p}
            +1
            g LOCK.RENEW x ann TOKEN @f FENCE 1800002500000007
            g LOCK.RENEW x ann TOKEN @f FENCE 1800002500000007
            +{0|1|20}
            h LOCK.RENEW x ann TOKEN @f LEASE 60000
            +1
            g !expect 1800002500000007
            h !expect null",
    },
    Scenario {
        name: "withdrawn-while-it-waits",
        rule: WITHDRAWN,
        lines: "f LOCK.MACQUIRE 2 x y ann
            g LOCK.{ACQUIRE x ben|MACQUIRE 2 x y ben|MACQUIRE 2 y x ben} WAIT {0|5000} {|REPLICAS 1}
            h LOCK.ACQUIRE x cat WAIT 0
            +1
            i LOCK.RELEASE x ben {ALL|HOLDS 0}
            +1
            g !expect null
            i !expect 1
            f LOCK.MRELEASE 2 x y ann
            +1
            h !expect 1",
    },
    Scenario {
        name: "withdrawn-before-it-is-read",
        rule: WITHDRAWN,
        lines: "f LOCK.ACQUIRE x ann
            g LOCK.{ACQUIRE x ben|MACQUIRE 2 x y ben} WAIT 0 {|WATCHDOG} SESSION $p
            +1
            f LOCK.RELEASE x ann
            +{0|1|20}
            h LOCK.RELEASE x ben ALL
            p LOCK.EVENTS
            i LOCK.MACQUIRE 2 x y cat
            +5
            h !expect 1
            p !expect [[\"refused\", 0, [\"x\"
            i !expect 1",
    },
    Scenario {
        name: "withdrawn-and-re-entered-meanwhile",
        rule: WITHDRAWN,
        lines: "f LOCK.ACQUIRE x ann
            g LOCK.MACQUIRE 2 x y ben WAIT 0 EPHEMERAL SESSION $p
            +1
            f LOCK.RELEASE x ann
            +1
            h LOCK.ACQUIRE y ben {|HOLDS 1|LEASE 60000}
            h LOCK.RELEASE x ben ALL
            +1
            p !end
            +20
            i LOCK.ACQUIRE y cat
            +1
            i !expect null",
    },
    Scenario {
        name: "withdrawn-while-it-is-confirmed",
        rule: WITHDRAWN,
        lines: "!replicas never
            f LOCK.{ACQUIRE x ann|MACQUIRE 2 x y ann} REPLICAS 1 {|WAIT 0}
            g LOCK.ACQUIRE x ann HOLDS 1 WAIT {0|5000}
            +{1|20}
            h LOCK.RELEASE x ann ALL
            +5
            f !expect -UNCONFIRMED
            g !expect null
            h !expect 1
            i LOCK.MACQUIRE 2 x y ben
            +1
            i !expect 1",
    },
    Scenario {
        name: "behind-its-own-confirmation",
        rule: CONFIRMED,
        lines: "!replicas {20|50}
            f LOCK.ACQUIRE x ann REPLICAS 1
            +1
            g LOCK.ACQUIRE x ann
            h LOCK.ACQUIRE x ann WAIT {0|5000}
            i LOCK.ACQUIRE x ben WAIT 0
            +1
            g !expect -ERR another request
            h !expect nothing
            +100
            h !expect 1
            i LOCK.RELEASE x ben ALL",
    },
    Scenario {
        name: "asked-again",
        rule: SUPERSEDED,
        lines: "f LOCK.MACQUIRE 2 x y ann
            g LOCK.MACQUIRE 2 x y ben WAIT {0|5000} {|SESSION $p}
            h LOCK.ACQUIRE x cat WAIT 0
            +{1|20}
            i LOCK.MACQUIRE 2 {x y|y x} ben WAIT {0|5000} LEASE 60000 {|HOLDS 1|REPLICAS 1 SESSION $q}
            +1
            j LOCK.ACQUIRE {x ben|x ben LIMIT 2|y ben} WAIT 0
            +1
            j !expect -ERR
            f LOCK.MRELEASE 2 x y ann
            +20
            h !expect nothing",
    },
    Scenario {
        name: "asked-again-over-another-connection",
        rule: SUPERSEDED,
        lines: "f LOCK.ACQUIRE x ann
            g LOCK.ACQUIRE x ben WAIT {0|5000}
            h LOCK.ACQUIRE x cat WAIT 0
            +1
            i LOCK.ACQUIRE x ben WAIT {0|5000} {|WAITED 5}
            +1
            g !expect -SUPERSEDED
            {g !end|h LOCK.WAITERS x|f LOCK.RENEW x ann}
            f LOCK.RELEASE x ann
            +1
            i !expect 1
            h !expect nothing",
    },
    Scenario {
        name: "repeated-with-holds",
        rule: REPEATED,
        lines: "f LOCK.ACQUIRE x ann SHARED HOLDS 1
            g LOCK.ACQUIRE x ben LIMIT 5
            +1
            f LOCK.ACQUIRE x ann SHARED HOLDS 1 LEASE {50|60000}
            h LOCK.ACQUIRE x ann {HOLDS 1|LIMIT 2 HOLDS 1|SHARED HOLDS 2|SHARED}
            +1
            f !expect 1
            h !expect -ERR",
    },
    Scenario {
        name: "overtakes",
        rule: CYCLES,
        lines: "f LOCK.ACQUIRE x ann WATCHDOG
            g LOCK.ACQUIRE y ben {WATCHDOG|LEASE 600000}
            +1
            f LOCK.ACQUIRE y ann WAIT {0|5000}
            +{1|20}
            h LOCK.MACQUIRE 2 {x y|y x} cat WAIT {0|5000} WAITED {1000|60000} {|SESSION $p}
            +1
            h !expect -DEADLOCK
            g LOCK.RELEASE y ben
            +1
            f !expect 1",
    },
    Scenario {
        name: "readers",
        rule: CYCLES,
        lines: "f LOCK.ACQUIRE x ann {WATCHDOG|LEASE 600000}
            g LOCK.ACQUIRE y ben {WATCHDOG|LEASE 600000}
            +1
            f LOCK.ACQUIRE y ann {|SHARED|LIMIT 3} WAIT 5000
            +{1|20}
            g LOCK.ACQUIRE x ben {SHARED|LIMIT 2} WAIT 5000 {|SESSION $p}
            +1
            f !expect nothing
            g !expect -DEADLOCK",
    },
    Scenario {
        name: "ring-of-three",
        rule: CYCLES,
        lines: "f LOCK.ACQUIRE x ann WATCHDOG
            g LOCK.ACQUIRE y ben WATCHDOG
            h LOCK.ACQUIRE w cat WATCHDOG
            +1
            f LOCK.ACQUIRE y ann WAIT 0 {|SHARED}
            +1
            g LOCK.ACQUIRE w ben WAIT {0|5000} {|LIMIT 2}
            +{1|20}
            h LOCK.ACQUIRE x cat WAIT {0|5000}
            +1
            f !expect nothing
            g !expect nothing
            h !expect -DEADLOCK",
    },
    Scenario {
        name: "waits-for-itself",
        rule: CYCLES,
        lines: "f LOCK.ACQUIRE x ann##1 LEASE {300|1000}
            g LOCK.ACQUIRE x ann##2 {|SHARED} WAIT {0|2000|5000}
            +1
            g !expect -DEADLOCK",
    },
    Scenario {
        name: "one-of-two-ends",
        rule: CYCLES,
        lines: "f LOCK.ACQUIRE x ann LEASE {300|1000} {|EPHEMERAL}
            g LOCK.ACQUIRE y ben {|SESSION $p}
            +1
            f LOCK.ACQUIRE y ann WAIT {0|5000}
            +1
            g LOCK.ACQUIRE x ben WAIT {0|2000|5000}
            +1
            f !expect nothing
            g !expect -DEADLOCK",
    },
    Scenario {
        name: "silent",
        rule: SILENT,
        lines: "f LOCK.ACQUIRE x ann LEASE 3600000 EPHEMERAL SESSION $p
            p LOCK.EVENTS HEARTBEAT
            +36000
            g LOCK.ACQUIRE x ben
            +1
            g !expect 1",
    },
    Scenario {
        name: "other-terms",
        rule: SAME_TERMS,
        lines: "!replicas {20|50}
            f LOCK.ACQUIRE x ann
            +20
            f LOCK.RENEW x ann LEASE 2000 REPLICAS 1 SESSION $p
            f LOCK.RENEW x ann LEASE 2000 {TOKEN 7|TOKEN @f|FENCE 1800002500000007} REPLICAS 1 SESSION $p
            +100
            f !expect -ERR another request of this owner",
    },
    Scenario {
        name: "closed-behind-its-grant",
        rule: UNDELIVERED,
        lines: "f LOCK.MACQUIRE 2 x y ann
            +1
            g LOCK.SESSION
            g LOCK.ACQUIRE x ben {|WATCHDOG} WAIT 0
            h LOCK.ACQUIRE y cat WAIT {0|5000}
            i {CLIENT KILL ID #g|LOCK.SESSION REPLACES $g}
            +1
            f LOCK.MRELEASE 2 x y ann
            +5
            i LOCK.ACQUIRE x dan
            +1
            i !expect 1",
    },
    Scenario {
        name: "closed-before-its-answer",
        rule: UNDELIVERED,
        lines: "f LOCK.ACQUIRE x ann
            +1
            g LOCK.SESSION
            g LOCK.ACQUIRE x ben {|WATCHDOG} WAIT 0
            h LOCK.ACQUIRE x cat WAIT {0|5000}
            +1
            f LOCK.{RELEASE x ann|FORCE x}
            f {CLIENT KILL ID #g|LOCK.SESSION REPLACES $g}
            +5
            h !expect 1",
    },
    Scenario {
        name: "closed-as-it-reads",
        rule: DELIVERED,
        lines: "f LOCK.ACQUIRE x ann
            f LOCK.ACQUIRE x ben {|WATCHDOG} WAIT 0 SESSION $p
            h LOCK.ACQUIRE x cat WAIT 0
            +1
            f LOCK.RELEASE x ann
            +1
            p LOCK.EVENTS {|HEARTBEAT}
            g {CLIENT KILL ID #p|LOCK.SESSION REPLACES $p}
            +5
            h !expect nothing
            i LOCK.RELEASE x ben ALL
            +1
            h !expect 1",
    },
    Scenario {
        name: "granted-by-repetition",
        rule: HELD,
        lines: "f LOCK.ACQUIRE x ann
            g LOCK.ACQUIRE x ben HOLDS 1 WAIT 0 SESSION $p
            +1
            f LOCK.RELEASE x ann
            +1
            h {LOCK.ACQUIRE x ben HOLDS 1|LOCK.RENEW x ben LEASE 60000}
            +1
            p !end
            +5
            i LOCK.ACQUIRE x cat
            +1
            h !expect 1
            i !expect null",
    },
    Scenario {
        name: "renewed-without-a-lease",
        rule: LEASE,
        lines: "f LOCK.ACQUIRE x ann LEASE 3600000
            +1
            g LOCK.RENEW x ann {|TOKEN @f}
            +40000
            h LOCK.ACQUIRE x ben
            +1
            g !expect 1
            h !expect null",
    },
    Scenario {
        name: "unbound-by-its-owner",
        rule: UNBOUND,
        lines: "f LOCK.ACQUIRE x ann LEASE {600|2000} WATCHDOG SESSION $p
            p LOCK.EVENTS HEARTBEAT
            +{1|300}
            g LOCK.RENEW x ann {|TOKEN @f|TOKEN @f FENCE 1800002500000007} LEASE 900 UNBIND
            +1
            p LOCK.EVENTS WAIT 0
            +800
            h LOCK.ACQUIRE x ben
            +1
            h !expect null
            +200
            i LOCK.ACQUIRE x cat
            +1
            i !expect 1
            p !expect nothing",
    },
    Scenario {
        name: "unconfirmed-re-entry",
        rule: CONFIRMED,
        lines: "!replicas 0
            f LOCK.ACQUIRE x ann LEASE 2000 WATCHDOG REPLICAS 1
            +5
            !replicas never
            +300
            g LOCK.ACQUIRE x ann LEASE {60000|3600000} REPLICAS {1|2}
            +1500
            +500
            h LOCK.ACQUIRE x ben
            +1000
            h !expect 1",
    },
    Scenario {
        name: "renamed-to-an-ephemeral-one",
        rule: HELD,
        lines: "f LOCK.ACQUIRE x ann EPHEMERAL
            g LOCK.ACQUIRE y ann {|LEASE 60000}
            +{1|20}
            g RENAME y x
            f !end
            h LOCK.ACQUIRE x ben
            +1
            h !expect null",
    },
    Scenario {
        name: "behind-its-own-pipeline",
        rule: HELD,
        lines: "f LOCK.ACQUIRE x ann LEASE 1
            g LOCK.ACQUIRE x ben WAIT 0
            h LOCK.ACQUIRE x ben WAIT 0 WAITED {1000|60000}
            g REPLICAOF 127.0.0.1 1
            g REPLICAOF NO ONE
            g LOCK.ACQUIRE x ben
            h LOCK.ACQUIRE x ben REPLICAS 1
            +10",
    },
    Scenario {
        name: "written-anew",
        rule: LIMIT,
        lines: "f LOCK.ACQUIRE x ann SHARED WATCHDOG
            g LOCK.ACQUIRE x ben LIMIT 2
            h LOCK.ACQUIRE x ann LIMIT 2
            +400
            !clock {45000|60000}
            i LOCK.ACQUIRE x cat {SHARED|LIMIT 3}
            +1
            j LOCK.ACQUIRE x dan {SHARED|LIMIT 3}
            +400
            i !expect 1
            j !expect null",
    },
    Scenario {
        name: "contended",
        rule: CONTENTION,
        lines: "f LOCK.ACQUIRE x ann {|WATCHDOG|EPHEMERAL} CONTENTION SESSION $p
            p LOCK.EVENTS WAIT 0
            +{1|20}
            p !expect nothing
            g LOCK.{ACQUIRE x ben|MACQUIRE 2 y x ben} {|WAIT 0|WAIT 5000}
            +1
            p !expect [[\"contended\", 0, [\"x\"], \"ann\",
            p LOCK.EVENTS WAIT 0
            h LOCK.ACQUIRE x cat {|WAIT 5000}
            +20
            p !expect nothing",
    },
    Scenario {
        name: "contended-at-its-grant",
        rule: CONTENTION,
        lines: "f LOCK.ACQUIRE x ann
            f LOCK.ACQUIRE x ben WAIT 0 CONTENTION SESSION $p
            p LOCK.EVENTS WAIT 0 COUNT 1
            +1
            g LOCK.ACQUIRE x cat WAIT 0
            +1
            f LOCK.RELEASE x ann
            +1
            p !expect [[\"granted\", 0, [\"x\"], \"ben\",
            p LOCK.EVENTS COUNT 1
            +1
            p !expect [[\"contended\", 0, [\"x\"], \"ben\",",
    },
    Scenario {
        name: "contended-by-another-session",
        rule: CONTENTION,
        lines: "f LOCK.ACQUIRE x ann WATCHDOG {|CONTENTION} SESSION $p
            g LOCK.ACQUIRE x ben WAIT 0
            +1
            f LOCK.RENEW x ann WATCHDOG CONTENTION SESSION $q
            q LOCK.EVENTS WAIT 0
            +1
            q !expect [[\"contended\", 0, [\"x\"], \"ann\",",
    },
];

/// The invariant that a scenario shows.
pub fn rule(name: &str) -> &'static str {
    SCENARIOS.iter().find(|scenario| scenario.name == name).map_or(EXPECTED, |scenario| scenario.rule)
}

/// Inserts a scenario into some runs.
pub fn add(seed: u64, lines: &mut Vec<Line>) {
    let mut random = Random::new(!seed);
    if !random.one_in(16) {
        return;
    }
    let scenario = random.of(&SCENARIOS);
    let played = parse(&chosen(scenario.lines, &mut random));
    let mut all = vec![Line::Scenario(scenario.name.into())];
    all.extend(parse(BEGIN));
    let names: BTreeSet<Name> = played.iter().flat_map(names).chain(['z']).collect();
    let at = random.below(lines.len() + 1);
    if played.iter().any(|line| matches!(line, Line::Replicas(_))) {
        let before = lines[..at].iter().rfind(|line| matches!(line, Line::Replicas(_)));
        let before = before.cloned().unwrap_or(Line::Replicas(Vec::new()));
        all.extend(played.into_iter().chain([Line::EndScenario, before]));
    } else {
        all.extend(played.into_iter().chain([Line::EndScenario]));
    }
    all.extend(names.into_iter().map(Line::End));
    lines.splice(at..at, all);
}

/// The clients of a line.
fn names(line: &Line) -> Vec<Name> {
    let Line::Request(name, words) = line else { return Vec::new() };
    let named = words.iter().filter_map(|word| word.strip_prefix(['$', '#'])?.chars().next());
    named.chain([*name]).collect()
}

/// Chooses one of the alternatives in each pair of braces.
fn chosen(text: &str, random: &mut Random) -> String {
    let mut pieces = text.split('{');
    let mut chosen: String = pieces.next().unwrap_or_default().into();
    for piece in pieces {
        let (choices, rest) = piece.split_once('}').unwrap_or((piece, ""));
        let choices: Vec<&str> = choices.split('|').collect();
        chosen.push_str(choices[random.below(choices.len())]);
        chosen.push_str(rest);
    }
    chosen
}
