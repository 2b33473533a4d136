//! Where locks come from.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::{Bytes, Limit, Outcome, Reply, Terms, Wait};
use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, ConnectionInfo, IntoConnectionInfo};
use rustix::system::uname;

use crate::client::{Client, PATIENT, Wish, failed, unreachable};
use crate::clock;
use crate::error::Error;
use crate::guard::Guard;
use crate::hold::Hold;
use crate::info::Info;
use crate::line::Same;
use crate::names::{ACTOR_ENDS, Keys};
use crate::order::{Name, Position};
use crate::place::{Place, without_delay};
use crate::seen::Seen;
use crate::servers::{Cluster, Servers};
use crate::terms::{Deadline, at_most};
use crate::turn::Keep;
use crate::url::{self, Address};

/// A connection that is not there within this has failed, and so has a request over one that only looks.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// The longest owner that the server takes, less what the client puts behind the name.
const LONGEST_NAME: usize = 400;
/// Of the machine's name, so many characters.
const LONGEST_HOST: usize = 60;
/// Nothing is kept, unless the program says so.
const KEEP: Keep = Keep { idle: 0, most: 1 };

/// Locks on one server, one cluster, or whatever master Sentinel names. Cheap to clone; clones share their connections.
///
/// Nothing is connected before it is needed. Then there are two connections to each server that is used: one to hear on,
/// one for requests, however many tasks wait. They end with the last clone and the last [`Guard`].
#[derive(Clone)]
pub struct Locks {
    client: Arc<Client>,
    /// What every owner begins with.
    prefix: Arc<str>,
}

impl Locks {
    /// Locks on one server.
    pub fn new(client: redis::Client) -> Self {
        Self::with_config(client, config())
    }

    /// The same, with connection settings of one's own. A response timeout is for requests: waiting for a lock takes none.
    pub fn with_config(client: redis::Client, config: AsyncConnectionConfig) -> Self {
        let place = Place::Fixed(without_delay(&client));
        Self::of(Name::of(client.get_connection_info()), Servers::One(Arc::new(place)), config)
    }

    /// Locks on the master that Sentinel names. After a failover, waits and holds go on at the new one.
    pub fn sentinel(client: SentinelClient) -> Self {
        // It does not say which ones it asks.
        Self::at_sentinel(Name::Unknown, "sentinel".to_owned(), client)
    }

