//! One primary, two replicas, three Sentinels: three containers, a server and a Sentinel in each.

use std::thread::sleep;
use std::time::Duration;

use redis::{Connection, cmd};

use crate::clock::{now, until};
use crate::engine::{BadNetwork, Equipment, LabError, MODULE, NetworkFaults, Node, OLD_MODULE, Result, Site};
use crate::history::{Fault, Micros};
use crate::options::Options;
use crate::primary_fault::PrimaryFault;
use crate::session::{Discovery, MASTER_NAME, field};
use crate::trace::trace;

const SERVER: &str = "server";
const SENTINEL: &str = "sentinel";
const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Replicas report their offset once a second.
const SOON: Duration = Duration::from_secs(5);
/// Sentinels that vote against each other retry after ten seconds.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a trio.
pub struct Setting {
    /// After how long without a reply a Sentinel considers a server down.
    pub down_after_ms: u32,
    /// The replicas that a primary needs for writes (`min-replicas-to-write`), heard from within the last three seconds.
    pub min_replicas: u32,
    /// Another server than the image's, and the initial build of the module, if it is not the one under test.
    pub equipment: Equipment,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting { down_after_ms: 700, min_replicas: 0, equipment: Equipment::default() }
    }
}

/// What makes the old primary a replica when it is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demotion {
    /// The Sentinels. They take some ten seconds, in which it considers itself the primary.
    BySentinels,
    /// The lab, after this many milliseconds, so that more failovers fit into the time.
    ByHand(u64),
}

/// Whether the last server with all confirmed grants fails before another has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Third {
    /// It stays up, and can be promoted.
    Lives,
    /// It is killed: the promoted server has nothing.
    Dies,
}

/// How an upgrade promotes another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOver {
    /// `SENTINEL FAILOVER` alone. The Sentinels demote the old primary some ten seconds later.
    Sentinels,
    /// The same, while writes are paused at the old primary until it is a replica.
    Paused,
}

/// The results of two failovers, the second before all was healthy.
pub struct Pair {
    /// From the first fault until all was healthy again.
    pub fault: Fault,
    /// How many servers were killed.
    pub killed: u64,
    /// Whether a grant that all replicas had confirmed before the first fault existed after the second.
    pub kept: bool,
}

/// The three nodes.
pub struct Trio {
    site: Site,
    primary: usize,
    down_after_ms: u32,
    min_replicas: u32,
    modules: [&'static str; 3],
    last_settled: LastSettled,
}

/// The last healthy state.
struct LastSettled {
    /// When it was seen.
    at: Micros,
    /// The primary's epoch then.
    epoch: String,
}

/// The results of one failover.
pub struct Failover {
    /// From the fault until all was healthy again.
    pub fault: Fault,
    /// How long it took until the Sentinels had agreed on another primary, and it was one.
    pub took: Micros,
}

impl Trio {
    /// Starts three servers and their Sentinels, and waits until they know each other.
    pub fn start(setting: Setting, options: &Options) -> Result<Trio> {
        let Setting { down_after_ms, min_replicas, equipment } = setting;
        let modules = [if equipment.old_module.is_some() { OLD_MODULE } else { MODULE }; 3];
        let site = Site::new("trio", 3, equipment, options)?;
        let last_settled = LastSettled { at: now(), epoch: String::new() };
        let mut trio = Trio { site, primary: 0, down_after_ms, min_replicas, modules, last_settled };
        for node in 0..3 {
            trio.start_server(node)?;
        }
        for node in 0..3 {
            trio.start_sentinel(node)?;
        }
        trio.settle()?;
        Ok(trio)
    }

    fn start_server(&self, node: usize) -> Result<()> {
        let mut configuration = format!(
            "port {SERVER_PORT}\nsave \"\"\nappendonly no\nloadmodule {}\nholdfast.default-lease 4000\n\
             repl-diskless-sync yes\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n\
             min-replicas-to-write {}\nmin-replicas-max-lag 3\n",
            self.modules[node], self.min_replicas
        );
        if node != self.primary {
            let primary = &self.node(self.primary).ip;
            configuration += &format!("replicaof {primary} {SERVER_PORT}\n");
        }
        self.node(node).start(SERVER, &configuration, &[])
    }

    fn start_sentinel(&self, node: usize) -> Result<()> {
        let primary = &self.node(self.primary).ip;
        let configuration = format!(
            "port {SENTINEL_PORT}\nsentinel monitor {MASTER_NAME} {primary} {SERVER_PORT} 2\n\
             sentinel down-after-milliseconds {MASTER_NAME} {}\n\
             sentinel failover-timeout {MASTER_NAME} 5000\nsentinel parallel-syncs {MASTER_NAME} 2\n",
            self.down_after_ms
        );
        self.node(node).start(SENTINEL, &configuration, &["--sentinel"])
    }

