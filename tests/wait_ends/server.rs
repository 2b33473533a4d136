//! Server events: the server is paused, short of memory, becomes a replica, migrates a slot, shuts down.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually, until};

use super::AHEAD;
use crate::common::{array, error, info_number, text, unix_micros};
use crate::moving_slot::MovingSlot;
use crate::waiter::{Commands, SOON, Waiter, assert_held, count_waiters, holders_in_hash, until_no_waiters};

/// Long enough to notice an unexpected reply.
const A_WHILE: Duration = Duration::from_millis(300);

/// Long enough for a lease of [`AHEAD`] to end, and to notice an unexpected reply then.
fn past_the_lease() -> Duration {
    Duration::from_millis(AHEAD) + A_WHILE
}

#[test]
fn evicted_lock_is_granted_to_waiter() {
    let server = Server::builder().arg("maxmemory-policy", "volatile-ttl").arg("maxmemory-samples", "64").start();
    let mut client = server.raw();
    // The other key is large enough to be the last one that is evicted.
    client.call(&[b"SET", b"ballast", &vec![b'x'; 4 << 20], b"EX", b"1000"]);
    let held = client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
    let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 3000000 WAIT 0");
    let mut second = Waiter::sending(&server, "LOCK.ACQUIRE key second LEASE 3000000 WAIT 0");
    let limit = info_number(&server, "memory", "used_memory") - (1 << 20);
    client.run_ok(&format!("CONFIG SET maxmemory {limit}"));
    assert!(first.token() > held);
    assert_held(&mut client, "key", "first");
    assert_eq!(info_number(&server, "stats", "evicted_keys"), 2, "the lock and the ballast");
    assert!(second.waits());
    client.run_ok("LOCK.RELEASE key first");
    second.token();
}

#[test]
fn hand_off_works_when_waiters_fill_memory() {
    let server = Server::builder().arg("maxmemory-policy", "noeviction").start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    client.run_ok("CONFIG SET maxmemory 1");
    assert_eq!(error(&client.run("LOCK.ACQUIRE another newcomer")).0, "OOM");
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
    assert_held(&mut client, "key", "waiter");
}

mod client_pause {
    use super::*;

    /// The hand-off is a write, so it happens when the pause has ended.
    #[test]
    fn lock_that_expires_is_granted_after_pause() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        client.run_ok("CLIENT PAUSE 60000 WRITE");
        assert!(!eventually(past_the_lease(), || !first.waits()), "no grant while writes are paused");
        let paused_until = unix_micros();
        client.run_ok("CLIENT UNPAUSE");
        assert!(first.token() >= paused_until);
        assert!(second.waits());
        assert_held(&mut client, "key", "first");
        client.run_ok("LOCK.RELEASE key first");
        second.token();
    }

    #[test]
    fn lock_that_expires_during_full_pause_is_granted_after_it() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut waiter = Waiter::start(&server, "key", "waiter");
        let begin = unix_micros();
        let pause = AHEAD as i64 + 500;
        client.run_ok(&format!("CLIENT PAUSE {pause} ALL"));
        assert!(waiter.token() - begin >= (pause - 1) * 1000, "no grant while everything is paused");
    }

    #[test]
    fn ephemeral_hold_ends_during_pause() {
        let server = Server::start();
        let mut client = server.raw();
        let mut holder = server.raw();
        holder.get_token("LOCK.ACQUIRE key holder LEASE 60000 EPHEMERAL");
        let mut waiter = Waiter::start(&server, "key", "waiter");
        client.run_ok("CLIENT PAUSE 60000 WRITE");
        holder.reset();
        assert!(!eventually(A_WHILE, || !waiter.waits()), "no grant while writes are paused");
        assert_held(&mut client, "key", "holder");
        client.run_ok("CLIENT UNPAUSE");
        waiter.token();
        assert_held(&mut client, "key", "waiter");
    }

    #[test]
    fn request_during_pause_is_granted_after_it() {
        let server = Server::start();
        let mut client = server.raw();
        client.run_ok("CLIENT PAUSE 60000 WRITE");
        let mut waiter = Waiter::start(&server, "key", "waiter");
        let mut release = Waiter::sending(&server, "LOCK.RELEASE key waiter");
        assert!(!eventually(A_WHILE, || !waiter.waits()));
        assert_eq!(client.run("EXISTS key"), Value::Int(0));
        client.run_ok("CLIENT UNPAUSE");
        waiter.token();
        assert_eq!(release.end(), Value::Int(1), "after the other, in order of arrival");
    }

    #[test]
    fn waiter_leaves_during_pause() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        client.run_ok("CLIENT PAUSE 60000 WRITE");
        first.raw.reset();
        assert!(!eventually(past_the_lease(), || !second.waits()));
        client.run_ok("CLIENT UNPAUSE");
        second.token();
        assert_held(&mut client, "key", "second");
    }
}

