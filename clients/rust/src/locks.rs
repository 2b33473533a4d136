//! The entry point: clients of one server, a cluster, or Sentinel.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::{Bytes, Limit, Outcome, Reply, Terms, Wait};
use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, ConnectionInfo, IntoConnectionInfo};
use rustix::system::uname;
use tokio::sync::broadcast;

use crate::client::{Client, LockRequest, PATIENT, failed, unreachable};
use crate::clock;
use crate::error::Error;
use crate::events::Event;
use crate::guard::Guard;
use crate::hold::Hold;
use crate::info::{Info, Waiter};
use crate::line::QueueKey;
use crate::names::{ACTOR_ENDS, Keys};
use crate::order::{Name, Position};
use crate::place::{Place, without_delay};
use crate::seen::HoldStatus;
use crate::servers::{Cluster, Servers};
use crate::terms::{Deadline, at_most};
use crate::turn::CacheOptions;
use crate::url::{self, Address};

/// The time limit for opening a connection, and for a request over a connection that only reads.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// The longest owner that the server accepts, less the suffix that the client adds to the name.
pub(crate) const LONGEST_NAME: usize = 400;
/// The end of a name in an owner. The value of a candidate ends otherwise.
const NAME_ENDS: char = ':';
/// How many characters of the host name are used.
const LONGEST_HOST: usize = 60;
/// How many keys one command names at most.
const MOST_KEYS: usize = 128;
/// No caching by default.
const KEEP: CacheOptions = CacheOptions { idle: 0, most: 1 };

/// Locks on one server, one cluster, or the primary that Sentinel names. Cheap to clone; clones share their connections.
///
/// Connections are opened when first needed: two to each server that is used, one for events, one for requests, however many tasks
/// wait. They close with the last clone and the last [`Guard`].
#[derive(Clone)]
pub struct Locks {
    client: Arc<Client>,
    /// The readable prefix of every owner.
    prefix: Arc<str>,
}

impl Locks {
    /// Locks on one server.
    pub fn new(client: redis::Client) -> Self {
        Self::with_config(client, config())
    }

    /// The same, with these connection settings. A response timeout applies only to connections that [`server_of`](Self::server_of)
    /// and [`servers`](Self::servers) open: a lock has limits of its own.
    pub fn with_config(client: redis::Client, config: AsyncConnectionConfig) -> Self {
        let place = Place::Fixed(without_delay(&client));
        Self::of(Name::of(client.get_connection_info()), Servers::One(Arc::new(place)), config)
    }

    /// Locks on the primary that Sentinel names. After a failover, waits and holds continue at the new primary.
    pub fn sentinel(client: SentinelClient) -> Self {
        // The client does not reveal which Sentinels it asks.
        Self::at_sentinel(Name::Unknown, "sentinel".to_owned(), client)
    }

    /// Locks on a cluster, of which at least one node is named, as for `redis::cluster::ClusterClient`. All nodes have
    /// the login of the first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is none, or one is not an address.
    pub fn cluster<N: IntoConnectionInfo>(nodes: impl IntoIterator<Item = N>) -> Result<Self, Error> {
        let nodes = nodes.into_iter().map(IntoConnectionInfo::into_connection_info).collect::<Result<Vec<_>, _>>();
        let nodes = nodes.map_err(|error| Error::Invalid { message: error.to_string() })?;
        if nodes.is_empty() {
            return Err(Error::Invalid {
                message: "a cluster needs the address of one node at least, got none".into(),
            });
        }
        let name = Name::of_cluster(nodes.iter().map(ConnectionInfo::addr));
        Ok(Self::of(name, Servers::Cluster(Box::new(Cluster::new(nodes, config()))), config()))
    }

    /// Locks at an address: `redis://`, `rediss://` (feature `tls`), `unix://` as the `redis` crate has them, and
    /// `redis+cluster://host:port,host:port` and `redis+sentinel://host:port,host:port/master`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it is none of these.
    pub fn open(url: &str) -> Result<Self, Error> {
        Self::at(url::parse(url)?)
    }

    /// The same with these certificates: this client's own, if the server asks for one, and those of the authorities
    /// that it trusts. The address is one of `rediss://`, `rediss+cluster://`, `rediss+sentinel://`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it is none of these, or the certificates can't be read.
    #[cfg(feature = "tls")]
    pub fn open_with_certificates(url: &str, certificates: redis::TlsCertificates) -> Result<Self, Error> {
        let address = url::parse(url)?.with_certificates(certificates);
        Self::at(address.map_err(|error| Error::Invalid { message: error.to_string() })?)
    }

