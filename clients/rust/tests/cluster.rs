//! A cluster: a session at each node that is used, and slots that move.

use std::collections::HashMap;
use std::time::Duration;

use holdfast_client::{Error, Locks};
use support::{Cluster, Proxy, Server};

use crate::common::{SOON, clients, holder, is_free, say, sessions, soon, waiters};

fn locks(cluster: &Cluster) -> Locks {
    locks_of(cluster, 0)
}

/// A client that is given this node.
fn locks_of(cluster: &Cluster, node: usize) -> Locks {
    Locks::open(&format!("redis+cluster://{}", cluster.node(node).addr())).unwrap()
}

fn owner<'a>(cluster: &'a Cluster, key: &str) -> &'a Server {
    cluster.node(cluster.owner_of(cluster.slot_of(key.as_bytes())))
}

#[tokio::test]
async fn each_key_is_locked_at_its_node() {
    let cluster = Cluster::start(3);
    let locks = locks(&cluster);
    for number in 0..20 {
        let key = format!("k{number}");
        let guard = locks.lock(&key).try_acquire().await.unwrap().unwrap();
        assert!(holder(owner(&cluster, &key), &key).is_some());
        guard.release().await.unwrap();
    }
    let both = locks.lock_all(["{t}a", "{t}b"]).try_acquire().await.unwrap().unwrap();
    both.release().await.unwrap();
    let error = locks.lock_all(["a", "b"]).try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Server { message, .. } if message.starts_with("CROSSSLOT")), "{error}");
    assert_eq!(locks.servers().await.unwrap().into_iter().filter(Result::is_ok).count(), 3);
}

#[tokio::test]
async fn acquisition_waits_for_a_cluster_that_refuses_connections() {
    let cluster = Cluster::start(1);
    let proxy = Proxy::to(cluster.node(0).addr());
    proxy.refuse();
    let locks = Locks::open(&format!("redis+cluster://{}", proxy.addr())).unwrap();
    let lock = locks.lock("a");
    let refused = async {
        let error = locks.lock("a").try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Connection { .. }), "{error}");
        proxy.accept();
    };
    let (guard, ()) = tokio::time::timeout(SOON, async { tokio::join!(lock.acquire(), refused) }).await.unwrap();
    guard.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn closed_client_does_not_wait_for_a_cluster() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    proxy.refuse();
    let locks = Locks::open(&format!("redis+cluster://{}", proxy.addr())).unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock("a");
        async move { lock.acquire().await }
    });
    tokio::task::yield_now().await;
    locks.close().await;
    for ended in [waiting.await.unwrap(), locks.lock("a").acquire().await] {
        assert!(matches!(ended, Err(Error::Connection { .. })), "{ended:?}");
    }
}

#[tokio::test]
async fn silent_node_does_not_delay_connections_to_others() {
    let cluster = Cluster::start(1);
    let server = cluster.node(0);
    // It accepts connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis+cluster://{},{}", silent.local_addr().unwrap(), server.addr());
    let locks = Locks::open(&url).unwrap();
    let short = locks.lock("short").watched(Duration::from_secs(1)).try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(server).len() == 1).await;
    for session in sessions(server) {
        let _: i64 = say(server, &format!("CLIENT KILL ID {session}"));
    }
    let again = tokio::time::timeout(SOON, locks.lock("a").acquire()).await.unwrap();
    again.unwrap().unwrap().release().await.unwrap();
    drop(short);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_and_hold_move_with_their_slot() {
    let cluster = Cluster::start(2);
    let locks = locks(&cluster);
    let key = "a";
    let slot = cluster.slot_of(key.as_bytes());
    let from = cluster.owner_of(slot);
    let to = 1 - from;
    let guard = locks.lock(key).try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock(key).wait_forever();
        async move { lock.acquire().await }
    });
    soon("the request waits", || waiters(cluster.node(from), key) == 1).await;
    cluster.move_slot(slot, from, to);
    soon("the request waits at the new node", || waiters(cluster.node(to), key) == 1).await;
    guard.check().await.unwrap();
    soon("the hold is bound at the new node", || {
        clients(cluster.node(to)).iter().any(|(_, command)| command.contains("lock.events"))
    })
    .await;
    guard.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert!(is_free(cluster.node(to), key));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_carries_waits_and_holds_over() {
    let cluster = Cluster::start(3);
    let locks = locks(&cluster);
    let key = "a";
    let old = cluster.owner_of(cluster.slot_of(key.as_bytes()));
    let new = cluster.replica_of(old);
    let guard = locks.lock(key).try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock(key).wait_forever();
        async move { lock.acquire().await }
    });
    soon("the request waits", || waiters(cluster.node(old), key) == 1).await;
    cluster.fail_over_to(&new);
    soon("the request waits at the new primary", || waiters(&new, key) == 1).await;
    guard.check().await.unwrap();
    assert_eq!(holder(&new, key).unwrap().as_bytes(), guard.owner().as_bytes());
    guard.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert!(is_free(&new, key));
}

