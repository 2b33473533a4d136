//! Cycles of waits are refused, and nothing else is.

use redis::Value;
use support::{Random, Raw, Server, until};

use crate::many::Crowd;
use crate::random_run::{Mix, Run};
use crate::speak::{Reply, SOON, Speak, arrives, encode, setting, waiters};

/// Requires that a request is refused because of a cycle; its message.
#[track_caller]
fn refused(connection: &mut Raw, line: &str) -> String {
    let reply = connection.begin(line);
    let error = reply.unwrap_or_else(|| panic!("{line} waits")).error();
    assert!(error.starts_with("DEADLOCK owner "), "{line}: {error}");
    error
}

#[track_caller]
fn waits(connection: &mut Raw, line: &str) {
    assert_eq!(connection.begin(line), None, "{line} does not wait");
}

fn connections<const COUNT: usize>(server: &Server) -> [Raw; COUNT] {
    std::array::from_fn(|_| server.raw())
}

#[test]
fn circles_are_refused_and_named_in_full() {
    let server = Server::start();
    for size in [2, 3, 20] {
        let mut clients: Vec<Raw> = (0..size).map(|_| server.raw()).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            client.say(&format!("LOCK.ACQUIRE {size}:key:{index} owner-{index}-of-{size} LEASE 600000")).token();
        }
        let line = |index: usize, wait: &str| {
            format!("LOCK.ACQUIRE {size}:key:{} owner-{index}-of-{size} LEASE 600000 {wait}", (index + 1) % size)
        };
        for (index, client) in clients.iter_mut().enumerate().take(size - 1) {
            waits(client, &line(index, "WAIT 0"));
        }
        let last = size - 1;
        for wait in ["WAIT 0", "WAIT 60000"] {
            let message = refused(&mut clients[last], &line(last, wait));
            println!("{message}");
            for index in 0..size {
                for name in [format!("owner-{index}-of-{size}"), format!("{size}:key:{index}")] {
                    assert!(message.contains(&name), "no {name} in {message}");
                }
            }
            assert!(message.contains(" waits for ") && message.contains(" held by "), "{message}");
        }
        // It was only refused: nothing has changed, and all the others get what they wait for in the end.
        assert_eq!(waiters(&mut clients[last], &format!("{size}:key:0")), Vec::<String>::new());
        for index in (1..size).rev() {
            clients[index].say(&format!("LOCK.RELEASE {size}:key:{index} owner-{index}-of-{size}"));
            arrives(&mut clients[index - 1]).token();
        }
    }
    assert_eq!(server.info("holdfast", "holdfast_deadlocks_refused").as_deref(), Some("6"));
}

#[test]
fn who_does_not_wait_is_not_refused() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.say("LOCK.ACQUIRE a one").token();
    two.say("LOCK.ACQUIRE b two").token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    assert!(two.say("LOCK.ACQUIRE a two").is_null());
    two.say("MULTI");
    two.say("LOCK.ACQUIRE a two WAIT 0");
    assert!(two.say("EXEC").items()[0].is_null());
    two.say("LOCK.ACQUIRE b two WAIT 0").token();
    refused(&mut two, "LOCK.ACQUIRE a two WAIT 0");
}

