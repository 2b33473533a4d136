//! Acquires a RedLock repeatedly, and prints what it observed, to compare contenders.
//!
//! ```text
//! redlock_contender URL,URL,URL KEY TURNS|SECONDSs [HOLD_MS [LEASE_MS [WAIT_MS]]]
//! ```
//!
//! It stops after TURNS holds, or after SECONDS. Each hold lasts HOLD_MS (1). With LEASE_MS the lease is fixed; without
//! it, the servers renew. Each acquisition waits for at most WAIT_MS (10000). For each hold or failed acquisition it
//! prints a line to standard output, with times in microseconds of the machine's monotonic clock:
//!
//! ```text
//! {"t_request":1,"t_granted":2,"fence":3,"t_until_valid":4,"t_release":5,"t_released":6,"lost":null}
//! {"t_request":1,"t_failed":2,"why":"not granted"}
//! ```
//!
//! It held the lock from `t_granted` to `t_release` or `t_until_valid`, whichever is earlier; `lost` is the loss that
//! it was notified of.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use holdfast_client::{Locks, RedGuard, RedLock};
use rustix::time::{ClockId, clock_gettime};

const USAGE: &str = "usage: redlock_contender URL,URL,URL KEY TURNS|SECONDSs [HOLD_MS [LEASE_MS [WAIT_MS]]]";

/// When the program stops.
enum StopCondition {
    Holds(u64),
    At(Instant),
}

/// Microseconds of the machine's monotonic clock, which all processes share.
fn micros(at: Instant) -> i128 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
    let span = |span: Duration| span.as_micros() as i128;
    let instant = Instant::now();
    now + span(at.saturating_duration_since(instant)) - span(instant.saturating_duration_since(at))
}

fn condition(amount: &str) -> Result<StopCondition, Box<dyn Error>> {
    Ok(match amount.strip_suffix('s') {
        Some(seconds) => StopCondition::At(Instant::now() + Duration::from_secs_f64(seconds.parse()?)),
        None => StopCondition::Holds(amount.parse()?),
    })
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Holds the lock for this long, releases it, and prints the line.
async fn hold_once(guard: RedGuard, requested: Instant, hold: Duration) -> Result<(), Box<dyn Error>> {
    let (granted, fence) = (Instant::now(), guard.fence());
    let mut until = guard.valid_until().unwrap_or(granted);
    let lost = guard.while_held(tokio::time::sleep(hold)).await.is_err();
    until = guard.valid_until().unwrap_or(until);
    let release = Instant::now();
    let why = if lost { Some(guard.lost().await.to_string()) } else { None };
    let release_error = guard.release().await.err().map(|error| error.to_string());
    let lost = why.or(release_error).map_or("null".to_owned(), |why| format!("\"{}\"", why.escape_default()));
    let [requested, granted, until, release, released] =
        [requested, granted, until, release, Instant::now()].map(micros);
    say(&format!(
        "{{\"t_request\":{requested},\"t_granted\":{granted},\"fence\":{fence},\"t_until_valid\":{until},\
         \"t_release\":{release},\"t_released\":{released},\"lost\":{lost}}}"
    ))?;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [urls, key, amount, rest @ ..] = arguments.as_slice() else { return Err(USAGE.into()) };
    let mut rest = rest.iter().map(|text| text.parse().map(Duration::from_millis));
    let hold = rest.next().unwrap_or(Ok(Duration::from_millis(1)))?;
    let lease = rest.next().transpose()?;
    let wait = rest.next().unwrap_or(Ok(Duration::from_secs(10)))?;
    let servers = urls.split(',').map(Locks::open).collect::<Result<Vec<_>, _>>()?;
    let mut lock = RedLock::new(servers.clone(), key).wait(wait);
    if let Some(lease) = lease {
        lock = lock.lease(lease);
    }
    let condition = condition(amount)?;
    let mut holds = 0;
    while match condition {
        StopCondition::Holds(most) => holds < most,
        StopCondition::At(end) => Instant::now() < end,
    } {
        let requested = Instant::now();
        let why = match lock.acquire().await {
            Ok(Some(guard)) => {
                hold_once(guard, requested, hold).await?;
                holds += 1;
                continue;
            }
            Ok(None) => "not granted".to_owned(),
            Err(error) => error.to_string(),
        };
        let (requested, failed, why) = (micros(requested), micros(Instant::now()), why.escape_default());
        say(&format!("{{\"t_request\":{requested},\"t_failed\":{failed},\"why\":\"{why}\"}}"))?;
        // If no server answers, an error is returned immediately.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for server in servers {
        let _ = tokio::time::timeout(Duration::from_secs(1), server.settle()).await;
    }
    Ok(())
}
