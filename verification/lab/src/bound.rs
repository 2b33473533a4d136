//! A process with one session: its tasks use Holdfast's own client, beside clients that block in the same queues. They write
//! only while that client reports that they hold the lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fastrand::Rng;
use holdfast_client::{Error, Guard, Lock, Locks, LossReason};
use redis::cmd;
use tokio::time::{sleep, timeout};

use crate::checker::PATIENCE;
use crate::client::{ClientConfig, Durability, HoldTime};
use crate::clock::{WallClock, micros, now};
use crate::history::{Assurance, Event, ForcedLock, Grant, LEASE_MARGIN, Limit, Loss, Micros, Outcome, Request};
use crate::session::Discovery;
use crate::trace::trace;

/// The client's timeout for a reply. After it, the client closes the connection.
const REPLY_TIMEOUT: Micros = 5_000_000;
/// How often a task checks whether it still holds the lock.
const LOOKS: std::ops::Range<u64> = 2..40;

/// The client of a process, shared by its tasks.
pub fn locks(discovery: &Discovery) -> Result<Locks, Error> {
    match discovery {
        Discovery::Sentinels(at) => {
            Locks::open(&format!("redis+sentinel://{}/{}", at.join(","), crate::session::MASTER_NAME))
        }
        Discovery::Cluster(at) => Locks::open(&format!("redis+cluster://{}", at.join(","))),
    }
}

/// One task of the process.
pub struct Task {
    client_config: ClientConfig,
    locks: Locks,
    rng: Rng,
    wall: WallClock,
    stop: Arc<AtomicBool>,
    record: Vec<Event>,
    hold: u64,
}

/// The next lock request of a task.
struct LockRequest {
    keys: Vec<String>,
    limit: Limit,
    lease: Duration,
    wait: Duration,
    watched: bool,
}

impl Task {
    /// A task that works until `stop`.
    pub fn new(client_config: ClientConfig, locks: Locks, wall: WallClock, stop: Arc<AtomicBool>) -> Task {
        let rng = Rng::with_seed(client_config.seed);
        Task { client_config, locks, rng, wall, stop, record: Vec::new(), hold: 0 }
    }

