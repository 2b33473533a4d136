//! Requests that would close a cycle of waits are refused, and no others.

use redis::Value;
use support::{Random, Raw, Server, until};

use crate::lines::{Commands, Reply, SOON, arrives, encode, setting, waiters};
use crate::random_run::{Mix, Run};

/// Asserts that a request is refused because of a cycle, and returns the message.
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
fn cycles_are_refused_and_named_in_full() {
    let server = Server::start();
    for size in [2, 3, 20] {
        let mut clients: Vec<Raw> = (0..size).map(|_| server.raw()).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            client.run(&format!("LOCK.ACQUIRE {size}:key:{index} owner-{index}-of-{size} LEASE 600000")).token();
        }
        let line = |index: usize, wait: &str| {
            format!("LOCK.ACQUIRE {size}:key:{} owner-{index}-of-{size} LEASE 600000 {wait}", (index + 1) % size)
        };
        for (index, client) in clients.iter_mut().enumerate().take(size - 1) {
            waits(client, &line(index, "WAIT 60000"));
        }
        let last = size - 1;
        for wait in ["WAIT 1000", "WAIT 60000"] {
            let message = refused(&mut clients[last], &line(last, wait));
            println!("{message}");
            for index in 0..size {
                for name in [format!("owner-{index}-of-{size}"), format!("{size}:key:{index}")] {
                    assert!(message.contains(&name), "no {name} in {message}");
                }
            }
            assert!(message.contains(" waits for ") && message.contains(" held by "), "{message}");
        }
        // The refusal changed nothing: the other requests are granted in the end.
        assert_eq!(waiters(&mut clients[last], &format!("{size}:key:0")), Vec::<String>::new());
        for index in (1..size).rev() {
            clients[index].run(&format!("LOCK.RELEASE {size}:key:{index} owner-{index}-of-{size}"));
            arrives(&mut clients[index - 1]).token();
        }
    }
    assert_eq!(server.info("holdfast", "holdfast_deadlocks_refused").as_deref(), Some("6"));
}

#[test]
fn request_without_wait_is_not_refused() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("LOCK.ACQUIRE a one LEASE 600000").token();
    two.run("LOCK.ACQUIRE b two LEASE 600000").token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    assert!(two.run("LOCK.ACQUIRE a two").is_null());
    two.run("MULTI");
    two.run("LOCK.ACQUIRE a two WAIT 60000");
    assert!(two.run("EXEC").items()[0].is_null());
    two.run("LOCK.ACQUIRE b two WAIT 60000").token();
    refused(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
}

