//! Cached locks: which task uses them next, and when they are released.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use holdfast_client::{Error, Guard, Lock, Locks, LossReason, MultiLock};
use support::{NotBefore, Proxy, Random, Server};

use crate::common::{
    SOON, clients, dropped_at, held, hold_up_acquisitions, holder, is_free, locks, locks_over, say, soon, waiters,
};

/// Longer than the test.
const LONG: Duration = Duration::from_secs(600);

/// The number of requests that could change a lock.
fn requests(server: &Server) -> u64 {
    let calls = |command: &str| -> Option<u64> {
        let line = server.info("commandstats", &format!("cmdstat_lock.{command}"))?;
        line.split(',').find_map(|field| field.strip_prefix("calls="))?.parse().ok()
    };
    let commands = ["acquire", "macquire", "renew", "mrenew", "release", "mrelease", "cancel"];
    commands.into_iter().filter_map(calls).sum()
}

/// A lock that its client caches for long.
fn cached_lock(locks: &Locks) -> Lock {
    locks.lock("a").keep(LONG)
}

async fn granted(lock: &Lock) -> Guard {
    tokio::time::timeout(SOON, lock.clone().wait_forever().acquire())
        .await
        .expect("the request is granted")
        .unwrap()
        .expect("a wait without a timeout")
}

/// Waits until the client has read all events that the server has sent.
async fn wait_for_events(locks: &Locks) {
    // Events are written before the replies to later requests.
    locks.info("a").await.unwrap();
}

/// A request for the lock waits, here or at the server.
fn waits(lock: &Lock) -> tokio::task::JoinHandle<Guard> {
    let lock = lock.clone();
    tokio::spawn(async move { granted(&lock).await })
}

/// Lets all runnable tasks run.
async fn run_all_tasks() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn cached_lock_is_acquired_without_a_request() {
    let server = Server::start();
    let locks = locks(&server);
    let first = cached_lock(&locks).try_acquire().await.unwrap().unwrap();
    let (owner, fence) = (first.owner().clone(), first.fence());
    first.release().await.unwrap();
    for round in 0..100 {
        let guard = cached_lock(&locks).try_acquire().await.unwrap().unwrap();
        assert_eq!((guard.owner(), guard.fence()), (&owner, fence));
        guard.check().await.unwrap();
        if round % 2 == 0 { guard.release().await.unwrap() } else { drop(guard) }
    }
    assert_eq!(requests(&server), 1);
    assert_eq!(holder(&server, "a").as_deref().map(str::as_bytes), Some(owner.as_bytes()));
}

/// Only a request needs the replicas: they have confirmed the cached lock, and the server renews it.
#[tokio::test]
async fn cached_lock_needs_no_second_confirmation() {
    let (primary, replica) = (Server::start(), Server::start());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let (locks, others) = (locks(&primary), locks(&primary));
    let lock = cached_lock(&locks).replicas(1);
    let first = granted(&lock).await;
    let fence = first.fence();
    first.release().await.unwrap();
    // More than one, if the replica confirmed the first too late.
    let asked = requests(&primary);
    replica.stop();
    let again = granted(&lock).await;
    assert_eq!(again.fence(), fence);
    again.check().await.unwrap();
    assert_eq!(requests(&primary), asked);
    // Another client's request is granted.
    let next = waits(&others.lock("a"));
    soon("the other request waits", || waiters(&primary, "a") == 1).await;
    again.release().await.unwrap();
    let next = next.await.unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
    let error = lock.try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoReplicas { .. }), "{error}");
    soon("the unconfirmed hold is revoked", || is_free(&primary, "a")).await;
    replica.cont();
    primary.wait_replica_online();
    granted(&lock).await.release().await.unwrap();
    primary.wait_for_replica(&replica);
    assert_eq!(holder(&replica, "a"), holder(&primary, "a"));
}

