//! Something happens to the server: it is paused, short of memory, becomes a replica, gives a slot away, ends.

use std::time::Duration;

use redis::Value;
use support::{Raw, Server, eventually, until};

use super::AHEAD;
use crate::common::{array, error, info_number, text, unix_micros};
use crate::moving_slot::MovingSlot;
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held, count_waiters, holders_in_hash, until_nobody_waits};

/// Long enough to see that nothing happens.
const A_WHILE: Duration = Duration::from_millis(300);

/// Long enough for a lease of [`AHEAD`] to be over, and to see that nothing happens then.
fn until_it_is_over() -> Duration {
    Duration::from_millis(AHEAD) + A_WHILE
}

#[test]
fn evicted_lock_is_granted_to_waiter() {
    let server = Server::builder().arg("maxmemory-policy", "volatile-ttl").arg("maxmemory-samples", "64").start();
    let mut client = server.raw();
    // What goes after the lock is big enough to be the last that has to go.
    client.call(&[b"SET", b"ballast", &vec![b'x'; 4 << 20], b"EX", b"1000"]);
    let held = client.take("LOCK.ACQUIRE key holder LEASE 600000");
    let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 3000000 WAIT 0");
    let mut second = Waiter::sending(&server, "LOCK.ACQUIRE key second LEASE 3000000 WAIT 0");
    let limit = info_number(&server, "memory", "used_memory") - (1 << 20);
    client.order(&format!("CONFIG SET maxmemory {limit}"));
    assert!(first.token() > held);
    assert_held(&mut client, "key", "first");
    assert_eq!(info_number(&server, "stats", "evicted_keys"), 2, "the lock and the ballast");
    assert!(second.waits());
    client.order("LOCK.RELEASE key first");
    second.token();
}

#[test]
fn hand_off_works_when_waiters_fill_memory() {
    let server = Server::builder().arg("maxmemory-policy", "noeviction").start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    client.order("CONFIG SET maxmemory 1");
    assert_eq!(error(&client.say("LOCK.ACQUIRE another newcomer")).0, "OOM");
    client.order("LOCK.RELEASE key holder");
    waiter.token();
    assert_held(&mut client, "key", "waiter");
}

mod client_pause {
    use super::*;

    /// The hand-off is a write, so it comes when the pause is over.
    #[test]
    fn lock_that_expires_is_granted_after_pause() {
        let server = Server::start();
        let mut client = server.raw();
        client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        client.order("CLIENT PAUSE 60000 WRITE");
        assert!(!eventually(until_it_is_over(), || !first.waits()), "no grant while writes are paused");
        let paused_until = unix_micros();
        client.order("CLIENT UNPAUSE");
        assert!(first.token() >= paused_until);
        assert!(second.waits());
        assert_held(&mut client, "key", "first");
        client.order("LOCK.RELEASE key first");
        second.token();
    }

    #[test]
    fn lock_that_expires_during_full_pause_is_granted_after_it() {
        let server = Server::start();
        let mut client = server.raw();
        client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut waiter = Waiter::start(&server, "key", "waiter");
        let begin = unix_micros();
        let pause = AHEAD as i64 + 500;
        client.order(&format!("CLIENT PAUSE {pause} ALL"));
        assert!(waiter.token() - begin >= (pause - 1) * 1000, "no grant while everything is paused");
    }

    #[test]
    fn ephemeral_hold_ends_during_pause() {
        let server = Server::start();
        let mut client = server.raw();
        let mut holder = server.raw();
        holder.take("LOCK.ACQUIRE key holder LEASE 60000 EPHEMERAL");
        let mut waiter = Waiter::start(&server, "key", "waiter");
        client.order("CLIENT PAUSE 60000 WRITE");
        holder.reset();
        assert!(!eventually(A_WHILE, || !waiter.waits()), "no grant while writes are paused");
        assert_held(&mut client, "key", "holder");
        client.order("CLIENT UNPAUSE");
        waiter.token();
        assert_held(&mut client, "key", "waiter");
    }

    #[test]
    fn request_during_pause_is_granted_after_it() {
        let server = Server::start();
        let mut client = server.raw();
        client.order("CLIENT PAUSE 60000 WRITE");
        let mut waiter = Waiter::start(&server, "key", "waiter");
        let mut release = Waiter::sending(&server, "LOCK.RELEASE key waiter");
        assert!(!eventually(A_WHILE, || !waiter.waits()));
        assert_eq!(client.say("EXISTS key"), Value::Int(0));
        client.order("CLIENT UNPAUSE");
        waiter.token();
        assert_eq!(release.end(), Value::Int(1), "after the other, in the order in which they came");
    }

