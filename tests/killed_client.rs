//! A client process that is killed while it holds a thousand ephemeral locks, each with a waiter.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives, holders};

const LOCKS: usize = 1000;

/// Another process with one connection: `redis-cli`, which reads its commands from a pipe.
struct Client(Child);

impl Client {
    fn start(server: &Server) -> Self {
        let (host, port) = (server.addr().ip().to_string(), server.port().to_string());
        let mut command = Command::new("redis-cli");
        command.args(["-h", &host, "-p", &port]).stdin(Stdio::piped()).stdout(Stdio::null());
        Self(command.spawn().expect("redis-cli starts"))
    }

    fn send(&mut self, lines: &[String]) {
        let pipe = self.0.stdin.as_mut().expect("stdin is a pipe");
        pipe.write_all(format!("{}\n", lines.join("\n")).as_bytes()).expect("redis-cli reads");
    }

    /// SIGKILL.
    fn kill(&mut self) {
        self.0.kill().expect("it can be killed");
        self.0.wait().expect("it ends");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn killed_client_frees_a_thousand_ephemeral_locks() {
    let server = Server::start();
    let mut viewer = server.raw();
    let mut client = Client::start(&server);
    let lines: Vec<String> =
        (0..LOCKS).map(|index| format!("LOCK.ACQUIRE key:{index} victim LEASE 600000 EPHEMERAL")).collect();
    client.send(&lines);
    until(SOON, "the client holds all locks", || viewer.run("DBSIZE") == Value::Int(LOCKS as i64));

    let mut waiters: Vec<Raw> = (0..LOCKS).map(|_| server.raw()).collect();
    for (index, waiter) in waiters.iter_mut().enumerate() {
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE key:{index} waiter:{index} LEASE 600000 WAIT 0")), None);
    }

    client.kill();
    let tokens: BTreeSet<i64> = waiters.iter_mut().map(|waiter| arrives(waiter).token()).collect();

    assert_eq!(tokens.len(), LOCKS, "every grant has its own token");
    for index in 0..LOCKS {
        let holders = holders(&mut viewer, &format!("key:{index}"));
        assert_eq!(holders.into_keys().collect::<Vec<_>>(), [format!("waiter:{index}")]);
    }
}