#[test]
fn a_circle_is_gone_with_one_of_its_waits() {
    let server = Server::start();
    let [mut one, mut two, mut viewer] = connections(&server);
    one.say("LOCK.ACQUIRE a one").token();
    viewer.say("LOCK.ACQUIRE b two").token();
    let id = one.client_id();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    refused(&mut two, "LOCK.ACQUIRE a two WAIT 0");
    viewer.say(&format!("CLIENT UNBLOCK {id}"));
    assert!(arrives(&mut one).is_null());
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 0");
    // And the other way round.
    refused(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    two.reset();
    until(SOON, "the waiter has left", || waiters(&mut viewer, "a").is_empty());
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 0");
}

#[test]
fn an_owner_is_the_same_on_every_connection() {
    let server = Server::start();
    let [mut holding, mut waiting, mut other] = connections(&server);
    holding.say("LOCK.ACQUIRE a one").token();
    other.say("LOCK.ACQUIRE b two").token();
    waits(&mut waiting, "LOCK.ACQUIRE b one WAIT 0");
    refused(&mut other, "LOCK.ACQUIRE a two WAIT 0");
}

#[test]
fn a_circle_through_a_queue_for_several_locks() {
    let server = Server::start();
    let [mut holder, mut queued] = connections(&server);
    holder.say("LOCK.ACQUIRE a holder").token();
    waits(&mut queued, "LOCK.MACQUIRE 2 a b queued WAIT 0");
    // Nobody holds `b`, but the one who is first in its queue waits for `a`.
    let message = refused(&mut holder, "LOCK.ACQUIRE b holder WAIT 0");
    println!("{message}");
    assert!(message.contains("holder") && message.contains("queued"), "{message}");
    holder.say("LOCK.RELEASE a holder");
    arrives(&mut queued).token();
}

#[test]
fn a_circle_through_a_queue_of_readers_and_a_writer() {
    let server = Server::start();
    let [mut reader, mut writer, mut second] = connections(&server);
    reader.say("LOCK.ACQUIRE report reader SHARED").token();
    second.say("LOCK.ACQUIRE other second").token();
    waits(&mut writer, "LOCK.ACQUIRE report writer WAIT 0");
    waits(&mut second, "LOCK.ACQUIRE report second SHARED WAIT 0");
    // reader -> other, held by second -> report, behind writer -> report, held by reader
    let message = refused(&mut reader, "LOCK.ACQUIRE other reader WAIT 0");
    println!("{message}");
    for name in ["reader", "writer", "second", "report", "other"] {
        assert!(message.contains(name), "no {name} in {message}");
    }
}

#[test]
fn one_stuck_reader_is_enough_to_stop_a_writer() {
    let server = Server::start();
    let [mut stuck, mut free, mut writer] = connections(&server);
    stuck.say("LOCK.ACQUIRE report stuck SHARED").token();
    free.say("LOCK.ACQUIRE report free SHARED").token();
    writer.say("LOCK.ACQUIRE other writer").token();
    waits(&mut stuck, "LOCK.ACQUIRE other stuck WAIT 0");
    refused(&mut writer, "LOCK.ACQUIRE report writer WAIT 0");
}

#[test]
fn no_circle_where_a_place_in_a_semaphore_would_free() {
    let server = Server::start();
    let [mut one, mut two, mut three] = connections(&server);
    one.say("LOCK.ACQUIRE permits one LIMIT 2").token();
    two.say("LOCK.ACQUIRE permits two LIMIT 2").token();
    three.say("LOCK.ACQUIRE mutex three").token();
    waits(&mut three, "LOCK.ACQUIRE permits three LIMIT 2 WAIT 0");
    // `two` may still give its permit back.
    waits(&mut one, "LOCK.ACQUIRE mutex one WAIT 0");
    // Now it may not.
    let message = refused(&mut two, "LOCK.ACQUIRE mutex two WAIT 0");
    println!("{message}");
    two.say("LOCK.RELEASE permits two");
    arrives(&mut three).token();
}

#[test]
fn no_circle_where_the_queue_moves_on() {
    let server = Server::start();
    let [mut one, mut two, mut three] = connections(&server);
    one.say("LOCK.ACQUIRE a one").token();
    two.say("LOCK.ACQUIRE b two").token();
    waits(&mut three, "LOCK.ACQUIRE a three WAIT 0");
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 0");
    // `three` waits for `one` and holds nothing: `b` is a cycle only because `two` waits for `one`.
    refused(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    one.say("LOCK.RELEASE a one");
    arrives(&mut three).token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    three.say("LOCK.RELEASE a three");
    arrives(&mut two).token();
    two.say("LOCK.RELEASE b two");
    arrives(&mut one).token();
}

#[test]
fn a_cycle_through_several_locks() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.say("LOCK.MACQUIRE 2 a b one").token();
    two.say("LOCK.MACQUIRE 2 c d two").token();
    waits(&mut one, "LOCK.MACQUIRE 2 e c one WAIT 0");
    refused(&mut two, "LOCK.MACQUIRE 2 f b two WAIT 0");
}

/// Owners of the same name in two databases may be two programs that know nothing of each other.
#[test]
fn owners_of_one_name_in_two_databases_close_no_cycle() {
    let server = Server::start();
    let [mut one, mut two, mut there] = connections(&server);
    one.say("LOCK.ACQUIRE a1 worker-1").token();
    waits(&mut two, "LOCK.ACQUIRE a1 worker-2 WAIT 0");
    there.say("SELECT 5");
    there.say("LOCK.ACQUIRE b1 worker-2").token();
    assert!(there.say("LOCK.ACQUIRE b1 worker-1 WAIT 20").is_null(), "it waits, and its time is over");
}

/// The search follows no key that the asker may not read, and shows none: neither to tell what is there, nor to have
/// somebody refused who has nothing to do with it.
#[test]
fn a_cycle_through_a_key_that_may_not_be_read_is_not_found() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.say("ACL SETUSER app on >secret ~app:* &* +@all");
    one.say("LOCK.ACQUIRE secret:x one").token();
    let mut app = server.raw();
    app.say("AUTH app secret");
    app.say("LOCK.ACQUIRE app:z victim").token();
    // "victim" waits for "secret:x", as far as anybody can tell who may look there.
    waits(&mut two, "LOCK.ACQUIRE secret:x victim WAIT 0");
    assert!(app.say("LOCK.ACQUIRE app:z one WAIT 20").is_null(), "it waits, and its time is over");
    // Who may read both is told.
    refused(&mut one, "LOCK.ACQUIRE app:z one WAIT 0");
}

