//! Hashes that somebody wrote by hand: what a lock makes of tokens, deadlines and expiries that it never set.

use redis::Value;
use support::{Raw, Server};

use crate::common::unix_micros;
use crate::speak::{Reply, Speak, holders, now, owners};

const HOUR: i64 = 60 * 60 * 1_000_000;
/// Tokens that no server can have given: the last ones below 2^52 and 2^53, and one a little more than an hour ahead.
fn tokens_from_nowhere() -> [i64; 3] {
    [(1 << 52) - 1, (1 << 53) - 1, unix_micros() + HOUR + HOUR / 60]
}

/// Hashes with a token in each place where one can stand.
fn forged(token: i64) -> [String; 3] {
    let end = now() + 600_000;
    [
        format!("HSET app:x me 1 #fence {token}"),
        format!("HSET app:x me 1 #fence {token} #limit 0 #@me {end}:{token}"),
        format!("HSET app:x #fence {token}"),
    ]
}

/// A new token that is the time, give or take what a busy machine takes.
#[track_caller]
fn is_of_the_clock(token: i64) {
    let ahead = token - unix_micros();
    assert!(ahead.abs() < HOUR / 60, "{token} lies {ahead} µs ahead of the clock");
}

/// Lets the module see the hash in every way there is.
fn look_at(connection: &mut Raw, key: &str) {
    for line in ["LOCK.INFO", "LOCK.WAITERS"] {
        connection.say(&format!("{line} {key}"));
    }
    for line in ["LOCK.ACQUIRE # other", "LOCK.ACQUIRE # other SHARED", "LOCK.RENEW # other", "LOCK.RELEASE # other"] {
        connection.say(&line.replace('#', key));
    }
}

#[test]
fn a_token_from_nowhere_moves_no_other_token() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in tokens_from_nowhere() {
        for forged in forged(token) {
            connection.say(&forged);
            look_at(&mut connection, "app:x");
            is_of_the_clock(connection.say("LOCK.ACQUIRE elsewhere me").token());
            assert_eq!(connection.say("LOCK.FORCE elsewhere"), Value::Int(1));
            connection.say("DEL app:x");
            is_of_the_clock(connection.say("LOCK.ACQUIRE app:x me").token());
            connection.say("DEL app:x");
        }
    }
}

#[test]
fn a_token_that_may_be_another_server_s_counts() {
    let server = Server::start();
    let mut connection = server.raw();
    let mut newest = 0;
    for (index, forged) in forged(0).iter().enumerate() {
        // Another server's clock may be ahead, by less than an hour.
        let token = unix_micros() + HOUR / 2 + HOUR / 10 * index as i64;
        connection.say(&forged.replace("#fence 0", &format!("#fence {token}")).replace(":0", &format!(":{token}")));
        look_at(&mut connection, "app:x");
        newest = connection.say("LOCK.ACQUIRE elsewhere me SHARED").token();
        assert!(newest > token, "{newest} after {token}");
        connection.say("FLUSHALL");
    }
    assert!(connection.say("LOCK.ACQUIRE elsewhere me").token() > newest);
}

#[test]
fn a_hold_with_a_token_from_nowhere_is_a_hold_until_it_is_entered_again() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in tokens_from_nowhere() {
        for (forged, limit) in forged(token).iter().zip(["", "SHARED"]) {
            connection.say(forged);
            connection.say("PEXPIRE app:x 600000");
            let info = connection.say("LOCK.INFO app:x");
            assert_eq!(info.field("fence"), Value::Int(token), "as it stands");
            assert_eq!(holders(&mut connection, "app:x")["me"].field("token"), Value::Int(token), "as it stands");
            assert!(connection.say(&format!("LOCK.RELEASE app:x me TOKEN {}", token - 1)).is_null());
            assert_eq!(connection.say(&format!("LOCK.RENEW app:x me TOKEN {token}")), Value::Int(token));
            // Who enters gets a token that grows, and keeps that one.
            let entered = connection.say(&format!("LOCK.ACQUIRE app:x me {limit}")).token();
            is_of_the_clock(entered);
            assert_eq!(connection.say(&format!("LOCK.ACQUIRE app:x me {limit}")), Value::Int(entered));
            assert_eq!(connection.say("LOCK.INFO app:x").field("fence"), Value::Int(entered));
            assert_eq!(holders(&mut connection, "app:x")["me"].field("token"), Value::Int(entered));
            assert_eq!(connection.say(&format!("LOCK.RELEASE app:x me ALL TOKEN {entered}")), Value::Int(0));

            connection.say(forged);
            assert_eq!(connection.say(&format!("LOCK.RELEASE app:x me TOKEN {token}")), Value::Int(0));
        }
    }
}