mod replicaof {
    use super::*;

    fn demote(client: &mut Raw) {
        // The port is closed: the link stays down, and the data stay as they are.
        client.run_ok("REPLICAOF 127.0.0.1 1");
    }

    fn promote(client: &mut Raw) {
        client.run_ok("REPLICAOF NO ONE");
    }

    #[test]
    fn waiters_get_unblocked_error_at_demotion_as_blpop() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        let mut blpop = Waiter::sending(&server, "BLPOP list 0");
        demote(&mut client);
        let received = first.end();
        assert_eq!(error(&received).0, "UNBLOCKED");
        assert_eq!(error(&received), error(&blpop.end()));
        assert_eq!(second.error(), "UNBLOCKED");
        until_no_waiters(&server);
        assert_held(&mut client, "key", "holder");
    }

    #[test]
    fn demoted_primary_grants_nothing() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        client.get_token("LOCK.ACQUIRE kept holder LEASE 60000");
        let mut waiters: Vec<Waiter> = ["key", "kept", "key", "kept"]
            .iter()
            .enumerate()
            .map(|(number, key)| Waiter::start(&server, key, &format!("waiter-{number}")))
            .collect();
        let offset = |server: &Server| info_number(server, "replication", "master_repl_offset");
        demote(&mut client);
        let written = offset(&server);
        for waiter in &mut waiters {
            assert_eq!(waiter.error(), "UNBLOCKED");
        }
        // The deadline of the first lock passes, and the waiters' connections are closed: nothing is granted.
        assert!(!eventually(past_the_lease(), || offset(&server) != written), "a replica writes nothing of its own");
        drop(waiters);
        until_no_waiters(&server);
        assert_eq!(holders_in_hash(&mut client, "key"), []);
        assert_held(&mut client, "kept", "holder");
        for line in ["LOCK.ACQUIRE key newcomer WAIT 0", "LOCK.RELEASE kept holder", "LOCK.FORCE kept"] {
            assert_eq!(error(&client.run(line)).0, "READONLY", "{line}");
        }
    }

    /// The grant and the demotion happen in one event-loop iteration. The server replies -UNBLOCKED to all blocked clients, and a
    /// replica revokes nothing, so the hold lasts until its lease ends. (A reply at the grant would get a client out of step if
    /// `CLIENT UNBLOCK … ERROR` came in that iteration.)
    #[test]
    fn grant_and_demotion_in_one_pipeline() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 500 WAIT 0");
        let mut second = Waiter::start(&server, "key", "second");
        client.send_lines(&["LOCK.RELEASE key holder", "REPLICAOF 127.0.0.1 1"]);
        assert_eq!(client.read().unwrap(), Value::Int(1));
        assert_eq!(client.read().unwrap(), Value::Okay);
        assert_eq!(first.error(), "UNBLOCKED");
        assert_eq!(second.error(), "UNBLOCKED");
        client.run("REPLICAOF NO ONE");
        until(
            SOON,
            "the lock can be acquired again",
            || matches!(client.run("LOCK.ACQUIRE key newcomer"), Value::Int(token) if token > 0),
        );
    }

    #[test]
    fn promoted_replica_serves_new_requests() {
        let (primary, replica) = (Server::start(), Server::start());
        replica.replica_of(&primary);
        primary.raw().get_token("LOCK.ACQUIRE key holder LEASE 60000");
        primary.wait_for_replica(&replica);
        let mut client = replica.raw();
        promote(&mut client);
        let mut waiter = Waiter::start(&replica, "key", "waiter");
        client.run_ok("LOCK.RELEASE key holder");
        waiter.token();
        assert_held(&mut client, "key", "waiter");
    }

    #[test]
    fn demotion_and_promotion_repeat() {
        let server = Server::start();
        let mut client = server.raw();
        client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        for _ in 0..3 {
            let mut waiter = Waiter::start(&server, "key", "waiter");
            demote(&mut client);
            assert_eq!(waiter.error(), "UNBLOCKED");
            promote(&mut client);
        }
        let mut waiter = Waiter::start(&server, "key", "waiter");
        client.run_ok("LOCK.RELEASE key holder");
        waiter.token();
        until_no_waiters(&server);
    }
}