    fn node(&self, index: usize) -> &Node {
        &self.site.nodes[index]
    }

    /// How clients find the primary.
    pub fn discovery(&self) -> Discovery {
        let at = |node: &Node| format!("{}:{SENTINEL_PORT}", node.ip);
        Discovery::Sentinels(self.site.nodes.iter().map(at).collect())
    }

    /// A connection to the current primary.
    pub fn primary(&self) -> Result<Connection> {
        self.connect(self.primary, SERVER_PORT)
    }

    /// The node of the current primary.
    pub fn primary_node(&self) -> usize {
        self.primary
    }

    fn connect(&self, node: usize, port: u16) -> Result<Connection> {
        self.node(node).connect(port)
    }

    /// The section `holdfast` of every server's `INFO`.
    pub fn infos(&self) -> Result<Vec<String>> {
        (0..3).map(|node| self.info(node, "holdfast")).collect()
    }

    /// The module's version at the current primary.
    pub fn version(&self) -> Result<String> {
        let info = self.info(self.primary, "holdfast")?;
        Ok(field(&info, "holdfast_version").unwrap_or_default().to_owned())
    }

    fn info(&self, node: usize, section: &str) -> Result<String> {
        let mut connection = self.connect(node, SERVER_PORT)?;
        Ok(cmd("INFO").arg(section).query(&mut connection)?)
    }

    /// Injects a fault into the primary, waits until the Sentinels have promoted another one, and heals the fault.
    pub fn fail_over(&mut self, primary_fault: PrimaryFault, split: Duration, back: Demotion) -> Result<Failover> {
        let unhealthy_period = self.settle()?;
        let old = self.primary;
        let injected = now();
        self.inject(primary_fault)?;
        self.await_successor(old)?;
        let took = now() - injected;
        sleep(split);
        self.bring_back(old, primary_fault, back)?;
        self.settle()?;
        let from = unhealthy_period.map_or(injected, |period| period.from);
        Ok(Failover { fault: Fault { from, until: now() }, took })
    }

    /// Injects a fault into the primary.
    pub fn inject(&self, primary_fault: PrimaryFault) -> Result<()> {
        primary_fault.inject(&self.site, self.primary, SERVER)
    }

    /// Makes the network of all three nodes unreliable until the result is dropped.
    pub fn bad_network(&self, network_faults: NetworkFaults, seed: u64) -> Result<Vec<BadNetwork>> {
        self.site.bad_network(network_faults, seed)
    }

    /// Kills the primary, and also the promoted one before the old primary, which restarts empty, has any of its data. `third`: whether
    /// the server with all data is killed as well, before the old primary is back.
    pub fn fail_over_twice(&mut self, key: &str, third: Third) -> Result<Pair> {
        let unhealthy_period = self.settle()?;
        let first = self.primary;
        let mut connection = self.primary()?;
        let token: i64 = cmd("LOCK.ACQUIRE")
            .arg(key)
            .arg("witness")
            .arg(&["LEASE", "300000", "REPLICAS", "2"])
            .query(&mut connection)?;
        let from = unhealthy_period.map_or_else(now, |period| period.from);
        self.node(first).signal(SERVER, "KILL")?;
        self.await_successor(first)?;
        let second = self.primary;
        self.node(second).signal(SERVER, "KILL")?;
        let last = 3 - first - second;
        if third == Third::Dies {
            self.node(last).signal(SERVER, "KILL")?;
        }
        self.primary = second;
        self.start_server(first)?;
        // The Sentinel that led the first failover does not end it while the promoted server is down.
        self.primary = self.await_primary(&[0, 1, 2], second)?;
        let kept: Option<String> = cmd("HGET").arg(key).arg("#fence").query(&mut self.primary()?)?;
        for node in (0..3).filter(|&node| node != first && (node == second || third == Third::Dies)) {
            self.start_server(node)?;
        }
        self.restart_sentinels()?;
        let killed = if third == Third::Dies { 3 } else { 2 };
        Ok(Pair { fault: Fault { from, until: now() }, killed, kept: kept == Some(token.to_string()) })
    }

