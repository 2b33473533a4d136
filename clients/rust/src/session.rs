//! A session: the connection that stands for this process at one server, and the task that reads from it.
//!
//! The task opens the connection when somebody needs it, asks `LOCK.NEXT` on it in a loop, and says what it hears to
//! whoever waits for it. When the connection ends, so does the session; the next one is opened when somebody needs it,
//! and whatever waits or is held needs it.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, RedisError, RedisResult, Value, cmd};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use crate::requests::Requests;
use crate::servers::Place;
use crate::shared::{Returned, Shared};
use crate::terms::Lease;
use crate::wire;

/// The server's default lease where nobody may ask for it (`CONFIG GET`).
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// Longer leases are counted as this: the server allows no longer ones.
const LONGEST_LEASE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// An event is told at once; this often it is told that there is none, as a sign of life. So whoever holds knows how
/// long the hold is sure to last if the connection ends, even if this process slept meanwhile.
const SIGNS_OF_LIFE_A_LEASE: u32 = 8;
const QUICKEST_SIGN_OF_LIFE: Duration = Duration::from_millis(10);
const SLOWEST_SIGN_OF_LIFE: Duration = Duration::from_secs(10);
/// A sign of life that is so late will not come. Not sooner: a server that stands still for a while is no dead one, and
/// who gives the session up gives up the places in all queues.
const LATE: Duration = Duration::from_secs(10);

/// One session. It ends with its connection; what waits or is held then belongs to another one.
#[derive(Debug)]
pub(crate) struct Session {
    id: String,
    requests: Requests,
    default_lease: Duration,
    /// The shortest lease that it keeps alive.
    shortest_lease: Mutex<Duration>,
    life: Mutex<Life>,
}

/// What is known of a session's life.
#[derive(Debug)]
struct Life {
    /// When the newest `LOCK.NEXT` was sent that was answered: then the session was alive.
    alive: Instant,
    /// When the next sign of life is overdue.
    due: Instant,
}

/// A session, equal to itself only.
#[derive(Clone)]
pub(crate) struct SessionRef(Arc<Session>);

impl Session {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Its server's address, for messages.
    pub(crate) fn server(&self) -> &str {
        self.requests.server()
    }

    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// When it was alive for certain.
    pub(crate) fn alive(&self) -> Instant {
        self.life().alive
    }

    /// From then on it is in doubt, unless there is another sign of life before.
    pub(crate) fn due(&self) -> Instant {
        self.life().due
    }

    /// How long a lease is.
    pub(crate) fn lease(&self, lease: Lease) -> Duration {
        let lease = match lease {
            Lease::Watched(lease) => lease.unwrap_or(self.default_lease),
            Lease::Fixed(lease) => lease,
        };
        lease.min(LONGEST_LEASE)
    }

    /// A hold with this lease is to be kept alive.
    pub(crate) fn watches(&self, lease: Duration) {
        let mut shortest = self.shortest_lease.lock().unwrap_or_else(PoisonError::into_inner);
        *shortest = lease.min(*shortest);
    }

    fn sign_of_life(&self) -> Duration {
        let shortest = *self.shortest_lease.lock().unwrap_or_else(PoisonError::into_inner);
        (shortest / SIGNS_OF_LIFE_A_LEASE).clamp(QUICKEST_SIGN_OF_LIFE, SLOWEST_SIGN_OF_LIFE)
    }

    /// Asked for events now, to be answered within `wait`.
    fn asked(&self, sent: Instant, wait: Duration) {
        self.life().due = sent + wait * 2;
    }

    /// What was asked then was answered.
    fn answered(&self, sent: Instant) {
        self.life().alive = sent;
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for SessionRef {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.0
    }
}

impl PartialEq for SessionRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for SessionRef {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "session {} of {}", self.id, self.server())
    }
}

/// What the task is asked to do.
pub(crate) enum Order {
    /// Somebody needs a session.
    Open,
    /// This one is of no use any more: its server does not know it, or has become a replica.
    Leave(SessionRef),
    /// Nobody wants this any more.
    GiveBack(Returned),
}

/// Whether there is a session.
#[derive(Clone, Debug)]
pub(crate) enum Link {
    Down,
    Up(SessionRef),
    /// The last attempt to open one failed.
    Failed(Failure),
}

/// Why a server can't be used.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) server: String,
    pub(crate) error: RedisError,
}

pub(crate) struct Task {
    pub(crate) place: Arc<Place>,
    pub(crate) config: AsyncConnectionConfig,
    pub(crate) link: Arc<watch::Sender<Link>>,
    pub(crate) shared: Weak<Shared>,
    pub(crate) orders: UnboundedReceiver<Order>,
}

/// The runtime may end before those who need a session: then the next one of them finds none.
impl Drop for Task {
    fn drop(&mut self) {
        self.link.send_replace(Link::Down);
    }
}

/// Why a session is not read from any more.
enum End {
    /// Its connection is gone, or of no use.
    Ended,
    /// Nobody is left who could need it.
    Closed,
}

