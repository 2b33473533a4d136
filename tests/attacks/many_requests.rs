//! Thousands of requests that are granted at once, in order of the queue.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives, owners, waiters};
use crate::many::may_open_files;

const READERS: usize = 2400;
const KEYS: usize = 2000;

#[test]
fn readers_are_granted_together_and_writer_after_them() {
    if !may_open_files(READERS) {
        return;
    }
    let server = Server::start();
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    let mut readers: Vec<Raw> = (0..READERS).map(|_| server.raw()).collect();
    for (index, reader) in readers.iter_mut().enumerate() {
        reader.send_lines(&[&format!("LOCK.ACQUIRE key reader:{index} SHARED LEASE 600000 WAIT 0")]);
    }
    until(SOON, "all of them wait", || connection.run("LOCK.INFO key").field("waiters") == Value::Int(READERS as i64));
    let order = waiters(&mut connection, "key");
    let mut writer = server.raw();
    assert_eq!(writer.begin("LOCK.ACQUIRE key writer LEASE 600000 WAIT 0"), None);

    // The new request is in the same packet, so no client can have read a reply before it.
    connection.send_lines(&["LOCK.RELEASE key holder", "LOCK.ACQUIRE key late SHARED"]);
    assert_eq!(arrives(&mut connection), Value::Int(1));
    assert!(arrives(&mut connection).is_null(), "the request would overtake the writer");
    let mut of_owner = BTreeMap::new();
    for (index, reader) in readers.iter_mut().enumerate() {
        of_owner.insert(format!("reader:{index}"), arrives(reader).token());
    }
    let tokens: Vec<i64> = order.iter().map(|owner| of_owner[owner]).collect();
    assert!(tokens.is_sorted_by(|earlier, later| earlier < later), "in the order of the queue");
    assert_eq!(connection.run("LOCK.INFO key").field("holder_count"), Value::Int(READERS as i64));
    assert!(connection.run("LOCK.ACQUIRE key late SHARED").is_null());

    let (last, others) = order.split_last().expect("at least one reader");
    let lines: Vec<String> = others.iter().map(|owner| format!("LOCK.RELEASE key {owner}")).collect();
    assert!(connection.run_all(&lines).iter().all(|reply| *reply == Value::Int(1)));
    assert!(writer.pending(), "one reader is left");
    assert_eq!(connection.run(&format!("LOCK.RELEASE key {last}")), Value::Int(1));
    assert!(arrives(&mut writer).token() > tokens[READERS - 1]);
    assert_eq!(owners(&mut connection, "key"), ["writer"]);
}

/// Reads events of a session until there are `count`.
fn events(session: &mut Raw, count: usize) -> Vec<Value> {
    let mut all = Vec::new();
    until(SOON, "all events have arrived", || {
        let events = session.run("LOCK.EVENTS");
        all.extend(if events.is_null() { Vec::new() } else { events.items().to_vec() });
        all.len() >= count
    });
    assert_eq!(all.len(), count);
    all
}