#[tokio::test]
async fn wait_includes_the_look_up_of_the_slot_map() {
    const WAIT: Duration = Duration::from_secs(600);
    let cluster = Cluster::start(2);
    let guard = locks(&cluster).lock("a").try_acquire().await.unwrap().unwrap();
    // It accepts connections and never answers, so the look-up at this node takes its whole second.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let seeds = format!("{},{}", silent.local_addr().unwrap(), cluster.node(0).addr());
    let locks = Locks::open(&format!("redis+cluster://{seeds}")).unwrap();
    let lock = locks.lock("a").wait(WAIT);
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("it waits", || waiters(owner(&cluster, "a"), "a") == 1).await;
    let waiters: Vec<HashMap<String, redis::Value>> = say(owner(&cluster, "a"), "LOCK.WAITERS a");
    let remaining: u64 = redis::from_redis_value(waiters[0]["remaining"].clone()).unwrap();
    assert!(Duration::from_millis(remaining) <= WAIT - Duration::from_secs(1), "{remaining} ms are left");
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn documented_rights_suffice() {
    let cluster = Cluster::start(2);
    let (_, needed) = include_str!("../../../docs/clients/rust.md").split_once("client's ACL user needs").unwrap();
    let (needed, _) = needed.split_once("\n\n").unwrap();
    let quoted: Vec<&str> = needed.split('`').skip(1).step_by(2).filter(|words| words.starts_with('+')).collect();
    for node in 0..2 {
        let user = format!("ACL SETUSER locker on >secret ~* -@all {}", quoted.join(" ").replace('\n', " "));
        let _: String = say(cluster.node(node), &user);
    }
    let locks = Locks::open(&format!("redis+cluster://locker:secret@{}", cluster.node(0).addr())).unwrap();
    let slot = cluster.slot_of(b"a");
    let from = cluster.owner_of(slot);
    locks.lock("a").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    cluster.begin_move(slot, from, 1 - from);
    locks.lock("a").try_acquire().await.unwrap().unwrap().release().await.unwrap();
    cluster.finish_move(slot, from, 1 - from);
}

#[tokio::test]
async fn request_at_wrong_node_is_redirected() {
    let cluster = Cluster::start(2);
    let locks = locks(&cluster);
    let key = "a";
    let slot = cluster.slot_of(key.as_bytes());
    let from = cluster.owner_of(slot);
    locks.lock(key).try_acquire().await.unwrap().unwrap().release().await.unwrap();
    // Without holds and waits, no event redirects the client.
    cluster.move_slot(slot, from, 1 - from);
    let guard = locks.lock(key).try_acquire().await.unwrap().unwrap();
    assert!(holder(cluster.node(1 - from), key).is_some());
    guard.release().await.unwrap();
    // While a slot migrates, new keys of it are requested at the target.
    cluster.begin_move(slot, 1 - from, from);
    // Also of a client that has no session there yet.
    assert!(locks_of(&cluster, 1 - from).info(key).await.unwrap().is_none());
    let guard = locks.lock(key).try_acquire().await.unwrap().unwrap();
    guard.release().await.unwrap();
    cluster.finish_move(slot, 1 - from, from);
    locks.lock(key).try_acquire().await.unwrap().unwrap().release().await.unwrap();
}
