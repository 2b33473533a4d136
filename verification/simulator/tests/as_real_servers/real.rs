//! Plays a script on a real server.
//!
//! The lines of one poll arrive together, because the server is paused (`SIGSTOP`) while they are sent. One processor
//! sends them one after the other and delivers them in this order: sockets become ready in the order in which bytes
//! arrived on them.

use crate::observed::Observed;
use crate::replica::{END, Replica};
use simulator::resp::Reply;
use simulator::script::{Line, Name, SlotChange, bytes, sessions};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use support::{Builder, Clock, Cluster, Feature, Server, encode, stay_on_this_processor, until};

/// How long a reply may take that the simulated server gave immediately.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where a script is played: on a server, or, if slots move in it, on one of two nodes of a cluster.
pub enum Target {
    Server(Box<Server>),
    /// A server whose clock steps.
    Stepped(Box<Server>, Clock),
    Cluster {
        cluster: Cluster,
        node: usize,
    },
}

impl Target {
    /// The target for this script, if it is available here. All keys of a script with slots are in one slot.
    pub fn of(script: &[Line]) -> Option<Self> {
        if script.iter().any(|line| matches!(line, Line::Clock(_))) {
            let (builder, clock) = Clock::of(settings(Server::builder()))?;
            return Some(Self::Stepped(Box::new(builder.start()), clock));
        }
        let moves = script.iter().find_map(|line| match line {
            Line::Slot(key, _) => Some(key),
            _ => None,
        });
        let Some(key) = moves else { return Some(Self::Server(Box::new(settings(Server::builder()).start()))) };
        let cluster = Cluster::start_with(2, settings);
        let node = cluster.owner_of(cluster.slot_of(key.as_bytes()));
        Some(Self::Cluster { cluster, node })
    }

    /// The server on which the script is played.
    pub fn server(&self) -> &Server {
        match self {
            Self::Server(server) | Self::Stepped(server, _) => server,
            Self::Cluster { cluster, node } => cluster.node(*node),
        }
    }

    /// Changes where the slot of this key is served, as a cluster manager does.
    fn slot(&self, key: &str, moves: SlotChange) {
        let Self::Cluster { cluster, node } = self else { panic!("no cluster") };
        let (slot, here, there) = (cluster.slot_of(key.as_bytes()), *node, 1 - *node);
        match moves {
            SlotChange::Migrates => cluster.begin_move(slot, here, there),
            // (A node that does not import a slot takes it without a newer epoch, and may lose it again to the next
            // message of the other node.)
            SlotChange::Moves => {
                cluster.begin_move(slot, here, there);
                cluster.finish_move(slot, here, there);
            }
            SlotChange::Arrives | SlotChange::Unowned => {
                panic!("not played on real servers: see tests/cluster_down.rs")
            }
            SlotChange::Goes if self.server().can(Feature::AtomicSlotMigration) => {
                cluster.move_whole_slot(slot, here, there)
            }
            SlotChange::Goes => cluster.take_slot(slot, here, there),
            SlotChange::Comes if cluster.owner_of(slot) == here => cluster.give_up_move(slot, here, there),
            SlotChange::Comes => {
                Connection::open(cluster.node(there)).ask(&[b"FLUSHALL"]);
                cluster.begin_move(slot, there, here);
                cluster.finish_move(slot, there, here);
            }
        }
    }
}

fn settings(builder: Builder) -> Builder {
    builder
        .arg("notify-keyspace-events", "KEA")
        // Replicas that never confirm stay connected, however slow the machine is.
        .arg("repl-timeout", "3600")
        .arg("min-replicas-max-lag", "3600")
}

