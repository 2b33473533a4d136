//! Slots that move in one piece, with all that the module knows of the locks in them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;

use redis::Value;
use support::{Cluster, Family, Feature, Over, Raw, Server, skip, until};

use crate::common::{Bytes, error, fields, info_number, keys, unix_millis};
use crate::speak::{Reply, Watched, deadline, holders};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held, until_nobody_waits};

/// A cluster of two, the slot of `key`, and who has it.
struct Scene {
    cluster: Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Scene {
    /// `None`, and said, where slots don't move in one piece.
    fn set() -> Option<Self> {
        if !Server::start().can(Feature::WholeSlots) {
            skip("this server moves no slot in one piece");
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

    /// The slot moves, and what was the target is the source from then on.
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

/// All that lies in a keyspace: the fields of each key, and when it expires.
fn contents(server: &Server) -> BTreeMap<Bytes, (BTreeMap<Bytes, Bytes>, i64)> {
    let mut client = server.raw();
    let read = |key: Bytes| {
        let content = (fields(&mut client, &key), crate::common::deadline(&mut client, &key));
        (key, content)
    };
    keys(&mut server.raw()).into_iter().map(read).collect()
}

/// The module says of the holders of `key` what stands in the key: of each its token and its deadline.
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
        // At some moment between the two, and in whole milliseconds.
        let ttl = said[&owner].field("ttl").int();
        let said = before + ttl - 1..=after + ttl + 1;
        assert!(
            said.contains(&deadline),
            "{owner}'s deadline is {deadline} in the key, and said to be within {said:?}"
        );
    }
}

fn bound(server: &Server) -> i64 {
    info_number(server, "holdfast", "holdfast_bound_holds")
}

fn until_nothing_is_bound(server: &Server) {
    until(SOON, "no hold is bound any more", || bound(server) == 0);
}

fn until_empty(server: &Server) {
    until(SOON, "nothing of the slot is left", || server.raw().say("DBSIZE") == Value::Int(0));
}

#[test]
fn locks_arrive_and_waiters_are_redirected() {
    let Some(mut scene) = Scene::set() else { return };
    let mut client = scene.source().raw();
    let mut last = client.take("LOCK.ACQUIRE key holder LEASE 60000");
    for (owner, lease) in [("a", 50_000), ("b", 40_000), ("c", 60_000)] {
        last = client.take(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 3 LEASE {lease}"));
        client.take(&format!("LOCK.ACQUIRE {{key}}readers {owner} SHARED LEASE {lease}"));
    }
    let mut waiters: Vec<Waiter> = [
        "LOCK.ACQUIRE key first WAIT 0",
        "LOCK.ACQUIRE key second WAIT 60000",
        "LOCK.ACQUIRE {key}few d LIMIT 3 WAIT 0",
        "LOCK.ACQUIRE {key}readers writer WAIT 0",
        "LOCK.MACQUIRE 2 {key}free key both WAIT 0",
    ]
    .iter()
    .map(|line| Waiter::sending(scene.source(), line))
    .collect();
    let before = contents(scene.source());
    scene.moves();
    for waiter in &mut waiters {
        scene.is_moved(waiter, scene.source());
    }
    until_nobody_waits(scene.target());
    until_empty(scene.target());
    assert_eq!(contents(scene.source()), before);

    let mut client = scene.source().raw();
    for key in ["{key}few", "{key}readers"] {
        assert_holders_listed(&mut client, key);
    }
    let mut first = Waiter::start(scene.source(), "key", "first");
    client.order("LOCK.RELEASE key holder");
    assert!(first.token() > last);
    let mut fourth = Waiter::sending(scene.source(), "LOCK.ACQUIRE {key}few d LIMIT 3 WAIT 0");
    client.order("LOCK.RELEASE {key}few b");
    fourth.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// Also when the slot comes back.
#[test]
fn bindings_end_when_slot_moves() {
    let Some(mut scene) = Scene::set() else { return };
    let holder = scene.source().raw();
    let mut holder = Watched::over(holder, scene.source());
    holder.take("LOCK.ACQUIRE key holder LEASE 60000 WATCHDOG EPHEMERAL");
    holder.take("LOCK.ACQUIRE {key}few holder LIMIT 2 LEASE 60000 EPHEMERAL");
    scene.moves();
    until_nothing_is_bound(scene.target());
    assert_eq!(bound(scene.source()), 0);
    scene.moves();
    assert_eq!(bound(scene.source()), 0);
    let before = contents(scene.source());
    let id = holder.client_id();
    holder.reset();
    let mut client = scene.source().raw();
    crate::speak::until_gone(&mut client, id);
    // What an ended binding takes along goes before the next waiter of another lock is served.
    client.take("LOCK.ACQUIRE {key}other holder LEASE 60000");
    let mut waiter = Waiter::start(scene.source(), "{key}other", "waiter");
    client.order("LOCK.RELEASE {key}other holder");
    waiter.token();
    client.order("LOCK.RELEASE {key}other waiter");
    assert_eq!(contents(scene.source()), before);
}

/// Until the slot moves, the source renews and grants, and all of that arrives.
#[test]
fn changes_during_migration_arrive() {
    const LEASE: i64 = 3000;
    let Some(scene) = Scene::set() else { return };
    let client = scene.source().raw();
    let mut client = Watched::over(client, scene.source());
    client.take(&format!("LOCK.ACQUIRE key holder LEASE {LEASE} WATCHDOG"));
    client.take(&format!("LOCK.ACQUIRE {{key}}few holder LIMIT 2 LEASE {LEASE} WATCHDOG"));
    client.take("LOCK.ACQUIRE {key}freed holder LEASE 60000");
    client.take("LOCK.ACQUIRE {key}deleted holder LEASE 60000");
    let mut freed = Waiter::sending(scene.source(), "LOCK.ACQUIRE {key}freed waiter LEASE 60000 WAIT 0");
    let mut deleted = Waiter::sending(scene.source(), "LOCK.ACQUIRE {key}deleted waiter LEASE 60000 WAIT 0");
    let mut still = Waiter::start(scene.source(), "key", "still");
    let begin = unix_millis();
    let mut halfway = scene.cluster.begin_whole_move_and_hold(scene.slot, scene.from, scene.to);

    let mut stranger = scene.target().raw();
    for line in ["LOCK.ACQUIRE key stranger WAIT 0", "LOCK.INFO key", "LOCK.FORCE {key}freed"] {
        assert_eq!(error(&stranger.say(line)).0, "MOVED", "{line}: the slot is still the source's");
    }
    client.order("LOCK.RELEASE {key}freed holder");
    let freed = freed.token();
    client.order("DEL {key}deleted");
    let deleted = deleted.token();
    until(SOON, "leases were renewed beyond what they were when the move began", || {
        deadline(&mut client, "key") > begin + 2 * LEASE
    });
    assert!(still.waits());

    halfway.let_go();
    halfway.arrives();
    scene.is_moved(&mut still, scene.target());
    let mut client = scene.target().raw();
    assert!(deadline(&mut client, "key") > begin + 2 * LEASE, "the renewals have arrived");
    assert_held(&mut client, "key", "holder");
    assert_holders_listed(&mut client, "{key}few");
    for (key, token) in [("{key}freed", freed), ("{key}deleted", deleted)] {
        assert_held(&mut client, key, "waiter");
        assert_eq!(fields(&mut client, key.as_bytes())[b"#fence".as_slice()], token.to_string().into_bytes());
    }
    // Nobody renews there, as after every move.
    until(SOON, "the lease has run out", || client.say("EXISTS key") == Value::Int(0));
    until_nothing_is_bound(scene.source());
}

#[test]
fn cancelled_migration_keeps_locks() {
    const LEASE: i64 = 3000;
    let Some(mut scene) = Scene::set() else { return };
    let client = scene.source().raw();
    let mut client = Watched::over(client, scene.source());
    client.take(&format!("LOCK.ACQUIRE key holder LEASE {LEASE} WATCHDOG"));
    for owner in ["a", "b"] {
        client.take(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    let mut waiter = Waiter::start(scene.source(), "key", "waiter");
    let mut third = Waiter::sending(scene.source(), "LOCK.ACQUIRE {key}few c LIMIT 2 LEASE 60000 WAIT 0");
    let halfway = scene.cluster.begin_whole_move_and_hold(scene.slot, scene.from, scene.to);
    client.order("LOCK.RELEASE {key}few a");
    third.token();
    halfway.cancel();
    until_empty(scene.target());

    let until_then = unix_millis() + 2 * LEASE;
    until(SOON, "the watchdog goes on", || deadline(&mut client, "key") > until_then);
    assert!(waiter.waits());
    client.order("LOCK.RELEASE key holder");
    waiter.token();
    assert_holders_listed(&mut client, "{key}few");
    client.order("LOCK.RELEASE {key}few b");
    client.take("LOCK.ACQUIRE {key}few d LIMIT 2 LEASE 50000");

    scene.moves();
    let mut client = scene.source().raw();
    assert_holders_listed(&mut client, "{key}few");
    assert!(client.say("LOCK.ACQUIRE {key}few e LIMIT 2").is_null(), "c and d hold it");
    client.order("LOCK.RELEASE {key}few c");
    client.take("LOCK.ACQUIRE {key}few e LIMIT 2");
}

/// The same number of holders under the same newest token, with other deadlines: a copy from before would pass for the
/// key's.
#[test]
fn slot_returns_with_other_deadlines() {
    let Some(mut scene) = Scene::set() else { return };
    let mut client = scene.source().raw();
    for owner in ["a", "b"] {
        client.take(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    assert_holders_listed(&mut client, "{key}few");
    scene.moves();
    for (owner, lease) in [("a", 300_000), ("b", 600_000)] {
        scene.source().raw().take(&format!("LOCK.RENEW {{key}}few {owner} LEASE {lease}"));
    }
    scene.moves();
    assert_holders_listed(&mut client, "{key}few");
    let mut third = Waiter::sending(scene.source(), "LOCK.ACQUIRE {key}few c LIMIT 2 WAIT 0");
    client.order("LOCK.RELEASE {key}few a");
    third.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// A waiter at a node that hands the slot over and gets it back at once may still wait there when the keys come, a part
/// of the holders at a time: there seems to be room, and there is none.
#[test]
fn waiter_is_not_granted_during_import() {
    const HOLDERS: usize = 500;
    let Some(mut scene) = Scene::set() else { return };
    // The server itself sends waiters away from its cron: that is to come late.
    scene.source().raw().order("CONFIG SET hz 1");
    let lines: Vec<String> =
        (0..HOLDERS).map(|index| format!("LOCK.ACQUIRE {{key}}many {index} LIMIT {HOLDERS} LEASE 60000")).collect();
    for reply in scene.source().raw().say_all(&lines) {
        reply.token();
    }
    let mut waiters: Vec<Waiter> = (0..20)
        .map(|index| format!("LOCK.ACQUIRE {{key}}many waiter-{index} LIMIT {HOLDERS} WAIT 0"))
        .map(|line| Waiter::sending(scene.source(), &line))
        .collect();
    scene.moves();
    let mut halfway = scene.cluster.begin_whole_move_and_hold(scene.slot, scene.from, scene.to);
    halfway.let_go();
    halfway.arrives();
    let mut client = scene.target().raw();
    for waiter in &mut waiters {
        if !waiter.waits() {
            assert_eq!(waiter.error(), "MOVED");
        }
    }
    assert_holders_listed(&mut client, "{key}many");
    assert_eq!(holders(&mut client, "{key}many").len(), HOLDERS);
}

/// Valkey's target can be kept from taking over, Redis' import can be made to fail time and again.
#[test]
fn failed_migration_keeps_locks() {
    let Some(scene) = Scene::set() else { return };
    let family = scene.source().version().family;
    let mut client = scene.source().raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    for owner in ["a", "b"] {
        client.take(&format!("LOCK.ACQUIRE {{key}}few {owner} LIMIT 2 LEASE 60000"));
    }
    let before = contents(scene.source());
    let mut waiter = Waiter::start(scene.source(), "key", "waiter");
    let mut target = scene.target().raw();
    match family {
        Family::Valkey => {
            // How long the source waits for it.
            client.order("CONFIG SET cluster-manual-failover-timeout 500");
            target.order("DEBUG SLOTMIGRATION PREVENT-FAILOVER 1")
        }
        Family::Redis => target.order("DEBUG ASM-FAILPOINT import-main-channel wait-stream-eof"),
    };
    let failing = scene.cluster.begin_whole_move(scene.slot, scene.from, scene.to);
    match family {
        Family::Valkey => failing.is_given_up(),
        Family::Redis => {
            until(SOON, "the import has failed", || {
                scene.target().log().contains("Import task") && scene.target().log().contains("failed")
            });
            target.order("CLUSTER MIGRATION CANCEL ALL");
            failing.is_given_up();
        }
    }
    until_empty(scene.target());
    assert_eq!(contents(scene.source()), before);
    assert!(waiter.waits());
    client.order("LOCK.RELEASE key holder");
    waiter.token();
    assert_holders_listed(&mut client, "{key}few");
}

/// Six clients follow the lock: never do two hold it, and tokens increase.
#[test]
fn slot_moves_back_and_forth_under_load() {
    const MOVES: usize = 6;
    let Some(mut scene) = Scene::set() else { return };
    let (over, held, newest, grants) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicI64::new(0), AtomicI64::new(0));
    let addresses = [scene.source().addr(), scene.target().addr()];
    thread::scope(|threads| {
        for number in 0..6 {
            let (over, held, newest, grants) = (&over, &held, &newest, &grants);
            threads.spawn(move || {
                let mut nodes = addresses.map(|address| Raw::connect(address).expect("connected"));
                let mut place = 0;
                while !over.load(Ordering::SeqCst) {
                    match nodes[place].say(&format!("LOCK.ACQUIRE key client-{number} LEASE 10000 WAIT 3000 HOLDS 1")) {
                        Value::Int(token) => {
                            assert!(!held.swap(true, Ordering::SeqCst), "two hold the lock");
                            assert!(newest.fetch_max(token, Ordering::SeqCst) < token, "tokens go back");
                            grants.fetch_add(1, Ordering::SeqCst);
                            held.store(false, Ordering::SeqCst);
                            if matches!(
                                nodes[place].say(&format!("LOCK.RELEASE key client-{number} ALL")),
                                Value::ServerError(_)
                            ) {
                                nodes[1 - place].say(&format!("LOCK.RELEASE key client-{number} ALL"));
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
            scene.moves();
        }
    });
    for node in scene.cluster.nodes() {
        until_nobody_waits(node);
        assert_eq!(bound(node), 0);
    }
}
