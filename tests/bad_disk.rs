//! docs/operations.md, "Disks": what a disk that hangs, or a fork that fails, does to locks.

use crate::lines::{Commands, Reply, Watched};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, process};

use redis::Value;
use support::{Family, Server, in_containers, server_program, skip, until, workspace};

use crate::common::{ask, ask_int, ask_ok, ask_token, words};

const SOON: Duration = Duration::from_secs(20);

/// Controls the disk as one server sees it, through a preloaded library.
struct Disk(PathBuf);

impl Disk {
    fn new(purpose: &str) -> Self {
        let folder = env::temp_dir().join(format!("holdfast-{purpose}-{}", process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let library = folder.join("preload.so");
        let source = workspace().join("tests/bad_disk/preload.c");
        // The linker of the Rust toolchain is installed here.
        let done =
            Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl").status();
        assert!(done.expect("a compiler").success());
        let program = fs::canonicalize(server_program()).unwrap_or_else(|_| server_program());
        let [folder_name, library, program] = [&folder, &library, &program].map(|path| path.display());
        let start = format!("#!/bin/sh\nBAD_DISK='{folder_name}' LD_PRELOAD='{library}' exec '{program}' \"$@\"\n");
        let starter = folder.join("server");
        fs::write(&starter, start).expect("a file");
        fs::set_permissions(&starter, fs::Permissions::from_mode(0o755)).expect("a program");
        Self(folder)
    }

    fn start(&self, settings: &[(&str, &str)]) -> Server {
        let builder = Server::builder().program(self.0.join("server")).arg("appendonly", "yes");
        settings.iter().fold(builder, |builder, (name, value)| builder.arg(name, value)).start()
    }

    /// The disk `hangs`, is `broken`, or has `no-fork`, from now until [`Disk::end`].
    fn begin(&self, what: &str) {
        fs::write(self.0.join(what), "").expect("a file");
    }

    fn end(&self, what: &str) {
        fs::remove_file(self.0.join(what)).expect("the fault is on");
    }

    fn is_waited_for(&self) {
        until(SOON, "a sync waits", || self.0.join("waiting").exists());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn persistence(server: &Server, field: &str) -> String {
    server.info("persistence", field).unwrap_or_else(|| panic!("no {field}"))
}

#[test]
fn slow_disk_delays_all_clients_with_appendfsync_always() {
    if in_containers() {
        return skip("the server's disk is not on this machine");
    }
    let disk = Disk::new("slow-always");
    let server = disk.start(&[("appendfsync", "always"), ("latency-monitor-threshold", "20")]);
    let [mut plain, watched, mut bob, mut erin, mut carol, mut dave] = [(); 6].map(|()| server.raw());
    ask_token(&mut plain, "LOCK.ACQUIRE plain alice LEASE 1500");
    let mut watched = Watched::over(watched, &server);
    watched.run("LOCK.ACQUIRE watched alice LEASE 1500 WATCHDOG").token();
    bob.send(&words("LOCK.ACQUIRE plain bob WAIT 600000")).unwrap();
    erin.send(&words("LOCK.ACQUIRE watched erin WAIT 600000")).unwrap();

    disk.begin("hangs");
    carol.send(&words("LOCK.ACQUIRE ledger carol LEASE 600000")).unwrap();
    disk.is_waited_for();
    // From here on the server renews nothing.
    let end = Instant::now() + Duration::from_millis(1500);
    dave.send(&words("PING")).unwrap();
    until(SOON, "the leases have expired", || Instant::now() > end);
    assert!(carol.pending() && dave.pending(), "a reply arrived while the disk hangs");

    disk.end("hangs");
    assert!(matches!(carol.read().unwrap(), Value::Int(_)));
    assert_eq!(dave.read().unwrap(), Value::SimpleString("PONG".to_owned()));
    assert!(matches!(bob.read().unwrap(), Value::Int(_)), "the waiter has the lock that expired");
    assert!(matches!(erin.read().unwrap(), Value::Int(_)), "also the lock that a watchdog would have renewed");
    assert_eq!(ask(&mut plain, "LOCK.RENEW plain alice"), Value::Nil);
    assert_eq!(ask(&mut watched, "LOCK.RENEW watched alice"), Value::Nil);
    let slow = format!("{:?}", ask(&mut dave, "LATENCY LATEST"));
    assert!(slow.contains("aof-fsync-always"), "{slow}");
}

#[test]
fn hanging_disk_delays_nothing_with_appendfsync_everysec() {
    if in_containers() {
        return skip("the server's disk is not on this machine");
    }
    let disk = Disk::new("slow-everysec");
    let server = disk.start(&[("appendfsync", "everysec")]);
    let mut alice = server.raw();
    disk.begin("hangs");
    ask_token(&mut alice, "LOCK.ACQUIRE ledger alice LEASE 600000");
    disk.is_waited_for();
    // The server replies to each of these while the first sync runs.
    until(SOON, "a write waited for the sync, and completed", || {
        ask_token(&mut alice, "LOCK.ACQUIRE printer alice");
        assert_eq!(ask_int(&mut alice, "LOCK.RELEASE printer alice"), 1);
        persistence(&server, "aof_delayed_fsync") != "0"
    });
    disk.end("hangs");
    assert_eq!(ask_int(&mut alice, "LOCK.RELEASE ledger alice"), 1);
}

#[test]
fn failed_disk_ends_appendfsync_always_and_stops_writes_else() {
    if in_containers() {
        return skip("the server's disk is not on this machine");
    }
    let disk = Disk::new("broken-disk");
    let mut server = disk.start(&[("appendfsync", "always")]);
    ask_token(&mut server.raw(), "LOCK.ACQUIRE printer alice LEASE 600000");
    disk.begin("broken");
    let mut unanswered = server.raw();
    unanswered.send(&words("LOCK.ACQUIRE ledger alice LEASE 600000")).unwrap();
    server.wait_until_ended();
    assert!(server.log().contains("when the AOF fsync policy is 'always'"), "{}", server.log());
    disk.end("broken");
    server.restart();
    assert_eq!(ask(&mut server.raw(), "LOCK.ACQUIRE printer bob"), Value::Nil, "what was answered is there");

    let server = disk.start(&[("appendfsync", "everysec")]);
    let mut alice = server.raw();
    disk.begin("broken");
    // One write causes one sync.
    ask_token(&mut alice, "LOCK.ACQUIRE printer alice LEASE 600000");
    let refused = |reply: Value| format!("{reply:?}").contains("MISCONF");
    until(SOON, "the server notices", || refused(ask(&mut alice, "PING")));
    assert!(refused(ask(&mut alice, "LOCK.RELEASE printer alice")));
    disk.end("broken");
    assert!(refused(ask(&mut alice, "LOCK.RELEASE printer alice")), "it has tried again by itself");
    let version = server.version();
    if version.family == Family::Valkey || version.at_least(Family::Redis, 7, 2) {
        ask(&mut alice, "BGREWRITEAOF");
    } else {
        ask_ok(&mut alice, "CONFIG SET appendonly no");
        ask_ok(&mut alice, "CONFIG SET appendonly yes");
    }
    until(SOON, "it goes on", || !refused(ask(&mut alice, "LOCK.RELEASE printer alice")));
    until(SOON, "all data is written", || {
        ["aof_last_write_status", "aof_last_bgrewrite_status"].map(|field| persistence(&server, field)) == ["ok", "ok"]
            && persistence(&server, "aof_rewrite_in_progress") == "0"
    });
}

#[test]
fn failed_fork_stops_locks_only_with_snapshots() {
    if in_containers() {
        return skip("the server's disk is not on this machine");
    }
    let disk = Disk::new("no-fork");
    let server = disk.start(&[("save", "3600 1")]);
    let mut alice = server.raw();
    ask_token(&mut alice, "LOCK.ACQUIRE printer alice LEASE 600000");
    disk.begin("no-fork");
    assert!(matches!(ask(&mut alice, "BGSAVE"), Value::ServerError(_)));
    assert!(server.log().contains("Can't save in background: fork: Cannot allocate memory"), "{}", server.log());
    assert_eq!(persistence(&server, "rdb_last_bgsave_status"), "err");
    let refused = format!("{:?}", ask(&mut alice, "LOCK.RELEASE printer alice"));
    assert!(refused.contains("MISCONF"), "{refused}");

    // As in redis.conf.example.
    assert_eq!(alice.call(&[b"CONFIG".as_slice(), b"SET", b"save", b""]), Value::Okay);
    assert_eq!(ask_int(&mut alice, "LOCK.RELEASE printer alice"), 1);
    assert!(matches!(ask(&mut alice, "BGREWRITEAOF"), Value::ServerError(_)));
    assert_eq!(persistence(&server, "aof_last_bgrewrite_status"), "err");
    ask_token(&mut alice, "LOCK.ACQUIRE printer alice");

    disk.end("no-fork");
    ask(&mut alice, "BGREWRITEAOF");
    until(SOON, "the append-only file is rewritten", || persistence(&server, "aof_last_bgrewrite_status") == "ok");
}
