//! A web service with a lock for each order. Requests for one order run one after the other, on whatever host; those
//! for different orders run concurrently.
//!
//! `web-service PORT`, `curl -X POST 127.0.0.1:PORT/orders/7/items`: a request that would wait for more than two seconds gets 409. A
//! client that hangs up leaves the queue, or releases the lock. A process that is killed during a request blocks its order for a lease.

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use holdfast_client::redis::aio::MultiplexedConnection;
use holdfast_client::redis::{self, AsyncCommands, RedisResult};
use holdfast_client::{Error, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).ok_or("a port")?.parse()?;
    let client =
        redis::Client::open(std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned()))?;
    let data = client.get_multiplexed_async_connection().await?;
    let locks = Locks::new(client);
    let service = Router::new().route("/orders/{order}/items", post(add_item)).with_state((locks.clone(), data));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let interrupted = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    axum::serve(listener, service).with_graceful_shutdown(interrupted).await?;
    locks.settle().await;
    Ok(())
}

async fn add_item(
    State((locks, data)): State<(Locks, MultiplexedConnection)>,
    Path(order): Path<String>,
) -> Result<String, (StatusCode, String)> {
    let lock = locks.lock(format!("order:{order}")).watched(Duration::from_secs(5)).wait(Duration::from_secs(2));
    let unavailable = |error: Error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string());
    let Some(guard) = lock.acquire().await.map_err(unavailable)? else {
        return Err((StatusCode::CONFLICT, "this order is being changed".to_owned()));
    };
    let counted = guard.while_held(count(data, &format!("items:{order}"))).await.map_err(unavailable)?;
    let items = counted.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    guard.release().await.map_err(unavailable)?;
    Ok(format!("{items} items"))
}

/// Reads, computes, writes: without the lock, two requests would count one item.
async fn count(mut data: MultiplexedConnection, key: &str) -> RedisResult<u64> {
    let items: Option<u64> = data.get(key).await?;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let items = items.unwrap_or(0) + 1;
    let () = data.set(key, items).await?;
    Ok(items)
}
