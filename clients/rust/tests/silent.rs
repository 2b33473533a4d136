//! Connections that die silently, and servers that are unreachable while a release is pending.

use std::time::{Duration, Instant};

use holdfast_client::Error;
use holdfast_client::redis;
use support::{Direction, Fate, NotBefore, Proxy, Server};

use crate::common::{SOON, clients, holder, is_free, locks, locks_over, names, say, soon, waiters};

/// Timeout until a silence is noticed, and the waits and holds are carried over.
const NOTICED: Duration = Duration::from_secs(45);

#[tokio::test]
async fn silently_dead_connection_is_replaced() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let first = locks(&server).lock("waited").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waited = locks.lock("waited").wait_forever();
    let waiting = tokio::spawn(async move { waited.acquire().await });
    soon("the request waits", || waiters(&server, "waited") == 1).await;
    let mut forgotten = None;
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Direction::Server && names(message, "LOCK.ACQUIRE") {
            forgotten.get_or_insert(flow);
        }
        if forgotten == Some(flow) { Fate::Drop } else { Fate::Pass }
    });
    let end = Instant::now() + NOTICED;
    let other = loop {
        let asked = tokio::time::timeout(SOON, locks.lock("b").try_acquire()).await.expect("a call ends");
        match asked {
            Ok(granted) => break granted.unwrap(),
            Err(error) => assert!(matches!(error, Error::Connection { .. }), "{error}"),
        }
        assert!(Instant::now() < end, "no other connection");
    };
    // Holds and waits are carried over.
    soon("the request waits again", || waiters(&server, "waited") == 1).await;
    first.release().await.unwrap();
    let second = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    for guard in [guard, other, second] {
        guard.release().await.unwrap();
    }
    locks.settle().await;
    assert!(is_free(&server, "a") && is_free(&server, "b") && is_free(&server, "waited"));
}

/// Also before the reply `WAITING`.
#[tokio::test]
async fn wait_without_reply_is_carried_over() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let first = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let mut swallowed = None;
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Direction::Server && names(message, "LOCK.ACQUIRE") {
            swallowed.get_or_insert(flow);
        }
        if swallowed == Some(flow) && toward == Direction::Client { Fate::Drop } else { Fate::Pass }
    });
    let lock = locks.lock("a").wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    let before = proxy.flows();
    let end = Instant::now() + NOTICED;
    while proxy.flows() == before || waiters(&server, "a") != 1 {
        assert!(Instant::now() < end, "the request does not wait again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    first.release().await.unwrap();
    let second = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    second.release().await.unwrap();
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn swallowed_release_takes_effect_before_the_lease_expires() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let guard = locks.lock("a").watched(Duration::from_secs(600)).try_acquire().await.unwrap().unwrap();
    let mut forgotten = None;
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Direction::Server && names(message, "LOCK.RELEASE") {
            forgotten.get_or_insert(flow);
        }
        if forgotten == Some(flow) { Fate::Drop } else { Fate::Pass }
    });
    // It is released over another connection.
    tokio::time::timeout(SOON, guard.release()).await.expect("a call ends").unwrap();
    assert!(is_free(&server, "a"));
}

