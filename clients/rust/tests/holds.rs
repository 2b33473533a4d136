//! How long a hold lasts, and how it is released.

use std::time::{Duration, Instant};

use holdfast_client::{Error, LossReason};
use support::{Fate, Proxy, Server};

use crate::common::{SOON, held, holder, is_free, locks, locks_over, say, soon};

fn ttl(server: &Server, key: &str) -> i64 {
    say(server, &format!("PTTL {key}"))
}

/// Waits until this many leases have passed.
async fn wait_for_leases(count: u32, lease: Duration) {
    let begin = Instant::now();
    soon("some leases have passed", || begin.elapsed() > lease * count).await;
}

#[tokio::test]
async fn hold_outlives_its_lease_while_process_runs() {
    let lease = Duration::from_secs(2);
    let server = Server::builder().module_args(&["default-lease", "2000"]).start();
    let locks = locks(&server);
    let default = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let own = locks.lock("b").watched(lease * 3 / 2).try_acquire().await.unwrap().unwrap();
    wait_for_leases(3, lease).await;
    assert!(holder(&server, "a").is_some() && holder(&server, "b").is_some());
    default.release().await.unwrap();
    own.release().await.unwrap();
}

#[tokio::test]
async fn fixed_lease_is_not_renewed() {
    let server = Server::start();
    let guard = locks(&server).lock("a").lease(Duration::from_secs(2)).try_acquire().await.unwrap().unwrap();
    let lost = tokio::time::timeout(SOON, guard.lost()).await.unwrap();
    assert_eq!(lost, LossReason::Expired);
    soon("the lock is free", || is_free(&server, "a")).await;
    let error = guard.release().await.unwrap_err();
    assert!(matches!(error, Error::Lost { why: LossReason::Expired, .. }), "{error}");
}

#[tokio::test]
async fn renew_changes_lease() {
    let server = Server::start();
    let locks = locks(&server);
    let fixed = locks.lock("a").lease(Duration::from_secs(5)).try_acquire().await.unwrap().unwrap();
    fixed.renew(Duration::from_secs(100)).await.unwrap();
    assert!((90_000..=100_000).contains(&ttl(&server, "a")));
    fixed.renew(Duration::from_secs(2)).await.unwrap();
    assert_eq!(tokio::time::timeout(SOON, fixed.lost()).await.unwrap(), LossReason::Expired);
    let error = fixed.renew(Duration::from_secs(100)).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    let watched = locks.lock("b").try_acquire().await.unwrap().unwrap();
    let lease = Duration::from_secs(2);
    watched.renew(lease).await.unwrap();
    wait_for_leases(2, lease).await;
    held(&watched).await;
    assert!(holder(&server, "b").is_some());
    watched.release().await.unwrap();
}

#[tokio::test]
async fn dropped_guard_is_released() {
    let server = Server::start();
    let locks = locks(&server);
    let keys: Vec<String> = (0..100).map(|number| format!("k{number}")).collect();
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(locks.lock(key).try_acquire().await.unwrap().unwrap());
    }
    drop(guards);
    locks.settle().await;
    assert!(keys.iter().all(|key| is_free(&server, key)));
}

#[test]
fn guard_may_be_dropped_outside_a_runtime() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let locks = locks(&server);
    let guard = runtime.block_on(locks.lock("a").try_acquire()).unwrap().unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    support::until(SOON, "the lock is released", || is_free(&server, "a"));
}

#[test]
fn guard_may_outlive_its_runtime() {
    let server = Server::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks(&server);
    let first = runtime();
    let guard = first.block_on(locks.lock("a").ephemeral().try_acquire()).unwrap().unwrap();
    let end = std::thread::spawn(move || drop(first));
    support::until(SOON, "the runtime ends", || end.is_finished());
    support::until(SOON, "the hold ended with its connection", || is_free(&server, "a"));
    drop(guard);
    // The same handle continues in another runtime.
    let guard = runtime().block_on(async { locks.lock("a").try_acquire().await.unwrap().unwrap() });
    assert!(holder(&server, "a").is_some());
    drop(guard);
}

