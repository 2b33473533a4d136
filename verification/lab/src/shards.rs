//! A cluster of three primaries with a replica each: six containers.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::Duration;

use redis::{Connection, cmd};

use crate::clock::{now, until};
use crate::engine::{Equipment, LabError, MODULE, Node, Result, Site};
use crate::history::{Fault, LocalFault, Micros};
use crate::options::Options;
use crate::primary_fault::PrimaryFault;
use crate::session::{Discovery, field};
use crate::trace::trace;

const SERVER: &str = "server";
const PORT: u16 = 6379;
const PRIMARIES: usize = 3;
const NODES: usize = 2 * PRIMARIES;
const NODE_TIMEOUT_MS: u32 = 1_500;

/// The hash tags of the clients' keys: see [`crate::client`].
const TAGS: [&str; 6] = ["0", "1", "2", "3", "4", "5"];

/// How slots move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// Each key by itself, as every server can.
    KeyByKey,
    /// Atomically: `CLUSTER MIGRATESLOTS`.
    Whole,
}

/// The six nodes.
pub struct Shards {
    site: Site,
    moves: Moves,
    ids: Vec<String>,
    slots: BTreeMap<&'static str, u16>,
    last_settled: RefCell<LastSettled>,
}

/// The last healthy state.
#[derive(Default)]
struct LastSettled {
    /// When it was seen.
    at: Micros,
    /// The primaries and replicas then.
    leaders: BTreeMap<String, String>,
    /// Periods of failovers that the lab did not cause.
    unhealthy_periods: Vec<Fault>,
}

/// A view of the cluster: primaries, replicas and slots.
#[derive(Clone, Debug, PartialEq, Eq)]
struct View {
    /// The primary of each node; a primary is its own.
    leaders: BTreeMap<String, String>,
    /// The owner of each slot that the lab uses.
    owners: BTreeMap<u16, String>,
    healthy: bool,
}

impl Shards {
    /// Starts six servers, joins them, and waits until all agree.
    pub fn start(equipment: Equipment, moves: Moves, options: &Options) -> Result<Shards> {
        let site = Site::new("shards", NODES, equipment, options)?;
        let mut shards =
            Shards { site, moves, ids: Vec::new(), slots: BTreeMap::new(), last_settled: RefCell::default() };
        for node in 0..NODES {
            shards.start_server(node)?;
        }
        shards.create()?;
        for tag in TAGS {
            let slot = cmd("CLUSTER").arg("KEYSLOT").arg(tag).query(&mut shards.connect(0)?)?;
            shards.slots.insert(tag, slot);
        }
        shards.settle()?;
        Ok(shards)
    }

    fn start_server(&self, node: usize) -> Result<()> {
        let ip = &self.node(node).ip;
        let configuration = format!(
            "port {PORT}\nsave \"\"\nappendonly no\nloadmodule {MODULE}\nholdfast.default-lease 4000\n\
             repl-diskless-sync yes\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n\
             cluster-enabled yes\ncluster-config-file nodes.conf\ncluster-announce-ip {ip}\n\
             cluster-node-timeout {NODE_TIMEOUT_MS}\ncluster-require-full-coverage no\n\
             cluster-allow-replica-migration no\n"
        );
        self.node(node).start(SERVER, &configuration, &[])
    }

    fn create(&mut self) -> Result<()> {
        for node in 0..NODES {
            let mut connection = self.connect(node)?;
            self.ids.push(cmd("CLUSTER").arg("MYID").query(&mut connection)?);
            cmd("CLUSTER").arg("SET-CONFIG-EPOCH").arg(node + 1).exec(&mut connection)?;
            if node < PRIMARIES {
                let first = 16_384 * node / PRIMARIES;
                let last = 16_384 * (node + 1) / PRIMARIES - 1;
                cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(&[first, last]).exec(&mut connection)?;
            }
        }
        let mut first = self.connect(0)?;
        for node in 1..NODES {
            cmd("CLUSTER").arg("MEET").arg(&self.node(node).ip).arg(PORT).exec(&mut first)?;
        }
        self.wait_for("all nodes to know each other", || (0..NODES).all(|node| self.known_to(node) == NODES))?;
        for node in PRIMARIES..NODES {
            let mut connection = self.connect(node)?;
            cmd("CLUSTER").arg("REPLICATE").arg(&self.ids[node - PRIMARIES]).exec(&mut connection)?;
        }
        Ok(())
    }

