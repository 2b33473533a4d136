//! Scenarios as they stand in `scenarios/*.yaml`: the promises of a client. README.md explains how to write one.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// One promise, and the steps that show whether it is kept.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The name of its file.
    #[serde(skip)]
    pub name: String,
    /// What is promised, in a sentence.
    pub promise: String,
    /// The rules of docs/client-protocol.md that it checks.
    pub rules: Vec<String>,
    /// The clients that it is about; none: all.
    #[serde(default)]
    pub profile: Option<Profile>,
    /// What a client must have for it.
    #[serde(default)]
    pub needs: Vec<Feature>,
    /// Where the locks are.
    #[serde(default)]
    pub servers: Shape,
    /// Each is a client of its own, in a process of its own.
    pub clients: Vec<String>,
    /// The client between whose messages faults are put, one after the other.
    #[serde(default)]
    pub positions: Option<String>,
    /// What is done, in this order.
    pub steps: Vec<Step>,
}

/// What a client is made of: docs/client-protocol.md.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Commands over a small pool of connections.
    Basic,
    /// One session with each server, whose events tell what happens.
    Sessions,
}

/// Where the locks of a scenario are.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// At one server; between it and each client there is a proxy.
    #[default]
    One,
    /// The same, and it has a replica.
    Replicated,
    /// At the master that a sentinel names.
    Sentinel,
    /// In a cluster, all in one slot.
    Cluster,
}

/// What not every client has.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Feature {
    /// Readers and writers.
    Shared,
    /// A limit on how many hold it.
    Semaphore,
    /// Several keys in one step.
    SeveralKeys,
    /// A watched lease of one's own.
    WatchedLease,
    /// Released at once when the connection ends.
    Ephemeral,
    /// Confirmed by replicas.
    Replicas,
    /// A wait that is given up.
    Cancel,
    /// A hold that nobody can reach any more.
    Drop,
    /// A client that is closed gives back what it holds.
    Close,
    /// A loss is told, without being asked.
    Told,
    /// It calls back when it tells a loss.
    Callbacks,
    /// A process may go on in a child of its own.
    Fork,
    /// It runs in an event loop of its program's, which may be blocked.
    EventLoop,
    /// A program has several runtimes (event loops), of which each may end.
    Runtimes,
    /// It finds its server by a sentinel.
    Sentinel,
    /// It finds its servers in a cluster.
    Cluster,
    /// Locks of several servers, all or none.
    MultiLock,
    /// A lock on a majority of servers.
    RedLock,
    /// A lock that the client keeps after its release.
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
        Self::Told,
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

    /// What scenarios and manifests call it.
    pub fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|it| it.as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// What people call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Shared => "readers and writers",
            Self::Semaphore => "semaphores",
            Self::SeveralKeys => "several keys in one step",
            Self::WatchedLease => "a watched lease of a given length",
            Self::Ephemeral => "released when the connection ends",
            Self::Replicas => "confirmed by replicas",
            Self::Cancel => "a wait can be cancelled",
            Self::Drop => "an unreachable hold is released",
            Self::Close => "closing releases everything",
            Self::Told => "a loss is reported unasked",
            Self::Callbacks => "calls back with a loss",
            Self::Fork => "may be forked",
            Self::EventLoop => "runs in its program's event loop",
            Self::Runtimes => "used by several runtimes, one of which may end",
            Self::Sentinel => "finds its server by Sentinel",
            Self::Cluster => "finds its server in a cluster",
            Self::MultiLock => "locks of several servers, all or none",
            Self::RedLock => "a lock on a majority of servers",
            Self::Keep => "a lock is kept at hand until somebody else wants it",
        }
    }
}