    #[test]
    fn waiter_leaves_during_pause() {
        let server = Server::start();
        let mut client = server.raw();
        client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        client.order("CLIENT PAUSE 60000 WRITE");
        first.raw.reset();
        assert!(!eventually(until_it_is_over(), || !second.waits()));
        client.order("CLIENT UNPAUSE");
        second.token();
        assert_held(&mut client, "key", "second");
    }
}

mod replicaof {
    use super::*;

    fn demote(client: &mut Raw) {
        // Nobody listens there: the link stays down, and the data as they are.
        client.order("REPLICAOF 127.0.0.1 1");
    }

    fn promote(client: &mut Raw) {
        client.order("REPLICAOF NO ONE");
    }

    #[test]
    fn waiters_get_unblocked_error_at_demotion_as_blpop() {
        let server = Server::start();
        let mut client = server.raw();
        client.take("LOCK.ACQUIRE key holder LEASE 60000");
        let mut first = Waiter::start(&server, "key", "first");
        let mut second = Waiter::start(&server, "key", "second");
        let mut blpop = Waiter::sending(&server, "BLPOP list 0");
        demote(&mut client);
        let told = first.end();
        assert_eq!(error(&told).0, "UNBLOCKED");
        assert_eq!(error(&told), error(&blpop.end()));
        assert_eq!(second.error(), "UNBLOCKED");
        until_nobody_waits(&server);
        assert_held(&mut client, "key", "holder");
    }

    #[test]
    fn demoted_primary_grants_nothing() {
        let server = Server::start();
        let mut client = server.raw();
        client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        client.take("LOCK.ACQUIRE kept holder LEASE 60000");
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
        // The deadline of the first lock passes, and with the waiters' connections gone nobody is served either.
        assert!(!eventually(until_it_is_over(), || offset(&server) != written), "a replica writes nothing of its own");
        drop(waiters);
        until_nobody_waits(&server);
        assert_eq!(holders_in_hash(&mut client, "key"), []);
        assert_held(&mut client, "kept", "holder");
        for line in ["LOCK.ACQUIRE key newcomer WAIT 0", "LOCK.RELEASE kept holder", "LOCK.FORCE kept"] {
            assert_eq!(error(&client.say(line)).0, "READONLY", "{line}");
        }
    }

    /// Granted and demoted in the same turn of the event loop: the server says -UNBLOCKED to all who are blocked, and a
    /// replica takes nothing back, so the hold ends with its lease. (To answer at the grant instead would, with `CLIENT
    /// UNBLOCK … ERROR` in that turn, put a client out of step for good.)
    #[test]
    fn grant_and_demotion_in_one_pipeline() {
        let server = Server::start();
        let mut client = server.raw();
        client.take("LOCK.ACQUIRE key holder LEASE 60000");
        let mut first = Waiter::sending(&server, "LOCK.ACQUIRE key first LEASE 500 WAIT 0");
        let mut second = Waiter::start(&server, "key", "second");
        client.tell(&["LOCK.RELEASE key holder", "REPLICAOF 127.0.0.1 1"]);
        assert_eq!(client.read().unwrap(), Value::Int(1));
        assert_eq!(client.read().unwrap(), Value::Okay);
        assert_eq!(first.error(), "UNBLOCKED");
        assert_eq!(second.error(), "UNBLOCKED");
        client.say("REPLICAOF NO ONE");
        until(
            SOON,
            "the lock can be had again",
            || matches!(client.say("LOCK.ACQUIRE key newcomer"), Value::Int(token) if token > 0),
        );
    }

    #[test]
    fn promoted_replica_serves_new_requests() {
        let (master, replica) = (Server::start(), Server::start());
        replica.replica_of(&master);
        master.raw().take("LOCK.ACQUIRE key holder LEASE 60000");
        master.wait_for_replica(&replica);
        let mut client = replica.raw();
        promote(&mut client);
        let mut waiter = Waiter::start(&replica, "key", "waiter");
        client.order("LOCK.RELEASE key holder");
        waiter.token();
        assert_held(&mut client, "key", "waiter");
    }

    #[test]
    fn demotion_and_promotion_repeat() {
        let server = Server::start();
        let mut client = server.raw();
        client.take("LOCK.ACQUIRE key holder LEASE 60000");
        for _ in 0..3 {
            let mut waiter = Waiter::start(&server, "key", "waiter");
            demote(&mut client);
            assert_eq!(waiter.error(), "UNBLOCKED");
            promote(&mut client);
        }
        let mut waiter = Waiter::start(&server, "key", "waiter");
        client.order("LOCK.RELEASE key holder");
        waiter.token();
        until_nobody_waits(&server);
    }
}

