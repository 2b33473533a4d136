//! A primary, its replicas, and a control connection.

use std::collections::BTreeMap;

use redis::Value;
use support::{Builder, Raw, Server};

use crate::common::{Bytes, deadline, fields, info_number};
use crate::lines::{Commands, Reply};
use crate::waiter::Waiter;

/// A `holdfast.replicas-timeout` that no test reaches, in ms.
pub(crate) const PATIENT: i64 = 3_600_000;

/// A `holdfast.replicas-timeout` that a test waits for, in ms.
pub(crate) const BRIEF: i64 = 250;

pub(crate) struct Group {
    pub(crate) primary: Server,
    pub(crate) replicas: Vec<Server>,
    pub(crate) control: Raw,
}

impl Group {
    /// Replicas confirm without the module.
    #[track_caller]
    pub(crate) fn of(count: usize) -> Self {
        let primary = quiet().start();
        let mut control = primary.raw();
        set_timeout(&mut control, PATIENT);
        let mut group = Self { primary, replicas: Vec::new(), control };
        let replicas: Vec<Server> = (0..count).map(|_| quiet().without_module().start()).collect();
        // In parallel: Valkey 9 starts to replicate up to a second later.
        for replica in &replicas {
            replica.raw().run_ok(&follow(&group.primary));
        }
        replicas.into_iter().for_each(|replica| group.join(replica));
        group
    }

    /// Adds a replica.
    #[track_caller]
    pub(crate) fn join(&mut self, replica: Server) {
        replica.replica_of(&self.primary);
        self.replicas.push(replica);
        self.primary.wait_replicas_online(self.replicas.len());
    }

    /// Sets `holdfast.replicas-timeout`, in ms.
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
        info_number(&self.primary, "holdfast", &format!("holdfast_{field}"))
    }

    /// A client whose request waits, in the queue or for replicas.
    #[track_caller]
    pub(crate) fn waits(&self, line: &str) -> Waiter {
        Waiter::sending(&self.primary, line)
    }

    /// The primary's state of these keys.
    #[track_caller]
    pub(crate) fn state(&mut self, keys: &[&str]) -> State {
        state(&mut self.control, keys)
    }

    #[track_caller]
    pub(crate) fn exists(&mut self, key: &str) -> bool {
        self.control.run(&format!("EXISTS {key}")) == Value::Int(1)
    }
}

/// A server that writes no pings to the replication stream, and never disconnects an idle replica.
///
/// It sends copies as files. After a diskless copy, a replica counts as online but may acknowledge nothing for a second
/// (also to the server's `WAIT`).
pub(crate) fn quiet() -> Builder {
    Server::builder()
        .arg("repl-ping-replica-period", "3600")
        .arg("repl-timeout", "7200")
        .arg("repl-diskless-sync", "no")
}

/// The command by which a replica follows `primary`.
pub(crate) fn follow(primary: &Server) -> String {
    let address = primary.addr();
    format!("REPLICAOF {} {}", address.ip(), address.port())
}

#[track_caller]
pub(crate) fn set_timeout(client: &mut Raw, ms: i64) {
    client.run_ok(&format!("CONFIG SET holdfast.replicas-timeout {ms}"));
}

/// The keys of a lock: the deadline (Unix ms, -1: none, -2: no key), and the fields.
pub(crate) type State = Vec<(i64, BTreeMap<Bytes, Bytes>)>;

#[track_caller]
pub(crate) fn state(client: &mut Raw, keys: &[&str]) -> State {
    let keys = keys.iter().map(|key| key.as_bytes());
    keys.map(|key| (deadline(client, key), fields(client, key))).collect()
}

/// The state of a missing key.
pub(crate) fn gone() -> (i64, BTreeMap<Bytes, Bytes>) {
    (-2, BTreeMap::new())
}

/// Asserts that a request was not confirmed.
#[track_caller]
pub(crate) fn assert_refused(reply: &Value, having: usize, needed: u32, ms: i64) {
    let expected = format!("UNCONFIRMED {having} of {needed} replicas confirmed within {ms} ms");
    assert_eq!(reply.error(), expected);
}
