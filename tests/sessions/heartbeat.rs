//! `LOCK.EVENTS … HEARTBEAT`: the server sends heartbeats, as often as the session's holds need them.

use std::time::Duration;

use redis::Value;
use support::{NotBefore, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, events};
use crate::common::{Protocol, array, error, info_number, text, unix_micros};
use crate::waiter::{Commands, SOON, blocked_clients, is_blocked};

/// The longest interval, which the server uses if every lease is this long or longer.
const LONG_LEASE: &str = "80000";
const LONG_INTERVAL: i64 = 10_000;
/// A reply within this time did not wait for the longest interval.
const BEFORE_LONG_INTERVAL: Duration = Duration::from_secs(8);

/// A server whose sessions get heartbeats rarely, unless a hold needs them.
fn server() -> Server {
    let server = Server::start();
    server.raw().run_ok(&format!("CONFIG SET holdfast.default-lease {LONG_LEASE}"));
    server
}

/// The contents of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heartbeat {
    /// The time until the next one, in ms.
    next: i64,
    /// The default lease.
    default: i64,
    /// The least remaining share of all renewed leases, in thousandths.
    sure: i64,
    /// Whether the server takes writes.
    writes: i64,
}

/// The events in a reply, and the heartbeat at its end.
#[track_caller]
fn parse_reply(reply: &Value) -> (Vec<Event>, Heartbeat) {
    let Some((last, others)) = array(reply).split_last() else { panic!("nothing: {reply:?}") };
    let [kind, db, keys, owner, token, detail] = array(last) else { panic!("not an event: {last:?}") };
    assert_eq!((text(kind), db, array(keys)), ("heartbeat".into(), &Value::Int(0), &[][..]));
    assert_eq!([owner, token], [&Value::Nil; 2]);
    let numbers: Vec<i64> = text(detail).split(' ').map(|number| number.parse().expect("a number")).collect();
    let [next, default, sure, writes] = *numbers else { panic!("not four numbers: {detail:?}") };
    (events(&Value::Array(others.to_vec())), Heartbeat { next, default, sure, writes })
}

/// The heartbeat in a reply that has nothing else.
#[track_caller]
fn parse_heartbeat(reply: &Value) -> Heartbeat {
    let (events, heartbeat) = parse_reply(reply);
    assert_eq!(events, [], "{reply:?}");
    heartbeat
}

/// The heartbeat's interval and default lease.
#[track_caller]
fn interval_and_default(reply: &Value) -> (i64, i64) {
    let Heartbeat { next, default, .. } = parse_heartbeat(reply);
    (next, default)
}

/// The interval that the session would get now.
#[track_caller]
fn interval(session: &mut Session) -> i64 {
    interval_and_default(&session.raw.run("LOCK.EVENTS HEARTBEAT")).0
}

/// Sends `LOCK.EVENTS`, and waits until the server has blocked the session.
#[track_caller]
fn listen(session: &mut Session, server: &Server) {
    session.raw.send_lines(&["LOCK.EVENTS WAIT 0 HEARTBEAT"]);
    let (mut observer, client) = (server.raw(), session.client);
    until(SOON, "the session is blocked", || is_blocked(&mut observer, client));
}

/// The reply to the blocked session, which comes before the longest interval has passed.
#[track_caller]
fn read_reply(session: &mut Session) -> Value {
    session.raw.read_timeout(BEFORE_LONG_INTERVAL).expect("the connection is open").expect("a reply")
}

#[test]
fn heartbeat_comes_immediately_without_wait() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        raw.run_ok("LOCK.SESSION");
        let null = String::from_utf8_lossy(protocol.null()).into_owned();
        let expected = format!("*1\r\n*6\r\n$9\r\nheartbeat\r\n:0\r\n*0\r\n{null}{null}$14\r\n3750 30000 0 1\r\n");
        assert_eq!(raw.call_for_bytes(&[b"LOCK.EVENTS", b"HEARTBEAT"]), expected.as_bytes());
        assert_eq!(raw.call_for_bytes(&[b"LOCK.EVENTS", b"COUNT", b"1", b"heartbeat"]), expected.as_bytes());
    }
}

