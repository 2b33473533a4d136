//! Scenarios (`scenarios/*.yaml`): the guarantees of a client. README.md explains how to write one.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A guarantee, and the steps that test it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The name of its file.
    #[serde(skip)]
    pub name: String,
    /// The guarantee, in one sentence.
    pub promise: String,
    /// The rules of docs/client-protocol.md that it checks.
    pub rules: Vec<String>,
    /// The profile that it applies to; `None`: all.
    #[serde(default)]
    pub profile: Option<Profile>,
    /// The features that a client needs for it.
    #[serde(default)]
    pub needs: Vec<Feature>,
    /// The servers of the locks.
    #[serde(default)]
    pub servers: Shape,
    /// The clients, each in its own process.
    pub clients: Vec<String>,
    /// The client with the faults, one at a time.
    #[serde(default)]
    pub positions: Option<String>,
    /// The steps, in this order.
    pub steps: Vec<Step>,
}

/// The profile of a client: docs/client-protocol.md.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Commands over a small pool of connections.
    Basic,
    /// One session with each server, which reads events.
    Sessions,
    /// Another protocol on the same locks (Redisson). Such clients run only in fleets.
    Foreign,
}

/// The servers of a scenario.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// One server, with a proxy between it and each client.
    #[default]
    One,
    /// The same, and it has a replica.
    Replicated,
    /// The primary that a sentinel names.
    Sentinel,
    /// In a cluster, all in one slot.
    Cluster,
}

/// Features that not every client has.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Feature {
    /// Readers and writers.
    Shared,
    /// A limit of holders.
    Semaphore,
    /// Several keys in one command.
    SeveralKeys,
    /// A lease of the program's choice with a watchdog.
    WatchedLease,
    /// Released immediately when the connection closes.
    Ephemeral,
    /// Confirmed by replicas.
    Replicas,
    /// Cancelled waits.
    Cancel,
    /// A hold whose handle is garbage-collected.
    Drop,
    /// A closed client releases its holds.
    Close,
    /// A loss is reported without a request.
    LossReports,
    /// A loss is reported by a callback.
    Callbacks,
    /// A process may continue in a forked child.
    Fork,
    /// It runs in an event loop of its program, which may be blocked.
    EventLoop,
    /// A program has several runtimes (event loops), each of which may end.
    Runtimes,
    /// It finds its server through a sentinel.
    Sentinel,
    /// It finds its servers in a cluster.
    Cluster,
    /// Locks of several servers, all or none.
    MultiLock,
    /// A lock on a majority of servers.
    RedLock,
    /// A lock that the client caches after its release.
    Keep,
}

impl Feature {
    /// All, in the order of the table.
    pub const ALL: [Self; 19] = [
        Self::Shared,
        Self::Semaphore,
        Self::SeveralKeys,
        Self::WatchedLease,
        Self::Ephemeral,
        Self::Replicas,
        Self::Cancel,
        Self::Drop,
        Self::Close,
        Self::LossReports,
        Self::Callbacks,
        Self::Fork,
        Self::EventLoop,
        Self::Runtimes,
        Self::Sentinel,
        Self::Cluster,
        Self::MultiLock,
        Self::RedLock,
        Self::Keep,
    ];

    /// Its name in scenarios and manifests.
    pub fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|it| it.as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// Its name for readers.
    pub fn title(self) -> &'static str {
        match self {
            Self::Shared => "readers and writers",
            Self::Semaphore => "semaphores",
            Self::SeveralKeys => "several keys in one command",
            Self::WatchedLease => "a watched lease with a given duration",
            Self::Ephemeral => "released when the connection ends",
            Self::Replicas => "confirmed by replicas",
            Self::Cancel => "a wait can be cancelled",
            Self::Drop => "a garbage-collected hold is released",
            Self::Close => "closing releases everything",
            Self::LossReports => "reports a loss by itself",
            Self::Callbacks => "callback on a loss",
            Self::Fork => "can be forked",
            Self::EventLoop => "runs in its program's event loop",
            Self::Runtimes => "several runtimes, one of which may end",
            Self::Sentinel => "finds its server by Sentinel",
            Self::Cluster => "finds its server in a cluster",
            Self::MultiLock => "locks of several servers, all or none",
            Self::RedLock => "a lock on a majority of servers",
            Self::Keep => "lock caching until contention",
        }
    }
}

