//! Every event that ends a hold, or frees a lock: the one who held it is told that it lost it, and why; those who wait
//! for it on behalf of sessions are served.

use std::time::Duration;

use redis::Value;
use support::{Feature, Raw, Server, eventually, skip, until};

use super::session::{Event, Session};
use crate::common::{info_number, unix_micros};
use crate::waiter::{SOON, Speak, Tell, assert_held};

/// `holder` holds `key` on behalf of one session, `next` waits for it on behalf of another.
struct Scene {
    server: Server,
    client: Raw,
    holding: Session,
    waiting: Session,
    token: i64,
}

/// What became of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It fell free, and the next has it.
    Served,
    /// The key is no lock any more, and the next is refused.
    Refused,
    /// Somebody else has it, and the next waits on.
    Waits,
}

impl Scene {
    #[track_caller]
    fn set(lease: &str) -> Self {
        Self::on(Server::start(), lease)
    }

    #[track_caller]
    fn on(server: Server, lease: &str) -> Self {
        let mut client = server.raw();
        let (holding, waiting) = (Session::open(&server), Session::open(&server));
        let token = holding.take(&mut client, &format!("LOCK.ACQUIRE key holder {lease}"));
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
                let told = self.waiting.event().error_of(&["key"], "next");
                assert!(told.starts_with("WRONGTYPE "), "{told}");
            }
            Then::Waits => {
                assert_eq!(crate::waiter::count_waiters(&mut self.client, "key"), 1);
                assert_eq!(self.waiting.raw.say("LOCK.EVENTS"), Value::Nil);
            }
        }
        self.holding.hears_nothing(&mut self.client);
    }

    #[track_caller]
    fn is_not_lost(&mut self) {
        self.holding.hears_nothing(&mut self.client);
        assert_eq!(self.waiting.raw.say("LOCK.EVENTS"), Value::Nil);
        assert_eq!(crate::waiter::count_waiters(&mut self.client, "key"), 1);
    }
}

/// Whether the hold is lost for this reason, however it is bound, by `commands` after those of `before`; in a step of
/// their own, in a transaction, in a script.
fn loses(before: &[&str], commands: &[&str], why: &str, then: Then) {
    for binding in ["WATCHDOG", "EPHEMERAL"] {
        let mut scene = Scene::set(binding);
        before.iter().for_each(|line| drop(scene.client.order(line)));
        commands.iter().for_each(|line| drop(scene.client.order(line)));
        scene.is_lost(why, then);
    }
    let mut scene = Scene::set("WATCHDOG");
    before.iter().for_each(|line| drop(scene.client.order(line)));
    scene.client.order("MULTI");
    commands.iter().for_each(|line| drop(scene.client.order(line)));
    scene.client.order("EXEC");
    scene.is_lost(why, then);

    let mut scene = Scene::set("EPHEMERAL");
    before.iter().for_each(|line| drop(scene.client.order(line)));
    let calls: Vec<String> =
        commands.iter().map(|line| format!("redis.call('{}')", line.replace(' ', "','"))).collect();
    let script = calls.join(" ");
    let done = scene.client.call(&[b"EVAL", script.as_bytes(), b"0"]);
    assert!(!matches!(done, Value::ServerError(_)), "{done:?}");
    scene.is_lost(why, then);
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
    hdel_of_the_owner: [], ["HDEL key holder"], "changed", Served;
    hdel_of_every_field: [], ["HDEL key holder #fence"], "changed", Served;
    hset_of_another_token: [], ["HSET key #fence 5"], "changed", Waits;
    hset_of_nonsense: [], ["HSET key holder nonsense"], "changed", Refused;
    rename_away: [], ["RENAME key elsewhere"], "changed", Served;
    renamenx_away: [], ["RENAMENX key elsewhere"], "changed", Served;
    rename_over_it: ["SET text text"], ["RENAME text key"], "changed", Refused;
    copy_over_it: ["HSET other somebody 1"], ["COPY other key REPLACE"], "changed", Waits;
    move_away: [], ["MOVE key 1", "SELECT 0"], "changed", Served;
    flushall: [], ["FLUSHALL"], "changed", Served;
    flushall_async: [], ["FLUSHALL ASYNC"], "changed", Served;
    flushdb: [], ["FLUSHDB"], "changed", Served;
    store_over_it: [], ["SUNIONSTORE key nothing"], "changed", Served;
}

/// Without a watchdog, the hold is over at its deadline, and the session is notified within about a millisecond.
#[test]
fn expired_hold_is_notified() {
    let mut scene = Scene::set("EPHEMERAL LEASE 200");
    scene.is_lost("expired", Then::Served);
}

/// No other request waits for it or accesses it.
#[test]
fn expired_hold_without_waiters_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    session.listen(&server);
    let token = session.take(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL LEASE 1500");
    let end = crate::common::deadline(&mut client, b"key") * 1000;
    assert_eq!(session.heard(), [Event::lost("key", "owner", token, "expired")]);
    assert!(unix_micros() >= end, "not before its deadline");
}

