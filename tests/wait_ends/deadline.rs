//! The lock expires, sooner or later than it was going to when the waiter came.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually};

use super::AHEAD;
use super::way::{Way, in_every_way, run};
use crate::common::{int, unix_micros};
use crate::waiter::{Speak, Tell, Waiter, assert_held, figure, until_nobody_waits};

/// Later than this nobody is served who is served by the deadline: that of one round, on a machine that has other work
/// too.
const LATE: i64 = 2_000_000;
/// Later than this is not the middle one of several rounds, in microseconds. The module's promise is 5 ms; the server's
/// own expiry cycle comes by every 100 ms, or every second with `hz 1`.
const LATE_MEDIAN: i64 = 50_000;
const ROUNDS: usize = 9;
/// Rounds lie further apart than a busy machine lets a process wait, so that one such pause is not in most of them; and
/// such that the server's own cycle would be as late as it can be in some of them.
const APART: i64 = 130;

/// The moment at which `key` expires, in microseconds since 1970.
fn deadline(client: &mut Raw, key: &str) -> i64 {
    let millis = int(&client.say(&format!("PEXPIRETIME {key}")));
    assert!(millis > 0, "{key} has no deadline: {millis}");
    millis * 1000
}

/// How late the grant was, in microseconds. A token is the time at which it was given, as long as that grows.
#[track_caller]
fn lateness(deadline: i64, token: i64) -> i64 {
    let late = token - deadline;
    assert!(late >= 0, "granted {} µs before the deadline", -late);
    assert!(late < LATE, "granted {late} µs after the deadline");
    late
}

struct Scene {
    server: Server,
    client: Raw,
}

impl Scene {
    /// A server whose cron comes by once a second.
    fn slow() -> Self {
        let server = Server::builder().arg("hz", "1").arg("dynamic-hz", "no").start();
        let client = server.raw();
        Self { server, client }
    }

    /// A server that on its own would not find out that a key has expired.
    fn lazy() -> Self {
        let mut scene = Self::slow();
        scene.client.order("DEBUG SET-ACTIVE-EXPIRE 0");
        scene
    }

    /// `holder` has the lock for `lease` ms, and somebody waits for it.
    #[track_caller]
    fn held_for(&mut self, lease: u64) -> Waiter {
        self.client.take(&format!("LOCK.ACQUIRE key holder LEASE {lease}"));
        Waiter::start(&self.server, "key", "waiter")
    }

    /// The waiter is served at the deadline that the key has now.
    #[track_caller]
    fn serves_at_the_deadline(mut self, mut waiter: Waiter) {
        let deadline = deadline(&mut self.client, "key");
        lateness(deadline, waiter.token());
        assert_held(&mut self.client, "key", "waiter");
        until_nobody_waits(&self.server);
    }

    /// The waiter is not served in the next `millis`, which its first deadline is in.
    #[track_caller]
    fn nobody_is_served_for(&mut self, millis: u64, waiter: &mut Waiter) {
        assert!(!eventually(Duration::from_millis(millis), || !waiter.waits()));
        assert_held(&mut self.client, "key", "holder");
    }
}

/// Waits for locks that expire, one after the other, and prints how late the grants were.
fn is_punctual(name: &str, mut scene: Scene) {
    let rounds: Vec<(i64, Waiter)> = (0..ROUNDS).map(|round| begin_round(&mut scene, round)).collect();
    let end = |(deadline, mut waiter): (i64, Waiter)| {
        let token = waiter.token();
        (lateness(deadline, token), unix_micros() - deadline)
    };
    let mut late: Vec<(i64, i64)> = rounds.into_iter().map(end).collect();
    late.sort_unstable();
    let (median, at_client) = late[ROUNDS / 2];
    let (least, most) = (late[0].0, late[ROUNDS - 1].0);
    figure(format_args!(
        "grant after a deadline, {name}: median {median} µs (at the client {at_client} µs), {least} to {most} µs"
    ));
    assert!(median < LATE_MEDIAN, "median {median} µs after the deadline");
}

/// A lock with a deadline of its own, and who waits for it.
fn begin_round(scene: &mut Scene, round: usize) -> (i64, Waiter) {
    let (key, lease) = (format!("key:{round}"), AHEAD as i64 + APART * round as i64);
    let token = scene.client.take(&format!("LOCK.ACQUIRE {key} holder LEASE {lease}"));
    // A token is the time of its grant, and a lease counts in whole milliseconds.
    ((token / 1000 + lease) * 1000, Waiter::start(&scene.server, &key, "waiter"))
}