mod cluster {
    use super::*;

    fn held() -> MovingSlot {
        let mut scene = MovingSlot::start();
        scene.client.take("LOCK.ACQUIRE key holder LEASE 60000");
        scene
    }

    /// The waiter is told where the slot is now.
    #[track_caller]
    fn is_moved(scene: &MovingSlot, waiter: &mut Waiter) {
        let reply = waiter.end();
        let (code, place) = error(&reply);
        assert_eq!(format!("{code} {place}"), scene.moved());
    }

    /// As those of BLPOP, and are granted at the new node.
    #[test]
    fn waiters_are_redirected_when_slot_moves() {
        let mut scene = held();
        let mut first = Waiter::start(scene.source(), "key", "first");
        let mut second = Waiter::start(scene.source(), "key", "second");
        scene.cluster.move_slot(scene.slot, scene.from, scene.to);
        is_moved(&scene, &mut first);
        is_moved(&scene, &mut second);
        until_nobody_waits(scene.source());
        let mut client = scene.target().raw();
        assert_held(&mut client, "key", "holder");
        let mut first = Waiter::start(scene.target(), "key", "first");
        let mut second = Waiter::start(scene.target(), "key", "second");
        assert_eq!(client.say("LOCK.RELEASE key holder"), Value::Int(1));
        let token = first.token();
        assert!(second.waits());
        client.order("LOCK.RELEASE key first");
        assert!(second.token() > token);
        assert_eq!(error(&scene.client.say("LOCK.ACQUIRE key first")).0, "MOVED");
    }

    /// The key has gone to the other node and lives there: nobody gets it here, although it is not here any more.
    #[test]
    fn lock_is_not_granted_while_its_key_is_at_the_other_node() {
        let scene = held();
        let mut waiter = Waiter::start(scene.source(), "key", "waiter");
        scene.cluster.begin_move(scene.slot, scene.from, scene.to);
        scene.cluster.migrate_keys(scene.slot, scene.from, scene.to);
        let served = eventually(A_WHILE * 3, || {
            waiter.raw.read_timeout(Duration::ZERO).unwrap().is_some_and(|reply| matches!(reply, Value::Int(_)))
        });
        assert!(!served, "holder holds it at the other node");
        scene.cluster.finish_move(scene.slot, scene.from, scene.to);
        assert_held(&mut scene.target().raw(), "key", "holder");
        until_nobody_waits(scene.source());
    }

    /// Its waiters are granted here or redirected, and no grant is lost.
    #[test]
    fn lock_freed_before_its_key_moves() {
        let mut scene = held();
        let mut first = Waiter::start(scene.source(), "key", "first");
        let mut second = Waiter::start(scene.source(), "key", "second");
        scene.cluster.begin_move(scene.slot, scene.from, scene.to);
        scene.client.order("LOCK.FORCE key");
        let granted = first.raw.read_timeout(A_WHILE).unwrap();
        scene.cluster.migrate_keys(scene.slot, scene.from, scene.to);
        scene.cluster.finish_move(scene.slot, scene.from, scene.to);
        is_moved(&scene, &mut second);
        let mut client = scene.target().raw();
        match granted {
            Some(Value::Int(_)) => assert_held(&mut client, "key", "first"),
            Some(other) => panic!("{other:?}"),
            None => {
                is_moved(&scene, &mut first);
                assert_eq!(client.say("EXISTS key"), Value::Int(0));
            }
        }
        until_nobody_waits(scene.source());
    }

    /// The wait is over, and the slot is not served here any more: the server's cron would send the client away just as the
    /// module answers it. It gets one reply. (The server is paused until both are due, so that one iteration does both.)
    #[test]
    fn wait_times_out_while_slot_moves() {
        let mut scene = held();
        for round in 0..10 {
            let mut waiter = Waiter::sending(scene.source(), "LOCK.ACQUIRE key waiter WAIT 150");
            let over = unix_micros() + 150_000;
            scene.client.order(&format!("CLUSTER DELSLOTS {}", scene.slot));
            scene.source().stop();
            until(SOON, "the wait is over, and the cron is due", || unix_micros() > over + 200_000);
            scene.source().cont();
            let reply = waiter.end();
            assert_eq!(waiter.raw.say("PING"), Value::SimpleString("PONG".into()), "round {round}, behind {reply:?}");
            scene.client.order(&format!("CLUSTER ADDSLOTS {}", scene.slot));
            until(SOON, "the cluster is whole", || {
                text(&scene.client.say("CLUSTER INFO")).contains("cluster_state:ok")
                    && !matches!(scene.client.say("LOCK.INFO key"), Value::ServerError(_))
            });
        }
    }