#[test]
fn expired_holder_among_many_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let short = session.take(&mut client, "LOCK.ACQUIRE key short SHARED EPHEMERAL LEASE 100");
    let long = session.take(&mut client, "LOCK.ACQUIRE key long SHARED EPHEMERAL LEASE 300");
    client.take("LOCK.ACQUIRE key longest SHARED LEASE 60000");
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
        let token = session.take(&mut client, &format!("LOCK.ACQUIRE key {owner} LIMIT 20 WATCHDOG"));
        expected.push(Event::lost("key", &owner, token, "forced"));
    }
    client.order("LOCK.FORCE key");
    let mut told = session.events(20);
    told.sort_by_key(|event| event.token);
    assert_eq!(told, expected);
}

/// Another owner's fields are deleted, and those of the session's owner stay.
#[test]
fn only_the_ended_holder_is_notified() {
    let server = Server::start();
    let mut client = server.raw();
    let (mut one, mut other) = (Session::open(&server), Session::open(&server));
    let token = one.take(&mut client, "LOCK.ACQUIRE key one SHARED WATCHDOG");
    other.take(&mut client, "LOCK.ACQUIRE key other SHARED WATCHDOG");
    client.order("HDEL key one #@one");
    assert_eq!(one.event(), Event::lost("key", "one", token, "changed"));
    other.hears_nothing(&mut client);
}

/// The deadline is removed and set again: the hold lasts until then.
#[test]
fn persist_then_pexpire_ends_hold_at_new_deadline() {
    let mut scene = Scene::set("EPHEMERAL LEASE 400");
    scene.client.order("PERSIST key");
    assert!(!eventually(Duration::from_millis(800), || !scene.holding.raw.pending()));
    scene.is_not_lost();
    scene.client.order("PEXPIRE key 150");
    scene.is_lost("expired", Then::Served);
}

#[test]
fn shorter_expiry_is_notified() {
    let mut scene = Scene::set("EPHEMERAL LEASE 600000");
    scene.client.order("PEXPIRE key 150");
    scene.is_lost("expired", Then::Served);
}

/// Another client shortens the expiry below the next renewal: the renewal does not come earlier.
#[test]
fn shorter_expiry_of_watched_hold_is_notified() {
    let mut scene = Scene::set("WATCHDOG LEASE 60000");
    scene.client.order("PEXPIRE key 200");
    scene.is_lost("expired", Then::Served);
}

#[test]
fn expired_owner_field_is_notified() {
    let mut scene = Scene::set("EPHEMERAL LEASE 600000");
    if !scene.server.can(Feature::HashFieldExpiry) {
        return skip("no expiry of hash fields");
    }
    scene.client.order("HPEXPIRE key 100 FIELDS 1 holder");
    scene.is_lost("expired", Then::Served);
}

#[test]
fn restore_of_other_lock_is_notified() {
    let mut scene = Scene::set("WATCHDOG");
    scene.client.order("HSET other somebody 1");
    let dump = scene.client.say("DUMP other");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(scene.client.call(&[b"RESTORE", b"key", b"0", bytes, b"REPLACE"]), Value::Okay);
    scene.is_lost("changed", Then::Waits);
}

#[test]
fn restore_of_other_type_is_notified() {
    let mut scene = Scene::set("WATCHDOG");
    scene.client.order("SET other text");
    let dump = scene.client.say("DUMP other");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(scene.client.call(&[b"RESTORE", b"key", b"0", bytes, b"REPLACE"]), Value::Okay);
    scene.is_lost("changed", Then::Refused);
}

/// The same hold is restored in its place.
#[test]
fn restore_of_same_hold_is_no_loss() {
    let mut scene = Scene::set("WATCHDOG");
    let dump = scene.client.say("DUMP key");
    let bytes = crate::common::bytes(&dump);
    assert_eq!(scene.client.call(&[b"RESTORE", b"key", b"60000", bytes, b"REPLACE"]), Value::Okay);
    scene.is_not_lost();
}

/// The lock and its binding move to the other database; waiters stay in theirs.
#[test]
fn swapdb_moves_lock_and_binding() {
    let mut scene = Scene::set("WATCHDOG");
    scene.client.order("SWAPDB 0 1");
    scene.waiting.event().token_of(&["key"], "next");
    scene.holding.hears_nothing(&mut scene.client);
    scene.client.order("SELECT 1");
    assert_held(&mut scene.client, "key", "holder");
    scene.client.order("LOCK.FORCE key");
    let lost = Event::lost("key", "holder", scene.token, "forced").in_db(1);
    assert_eq!(scene.holding.event(), lost);
}

