//! A hold that ends before it is released.

use std::time::{Duration, Instant};

use holdfast_client::{Error, Guard, Locks, LossReason};
use support::{Fate, Proxy, Server, Toward};

use crate::common::{SOON, held, holder, is_free, locks, locks_over, names, queue, say, sessions, soon, waiters};

async fn lost(guard: &Guard) -> LossReason {
    tokio::time::timeout(SOON, guard.lost()).await.expect("the loss is told")
}

/// The server was silent since `silent`: a check a lease later, or after that, does not say that it is held. Once
/// nobody has answered who could know, it is told to be lost.
async fn disconnected_in_time(guard: &Guard, silent: Instant, lease: Duration) {
    soon("it is uncertain", || {
        let is_over = Instant::now() >= silent + lease;
        let held = guard.check().is_ok();
        assert!(!held || !is_over, "it is held, a lease after the last that was heard of the server");
        !held
    })
    .await;
    assert_eq!(lost(guard).await, LossReason::Disconnected);
}

/// Longer than a busy machine lets a process stand still.
const SHORT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_broken_lock_is_told_to_its_holder() {
    let server = Server::start();
    let locks = locks(&server);
    for (command, why) in
        [("LOCK.FORCE a", LossReason::Forced), ("DEL a", LossReason::Changed), ("SET a text", LossReason::Changed)]
    {
        let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
        let _: holdfast_client::redis::Value = say(&server, command);
        assert_eq!(lost(&guard).await, why, "{command}");
        let error = guard.check().unwrap_err();
        assert!(matches!(error, Error::Lost { why: told, .. } if told == why), "{command}: {error}");
        let error = guard.release().await.unwrap_err();
        assert!(error.to_string().contains(&why.to_string()), "{command}: {error}");
        let _: i64 = say(&server, "DEL a");
    }
}

/// The server watches no hold with a fixed lease, so nobody says why it is gone.
#[tokio::test]
async fn the_loss_of_a_fixed_lease_is_told_too() {
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
async fn a_release_says_why_also_if_it_comes_first() {
    let server = Server::start();
    let locks = locks(&server);
    for _ in 0..50 {
        let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
        let _: i64 = say(&server, "LOCK.FORCE a");
        // Whether the event or the reply is read first is left to chance.
        let error = guard.release().await.unwrap_err();
        assert!(matches!(error, Error::Lost { why: LossReason::Forced, .. }), "{error}");
    }
}

/// The reply to whatever is asked for next comes over the other connection than the word of the loss, which is held up here.
#[tokio::test]
async fn what_is_overwritten_is_lost_whichever_word_of_it_comes_first() {
    for renewed in [true, false] {
        let server = Server::start();
        let proxy = Proxy::to(server.addr());
        proxy.rule(|toward, message| match toward {
            Toward::Client if names(message, "changed") => Fate::Hold,
            _ => Fate::Pass,
        });
        let guard = locks_over(&proxy).lock("a").lease(Duration::from_secs(100)).try_acquire().await.unwrap().unwrap();
        let _: String = say(&server, "SET a text");
        let answer = if renewed { guard.renew(Duration::from_secs(50)).await } else { guard.release().await };
        let error = answer.unwrap_err();
        assert!(matches!(error, Error::Lost { why: LossReason::Changed, .. }), "{error}");
    }
}

/// The session that holds it ends, and the next one finds something else there: nobody tells it why.
#[tokio::test]
async fn what_is_overwritten_between_two_connections_is_lost() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let guard = locks_over(&proxy).lock("a").try_acquire().await.unwrap().unwrap();
    proxy.refuse();
    let _: String = say(&server, "SET a text");
    proxy.accept();
    assert_eq!(lost(&guard).await, LossReason::Changed);
}

#[tokio::test]
async fn of_several_keys_the_rest_is_given_back_when_one_is_lost() {
    let server = Server::start();
    let locks = locks(&server);
    let guard = locks.lock_all(["a", "b"]).try_acquire().await.unwrap().unwrap();
    let _: i64 = say(&server, "LOCK.FORCE a");
    assert_eq!(lost(&guard).await, LossReason::Forced);
    soon("nobody has to ask for it", || holder(&server, "b").is_none()).await;
    guard.release().await.unwrap_err();
    locks.settle().await;
    assert!(is_free(&server, "b"));
}

