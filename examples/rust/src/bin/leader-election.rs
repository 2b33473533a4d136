//! Leader election with a fenced write: of all processes that run this, one leads and writes, and a former leader's late write
//! is refused.
//!
//! `leader-election NAME`: a leader that exits hands over at once; one that is killed is replaced a lease later. One that was
//! paused may wake up and write before it learns that it no longer leads: the fence of its term is lower than the new leader's,
//! and the storage refuses it.

use std::time::Duration;

use holdfast_client::{Locks, redis};

/// The storage keeps the highest fence that it has seen, and takes no lower one.
const WRITE: &str = "
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'by', ARGV[2])
    redis.call('HINCRBY', KEYS[1], 'writes', 1)
    return 1";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).ok_or("a name")?;
    let client =
        redis::Client::open(std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned()))?;
    let data = client.get_multiplexed_async_connection().await?;
    let locks = Locks::new(client);
    let candidate = locks.elect("scheduler", &name)?;
    loop {
        // Waits for as long as another process leads.
        let guard = tokio::select! {
            guard = candidate.acquire() => guard?.ok_or("it waits for ever")?,
            _ = tokio::signal::ctrl_c() => break,
        };
        println!("{name} leads, term {}", guard.fence());
        tokio::select! {
            led = guard.while_held(lead(data.clone(), guard.fence(), &name)) => match led {
                Ok(refused) => println!("{name}: {}", refused?),
                Err(lost) => println!("{name}: {lost}"),
            },
            _ = tokio::signal::ctrl_c() => {
                guard.release().await?;
                break;
            }
        }
    }
    locks.settle().await;
    Ok(())
}

/// Writes until a write is refused.
async fn lead(mut data: redis::aio::MultiplexedConnection, fence: u64, name: &str) -> redis::RedisResult<&'static str> {
    loop {
        let mut write = redis::cmd("EVAL");
        write.arg(WRITE).arg(1).arg("schedule").arg(fence).arg(name);
        if write.query_async::<i64>(&mut data).await? == 0 {
            return Ok("refused, the term is over");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
