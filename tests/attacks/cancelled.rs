//! `LOCK.CANCEL` of a request for many keys into which others have written crowds: the answer does not wait until all of
//! these have been read.

use redis::Value;
use support::{Raw, Server, until};

use crate::common::{info_number, spent};
use crate::speak::{Reply, SOON, Speak};

/// Keys of the request.
const KEYS: usize = 200;

/// Holders that others write into each of them.
const HOLDERS: usize = 2499;

/// Another client makes each of the keys, which the owner holds, a lock with many holders.
const CROWDS: &str = "for key = 1, KEYS[1] do \
     redis.call('hset', 'key:' .. key, '#limit', 5000) \
     for holder = 1, ARGV[1] do redis.call('hset', 'key:' .. key, 'holder:' .. holder, 1) end \
     end";

/// A session that was granted all keys, which others have made crowds since, and another client.
fn granted(server: &Server) -> (Raw, Raw, String) {
    let (mut client, mut session) = (server.raw(), server.raw());
    let id = session.say("LOCK.OWNER").text();
    let keys: Vec<String> = (1..=KEYS).map(|key| format!("key:{key}")).collect();
    client.say(&format!("LOCK.ACQUIRE {} before", keys[0])).token();
    let request = format!("LOCK.MACQUIRE {KEYS} {} me LEASE 600000 WAIT 0 SESSION {id}", keys.join(" "));
    assert_eq!(client.say(&request), Value::SimpleString("WAITING".into()));
    assert_eq!(client.say(&format!("LOCK.RELEASE {} before", keys[0])), Value::Int(0));
    assert_eq!(session.say("LOCK.NEXT").items().len(), 1, "it is granted");
    let (keys, holders) = (KEYS.to_string(), HOLDERS.to_string());
    assert_eq!(client.call(&[b"EVAL", CROWDS.as_bytes(), b"1", keys.as_bytes(), holders.as_bytes()]), Value::Nil);
    (client, session, id)
}

fn holds(connection: &mut Raw, key: usize) -> bool {
    connection.say(&format!("HEXISTS key:{key} me")) == Value::Int(1)
}

#[test]
fn a_cancel_reads_one_crowd_and_leaves_the_others_to_later_turns() {
    let server = Server::start();
    let (mut client, _session, id) = granted(&server);
    let named = KEYS / 2;
    // In one step with a look at what is left.
    let lines =
        ["MULTI".to_owned(), format!("LOCK.CANCEL key:{named} me SESSION {id}"), format!("HEXISTS key:{named} me")];
    client.say_all(&lines);
    let done = client.say("EXEC");
    assert_eq!(done.items(), [Value::Int(1), Value::Int(0)], "the one that was named is given back at once");
    until(SOON, "all the others are", || (1..=KEYS).all(|key| !holds(&mut client, key)));
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
    assert_eq!(client.say("HLEN key:1"), Value::Int(HOLDERS as i64 + 2), "the crowd is still there");

    // What a crowd costs to read, beside that.
    client.say("HSET key:1 holder:1 2");
    client.say("LOCK.INFO key:1 COUNT 1");
    let (cancel, look) = (spent(&mut client, "lock.cancel"), spent(&mut client, "lock.info"));
    assert!(cancel < look * KEYS as u64 / 8, "{cancel} µs, where a look at one of {KEYS} crowds takes {look} µs");
}

/// Where the owner has nothing, its crowds are not read at all.
#[test]
fn crowds_in_which_the_owner_holds_nothing_are_not_read() {
    let server = Server::start();
    let (mut client, _session, id) = granted(&server);
    let lines: Vec<String> = (1..=KEYS).map(|key| format!("HDEL key:{key} me")).collect();
    assert!(client.say_all(&lines).iter().all(|reply| *reply == Value::Int(1)));
    assert_eq!(client.say(&format!("LOCK.CANCEL key:1 me SESSION {id}")), Value::Int(0));
    client.say("LOCK.INFO key:1 COUNT 1");
    let (cancel, look) = (spent(&mut client, "lock.cancel"), spent(&mut client, "lock.info"));
    assert!(cancel < look * KEYS as u64 / 8, "{cancel} µs, where a look at one of {KEYS} crowds takes {look} µs");
}

/// What the owner is told after its `LOCK.CANCEL` stays, also where the cancelled hold has not been given back yet.
#[test]
fn what_is_acquired_anew_before_the_rest_is_given_back_stays() {
    let server = Server::start();
    let (mut client, _session, id) = granted(&server);
    let lines = [
        "MULTI".to_owned(),
        format!("LOCK.CANCEL key:{} me SESSION {id}", KEYS / 2),
        "LOCK.ACQUIRE key:97 me LIMIT 5000 LEASE 600000".to_owned(),
        "LOCK.ACQUIRE key:98 me LIMIT 5000 LEASE 600000 HOLDS 1".to_owned(),
        "LOCK.ACQUIRE key:99 me LIMIT 5000 LEASE 600000 HOLDS 3".to_owned(),
        "HMGET key:97 me".to_owned(),
    ];
    client.say_all(&lines);
    let done = client.say("EXEC");
    let [cancelled, granted @ .., held] = done.items() else { panic!("{done:?}") };
    assert_eq!(*cancelled, Value::Int(1));
    granted.iter().for_each(|token| assert!(matches!(token, Value::Int(1..)), "{token:?}"));
    assert_eq!(held.items(), [Value::BulkString(b"2".to_vec())], "the cancelled hold is still there");
    until(SOON, "all the others are given back", || (1..97).chain(100..=KEYS).all(|key| !holds(&mut client, key)));
    for (key, holds) in [(97, "1"), (98, "1"), (99, "3")] {
        assert_eq!(client.say(&format!("HGET key:{key} me")).text(), holds, "key:{key}");
    }
}
