//! The events of a run, from its seed: requests of programs, and faults between any two steps.

use holdfast_core::{Channel, Limit, Terms, Wait};
use simulator::random::Random;
use simulator::redis::Generation;
use std::fmt;

/// A run before it is played.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub generation: Generation,
    pub clients: usize,
    /// The events and their times (ms).
    pub acts: Vec<(u64, Act)>,
}

/// An event. A number selects a hold or call among those that exist.
#[derive(Clone, Debug)]
pub enum Act {
    Acquire {
        client: usize,
        keys: Vec<&'static str>,
        terms: Terms,
        wait: Wait,
        /// For a cached lock: the number of uses in a row while another client waits.
        most: u32,
    },
    Release {
        client: usize,
        pick: usize,
        within: u64,
        /// For a cached lock: how long it stays cached; 0: the next request in this program takes it over.
        keep: u64,
    },
    Renew {
        client: usize,
        pick: usize,
        lease: Option<u64>,
    },
    Check {
        client: usize,
        pick: usize,
    },
    Ask {
        client: usize,
    },
    /// A caller cancels, or a handle is garbage-collected.
    Drop {
        client: usize,
        pick: usize,
    },
    /// The program ends immediately, and another one starts.
    Kill {
        client: usize,
    },
    /// The program closes its client and starts another one.
    Close {
        client: usize,
    },
    /// Both sides see that a connection is closed; bytes on their way are lost.
    Cut {
        client: usize,
        channel: Channel,
    },
    /// Nothing arrives for this long in either direction; then all of it does.
    Partition {
        client: usize,
        ms: u64,
    },
    /// Nothing arrives on this connection any more, and neither side is notified.
    Swallow {
        client: usize,
        channel: Channel,
    },
    /// No program can connect for this long. The attempt fails at once, or without any reply.
    Unreachable {
        client: usize,
        ms: u64,
        silent: bool,
    },
    /// The process is paused.
    PauseProcess {
        client: usize,
        ms: u64,
    },
    /// The server is paused.
    Stall {
        ms: u64,
    },
    /// The server refuses writes.
    Misconf {
        ms: u64,
    },
    Pause {
        ms: u64,
    },
    /// No replica confirms.
    Unconfirmed {
        ms: u64,
    },
    Force {
        key: &'static str,
    },
    Delete {
        key: &'static str,
    },
    /// A value of another type takes the key.
    Overwrite {
        key: &'static str,
    },
}

/// Longer than any run: a lock that is cached for this long is released because of contention, or not at all.
pub const LONG: u64 = 1_000_000;

const KEYS: [&str; 4] = ["k", "l", "m", "n"];

