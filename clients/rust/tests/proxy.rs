//! Waits and holds continue when connections break.

use std::time::Duration;

use holdfast_client::{Error, Locks};
use support::{Direction, Fate, Proxy, Server};

use crate::common::{SOON, holder, is_free, locks, locks_over, names, soon, waiters};

/// Waits until the client has read every earlier reply: replies come in order.
async fn wait_for_replies(locks: &Locks) {
    locks.lock("other").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_continue_after_a_cut() {
    const WAITERS: usize = 20;
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let tasks: Vec<_> = (0..WAITERS)
        .map(|_| {
            let lock = locks.lock("a").wait_forever();
            tokio::spawn(async move { lock.acquire().await.unwrap().unwrap().release().await.unwrap() })
        })
        .collect();
    soon("all requests wait", || waiters(&server, "a") == WAITERS).await;
    wait_for_replies(&locks).await;
    proxy.refuse();
    soon("no request waits", || waiters(&server, "a") == 0).await;
    proxy.accept();
    soon("all requests wait again", || waiters(&server, "a") == WAITERS).await;
    held.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn acquisition_waits_for_a_server_that_refuses_connections() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    proxy.refuse();
    let locks = locks_over(&proxy);
    let lock = locks.lock("a");
    let refused = async {
        let error = locks.lock("b").try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Connection { .. }), "{error}");
        proxy.accept();
    };
    let (guard, ()) = tokio::time::timeout(SOON, async { tokio::join!(lock.acquire(), refused) }).await.unwrap();
    guard.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn wait_times_out_without_a_server() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let lock = locks.lock("a").wait(Duration::from_secs(3));
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    wait_for_replies(&locks).await;
    proxy.refuse();
    let outcome = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap();
    assert!(outcome.unwrap().is_none());
    held.release().await.unwrap();
}

#[tokio::test]
async fn lost_grant_is_found_again() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let lock = locks.lock("a").wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    let mut cut = false;
    proxy.rule(move |toward, message| {
        let grant = toward == Direction::Client && message.windows(7).any(|part| part == b"granted");
        if grant && !cut {
            cut = true;
            return Fate::Cut;
        }
        Fate::Pass
    });
    let first = held.fence();
    held.release().await.unwrap();
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    assert!(guard.fence() > first);
    assert_eq!(holder(&server, "a").unwrap().as_bytes(), guard.owner().as_bytes());
    guard.release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn info_is_repeated_when_its_connection_ends() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    for lost in ["LOCK.INFO", "LOCK.FORCE"] {
        let mut cut = false;
        proxy.rule(move |toward, message| match toward {
            Direction::Server if names(message, lost) && !std::mem::replace(&mut cut, true) => Fate::Cut,
            _ => Fate::Pass,
        });
        match lost {
            "LOCK.INFO" => assert_eq!(locks.info("a").await.unwrap().unwrap().holders.len(), 1),
            // A request other than a read is not repeated, because its outcome is unknown.
            _ => assert!(matches!(locks.force("a").await, Err(Error::Connection { .. }))),
        }
    }
    held.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_cuts_leave_no_hold_and_no_double_hold() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    const TASKS: usize = 10;
    const TURNS: usize = 20;
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let inside = Arc::new(AtomicUsize::new(0));
    let turns = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (lock, inside, turns) = (locks.lock("a").wait_forever(), inside.clone(), turns.clone());
            tokio::spawn(async move {
                let mut mine = 0;
                while mine < TURNS {
                    // A request that was pending when the connection broke failed. If it was granted, the lock is released.
                    let Ok(granted) = lock.acquire().await else { continue };
                    let guard = granted.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    mine += 1;
                    turns.fetch_add(1, Ordering::SeqCst);
                    let _ = guard.release().await;
                }
            })
        })
        .collect();
    let mut cuts = 0;
    while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
        let before = turns.load(Ordering::SeqCst);
        soon("a task has made progress", || {
            turns.load(Ordering::SeqCst) > before || tasks.iter().all(tokio::task::JoinHandle::is_finished)
        })
        .await;
        if cuts < 40 {
            proxy.cut();
            cuts += 1;
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(cuts > 10, "{cuts} cuts");
    locks.settle().await;
    assert!(is_free(&server, "a"));
}
