//! How one server is found and reached.

use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, Client, RedisError};

/// More than a core leaves unanswered: no request is ever queued in this process behind others.
const BUFFER: usize = 1024;

/// Why a server can't be used.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) server: String,
    pub(crate) error: RedisError,
}

/// How one server is found.
pub(crate) enum Place {
    Fixed(Client),
    /// The primary that Sentinel names when asked.
    Sentinel {
        client: tokio::sync::Mutex<SentinelClient>,
        /// The Sentinels and the name of the primary, for messages.
        name: String,
    },
}

/// Both connections of a pair, and the server's address.
pub(crate) struct Opened {
    pub(crate) server: String,
    pub(crate) session: MultiplexedConnection,
    pub(crate) requests: MultiplexedConnection,
}

impl Place {
    /// A client of the server, as it is found now.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        match self {
            Self::Fixed(client) => Ok(client.clone()),
            Self::Sentinel { client, name } => {
                let client = client.lock().await.async_get_client().await;
                let client = client.map_err(|error| Failure { server: name.clone(), error })?;
                Ok(without_delay(&client))
            }
        }
    }

    /// A connection that is no session's, and the server's address: to inspect locks, no right to lock is needed.
    pub(crate) async fn connect(
        &self,
        config: &AsyncConnectionConfig,
    ) -> Result<(String, MultiplexedConnection), Failure> {
        let client = self.client().await?;
        let server = client.get_connection_info().addr().to_string();
        match client.get_multiplexed_async_connection_with_config(config).await {
            Ok(connection) => Ok((server, connection)),
            Err(error) => Err(Failure { server, error }),
        }
    }

    pub(crate) async fn open(&self, config: &AsyncConnectionConfig) -> Result<Opened, Failure> {
        // The core limits how long a reply may take.
        let config = config.clone().set_response_timeout(None).set_pipeline_buffer_size(BUFFER);
        let client = self.client().await?;
        let server = client.get_connection_info().addr().to_string();
        let connect = || client.get_multiplexed_async_connection_with_config(&config);
        match tokio::try_join!(connect(), connect()) {
            Ok((session, requests)) => Ok(Opened { server, session, requests }),
            Err(error) => Err(Failure { server, error }),
        }
    }

    /// The server's name before it was reached.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Fixed(client) => client.get_connection_info().addr().to_string(),
            Self::Sentinel { name, .. } => name.clone(),
        }
    }
}

/// Sends a small request that follows another at once.
pub(crate) fn without_delay(client: &Client) -> Client {
    let info = client.get_connection_info().clone();
    let settings = info.tcp_settings().clone().set_nodelay(true);
    // A client used this address already.
    Client::open(info.set_tcp_settings(settings)).unwrap_or_else(|_| client.clone())
}

/// The error of a reply that did not come in time.
pub(crate) fn late() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}