/// One step. Times are in milliseconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Step {
    /// A client takes a lock.
    Acquire(Acquire),
    /// An acquisition that was left running ends.
    Ended {
        /// Whose.
        client: String,
        /// Which.
        hold: String,
        /// How.
        ends: String,
        /// In how much time from now.
        #[serde(default = "soon")]
        within: u64,
        /// In how much time since it was asked for, by the client's own clock.
        #[serde(default, rename = "at-most")]
        at_most: Option<u64>,
    },
    /// A client gives a lock back.
    Release(Call),
    /// A client begins a lease anew.
    Renew {
        /// Who.
        client: String,
        /// What.
        hold: String,
        /// How long it is.
        lease: u64,
        /// How that ends.
        ends: String,
    },
    /// A client says whether it holds a lock.
    Check(Call),
    /// A client gives up an acquisition that runs.
    Cancel(Which),
    /// A client forgets a hold without giving it back.
    Drop(Which),
    /// The process of a client has a child, which ends in good order.
    Fork {
        /// Whose.
        client: String,
    },
    /// A client ends.
    Close {
        /// Who.
        client: String,
    },
    /// The process of a client ends, without a word.
    Kill {
        /// Who.
        client: String,
    },
    /// The program of a client ends in good order, which takes it no longer than what is soon.
    Quit {
        /// Whose.
        client: String,
    },
    /// A client tells that a hold is lost.
    Lost {
        /// Who.
        client: String,
        /// What.
        hold: String,
        /// Why.
        reason: String,
        /// In how much time from now.
        #[serde(default = "soon")]
        within: u64,
    },
    /// Somebody breaks a lock, by `LOCK.FORCE`.
    Force {
        /// Which.
        key: String,
    },
    /// Somebody deletes its key.
    Delete {
        /// Which.
        key: String,
    },
    /// Waits until the server says so.
    Until {
        /// Of which lock.
        key: String,
        /// So many hold it.
        #[serde(default)]
        holders: Option<u64>,
        /// So many wait for it.
        #[serde(default)]
        waiters: Option<u64>,
    },
    /// Somebody says this to the server.
    Say {
        /// A command.
        words: Vec<String>,
    },
    /// The server's process is killed, and started again.
    Restart {
        /// Whether it has what it had.
        data: bool,
    },
    /// The server's process is killed, and a replica that had everything takes its place.
    Failover,
    /// The server becomes a replica of its replica, and clients find it so for this time before they find the new master.
    Demote {
        /// How long, in ms.
        time: u64,
    },
    /// A client has opened so many connections at most until now.
    Opened {
        /// Who.
        client: String,
        /// How many.
        #[serde(rename = "at-most")]
        at_most: usize,
    },
    /// A slot of a cluster moves to another server, with the locks in it.
    MoveSlot {
        /// That of this key.
        key: String,
    },
    /// So many requests of this name at most were sent to the server until now.
    Asked {
        /// The command.
        command: String,
        /// How many.
        #[serde(rename = "at-most")]
        at_most: u64,
    },
    /// A client has so many connections at most.
    Connections {
        /// Who.
        client: String,
        /// How many.
        #[serde(rename = "at-most")]
        at_most: usize,
    },
    /// The event loop of a client is blocked for so long by its program.
    Block {
        /// Whose.
        client: String,
        /// How long.
        time: u64,
    },
    /// A client's program begins another runtime (event loop), in which it goes on; or the first one ends.
    Runtime {
        /// Whose.
        client: String,
        /// What happens.
        is: Runtime,
        /// The holds that end with it.
        #[serde(default)]
        holds: Vec<String>,
    },
    /// What becomes of a client's connections.
    Network {
        /// Whose.
        client: String,
        /// What happens.
        is: Network,
    },
    /// The process of a client, or the server if none is named, is stopped for so long.
    Freeze {
        /// Whose.
        #[serde(default)]
        client: Option<String>,
        /// How long.
        time: u64,
        /// Whether its connections are cut meanwhile.
        #[serde(default)]
        cut: bool,
        /// What it is asked meanwhile, and answers before anything else: whether it holds this.
        #[serde(default)]
        check: Option<Call>,
    },
}

