//! Every future may be dropped at any point, and leaves no hold and no request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use holdfast_client::{Error, Guard};
use support::{Direction, Fate, Proxy, Random, Server};

use crate::common::{dropped_at, hold_up_acquisitions, is_free, locks, locks_over, names, soon, waiters};

#[tokio::test]
async fn acquire_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let mut polls = 0;
    loop {
        // A new client, so that the first poll connects.
        let locks = locks(&server);
        let lock = locks.lock("a").wait_forever();
        let done = dropped_at(polls, lock.acquire()).await;
        let granted = done.is_some();
        drop(done);
        locks.settle().await;
        assert!(is_free(&server, "a"), "dropped at poll {polls}");
        if granted {
            break;
        }
        polls += 1;
    }
    // Before the request was sent, and while its reply was pending.
    assert!(polls > 1, "it was dropped in between: {polls}");
}

/// Whatever request is pending at that time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_may_be_dropped_at_any_time() {
    const TASKS: usize = 10;
    const ROUNDS: usize = 100;
    let server = Server::start();
    let locks = locks(&server);
    let granted = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (lock, granted) = (locks.lock("a").wait_forever(), granted.clone());
            tokio::spawn(async move {
                let mut random = Random::new();
                for _ in 0..ROUNDS {
                    let time = Duration::from_micros(random.below(3_000));
                    if let Ok(guard) = tokio::time::timeout(time, lock.acquire()).await {
                        granted.fetch_add(1, Ordering::Relaxed);
                        drop(guard);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    locks.settle().await;
    assert!(is_free(&server, "a"));
    let granted = granted.load(Ordering::Relaxed);
    assert!((1..TASKS * ROUNDS).contains(&granted), "{granted} were granted");
}

#[tokio::test]
async fn wait_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let locks = locks(&server);
    let held = locks.lock("a").try_acquire().await.unwrap().unwrap();
    for polls in 0..6 {
        let lock = locks.lock("a").wait_forever();
        let waiting = tokio::time::timeout(Duration::from_millis(30), dropped_at(polls, lock.acquire())).await;
        assert!(!matches!(waiting, Ok(Some(_))), "the dropped request was granted");
        locks.settle().await;
        assert_eq!(waiters(&server, "a"), 0, "dropped at poll {polls}");
    }
    held.release().await.unwrap();
}

#[tokio::test]
async fn release_and_renew_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let locks = locks(&server);
    for renew in [false, true] {
        let mut polls = 0;
        loop {
            let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
            let done = if renew {
                let done = dropped_at(polls, guard.renew(Duration::from_secs(60))).await;
                drop(guard);
                done
            } else {
                dropped_at(polls, guard.release()).await
            };
            locks.settle().await;
            assert!(is_free(&server, "a"), "dropped at poll {polls}");
            match done {
                Some(done) => break done.unwrap(),
                None => polls += 1,
            }
        }
        assert!(polls > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_contended_rounds_leave_no_hold() {
    const TASKS: usize = 20;
    const ROUNDS: usize = 50;
    let server = Server::start();
    let locks = locks(&server);
    let inside = Arc::new(AtomicUsize::new(0));
    let dropped = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (locks, inside, dropped) = (locks.clone(), inside.clone(), dropped.clone());
            tokio::spawn(async move {
                let mut random = Random::new();
                for _ in 0..ROUNDS {
                    let keys = if random.below(4) == 0 { vec!["a", "b"] } else { vec!["a"] };
                    let lock = locks.lock_all(keys).wait_forever();
                    match dropped_at(random.below(8) as usize, lock.acquire()).await {
                        None => drop(dropped.fetch_add(1, Ordering::Relaxed)),
                        Some(guard) => held(guard.unwrap().unwrap(), &inside, &mut random).await,
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    locks.settle().await;
    assert!(is_free(&server, "a") && is_free(&server, "b"));
    let dropped = dropped.load(Ordering::Relaxed);
    assert!((TASKS * ROUNDS / 10..TASKS * ROUNDS * 9 / 10).contains(&dropped), "{dropped} were dropped");
}

/// Holds the lock alone, and releases it in one of several ways.
async fn held(guard: Guard, inside: &AtomicUsize, random: &mut Random) {
    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
    tokio::task::yield_now().await;
    inside.fetch_sub(1, Ordering::SeqCst);
    if random.below(2) == 0 {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn request_that_arrives_after_cancellation_is_not_granted() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    locks.lock("first").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    let late = hold_up_acquisitions(&proxy);
    let lock = locks.lock("a");
    {
        let mut asking = Box::pin(lock.try_acquire());
        tokio::select! {
            _ = &mut asking => panic!("the request is delayed"),
            () = soon("the request was sent", || late.load(Ordering::SeqCst) > 0) => {}
        }
    }
    // The cancellation follows on the same connection.
    proxy.pass();
    locks.settle().await;
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn lost_reply_leaves_no_hold() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    locks.lock("first").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    let mut asked = false;
    proxy.rule(move |toward, message| match toward {
        Direction::Server => {
            asked = asked || names(message, "LOCK.ACQUIRE");
            Fate::Pass
        }
        // The grant itself.
        Direction::Client if asked && message.starts_with(b":") => {
            asked = false;
            Fate::Cut
        }
        Direction::Client => Fate::Pass,
    });
    let error = locks.lock("a").try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    locks.settle().await;
    assert!(is_free(&server, "a"));
}