#[tokio::test]
async fn info_shows_cached_lock() {
    let server = Server::start();
    let locks = locks(&server);
    let (_kept, _used) = (granted(&cached_lock(&locks)).await, granted(&locks.lock("b")).await);
    for (key, wanted) in [("a", true), ("b", false)] {
        assert_eq!(locks.info(key).await.unwrap().unwrap().holders[0].contention, wanted, "{key}");
    }
}

/// Neither acquiring nor releasing it waits.
#[tokio::test]
async fn cached_lock_is_acquired_at_the_first_poll() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    let guard = granted(&lock).await;
    assert!(dropped_at(1, guard.release()).await.expect("at the first poll").is_ok());
    let guard = dropped_at(1, lock.try_acquire()).await.expect("at the first poll").unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn zero_caching_time_disables_caching() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = locks.lock("a").keep(Duration::ZERO).keep_uses(0);
    let first = granted(&lock).await;
    let fence = first.fence();
    first.release().await.unwrap();
    assert!(is_free(&server, "a"));
    let second = granted(&lock.keep_uses(5)).await;
    assert!(second.fence() > fence);
    drop(second);
    locks.settle().await;
    assert!(is_free(&server, "a"));
}

/// A task that acquires it repeatedly without a pause can't keep other clients out, even if it has the only thread.
#[tokio::test]
async fn busy_task_is_notified_of_contention() {
    let server = Server::start();
    let (one, other) = (locks(&server), locks(&server));
    let lock = cached_lock(&one);
    let is_over = Arc::new(AtomicUsize::new(0));
    let over = is_over.clone();
    let busy = tokio::spawn(async move {
        while over.load(Ordering::Relaxed) == 0 {
            granted(&lock).await.release().await.unwrap();
        }
    });
    for _ in 0..10 {
        granted(&cached_lock(&other)).await.release().await.unwrap();
        other.settle().await;
    }
    is_over.store(1, Ordering::Relaxed);
    busy.await.unwrap();
}

#[tokio::test]
async fn tasks_of_one_process_are_granted_in_order() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = granted(&cached_lock(&locks)).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..10 {
        let (lock, order) = (cached_lock(&locks), order.clone());
        tasks.push(tokio::spawn(async move {
            let guard = granted(&lock).await;
            order.lock().unwrap().push(number);
            tokio::task::yield_now().await;
            drop(guard);
        }));
        run_all_tasks().await;
    }
    assert_eq!(waiters(&server, "a"), 0, "the requests wait in the client");
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    assert_eq!(requests(&server), 1);
}

#[tokio::test]
async fn try_acquire_returns_none_when_lock_is_in_use() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    let guard = granted(&lock).await;
    assert!(dropped_at(1, lock.try_acquire()).await.expect("immediately").unwrap().is_none());
    assert!(lock.clone().wait(Duration::ZERO).acquire().await.unwrap().is_none());
    let due = NotBefore::millis(49);
    assert!(lock.clone().wait(Duration::from_millis(50)).acquire().await.unwrap().is_none());
    due.is_over("the end of the wait");
    assert_eq!(requests(&server), 1, "no request reached the server");
    guard.release().await.unwrap();
    assert!(lock.try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn cached_lock_is_released_on_contention() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let first = granted(&cached_lock(&mine)).await;
    let fence = first.fence();
    first.release().await.unwrap();
    let theirs = granted(&others.lock("a")).await;
    assert!(theirs.fence() > fence);
    assert!(cached_lock(&mine).try_acquire().await.unwrap().is_none(), "the other client holds it");
    theirs.release().await.unwrap();
    // A request without a wait is refused. One a moment later is granted.
    granted(&cached_lock(&mine)).await.release().await.unwrap();
    assert!(others.lock("a").try_acquire().await.unwrap().is_none());
    soon("the lock is released", || is_free(&server, "a")).await;
}

