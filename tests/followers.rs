//! A replica, file or monitor that starts at any moment misses nothing: while there is none, the module hands
//! nothing over for replication (`src/keyspace/listeners.rs`), and must notice in time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use support::{Over, Server, until};

const SOON_ENOUGH: Duration = Duration::from_secs(20);

/// Locks and releases without a pause until told to stop; some locks stay.
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

/// Runs `during` while locks come and go; returns when it has, with the load at an end.
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

/// Whether the module has found itself alone: then a write leaves no trace in the replication offset, and with the
/// server's cron that takes a tenth of a second.
fn let_it_find_itself_alone() {
    thread::sleep(Duration::from_millis(250)); // Not observable from outside, and only makes the test harder.
}

#[test]
fn replica_that_connects_under_load_misses_nothing() {
    for diskless in ["yes", "no"] {
        let master = Server::builder().arg("repl-diskless-sync", diskless).arg("repl-diskless-sync-delay", "0").start();
        let_it_find_itself_alone();
        let replica = Server::builder().without_module().start();
        let steps = under_load(&master, || {
            replica.replica_of(&master);
            master.wait_replica_online();
        });
        until(SOON_ENOUGH, "the replica has what the master has", || digest(&master) == digest(&replica));
        assert!(steps > 0);
    }
}

#[test]
fn replica_that_reconnects_repeatedly_misses_nothing() {
    let master = Server::builder()
        .arg("repl-diskless-sync-delay", "0")
        // So that the master is alone once more after each time, and the next copy is a full one.
        .arg("repl-backlog-ttl", "1")
        .start();
    let replica = Server::builder().without_module().start();
    under_load(&master, || {
        for _ in 0..3 {
            replica.replica_of(&master);
            master.wait_replica_online();
            replica.replica_of_no_one();
            until(SOON_ENOUGH, "the backlog is gone", || {
                master.info("replication", "repl_backlog_active").as_deref() == Some("0")
            });
            let_it_find_itself_alone();
        }
        replica.replica_of(&master);
        master.wait_replica_online();
    });
    until(SOON_ENOUGH, "the replica has what the master has", || digest(&master) == digest(&replica));
}

#[test]
fn briefly_disconnected_replica_misses_nothing() {
    let master = Server::start();
    let replica = Server::builder().without_module().start();
    replica.replica_of(&master);
    master.wait_replica_online();
    under_load(&master, || {
        for _ in 0..5 {
            let _: () = redis::cmd("CLIENT")
                .arg("KILL")
                .arg("TYPE")
                .arg("replica")
                .query(&mut master.connect())
                .expect("killed");
            let_it_find_itself_alone();
            master.wait_replica_online();
        }
    });
    until(SOON_ENOUGH, "the replica has what the master has", || digest(&master) == digest(&replica));
}

#[test]
fn append_only_file_enabled_under_load_misses_nothing() {
    let mut server = Server::builder().arg("appendfsync", "always").start();
    let_it_find_itself_alone();
    let set = |server: &Server, value: &str| {
        let _: () =
            redis::cmd("CONFIG").arg("SET").arg("appendonly").arg(value).query(&mut server.connect()).expect("set");
    };
    under_load(&server, || {
        set(&server, "yes");
        until(SOON_ENOUGH, "the file is written", || {
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
    let_it_find_itself_alone();
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
