//! Requests and their outcomes.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_client::{Error, Guard, Locks};
use support::{NotBefore, Server};

use crate::common::{SOON, client_as, clients, holder, is_free, locks, say, soon, waiters};

#[tokio::test]
async fn lock_is_granted_and_released() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    assert_eq!(holder(&server, "a").as_deref().map(str::as_bytes), Some(guard.owner().as_bytes()));
    let fence: u64 = say(&server, "HGET a #fence");
    assert_eq!(guard.fence(), fence);
    guard.check().await.unwrap();
    guard.release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn fences_increase() {
    let server = Server::start();
    let lock = locks(&server).lock("a");
    let mut last = 0;
    for _ in 0..10 {
        let guard = lock.try_acquire().await.unwrap().unwrap();
        assert!(guard.fence() > last);
        last = guard.fence();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn try_acquire_returns_none_immediately() {
    let server = Server::start();
    let lock = locks(&server).lock("a");
    let guard = lock.try_acquire().await.unwrap().unwrap();
    assert!(lock.try_acquire().await.unwrap().is_none());
    assert!(lock.clone().wait(Duration::ZERO).acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn wait_ends_with_grant_or_timeout() {
    let server = Server::start();
    let lock = locks(&server).lock("a");
    let guard = lock.try_acquire().await.unwrap().unwrap();
    // The server counts in whole milliseconds, from the beginning of its event-loop iteration.
    let due = NotBefore::millis(48);
    assert!(lock.clone().wait(Duration::from_millis(50)).acquire().await.unwrap().is_none());
    due.is_over("the end of the wait");
    assert_eq!(waiters(&server, "a"), 0);
    let waiting = tokio::spawn({
        let lock = lock.clone().wait(SOON);
        async move { lock.acquire().await }
    });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    let first = guard.fence();
    guard.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap().unwrap();
    assert!(next.fence() > first);
    next.release().await.unwrap();
    // The server would refuse this time.
    let lock = lock.wait(Duration::from_secs(1 << 40));
    assert!(lock.acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn readers_share_and_permits_are_counted() {
    let server = Server::start();
    let locks = locks(&server);
    let reader = locks.lock("a").shared();
    let readers = [reader.try_acquire().await.unwrap().unwrap(), reader.try_acquire().await.unwrap().unwrap()];
    assert!(locks.lock("a").try_acquire().await.unwrap().is_none());
    for reader in readers {
        reader.release().await.unwrap();
    }
    let permit = locks.lock("b").limit(2);
    let permits = [permit.try_acquire().await.unwrap().unwrap(), permit.try_acquire().await.unwrap().unwrap()];
    assert!(permit.try_acquire().await.unwrap().is_none());
    for permit in permits {
        permit.release().await.unwrap();
    }
    assert!(is_free(&server, "a") && is_free(&server, "b"));
}

#[tokio::test]
async fn several_keys_are_acquired_all_or_none() {
    let server = Server::start();
    let locks = locks(&server);
    let both = locks.lock_all(["a", "b"]);
    let one = locks.lock("b").try_acquire().await.unwrap().unwrap();
    assert!(both.try_acquire().await.unwrap().is_none());
    assert!(is_free(&server, "a"));
    let waiting = tokio::spawn({
        let both = both.clone().wait_forever();
        async move { both.acquire().await }
    });
    soon("both requests wait", || waiters(&server, "b") == 1).await;
    one.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap().unwrap();
    assert_eq!(guard.keys().len(), 2);
    assert_eq!(holder(&server, "a"), holder(&server, "b"));
    guard.renew(Duration::from_secs(100)).await.unwrap();
    guard.release().await.unwrap();
    assert!(is_free(&server, "a") && is_free(&server, "b"));
}

#[tokio::test]
async fn refusals_have_error_types() {
    let server = Server::start();
    let locks = locks(&server);
    let () = say(&server, "SET text value");
    let error = locks.lock("text").try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
    let error = locks.lock("a").replicas(1).try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoReplicas { .. }), "{error}");
    assert!(is_free(&server, "a"));
    for (lock, word) in [
        (locks.lock_all(["a", "b"]).shared(), "only be locked as mutexes"),
        (locks.lock_all(<[&str; 0]>::default()), "one key"),
        (locks.lock("a").lease(Duration::ZERO), "longer than 0"),
    ] {
        let error = lock.acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { message } if message.contains(word)), "{error}");
    }
}

#[tokio::test]
async fn cycle_of_waits_is_refused() {
    let server = Server::start();
    let locks = locks(&server);
    let mut guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let _: i64 = say(&server, "LOCK.ACQUIRE b other");
    // The search follows only holds that last longer than the wait.
    for key in ["a", "b"] {
        let _: i64 = say(&server, &format!("PERSIST {key}"));
    }
    let mut other = server.raw();
    other.send(&[b"LOCK.ACQUIRE", b"a", b"other", b"WAIT", b"0"]).unwrap();
    soon("the other request waits", || waiters(&server, "a") == 1).await;
    let error = guard.acquire(&locks.lock("b").wait_forever()).await.unwrap_err();
    let Error::Deadlock { keys, message } = &error else { panic!("{error}") };
    assert!(keys.iter().eq([b"b"]), "{keys}");
    assert!(message.starts_with("DEADLOCK") && message.contains("other"), "{message}");
    assert_eq!(waiters(&server, "b"), 0);
}

#[tokio::test]
async fn replicas_confirm() {
    let primary = Server::start();
    let replica = Server::start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let guard = locks(&primary).lock("a").replicas(1).try_acquire().await.unwrap().unwrap();
    primary.wait_for_replica(&replica);
    assert_eq!(holder(&replica, "a"), holder(&primary, "a"));
    guard.renew(Duration::from_secs(60)).await.unwrap();
    replica.stop();
    let error = guard.renew(Duration::from_secs(90)).await.unwrap_err();
    assert!(matches!(error, Error::NoReplicas { .. }), "{error}");
    replica.cont();
    guard.check().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn idle_connection_that_ended_is_replaced() {
    let server = Server::start();
    let locks = locks(&server);
    locks.lock("a").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    // The session reads, so that only it would notice the end of its connection.
    let (idle, _) = clients(&server).into_iter().find(|(_, command)| command == "lock.release").unwrap();
    let _: i64 = say(&server, &format!("CLIENT KILL ID {idle}"));
    let asked = tokio::time::timeout(SOON, locks.lock("a").try_acquire()).await.unwrap();
    asked.unwrap().unwrap().release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn owner_contains_configured_name() {
    let server = Server::start();
    let locks = locks(&server);
    let named = locks.clone().named("billing@host7").unwrap();
    let guard = named.lock("a").try_acquire().await.unwrap().unwrap();
    assert!(guard.owner().as_bytes().starts_with(b"billing@host7:"));
    let other = locks.lock("b").try_acquire().await.unwrap().unwrap();
    // Each owner has its own random bits, so that a forked child inherits none.
    let mut inner = named.lock("c").try_acquire().await.unwrap().unwrap();
    let inner = inner.acquire(&named.lock("d")).await.unwrap().unwrap();
    let last = named.lock("e").try_acquire().await.unwrap().unwrap();
    let random = |guard: &Guard| {
        let owner = String::from_utf8(guard.owner().as_bytes().to_vec()).unwrap();
        let random = owner.rsplit(':').nth(1).unwrap().rsplit('#').next().unwrap().to_owned();
        assert_eq!(random.len(), 32, "{owner}");
        random
    };
    let owners: BTreeSet<String> = [&guard, &other, &inner, &last].into_iter().map(random).collect();
    assert_eq!(owners.len(), 4, "{owners:?}");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let process = format!("{}:{}:", host.trim(), std::process::id());
    assert!(other.owner().as_bytes().starts_with(process.as_bytes()), "{other:?}");
    for none in ["#no", "neither##this"] {
        assert!(locks.clone().named(none).is_err(), "{none}");
    }
    assert!(locks.named(&"x".repeat(401)).is_err());
}

/// No later attempt would succeed.
#[tokio::test]
async fn wrong_password_ends_a_wait() {
    let server = Server::start();
    let () = say(&server, "CONFIG SET requirepass secret");
    let locks = Locks::open(&format!("redis://:wrong@{}", server.addr())).unwrap();
    let waited = tokio::time::timeout(SOON, locks.lock("a").acquire()).await.unwrap();
    let error = waited.unwrap_err();
    assert!(matches!(&error, Error::Server { message, .. } if message.starts_with("WRONGPASS")), "{error}");
}

#[tokio::test]
async fn connection_error_names_address() {
    let mut server = Server::start();
    let locks = locks(&server);
    let address = server.addr().to_string();
    server.kill9();
    let lock = locks.lock("a").wait(Duration::from_millis(50));
    for error in [lock.try_acquire().await.unwrap_err(), lock.acquire().await.unwrap_err()] {
        assert!(matches!(&error, Error::Connection { server, .. } if *server == address), "{error}");
        assert!(error.to_string().contains("\"a\""), "{error}");
    }
    server.restart();
    locks.lock("a").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn missing_module_is_reported() {
    let server = Server::builder().without_module().start();
    let error = locks(&server).lock("a").try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::ModuleNotLoaded { message, .. } if message.contains("unknown command")), "{error}");
    let words = error.to_string();
    for word in [&*server.addr().to_string(), "\"a\"", "MODULE LOAD", "loadmodule"] {
        assert!(words.contains(word), "{word}: {words}");
    }
    let error = locks(&server).info("a").await.unwrap_err();
    assert!(matches!(error, Error::ModuleNotLoaded { .. }), "{error}");
}

#[tokio::test]
async fn user_with_minimal_rights_can_lock() {
    let server = Server::start();
    let () = say(
        &server,
        "ACL SETUSER worker on >secret ~jobs:* -@all +lock.acquire +lock.release +lock.renew +lock.session +lock.events +lock.version",
    );
    let locks = Locks::new(client_as(&server, "worker", "secret"));
    let guard = locks.lock("jobs:1").try_acquire().await.unwrap().unwrap();
    let error = locks.lock("other").try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Server { message, .. } if message.starts_with("NOPERM")), "{error}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn info_and_force_work() {
    let server = Server::start();
    let locks = locks(&server);
    assert_eq!(locks.info("a").await.unwrap(), None);
    assert!(!locks.locked("a").await.unwrap());
    assert_eq!(locks.force("a").await.unwrap(), 0);
    let permits = locks.lock("a").limit(2);
    let one = permits.try_acquire().await.unwrap().unwrap();
    let other = permits.lease(Duration::from_secs(600)).try_acquire().await.unwrap().unwrap();
    let _: i64 = say(&server, "HSET for-ever owner 1");
    let waiting = tokio::spawn({
        let lock = locks.lock("a").wait_forever();
        async move { lock.acquire().await.unwrap().unwrap() }
    });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    let info = locks.info("a").await.unwrap().unwrap();
    assert_eq!((info.limit, info.waiters, info.fence), (Some(2), 1, Some(other.fence())));
    for guard in [&one, &other] {
        let holder =
            info.holders.iter().find(|holder| holder.owner == *guard.owner()).expect("the owner holds the lock");
        assert_eq!((holder.holds, holder.token), (1, Some(guard.fence())));
        assert!(holder.left.is_some_and(|left| left <= Duration::from_secs(600)), "{holder:?}");
    }
    assert!(locks.locked("a").await.unwrap());
    assert_eq!(locks.force("a").await.unwrap(), 2);
    // The waiter is granted.
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap();
    assert_eq!(locks.info("a").await.unwrap().unwrap().limit, Some(1));
    next.release().await.unwrap();
    let reader = locks.lock("a").shared().try_acquire().await.unwrap().unwrap();
    assert_eq!(locks.info("a").await.unwrap().unwrap().limit, None);
    reader.release().await.unwrap();
    let for_ever = locks.info("for-ever").await.unwrap().unwrap();
    assert_eq!((for_ever.fence, for_ever.holders[0].left), (None, None));
    let () = say(&server, "SET text value");
    let error = locks.info("text").await.unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
}

#[tokio::test]
async fn waiters_are_listed_in_order() {
    let server = Server::start();
    let locks = locks(&server);
    assert_eq!(locks.waiters("a").await.unwrap(), []);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let wait = |name: &str, wait: Option<Duration>| {
        let lock = locks.clone().named(name).unwrap().lock("a");
        let lock = wait.map_or(lock.clone(), |time| lock.wait(time));
        tokio::spawn(async move { lock.acquire().await })
    };
    let first = wait("first", Some(SOON * 10));
    soon("one request waits", || waiters(&server, "a") == 1).await;
    let second = wait("second", None);
    soon("both requests wait", || waiters(&server, "a") == 2).await;
    let listed = locks.waiters("a").await.unwrap();
    let is_of = |at: usize, name: &str| listed[at].owner.as_bytes().starts_with(name.as_bytes());
    assert!(listed.len() == 2 && is_of(0, "first") && is_of(1, "second"), "{listed:?}");
    assert!(listed[0].remaining.is_some_and(|left| left > SOON) && listed[1].remaining.is_none(), "{listed:?}");
    assert_eq!(listed[0].limit, Some(1));
    first.abort();
    second.abort();
    guard.release().await.unwrap();
}
