//! The replication stream, and a copy of the keyspace that is built from it alone.

use super::keyspace::{Database, Entry, Hash, Value};
use super::{Bytes, DATABASES};
use crate::lock::Millis;
use std::collections::{BTreeMap, VecDeque};

/// A replica.
#[derive(Clone, Debug)]
pub struct Replica {
    /// The offset that it has confirmed.
    pub confirmed: u64,
    /// How long it takes to confirm, in ms; `None`: forever.
    pub delay: Option<Millis>,
    /// Whether `min-replicas-to-write` counts it.
    pub is_good: bool,
    /// When its confirmations arrive (monotonic, µs), and their offsets: one for each request for confirmation.
    pub confirms_at: VecDeque<(u64, u64)>,
}

/// The replication stream.
#[derive(Debug, Default)]
pub struct Stream {
    /// The commands of the current execution unit.
    step: Vec<(i32, Vec<Bytes>)>,
    db: Option<i32>,
    /// The commands that were sent since they were last collected.
    pub sent: Vec<Vec<Bytes>>,
    /// The number of commands that were sent.
    count: u64,
    /// The offset at which replicas were last asked to confirm; `None` once that was processed.
    pub ack_requested: Option<u64>,
    copy: Copy,
}

impl Stream {
    /// The current offset.
    pub fn offset(&self) -> u64 {
        self.count
    }

    /// Adds a command to the current execution unit.
    pub fn note(&mut self, db: i32, command: Vec<Bytes>) {
        self.step.push((db, command));
    }

    /// Sends the commands of the execution unit: several of them as a transaction.
    pub fn end_step(&mut self) {
        let step = std::mem::take(&mut self.step);
        let is_one = step.len() <= 1;
        for (position, (db, command)) in step.into_iter().enumerate() {
            let is_ping = command[0] == b"REPLCONF";
            if !is_one && position == 0 {
                self.select(db);
                self.send(vec![b"MULTI".to_vec()]);
            }
            if !is_ping {
                self.select(db);
            }
            self.send(command);
            if is_ping && is_one {
                self.ack_requested = Some(self.count);
            }
        }
        if !is_one {
            self.send(vec![b"EXEC".to_vec()]);
        }
    }

    fn select(&mut self, db: i32) {
        if self.db != Some(db) {
            self.db = Some(db);
            self.send(vec![b"SELECT".to_vec(), db.to_string().into_bytes()]);
        }
    }

    fn send(&mut self, command: Vec<Bytes>) {
        self.count += 1;
        self.copy.apply(&command);
        self.sent.push(command);
    }

    /// Removes a key that replicas learn of in another way.
    pub fn forget(&mut self, db: i32, key: &[u8]) {
        self.copy.dbs[db as usize].remove(key);
    }

    /// The keyspace of a replica that has received everything.
    pub fn copy(&self) -> &[Database] {
        &self.copy.dbs
    }
}

/// A keyspace that is built from the stream alone. It decides nothing, and expires nothing.
#[derive(Debug)]
struct Copy {
    dbs: Vec<Database>,
    db: usize,
}

impl Default for Copy {
    fn default() -> Self {
        Self { dbs: vec![BTreeMap::new(); DATABASES], db: 0 }
    }
}

impl Copy {
    fn apply(&mut self, command: &[Bytes]) {
        let number = |text: &Bytes| String::from_utf8_lossy(text).parse::<u64>().unwrap_or(0);
        let db = self.db;
        match command {
            [name, to] if name == b"SELECT" => self.db = number(to) as usize,
            [name, key, pairs @ ..] if name == b"HSET" => {
                let empty = Entry { value: Value::Hash(Hash::default()), expiry: None };
                if let Value::Hash(hash) = &mut self.dbs[db].entry(key.clone()).or_insert(empty).value {
                    pairs.chunks(2).for_each(|pair| hash.set(&pair[0], &pair[1]));
                }
            }
            [name, key, fields @ ..] if name == b"HDEL" => {
                if let Some(Entry { value: Value::Hash(hash), .. }) = self.dbs[db].get_mut(key) {
                    for field in fields {
                        hash.delete(field);
                    }
                    if hash.is_empty() {
                        self.dbs[db].remove(key);
                    }
                }
            }
            [name, keys @ ..] if name == b"DEL" => keys.iter().for_each(|key| drop(self.dbs[db].remove(key))),
            [name, key, at] if name == b"PEXPIREAT" => {
                if let Some(entry) = self.dbs[db].get_mut(key) {
                    entry.expiry = Some(number(at));
                }
            }
            [name, key] if name == b"PERSIST" => {
                if let Some(entry) = self.dbs[db].get_mut(key) {
                    entry.expiry = None;
                }
            }
            [name, key, at, dump, rest @ ..] if name == b"RESTORE" => {
                // Without `ABSTTL`, the time would count from when a replica runs the command.
                let is_absolute = rest.iter().any(|word| word == b"ABSTTL");
                let expiry = Some(if is_absolute { number(at) } else { 0 }).filter(|at| *at > 0);
                let value = Value::Hash(undump(dump).unwrap_or_default());
                self.dbs[db].insert(key.clone(), Entry { value, expiry });
            }
            [name, key, value] if name == b"SET" || name == b"RPUSH" => {
                self.dbs[db].insert(key.clone(), Entry { value: Value::Other(value.clone()), expiry: None });
            }
            [name, from, to] if name == b"RENAME" => {
                if let Some(entry) = self.dbs[db].remove(from) {
                    self.dbs[db].insert(to.clone(), entry);
                }
            }
            [name, key, to] if name == b"MOVE" => {
                if let Some(entry) = self.dbs[db].remove(key) {
                    self.dbs[number(to) as usize].insert(key.clone(), entry);
                }
            }
            [name] if name == b"FLUSHALL" => self.dbs.iter_mut().for_each(BTreeMap::clear),
            [name] if name == b"FLUSHDB" => self.dbs[db].clear(),
            [name, one, other] if name == b"SWAPDB" => self.dbs.swap(number(one) as usize, number(other) as usize),
            _ => {}
        }
    }
}

/// The hash in a dump of a listpack, with strings of less than 4 KiB and numbers, as the module makes them.
pub fn undump(dump: &[u8]) -> Option<Hash> {
    let mut rest = dump.get(9..)?;
    let mut elements = Vec::new();
    while *rest.first()? != 0xff {
        let (element, len) = match rest {
            [small @ 0..0x80, ..] => (small.to_string().into_bytes(), 1),
            [head @ 0x80..0xc0, tail @ ..] => {
                let len = usize::from(head & 0x3f);
                (tail.get(..len)?.to_vec(), 1 + len)
            }
            [head @ 0xe0..0xf0, low, tail @ ..] => {
                let len = usize::from(head & 0x0f) << 8 | usize::from(*low);
                (tail.get(..len)?.to_vec(), 2 + len)
            }
            [0xf4, tail @ ..] => {
                let number = tail.first_chunk().map(|bytes| i64::from_le_bytes(*bytes))?;
                (number.to_string().into_bytes(), 9)
            }
            _ => return None,
        };
        elements.push(element);
        rest = rest.get(len + if len < 128 { 1 } else { 2 }..)?;
    }
    let mut hash = Hash::default();
    elements.chunks(2).for_each(|pair| hash.set(&pair[0], &pair[1]));
    Some(hash)
}