    fn at(address: Address) -> Result<Self, Error> {
        match address {
            Address::One(client) => Ok(Self::new(client)),
            Address::Sentinel { builder, hosts, primary, database } => {
                let client = builder.build().map_err(|error| Error::Invalid { message: error.to_string() })?;
                let called = format!("sentinel {hosts}/{primary}");
                Ok(Self::at_sentinel(Name::at(primary, database), called, client))
            }
            Address::Cluster(nodes) => Self::cluster(nodes),
        }
    }

    /// The same, with owners that begin with this name in place of `host:pid`, for operators who inspect a lock.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if it is longer than 400 bytes, begins with `#`, or contains `##`, which ends the name of an actor.
    pub fn named(self, name: &str) -> Result<Self, Error> {
        if name.len() > LONGEST_NAME || name.starts_with('#') || name.contains("##") {
            let message = format!(
                "a name has at most {LONGEST_NAME} bytes, does not begin with '#' and does not contain '##', got {name:?}"
            );
            return Err(Error::Invalid { message });
        }
        Ok(self.with_owners(&format!("{name}{NAME_ENDS}")))
    }

    /// The same, with owners that begin with this text.
    pub(crate) fn with_owners(self, begin: &str) -> Self {
        Self { prefix: begin.into(), ..self }
    }

    /// A lock by its key: a mutex, unless [`Lock::shared`] or [`Lock::limit`] says otherwise.
    pub fn lock(&self, key: impl AsRef<[u8]>) -> Lock {
        self.lock_all([key])
    }

    /// Several mutexes at once, all or none. In a cluster the keys must share a slot.
    pub fn lock_all<K: AsRef<[u8]>>(&self, keys: impl IntoIterator<Item = K>) -> Lock {
        let (client, prefix) = (self.client.clone(), self.prefix.clone());
        let terms = Terms { watchdog: true, ..Terms::default() };
        Lock { client, prefix, keys: keys.into_iter().collect(), terms, wait: Wait::Forever, keep: KEEP }
    }

