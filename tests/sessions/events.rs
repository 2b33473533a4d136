//! The encoding of events.

use support::{Raw, Server};

use super::session::Session;
use crate::common::{Protocol, words};
use crate::waiter::Commands;

/// The bytes of an event. `_` stands for null.
fn bytes_of(protocol: Protocol, elements: &[&str]) -> Vec<u8> {
    let mut bytes = b"*1\r\n*6\r\n".to_vec();
    for element in elements {
        match element.as_bytes() {
            b"_" => bytes.extend_from_slice(protocol.null()),
            [b':', ..] => bytes.extend_from_slice(format!("{element}\r\n").as_bytes()),
            [b'[', ..] => {
                let keys: Vec<&str> = element.trim_matches(['[', ']']).split_whitespace().collect();
                bytes.extend_from_slice(format!("*{}\r\n", keys.len()).as_bytes());
                keys.iter().for_each(|key| bytes.extend_from_slice(format!("${}\r\n{key}\r\n", key.len()).as_bytes()));
            }
            text => bytes.extend_from_slice(format!("${}\r\n{element}\r\n", text.len()).as_bytes()),
        }
    }
    bytes
}

/// Checks the elements of the event after `cause`, in both protocols. `cause` may return a token for `?`. `ms` stands for the
/// remaining default lease.
fn assert_event(cause: impl Fn(&mut Raw, &Session) -> i64, elements: &[&str]) {
    for protocol in Protocol::BOTH {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::on(protocol.connect(&server));
        let token = format!(":{}", cause(&mut client, &session));
        let received = session.raw.call_for_bytes(&words("LOCK.EVENTS WAIT 20000"));
        let left = String::from_utf8_lossy(&received).lines().last().unwrap_or_default().to_owned();
        let element = |&it: &&str| match it {
            "?" => token.clone(),
            "ms" => {
                left.parse::<u64>().ok().filter(|left| (20_000..=30_000).contains(left)).expect("a time").to_string()
            }
            it => it.into(),
        };
        let elements: Vec<String> = elements.iter().map(element).collect();
        let elements: Vec<&str> = elements.iter().map(String::as_str).collect();
        assert_eq!(received.escape_ascii().to_string(), bytes_of(protocol, &elements).escape_ascii().to_string());
    }
}

fn token_of(client: &mut Raw, key: &str) -> i64 {
    let token = client.run_ok(&format!("HGET {key} #fence"));
    crate::common::text(&token).parse().expect("a token")
}

#[test]
fn granted_event_has_documented_fields() {
    let cause = |client: &mut Raw, session: &Session| {
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(client, "LOCK.ACQUIRE key owner WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        token_of(client, "key")
    };
    assert_event(cause, &["granted", ":0", "[key]", "owner", "?", "ms"]);
}

#[test]
fn granted_event_of_several_keys_names_database() {
    let cause = |client: &mut Raw, session: &Session| {
        client.run_ok("SELECT 7");
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(client, "LOCK.MACQUIRE 2 other key owner WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        token_of(client, "key")
    };
    assert_event(cause, &["granted", ":7", "[other key]", "owner", "?", "ms"]);
}

#[test]
fn contended_event_has_documented_fields() {
    let cause = |client: &mut Raw, session: &Session| {
        let token = session.get_token(client, "LOCK.ACQUIRE key owner CONTENTION");
        client.run_ok("LOCK.ACQUIRE key other");
        token
    };
    assert_event(cause, &["contended", ":0", "[key]", "owner", "?", "_"]);
}

#[test]
fn timeout_event_has_documented_fields() {
    let cause = |client: &mut Raw, session: &Session| {
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(client, "LOCK.ACQUIRE key owner WAIT 10");
        0
    };
    assert_event(cause, &["timeout", ":0", "[key]", "owner", "_", "_"]);
}

#[test]
fn refused_event_has_documented_fields() {
    let cause = |client: &mut Raw, session: &Session| {
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(client, "LOCK.MACQUIRE 2 key other owner WAIT 0");
        client.run_ok("SET key text");
        0
    };
    let detail = "WRONGTYPE Operation against a key holding the wrong kind of value";
    assert_event(cause, &["refused", ":0", "[key other]", "owner", "_", detail]);
}

fn lost(how: &str, lease: i64, why: &str) {
    let cause = |client: &mut Raw, session: &Session| {
        let token = session.get_token(client, &format!("LOCK.MACQUIRE 2 key other owner EPHEMERAL LEASE {lease}"));
        session.request(client, "LOCK.RENEW other owner LEASE 100000");
        client.run_ok(how);
        token
    };
    assert_event(cause, &["lost", ":0", "[key]", "owner", "?", why]);
}

#[test]
fn lost_expired_event_has_documented_fields() {
    lost("PING", 2000, "expired");
}

#[test]
fn lost_forced_event_has_documented_fields() {
    lost("LOCK.FORCE key", 100_000, "forced");
}

#[test]
fn lost_changed_event_has_documented_fields() {
    lost("DEL key", 100_000, "changed");
}

#[test]
fn unbound_event_has_documented_fields() {
    let cause = |client: &mut Raw, session: &Session| {
        let token = session.get_token(client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.run_ok("REPLICAOF 127.0.0.1 1");
        token
    };
    assert_event(cause, &["unbound", ":0", "[key]", "owner", "?", "replica"]);
}
