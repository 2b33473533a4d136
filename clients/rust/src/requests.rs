//! The connection that requests of one session go over, all at once and in order. It stands and falls with the session: if
//! it breaks, or is silent for too long while something is owed, the session ends, and no request is sent over it again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, RedisResult, Value, cmd, make_extension_error, pipe};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep_until, timeout};

/// Without a single reply for so long while one is owed, the connection is of no use. Not sooner: a server that stands still
/// for a while is no dead one, and who gives the session up gives up the places in all queues.
pub(crate) const SILENT: Duration = Duration::from_secs(10);
/// From then on it is asked for a sign of life: whoever is owed the reply may have gone, and would not notice that it comes.
const DOUBTED: Duration = Duration::from_secs(5);
/// Between two such questions, if the first fails at once.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct Requests {
    server: String,
    state: Mutex<State>,
    /// Something is wrong with the connection that needs no waiting for.
    broken: Notify,
    ended: watch::Sender<bool>,
}

struct State {
    /// None once the session has ended.
    connection: Option<MultiplexedConnection>,
    /// How many requests have not been answered, of those that somebody waits for.
    owed: usize,
    /// For how long something has been owed, and no reply came.
    silent_since: Option<Instant>,
}

/// Whether the server is to answer for a key that is on its way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    No,
    Asked,
}

impl Requests {
    pub(crate) fn new(connection: MultiplexedConnection, server: String) -> Self {
        let state = State { connection: Some(connection), owed: 0, silent_since: None };
        Self { server, state: Mutex::new(state), broken: Notify::new(), ended: watch::Sender::new(false) }
    }

    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and reads its reply. If the session ends meanwhile, it is not known whether it took effect; if it
    /// had ended before, the error is the server's own, and nothing was sent.
    pub(crate) async fn send(&self, cmd: &Cmd, redirect: Redirect) -> RedisResult<Value> {
        let mut ended = self.ended.subscribe();
        let (mut connection, owed) = self.connection()?;
        let asked = async {
            match redirect {
                Redirect::No => cmd.query_async(&mut connection).await,
                Redirect::Asked => {
                    let mut both = pipe();
                    both.cmd("ASKING").ignore().add_command(cmd.clone());
                    both.query_async::<(Value,)>(&mut connection).await.map(|(reply,)| reply)
                }
            }
        };
        let mut has_ended = async || drop(ended.wait_for(|ended| *ended).await);
        let reply = tokio::select! {
            biased;
            reply = asked => reply,
            () = has_ended() => Err(std::io::Error::from(std::io::ErrorKind::ConnectionAborted).into()),
        };
        drop(owed);
        if is_reply(&reply) {
            self.heard();
        } else if reply.as_ref().is_err_and(RedisError::is_unrecoverable_error) {
            // Whoever is told so early would ask the same session again.
            self.broken.notify_one();
            has_ended().await;
        }
        reply
    }

    /// Returns when the connection is of no use any more: broken, or silent for too long. The time in which the server
    /// takes no writes does not count.
    pub(crate) async fn fails(&self, takes_writes: impl Fn() -> bool) {
        tokio::select! {
            () = self.broken.notified() => {}
            () = self.is_silent(takes_writes) => {}
        }
    }

    async fn is_silent(&self, takes_writes: impl Fn() -> bool) {
        loop {
            let now = Instant::now();
            let since = self.state().silent_since;
            // What is sent while nothing is owed is younger than that when it is looked at again.
            let begin = since.unwrap_or(now);
            if now < begin + DOUBTED {
                sleep_until((begin + DOUBTED).into()).await;
            } else if !takes_writes() {
                self.state().silent_since = Some(now);
            } else if !self.answers().await && begin + SILENT <= Instant::now() && self.state().silent_since == since {
                return;
            }
        }
    }

    /// Whether the server answers a question of its own. If this process stood still, that takes in what came meanwhile.
    async fn answers(&self) -> bool {
        let question = cmd("LOCK.OWNER");
        let asked = timeout(SILENT - DOUBTED, self.send(&question, Redirect::No));
        let answered = matches!(&asked.await, Ok(reply) if is_reply(reply));
        if !answered {
            tokio::time::sleep(PAUSE).await;
        }
        answered
    }

    /// No request is sent from now on, and those that are not answered will not be.
    pub(crate) fn end(&self) {
        self.state().connection = None;
        self.ended.send_replace(true);
    }

    fn connection(&self) -> RedisResult<(MultiplexedConnection, Owed<'_>)> {
        let mut state = self.state();
        let Some(connection) = state.connection.clone() else {
            return Err(make_extension_error("NOSESSION".to_owned(), Some("it has ended".to_owned())));
        };
        state.owed += 1;
        state.silent_since.get_or_insert_with(Instant::now);
        Ok((connection, Owed(self)))
    }

    fn heard(&self) {
        let mut state = self.state();
        state.silent_since = (state.owed > 0).then(Instant::now);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reply that somebody waits for.
struct Owed<'r>(&'r Requests);

impl Drop for Owed<'_> {
    fn drop(&mut self) {
        self.0.state().owed -= 1;
    }
}

/// Whether the server has said this: an error may be a reply, too.
fn is_reply<T>(reply: &Result<T, RedisError>) -> bool {
    reply.as_ref().map_or_else(|error| error.code().is_some(), |_| true)
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "requests to {}", self.server)
    }
}
