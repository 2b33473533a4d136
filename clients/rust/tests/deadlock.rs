//! Two who take two locks in opposite order: one of them is told who waits for whom, and the other one goes on. And who takes what
//! he holds already.

use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast_client::{Error, Locks, block_on};
use support::Server;

use crate::common::{SOON, is_free, locks, waiters};

/// Where a process of the test finds the server, and what it takes.
const ADDRESS: &str = "HOLDFAST_TEST_ADDRESS";
const ORDER: &str = "HOLDFAST_TEST_ORDER";

/// Takes one lock, and, as soon as both are taken, the other one as well.
async fn takes_both(locks: &Locks, first: &str, second: &str) -> Result<(), Error> {
    let mut outer = locks.lock(first).wait_forever().acquire().await?.expect("it waits for it");
    while !(locks.locked(first).await? && locks.locked(second).await?) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let inner = outer.acquire(&locks.lock(second).wait_forever()).await?.expect("it waits for it");
    inner.release().await?;
    outer.release().await
}

/// One of two was told, in words that name both owners and both locks.
#[track_caller]
fn one_was_told(server: &Server, told: &[Option<String>]) {
    let deadlocks: Vec<&String> = told.iter().flatten().collect();
    let [deadlock] = deadlocks[..] else { panic!("{told:?}") };
    let process = format!(":{}:", std::process::id());
    for words in ["DEADLOCK", "waits for 'a'", "waits for 'b'"] {
        assert!(deadlock.contains(words), "{words}: {deadlock}");
    }
    assert!(deadlock.matches("owner '").count() >= 2, "{deadlock}");
    assert!(deadlock.contains(&process) || told.len() == 2, "{deadlock}");
    assert_eq!((waiters(server, "a"), waiters(server, "b")), (0, 0));
    support::until(SOON, "nothing is left", || is_free(server, "a") && is_free(server, "b"));
}

fn deadlock(outcome: Result<(), Error>) -> Option<String> {
    match outcome {
        Ok(()) => None,
        Err(error @ Error::Deadlock { .. }) => Some(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn two_tasks() {
    let server = Server::start();
    let locks = locks(&server);
    let both = async { tokio::join!(takes_both(&locks, "a", "b"), takes_both(&locks, "b", "a")) };
    let (one, other) = tokio::time::timeout(SOON, both).await.expect("nobody waits for ever");
    locks.settle().await;
    one_was_told(&server, &[deadlock(one), deadlock(other)]);
}

#[test]
fn two_threads() {
    let server = Server::start();
    let locks = locks(&server);
    let told = std::thread::scope(|scope| {
        let take = |first: &'static str, second: &'static str| {
            let locks = &locks;
            scope.spawn(move || deadlock(block_on(takes_both(locks, first, second))))
        };
        [take("a", "b"), take("b", "a")].map(|thread| thread.join().unwrap())
    });
    block_on(locks.settle());
    one_was_told(&server, &told);
}

#[test]
fn two_processes() {
    let server = Server::start();
    let take = |order: &str| {
        Command::new(std::env::current_exe().expect("a test is a program"))
            .args(["--exact", "deadlock::a_process_of_two", "--nocapture"])
            .env(ADDRESS, server.addr().to_string())
            .env(ORDER, order)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    let processes = [take("a b"), take("b a")];
    let told = processes.map(|process| {
        let output = process.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        said.lines().find_map(|line| line.strip_prefix("told: ")).map(str::to_owned)
    });
    one_was_told(&server, &told);
}

/// Does nothing but in a process of the test above.
#[tokio::test]
async fn a_process_of_two() {
    let (Ok(address), Ok(order)) = (std::env::var(ADDRESS), std::env::var(ORDER)) else { return };
    let locks = Locks::open(&format!("redis://{address}")).unwrap();
    let (first, second) = order.split_once(' ').expect("two locks");
    let outcome = tokio::time::timeout(SOON, takes_both(&locks, first, second)).await.expect("nobody waits for ever");
    if let Some(told) = deadlock(outcome) {
        println!("told: {told}");
    }
    locks.settle().await;
}

/// A guard that moves between tasks may be released by any of them: what looks like a cycle need not be one.
#[tokio::test]
async fn acquisitions_apart_are_no_actor() {
    let server = Server::start();
    let locks = locks(&server);
    let one = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock("a").wait_forever();
        async move { lock.acquire().await }
    });
    crate::common::soon("it waits", || waiters(&server, "a") == 1).await;
    one.release().await.unwrap();
    waiting.await.unwrap().unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn re_entry_is_granted_at_once_and_released_by_the_first_guard() {
    let server = Server::start();
    let locks = locks(&server);
    let mut a = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let (fence, owner) = (a.fence(), a.owner().clone());
    {
        let mut b = a.acquire(&locks.lock("b")).await.unwrap().unwrap();
        assert!(b.owner().as_bytes().starts_with(&[owner.as_bytes(), b"##"].concat()), "{b:?}");
        let again = b.acquire(&locks.lock("a").shared()).await.unwrap().unwrap();
        assert_eq!((again.fence(), again.owner()), (fence, &owner));
        again.check().unwrap();
        again.release().await.unwrap();
        assert!(!is_free(&server, "a") && !is_free(&server, "b"));
        // Others are not let in.
        assert!(locks.lock("a").try_acquire().await.unwrap().is_none());
    }
    locks.settle().await;
    assert!(!is_free(&server, "a") && is_free(&server, "b"));
    drop(a.acquire(&locks.lock("a")).await.unwrap().unwrap());
    a.check().unwrap();
    // One that is lost is not had.
    let _: i64 = crate::common::say(&server, "LOCK.FORCE a");
    a.lost().await;
    let error = a.acquire(&locks.lock("a")).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
}

/// A reader who wants to write, and who asks for one of several keys that are held together.
#[tokio::test]
async fn who_would_wait_for_himself_is_told() {
    let server = Server::start();
    let locks = locks(&server);
    let mut both = locks.lock_all(["a", "b"]).try_acquire().await.unwrap().unwrap();
    both.acquire(&locks.lock("b")).await.unwrap().unwrap().release().await.unwrap();
    let error = both.acquire(&locks.lock_all(["b", "c"]).wait_forever()).await.unwrap_err();
    assert!(matches!(error, Error::Deadlock { .. }), "{error}");
    both.release().await.unwrap();
    assert!(is_free(&server, "a") && is_free(&server, "b") && is_free(&server, "c"));
}
