//! Slots that move atomically, and the module's state of the locks in them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;

use redis::Value;
use support::{Cluster, Family, Feature, Over, Raw, Server, skip, until};

use crate::common::{Bytes, error, fields, info_number, keys, unix_millis};
use crate::lines::{Reply, Watched, deadline, holders};
use crate::waiter::{Commands, SOON, Waiter, assert_held, until_no_waiters};

/// A cluster of two nodes, and the node that owns the slot of `key`.
struct Fixture {
    cluster: Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Fixture {
    /// `None` if the server has no atomic slot migration.
    fn start() -> Option<Self> {
        if !Server::start().can(Feature::AtomicSlotMigration) {
            skip("this server has no atomic slot migration");
            return None;
        }
        let cluster = Cluster::start(2);
        let slot = cluster.slot_of(b"key");
        let from = cluster.owner_of(slot);
        Some(Self { cluster, slot, from, to: 1 - from })
    }

    fn source(&self) -> &Server {
        self.cluster.node(self.from)
    }

    fn target(&self) -> &Server {
        self.cluster.node(self.to)
    }

    /// Moves the slot to the target, which is the source afterwards.
    fn moves(&mut self) {
        self.cluster.move_whole_slot(self.slot, self.from, self.to);
        std::mem::swap(&mut self.from, &mut self.to);
    }

    #[track_caller]
    fn is_moved(&self, waiter: &mut Waiter, to: &Server) {
        let place = format!("{} {}", self.slot, to.addr());
        assert_eq!(error(&waiter.end()), ("MOVED", place.as_str()));
    }
}

/// The contents of a keyspace: the fields of each key, and its deadline.
fn contents(server: &Server) -> BTreeMap<Bytes, (BTreeMap<Bytes, Bytes>, i64)> {
    let mut client = server.raw();
    let read = |key: Bytes| {
        let content = (fields(&mut client, &key), crate::common::deadline(&mut client, &key));
        (key, content)
    };
    keys(&mut server.raw()).into_iter().map(read).collect()
}

/// `LOCK.INFO` lists the holders of `key` with the tokens and deadlines in the hash.
#[track_caller]
fn assert_holders_listed(client: &mut Raw, key: &str) {
    let written: BTreeMap<String, (i64, i64)> = fields(client, key.as_bytes())
        .into_iter()
        .filter_map(|(field, value)| {
            let owner = String::from_utf8(field).expect("letters").strip_prefix("#@")?.to_owned();
            let value = String::from_utf8(value).expect("digits");
            let (deadline, token) = value.split_once(':').expect("a deadline and a token");
            Some((owner, (deadline.parse().expect("digits"), token.parse().expect("digits"))))
        })
        .collect();
    let before = unix_millis();
    let said = holders(client, key);
    let after = unix_millis();
    assert_eq!(said.keys().collect::<Vec<_>>(), written.keys().collect::<Vec<_>>(), "who holds {key}");
    for (owner, (deadline, token)) in written {
        assert_eq!(said[&owner].field("token").int(), token, "{owner}");
        // At some moment between the two, in whole milliseconds.
        let ttl = said[&owner].field("ttl").int();
        let said = before + ttl - 1..=after + ttl + 1;
        assert!(
            said.contains(&deadline),
            "{owner}'s deadline is {deadline} in the key, and reported as within {said:?}"
        );
    }
}

fn bound(server: &Server) -> i64 {
    info_number(server, "holdfast", "holdfast_bound_holds")
}

fn until_nothing_is_bound(server: &Server) {
    until(SOON, "no hold is bound", || bound(server) == 0);
}

fn until_empty(server: &Server) {
    until(SOON, "the slot is empty", || server.raw().run("DBSIZE") == Value::Int(0));
}

#[test]
fn locks_arrive_and_waiters_are_redirected() {
    let Some(mut fixture) = Fixture::start() else { return };
    let mut client = fixture.source().raw();
    let mut last = client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    for (owner, lease) in [("a", 50_000), ("b", 40_000), ("c", 60_000)] {
        last = client.get_token(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 3 LEASE {lease}"));
        client.get_token(&format!("LOCK.ACQUIRE {{key}}readers {owner} SHARED LEASE {lease}"));
    }
    let mut waiters: Vec<Waiter> = [
        "LOCK.ACQUIRE key first WAIT 0",
        "LOCK.ACQUIRE key second WAIT 60000",
        "LOCK.ACQUIRE {key}few d LIMIT 3 WAIT 0",
        "LOCK.ACQUIRE {key}readers writer WAIT 0",
        "LOCK.MACQUIRE 2 {key}free key both WAIT 0",
    ]
    .iter()
    .map(|line| Waiter::sending(fixture.source(), line))
    .collect();
    let before = contents(fixture.source());
    fixture.moves();
    for waiter in &mut waiters {
        fixture.is_moved(waiter, fixture.source());
    }
    until_no_waiters(fixture.target());
    until_empty(fixture.target());
    assert_eq!(contents(fixture.source()), before);

    let mut client = fixture.source().raw();
    for key in ["{key}few", "{key}readers"] {
        assert_holders_listed(&mut client, key);
    }
    let mut first = Waiter::start(fixture.source(), "key", "first");
    client.run_ok("LOCK.RELEASE key holder");
    assert!(first.token() > last);
    let mut fourth = Waiter::sending(fixture.source(), "LOCK.ACQUIRE {key}few d LIMIT 3 WAIT 0");
    client.run_ok("LOCK.RELEASE {key}few b");
    fourth.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// Also when the slot moves back.
#[test]
fn bindings_end_when_slot_moves() {
    let Some(mut fixture) = Fixture::start() else { return };
    let holder = fixture.source().raw();
    let mut holder = Watched::over(holder, fixture.source());
    holder.get_token("LOCK.ACQUIRE key holder LEASE 60000 WATCHDOG EPHEMERAL");
    holder.get_token("LOCK.ACQUIRE {key}few holder LIMIT 2 LEASE 60000 EPHEMERAL");
    fixture.moves();
    until_nothing_is_bound(fixture.target());
    assert_eq!(bound(fixture.source()), 0);
    fixture.moves();
    assert_eq!(bound(fixture.source()), 0);
    let before = contents(fixture.source());
    let id = holder.client_id();
    holder.reset();
    let mut client = fixture.source().raw();
    crate::lines::until_gone(&mut client, id);
    // Holds that end with the binding are released before the next waiter of another lock is granted.
    client.get_token("LOCK.ACQUIRE {key}other holder LEASE 60000");
    let mut waiter = Waiter::start(fixture.source(), "{key}other", "waiter");
    client.run_ok("LOCK.RELEASE {key}other holder");
    waiter.token();
    client.run_ok("LOCK.RELEASE {key}other waiter");
    assert_eq!(contents(fixture.source()), before);
}

/// Until the slot moves, the source renews and grants, and the target receives all of it.
#[test]
fn changes_during_migration_arrive() {
    const LEASE: i64 = 3000;
    let Some(fixture) = Fixture::start() else { return };
    let client = fixture.source().raw();
    let mut client = Watched::over(client, fixture.source());
    client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {LEASE} WATCHDOG"));
    client.get_token(&format!("LOCK.ACQUIRE {{key}}few holder LIMIT 2 LEASE {LEASE} WATCHDOG"));
    client.get_token("LOCK.ACQUIRE {key}freed holder LEASE 60000");
    client.get_token("LOCK.ACQUIRE {key}deleted holder LEASE 60000");
    let mut freed = Waiter::sending(fixture.source(), "LOCK.ACQUIRE {key}freed waiter LEASE 60000 WAIT 0");
    let mut deleted = Waiter::sending(fixture.source(), "LOCK.ACQUIRE {key}deleted waiter LEASE 60000 WAIT 0");
    let mut still = Waiter::start(fixture.source(), "key", "still");
    let begin = unix_millis();
    let mut halfway = fixture.cluster.begin_paused_migration(fixture.slot, fixture.from, fixture.to);

    let mut stranger = fixture.target().raw();
    for line in ["LOCK.ACQUIRE key stranger WAIT 0", "LOCK.INFO key", "LOCK.FORCE {key}freed"] {
        assert_eq!(error(&stranger.run(line)).0, "MOVED", "{line}: the slot is still the source's");
    }
    client.run_ok("LOCK.RELEASE {key}freed holder");
    let freed = freed.token();
    client.run_ok("DEL {key}deleted");
    let deleted = deleted.token();
    until(SOON, "the source has renewed leases since the move began", || {
        deadline(&mut client, "key") > begin + 2 * LEASE
    });
    assert!(still.waits());

    halfway.resume();
    halfway.arrives();
    fixture.is_moved(&mut still, fixture.target());
    let mut client = fixture.target().raw();
    assert!(deadline(&mut client, "key") > begin + 2 * LEASE, "the renewals have arrived");
    assert_held(&mut client, "key", "holder");
    assert_holders_listed(&mut client, "{key}few");
    for (key, token) in [("{key}freed", freed), ("{key}deleted", deleted)] {
        assert_held(&mut client, key, "waiter");
        assert_eq!(fields(&mut client, key.as_bytes())[b"#fence".as_slice()], token.to_string().into_bytes());
    }
    // The new node does not renew, as after every move.
    until(SOON, "the lease has expired", || client.run("EXISTS key") == Value::Int(0));
    until_nothing_is_bound(fixture.source());
}

#[test]
fn cancelled_migration_keeps_locks() {
    const LEASE: i64 = 3000;
    let Some(mut fixture) = Fixture::start() else { return };
    let client = fixture.source().raw();
    let mut client = Watched::over(client, fixture.source());
    client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {LEASE} WATCHDOG"));
    for owner in ["a", "b"] {
        client.get_token(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    let mut waiter = Waiter::start(fixture.source(), "key", "waiter");
    let mut third = Waiter::sending(fixture.source(), "LOCK.ACQUIRE {key}few c LIMIT 2 LEASE 60000 WAIT 0");
    let halfway = fixture.cluster.begin_paused_migration(fixture.slot, fixture.from, fixture.to);
    client.run_ok("LOCK.RELEASE {key}few a");
    third.token();
    halfway.cancel();
    until_empty(fixture.target());

    let later_deadline = unix_millis() + 2 * LEASE;
    until(SOON, "the watchdog renews again", || deadline(&mut client, "key") > later_deadline);
    assert!(waiter.waits());
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
    assert_holders_listed(&mut client, "{key}few");
    client.run_ok("LOCK.RELEASE {key}few b");
    client.get_token("LOCK.ACQUIRE {key}few d LIMIT 2 LEASE 50000");

    fixture.moves();
    let mut client = fixture.source().raw();
    assert_holders_listed(&mut client, "{key}few");
    assert!(client.run("LOCK.ACQUIRE {key}few e LIMIT 2").is_null(), "c and d hold it");
    client.run_ok("LOCK.RELEASE {key}few c");
    client.get_token("LOCK.ACQUIRE {key}few e LIMIT 2");
}

/// The slot returns with the same number of holders and the same newest token, but with other deadlines: the module
/// must not use its older copy of them.
#[test]
fn slot_returns_with_other_deadlines() {
    let Some(mut fixture) = Fixture::start() else { return };
    let mut client = fixture.source().raw();
    for owner in ["a", "b"] {
        client.get_token(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    assert_holders_listed(&mut client, "{key}few");
    fixture.moves();
    for (owner, lease) in [("a", 300_000), ("b", 600_000)] {
        fixture.source().raw().get_token(&format!("LOCK.RENEW {{key}}few {owner} LEASE {lease}"));
    }
    fixture.moves();
    assert_holders_listed(&mut client, "{key}few");
    let mut third = Waiter::sending(fixture.source(), "LOCK.ACQUIRE {key}few c LIMIT 2 WAIT 0");
    client.run_ok("LOCK.RELEASE {key}few a");
    third.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// A node gives a slot away and gets it back immediately. A waiter may still be queued there when the keys arrive, a
/// part of the holders at a time. In between, a place seems to be free.
#[test]
fn waiter_is_not_granted_during_import() {
    const HOLDERS: usize = 500;
    let Some(mut fixture) = Fixture::start() else { return };
    // The server disconnects waiters in its cron, which has to run late here.
    fixture.source().raw().run_ok("CONFIG SET hz 1");
    let lines: Vec<String> =
        (0..HOLDERS).map(|index| format!("LOCK.ACQUIRE {{key}}many {index} LIMIT {HOLDERS} LEASE 60000")).collect();
    for reply in fixture.source().raw().run_all(&lines) {
        reply.token();
    }
    let mut waiters: Vec<Waiter> = (0..20)
        .map(|index| format!("LOCK.ACQUIRE {{key}}many waiter-{index} LIMIT {HOLDERS} WAIT 0"))
        .map(|line| Waiter::sending(fixture.source(), &line))
        .collect();
    fixture.moves();
    let mut halfway = fixture.cluster.begin_paused_migration(fixture.slot, fixture.from, fixture.to);
    halfway.resume();
    halfway.arrives();
    let mut client = fixture.target().raw();
    for waiter in &mut waiters {
        if !waiter.waits() {
            assert_eq!(waiter.error(), "MOVED");
        }
    }
    assert_holders_listed(&mut client, "{key}many");
    assert_eq!(holders(&mut client, "{key}many").len(), HOLDERS);
}

/// Valkey's target can be kept from taking over. Redis' import can be made to fail repeatedly.
#[test]
fn failed_migration_keeps_locks() {
    let Some(fixture) = Fixture::start() else { return };
    let family = fixture.source().version().family;
    let mut client = fixture.source().raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    for owner in ["a", "b"] {
        client.get_token(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    let before = contents(fixture.source());
    let mut waiter = Waiter::start(fixture.source(), "key", "waiter");
    let mut target = fixture.target().raw();
    match family {
        Family::Valkey => {
            // How long the source waits for the target.
            client.run_ok("CONFIG SET cluster-manual-failover-timeout 500");
            target.run_ok("DEBUG SLOTMIGRATION PREVENT-FAILOVER 1")
        }
        Family::Redis => target.run_ok("DEBUG ASM-FAILPOINT import-main-channel wait-stream-eof"),
    };
    let failing = fixture.cluster.begin_atomic_move(fixture.slot, fixture.from, fixture.to);
    match family {
        Family::Valkey => failing.wait_until_cancelled(),
        Family::Redis => {
            until(SOON, "the import has failed", || {
                fixture.target().log().contains("Import task") && fixture.target().log().contains("failed")
            });
            target.run_ok("CLUSTER MIGRATION CANCEL ALL");
            failing.wait_until_cancelled();
        }
    }
    until_empty(fixture.target());
    assert_eq!(contents(fixture.source()), before);
    assert!(waiter.waits());
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// Six clients follow the lock: two never hold it at once, and tokens increase.
#[test]
fn slot_moves_back_and_forth_under_load() {
    const MOVES: usize = 6;
    let Some(mut fixture) = Fixture::start() else { return };
    let (over, held, newest, grants) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicI64::new(0), AtomicI64::new(0));
    let addresses = [fixture.source().addr(), fixture.target().addr()];
    thread::scope(|threads| {
        for number in 0..6 {
            let (over, held, newest, grants) = (&over, &held, &newest, &grants);
            threads.spawn(move || {
                let mut nodes = addresses.map(|address| Raw::connect(address).expect("connected"));
                let mut place = 0;
                while !over.load(Ordering::SeqCst) {
                    match nodes[place].run(&format!("LOCK.ACQUIRE key client-{number} LEASE 10000 WAIT 3000 HOLDS 1")) {
                        Value::Int(token) => {
                            assert!(!held.swap(true, Ordering::SeqCst), "two hold the lock");
                            assert!(newest.fetch_max(token, Ordering::SeqCst) < token, "a token decreased");
                            grants.fetch_add(1, Ordering::SeqCst);
                            held.store(false, Ordering::SeqCst);
                            if matches!(
                                nodes[place].run(&format!("LOCK.RELEASE key client-{number} ALL")),
                                Value::ServerError(_)
                            ) {
                                nodes[1 - place].run(&format!("LOCK.RELEASE key client-{number} ALL"));
                                place = 1 - place;
                            }
                        }
                        Value::ServerError(_) => place = 1 - place,
                        _ => {}
                    }
                }
            });
        }
        let _over = Over(&over);
        for _ in 0..MOVES {
            let before = grants.load(Ordering::SeqCst);
            until(SOON, "a hundred grants", || grants.load(Ordering::SeqCst) > before + 100);
            fixture.moves();
        }
    });
    for node in fixture.cluster.nodes() {
        until_no_waiters(node);
        assert_eq!(bound(node), 0);
    }
}