#[tokio::test]
async fn what_ends_with_the_connection_is_lost_with_it() {
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
async fn a_hold_is_taken_to_the_next_connection() {
    let server = Server::start();
    let guard = locks(&server).lock("a").watched(SHORT * 3 / 2).try_acquire().await.unwrap().unwrap();
    for _ in 0..5 {
        soon("the session reads", || sessions(&server).len() == 1).await;
        let session = sessions(&server)[0];
        let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
        soon("it is another one's", || sessions(&server).first().is_some_and(|next| *next != session)).await;
        soon("the hold is that one's", || bound_to(&server) == sessions(&server).first().copied()).await;
        held(&guard).await;
    }
    // The new one's watchdog renews it.
    let begin = Instant::now();
    soon("two leases are over", || begin.elapsed() > SHORT * 3).await;
    held(&guard).await;
    guard.release().await.unwrap();
}

/// The answer to a renewal with the second session comes when there is a third one already.
#[tokio::test]
async fn hold_moves_on_when_its_new_session_ends_too() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let guard = locks.lock("a").watched(Duration::from_secs(60)).try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let first = sessions(&server)[0];
    let renewed = format!(":{}\r\n", guard.fence());
    // Only on the second one's way: what the third one renews is answered.
    let mut held_up = None;
    proxy.rule_by_flow(move |flow, _, message| {
        if message == renewed.as_bytes() {
            held_up.get_or_insert(flow);
        }
        if message == renewed.as_bytes() && held_up == Some(flow) { Fate::Hold } else { Fate::Pass }
    });
    let _: i64 = say(&server, &format!("CLIENT KILL ID {first}"));
    soon("there is a second one", || sessions(&server).first().is_some_and(|second| *second != first)).await;
    let second = sessions(&server)[0];
    soon("the hold is the second one's", || bound_to(&server) == Some(second)).await;
    let _: i64 = say(&server, &format!("CLIENT KILL ID {second}"));
    // What is asked for with the second one, before its end is known, gets no answer.
    let answered = async {
        loop {
            let asked = tokio::time::timeout(Duration::from_millis(250), locks.lock("b").try_acquire()).await;
            match asked {
                Ok(Ok(other)) => break other.unwrap(),
                // On its way when the session ended.
                Ok(Err(error)) => assert!(matches!(error, Error::Connection { .. }), "{error}"),
                Err(_late) => {}
            }
        }
    };
    let other = tokio::time::timeout(SOON, answered).await.expect("the end of the second one is noticed");
    let third = sessions(&server)[0];
    assert_ne!(third, second);
    proxy.pass();
    soon("the hold is the third one's", || bound_to(&server) == Some(third)).await;
    guard.check().unwrap();
    guard.release().await.unwrap();
    other.release().await.unwrap();
}

/// The connection that the holder of `a` is bound to.
fn bound_to(server: &Server) -> Option<i64> {
    let info: std::collections::HashMap<String, holdfast_client::redis::Value> =
        holdfast_client::redis::cmd("LOCK.INFO").arg("a").query(&mut server.connect3()).unwrap();
    let text = format!("{:?}", info.get("holders"));
    let rest = text.split("\"client\"").nth(1).or_else(|| text.split("client").nth(1))?;
    rest.split("int(").nth(1)?.split(')').next()?.parse().ok()
}

#[tokio::test]
async fn a_server_that_lost_its_memory_is_a_lock_that_is_lost() {
    let mut server = Server::start();
    let guard = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    server.kill9();
    server.restart();
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
}

#[tokio::test]
async fn who_cannot_ask_counts_the_lease_by_its_own_clock() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let watched = locks.lock("a").watched(SHORT).try_acquire().await.unwrap().unwrap();
    let fixed = locks.lock("b").lease(Duration::from_secs(100)).try_acquire().await.unwrap().unwrap();
    proxy.refuse();
    disconnected_in_time(&watched, Instant::now(), SHORT).await;
    fixed.check().unwrap();
    let error = fixed.release().await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    proxy.accept();
    soon("it is released as soon as the server is back", || is_free(&server, "b")).await;
}

#[tokio::test]
async fn a_silent_connection_is_a_lock_in_doubt() {
    let server = Server::start();
    let guard = locks(&server).lock("a").watched(SHORT).try_acquire().await.unwrap().unwrap();
    server.stop();
    assert_eq!(lost(&guard).await, LossReason::Disconnected);
    server.cont();
    guard.release().await.unwrap_err();
    soon("it is released", || is_free(&server, "a")).await;
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
    // Heartbeats come soon enough that it is not given up.
    soon("two leases are over", || begin.elapsed() > SHORT * 2).await;
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
    // Before the session's question, that was to wait for seconds, is answered in any case.
    proxy.rule(|_, _| Fate::Hold);
    disconnected_in_time(&short, Instant::now(), SHORT).await;
    long.check().unwrap();
}

