//! Cached locks: which task uses them next, and when they are released.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use holdfast_client::{Error, Guard, Lock, Locks, LossReason, MultiLock};
use support::{NotBefore, Proxy, Random, Server};

use crate::common::{
    SOON, clients, given_up_at, held, hold_up_acquisitions, holder, is_free, locks, locks_over, say, soon, waiters,
};

/// Nothing ends by this time.
const LONG: Duration = Duration::from_secs(600);

/// How many requests there were that could change a lock.
fn requests(server: &Server) -> u64 {
    let calls = |command: &str| -> Option<u64> {
        let line = server.info("commandstats", &format!("cmdstat_lock.{command}"))?;
        line.split(',').find_map(|field| field.strip_prefix("calls="))?.parse().ok()
    };
    let commands = ["acquire", "macquire", "renew", "mrenew", "release", "mrelease", "cancel"];
    commands.into_iter().filter_map(calls).sum()
}

/// A lock that its client keeps for long.
fn kept(locks: &Locks) -> Lock {
    locks.lock("a").keep(LONG)
}

async fn granted(lock: &Lock) -> Guard {
    tokio::time::timeout(SOON, lock.clone().wait_forever().acquire())
        .await
        .expect("it is granted")
        .unwrap()
        .expect("waited for")
}

/// The client has heard all that the server has told until now.
async fn has_heard(locks: &Locks) {
    // Events are written before the reply to whatever is asked for later.
    locks.info("a").await.unwrap();
}

/// Somebody waits for the lock, here or at the server.
fn waits(lock: &Lock) -> tokio::task::JoinHandle<Guard> {
    let lock = lock.clone();
    tokio::spawn(async move { granted(&lock).await })
}

/// Lets all tasks run that can.
async fn all_have_run() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_is_kept_is_taken_again_without_a_request() {
    let server = Server::start();
    let locks = locks(&server);
    let first = kept(&locks).try_acquire().await.unwrap().unwrap();
    let (owner, fence) = (first.owner().clone(), first.fence());
    first.release().await.unwrap();
    for round in 0..100 {
        let guard = kept(&locks).try_acquire().await.unwrap().unwrap();
        assert_eq!((guard.owner(), guard.fence()), (&owner, fence));
        guard.check().unwrap();
        if round % 2 == 0 { guard.release().await.unwrap() } else { drop(guard) }
    }
    assert_eq!(requests(&server), 1);
    assert_eq!(holder(&server, "a").as_deref().map(str::as_bytes), Some(owner.as_bytes()));
}

/// Only a request needs the replicas: what is at hand was confirmed by them, and is renewed by the server.
#[tokio::test]
async fn cached_lock_needs_no_second_confirmation() {
    let (master, replica) = (Server::start(), Server::start());
    replica.replica_of(&master);
    master.wait_replica_online();
    let (locks, others) = (locks(&master), locks(&master));
    let lock = kept(&locks).replicas(1);
    let first = granted(&lock).await;
    let fence = first.fence();
    first.release().await.unwrap();
    replica.stop();
    let again = granted(&lock).await;
    assert_eq!(again.fence(), fence);
    again.check().unwrap();
    assert_eq!(requests(&master), 1);
    // Another client's request is granted.
    let next = waits(&others.lock("a"));
    soon("the other one waits", || waiters(&master, "a") == 1).await;
    again.release().await.unwrap();
    let next = next.await.unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
    let error = lock.try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoReplicas { .. }), "{error}");
    soon("what was not confirmed is gone", || is_free(&master, "a")).await;
    replica.cont();
    master.wait_replica_online();
    granted(&lock).await.release().await.unwrap();
    master.wait_for_replica(&replica);
    assert_eq!(holder(&replica, "a"), holder(&master, "a"));
}

#[tokio::test]
async fn it_can_be_seen_that_it_may_be_kept() {
    let server = Server::start();
    let locks = locks(&server);
    let (_kept, _used) = (granted(&kept(&locks)).await, granted(&locks.lock("b")).await);
    for (key, wanted) in [("a", true), ("b", false)] {
        assert_eq!(locks.info(key).await.unwrap().unwrap().holders[0].contention, wanted, "{key}");
    }
}

