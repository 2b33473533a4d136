//! Tests of the helpers, with servers without the module.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::Duration;

use redis::{Connection, Value};
use support::{Cluster, Server, eventually, lua, until};

fn plain() -> Server {
    Server::builder().without_module().start()
}

fn set(connection: &mut Connection, key: &str, value: &str) {
    redis::cmd("SET").arg(key).arg(value).exec(connection).unwrap();
}

fn get(connection: &mut Connection, key: &str) -> Option<String> {
    redis::cmd("GET").arg(key).query(connection).unwrap()
}

#[test]
fn dropped_server_and_its_directory_are_removed() {
    let server = plain();
    let (process, dir) = (Path::new("/proc").join(server.pid().to_string()), server.dir().to_owned());
    assert!(dir.exists() && process.exists());
    assert!(server.log().contains("Ready to accept connections"));
    drop(server);
    assert!(!dir.exists());
    until(Duration::from_secs(30), "the process has ended", || !process.exists());
}

#[test]
fn server_outlives_thread_that_started_it() {
    let server = std::thread::spawn(plain).join().unwrap();
    // The directory must not be deleted, so there is nothing to wait for.
    assert!(!eventually(Duration::from_millis(100), || server.ended()));
}

#[test]
fn restart_keeps_port_and_data() {
    let mut server = Server::builder().without_module().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let address = server.addr();
    set(&mut server.connect(), "key", "value");
    server.kill9();
    assert!(server.ended());
    server.restart();
    assert_eq!(server.addr(), address);
    assert_eq!(get(&mut server.connect(), "key").as_deref(), Some("value"));
    server.restart();
    assert_eq!(get(&mut server.connect(), "key").as_deref(), Some("value"));
}

#[test]
fn failed_start_reports_reason() {
    let log = Server::builder().without_module().arg("maxmemory-policy", "nonsense").try_start().err().unwrap();
    assert!(log.contains("maxmemory-policy"), "{log}");
    let panic = catch_unwind(|| Server::builder().without_module().arg("no-such", "setting").start()).err().unwrap();
    assert!(panic.downcast_ref::<String>().unwrap().contains("no-such"));
}

#[test]
fn paused_server_continues() {
    let server = plain();
    let mut raw = server.raw();
    assert!(raw.client_id() > 0);
    server.stop();
    raw.send(&[b"PING"]).unwrap();
    assert_eq!(raw.read_timeout(Duration::from_millis(50)).unwrap(), None);
    assert!(raw.pending());
    server.cont();
    assert_eq!(raw.read().unwrap(), Value::SimpleString("PONG".into()));
}

#[test]
fn raw_connection_is_binary_safe_in_both_protocols() {
    let server = plain();
    let bytes = [0, b'\r', b'\n', b'%', 0xff, b'{'];
    let mut raw = server.raw();
    assert_eq!(raw.call(&[b"SET", &bytes, &bytes]), Value::Okay);
    assert_eq!(raw.call(&[b"GET", &bytes]), Value::BulkString(bytes.into()));
    assert_eq!(raw.call(&[b"GET", b"missing"]), Value::Nil);
    assert!(matches!(raw.call(&[b"NONSENSE"]), Value::ServerError(_)));
    raw.hello3();
    assert_eq!(raw.call(&[b"GET", b"missing"]), Value::Nil);
    assert!(matches!(raw.call(&[b"CONFIG", b"GET", b"save"]), Value::Map(_)));
    raw.send_bytes(b"PING\r\nPING\r\n").unwrap();
    assert_eq!(raw.read().unwrap(), raw.read().unwrap());
}

#[test]
fn raw_connection_notices_and_causes_close() {
    let server = plain();
    let (mut seen, gone) = (server.raw(), server.raw());
    let id = seen.client_id().to_string();
    assert!(!seen.closed());
    server.raw().call(&[b"CLIENT", b"KILL", b"ID", id.as_bytes()]);
    until(Duration::from_secs(30), "the close is noticed", || seen.closed());
    assert!(seen.read().is_err());
    let address = gone.local_addr().to_string();
    let known = || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connect()).unwrap();
        list.contains(&address)
    };
    until(Duration::from_secs(30), "the server knows the client", known);
    gone.reset();
    until(Duration::from_secs(30), "the server has noticed the close", || !known());
}

#[test]
fn client_speaks_both_protocols() {
    let server = plain();
    for mut connection in [server.connect(), server.connect3()] {
        set(&mut connection, "key", "value");
        assert_eq!(get(&mut connection, "key").as_deref(), Some("value"));
    }
    let reply: Value = redis::cmd("CONFIG").arg("GET").arg("save").query(&mut server.connect3()).unwrap();
    assert!(matches!(reply, Value::Map(_)));
}

#[test]
fn replica_follows() {
    let (primary, replica) = (plain(), plain());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    set(&mut primary.connect(), "key", "value");
    primary.wait_for_replica(&replica);
    assert_eq!(get(&mut replica.connect(), "key").as_deref(), Some("value"));
    replica.replica_of_no_one();
    set(&mut replica.connect(), "key", "other");
}

#[test]
fn slot_moves_with_its_keys() {
    let cluster = Cluster::start_with(3, |builder| builder.without_module());
    let slot = cluster.slot_of(b"key");
    let from = cluster.owner_of(slot);
    let to = (from + 1) % 3;
    set(&mut cluster.node(from).connect(), "key", "value");
    cluster.move_slot(slot, from, to);
    assert_eq!(cluster.owner_of(slot), to);
    assert_eq!(get(&mut cluster.node(to).connect(), "key").as_deref(), Some("value"));
    let moved = cluster.node(from).raw().call(&[b"GET", b"key"]);
    assert!(matches!(&moved, Value::ServerError(error) if error.code() == "MOVED"), "{moved:?}");
    cluster.move_slot(slot, to, from);
    assert_eq!(get(&mut cluster.node(from).connect(), "key").as_deref(), Some("value"));
}

#[test]
fn redisson_scripts_acquire_and_release() {
    let server = plain();
    let mut connection = server.connect();
    let mut run = |script: &str, owner: &str| -> Option<i64> {
        redis::cmd("EVAL").arg(script).arg(2).arg(&["lock", "channel", "10000", owner]).query(&mut connection).unwrap()
    };
    assert_eq!(run(lua::ACQUIRE, "a"), None);
    assert_eq!(run(lua::ACQUIRE, "a"), None);
    assert!((1..=10_000).contains(&run(lua::ACQUIRE, "b").unwrap()));
    assert_eq!(run(lua::RENEW, "a"), Some(1));
    assert_eq!(run(lua::RENEW, "b"), Some(0));
    assert_eq!(run(lua::RELEASE, "b"), None);
    assert_eq!(run(lua::RELEASE, "a"), Some(0));
    assert_eq!(run(lua::RELEASE, "a"), Some(1));
    assert_eq!(run(lua::RELEASE, "a"), None);
    assert_eq!(lua::channel(b"a"), b"redisson_lock__channel:{a}");
    assert_eq!(lua::channel(b"{a}b"), b"redisson_lock__channel:{a}b");
}

#[test]
fn given_directory_is_not_removed() {
    let dir = std::env::temp_dir().join(format!("holdfast-given-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let server = Server::builder().without_module().dir(&dir).start();
    assert_eq!(server.info("server", "tcp_port"), Some(server.port().to_string()));
    redis::cmd("SAVE").exec(&mut server.connect()).unwrap();
    drop(server);
    assert!(dir.join("dump.rdb").exists());
    fs::remove_dir_all(&dir).unwrap();
}