    /// Locks on a cluster, of which one node at least is named, as for `redis::cluster::ClusterClient`. All nodes have
    /// the login of the first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if that is no address.
    pub fn cluster<N: IntoConnectionInfo>(nodes: impl IntoIterator<Item = N>) -> Result<Self, Error> {
        let nodes = nodes.into_iter().map(IntoConnectionInfo::into_connection_info).collect::<Result<Vec<_>, _>>();
        let nodes = nodes.map_err(|error| Error::Invalid { message: error.to_string() })?;
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

    /// The same with these certificates: this client's own, where the server asks for one, and those of the authorities
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
            Address::Sentinel { builder, hosts, master, database } => {
                let client = builder.build().map_err(|error| Error::Invalid { message: error.to_string() })?;
                let called = format!("sentinel {hosts}/{master}");
                Ok(Self::at_sentinel(Name::at(master, database), called, client))
            }
            Address::Cluster(nodes) => Self::cluster(nodes),
        }
    }

    /// The same, with owners that begin with this name in place of `host:pid`: so whoever looks at a lock sees who has it.
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
        Ok(Self { prefix: fresh_prefix(name).into(), ..self })
    }

    /// A lock by its key: a mutex, unless [`Lock::shared`] or [`Lock::limit`] says otherwise.
    pub fn lock(&self, key: impl AsRef<[u8]>) -> Lock {
        self.lock_all([key])
    }

    /// Several mutexes at once, all or none. In a cluster the keys have one slot.
    pub fn lock_all<K: AsRef<[u8]>>(&self, keys: impl IntoIterator<Item = K>) -> Lock {
        let (client, prefix) = (self.client.clone(), self.prefix.clone());
        let terms = Terms { watchdog: true, ..Terms::default() };
        Lock { client, prefix, keys: keys.into_iter().collect(), terms, wait: Wait::Forever, keep: KEEP }
    }

    /// Who holds a lock, and how many wait for it; none if it is free. The user needs the right to `LOCK.INFO`.
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

    /// Whether anybody holds a lock. That may have changed when it is known: to take a lock if it is free, ask for it.
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn locked(&self, key: impl AsRef<[u8]>) -> Result<bool, Error> {
        Ok(self.info(key).await?.is_some_and(|info| !info.holders.is_empty()))
    }

    /// Breaks a lock, whoever holds it: how many have lost it. Each of them is told, and those who wait are served. The user
    /// needs the right to `LOCK.FORCE`.
    ///
    /// # Errors
    ///
    /// As for [`info`](Self::info).
    pub async fn force(&self, key: impl AsRef<[u8]>) -> Result<u64, Error> {
        self.ask("LOCK.FORCE", key, Reply::number).await
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
            let source = (redis::ErrorKind::UnexpectedReturnType, "an answer that makes no sense", reply.to_string());
            Error::Connection { server: String::new(), keys, source: source.into() }
        })
    }

    /// Returns when all that was dropped has been given back, or can't be any more; so is what is kept ([`Lock::keep`]) and nobody
    /// uses. To be called before the runtime ends, where dropped guards are not to last until their lease is over.
    pub async fn settle(&self) {
        self.client.settled().await;
    }

    /// A connection of its own to the server that serves this key, to look at its locks: no session, so no right to lock
    /// is needed. The server's address comes with it.
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

    /// The same to all servers that grant locks now; in the place of each that can't be reached, why.
    ///
    /// # Errors
    ///
    /// [`Error::Connection`] if nobody says which servers there are.
    pub async fn servers(&self) -> Result<Vec<Result<(String, MultiplexedConnection), Error>>, Error> {
        let mut connections = Vec::new();
        for place in self.places().await? {
            let connected = place.connect(&self.client.shared().config).await;
            connections.push(connected.map_err(|failure| unreachable(&no_keys(), failure)));
        }
        Ok(connections)
    }

    /// Clients of all servers that grant locks now, with the login and the certificates of this one. Nothing is connected.
    ///
    /// # Errors
    ///
    /// [`Error::Connection`] if nobody says which servers there are.
    pub async fn clients(&self) -> Result<Vec<redis::Client>, Error> {
        let mut clients = Vec::new();
        for place in self.places().await? {
            clients.push(place.client().await.map_err(|failure| unreachable(&no_keys(), failure))?);
        }
        Ok(clients)
    }

    async fn places(&self) -> Result<Vec<Arc<Place>>, Error> {
        // A master of a while ago may be a replica by now, and answers as before.
        let servers = &self.client.shared().servers;
        servers.doubt();
        servers.all().await.map_err(|failure| unreachable(&no_keys(), failure))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// What owners begin with.
    pub(crate) fn by(&self) -> Bytes {
        self.prefix.as_bytes().to_vec()
    }

    fn at_sentinel(name: Name, called: String, client: SentinelClient) -> Self {
        let place = Place::Sentinel { client: client.into(), name: called };
        Self::of(name, Servers::One(Arc::new(place)), config())
    }

    fn of(name: Name, servers: Servers, config: AsyncConnectionConfig) -> Self {
        Self { client: Client::new(name, servers, config), prefix: fresh_prefix(&this_process()).into() }
    }
}

/// One lock, or several at once, and how it is asked for. Each [`acquire`](Lock::acquire) is an acquisition of its own,
/// with its own owner: a lock that a process holds is not free for another task of it. Who holds one and wants another as well
/// asks by its guard: [`Guard::acquire`].
#[derive(Clone)]
pub struct Lock {
    client: Arc<Client>,
    prefix: Arc<str>,
    keys: Keys,
    terms: Terms,
    wait: Wait,
    keep: Keep,
}