#[tokio::test]
async fn lock_in_use_is_released_to_a_waiter_when_the_use_ends() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let lock = cached_lock(&mine);
    let guard = granted(&lock).await;
    let theirs = waits(&others.lock("a"));
    soon("the requests wait", || waiters(&server, "a") == 1).await;
    wait_for_events(&mine).await;
    let next = waits(&lock);
    run_all_tasks().await;
    guard.check().await.unwrap();
    guard.release().await.unwrap();
    let theirs = theirs.await.unwrap();
    soon("the next request waits at the server", || waiters(&server, "a") == 1).await;
    assert!(!next.is_finished());
    let fence = theirs.fence();
    theirs.release().await.unwrap();
    assert!(next.await.unwrap().fence() > fence);
}

/// The current use, and so many more.
#[tokio::test]
async fn uses_in_a_row_are_limited_under_contention() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let lock = cached_lock(&mine).keep_uses(3);
    // Uses before another client waits don't count.
    for _ in 0..10 {
        granted(&lock).await.release().await.unwrap();
    }
    let mut guard = granted(&lock).await;
    let fence = guard.fence();
    let theirs = waits(&others.lock("a"));
    soon("the requests wait", || waiters(&server, "a") == 1).await;
    wait_for_events(&mine).await;
    for use_ in 1..3 {
        let next = waits(&lock);
        run_all_tasks().await;
        guard.release().await.unwrap();
        guard = next.await.unwrap();
        assert_eq!(guard.fence(), fence, "use {use_}");
        assert!(!theirs.is_finished());
    }
    let last = waits(&lock);
    run_all_tasks().await;
    guard.release().await.unwrap();
    let theirs = theirs.await.unwrap();
    assert!(theirs.fence() > fence && !last.is_finished());
    theirs.release().await.unwrap();
    assert!(last.await.unwrap().fence() > fence);
}

#[tokio::test]
async fn cached_lock_is_released_after_its_caching_time() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = locks.lock("a").keep(Duration::from_millis(300));
    let first = granted(&lock).await;
    let fence = first.fence();
    // A use may take any time.
    let begin = Instant::now();
    soon("twice the caching time has passed", || begin.elapsed() > Duration::from_millis(600)).await;
    first.check().await.unwrap();
    let due = NotBefore::millis(299);
    first.release().await.unwrap();
    soon("the lock is released", || is_free(&server, "a")).await;
    due.is_over("the end of its caching time");
    assert!(granted(&lock).await.fence() > fence);
}

#[tokio::test]
async fn lost_cached_lock_is_requested_again() {
    let server = Server::start();
    let locks = locks(&server);
    for command in ["LOCK.FORCE a", "DEL a"] {
        let first = granted(&cached_lock(&locks)).await;
        let fence = first.fence();
        first.release().await.unwrap();
        let _: i64 = say(&server, command);
        wait_for_events(&locks).await;
        let second = granted(&cached_lock(&locks)).await;
        assert!(second.fence() > fence, "{command}");
        second.check().await.unwrap();
    }
}

/// The task that uses it is notified. The next ones do not wait for it, and it does not affect them.
#[tokio::test]
async fn loss_in_use_is_reported_to_the_user_only() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    let first = granted(&lock).await;
    let (second, third) = (waits(&lock), waits(&lock));
    run_all_tasks().await;
    let _: i64 = say(&server, "LOCK.FORCE a");
    let second = second.await.unwrap();
    assert!(second.fence() > first.fence());
    assert_eq!(first.lost().await, LossReason::Forced);
    assert!(matches!(first.check().await, Err(Error::Lost { why: LossReason::Forced, .. })));
    let error = first.release().await.unwrap_err();
    assert!(matches!(error, Error::Lost { why: LossReason::Forced, .. }), "{error}");
    second.check().await.unwrap();
    assert_eq!(holder(&server, "a").as_deref().map(str::as_bytes), Some(second.owner().as_bytes()));
    let fence = second.fence();
    assert!(!third.is_finished());
    second.release().await.unwrap();
    let third = third.await.unwrap();
    assert_eq!(third.fence(), fence);
    // So does a dropped guard.
    let _: i64 = say(&server, "DEL a");
    assert_eq!(third.lost().await, LossReason::Changed);
    let fourth = granted(&lock).await;
    drop(third);
    fourth.check().await.unwrap();
    assert_eq!(requests(&server), 3);
}

