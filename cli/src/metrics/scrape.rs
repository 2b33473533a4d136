//! Finds the servers and reads their state. All are asked in parallel over connections of this scrape, with a short timeout, so that
//! one that hangs does not delay the others. Recently known servers are asked too: a primary that failed must stay in the metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_client::redis::{AsyncConnectionConfig, Client, ConnectionAddr, RedisError};
use holdfast_client::{Error, Locks};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::fields::Info;
use crate::args::Metrics;
use crate::failure::words;
use crate::inspect::{Queue, Server};
use crate::report::print_message;

/// Timeout for Sentinel or the cluster to list the servers.
const NAMED_WITHIN: Duration = Duration::from_millis(700);
/// Timeout for a server to connect and reply. A scrape takes `NAMED_WITHIN`, and twice this if a new replica was found.
const ANSWERED_WITHIN: Duration = Duration::from_millis(600);

/// Scrapes the servers, and remembers them.
pub struct Observer {
    locks: Locks,
    queues: usize,
    replicas: bool,
    forget: Duration,
    known: Mutex<BTreeMap<String, KnownServer>>,
    /// The last list of servers. It is read in the background: if a Sentinel hangs, that takes longer than a scrape may, and the
    /// next scrape needs the reply of the next Sentinel.
    listed: watch::Sender<Option<ServerList>>,
}

type ServerList = Result<Vec<Client>, Error>;

struct KnownServer {
    client: Client,
    last_seen: Instant,
}

/// The state of one server, or why it is missing.
pub struct ServerReport {
    /// Its address.
    pub server: String,
    /// Whether clients use it; `None`: unknown.
    pub chosen: Option<bool>,
    /// The fields of `INFO`.
    pub info: Option<Info>,
    /// The longest queues, or why the server can't be used.
    pub queues: Result<Vec<Queue>, Reason>,
}

/// Why a server can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The connection failed.
    Unreachable,
    /// A timeout.
    Silent,
    /// The module is not loaded.
    NoModule,
    /// This user has no right to read it.
    NoRights,
    /// The login was refused, or is missing.
    Login,
    /// The server is loading its data.
    Loading,
    /// Another error, which is in the log.
    Other,
}

impl Observer {
    /// An observer that knows no servers yet.
    pub fn new(locks: Locks, task: &Metrics) -> Self {
        let (queues, replicas, forget) = (task.queues, !task.no_replicas, task.forget);
        Self { locks, queues, replicas, forget, known: Mutex::default(), listed: watch::Sender::new(None) }
    }

    /// Reads the state of all servers.
    pub async fn scrape(self: &Arc<Self>) -> Vec<ServerReport> {
        let begin = Instant::now();
        let listed = self.list_servers().await;
        let chosen: Option<Vec<String>> = match &listed {
            Some(Ok(clients)) => Some(clients.iter().map(|client| self.remember(client, begin)).collect()),
            _ => None,
        };
        let mut reports = self.read_servers(self.known_at(begin)).await;
        if self.replicas {
            reports.extend(self.read_servers(self.replicas_of(&reports, begin)).await);
        }
        for one in &mut reports {
            one.chosen = chosen.as_ref().map(|chosen| chosen.contains(&one.server));
        }
        match listed {
            Some(Err(error)) => reports.extend(unlisted(&error, &reports)),
            None if reports.is_empty() => reports.push(missing("Sentinel or cluster", Reason::Silent)),
            _ => {}
        }
        reports.sort_by(|a, b| a.server.cmp(&b.server));
        reports
    }

    /// The servers that clients use; `None`: no list was ever read.
    async fn list_servers(self: &Arc<Self>) -> Option<ServerList> {
        let mut news = self.listed.subscribe();
        let asking = self.clone();
        let task = tokio::spawn(async move {
            let listed = asking.locks.clients().await;
            asking.listed.send_replace(Some(listed));
        });
        if timeout(NAMED_WITHIN, news.changed()).await.is_err() && self.listed.borrow().is_none() {
            return None;
        }
        drop(task);
        self.listed.borrow().clone()
    }

