//! A single consumer of a stream, in order: the others wait, and one of them continues where the consumer was killed.
//!
//! `stream-consumer NAME`: the position is written with the fence of the lock, together with the result, in one step. So a consumer
//! that was paused, and lost its lock meanwhile, can neither apply an entry again nor move the position back.

use std::time::Duration;

use holdfast_client::{Locks, redis};

const APPLY: &str = "
    if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'position', ARGV[2])
    redis.call('RPUSH', KEYS[2], ARGV[3])
    return 1";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).ok_or("a name")?;
    let client =
        redis::Client::open(std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned()))?;
    let data = client.get_multiplexed_async_connection().await?;
    let lock = Locks::new(client).lock("orders:consumer").watched(Duration::from_secs(5));
    // Waits for as long as another process consumes.
    let guard = lock.acquire().await?.ok_or("it waits for ever")?;
    println!("{name} consumes");
    guard.while_held(consume(data, guard.fence())).await??;
    Err("another one consumes".into())
}

/// Consumes until another consumer has written.
async fn consume(mut data: redis::aio::MultiplexedConnection, fence: u64) -> redis::RedisResult<()> {
    loop {
        let position: Option<String> =
            redis::cmd("HGET").arg("orders:state").arg("position").query_async(&mut data).await?;
        let after = position.map_or_else(|| "-".to_owned(), |position| format!("({position}"));
        let mut next = redis::cmd("XRANGE");
        next.arg("orders").arg(after).arg("+").arg("COUNT").arg(1);
        let entries: Vec<(String, Vec<String>)> = next.query_async(&mut data).await?;
        let Some((entry, fields)) = entries.first() else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let item = fields.get(1).map_or("", String::as_str);
        let mut apply = redis::cmd("EVAL");
        apply.arg(APPLY).arg(2).arg("orders:state").arg("orders:done").arg(fence).arg(entry).arg(item);
        if apply.query_async::<i64>(&mut data).await? == 0 {
            return Ok(());
        }
    }
}