#[tokio::test]
async fn queued_wait_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    let guard = granted(&lock).await;
    for polls in 0..4 {
        let last = waits(&lock);
        let asking = lock.clone().wait_forever();
        let waiting = tokio::time::timeout(Duration::from_millis(30), dropped_at(polls, asking.acquire())).await;
        assert!(!matches!(waiting, Ok(Some(_))), "the dropped request was granted");
        last.abort();
        assert!(last.await.is_err());
    }
    guard.release().await.unwrap();
    let fence = granted(&lock).await.fence();
    assert_eq!((requests(&server), holder(&server, "a").is_some()), (1, true));
    assert!(fence > 0);
}

/// The lock was passed to this task, which does not know yet.
#[tokio::test]
async fn cancel_at_the_head_of_the_queue_lets_the_next_one_in() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    for is_lost in [false, true] {
        let guard = granted(&lock).await;
        let next = {
            let asking = lock.clone().wait_forever();
            let mut waiting = pin!(asking.acquire());
            assert!(tokio::time::timeout(Duration::from_millis(5), &mut waiting).await.is_err());
            let next = waits(&lock);
            run_all_tasks().await;
            if is_lost {
                // The task is the next that sends a request.
                let _: i64 = say(&server, "LOCK.FORCE a");
                wait_for_events(&locks).await;
                assert_eq!(guard.lost().await, LossReason::Forced);
            } else {
                guard.release().await.unwrap();
            }
            next
        };
        let next = tokio::time::timeout(SOON, next).await.expect("the next task is granted").unwrap();
        next.check().await.unwrap();
        drop(next);
        // No task is queued: the lock stays cached.
        let guard = granted(&lock).await;
        {
            let asking = lock.clone().wait_forever();
            let mut waiting = pin!(asking.acquire());
            assert!(tokio::time::timeout(Duration::from_millis(5), &mut waiting).await.is_err());
            guard.release().await.unwrap();
        }
        let before = requests(&server);
        granted(&lock).await.release().await.unwrap();
        assert_eq!(requests(&server), before);
    }
}

#[tokio::test]
async fn next_task_requests_when_request_is_cancelled() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let theirs = granted(&others.lock("a")).await;
    let lock = cached_lock(&mine);
    // One request is cancelled, and one times out.
    let cancelled = waits(&lock);
    soon("the request waits at the server", || waiters(&server, "a") == 1).await;
    let late = tokio::spawn({
        let lock = lock.clone().wait(Duration::from_millis(400));
        async move { lock.acquire().await }
    });
    run_all_tasks().await;
    let (third, fourth) = (waits(&lock), waits(&lock));
    run_all_tasks().await;
    let first = crate::common::queue(&server, "a");
    assert_eq!(first.len(), 1, "one request waits at the server, and the others wait in the client");
    cancelled.abort();
    soon("the next request waits at the server", || {
        let now = crate::common::queue(&server, "a");
        now.len() == 1 && now != first
    })
    .await;
    assert!(late.await.unwrap().unwrap().is_none());
    soon("the third request waits at the server", || waiters(&server, "a") == 1).await;
    theirs.release().await.unwrap();
    let third = third.await.unwrap();
    assert!(!fourth.is_finished());
    third.release().await.unwrap();
    fourth.await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn error_of_a_request_is_returned_to_its_task_only() {
    let server = Server::start();
    let locks = locks(&server);
    let () = say(&server, "SET a text");
    let lock = cached_lock(&locks).wait_forever();
    let (one, other) = tokio::join!(lock.acquire(), lock.acquire());
    for error in [one.unwrap_err(), other.unwrap_err()] {
        assert!(matches!(error, Error::WrongType { .. }), "{error}");
    }
    assert_eq!(requests(&server), 2);
    let _: i64 = say(&server, "DEL a");
    granted(&lock).await.release().await.unwrap();
    // Also if the server is unreachable.
    let mut gone = Server::start();
    let lock = cached_lock(&crate::common::locks(&gone));
    gone.kill9();
    for _ in 0..2 {
        let error = lock.try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Connection { .. }), "{error}");
    }
}