    fn node(&self, index: usize) -> &Node {
        &self.site.nodes[index]
    }

    fn connect(&self, node: usize) -> Result<Connection> {
        self.node(node).connect(PORT)
    }

    fn connect_to(&self, id: &str) -> Result<Connection> {
        self.connect(self.index_of(id)?)
    }

    fn index_of(&self, id: &str) -> Result<usize> {
        self.ids.iter().position(|known| known == id).ok_or_else(|| LabError(format!("no node {id}")))
    }

    fn known_to(&self, node: usize) -> usize {
        self.nodes_as_seen_by(node).map_or(0, |text| text.lines().filter(|line| !line.contains("handshake")).count())
    }

    fn nodes_as_seen_by(&self, node: usize) -> Result<String> {
        let mut connection = self.connect(node)?;
        Ok(cmd("CLUSTER").arg("NODES").query(&mut connection)?)
    }

    fn view(&self, node: usize) -> Option<View> {
        let text = self.nodes_as_seen_by(node).ok()?;
        View::read(&text, self.slots.values())
    }

    /// How clients find the cluster.
    pub fn discovery(&self) -> Discovery {
        let at = |node: &Node| format!("{}:{PORT}", node.ip);
        Discovery::Cluster(self.site.nodes.iter().map(at).collect())
    }

    /// A connection to the current owner of a key's slot.
    pub fn owner_of(&self, key: &str) -> Result<Connection> {
        let mut any = self.connect(0)?;
        let slot: u16 = cmd("CLUSTER").arg("KEYSLOT").arg(key).query(&mut any)?;
        let text = self.nodes_as_seen_by(0)?;
        let owner = View::read(&text, [&slot])
            .and_then(|view| view.owners.get(&slot).cloned())
            .ok_or_else(|| LabError(format!("slot {slot} has no owner")))?;
        self.connect_to(&owner)
    }

    /// The section `holdfast` of every server's `INFO`.
    pub fn infos(&self) -> Result<Vec<String>> {
        (0..NODES).map(|node| self.info(node, "holdfast")).collect()
    }

    fn info(&self, node: usize, section: &str) -> Result<String> {
        let mut connection = self.connect(node)?;
        Ok(cmd("INFO").arg(section).query(&mut connection)?)
    }

    /// Lines in the servers' logs that report a crash or a failed assertion.
    pub fn crashes(&self) -> Vec<String> {
        self.site.nodes.iter().flat_map(|node| node.crashes(SERVER)).collect()
    }

    /// Injects a fault into the primary of a tag's slot, waits until its replica is promoted, and heals the fault.
    pub fn fail_over(&self, tag: &str, primary_fault: PrimaryFault, split: Duration) -> Result<(LocalFault, Micros)> {
        let view = self.settle()?;
        let slot = self.slot(tag)?;
        let old = self.index_of(view.owners.get(&slot).map_or("", String::as_str))?;
        let tags = self.tags_of(&view, &self.ids[old]);
        let from = now();
        primary_fault.inject(&self.site, old, SERVER)?;
        self.await_successor(old, slot)?;
        let took = now() - from;
        sleep(split);
        primary_fault.heal(&self.site, old, SERVER, || self.start_server(old))?;
        self.last_settled.borrow_mut().leaders = self.agree()?.leaders;
        let fault = Fault { from, until: now() };
        Ok((LocalFault { fault, tags }, took))
    }

