//! Where the slots of a cluster are served, as this node knows it.

use super::call::{self, Reply};
use super::clock::Now;
use super::key::Kind;
use super::text::{AsText, Text};
use super::{Ctx, Key, MainThread};
use crate::lock::Millis;

/// How long, in ms, what was read about the slots stays valid: many may ask at once, and reading takes some ten
/// microseconds.
const GOOD_FOR: Millis = 10;

/// Where a slot is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: i64,
    /// The node: its host and port.
    pub address: String,
}

/// Which node of a cluster decides on a key, for those who wait for it or hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// This one.
    Here,
    /// Another one.
    Elsewhere(Place),
    /// The slot is being moved to another node, and the key is not here any more, if it ever was.
    Leaving,
    /// The slot is being moved here, and the key is not here yet, if it exists.
    Arriving,
    /// None: no node owns the slot, or the cluster is down.
    Nowhere,
}

/// Who serves a slot, according to `CLUSTER NODES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Myself,
    /// The node of this number in [`Slots::addresses`].
    Other(usize),
}

/// What this node knows of the slots.
#[derive(Debug, Default)]
struct Slots {
    /// When it was read.
    read: Option<Millis>,
    addresses: Vec<String>,
    /// Ranges of slots, both ends included.
    ranges: Vec<(i64, i64, Owner)>,
    /// Slots that are being moved to another node.
    migrating: Vec<i64>,
    /// Slots that are being moved here.
    importing: Vec<i64>,
}

static SLOTS: MainThread<Slots> = MainThread::new();

/// Which node decides on a key of the selected database. To be asked before the key is opened.
///
/// Mostly it takes one command that is not run as a client would, less than a microsecond. Where this node does not serve the
/// key as its own, what was last read about the slots is looked at.
pub fn served(ctx: Ctx, key: &Text) -> Served {
    if ctx.serves(key) {
        return Served::Here;
    }
    let Some(slot) = call::run(ctx, c"CLUSTER", c"KEYSLOT", &[key], Reply::integer) else { return Served::Nowhere };
    read_slots(ctx);
    let (owner, is_migrating, is_importing) = SLOTS.with(|slots| {
        let range = slots.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        let owner = range.map(|(.., owner)| match owner {
            Owner::Myself => None,
            Owner::Other(node) => slots.addresses.get(*node).cloned(),
        });
        (owner, slots.migrating.contains(&slot), slots.importing.contains(&slot))
    });
    match owner {
        Some(Some(_)) if is_importing => {
            let is_here = Key::open(ctx, key.as_text()).kind() != Kind::Missing;
            if is_here { Served::Here } else { Served::Arriving }
        }
        Some(Some(address)) => Served::Elsewhere(Place { slot, address }),
        Some(None) if is_migrating => Served::Leaving,
        Some(None) | None => Served::Nowhere,
    }
}

/// Reads what this node knows of the slots, unless it was read just now.
fn read_slots(ctx: Ctx) {
    let now = Now::read().millis();
    let is_known =
        SLOTS.with(|slots| slots.read.is_some_and(|read| (read..read.saturating_add(GOOD_FOR)).contains(&now)));
    if !is_known {
        // Not `SLOTS`: Valkey 8.0 prepares that reply for a connection, and crashes where there is none.
        let nodes = call::run(ctx, c"CLUSTER", c"NODES", &[], Reply::bytes).unwrap_or_default();
        let slots = parse_slots(&String::from_utf8_lossy(&nodes));
        SLOTS.with(|it| *it = Slots { read: Some(now), ..slots });
    }
}

/// Reads `CLUSTER NODES`: a line for each node, with its id, its address (`host:port@busport`, and perhaps `,hostname`), its
/// flags, five more fields, and its slots. Those in brackets are on the move.
fn parse_slots(nodes: &str) -> Slots {
    let mut all = Slots::default();
    for line in nodes.lines() {
        let mut fields = line.split(' ');
        let (address, flags) = (fields.nth(1).unwrap_or_default(), fields.next().unwrap_or_default());
        let owner = if flags.split(',').any(|flag| flag == "myself") {
            Owner::Myself
        } else {
            all.addresses.push(address.split(['@', ',']).next().unwrap_or_default().into());
            Owner::Other(all.addresses.len().saturating_sub(1))
        };
        for slots in fields.skip(5) {
            if let Some(moving) = slots.strip_prefix('[') {
                let to = moving.split_once("->-").map(|(slot, _)| (slot, true));
                let moved = to.or_else(|| moving.split_once("-<-").map(|(slot, _)| (slot, false)));
                if let Some((Ok(slot), is_leaving)) = moved.map(|(slot, is_leaving)| (slot.parse(), is_leaving)) {
                    if is_leaving { all.migrating.push(slot) } else { all.importing.push(slot) }
                }
                continue;
            }
            let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
            if let (Ok(first), Ok(last)) = (first.parse(), last.parse()) {
                all.ranges.push((first, last, owner));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{Owner, parse_slots};

    #[test]
    fn slots_are_read_with_those_that_move() {
        let nodes = "aa 127.0.0.1:7001@17001 myself,master - 0 0 1 connected 0-99 [5->-bb] [7-<-bb]\n\
                     bb 127.0.0.1:7002@17002,host master - 0 1426238316232 2 connected 100-200 300\n\
                     cc 127.0.0.1:7003@17003 slave bb 0 1426238316232 3 connected\n";
        let slots = parse_slots(nodes);
        let right = [(0, 99, Owner::Myself), (100, 200, Owner::Other(0)), (300, 300, Owner::Other(0))];
        assert_eq!(slots.ranges, right);
        assert_eq!(slots.addresses, ["127.0.0.1:7002", "127.0.0.1:7003"]);
        assert_eq!((slots.migrating, slots.importing), (vec![5], vec![7]));
    }
}
