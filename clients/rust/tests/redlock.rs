//! RedLock: a majority of independent servers, some of which are killed, paused, slow or late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use holdfast_client::{Error, Locks, LossReason, RedGuard, RedLock};
use support::{Direction, Fate, Proxy, Random, Server};
use tokio::task::JoinSet;

use crate::common::{
    SOON, clients, dropped_at, hold_up_acquisitions, holder, is_free, locks, locks_over, names, say, sessions, soon,
    waiters,
};

/// Long enough for a busy machine.
const PATIENT: Duration = Duration::from_secs(5);

fn start(count: usize) -> Vec<Server> {
    let mut servers: Vec<_> = (0..count).map(|_| Server::start()).collect();
    servers.sort_by_key(|server| server.addr().to_string().into_bytes());
    servers
}

fn over(servers: &[Server]) -> Vec<Locks> {
    servers.iter().map(locks).collect()
}

fn lock(locks: &[Locks]) -> RedLock {
    RedLock::new(locks.to_vec(), "a").server_timeout(PATIENT)
}

fn holders(servers: &[Server]) -> usize {
    servers.iter().filter(|server| !server.ended() && holder(server, "a").is_some()).count()
}

async fn all_free(servers: &[Server]) {
    soon("all locks are free", || servers.iter().all(|server| server.ended() || is_free(server, "a"))).await;
}

async fn lost(guard: &RedGuard) -> LossReason {
    tokio::time::timeout(SOON, guard.lost()).await.expect("a loss")
}

/// 0: it has granted nothing yet.
fn fence_at(server: &Server) -> u64 {
    say::<Option<u64>>(server, "HGET a #fence").unwrap_or(0)
}

/// Waits until all is released: a server that granted after the majority is released in the background, and refuses requests without
/// a wait meanwhile.
async fn settle(clients: &[Locks]) {
    for client in clients {
        client.settle().await;
    }
}

#[tokio::test]
async fn majority_holds_lock_and_has_fence() {
    for count in [1, 3, 5] {
        let servers = start(count);
        let clients = over(&servers);
        let guard = lock(&clients).try_acquire().await.unwrap().unwrap();
        soon("all servers have granted", || holders(&servers) == count).await;
        soon("all servers have the fence", || servers.iter().all(|server| fence_at(server) >= guard.fence())).await;
        assert!(servers.iter().all(|server| holder(server, "a").unwrap().as_bytes() == guard.owner().as_bytes()));
        guard.check().unwrap();
        assert!(guard.valid_until().unwrap() > Instant::now() + Duration::from_secs(10));
        assert!(lock(&clients).try_acquire().await.unwrap().is_none());
        assert!(lock(&clients).wait(Duration::from_millis(20)).acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
        all_free(&servers).await;
    }
}

#[tokio::test]
async fn fixed_lease_is_valid_for_less_by_the_drift() {
    const LEASE: Duration = Duration::from_secs(100);
    let servers = start(3);
    let asked = Instant::now();
    let guard = lock(&over(&servers)).lease(LEASE).try_acquire().await.unwrap().unwrap();
    let drift = Duration::from_millis(1002);
    let counted_from = guard.valid_until().unwrap() + drift - LEASE;
    assert!((asked..=Instant::now()).contains(&counted_from), "counted from the request");
    guard.renew(LEASE * 2).await.unwrap();
    assert!(guard.valid_until().unwrap() > asked + LEASE);
    guard.release().await.unwrap();
    let short = lock(&over(&servers)).lease(Duration::from_secs(2)).try_acquire().await.unwrap().unwrap();
    assert_eq!(lost(&short).await, LossReason::Expired);
    assert!(matches!(short.release().await.unwrap_err(), Error::Lost { why: LossReason::Expired, .. }));
    for lease in [Duration::ZERO, Duration::from_millis(2)] {
        let error = lock(&over(&servers)).lease(lease).try_acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { message } if message.contains("2 ms")), "{error}");
    }
}

#[tokio::test]
async fn invalid_arguments_are_refused() {
    let server = Server::start();
    for servers in [vec![], vec![locks(&server), locks(&server)]] {
        let error = RedLock::new(servers, "a").try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
    }
    let error = lock(&over(&[server])).server_timeout(Duration::ZERO).try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}

