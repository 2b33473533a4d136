//! Another module may react to every change of a key within the notification: while this module writes, searches for
//! cycles, reads a key that turns out to have expired, or serves a queue.

use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, process};

use redis::Value;
use support::{Server, in_containers, skip, until, workspace};

use crate::lines::{Commands, Reply, SOON, arrives};

/// A server with both modules, and the directory of the other one.
struct TwoModules(Server, PathBuf);

impl TwoModules {
    fn start(purpose: &str) -> Self {
        let folder = env::temp_dir().join(format!("holdfast-other_module-{purpose}-{}", process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let library = folder.join("other_module.so");
        let source = workspace().join("tests/other_module/module.c");
        // The linker of the Rust toolchain is installed here.
        let done =
            Command::new("cc").args(["-shared", "-fPIC", "-pthread", "-O1", "-o"]).args([&library, &source]).status();
        assert!(done.expect("a compiler").success());
        let library = library.to_str().expect("a path in UTF-8").to_owned();
        Self(Server::builder().arg("loadmodule", &library).start(), folder)
    }
}

impl Drop for TwoModules {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.1);
    }
}

/// One of the request's locks has expired unnoticed. The server notifies the modules of the expiry during the request.
#[test]
fn other_module_writes_while_several_locks_are_read() {
    if in_containers() {
        return skip("the other module is compiled on this machine");
    }
    let TwoModules(ref server, _) = TwoModules::start("reading");
    let mut client = server.raw();
    // Only a command that reads a key finds it expired.
    client.run_ok("DEBUG SET-ACTIVE-EXPIRE 0");
    let session = client.run("LOCK.SESSION").field("id").text();
    client.run_ok("LOCK.ACQUIRE bobs bob LEASE 600000");
    client.run_ok("LOCK.ACQUIRE alices alice LEASE 600000");
    assert_eq!(client.run(&format!("LOCK.ACQUIRE alices bob WAIT 0 SESSION {session}")).text(), "WAITING");
    for round in 0..20 {
        let short = format!("short:{round}");
        // A token is the time in microseconds.
        let token = client.run_ok(&format!("LOCK.ACQUIRE {short} carol LEASE 1")).int();
        until(SOON, "the lease has expired", || unix_micros() > token + 2_000);
        let asked = client.run(&format!("LOCK.MACQUIRE 2 {short} bobs alice WAIT 1000 SESSION {session}"));
        assert!(asked.error().starts_with("DEADLOCK"), "{asked:?}");
    }
}

fn unix_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    i64::try_from(since.as_micros()).expect("for a long time")
}

/// All kinds of commands, with the other module writing at each change.
#[test]
fn other_module_writes_at_every_change_of_key() {
    if in_containers() {
        return skip("the other module is compiled on this machine");
    }
    let TwoModules(ref server, _) = TwoModules::start("change");
    let mut client = server.raw();
    let session = client.run("LOCK.SESSION").field("id").text();
    for line in [
        "LOCK.ACQUIRE k alice",
        "LOCK.ACQUIRE k alice",
        "LOCK.ACQUIRE r x SHARED",
        "LOCK.ACQUIRE r y SHARED LEASE 20",
        "LOCK.ACQUIRE s x LIMIT 3 WATCHDOG",
        "LOCK.MACQUIRE 2 a b alice",
        "LOCK.ACQUIRE k bob WAIT 0 SESSION {}",
        "LOCK.MACQUIRE 2 a k carol WAIT 0 SESSION {}",
        "LOCK.ACQUIRE r w WAIT 0 SESSION {}",
        "LOCK.RENEW k alice LEASE 50000 WATCHDOG SESSION {}",
        "LOCK.RELEASE k alice ALL",
        "DEL r",
        "LOCK.FORCE k",
        "SET s x",
        "PEXPIRE a 1",
        "HSET b #fence 7",
        "LOCK.MRELEASE 2 a k carol ALL",
        "RENAME b c",
        "FLUSHALL",
    ] {
        client.run(&line.replace("{}", &session));
    }
    // No wait is forgotten, even if another client acquires the lock in between.
    until(SOON, "no request waits", || server.info("holdfast", "holdfast_waiters").as_deref() == Some("0"));
    assert_eq!(client.run("DBSIZE"), Value::Int(0));
    assert_eq!(client.run("LOCK.INFO k"), Value::Nil);
}

/// The other module deletes `another key` when it is notified of a release.
#[test]
fn other_module_deletes_another_lock() {
    if in_containers() {
        return skip("the other module is compiled on this machine");
    }
    let TwoModules(ref server, _) = TwoModules::start("another");
    let (mut session, mut waiting) = (server.raw(), server.raw());
    session.run_ok("LOCK.SESSION");
    let (another, [acquire, wait]) = (b"another key".as_slice(), [b"LOCK.ACQUIRE".as_slice(), b"WAIT".as_slice()]);
    let token = session.call(&[acquire, another, b"alice", b"LEASE", b"600000"]).token();
    session.get_token("LOCK.ACQUIRE k alice");
    waiting.send(&[acquire, another, b"bob", wait, b"0"]).expect("request sent");
    until(SOON, "bob waits", || server.info("holdfast", "holdfast_waiters").as_deref() == Some("1"));
    assert_eq!(session.run("LOCK.RELEASE k alice"), Value::Int(1));
    arrives(&mut waiting).token();
    let events = session.run("LOCK.EVENTS WAIT 0");
    let [lost] = events.items() else { panic!("{events:?}") };
    assert_eq!(
        (lost.items()[0].text(), lost.items()[4].int(), lost.items()[5].text()),
        ("lost".into(), token, "changed".into())
    );
}

/// The module's state belongs to the server's main thread.
#[test]
fn call_from_thread_of_other_module_is_refused() {
    if in_containers() {
        return skip("the other module is compiled on this machine");
    }
    let TwoModules(ref server, _) = TwoModules::start("thread");
    let mut client = server.raw();
    client.call(&[b"SET".as_slice(), b"another thread", b"1"]);
    until(SOON, "the thread has got its reply", || client.run("EXISTS error") == Value::Int(1));
    let error = client.run("GET error").text();
    assert_eq!(error, "ERR commands of this module can be called on the server's main thread only");
    assert_eq!(client.run("EXISTS k"), Value::Int(0));
}