    /// Reads the state of these in parallel. Every one that replies is remembered.
    async fn read_servers(&self, clients: Vec<(String, Client)>) -> Vec<ServerReport> {
        let mut asked = JoinSet::new();
        for (server, client) in clients {
            let queues = self.queues;
            asked.spawn(async move {
                let report = read_server(&server, &client, queues).await;
                (server, client, report)
            });
        }
        let mut all = Vec::new();
        while let Some(done) = asked.join_next().await {
            let Ok((server, client, (info, queues))) = done else { continue };
            if info.is_some() {
                self.known().insert(server.clone(), KnownServer { client, last_seen: Instant::now() });
            }
            all.push(ServerReport { server, chosen: None, info, queues });
        }
        all
    }

    /// The replicas that primaries have reported and that have not been asked.
    fn replicas_of(&self, reports: &[ServerReport], now: Instant) -> Vec<(String, Client)> {
        let mut found: BTreeMap<String, Client> = BTreeMap::new();
        for one in reports {
            let like = self.known().get(&one.server).map(|known| known.client.clone());
            for replica in one.info.iter().flat_map(Info::replicas) {
                let there = like.as_ref().and_then(|like| at(like, &replica.host, replica.port));
                if let Some(client) = there {
                    found.insert(self.remember(&client, now), client);
                }
            }
        }
        found.into_iter().filter(|(server, _)| !reports.iter().any(|one| one.server == *server)).collect()
    }

    fn remember(&self, client: &Client, now: Instant) -> String {
        let server = client.get_connection_info().addr().to_string();
        self.known().insert(server.clone(), KnownServer { client: client.clone(), last_seen: now });
        server
    }

    fn known_at(&self, now: Instant) -> Vec<(String, Client)> {
        let mut known = self.known();
        known.retain(|_, server| now.saturating_duration_since(server.last_seen) < self.forget);
        known.iter().map(|(server, known)| (server.clone(), known.client.clone())).collect()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, KnownServer>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// No list of servers: shown as a server that can't be used.
fn unlisted(error: &Error, reports: &[ServerReport]) -> Option<ServerReport> {
    print_message(error);
    let Error::Connection { server, source, .. } = error else { return None };
    if reports.iter().any(|one| one.server == *server) {
        return None;
    }
    Some(missing(server, Reason::of(source)))
}

fn missing(server: &str, reason: Reason) -> ServerReport {
    ServerReport { server: server.to_owned(), chosen: None, info: None, queues: Err(reason) }
}

/// The same login at another address.
fn at(like: &Client, host: &str, port: u16) -> Option<Client> {
    let info = like.get_connection_info().clone();
    let host = host.to_owned();
    let address = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Client::open(info.set_addr(address)).ok()
}

/// The `INFO` fields and the queues of a server.
async fn read_server(name: &str, client: &Client, queues: usize) -> (Option<Info>, Result<Vec<Queue>, Reason>) {
    let mut info = None;
    let asking = async {
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(ANSWERED_WITHIN))
            .set_connection_timeout(Some(ANSWERED_WITHIN));
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let mut server = Server { name: name.to_owned(), connection };
        info = Some(Info::new(server.info(&super::fields::SECTIONS).await?));
        server.top(queues).await
    };
    let queues = match timeout(ANSWERED_WITHIN, asking).await {
        Ok(Ok(queues)) => Ok(queues),
        Ok(Err(error)) => {
            print_message(format_args!("{name}: {}", words(&error)));
            Err(Reason::of(&error))
        }
        Err(_late) => {
            print_message(format_args!("{name}: no answer within {} ms", ANSWERED_WITHIN.as_millis()));
            Err(Reason::Silent)
        }
    };
    (info, queues)
}

impl Reason {
    /// The reason in an error.
    fn of(error: &RedisError) -> Self {
        let words = words(error);
        match error.code() {
            Some("NOAUTH" | "WRONGPASS") => Self::Login,
            Some("NOPERM") => Self::NoRights,
            Some("LOADING") => Self::Loading,
            Some(_) if words.contains("unknown command") => Self::NoModule,
            _ if words.contains("NOAUTH") || words.contains("WRONGPASS") || words.contains("uthentication") => {
                Self::Login
            }
            Some(_) => Self::Other,
            None if error.is_timeout() => Self::Silent,
            None => Self::Unreachable,
        }
    }

    /// As a label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Silent => "no answer in time",
            Self::NoModule => "module not loaded",
            Self::NoRights => "no rights",
            Self::Login => "login refused",
            Self::Loading => "loading its data",
            Self::Other => "see the exporter's log",
        }
    }
}