#[test]
fn at_the_deadline() {
    let server = Server::start();
    let client = server.raw();
    is_punctual("hz 10", Scene { server, client });
}

#[test]
fn at_the_deadline_with_hz_1() {
    is_punctual("hz 1", Scene::slow());
}

#[test]
fn at_the_deadline_without_any_expiry_cycle() {
    let scene = Scene::lazy();
    is_punctual("no expiry cycle", scene);
}

/// Whoever was served by a release has a deadline, too, and those behind wait for it.
#[test]
fn at_the_deadline_of_one_who_was_served() {
    let mut scene = Scene::lazy();
    let mut late: Vec<i64> = (0..ROUNDS)
        .map(|round| {
            let lease = 60 + round as i64;
            scene.client.take("LOCK.ACQUIRE key holder LEASE 3600000");
            let line = format!("LOCK.ACQUIRE key first WAIT 0 LEASE {lease}");
            let mut first = Waiter::sending(&scene.server, &line);
            let mut second = Waiter::start(&scene.server, "key", "second");
            scene.client.order("LOCK.RELEASE key holder");
            // A token is the time of its grant, and a lease counts in whole milliseconds.
            let deadline = (first.token() / 1000 + lease) * 1000;
            let late = lateness(deadline, second.token());
            scene.client.order("LOCK.RELEASE key second");
            late
        })
        .collect();
    late.sort_unstable();
    figure(format_args!("grant after the deadline of one who was served: median {} µs", late[ROUNDS / 2]));
    assert!(late[ROUNDS / 2] < LATE_MEDIAN, "{late:?} µs after the deadline");
}

/// The holder of a lock for several has a deadline of its own, before that of the key.
#[test]
fn at_the_deadline_of_one_holder_of_several() {
    let mut scene = Scene::lazy();
    scene.client.take("LOCK.ACQUIRE key long LIMIT 2 LEASE 60000");
    let short = scene.client.take("LOCK.ACQUIRE key short LIMIT 2 LEASE 1500");
    let mut waiter = Waiter::sending(&scene.server, "LOCK.ACQUIRE key waiter LIMIT 2 WAIT 0");
    let late = waiter.token() - (short / 1000 + 1500) * 1000;
    assert!((-1000..LATE).contains(&late), "{late} µs after the deadline");
}

#[test]
fn one_after_the_other_when_nobody_releases() {
    let mut scene = Scene::lazy();
    scene.client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
    let lines = (0..5).map(|number| format!("LOCK.ACQUIRE key waiter-{number} LEASE 100 WAIT 0"));
    let waiters: Vec<Waiter> = lines.map(|line| Waiter::sending(&scene.server, &line)).collect();
    let tokens: Vec<i64> = waiters.into_iter().map(|mut waiter| waiter.token()).collect();
    for pair in tokens.windows(2) {
        let apart = pair[1] - pair[0];
        assert!((99_000..100_000 + LATE).contains(&apart), "{apart} µs apart");
    }
}

