//! Names as long as a server takes them: those of requests have limits, and what others write is no lock then.

use redis::Value;
use support::Server;

use crate::speak::{Reply, Speak};

/// The longest key and the longest owner.
const KEY: usize = 1024;
const OWNER: usize = 512;

/// What the server takes without a word.
const HUGE: usize = 10 << 20;

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
        let longest = connection.say(&line.replace('#', &"k".repeat(KEY)));
        assert!(!matches!(longest, Value::ServerError(_)), "{line}: {longest:?}");
        for length in [KEY + 1, HUGE] {
            let error = connection.say(&line.replace('#', &"k".repeat(length))).error();
            let told = format!("ERR key must be at most {KEY} bytes long, got {length} bytes: 'kkk");
            assert!(error.starts_with(&told) && error.len() < 300, "{line}: {error}");
        }
    }
    assert_eq!(connection.say("KEYS *").items().iter().map(Reply::text).collect::<Vec<_>>(), ["a"], "nothing else");
}

#[test]
fn error_shows_beginning_of_long_argument() {
    let server = Server::start();
    let mut connection = server.raw();
    for line in ["LOCK.ACQUIRE key #", "LOCK.ACQUIRE key me LEASE #", "LOCK.ACQUIRE key me #", "LOCK.MACQUIRE # key me"]
    {
        let error = connection.say(&line.replace('#', &"o".repeat(HUGE))).error();
        assert!(error.starts_with("ERR") && error.contains("ooo") && error.len() < 600, "{line}: {error}");
    }
}

/// So many fields that nobody holds a lock by, on a lock of one and on a lock of several.
#[test]
fn hash_with_too_many_other_fields_is_no_lock() {
    let server = Server::start();
    let mut connection = server.raw();
    for lock in ["me 1", "#limit 3 me 1"] {
        let marked = lock.matches('#').count();
        for (fields, is_lock) in [(1000 - marked, true), (1001 - marked, false)] {
            let others: String = (0..fields).map(|field| format!(" #{field} x")).collect();
            connection.say(&format!("HSET key {lock}{others}")).int();
            let info = connection.say("LOCK.INFO key");
            match is_lock {
                true => assert!(!matches!(info, Value::ServerError(_)), "{lock}, {fields}: {info:?}"),
                false => assert!(info.error().starts_with("WRONGTYPE"), "{lock}, {fields}: {info:?}"),
            }
            connection.say("DEL key");
        }
    }
}

/// A client that may write the key may write anything into it; each command would have to read all of that.
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
        connection.say(&format!("HSET key:{index} {fields}")).int();
        let info = connection.say(&format!("LOCK.INFO key:{index}"));
        match is_lock {
            true => assert!(!matches!(info, Value::ServerError(_)), "{form}, {length}: {info:?}"),
            false => assert!(info.error().starts_with("WRONGTYPE"), "{form}, {length}: {info:?}"),
        }
    }
}
