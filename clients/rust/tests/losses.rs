//! Holds that end before their release.

use std::time::{Duration, Instant};

use holdfast_client::{Error, Event, Guard, Locks, LossReason};
use support::{Direction, Fate, Proxy, Server};

use crate::common::{SOON, held, holder, is_free, locks, locks_over, names, queue, say, sessions, soon, waiters};

async fn lost(guard: &Guard) -> LossReason {
    tokio::time::timeout(SOON, guard.lost()).await.expect("a loss")
}

/// The server is silent since `silent`. A check more than a lease later does not report the hold as certain. When no server could
/// confirm it in time, it is reported as lost.
async fn disconnected_in_time(guard: &Guard, silent: Instant, lease: Duration) {
    soon("the hold is uncertain", || {
        let is_over = Instant::now() >= silent + lease;
        let held = guard.is_held();
        assert!(!held || !is_over, "held more than a lease after the server's last message");
        !held
    })
    .await;
    assert_eq!(lost(guard).await, LossReason::Disconnected);
}

/// Longer than a process may pause on a busy machine.
const SHORT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn forced_lock_is_reported_to_its_holder() {
    let server = Server::start();
    let locks = locks(&server);
    for (command, why) in
        [("LOCK.FORCE a", LossReason::Forced), ("DEL a", LossReason::Changed), ("SET a text", LossReason::Changed)]
    {
        let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
        let _: holdfast_client::redis::Value = say(&server, command);
        assert_eq!(lost(&guard).await, why, "{command}");
        let error = guard.check().await.unwrap_err();
        assert!(matches!(error, Error::Lost { why: told, .. } if told == why), "{command}: {error}");
        let error = guard.release().await.unwrap_err();
        assert!(error.to_string().contains(&why.to_string()), "{command}: {error}");
        let _: i64 = say(&server, "DEL a");
    }
}

#[tokio::test]
async fn events_report_acquired_released_and_lost() {
    let server = Server::start();
    let locks = locks(&server);
    let mut events = locks.events();
    let first = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let lock = locks.lock("a");
    let next = tokio::spawn(async move { lock.acquire().await.unwrap() });
    soon("a waiter", || waiters(&server, "a") == 1).await;
    first.release().await.unwrap();
    let next = next.await.unwrap().expect("the lock");
    let _: i64 = say(&server, "LOCK.FORCE a");
    lost(&next).await;
    // In the order in which the server's replies arrive: the release and the grant may change places.
    let mut seen = Vec::new();
    for _ in 0..4 {
        seen.push(match tokio::time::timeout(SOON, events.recv()).await.expect("an event").unwrap() {
            Event::Acquired { keys, waited } => format!("acquired {keys}, waited: {}", !waited.is_zero()),
            Event::Released { keys, held } => format!("released {keys}, held: {}", !held.is_zero()),
            Event::Lost { keys, why } => format!("lost {keys}: {why:?}"),
            other => format!("{other:?}"),
        });
    }
    let [acquired, released, lost] =
        [r#"acquired "a", waited: true"#, r#"released "a", held: true"#, r#"lost "a": Forced"#];
    assert_eq!((&*seen[0], &*seen[3]), (acquired, lost), "{seen:?}");
    seen.sort();
    assert_eq!(seen, [acquired, acquired, lost, released]);
}

/// The server watches no hold with a fixed lease, so the reason of the loss is unknown.
#[tokio::test]
async fn loss_of_fixed_lease_is_reported() {
    let server = Server::start();
    let lock = locks(&server).lock("a").lease(Duration::from_secs(100));
    for renewed in [true, false] {
        let guard = lock.try_acquire().await.unwrap().unwrap();
        let _: i64 = say(&server, "DEL a");
        let answer = if renewed { guard.renew(Duration::from_secs(50)).await } else { guard.release().await };
        let error = answer.unwrap_err();
        assert!(matches!(error, Error::Lost { why: LossReason::Changed, .. }), "{error}");
    }
}

#[tokio::test]
async fn release_returns_reason_before_the_event() {
    let server = Server::start();
    let locks = locks(&server);
    for _ in 0..50 {
        let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
        let _: i64 = say(&server, "LOCK.FORCE a");
        // The event and the reply may be read in any order.
        let error = guard.release().await.unwrap_err();
        assert!(matches!(error, Error::Lost { why: LossReason::Forced, .. }), "{error}");
    }
}

/// The next reply arrives over another connection than the loss event, which is delayed here.
#[tokio::test]
async fn overwritten_lock_is_lost_by_event_or_reply() {
    for renewed in [true, false] {
        let server = Server::start();
        let proxy = Proxy::to(server.addr());
        proxy.rule(|toward, message| match toward {
            Direction::Client if names(message, "changed") => Fate::Hold,
            _ => Fate::Pass,
        });
        let guard = locks_over(&proxy).lock("a").lease(Duration::from_secs(100)).try_acquire().await.unwrap().unwrap();
        let _: String = say(&server, "SET a text");
        let answer = if renewed { guard.renew(Duration::from_secs(50)).await } else { guard.release().await };
        let error = answer.unwrap_err();
        assert!(matches!(error, Error::Lost { why: LossReason::Changed, .. }), "{error}");
    }
}

/// The hold's session ends, and the next one finds another value: no event gives the reason.
#[tokio::test]
async fn lock_overwritten_between_two_sessions_is_lost() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let guard = locks_over(&proxy).lock("a").try_acquire().await.unwrap().unwrap();
    proxy.refuse();
    let _: String = say(&server, "SET a text");
    proxy.accept();
    assert_eq!(lost(&guard).await, LossReason::Changed);
}