#[test]
fn cycle_ends_with_one_of_its_waits() {
    let server = Server::start();
    let [mut one, mut two, mut viewer] = connections(&server);
    one.run("LOCK.ACQUIRE a one LEASE 600000").token();
    viewer.run("LOCK.ACQUIRE b two LEASE 600000").token();
    let id = one.client_id();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    refused(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
    viewer.run(&format!("CLIENT UNBLOCK {id}"));
    assert!(arrives(&mut one).is_null());
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
    // The same in the other direction.
    refused(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    two.reset();
    until(SOON, "the waiter has left the queue", || waiters(&mut viewer, "a").is_empty());
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
}

#[test]
fn owner_is_the_same_on_every_connection() {
    let server = Server::start();
    let [mut holding, mut waiting, mut other] = connections(&server);
    holding.run("LOCK.ACQUIRE a one LEASE 600000").token();
    other.run("LOCK.ACQUIRE b two LEASE 600000").token();
    waits(&mut waiting, "LOCK.ACQUIRE b one WAIT 60000");
    refused(&mut other, "LOCK.ACQUIRE a two WAIT 60000");
}

#[test]
fn cycle_through_queue_for_several_locks_is_refused() {
    let server = Server::start();
    let [mut holder, mut queued] = connections(&server);
    holder.run("LOCK.ACQUIRE a holder LEASE 600000").token();
    waits(&mut queued, "LOCK.MACQUIRE 2 a b queued WAIT 60000");
    // `b` has no holder, but the head of its queue waits for `a`.
    let message = refused(&mut holder, "LOCK.ACQUIRE b holder WAIT 60000");
    println!("{message}");
    assert!(message.contains("holder") && message.contains("queued"), "{message}");
    holder.run("LOCK.RELEASE a holder");
    arrives(&mut queued).token();
}

/// A holder with `LIMIT 1` does not share the lock, so readers wait for it as well.
#[test]
fn cycle_of_two_readers_of_exclusive_locks_is_refused() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("LOCK.ACQUIRE a one LEASE 600000").token();
    two.run("LOCK.ACQUIRE b two LEASE 600000").token();
    waits(&mut one, "LOCK.ACQUIRE b one SHARED WAIT 60000");
    refused(&mut two, "LOCK.ACQUIRE a two SHARED WAIT 60000");
}

/// A writer waits for readers that may change. The search does not follow them.
#[test]
fn search_does_not_follow_readers() {
    let server = Server::start();
    let [mut stuck, mut free, mut writer] = connections(&server);
    stuck.run("LOCK.ACQUIRE report stuck SHARED LEASE 600000").token();
    free.run("LOCK.ACQUIRE report free SHARED LEASE 600000").token();
    writer.run("LOCK.ACQUIRE other writer LEASE 600000").token();
    waits(&mut stuck, "LOCK.ACQUIRE other stuck WAIT 60000");
    waits(&mut writer, "LOCK.ACQUIRE report writer WAIT 60000");
}

#[test]
fn search_does_not_follow_semaphores() {
    let server = Server::start();
    let [mut one, mut two, mut three] = connections(&server);
    one.run("LOCK.ACQUIRE permits one LIMIT 2 LEASE 600000").token();
    two.run("LOCK.ACQUIRE permits two LIMIT 2 LEASE 600000").token();
    three.run("LOCK.ACQUIRE mutex three LEASE 600000").token();
    waits(&mut three, "LOCK.ACQUIRE permits three LIMIT 2 WAIT 60000");
    waits(&mut one, "LOCK.ACQUIRE mutex one WAIT 60000");
    waits(&mut two, "LOCK.ACQUIRE mutex two WAIT 60000");
}

/// A thread of a client is one actor, with all its acquisitions.
#[test]
fn thread_that_waits_for_itself_is_refused() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("LOCK.ACQUIRE a vm:1:thread##1 LEASE 600000").token();
    let message = refused(&mut one, "LOCK.ACQUIRE a vm:1:thread##2 WAIT 60000");
    assert!(message.contains("'vm:1:thread##2' waits for 'a' held by 'vm:1:thread##1'"), "{message}");
    two.run("LOCK.ACQUIRE b vm:1:other##1 LEASE 600000").token();
    waits(&mut two, "LOCK.ACQUIRE a vm:1:other##2 WAIT 60000");
    refused(&mut one, "LOCK.ACQUIRE b vm:1:thread##3 WAIT 60000");
}

/// A lease would end this cycle, but the expiry would be a loss.
#[test]
fn search_ignores_leases() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("LOCK.ACQUIRE x t##1 LEASE 1500").token();
    for wait in ["WAIT 0", "WAIT 1", "WAIT 60000"] {
        refused(&mut one, &format!("LOCK.ACQUIRE x t##2 {wait}"));
    }
    one.run("LOCK.ACQUIRE a one LEASE 20000").token();
    two.run("LOCK.ACQUIRE b two LEASE 20000").token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    refused(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
}

#[test]
fn waiting_behind_a_queue_closes_no_cycle() {
    let server = Server::start();
    let [mut one, mut two, mut three] = connections(&server);
    one.run("LOCK.ACQUIRE a one LEASE 600000").token();
    two.run("LOCK.ACQUIRE b two LEASE 600000").token();
    waits(&mut three, "LOCK.ACQUIRE a three WAIT 60000");
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
    // `three` waits for `one` and holds nothing. The request for `b` closes a cycle only because `two` waits for `one`.
    refused(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    one.run("LOCK.RELEASE a one");
    arrives(&mut three).token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    three.run("LOCK.RELEASE a three");
    arrives(&mut two).token();
    two.run("LOCK.RELEASE b two");
    arrives(&mut one).token();
}

#[test]
fn cycle_through_several_locks_is_refused() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("LOCK.MACQUIRE 2 a b one LEASE 600000").token();
    two.run("LOCK.MACQUIRE 2 c d two LEASE 600000").token();
    waits(&mut one, "LOCK.MACQUIRE 2 e c one WAIT 60000");
    refused(&mut two, "LOCK.MACQUIRE 2 f b two WAIT 60000");
}