#[test]
fn flushall_ends_bound_holds_and_serves_their_queues() {
    let server = Server::start();
    let [mut viewer, mut sender, mut holder, mut waiter] = std::array::from_fn(|_| server.raw());
    let (of_holder, of_waiter) =
        (holder.run("LOCK.SESSION").field("id").text(), waiter.run("LOCK.SESSION").field("id").text());
    let lines = |form: &str, id: &str| -> Vec<String> {
        (0..KEYS).map(|index| format!("{} SESSION {id}", form.replace('#', &index.to_string()))).collect()
    };
    for reply in sender.run_all(&lines("LOCK.ACQUIRE key:# holder LEASE 600000 WATCHDOG EPHEMERAL", &of_holder)) {
        reply.token();
    }
    for reply in sender.run_all(&lines("LOCK.ACQUIRE key:# waiter:# LEASE 600000 EPHEMERAL WAIT 0", &of_waiter)) {
        assert_eq!(reply, Value::SimpleString("WAITING".into()));
    }
    assert_eq!(viewer.run("FLUSHALL"), Value::Okay);

    let granted = events(&mut waiter, KEYS);
    assert!(granted.iter().all(|event| event.items()[0].text() == "granted"));
    for lost in events(&mut holder, KEYS) {
        assert_eq!((lost.items()[0].text(), lost.items()[5].text()), ("lost".to_owned(), "changed".to_owned()));
    }
    for (index, fields) in viewer.run_all(&lines_of("HKEYS key:#", KEYS)).iter().enumerate() {
        let mut names: Vec<String> = fields.items().iter().map(Reply::text).collect();
        names.sort();
        assert_eq!(names, ["#fence".to_owned(), format!("waiter:{index}")]);
    }
    // None of the lost holds is still bound: the current hold ends with the other session.
    drop(holder);
    assert_eq!(viewer.run("DBSIZE"), Value::Int(KEYS as i64));
    waiter.close();
    until(SOON, "all locks are free", || viewer.run("DBSIZE") == Value::Int(0));
}

fn lines_of(form: &str, count: usize) -> Vec<String> {
    (0..count).map(|index| form.replace('#', &index.to_string())).collect()
}

#[test]
fn thousands_of_ephemeral_holds_end_with_their_connection() {
    const HOLDS: usize = 5000;
    let server = Server::start();
    let (mut viewer, mut holder, mut waiter) = (server.raw(), server.raw(), server.raw());
    for reply in holder.run_all(&lines_of("LOCK.ACQUIRE key:# me LEASE 600000 EPHEMERAL", HOLDS)) {
        reply.token();
    }
    viewer.run("LOCK.ACQUIRE other me LEASE 600000").token();
    let last = HOLDS - 1;
    assert_eq!(waiter.begin(&format!("LOCK.MACQUIRE 2 key:0 key:{last} next LEASE 600000 WAIT 0")), None);
    holder.reset();
    arrives(&mut waiter).token();
    until(SOON, "only the locks of others are held", || viewer.run("DBSIZE") == Value::Int(3));
    assert_eq!(owners(&mut viewer, "other"), ["me"]);
    assert_eq!(owners(&mut viewer, &format!("key:{last}")), ["next"]);
}

#[test]
fn owner_withdraws_undelivered_grants() {
    const WAITS: usize = 100;
    let server = Server::start();
    let [mut viewer, mut sender, mut session] = std::array::from_fn(|_| server.raw());
    let id = session.run("LOCK.SESSION").field("id").text();
    for reply in viewer.run_all(&lines_of("LOCK.ACQUIRE key:# holder LEASE 600000", WAITS)) {
        reply.token();
    }
    let wait = format!("LOCK.ACQUIRE key:# one LEASE 600000 WAIT 0 SESSION {id}");
    for reply in sender.run_all(&lines_of(&wait, WAITS)) {
        assert_eq!(reply, Value::SimpleString("WAITING".into()));
    }
    for reply in viewer.run_all(&lines_of("LOCK.RELEASE key:# holder", WAITS)) {
        assert_eq!(reply, Value::Int(1));
    }
    for index in 0..WAITS {
        assert_eq!(owners(&mut viewer, &format!("key:{index}")), ["one"]);
    }
    // The server reads the request, and notices only when it replies that the connection is closed.
    server.stop();
    session.send_line("LOCK.EVENTS");
    session.reset_and_arrive();
    server.cont();
    let sessions = || server.info("holdfast", "holdfast_sessions");
    until(SOON, "the session has ended", || sessions().as_deref() == Some("0"));
    for reply in viewer.run_all(&lines_of("LOCK.RELEASE key:# one ALL", WAITS)) {
        assert!(matches!(reply, Value::Nil | Value::Int(1)), "{reply:?}");
    }
    assert_eq!(viewer.run("DBSIZE"), Value::Int(0));
}