/// Whichever runtime was first.
#[test]
fn waiters_continue_when_the_reading_runtime_ends() {
    let server = Server::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let other_runtime = runtime();
    let other = locks(&server);
    let guard = other_runtime.block_on(other.lock("a").try_acquire()).unwrap().unwrap();
    let locks = locks(&server);
    let first = runtime();
    first.block_on(async { locks.lock("b").try_acquire().await.unwrap().unwrap().release().await.unwrap() });
    let (lock, holder) = (locks.lock("a").wait_forever(), locks.lock("c").watched(Duration::from_secs(3)));
    let kept = first.block_on(holder.try_acquire()).unwrap().unwrap();
    let waiting = std::thread::spawn(move || {
        runtime().block_on(async {
            let guard = lock.acquire().await.unwrap().unwrap();
            guard.release().await.unwrap();
            // This runtime keeps the other one's holds alive.
            let begin = Instant::now();
            soon("two leases have passed", || begin.elapsed() > Duration::from_secs(6)).await;
            held(&kept).await;
            kept.release().await.unwrap();
        });
    });
    first.block_on(soon("the request waits", || crate::common::waiters(&server, "a") == 1));
    drop(first);
    support::until(SOON, "the request waits again", || crate::common::waiters(&server, "a") == 1);
    other_runtime.block_on(guard.release()).unwrap();
    waiting.join().unwrap();
    assert!(is_free(&server, "a") && is_free(&server, "c"));
}

#[tokio::test]
async fn connections_end_with_the_last_handle() {
    let server = Server::start();
    let connected = || crate::common::clients(&server).len();
    let locks = locks(&server);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    soon("it has two connections, and another one asks", || connected() == 3).await;
    drop(locks);
    guard.check().await.unwrap();
    drop(guard);
    soon("only the connection that asks is left", || connected() == 1).await;
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn while_held_runs_future_until_loss() {
    let server = Server::start();
    let guard = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    assert_eq!(guard.while_held(async { 7 }).await.unwrap(), 7);
    let stopped = guard.while_held(std::future::pending::<()>());
    let (stopped, ()) = tokio::join!(stopped, async {
        let broken: i64 = say(&server, "LOCK.FORCE a");
        assert_eq!(broken, 1);
    });
    assert!(matches!(stopped, Err(Error::Lost { why: LossReason::Forced, .. })));
    let never = guard.while_held(async { unreachable!("the hold is lost") }).await;
    assert!(never.is_err());
}

#[tokio::test]
async fn concurrent_renewals_succeed() {
    let server = Server::start();
    let guard = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let renew = |seconds| guard.renew(Duration::from_secs(seconds));
    let (first, second, third) = tokio::join!(renew(600), renew(700), renew(800));
    first.and(second).and(third).unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn closed_client_holds_nothing_and_refuses_requests() {
    let server = Server::start();
    let connected = || crate::common::clients(&server).len();
    let locks = locks(&server);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock("a").wait_forever();
        async move { lock.acquire().await }
    });
    soon("the request waits", || crate::common::waiters(&server, "a") == 1).await;
    locks.close().await;
    assert!(is_free(&server, "a"));
    assert!(!guard.is_held());
    assert_eq!(guard.lost().await, LossReason::Disconnected);
    assert!(matches!(guard.release().await, Err(Error::Lost { .. })));
    for error in [waiting.await.unwrap().unwrap_err(), locks.lock("b").acquire().await.unwrap_err()] {
        assert!(matches!(error, Error::Connection { .. }) && error.to_string().contains("closed"), "{error}");
    }
    soon("only the connection that asks is left", || connected() == 1).await;
}

#[tokio::test]
async fn client_closed_before_its_first_request_connects_nowhere() {
    let server = Server::start();
    let locks = locks(&server);
    locks.close().await;
    let error = locks.lock("a").acquire().await.unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
    assert!(crate::common::sessions(&server).is_empty());
}

#[tokio::test]
async fn guard_knows_for_how_long_it_is_held() {
    let server = Server::start();
    let lease = Duration::from_secs(100);
    let guard = locks(&server).lock("a").lease(lease).try_acquire().await.unwrap().unwrap();
    assert!(guard.is_held());
    assert!((lease / 2..lease).contains(&guard.remaining()), "{:?}", guard.remaining());
    let _: i64 = say(&server, "LOCK.FORCE a");
    guard.lost().await;
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
}

/// Nothing else runs in it after the drop, as when `main` returns.
#[test]
fn runtime_releases_dropped_guards_before_it_ends() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks(&server);
    let guard = runtime.block_on(locks.lock("a").try_acquire()).unwrap().unwrap();
    let of_a_task = runtime.block_on(locks.lock("b").try_acquire()).unwrap().unwrap();
    runtime.spawn(async move { of_a_task.while_held(std::future::pending::<()>()).await });
    drop(guard);
    drop(locks);
    drop(runtime);
    assert!(is_free(&server, "a") && is_free(&server, "b"));
}

#[test]
fn end_of_a_runtime_does_not_wait_long_for_a_silent_server() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks_over(&proxy);
    let guard = runtime.block_on(locks.lock("a").try_acquire()).unwrap().unwrap();
    proxy.rule(|_, _| Fate::Hold);
    let end = std::thread::spawn(move || drop((guard, runtime, locks)));
    support::until(SOON, "the runtime has ended", || end.is_finished());
}
