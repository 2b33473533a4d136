//! A primary, a replica and a sentinel, for tests with failovers.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use crate::server::{Builder, Server};
use crate::until::until;

const SOON: Duration = Duration::from_secs(30);
/// The name of the primary.
const NAME: &str = "mymaster";

/// A primary with one replica, watched by one sentinel. Dropping it ends them.
pub struct Trio {
    sentinel: Server,
    /// The initial primary, and the replica.
    servers: [Server; 2],
}

impl Trio {
    /// Starts all three, and waits until the sentinel knows the others.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(|builder| builder)
    }

    /// The same, with other settings for both servers.
    #[track_caller]
    pub fn start_with(settings: impl Fn(Builder) -> Builder) -> Self {
        let servers = [Server::builder(), Server::builder()].map(|builder| settings(builder).start());
        servers[1].replica_of(&servers[0]);
        let sentinel = sentinel_of(&servers[0]);
        let trio = Self { sentinel, servers };
        until(SOON, "the sentinel knows the replica", || {
            let replicas: Vec<redis::Value> = trio.ask(&["REPLICAS", NAME]).unwrap_or_default();
            replicas.len() == 1
        });
        trio
    }

    /// The primary's name at the sentinel.
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// The sentinel.
    pub fn sentinel(&self) -> &Server {
        &self.sentinel
    }

    /// The initial primary, and the replica.
    pub fn servers(&self) -> &[Server; 2] {
        &self.servers
    }

    /// Fails over to the replica, as an operator does, and waits until the sentinel names it.
    #[track_caller]
    pub fn fail_over(&self) {
        self.servers[0].wait_for_replica(&self.servers[1]);
        // Refused while the sentinel considers the replica unhealthy.
        until(SOON, "the sentinel begins a failover", || self.ask::<()>(&["FAILOVER", NAME]).is_ok());
        self.wait_for_the_new_primary();
    }

    /// Kills the primary when the replica is in step, and waits until the sentinel names the replica.
    #[track_caller]
    pub fn kill_primary(&mut self) {
        self.servers[0].wait_for_replica(&self.servers[1]);
        self.servers[0].kill9();
        self.wait_for_the_new_primary();
    }

    #[track_caller]
    fn wait_for_the_new_primary(&self) {
        until(SOON, "the sentinel names the new primary", || {
            let address: Option<(String, u16)> = self.ask(&["GET-MASTER-ADDR-BY-NAME", NAME]).ok();
            address.is_some_and(|(_, port)| port == self.servers[1].port())
        });
    }

    fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        redis::cmd("SENTINEL").arg(words).query(&mut self.sentinel.connect())
    }
}

fn sentinel_of(primary: &Server) -> Server {
    let address: SocketAddr = primary.addr();
    let file = primary.dir().join("sentinel.conf");
    let settings = format!(
        "sentinel monitor {NAME} {} {} 1\nsentinel down-after-milliseconds {NAME} 2000\n\
         sentinel failover-timeout {NAME} 10000\n",
        address.ip(),
        address.port()
    );
    fs::write(&file, settings).expect("the sentinel's file can be written");
    Server::builder().sentinel(file).start()
}