/// Owners of the same name in two databases may belong to unrelated programs.
#[test]
fn same_owner_in_two_databases_closes_no_cycle() {
    let server = Server::start();
    let [mut one, mut two, mut there] = connections(&server);
    one.run("LOCK.ACQUIRE a1 worker-1 LEASE 600000").token();
    waits(&mut two, "LOCK.ACQUIRE a1 worker-2 WAIT 60000");
    there.run("SELECT 5");
    there.run("LOCK.ACQUIRE b1 worker-2 LEASE 600000").token();
    assert!(there.run("LOCK.ACQUIRE b1 worker-1 WAIT 20").is_null(), "it waits, and its time is over");
}

/// The search does not follow keys that the client may not read. An error would show their names, and a client could
/// cause refusals for others.
#[test]
fn cycle_through_unreadable_key_is_not_found() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    one.run("ACL SETUSER app on >secret ~app:* &* +@all");
    one.run("LOCK.ACQUIRE secret:x one LEASE 600000").token();
    let mut app = server.raw();
    app.run("AUTH app secret");
    app.run("LOCK.ACQUIRE app:z victim LEASE 600000").token();
    // `victim` waits for `secret:x`, which only users with the right to read it may learn.
    waits(&mut two, "LOCK.ACQUIRE secret:x victim WAIT 60000");
    assert!(app.run("LOCK.ACQUIRE app:z one WAIT 20").is_null(), "it waits, and its time is over");
    // A user that may read both keys gets the error.
    refused(&mut one, "LOCK.ACQUIRE app:z one WAIT 60000");
}