/// Neither taking it nor giving it back waits for anything.
#[tokio::test]
async fn what_is_at_hand_is_had_at_the_first_poll() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = kept(&locks);
    let guard = granted(&lock).await;
    assert!(given_up_at(1, guard.release()).await.expect("at the first poll").is_ok());
    let guard = given_up_at(1, lock.try_acquire()).await.expect("at the first poll").unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn no_time_is_as_without() {
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

/// A task that does nothing but take it again and again keeps nobody out for good, also if it has the only thread.
#[tokio::test]
async fn whoever_takes_it_without_a_pause_hears_who_wants_it() {
    let server = Server::start();
    let (one, other) = (locks(&server), locks(&server));
    let lock = kept(&one);
    let is_over = Arc::new(AtomicUsize::new(0));
    let over = is_over.clone();
    let busy = tokio::spawn(async move {
        while over.load(Ordering::Relaxed) == 0 {
            granted(&lock).await.release().await.unwrap();
        }
    });
    for _ in 0..10 {
        granted(&kept(&other)).await.release().await.unwrap();
        other.settle().await;
    }
    is_over.store(1, Ordering::Relaxed);
    busy.await.unwrap();
}

#[tokio::test]
async fn tasks_of_one_process_are_granted_in_order() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = granted(&kept(&locks)).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..10 {
        let (lock, order) = (kept(&locks), order.clone());
        tasks.push(tokio::spawn(async move {
            let guard = granted(&lock).await;
            order.lock().unwrap().push(number);
            tokio::task::yield_now().await;
            drop(guard);
        }));
        all_have_run().await;
    }
    assert_eq!(waiters(&server, "a"), 0, "they wait here");
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    assert_eq!(requests(&server), 1);
}

#[tokio::test]
async fn whoever_does_not_wait_is_told_at_once_that_it_is_in_use() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = kept(&locks);
    let guard = granted(&lock).await;
    assert!(given_up_at(1, lock.try_acquire()).await.expect("at once").unwrap().is_none());
    assert!(lock.clone().wait(Duration::ZERO).acquire().await.unwrap().is_none());
    let due = NotBefore::millis(49);
    assert!(lock.clone().wait(Duration::from_millis(50)).acquire().await.unwrap().is_none());
    due.is_over("the end of the wait");
    assert_eq!(requests(&server), 1, "nobody asked the server");
    guard.release().await.unwrap();
    assert!(lock.try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn what_lies_at_hand_is_given_to_whoever_wants_it() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let first = granted(&kept(&mine)).await;
    let fence = first.fence();
    first.release().await.unwrap();
    let theirs = granted(&others.lock("a")).await;
    assert!(theirs.fence() > fence);
    assert!(kept(&mine).try_acquire().await.unwrap().is_none(), "it is theirs");
    theirs.release().await.unwrap();
    // A request without a wait is refused, and one a moment later is granted.
    granted(&kept(&mine)).await.release().await.unwrap();
    assert!(others.lock("a").try_acquire().await.unwrap().is_none());
    soon("it is released", || is_free(&server, "a")).await;
}

#[tokio::test]
async fn lock_in_use_is_released_to_a_waiter_when_the_use_ends() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let lock = kept(&mine);
    let guard = granted(&lock).await;
    let theirs = waits(&others.lock("a"));
    soon("they wait", || waiters(&server, "a") == 1).await;
    has_heard(&mine).await;
    let next = waits(&lock);
    all_have_run().await;
    guard.check().unwrap();
    guard.release().await.unwrap();
    let theirs = theirs.await.unwrap();
    soon("the next one asks the server", || waiters(&server, "a") == 1).await;
    assert!(!next.is_finished());
    let fence = theirs.fence();
    theirs.release().await.unwrap();
    assert!(next.await.unwrap().fence() > fence);
}

/// The present use, and so many more.
#[tokio::test]
async fn so_many_uses_in_a_row_while_others_wait() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let lock = kept(&mine).keep_uses(3);
    // Uses before somebody else waits don't count.
    for _ in 0..10 {
        granted(&lock).await.release().await.unwrap();
    }
    let mut guard = granted(&lock).await;
    let fence = guard.fence();
    let theirs = waits(&others.lock("a"));
    soon("they wait", || waiters(&server, "a") == 1).await;
    has_heard(&mine).await;
    for use_ in 1..3 {
        let next = waits(&lock);
        all_have_run().await;
        guard.release().await.unwrap();
        guard = next.await.unwrap();
        assert_eq!(guard.fence(), fence, "use {use_}");
        assert!(!theirs.is_finished());
    }
    let last = waits(&lock);
    all_have_run().await;
    guard.release().await.unwrap();
    let theirs = theirs.await.unwrap();
    assert!(theirs.fence() > fence && !last.is_finished());
    theirs.release().await.unwrap();
    assert!(last.await.unwrap().fence() > fence);
}

