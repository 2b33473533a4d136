//! MultiLock: locks at several servers, all or none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use holdfast_client::{Error, Lock, Locks, LossReason, MultiLock};
use support::{Cluster, Fate, Proxy, Random, Server};
use tokio::task::JoinSet;

use crate::common::{SOON, dropped_at, holder, is_free, locks, locks_over, names, say, soon, waiters};

fn servers() -> [Server; 3] {
    [Server::start(), Server::start(), Server::start()]
}

/// The same key at each server.
fn everywhere(locks: &[Locks]) -> Vec<Lock> {
    locks.iter().map(|locks| locks.lock("a")).collect()
}

fn all_free(servers: &[Server]) -> bool {
    servers.iter().all(|server| is_free(server, "a"))
}

#[tokio::test]
async fn all_locks_are_held_or_none() {
    let servers = servers();
    let clients: Vec<_> = servers.iter().map(locks).collect();
    let all = MultiLock::new(everywhere(&clients));
    let guard = all.try_acquire().await.unwrap().unwrap();
    assert_eq!(guard.parts().len(), 3);
    assert!(servers.iter().all(|server| holder(server, "a").is_some()));
    guard.check().await.unwrap();
    assert!(all.try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(all_free(&servers));
    // Whichever lock is unavailable, none of the others stays held.
    for client in &clients {
        let other = client.lock("a").try_acquire().await.unwrap().unwrap();
        assert!(all.clone().wait(Duration::from_millis(30)).acquire().await.unwrap().is_none());
        for client in &clients {
            client.settle().await;
        }
        assert_eq!(servers.iter().filter(|server| holder(server, "a").is_some()).count(), 1);
        other.release().await.unwrap();
    }
}

#[tokio::test]
async fn keys_of_one_database_are_acquired_in_one_command() {
    let server = Server::start();
    let zero = locks(&server);
    let one = Locks::open(&format!("redis://{}/1", server.addr())).unwrap();
    let several = MultiLock::new([one.lock("a"), zero.lock("b"), zero.lock("a"), zero.lock_all(["c", "d"])]);
    let guard = several.try_acquire().await.unwrap().unwrap();
    let parts: Vec<_> = guard.parts().iter().map(|part| part.keys().to_string()).collect();
    assert_eq!(parts, [r#""b", "a", "c", "d""#, r#""a""#]);
    let other = locks(&server).lock("a").try_acquire().await.unwrap();
    assert!(other.is_none());
    guard.release().await.unwrap();
    let error = MultiLock::new([zero.lock("a"), locks(&server).lock("a")]).try_acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Invalid { message } if message.contains("named twice")), "{error}");
}

#[tokio::test]
async fn keys_in_a_cluster_may_have_different_slots() {
    let cluster = Cluster::start(3);
    let locks = Locks::open(&format!("redis+cluster://{}", cluster.node(0).addr())).unwrap();
    let keys = ["a", "b", "c", "{a}2"];
    let guard = MultiLock::new(keys.map(|key| locks.lock(key))).try_acquire().await.unwrap().unwrap();
    assert_eq!(guard.parts().len(), 3);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn loss_of_one_lock_is_loss_of_all() {
    let servers = servers();
    let clients: Vec<_> = servers.iter().map(locks).collect();
    let all = MultiLock::new(everywhere(&clients));
    for server in &servers {
        let guard = all.try_acquire().await.unwrap().unwrap();
        let _: i64 = say(server, "LOCK.FORCE a");
        let stopped = tokio::time::timeout(SOON, guard.while_held(std::future::pending::<()>())).await.unwrap();
        assert!(matches!(stopped, Err(Error::Lost { why: LossReason::Forced, .. })));
        assert!(guard.check().await.is_err());
        guard.release().await.unwrap_err();
        soon("the others are released", || all_free(&servers)).await;
    }
}

#[tokio::test]
async fn loss_of_one_lock_ends_the_wait_for_another() {
    let servers = servers();
    let clients: Vec<_> = servers.iter().map(locks).collect();
    let guards = each_held(&clients).await;
    let all = MultiLock::new(everywhere(&clients)).wait_forever();
    let waiting = tokio::spawn(async move { all.acquire().await });
    // It waits in one queue at a time, and does not poll.
    soon("the request waits at one server", || servers.iter().map(|server| waiters(server, "a")).sum::<usize>() == 1)
        .await;
    let first = servers.iter().position(|server| waiters(server, "a") == 1).unwrap();
    let mut guards: Vec<_> = guards.into_iter().map(Some).collect();
    guards[first].take().unwrap().release().await.unwrap();
    soon("the lock of that server is held", || holder(&servers[first], "a").is_some()).await;
    soon("the request waits at the next server", || {
        servers.iter().map(|server| waiters(server, "a")).sum::<usize>() == 1
    })
    .await;
    let _: i64 = say(&servers[first], "LOCK.FORCE a");
    let error = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { why: LossReason::Forced, .. }), "{error}");
    drop(guards);
    soon("all locks are free", || all_free(&servers)).await;
}

