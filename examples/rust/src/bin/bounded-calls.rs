//! A semaphore that bounds the calls to a service: at most three at a time, from all processes together.
//!
//! `bounded-calls CALLS`: if a process is killed during a call, its permit is free a lease later.

use std::time::Duration;

use holdfast_client::{Locks, redis};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let calls: usize = std::env::args().nth(1).ok_or("how many calls")?.parse()?;
    let client =
        redis::Client::open(std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned()))?;
    let data = client.get_multiplexed_async_connection().await?;
    let permits = Locks::new(client).lock("service").limit(3).wait(Duration::from_secs(60));
    let tasks: Vec<_> = (0..calls)
        .map(|_| {
            let (permits, data) = (permits.clone(), data.clone());
            tokio::spawn(async move {
                let permit =
                    permits.acquire().await.map_err(|error| error.to_string())?.ok_or("the service is busy")?;
                service(data).await.map_err(|error| error.to_string())?;
                permit.release().await.map_err(|error| error.to_string())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    println!("{calls} calls");
    Ok(())
}

/// A stand-in for the service, which counts its concurrent calls.
async fn service(mut data: redis::aio::MultiplexedConnection) -> redis::RedisResult<()> {
    let now: i64 = redis::cmd("INCR").arg("service:calls").query_async(&mut data).await?;
    let _: i64 = redis::cmd("ZADD").arg("service:most").arg("GT").arg(now).arg("calls").query_async(&mut data).await?;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _: i64 = redis::cmd("DECR").arg("service:calls").query_async(&mut data).await?;
    Ok(())
}
