//! Which nodes serve the slots of a cluster, as far as this node knows.

use super::call::{self, Reply};
use super::clock::Now;
use super::key::Kind;
use super::text::{AsText, Text};
use super::{Ctx, Key, MainThread};
use crate::lock::Millis;

/// How long the slot table is cached, in ms. Many requests may need it at the same time, and reading it takes some ten
/// microseconds.
const CACHED_FOR: Millis = 10;

/// A slot, and the node that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: i64,
    /// The host and port of the node.
    pub address: String,
}

/// Which node of a cluster decides on a key, for its waiters and holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// This node.
    Here,
    /// Another node.
    Elsewhere(Place),
    /// The slot is being migrated to another node, and the key is not here: it has moved already, or does not exist.
    Leaving,
    /// The slot is being imported, and the key is not here: it has not moved yet, or does not exist.
    Arriving,
    /// None: no node owns the slot, or this node owns it but does not serve it, as when the cluster is down.
    Nowhere,
}

/// The node that serves a slot, according to `CLUSTER NODES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Myself,
    /// Index of the node in [`Slots::addresses`].
    Other(usize),
}

/// The slot table.
#[derive(Debug, Default)]
struct Slots {
    /// When the table was read.
    read: Option<Millis>,
    /// Addresses of the other nodes.
    addresses: Vec<String>,
    /// Ranges of slots, both ends included.
    ranges: Vec<(i64, i64, Owner)>,
    /// Slots that are being migrated to another node.
    migrating: Vec<i64>,
    /// Slots that are being imported.
    importing: Vec<i64>,
    /// Whether the cluster is down. Then a key in a migrating slot is not served even if it has not moved yet.
    is_down: bool,
}

static SLOTS: MainThread<Slots> = MainThread::new();

/// Returns which node decides on a key of the selected database. The caller must not have a key open, because the
/// server runs a command.
///
/// Usually one check by [`Ctx::serves`] suffices, which takes less than a microsecond. If it fails, the function looks
/// the slot up in the slot table.
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
        (owner, !slots.is_down && slots.migrating.contains(&slot), slots.importing.contains(&slot))
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

/// Reads the slot table, unless the cached one is recent enough.
fn read_slots(ctx: Ctx) {
    let now = Now::read().millis();
    let is_known =
        SLOTS.with(|slots| slots.read.is_some_and(|read| (read..read.saturating_add(CACHED_FOR)).contains(&now)));
    if !is_known {
        // Not `CLUSTER SLOTS`: Valkey 8.0 composes its reply for a connection, and crashes if there is none.
        let nodes = call::run(ctx, c"CLUSTER", c"NODES", &[], Reply::bytes).unwrap_or_default();
        let setting = Text::new(b"cluster-preferred-endpoint-type");
        let endpoint = call::run(ctx, c"CONFIG", c"GET", &[&setting], Reply::second).unwrap_or_default();
        let slots = parse_slots(&String::from_utf8_lossy(&nodes), &endpoint);
        let info = call::run(ctx, c"CLUSTER", c"INFO", &[], Reply::bytes).unwrap_or_default();
        let is_down = String::from_utf8_lossy(&info).lines().any(|line| line == "cluster_state:fail");
        SLOTS.with(|it| *it = Slots { read: Some(now), is_down, ..slots });
    }
}

/// Parses the reply of `CLUSTER NODES`. It has a line for each node: id, address (see [`address_for_clients`]), flags,
/// five more fields, and slots. Slots in brackets are being migrated or imported.
fn parse_slots(nodes: &str, endpoint: &[u8]) -> Slots {
    let mut all = Slots::default();
    for line in nodes.lines() {
        let mut fields = line.split(' ');
        let (address, flags) = (fields.nth(1).unwrap_or_default(), fields.next().unwrap_or_default());
        let owner = if flags.split(',').any(|flag| flag == "myself") {
            Owner::Myself
        } else {
            all.addresses.push(address_for_clients(address, endpoint));
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

/// The address of a node as the server names it in `-MOVED`, with the value of `cluster-preferred-endpoint-type`.
/// `CLUSTER NODES` shows `host:port@busport`, optionally followed by `,hostname`.
fn address_for_clients(address: &str, endpoint: &[u8]) -> String {
    let (place, rest) = address.split_once('@').unwrap_or((address, ""));
    let (ip, port) = place.rsplit_once(':').unwrap_or((place, ""));
    let host = match endpoint {
        b"hostname" => rest.split(',').nth(1).filter(|name| !name.is_empty()).unwrap_or("?"),
        b"unknown-endpoint" => "",
        _ => ip,
    };
    format!("{host}:{port}")
}

#[cfg(test)]
mod tests {
    use super::{Owner, address_for_clients, parse_slots};

    #[test]
    fn address_is_the_preferred_endpoint() {
        let named = |address, endpoint: &str| address_for_clients(address, endpoint.as_bytes());
        let address = "127.0.0.1:7002@17002,host";
        assert_eq!(
            ["ip", "hostname", "unknown-endpoint"].map(|it| named(address, it)),
            ["127.0.0.1:7002", "host:7002", ":7002"]
        );
        assert_eq!(["", "hostname"].map(|it| named("::1:7002@17002", it)), ["::1:7002", "?:7002"]);
    }

    #[test]
    fn parse_slots_reads_ranges_and_moving_slots() {
        let nodes = "aa 127.0.0.1:7001@17001 myself,master - 0 0 1 connected 0-99 [5->-bb] [7-<-bb]\n\
                     bb 127.0.0.1:7002@17002,host master - 0 1426238316232 2 connected 100-200 300\n\
                     cc 127.0.0.1:7003@17003 slave bb 0 1426238316232 3 connected\n";
        let slots = parse_slots(nodes, b"ip");
        let expected = [(0, 99, Owner::Myself), (100, 200, Owner::Other(0)), (300, 300, Owner::Other(0))];
        assert_eq!(slots.ranges, expected);
        assert_eq!(slots.addresses, ["127.0.0.1:7002", "127.0.0.1:7003"]);
        assert_eq!((slots.migrating, slots.importing), (vec![5], vec![7]));
    }
}
