//! Helpers of the tests.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use holdfast_client::redis::{self, Client, FromRedisValue, RedisConnectionInfo};
use holdfast_client::{Guard, Locks};
use support::{Direction, Fate, Proxy, Server};

/// Timeout for everything that has no duration of its own.
pub const SOON: Duration = Duration::from_secs(20);

/// A client of a server.
pub fn locks(server: &Server) -> Locks {
    Locks::new(server.client())
}

/// A client of a server, through a proxy.
pub fn locks_over(proxy: &Proxy) -> Locks {
    Locks::open(&format!("redis://{}", proxy.addr())).expect("an address")
}

/// Whether a message contains this argument of a command.
pub fn names(message: &[u8], word: &str) -> bool {
    message.windows(word.len()).any(|part| part == word.as_bytes())
}

/// From now on the proxy holds acquisitions. Returns their number.
pub fn hold_up_acquisitions(proxy: &Proxy) -> Arc<AtomicUsize> {
    let held_up = Arc::new(AtomicUsize::new(0));
    let count = held_up.clone();
    proxy.rule(move |toward, message| match toward {
        Direction::Server if names(message, "LOCK.ACQUIRE") => {
            count.fetch_add(1, Ordering::SeqCst);
            Fate::Hold
        }
        _ => Fate::Pass,
    });
    held_up
}

/// Waits until the condition holds, without blocking the runtime.
#[track_caller]
pub fn soon(what: &str, condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    let mut condition = condition;
    async move {
        let begin = Instant::now();
        while !condition() {
            assert!(Instant::now() < begin + SOON, "not within {SOON:?}: {what}, {caller}");
            tokio::time::sleep(support::pause(begin.elapsed())).await;
        }
    }
}

/// Runs a command, given as words separated by spaces.
#[track_caller]
pub fn say<T: FromRedisValue>(server: &Server, line: &str) -> T {
    let mut words = line.split(' ');
    let mut cmd = redis::cmd(words.next().expect("a command"));
    cmd.arg(words.collect::<Vec<_>>());
    cmd.query(&mut server.connect()).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// The owner of the mutex.
pub fn holder(server: &Server, key: &str) -> Option<String> {
    let fields: Vec<String> = say(server, &format!("HKEYS {key}"));
    fields.into_iter().find(|field| !field.starts_with('#'))
}

/// The number of requests that wait for the key.
pub fn waiters(server: &Server, key: &str) -> usize {
    say::<Vec<redis::Value>>(server, &format!("LOCK.WAITERS {key} COUNT 100000")).len()
}

/// The queue: each waiter's owner, and the connection of its session.
pub fn queue(server: &Server, key: &str) -> Vec<(String, i64)> {
    let waiters: Vec<HashMap<String, redis::Value>> = say(server, &format!("LOCK.WAITERS {key}"));
    let field = |waiter: &HashMap<String, redis::Value>, name: &str| waiter[name].clone();
    let owner = |waiter: &_| redis::from_redis_value(field(waiter, "owner")).unwrap();
    let client = |waiter: &_| redis::from_redis_value(field(waiter, "client")).unwrap();
    waiters.iter().map(|waiter| (owner(waiter), client(waiter))).collect()
}

/// Waits until it is certain that the lock is held: during a pause of this process or the server it is uncertain.
pub async fn held(guard: &Guard) {
    guard.check().await.expect("the lock is held");
    soon("the hold is certain", || guard.is_held()).await;
}

/// Whether the key has no holder and no waiter.
pub fn is_free(server: &Server, key: &str) -> bool {
    say::<redis::Value>(server, &format!("LOCK.INFO {key}")) == redis::Value::Nil
}

/// The connections of clients that read events.
pub fn sessions(server: &Server) -> Vec<i64> {
    clients(server).into_iter().filter(|(_, command)| command.contains("lock.events")).map(|(id, _)| id).collect()
}

/// All connections with their last command.
pub fn clients(server: &Server) -> Vec<(i64, String)> {
    let list: String = say(server, "CLIENT LIST");
    let field = |line: &str, name: &str| -> Option<String> {
        line.split(' ').find_map(|field| field.strip_prefix(name)).map(str::to_owned)
    };
    list.lines().filter_map(|line| Some((field(line, "id=")?.parse().ok()?, field(line, "cmd=")?))).collect()
}

/// A client of a server as this user.
pub fn client_as(server: &Server, user: &str, password: &str) -> Client {
    let settings = RedisConnectionInfo::default().set_username(user).set_password(password);
    let info = server.client().get_connection_info().clone().set_redis_settings(settings);
    Client::open(info).expect("an address")
}

/// A future that is dropped at the poll with this number, counted from 0. Its output is `None` then.
pub struct DroppedAt<F> {
    future: Pin<Box<F>>,
    polls: usize,
}

impl<F: Future> Future for DroppedAt<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 {
            return Poll::Ready(None);
        }
        self.polls -= 1;
        self.future.as_mut().poll(context).map(Some)
    }
}

/// The future, dropped at that poll.
pub fn dropped_at<F: Future>(polls: usize, future: F) -> DroppedAt<F> {
    DroppedAt { future: Box::pin(future), polls }
}
