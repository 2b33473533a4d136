//! How one server is found.

use redis::sentinel::SentinelClient;
use redis::{Client, RedisError};

/// Why a server can't be used.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) server: String,
    pub(crate) error: RedisError,
}

/// How one server is found.
pub(crate) enum Place {
    Fixed(Client),
    /// Whoever is master when asked.
    Sentinel(tokio::sync::Mutex<SentinelClient>),
}

impl Place {
    /// A client of the server, as it is found now.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        match self {
            Self::Fixed(client) => Ok(client.clone()),
            Self::Sentinel(sentinel) => {
                let client = sentinel.lock().await.async_get_client().await;
                let client = client.map_err(|error| Failure { server: "sentinel".to_owned(), error })?;
                Ok(without_delay(&client))
            }
        }
    }
}

/// A small request that follows another goes out at once.
pub(crate) fn without_delay(client: &Client) -> Client {
    let info = client.get_connection_info().clone();
    let settings = info.tcp_settings().clone().set_nodelay(true);
    // It was a client's already.
    Client::open(info.set_tcp_settings(settings)).unwrap_or_else(|_| client.clone())
}