mod cluster {
    use super::*;

    fn held() -> MovingSlot {
        let mut fixture = MovingSlot::start();
        fixture.client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
        fixture
    }

    /// The waiter is redirected to the slot's new node.
    #[track_caller]
    fn assert_redirected(fixture: &MovingSlot, waiter: &mut Waiter) {
        let reply = waiter.end();
        let (code, place) = error(&reply);
        assert_eq!(format!("{code} {place}"), fixture.moved());
    }

    /// Like those of BLPOP. They are granted at the new node.
    #[test]
    fn waiters_are_redirected_when_slot_moves() {
        let mut fixture = held();
        let mut first = Waiter::start(fixture.source(), "key", "first");
        let mut second = Waiter::start(fixture.source(), "key", "second");
        fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
        assert_redirected(&fixture, &mut first);
        assert_redirected(&fixture, &mut second);
        until_no_waiters(fixture.source());
        let mut client = fixture.target().raw();
        assert_held(&mut client, "key", "holder");
        let mut first = Waiter::start(fixture.target(), "key", "first");
        let mut second = Waiter::start(fixture.target(), "key", "second");
        assert_eq!(client.run("LOCK.RELEASE key holder"), Value::Int(1));
        let token = first.token();
        assert!(second.waits());
        client.run_ok("LOCK.RELEASE key first");
        assert!(second.token() > token);
        assert_eq!(error(&fixture.client.run("LOCK.ACQUIRE key first")).0, "MOVED");
    }

    /// The key exists at the other node: nothing is granted here, although it is missing here.
    #[test]
    fn lock_is_not_granted_while_its_key_is_at_the_other_node() {
        let fixture = held();
        let mut waiter = Waiter::start(fixture.source(), "key", "waiter");
        fixture.cluster.begin_move(fixture.slot, fixture.from, fixture.to);
        fixture.cluster.migrate_keys(fixture.slot, fixture.from, fixture.to);
        let served = eventually(A_WHILE * 3, || {
            waiter.raw.read_timeout(Duration::ZERO).unwrap().is_some_and(|reply| matches!(reply, Value::Int(_)))
        });
        assert!(!served, "holder holds the lock at the other node");
        fixture.cluster.finish_move(fixture.slot, fixture.from, fixture.to);
        assert_held(&mut fixture.target().raw(), "key", "holder");
        until_no_waiters(fixture.source());
    }

    /// Its waiters are granted here or redirected, and no grant is lost.
    #[test]
    fn lock_freed_before_its_key_moves() {
        let mut fixture = held();
        let mut first = Waiter::start(fixture.source(), "key", "first");
        let mut second = Waiter::start(fixture.source(), "key", "second");
        fixture.cluster.begin_move(fixture.slot, fixture.from, fixture.to);
        fixture.client.run_ok("LOCK.FORCE key");
        let granted = first.raw.read_timeout(A_WHILE).unwrap();
        fixture.cluster.migrate_keys(fixture.slot, fixture.from, fixture.to);
        fixture.cluster.finish_move(fixture.slot, fixture.from, fixture.to);
        assert_redirected(&fixture, &mut second);
        let mut client = fixture.target().raw();
        match granted {
            Some(Value::Int(_)) => assert_held(&mut client, "key", "first"),
            Some(other) => panic!("{other:?}"),
            None => {
                assert_redirected(&fixture, &mut first);
                assert_eq!(client.run("EXISTS key"), Value::Int(0));
            }
        }
        until_no_waiters(fixture.source());
    }