/// The server does not know that the connection ended, and would grant to the dead session.
#[tokio::test]
async fn cancelled_wait_leaves_the_queue_with_the_next_session() {
    let server = Server::start();
    // The server would end the session a default lease later.
    let _: String = say(&server, "CONFIG SET holdfast.default-lease 600000");
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let lock = locks.lock("a").wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    // Neither data nor the end of a connection is forwarded.
    let before = proxy.flows();
    proxy.rule_by_flow(move |flow, _, _| if flow <= before { Fate::Hold } else { Fate::Pass });
    waiting.abort();
    let gone = async {
        while waiters(&server, "a") > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(NOTICED, gone).await.expect("the wait leaves the queue");
    held.release().await.unwrap();
    assert!(is_free(&server, "a"), "the dead session was granted nothing");
}

#[tokio::test]
async fn release_during_an_outage_takes_effect_afterwards() {
    const LEASE: Duration = Duration::from_millis(1500);
    let server = Server::start();
    let held = locks(&server).lock("waited").lease(Duration::from_secs(600)).try_acquire().await.unwrap().unwrap();
    let locks = locks(&server);
    let guard = locks.lock("a").watched(LEASE).try_acquire().await.unwrap().unwrap();
    let waited = locks.lock("waited").watched(LEASE).wait_forever();
    let waiting = tokio::spawn(async move { waited.acquire().await.map(drop) });
    soon("the request waits", || waiters(&server, "waited") == 1).await;
    // The connections for requests are closed. Those for events stay open, and no new ones are accepted.
    let mut admin = server.connect();
    let requests: Vec<i64> =
        clients(&server).into_iter().filter(|(_, command)| command == "lock.acquire").map(|(id, _)| id).collect();
    assert_eq!(requests.len(), 2);
    let _: String = redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(1).query(&mut admin).unwrap();
    for id in requests {
        let _: i64 = redis::cmd("CLIENT").arg("KILL").arg("ID").arg(id).query(&mut admin).unwrap();
    }
    drop(guard);
    waiting.abort();
    let begin = Instant::now();
    soon("more than a lease has passed", || begin.elapsed() > LEASE * 2).await;
    let _: String = redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(10_000).query(&mut admin).unwrap();
    soon("the lock is free", || is_free(&server, "a")).await;
    soon("no request waits", || waiters(&server, "waited") == 0).await;
    drop(held);
}

/// Also before the session is open.
#[tokio::test]
async fn acquire_returns_within_its_timeout_when_server_is_unresponsive() {
    let server = Server::start();
    server.stop();
    // The client closes a connection to an unresponsive server after ten seconds, whatever the caller's timeout is.
    let lock = locks(&server).lock("a").wait(Duration::from_secs(1));
    let asked = tokio::time::timeout(Duration::from_millis(9_500), lock.acquire()).await.expect("a bound");
    server.cont();
    assert!(matches!(asked, Err(Error::Connection { .. })), "{asked:?}");
}

#[tokio::test]
async fn refused_release_is_retried() {
    let server = Server::start();
    let _: String = say(&server, "ACL SETUSER locker on >secret ~* +@all");
    let client = crate::common::client_as(&server, "locker", "secret");
    let locks = holdfast_client::Locks::new(client);
    let guard = locks.lock("a").watched(Duration::from_secs(600)).try_acquire().await.unwrap().unwrap();
    let _: String = say(&server, "ACL SETUSER locker -lock.release");
    drop(guard);
    let begin = Instant::now();
    soon("the release was tried several times", || begin.elapsed() > Duration::from_secs(1)).await;
    assert!(holder(&server, "a").is_some(), "the server renews it");
    let _: String = say(&server, "ACL SETUSER locker +lock.release");
    soon("the lock is released", || is_free(&server, "a")).await;
}

/// The caller gets the error immediately. The client repeats the release until its time is over. Then it ends the
/// session, so that the server does not renew the hold.
#[tokio::test]
async fn release_refused_for_too_long_ends_session() {
    const LEASE: Duration = Duration::from_secs(3);
    let server = Server::start();
    let _: String = say(&server, "ACL SETUSER locker on >secret ~* +@all");
    let client = crate::common::client_as(&server, "locker", "secret");
    let locks = holdfast_client::Locks::new(client);
    let guard = locks.lock("a").watched(LEASE).try_acquire().await.unwrap().unwrap();
    let _: String = say(&server, "ACL SETUSER locker -lock.release");
    let due = NotBefore::millis(2 * LEASE.as_millis() as u64);
    let error = guard.release().await.unwrap_err();
    assert!(error.to_string().contains("NOPERM"), "{error}");
    soon("its lease has expired", || is_free(&server, "a")).await;
    due.is_over("the end of the session, which the server renewed it until");
    tokio::time::timeout(SOON, locks.settle()).await.expect("the release is not tried forever");
}
