//! Everything that ends a hold or frees a lock: the session of the holder is notified of the loss and its reason, and the
//! sessions that wait are served.

use std::time::Duration;

use redis::Value;
use support::{Feature, Raw, Server, eventually, skip, until};

use super::session::{Event, Session};
use crate::common::{info_number, unix_micros};
use crate::waiter::{Commands, SOON, assert_held};

/// `holder` holds `key` on behalf of one session, and `next` waits for it on behalf of another.
struct Fixture {
    server: Server,
    client: Raw,
    holding: Session,
    waiting: Session,
    token: i64,
}

/// What happens to the waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The lock becomes free, and the waiter is granted.
    Served,
    /// The key is not a lock any more, and the waiter is refused.
    Refused,
    /// Another owner holds the lock, and the waiter still waits.
    Waits,
}

impl Fixture {
    #[track_caller]
    fn set(lease: &str) -> Self {
        Self::on(Server::start(), lease)
    }

    #[track_caller]
    fn on(server: Server, lease: &str) -> Self {
        let mut client = server.raw();
        let (holding, waiting) = (Session::open(&server), Session::open(&server));
        let token = holding.get_token(&mut client, &format!("LOCK.ACQUIRE key holder {lease}"));
        waiting.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0 LEASE 3600000");
        Self { server, client, holding, waiting, token }
    }

    #[track_caller]
    fn is_lost(&mut self, why: &str, then: Then) {
        assert_eq!(self.holding.event(), Event::lost("key", "holder", self.token, why));
        match then {
            Then::Served => {
                let token = self.waiting.event().token_of(&["key"], "next");
                assert!(token > self.token);
                assert_held(&mut self.client, "key", "next");
            }
            Then::Refused => {
                let received = self.waiting.event().error_of(&["key"], "next");
                assert!(received.starts_with("WRONGTYPE "), "{received}");
            }
            Then::Waits => {
                assert_eq!(crate::waiter::count_waiters(&mut self.client, "key"), 1);
                assert_eq!(self.waiting.raw.run("LOCK.EVENTS"), Value::Nil);
            }
        }
        self.holding.assert_no_event(&mut self.client);
    }

    #[track_caller]
    fn is_not_lost(&mut self) {
        self.holding.assert_no_event(&mut self.client);
        assert_eq!(self.waiting.raw.run("LOCK.EVENTS"), Value::Nil);
        assert_eq!(crate::waiter::count_waiters(&mut self.client, "key"), 1);
    }
}

/// `commands`, after those of `before`, cause a loss for this reason, with every kind of binding: outside and inside a
/// transaction, and in a script.
fn loses(before: &[&str], commands: &[&str], why: &str, then: Then) {
    for binding in ["WATCHDOG", "EPHEMERAL"] {
        let mut fixture = Fixture::set(binding);
        before.iter().for_each(|line| drop(fixture.client.run_ok(line)));
        commands.iter().for_each(|line| drop(fixture.client.run_ok(line)));
        fixture.is_lost(why, then);
    }
    let mut fixture = Fixture::set("WATCHDOG");
    before.iter().for_each(|line| drop(fixture.client.run_ok(line)));
    fixture.client.run_ok("MULTI");
    commands.iter().for_each(|line| drop(fixture.client.run_ok(line)));
    fixture.client.run_ok("EXEC");
    fixture.is_lost(why, then);

    let mut fixture = Fixture::set("EPHEMERAL");
    before.iter().for_each(|line| drop(fixture.client.run_ok(line)));
    let calls: Vec<String> =
        commands.iter().map(|line| format!("redis.call('{}')", line.replace(' ', "','"))).collect();
    let script = calls.join(" ");
    let done = fixture.client.call(&[b"EVAL", script.as_bytes(), b"0"]);
    assert!(!matches!(done, Value::ServerError(_)), "{done:?}");
    fixture.is_lost(why, then);
}

macro_rules! losses {
    ($($name:ident: $before:expr, $commands:expr, $why:expr, $then:ident;)*) => {$(
        #[test]
        fn $name() {
            loses(&$before, &$commands, $why, Then::$then);
        }
    )*};
}

