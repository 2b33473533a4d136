//! Two clients acquire two locks in opposite order: one of them gets the error, and the other one continues. And re-entry.

use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast_client::{Error, Locks, block_on};
use support::Server;

use crate::common::{SOON, is_free, locks, waiters};

/// The variables with the server's address and the order of the locks, for a process of the test.
const ADDRESS: &str = "HOLDFAST_TEST_ADDRESS";
const ORDER: &str = "HOLDFAST_TEST_ORDER";

/// Acquires one lock, and, as soon as both are held, the other one as well.
async fn acquire_both(locks: &Locks, first: &str, second: &str) -> Result<(), Error> {
    let mut outer = locks.lock(first).wait_forever().acquire().await?.expect("a wait without a timeout");
    while !(locks.locked(first).await? && locks.locked(second).await?) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let inner = outer.acquire(&locks.lock(second).wait_forever()).await?.expect("a wait without a timeout");
    inner.release().await?;
    outer.release().await
}

/// One of two got an error that names both owners and both locks.
#[track_caller]
fn one_got_error(server: &Server, errors: &[Option<String>]) {
    let deadlocks: Vec<&String> = errors.iter().flatten().collect();
    let [deadlock] = deadlocks[..] else { panic!("{errors:?}") };
    let process = format!(":{}:", std::process::id());
    for words in ["DEADLOCK", "waits for 'a'", "waits for 'b'"] {
        assert!(deadlock.contains(words), "{words}: {deadlock}");
    }
    assert!(deadlock.matches("owner '").count() >= 2, "{deadlock}");
    assert!(deadlock.contains(&process) || errors.len() == 2, "{deadlock}");
    assert_eq!((waiters(server, "a"), waiters(server, "b")), (0, 0));
    support::until(SOON, "all locks are free", || is_free(server, "a") && is_free(server, "b"));
}

fn deadlock(outcome: Result<(), Error>) -> Option<String> {
    match outcome {
        Ok(()) => None,
        Err(error @ Error::Deadlock { .. }) => Some(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn two_tasks_in_opposite_order_get_one_error() {
    let server = Server::start();
    let locks = locks(&server);
    let both = async { tokio::join!(acquire_both(&locks, "a", "b"), acquire_both(&locks, "b", "a")) };
    let (one, other) = tokio::time::timeout(SOON, both).await.expect("both end");
    locks.settle().await;
    one_got_error(&server, &[deadlock(one), deadlock(other)]);
}

#[test]
fn two_threads_in_opposite_order_get_one_error() {
    let server = Server::start();
    let locks = locks(&server);
    let errors = std::thread::scope(|scope| {
        let take = |first: &'static str, second: &'static str| {
            let locks = &locks;
            scope.spawn(move || deadlock(block_on(acquire_both(locks, first, second))))
        };
        [take("a", "b"), take("b", "a")].map(|thread| thread.join().unwrap())
    });
    block_on(locks.settle());
    one_got_error(&server, &errors);
}

#[test]
fn two_processes_in_opposite_order_get_one_error() {
    let server = Server::start();
    let take = |order: &str| {
        Command::new(std::env::current_exe().expect("a test is a program"))
            .args(["--exact", "deadlock::process_of_two_processes", "--nocapture"])
            .env(ADDRESS, server.addr().to_string())
            .env(ORDER, order)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    let processes = [take("a b"), take("b a")];
    let errors = processes.map(|process| {
        let output = process.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        said.lines().find_map(|line| line.strip_prefix("told: ")).map(str::to_owned)
    });
    one_got_error(&server, &errors);
}

/// Runs only in a process of the test above.
#[tokio::test]
async fn process_of_two_processes() {
    let (Ok(address), Ok(order)) = (std::env::var(ADDRESS), std::env::var(ORDER)) else { return };
    let locks = Locks::open(&format!("redis://{address}")).unwrap();
    let (first, second) = order.split_once(' ').expect("two locks");
    let outcome = tokio::time::timeout(SOON, acquire_both(&locks, first, second)).await.expect("both end");
    if let Some(errors) = deadlock(outcome) {
        println!("told: {errors}");
    }
    locks.settle().await;
}

/// A guard that moves between tasks may be released by any of them: an apparent cycle need not be one.
#[tokio::test]
async fn separate_acquisitions_have_separate_actors() {
    let server = Server::start();
    let locks = locks(&server);
    let one = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock("a").wait_forever();
        async move { lock.acquire().await }
    });
    crate::common::soon("the request waits", || waiters(&server, "a") == 1).await;
    one.release().await.unwrap();
    waiting.await.unwrap().unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn reentry_is_granted_immediately_and_released_with_the_first_guard() {
    let server = Server::start();
    let locks = locks(&server);
    let mut a = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let (fence, owner) = (a.fence(), a.owner().clone());
    {
        let mut b = a.acquire(&locks.lock("b")).await.unwrap().unwrap();
        assert!(b.owner().as_bytes().starts_with(&[owner.as_bytes(), b"##"].concat()), "{b:?}");
        let again = b.acquire(&locks.lock("a").shared()).await.unwrap().unwrap();
        assert_eq!((again.fence(), again.owner()), (fence, &owner));
        again.check().await.unwrap();
        again.release().await.unwrap();
        assert!(!is_free(&server, "a") && !is_free(&server, "b"));
        // Other clients are not granted the lock.
        assert!(locks.lock("a").try_acquire().await.unwrap().is_none());
    }
    locks.settle().await;
    assert!(!is_free(&server, "a") && is_free(&server, "b"));
    drop(a.acquire(&locks.lock("a")).await.unwrap().unwrap());
    a.check().await.unwrap();
    let error = a.acquire(&locks.lock_all::<&str>([])).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    // A lost lock is not re-entered.
    let _: i64 = crate::common::say(&server, "LOCK.FORCE a");
    a.lost().await;
    let error = a.acquire(&locks.lock("a")).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
}

/// A reader that requests the lock as a writer, and a request for one of several keys that are held together.
#[tokio::test]
async fn wait_for_itself_is_refused() {
    let server = Server::start();
    let locks = locks(&server);
    let mut both = locks.lock_all(["a", "b"]).try_acquire().await.unwrap().unwrap();
    both.acquire(&locks.lock("b")).await.unwrap().unwrap().release().await.unwrap();
    let error = both.acquire(&locks.lock_all(["b", "c"]).wait_forever()).await.unwrap_err();
    assert!(matches!(error, Error::Deadlock { .. }), "{error}");
    both.release().await.unwrap();
    assert!(is_free(&server, "a") && is_free(&server, "b") && is_free(&server, "c"));
}