#[test]
fn error_escapes_keys_and_owners() {
    let server = Server::start();
    let [mut one, mut two] = connections(&server);
    let (first, second): (&[u8], &[u8]) = (b"own\0er\r\n-ERR \"1\"", b"\xffowner\t2");
    let (a, b): (&[u8], &[u8]) = (b"key\r\n\x1b[31m", b"\x80\\key");
    one.call(&[b"LOCK.ACQUIRE", a, first, b"LEASE", b"600000"]).token();
    two.call(&[b"LOCK.ACQUIRE", b, second, b"LEASE", b"600000"]).token();
    one.send(&[b"LOCK.ACQUIRE", b, first, b"WAIT", b"60000"]).unwrap();
    until(SOON, "the first waits", || !two.call(&[b"LOCK.WAITERS", b]).items().is_empty());
    let message = two.call(&[b"LOCK.ACQUIRE", a, second, b"WAIT", b"60000"]).error();
    println!("{message}");
    assert!(message.starts_with("DEADLOCK "), "{message}");
    assert!(message.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{message}");
    for part in ["\\x00", "\\r\\n", "\\xff", "\\t", "\\x1b", "\\x80\\\\key"] {
        assert!(message.contains(part), "no {part} in {message}");
    }
}

/// The search for a cycle is the first to read a key that has expired. The server notifies the module of the expiry during the search.
#[test]
fn search_handles_key_that_expired() {
    let server = Server::start();
    let mut raw = server.raw();
    let session = raw.run("LOCK.SESSION").field("id").text();
    raw.run("LOCK.ACQUIRE bobs bob LEASE 600000").int();
    raw.run("LOCK.ACQUIRE alices alice LEASE 600000").int();
    raw.run("LOCK.ACQUIRE short carol LEASE 1500").int();
    let waiting = raw.run(&format!("LOCK.MACQUIRE 2 short alices bob WAIT 0 SESSION {session}"));
    assert_eq!(waiting.text(), "WAITING");
    // In one write, so that no other command reads the key before.
    let asked = format!("LOCK.ACQUIRE bobs alice WAIT 1000 SESSION {session}");
    raw.send_bytes(&["DEBUG SLEEP 2", &asked].map(encode).concat()).expect("sent");
    assert_eq!(raw.read().expect("a reply"), Value::Okay);
    let refused = raw.read().expect("a reply").error();
    assert!(refused.starts_with("DEADLOCK"), "{refused}");
}

#[test]
fn detection_can_be_turned_off() {
    let server = Server::start();
    let [mut one, mut two, mut viewer] = connections(&server);
    assert_eq!(viewer.run("CONFIG SET holdfast.detect-deadlocks no"), Value::Okay);
    one.run("LOCK.ACQUIRE a one LEASE 600000").token();
    two.run("LOCK.ACQUIRE b two LEASE 600000").token();
    waits(&mut one, "LOCK.ACQUIRE b one WAIT 60000");
    assert!(two.run("LOCK.ACQUIRE a two WAIT 20").is_null());
    waits(&mut two, "LOCK.ACQUIRE a two WAIT 60000");
    assert_eq!(waiters(&mut viewer, "a"), ["two"]);
    // An existing cycle does not keep other requests from waiting.
    assert_eq!(viewer.run("CONFIG SET holdfast.detect-deadlocks yes"), Value::Okay);
    let mut third = server.raw();
    third.run("LOCK.ACQUIRE c third LEASE 600000").token();
    viewer.run("LOCK.ACQUIRE d viewer LEASE 600000").token();
    waits(&mut third, "LOCK.ACQUIRE d third WAIT 60000");
    viewer.run("LOCK.FORCE a");
    arrives(&mut two).token();
    assert!(one.pending());
}

/// Many waits and few releases. Each reply is compared with a plain search through all possible orders.
#[test]
fn random_run_has_no_false_and_no_missed_cycles() {
    const MIX: Mix =
        Mix { owners: 20, keys: 8, release: 25, rare: 2, crash: 1, unblock: 10, several: 25, wait: 90, sessions: 2 };
    let steps = setting("HOLDFAST_DEADLOCK_STEPS", 8_000);
    let mut run = Run::new(Server::start(), MIX, Random::new());
    for _ in 0..steps {
        run.step();
    }
    run.compare_all();
    println!("{steps} steps: {:?}", run.coverage);
    assert!(run.coverage.count("deadlock") > steps / 1000 && run.coverage.count("served") > steps / 100);
}

/// Sends requests of a session in a pipeline.
fn ask_all(connection: &mut Raw, lines: impl Iterator<Item = String>) {
    let lines: Vec<Vec<u8>> = lines.map(|line| encode(&line)).collect();
    for part in lines.chunks(500) {
        connection.send_bytes(&part.concat()).unwrap();
        part.iter().for_each(|_| assert!(!matches!(connection.read().unwrap(), Value::ServerError(_))));
    }
}

fn figure(server: &Server, name: &str) -> u64 {
    let value = server.info("holdfast", &format!("holdfast_{name}")).expect("INFO has it");
    value.parse().expect("a number")
}

/// Six thousand requests for one lock, each of which searches for a cycle. `scripts/bench` measures the cost.
#[test]
fn many_new_requests_wait() {
    let server = Server::start();
    let [mut session, mut asking] = connections(&server);
    let id = session.run("LOCK.SESSION").field("id").text();
    ask_all(&mut asking, (0..60).map(|it| format!("LOCK.ACQUIRE k{it} h:{it} LEASE 600000")));
    ask_all(&mut asking, (0..60).map(|it| format!("LOCK.ACQUIRE k{it} w:{it} WAIT 0 SESSION {id}")));
    asking.run("LOCK.ACQUIRE hot holder LEASE 600000").token();
    asking.run(&format!("LOCK.MACQUIRE 2 k1 k2 z WAIT 0 SESSION {id}"));
    ask_all(&mut asking, (0..6_000).map(|it| format!("LOCK.ACQUIRE hot o:{it} WAIT 0 SESSION {id}")));
    assert!(figure(&server, "waiters") >= 6_060);
}

/// The search is aborted in a long chain of waits.
#[test]
fn too_long_search_is_aborted_and_counted() {
    let server = Server::start();
    let [mut session, mut asking] = connections(&server);
    let id = session.run("LOCK.SESSION").field("id").text();
    let length = 2_000;
    ask_all(&mut asking, (0..=length).map(|it| format!("LOCK.ACQUIRE c:{it} link:{it} LEASE 600000")));
    // From the end to the beginning: each request waits for an owner that does not wait yet, so each search is short.
    let wait = |it: i32| format!("LOCK.ACQUIRE c:{} link:{it} WAIT 60000 SESSION {id}", it + 1);
    ask_all(&mut asking, (0..length).map(wait));
    let counts = || ["deadlock_searches_given_up", "deadlocks_refused"].map(|it| figure(&server, it));
    let [given_up, refused] = counts();
    let waiting = |from: i32| format!("LOCK.ACQUIRE c:{from} link:{length} WAIT 60000 SESSION {id}");
    assert_eq!(asking.run(&waiting(0)), Value::SimpleString("WAITING".into()), "the cycle is too long to be found");
    assert_eq!(counts(), [given_up + 1, refused]);
    let error = asking.run(&waiting(length - 200)).error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    assert_eq!(counts(), [given_up + 1, refused + 1]);
}
