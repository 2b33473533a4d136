//! Where the slots of a cluster are served, as this node knows it.

use super::call::{self, Reply};
use super::clock::Now;
use super::text::Text;
use super::{Ctx, MainThread};
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

/// A range of slots that another node serves, both ends included.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    first: i64,
    last: i64,
    address: String,
}

#[derive(Debug, Default)]
struct Slots {
    read: Option<Millis>,
    ranges: Vec<Range>,
}

static SLOTS: MainThread<Slots> = MainThread::new();

/// Where the slot of a key is served, if another node serves it; `None` if this one does, if the slot is being
/// migrated, or if no node serves it.
pub fn elsewhere(ctx: Ctx, key: &Text) -> Option<Place> {
    let slot = call::run(ctx, c"CLUSTER", c"KEYSLOT", &[key], Reply::integer)?;
    let now = Now::read().millis();
    let is_known =
        SLOTS.with(|slots| slots.read.is_some_and(|read| (read..read.saturating_add(GOOD_FOR)).contains(&now)));
    if !is_known {
        // Not `SLOTS`: Valkey 8.0 prepares that reply for a connection, and crashes where there is none.
        let nodes = call::run(ctx, c"CLUSTER", c"NODES", &[], Reply::bytes).unwrap_or_default();
        let ranges = ranges_of_others(&String::from_utf8_lossy(&nodes));
        SLOTS.with(|slots| *slots = Slots { read: Some(now), ranges });
    }
    SLOTS.with(|slots| {
        let range = slots.ranges.iter().find(|range| (range.first..=range.last).contains(&slot))?;
        Some(Place { slot, address: range.address.clone() })
    })
}

/// The slots that other nodes serve, according to `CLUSTER NODES`: a line for each node, with its id, its address
/// (`host:port@busport`, and perhaps `,hostname`), its flags, five more fields, and its slots.
fn ranges_of_others(nodes: &str) -> Vec<Range> {
    let of_node = |line: &str| -> Vec<Range> {
        let mut fields = line.split(' ');
        let (address, flags) = (fields.nth(1).unwrap_or_default(), fields.next().unwrap_or_default());
        if flags.split(',').any(|flag| flag == "myself") {
            return Vec::new();
        }
        let address = address.split(['@', ',']).next().unwrap_or_default();
        let range = |slots: &str| {
            // Slots in brackets are being migrated.
            let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
            Some(Range { first: first.parse().ok()?, last: last.parse().ok()?, address: address.into() })
        };
        fields.skip(5).filter_map(range).collect()
    };
    nodes.lines().flat_map(of_node).collect()
}

#[cfg(test)]
mod tests {
    use super::{Range, ranges_of_others};

    #[test]
    fn slots_of_other_nodes_are_read() {
        let nodes = "aa 127.0.0.1:7001@17001 myself,master - 0 0 1 connected 0-99 [5->-bb]\n\
                     bb 127.0.0.1:7002@17002,host master - 0 1426238316232 2 connected 100-200 300 [7-<-aa]\n\
                     cc 127.0.0.1:7003@17003 slave bb 0 1426238316232 3 connected\n";
        let range = |first, last| Range { first, last, address: "127.0.0.1:7002".into() };
        assert_eq!(ranges_of_others(nodes), [range(100, 200), range(300, 300)]);
    }
}