    /// Starts new Sentinels with the current primary. After two failovers at once, the old ones may disagree on the primary under the same
    /// epoch, which only an operator can resolve.
    fn restart_sentinels(&mut self) -> Result<()> {
        for node in 0..3 {
            self.node(node).signal(SENTINEL, "KILL")?;
        }
        // One of them may have begun to demote it.
        cmd("REPLICAOF").arg(&["NO", "ONE"]).exec(&mut self.primary()?)?;
        self.attach_replicas()?;
        for node in 0..3 {
            self.start_sentinel(node)?;
        }
        self.settle().map(drop)
    }

    /// Upgrades the module on every server, first on the replicas, then on the old primary. Between two steps, both builds run for the
    /// time `mixed`. Returns when each step was. The third step is the failover.
    pub fn upgrade(&mut self, mixed: Duration, hand_over: HandOver) -> Result<Vec<Fault>> {
        self.settle()?;
        let old = self.primary;
        let mut faults = Vec::new();
        for node in (0..3).filter(|&node| node != old) {
            faults.push(self.replace_module(node)?);
            sleep(mixed);
        }
        let from = now();
        match hand_over {
            HandOver::Sentinels => self.hand_over(old)?,
            HandOver::Paused => self.hand_over_paused(old)?,
        }
        self.settle()?;
        faults.push(Fault { from, until: now() });
        sleep(mixed);
        faults.push(self.replace_module(old)?);
        Ok(faults)
    }

    fn hand_over(&mut self, old: usize) -> Result<()> {
        cmd("SENTINEL").arg("FAILOVER").arg(MASTER_NAME).exec(&mut self.connect(old, SENTINEL_PORT)?)?;
        self.await_successor(old)
    }

    /// As in docs/operations.md.
    fn hand_over_paused(&mut self, old: usize) -> Result<()> {
        let mut connection = self.connect(old, SERVER_PORT)?;
        cmd("CLIENT").arg(&["PAUSE", "60000", "WRITE"]).exec(&mut connection)?;
        let written = self.offsets(old, "master_repl_offset:")?;
        if !until(SOON, || self.offsets(old, ",offset=").is_ok_and(|have| have.iter().min() >= written.first())) {
            return Err(LabError(self.failure_with_logs("the replicas don't catch up")));
        }
        self.hand_over(old)?;
        self.demote(old)?;
        cmd("CLIENT").arg("UNPAUSE").exec(&mut self.connect(old, SERVER_PORT)?)?;
        Ok(())
    }

    /// The numbers with this label in the section `replication`.
    fn offsets(&self, node: usize, label: &str) -> Result<Vec<u64>> {
        let info = self.info(node, "replication")?;
        let number = |text: &str| text.split([',', '\r']).next().and_then(|digits| digits.parse().ok());
        Ok(info.split(label).skip(1).filter_map(number).collect())
    }

    fn replace_module(&mut self, node: usize) -> Result<Fault> {
        let from = now();
        // The connection is closed instead of a reply.
        let _ = cmd("SHUTDOWN").arg("NOSAVE").exec(&mut self.connect(node, SERVER_PORT)?);
        self.modules[node] = MODULE;
        if !until(Duration::from_secs(10), || self.connect(node, SERVER_PORT).is_err()) {
            return Err(LabError(self.failure_with_logs("a server did not shut down")));
        }
        self.start_server(node)?;
        self.settle()?;
        Ok(Fault { from, until: now() })
    }

    /// Heals the fault of a node that is not the primary any more, and makes sure that the node learns of it.
    pub fn bring_back(&mut self, node: usize, primary_fault: PrimaryFault, back: Demotion) -> Result<()> {
        primary_fault.heal(&self.site, node, SERVER, || self.start_server(node))?;
        if let Demotion::ByHand(millis) = back {
            sleep(Duration::from_millis(millis));
            self.await_successor(node)?;
            self.attach_replicas()?;
        }
        Ok(())
    }

    /// Makes every node a replica of the primary, if it is not yet.
    fn attach_replicas(&self) -> Result<()> {
        for node in (0..3).filter(|&node| node != self.primary) {
            let info = self.info(node, "replication")?;
            if field(&info, "master_host") != Some(&self.node(self.primary).ip) {
                self.demote(node)?;
            }
        }
        Ok(())
    }

    /// Demotes like Sentinel: makes the server a replica and closes its clients' connections, in one transaction.
    fn demote(&self, node: usize) -> Result<()> {
        let mut connection = self.connect(node, SERVER_PORT)?;
        redis::pipe()
            .atomic()
            .cmd("REPLICAOF")
            .arg(&self.node(self.primary).ip)
            .arg(SERVER_PORT)
            .cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal"])
            .exec(&mut connection)?;
        Ok(())
    }

