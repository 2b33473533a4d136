//! A cluster of primaries, for tests with moving slots.

use std::ops::Range;
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value};

use crate::server::{Builder, Server};
use crate::until::until;

const SLOTS: u16 = 16_384;
const SOON: Duration = Duration::from_secs(30);
/// After the node timeout a node forgets a `CLUSTER MEET`.
const FORGOTTEN: Duration = Duration::from_secs(6);

/// Primaries that share the slots evenly. Dropping it ends them.
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    /// `count` primaries with the module loaded, once all of them report that the cluster is ready.
    #[track_caller]
    pub fn start(count: usize) -> Self {
        Self::start_with(count, |builder| builder)
    }

    /// The same, with other settings for each node.
    #[track_caller]
    pub fn start_with(count: usize, settings: impl Fn(Builder) -> Builder) -> Self {
        let cluster = Self { nodes: (0..count).map(|_| settings(builder()).start()).collect() };
        cluster.assign_slots();
        cluster.nodes[1..].iter().for_each(|node| cluster.introduce(node, 0));
        cluster.wait_until_ok();
        cluster
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// One node.
    pub fn node(&self, index: usize) -> &Server {
        &self.nodes[index]
    }

    /// One node, to stop or kill it.
    pub fn node_mut(&mut self, index: usize) -> &mut Server {
        &mut self.nodes[index]
    }

    /// The slot of a key.
    #[track_caller]
    pub fn slot_of(&self, key: &[u8]) -> u16 {
        redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query(&mut self.nodes[0].connect()).expect("CLUSTER KEYSLOT")
    }

    /// The index of the node that owns a slot, by its own account.
    #[track_caller]
    pub fn owner_of(&self, slot: u16) -> usize {
        (0..self.nodes.len()).find(|index| self.owns(*index, slot)).expect("every slot has an owner")
    }

    /// Whether a node owns a slot, by its own account.
    #[track_caller]
    pub(crate) fn owns(&self, index: usize, slot: u16) -> bool {
        own_slots(&mut self.nodes[index].connect()).iter().any(|range| range.contains(&slot))
    }

    /// Whether a node owns the slot of a key, by its own account.
    #[track_caller]
    pub fn owns_key(&self, index: usize, key: &[u8]) -> bool {
        self.owns(index, self.slot_of(key))
    }

    /// Moves a slot with all its keys, as a cluster manager does, and waits until every node knows.
    #[track_caller]
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to);
        self.migrate_keys(slot, from, to);
        self.finish_move(slot, from, to);
    }

    /// First step of a move: both nodes know of it, and no key has moved.
    #[track_caller]
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let (source, target) = (self.id(from), self.id(to));
        self.set_slot(to, slot, &["IMPORTING", &source]);
        self.set_slot(from, slot, &["MIGRATING", &target]);
    }

    /// Second step of a move: moves the keys that exist now.
    #[track_caller]
    pub fn migrate_keys(&self, slot: u16, from: usize, to: usize) {
        self.try_migrate_keys(slot, from, to).expect("MIGRATE");
    }

    /// The same. The error is that of `MIGRATE`, for example if a key exists at both nodes.
    #[track_caller]
    pub fn try_migrate_keys(&self, slot: u16, from: usize, to: usize) -> RedisResult<()> {
        let mut source = self.nodes[from].connect();
        let target = self.nodes[to].addr();
        loop {
            let keys: Vec<Vec<u8>> = redis::cmd("CLUSTER")
                .arg("GETKEYSINSLOT")
                .arg(slot)
                .arg(100)
                .query(&mut source)
                .expect("CLUSTER GETKEYSINSLOT");
            if keys.is_empty() {
                return Ok(());
            }
            // NOKEY is allowed: a lock may expire between the two commands.
            let _: Value = redis::cmd("MIGRATE")
                .arg(target.ip().to_string())
                .arg(target.port())
                .arg("")
                .arg(0)
                .arg(5000)
                .arg("KEYS")
                .arg(keys)
                .query(&mut source)?;
        }
    }

    /// Last step of a move: the new node owns the slot.
    #[track_caller]
    pub fn finish_move(&self, slot: u16, from: usize, to: usize) {
        let target = self.id(to);
        // The new owner first, so that at every moment one node considers itself the owner.
        self.set_slot(to, slot, &["NODE", &target]);
        self.set_slot(from, slot, &["NODE", &target]);
        for node in (0..self.nodes.len()).filter(|node| ![from, to].contains(node)) {
            self.set_slot(node, slot, &["NODE", &target]);
        }
    }

    /// Cancels a move that has begun: the slot stays where it is.
    #[track_caller]
    pub fn give_up_move(&self, slot: u16, from: usize, to: usize) {
        [from, to].into_iter().for_each(|node| self.set_slot(node, slot, &["STABLE"]));
    }

    /// One node claims a slot. When the other one learns of it, it deletes the slot's keys.
    #[track_caller]
    pub fn take_slot(&self, slot: u16, from: usize, to: usize) {
        self.set_slot(to, slot, &["IMPORTING", &self.id(from)]);
        self.set_slot(to, slot, &["NODE", &self.id(to)]);
        until(SOON, "the other node knows", || !self.owns(from, slot));
    }

    /// Waits until every node reports that the cluster is ready.
    #[track_caller]
    pub fn wait_until_ok(&self) {
        let count = self.nodes.len().to_string();
        until(SOON, "every node reports cluster_state:ok", || {
            self.nodes.iter().all(|node| {
                let info: RedisResult<String> = redis::cmd("CLUSTER").arg("INFO").query(&mut node.connect());
                let info = info.expect("CLUSTER INFO");
                let says = |field: &str, value: &str| info.lines().any(|line| line == format!("{field}:{value}"));
                says("cluster_state", "ok") && says("cluster_known_nodes", &count) && says("cluster_size", &count)
            })
        });
    }

    /// A replica of one node, once it can be promoted.
    ///
    /// A replica asks for votes once, and again only after four node timeouts. If two nodes are not connected yet, the request
    /// or the vote is lost. A node that does not know the replica's primary yet refuses. So all nodes must be connected and
    /// agree.
    #[track_caller]
    pub fn replica_of(&self, index: usize) -> Server {
        self.replica_from(builder(), index, 0)
    }

    /// A replica of each node, with another node timeout, in ms.
    #[track_caller]
    pub fn replica_of_each(&self, node_timeout: &str) -> Vec<Server> {
        let replica = |index| self.replica_from(builder().arg("cluster-node-timeout", node_timeout), index, index);
        (0..self.nodes.len()).map(replica).collect()
    }

    /// A replica, beside this many others.
    #[track_caller]
    fn replica_from(&self, builder: Builder, index: usize, others: usize) -> Server {
        let (replica, primary) = (builder.start(), self.id(index));
        self.introduce(&replica, index);
        until(SOON, "the replica knows its primary", || {
            redis::cmd("CLUSTER").arg("REPLICATE").arg(&primary).exec(&mut replica.connect()).is_ok()
        });
        until(SOON, "the replica is in step", || {
            replica.info("replication", "master_link_status").as_deref() == Some("up")
        });
        let own = id(&replica);
        let as_it_is = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let [id, _, flags, its_primary, _, _, _, "connected", slots @ ..] = &words[..] else { return false };
            match *id == own {
                true => flags.contains("slave") && *its_primary == primary,
                false => flags.contains("slave") || !slots.is_empty(),
            }
        };
        until(SOON, "all nodes are connected, and know the replica's primary", || {
            self.nodes.iter().chain([&replica]).all(|node| {
                let seen = nodes_as_seen_by(&mut node.connect());
                seen.lines().count() == self.nodes.len() + others + 1 && seen.lines().all(as_it_is)
            })
        });
        replica
    }

    /// Promotes a replica by `CLUSTER FAILOVER`, as an operator does.
    #[track_caller]
    pub fn fail_over_to(&self, replica: &Server) {
        redis::cmd("CLUSTER").arg("FAILOVER").exec(&mut replica.connect()).expect("CLUSTER FAILOVER");
        until(SOON, "the replica is promoted", || replica.info("replication", "role").as_deref() == Some("master"));
    }

    fn assign_slots(&self) {
        let count = self.nodes.len();
        let bound = |index: usize| index * usize::from(SLOTS) / count;
        for (index, node) in self.nodes.iter().enumerate() {
            let mut connection = node.connect();
            redis::cmd("CLUSTER")
                .arg("ADDSLOTSRANGE")
                .arg(bound(index))
                .arg(bound(index + 1) - 1)
                .exec(&mut connection)
                .expect("CLUSTER ADDSLOTSRANGE");
            // Each node its own epoch, so that they need not agree on one first.
            redis::cmd("CLUSTER")
                .arg("SET-CONFIG-EPOCH")
                .arg(index + 1)
                .exec(&mut connection)
                .expect("CLUSTER SET-CONFIG-EPOCH");
        }
    }

    /// Makes a new node meet an existing one, until that knows it. On a busy machine one side may forget the meeting before the
    /// other replies, and it is not repeated.
    fn introduce(&self, newcomer: &Server, index: usize) {
        let (node, newcomers_id) = (&self.nodes[index], id(newcomer));
        let mut next = Instant::now();
        until(SOON, "the node knows the newcomer", || {
            if next <= Instant::now() {
                let address = node.addr();
                redis::cmd("CLUSTER")
                    .arg("MEET")
                    .arg(address.ip().to_string())
                    .arg(address.port())
                    .exec(&mut newcomer.connect())
                    .expect("CLUSTER MEET");
                next = Instant::now() + FORGOTTEN;
            }
            nodes_as_seen_by(&mut node.connect()).contains(&newcomers_id)
        });
    }

    pub(crate) fn id(&self, index: usize) -> String {
        id(&self.nodes[index])
    }

    fn set_slot(&self, node: usize, slot: u16, rest: &[&str]) {
        redis::cmd("CLUSTER")
            .arg("SETSLOT")
            .arg(slot)
            .arg(rest)
            .exec(&mut self.nodes[node].connect())
            .expect("CLUSTER SETSLOT");
    }
}

/// The settings of a node.
fn builder() -> Builder {
    Server::builder().arg("cluster-enabled", "yes").arg("cluster-node-timeout", "5000")
}

fn id(node: &Server) -> String {
    redis::cmd("CLUSTER").arg("MYID").query(&mut node.connect()).expect("CLUSTER MYID")
}

fn nodes_as_seen_by(node: &mut Connection) -> String {
    redis::cmd("CLUSTER").arg("NODES").query(node).expect("CLUSTER NODES")
}

/// The slots that a node considers its own.
fn own_slots(connection: &mut Connection) -> Vec<Range<u16>> {
    let nodes = nodes_as_seen_by(connection);
    let myself = nodes.lines().find(|line| line.contains("myself")).expect("a node knows itself");
    // Migrating slots are in brackets behind the others.
    myself.split(' ').skip(8).take_while(|slots| !slots.starts_with('[')).filter_map(range).collect()
}

fn range(slots: &str) -> Option<Range<u16>> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some(first.parse().ok()?..last.parse::<u16>().ok()? + 1)
}