impl Lock {
    /// Waits for at most this long, in the server's queue. Without it [`acquire`](Self::acquire) waits for as long as it takes.
    pub fn wait(mut self, time: Duration) -> Self {
        self.wait = at_most(time);
        self
    }

    /// Waits for as long as it takes.
    pub fn wait_forever(mut self) -> Self {
        self.wait = Wait::Forever;
        self
    }

    /// Holds for this long from the grant on, and nobody renews it. Without it the lock is held for as long as the process
    /// lives, and for at most the server's default lease longer.
    pub fn lease(mut self, time: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(time)), false);
        self
    }

    /// Held for as long as the process lives, and for at most this much longer.
    pub fn watched(mut self, lease: Duration) -> Self {
        (self.terms.lease, self.terms.watchdog) = (Some(clock::millis(lease)), true);
        self
    }

    /// Given back at once when the connection ends: the next one need not wait for a lease. In return a connection that
    /// breaks is a lock that is lost.
    pub fn ephemeral(mut self) -> Self {
        self.terms.ephemeral = true;
        self
    }

    /// Granted when so many replicas have it: then it outlives a failover to one of them.
    pub fn replicas(mut self, count: u32) -> Self {
        self.terms.replicas = count;
        self
    }

    /// Shared with all others who ask so: a reader, where an ordinary request is the writer.
    pub fn shared(mut self) -> Self {
        self.terms.limit = Limit::Shared;
        self
    }

    /// One of so many permits.
    pub fn limit(mut self, permits: u32) -> Self {
        self.terms.limit = Limit::Of(permits);
        self
    }

    /// Keeps the lock at hand for up to this long when it is given back and nobody else wants it. Until then whoever asks for it in
    /// this process, by these [`Locks`] or a clone of them and on the same terms, has it without a request. The server tells as soon as
    /// somebody else asks for it: then it is given back at the end of the present use, and at once if there is none. The README says
    /// when that is a good idea, and when not.
    ///
    /// All uses in between are one hold at the server: they have the same owner and the same fence. Those who want the lock in this process
    /// have it one after the other, in the order in which they asked; while one of them asks the server, the others wait here. What
    /// ends a hold ends one that is kept, too, and then whoever asks next asks the server. What is said in [`Guard`] holds for each use;
    /// [`Guard::release`] of a lock that is kept waits for nothing.
    ///
    /// For a mutex, or several at once, that the server renews: not for [`lease`](Self::lease), [`shared`](Self::shared) or
    /// [`limit`](Self::limit). No time means that it is not kept.
    pub fn keep(mut self, time: Duration) -> Self {
        self.keep.idle = clock::millis(time);
        self.terms.kept = self.keep.idle > 0;
        self
    }

    /// How often in a row a kept lock is used in this process at most, from when somebody else waits for it: one time, the present use,
    /// unless it is said here. More of them are fewer hand-overs between processes, and longer waits for the others.
    pub fn keep_uses(mut self, most: u32) -> Self {
        self.keep.most = most;
        self
    }

    /// The keys.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Waits for it: as long as it takes, or none if it was not granted in the time that [`wait`](Self::wait) allows. May be
    /// dropped at any point: then it is released, whatever came of it.
    ///
    /// # Errors
    ///
    /// What the server refused with, or [`Error::Connection`].
    pub async fn acquire(&self) -> Result<Option<Guard>, Error> {
        self.acquire_by(Deadline::of(self.wait, Instant::now())).await
    }

    /// Asks for it without waiting: none if it was not granted at once, whatever [`wait`](Self::wait) says.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>, Error> {
        self.acquire_by(Deadline::of(Wait::No, Instant::now())).await
    }

    /// The same until then, whatever [`wait`](Self::wait) says.
    pub(crate) async fn acquire_by(&self, deadline: Deadline) -> Result<Option<Guard>, Error> {
        self.acquire_as(self.prefix.as_bytes().to_vec(), deadline).await
    }

    /// How long it waits unless it is said otherwise.
    pub(crate) fn waits_for(&self) -> Wait {
        self.wait
    }

    /// The same for whoever acts in the holder's name already. Nobody else does meanwhile.
    pub(crate) async fn acquire_within(&self, outer: &Hold, wait: Wait) -> Result<Option<Guard>, Error> {
        // Numbers are this client's own. Whoever uses what is kept is not whoever took it, so its owner acts for nobody.
        let by = if Arc::ptr_eq(&self.client, &outer.client) && !self.terms.kept {
            [outer.owner.actor(), ACTOR_ENDS].concat()
        } else {
            self.prefix.as_bytes().to_vec()
        };
        self.acquire_as(by, Deadline::of(wait, Instant::now())).await
    }

    /// Whether whoever has this hold has what is asked for: all of it alone, or shared if it is to be shared.
    pub(crate) fn is_had_by(&self, hold: &Hold) -> bool {
        let may = hold.limit == Limit::One || (hold.limit == Limit::Shared && self.terms.limit == Limit::Shared);
        may && Arc::ptr_eq(&self.client, &hold.client)
            && self.keys.iter().all(|key| hold.keys.iter().any(|held| held == key))
    }

    async fn acquire_as(&self, by: Bytes, deadline: Deadline) -> Result<Option<Guard>, Error> {
        self.check()?;
        let mut turn = None;
        if self.terms.kept {
            // Whoever takes what is at hand again and again, and waits for nothing else, lets others run: they hear who wants it.
            tokio::task::consume_budget().await;
            let same = Same { keys: self.keys.clone(), terms: self.terms.clone(), by: self.prefix.clone() };
            let Some(its) = self.client.turn(Arc::new(same), self.keep, deadline).await else { return Ok(None) };
            match Hold::again(&self.client, its) {
                Ok(hold) => return Ok(Some(Guard::new(hold))),
                Err(its) => turn = Some(its),
            }
        }
        let wish = Wish {
            number: turn.as_ref().map(|turn| turn.id),
            by,
            keys: self.keys.clone(),
            terms: self.terms.clone(),
            wait: deadline.left(Instant::now()),
            line: turn.as_ref().map(|turn| turn.line.clone()),
        };
        // From here on it is given back unless the caller has it.
        let (mut hold, mut answer) = Hold::acquire(&self.client, wish, Arc::<Seen>::default()).await?;
        let ended = answer.outcome().await;
        match ended.outcome {
            Outcome::Granted(_) => {
                if let Some(turn) = turn {
                    hold.keep(turn);
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
        let alone = |key| Self { keys: Keys::from_iter([key]), ..self.clone() };
        self.keys.iter().map(move |key| Ok((self.client.shared().name.position(key)?, alone(key))))
    }

    /// The same with the keys of another one.
    pub(crate) fn and(self, other: &Self) -> Self {
        let keys = self.keys.iter().chain(other.keys.iter()).collect();
        Self { keys, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let invalid = |message: &str| Err(Error::Invalid { message: format!("{}: {message}", self.keys) });
        if self.keys.is_empty() {
            return invalid("a lock needs one key at least");
        }
        if self.keys.len() > 1 && self.terms.limit != Limit::One {
            return invalid("several keys are mutexes: they are neither shared nor have a limit");
        }
        if self.terms.lease == Some(0) {
            return invalid("a lease is longer than nothing");
        }
        if self.terms.kept && (!self.terms.watchdog || self.terms.limit != Limit::One) {
            return invalid(
                "what is kept is a mutex that the server renews: neither with a lease, nor shared, nor with a limit",
            );
        }
        if self.terms.kept && self.keep.most == 0 {
            return invalid("what is kept is used once at least (keep_uses)");
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

/// What owners begin with: a name, and 128 bits that nobody else has (the standard library's seeds are the system's random
/// numbers).
fn fresh_prefix(name: &str) -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!("{name}:{:016x}{:016x}:", half(), half())
}

/// `host:pid`, for those who look at a lock.
fn this_process() -> String {
    let host: String = uname().nodename().to_string_lossy().replace('#', "?");
    format!("{}:{}", host.chars().take(LONGEST_HOST).collect::<String>(), std::process::id())
}
