//! How a client finds its server: through Sentinels, or as a cluster's client.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::sentinel::{SentinelClient, SentinelServerType};
use redis::{AsyncConnectionConfig, Cmd, RedisError, Value, cmd};
use tokio::time::timeout;

use crate::history::Epoch;

/// The primary's name at the Sentinels.
pub const MASTER_NAME: &str = "lab";

const TO_CONNECT: Duration = Duration::from_millis(1_000);
const TO_OPEN: Duration = Duration::from_secs(3);
/// Longer than any request of the lab may take: the lab's own timeout comes first.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How to find the server.
#[derive(Clone, Debug)]
pub enum Discovery {
    /// Ask these Sentinels (`host:port`) for the primary.
    Sentinels(Vec<String>),
    /// These nodes (`host:port`) know the cluster.
    Cluster(Vec<String>),
}

/// An open connection.
pub enum Session {
    /// To one server, and its epoch when the connection was made. (Demotion closes connections.)
    Server(MultiplexedConnection, String),
    /// To a cluster. The client library chooses the node.
    Cluster(Box<ClusterConnection>),
}

/// A reply or an error.
pub enum Answer {
    /// A reply.
    Value(Value),
    /// An error of the server or of the connection.
    Error(RedisError),
    /// Nothing within the time given.
    Nothing,
}

impl Discovery {
    /// How often a wait may start within one request. A cluster's client follows a slot that moves and waits again, as
    /// often as the lab moves one within the longest wait.
    pub fn attempts(&self) -> u64 {
        match self {
            Discovery::Sentinels(_) => 1,
            Discovery::Cluster(_) => 3,
        }
    }

    /// Opens a connection.
    pub async fn open(&self) -> Result<Session, String> {
        let opened = match self {
            Discovery::Sentinels(addresses) => timeout(TO_OPEN, through_sentinels(addresses)).await,
            Discovery::Cluster(addresses) => timeout(TO_OPEN, into_cluster(addresses)).await,
        };
        match opened {
            Ok(session) => session.map_err(|why| why.to_string()),
            Err(_) => Err("no server found in time".into()),
        }
    }
}

async fn through_sentinels(addresses: &[String]) -> Result<Session, RedisError> {
    let urls: Vec<String> = addresses.iter().map(|at| format!("redis://{at}")).collect();
    let mut client = SentinelClient::build(urls, String::from(MASTER_NAME), None, SentinelServerType::Master)?;
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(TO_CONNECT)).set_response_timeout(Some(REPLY_TIMEOUT));
    let mut connection = client.get_async_connection_with_config(&config).await?;
    let replication: String = cmd("INFO").arg("replication").query_async(&mut connection).await?;
    let epoch = field(&replication, "master_replid").unwrap_or_default();
    Ok(Session::Server(connection, epoch.to_owned()))
}

async fn into_cluster(addresses: &[String]) -> Result<Session, RedisError> {
    let urls = addresses.iter().map(|at| format!("redis://{at}"));
    let client = ClusterClient::builder(urls.collect::<Vec<_>>())
        .connection_timeout(TO_CONNECT)
        .response_timeout(REPLY_TIMEOUT)
        .retries(4)
        .build()?;
    let connection = client.get_async_connection().await?;
    Ok(Session::Cluster(Box::new(connection)))
}

/// The value of a line `name:value` of an `INFO` reply.
pub fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .filter_map(|line| line.split_once(':'))
        .find_map(|(field, value)| (field == name).then_some(value.trim()))
}

impl Session {
    /// Sends a command about `key` and waits for the reply, for at most `patience`.
    pub async fn ask(&mut self, command: Cmd, key: &str, patience: Duration) -> Answer {
        let asked = async {
            match self {
                Session::Server(connection, _) => connection.send_packed_command(&command).await,
                Session::Cluster(connection) => {
                    let route = RoutingInfo::SingleNode(SingleNodeRoutingInfo::SpecificNode(Route::with_key(
                        key,
                        SlotAddr::Master,
                    )));
                    connection.route_command(command, route).await
                }
            }
        };
        match timeout(patience, asked).await {
            Ok(Ok(Value::ServerError(error))) => Answer::Error(error.into()),
            Ok(Ok(value)) => Answer::Value(value),
            Ok(Err(error)) => Answer::Error(error),
            Err(_) => Answer::Nothing,
        }
    }

    /// The epoch of the connection's server.
    pub fn epoch(&self) -> Epoch {
        match self {
            Session::Server(_, epoch) => Some(epoch.clone()),
            Session::Cluster(_) => None,
        }
    }
}