#[test]
fn heartbeat_names_default_lease_and_an_eighth_of_it() {
    let server = Server::start();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for (name, value, expected) in [
        ("default-lease", 8000, (1000, 8000)),
        ("default-lease", 1, (10, 1)),
        ("default-lease", 80_000, (10_000, 80_000)),
        ("default-lease", 3_600_000, (10_000, 3_600_000)),
        // An interval is never longer than the longest.
        ("max-lease", 16_000, (2000, 16_000)),
    ] {
        client.run_ok(&format!("CONFIG SET holdfast.{name} {value}"));
        assert_eq!(interval_and_default(&session.raw.run("LOCK.EVENTS HEARTBEAT")), expected, "{name} {value}");
    }
}

#[test]
fn shortest_renewed_lease_sets_heartbeat_interval() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for (line, expected) in [
        // These holds are not renewed.
        ("LOCK.ACQUIRE fixed owner LEASE 100000", LONG_INTERVAL),
        ("LOCK.ACQUIRE ephemeral owner LEASE 100000 EPHEMERAL", LONG_INTERVAL),
        ("LOCK.RENEW ephemeral owner LEASE 40000", LONG_INTERVAL),
        ("LOCK.ACQUIRE a owner WATCHDOG LEASE 64000", 8000),
        ("LOCK.ACQUIRE b owner WATCHDOG LEASE 48000", 6000),
        ("LOCK.ACQUIRE c owner WATCHDOG LEASE 56000", 6000),
        // The lease of one renewal by the client is not the watchdog's.
        ("LOCK.RENEW a owner LEASE 40000", 6000),
        ("LOCK.RENEW a owner LEASE 40000 WATCHDOG", 5000),
        ("LOCK.MACQUIRE 2 d e owner WATCHDOG LEASE 32000", 4000),
        ("LOCK.RENEW d owner LEASE 64000 WATCHDOG", 4000),
    ] {
        session.get_token(&mut client, line);
        assert_eq!(interval(&mut session), expected, "{line}");
    }
    for (line, expected) in [
        ("LOCK.RELEASE e owner", 5000),
        ("LOCK.RELEASE b owner", 5000),
        ("LOCK.RELEASE a owner", 7000),
        ("LOCK.MRELEASE 2 c d owner", LONG_INTERVAL),
    ] {
        client.run_ok(line);
        assert_eq!(interval(&mut session), expected, "{line}");
    }
    // A hold of another session does not count.
    let other = Session::open(&server);
    other.get_token(&mut client, "LOCK.ACQUIRE f owner WATCHDOG LEASE 800");
    assert_eq!(interval(&mut session), LONG_INTERVAL);
    // A lost hold does not count.
    session.get_token(&mut client, "LOCK.ACQUIRE g owner WATCHDOG LEASE 64000");
    assert_eq!(interval(&mut session), 8000);
    client.run_ok("LOCK.FORCE g");
    assert_eq!(session.event().kind, "lost");
    assert_eq!(interval(&mut session), LONG_INTERVAL);
}

#[test]
fn heartbeat_comes_at_its_interval() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 4000");
    assert_eq!(interval(&mut session), 500);
    for line in
        ["LOCK.EVENTS WAIT 0 HEARTBEAT", "LOCK.EVENTS WAIT 100000 HEARTBEAT", "LOCK.EVENTS HEARTBEAT COUNT 5 WAIT 0"]
    {
        let due = NotBefore::millis(499);
        session.raw.send_lines(&[line]);
        assert_eq!(interval_and_default(&read_reply(&mut session)), (500, 80_000), "{line}");
        due.is_over(line);
    }
}

#[test]
fn heartbeat_comes_when_wait_is_over() {
    let server = server();
    let mut session = Session::open(&server);
    let due = NotBefore::millis(119);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 120 HEARTBEAT"]);
    assert_eq!(interval_and_default(&read_reply(&mut session)).0, LONG_INTERVAL);
    due.is_over("the end of the wait");
}

#[test]
fn heartbeat_follows_events() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for line in ["LOCK.EVENTS HEARTBEAT", "LOCK.EVENTS WAIT 0 HEARTBEAT"] {
        let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.run_ok("DEL key");
        session.raw.send_lines(&[line]);
        assert_eq!(parse_reply(&read_reply(&mut session)).0, [Event::lost("key", "owner", token, "changed")], "{line}");
        interval(&mut session);
    }
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    listen(&mut session, &server);
    client.run_ok("DEL key");
    assert_eq!(parse_reply(&read_reply(&mut session)).0, [Event::lost("key", "owner", token, "changed")]);
    // COUNT does not limit it, and it has the same contents as a heartbeat without events.
    for number in 0..3 {
        session.get_token(&mut client, &format!("LOCK.ACQUIRE key-{number} owner EPHEMERAL"));
    }
    session.get_token(&mut client, "LOCK.ACQUIRE watched owner WATCHDOG LEASE 8000");
    client.run_ok("DEL key-0 key-1 key-2");
    let (two, beside) = parse_reply(&session.raw.run("LOCK.EVENTS COUNT 2 HEARTBEAT"));
    let (one, _) = parse_reply(&session.raw.run("LOCK.EVENTS WAIT 0 COUNT 1 HEARTBEAT"));
    assert_eq!((two.len(), one.len()), (2, 1));
    assert_eq!((beside.next, beside.default, beside.writes), (1000, 80_000, 1));
}