#[tokio::test]
async fn closed_clients_end_acquisitions_with_an_error() {
    let servers = start(3);
    let clients = over(&servers);
    let _guard = lock(&over(&servers)).try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = lock(&clients);
        async move { lock.acquire().await }
    });
    soon("the request waits", || waiters(&servers[0], "a") == 1).await;
    for client in &clients {
        client.close().await;
    }
    let ended = tokio::time::timeout(SOON, waiting).await.expect("the wait ends").unwrap();
    let later = tokio::time::timeout(SOON, lock(&clients).acquire()).await.expect("it does not wait");
    for error in [ended.unwrap_err(), later.unwrap_err()] {
        assert!(matches!(error, Error::NoMajority { .. }) && error.to_string().contains("closed"), "{error}");
    }
}

#[tokio::test]
async fn client_closed_while_its_server_is_unreachable_ends_acquisitions() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    proxy.refuse();
    let clients = [locks_over(&proxy)];
    let waiting = tokio::spawn({
        let lock = lock(&clients);
        async move { lock.acquire().await }
    });
    let error = lock(&clients).try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoMajority { .. }), "{error}");
    clients[0].close().await;
    let ended = tokio::time::timeout(SOON, waiting).await.expect("the wait ends").unwrap();
    assert!(matches!(ended, Err(Error::NoMajority { .. })), "{ended:?}");
}

#[tokio::test]
async fn waiters_queue_at_the_first_server() {
    const WAITERS: usize = 10;
    let servers = start(5);
    let clients = over(&servers);
    let guard = lock(&clients).try_acquire().await.unwrap().unwrap();
    let order = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for number in 0..WAITERS {
        let (lock, order) = (lock(&clients).wait_forever(), order.clone());
        tasks.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap().unwrap();
            assert_eq!(order.fetch_add(1, Ordering::SeqCst), number, "granted in order of arrival");
            guard.release().await.unwrap();
        }));
        soon("the request waits", || waiters(&servers[0], "a") == number + 1).await;
    }
    assert!(servers[1..].iter().all(|server| waiters(server, "a") == 0));
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    all_free(&servers).await;
}