/// Plays a script. `expected`: the observations on a simulated server.
pub fn play(target: &Target, lines: &[Line], expected: &Observed) -> Observed {
    let server = target.server();
    let (begins, lines) = match lines {
        [Line::Replicas(delays), rest @ ..] => (delays.as_slice(), rest),
        _ => (&[][..], lines),
    };
    let mut control = Connection::open(server);
    control.begin_session();
    let mut player = Player {
        target,
        server,
        control,
        sessions: sessions(lines),
        connections: BTreeMap::new(),
        open: BTreeMap::new(),
        poll: Vec::new(),
        replicas: follow(server, begins),
        stepped: 0,
        observed: Observed { began: unix_millis(), ..Observed::default() },
    };
    stay_on_this_processor();
    lines.iter().for_each(|line| player.line(line));
    player.collect_all(expected);
    player.control.ask(&[b"CONFIG", b"SET", b"min-replicas-to-write", b"0"]);
    player.end_of_stream(&[b"SET", END, b"x"]);
    player.observed
}

/// New replicas of a server, with their delays.
fn follow(server: &Server, delays: &[Option<u64>]) -> Vec<Replica> {
    let replicas: Vec<Replica> = delays.iter().map(|delay| Replica::follow(server.addr(), *delay)).collect();
    if !replicas.is_empty() {
        server.wait_replicas_online(replicas.len());
    }
    replicas
}

/// A step that is taken while the server is paused.
enum Step {
    Send(u64, Vec<u8>),
    Close(u64),
}

struct Player<'s> {
    target: &'s Target,
    server: &'s Server,
    control: Connection,
    /// The clients whose connections are sessions from the start.
    sessions: BTreeSet<Name>,
    connections: BTreeMap<u64, Connection>,
    open: BTreeMap<Name, u64>,
    poll: Vec<Step>,
    replicas: Vec<Replica>,
    /// The offset of the server's clock to the machine's in the next poll, in ms.
    stepped: i64,
    observed: Observed,
}

