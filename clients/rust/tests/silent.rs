//! Connections that die silently, and servers that can't be reached while a release is pending.

use std::time::{Duration, Instant};

use holdfast_client::Error;
use holdfast_client::redis;
use support::{Fate, NotBefore, Proxy, Server, Toward};

use crate::common::{SOON, clients, holder, is_free, locks, locks_over, names, say, soon, waiters};

/// Until a silence must have been noticed, and what was lost by it taken along.
const NOTICED: Duration = Duration::from_secs(45);

#[tokio::test]
async fn a_connection_that_a_firewall_has_forgotten_is_replaced() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let first = locks(&server).lock("waited").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waited = locks.lock("waited").wait_forever();
    let waiting = tokio::spawn(async move { waited.acquire().await });
    soon("it waits", || waiters(&server, "waited") == 1).await;
    let mut forgotten = None;
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Toward::Server && names(message, "LOCK.ACQUIRE") {
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
    // What was held and what waited has been taken along.
    soon("it waits again", || waiters(&server, "waited") == 1).await;
    first.release().await.unwrap();
    let second = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    for guard in [guard, other, second] {
        guard.release().await.unwrap();
    }
    locks.settle().await;
    assert!(is_free(&server, "a") && is_free(&server, "b") && is_free(&server, "waited"));
}

/// Also if nobody has said yet that it waits.
#[tokio::test]
async fn a_wait_whose_answer_is_swallowed_is_taken_along() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let first = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let mut swallowed = None;
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Toward::Server && names(message, "LOCK.ACQUIRE") {
            swallowed.get_or_insert(flow);
        }
        if swallowed == Some(flow) && toward == Toward::Client { Fate::Drop } else { Fate::Pass }
    });
    let lock = locks.lock("a").wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("it waits", || waiters(&server, "a") == 1).await;
    let before = proxy.flows();
    let end = Instant::now() + NOTICED;
    while proxy.flows() == before || waiters(&server, "a") != 1 {
        assert!(Instant::now() < end, "it does not wait again");
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
        if toward == Toward::Server && names(message, "LOCK.RELEASE") {
            forgotten.get_or_insert(flow);
        }
        if forgotten == Some(flow) { Fate::Drop } else { Fate::Pass }
    });
    let error = tokio::time::timeout(SOON, guard.release()).await.expect("a call ends").unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    tokio::time::timeout(NOTICED, locks.settle()).await.expect("it is released over another connection");
    assert!(is_free(&server, "a"));
}

/// Its end has not reached the server, which would grant to the session that is gone.
#[tokio::test]
async fn cancelled_wait_leaves_the_queue_with_the_next_session() {
    let server = Server::start();
    // A default lease later the server itself would end the session.
    let _: String = say(&server, "CONFIG SET holdfast.default-lease 600000");
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let locks = locks_over(&proxy);
    let lock = locks.lock("a").wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
    soon("it waits", || waiters(&server, "a") == 1).await;
    // Neither what is said nor that a connection has ended gets any further.
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
    assert!(is_free(&server, "a"), "nobody who is gone was granted it");
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
    soon("it waits", || waiters(&server, "waited") == 1).await;
    // All that requests go over end; those that hear live on, and no new ones are taken.
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
    soon("more than a lease is over", || begin.elapsed() > LEASE * 2).await;
    let _: String = redis::cmd("CONFIG").arg("SET").arg("maxclients").arg(10_000).query(&mut admin).unwrap();
    soon("it is free", || is_free(&server, "a")).await;
    soon("nobody waits", || waiters(&server, "waited") == 0).await;
    drop(held);
}

/// Also while the session is yet to be opened.
#[tokio::test]
async fn a_time_to_wait_is_a_bound_also_when_the_server_stands_still() {
    let server = Server::start();
    server.stop();
    // A server that answers nothing is given up after ten seconds, whatever the caller says.
    let lock = locks(&server).lock("a").wait(Duration::from_secs(1));
    let asked = tokio::time::timeout(Duration::from_millis(9500), lock.acquire()).await.expect("a bound");
    server.cont();
    assert!(matches!(asked, Err(Error::Connection { .. })), "{asked:?}");
}

#[tokio::test]
async fn a_release_that_is_refused_is_tried_until_it_is_done() {
    let server = Server::start();
    let _: String = say(&server, "ACL SETUSER locker on >secret ~* +@all");
    let client = crate::common::client_as(&server, "locker", "secret");
    let locks = holdfast_client::Locks::new(client);
    let guard = locks.lock("a").watched(Duration::from_secs(600)).try_acquire().await.unwrap().unwrap();
    let _: String = say(&server, "ACL SETUSER locker -lock.release");
    drop(guard);
    let begin = Instant::now();
    soon("it was tried several times", || begin.elapsed() > Duration::from_secs(1)).await;
    assert!(holder(&server, "a").is_some(), "the server renews it");
    let _: String = say(&server, "ACL SETUSER locker +lock.release");
    soon("it is released", || is_free(&server, "a")).await;
}

/// So nobody renews it any more.
#[tokio::test]
async fn a_release_that_is_refused_for_too_long_ends_the_session() {
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
    due.is_over("the end of the session");
    assert!(holder(&server, "a").is_some(), "the server renewed it until now");
    soon("its lease is over", || is_free(&server, "a")).await;
    tokio::time::timeout(SOON, locks.settle()).await.expect("it is not tried for ever");
}