/// One step. Times are in milliseconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Step {
    /// A client acquires a lock.
    Acquire(Acquire),
    /// A running acquisition ends.
    Ended {
        /// The client.
        client: String,
        /// The hold.
        hold: String,
        /// The outcome.
        ends: String,
        /// The time limit from now.
        #[serde(default = "soon")]
        within: u64,
        /// The time limit since its request, by the client's own clock.
        #[serde(default, rename = "at-most")]
        at_most: Option<u64>,
    },
    /// A client releases a lock.
    Release(Call),
    /// A client renews a lease.
    Renew {
        /// The client.
        client: String,
        /// The hold.
        hold: String,
        /// The lease.
        lease: u64,
        /// The outcome.
        ends: String,
    },
    /// A client reports whether it holds a lock.
    Check(Call),
    /// A client cancels a running acquisition.
    Cancel(HoldName),
    /// A client drops a hold without releasing it.
    Drop(HoldName),
    /// The process of a client forks a child, which exits normally.
    Fork {
        /// The client.
        client: String,
    },
    /// A client is closed.
    Close {
        /// The client.
        client: String,
    },
    /// The process of a client is killed.
    Kill {
        /// The client.
        client: String,
    },
    /// The program of a client exits normally, within a short time.
    Quit {
        /// The client.
        client: String,
    },
    /// A client reports the loss of a hold.
    Lost {
        /// The client.
        client: String,
        /// The hold.
        hold: String,
        /// The reason.
        reason: String,
        /// The time limit from now.
        #[serde(default = "soon")]
        within: u64,
    },
    /// Another client runs `LOCK.FORCE`.
    Force {
        /// The lock.
        key: String,
    },
    /// Another client deletes its key.
    Delete {
        /// The lock.
        key: String,
    },
    /// Waits for a state of the server.
    Until {
        /// The lock.
        key: String,
        /// The number of holders.
        #[serde(default)]
        holders: Option<u64>,
        /// The number of waiters.
        #[serde(default)]
        waiters: Option<u64>,
    },
    /// Waits until all locks have just been renewed, early in their leases.
    Renewed {
        /// Their lease.
        lease: u64,
    },
    /// Waits until the server has answered requests of a client with `-SUPERSEDED`. From now on these replies are held
    /// back until the client's network is whole.
    Superseded {
        /// The client.
        client: String,
        /// The number of requests.
        requests: usize,
    },
    /// Another client sends a command to the server.
    Say {
        /// The command.
        words: Vec<String>,
    },
    /// The server's process is killed, and started again.
    Restart {
        /// Whether its data are kept.
        data: bool,
    },
    /// The server's process is killed, and a replica with all its data is promoted.
    Failover,
    /// The server becomes a replica of its replica. Clients find it as a replica for this time before they find the new
    /// primary.
    Demote {
        /// The duration in ms.
        time: u64,
    },
    /// A client has opened at most this many connections so far.
    Opened {
        /// The client.
        client: String,
        /// The number.
        #[serde(rename = "at-most")]
        at_most: usize,
    },
    /// A slot of a cluster moves to another server, with the locks in it.
    MoveSlot {
        /// The key of the slot.
        key: String,
    },
    /// The server has received at most this many requests of this name so far.
    Asked {
        /// The command.
        command: String,
        /// The number.
        #[serde(rename = "at-most")]
        at_most: u64,
    },
    /// Waits until a client has at most this many connections.
    Connections {
        /// The client.
        client: String,
        /// The number.
        #[serde(rename = "at-most")]
        at_most: usize,
    },
    /// The program of a client blocks its event loop.
    Block {
        /// The client.
        client: String,
        /// The duration.
        time: u64,
    },
    /// A client's program starts another runtime (event loop) and continues in it, or the first one ends.
    Runtime {
        /// The client.
        client: String,
        /// The change.
        is: Runtime,
        /// The holds that end with it.
        #[serde(default)]
        holds: Vec<String>,
    },
    /// A fault of a client's connections.
    Network {
        /// The client.
        client: String,
        /// The fault.
        is: Network,
    },
    /// The process of a client, or the server if none is named, is paused.
    Pause {
        /// The client.
        #[serde(default)]
        client: Option<String>,
        /// The duration.
        time: u64,
        /// Whether its connections are cut meanwhile.
        #[serde(default)]
        cut: bool,
        /// A call `check` of this hold, which the client gets during the pause and replies to first.
        #[serde(default)]
        check: Option<Call>,
    },
}