/// The remaining share of the renewed leases, in thousandths: the smallest of all holds.
#[test]
fn sure_is_the_least_remaining_share_of_leases() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let sure = |session: &mut Session| parse_heartbeat(&session.raw.run("LOCK.EVENTS HEARTBEAT")).sure;
    for line in ["LOCK.ACQUIRE fixed owner LEASE 20000", "LOCK.ACQUIRE ephemeral owner LEASE 20000 EPHEMERAL"] {
        session.get_token(&mut client, line);
    }
    let over = crate::common::deadline(&mut client, b"ephemeral") - 19_900;
    until(SOON, "a two-hundredth of their leases has passed", || unix_micros() / 1000 > over);
    assert_eq!(sure(&mut session), 0, "nothing is renewed");
    client.run_ok("LOCK.RELEASE fixed owner");
    client.run_ok("LOCK.RELEASE ephemeral owner");
    session.get_token(&mut client, "LOCK.ACQUIRE long owner WATCHDOG LEASE 3600000");
    session.get_token(&mut client, "LOCK.ACQUIRE longer owner WATCHDOG LEASE 7200000");
    assert!((990..=1000).contains(&sure(&mut session)));
    // A lease that the owner shortens stays short until the next renewal: the remaining share is a third of it later.
    session.get_token(&mut client, "LOCK.RENEW long owner LEASE 1800000");
    assert!((490..=500).contains(&sure(&mut session)));
    session.get_token(&mut client, "LOCK.RENEW longer owner LEASE 720000");
    assert!((90..=100).contains(&sure(&mut session)));
    client.run_ok("LOCK.RELEASE longer owner");
    assert!((490..=500).contains(&sure(&mut session)));
    // The same if another client shortens it, once the module has read the key.
    client.run_ok("PEXPIRE long 900000");
    until(SOON, "the module has read the key", || (240..=250).contains(&sure(&mut session)));
    // The share is that of the request's arrival, not of the reply.
    session.get_token(&mut client, "LOCK.ACQUIRE short owner WATCHDOG LEASE 2000");
    client.run_ok("LOCK.RELEASE long owner");
    let begin = unix_micros();
    let least = parse_heartbeat(&session.raw.run("LOCK.EVENTS WAIT 0 HEARTBEAT")).sure;
    let deadline = crate::common::deadline(&mut client, b"short");
    assert!(begin / 1000 + 2000 * least / 1000 <= deadline, "{least}");
}

/// Another client releases the hold between two requests. This causes no event.
#[test]
fn sure_is_zero_after_release_of_only_watched_hold() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let sure = |session: &mut Session| parse_heartbeat(&session.raw.run("LOCK.EVENTS HEARTBEAT")).sure;
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 3600000");
    assert!(sure(&mut session) >= 990);
    client.run_ok("LOCK.RELEASE key owner");
    assert_eq!(sure(&mut session), 0);
}

/// While the server refuses writes, it renews nothing.
#[test]
fn sure_decreases_while_writes_are_refused() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let writes = |session: &mut Session| parse_heartbeat(&session.raw.run("LOCK.EVENTS HEARTBEAT")).writes;
    assert_eq!(writes(&mut session), 1);
    client.run_ok("CONFIG SET min-replicas-to-write 1");
    assert_eq!(writes(&mut session), 0);
    client.run_ok("CONFIG SET min-replicas-to-write 0");
    assert_eq!(writes(&mut session), 1);
    client.run_ok("CLIENT PAUSE 600000 WRITE");
    assert_eq!(writes(&mut session), 0);
    client.run_ok("CLIENT UNPAUSE");
    client.run_ok("REPLICAOF 127.0.0.1 1");
    assert_eq!(writes(&mut session), 0);
    client.run_ok("REPLICAOF NO ONE");
    assert_eq!(writes(&mut session), 1);
}