#[tokio::test]
async fn first_lock_is_held_when_the_last_is_granted() {
    let servers = servers();
    let proxies: Vec<_> = servers.iter().map(|server| Proxy::to(server.addr())).collect();
    let clients: Vec<_> = proxies.iter().map(locks_over).collect();
    let mut order: Vec<usize> = (0..servers.len()).collect();
    order.sort_by_key(|index| proxies[*index].addr().to_string());
    let (first, last) = (order[0], order[servers.len() - 1]);
    let guard = clients[last].lock("a").try_acquire().await.unwrap().unwrap();
    let all = MultiLock::new(everywhere(&clients)).wait_forever();
    let waiting = tokio::spawn(async move { all.acquire().await });
    soon("the request waits at the last server", || waiters(&servers[last], "a") == 1).await;
    // The loss event is slower than the grant.
    proxies[first].rule(|_, message| if names(message, "lost") { Fate::Hold } else { Fate::Pass });
    let _: i64 = say(&servers[first], "LOCK.FORCE a");
    guard.release().await.unwrap();
    let error = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { .. } | Error::NotHeld { .. }), "{error}");
    proxies[first].pass();
    soon("all locks are free", || all_free(&servers)).await;
}

async fn each_held(clients: &[Locks]) -> Vec<holdfast_client::Guard> {
    let mut guards = Vec::new();
    for client in clients {
        guards.push(client.lock("a").try_acquire().await.unwrap().unwrap());
    }
    guards
}

#[tokio::test]
async fn fixed_leases_begin_when_all_are_held() {
    const LEASE: Duration = Duration::from_secs(100);
    let servers = servers();
    let clients: Vec<_> = servers.iter().map(locks).collect();
    let mut guards: Vec<_> = each_held(&clients).await.into_iter().map(Some).collect();
    let all = MultiLock::new(clients.iter().map(|client| client.lock("a").lease(LEASE))).wait_forever();
    let waiting = tokio::spawn(async move { all.acquire().await });
    let mut first = None;
    for _ in &servers {
        let at = || servers.iter().position(|server| waiters(server, "a") == 1);
        soon("the request waits", || at().is_some()).await;
        let at = at().unwrap();
        guards[at].take().unwrap().release().await.unwrap();
        if first.is_none() {
            first = Some(at);
            // As after a long wait.
            soon("the lock is held", || holder(&servers[at], "a").is_some()).await;
            let _: i64 = say(&servers[at], "PEXPIRE a 50000");
        }
    }
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    let left: u64 = say(&servers[first.unwrap()], "PTTL a");
    assert!(left > 80_000, "{left}");
    guard.renew(LEASE * 2).await.unwrap();
    assert!(servers.iter().all(|server| say::<u64>(server, "PTTL a") > 180_000));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn acquire_may_be_dropped_at_every_poll() {
    let servers = servers();
    let mut polls = 0;
    loop {
        let clients: Vec<_> = servers.iter().map(locks).collect();
        let all = MultiLock::new(everywhere(&clients)).wait_forever();
        let done = dropped_at(polls, all.acquire()).await;
        let granted = done.is_some();
        drop(done);
        for client in &clients {
            client.settle().await;
        }
        assert!(all_free(&servers), "dropped at poll {polls}");
        if granted {
            break;
        }
        polls += 1;
    }
    // While each of three was waited for, and while the first two were requested again.
    assert!(polls > 4, "it was dropped in between: {polls}");
}

/// Each task requests some of the keys, in any order, with or without a timeout. It may be cancelled, and its connections may be
/// cut. A holder is alone. If all tasks were blocked, this would not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_never_deadlock() {
    const TASKS: usize = 12;
    const TURNS: usize = 12;
    const KEYS: [&str; 2] = ["a", "b"];
    let servers = servers();
    let proxies: Vec<_> = servers.iter().map(|server| Proxy::to(server.addr())).collect();
    let clients: Arc<Vec<_>> = Arc::new(proxies.iter().map(locks_over).collect());
    let inside: Arc<Vec<AtomicUsize>> =
        Arc::new((0..servers.len() * KEYS.len()).map(|_| AtomicUsize::new(0)).collect());
    let turns = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (clients, inside, turns) = (clients.clone(), inside.clone(), turns.clone());
        tasks.spawn(async move {
            let all: Vec<usize> = (0..inside.len()).collect();
            let mut random = Random::new();
            let mut mine = 0;
            while mine < TURNS {
                let count = 1 + random.index(4);
                let places = random.some(&all, count);
                let lock = |place: &usize| clients[place / KEYS.len()].lock(KEYS[place % KEYS.len()]);
                let all = MultiLock::new(places.iter().map(lock).collect::<Vec<_>>());
                let all = if random.chance(33) { all.wait(Duration::from_millis(5)) } else { all.wait_forever() };
                let polls = if random.chance(33) { random.index(12) } else { usize::MAX };
                // A connection that was cut causes an error, or a loss.
                let Some(Ok(Some(guard))) = dropped_at(polls, all.acquire()).await else { continue };
                for place in &places {
                    assert_eq!(inside[*place].fetch_add(1, Ordering::SeqCst), 0, "two holders of {place} at once");
                }
                tokio::task::yield_now().await;
                for place in &places {
                    inside[*place].fetch_sub(1, Ordering::SeqCst);
                }
                mine += 1;
                turns.fetch_add(1, Ordering::SeqCst);
                if random.chance(50) {
                    let _ = guard.release().await;
                }
            }
        });
    }
    let mut random = Random::new();
    let mut cuts = 0;
    while turns.load(Ordering::SeqCst) < TASKS * TURNS {
        let before = turns.load(Ordering::SeqCst);
        let moved = || turns.load(Ordering::SeqCst) > before || tasks.is_empty();
        soon("a task has made progress", moved).await;
        if cuts < 15 {
            proxies[random.index(3)].cut();
            cuts += 1;
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    for client in clients.iter() {
        client.settle().await;
    }
    for server in &servers {
        assert!(KEYS.iter().all(|key| is_free(server, key)));
    }
}