    /// Runs until `stop`, and returns the record.
    pub async fn run(mut self) -> Vec<Event> {
        while !self.stopped() {
            let planned = self.planned();
            match self.acquire(&planned).await {
                Some((guard, holds)) => self.hold(guard, &holds, &planned).await,
                None => sleep(Duration::from_millis(self.rng.u64(1..20))).await,
            }
        }
        // Dropped guards are released in the background.
        let _ = timeout(Duration::from_micros(PATIENCE), self.locks.settle()).await;
        self.record
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn planned(&mut self) -> LockRequest {
        let long = self.client_config.hold_time == HoldTime::Long;
        let lease = if long { self.rng.u64(2_500..5_000) } else { self.rng.u64(900..1_500) };
        let (keys, limit) = self.choose_locks(long);
        LockRequest {
            keys,
            limit,
            lease: Duration::from_millis(lease),
            wait: Duration::from_millis(self.rng.u64(20..1_500)),
            watched: self.rng.u8(..4) > 0,
        }
    }

    fn choose_locks(&mut self, long: bool) -> (Vec<String>, Limit) {
        let prefix = &self.client_config.prefix;
        let one = |name: &str, number: u8| vec![format!("{prefix}{name}:{{{number}}}")];
        match self.rng.u8(..10) {
            _ if long => (one("long", self.rng.u8(..6)), Limit::Of(1)),
            0..4 => (one(FORCED, self.rng.u8(..6)), Limit::Of(1)),
            4 => (one("sem", self.rng.u8(..2)), Limit::Of(3)),
            5 => (one("rw", self.rng.u8(..2)), if self.rng.bool() { Limit::Shared } else { Limit::Of(1) }),
            6 => (["c", "a"].map(|name| format!("{prefix}both:{{1}}:{name}")).to_vec(), Limit::Of(1)),
            _ => (one("m", self.rng.u8(..4)), Limit::Of(1)),
        }
    }

    fn lock(&self, planned: &LockRequest) -> Lock {
        let lock = self.locks.lock_all(&planned.keys).wait(planned.wait);
        let lock = match planned.limit {
            Limit::Shared => lock.shared(),
            Limit::Of(1) => lock,
            Limit::Of(n) => lock.limit(u32::try_from(n).unwrap_or(1)),
        };
        let lock = if planned.watched { lock.watched(planned.lease) } else { lock.watched(planned.lease).ephemeral() };
        match self.client_config.durability {
            Durability::Replicas(n) => lock.replicas(u32::try_from(n).unwrap_or(1)),
            _ => lock,
        }
    }

    async fn acquire(&mut self, planned: &LockRequest) -> Option<(Guard, Vec<u64>)> {
        let lock = self.lock(planned);
        let sent = now();
        let allowed = (micros(planned.wait) + REPLY_TIMEOUT) * self.client_config.discovery.attempts();
        let answer = timeout(Duration::from_micros(allowed + PATIENCE), lock.acquire()).await;
        let replied = now();
        let outcome = match &answer {
            Ok(Ok(Some(_))) => Outcome::Granted,
            Ok(Ok(None)) => Outcome::Refused,
            Ok(Err(_)) => Outcome::Failed,
            Err(_) => Outcome::Unanswered,
        };
        self.record.push(Event::Request(Request { sent, allowed, ended: Some(replied), outcome }));
        match answer {
            Ok(Ok(Some(guard))) => {
                let holds = self.granted(&guard, planned, sent, replied);
                Some((guard, holds))
            }
            Ok(Err(why)) => {
                trace(|| format!("{}: {why}", self.client_config.name));
                None
            }
            _ => None,
        }
    }

    fn granted(&mut self, guard: &Guard, planned: &LockRequest, sent: Micros, replied: Micros) -> Vec<u64> {
        let token = guard.fence();
        let owner = String::from_utf8_lossy(guard.owner().as_bytes()).into_owned();
        trace(|| format!("{owner} got {:?} with {token}, asked at {sent}", planned.keys));
        let mut holds = Vec::new();
        for key in &planned.keys {
            self.hold += 1;
            holds.push(self.hold);
            self.record.push(Event::Grant(Grant {
                hold: self.hold,
                key: key.clone(),
                owner: owner.clone(),
                limit: planned.limit,
                token,
                sent,
                began: sent.max(self.wall.time_of(token)),
                replied,
                // Until when the lock is held from here on is known at each check.
                lease: LEASE_MARGIN,
                epoch: None,
                assurance: self.assurance(),
            }));
            self.record.push(Event::Bound { hold: self.hold });
        }
        holds
    }

    fn assurance(&self) -> Assurance {
        match self.client_config.durability {
            Durability::Replicas(_) => Assurance::Replicas,
            Durability::Nothing | Durability::Wait => Assurance::Plain,
        }
    }

    /// Holds the lock, writes while the client reports that it is held, and releases or drops it.
    async fn hold(&mut self, guard: Guard, holds: &[u64], planned: &LockRequest) {
        let long = self.client_config.hold_time == HoldTime::Long;
        let until = now() + if long { self.rng.u64(500_000..4_500_000) } else { self.rng.u64(2_000..400_000) };
        let mut seen = now();
        while now() < until && !self.stopped() {
            let pause = Duration::from_millis(self.rng.u64(LOOKS));
            let notified = timeout(pause, guard.lost()).await;
            if let Ok(why) = notified {
                trace(|| format!("{:?} notified of its loss: {why}", planned.keys));
                return self.each(holds, |hold, at| Event::LossNotified { hold, at, why: loss(why) });
            }
            let at = now();
            if guard.is_held() {
                self.look(holds, seen, at);
                self.each(holds, |hold, _| Event::Write { hold, at });
                seen = at;
            }
        }
        self.each(holds, |hold, at| Event::Ended { hold, at });
        // One in ten drops its guard.
        if self.rng.u8(..10) > 0 {
            let sent = now();
            let answer = timeout(Duration::from_micros(REPLY_TIMEOUT + PATIENCE), guard.release()).await;
            let outcome = match answer {
                Ok(Ok(())) => Outcome::Granted,
                Ok(Err(_)) => Outcome::Failed,
                Err(_) => Outcome::Unanswered,
            };
            let allowed = REPLY_TIMEOUT * self.client_config.discovery.attempts();
            self.record.push(Event::Request(Request { sent, allowed, ended: Some(now()), outcome }));
        }
    }

    /// The lock was held from the last check to this one.
    fn look(&mut self, holds: &[u64], seen: Micros, at: Micros) {
        let assurance = self.assurance();
        for &hold in holds {
            let (epoch, lease) = (None, LEASE_MARGIN);
            self.record.push(Event::Renewed { hold, sent: at, replied: seen, lease, epoch, assurance });
        }
    }

    fn each(&mut self, holds: &[u64], event: impl Fn(u64, Micros) -> Event) {
        let at = now();
        self.record.extend(holds.iter().map(|&hold| event(hold, at)));
    }
}

/// A lock that only sessions use, and that is forced now and then.
const FORCED: &str = "forced";

/// Forces locks until `stop`, and returns what it forced.
pub async fn force_locks(client_config: ClientConfig, locks: Locks, stop: Arc<AtomicBool>) -> Vec<Event> {
    let mut rng = Rng::with_seed(client_config.seed);
    let mut lines = HashMap::new();
    let mut record = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        sleep(Duration::from_millis(rng.u64(50..400))).await;
        let key = format!("{}{FORCED}:{{{}}}", client_config.prefix, rng.u8(..6));
        let sent = now();
        let Ok(Ok((_, line))) = timeout(Duration::from_micros(PATIENCE), locks.server_of(&key)).await else {
            continue;
        };
        let line = lines.entry(key.clone()).insert_entry(line).into_mut();
        let mut command = cmd("LOCK.FORCE");
        command.arg(&key);
        let answer = timeout(Duration::from_micros(PATIENCE), command.query_async::<u64>(line)).await;
        match answer {
            Ok(Ok(0)) => {}
            Ok(Ok(_)) => record.push(Event::Forced(ForcedLock { key, sent, replied: Some(now()) })),
            _ => record.push(Event::Forced(ForcedLock { key, sent, replied: None })),
        }
    }
    record
}

fn loss(why: LossReason) -> Loss {
    match why {
        LossReason::Expired => Loss::Expired,
        LossReason::Forced => Loss::Forced,
        LossReason::Disconnected => Loss::Disconnected,
        _ => Loss::Changed,
    }
}