impl Player<'_> {
    fn line(&mut self, line: &Line) {
        match line {
            Line::Request(name, words) => {
                let words: Vec<Vec<u8>> = words.iter().map(|word| self.word(word)).collect();
                let id = self.connection(*name).id;
                self.poll.push(Step::Send(id, encode([words])));
            }
            Line::End(name) => {
                self.poll.extend(self.open.remove(name).map(Step::Close));
            }
            Line::Pass(ms) => self.pass(*ms),
            Line::Replicas(delays) => {
                self.end_of_stream(&[b"PUBLISH", END, b"x"]);
                self.replicas = follow(self.server, delays);
            }
            Line::Vanish(name) => self.connection(*name).has_vanished = true,
            Line::StopReading(name) => self.stop_reading(*name),
            Line::ResumeReading(name) => self.connection(*name).is_not_reading = false,
            Line::Misconf(state) => self.misconf(*state),
            Line::Cluster(_) => panic!("not played on real servers: see tests/cluster_down.rs"),
            Line::Slot(key, moves) => self.target.slot(key, *moves),
            Line::Clock(ms) => self.stepped += ms,
            Line::Good(count) => self.good(*count),
            Line::Scenario(_) | Line::EndScenario | Line::Expect(..) => {}
        }
    }

    /// Ends the stream of all replicas with this command, and disconnects them. All have received the same.
    fn end_of_stream(&mut self, command: &[&[u8]]) {
        if !self.replicas.is_empty() {
            self.control.ask(command);
        }
        let streams = std::mem::take(&mut self.replicas).into_iter().map(Replica::stream);
        self.observed.stream.extend(streams.last().unwrap_or_default());
    }

    /// A client stops reading. If it waits for nothing, it gets a large reply first, so that the server can't send any
    /// later reply either.
    fn stop_reading(&mut self, name: Name) {
        let connection = self.connection(name);
        connection.is_not_reading = true;
        if connection.sent > connection.received_replies {
            return;
        }
        connection.skips += 1;
        connection.send(&encode([[b"EVAL_RO".as_slice(), b"return string.rep('x', 16777216)", b"0"]]));
        let (id, control) = (connection.id.to_string(), &mut self.control);
        until(PATIENCE, "the server has unsent output", || {
            let shown = control.ask(&[b"CLIENT", b"LIST", b"ID", id.as_bytes()]);
            !String::from_utf8_lossy(shown.bytes()).contains(" omem=0 ")
        });
    }

    /// A snapshot fails, because a directory has its name; or the next one succeeds.
    fn misconf(&mut self, state: bool) {
        let snapshot = self.server.dir().join("dump.rdb");
        // A copy for a replica may have this name.
        let _ = std::fs::remove_file(&snapshot);
        let done = if state { std::fs::create_dir(snapshot) } else { std::fs::remove_dir(snapshot) };
        done.expect("the server's directory is writable");
        self.control.ask(&[b"CONFIG", b"SET", b"save", b"3600 1000000"]);
        self.control.ask(&[b"BGSAVE"]);
        until(PATIENCE, "the snapshot has ended", || {
            let status = if state { "err" } else { "ok" };
            self.server.info("persistence", "rdb_last_bgsave_status").as_deref() == Some(status)
        });
    }

    /// Only this many replicas send heartbeats to the server.
    fn good(&mut self, count: usize) {
        self.replicas.iter().enumerate().for_each(|(position, replica)| replica.set_good(position < count));
        self.control.ask(&[b"CONFIG", b"SET", b"min-replicas-max-lag", b"2"]);
        until(PATIENCE, "the server counts these replicas", || {
            self.server.info("replication", "min_slaves_good_slaves") == Some(count.to_string())
        });
    }

    fn word(&mut self, word: &str) -> Vec<u8> {
        let mut name = word.chars();
        match (name.next(), name.next(), name.next()) {
            (Some('$'), Some(name), None) => self.connection(name).identity.clone(),
            (Some('#'), Some(name), None) => self.connection(name).id.to_string().into_bytes(),
            (Some('@'), Some(name), None) => self.connection(name).token.to_string().into_bytes(),
            _ => bytes(word),
        }
    }

    /// The connection of a client: a new one if it has none, or if the server has closed it.
    fn connection(&mut self, name: Name) -> &mut Connection {
        let known = self.open.get(&name).copied().filter(|id| self.connections.get(id).is_some_and(|it| !it.is_closed));
        let id = known.unwrap_or_else(|| {
            let mut connection = Connection::open(self.server);
            let id = connection.id;
            if self.sessions.contains(&name) {
                connection.begin_session();
            } else {
                // The identity that it would have as a session.
                let run = self.control.identity.split(|byte| *byte == b':').next().unwrap_or_default();
                connection.identity = [run, b":", id.to_string().as_bytes()].concat();
            }
            self.observed.ids.insert(id, name);
            self.open.insert(name, id);
            self.connections.insert(id, connection);
            id
        });
        self.connections.get_mut(&id).expect("it was just inserted")
    }

    /// One poll with what was gathered; then this time passes.
    fn pass(&mut self, ms: u64) {
        let poll = std::mem::take(&mut self.poll);
        // The connection with the latest input is the first that the server processes: that must be this one.
        self.iteration();
        self.server.stop();
        if let Target::Stepped(_, clock) = self.target {
            clock.set(self.stepped);
        }
        let mut last = None;
        let count = poll.len();
        for (position, step) in poll.into_iter().enumerate() {
            let (Step::Send(id, _) | Step::Close(id)) = step;
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            let address = connection.address();
            if position + 1 == count {
                last = Some((address, self.server.socket(address)));
            }
            match step {
                Step::Send(_, text) => connection.send(&text),
                // Further bytes are not read. (A process that another test is starting has a copy of the socket until it
                // executes its program: closing alone would end the connection only then.)
                Step::Close(_) => {
                    let _ = connection.stream.shutdown(Shutdown::Both);
                    self.connections.remove(&id);
                }
            }
        }
        if let Some((address, before)) = last.filter(|(_, before)| before.is_some()) {
            until(PATIENCE, "all bytes have arrived", || self.server.socket(address) != before);
        }
        self.server.cont();
        // An iteration may cause another one.
        self.iteration();
        self.iteration();
        thread::sleep(Duration::from_millis(ms));
        self.iteration();
        self.collect();
    }

    /// Waits for an event-loop iteration.
    fn iteration(&mut self) {
        self.control.ask(&[b"PING"]);
    }

    fn collect(&mut self) {
        for (name, id) in &self.open {
            let replies = self.connections.get_mut(id).map(Connection::take).unwrap_or_default();
            self.observed.replies.entry(*name).or_default().extend(replies);
        }
    }

    /// Waits until every client has received as many replies as on the simulated server, up to a time limit.
    fn collect_all(&mut self, expected: &Observed) {
        let end = Instant::now() + PATIENCE;
        let count = |observed: &Observed, name: &Name| observed.replies.get(name).map_or(0, Vec::len);
        while expected.replies.keys().any(|name| count(&self.observed, name) < count(expected, name))
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(1));
            self.collect();
        }
        self.iteration();
        self.collect();
    }
}

