//! Many tasks of one process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::Server;

use crate::common::{clients, is_free, locks, soon, waiters};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_tasks_wait_on_two_connections() {
    const TASKS: usize = 2_000;
    const LOCKS: usize = 100;
    let server = Server::start();
    let locks = locks(&server);
    let mut held = Vec::new();
    for number in 0..LOCKS {
        held.push(locks.lock(format!("k{number}")).try_acquire().await.unwrap().unwrap());
    }
    let turns = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|number| {
            let lock = locks.lock(format!("k{}", number % LOCKS)).wait_forever();
            let turns = turns.clone();
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap().unwrap();
                turns.fetch_add(1, Ordering::Relaxed);
                guard.release().await.unwrap();
            })
        })
        .collect();
    soon("all requests wait", || (0..LOCKS).all(|number| waiters(&server, &format!("k{number}")) == TASKS / LOCKS))
        .await;
    soon("they share two connections; this test has another", || clients(&server).len() == 3).await;
    for guard in held {
        guard.release().await.unwrap();
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(turns.load(Ordering::Relaxed), TASKS);
    assert!((0..LOCKS).all(|number| is_free(&server, &format!("k{number}"))));
}
