//! A paused process: here, its only thread is blocked. Afterwards the client asks the server before it considers a hold lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use holdfast_client::{Error, LossReason, MultiLock};
use support::{Direction, Fate, Proxy, Server};

use crate::common::{SOON, holder, is_free, locks, locks_over, sessions, soon, waiters};

/// Blocks the whole process for this long.
fn block_process(time: Duration) {
    std::thread::sleep(time);
}

#[tokio::test]
async fn hold_renewed_during_a_pause_is_held() {
    const LEASE: Duration = Duration::from_secs(10);
    let server = Server::start();
    let locks = locks(&server);
    let guard = Arc::new(locks.lock("a").watched(LEASE).try_acquire().await.unwrap().unwrap());
    let all = MultiLock::new([locks.lock("b").watched(LEASE)]).try_acquire().await.unwrap().unwrap();
    let reported = Arc::new(AtomicBool::new(false));
    let watching = tokio::spawn({
        let (guard, reported) = (guard.clone(), reported.clone());
        async move {
            guard.lost().await;
            reported.store(true, Ordering::SeqCst);
        }
    });
    soon("the session reads", || sessions(&server).len() == 1).await;
    // Until the grant promises less than the heartbeat.
    let begin = Instant::now();
    soon("more than a third of the lease has passed", || begin.elapsed() > LEASE * 4 / 10).await;
    block_process(LEASE * 72 / 100);
    let checked = guard.check().await;
    checked.expect("the server says that it is still held");
    guard.while_held(async {}).await.expect("it is still held");
    all.while_held(async {}).await.expect("it is still held");
    guard.check().await.unwrap();
    let begin = Instant::now();
    soon("a while has passed", || begin.elapsed() > LEASE / 5).await;
    assert!(!reported.load(Ordering::SeqCst), "a loss was reported");
    watching.abort();
    let _ = watching.await;
    Arc::into_inner(guard).unwrap().release().await.unwrap();
    all.release().await.unwrap();
    assert!(is_free(&server, "a") && is_free(&server, "b"));
}

#[tokio::test]
async fn hold_granted_to_another_client_during_a_pause_is_lost() {
    const LEASE: Duration = Duration::from_secs(3);
    let server = Server::start();
    let guard = locks(&server).lock("a").watched(LEASE).try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let mut other = server.raw();
    other.send(&[b"LOCK.ACQUIRE", b"a", b"other", b"WAIT", b"0", b"LEASE", b"600000"]).unwrap();
    soon("the request waits", || waiters(&server, "a") == 1).await;
    while holder(&server, "a").as_deref() != Some("other") {
        block_process(LEASE / 10);
    }
    assert!(guard.check().await.is_err());
    let mut ran = false;
    let outcome = guard.while_held(async { ran = true }).await;
    assert!(matches!(outcome, Err(Error::Lost { .. })) && !ran, "{outcome:?}");
    assert!(matches!(guard.check().await, Err(Error::Lost { .. })));
    guard.release().await.unwrap_err();
}

/// It can't wait for a reply forever.
#[tokio::test]
async fn hold_is_lost_when_server_is_unreachable_after_a_pause() {
    const LEASE: Duration = Duration::from_secs(3);
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let guard = locks_over(&proxy).lock("a").watched(LEASE).try_acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    proxy.rule(|_, _| Fate::Hold);
    block_process(LEASE);
    let mut ran = false;
    let outcome = tokio::time::timeout(SOON, guard.while_held(async { ran = true })).await.expect("it is decided");
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Disconnected, .. })) && !ran, "{outcome:?}");
}

/// Even if the event is late, and if the reply to its wait is still pending.
#[tokio::test]
async fn lease_counts_from_the_grant_not_from_its_event() {
    tokio::join!(counts_from_its_grant(false), counts_from_its_grant(true));
}

async fn counts_from_its_grant(is_overtaken: bool) {
    // A third of it is less than the silence that ends a session.
    const LEASE: Duration = Duration::from_millis(1_500);
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let first = locks(&server).lock("a").try_acquire().await.unwrap().unwrap();
    let heard = Arc::new(AtomicBool::new(false));
    let hear = {
        let heard = heard.clone();
        move |_, message: &[u8]| {
            let is_reply = message.starts_with(b"+WAITING");
            heard.fetch_or(is_reply, Ordering::SeqCst);
            if is_reply && is_overtaken { Fate::Hold } else { Fate::Pass }
        }
    };
    proxy.rule(hear.clone());
    let lock = locks_over(&proxy).lock("a").lease(LEASE).wait_forever();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    soon("the request waits", || waiters(&server, "a") == 1 && heard.load(Ordering::SeqCst)).await;
    let hear_nothing = || proxy.rule(|toward, _| if toward == Direction::Client { Fate::Hold } else { Fate::Pass });
    hear_nothing();
    first.release().await.unwrap();
    let granted = Instant::now();
    soon("a third of the lease has passed", || granted.elapsed() > LEASE / 3).await;
    proxy.rule(hear);
    let guard = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    hear_nothing();
    soon("the lease has expired", || granted.elapsed() > LEASE).await;
    let checked = guard.check().await;
    assert!(matches!(checked, Err(Error::Lost { .. })), "{checked:?}");
}
