//! A master, a replica and the sentinel that watches them, for tests of what a failover does.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use crate::server::{Builder, Server};
use crate::until::until;

const SOON: Duration = Duration::from_secs(30);
/// The name of the master.
const NAME: &str = "mymaster";

/// A master with one replica under one sentinel. They end when it is dropped.
pub struct Trio {
    sentinel: Server,
    /// The master at the start, and the replica.
    servers: [Server; 2],
}

impl Trio {
    /// Starts them, and waits until the sentinel knows them.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(|builder| builder)
    }

    /// The same, with settings of one's own for both servers.
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

    /// The name under which the sentinel knows the master.
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// The sentinel.
    pub fn sentinel(&self) -> &Server {
        &self.sentinel
    }

    /// The master at the start, and the replica.
    pub fn servers(&self) -> &[Server; 2] {
        &self.servers
    }

    /// Makes the replica the master, as an operator does, and waits until the sentinel names it.
    #[track_caller]
    pub fn fail_over(&self) {
        self.servers[0].wait_for_replica(&self.servers[1]);
        // Refused while the sentinel has not seen the replica in good order.
        until(SOON, "the sentinel begins a failover", || self.ask::<()>(&["FAILOVER", NAME]).is_ok());
        self.wait_for_the_new_master();
    }

    /// Kills the master once its replica has all that it wrote, and waits until the sentinel has noticed, and names the replica.
    #[track_caller]
    pub fn kill_master(&mut self) {
        self.servers[0].wait_for_replica(&self.servers[1]);
        self.servers[0].kill9();
        self.wait_for_the_new_master();
    }

    #[track_caller]
    fn wait_for_the_new_master(&self) {
        until(SOON, "the sentinel names the new master", || {
            let address: Option<(String, u16)> = self.ask(&["GET-MASTER-ADDR-BY-NAME", NAME]).ok();
            address.is_some_and(|(_, port)| port == self.servers[1].port())
        });
    }

    fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        redis::cmd("SENTINEL").arg(words).query(&mut self.sentinel.connect())
    }
}

fn sentinel_of(master: &Server) -> Server {
    let address: SocketAddr = master.addr();
    let file = master.dir().join("sentinel.conf");
    let settings = format!(
        "sentinel monitor {NAME} {} {} 1\nsentinel down-after-milliseconds {NAME} 2000\n\
         sentinel failover-timeout {NAME} 10000\n",
        address.ip(),
        address.port()
    );
    fs::write(&file, settings).expect("the sentinel's file can be written");
    Server::builder().sentinel(file).start()
}
