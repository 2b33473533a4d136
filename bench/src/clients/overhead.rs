//! Acquire and release by one task: the client's overhead over its commands.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use holdfast_client::Locks;
use redis::aio::MultiplexedConnection;
use support::resp::{self, Value};

use crate::server::{Program, Running};
use crate::settings::Scale;
use crate::stats::{Percentiles, Spread};

/// A line of the result.
#[derive(serde::Serialize)]
pub struct Row {
    pub server: String,
    pub client_p50_us: Spread,
    pub client_p99_us: Spread,
    pub raw_p50_us: Spread,
    pub raw_p99_us: Spread,
    pub client_over_raw: Spread,
}

/// Measures both, alternately.
pub fn measure(scale: &Scale, program: &Program, server: &mut Running) -> Result<Row> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let locks = Locks::open(&format!("redis://127.0.0.1:{}", server.port()))?;
    let (mut client, mut raw) = (Vec::new(), Vec::new());
    let (_, connection) = runtime.block_on(locks.server_of("pair"))?;
    let session = runtime.block_on(session_of(&locks, server))?;
    let mut by_hand = ByHand { connection, session, pairs: 0 };
    for round in 0..=scale.client_rounds {
        for turn in 0..2 {
            let (mut times, of) = if (turn + round) % 2 == 0 {
                (runtime.block_on(by_client(&locks, scale.client_pairs))?, &mut client)
            } else {
                (runtime.block_on(by_hand.pairs(scale.client_pairs))?, &mut raw)
            };
            // The first round is a warm-up.
            if round > 0 {
                of.push(Percentiles::of(&mut times));
            }
        }
    }
    drop((by_hand, locks, runtime));
    server.clear()?;
    let all = |of: &[Percentiles], get: fn(&Percentiles) -> f64| of.iter().map(get).collect::<Vec<_>>();
    let spread = |of: &[Percentiles], get: fn(&Percentiles) -> f64| Spread::of(&all(of, get));
    Ok(Row {
        server: program.label.clone(),
        client_p50_us: spread(&client, |p| p.p50),
        client_p99_us: spread(&client, |p| p.p99),
        raw_p50_us: spread(&raw, |p| p.p50),
        raw_p99_us: spread(&raw, |p| p.p99),
        client_over_raw: Spread::of_ratios(&all(&client, |p| p.p50), &all(&raw, |p| p.p50)),
    })
}

/// The id of the client's session, as in its requests.
async fn session_of(locks: &Locks, server: &mut Running) -> Result<String> {
    let guard = locks.lock("pair").try_acquire().await?.context("a free lock was refused")?;
    let holder = server.control.call(&["LOCK.INFO", "pair"])?;
    let own = resp::session_id(&server.control.call(&["LOCK.SESSION"])?)?;
    guard.release().await?;
    let client = field(&holder, "holders").and_then(|holders| match holders {
        Value::Array(holders) => field(holders.first()?, "client"),
        _ => None,
    });
    let client = resp::int(client.context("the lock is not bound")?)?;
    let (run, _) = own.split_once(':').context("an identity without a colon")?;
    Ok(format!("{run}:{client}"))
}

/// A field in a RESP2 map.
fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    let Value::Array(fields) = map else { return None };
    let is_it = |[field, _]: &&[Value; 2]| resp::text(field).is_ok_and(|text| text == name);
    fields.as_chunks().0.iter().find(is_it).map(|[_, value]| value)
}

async fn by_client(locks: &Locks, pairs: usize) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        let start = Instant::now();
        let guard = locks.lock("pair").try_acquire().await?.context("a free lock was refused")?;
        guard.release().await?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// The commands that the client sends.
struct ByHand {
    connection: MultiplexedConnection,
    session: String,
    pairs: usize,
}

impl ByHand {
    async fn pairs(&mut self, pairs: usize) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(pairs);
        for _ in 0..pairs {
            self.pairs += 1;
            let start = Instant::now();
            let owner = format!("7b1f2f5e3c554f0a9d570d2c1a6be0f1:{}", self.pairs);
            let mut acquire = redis::cmd("LOCK.ACQUIRE");
            acquire.arg("pair").arg(&owner).arg("HOLDS").arg(1).arg("WATCHDOG").arg("SESSION").arg(&self.session);
            let token: i64 = acquire.query_async(&mut self.connection).await?;
            let mut release = redis::cmd("LOCK.RELEASE");
            release.arg("pair").arg(&owner).arg("TOKEN").arg(token).arg("ALL");
            let left: i64 = release.query_async(&mut self.connection).await?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            if left != 0 {
                bail!("{left} holds are left");
            }
        }
        Ok(times)
    }
}
