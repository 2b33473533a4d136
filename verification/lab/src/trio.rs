//! One master, two replicas, three Sentinels: three containers, a server and a Sentinel in each.

use std::thread::sleep;
use std::time::Duration;

use redis::{Connection, cmd};

use crate::blow::Blow;
use crate::clock::{now, until};
use crate::engine::{BadNetwork, Equipment, MODULE, Node, OLD_MODULE, Result, Site, Trouble, Weather};
use crate::history::{Fault, Micros};
use crate::options::Options;
use crate::session::{MASTER_NAME, Way, field};
use crate::trace::trace;

const SERVER: &str = "server";
const SENTINEL: &str = "sentinel";
const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// By when replicas tell how far they are: once a second.
const SOON: Duration = Duration::from_secs(5);
/// Sentinels that vote against each other try again after ten seconds only.
const TO_FAIL_OVER: Duration = Duration::from_secs(60);

/// How a trio is set up.
pub struct Setting {
    /// How long a server may be silent before a Sentinel takes it for down.
    pub down_after_ms: u32,
    /// What a master needs to take writes (`min-replicas-to-write`), heard of within the last three seconds.
    pub min_replicas: u32,
    /// Another server than the image's, and the build of the module that all begin with, if it is not the one under test.
    pub equipment: Equipment,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting { down_after_ms: 700, min_replicas: 0, equipment: Equipment::default() }
    }
}

/// Who makes the old master a replica when it is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// The Sentinels, which takes them some ten seconds in which it still takes itself for the master.
    BySentinels,
    /// The lab, after so many milliseconds: so that more failovers fit into the time.
    ByHand(u64),
}

/// Whether the last server that has all that was confirmed dies before another has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Third {
    /// It lives, and can take over.
    Lives,
    /// It dies: who takes over has nothing.
    Dies,
}

/// How an upgrade makes another server the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOver {
    /// `SENTINEL FAILOVER` alone. The Sentinels leave the old master a master for some ten seconds.
    Sentinels,
    /// The same, while writes are paused at the old master until it is a replica.
    Paused,
}

/// Two failovers, the second before all was in order, as they went.
pub struct Pair {
    /// From the first blow until all was in order again.
    pub fault: Fault,
    /// How many servers were killed.
    pub killed: u64,
    /// Whether a grant that all replicas had confirmed before the first blow was still there after the second.
    pub kept: bool,
}

/// Three nodes at work.
pub struct Trio {
    site: Site,
    master: usize,
    down_after_ms: u32,
    min_replicas: u32,
    modules: [&'static str; 3],
    order: Order,
}

/// All as it should be.
struct Order {
    /// When that was last seen.
    at: Micros,
    /// Which life of which server was the master's then.
    epoch: String,
}

/// One failover, as it went.
pub struct Failover {
    /// From the blow until all was in order again.
    pub fault: Fault,
    /// How long it took until the Sentinels had agreed on another master, which was one by then.
    pub took: Micros,
}

impl Trio {
    /// Starts three servers and their Sentinels, and waits until they know one another.
    pub fn start(setting: Setting, options: &Options) -> Result<Trio> {
        let Setting { down_after_ms, min_replicas, equipment } = setting;
        let modules = [if equipment.old_module.is_some() { OLD_MODULE } else { MODULE }; 3];
        let site = Site::new("trio", 3, equipment, options)?;
        let order = Order { at: now(), epoch: String::new() };
        let mut trio = Trio { site, master: 0, down_after_ms, min_replicas, modules, order };
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
        if node != self.master {
            let master = &self.node(self.master).ip;
            configuration += &format!("replicaof {master} {SERVER_PORT}\n");
        }
        self.node(node).start(SERVER, &configuration, &[])
    }

    fn start_sentinel(&self, node: usize) -> Result<()> {
        let master = &self.node(self.master).ip;
        let configuration = format!(
            "port {SENTINEL_PORT}\nsentinel monitor {MASTER_NAME} {master} {SERVER_PORT} 2\n\
             sentinel down-after-milliseconds {MASTER_NAME} {}\n\
             sentinel failover-timeout {MASTER_NAME} 5000\nsentinel parallel-syncs {MASTER_NAME} 2\n",
            self.down_after_ms
        );
        self.node(node).start(SENTINEL, &configuration, &["--sentinel"])
    }

