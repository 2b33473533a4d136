//! How one server is found and reached.

use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, Client, RedisError};

/// More than the requests that a core leaves pending, so that no request waits in this process.
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

    /// A connection without a session, and the server's address: inspecting locks needs no right to lock.
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

    /// The server's name for messages, before a connection is opened.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Fixed(client) => client.get_connection_info().addr().to_string(),
            Self::Sentinel { name, .. } => name.clone(),
        }
    }
}

/// The same client with `TCP_NODELAY`, so that a small request right after another one is not delayed.
pub(crate) fn without_delay(client: &Client) -> Client {
    let info = client.get_connection_info().clone();
    let settings = info.tcp_settings().clone().set_nodelay(true);
    // This does not fail: the given client has the same address.
    Client::open(info.set_tcp_settings(settings)).unwrap_or_else(|_| client.clone())
}

/// The error of a call to a client that the program has closed.
pub(crate) fn closed() -> RedisError {
    (redis::ErrorKind::Client, "the program has closed this client").into()
}

/// The error of a reply that did not come in time.
pub(crate) fn late() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}