/// An undelivered grant moves to the other database too, and is revoked there.
#[test]
fn swapdb_moves_unread_grant() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 LEASE 3600000");
    client.order("LOCK.RELEASE key holder");
    client.order("SWAPDB 0 1");
    client.order("SELECT 1");
    assert_held(&mut client, "key", "owner");
    session.raw.reset();
    until(SOON, "it is revoked", || client.say("EXISTS key") == Value::Int(0));
}

#[test]
fn flushdb_of_other_database_is_no_loss() {
    let mut scene = Scene::set("WATCHDOG");
    scene.client.order("SELECT 1");
    scene.client.order("FLUSHDB");
    scene.client.order("SELECT 0");
    scene.is_not_lost();
    assert_held(&mut scene.client, "key", "holder");
}

#[test]
fn evicted_lock_is_notified() {
    let server = Server::builder().arg("maxmemory-policy", "volatile-ttl").arg("maxmemory-samples", "64").start();
    let mut client = server.raw();
    client.call(&[b"SET", b"ballast", &vec![b'x'; 4 << 20], b"EX", b"1000"]);
    let mut session = Session::open(&server);
    let token = session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG LEASE 600000");
    let limit = info_number(&server, "memory", "used_memory") - (1 << 20);
    client.order(&format!("CONFIG SET maxmemory {limit}"));
    assert_eq!(session.event(), Event::lost("key", "owner", token, "changed"));
}

/// A lock of Redisson is not bound to the session; a hold of the session that a Redisson script releases is lost.
#[test]
fn release_by_redisson_script_is_notified() {
    let mut scene = Scene::set("WATCHDOG");
    let script =
        "redis.call('hdel', KEYS[1], ARGV[1]) if redis.call('hlen', KEYS[1]) <= 1 then redis.call('del', KEYS[1]) end";
    let done = scene.client.call(&[b"EVAL", script.as_bytes(), b"1", b"key", b"holder"]);
    assert!(!matches!(done, Value::ServerError(_)), "{done:?}");
    scene.is_lost("changed", Then::Served);
}

/// The session ends, so there is no session to notify.
#[test]
fn killed_holder_frees_lock_for_next_waiter() {
    let mut scene = Scene::set("EPHEMERAL");
    scene.client.order(&format!("CLIENT KILL ID {}", scene.holding.client));
    scene.waiting.event().token_of(&["key"], "next");
}

#[test]
fn release_by_owner_is_no_loss() {
    let mut scene = Scene::set("WATCHDOG");
    scene.client.order("LOCK.RELEASE key holder");
    scene.waiting.event().token_of(&["key"], "next");
    scene.holding.hears_nothing(&mut scene.client);
}

/// Within the same command.
#[test]
fn blocked_reader_is_notified_immediately() {
    for (way, why) in [("LOCK.FORCE key", "forced"), ("DEL key", "changed"), ("FLUSHALL", "changed")] {
        let mut scene = Scene::set("WATCHDOG");
        scene.holding.listen(&scene.server);
        let begin = unix_micros();
        scene.client.order(way);
        assert_eq!(scene.holding.heard(), [Event::lost("key", "holder", scene.token, why)]);
        println!("{way}: told after {} µs", unix_micros() - begin);
    }
}

/// Within the same event-loop iteration.
#[test]
fn loss_is_readable_by_next_command() {
    let server = Server::start();
    let mut client = server.raw();
    for (way, why) in [("LOCK.FORCE key", "forced"), ("DEL key", "changed"), ("HDEL key owner", "changed")] {
        let mut session = Session::open(&server);
        let token = session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.order(way);
        // The reply to that came at the end of the turn.
        let told = session.raw.say("LOCK.EVENTS");
        assert_eq!(super::session::events(&told), [Event::lost("key", "owner", token, why)], "{way}");
        client.order("DEL key");
    }
}

/// Nothing is renewed during the pause.
#[test]
fn pause_longer_than_lease_loses_hold() {
    let mut scene = Scene::set("WATCHDOG LEASE 300");
    scene.client.order("CLIENT PAUSE 700 WRITE");
    scene.is_lost("expired", Then::Served);
}

/// A pause of the server's process looks like a clock step to the server.
#[test]
fn server_paused_longer_than_lease_loses_hold() {
    let mut scene = Scene::set("EPHEMERAL LEASE 300");
    let end = crate::common::deadline(&mut scene.client, b"key");
    scene.server.stop();
    until(SOON, "the lease is over", || crate::common::unix_millis() > end + 100);
    scene.server.cont();
    scene.is_lost("expired", Then::Served);
}

#[test]
fn idle_session_gets_no_events() {
    // Short enough to be renewed often; so long that a server that pauses for a moment doesn't lose it.
    let mut scene = Scene::set("WATCHDOG LEASE 3000");
    until(SOON, "it is renewed again and again", || {
        assert_eq!(scene.holding.raw.say("LOCK.EVENTS"), Value::Nil);
        info_number(&scene.server, "holdfast", "holdfast_watchdog_renewals") >= 4
    });
    scene.is_not_lost();
}