/// The run of a seed.
pub fn plan(seed: u64) -> Plan {
    let mut random = Random::new(seed ^ 0x00c1_1e27);
    let it = &mut random;
    let clients = 1 + it.below(4);
    let keys = 1 + it.below(4);
    let length = 300 + it.below(2_000) as u64;
    // Some runs have no faults of a kind, so that others are seen.
    let check_idle = it.one_in(5);
    let with =
        Chances { ephemeral: it.one_in(2), replicas: it.one_in(4), refuses: it.one_in(3), strangers: it.one_in(3) };
    let mut acts = Vec::new();
    for _ in 0..8 + it.below(40) {
        let client = it.below(clients);
        let act = match it.below(if check_idle { 22 } else { 34 }) {
            0..10 => acquire(it, client, keys, &with),
            10..15 => Act::Release { client, pick: it.below(8), within: 100 + it.below(900) as u64, keep: 0 },
            15..17 => Act::Renew { client, pick: it.below(8), lease: it.one_in(2).then(|| lease(it)) },
            17 => Act::Check { client, pick: it.below(8) },
            18..21 => Act::Drop { client, pick: it.below(8) },
            21 => Act::Ask { client },
            22..24 => Act::Cut { client, channel: channel(it) },
            24 => Act::Partition { client, ms: span(it) },
            25 => Act::Swallow { client, channel: channel(it) },
            26..28 => Act::Unreachable { client, ms: span(it), silent: it.one_in(3) },
            28 => Act::PauseProcess { client, ms: span(it) },
            29 => Act::Stall { ms: span(it) },
            30 if it.one_in(2) => Act::Kill { client },
            30 => Act::Close { client },
            31 if with.refuses && it.one_in(2) => Act::Misconf { ms: span(it) },
            31 if with.refuses => Act::Pause { ms: span(it) },
            32 if with.strangers && it.one_in(3) => Act::Force { key: KEYS[it.below(keys)] },
            32 if with.strangers && it.one_in(2) => Act::Overwrite { key: KEYS[it.below(keys)] },
            32 if with.strangers => Act::Delete { key: KEYS[it.below(keys)] },
            33 if with.replicas => Act::Unconfirmed { ms: span(it) },
            _ => Act::Drop { client, pick: it.below(8) },
        };
        // Often at the same time as another event.
        let at = match acts.last() {
            Some((at, _)) if it.one_in(3) => *at + it.below(4) as u64,
            _ => it.below(length as usize) as u64,
        };
        // It is deleted later, so that there are locks under this key again.
        let end = if let Act::Overwrite { key } = act { Some((at + span(it), Act::Delete { key })) } else { None };
        acts.push((at, act));
        acts.extend(end);
    }
    acts.sort_by_key(|(at, _)| *at);
    let generation = *it.of(&Generation::ALL);
    keep(&mut acts, seed);
    Plan { seed, generation, clients, acts }
}

/// In every second run, some locks are cached. This uses random numbers of its own, so that the rest of the run stays
/// the same.
fn keep(acts: &mut [(u64, Act)], seed: u64) {
    let mut random = Random::new(seed ^ 0x006b_6570_7400);
    let it = &mut random;
    if it.one_in(2) {
        return;
    }
    for (_, act) in acts {
        match act {
            Act::Acquire { terms, most, .. } if terms.watchdog && terms.limit == Limit::One => {
                (terms.kept, *most) = (!it.one_in(4), 1 + it.below(2) as u32);
            }
            Act::Release { keep, .. } => *keep = *it.of(&[0, 1, 100, 1_000, LONG]),
            _ => {}
        }
    }
}

struct Chances {
    ephemeral: bool,
    replicas: bool,
    refuses: bool,
    strangers: bool,
}

fn acquire(it: &mut Random, client: usize, keys: usize, with: &Chances) -> Act {
    let several = keys > 1 && it.one_in(4);
    let first = it.below(keys);
    let keys = if several { vec![KEYS[first], KEYS[(first + 1) % keys]] } else { vec![KEYS[first]] };
    let watchdog = !it.one_in(3);
    let limit = match it.below(8) {
        _ if several => Limit::One,
        0 => Limit::Shared,
        1 => Limit::Of(2),
        _ => Limit::One,
    };
    let terms = Terms {
        lease: (!watchdog || it.one_in(2)).then(|| lease(it)),
        watchdog,
        ephemeral: with.ephemeral && it.one_in(3),
        replicas: u32::from(with.replicas && it.one_in(3)),
        limit,
        kept: false,
    };
    let wait = match it.below(4) {
        0 => Wait::No,
        1 => Wait::Forever,
        _ => Wait::For(1 + it.below(1_500) as u64),
    };
    Act::Acquire { client, keys, terms, wait, most: 1 }
}

fn lease(it: &mut Random) -> u64 {
    150 + it.below(1_200) as u64
}

fn span(it: &mut Random) -> u64 {
    let most = *it.of(&[20, 200, 1_500]);
    1 + it.below(most) as u64
}

fn channel(it: &mut Random) -> Channel {
    if it.one_in(2) { Channel::Session } else { Channel::Requests }
}

impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "seed {}, {:?}, {} clients", self.seed, self.generation, self.clients)?;
        self.acts.iter().try_for_each(|(at, act)| writeln!(out, "  {at:>5} {act:?}"))
    }
}