#[tokio::test]
async fn it_is_given_back_when_its_time_at_hand_is_over() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = locks.lock("a").keep(Duration::from_millis(300));
    let first = granted(&lock).await;
    let fence = first.fence();
    // A use takes as long as it takes.
    let begin = Instant::now();
    soon("twice the time is over", || begin.elapsed() > Duration::from_millis(600)).await;
    first.check().unwrap();
    let due = NotBefore::millis(299);
    first.release().await.unwrap();
    soon("it is released", || is_free(&server, "a")).await;
    due.is_over("the end of its time at hand");
    assert!(granted(&lock).await.fence() > fence);
}

#[tokio::test]
async fn what_is_lost_at_hand_is_asked_for_anew() {
    let server = Server::start();
    let locks = locks(&server);
    for command in ["LOCK.FORCE a", "DEL a"] {
        let first = granted(&kept(&locks)).await;
        let fence = first.fence();
        first.release().await.unwrap();
        let _: i64 = say(&server, command);
        has_heard(&locks).await;
        let second = granted(&kept(&locks)).await;
        assert!(second.fence() > fence, "{command}");
        second.check().unwrap();
    }
}

/// The task that uses it is notified; those behind do not wait for it, and it does nothing to them.
#[tokio::test]
async fn what_is_lost_in_use_is_his_loss_alone() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = kept(&locks);
    let first = granted(&lock).await;
    let (second, third) = (waits(&lock), waits(&lock));
    all_have_run().await;
    let _: i64 = say(&server, "LOCK.FORCE a");
    let second = second.await.unwrap();
    assert!(second.fence() > first.fence());
    assert_eq!(first.lost().await, LossReason::Forced);
    assert!(matches!(first.check(), Err(Error::Lost { why: LossReason::Forced, .. })));
    let error = first.release().await.unwrap_err();
    assert!(matches!(error, Error::Lost { why: LossReason::Forced, .. }), "{error}");
    second.check().unwrap();
    assert_eq!(holder(&server, "a").as_deref().map(str::as_bytes), Some(second.owner().as_bytes()));
    let fence = second.fence();
    assert!(!third.is_finished());
    second.release().await.unwrap();
    let third = third.await.unwrap();
    assert_eq!(third.fence(), fence);
    // So does a guard that is dropped.
    let _: i64 = say(&server, "DEL a");
    assert_eq!(third.lost().await, LossReason::Changed);
    let fourth = granted(&lock).await;
    drop(third);
    fourth.check().unwrap();
    assert_eq!(requests(&server), 3);
}

#[tokio::test]
async fn a_wait_in_the_line_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = kept(&locks);
    let guard = granted(&lock).await;
    for polls in 0..4 {
        let last = waits(&lock);
        let asking = lock.clone().wait_forever();
        let waiting = tokio::time::timeout(Duration::from_millis(30), given_up_at(polls, asking.acquire())).await;
        assert!(!matches!(waiting, Ok(Some(_))), "nobody else gets it");
        last.abort();
        assert!(last.await.is_err());
    }
    guard.release().await.unwrap();
    let fence = granted(&lock).await.fence();
    assert_eq!((requests(&server), holder(&server, "a").is_some()), (1, true));
    assert!(fence > 0);
}