losses! {
    force: [], ["LOCK.FORCE key"], "forced", Served;
    del: [], ["DEL key"], "changed", Served;
    unlink: [], ["UNLINK key"], "changed", Served;
    set: [], ["SET key text"], "changed", Refused;
    hdel_of_owner: [], ["HDEL key holder"], "changed", Served;
    hdel_of_every_field: [], ["HDEL key holder #fence"], "changed", Served;
    hset_of_other_token: [], ["HSET key #fence 5"], "changed", Waits;
    hset_of_invalid_count: [], ["HSET key holder nonsense"], "changed", Refused;
    rename_away: [], ["RENAME key elsewhere"], "changed", Served;
    renamenx_away: [], ["RENAMENX key elsewhere"], "changed", Served;
    rename_over_lock: ["SET text text"], ["RENAME text key"], "changed", Refused;
    copy_over_lock: ["HSET other somebody 1"], ["COPY other key REPLACE"], "changed", Waits;
    move_away: [], ["MOVE key 1", "SELECT 0"], "changed", Served;
    flushall: [], ["FLUSHALL"], "changed", Served;
    flushall_async: [], ["FLUSHALL ASYNC"], "changed", Served;
    flushdb: [], ["FLUSHDB"], "changed", Served;
    store_over_lock: [], ["SUNIONSTORE key nothing"], "changed", Served;
}

/// Without a watchdog, the hold ends at its deadline. The session is notified within about a millisecond.
#[test]
fn expired_hold_is_notified() {
    let mut fixture = Fixture::set("EPHEMERAL LEASE 1500");
    fixture.is_lost("expired", Then::Served);
}

/// No other request waits for the lock or reads it.
#[test]
fn expired_hold_without_waiters_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.listen(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL LEASE 1500");
    let end = crate::common::deadline(&mut client, b"key") * 1000;
    assert_eq!(session.read_events(), [Event::lost("key", "owner", token, "expired")]);
    assert!(unix_micros() >= end, "not before its deadline");
}

#[test]
fn expired_holder_among_many_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let short = session.get_token(&mut client, "LOCK.ACQUIRE key short SHARED EPHEMERAL LEASE 100");
    let long = session.get_token(&mut client, "LOCK.ACQUIRE key long SHARED EPHEMERAL LEASE 300");
    client.get_token("LOCK.ACQUIRE key longest SHARED LEASE 60000");
    let lost = |owner, token| Event::lost("key", owner, token, "expired");
    assert_eq!(session.events(2), [lost("short", short), lost("long", long)]);
    assert_held(&mut client, "key", "longest");
}

#[test]
fn force_notifies_many_holders() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let mut expected = Vec::new();
    for number in 0..20 {
        let owner = format!("owner-{number}");
        let token = session.get_token(&mut client, &format!("LOCK.ACQUIRE key {owner} LIMIT 20 WATCHDOG"));
        expected.push(Event::lost("key", &owner, token, "forced"));
    }
    client.run_ok("LOCK.FORCE key");
    let mut received = session.events(20);
    received.sort_by_key(|event| event.token);
    assert_eq!(received, expected);
}

/// Another owner's fields are deleted, and those of the session's owner stay.
#[test]
fn only_the_ended_holder_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    let token = one.get_token(&mut client, "LOCK.ACQUIRE key one SHARED WATCHDOG");
    other.get_token(&mut client, "LOCK.ACQUIRE key other SHARED WATCHDOG");
    client.run_ok("HDEL key one #@one");
    assert_eq!(one.event(), Event::lost("key", "one", token, "changed"));
    other.assert_no_event(&mut client);
}

/// The deadline is removed and set again: the hold lasts until then.
#[test]
fn persist_then_pexpire_ends_hold_at_new_deadline() {
    let mut fixture = Fixture::set("EPHEMERAL LEASE 1500");
    fixture.client.run_ok("PERSIST key");
    assert!(!eventually(Duration::from_millis(2000), || !fixture.holding.raw.pending()));
    fixture.is_not_lost();
    fixture.client.run_ok("PEXPIRE key 150");
    fixture.is_lost("expired", Then::Served);
}

#[test]
fn shorter_expiry_is_notified() {
    let mut fixture = Fixture::set("EPHEMERAL LEASE 600000");
    fixture.client.run_ok("PEXPIRE key 150");
    fixture.is_lost("expired", Then::Served);
}