/// One after the other in a pipeline: each request begins to wait when the previous one is granted.
#[test]
fn pipelined_waits_of_closed_connection_hold_nothing() {
    const WAITS: usize = 10;
    let server = Server::start();
    for _ in 0..10 {
        let (mut viewer, mut client) = (server.raw(), server.raw());
        for reply in viewer.run_all(&lines_of("LOCK.ACQUIRE key:# holder LEASE 600000", WAITS)) {
            reply.token();
        }
        let waits = lines_of("LOCK.ACQUIRE key:# one LEASE 600000 WAIT 0", WAITS);
        client.send_lines(&waits.iter().map(String::as_str).collect::<Vec<_>>());
        until(SOON, "the request waits", || waiters(&mut viewer, "key:0") == ["one"]);
        server.stop();
        let releases = lines_of("LOCK.RELEASE key:# holder", WAITS);
        viewer.send_lines(&releases.iter().map(String::as_str).collect::<Vec<_>>());
        client.reset_and_arrive();
        server.cont();
        for _ in 0..WAITS {
            assert_eq!(arrives(&mut viewer), Value::Int(1));
        }
        until(SOON, "no lock is held", || viewer.run("DBSIZE") == Value::Int(0));
    }
}

/// The benchmarks measure how late the last one ends.
#[test]
fn waits_with_same_timeout_all_end() {
    const WAITS: usize = 20_000;
    let server = Server::start();
    let [mut sender, mut session] = std::array::from_fn(|_| server.raw());
    let id = session.run("LOCK.SESSION").field("id").text();
    sender.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    let end = Instant::now() + Duration::from_secs(20);
    for first in (0..WAITS).step_by(500) {
        let left = end.saturating_duration_since(Instant::now()).as_millis().max(1);
        let line = |owner| format!("LOCK.ACQUIRE key o:{owner} WAIT {left} SESSION {id}");
        let replies = sender.run_all(&(first..first + 500).map(line).collect::<Vec<_>>());
        assert!(replies.iter().all(|reply| *reply == Value::SimpleString("WAITING".into())));
    }
    let waiting = |sender: &mut Raw| sender.run("LOCK.INFO key").field("waiters").int();
    assert_eq!(waiting(&mut sender), WAITS as i64, "all of them wait");
    until(2 * SOON, "all waits have ended", || waiting(&mut sender) == 0);
    assert!(events(&mut session, WAITS).iter().all(|event| event.items()[0].text() == "timeout"));
}

/// The client does not read meanwhile. Neither its connection nor any other is closed.
#[test]
fn hundred_thousand_waits_of_a_session_end_together() {
    const WAITS: usize = 100_000;
    let server = Server::start();
    let [mut sender, mut session, mut other] = std::array::from_fn(|_| server.raw());
    let [id, other_id] = [&mut session, &mut other].map(|raw| raw.run("LOCK.SESSION").field("id").text());
    sender.run("LOCK.ACQUIRE key holder LEASE 600000").token();
    sender.run("CONFIG SET holdfast.detect-deadlocks no");
    sender.run(&format!("LOCK.ACQUIRE key other WAIT 0 SESSION {other_id}"));
    for first in (0..WAITS).step_by(500) {
        let line = |owner| format!("LOCK.ACQUIRE key o:{owner} WAIT 0 SESSION {id}");
        let replies = sender.run_all(&(first..first + 500).map(line).collect::<Vec<_>>());
        assert!(replies.iter().all(|reply| *reply == Value::SimpleString("WAITING".into())));
    }
    assert_eq!(sender.run("SET key text"), Value::Okay);
    let is_over = || server.info("holdfast", "holdfast_waiters").as_deref() == Some("0");
    until(2 * SOON, "all waits have ended", is_over);
    assert!(events(&mut session, WAITS).iter().all(|event| event.items()[0].text() == "refused"));
    assert_eq!(events(&mut other, 1)[0].items()[0].text(), "refused");
    assert_eq!(server.info("holdfast", "holdfast_sessions").as_deref(), Some("2"));
}
