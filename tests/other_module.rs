//! Another module may follow every change of a key by commands of ours, from within the notification: while we write,
//! while we look for a cycle of waits and a key that we read turns out to have expired, while we serve.

use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, process};

use redis::Value;
use support::{Server, in_containers, skip, until, workspace};

use crate::speak::{Reply, SOON, Speak};
use crate::waiter::Tell;

/// A server with both modules, and the folder of the other one.
struct Meddled(Server, PathBuf);

impl Meddled {
    fn start(purpose: &str) -> Self {
        let folder = env::temp_dir().join(format!("holdfast-other_module-{purpose}-{}", process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let library = folder.join("other_module.so");
        let source = workspace().join("tests/other_module/module.c");
        // Whatever links Rust programs is here.
        let done = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).status();
        assert!(done.expect("a compiler").success());
        let library = library.to_str().expect("a path in UTF-8").to_owned();
        Self(Server::builder().arg("loadmodule", &library).start(), folder)
    }
}

impl Drop for Meddled {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.1);
    }
}

/// One of the locks that a request reads has expired, and nobody has seen it yet: the server says so in the middle.
#[test]
fn other_module_writes_while_several_locks_are_read() {
    if in_containers() {
        return skip("it is compiled here");
    }
    let Meddled(ref server, _) = Meddled::start("reading");
    let mut client = server.raw();
    // Nobody but who looks at a key finds out that it has expired.
    client.order("DEBUG SET-ACTIVE-EXPIRE 0");
    let session = client.say("LOCK.SESSION").field("id").text();
    client.order("LOCK.ACQUIRE bobs bob LEASE 600000");
    client.order("LOCK.ACQUIRE alices alice LEASE 600000");
    assert_eq!(client.say(&format!("LOCK.ACQUIRE alices bob WAIT 0 SESSION {session}")).text(), "WAITING");
    for round in 0..20 {
        let short = format!("short:{round}");
        // A token is the time in microseconds.
        let token = client.order(&format!("LOCK.ACQUIRE {short} carol LEASE 1")).int();
        until(SOON, "its lease is over", || unix_micros() > token + 2_000);
        let asked = client.say(&format!("LOCK.MACQUIRE 2 {short} bobs alice WAIT 1000 SESSION {session}"));
        assert!(asked.error().starts_with("DEADLOCK"), "{asked:?}");
    }
}

fn unix_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    i64::try_from(since.as_micros()).expect("for a long time")
}

/// All kinds of work, with the other module at each change.
#[test]
fn other_module_writes_at_every_change_of_key() {
    if in_containers() {
        return skip("it is compiled here");
    }
    let Meddled(ref server, _) = Meddled::start("change");
    let mut client = server.raw();
    let session = client.say("LOCK.SESSION").field("id").text();
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
        client.say(&line.replace("{}", &session));
    }
    // No wait is forgotten, also if another client took the lock in between.
    until(SOON, "nobody waits", || server.info("holdfast", "holdfast_waiters").as_deref() == Some("0"));
    assert_eq!(client.say("DBSIZE"), Value::Int(0));
    assert_eq!(client.say("LOCK.INFO k"), Value::Nil);
}
