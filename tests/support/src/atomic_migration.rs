//! Atomic slot migration, by `CLUSTER MIGRATESLOTS` (Valkey 9) or `CLUSTER MIGRATION` (Redis 8.4).

use std::fs;
use std::time::Duration;

use redis::{RedisResult, Value};

use crate::cluster::Cluster;
use crate::server::Server;
use crate::until::until;
use crate::version::Family;

const SOON: Duration = Duration::from_secs(30);
/// Delay for each key of a snapshot that is to be paused during its transfer, in µs.
const PER_KEY: u32 = 500_000;

/// A migration that has begun. It is paused until [`AtomicMigration::resume`], unless [`Cluster::begin_atomic_move`] began it.
pub struct AtomicMigration<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
    /// The process that sends the snapshot, if that is paused.
    stopped: Option<libc::pid_t>,
}

impl Cluster {
    /// Migrates a slot, and waits until both nodes report that it has moved.
    #[track_caller]
    pub fn move_whole_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_atomic_move(slot, from, to).arrives();
    }

    /// Starts the migration of a slot.
    #[track_caller]
    pub fn begin_atomic_move(&self, slot: u16, from: usize, to: usize) -> AtomicMigration<'_> {
        match self.node(from).version().family {
            Family::Valkey => {
                order(self.node(from), &format!("CLUSTER MIGRATESLOTS SLOTSRANGE {slot} {slot} NODE {}", self.id(to)))
            }
            Family::Redis => order(self.node(to), &format!("CLUSTER MIGRATION IMPORT {slot} {slot}")),
        };
        AtomicMigration { cluster: self, slot, from, to, stopped: None }
    }

    /// Starts the migration of a slot with at least one key, and pauses it halfway. On Valkey, all keys have arrived by
    /// then and only the takeover is left; on Redis, it pauses at the snapshot.
    #[track_caller]
    pub fn begin_paused_migration(&self, slot: u16, from: usize, to: usize) -> AtomicMigration<'_> {
        let source = self.node(from);
        match source.version().family {
            Family::Valkey => {
                order(source, "DEBUG SLOTMIGRATION PREVENT-PAUSE 1");
                let halfway = self.begin_atomic_move(slot, from, to);
                until(SOON, "all keys have arrived", || states(source, "GETSLOTMIGRATIONS")[0] == "waiting-to-pause");
                halfway
            }
            Family::Redis => {
                order(source, &format!("CONFIG SET rdb-key-save-delay {PER_KEY}"));
                let mut halfway = self.begin_atomic_move(slot, from, to);
                until(SOON, "the snapshot is being taken", || {
                    halfway.stopped = child_of(source.pid());
                    halfway.stopped.is_some()
                });
                halfway.signal(libc::SIGSTOP);
                halfway
            }
        }
    }
}

impl AtomicMigration<'_> {
    /// Continues a paused migration.
    #[track_caller]
    pub fn resume(&mut self) {
        let source = self.cluster.node(self.from);
        match source.version().family {
            Family::Valkey => {
                order(source, "DEBUG SLOTMIGRATION PREVENT-PAUSE 0");
            }
            Family::Redis => {
                self.signal(libc::SIGCONT);
                self.stopped = None;
                order(source, "CONFIG SET rdb-key-save-delay 0");
            }
        }
    }

    /// Waits until both nodes report that the slot has moved.
    #[track_caller]
    pub fn arrives(self) {
        until(SOON, "both nodes report that the slot has moved", || {
            self.cluster.owns(self.to, self.slot) && !self.cluster.owns(self.from, self.slot) && self.is_over()
        });
    }

    /// Cancels the migration, and waits until both nodes have ended it.
    #[track_caller]
    pub fn cancel(mut self) {
        match self.cluster.node(self.from).version().family {
            Family::Valkey => order(self.cluster.node(self.from), "CLUSTER CANCELSLOTMIGRATIONS"),
            Family::Redis => order(self.cluster.node(self.to), "CLUSTER MIGRATION CANCEL ALL"),
        };
        self.resume();
        self.wait_until_cancelled();
    }

    /// Waits until both nodes have ended the migration without success, for any reason.
    #[track_caller]
    pub fn wait_until_cancelled(self) {
        until(SOON, "both nodes have ended the migration", || {
            self.is_over() && self.cluster.owns(self.from, self.slot)
        });
    }

    /// Whether both nodes have ended the migration.
    fn is_over(&self) -> bool {
        const ENDS: [&str; 6] = ["success", "failed", "cancelled", "completed", "canceled", "none"];
        let ends = [self.cluster.node(self.from), self.cluster.node(self.to)];
        ends.into_iter().all(|node| {
            let question = match node.version().family {
                Family::Valkey => "GETSLOTMIGRATIONS",
                Family::Redis => "MIGRATION STATUS ALL",
            };
            states(node, question).iter().all(|state| ENDS.contains(&state.as_str()))
        })
    }

    fn signal(&self, signal: i32) {
        if let Some(pid) = self.stopped {
            // SAFETY: a system call with two numbers. The process is a child of this test's server.
            unsafe { libc::kill(pid, signal) };
        }
    }
}

impl Drop for AtomicMigration<'_> {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT); // Otherwise it would outlive its server.
    }
}

#[track_caller]
fn order(node: &Server, line: &str) -> Value {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().expect("a command"));
    let reply: RedisResult<Value> = command.arg(words.collect::<Vec<_>>()).query(&mut node.connect());
    reply.unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// The states of the migrations that a node knows of, newest first.
#[track_caller]
fn states(node: &Server, question: &str) -> Vec<String> {
    let moves: Vec<std::collections::HashMap<String, Value>> =
        redis::from_redis_value(order(node, &format!("CLUSTER {question}"))).expect("a list of moves");
    let state = |it: &std::collections::HashMap<String, Value>| match it.get("state") {
        Some(Value::BulkString(state)) => String::from_utf8_lossy(state).into_owned(),
        other => panic!("not a state: {other:?}"),
    };
    moves.iter().map(state).collect()
}

/// A child process of this one.
fn child_of(pid: u32) -> Option<libc::pid_t> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.split(' ').next()?.parse().ok()
}