    /// Waits until the Sentinels have promoted another primary.
    pub fn await_successor(&mut self, old: usize) -> Result<()> {
        let watchers: Vec<usize> = (0..3).filter(|node| *node != old).collect();
        self.primary = self.await_primary(&watchers, old)?;
        Ok(())
    }

    /// Waits until two of these Sentinels name the same other primary, and it is one.
    fn await_primary(&self, sentinels: &[usize], old: usize) -> Result<usize> {
        let mut successor = None;
        until(FAILOVER_TIMEOUT, || {
            let named: Vec<usize> = sentinels.iter().filter_map(|&sentinel| self.primary_by(sentinel)).collect();
            let by_two = |node: &usize| named.iter().filter(|name| *name == node).count() >= 2;
            successor = (0..3).find(|node| *node != old && by_two(node) && self.is_primary(*node));
            successor.is_some()
        });
        successor.ok_or_else(|| LabError(self.failure_with_logs("no other primary in time")))
    }

    /// The node that all of these Sentinels name as the primary.
    fn agreed(&self, sentinels: &[usize]) -> Option<usize> {
        sentinels
            .iter()
            .map(|&sentinel| self.primary_by(sentinel))
            .reduce(|a, b| if a == b { a } else { None })
            .flatten()
    }

    /// The node that a Sentinel names as the primary.
    fn primary_by(&self, sentinel: usize) -> Option<usize> {
        let mut connection = self.connect(sentinel, SENTINEL_PORT).ok()?;
        let (ip, _): (String, u16) =
            cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER_NAME).query(&mut connection).ok()?;
        self.site.nodes.iter().position(|node| node.ip == ip)
    }

    fn is_primary(&self, node: usize) -> bool {
        self.info(node, "replication").is_ok_and(|info| field(&info, "role") == Some("master"))
    }

    /// Waits until every replica is in step with the primary, and every Sentinel sees all servers.
    ///
    /// Sometimes two Sentinels start a failover each, and the second one may begin when all seemed healthy, so the first successor
    /// need not be the last. If not all was healthy since the last call, that period is returned as a fault.
    pub fn settle(&mut self) -> Result<Option<Fault>> {
        let mut waited = false;
        let settled = until(Duration::from_secs(45), || {
            self.primary = self.agreed(&[0, 1, 2]).unwrap_or(self.primary);
            let settled = self.is_settled();
            waited |= !settled;
            settled
        });
        if !settled {
            return Err(LabError(self.failure_with_logs("not healthy within 45 s")));
        }
        let info = self.info(self.primary, "replication")?;
        let last_settled =
            LastSettled { at: now(), epoch: field(&info, "master_replid").unwrap_or_default().to_owned() };
        let fault = Fault { from: self.last_settled.at, until: last_settled.at };
        let was_unhealthy = waited || last_settled.epoch != self.last_settled.epoch;
        self.last_settled = last_settled;
        if was_unhealthy {
            trace(|| format!("not always healthy since {}", fault.from));
        }
        Ok(was_unhealthy.then_some(fault))
    }

    fn is_settled(&self) -> bool {
        self.in_step() && (0..3).all(|sentinel| self.sees_all(sentinel))
    }

    fn in_step(&self) -> bool {
        let Ok(info) = self.info(self.primary, "replication") else {
            return false;
        };
        let online = info.matches("state=online").count();
        let up =
            |node| self.info(node, "replication").is_ok_and(|info| field(&info, "master_link_status") == Some("up"));
        field(&info, "role") == Some("master") && online == 2 && (0..3).filter(|&node| node != self.primary).all(up)
    }

    fn sees_all(&self, sentinel: usize) -> bool {
        let Ok(mut connection) = self.connect(sentinel, SENTINEL_PORT) else {
            return false;
        };
        let replicas: Vec<std::collections::HashMap<String, String>> =
            cmd("SENTINEL").arg("REPLICAS").arg(MASTER_NAME).query(&mut connection).unwrap_or_default();
        self.primary_by(sentinel) == Some(self.primary)
            && replicas.len() == 2
            && replicas.iter().all(|replica| replica.get("flags").map(String::as_str) == Some("slave"))
    }

    /// The error, with the last lines of all logs.
    fn failure_with_logs(&self, what: &str) -> String {
        let mut text = what.to_owned();
        for node in &self.site.nodes {
            text += &node.last_words(SERVER);
            text += &node.last_words(SENTINEL);
        }
        text
    }

    /// Lines in the servers' logs that report a crash or a failed assertion.
    pub fn crashes(&self) -> Vec<String> {
        self.site.nodes.iter().flat_map(|node| node.crashes(SERVER)).collect()
    }
}
