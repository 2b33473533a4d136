//! Which server serves a key: the only one, Sentinel's primary, or the cluster's node that serves the slot.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value, cmd,
};
use tokio::time::timeout;

use crate::place::{Failure, Place, late, without_delay};
use crate::slot::{SLOTS, slot};

/// How long one node has to return the slot map, before the next one is asked.
const ASKED_FOR: Duration = Duration::from_secs(1);

/// The servers of a client.
pub(crate) enum Servers {
    One(Arc<Place>),
    Cluster(Box<Cluster>),
}

impl Servers {
    /// The server of this key, as far as is known.
    pub(crate) async fn place_of(&self, key: &[u8]) -> Result<Arc<Place>, Failure> {
        match self {
            Self::One(place) => Ok(place.clone()),
            Self::Cluster(cluster) => cluster.place_of(slot(key)).await,
        }
    }

    /// The same without asking any server.
    pub(crate) fn known(&self, key: &[u8]) -> Option<Arc<Place>> {
        match self {
            Self::One(place) => Some(place.clone()),
            Self::Cluster(cluster) => cluster.known(slot(key)),
        }
    }

    /// Applies a redirection: `MOVED slot host:port`, or `ASK`. None: it is malformed, or this is no cluster.
    pub(crate) fn redirected(&self, error: &str, asked: &str) -> Option<Arc<Place>> {
        let Self::Cluster(cluster) = self else { return None };
        let mut words = error.split(' ');
        let (code, slot, address) = (words.next()?, words.next()?.parse::<usize>().ok()?, words.next()?);
        let (host, port) = address.rsplit_once(':').filter(|_| code == "MOVED" || code == "ASK")?;
        // An empty host means the node that answered.
        let host = if host.is_empty() { asked.rsplit_once(':')?.0 } else { host };
        let address = (host.trim_matches(['[', ']']).to_owned(), port.parse().ok()?);
        let mut map = cluster.map();
        let place = cluster.place(&mut map, &address)?;
        if code == "MOVED"
            && let Some(serves) = map.slots.get_mut(slot)
        {
            *serves = Some(address);
        }
        Some(place)
    }

    /// Whether a key may move to another server.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Marks the topology as unknown, because a server can't be reached.
    pub(crate) fn invalidate(&self) {
        if let Self::Cluster(cluster) = self {
            cluster.map().is_known = false;
        }
    }

    /// Asks for the topology, unless it is known. If no node answers, the last known one stays.
    pub(crate) async fn ensure_known(&self) -> Result<(), Failure> {
        match self {
            Self::One(_) => Ok(()),
            Self::Cluster(cluster) => cluster.ensure_known().await,
        }
    }

    /// Every server that may grant a lock now.
    pub(crate) async fn all(&self) -> Result<Vec<Arc<Place>>, Failure> {
        match self {
            Self::One(place) => Ok(vec![place.clone()]),
            Self::Cluster(cluster) => cluster.all().await,
        }
    }
}

type Address = (String, u16);

/// A cluster: which node serves which slot, as far as is known.
pub(crate) struct Cluster {
    seeds: Vec<ConnectionInfo>,
    config: AsyncConnectionConfig,
    map: Mutex<Map>,
    /// Held by the task that asks for the map; the others wait.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Map {
    /// By slot, as it was last read.
    slots: Vec<Option<Address>>,
    /// Nothing has indicated since then that it may have changed.
    is_known: bool,
    places: HashMap<Address, Arc<Place>>,
}

impl Cluster {
    pub(crate) fn new(seeds: Vec<ConnectionInfo>, config: AsyncConnectionConfig) -> Self {
        Self { seeds, config, map: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    async fn place_of(&self, slot: u16) -> Result<Arc<Place>, Failure> {
        // While the map is read again, the last known one is used.
        if self.known(slot).is_none() {
            self.ensure_known().await?;
        }
        self.known(slot).ok_or_else(|| {
            // The next call asks again.
            self.map().is_known = false;
            unserved(slot)
        })
    }

    fn known(&self, slot: u16) -> Option<Arc<Place>> {
        let mut map = self.map();
        let address = map.slots.get(usize::from(slot)).cloned().flatten()?;
        self.place(&mut map, &address)
    }

    async fn all(&self) -> Result<Vec<Arc<Place>>, Failure> {
        self.ensure_known().await?;
        let mut map = self.map();
        let mut addresses: Vec<Address> = map.slots.iter().flatten().cloned().collect();
        addresses.sort();
        addresses.dedup();
        Ok(addresses.iter().filter_map(|address| self.place(&mut map, address)).collect())
    }

    /// Asks for the map, unless it is known.
    async fn ensure_known(&self) -> Result<(), Failure> {
        if self.map().is_known {
            return Ok(());
        }
        let _guard = self.asking.lock().await;
        if self.map().is_known {
            return Ok(());
        }
        let slots = self.ask_any_node().await?;
        let mut map = self.map();
        (map.slots, map.is_known) = (slots, true);
        Ok(())
    }

    async fn ask_any_node(&self) -> Result<Vec<Option<Address>>, Failure> {
        let known: Vec<Address> = self.map().places.keys().cloned().collect();
        let known = known.iter().filter_map(|address| self.info(address));
        let mut failure = Failure { server: "cluster".to_owned(), error: no_seed() };
        for info in self.seeds.iter().cloned().chain(known) {
            let server = info.addr().to_string();
            match timeout(ASKED_FOR, ask_for_slots(info, &self.config)).await {
                Ok(Ok(slots)) => return Ok(slots),
                Ok(Err(error)) => failure = Failure { server, error },
                Err(_late) => failure = Failure { server, error: late() },
            }
        }
        Err(failure)
    }

    fn place(&self, map: &mut Map, address: &Address) -> Option<Arc<Place>> {
        if let Some(place) = map.places.get(address) {
            return Some(place.clone());
        }
        let client = Client::open(self.info(address)?).ok()?;
        let place = Arc::new(Place::Fixed(without_delay(&client)));
        map.places.insert(address.clone(), place.clone());
        Some(place)
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
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = range.as_slice() else { continue };
        let [host, Value::Int(port), ..] = primary.as_slice() else { continue };
        let Ok(port) = u16::try_from(*port) else { continue };
        let host = match host {
            Value::BulkString(host) if !host.is_empty() => String::from_utf8_lossy(host).into_owned(),
            // The node does not know its own name; it is the one that was asked.
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

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    #[tokio::test]
    async fn last_slot_map_is_used_while_it_is_read_again() {
        // It accepts connections and never answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let seed = format!("redis://{}", silent.local_addr().unwrap()).into_connection_info().unwrap();
        let cluster = Cluster::new(vec![seed], AsyncConnectionConfig::new());
        cluster.map().slots = vec![Some(("node".to_owned(), 7000)); usize::from(SLOTS)];
        let servers = Servers::Cluster(Box::new(cluster));
        servers.invalidate();
        let place = tokio::time::timeout(ASKED_FOR / 2, servers.place_of(b"a")).await.unwrap();
        assert_eq!(place.ok().unwrap().name(), "node:7000");
        assert!(servers.ensure_known().await.is_err(), "it asked");
        assert!(servers.known(b"a").is_some());
    }
}