/// What happens to the connections of a client.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// They are cut, and may be opened again.
    Cut,
    /// They are cut, and new ones, too.
    Refused,
    /// Nothing arrives any more in either direction, and nobody is told: also over new ones.
    Silent,
    /// New ones are taken again, and what was sent while it was silent arrives.
    Whole,
    /// What a session is told is what a later version of the server may say: more of each thing, and things that nobody knows yet.
    Newer,
}

/// What happens to the runtimes of a program.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// There is another one, in which all later calls run.
    Another,
    /// The first one ends, with all that runs in it.
    Ended,
}

/// An acquisition.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Acquire {
    /// Who.
    pub client: String,
    /// What the hold is called in this scenario.
    pub hold: String,
    /// The locks.
    pub keys: Vec<String>,
    /// The terms.
    #[serde(default)]
    pub terms: Terms,
    /// How it ends; `later`: the steps go on meanwhile.
    pub ends: String,
    /// In how much time since it was asked for, by the client's own clock.
    #[serde(default, rename = "at-most")]
    pub at_most: Option<u64>,
}

/// The terms of an acquisition. None: a mutex that is watched, with the server's default lease.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// How long it waits at most; none: as long as it takes; 0: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<u64>,
    /// The lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Whether the server renews that lease.
    #[serde(default, skip_serializing_if = "is_not")]
    pub watched: bool,
    /// Whether it is released when the connection ends.
    #[serde(default, skip_serializing_if = "is_not")]
    pub ephemeral: bool,
    /// A reader.
    #[serde(default, skip_serializing_if = "is_not")]
    pub shared: bool,
    /// So many may hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// So many replicas must have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u64>,
    /// For how long the client keeps it after its release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u64>,
    /// So many uses of it in a row while somebody else waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_uses: Option<u64>,
    /// What the program does when it is called back because the hold is lost, having said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<Callback>,
}

/// What a program does in a callback that it should not.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Callback {
    /// An error leaves it.
    Throws,
    /// It ends the program, or so it believes.
    Exits,
    /// It does not return.
    Blocks,
    /// It takes another lock, and releases it.
    Locks,
}

/// A call about a hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// Who.
    pub client: String,
    /// What.
    pub hold: String,
    /// How it ends.
    pub ends: String,
    /// What an error's text names; `{pid}`: the client's process.
    #[serde(default)]
    pub names: Vec<String>,
}

/// A hold.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Which {
    /// Whose.
    pub client: String,
    /// Which.
    pub hold: String,
}

/// Reads all scenarios of a folder, by name.
///
/// # Errors
///
/// What is wrong, with the file's name.
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
            return Err(wrong(&format!("no client is called {client}")));
        }
    }
    Ok(scenario)
}

impl Step {
    /// Who does it, or to whom it is done.
    fn client(&self) -> Option<&str> {
        match self {
            Self::Acquire(Acquire { client, .. })
            | Self::Release(Call { client, .. })
            | Self::Check(Call { client, .. })
            | Self::Cancel(Which { client, .. })
            | Self::Drop(Which { client, .. })
            | Self::Ended { client, .. }
            | Self::Renew { client, .. }
            | Self::Close { client }
            | Self::Fork { client }
            | Self::Kill { client }
            | Self::Quit { client }
            | Self::Connections { client, .. }
            | Self::Opened { client, .. }
            | Self::Lost { client, .. }
            | Self::Block { client, .. }
            | Self::Runtime { client, .. }
            | Self::Network { client, .. } => Some(client),
            Self::Freeze { client, .. } => client.as_deref(),
            Self::Force { .. }
            | Self::Delete { .. }
            | Self::Until { .. }
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
    /// The keys of its locks, one by one as they are asked for.
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
    fn all_scenarios_can_be_read_and_no_manifest_names_another() {
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
    fn scenario_with_an_unknown_client_step_or_field_is_refused() {
        let file = std::env::temp_dir().join(format!("holdfast-scenario-{}.yaml", std::process::id()));
        for (steps, part) in [
            ("- acquire: {client: B, hold: b, keys: [k], ends: held}", "no client is called B"),
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