in_every_way! {
    sooner_by_pexpire: |way| {
        let mut scene = Scene::lazy();
        let waiter = scene.held_for(60_000);
        run(&mut scene.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        scene.serves_at_the_deadline(waiter);
    };
    sooner_by_expireat: |way| {
        let mut scene = Scene::lazy();
        let waiter = scene.held_for(60_000);
        let second = unix_micros() / 1_000_000 + 2;
        run(&mut scene.client, way, &[&format!("EXPIREAT key {second}")]);
        lateness(second * 1_000_000, { waiter }.token());
    };
    later_by_pexpire: |way| {
        let mut scene = Scene::lazy();
        let mut waiter = scene.held_for(AHEAD);
        run(&mut scene.client, way, &[&format!("PEXPIRE key {}", 3 * AHEAD)]);
        scene.nobody_is_served_for(AHEAD + 150, &mut waiter);
        scene.serves_at_the_deadline(waiter);
    };
    later_by_expireat: |way| {
        let mut scene = Scene::lazy();
        let mut waiter = scene.held_for(AHEAD);
        let second = unix_micros() / 1_000_000 + 4;
        run(&mut scene.client, way, &[&format!("EXPIREAT key {second}")]);
        scene.nobody_is_served_for(AHEAD + 150, &mut waiter);
        scene.serves_at_the_deadline(waiter);
    };
    never_by_persist: |way| {
        let mut scene = Scene::lazy();
        let mut waiter = scene.held_for(AHEAD);
        run(&mut scene.client, way, &["PERSIST key"]);
        scene.nobody_is_served_for(AHEAD + 150, &mut waiter);
        run(&mut scene.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        scene.serves_at_the_deadline(waiter);
    };
    a_first_deadline: |way| {
        let mut scene = Scene::lazy();
        scene.client.order("HSET key holder 1");
        let mut waiter = Waiter::start(&scene.server, "key", "waiter");
        scene.nobody_is_served_for(50, &mut waiter);
        run(&mut scene.client, way, &[&format!("PEXPIRE key {AHEAD}")]);
        scene.serves_at_the_deadline(waiter);
    };
    later_by_renewal: |way| {
        let mut scene = Scene::lazy();
        let mut waiter = scene.held_for(AHEAD);
        run(&mut scene.client, way, &[&format!("LOCK.RENEW key holder LEASE {}", 3 * AHEAD)]);
        scene.nobody_is_served_for(AHEAD + 150, &mut waiter);
        scene.serves_at_the_deadline(waiter);
    };
    sooner_by_renewal: |way| {
        let mut scene = Scene::lazy();
        let waiter = scene.held_for(60_000);
        run(&mut scene.client, way, &[&format!("LOCK.RENEW key holder LEASE {AHEAD}")]);
        scene.serves_at_the_deadline(waiter);
    };
    sooner_by_a_release_that_leaves_holds: |way| {
        let mut scene = Scene::lazy();
        let waiter = scene.held_for(60_000);
        scene.client.order("LOCK.ACQUIRE key holder LEASE 60000");
        run(&mut scene.client, way, &[&format!("LOCK.RELEASE key holder LEASE {AHEAD}")]);
        scene.serves_at_the_deadline(waiter);
    };
    sooner_by_another_lock_in_its_place: |way| {
        let mut scene = Scene::lazy();
        let waiter = scene.held_for(60_000);
        scene.client.order("LOCK.ACQUIRE other holder LEASE 60000");
        run(&mut scene.client, way, &[&format!("PEXPIRE other {AHEAD}"), "RENAME other key"]);
        scene.serves_at_the_deadline(waiter);
    };
}

#[test]
fn the_deadline_of_a_re_entry_counts() {
    let mut scene = Scene::lazy();
    let mut waiter = scene.held_for(AHEAD);
    scene.client.order(&format!("LOCK.ACQUIRE key holder HOLDS 1 LEASE {}", 3 * AHEAD));
    scene.nobody_is_served_for(AHEAD + 150, &mut waiter);
    scene.serves_at_the_deadline(waiter);
}

/// Its own deadline, not the lock's.
#[test]
fn its_own_timeout() {
    let server = Server::start();
    let mut client = server.raw();
    let held = client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut behind = server.raw();
    for wait in [1, 20, 200] {
        let begin = unix_micros();
        let mut waiter = server.raw();
        waiter.tell(&[&format!("LOCK.ACQUIRE key waiter WAIT {wait}")]);
        assert_eq!(waiter.read().unwrap(), Value::Nil);
        let took = unix_micros() - begin;
        figure(format_args!("null after WAIT {wait}: {took} µs"));
        // "At most that long": a part of a millisecond less is fine.
        assert!(((wait - 1) * 1000..wait * 1000 + LATE).contains(&took), "{took} µs");
    }
    until_nobody_waits(&server);
    assert_held(&mut client, "key", "holder");
    assert_eq!(client.say("LOCK.ACQUIRE key holder"), Value::Int(held), "the lock is as it was");
    client.order("LOCK.RELEASE key holder ALL");
    behind.take("LOCK.ACQUIRE key newcomer");
}

#[test]
fn a_timeout_in_the_middle_of_the_queue() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(&server, "key", "first");
    let mut middle = Waiter::sending(&server, &format!("LOCK.ACQUIRE key middle WAIT {AHEAD}"));
    let mut last = Waiter::start(&server, "key", "last");
    assert_eq!(middle.end(), Value::Nil);
    client.order("LOCK.RELEASE key holder");
    first.token();
    assert!(last.waits());
    client.order("LOCK.RELEASE key first");
    last.token();
}

/// The wait of the longest possible kind does not overflow into a short one.
#[test]
fn a_very_long_wait() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::sending(&server, &format!("LOCK.ACQUIRE key waiter WAIT {}", 365_u64 * 24 * 3_600_000));
    assert!(!eventually(Duration::from_millis(50), || !waiter.waits()));
    client.order("LOCK.RELEASE key holder");
    waiter.token();
}
