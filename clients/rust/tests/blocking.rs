//! Programs without a tokio runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use holdfast_client::{Error, LossReason, RedLock, block_on};
use support::{Fate, Proxy, Server, until};

use crate::common::{SOON, is_free, locks, locks_over, names, say, waiters};

#[test]
fn threads_hold_lock_one_at_a_time() {
    const THREADS: usize = 8;
    const TURNS: usize = 20;
    let server = Server::start();
    let lock = locks(&server).lock("a").wait_forever();
    let inside = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..TURNS {
                    let guard = block_on(lock.acquire()).unwrap().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
                    inside.fetch_sub(1, Ordering::SeqCst);
                    block_on(guard.release()).unwrap();
                }
            });
        }
    });
    assert!(is_free(&server, "a"));
}

#[test]
fn holds_are_renewed_while_the_program_does_something_else() {
    const LEASE: Duration = Duration::from_secs(2);
    let server = Server::start();
    let guard = block_on(locks(&server).lock("a").watched(LEASE).try_acquire()).unwrap().unwrap();
    let begin = Instant::now();
    until(SOON, "two leases have passed", || begin.elapsed() > LEASE * 2);
    block_on(guard.check()).unwrap();
    // A dropped guard is released in the background.
    drop(guard);
    until(SOON, "the lock is free", || is_free(&server, "a"));
}

#[test]
fn thread_can_wait_for_loss() {
    let server = Server::start();
    let guard = block_on(locks(&server).lock("a").try_acquire()).unwrap().unwrap();
    std::thread::scope(|scope| {
        let told = scope.spawn(|| block_on(guard.lost()));
        let _: i64 = say(&server, "LOCK.FORCE a");
        assert_eq!(told.join().unwrap(), LossReason::Forced);
    });
    assert!(matches!(block_on(guard.release()), Err(Error::Lost { why: LossReason::Forced, .. })));
}

#[test]
fn timeout_works_without_a_runtime() {
    let server = Server::start();
    let locks = locks(&server);
    let held = block_on(locks.lock("a").try_acquire()).unwrap().unwrap();
    assert!(block_on(locks.lock("a").wait(Duration::from_millis(50)).acquire()).unwrap().is_none());
    assert_eq!(waiters(&server, "a"), 0);
    block_on(held.release()).unwrap();
}

#[test]
fn redlock_works_without_a_runtime() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let lock = RedLock::new(servers.iter().map(locks), "a").server_timeout(Duration::from_secs(5));
    let guard = block_on(lock.try_acquire()).unwrap().unwrap();
    assert!(guard.valid_until().is_some());
    block_on(guard.release()).unwrap();
    until(SOON, "all locks are free", || servers.iter().all(|server| is_free(server, "a")));
}

/// As when `main` returns.
#[test]
fn drop_of_the_last_handle_waits_for_releases() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let guard = block_on(locks.lock("a").try_acquire()).unwrap().unwrap();
    let held_up = Arc::new(AtomicBool::new(false));
    let hold_up = held_up.clone();
    proxy.rule(move |_, message| {
        hold_up.fetch_or(names(message, "LOCK.RELEASE"), Ordering::SeqCst);
        if hold_up.load(Ordering::SeqCst) { Fate::Hold } else { Fate::Pass }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until(SOON, "the release is on its way", || held_up.load(Ordering::SeqCst));
            proxy.rule(|_, _| Fate::Pass);
        });
        drop(guard);
        drop(locks);
        assert!(is_free(&server, "a"));
    });
}