    /// The events of this client's holds from now on, for metrics and logs. A reader that is more than 256 events
    /// behind loses the oldest.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.client.shared().events.subscribe()
    }

    /// The holders of a lock and the number of its waiters; none if it is free. The user needs the right to `LOCK.INFO`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongType`] if the key holds something else, or [`Error::Connection`].
    pub async fn info(&self, key: impl AsRef<[u8]>) -> Result<Option<Info>, Error> {
        self.ask("LOCK.INFO", key, |reply| match reply {
            Reply::Null => Some(None),
            reply => Info::read(reply).map(Some),
        })
        .await
    }

    /// Whether a lock is held. This may have changed when the reply arrives: to take a lock if it is free, use [`Lock::try_acquire`].
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn locked(&self, key: impl AsRef<[u8]>) -> Result<bool, Error> {
        Ok(self.info(key).await?.is_some_and(|info| !info.holders.is_empty()))
    }

    /// Forces a lock free, and returns how many holders lost it. The server notifies each of them, and grants the lock
    /// to waiters. The user needs the right to `LOCK.FORCE`.
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn force(&self, key: impl AsRef<[u8]>) -> Result<u64, Error> {
        self.ask("LOCK.FORCE", key, Reply::number).await
    }

    /// The requests that wait for a lock, in order: the first 1,000. The user needs the right to `LOCK.WAITERS`.
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn waiters(&self, key: impl AsRef<[u8]>) -> Result<Vec<Waiter>, Error> {
        self.ask("LOCK.WAITERS", key, |reply| reply.elements()?.iter().map(Waiter::read).collect()).await
    }

    async fn ask<T>(
        &self,
        command: &str,
        key: impl AsRef<[u8]>,
        read: impl FnOnce(&Reply) -> Option<T>,
    ) -> Result<T, Error> {
        let keys = Keys::from_iter([key]);
        let words = [command.as_bytes().to_vec(), keys.first().to_vec()];
        let reply = self.client.request(&keys, &words, PATIENT).await?;
        read(&reply).ok_or_else(|| {
            let source = (redis::ErrorKind::UnexpectedReturnType, "unexpected reply", format!("{reply:?}"));
            Error::Connection { server: String::new(), keys, source: source.into() }
        })
    }

    /// Returns when the locks of all dropped guards are released, or have expired, cached locks ([`Lock::keep`])
    /// included.
    pub async fn settle(&self) {
        self.client.settled().await;
    }

    /// Releases all holds, which count as lost from now on, ends all waits with an error, and closes the connections.
    /// Returns when that is done, at the latest after 10 s. It closes all clones of these locks, for ever. The drop
    /// of the last handle does the same in the background; the end of its runtime waits for that, for at most 2 s. Call
    /// this before `std::process::exit`, and for `Locks` in a `static`: neither drops anything.
    pub async fn close(&self) {
        self.client.close().await;
    }

    /// A connection of its own to the server of this key, to inspect locks: no session, so no right to lock
    /// is needed. Returned with the server's address.
    ///
    /// # Errors
    ///
    /// [`Error::Connection`].
    pub async fn server_of(&self, key: impl AsRef<[u8]>) -> Result<(String, MultiplexedConnection), Error> {
        let keys = Keys::from_iter([key]);
        let shared = self.client.shared();
        let connected = async { shared.servers.place_of(keys.first()).await?.connect(&shared.config).await };
        connected.await.map_err(|failure| unreachable(&keys, failure))
    }

    /// The same for all servers that grant locks now; for each that can't be reached, the error.
    ///
    /// # Errors
    ///
    /// [`Error::Connection`] if the servers can't be listed.
    pub async fn servers(&self) -> Result<Vec<Result<(String, MultiplexedConnection), Error>>, Error> {
        let mut connections = Vec::new();
        for place in self.places().await? {
            let connected = place.connect(&self.client.shared().config).await;
            connections.push(connected.map_err(|failure| unreachable(&no_keys(), failure)));
        }
        Ok(connections)
    }

    /// Clients of all servers that grant locks now, with this one's login and certificates. Nothing is connected.
    ///
    /// # Errors
    ///
    /// [`Error::Connection`] if the servers can't be listed.
    pub async fn clients(&self) -> Result<Vec<redis::Client>, Error> {
        let mut clients = Vec::new();
        for place in self.places().await? {
            clients.push(place.client().await.map_err(|failure| unreachable(&no_keys(), failure))?);
        }
        Ok(clients)
    }

    async fn places(&self) -> Result<Vec<Arc<Place>>, Error> {
        // A former primary may be a replica by now, and still answers.
        let servers = &self.client.shared().servers;
        servers.invalidate();
        servers.all().await.map_err(|failure| unreachable(&no_keys(), failure))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// The owner of a new acquisition, without its number.
    pub(crate) fn by(&self) -> Bytes {
        fresh(self.prefix.as_bytes())
    }

    fn at_sentinel(name: Name, called: String, client: SentinelClient) -> Self {
        let place = Place::Sentinel { client: client.into(), name: called };
        Self::of(name, Servers::One(Arc::new(place)), config())
    }

    fn of(name: Name, servers: Servers, config: AsyncConnectionConfig) -> Self {
        Self { client: Client::new(name, servers, config), prefix: this_process().into() }
    }
}

/// One lock, or several at once, and the options of its requests. Each [`acquire`](Lock::acquire) is an acquisition of its own,
/// with its own owner: a lock that this process holds is not free for another task of it. A task that holds one and needs another
/// acquires it through its guard: [`Guard::acquire`].
#[derive(Clone)]
pub struct Lock {
    client: Arc<Client>,
    prefix: Arc<str>,
    keys: Keys,
    terms: Terms,
    wait: Wait,
    keep: CacheOptions,
}

impl Lock {
    /// Waits for at most this long, in the server's queue. Without it [`acquire`](Self::acquire) waits without a limit.
    pub fn wait(mut self, time: Duration) -> Self {
        self.wait = at_most(time);
        self
    }

    /// Waits without a limit.
    pub fn wait_forever(mut self) -> Self {
        self.wait = Wait::Forever;
        self
    }