#[tokio::test]
async fn acquire_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let mut polls = 0;
    loop {
        // A new client, so that the first poll connects.
        let locks = locks(&server);
        let lock = cached_lock(&locks).wait_forever();
        let done = tokio::select! {
            biased;
            done = dropped_at(polls, lock.acquire()) => done,
            guard = lock.acquire() => panic!("it was granted first: {guard:?}"),
        };
        let is_granted = done.is_some();
        drop(done);
        // The next task gets the lock, from the server or from the cache.
        granted(&lock).await.release().await.unwrap();
        locks.settle().await;
        assert!(is_free(&server, "a"), "dropped at poll {polls}");
        if is_granted {
            break;
        }
        polls += 1;
    }
    assert!(polls > 1, "it was dropped in between: {polls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_rounds_of_two_processes_leave_no_hold() {
    const TASKS: usize = 10;
    const ROUNDS: usize = 50;
    let server = Server::start();
    let both = [locks(&server), locks(&server)];
    let inside = Arc::new(AtomicUsize::new(0));
    let uses = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (process, locks) in both.iter().enumerate() {
        for task in 0..TASKS {
            let lock = cached_lock(locks).keep_uses(1 + (task % 3) as u32).wait_forever();
            let (inside, uses) = (inside.clone(), uses.clone());
            tasks.push(tokio::spawn(async move {
                let mut random = Random::new();
                for round in 0..ROUNDS {
                    // Most requests have a short timeout. Every third waits, so that both processes get the lock often, even on a busy machine.
                    let time = if round % 3 == 0 { SOON } else { Duration::from_micros(200 + random.below(20_000)) };
                    let Ok(guard) = tokio::time::timeout(time, lock.acquire()).await else { continue };
                    let guard = guard.unwrap().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
                    uses.lock().unwrap().push((guard.fence(), process));
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    if random.below(2) == 0 { guard.release().await.unwrap() } else { drop(guard) }
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    for locks in &both {
        locks.settle().await;
    }
    assert!(is_free(&server, "a"));
    let uses = uses.lock().unwrap();
    assert!(uses.is_sorted(), "tokens increase, and each belongs to one process");
    for process in 0..both.len() {
        let count = uses.iter().filter(|(_, it)| *it == process).count();
        assert!(count > ROUNDS, "process {process} had the lock {count} times");
    }
}

#[tokio::test]
async fn guard_dropped_outside_a_runtime_leaves_lock_cached() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = granted(&cached_lock(&locks)).await;
    let next = waits(&cached_lock(&locks));
    run_all_tasks().await;
    std::thread::spawn(move || drop(guard)).join().unwrap();
    let next = next.await.unwrap();
    std::thread::spawn(move || drop(next)).join().unwrap();
    granted(&cached_lock(&locks)).await.release().await.unwrap();
    assert_eq!(requests(&server), 1);
}

/// A waiter keeps the client alive. With the last handle, cached locks are released.
#[tokio::test]
async fn cached_locks_are_released_with_the_last_handle() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = granted(&cached_lock(&locks)).await;
    let (next, last) = (waits(&cached_lock(&locks)), waits(&cached_lock(&locks)));
    run_all_tasks().await;
    drop(locks);
    drop(guard);
    next.await.unwrap().release().await.unwrap();
    last.await.unwrap().release().await.unwrap();
    soon("only the connection that asks is left", || clients(&server).len() == 1).await;
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn settle_releases_cached_locks() {
    let server = Server::start();
    let locks = locks(&server);
    let used = granted(&locks.lock("b").keep(LONG)).await;
    granted(&cached_lock(&locks)).await.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "a"));
    used.check().await.unwrap();
    used.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "b"));
    granted(&cached_lock(&locks)).await.release().await.unwrap();
}

/// The lock's runtime has ended, or that of its connections.
#[test]
fn ended_runtime_leaves_cached_lock_to_another_one() {
    let server = Server::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks(&server);
    let lock = cached_lock(&locks);
    for is_used in [true, false] {
        let first = runtime();
        let guard = first.block_on(granted(&lock));
        let kept_outside = if is_used {
            first.spawn(async move {
                std::future::pending::<()>().await;
                drop(guard);
            });
            None
        } else {
            Some(guard)
        };
        first.block_on(run_all_tasks());
        let (waiting, asked) = std::sync::mpsc::channel();
        let other = std::thread::spawn({
            let lock = lock.clone();
            move || {
                runtime().block_on(async {
                    let next = waits(&lock);
                    run_all_tasks().await;
                    waiting.send(()).unwrap();
                    let next = next.await.unwrap();
                    held(&next).await;
                    next.release().await.unwrap();
                });
            }
        });
        asked.recv().unwrap();
        drop(first);
        drop(kept_outside);
        other.join().unwrap();
        // That runtime has ended, too, and this crate's own one keeps the lock cached.
        assert!(!is_free(&server, "a"));
        holdfast_client::block_on(locks.settle());
        assert!(is_free(&server, "a"));
    }
}

#[tokio::test]
async fn caching_is_refused_for_unsupported_locks() {
    let server = Server::start();
    let locks = locks(&server);
    let second = Duration::from_secs(1);
    for (lock, word) in [
        (cached_lock(&locks).lease(second), "lease"),
        (locks.lock("a").lease(second).keep(second), "lease"),
        (cached_lock(&locks).shared(), "shared"),
        (cached_lock(&locks).limit(3), "limit"),
        (cached_lock(&locks).keep_uses(0), "keep_uses"),
    ] {
        let error = lock.try_acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { message } if message.contains(word)), "{error}");
    }
    let error = MultiLock::new([cached_lock(&locks)]).try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Invalid { message } if message.contains("be cached")), "{error}");
    assert_eq!(requests(&server), 0);
}

