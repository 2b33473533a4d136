//! Plays a script to a real server.
//!
//! The lines of one poll arrive together because the server stands still (`SIGSTOP`) while they are sent, one after the
//! other, all by one processor, which delivers them in this order: sockets become ready in the order in which something
//! arrived on them.

use crate::replica::{END, Replica};
use crate::told::{self, Told};
use simulated::resp::Reply;
use simulated::script::{Line, Name, bytes};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use support::{Server, encode, stay_on_this_processor, until};

/// How long a reply may take that the simulated server gave at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server for a script.
pub fn start() -> Server {
    Server::builder()
        .arg("notify-keyspace-events", "KEA")
        // Replicas that never confirm stay nevertheless, however slow the machine is.
        .arg("repl-timeout", "3600")
        .arg("min-replicas-max-lag", "3600")
        .start()
}

/// Plays a script whose replies on a simulated server are known.
pub fn play(server: &Server, lines: &[Line], expected: &Told) -> Told {
    let mut player = Player {
        server,
        control: Connection::open(server),
        connections: BTreeMap::new(),
        open: BTreeMap::new(),
        poll: Vec::new(),
        told: Told { began: unix_millis(), ..Told::default() },
    };
    let replicas: Vec<Replica> =
        told::replicas(lines).iter().map(|delay| Replica::follow(server.addr(), *delay)).collect();
    if !replicas.is_empty() {
        server.wait_replicas_online(replicas.len());
    }
    stay_on_this_processor();
    lines.iter().for_each(|line| player.line(line));
    player.collect_all(expected);
    player.control.ask(&[b"CONFIG", b"SET", b"min-replicas-to-write", b"0"]);
    player.control.ask(&[b"SET", END, b"x"]);
    // All get the same.
    player.told.stream = replicas.into_iter().map(Replica::stream).next_back().unwrap_or_default();
    player.told
}

/// Something that is done while the server stands still.
enum Step {
    Send(u64, Vec<u8>),
    Close(u64),
}

struct Player<'s> {
    server: &'s Server,
    control: Connection,
    connections: BTreeMap<u64, Connection>,
    open: BTreeMap<Name, u64>,
    poll: Vec<Step>,
    told: Told,
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
            Line::Replicas(_) => {}
            other => panic!("not on a real server: {other}"),
        }
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

    /// The connection of a client: a new one if it has none, or if the server has ended it.
    fn connection(&mut self, name: Name) -> &mut Connection {
        let known = self.open.get(&name).copied().filter(|id| self.connections.get(id).is_some_and(|it| !it.has_ended));
        let id = known.unwrap_or_else(|| {
            let connection = Connection::open(self.server);
            let id = connection.id;
            self.told.ids.insert(id, name);
            self.open.insert(name, id);
            self.connections.insert(id, connection);
            id
        });
        self.connections.get_mut(&id).expect("it is there")
    }

    /// One poll with what was gathered; then this time passes.
    fn pass(&mut self, ms: u64) {
        let poll = std::mem::take(&mut self.poll);
        // The connection that the server has heard last is the first that it looks at: that is to be this one.
        self.turn();
        self.server.stop();
        let mut last = None;
        let count = poll.len();
        for (place, step) in poll.into_iter().enumerate() {
            let (Step::Send(id, _) | Step::Close(id)) = step;
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            let port = connection.port();
            if place + 1 == count {
                last = Some((port, as_server_has_it(self.server, port)));
            }
            match step {
                Step::Send(_, text) => connection.send(&text),
                // What else comes is for nobody.
                Step::Close(_) => drop(self.connections.remove(&id)),
            }
        }
        if let Some((port, before)) = last.filter(|(_, before)| before.is_some()) {
            until(PATIENCE, "all has arrived", || as_server_has_it(self.server, port) != before);
        }
        self.server.cont();
        // One turn may lead to another.
        self.turn();
        self.turn();
        thread::sleep(Duration::from_millis(ms));
        self.turn();
        self.collect();
    }

    /// Waits for a turn of the event loop.
    fn turn(&mut self) {
        self.control.ask(&[b"PING"]);
    }

    fn collect(&mut self) {
        for (name, id) in &self.open {
            let replies = self.connections.get_mut(id).map(Connection::take).unwrap_or_default();
            self.told.replies.entry(*name).or_default().extend(replies);
        }
    }

    /// Waits until everybody has been told as much as on the simulated server, if he ever is.
    fn collect_all(&mut self, expected: &Told) {
        let end = Instant::now() + PATIENCE;
        let count = |told: &Told, name: &Name| told.replies.get(name).map_or(0, Vec::len);
        while expected.replies.keys().any(|name| count(&self.told, name) < count(expected, name))
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(1));
            self.collect();
        }
        self.turn();
        self.collect();
    }
}

/// A connection to a real server, which never waits for what it reads unless it asks.
struct Connection {
    stream: TcpStream,
    id: u64,
    identity: Vec<u8>,
    received: Vec<u8>,
    has_ended: bool,
    token: u64,
}

impl Connection {
    fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(server.addr()).expect("connects");
        stream.set_nodelay(true).expect("an option");
        stream.set_nonblocking(true).expect("an option");
        let (identity, received) = (Vec::new(), Vec::new());
        let mut connection = Self { stream, id: 0, identity, received, has_ended: false, token: 0 };
        connection.id = connection.ask(&[b"CLIENT", b"ID"]).number().expect("an id");
        connection.identity = connection.ask(&[b"LOCK.OWNER"]).bytes().to_vec();
        connection
    }

    fn port(&self) -> u16 {
        self.stream.local_addr().expect("it is connected").port()
    }

    fn send(&mut self, text: &[u8]) {
        // The server may have ended the connection meanwhile.
        let _ = self.stream.write_all(text);
    }

    fn receive(&mut self) {
        let mut buffer = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.has_ended = true,
                Ok(length) => {
                    self.received.extend_from_slice(&buffer[..length]);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => self.has_ended |= error.kind() != ErrorKind::WouldBlock,
            }
            return;
        }
    }

    fn take(&mut self) -> Vec<Reply> {
        self.receive();
        let replies: Vec<Reply> = std::iter::from_fn(|| Reply::take(&mut self.received)).collect();
        self.token = replies.iter().rev().find_map(Reply::last_token).unwrap_or(self.token);
        replies
    }

    /// Sends a request and waits for its reply.
    fn ask(&mut self, words: &[&[u8]]) -> Reply {
        self.send(&encode([words]));
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && !self.has_ended {
            if let Some(reply) = self.take().pop() {
                return reply;
            }
            thread::sleep(Duration::from_micros(100));
        }
        panic!("no reply to {}", words.join(&b' ').escape_ascii());
    }
}

/// The state of a connection, seen from the server's end, and how much has arrived there; `None` if it is gone.
fn as_server_has_it(server: &Server, port: u16) -> Option<String> {
    let table = std::fs::read_to_string(format!("/proc/{}/net/tcp", server.pid())).expect("the system's connections");
    let shown = |port: u16| format!(":{port:04X}");
    let (here, there) = (shown(server.port()), shown(port));
    table.lines().find_map(|line| {
        // number, local address, remote address, state, queues
        match *line.split_ascii_whitespace().take(5).collect::<Vec<_>>() {
            [_, local, remote, state, queues] if local.ends_with(&here) && remote.ends_with(&there) => {
                Some(format!("{state} {queues}"))
            }
            _ => None,
        }
    })
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_millis() as u64)
}
