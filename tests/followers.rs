//! A replica, append-only file or monitor that starts at any moment misses nothing. Without one, the module does not
//! replicate (`src/keyspace/listeners.rs`), and it must notice a new one in time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use support::{Over, Server, until};

const SOON: Duration = Duration::from_secs(20);

/// Acquires and releases without a pause until `over` is set. Some locks stay held.
fn load(server: &Server, over: &AtomicBool) -> u64 {
    let mut connection = server.raw();
    let mut random = support::Random::new();
    let mut steps = 0;
    while !over.load(Ordering::Relaxed) {
        let commands: Vec<Vec<Vec<u8>>> = (0..50)
            .map(|_| {
                let key = format!("k{}", random.below(200)).into_bytes();
                let limit: &[&[u8]] = match random.below(3) {
                    0 => &[],
                    _ => &[b"LIMIT", b"3"],
                };
                let owner = format!("o{}", random.below(4)).into_bytes();
                let words: Vec<&[u8]> = match random.below(3) {
                    0 => vec![b"LOCK.RELEASE", &key[..], &owner],
                    _ => [vec![b"LOCK.ACQUIRE", &key[..], &owner, b"LEASE", b"3600000"], limit.to_vec()].concat(),
                };
                words.into_iter().map(<[u8]>::to_vec).collect()
            })
            .collect();
        steps += connection.call_all(&commands).len() as u64;
    }
    steps
}

fn digest(server: &Server) -> String {
    redis::cmd("DEBUG").arg("DIGEST").query(&mut server.connect()).expect("a digest")
}

/// Runs `during` under load, and stops the load afterwards. Returns the number of locks.
fn under_load(server: &Server, during: impl FnOnce()) -> u64 {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(|| load(server, &over));
        {
            let _over = Over(&over);
            during();
        }
        load.join().expect("the load")
    })
}

/// Gives the module time to notice that it has no replicas: the server's cron notifies it within a tenth of a second. A
/// write then leaves the replication offset unchanged.
fn wait_until_module_sees_no_replicas() {
    thread::sleep(Duration::from_millis(250)); // Clients can't observe it. If it takes longer, the test checks less.
}

#[test]
fn replica_that_connects_under_load_misses_nothing() {
    for diskless in ["yes", "no"] {
        let primary =
            Server::builder().arg("repl-diskless-sync", diskless).arg("repl-diskless-sync-delay", "0").start();
        wait_until_module_sees_no_replicas();
        let replica = Server::builder().without_module().start();
        let steps = under_load(&primary, || {
            replica.replica_of(&primary);
            primary.wait_replica_online();
        });
        until(SOON, "the replica has the primary's data", || digest(&primary) == digest(&replica));
        assert!(steps > 0);
    }
}

#[test]
fn replica_that_reconnects_repeatedly_misses_nothing() {
    let primary = Server::builder()
        .arg("repl-diskless-sync-delay", "0")
        // The primary has no replica in between, so the next one gets a full copy.
        .arg("repl-backlog-ttl", "1")
        .start();
    let replica = Server::builder().without_module().start();
    under_load(&primary, || {
        for _ in 0..3 {
            replica.replica_of(&primary);
            primary.wait_replica_online();
            replica.replica_of_no_one();
            until(SOON, "the backlog is freed", || {
                primary.info("replication", "repl_backlog_active").as_deref() == Some("0")
            });
            wait_until_module_sees_no_replicas();
        }
        replica.replica_of(&primary);
        primary.wait_replica_online();
    });
    until(SOON, "the replica has the primary's data", || digest(&primary) == digest(&replica));
}

#[test]
fn briefly_disconnected_replica_misses_nothing() {
    let primary = Server::start();
    let replica = Server::builder().without_module().start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    under_load(&primary, || {
        for _ in 0..5 {
            let _: () = redis::cmd("CLIENT")
                .arg("KILL")
                .arg("TYPE")
                .arg("replica")
                .query(&mut primary.connect())
                .expect("killed");
            wait_until_module_sees_no_replicas();
            primary.wait_replica_online();
        }
    });
    until(SOON, "the replica has the primary's data", || digest(&primary) == digest(&replica));
}

#[test]
fn append_only_file_enabled_under_load_misses_nothing() {
    let mut server = Server::builder().arg("appendfsync", "always").start();
    wait_until_module_sees_no_replicas();
    let set = |server: &Server, value: &str| {
        let _: () =
            redis::cmd("CONFIG").arg("SET").arg("appendonly").arg(value).query(&mut server.connect()).expect("set");
    };
    under_load(&server, || {
        set(&server, "yes");
        until(SOON, "the file is written", || {
            server.info("persistence", "aof_rewrite_in_progress").as_deref() == Some("0")
                && server.info("persistence", "aof_rewrite_scheduled").as_deref() == Some("0")
        });
    });
    let before = digest(&server);
    let _: () = redis::cmd("CONFIG").arg("REWRITE").query(&mut server.connect()).unwrap_or(());
    server.kill9();
    let server = Server::builder().arg("appendonly", "yes").dir(server.dir()).start();
    assert_eq!(digest(&server), before);
}

#[test]
fn changes_count_for_snapshots_without_replicas() {
    let server = Server::start();
    wait_until_module_sees_no_replicas();
    let mut connection = server.connect();
    let changes =
        || server.info("persistence", "rdb_changes_since_last_save").and_then(|text| text.parse::<u64>().ok());
    let before = changes().expect("a number");
    for _ in 0..10 {
        let _: u64 = redis::cmd("LOCK.ACQUIRE").arg("k").arg("o").query(&mut connection).expect("granted");
        let _: u64 = redis::cmd("LOCK.RELEASE").arg("k").arg("o").query(&mut connection).expect("released");
    }
    assert!(changes().expect("a number") >= before + 20);
}