#[test]
fn keys_and_owners_are_escaped_in_the_message() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    let (first, second): (&[u8], &[u8]) = (b"own\0er\r\n-ERR \"1\"", b"\xffowner\t2");
    let (a, b): (&[u8], &[u8]) = (b"key\r\n\x1b[31m", b"\x80\\key");
    one.call(&[b"LOCK.ACQUIRE", a, first]).token();
    two.call(&[b"LOCK.ACQUIRE", b, second]).token();
    one.send(&[b"LOCK.ACQUIRE", b, first, b"WAIT", b"0"]).unwrap();
    until(SOON, "the first waits", || !two.call(&[b"LOCK.WAITERS", b]).items().is_empty());
    let message = two.call(&[b"LOCK.ACQUIRE", a, second, b"WAIT", b"0"]).error();
    println!("{message}");
    assert!(message.starts_with("DEADLOCK "), "{message}");
    assert!(message.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{message}");
    for part in ["\\x00", "\\r\\n", "\\xff", "\\t", "\\x1b", "\\x80\\\\key"] {
        assert!(message.contains(part), "no {part} in {message}");
    }
}

#[test]
fn detection_can_be_turned_off() {
    let server = Server::start();
    let [mut one, mut two, mut viewer] = connections(&server);
    assert_eq!(viewer.say("CONFIG SET holdfast.detect-deadlocks no"), Value::Okay);
    one.say("LOCK.ACQUIRE a one").token();
    two.say("LOCK.ACQUIRE b two").token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 0");
    assert!(two.say("LOCK.ACQUIRE a two WAIT 20").is_null());
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 0");
    assert_eq!(waiters(&mut viewer, "a"), ["two"]);
    // A cycle that stands already keeps nobody else from waiting.
    assert_eq!(viewer.say("CONFIG SET holdfast.detect-deadlocks yes"), Value::Okay);
    let mut third = server.raw();
    third.say("LOCK.ACQUIRE c third").token();
    viewer.say("LOCK.ACQUIRE d viewer").token();
    waits(&mut third, "LOCK.ACQUIRE d third WAIT 0");
    viewer.say("LOCK.FORCE a");
    arrives(&mut two).token();
    assert!(one.pending());
}

