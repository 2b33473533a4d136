//! Sentinel: waits and holds continue at the new primary.

use holdfast_client::Locks;
use support::Trio;

use crate::common::{SOON, holder, is_free, soon, waiters};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_carries_waits_and_holds_over() {
    let trio = Trio::start();
    let [old, new] = trio.servers();
    let locks = Locks::open(&format!("redis+sentinel://{}/{}", trio.sentinel().addr(), trio.name())).unwrap();
    let guard = locks.lock("a").try_acquire().await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let lock = locks.lock("a").wait_forever();
        async move { lock.acquire().await }
    });
    soon("the request waits", || waiters(old, "a") == 1).await;
    trio.fail_over();
    soon("the request waits at the new primary", || waiters(new, "a") == 1).await;
    guard.check().await.unwrap();
    assert_eq!(holder(new, "a").unwrap().as_bytes(), guard.owner().as_bytes());
    guard.release().await.unwrap();
    let next = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert!(is_free(new, "a"));
}