    /// Holds for this long from the grant on, without renewal. Without this, the server renews the lock for as long as the process
    /// runs, and it expires at most the server's default lease later.
    pub fn lease(mut self, time: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(time)), false);
        self
    }

    /// Renewed by the server while the process runs; expires at most this much later.
    pub fn watched(mut self, lease: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(lease)), true);
        self
    }

    /// Released immediately when the connection ends: the next waiter need not wait for a lease. In return, the lock is
    /// lost when a connection breaks.
    pub fn ephemeral(mut self) -> Self {
        self.terms.ephemeral = true;
        self
    }

    /// Granted only when this many replicas have it, so that it survives a failover to one of them.
    pub fn replicas(mut self, count: u32) -> Self {
        self.terms.replicas = count;
        self
    }

    /// Shared with all other shared requests: a reader, where an ordinary request is the writer.
    pub fn shared(mut self) -> Self {
        self.terms.limit = Limit::Shared;
        self
    }

    /// One of `n` permits.
    pub fn limit(mut self, permits: u32) -> Self {
        self.terms.limit = Limit::Of(permits);
        self
    }

    /// Caches the lock for up to this long when it is released and no other client requests it. Until then an acquisition in
    /// this process, by these [`Locks`] or a clone of them and with the same options, needs no request. The server notifies this client when
    /// another client requests the lock: then it is released at the end of the present use, and at once if there is none. The README says
    /// when to use this, and when not.
    ///
    /// All uses between two requests are one hold at the server: they have the same owner and fence. Acquisitions in this process are
    /// granted in the order in which they were made; while one of them asks the server, the others wait here. A hold that is lost
    /// is not used again: the next acquisition asks the server. [`Guard`] applies to each use;
    /// [`Guard::release`] of a cached lock waits for nothing.
    ///
    /// For a mutex, or several at once, that the server renews: not for [`lease`](Self::lease), [`shared`](Self::shared) or
    /// [`limit`](Self::limit). Zero turns caching off.
    pub fn keep(mut self, time: Duration) -> Self {
        self.keep.idle = clock::millis(time);
        self.terms.kept = self.keep.idle > 0;
        self
    }

    /// How many uses in a row a cached lock has in this process at most, once another client waits for it: by default one, the present
    /// use. More uses mean fewer hand-offs between processes, and longer waits for the others.
    pub fn keep_uses(mut self, most: u32) -> Self {
        self.keep.most = most;
        self
    }

    /// The keys.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Acquires the lock: waits without a limit, or returns none if it was not granted within [`wait`](Self::wait). The future may be
    /// dropped at any point: the request is withdrawn.
    ///
    /// # Errors
    ///
    /// The server's refusal, or [`Error::Connection`].
    pub async fn acquire(&self) -> Result<Option<Guard>, Error> {
        self.acquire_by(Deadline::of(self.wait, Instant::now())).await
    }

    /// Acquires the lock without waiting: none if it was not granted at once, whatever [`wait`](Self::wait) says.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        self.acquire_by(Deadline::of(Wait::No, Instant::now())).await
    }

    /// The same with this deadline, whatever [`wait`](Self::wait) says.
    pub(crate) async fn acquire_by(&self, deadline: Deadline) -> Result<Option<Guard>, Error> {
        self.acquire_as(self.prefix.as_bytes(), deadline).await
    }

    /// The wait that applies by default.
    pub(crate) fn waits_for(&self) -> Wait {
        self.wait
    }

    /// The same for an actor that holds a lock already. No other task uses that actor meanwhile.
    pub(crate) async fn acquire_within(&self, outer: &Hold, wait: Wait) -> Result<Option<Guard>, Error> {
        // A cached lock may be used by another task than the one that requested it, so its owner names no actor. The
        // owner of a candidate has its value there.
        let may_name_actor = !self.terms.kept && self.prefix.ends_with(NAME_ENDS);
        let by = if Arc::ptr_eq(&self.client, &outer.client) && may_name_actor {
            &[outer.owner.actor(), ACTOR_ENDS].concat()
        } else {
            self.prefix.as_bytes()
        };
        self.acquire_as(by, Deadline::of(wait, Instant::now())).await
    }

    /// Whether this hold satisfies the request: exclusive, or shared if it is to be shared.
    pub(crate) fn is_satisfied_by(&self, hold: &Hold) -> bool {
        let may = hold.limit == Limit::One || (hold.limit == Limit::Shared && self.terms.limit == Limit::Shared);
        may && Arc::ptr_eq(&self.client, &hold.client)
            && self.keys.iter().all(|key| hold.keys.iter().any(|held| held == key))
    }

    async fn acquire_as(&self, begin: &[u8], deadline: Deadline) -> Result<Option<Guard>, Error> {
        self.check()?;
        let mut head = None;
        if self.terms.kept {
            // A task that repeatedly takes a cached lock yields, so that other tasks of this runtime can receive
            // events.
            tokio::task::consume_budget().await;
            let queue_key = QueueKey { keys: self.keys.clone(), terms: self.terms.clone(), by: self.prefix.clone() };
            let Some(position) = self.client.wait_for_head(Arc::new(queue_key), self.keep, deadline).await else {
                return Ok(None);
            };
            match Hold::again(&self.client, position) {
                Ok(hold) => return Ok(Some(Guard::new(hold))),
                Err(position) => head = Some(position),
            }
        }
        let request = LockRequest {
            number: head.as_ref().map(|head| head.id),
            by: fresh(begin),
            keys: self.keys.clone(),
            terms: self.terms.clone(),
            wait: deadline.left(Instant::now()),
            line: head.as_ref().map(|head| head.line.clone()),
        };
        // From here on, dropping the hold releases it, until the caller has it.
        let (mut hold, mut answer) = Hold::acquire(&self.client, request, Arc::<HoldStatus>::default()).await?;
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Granted(_) => {
                if let Some(head) = head {
                    hold.keep(head);
                }
                Ok(Some(Guard::new(hold)))
            }
            Outcome::NotGranted => Ok(None),
            _ => Err(failed(&self.keys, Some(&hold.owner), ended)),
        }
    }

    pub(crate) fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Each of its keys alone, with its place in the order of servers.
    pub(crate) fn each_key(&self) -> impl Iterator<Item = Result<(Position, Self), Error>> {
        let alone = |key| self.clone().with_keys(Keys::from_iter([key]));
        self.keys.iter().map(move |key| Ok((self.client.shared().name.position(key)?, alone(key))))
    }

    /// The same with these keys.
    pub(crate) fn with_keys(self, keys: Keys) -> Self {
        Self { keys, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let invalid = |message: &str| Err(Error::Invalid { message: format!("{}: {message}", self.keys) });
        if self.keys.is_empty() {
            return Err(Error::Invalid { message: "a lock needs at least one key, got none".into() });
        }
        if self.keys.len() > MOST_KEYS {
            let message = format!("one server locks at most {MOST_KEYS} keys at once, got {}", self.keys.len());
            return Err(Error::Invalid { message });
        }
        if self.keys.iter().collect::<HashSet<_>>().len() < self.keys.len() {
            return invalid("a key is named twice");
        }
        if self.keys.len() > 1 && self.terms.limit != Limit::One {
            return invalid("several keys can only be locked as mutexes, without SHARED or LIMIT");
        }
        if self.terms.lease == Some(0) {
            return invalid("lease must be longer than 0");
        }
        if self.terms.kept && (!self.terms.watchdog || self.terms.limit != Limit::One) {
            return invalid(
                "a cached lock is a mutex that the server renews: it has no lease of its own, no limit, and is not shared",
            );
        }
        if self.terms.kept && self.keep.most == 0 {
            return invalid("keep_uses must be at least 1, got 0");
        }
        Ok(())
    }
}

fn no_keys() -> Keys {
    Keys::from_iter(<[&str; 0]>::default())
}

fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_response_timeout(Some(ANSWERED_WITHIN))
        .set_connection_timeout(Some(ANSWERED_WITHIN))
}

/// The owner of an acquisition, without its number: this beginning, and 128 random bits of the operating system. A forked child
/// inherits neither them nor the state of a generator.
fn fresh(begin: &[u8]) -> Bytes {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("the operating system has random numbers");
    [begin, format!("{:032x}:", u128::from_ne_bytes(random)).as_bytes()].concat()
}

/// `host:pid:`, for operators who inspect a lock.
fn this_process() -> String {
    let host: String = uname().nodename().to_string_lossy().replace('#', "?");
    format!("{}:{}{NAME_ENDS}", host.chars().take(LONGEST_HOST).collect::<String>(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a node, a wait would never end.
    #[test]
    fn cluster_without_nodes_is_refused() {
        let error = Locks::cluster(std::iter::empty::<&str>()).err();
        assert!(matches!(&error, Some(Error::Invalid { message }) if message.contains("at least")), "{error:?}");
    }
}
