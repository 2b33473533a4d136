//! Very long names. Requests with them are refused. If another client writes them into a hash, it is not a lock.

use redis::Value;
use support::Server;

use crate::lines::{Commands, Reply};

/// The longest key and the longest owner.
const KEY: usize = 1024;
const OWNER: usize = 512;

/// A length that the server itself accepts.
const HUGE: usize = 2 << 20;

#[test]
fn key_is_refused_when_too_long() {
    let server = Server::start();
    let mut connection = server.raw();
    let lines = [
        "LOCK.MACQUIRE 2 a # me LEASE 600000",
        "LOCK.ACQUIRE # me",
        "LOCK.RENEW # me",
        "LOCK.MRENEW 1 # me",
        "LOCK.WAITERS #",
        "LOCK.INFO #",
        "LOCK.RELEASE # me",
        "LOCK.MRELEASE 1 # me",
        "LOCK.FORCE #",
    ];
    for line in lines {
        let longest = connection.run(&line.replace('#', &"k".repeat(KEY)));
        assert!(!matches!(longest, Value::ServerError(_)), "{line}: {longest:?}");
        for length in [KEY + 1, HUGE] {
            let error = connection.run(&line.replace('#', &"k".repeat(length))).error();
            let expected = format!("ERR key must be at most {KEY} bytes long, got {length} bytes: 'kkk");
            assert!(error.starts_with(&expected) && error.len() < 300, "{line}: {error}");
        }
    }
    assert_eq!(connection.run("KEYS *").items().iter().map(Reply::text).collect::<Vec<_>>(), ["a"], "nothing else");
}

#[test]
fn error_shows_beginning_of_long_argument() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.ACQUIRE key #", "LOCK.ACQUIRE key me LEASE #", "LOCK.ACQUIRE key me #", "LOCK.MACQUIRE # key me"]
    {
        let error = connection.run(&line.replace('#', &"o".repeat(HUGE))).error();
        assert!(error.starts_with("ERR") && error.contains("ooo") && error.len() < 600, "{line}: {error}");
    }
}

/// Thousands of fields without an owner, in a mutex and in a semaphore.
#[test]
fn hash_with_too_many_other_fields_is_no_lock() {
    let server = Server::start();
    let mut connection = server.raw();
    for lock in ["me 1", "#limit 3 me 1"] {
        let marked = lock.matches('#').count();
        for (fields, is_lock) in [(1000 - marked, true), (1001 - marked, false)] {
            let others: String = (0..fields).map(|field| format!(" #{field} x")).collect();
            connection.run(&format!("HSET key {lock}{others}")).int();
            let info = connection.run("LOCK.INFO key");
            match is_lock {
                true => assert!(!matches!(info, Value::ServerError(_)), "{lock}, {fields}: {info:?}"),
                false => assert!(info.error().starts_with("WRONGTYPE"), "{lock}, {fields}: {info:?}"),
            }
            connection.run("DEL key");
        }
    }
}

/// A client with the right to write the key may write long fields, which each command would have to read.
#[test]
fn hash_with_too_long_fields_is_no_lock() {
    let server = Server::start();
    let mut connection = server.raw();
    let forms = ["# 1", "#limit 3 me 1 # 1", "#limit 3 me 1 #@# 9223372036854775807:1"];
    let owners = forms.map(|form| [(form.to_owned(), OWNER, true), (form.to_owned(), OWNER + 1, false)]);
    let marks = [("me 1 #mark #".to_owned(), 1 << 19, true), ("me 1 #mark #".to_owned(), HUGE, false)];
    for (index, (form, length, is_lock)) in owners.into_iter().flatten().chain(marks).enumerate() {
        let long = "x".repeat(length);
        let fields = form.replace("# ", &format!("{long} ")).replace("mark #", &format!("mark {long}"));
        connection.run(&format!("HSET key:{index} {fields}")).int();
        let info = connection.run(&format!("LOCK.INFO key:{index}"));
        match is_lock {
            true => assert!(!matches!(info, Value::ServerError(_)), "{form}, {length}: {info:?}"),
            false => assert!(info.error().starts_with("WRONGTYPE"), "{form}, {length}: {info:?}"),
        }
    }
}
