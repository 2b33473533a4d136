//! `LOCK.CANCEL` of a request for many keys into which others have written crowds: the answer does not wait until all of
//! these have been read.

use redis::Value;
use support::{Raw, Server, until};

use crate::common::info_number;
use crate::speak::{Reply, SOON, Speak, in_one_step};

/// Keys of the request.
const KEYS: usize = 128;

/// Holders that others write into each of them.
const HOLDERS: usize = 2499;

/// Another client makes each of the keys, which the owner holds, a lock with many holders, of which the owner is one under
/// the token that it has.
const CROWDS: &str = "for key = 1, KEYS[1] do \
     local name = 'key:' .. key \
     redis.call('hset', name, '#limit', 5000, '#@me', redis.call('pexpiretime', name) .. ':' .. ARGV[2]) \
     for holder = 1, ARGV[1] do redis.call('hset', 'key:' .. key, 'holder:' .. holder, 1) end \
     end";

/// A session that was granted all keys, which others have made crowds since, and another client; the session's id and the
/// token.
fn granted(server: &Server) -> (Raw, Raw, String, i64) {
    let (mut client, mut session) = (server.raw(), server.raw());
    let id = session.say("LOCK.SESSION").field("id").text();
    let keys: Vec<String> = (1..=KEYS).map(|key| format!("key:{key}")).collect();
    client.say(&format!("LOCK.ACQUIRE {} before", keys[0])).token();
    let request = format!("LOCK.MACQUIRE {KEYS} {} me LEASE 600000 WAIT 0 SESSION {id}", keys.join(" "));
    assert_eq!(client.say(&request), Value::SimpleString("WAITING".into()));
    assert_eq!(client.say(&format!("LOCK.RELEASE {} before", keys[0])), Value::Int(0));
    let told = session.say("LOCK.EVENTS");
    let [granted] = told.items() else { panic!("{told:?}") };
    let token = granted.items()[4].token();
    let (keys, holders) = (KEYS.to_string(), HOLDERS.to_string());
    let arguments = [keys.as_bytes(), holders.as_bytes(), &token.to_string().into_bytes()];
    let [keys, holders, of_grant] = arguments;
    assert_eq!(client.call(&[b"EVAL", CROWDS.as_bytes(), b"1", keys, holders, of_grant]), Value::Nil);
    (client, session, id, token)
}

fn holds(connection: &mut Raw, key: usize) -> bool {
    connection.say(&format!("HEXISTS key:{key} me")) == Value::Int(1)
}

#[test]
fn a_cancel_reads_one_crowd_and_leaves_the_others_to_later_turns() {
    let server = Server::start();
    let (mut client, _session, id, _) = granted(&server);
    let named = KEYS / 2;
    // In one step with a look at what is left.
    let looks: Vec<String> = (1..=KEYS).map(|key| format!("HEXISTS key:{key} me")).collect();
    let (done, cancel) = in_one_step(&mut client, &format!("LOCK.CANCEL key:{named} me SESSION {id}"), &looks);
    let [cancelled, left @ ..] = &done[..] else { panic!("{done:?}") };
    assert_eq!(*cancelled, Value::Int(1));
    assert_eq!(left[named - 1], Value::Int(0), "the one that was named is given back at once");
    until(SOON, "all the others are", || (1..=KEYS).all(|key| !holds(&mut client, key)));
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
    assert_eq!(client.say("HLEN key:1"), Value::Int(HOLDERS as i64 + 2), "the crowd is still there");

    // What a crowd costs to read, beside that.
    client.say("HSET key:1 holder:1 2");
    let (_, look) = in_one_step(&mut client, "LOCK.INFO key:1 COUNT 1", &[]);
    assert!(cancel < look * KEYS as u32 / 8, "{cancel:?}, where a look at one of {KEYS} crowds takes {look:?}");
}

/// Where the owner has nothing, its crowds are not read at all.
#[test]
fn crowds_in_which_the_owner_holds_nothing_are_not_read() {
    let server = Server::start();
    let (mut client, _session, id, _) = granted(&server);
    let lines: Vec<String> = (1..=KEYS).map(|key| format!("HDEL key:{key} me")).collect();
    assert!(client.say_all(&lines).iter().all(|reply| *reply == Value::Int(1)));
    until(SOON, "their loss is seen", || info_number(&server, "holdfast", "holdfast_bound_holds") == 0);
    let (done, cancel) = in_one_step(&mut client, &format!("LOCK.CANCEL key:1 me SESSION {id}"), &[]);
    assert_eq!(done, [Value::Int(0)]);
    let (_, look) = in_one_step(&mut client, "LOCK.INFO key:1 COUNT 1", &[]);
    assert!(cancel < look * KEYS as u32 / 8, "{cancel:?}, where a look at one of {KEYS} crowds takes {look:?}");
}

/// What the owner is told after its `LOCK.CANCEL` stays, also where the cancelled hold has not been given back yet: that is
/// over, and what is granted now is a new hold.
#[test]
fn what_is_acquired_anew_before_the_rest_is_given_back_stays() {
    let server = Server::start();
    let (mut client, _session, id, cancelled_token) = granted(&server);
    let lines = [
        "MULTI".to_owned(),
        format!("LOCK.CANCEL key:{} me SESSION {id}", KEYS / 2),
        "LOCK.ACQUIRE key:97 me LIMIT 5000 LEASE 600000".to_owned(),
        "LOCK.ACQUIRE key:98 me LIMIT 5000 LEASE 600000 HOLDS 1".to_owned(),
        "LOCK.ACQUIRE key:99 me LIMIT 5000 LEASE 600000 HOLDS 3".to_owned(),
        "HGET key:97 me".to_owned(),
    ];
    client.say_all(&lines);
    let done = client.say("EXEC");
    let [cancelled, granted @ .., held] = done.items() else { panic!("{done:?}") };
    assert_eq!(*cancelled, Value::Int(1));
    granted.iter().for_each(|token| assert!(token.token() > cancelled_token, "{token:?}"));
    assert_eq!(held.text(), "1", "the cancelled hold does not count any more");
    until(SOON, "all the others are given back", || (1..97).chain(100..=KEYS).all(|key| !holds(&mut client, key)));
    for (key, holds) in [(97, "1"), (98, "1"), (99, "3")] {
        assert_eq!(client.say(&format!("HGET key:{key} me")).text(), holds, "key:{key}");
    }
}