    /// A move that is called off: who could not be served while it went on is served then.
    #[test]
    fn waiter_is_granted_when_migration_is_cancelled() {
        let mut scene = held();
        let mut first = Waiter::start(scene.source(), "key", "first");
        let mut second = Waiter::start(scene.source(), "key", "second");
        scene.cluster.begin_move(scene.slot, scene.from, scene.to);
        scene.client.order("LOCK.RELEASE key holder");
        let line = format!("CLUSTER SETSLOT {} STABLE", scene.slot);
        for mut node in [scene.target().raw(), scene.source().raw()] {
            node.order(&line);
        }
        let granted = first.token();
        assert_held(&mut scene.client, "key", "first");
        assert!(second.waits());
        scene.client.order("LOCK.RELEASE key first");
        assert!(second.token() > granted);
    }

    /// A lock that expires while its slot moves is not given away twice.
    #[test]
    fn lock_that_expires_while_slot_moves_is_granted_once() {
        let mut scene = MovingSlot::start();
        scene.client.take(&format!("LOCK.ACQUIRE key holder LEASE {AHEAD}"));
        let mut waiter = Waiter::start(scene.source(), "key", "waiter");
        scene.cluster.move_slot(scene.slot, scene.from, scene.to);
        // Expired before it moved, or after.
        match waiter.end() {
            Value::Int(granted) => {
                assert_held(&mut scene.target().raw(), "key", "waiter");
                assert!(granted > 0);
            }
            refused => {
                assert_eq!(error(&refused).0, "MOVED");
                let mut client = scene.target().raw();
                until(SOON, "it expires there", || client.say("EXISTS key") == Value::Int(0));
            }
        }
        until_nobody_waits(scene.source());
    }

    #[test]
    fn waiters_of_other_slots_stay() {
        let mut scene = held();
        let other = (0..)
            .map(|number| format!("other-{number}"))
            .find(|key| {
                let slot = scene.cluster.slot_of(key.as_bytes());
                slot != scene.slot && scene.cluster.owner_of(slot) == scene.from
            })
            .expect("a node has many slots");
        scene.client.take(&format!("LOCK.ACQUIRE {other} holder LEASE 60000"));
        let mut moved = Waiter::start(scene.source(), "key", "waiter");
        let mut stays = Waiter::start(scene.source(), &other, "waiter");
        scene.cluster.move_slot(scene.slot, scene.from, scene.to);
        is_moved(&scene, &mut moved);
        assert!(stays.waits());
        scene.client.order(&format!("LOCK.RELEASE {other} holder"));
        stays.token();
    }
}

/// The waiters' connections end; the lock is as it was.
#[test]
fn shutdown_disconnects_waiters_and_keeps_lock() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let held = server.raw().take("LOCK.ACQUIRE key holder LEASE 60000");
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
    assert_eq!(client.say("LOCK.ACQUIRE key holder"), Value::Int(held));
    until_nobody_waits(&server);
}

#[test]
fn shutdown_in_granting_pipeline() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let waiter = Waiter::start(&server, "key", "waiter");
    client.tell(&["LOCK.RELEASE key holder", "SHUTDOWN"]);
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
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut waiter = Waiter::start(&server, "key", "waiter");
    let refusal = client.say("MODULE UNLOAD holdfast");
    assert!(error(&refusal).1.contains("blocked clients"), "{refusal:?}");
    client.order("LOCK.RELEASE key holder");
    waiter.token();
    drop(waiter);
    until(SOON, "it can be unloaded", || client.say("MODULE UNLOAD holdfast") == Value::Okay);
    assert_held(&mut client, "key", "waiter");
    assert!(!server.log().contains("crash"), "{}", server.log());
}

#[test]
fn debug_reload_keeps_queue() {
    let server = Server::start();
    let mut client = server.raw();
    client.take("LOCK.ACQUIRE key holder LEASE 60000");
    let mut first = Waiter::start(&server, "key", "first");
    let mut second = Waiter::start(&server, "key", "second");
    client.order("DEBUG RELOAD");
    assert!(!eventually(A_WHILE, || !first.waits()), "holder holds it");
    assert_held(&mut client, "key", "holder");
    assert_eq!(count_waiters(&mut client, "key"), 2);
    client.order("LOCK.RELEASE key holder");
    let token = first.token();
    assert!(second.waits());
    client.order("LOCK.RELEASE key first");
    assert!(second.token() > token);
    assert!(array(&client.say("LOCK.TOP")).is_empty());
}
