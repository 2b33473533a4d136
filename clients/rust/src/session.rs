//! A session: the connection that stands for this process at one server, and what is known of its life.

use std::fmt;
use std::ops::Deref;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, RedisResult, Value, cmd};
use tokio::sync::Notify;

use crate::place::{Failure, Place};
use crate::requests::{Redirect, Requests};
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
    shorter: Notify,
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

/// A session that was opened, with its own connection, to be read from.
pub(crate) struct Opened {
    pub(crate) session: SessionRef,
    pub(crate) connection: MultiplexedConnection,
}

/// Opens one.
pub(crate) async fn open(place: &Place, config: &AsyncConnectionConfig) -> Result<Opened, Failure> {
    let opened = Instant::now();
    let client = place.client().await?;
    let server = client.get_connection_info().addr().to_string();
    let fail = |error| Failure { server: server.clone(), error };
    let (connection, id, lease) = open_connection(&client, config).await.map_err(fail)?;
    let session = Session {
        id,
        requests: Requests::new(client, server.clone(), config.clone()),
        default_lease: lease,
        shortest_lease: Mutex::new(lease),
        shorter: Notify::new(),
        life: Mutex::new(Life { alive: opened, due: opened + LATE }),
    };
    Ok(Opened { session: SessionRef(Arc::new(session)), connection })
}

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
        if lease < *shortest {
            *shortest = lease;
            self.shorter.notify_one();
        }
    }

    /// If it dies, that is to be seen within this time.
    pub(crate) fn missed_within(&self, time: Duration) {
        // It is overdue after twice the time between two signs.
        self.watches(time.saturating_mul(SIGNS_OF_LIFE_A_LEASE) / 2);
    }

    fn sign_of_life(&self) -> Duration {
        let shortest = *self.shortest_lease.lock().unwrap_or_else(PoisonError::into_inner);
        (shortest / SIGNS_OF_LIFE_A_LEASE).clamp(QUICKEST_SIGN_OF_LIFE, SLOWEST_SIGN_OF_LIFE)
    }

    /// Asked for events now, to be answered within `wait`.
    fn asked(&self, sent: Instant, wait: Duration) {
        self.life().due = sent + wait * 2;
    }

    /// A question that was asked then may wait too long for a lease that came since: the server is told to answer it at
    /// once. Returns when that is done, or can't be.
    async fn hurry(&self, sent: Instant, wait: Duration) {
        while wait <= self.sign_of_life() {
            self.shorter.notified().await;
        }
        let sooner = self.sign_of_life();
        self.expect(Instant::now() + sooner * 2);
        let unblock = wire::unblock(&self.id);
        loop {
            match self.requests.send(&unblock, Redirect::No).await {
                // The question is on its way still.
                Ok(Value::Int(0)) => tokio::time::sleep(sooner).await,
                Ok(_) => return,
                // This user may not, so the sign of life comes when it comes.
                Err(_) => return self.asked(sent, wait),
            }
        }
    }

    /// The next sign of life is overdue then, if not before.
    fn expect(&self, due: Instant) {
        let mut life = self.life();
        life.due = life.due.min(due);
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

impl Opened {
    /// The next events, or none as a sign of life. What it returns is to be waited for to its end: an answer that nobody
    /// reads is lost.
    pub(crate) fn next(&self) -> impl Future<Output = RedisResult<Vec<wire::Event>>> + Send + use<> {
        let (session, mut connection) = (self.session.clone(), self.connection.clone());
        async move {
            let (sent, wait) = (Instant::now(), session.sign_of_life());
            session.asked(sent, wait);
            let next = wire::next(wait);
            let mut answer = pin!(tokio::time::timeout(wait + LATE, next.query_async::<Value>(&mut connection)));
            let reply = tokio::select! {
                reply = &mut answer => reply,
                () = session.hurry(sent, wait) => answer.await,
            };
            let events = match reply {
                // As if nothing had happened: somebody woke it.
                Ok(Err(error)) if error.code() == Some("UNBLOCKED") => Ok(Vec::new()),
                Ok(reply) => reply.and_then(wire::events),
                Err(_late) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            };
            if events.is_ok() {
                session.answered(sent);
            }
            events
        }
    }
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