/// The fence is the greatest token of its majority, so the next one is greater, whichever majority grants it.
#[tokio::test]
async fn fences_increase_with_different_server_clocks() {
    let servers = start(3);
    let clients = over(&servers);
    let mut last = 0;
    for round in 0..9 {
        // One server is ahead of the others by less than an hour, another one each time. Another one is down each time.
        let ahead = &servers[round % 3];
        let (seconds, micros) = say::<(u64, u64)>(ahead, "TIME");
        let fence = (seconds + 10 * (round as u64 + 1)) * 1_000_000 + micros;
        let _: u64 = say(ahead, "LOCK.ACQUIRE other somebody");
        let _: u64 = say(ahead, &format!("LOCK.RENEW other somebody FENCE {fence}"));
        let _: u64 = say(ahead, "LOCK.RELEASE other somebody");
        let away = (round + 2) % 3;
        let nobody = Proxy::to(servers[away].addr());
        nobody.refuse();
        let present: Vec<_> =
            (0..3).map(|server| if server == away { locks_over(&nobody) } else { clients[server].clone() }).collect();
        let guard = lock(&present).try_acquire().await.unwrap().unwrap();
        assert!(guard.fence() > last, "round {round}: {} after {last}", guard.fence());
        last = guard.fence();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn loss_is_reported_when_no_majority_is_left() {
    let servers = start(5);
    let clients = over(&servers);
    for (command, why) in [("LOCK.FORCE a", LossReason::Forced), ("DEL a", LossReason::Changed)] {
        let guard = lock(&clients).try_acquire().await.unwrap().unwrap();
        soon("all servers have granted", || holders(&servers) == 5).await;
        soon("all servers have confirmed", || servers.iter().all(|server| fence_at(server) >= guard.fence())).await;
        for server in &servers[..2] {
            let _: i64 = say(server, command);
        }
        // It was notified of both. The third loss ends the majority.
        for server in &servers[2..] {
            guard.check().unwrap();
            let _: i64 = say(server, command);
        }
        assert_eq!(lost(&guard).await, why);
        assert!(guard.while_held(std::future::ready(())).await.is_err());
        let error = guard.release().await.unwrap_err();
        assert!(error.to_string().contains(&why.to_string()), "{error}");
        all_free(&servers).await;
    }
}

#[tokio::test]
async fn lock_survives_a_minority_and_is_lost_with_the_majority() {
    let mut servers = start(5);
    let clients = over(&servers);
    let guard = lock(&clients).watched(Duration::from_secs(3)).try_acquire().await.unwrap().unwrap();
    soon("all servers have granted", || servers.iter().all(|server| holder(server, "a").is_some())).await;
    servers[0].kill9();
    servers[3].kill9();
    // For two leases: the others renew.
    let held_for = Instant::now();
    soon("two leases have passed", || held_for.elapsed() > Duration::from_secs(6)).await;
    guard.check().unwrap();
    servers[4].kill9();
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
    guard.release().await.unwrap_err();
    all_free(&servers).await;
    let error = lock(&clients).try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoMajority { answer: 2, majority: 3, .. }), "{error}");
    // Granted when there is a majority again.
    let waiting = tokio::spawn({
        let lock = lock(&clients).wait_forever();
        async move { lock.acquire().await }
    });
    servers[0].restart();
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn paused_server_costs_one_timeout() {
    const TIMEOUT: Duration = Duration::from_secs(1);
    for stopped in [0, 1] {
        let servers = start(3);
        let clients = over(&servers);
        let lock = lock(&clients).server_timeout(TIMEOUT);
        let first = lock.try_acquire().await.unwrap().unwrap();
        soon("all servers have granted", || holders(&servers) == 3).await;
        first.release().await.unwrap();
        settle(&clients).await;
        servers[stopped].stop();
        // The acquisition or the release meets the timeout.
        lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
        // Otherwise each of them would take a timeout.
        let rounds = async {
            for _ in 0..100 {
                lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
            }
        };
        tokio::time::timeout(TIMEOUT * 100, rounds).await.expect("rounds without a timeout");
        servers[stopped].cont();
        soon("the lock is free", || is_free(&servers[stopped], "a")).await;
        // The client pings it in the background, and uses it again.
        let end = Instant::now() + SOON;
        loop {
            let guard = lock.try_acquire().await.unwrap().unwrap();
            let joined = async || {
                let end = Instant::now() + Duration::from_millis(50);
                while Instant::now() < end {
                    if holder(&servers[stopped], "a").is_some() {
                        return true;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                false
            };
            let joined = joined().await;
            guard.release().await.unwrap();
            settle(&clients).await;
            if joined {
                break;
            }
            assert!(Instant::now() < end, "the server is not used again");
        }
        all_free(&servers).await;
    }
}

#[tokio::test]
async fn waiter_of_killed_server_continues_at_the_next() {
    for stop in [false, true] {
        let mut servers = start(3);
        let clients = over(&servers);
        let lock = lock(&clients).server_timeout(Duration::from_secs(1));
        let guard = lock.try_acquire().await.unwrap().unwrap();
        soon("all servers have granted", || holders(&servers) == 3).await;
        let waiting = tokio::spawn({
            let lock = lock.clone().wait_forever();
            async move { lock.acquire().await }
        });
        soon("the request waits at the first server", || waiters(&servers[0], "a") == 1).await;
        if stop {
            servers[0].stop();
        } else {
            servers[0].kill9();
        }
        soon("the request waits at the second server", || waiters(&servers[1], "a") == 1).await;
        guard.check().unwrap();
        guard.release().await.unwrap();
        let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
        next.release().await.unwrap();
        if stop {
            servers[0].cont();
        }
        all_free(&servers).await;
    }
}

#[tokio::test]
async fn paused_server_is_left_in_time_despite_long_leases() {
    let servers = start(3);
    // The session's blocked request waits for an eighth of it.
    let _: String = say(&servers[0], "CONFIG SET holdfast.default-lease 300000");
    let guard = lock(&over(&servers)).try_acquire().await.unwrap().unwrap();
    soon("all servers have granted", || holders(&servers) == 3).await;
    let clients = over(&servers);
    let long = clients[0].lock("long").try_acquire().await.unwrap().unwrap();
    soon("both clients read events there", || sessions(&servers[0]).len() == 2).await;
    let lock = lock(&clients).server_timeout(Duration::from_secs(1)).wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits at the first server", || waiters(&servers[0], "a") == 1).await;
    servers[0].stop();
    // Long before that request would be overdue.
    soon("the request waits at the second server", || waiters(&servers[1], "a") == 1).await;
    servers[0].cont();
    guard.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    long.release().await.unwrap();
    all_free(&servers).await;
}

#[tokio::test]
async fn request_waits_at_a_free_first_server_while_the_majority_is_held() {
    let mut servers = start(3);
    let clients = over(&servers);
    let lock = lock(&clients).server_timeout(Duration::from_secs(1));
    let guard = lock.try_acquire().await.unwrap().unwrap();
    soon("all servers have granted", || holders(&servers) == 3).await;
    // The server has lost its data.
    servers[0].kill9();
    servers[0].restart();
    let other = over(&servers);
    let waiting = tokio::spawn({
        let lock = RedLock::new(other, "a").server_timeout(Duration::from_secs(1)).wait_forever();
        async move { lock.acquire().await }
    });
    soon("the request waits at the second server", || waiters(&servers[1], "a") == 1).await;
    soon("the first server is released", || is_free(&servers[0], "a")).await;
    guard.check().unwrap();
    guard.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    all_free(&servers).await;
}

#[tokio::test]
async fn wrong_type_at_a_majority_is_an_error() {
    let servers = start(3);
    let clients = over(&servers);
    let () = say(&servers[0], "SET a text");
    lock(&clients).try_acquire().await.unwrap().unwrap().release().await.unwrap();
    let () = say(&servers[2], "SET a text");
    let error = lock(&clients).try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
    soon("the third server is released", || is_free(&servers[1], "a")).await;
}

#[tokio::test]
async fn acquire_and_release_may_be_dropped_at_every_poll() {
    let servers = start(3);
    for release in [false, true] {
        let mut polls = 0;
        loop {
            let clients = over(&servers);
            let lock = lock(&clients).wait_forever();
            let done = if release {
                let guard = lock.acquire().await.unwrap().unwrap();
                dropped_at(polls, guard.release()).await.is_some()
            } else {
                dropped_at(polls, lock.acquire()).await.is_some()
            };
            settle(&clients).await;
            assert!(servers.iter().all(|server| is_free(server, "a")), "dropped at poll {polls}");
            if done {
                break;
            }
            polls += 1;
        }
        assert!(polls > 1, "it was dropped in between: {polls}");
    }
}

#[tokio::test]
async fn late_request_is_not_granted() {
    let servers = start(3);
    let proxy = Proxy::to(servers[2].addr());
    let clients = [locks(&servers[0]), locks(&servers[1]), locks_over(&proxy)];
    let lock = lock(&clients).server_timeout(Duration::from_secs(1));
    lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
    settle(&clients).await;
    let late = hold_up_acquisitions(&proxy);
    // Two are a majority.
    let guard = lock.try_acquire().await.unwrap().unwrap();
    soon("the request was sent", || late.load(Ordering::SeqCst) > 0).await;
    guard.release().await.unwrap();
    proxy.pass();
    settle(&clients).await;
    assert!(servers.iter().all(|server| is_free(server, "a")));
}

/// From now on the reply to the first such request is lost, and so is everything that follows on its connection, as on a real network.
fn lose_reply_to(proxy: &Proxy, what: &'static str) {
    let (mut asked, mut lost) = (None, false);
    proxy.rule_by_flow(move |flow, toward, message| {
        if toward == Direction::Server && names(message, what) {
            asked.get_or_insert(flow);
        }
        let is_answered = toward == Direction::Client && asked == Some(flow);
        lost |= is_answered && message.starts_with(b":");
        if lost && is_answered { Fate::Drop } else { Fate::Pass }
    });
}

#[tokio::test]
async fn lost_reply_leaves_no_hold() {
    let servers = start(3);
    for lost in ["LOCK.ACQUIRE", "FENCE"] {
        let proxies: Vec<_> = servers.iter().map(|server| Proxy::to(server.addr())).collect();
        let clients: Vec<_> = proxies.iter().map(locks_over).collect();
        let lock = lock(&clients).server_timeout(Duration::from_secs(1));
        lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
        settle(&clients).await;
        proxies[1..].iter().for_each(|proxy| lose_reply_to(proxy, lost));
        let outcome = lock.try_acquire().await;
        assert!(matches!(outcome, Err(Error::NoMajority { .. })), "{lost}: {outcome:?}");
        proxies.iter().for_each(Proxy::cut);
        all_free(&servers).await;
    }
}

/// Contenders, each with its own clients, while servers are killed (they keep their grants), paused and slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_never_overlap_and_fences_increase_when_servers_fail() {
    const TASKS: usize = 4;
    const TIME: Duration = Duration::from_secs(5);
    const TURNS: usize = 20;
    let durable = || Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut servers: Vec<_> = (0..3).map(|_| durable()).collect();
    let proxies: Vec<_> = servers.iter().map(|server| Proxy::to(server.addr())).collect();
    let (inside, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
    let (turns, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let clients: Vec<_> = proxies.iter().map(locks_over).collect();
        let lock = lock(&clients).server_timeout(Duration::from_millis(200)).watched(Duration::from_secs(2));
        let (inside, last) = (inside.clone(), last.clone());
        let (turns, over) = (turns.clone(), over.clone());
        tasks.spawn(async move {
            while !over.load(Ordering::SeqCst) {
                let Ok(Some(guard)) = lock.clone().wait(Duration::from_secs(1)).acquire().await else { continue };
                if guard.check().is_err() {
                    continue;
                }
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
                let before = last.swap(guard.fence(), Ordering::SeqCst);
                assert!(before < guard.fence(), "{} after {before}", guard.fence());
                inside.fetch_sub(1, Ordering::SeqCst);
                turns.fetch_add(1, Ordering::SeqCst);
                let _ = guard.release().await;
            }
            settle(&clients).await;
        });
    }
    let mut random = Random::new();
    let (begin, end) = (Instant::now(), Instant::now() + TIME + SOON * 5);
    while begin.elapsed() < TIME || turns.load(Ordering::SeqCst) < TURNS {
        assert!(Instant::now() < end, "too few turns: {turns:?}");
        let server = random.index(3);
        match random.below(3) {
            0 => {
                servers[server].kill9();
                servers[server].restart();
            }
            1 => {
                servers[server].stop();
                tokio::time::sleep(Duration::from_millis(250)).await;
                servers[server].cont();
            }
            _ => {
                proxies[server].rule(|_, _| {
                    std::thread::sleep(Duration::from_millis(20));
                    Fate::Pass
                });
                tokio::time::sleep(Duration::from_millis(200)).await;
                proxies[server].pass();
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    over.store(true, Ordering::SeqCst);
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    all_free(&servers).await;
}

#[tokio::test]
async fn acquire_sends_two_requests_and_a_release_to_each_server() {
    let servers = start(3);
    let clients_of = over(&servers);
    let lock = lock(&clients_of);
    let calls = |server: &Server| -> u64 {
        let stats: String = say(server, "INFO commandstats");
        let of = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_lock.") && !line.contains(".next")).filter_map(of).sum()
    };
    lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
    soon("no request is pending", || clients(&servers[2]).len() <= 3).await;
    settle(&clients_of).await;
    let before: Vec<u64> = servers.iter().map(calls).collect();
    for _ in 0..10 {
        let guard = lock.try_acquire().await.unwrap().unwrap();
        soon("all servers have granted", || servers.iter().all(|server| fence_at(server) >= guard.fence())).await;
        guard.release().await.unwrap();
        settle(&clients_of).await;
    }
    for (server, before) in servers.iter().zip(before) {
        // Requested, sent the fence, released. A server that granted late may be released again.
        let each = (calls(server) - before) / 10;
        assert!((3..=4).contains(&each), "{each} requests at {}", server.addr());
    }
}