#[tokio::test]
async fn other_keys_are_released_when_one_is_lost() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = locks.lock_all(["a", "b"]).try_acquire().await.unwrap().unwrap();
    let _: i64 = say(&server, "LOCK.FORCE a");
    assert_eq!(lost(&guard).await, LossReason::Forced);
    soon("released without a request of the program", || holder(&server, "b").is_none()).await;
    guard.release().await.unwrap_err();
    locks.settle().await;
    assert!(is_free(&server, "b"));
}

#[tokio::test]
async fn ephemeral_hold_is_lost_with_its_connection() {
    let server = Server::start();
    let guard = locks(&server).lock("a").ephemeral().try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    for session in sessions(&server) {
        let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
    }
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
    assert!(is_free(&server, "a"));
}

#[tokio::test]
async fn hold_is_carried_over_to_the_next_session() {
    let server = Server::start();
    let guard = locks(&server).lock("a").watched(SHORT * 3 / 2).try_acquire().await.unwrap().unwrap();
    for _ in 0..5 {
        soon("the session reads", || sessions(&server).len() == 1).await;
        let session = sessions(&server)[0];
        let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
        soon("the client has a new session", || sessions(&server).first().is_some_and(|next| *next != session)).await;
        soon("the hold is bound to the new session", || bound_to(&server) == sessions(&server).first().copied()).await;
        held(&guard).await;
    }
    // The watchdog of the new session renews it.
    let begin = Instant::now();
    soon("two leases have passed", || begin.elapsed() > SHORT * 3).await;
    held(&guard).await;
    guard.release().await.unwrap();
}