/// The faults of a client's connections.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// They are cut, and may be opened again.
    Cut,
    /// They are cut, and new ones, too.
    Refused,
    /// Nothing arrives in either direction, also over new connections, and neither side is notified.
    Silent,
    /// New connections are accepted again, and delayed bytes arrive.
    Whole,
    /// A session gets the events of a later server version: additional fields, and unknown kinds.
    Newer,
}

/// The changes of a program's runtimes.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// Another one is started, in which all later calls run.
    Another,
    /// The first one ends, with all its calls.
    Ended,
}

/// An acquisition.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acquire {
    /// The client.
    pub client: String,
    /// The name of the hold in this scenario.
    pub hold: String,
    /// The locks.
    pub keys: Vec<String>,
    /// The options.
    #[serde(default)]
    pub terms: Terms,
    /// The outcome; `later`: the steps continue meanwhile.
    pub ends: String,
    /// The time limit since its request, by the client's own clock.
    #[serde(default, rename = "at-most")]
    pub at_most: Option<u64>,
}

/// The options of an acquisition. By default, a watched mutex with the server's default lease.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The timeout; none: without limit; 0: no wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<u64>,
    /// The lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Whether the server renews the lease.
    #[serde(default, skip_serializing_if = "is_not")]
    pub watched: bool,
    /// Whether it is released when the connection closes.
    #[serde(default, skip_serializing_if = "is_not")]
    pub ephemeral: bool,
    /// `SHARED`.
    #[serde(default, skip_serializing_if = "is_not")]
    pub shared: bool,
    /// The limit of holders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// The number of replicas that must confirm it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u64>,
    /// How long the client caches it after its release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u64>,
    /// The number of uses in a row while another client waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_uses: Option<u64>,
    /// The action of the program in the callback of a loss, after its report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<Callback>,
}

/// Faulty actions of a program in a callback.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Callback {
    /// It raises an error.
    Throws,
    /// It tries to end the program.
    Exits,
    /// It does not return.
    Blocks,
    /// It acquires another lock, and releases it.
    Locks,
}

/// A call about a hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// The client.
    pub client: String,
    /// The hold.
    pub hold: String,
    /// The outcome.
    pub ends: String,
    /// A part of the error's text; `{pid}`: the client's process.
    #[serde(default)]
    pub names: Vec<String>,
}

/// A hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldName {
    /// The client.
    pub client: String,
    /// The hold.
    pub hold: String,
}