    /// The wait times out, and the slot is not served here any more: the server's cron would redirect the client when the module
    /// replies. The client gets one reply. (The server is paused until both are due, so that one iteration does both.)
    #[test]
    fn wait_times_out_while_slot_moves() {
        let mut fixture = held();
        for round in 0..10 {
            let mut waiter = Waiter::sending_briefly(fixture.source(), "LOCK.ACQUIRE key waiter WAIT 150");
            let over = unix_micros() + 150_000;
            fixture.client.run_ok(&format!("CLUSTER DELSLOTS {}", fixture.slot));
            fixture.source().stop();
            until(SOON, "the wait has timed out, and the cron is due", || unix_micros() > over + 200_000);
            fixture.source().cont();
            let reply = waiter.end();
            assert_eq!(waiter.raw.run("PING"), Value::SimpleString("PONG".into()), "round {round}, behind {reply:?}");
            fixture.client.run_ok(&format!("CLUSTER ADDSLOTS {}", fixture.slot));
            until(SOON, "the cluster is whole", || {
                text(&fixture.client.run("CLUSTER INFO")).contains("cluster_state:ok")
                    && !matches!(fixture.client.run("LOCK.INFO key"), Value::ServerError(_))
            });
        }
    }

    /// The migration is cancelled: a waiter that was not granted meanwhile is granted then.
    #[test]
    fn waiter_is_granted_when_migration_is_cancelled() {
        let mut fixture = held();
        let mut first = Waiter::start(fixture.source(), "key", "first");
        let mut second = Waiter::start(fixture.source(), "key", "second");
        fixture.cluster.begin_move(fixture.slot, fixture.from, fixture.to);
        fixture.client.run_ok("LOCK.RELEASE key holder");
        let line = format!("CLUSTER SETSLOT {} STABLE", fixture.slot);
        for mut node in [fixture.target().raw(), fixture.source().raw()] {
            node.run_ok(&line);
        }
        let granted = first.token();
        assert_held(&mut fixture.client, "key", "first");
        assert!(second.waits());
        fixture.client.run_ok("LOCK.RELEASE key first");
        assert!(second.token() > granted);
    }

