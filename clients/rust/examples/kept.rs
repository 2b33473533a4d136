//! Measures acquire and release of a cached lock: `cargo run --release -p holdfast-client --example kept [URL]`.

use std::time::{Duration, Instant};

use holdfast_client::Locks;

/// Pairs of acquire and release in a round, and rounds.
const PAIRS: u32 = 100_000;
const ROUNDS: usize = 10;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379/".to_owned());
    let locks = Locks::open(&url)?;
    let lock = locks.lock("kept").keep(Duration::from_secs(10));
    let first = lock.try_acquire().await?.ok_or("somebody else has it")?;
    let fence = first.fence();
    first.release().await?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for _ in 0..PAIRS {
            let guard = lock.try_acquire().await?.ok_or("somebody else has it")?;
            guard.release().await?;
        }
        rounds.push(begin.elapsed() / PAIRS);
        // The client reads the server's events here.
        tokio::task::yield_now().await;
    }
    rounds.sort();
    let last = lock.try_acquire().await?.ok_or("somebody else has it")?;
    assert_eq!(last.fence(), fence, "it was one hold all the time");
    drop(last);
    locks.settle().await;
    println!(
        "{} ns for acquire and release; the slowest of {ROUNDS} rounds {} ns",
        rounds[ROUNDS / 2].as_nanos(),
        rounds[ROUNDS - 1].as_nanos()
    );
    Ok(())
}