    fn slot(&self, tag: &str) -> Result<u16> {
        self.slots.get(tag).copied().ok_or_else(|| LabError(format!("no tag {tag}")))
    }

    fn tags_of(&self, view: &View, owner: &str) -> BTreeSet<String> {
        self.slots
            .iter()
            .filter(|(_, slot)| view.owners.get(slot).is_some_and(|id| id == owner))
            .map(|(tag, _)| (*tag).to_owned())
            .collect()
    }

    fn await_successor(&self, old: usize, slot: u16) -> Result<()> {
        self.wait_for("a replica to be promoted", || {
            (0..NODES).filter(|&node| node != old).all(|node| {
                self.view(node).is_some_and(|view| view.owners.get(&slot).is_some_and(|owner| *owner != self.ids[old]))
            })
        })
    }

    /// Moves a tag's slot to another primary while clients use it. `pause` is the time between the two nodes.
    pub fn move_slot(&self, tag: &str, choice: usize, pause: Duration) -> Result<()> {
        let slot = self.slot(tag)?;
        let view = self.settle()?;
        let from = view.owners.get(&slot).cloned().unwrap_or_default();
        let primaries: BTreeSet<&String> = view.leaders.values().collect();
        let others: Vec<&String> = primaries.into_iter().filter(|id| **id != from).collect();
        let Some(to) = others.get(choice % others.len().max(1)) else {
            return Err(LabError("there is no other primary".into()));
        };
        trace(|| format!("slot of {tag}: {from} to {to} begins"));
        match self.moves {
            Moves::KeyByKey => self.move_key_by_key(slot, (&from, to), pause)?,
            Moves::Whole => self.move_whole(slot, (&from, to), pause)?,
        }
        trace(|| format!("slot of {tag}: moved"));
        self.settle().map(drop)
    }

    fn move_whole(&self, slot: u16, (from, to): (&str, &str), pause: Duration) -> Result<()> {
        sleep(pause);
        let mut source = self.connect_to(from)?;
        cmd("CLUSTER")
            .arg("MIGRATESLOTS")
            .arg("SLOTSRANGE")
            .arg(&[slot, slot])
            .arg("NODE")
            .arg(to)
            .exec(&mut source)?;
        self.wait_for("an atomic slot migration", || {
            (0..NODES)
                .all(|node| self.view(node).is_some_and(|view| view.owners.get(&slot).is_some_and(|owner| owner == to)))
        })
    }

    fn move_key_by_key(&self, slot: u16, (from, to): (&str, &str), pause: Duration) -> Result<()> {
        let mut source = self.connect_to(from)?;
        let mut target = self.connect_to(to)?;
        set_slot(&mut target, slot, "IMPORTING", from)?;
        set_slot(&mut source, slot, "MIGRATING", to)?;
        sleep(pause / 2);
        let ip = &self.node(self.index_of(to)?).ip;
        move_keys(&mut source, slot, ip)?;
        sleep(pause / 2);
        // Again: a lock that was held all the time was never missing here, and others may have been acquired again.
        move_keys(&mut source, slot, ip)?;
        set_slot(&mut target, slot, "NODE", to)?;
        set_slot(&mut source, slot, "NODE", to)
    }

    /// Waits until all is healthy, and returns the periods since the last call in which it was not: on a machine that pauses for
    /// seconds, nodes consider each other failed.
    pub fn unhealthy_periods(&self) -> Result<Vec<Fault>> {
        self.settle()?;
        Ok(std::mem::take(&mut self.last_settled.borrow_mut().unhealthy_periods))
    }

    /// Waits until all nodes agree and are healthy, and returns their view.
    fn settle(&self) -> Result<View> {
        let view = self.agree()?;
        let mut last_settled = self.last_settled.borrow_mut();
        let LastSettled { at, leaders, unhealthy_periods } = &mut *last_settled;
        let before = std::mem::replace(leaders, view.leaders.clone());
        let since = std::mem::replace(at, now());
        if !before.is_empty() && before != view.leaders {
            trace(|| format!("a failover that the lab did not cause, since {since}"));
            unhealthy_periods.push(Fault { from: since, until: *at });
        }
        drop(last_settled);
        Ok(view)
    }

