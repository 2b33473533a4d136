//! Connections and users, and how a connection or a block ends.

use super::{Bytes, Node};
use std::collections::VecDeque;

/// A connection, as the server knows it.
#[derive(Clone, Debug)]
pub struct Client {
    pub user: String,
    pub db: i32,
    /// Requests that have arrived and have not begun.
    pub input: VecDeque<Vec<Bytes>>,
    /// Replies that have been written, but not sent.
    pub output: Bytes,
    /// Bytes that were sent since they were last collected.
    pub sent: Bytes,
    pub state: State,
    /// The channels that it subscribes to.
    pub channels: Vec<Bytes>,
    /// The requests of a transaction; `Some(None)`: one was refused.
    pub multi: Option<Option<Vec<Vec<Bytes>>>>,
    /// The connection is closed once its replies are sent.
    pub closes_after_reply: bool,
    /// The connection is closed at the end of the iteration, and no more of its requests run.
    pub is_closing: bool,
    /// It does not read its socket at the moment.
    pub is_not_reading: bool,
}

/// The state of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It can run its next request.
    Ready,
    /// The module has blocked it.
    Blocked(Block),
    /// Its first request waits for the end of a pause.
    Postponed,
}

/// The server's data about a client that the module has blocked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The module's id of it.
    pub ticket: u64,
    /// The keys that it is blocked on, if any.
    pub keys: Option<Vec<Bytes>>,
    /// The module has unblocked it.
    pub is_answered: bool,
}

impl Block {
    /// Whether the server may still end it, and tells the module. One without keys that the module has unblocked gets its
    /// reply only at the end of the iteration.
    pub(crate) fn may_end_without_module(&self) -> bool {
        !self.is_answered || self.keys.is_none()
    }
}

impl Client {
    pub(crate) fn new() -> Self {
        Self {
            user: "default".into(),
            db: 0,
            input: VecDeque::new(),
            output: Vec::new(),
            sent: Vec::new(),
            state: State::Ready,
            channels: Vec::new(),
            multi: None,
            closes_after_reply: false,
            is_closing: false,
            is_not_reading: false,
        }
    }

    /// The current block.
    pub(crate) fn blocked(&mut self) -> Option<&mut Block> {
        match &mut self.state {
            State::Blocked(block) => Some(block),
            _ => None,
        }
    }
}

/// The permissions of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Commands that it may not run, in lower case; `lock.` stands for all of the module's.
    pub denied: Vec<String>,
    /// The prefix of the keys that it may access.
    pub prefix: Option<Bytes>,
}

impl Default for User {
    fn default() -> Self {
        Self { denied: Vec::new(), prefix: Some(Vec::new()) }
    }
}

impl User {
    /// Whether it may access this key.
    pub fn may_touch(&self, key: &[u8]) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| key.starts_with(prefix))
    }
}

impl Node {
    /// A new connection.
    pub fn connect(&mut self) -> u64 {
        let id = self.next_client;
        self.next_client += 1;
        self.clients.insert(id, Client::new());
        id
    }

    /// Writes a part of a reply.
    pub fn reply(&mut self, client: u64, text: &[u8]) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.output.extend_from_slice(text);
        }
    }

    /// Publishes a message.
    pub fn publish(&mut self, channel: &[u8], message: &[u8]) {
        self.published.push((channel.to_vec(), message.to_vec()));
        for client in self.clients.values_mut().filter(|client| client.channels.iter().any(|it| it == channel)) {
            client.output.extend_from_slice(b"*3\r\n$7\r\nmessage\r\n");
            for part in [channel, message] {
                client.output.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
                client.output.extend_from_slice(part);
                client.output.extend_from_slice(b"\r\n");
            }
        }
    }

    /// The module blocks a client.
    pub fn block(&mut self, client: u64, block: Block) {
        self.handles += isize::from(block.keys.is_none());
        if let Some(client) = self.clients.get_mut(&client) {
            client.state = State::Blocked(block);
        }
    }

    /// Whether a user may run a command with these arguments.
    pub fn may_run(&self, user: &User, argv: &[Bytes]) -> bool {
        let name = String::from_utf8_lossy(&argv[0]).to_lowercase();
        let denied = user.denied.iter().any(|it| *it == name || it.ends_with('.') && name.starts_with(it.as_str()));
        !denied && self.keys_of(argv).iter().all(|key| user.may_touch(key))
    }
}