/// Another client shortens the expiry to before the next renewal, which does not run earlier.
#[test]
fn shorter_expiry_of_watched_hold_is_notified() {
    let mut fixture = Fixture::set("WATCHDOG LEASE 60000");
    fixture.client.run_ok("PEXPIRE key 200");
    fixture.is_lost("expired", Then::Served);
}

#[test]
fn expired_owner_field_is_notified() {
    let mut fixture = Fixture::set("EPHEMERAL LEASE 600000");
    if !fixture.server.can(Feature::HashFieldExpiry) {
        return skip("this server has no field expiry");
    }
    fixture.client.run_ok("HPEXPIRE key 100 FIELDS 1 holder");
    fixture.is_lost("expired", Then::Served);
}

#[test]
fn restore_of_other_lock_is_notified() {
    let mut fixture = Fixture::set("WATCHDOG");
    fixture.client.run_ok("HSET other somebody 1");
    let dump = fixture.client.run("DUMP other");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(fixture.client.call(&[b"RESTORE", b"key", b"0", bytes, b"REPLACE"]), Value::Okay);
    fixture.is_lost("changed", Then::Waits);
}

#[test]
fn restore_of_other_type_is_notified() {
    let mut fixture = Fixture::set("WATCHDOG");
    fixture.client.run_ok("SET other text");
    let dump = fixture.client.run("DUMP other");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(fixture.client.call(&[b"RESTORE", b"key", b"0", bytes, b"REPLACE"]), Value::Okay);
    fixture.is_lost("changed", Then::Refused);
}

/// The same hold is restored at its key.
#[test]
fn restore_of_same_hold_is_no_loss() {
    let mut fixture = Fixture::set("WATCHDOG");
    let dump = fixture.client.run("DUMP key");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(fixture.client.call(&[b"RESTORE", b"key", b"60000", bytes, b"REPLACE"]), Value::Okay);
    fixture.is_not_lost();
}

/// The lock and its binding move to the other database; waiters stay in theirs.
#[test]
fn swapdb_moves_lock_and_binding() {
    let mut fixture = Fixture::set("WATCHDOG");
    fixture.client.run_ok("SWAPDB 0 1");
    fixture.waiting.event().token_of(&["key"], "next");
    fixture.holding.assert_no_event(&mut fixture.client);
    fixture.client.run_ok("SELECT 1");
    assert_held(&mut fixture.client, "key", "holder");
    fixture.client.run_ok("LOCK.FORCE key");
    let lost = Event::lost("key", "holder", fixture.token, "forced").in_db(1);
    assert_eq!(fixture.holding.event(), lost);
}

/// An undelivered grant moves to the other database too, and is revoked there.
#[test]
fn swapdb_moves_unread_grant() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 3600000");
    client.run_ok("LOCK.RELEASE key holder");
    client.run_ok("SWAPDB 0 1");
    client.run_ok("SELECT 1");
    assert_held(&mut client, "key", "owner");
    session.raw.reset();
    until(SOON, "the grant is revoked", || client.run("EXISTS key") == Value::Int(0));
}

#[test]
fn flushdb_of_other_database_is_no_loss() {
    let mut fixture = Fixture::set("WATCHDOG");
    fixture.client.run_ok("SELECT 1");
    fixture.client.run_ok("FLUSHDB");
    fixture.client.run_ok("SELECT 0");
    fixture.is_not_lost();
    assert_held(&mut fixture.client, "key", "holder");
}

#[test]
fn evicted_lock_is_notified() {
    let server = Server::builder().arg("maxmemory-policy", "volatile-ttl").arg("maxmemory-samples", "64").start();
    let mut client = server.raw();
    client.call(&[b"SET", b"ballast", &vec![b'x'; 4 << 20], b"EX", b"1000"]);
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 600000");
    let limit = info_number(&server, "memory", "used_memory") - (1 << 20);
    client.run_ok(&format!("CONFIG SET maxmemory {limit}"));
    assert_eq!(session.event(), Event::lost("key", "owner", token, "changed"));
}