/// The reply to a renewal with the second session arrives when there is a third one already.
#[tokio::test]
async fn hold_moves_on_when_its_new_session_ends_too() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let guard = locks.lock("a").watched(Duration::from_secs(60)).try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let first = sessions(&server)[0];
    let renewed = format!(":{}\r\n", guard.fence());
    // Only for the second session: the third one's renewals get replies.
    let mut held_up = None;
    proxy.rule_by_flow(move |flow, _, message| {
        if message == renewed.as_bytes() {
            held_up.get_or_insert(flow);
        }
        if message == renewed.as_bytes() && held_up == Some(flow) { Fate::Hold } else { Fate::Pass }
    });
    let _: i64 = say(&server, &format!("CLIENT KILL ID {first}"));
    soon("there is a second session", || sessions(&server).first().is_some_and(|second| *second != first)).await;
    let second = sessions(&server)[0];
    soon("the hold is bound to the second session", || bound_to(&server) == Some(second)).await;
    let _: i64 = say(&server, &format!("CLIENT KILL ID {second}"));
    // A request with the second session, before its end is known, gets no reply.
    let answered = async {
        loop {
            let asked = tokio::time::timeout(Duration::from_millis(250), locks.lock("b").try_acquire()).await;
            match asked {
                Ok(Ok(Some(other))) => break other,
                // A request that was dropped when it had just been granted is being withdrawn.
                Ok(Ok(None)) => {}
                // Pending when the session ended.
                Ok(Err(error)) => assert!(matches!(error, Error::Connection { .. }), "{error}"),
                Err(_late) => {}
            }
        }
    };
    let other = tokio::time::timeout(SOON, answered).await.expect("the end of the second session is noticed");
    let third = sessions(&server)[0];
    assert_ne!(third, second);
    proxy.pass();
    soon("the hold is bound to the third session", || bound_to(&server) == Some(third)).await;
    guard.check().await.unwrap();
    guard.release().await.unwrap();
    other.release().await.unwrap();
}

/// The connection that the hold of `a` is bound to.
fn bound_to(server: &Server) -> Option<i64> {
    let info: std::collections::HashMap<String, holdfast_client::redis::Value> =
        holdfast_client::redis::cmd("LOCK.INFO").arg("a").query(&mut server.connect3()).unwrap();
    let text = format!("{:?}", info.get("holders"));
    let rest = text.split("\"client\"").nth(1).or_else(|| text.split("client").nth(1))?;
    rest.split("int(").nth(1)?.split(')').next()?.parse().ok()
}

#[tokio::test]
async fn hold_is_lost_when_server_lost_its_data() {
    let mut server = Server::start();
    let guard = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    server.kill9();
    server.restart();
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
}

#[tokio::test]
async fn lease_counts_by_the_clients_clock_without_a_server() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let watched = locks.lock("a").watched(SHORT).try_acquire().await.unwrap().unwrap();
    let fixed = locks.lock("b").lease(Duration::from_secs(100)).try_acquire().await.unwrap().unwrap();
    proxy.refuse();
    disconnected_in_time(&watched, Instant::now(), SHORT).await;
    fixed.check().await.unwrap();
    let error = fixed.release().await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    proxy.accept();
    soon("the lock is released as soon as the server is back", || is_free(&server, "b")).await;
}

#[tokio::test]
async fn silent_connection_makes_hold_uncertain() {
    let server = Server::start();
    let guard = locks(&server).lock("a").watched(SHORT).try_acquire().await.unwrap().unwrap();
    server.stop();
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
    server.cont();
    guard.release().await.unwrap_err();
    soon("the lock is released", || is_free(&server, "a")).await;
}

#[tokio::test]
async fn short_lease_is_renewed_by_a_session_opened_for_long_ones() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let long = locks.lock("a").try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let begin = Instant::now();
    let short = locks.lock("b").watched(SHORT).try_acquire().await.unwrap().unwrap();
    // Heartbeats come often enough that the hold stays certain.
    soon("two leases have passed", || begin.elapsed() > SHORT * 2).await;
    held(&short).await;
    short.release().await.unwrap();
    long.release().await.unwrap();
}

#[tokio::test]
async fn short_lease_is_lost_in_time_on_a_session_opened_for_long_ones() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let long = locks.lock("a").try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let short = locks.lock("b").watched(SHORT).try_acquire().await.unwrap().unwrap();
    // Before the session's blocked request, which was to wait for seconds, gets a reply.
    proxy.rule(|_, _| Fate::Hold);
    disconnected_in_time(&short, Instant::now(), SHORT).await;
    long.check().await.unwrap();
}

