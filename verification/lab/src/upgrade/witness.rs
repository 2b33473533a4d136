//! Locks that are held during a whole upgrade, and a queue for one of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_client::{Guard, Locks};
use redis::{Connection, Value, cmd};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::bound;
use crate::clock::until;
use crate::engine::{LabError, Result};
use crate::trio::Trio;

/// Longer than any upgrade.
const LONG: Duration = Duration::from_secs(2 * 3600);
/// The watched hold's lease: longer than a failover, and shorter than the upgrade, so that it has to be renewed.
const LEASE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(60);
const PLAIN: usize = 20;
const WAITERS: usize = 5;
const KEY: &str = "witness:queue";

fn lab_error(why: impl ToString) -> LabError {
    LabError(why.to_string())
}

/// Plain leases without renewals, and their tokens.
pub struct Leases(Vec<(String, i64)>);

impl Leases {
    /// Acquires them.
    pub fn take(primary: &mut Connection) -> Result<Leases> {
        let mut taken = Vec::new();
        for number in 0..PLAIN {
            let key = format!("witness:{number}");
            let mut command = cmd("LOCK.ACQUIRE");
            command.arg(&key).arg("witness").arg("LEASE").arg(LONG.as_millis() as u64).arg(&["REPLICAS", "2"]);
            taken.push((key, command.query(primary)?));
        }
        Ok(Leases(taken))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Those that are not held with their tokens any more.
    pub fn lost(&self, primary: &mut Connection) -> Result<Vec<String>> {
        let mut lost = Vec::new();
        for (key, token) in &self.0 {
            let renewed: Option<i64> = cmd("LOCK.RENEW").arg(key).arg("witness").query(primary)?;
            if renewed != Some(*token) {
                lost.push(format!("{key} was granted with {token}, and is held with {renewed:?}"));
            }
        }
        Ok(lost)
    }
}

/// A watched hold of the client, and requests that wait for it, each with its own owner.
pub struct Queue {
    runtime: Runtime,
    guard: Guard,
    waiters: Vec<JoinHandle<std::result::Result<(), String>>>,
    granted: Arc<Mutex<Vec<usize>>>,
    order: Vec<String>,
}

impl Queue {
    /// Acquires the lock, and adds the waiters, one after the other.
    pub fn form(trio: &Trio) -> Result<Queue> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let locks = {
            let _inside = runtime.enter();
            bound::locks(&trio.discovery()).map_err(lab_error)?
        };
        let holder = locks.clone().named("holder").map_err(lab_error)?;
        let guard = runtime
            .block_on(async { holder.lock(KEY).watched(LEASE).acquire().await })
            .map_err(lab_error)?
            .ok_or_else(|| lab_error("the witness was refused its lock"))?;
        let granted = Arc::default();
        let mut queue = Queue { runtime, guard, waiters: Vec::new(), granted, order: Vec::new() };
        for number in 0..WAITERS {
            let locks = locks.clone().named(&format!("waiter{number}")).map_err(lab_error)?;
            queue.waiters.push(queue.runtime.spawn(wait(locks, number, Arc::clone(&queue.granted))));
            if !until(SOON, || waiting(trio).is_ok_and(|order| order.len() == number + 1)) {
                return Err(lab_error(format!("waiter {number} does not wait")));
            }
        }
        queue.order = waiting(trio)?;
        Ok(queue)
    }

    /// The differences to the state before. Releases the lock, which must be granted to the waiters in order.
    pub fn end(self, trio: &Trio) -> Result<Vec<String>> {
        let Queue { runtime, guard, waiters, granted, order } = self;
        let mut wrong = Vec::new();
        let mut now = Vec::new();
        if !until(SOON, || {
            now = waiting(trio).unwrap_or_default();
            now == order
        }) {
            wrong.push(format!("the queue was {order:?}, and is {now:?}"));
        }
        if let Err(why) = runtime.block_on(guard.check()) {
            wrong.push(format!("the watched hold: {why}"));
        }
        if let Err(why) = runtime.block_on(guard.release()) {
            wrong.push(format!("the watched hold could not be released: {why}"));
        }
        for waiter in waiters {
            match runtime.block_on(async { timeout(SOON, waiter).await }) {
                Ok(Ok(Ok(()))) => {}
                other => wrong.push(format!("a waiter: {other:?}")),
            }
        }
        let granted = granted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !granted.is_sorted() {
            wrong.push(format!("granted in the order {granted:?}"));
        }
        runtime.shutdown_background();
        Ok(wrong)
    }
}

async fn wait(locks: Locks, number: usize, granted: Arc<Mutex<Vec<usize>>>) -> std::result::Result<(), String> {
    let guard = locks.lock(KEY).watched(LEASE).wait(LONG).acquire().await.map_err(|why| why.to_string())?;
    let guard = guard.ok_or("refused")?;
    granted.lock().unwrap_or_else(PoisonError::into_inner).push(number);
    guard.release().await.map_err(|why| why.to_string())
}

/// The owners in the queue, at the present primary.
fn waiting(trio: &Trio) -> Result<Vec<String>> {
    let rows: Vec<HashMap<String, Value>> = cmd("LOCK.WAITERS").arg(KEY).query(&mut trio.primary()?)?;
    Ok(rows.iter().filter_map(|row| row.get("owner").map(|owner| format!("{owner:?}"))).collect())
}
