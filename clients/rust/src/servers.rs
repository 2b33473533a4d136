//! Which server is asked for a key: the one, Sentinel's master, or the cluster's node that serves the slot.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::sentinel::SentinelClient;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value, cmd,
};

use crate::node::Node;
use crate::session::Failure;
use crate::slot::{SLOTS, slot};

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

/// Who grants locks.
pub(crate) enum Servers {
    One(Arc<Node>),
    Cluster(Cluster),
}

impl Servers {
    /// Who serves this key, as far as is known.
    pub(crate) async fn node_for(&self, key: &[u8]) -> Result<Arc<Node>, Failure> {
        match self {
            Self::One(node) => Ok(node.clone()),
            Self::Cluster(cluster) => cluster.node_for(slot(key)).await,
        }
    }

    /// A server said who serves the slot instead: `slot host:port`. None if that makes no sense here.
    pub(crate) fn redirected(&self, error: &RedisError, asked: &str) -> Option<Arc<Node>> {
        let Self::Cluster(cluster) = self else { return None };
        let (address, slot) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        // An empty host is the one that said so.
        let host = if host.is_empty() { asked.rsplit_once(':')?.0 } else { host };
        let address = (host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?);
        let mut map = cluster.map();
        let node = cluster.node(&mut map, &address)?;
        if error.code() == Some("MOVED")
            && let Some(place) = map.slots.get_mut(usize::from(slot))
        {
            *place = Some(address);
        }
        Some(node)
    }

    /// Whether a key may be served by another one than before.
    pub(crate) fn several(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// A server can't be reached: who serves what is to be asked anew.
    pub(crate) fn doubt(&self) {
        if let Self::Cluster(cluster) = self {
            cluster.map().slots.clear();
        }
    }

    /// Every server that may grant a lock now.
    pub(crate) async fn all(&self) -> Result<Vec<Arc<Node>>, Failure> {
        match self {
            Self::One(node) => Ok(vec![node.clone()]),
            Self::Cluster(cluster) => cluster.all().await,
        }
    }

    /// The servers that this client has to do with already.
    pub(crate) fn known(&self) -> Vec<Arc<Node>> {
        match self {
            Self::One(node) => vec![node.clone()],
            Self::Cluster(cluster) => cluster.map().nodes.values().cloned().collect(),
        }
    }
}

type Address = (String, u16);

/// A cluster: which node serves which slot, as far as is known.
pub(crate) struct Cluster {
    seeds: Vec<ConnectionInfo>,
    config: AsyncConnectionConfig,
    map: Mutex<Map>,
    /// Whoever asks for the map; the others wait.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Map {
    /// By slot; empty while nobody knows.
    slots: Vec<Option<Address>>,
    nodes: HashMap<Address, Arc<Node>>,
}

impl Cluster {
    pub(crate) fn new(seeds: Vec<ConnectionInfo>, config: AsyncConnectionConfig) -> Self {
        Self { seeds, config, map: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    async fn node_for(&self, slot: u16) -> Result<Arc<Node>, Failure> {
        self.know().await?;
        let mut map = self.map();
        let address = map.slots.get(usize::from(slot)).cloned().flatten();
        let node = address.and_then(|address| self.node(&mut map, &address));
        node.ok_or_else(|| {
            // Asked again the next time.
            map.slots.clear();
            unserved(slot)
        })
    }

    async fn all(&self) -> Result<Vec<Arc<Node>>, Failure> {
        self.know().await?;
        let mut map = self.map();
        let mut addresses: Vec<Address> = map.slots.iter().flatten().cloned().collect();
        addresses.sort();
        addresses.dedup();
        Ok(addresses.iter().filter_map(|address| self.node(&mut map, address)).collect())
    }

    /// Asks who serves what, unless that is known.
    async fn know(&self) -> Result<(), Failure> {
        if !self.map().slots.is_empty() {
            return Ok(());
        }
        let _turn = self.asking.lock().await;
        if !self.map().slots.is_empty() {
            return Ok(());
        }
        let slots = self.ask_anybody().await?;
        self.map().slots = slots;
        Ok(())
    }

    async fn ask_anybody(&self) -> Result<Vec<Option<Address>>, Failure> {
        let known: Vec<Address> = self.map().nodes.keys().cloned().collect();
        let known = known.iter().filter_map(|address| self.info(address));
        let mut failure = Failure { server: "cluster".to_owned(), error: no_seed() };
        for info in self.seeds.iter().cloned().chain(known) {
            let server = info.addr().to_string();
            match ask_for_slots(info, &self.config).await {
                Ok(slots) => return Ok(slots),
                Err(error) => failure = Failure { server, error },
            }
        }
        Err(failure)
    }

    fn node(&self, map: &mut Map, address: &Address) -> Option<Arc<Node>> {
        if let Some(node) = map.nodes.get(address) {
            return Some(node.clone());
        }
        let client = Client::open(self.info(address)?).ok()?;
        let node = Arc::new(Node::new(Place::Fixed(without_delay(&client)), self.config.clone()));
        map.nodes.insert(address.clone(), node.clone());
        Some(node)
    }

    /// How a node is reached: as the first seed is, at another address.
    fn info(&self, (host, port): &Address) -> Option<ConnectionInfo> {
        let seed = self.seeds.first()?;
        let address = match seed.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host.clone(), *port),
        };
        Some(seed.clone().set_addr(address))
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask_for_slots(info: ConnectionInfo, config: &AsyncConnectionConfig) -> RedisResult<Vec<Option<Address>>> {
    let seed = match info.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.clone(),
        _ => String::new(),
    };
    let mut connection = Client::open(info)?.get_multiplexed_async_connection_with_config(config).await?;
    let ranges: Vec<Vec<Value>> = cmd("CLUSTER").arg("SLOTS").query_async(&mut connection).await?;
    let mut slots = vec![None; usize::from(SLOTS)];
    for range in ranges {
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = range.as_slice() else { continue };
        let [host, Value::Int(port), ..] = master.as_slice() else { continue };
        let Ok(port) = u16::try_from(*port) else { continue };
        let host = match host {
            Value::BulkString(host) if !host.is_empty() => String::from_utf8_lossy(host).into_owned(),
            // It does not know its own name; it is the one that was asked.
            _ => seed.clone(),
        };
        for slot in *first..=*last {
            if let Some(place) = usize::try_from(slot).ok().and_then(|slot| slots.get_mut(slot)) {
                *place = Some((host.clone(), port));
            }
        }
    }
    Ok(slots)
}

fn unserved(slot: u16) -> Failure {
    let detail = format!("slot {slot}");
    let error = (ErrorKind::ClusterConnectionNotFound, "no node of the cluster serves it", detail).into();
    Failure { server: "cluster".to_owned(), error }
}

fn no_seed() -> RedisError {
    (ErrorKind::InvalidClientConfig, "a cluster needs the address of one node at least").into()
}
