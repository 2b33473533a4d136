//! A session: the connection that stands for this process at one server, and what is known of its life.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult, Value, cmd};

use crate::place::{Failure, Place};
use crate::requests::{Requests, SILENT};
use crate::terms::Lease;
use crate::wire::{self, Alive};

/// Longer leases are counted as this: the server allows no longer ones.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// An answer that is so late will not come, on either connection.
const LATE: Duration = SILENT;

/// One session. It ends with its connection; what waits or is held then belongs to another one.
#[derive(Debug)]
pub(crate) struct Session {
    id: String,
    requests: Requests,
    life: Mutex<Life>,
    has_ended: AtomicBool,
}

/// What is known of a session's life. The server answers its questions as often as the shortest lease needs that it
/// keeps alive for the session. So whoever holds knows how long the hold is sure to last if the connection ends, even if
/// this process slept meanwhile.
#[derive(Debug)]
struct Life {
    /// When the newest `LOCK.NEXT` was sent that was answered: then the session was alive.
    alive: Instant,
    /// When the answer to the newest one is overdue.
    due: Instant,
    /// What the server said last.
    told: Alive,
    /// It answers within this time if nobody needs it sooner.
    patience: Option<Duration>,
}

/// A session, equal to itself only.
#[derive(Clone)]
pub(crate) struct SessionRef(Arc<Session>);

/// A session that was opened, with its own connection, to be read from.
pub(crate) struct Opened {
    pub(crate) session: SessionRef,
    pub(crate) connection: MultiplexedConnection,
}

/// Opens one, which replaces those that the server may not know to have ended.
pub(crate) async fn open(
    place: &Place,
    config: &AsyncConnectionConfig,
    replaced: &[SessionRef],
) -> Result<Opened, Failure> {
    let opened = Instant::now();
    let client = place.client().await?;
    let server = client.get_connection_info().addr().to_string();
    let fail = |error| Failure { server: server.clone(), error };
    let Connections { own: connection, requests, id, told } =
        open_connections(&client, config, replaced).await.map_err(fail)?;
    let session = Session {
        id,
        requests: Requests::new(requests, server.clone()),
        life: Mutex::new(Life { alive: opened, due: opened + LATE, told, patience: None }),
        has_ended: AtomicBool::new(false),
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

    /// It has ended; to be said before those who use it are told.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        self.requests.end();
    }

    /// Whether the server took writes when it was last heard of.
    pub(crate) fn takes_writes(&self) -> bool {
        self.life().told.takes_writes
    }

    /// Whether the server gives a wait that is asked for again the place that it had.
    pub(crate) fn takes_waited(&self) -> bool {
        self.life().told.takes_waited
    }

    /// Whether those who use it have been told, or are about to be, that it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// When the newest `LOCK.NEXT` was sent that was answered.
    pub(crate) fn asked_at(&self) -> Instant {
        self.life().alive
    }

    /// Until when a lease of this length that the server renews for this session can't have run out.
    pub(crate) fn sure_of(&self, lease: Duration) -> Instant {
        let life = self.life();
        life.alive + lease.mul_f64(life.told.sure)
    }

    /// From then on the server is silent, unless there is another sign of life before.
    pub(crate) fn due(&self) -> Instant {
        self.life().due
    }

    /// How long a lease is that is asked for now.
    pub(crate) fn lease(&self, lease: Lease) -> Duration {
        let lease = match lease {
            Lease::Watched(lease) => lease.unwrap_or_else(|| self.life().told.default_lease),
            Lease::Fixed(lease) => lease,
        };
        lease.min(LONGEST_LEASE)
    }

    /// If it dies, that is to be seen within this time.
    pub(crate) fn missed_within(&self, time: Duration) {
        // An answer is overdue after twice the time that it may take.
        let patience = time / 2;
        let mut life = self.life();
        // The open question may take longer. Whoever finds it overdue asks another one before it calls the server silent.
        life.due = life.due.min(Instant::now() + time);
        life.patience = Some(life.patience.map_or(patience, |before| before.min(patience)));
    }

    /// A question is about to be sent. How long the server may wait with its answer, if that is not the server's own
    /// business; and within which time it comes.
    fn ask(&self, sent: Instant) -> (Option<Duration>, Duration) {
        let mut life = self.life();
        let within = life.patience.map_or(life.told.next_within, |patience| patience.min(life.told.next_within));
        life.due = sent + within * 2;
        (life.patience, within)
    }

    /// What was asked then was answered.
    fn answered(&self, sent: Instant, told: Option<Alive>) {
        let mut life = self.life();
        life.alive = sent;
        if let Some(told) = told {
            life.told = told;
        }
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
            let sent = Instant::now();
            let (wait, within) = session.ask(sent);
            let next = wire::next(wait);
            let news = match tokio::time::timeout(within + LATE, next.query_async::<Value>(&mut connection)).await {
                // As if nothing had happened: somebody woke it.
                Ok(Err(error)) if error.code() == Some("UNBLOCKED") => Ok(wire::Answer::default()),
                Ok(reply) => reply.and_then(wire::answer),
                Err(_late) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
            }?;
            session.answered(sent, news.alive);
            Ok(news.events)
        }
    }
}

/// What a session is made of.
struct Connections {
    own: MultiplexedConnection,
    requests: MultiplexedConnection,
    id: String,
    told: Alive,
}

/// Both connections, the session's id, and what the server says of its life.
async fn open_connections(
    client: &Client,
    config: &AsyncConnectionConfig,
    replaced: &[SessionRef],
) -> RedisResult<Connections> {
    // Of a request whose answer does not come, nothing is known until its session has ended: one limit, for both.
    let patient = config.clone().set_response_timeout(None);
    let open = async {
        let mut own = client.get_multiplexed_async_connection_with_config(&patient).await?;
        let id = match wire::begin(replaced.iter().map(|session| session.id())).query_async(&mut own).await {
            // A server of version 0.2.
            Err(error) if !replaced.is_empty() && error.code() == Some("ERR") => {
                wire::begin([].into_iter()).query_async(&mut own).await?
            }
            answer => answer?,
        };
        // Nothing waits yet, so this is answered at once; and it shows that this user may ask.
        let told = wire::alive(cmd("LOCK.NEXT").arg("ALIVE").query_async(&mut own).await?)?;
        let requests = client.get_multiplexed_async_connection_with_config(&patient).await?;
        Ok(Connections { own, requests, id, told })
    };
    match tokio::time::timeout(LATE, open).await {
        Ok(opened) => opened,
        Err(_late) => Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
    }
}
