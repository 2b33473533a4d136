//! The servers of a scenario: one, with a replica to promote if needed; a sentinel's two; or a cluster's.

use std::time::Duration;

use support::{Cluster, Server, Trio};

use crate::scenario::{Scenario, Shape, Step};

/// The server's default lease: short, so that leaks show soon.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(2);

/// The servers, and which one has the locks.
pub enum Servers {
    /// One server, and its replacement.
    One(Box<Server>, Option<Box<Server>>),
    /// A primary and its replica under a sentinel, and the index of the primary.
    Sentinel(Box<Trio>, usize),
    /// Primaries that share the slots, and the index of the one with the scenario's slot.
    Cluster(Cluster, usize),
}

impl Servers {
    /// Starts the servers of a scenario.
    pub fn start(scenario: &Scenario) -> Self {
        let has = |wanted: fn(&Step) -> bool| scenario.steps.iter().any(wanted);
        let keeps = if has(|step| matches!(step, Step::Restart { data: true })) { "yes" } else { "no" };
        let lease = DEFAULT_LEASE.as_millis().to_string();
        let settings = |builder: support::Builder| {
            builder.module_args(&["default-lease", &lease]).arg("appendonly", keeps).arg("appendfsync", "always")
        };
        match scenario.servers {
            Shape::One | Shape::Replicated => {
                let start = || Box::new(settings(Server::builder()).start());
                let server = start();
                let replica = (scenario.servers == Shape::Replicated).then(start);
                if let Some(replica) = &replica {
                    replica.replica_of(&server);
                }
                Self::One(server, replica)
            }
            Shape::Sentinel => Self::Sentinel(Box::new(Trio::start_with(settings)), 0),
            Shape::Cluster => {
                let cluster = Cluster::start_with(2, settings);
                let key = scenario.keys().next().unwrap_or_default();
                let has_it = cluster.owner_of(cluster.slot_of(key.as_bytes()));
                Self::Cluster(cluster, has_it)
            }
        }
    }

    /// The server that has the locks.
    pub fn now(&self) -> &Server {
        match self {
            Self::One(server, _) => server,
            Self::Sentinel(trio, primary) => &trio.servers()[*primary],
            Self::Cluster(cluster, node) => cluster.node(*node),
        }
    }

    /// All running servers.
    pub fn all(&self) -> Vec<&Server> {
        match self {
            Self::One(..) | Self::Sentinel(..) => vec![self.now()],
            Self::Cluster(cluster, _) => cluster.nodes().iter().collect(),
        }
    }

    /// The address for clients; `None`: that of the proxy of the one server.
    pub fn url(&self) -> Option<String> {
        match self {
            Self::One(..) => None,
            Self::Sentinel(trio, _) => Some(format!("redis+sentinel://{}/{}", trio.sentinel().addr(), trio.name())),
            Self::Cluster(cluster, _) => Some(format!("redis+cluster://{}", cluster.node(0).addr())),
        }
    }

    /// Kills the server that has the locks, and restarts it, with its data or without.
    pub fn restart(&mut self) {
        if let Self::One(server, _) = self {
            server.kill9();
            server.restart();
        }
    }

    /// Kills the server that has the locks, and promotes the replica, which is in step.
    pub fn fail_over(&mut self) {
        match self {
            Self::One(server, replica) => {
                let Some(replica) = replica.take() else { return };
                server.wait_for_replica(&replica);
                server.kill9();
                replica.replica_of_no_one();
                *server = replica;
            }
            Self::Sentinel(trio, primary) => {
                trio.kill_primary();
                *primary = 1;
            }
            Self::Cluster(..) => {}
        }
    }

    /// Demotes the server that has the locks, and promotes the replica, which is in step.
    pub fn demote(&mut self) {
        if let Self::One(server, replica) = self
            && let Some(next) = replica.as_mut()
        {
            server.wait_for_replica(next);
            next.replica_of_no_one();
            server.replica_of(next);
            std::mem::swap(server, next);
        }
    }

    /// Moves a key's slot to the other node of a cluster.
    pub fn move_slot(&mut self, key: &str) {
        if let Self::Cluster(cluster, node) = self {
            let other = 1 - *node;
            cluster.move_slot(cluster.slot_of(key.as_bytes()), *node, other);
            *node = other;
        }
    }
}