    fn agree(&self) -> Result<View> {
        let mut seen = None;
        self.wait_for("all nodes to agree", || {
            let views: Option<Vec<View>> = (0..NODES).map(|node| self.view(node)).collect();
            seen = views.and_then(agreed);
            seen.as_ref().is_some_and(|view| self.replicas_in_step(view))
        })?;
        seen.ok_or_else(|| LabError("no view".into()))
    }

    fn replicas_in_step(&self, view: &View) -> bool {
        (0..NODES).filter(|&node| view.leaders.get(&self.ids[node]) != Some(&self.ids[node])).all(|node| {
            self.info(node, "replication").is_ok_and(|info| field(&info, "master_link_status") == Some("up"))
        })
    }

    fn wait_for(&self, what: &str, done: impl FnMut() -> bool) -> Result<()> {
        if until(Duration::from_secs(45), done) {
            return Ok(());
        }
        let mut text = format!("waited 45 s for {what}");
        for (index, node) in self.site.nodes.iter().enumerate() {
            text += &node.last_words(SERVER);
            text += "
";
            text += &self.nodes_as_seen_by(index).unwrap_or_default();
        }
        Err(LabError(text))
    }
}

fn set_slot(connection: &mut Connection, slot: u16, state: &str, node: &str) -> Result<()> {
    Ok(cmd("CLUSTER").arg("SETSLOT").arg(slot).arg(state).arg(node).exec(connection)?)
}

fn move_keys(source: &mut Connection, slot: u16, to: &str) -> Result<()> {
    loop {
        let keys: Vec<String> = cmd("CLUSTER").arg("GETKEYSINSLOT").arg(slot).arg(100).query(source)?;
        if keys.is_empty() {
            return Ok(());
        }
        // A key that expired meanwhile returns NOKEY, which is allowed.
        cmd("MIGRATE").arg(to).arg(PORT).arg("").arg(0).arg(1_000).arg("KEYS").arg(keys).exec(source)?;
    }
}

fn agreed(views: Vec<View>) -> Option<View> {
    let mut views = views.into_iter();
    let first = views.next()?;
    let sound = first.healthy && first.primaries_with_replica() == PRIMARIES;
    (sound && views.all(|view| view == first)).then_some(first)
}

impl View {
    /// Reads `CLUSTER NODES`.
    fn read<'a>(text: &str, slots: impl IntoIterator<Item = &'a u16>) -> Option<View> {
        let mut view = View { leaders: BTreeMap::new(), owners: BTreeMap::new(), healthy: true };
        let slots: Vec<u16> = slots.into_iter().copied().collect();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [id, _, flags, primary, _, _, _, link, ranges @ ..] = fields.as_slice() else {
                return None;
            };
            let leader = if flags.contains("master") { id } else { primary };
            view.leaders.insert((*id).to_owned(), (*leader).to_owned());
            view.healthy &= !flags.contains("fail") && !flags.contains("noaddr");
            view.healthy &= *link == "connected";
            for slot in slots.iter().filter(|slot| covered(ranges, **slot)) {
                view.owners.insert(*slot, (*id).to_owned());
            }
        }
        view.healthy &= view.owners.len() == slots.len();
        Some(view)
    }

    fn primaries_with_replica(&self) -> usize {
        let led: BTreeSet<&String> =
            self.leaders.iter().filter(|(id, leader)| id != leader).map(|(_, leader)| leader).collect();
        led.len()
    }
}

/// Whether the slot is in one of the ranges (`7`, `7-9`; `[7->-…]` is a migrating slot).
fn covered(ranges: &[&str], slot: u16) -> bool {
    ranges.iter().any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<u16>(), last.parse::<u16>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&slot),
            _ => false,
        }
    })
}