/// It was given to him, and he does not know.
#[tokio::test]
async fn cancel_at_the_head_of_the_queue_lets_the_next_one_in() {
    let server = Server::start();
    let locks = locks(&server);
    let lock = kept(&locks);
    for is_lost in [false, true] {
        let guard = granted(&lock).await;
        let next = {
            let asking = lock.clone().wait_forever();
            let mut waiting = pin!(asking.acquire());
            assert!(tokio::time::timeout(Duration::from_millis(5), &mut waiting).await.is_err());
            let next = waits(&lock);
            all_have_run().await;
            if is_lost {
                // His turn is to ask.
                let _: i64 = say(&server, "LOCK.FORCE a");
                has_heard(&locks).await;
                assert_eq!(guard.lost().await, LossReason::Forced);
            } else {
                guard.release().await.unwrap();
            }
            next
        };
        let next = tokio::time::timeout(SOON, next).await.expect("it is his turn").unwrap();
        next.check().unwrap();
        drop(next);
        // No task is behind: it stays cached.
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
async fn an_asker_who_gives_up_makes_the_next_one_ask() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let theirs = granted(&others.lock("a")).await;
    let lock = kept(&mine);
    // Cancelled, and whose time is over.
    let cancelled = waits(&lock);
    soon("it asks", || waiters(&server, "a") == 1).await;
    let late = tokio::spawn({
        let lock = lock.clone().wait(Duration::from_millis(400));
        async move { lock.acquire().await }
    });
    all_have_run().await;
    let (third, fourth) = (waits(&lock), waits(&lock));
    all_have_run().await;
    let first = crate::common::queue(&server, "a");
    assert_eq!(first.len(), 1, "one asks, and the others wait here");
    cancelled.abort();
    soon("the next one asks", || {
        let now = crate::common::queue(&server, "a");
        now.len() == 1 && now != first
    })
    .await;
    assert!(late.await.unwrap().unwrap().is_none());
    soon("the third one asks", || waiters(&server, "a") == 1).await;
    theirs.release().await.unwrap();
    let third = third.await.unwrap();
    assert!(!fourth.is_finished());
    third.release().await.unwrap();
    fourth.await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn an_error_of_an_asker_is_his_alone() {
    let server = Server::start();
    let locks = locks(&server);
    let () = say(&server, "SET a text");
    let lock = kept(&locks).wait_forever();
    let (one, other) = tokio::join!(lock.acquire(), lock.acquire());
    for error in [one.unwrap_err(), other.unwrap_err()] {
        assert!(matches!(error, Error::WrongType { .. }), "{error}");
    }
    assert_eq!(requests(&server), 2);
    let _: i64 = say(&server, "DEL a");
    granted(&lock).await.release().await.unwrap();
    // Also where it can't be asked.
    let mut gone = Server::start();
    let lock = kept(&crate::common::locks(&gone)).wait_forever();
    gone.kill9();
    let (one, other) = tokio::join!(lock.acquire(), lock.acquire());
    for error in [one.unwrap_err(), other.unwrap_err()] {
        assert!(matches!(error, Error::Connection { .. }), "{error}");
    }
}

#[tokio::test]
async fn an_acquisition_may_be_dropped_at_every_poll() {
    let server = Server::start();
    let mut polls = 0;
    loop {
        // Its own client: the first poll connects.
        let locks = locks(&server);
        let lock = kept(&locks).wait_forever();
        let done = tokio::select! {
            biased;
            done = given_up_at(polls, lock.acquire()) => done,
            guard = lock.acquire() => panic!("it came first: {guard:?}"),
        };
        let is_granted = done.is_some();
        drop(done);
        // The next task has it, from the server or from the cache.
        granted(&lock).await.release().await.unwrap();
        locks.settle().await;
        assert!(is_free(&server, "a"), "given up at poll {polls}");
        if is_granted {
            break;
        }
        polls += 1;
    }
    assert!(polls > 1, "it was given up in between: {polls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_rounds_of_two_processes_leave_nothing_behind() {
    const TASKS: usize = 10;
    const ROUNDS: usize = 50;
    let server = Server::start();
    let both = [locks(&server), locks(&server)];
    let inside = Arc::new(AtomicUsize::new(0));
    let uses = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (process, locks) in both.iter().enumerate() {
        for task in 0..TASKS {
            let lock = kept(locks).keep_uses(1 + (task % 3) as u32).wait_forever();
            let (inside, uses) = (inside.clone(), uses.clone());
            tasks.push(tokio::spawn(async move {
                let mut random = Random::new();
                for round in 0..ROUNDS {
                    // Most give up soon; every third waits, so that both processes have it often on a busy machine, too.
                    let time = if round % 3 == 0 { SOON } else { Duration::from_micros(200 + random.below(20_000)) };
                    let Ok(guard) = tokio::time::timeout(time, lock.acquire()).await else { continue };
                    let guard = guard.unwrap().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two hold at once");
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
    assert!(uses.is_sorted(), "fences grow, and one is of one process");
    for process in 0..both.len() {
        let count = uses.iter().filter(|(_, it)| *it == process).count();
        assert!(count > ROUNDS, "process {process} had it {count} times");
    }
}

#[tokio::test]
async fn a_guard_that_is_dropped_outside_a_runtime_leaves_it_at_hand() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = granted(&kept(&locks)).await;
    let next = waits(&kept(&locks));
    all_have_run().await;
    std::thread::spawn(move || drop(guard)).join().unwrap();
    let next = next.await.unwrap();
    std::thread::spawn(move || drop(next)).join().unwrap();
    granted(&kept(&locks)).await.release().await.unwrap();
    assert_eq!(requests(&server), 1);
}

/// A waiter keeps the client; with the last handle cached locks are released.
#[tokio::test]
async fn what_lies_at_hand_ends_with_the_last_handle() {
    let server = Server::start();
    let before = clients(&server).len();
    let locks = locks(&server);
    let guard = granted(&kept(&locks)).await;
    let (next, last) = (waits(&kept(&locks)), waits(&kept(&locks)));
    all_have_run().await;
    drop(locks);
    drop(guard);
    next.await.unwrap().release().await.unwrap();
    last.await.unwrap().release().await.unwrap();
    soon("the connections are closed", || clients(&server).len() == before).await;
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn settling_gives_back_what_lies_at_hand() {
    let server = Server::start();
    let locks = locks(&server);
    let used = granted(&locks.lock("b").keep(LONG)).await;
    granted(&kept(&locks)).await.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "a"));
    used.check().unwrap();
    used.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "b"));
    granted(&kept(&locks)).await.release().await.unwrap();
}

/// It had the lock, or its connections did.
#[test]
fn ended_runtime_leaves_cached_lock_to_another_one() {
    let server = Server::builder().module_args(&["default-lease", "3000"]).start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks(&server);
    let lock = kept(&locks);
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
        first.block_on(all_have_run());
        let (waiting, asked) = std::sync::mpsc::channel();
        let other = std::thread::spawn({
            let lock = lock.clone();
            move || {
                runtime().block_on(async {
                    let next = waits(&lock);
                    all_have_run().await;
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
        // That runtime has ended, too.
        support::until(SOON, "its lease is over", || is_free(&server, "a"));
    }
}

#[tokio::test]
async fn what_can_not_be_kept_is_refused() {
    let server = Server::start();
    let locks = locks(&server);
    let second = Duration::from_secs(1);
    for (lock, word) in [
        (kept(&locks).lease(second), "lease"),
        (locks.lock("a").lease(second).keep(second), "lease"),
        (kept(&locks).shared(), "shared"),
        (kept(&locks).limit(3), "limit"),
        (kept(&locks).keep_uses(0), "keep_uses"),
    ] {
        let error = lock.try_acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { message } if message.contains(word)), "{error}");
    }
    let error = MultiLock::new([kept(&locks)]).try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Invalid { message } if message.contains("not kept")), "{error}");
    assert_eq!(requests(&server), 0);
}

#[tokio::test]
async fn several_keys_and_other_terms_are_kept_each_by_themselves() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let both = mine.lock_all(["a", "b"]).keep(LONG);
    granted(&both).await.release().await.unwrap();
    granted(&both).await.release().await.unwrap();
    assert_eq!(requests(&server), 1);
    // One of them is wanted.
    let theirs = granted(&others.lock("b")).await;
    soon("both are released", || is_free(&server, "a")).await;
    theirs.release().await.unwrap();
    // On other terms, or in another name, it is another's as well.
    granted(&both).await.release().await.unwrap();
    let watched = kept(&mine).watched(Duration::from_secs(5));
    granted(&watched).await.release().await.unwrap();
    soon("both are released", || is_free(&server, "b")).await;
    let named = mine.clone().named("billing").unwrap();
    let guard = granted(&kept(&named).watched(Duration::from_secs(5))).await;
    assert!(guard.owner().as_bytes().starts_with(b"billing:"));
    guard.release().await.unwrap();
    // A request without caching, while it is cached.
    granted(&mine.lock("a")).await.release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn what_lies_at_hand_is_taken_along_and_can_be_wanted_then() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let (mine, others) = (locks_over(&proxy), locks(&server));
    let first = granted(&kept(&mine)).await;
    let fence = first.fence();
    first.release().await.unwrap();
    let before = crate::common::sessions(&server);
    proxy.cut();
    soon("there is another session", || {
        let now = crate::common::sessions(&server);
        !now.is_empty() && now != before
    })
    .await;
    let second = granted(&kept(&mine)).await;
    assert_eq!(second.fence(), fence);
    second.release().await.unwrap();
    assert!(granted(&others.lock("a")).await.fence() > fence);
}

#[tokio::test]
async fn what_is_ephemeral_is_lost_at_hand_when_the_connection_ends() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = kept(&locks).ephemeral();
    let first = granted(&lock).await;
    let fence = first.fence();
    first.release().await.unwrap();
    proxy.cut();
    soon("it is free", || is_free(&server, "a")).await;
    // The client has seen the end of it, too, once it has another session.
    soon("there is another session", || crate::common::sessions(&server).len() == 1).await;
    let second = granted(&lock).await;
    assert!(second.fence() > fence);
    second.check().unwrap();
}

/// The hold is uncertain: it is not used again, and a caller waits for a reply no longer than its time.
#[tokio::test]
async fn what_is_in_doubt_is_not_used() {
    let lease = Duration::from_secs(1);
    let server = Server::builder().module_args(&["default-lease", "1000"]).start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = kept(&locks);
    granted(&lock).await.release().await.unwrap();
    proxy.silence();
    let begin = Instant::now();
    soon("the lease is over", || begin.elapsed() > lease).await;
    let taken = tokio::time::timeout(SOON, lock.clone().wait(Duration::from_millis(100)).acquire()).await.unwrap();
    assert!(!matches!(taken, Ok(Some(_))), "it can't be known to be held");
}

/// A release returns whether it was held to the end: if that is uncertain, it asks the server.
#[tokio::test]
async fn a_release_in_doubt_asks_the_server() {
    let lease = Duration::from_secs(1);
    let server = Server::builder().module_args(&["default-lease", "1000"]).start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let lock = kept(&locks);
    let guard = granted(&lock).await;
    proxy.refuse();
    let begin = Instant::now();
    soon("the lease is over", || begin.elapsed() > lease).await;
    let released = tokio::time::timeout(SOON, guard.release()).await.unwrap();
    assert!(released.is_err(), "nobody knows that it was held to the end");
    proxy.accept();
    granted(&lock).await.release().await.unwrap();
}

/// The task that uses it need not be the one that took it: its owner names no actor.
#[tokio::test]
async fn a_kept_lock_within_another_one_acts_for_nobody() {
    let server = Server::start();
    let locks = locks(&server);
    let mut outer = granted(&locks.lock("outer")).await;
    let inner = outer.acquire(&kept(&locks)).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(inner.owner().as_bytes()).into_owned();
    assert!(!text.contains("##"), "{text}");
    inner.release().await.unwrap();
    let inner = outer.acquire(&kept(&locks)).await.unwrap().unwrap();
    assert_eq!(inner.owner().as_bytes(), text.as_bytes());
    drop(inner);
    // Re-entry is had at once, and ends nothing.
    let mut mine = granted(&kept(&locks)).await;
    let again = mine.acquire(&kept(&locks)).await.unwrap().unwrap();
    again.release().await.unwrap();
    mine.check().unwrap();
    assert!(kept(&locks).try_acquire().await.unwrap().is_none(), "it is in use");
    mine.release().await.unwrap();
    assert_eq!(requests(&server), 2);
}

/// What is renewed is the hold: the next use has its lease.
#[tokio::test]
async fn a_renewal_asks_to_be_told_too() {
    let server = Server::start();
    let (mine, others) = (locks(&server), locks(&server));
    let guard = granted(&kept(&mine)).await;
    guard.renew(Duration::from_secs(60)).await.unwrap();
    let fence = guard.fence();
    guard.release().await.unwrap();
    let again = granted(&kept(&mine)).await;
    assert_eq!(again.fence(), fence);
    again.release().await.unwrap();
    assert!(granted(&others.lock("a")).await.fence() > fence);
}

/// The grant is on its way when its task is cancelled: the next one requests its own, and nothing is left.
#[tokio::test]
async fn an_asker_who_goes_before_he_is_answered_leaves_nothing() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    granted(&locks.lock("first")).await.release().await.unwrap();
    let late = hold_up_acquisitions(&proxy);
    let lock = kept(&locks);
    let first = waits(&lock);
    soon("it is on its way", || late.load(Ordering::SeqCst) == 1).await;
    let second = waits(&lock);
    all_have_run().await;
    first.abort();
    assert!(first.await.is_err());
    proxy.pass();
    let guard = second.await.unwrap();
    guard.check().unwrap();
    guard.release().await.unwrap();
    locks.settle().await;
    assert!(is_free(&server, "a"));
}