    fn node(&self, index: usize) -> &Node {
        &self.site.nodes[index]
    }

    /// How clients find the master.
    pub fn way(&self) -> Way {
        let at = |node: &Node| format!("{}:{SENTINEL_PORT}", node.ip);
        Way::Sentinels(self.site.nodes.iter().map(at).collect())
    }

    /// A connection to the present master.
    pub fn master(&self) -> Result<Connection> {
        self.connect(self.master, SERVER_PORT)
    }

    /// Which node the present master is.
    pub fn master_node(&self) -> usize {
        self.master
    }

    fn connect(&self, node: usize, port: u16) -> Result<Connection> {
        self.node(node).connect(port)
    }

    /// The section `holdfast` of `INFO`, from every server.
    pub fn infos(&self) -> Result<Vec<String>> {
        (0..3).map(|node| self.info(node, "holdfast")).collect()
    }

    /// Which version of the module the present master has.
    pub fn version(&self) -> Result<String> {
        let info = self.info(self.master, "holdfast")?;
        Ok(field(&info, "holdfast_version").unwrap_or_default().to_owned())
    }

    fn info(&self, node: usize, section: &str) -> Result<String> {
        let mut connection = self.connect(node, SERVER_PORT)?;
        Ok(cmd("INFO").arg(section).query(&mut connection)?)
    }

    /// Deals the master a blow, lets the Sentinels make another one, and brings the old one back.
    pub fn fail_over(&mut self, blow: Blow, split: Duration, back: Return) -> Result<Failover> {
        let unrest = self.settle()?;
        let old = self.master;
        let struck = now();
        self.strike(blow)?;
        self.await_successor(old)?;
        let took = now() - struck;
        sleep(split);
        self.bring_back(old, blow, back)?;
        self.settle()?;
        let from = unrest.map_or(struck, |unrest| unrest.from);
        Ok(Failover { fault: Fault { from, until: now() }, took })
    }

    /// Deals the master a blow.
    pub fn strike(&self, blow: Blow) -> Result<()> {
        blow.strike(&self.site, self.master, SERVER)
    }

    /// Makes the network of all three a bad one, until what this returns is dropped.
    pub fn bad_network(&self, weather: Weather, seed: u64) -> Result<Vec<BadNetwork>> {
        self.site.bad_network(weather, seed)
    }

    /// The master is killed, and the one that takes over as well, before the old master, which comes back empty, has got
    /// anything of it. `third`: who has all of it is killed, too, before the old master is back.
    pub fn fail_over_twice(&mut self, key: &str, third: Third) -> Result<Pair> {
        let unrest = self.settle()?;
        let first = self.master;
        let mut connection = self.master()?;
        let token: i64 = cmd("LOCK.ACQUIRE")
            .arg(key)
            .arg("witness")
            .arg(&["LEASE", "300000", "REPLICAS", "2"])
            .query(&mut connection)?;
        let from = unrest.map_or_else(now, |unrest| unrest.from);
        self.node(first).signal(SERVER, "KILL")?;
        self.await_successor(first)?;
        let second = self.master;
        self.node(second).signal(SERVER, "KILL")?;
        let last = 3 - first - second;
        if third == Third::Dies {
            self.node(last).signal(SERVER, "KILL")?;
        }
        self.master = second;
        self.start_server(first)?;
        // A Sentinel that led the first failover does not end it while the one that it promoted is down.
        self.master = self.await_master(&[0, 1, 2], second)?;
        let kept: Option<String> = cmd("HGET").arg(key).arg("#fence").query(&mut self.master()?)?;
        for node in (0..3).filter(|&node| node != first && (node == second || third == Third::Dies)) {
            self.start_server(node)?;
        }
        self.begin_anew()?;
        let killed = if third == Third::Dies { 3 } else { 2 };
        Ok(Pair { fault: Fault { from, until: now() }, killed, kept: kept == Some(token.to_string()) })
    }