    /// A lock that expires while its slot moves is granted once.
    #[test]
    fn lock_that_expires_while_slot_moves_is_granted_once() {
        let mut fixture = MovingSlot::start();
        fixture.client.get_token(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut waiter = Waiter::start(fixture.source(), "key", "waiter");
        fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
        // Expired before the move, or after it.
        match waiter.end() {
            Value::Int(granted) => {
                assert_held(&mut fixture.target().raw(), "key", "waiter");
                assert!(granted > 0);
            }
            refused => {
                assert_eq!(error(&refused).0, "MOVED");
                let mut client = fixture.target().raw();
                until(SOON, "the lock expires at the new node", || client.run("EXISTS key") == Value::Int(0));
            }
        }
        until_no_waiters(fixture.source());
    }

    /// Its slot moved away and is coming back, and the server has not redirected it yet. One of its keys has arrived
    /// and is released by a client that was sent here by `ASK`; the other one is held at the other node.
    #[test]
    fn waiter_for_several_keys_is_not_granted_while_one_is_at_the_other_node() {
        let mut scene = MovingSlot::start();
        let source = scene.source().addr();
        // The server redirects from its cron: that is to come late.
        scene.client.run("CONFIG SET hz 1");
        scene.client.get_token("LOCK.ACQUIRE {key}a holder LEASE 60000");
        let _waiter = Waiter::sending(scene.source(), "LOCK.MACQUIRE 2 {key}a {key}b waiter LEASE 60000 WAIT 0");
        let mut other = scene.target().raw();
        scene.cluster.move_slot(scene.slot, scene.from, scene.to);
        other.get_token("LOCK.ACQUIRE {key}b other LEASE 60000");
        scene.cluster.begin_move(scene.slot, scene.to, scene.from);
        other.run(&format!("MIGRATE {} {} {{key}}a 0 5000", source.ip(), source.port()));
        scene.client.run("ASKING");
        assert_eq!(scene.client.run("LOCK.RELEASE {key}a holder"), Value::Int(1));
        assert_held(&mut other, "{key}b", "other");
        for key in ["{key}a", "{key}b"] {
            scene.client.run("ASKING");
            assert_eq!(scene.client.run(&format!("EXISTS {key}")), Value::Int(0), "{key}");
        }
    }

    #[test]
    fn waiters_of_other_slots_stay() {
        let mut fixture = held();
        let other = fixture.key_of_other_slot();
        fixture.client.get_token(&format!("LOCK.ACQUIRE {other} holder LEASE 60000"));
        let mut moved = Waiter::start(fixture.source(), "key", "waiter");
        let mut stays = Waiter::start(fixture.source(), &other, "waiter");
        fixture.cluster.move_slot(fixture.slot, fixture.from, fixture.to);
        assert_redirected(&fixture, &mut moved);
        assert!(stays.waits());
        fixture.client.run_ok(&format!("LOCK.RELEASE {other} holder"));
        stays.token();
    }
}

/// The waiters' connections end; the lock is unchanged.
#[test]
fn shutdown_disconnects_waiters_and_keeps_lock() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let held = server.raw().get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let waiters: Vec<Waiter> =
        (0..10).map(|number| Waiter::start(&server, "key", &format!("waiter-{number}"))).collect();
    server.shutdown();
    for mut waiter in waiters {
        match waiter.raw.read() {
            Err(_) | Ok(Value::ServerError(_)) => {}
            Ok(other) => panic!("{other:?}"),
        }
    }
    server.restart();
    let mut client = server.raw();
    assert_held(&mut client, "key", "holder");
    assert_eq!(client.run("LOCK.ACQUIRE key holder"), Value::Int(held));
    until_no_waiters(&server);
}

#[test]
fn shutdown_in_granting_pipeline() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let waiter = Waiter::start(&server, "key", "waiter");
    client.send_lines(&["LOCK.RELEASE key holder", "SHUTDOWN"]);
    server.wait_until_ended();
    drop(waiter);
    server.restart();
    // No request is left: the grant is held until its lease ends, or was revoked.
    let holders = holders_in_hash(&mut server.raw(), "key");
    assert!(holders.is_empty() || holders == [("waiter".into(), "1".into())], "{holders:?}");
}

#[test]
fn unload_is_refused_while_request_waits() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    let refusal = client.run("MODULE UNLOAD holdfast");
    assert!(error(&refusal).1.contains("blocked clients"), "{refusal:?}");
    client.run_ok("LOCK.RELEASE key holder");
    waiter.token();
    drop(waiter);
    until(SOON, "the module can be unloaded", || client.run("MODULE UNLOAD holdfast") == Value::Okay);
    assert_held(&mut client, "key", "waiter");
    assert!(!server.log().contains("crash"), "{}", server.log());
}

#[test]
fn debug_reload_keeps_queue() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(&server, "key", "first");
    let mut second = Waiter::start(&server, "key", "second");
    client.run_ok("DEBUG RELOAD");
    assert!(!eventually(A_WHILE, || !first.waits()), "holder holds the lock");
    assert_held(&mut client, "key", "holder");
    assert_eq!(count_waiters(&mut client, "key"), 2);
    client.run_ok("LOCK.RELEASE key holder");
    let token = first.token();
    assert!(second.waits());
    client.run_ok("LOCK.RELEASE key first");
    assert!(second.token() > token);
    assert!(array(&client.run("LOCK.TOP")).is_empty());
}