#[test]
fn the_next_grant_on_such_a_key_is_of_the_clock() {
    let server = Server::start();
    let mut connection = server.raw();
    for token in tokens_from_nowhere() {
        let [mutex, many, remains] = forged(token);
        connection.say(&many);
        connection.say("PEXPIRE app:x 600000");
        let second = connection.say("LOCK.ACQUIRE app:x you SHARED").token();
        is_of_the_clock(second);
        assert_eq!(connection.say("LOCK.INFO app:x").field("fence"), Value::Int(second), "the newest grant's");
        assert_eq!(owners(&mut connection, "app:x"), ["me", "you"]);
        connection.say("DEL app:x");

        connection.say(&remains);
        let first = connection.say("LOCK.ACQUIRE app:x you").token();
        is_of_the_clock(first);
        assert_eq!(connection.say("HGET app:x #fence").text(), first.to_string());
        connection.say("DEL app:x");

        connection.say(&mutex);
        let several = connection.say("LOCK.MACQUIRE 2 app:x app:y me").token();
        is_of_the_clock(several);
        assert_eq!(connection.say("HGET app:x #fence").text(), several.to_string());
        connection.say("FLUSHALL");
    }
}

/// Forges every token there is and takes locks before, in between and afterwards; the last token that was given.
fn attack(connection: &mut Raw) -> i64 {
    let mut last = connection.say("LOCK.ACQUIRE given me").token();
    for token in tokens_from_nowhere() {
        for (index, forged) in forged(token).iter().enumerate() {
            for (key, rest) in [("app:stays", ""), ("app:goes", "DEL app:goes")] {
                connection.say(&forged.replace("app:x", &format!("{key}{index}")));
                look_at(connection, &format!("{key}{index}"));
                if !rest.is_empty() {
                    connection.say(&format!("{rest}{index}"));
                }
                connection.say("LOCK.FORCE given");
                let next = connection.say("LOCK.ACQUIRE given me").token();
                assert!(next > last, "{next} after {last}");
                last = next;
            }
        }
    }
    last
}

/// The tokens after a restart or failover go on above `last`, whatever stands in the keyspace.
fn goes_on(connection: &mut Raw, last: i64) {
    let new = connection.say("LOCK.ACQUIRE new me").token();
    assert!(new > last, "{new} after {last}");
    for index in 0..3 {
        look_at(connection, &format!("app:stays{index}"));
    }
    let newer = connection.say("LOCK.ACQUIRE newer me").token();
    assert!(newer > new, "{newer} after {new}");
    is_of_the_clock(newer);
}

#[test]
fn tokens_go_on_after_a_restart_from_the_append_only_file() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let last = attack(&mut server.raw());
    server.kill9();
    server.restart();
    goes_on(&mut server.raw(), last);
}

#[test]
fn tokens_go_on_after_a_restart_from_an_rdb_file() {
    let mut server = Server::start();
    let last = attack(&mut server.raw());
    assert_eq!(server.raw().say("SAVE"), Value::Okay);
    server.kill9();
    server.restart();
    goes_on(&mut server.raw(), last);
}

#[test]
fn tokens_go_on_after_a_failover() {
    let [master, replica] = [Server::start(), Server::start()];
    replica.replica_of(&master);
    master.wait_replica_online();
    let last = attack(&mut master.raw());
    master.wait_for_replica(&replica);
    let mut connection = replica.raw();
    // The replica is looked at as well, while it decides nothing.
    for index in 0..3 {
        connection.say(&format!("LOCK.INFO app:stays{index}"));
    }
    drop(master);
    replica.replica_of_no_one();
    goes_on(&mut connection, last);
}