    /// New Sentinels, and the present master as theirs. After two failovers at once, the old ones may hold on to servers that the
    /// others have given up, under the same epoch, and then nobody convinces them: an operator has to.
    fn begin_anew(&mut self) -> Result<()> {
        for node in 0..3 {
            self.node(node).signal(SENTINEL, "KILL")?;
        }
        // One of them may have begun to make it a replica.
        cmd("REPLICAOF").arg(&["NO", "ONE"]).exec(&mut self.master()?)?;
        self.put_in_place()?;
        for node in 0..3 {
            self.start_sentinel(node)?;
        }
        self.settle().map(drop)
    }

    /// Gives every server the module under test, the replicas first, then the master, once another one is. Between two
    /// steps they work for so long, one with this build and one with that. Hands back when each step was; the third is the
    /// one at which another server became the master.
    pub fn upgrade(&mut self, mixed: Duration, hand_over: HandOver) -> Result<Vec<Fault>> {
        self.settle()?;
        let old = self.master;
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

    /// As docs/operations.md says.
    fn hand_over_paused(&mut self, old: usize) -> Result<()> {
        let mut connection = self.connect(old, SERVER_PORT)?;
        cmd("CLIENT").arg(&["PAUSE", "60000", "WRITE"]).exec(&mut connection)?;
        let written = self.offsets(old, "master_repl_offset:")?;
        if !until(SOON, || self.offsets(old, ",offset=").is_ok_and(|have| have.iter().min() >= written.first())) {
            return Err(Trouble(self.tell("the replicas don't catch up")));
        }
        self.hand_over(old)?;
        self.demote(old)?;
        cmd("CLIENT").arg("UNPAUSE").exec(&mut self.connect(old, SERVER_PORT)?)?;
        Ok(())
    }

    /// The numbers that stand behind this in what a server says of replication.
    fn offsets(&self, node: usize, label: &str) -> Result<Vec<u64>> {
        let info = self.info(node, "replication")?;
        let number = |text: &str| text.split([',', '\r']).next().and_then(|digits| digits.parse().ok());
        Ok(info.split(label).skip(1).filter_map(number).collect())
    }

    fn replace_module(&mut self, node: usize) -> Result<Fault> {
        let from = now();
        // It answers with nothing but the end of the connection.
        let _ = cmd("SHUTDOWN").arg("NOSAVE").exec(&mut self.connect(node, SERVER_PORT)?);
        self.modules[node] = MODULE;
        if !until(Duration::from_secs(10), || self.connect(node, SERVER_PORT).is_err()) {
            return Err(Trouble(self.tell("a server did not shut down")));
        }
        self.start_server(node)?;
        self.settle()?;
        Ok(Fault { from, until: now() })
    }

    /// Undoes a blow to a node that is no master any more, and sees to it that the node learns of this.
    pub fn bring_back(&mut self, node: usize, blow: Blow, back: Return) -> Result<()> {
        blow.heal(&self.site, node, SERVER, || self.start_server(node))?;
        if let Return::ByHand(millis) = back {
            sleep(Duration::from_millis(millis));
            self.await_successor(node)?;
            self.put_in_place()?;
        }
        Ok(())
    }

    /// Makes every node a replica of the master, where it is not yet.
    fn put_in_place(&self) -> Result<()> {
        for node in (0..3).filter(|&node| node != self.master) {
            let info = self.info(node, "replication")?;
            if field(&info, "master_host") != Some(&self.node(self.master).ip) {
                self.demote(node)?;
            }
        }
        Ok(())
    }

    /// What Sentinel does to an old master: makes it a replica and closes its clients' connections, in one step.
    fn demote(&self, node: usize) -> Result<()> {
        let mut connection = self.connect(node, SERVER_PORT)?;
        redis::pipe()
            .atomic()
            .cmd("REPLICAOF")
            .arg(&self.node(self.master).ip)
            .arg(SERVER_PORT)
            .cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal"])
            .exec(&mut connection)?;
        Ok(())
    }

    /// Waits until the Sentinels have made another one the master.
    pub fn await_successor(&mut self, old: usize) -> Result<()> {
        let watchers: Vec<usize> = (0..3).filter(|node| *node != old).collect();
        self.master = self.await_master(&watchers, old)?;
        Ok(())
    }

    /// Waits until two of these Sentinels name the same other master, and it is one.
    fn await_master(&self, sentinels: &[usize], old: usize) -> Result<usize> {
        let mut successor = None;
        until(TO_FAIL_OVER, || {
            let named: Vec<usize> = sentinels.iter().filter_map(|&sentinel| self.master_by(sentinel)).collect();
            let by_two = |node: &usize| named.iter().filter(|name| *name == node).count() >= 2;
            successor = (0..3).find(|node| *node != old && by_two(node) && self.is_master(*node));
            successor.is_some()
        });
        successor.ok_or_else(|| Trouble(self.tell("no other master in time")))
    }

    /// Which node these Sentinels all say is the master.
    fn agreed(&self, sentinels: &[usize]) -> Option<usize> {
        sentinels
            .iter()
            .map(|&sentinel| self.master_by(sentinel))
            .reduce(|a, b| if a == b { a } else { None })
            .flatten()
    }

    /// Which node a Sentinel says is the master.
    fn master_by(&self, sentinel: usize) -> Option<usize> {
        let mut connection = self.connect(sentinel, SENTINEL_PORT).ok()?;
        let (ip, _): (String, u16) =
            cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(MASTER_NAME).query(&mut connection).ok()?;
        self.site.nodes.iter().position(|node| node.ip == ip)
    }

    fn is_master(&self, node: usize) -> bool {
        self.info(node, "replication").is_ok_and(|info| field(&info, "role") == Some("master"))
    }

    /// Waits until every replica is in step with the master, and every Sentinel sees all.
    ///
    /// Two Sentinels sometimes start a failover each, so the successor of the first moment need not be the last; the
    /// second one may begin when all seemed to be in order. If it was not all the time since this was last called, that
    /// time is a fault as well, and is handed back.
    pub fn settle(&mut self) -> Result<Option<Fault>> {
        let mut waited = false;
        let settled = until(Duration::from_secs(45), || {
            self.master = self.agreed(&[0, 1, 2]).unwrap_or(self.master);
            let settled = self.is_settled();
            waited |= !settled;
            settled
        });
        if !settled {
            return Err(Trouble(self.tell("not in order within 45 s")));
        }
        let info = self.info(self.master, "replication")?;
        let order = Order { at: now(), epoch: field(&info, "master_replid").unwrap_or_default().to_owned() };
        let fault = Fault { from: self.order.at, until: order.at };
        let unrest = waited || order.epoch != self.order.epoch;
        self.order = order;
        if unrest {
            trace(|| format!("it was not in order all the time since {}", fault.from));
        }
        Ok(unrest.then_some(fault))
    }

    fn is_settled(&self) -> bool {
        self.in_step() && (0..3).all(|sentinel| self.sees_all(sentinel))
    }

    fn in_step(&self) -> bool {
        let Ok(info) = self.info(self.master, "replication") else {
            return false;
        };
        let online = info.matches("state=online").count();
        let up =
            |node| self.info(node, "replication").is_ok_and(|info| field(&info, "master_link_status") == Some("up"));
        field(&info, "role") == Some("master") && online == 2 && (0..3).filter(|&node| node != self.master).all(up)
    }

    fn sees_all(&self, sentinel: usize) -> bool {
        let Ok(mut connection) = self.connect(sentinel, SENTINEL_PORT) else {
            return false;
        };
        let replicas: Vec<std::collections::HashMap<String, String>> =
            cmd("SENTINEL").arg("REPLICAS").arg(MASTER_NAME).query(&mut connection).unwrap_or_default();
        self.master_by(sentinel) == Some(self.master)
            && replicas.len() == 2
            && replicas.iter().all(|replica| replica.get("flags").map(String::as_str) == Some("slave"))
    }

    /// What went wrong, with the last lines of all logs.
    fn tell(&self, what: &str) -> String {
        let mut text = what.to_owned();
        for node in &self.site.nodes {
            text += &node.last_words(SERVER);
            text += &node.last_words(SENTINEL);
        }
        text
    }

    /// Lines in the servers' logs that tell of a crash or a failed assertion.
    pub fn crashes(&self) -> Vec<String> {
        self.site.nodes.iter().flat_map(|node| node.crashes(SERVER)).collect()
    }
}