#[tokio::test]
async fn a_user_who_may_only_lock_is_told_as_soon_as_any() {
    let server = Server::start();
    // As docs/operations.md has it.
    let rights = "+lock.acquire +lock.release +lock.renew +lock.macquire +lock.mrelease +lock.mrenew +lock.events \
                  +lock.session +lock.info +lock.waiters +lock.top +lock.help +lock.version";
    let _: String = say(&server, &format!("ACL SETUSER locker on >secret ~app:* -@all {rights}"));
    let proxy = Proxy::to(server.addr());
    let locks = Locks::open(&format!("redis://locker:secret@{}", proxy.addr())).unwrap();
    let long = locks.lock("app:a").try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let begin = Instant::now();
    let short = locks.lock("app:b").watched(SHORT).try_acquire().await.unwrap().unwrap();
    soon("two leases are over", || begin.elapsed() > SHORT * 2).await;
    held(&short).await;
    proxy.rule(|_, _| Fate::Hold);
    disconnected_in_time(&short, Instant::now(), SHORT).await;
    long.check().unwrap();
}

/// Holds that name no lease are counted by the server's default as it was when they began.
#[tokio::test]
async fn a_default_lease_that_changes_counts_for_what_comes_after() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let locks = locks_over(&proxy);
    let set = |lease: u32| -> String { say(&server, &format!("CONFIG SET holdfast.default-lease {lease}")) };
    set(2000);
    let old = locks.lock("a").try_acquire().await.unwrap().unwrap();
    set(200_000);
    // Heard with the next heartbeat.
    let begin = Instant::now();
    soon("a lease is over", || begin.elapsed() > Duration::from_secs(2)).await;
    let new = locks.lock("b").try_acquire().await.unwrap().unwrap();
    proxy.rule(|_, _| Fate::Hold);
    let begin = Instant::now();
    disconnected_in_time(&old, begin, Duration::from_secs(2)).await;
    soon("the old lease is over", || begin.elapsed() > Duration::from_secs(3)).await;
    new.check().unwrap();
}

/// How long a grant was on its way can't be known, and its lease began when it was sent.
#[tokio::test]
async fn lease_counts_from_the_grant_when_the_reply_is_late() {
    const LEASE: Duration = Duration::from_secs(6);
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let held = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let lock = locks_over(&proxy).lock("a").watched(LEASE).wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("it waits", || waiters(&server, "a") == 1).await;
    let is_grant = |message: &[u8]| message.windows(7).any(|part| part == b"granted");
    proxy.rule(move |_, message| if is_grant(message) { Fate::Hold } else { Fate::Pass });
    held.release().await.unwrap();
    let granted = Instant::now();
    soon("a third of the lease is over", || granted.elapsed() > LEASE / 3).await;
    proxy.rule(move |_, message| if is_grant(message) { Fate::Pass } else { Fate::Hold });
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    disconnected_in_time(&guard, granted, LEASE).await;
}

#[tokio::test]
async fn a_wait_that_is_taken_along_keeps_its_place() {
    let server = Server::start();
    let first = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let (mut waits, mut places) = (Vec::new(), Vec::new());
    for number in 1..=3 {
        let lock = locks(&server).lock("a").wait_forever();
        waits.push(tokio::spawn(async move { lock.acquire().await }));
        soon("it waits", || waiters(&server, "a") == number).await;
        places = queue(&server, "a");
    }
    let owners = |places: &[(String, i64)]| places.iter().map(|(owner, _)| owner.clone()).collect::<Vec<_>>();
    for (owner, session) in &places[..2] {
        let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
        let is_back = |(waiter, client): &(String, i64)| waiter == owner && client != session;
        soon("it waits again", || queue(&server, "a").iter().any(is_back)).await;
        assert_eq!(owners(&queue(&server, "a")), owners(&places));
    }
    first.release().await.unwrap();
    for wait in waits {
        let guard = tokio::time::timeout(SOON, wait).await.unwrap().unwrap().unwrap().unwrap();
        guard.release().await.unwrap();
    }
    assert!(is_free(&server, "a"));
}