/// The lease counts from the request that reads the event, so it is also known for a queued grant.
#[test]
fn granted_event_names_remaining_lease() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let lasts = |reply: &Value| text(&array(&array(reply)[0])[5]).parse::<i64>().expect("a number");
    for (terms, longest) in [("LEASE 60000", 60_000), ("", 80_000), ("LEASE 40000 WATCHDOG", 40_000)] {
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, &format!("LOCK.ACQUIRE key owner WAIT 0 {terms}"));
        client.run_ok("LOCK.RELEASE key holder");
        let asked = unix_micros() / 1000;
        let left = lasts(&session.raw.run("LOCK.EVENTS"));
        let deadline = crate::common::deadline(&mut client, b"key");
        assert!(left > longest - 10_000 && asked + left <= deadline, "{terms}: {left}");
        client.run_ok("DEL key");
        session.raw.run("LOCK.EVENTS");
    }
    // A grant during the blocked request.
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.MACQUIRE 2 key other owner WAIT 0 LEASE 60000");
    listen(&mut session, &server);
    client.run_ok("LOCK.RELEASE key holder");
    let reply = read_reply(&mut session);
    assert!((60_000..70_000).contains(&lasts(&reply)), "{reply:?}");
    assert_eq!(array(&reply).len(), 2);
}

/// A request that gives a session a shorter lease to renew causes a heartbeat immediately.
#[test]
fn shorter_lease_causes_immediate_heartbeat() {
    let server = server();
    let mut client = server.raw();
    let ways: [(&[&str], &str); 6] = [
        (&[], "LOCK.ACQUIRE key owner WATCHDOG LEASE 8000"),
        (&[], "LOCK.MACQUIRE 2 key other owner WATCHDOG LEASE 8000"),
        (&["LOCK.ACQUIRE key owner LEASE 60000"], "LOCK.RENEW key owner WATCHDOG LEASE 8000"),
        (&["LOCK.ACQUIRE key owner WATCHDOG LEASE 80000"], "LOCK.ACQUIRE key owner LEASE 8000 WATCHDOG"),
        (&["LOCK.ACQUIRE key owner WATCHDOG LEASE 80000"], "LOCK.RENEW key owner LEASE 8000 EPHEMERAL"),
        (&["LOCK.ACQUIRE key owner WATCHDOG LEASE 80000"], "LOCK.MRENEW 1 key owner LEASE 8000 WATCHDOG"),
    ];
    for (before, line) in ways {
        let mut session = Session::open(&server);
        for line in before {
            session.get_token(&mut client, line);
        }
        listen(&mut session, &server);
        client.run_ok(&session.with_session(line));
        assert_eq!(interval_and_default(&read_reply(&mut session)), (1000, 80_000), "{line}");
        client.run_ok("DEL key other");
    }
}

/// So does a queued grant, with its event.
#[test]
fn shorter_lease_of_queued_grant_causes_reply() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 4000 WAIT 0");
    listen(&mut session, &server);
    client.run_ok("LOCK.RELEASE key holder");
    parse_reply(&read_reply(&mut session)).0[0].token_of(&["key"], "owner");
    // From then on, the interval is that of this lease.
    listen_once(&mut session);
    assert_eq!(interval_and_default(&read_reply(&mut session)).0, 500);
}

fn listen_once(session: &mut Session) {
    session.raw.send_lines(&["LOCK.EVENTS WAIT 0 HEARTBEAT"]);
}

#[test]
fn other_requests_cause_no_heartbeat() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    let other = Session::open(&server);
    listen(&mut session, &server);
    for line in [
        "LOCK.ACQUIRE long owner WATCHDOG LEASE 80000",
        "LOCK.ACQUIRE longer owner WATCHDOG LEASE 100000",
        "LOCK.ACQUIRE fixed owner LEASE 8000",
        "LOCK.ACQUIRE ephemeral owner LEASE 8000 EPHEMERAL",
    ] {
        session.get_token(&mut client, line);
    }
    other.get_token(&mut client, "LOCK.ACQUIRE of-another owner WATCHDOG LEASE 8000");
    client.run_ok("LOCK.RELEASE long owner");
    client.run_ok("CONFIG SET holdfast.default-lease 8000");
    assert!(!eventually(A_WHILE, || !session.raw.pending()));
    // The session still blocks for other reasons.
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 4000");
    assert_eq!(interval_and_default(&read_reply(&mut session)), (500, 8000));
}