/// Reads all scenarios of a folder, by name.
///
/// # Errors
///
/// If a scenario is invalid, with the file's name.
pub fn read_all(folder: &Path) -> Result<Vec<Scenario>, String> {
    let why = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut files: Vec<_> = fs::read_dir(folder)
        .map_err(why)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(why)?
        .into_iter()
        .map(|it| it.path())
        .collect();
    files.retain(|file| file.extension().is_some_and(|it| it == "yaml"));
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

fn read(file: &Path) -> Result<Scenario, String> {
    let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
    let text = fs::read_to_string(file).map_err(|why| wrong(&why))?;
    let mut scenario: Scenario = serde_saphyr::from_str(&text).map_err(|why| wrong(&why))?;
    scenario.name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    for step in &scenario.steps {
        if let Some(client) = step.client()
            && !scenario.clients.iter().any(|it| it == client)
        {
            return Err(wrong(&format!("unknown client {client}")));
        }
    }
    Ok(scenario)
}

impl Step {
    /// The client of the step.
    fn client(&self) -> Option<&str> {
        match self {
            Self::Acquire(Acquire { client, .. })
            | Self::Release(Call { client, .. })
            | Self::Check(Call { client, .. })
            | Self::Cancel(HoldName { client, .. })
            | Self::Drop(HoldName { client, .. })
            | Self::Ended { client, .. }
            | Self::Renew { client, .. }
            | Self::Close { client }
            | Self::Fork { client }
            | Self::Kill { client }
            | Self::Quit { client }
            | Self::Connections { client, .. }
            | Self::Opened { client, .. }
            | Self::Superseded { client, .. }
            | Self::Lost { client, .. }
            | Self::Block { client, .. }
            | Self::Runtime { client, .. }
            | Self::Network { client, .. } => Some(client),
            Self::Pause { client, .. } => client.as_deref(),
            Self::Force { .. }
            | Self::Delete { .. }
            | Self::Until { .. }
            | Self::Renewed { .. }
            | Self::Say { .. }
            | Self::Restart { .. }
            | Self::MoveSlot { .. }
            | Self::Asked { .. }
            | Self::Demote { .. }
            | Self::Failover => None,
        }
    }
}

impl Scenario {
    /// The keys of its locks, in the order in which they are requested.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let acquired = self.steps.iter().filter_map(|step| if let Step::Acquire(it) = step { Some(it) } else { None });
        acquired.flat_map(|it| it.keys.iter().map(String::as_str))
    }
}

fn soon() -> u64 {
    10_000
}

fn is_not(flag: &bool) -> bool {
    !flag
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Manifest;
    use crate::golden;

    fn folder(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    #[test]
    fn scenarios_are_valid_and_manifests_name_existing_ones() {
        let scenarios = read_all(&folder("scenarios")).unwrap();
        assert!(scenarios.len() > 20);
        let drivers: Vec<_> = fs::read_dir(folder("drivers")).unwrap().map(|it| it.unwrap().path()).collect();
        assert!(drivers.len() > 3);
        for driver in drivers {
            let manifest = Manifest::read(&driver).unwrap();
            for name in manifest.fails.keys().chain(manifest.fails_between.keys()) {
                assert!(
                    name == "random"
                        || name
                            .strip_prefix("vectors/")
                            .is_some_and(|it| folder("../vectors").join(it).with_extension("jsonl").is_file())
                        || golden::TABLES.iter().any(|(table, _)| name.split('/').next() == Some(table))
                        || scenarios.iter().any(|it| it.name == *name),
                    "{}: {name}",
                    driver.display()
                );
            }
        }
    }

    #[test]
    fn scenario_with_unknown_client_step_or_field_is_refused() {
        let file = std::env::temp_dir().join(format!("holdfast-scenario-{}.yaml", std::process::id()));
        for (steps, part) in [
            ("- acquire: {client: B, hold: b, keys: [k], ends: held}", "unknown client B"),
            ("- acquire: {client: A, hold: a, keys: [k], ends: held, lease: 3}", "lease"),
            ("- obtain: {client: A, hold: a, keys: [k], ends: held}", "obtain"),
        ] {
            fs::write(&file, format!("promise: one\nrules: []\nclients: [A]\nsteps:\n  {steps}\n")).unwrap();
            let why = read(&file).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
        fs::remove_file(&file).unwrap();
    }
}