/// A lock of Redisson is not bound to the session. A hold of the session that a Redisson script releases is lost.
#[test]
fn release_by_redisson_script_is_notified() {
    let mut fixture = Fixture::set("WATCHDOG");
    let script =
        "redis.call('hdel', KEYS[1], ARGV[1]) if redis.call('hlen', KEYS[1]) <= 1 then redis.call('del', KEYS[1]) end";
    let done = fixture.client.call(&[b"EVAL", script.as_bytes(), b"1", b"key", b"holder"]);
    assert!(!matches!(done, Value::ServerError(_)), "{done:?}");
    fixture.is_lost("changed", Then::Served);
}

/// The session ends, so there is no session to notify.
#[test]
fn killed_holder_frees_lock_for_next_waiter() {
    let mut fixture = Fixture::set("EPHEMERAL");
    fixture.client.run_ok(&format!("CLIENT KILL ID {}", fixture.holding.client));
    fixture.waiting.event().token_of(&["key"], "next");
}

#[test]
fn release_by_owner_is_no_loss() {
    let mut fixture = Fixture::set("WATCHDOG");
    fixture.client.run_ok("LOCK.RELEASE key holder");
    fixture.waiting.event().token_of(&["key"], "next");
    fixture.holding.assert_no_event(&mut fixture.client);
}

/// Within the same command.
#[test]
fn blocked_reader_is_notified_immediately() {
    for (way, why) in [("LOCK.FORCE key", "forced"), ("DEL key", "changed"), ("FLUSHALL", "changed")] {
        let mut fixture = Fixture::set("WATCHDOG");
        fixture.holding.listen(&fixture.server);
        let begin = unix_micros();
        fixture.client.run_ok(way);
        assert_eq!(fixture.holding.read_events(), [Event::lost("key", "holder", fixture.token, why)]);
        println!("{way}: notified after {} µs", unix_micros() - begin);
    }
}

/// Within the same event-loop iteration.
#[test]
fn loss_is_readable_by_next_command() {
    let server = Server::start();
    let mut client = server.raw();
    for (way, why) in [("LOCK.FORCE key", "forced"), ("DEL key", "changed"), ("HDEL key owner", "changed")] {
        let mut session = Session::open(&server);
        let token = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.run_ok(way);
        // Its reply came at the end of the iteration.
        let received = session.raw.run("LOCK.EVENTS");
        assert_eq!(super::session::events(&received), [Event::lost("key", "owner", token, why)], "{way}");
        client.run_ok("DEL key");
    }
}

/// The server renews nothing while the session's process is paused.
#[test]
fn pause_longer_than_lease_loses_hold() {
    let mut fixture = Fixture::set("WATCHDOG LEASE 1500");
    fixture.client.run_ok("CLIENT PAUSE 2500 WRITE");
    fixture.is_lost("expired", Then::Served);
}

/// A pause of the server's process looks like a clock step to the server.
#[test]
fn server_paused_longer_than_lease_loses_hold() {
    let mut fixture = Fixture::set("EPHEMERAL LEASE 1500");
    let end = crate::common::deadline(&mut fixture.client, b"key");
    fixture.server.stop();
    until(SOON, "the lease has expired", || crate::common::unix_millis() > end + 100);
    fixture.server.cont();
    fixture.is_lost("expired", Then::Served);
}

#[test]
fn idle_session_gets_no_events() {
    // Short enough for many renewals, and long enough for a short pause of the server.
    let mut fixture = Fixture::set("WATCHDOG LEASE 3000");
    until(SOON, "the lease is renewed repeatedly", || {
        assert_eq!(fixture.holding.raw.run("LOCK.EVENTS"), Value::Nil);
        info_number(&fixture.server, "holdfast", "holdfast_watchdog_renewals") >= 4
    });
    fixture.is_not_lost();
}

/// The lock was overwritten by another lock that the same owner holds. On Redis 7.0 the release comes before the module
/// has looked at it.
#[test]
fn release_of_overwriting_hold_reports_loss_of_bound_hold() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let lost = session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
    let other = client.get_token("LOCK.ACQUIRE elsewhere owner");
    client.send_lines(&["RENAME elsewhere key", &format!("LOCK.RELEASE key owner TOKEN {other}")]);
    assert_eq!(client.read().unwrap(), Value::Okay);
    assert_eq!(client.read().unwrap(), Value::Int(1));
    assert_eq!(session.event(), Event::lost("key", "owner", lost, "changed"));
    session.assert_no_event(&mut client);
}