/// A connection to a real server, which does not block except in `ask`.
struct Connection {
    stream: TcpStream,
    id: u64,
    identity: Vec<u8>,
    received: Vec<u8>,
    is_closed: bool,
    token: u64,
    /// Its client has vanished, or does not read at the moment.
    has_vanished: bool,
    is_not_reading: bool,
    /// How many requests were sent, how many replies were read, and how many of the next replies are skipped.
    sent: usize,
    received_replies: usize,
    skips: usize,
}

impl Connection {
    fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(server.addr()).expect("connects");
        stream.set_nodelay(true).expect("an option");
        stream.set_nonblocking(true).expect("an option");
        let (identity, received) = (Vec::new(), Vec::new());
        let mut connection = Self {
            stream,
            id: 0,
            identity,
            received,
            is_closed: false,
            token: 0,
            has_vanished: false,
            is_not_reading: false,
            sent: 0,
            received_replies: 0,
            skips: 0,
        };
        connection.id = connection.ask(&[b"CLIENT", b"ID"]).number().expect("an id");
        connection
    }

    /// Makes it a session.
    fn begin_session(&mut self) {
        let reply = self.ask(&[b"LOCK.SESSION"]);
        let Reply::Array(fields) = &reply else { panic!("no session: {reply:?}") };
        self.identity = fields.get(1).expect("its id").bytes().to_vec();
    }

    fn address(&self) -> SocketAddr {
        self.stream.local_addr().expect("it is connected")
    }

    fn send(&mut self, text: &[u8]) {
        self.sent += 1;
        // The server may have closed the connection meanwhile.
        let _ = self.stream.write_all(text);
    }

    fn receive(&mut self) {
        let mut buffer = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.is_closed = true,
                Ok(length) => {
                    self.received.extend_from_slice(&buffer[..length]);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => self.is_closed |= error.kind() != ErrorKind::WouldBlock,
            }
            return;
        }
    }

    fn take(&mut self) -> Vec<Reply> {
        if self.is_not_reading || self.has_vanished {
            return Vec::new();
        }
        self.receive();
        let mut replies: Vec<Reply> = std::iter::from_fn(|| Reply::take(&mut self.received)).collect();
        self.received_replies += replies.len();
        let skipped = replies.len().min(self.skips);
        self.skips -= skipped;
        replies.drain(..skipped);
        self.token = replies.iter().rev().find_map(Reply::last_token).unwrap_or(self.token);
        replies
    }

    /// Sends a request and waits for its reply.
    fn ask(&mut self, words: &[&[u8]]) -> Reply {
        self.send(&encode([words]));
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && !self.is_closed {
            if let Some(reply) = self.take().pop() {
                return reply;
            }
            thread::sleep(Duration::from_micros(100));
        }
        panic!("no reply to {}", words.join(&b' ').escape_ascii());
    }
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_millis() as u64)
}