#[tokio::test]
async fn locks_with_other_keys_or_options_are_cached_separately() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let both = mine.lock_all(["a", "b"]).keep(LONG);
    granted(&both).await.release().await.unwrap();
    granted(&both).await.release().await.unwrap();
    assert_eq!(requests(&server), 1);
    // Another client requests one of them.
    let theirs = granted(&others.lock("b")).await;
    soon("both are released", || is_free(&server, "a")).await;
    theirs.release().await.unwrap();
    // With other options, or another name, it is another lock as well.
    granted(&both).await.release().await.unwrap();
    let watched = cached_lock(&mine).watched(Duration::from_secs(5));
    granted(&watched).await.release().await.unwrap();
    soon("both are released", || is_free(&server, "b")).await;
    let named = mine.clone().named("billing").unwrap();
    let guard = granted(&cached_lock(&named).watched(Duration::from_secs(5))).await;
    assert!(guard.owner().as_bytes().starts_with(b"billing:"));
    guard.release().await.unwrap();
    // A request without caching, while the lock is cached.
    granted(&mine.lock("a")).await.release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn cached_lock_is_carried_over_and_released_on_contention() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let (mine, others) = (locks_over(&proxy), locks(&server));
    let first = granted(&cached_lock(&mine)).await;
    let fence = first.fence();
    first.release().await.unwrap();
    let before = crate::common::sessions(&server);
    proxy.cut();
    soon("the client has a new session", || {
        let now = crate::common::sessions(&server);
        !now.is_empty() && now != before
    })
    .await;
    let second = granted(&cached_lock(&mine)).await;
    assert_eq!(second.fence(), fence);
    second.release().await.unwrap();
    assert!(granted(&others.lock("a")).await.fence() > fence);
}