#[tokio::test]
async fn user_with_minimal_rights_is_notified_in_time() {
    let server = Server::start();
    // As in docs/operations.md.
    let rights = "+lock.acquire +lock.release +lock.renew +lock.macquire +lock.mrelease +lock.mrenew +lock.events \
                  +lock.session +lock.info +lock.waiters +lock.top +lock.help +lock.version";
    let _: String = say(&server, &format!("ACL SETUSER locker on >secret ~app:* -@all {rights}"));
    let proxy = Proxy::to(server.addr());
    let locks = Locks::open(&format!("redis://locker:secret@{}", proxy.addr())).unwrap();
    let long = locks.lock("app:a").try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let begin = Instant::now();
    let short = locks.lock("app:b").watched(SHORT).try_acquire().await.unwrap().unwrap();
    soon("two leases have passed", || begin.elapsed() > SHORT * 2).await;
    held(&short).await;
    proxy.rule(|_, _| Fate::Hold);
    disconnected_in_time(&short, Instant::now(), SHORT).await;
    long.check().await.unwrap();
}

/// Holds without a lease count the server's default lease at their beginning.
#[tokio::test]
async fn changed_default_lease_applies_to_later_holds() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let set = |lease: u32| -> String { say(&server, &format!("CONFIG SET holdfast.default-lease {lease}")) };
    set(2000);
    let old = locks.lock("a").try_acquire().await.unwrap().unwrap();
    set(200_000);
    // The next heartbeat reports it.
    let begin = Instant::now();
    soon("a lease has passed", || begin.elapsed() > Duration::from_secs(2)).await;
    let new = locks.lock("b").try_acquire().await.unwrap().unwrap();
    proxy.rule(|_, _| Fate::Hold);
    let begin = Instant::now();
    disconnected_in_time(&old, begin, Duration::from_secs(2)).await;
    soon("the old lease has passed", || begin.elapsed() > Duration::from_secs(3)).await;
    new.check().await.unwrap();
}

/// The client doesn't know how long the reply took. The lease began at the grant.
#[tokio::test]
async fn lease_counts_from_the_grant_when_the_reply_is_late() {
    const LEASE: Duration = Duration::from_secs(6);
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let lock = locks_over(&proxy).lock("a").watched(LEASE).wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits", || waiters(&server, "a") == 1).await;
    let is_grant = |message: &[u8]| message.windows(7).any(|part| part == b"granted");
    proxy.rule(move |_, message| if is_grant(message) { Fate::Hold } else { Fate::Pass });
    held.release().await.unwrap();
    let granted = Instant::now();
    soon("a third of the lease has passed", || granted.elapsed() > LEASE / 3).await;
    proxy.rule(move |_, message| if is_grant(message) { Fate::Pass } else { Fate::Hold });
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    disconnected_in_time(&guard, granted, LEASE).await;
}

#[tokio::test]
async fn carried_over_wait_keeps_its_position() {
    let server = Server::start();
    let first = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let (mut waits, mut places) = (Vec::new(), Vec::new());
    for number in 1..=3 {
        let lock = locks(&server).lock("a").wait_forever();
        waits.push(tokio::spawn(async move { lock.acquire().await }));
        soon("the request waits", || waiters(&server, "a") == number).await;
        places = queue(&server, "a");
    }
    let owners = |places: &[(String, i64)]| places.iter().map(|(owner, _)| owner.clone()).collect::<Vec<_>>();
    for (owner, session) in &places[..2] {
        let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
        let is_back = |(waiter, client): &(String, i64)| waiter == owner && client != session;
        soon("the request waits again", || queue(&server, "a").iter().any(is_back)).await;
        assert_eq!(owners(&queue(&server, "a")), owners(&places));
    }
    first.release().await.unwrap();
    for wait in waits {
        let guard = tokio::time::timeout(SOON, wait).await.unwrap().unwrap().unwrap().unwrap();
        guard.release().await.unwrap();
    }
    assert!(is_free(&server, "a"));
}
