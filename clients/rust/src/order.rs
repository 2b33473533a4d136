//! The order of servers that clients in all languages share, so that the waits of clients that take locks at several of
//! them form no cycle. `docs/redlock.md` has the rule.

use redis::{ConnectionAddr, ConnectionInfo};

use crate::error::Error;
use crate::slot::slot;

/// The name of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    One {
        server: String,
        database: u64,
    },
    Cluster {
        server: String,
    },
    /// The client that finds the server does not reveal its name.
    Unknown,
}

/// The place of a key in the order: the server's name, then the slot or the database.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) server: String,
    number: u64,
}

impl Name {
    /// One server, at a fixed address.
    pub(crate) fn of(info: &ConnectionInfo) -> Self {
        Self::at(info.addr().to_string(), info.redis_settings().db())
    }

    /// One server by its name.
    pub(crate) fn at(server: String, database: i64) -> Self {
        Self::One { server, database: database.unsigned_abs() }
    }

    /// A cluster: the least of its configured addresses.
    pub(crate) fn of_cluster<'a>(seeds: impl IntoIterator<Item = &'a ConnectionAddr>) -> Self {
        Self::Cluster { server: seeds.into_iter().map(ToString::to_string).min().unwrap_or_default() }
    }

    /// The place of a key at this server.
    ///
    /// # Errors
    ///
    /// If the server's name is not known.
    pub(crate) fn position(&self, key: &[u8]) -> Result<Position, Error> {
        match self {
            Self::One { server, database } => Ok(Position { server: server.clone(), number: *database }),
            Self::Cluster { server } => Ok(Position { server: server.clone(), number: slot(key).into() }),
            Self::Unknown => {
                let message = "locks over several servers need the servers' names, and a SentinelClient does not tell \
                               that of its primary: use Locks::open(\"redis+sentinel://…\")";
                Err(Error::Invalid { message: message.to_owned() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::IntoConnectionInfo;

    fn name(url: &str) -> Name {
        Name::of(&url.into_connection_info().unwrap())
    }

    #[test]
    fn positions_are_ordered_by_name_bytes_then_number() {
        let urls = [
            "redis://10.0.0.10:6379",
            "redis://10.0.0.9:6379/2",
            "redis://10.0.0.9:6379/10",
            "redis://B:1",
            "redis://a:10",
            "redis://a:9",
        ];
        let positions: Vec<_> = urls.iter().map(|url| name(url).position(b"k").unwrap()).collect();
        assert!(positions.is_sorted(), "{positions:?}");
    }

    #[test]
    fn cluster_position_has_least_address_and_slot() {
        let seeds = ["redis://b:7000", "redis://a:7001"].map(|url| url.into_connection_info().unwrap());
        let cluster = Name::of_cluster(seeds.iter().map(ConnectionInfo::addr));
        let position = cluster.position(b"foo").unwrap();
        assert_eq!(position, Position { server: "a:7001".to_owned(), number: 12_182 });
        assert_eq!(cluster.position(b"{foo}bar").unwrap(), position);
        assert_ne!(cluster.position(b"bar").unwrap(), position);
    }

    #[test]
    fn server_without_name_has_no_position() {
        assert!(matches!(Name::Unknown.position(b"k"), Err(Error::Invalid { .. })));
    }
}