/// A promised short interval counts for the next request, although its hold has ended.
#[test]
fn promised_interval_counts_for_next_request() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 4000");
    assert_eq!(interval(&mut session), 500);
    client.run_ok("LOCK.RELEASE key owner");
    listen_once(&mut session);
    assert_eq!(interval_and_default(&read_reply(&mut session)).0, LONG_INTERVAL);
    // From now on the longest interval counts.
    listen_once(&mut session);
    assert!(!eventually(A_WHILE + A_WHILE, || !session.raw.pending()));
}

#[test]
fn reply_has_no_heartbeat_without_option() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    interval(&mut session);
    session.listen(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL LEASE 8000");
    assert!(!eventually(A_WHILE, || !session.raw.pending()));
    client.run_ok("LOCK.FORCE key");
    assert_eq!(session.read_events(), [Event::lost("key", "owner", token, "forced")]);
    assert_eq!(session.raw.run("LOCK.EVENTS WAIT 50"), Value::Nil);
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn heartbeat_is_not_queued() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    listen(&mut session, &server);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 8000");
    assert_eq!(info_number(&server, "holdfast", "holdfast_undelivered_events"), 0);
    interval_and_default(&read_reply(&mut session));
    assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
}

#[test]
fn client_unblock_ends_heartbeat_wait() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    for how in ["", " TIMEOUT"] {
        listen(&mut session, &server);
        assert_eq!(client.run(&format!("CLIENT UNBLOCK {}{how}", session.client)), Value::Int(1));
        assert_eq!(interval_and_default(&read_reply(&mut session)).0, LONG_INTERVAL);
    }
    listen(&mut session, &server);
    assert_eq!(client.run(&format!("CLIENT UNBLOCK {} ERROR", session.client)), Value::Int(1));
    assert_eq!(error(&read_reply(&mut session)).0, "UNBLOCKED");
    assert_eq!(interval(&mut session), LONG_INTERVAL);
}

#[test]
fn heartbeat_does_not_block_in_transaction() {
    let server = server();
    let mut session = Session::open(&server);
    session.raw.send_lines(&["MULTI", "LOCK.EVENTS WAIT 0 HEARTBEAT", "LOCK.EVENTS HEARTBEAT", "EXEC"]);
    for _ in 0..3 {
        session.raw.read().unwrap();
    }
    let replies = read_reply(&mut session);
    assert_eq!(array(&replies).iter().map(interval_and_default).collect::<Vec<_>>(), [(LONG_INTERVAL, 80_000); 2]);
}

#[test]
fn script_cannot_ask_for_heartbeat() {
    let server = server();
    let reply = server.raw().call(&[b"EVAL", b"return redis.call('LOCK.EVENTS', 'HEARTBEAT')", b"0"]);
    assert!(error(&reply).1.contains("a script has none of its own"), "{reply:?}");
}

#[test]
fn killed_reader_leaves_nothing() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 4000");
    listen(&mut session, &server);
    client.run_ok(&format!("CLIENT KILL ID {}", session.client));
    until(SOON, "the session has ended", || info_number(&server, "holdfast", "holdfast_sessions") == 0);
    assert_eq!(blocked_clients(&server), 0);
    // Its interval causes no heartbeat later.
    assert!(!eventually(Duration::from_millis(400), || client.run("PING") != Value::SimpleString("PONG".into())));
}

/// A replica renews nothing.
#[test]
fn replica_uses_default_lease_as_interval() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 8000");
    assert_eq!(interval(&mut session), 1000);
    client.run_ok("REPLICAOF 127.0.0.1 1");
    assert_eq!(session.event().kind, "unbound");
    assert_eq!(interval(&mut session), LONG_INTERVAL);
    let due = NotBefore::millis(119);
    session.raw.send_lines(&["LOCK.EVENTS WAIT 120 HEARTBEAT"]);
    assert_eq!(interval_and_default(&read_reply(&mut session)).0, LONG_INTERVAL);
    due.is_over("the end of the wait");
}

/// Even if one command causes many shorter leases.
#[test]
fn many_shorter_leases_cause_one_heartbeat() {
    let server = server();
    let (mut client, mut session) = (server.raw(), Session::open(&server));
    listen(&mut session, &server);
    let line = |number: u32| session.with_session(&format!("LOCK.ACQUIRE key-{number} owner WATCHDOG LEASE 8000"));
    let lines: Vec<String> = (0..100).map(line).collect();
    assert_eq!(client.run_all(&lines).len(), 100);
    assert_eq!(interval_and_default(&read_reply(&mut session)).0, 1000);
    assert_eq!(session.raw.run("PING"), Value::SimpleString("PONG".into()));
}