impl Task {
    /// Runs until everybody who could need a session is gone.
    pub(crate) async fn run(mut self) {
        while let Some(order) = self.orders.recv().await {
            match order {
                Order::Open => {}
                // That one has ended already.
                Order::Leave(_) => continue,
                Order::GiveBack(returned) => {
                    tokio::spawn(returned.give_back());
                    continue;
                }
            }
            let (session, connection) = match self.open().await {
                Ok(opened) => opened,
                Err(failure) => {
                    self.answer_the_others();
                    self.link.send_replace(Link::Failed(failure));
                    continue;
                }
            };
            self.link.send_replace(Link::Up(session.clone()));
            let end = self.serve(&session, connection).await;
            self.link.send_replace(Link::Down);
            match end {
                End::Closed => return,
                End::Ended => {
                    if let Some(shared) = self.shared.upgrade() {
                        shared.session_ended(&session);
                    }
                }
            }
        }
    }

    async fn open(&self) -> Result<(SessionRef, MultiplexedConnection), Failure> {
        let opened = Instant::now();
        let client = self.place.client().await?;
        let server = client.get_connection_info().addr().to_string();
        let fail = |error| Failure { server: server.clone(), error };
        let (connection, id, lease) = open_connection(&client, &self.config).await.map_err(fail)?;
        let requests = Requests::new(client, server.clone(), self.config.clone());
        let session = Session {
            id,
            requests,
            default_lease: lease,
            shortest_lease: Mutex::new(lease),
            life: Mutex::new(Life { alive: opened, due: opened + LATE }),
        };
        Ok((SessionRef(Arc::new(session)), connection))
    }

    /// Hears what there is to hear until the connection ends.
    async fn serve(&mut self, session: &SessionRef, connection: MultiplexedConnection) -> End {
        // An answer that nobody reads is lost: the question stays when an order comes in between.
        let mut answer = Box::pin(ask(session.clone(), connection.clone()));
        loop {
            let (sent, events) = tokio::select! {
                (sent, events) = &mut answer => (sent, events),
                order = self.orders.recv() => match order {
                    None => return End::Closed,
                    Some(Order::Open) => continue,
                    Some(Order::Leave(left)) if left == *session => return End::Ended,
                    Some(Order::Leave(_)) => continue,
                    Some(Order::GiveBack(returned)) => {
                        tokio::spawn(returned.give_back());
                        continue;
                    }
                },
            };
            let Ok(events) = events else { return End::Ended };
            session.answered(sent);
            if let Some(shared) = self.shared.upgrade() {
                shared.told(session, events);
            }
            answer = Box::pin(ask(session.clone(), connection.clone()));
        }
    }

    /// Those who asked while an attempt was under way: it was theirs too.
    fn answer_the_others(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            if let Order::GiveBack(returned) = order {
                tokio::spawn(returned.give_back());
            }
        }
    }
}

/// The next events, or none as a sign of life, and when that was asked.
async fn ask(session: SessionRef, mut connection: MultiplexedConnection) -> (Instant, RedisResult<Vec<wire::Event>>) {
    let (sent, wait) = (Instant::now(), session.sign_of_life());
    session.asked(sent, wait);
    let next = wire::next(wait);
    let reply = tokio::time::timeout(wait + LATE, next.query_async::<Value>(&mut connection)).await;
    let events = match reply {
        // As if nothing had happened: somebody woke it.
        Ok(Err(error)) if error.code() == Some("UNBLOCKED") => Ok(Vec::new()),
        Ok(reply) => reply.and_then(wire::events),
        Err(_late) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    };
    (sent, events)
}

/// The session's own connection, its id, and the server's default lease.
async fn open_connection(
    client: &Client,
    config: &AsyncConnectionConfig,
) -> RedisResult<(MultiplexedConnection, String, Duration)> {
    let patient = config.clone().set_response_timeout(None);
    let open = async {
        let mut connection = client.get_multiplexed_async_connection_with_config(&patient).await?;
        let id = cmd("LOCK.OWNER").query_async(&mut connection).await?;
        // Nothing waits yet; it shows that this user may ask.
        let () = cmd("LOCK.NEXT").query_async::<Value>(&mut connection).await.map(drop)?;
        let lease = default_lease(&mut connection).await?;
        Ok((connection, id, lease))
    };
    match tokio::time::timeout(LATE, open).await {
        Ok(opened) => opened,
        Err(_late) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}

async fn default_lease(connection: &mut MultiplexedConnection) -> RedisResult<Duration> {
    let get: Cmd = {
        let mut get = cmd("CONFIG");
        get.arg("GET").arg("holdfast.default-lease");
        get
    };
    match get.query_async::<Value>(connection).await {
        Ok(reply) => Ok(wire::default_lease(&reply).unwrap_or(DEFAULT_LEASE)),
        // Not allowed to ask.
        Err(error) if error.code().is_some() => Ok(DEFAULT_LEASE),
        Err(error) => Err(error),
    }
}
