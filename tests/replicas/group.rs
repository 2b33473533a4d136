//! A master, its replicas, and a client that looks on.

use std::collections::BTreeMap;

use redis::Value;
use support::{Builder, Raw, Server};

use crate::common::{Bytes, deadline, fields, info_number};
use crate::speak::{Reply, Speak};
use crate::waiter::{Tell, Waiter};

/// As `holdfast.replicas-timeout`: replicas are waited for as long as it takes, in ms.
pub(crate) const PATIENT: i64 = 3_600_000;

/// As `holdfast.replicas-timeout`: no longer than a test must last, in ms.
pub(crate) const BRIEF: i64 = 250;

pub(crate) struct Group {
    pub(crate) master: Server,
    pub(crate) replicas: Vec<Server>,
    pub(crate) control: Raw,
}

impl Group {
    /// Replicas without the module: they need none to confirm.
    #[track_caller]
    pub(crate) fn of(count: usize) -> Self {
        let master = quiet().start();
        let mut control = master.raw();
        set_timeout(&mut control, PATIENT);
        let mut group = Self { master, replicas: Vec::new(), control };
        let replicas: Vec<Server> = (0..count).map(|_| quiet().without_module().start()).collect();
        // All at once: Valkey 9 begins to follow up to a second later.
        for replica in &replicas {
            replica.raw().order(&follow(&group.master));
        }
        replicas.into_iter().for_each(|replica| group.join(replica));
        group
    }

    /// One more replica.
    #[track_caller]
    pub(crate) fn join(&mut self, replica: Server) {
        replica.replica_of(&self.master);
        self.replicas.push(replica);
        self.master.wait_replicas_online(self.replicas.len());
    }

    /// For how long replicas are waited for from now on, in ms.
    #[track_caller]
    pub(crate) fn wait_for_replicas(&mut self, ms: i64) {
        set_timeout(&mut self.control, ms);
    }

    pub(crate) fn stop_replicas(&self) {
        self.replicas.iter().for_each(Server::stop);
    }

    pub(crate) fn cont_replicas(&self) {
        self.replicas.iter().for_each(Server::cont);
    }

    /// A field of `INFO holdfast`.
    #[track_caller]
    pub(crate) fn count(&self, field: &str) -> i64 {
        info_number(&self.master, "holdfast", &format!("holdfast_{field}"))
    }

    /// A client whose request waits, in the queue or for replicas.
    #[track_caller]
    pub(crate) fn waits(&self, line: &str) -> Waiter {
        Waiter::sending(&self.master, line)
    }

    /// What the master holds under these keys.
    #[track_caller]
    pub(crate) fn state(&mut self, keys: &[&str]) -> State {
        state(&mut self.control, keys)
    }

    #[track_caller]
    pub(crate) fn exists(&mut self, key: &str) -> bool {
        self.control.say(&format!("EXISTS {key}")) == Value::Int(1)
    }
}

/// A server that writes nothing of its own into the replication stream, and misses nobody who says nothing.
///
/// Its copies go by way of a file: after one without, a replica counts as online but may hear nothing for a second (for
/// the server's `WAIT` as well).
pub(crate) fn quiet() -> Builder {
    Server::builder()
        .arg("repl-ping-replica-period", "3600")
        .arg("repl-timeout", "7200")
        .arg("repl-diskless-sync", "no")
}

/// The command that lets a replica follow `master`.
pub(crate) fn follow(master: &Server) -> String {
    let address = master.addr();
    format!("REPLICAOF {} {}", address.ip(), address.port())
}

#[track_caller]
pub(crate) fn set_timeout(client: &mut Raw, ms: i64) {
    client.order(&format!("CONFIG SET holdfast.replicas-timeout {ms}"));
}

/// A lock as it lies in the keyspace, key by key: the deadline (Unix ms, -1: none, -2: no key), and the fields.
pub(crate) type State = Vec<(i64, BTreeMap<Bytes, Bytes>)>;

#[track_caller]
pub(crate) fn state(client: &mut Raw, keys: &[&str]) -> State {
    let keys = keys.iter().map(|key| key.as_bytes());
    keys.map(|key| (deadline(client, key), fields(client, key))).collect()
}

/// No key at all.
pub(crate) fn gone() -> (i64, BTreeMap<Bytes, Bytes>) {
    (-2, BTreeMap::new())
}

/// Asserts the end of a request that had to be confirmed and was not.
#[track_caller]
pub(crate) fn assert_refused(reply: &Value, having: usize, needed: u32, ms: i64) {
    let expected = format!("UNCONFIRMED {having} of {needed} replicas confirmed within {ms} ms");
    assert_eq!(reply.error(), expected);
}