#[tokio::test]
async fn cached_ephemeral_lock_is_lost_with_its_connection() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = cached_lock(&locks).ephemeral();
    let first = granted(&lock).await;
    let fence = first.fence();
    first.release().await.unwrap();
    proxy.cut();
    soon("the lock is free", || is_free(&server, "a")).await;
    // The client has noticed it, too, when it has a new session.
    soon("the client has a new session", || crate::common::sessions(&server).len() == 1).await;
    let second = granted(&lock).await;
    assert!(second.fence() > fence);
    second.check().await.unwrap();
}

/// The hold is uncertain: it is not used again, and a caller waits for a reply no longer than its timeout.
#[tokio::test]
async fn uncertain_cached_lock_is_not_used() {
    let lease = Duration::from_secs(1);
    let server = Server::builder().module_args(&["default-lease", "1000"]).start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = cached_lock(&locks);
    granted(&lock).await.release().await.unwrap();
    proxy.silence();
    let begin = Instant::now();
    soon("the lease has passed", || begin.elapsed() > lease).await;
    let taken = tokio::time::timeout(SOON, lock.clone().wait(Duration::from_millis(100)).acquire()).await.unwrap();
    assert!(!matches!(taken, Ok(Some(_))), "an uncertain hold was used");
}

/// A release returns whether the lock was held to the end. If that is uncertain, it asks the server.
#[tokio::test]
async fn uncertain_release_asks_the_server() {
    let lease = Duration::from_secs(1);
    let server = Server::builder().module_args(&["default-lease", "1000"]).start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = cached_lock(&locks);
    let guard = granted(&lock).await;
    proxy.refuse();
    let begin = Instant::now();
    soon("the lease has passed", || begin.elapsed() > lease).await;
    let released = tokio::time::timeout(SOON, guard.release()).await.unwrap();
    assert!(released.is_err(), "it is uncertain that it was held to the end");
    proxy.accept();
    granted(&lock).await.release().await.unwrap();
}

/// The task that uses it need not be the one that acquired it: its owner names no actor.
#[tokio::test]
async fn cached_lock_within_another_one_has_no_actor() {
    let server = Server::start();
    let locks = locks(&server);
    let mut outer = granted(&locks.lock("outer")).await;
    let inner = outer.acquire(&cached_lock(&locks)).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(inner.owner().as_bytes()).into_owned();
    assert!(!text.contains("##"), "{text}");
    inner.release().await.unwrap();
    let inner = outer.acquire(&cached_lock(&locks)).await.unwrap().unwrap();
    assert_eq!(inner.owner().as_bytes(), text.as_bytes());
    drop(inner);
    // A re-entry is granted immediately, and ends nothing.
    let mut mine = granted(&cached_lock(&locks)).await;
    let again = mine.acquire(&cached_lock(&locks)).await.unwrap().unwrap();
    again.release().await.unwrap();
    mine.check().await.unwrap();
    assert!(cached_lock(&locks).try_acquire().await.unwrap().is_none(), "the lock is in use");
    mine.release().await.unwrap();
    assert_eq!(requests(&server), 2);
}

/// The hold is renewed: the next use has its lease.
#[tokio::test]
async fn renewal_requests_contention_events() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let guard = granted(&cached_lock(&mine)).await;
    guard.renew(Duration::from_secs(60)).await.unwrap();
    let fence = guard.fence();
    guard.release().await.unwrap();
    let again = granted(&cached_lock(&mine)).await;
    assert_eq!(again.fence(), fence);
    again.release().await.unwrap();
    assert!(granted(&others.lock("a")).await.fence() > fence);
}

/// The task is cancelled while its grant is pending. The next one sends its own request, and nothing is left.
#[tokio::test]
async fn cancelled_request_leaves_no_hold() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    granted(&locks.lock("first")).await.release().await.unwrap();
    let late = hold_up_acquisitions(&proxy);
    let lock = cached_lock(&locks);
    let first = waits(&lock);
    soon("the grant was sent", || late.load(Ordering::SeqCst) == 1).await;
    let second = waits(&lock);
    run_all_tasks().await;
    first.abort();
    assert!(first.await.is_err());
    proxy.pass();
    let guard = second.await.unwrap();
    guard.check().await.unwrap();
    guard.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "a"));
}