/// Much waiting and little release: each answer is compared with a plain search through everything that could happen.
#[test]
fn a_random_run_has_no_false_alarm_and_misses_nothing() {
    const MIX: Mix =
        Mix { owners: 20, keys: 8, release: 25, rare: 2, crash: 1, unblock: 10, several: 25, wait: 90, sessions: 2 };
    let steps = setting("HOLDFAST_DEADLOCK_STEPS", 20_000);
    let mut run = Run::new(Server::start(), MIX, Random::new());
    for _ in 0..steps {
        run.step();
    }
    run.compare_all();
    println!("{steps} steps: {:?}", run.seen);
    assert!(run.seen.count("deadlock") > steps / 100 && run.seen.count("served") > steps / 100);
}

/// What a request costs the server while ten thousand wait, half of them in a chain, half behind one lock: printed.
#[test]
fn the_cost_of_the_search_with_ten_thousand_waiters_is_printed() {
    let Some(Crowd { control: mut viewer, members: mut scene, server: _server, .. }) = Crowd::gather() else { return };
    let half = scene.len() / 2;
    // Not while the scene is set: ten thousand searches would take their time.
    assert_eq!(viewer.say("CONFIG SET holdfast.detect-deadlocks no"), Value::Okay);
    let (crowd, chain) = scene.split_at_mut(half);
    viewer.say("LOCK.ACQUIRE chain:0 end LEASE 600000").token();
    for (index, client) in chain.iter_mut().enumerate() {
        stand_between(client, &format!("chain:{}", index + 1), &format!("chain:{index}"), &format!("link:{index}"));
    }
    // The holder of the crowded lock is the last of the chain: so everything hangs together.
    viewer.say(&format!("LOCK.ACQUIRE crowded link:{} LEASE 600000", half - 1)).token();
    for (index, client) in crowd.iter_mut().enumerate() {
        stand_between(client, &format!("own:{index}"), "crowded", &format!("member:{index}"));
    }
    assert_eq!(viewer.say("CONFIG SET holdfast.detect-deadlocks yes"), Value::Okay);
    let requests = [
        ("a lock whose holder waits for nothing", "LOCK.ACQUIRE chain:0 late WAIT 1".to_owned()),
        ("a short way to who waits for nothing", "LOCK.ACQUIRE chain:10 late WAIT 1".to_owned()),
        ("a chain of 5,000 to its end", format!("LOCK.ACQUIRE chain:{half} late WAIT 1")),
        ("a crowd of 5,000, and the chain", "LOCK.ACQUIRE crowded late WAIT 1".to_owned()),
        ("a cycle of 11", "LOCK.ACQUIRE chain:10 end WAIT 1".to_owned()),
        ("a cycle of 5,001", format!("LOCK.ACQUIRE chain:{half} end WAIT 1")),
    ];
    for (what, line) in requests {
        viewer.say("CONFIG RESETSTAT");
        let reply = viewer.say(&line);
        let outcome = if reply.is_null() { "waits" } else { "refused" };
        println!("{what}, {} waiters: {} µs, {outcome}", 2 * half, server_time(&mut viewer));
        // A cycle may be too long to be found; what is no cycle is never refused.
        assert!(
            reply.is_null() || (what.contains("cycle") && reply.error().starts_with("DEADLOCK ")),
            "{what}: {reply:?}"
        );
    }
    let short = viewer.say("LOCK.ACQUIRE chain:10 end WAIT 1").error();
    assert!(short.starts_with("DEADLOCK "), "{short}");
}

/// Holds one lock and waits for another.
fn stand_between(client: &mut Raw, held: &str, wanted: &str, owner: &str) {
    let packet = [
        encode(&format!("LOCK.ACQUIRE {held} {owner} LEASE 600000")),
        encode(&format!("LOCK.ACQUIRE {wanted} {owner} LEASE 600000 WAIT 0")),
    ];
    client.send_bytes(&packet.concat()).unwrap();
    client.read().unwrap().token();
}

/// What the requests since `CONFIG RESETSTAT` took the server, in µs, by its own account.
fn server_time(connection: &mut Raw) -> String {
    let stats = connection.say("INFO commandstats").text();
    let line = stats.lines().find(|line| line.to_ascii_lowercase().starts_with("cmdstat_lock.acquire:"));
    let time = line.and_then(|line| line.split("usec=").nth(1)?.split(',').next());
    time.expect("it was counted").to_owned()
}
