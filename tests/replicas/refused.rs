//! Too few confirmations in time: a new hold is revoked, a re-entry loses the hold that it added, a renewal loses nothing.
//! The next waiter is granted.

use redis::Value;
use support::{NotBefore, Raw, Server, until};

use super::group::{BRIEF, Group, PATIENT, State, assert_refused, set_timeout, state};
use crate::common::ask_ok;
use crate::lines::{Commands, Reply, SOON, arrives, assert_in_the_way, holders, now};
use crate::waiter::{Waiter, assert_held};

/// The state after a refused request.
#[derive(Clone, Copy)]
enum StateAfter {
    /// The state before it: a new hold is revoked, and so is the hold that a re-entry added without changing the deadline.
    Before,
    /// The owner's deadline in ms after the request, and its hold count. A re-entry loses the hold that it added; a named count
    /// and a renewal stay.
    Lease(i64, u64),
}

/// Commands before the refused request, the request, and the state after it. `$` is replaced by a prefix for each case.
///
/// The fence of a lock that was free or shared may stay: tokens never decrease.
const REFUSED: [(&[&str], &str, StateAfter); 24] = [
    (&[], "ACQUIRE $a owner", StateAfter::Before),
    (&[], "ACQUIRE $a owner HOLDS 3 EPHEMERAL", StateAfter::Before),
    (&[], "ACQUIRE $a owner SHARED", StateAfter::Before),
    (&[], "ACQUIRE $a owner LIMIT 3", StateAfter::Before),
    (&[], "MACQUIRE 2 $a $b owner", StateAfter::Before),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "ACQUIRE $a owner LEASE 90000", StateAfter::Lease(90_000, 1)),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "ACQUIRE $a owner LEASE 1", StateAfter::Before),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 7"], "ACQUIRE $a owner LEASE 90000", StateAfter::Lease(90_000, 7)),
    (
        &["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 2"],
        "ACQUIRE $a owner LEASE 90000 HOLDS 5",
        StateAfter::Lease(90_000, 5),
    ),
    (
        &["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 3"],
        "ACQUIRE $a owner LEASE 90000 HOLDS 1",
        StateAfter::Lease(90_000, 3),
    ),
    (&["LOCK.ACQUIRE $a owner LEASE 50000", "PERSIST $a"], "ACQUIRE $a owner LEASE 90000", StateAfter::Before),
    (
        &["LOCK.ACQUIRE $a owner LEASE 50000 SHARED"],
        "ACQUIRE $a owner LEASE 90000 SHARED",
        StateAfter::Lease(90_000, 1),
    ),
    (&["LOCK.ACQUIRE $a first LEASE 50000 SHARED"], "ACQUIRE $a owner LEASE 90000 SHARED", StateAfter::Before),
    (&["LOCK.ACQUIRE $a first LEASE 50000 LIMIT 3"], "ACQUIRE $a owner LEASE 90000 LIMIT 3", StateAfter::Before),
    (
        &["LOCK.ACQUIRE $a first LEASE 50000 SHARED", "LOCK.ACQUIRE $a owner LEASE 60000 SHARED"],
        "RENEW $a owner LEASE 90000",
        StateAfter::Lease(90_000, 1),
    ),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "RENEW $a owner LEASE 90000", StateAfter::Lease(90_000, 1)),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 4"], "RENEW $a owner LEASE 20000", StateAfter::Lease(20_000, 4)),
    (&["LOCK.ACQUIRE $a owner LEASE 50000", "PERSIST $a"], "RENEW $a owner LEASE 90000", StateAfter::Lease(90_000, 1)),
    (&["HSET $a owner 2", "PEXPIRE $a 50000"], "RENEW $a owner LEASE 90000", StateAfter::Lease(90_000, 2)),
    (&["HSET $a owner 2", "PEXPIRE $a 50000"], "ACQUIRE $a owner LEASE 90000", StateAfter::Lease(90_000, 2)),
    (&["LOCK.MACQUIRE 2 $a $b owner LEASE 50000"], "MACQUIRE 2 $b $a owner LEASE 90000", StateAfter::Lease(90_000, 1)),
    (&["LOCK.MACQUIRE 2 $a $b owner LEASE 50000"], "MRENEW 2 $a $b owner LEASE 90000", StateAfter::Lease(90_000, 1)),
    (
        &["LOCK.MACQUIRE 2 $a $b owner LEASE 50000", "PEXPIRE $b 40000"],
        "MRENEW 2 $a $b owner LEASE 20000",
        StateAfter::Lease(20_000, 1),
    ),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "MRENEW 2 $a $b owner LEASE 90000", StateAfter::Lease(90_000, 1)),
];

/// The state of a case's keys, without their fences.
#[track_caller]
fn of_case(client: &mut Raw, case: usize) -> State {
    let mut state = state(client, &[&format!("{case}:a"), &format!("{case}:b")]);
    for (_, fields) in &mut state {
        fields.remove(b"#fence".as_slice());
    }
    state
}

/// The expected state of a case whose request was made between two moments. `before` and `after` are the real states.
fn expected(left: StateAfter, mut before: State, after: &State, (from, until): (i64, i64)) -> State {
    let StateAfter::Lease(lease, holds) = left else { return before };
    for ((deadline, fields), (left, _)) in before.iter_mut().zip(after) {
        if !fields.contains_key(b"owner".as_slice()) {
            continue;
        }
        // A deadline between the two moments. Every field with it has the same one.
        *deadline = (*left).clamp(from + lease, until + lease);
        fields.insert(b"owner".to_vec(), holds.to_string().into_bytes());
        if let Some(own) = fields.get_mut(b"#@owner".as_slice()) {
            let text = String::from_utf8(own.clone()).expect("a deadline and a token");
            let (_, token) = text.split_once(':').expect("a deadline and a token");
            *own = format!("{deadline}:{token}").into_bytes();
        }
    }
    before
}

/// Runs all cases at once on a primary that gets no confirmation, up to the replies.
fn refuse_all(primary: &Server, needed: u32) {
    let mut control = primary.raw();
    let before: Vec<State> = (0..REFUSED.len())
        .map(|case| {
            for line in REFUSED[case].0 {
                control.run_ok(&line.replace('$', &format!("{case}:")));
            }
            of_case(&mut control, case)
        })
        .collect();
    let (due, from) = (NotBefore::millis(BRIEF as u64 - 1), now());
    let mut clients: Vec<Raw> = REFUSED.iter().map(|_| primary.raw()).collect();
    for (case, ((_, request, _), client)) in REFUSED.iter().zip(&mut clients).enumerate() {
        client.send_line(&format!("LOCK.{} REPLICAS {needed}", request.replace('$', &format!("{case}:"))));
    }
    for ((case, client), before) in clients.iter_mut().enumerate().zip(before) {
        let (_, request, left) = REFUSED[case];
        assert_refused(&arrives(client), 0, needed, BRIEF);
        due.is_over(request);
        let after = of_case(&mut control, case);
        assert_eq!(after, expected(left, before, &after, (from, now())), "{request}");
    }
}

#[test]
fn request_is_refused_when_replicas_are_paused() {
    let mut group = Group::of(2);
    group.wait_for_replicas(BRIEF);
    group.stop_replicas();
    refuse_all(&group.primary, 1);
    assert_eq!(group.count("revoked"), REFUSED.len() as i64);
    assert_eq!((group.count("confirmed"), group.count("confirming")), (0, 0));
    // When the replicas continue, they execute the revocations as well.
    group.cont_replicas();
    for replica in &group.replicas {
        group.primary.wait_for_replica(replica);
        let mut reader = replica.raw();
        assert_eq!(reader.run("DEBUG DIGEST"), group.control.run("DEBUG DIGEST"));
        for (case, (_, request, _)) in REFUSED.iter().enumerate() {
            assert_eq!(of_case(&mut reader, case), of_case(&mut group.control, case), "{request}");
        }
    }
}

#[test]
fn request_is_refused_without_replicas() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    refuse_all(&group.primary, i32::MAX as u32);
    assert_eq!(group.count("revoked"), REFUSED.len() as i64);
}

/// A refused request had taken effect: each of these commands has another result until the refusal.
#[test]
fn unconfirmed_request_takes_effect_until_refused() {
    let group = Group::of(0);
    let mut control = group.primary.raw();
    let mut waiters = Vec::new();
    for (case, (before, request, _)) in REFUSED.iter().enumerate() {
        let name = |line: &str| line.replace('$', &format!("{case}:"));
        for line in *before {
            control.run_ok(&name(line));
        }
        let before = of_case(&mut control, case);
        waiters.push(group.waits(&format!("LOCK.{} REPLICAS 1", name(request))));
        assert_ne!(of_case(&mut control, case), before, "{request}");
    }
    assert_eq!(group.count("confirming"), REFUSED.len() as i64);
}

#[test]
fn error_names_number_of_confirmations() {
    let group = Group::of(2);
    group.replicas[1].stop();
    let mut client = group.primary.raw();
    client.run_ok("CONFIG SET holdfast.replicas-timeout 1000");
    let due = NotBefore::millis(999);
    assert_refused(&client.run("LOCK.ACQUIRE key owner REPLICAS 2"), 1, 2, 1000);
    due.is_over("the refusal");
    assert_eq!(client.run("EXISTS key"), Value::Int(0));
}

#[test]
fn timeout_is_the_setting_at_the_grant() {
    let mut group = Group::of(0);
    let default = group.primary.raw().run("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(default.items()[1].text(), PATIENT.to_string());
    let mut patient = group.waits("LOCK.ACQUIRE patient owner REPLICAS 1");
    for ms in [50, 300, 1] {
        group.wait_for_replicas(ms);
        let due = NotBefore::millis(ms as u64 - 1);
        assert_refused(&group.control.run("LOCK.ACQUIRE key owner REPLICAS 1"), 0, 1, ms);
        due.is_over("the refusal");
    }
    assert!(patient.waits());
    assert!(group.exists("patient"));
    for wrong in ["-1", "abc", "1.5"] {
        let reply = group.control.run(&format!("CONFIG SET holdfast.replicas-timeout {wrong}"));
        assert!(reply.error().starts_with("ERR"), "{wrong}: {reply:?}");
    }
    let ms = group.control.run("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(ms.items()[1].text(), "1");
}

#[test]
fn default_timeout_is_one_second() {
    let server = Server::start();
    let ms = server.raw().run("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(ms.items()[1].text(), "1000");
    let server = Server::builder().module_args(&["replicas-timeout", "20"]).start();
    assert_refused(&server.raw().run("LOCK.ACQUIRE key owner REPLICAS 3"), 0, 3, 20);
}

#[test]
fn next_waiter_is_granted_after_revocation() {
    let mut group = Group::of(1);
    group.wait_for_replicas(BRIEF);
    group.stop_replicas();
    let mut first = group.primary.raw();
    first.send_line("LOCK.ACQUIRE key first REPLICAS 1");
    until(SOON, "the request is granted", || group.count("confirming") == 1);
    let mut others = ["second", "third"].map(|owner| {
        let mut other = group.primary.raw();
        other.send_line(&format!("LOCK.ACQUIRE key {owner} WAIT 0 REPLICAS 1"));
        other
    });
    // The requests are queued while the first is still being confirmed, or find a free lock, with the same result.
    let mut last = group.waits("LOCK.ACQUIRE key last LEASE 600000 WAIT 0");
    assert_refused(&arrives(&mut first), 0, 1, BRIEF);
    for other in &mut others {
        assert_refused(&arrives(other), 0, 1, BRIEF);
    }
    last.token();
    assert_held(&mut group.control, "key", "last");
    assert_eq!(group.count("revoked"), 3);
    assert_eq!(group.count("waiters"), 0);
}

/// Readers behind a revoked writer are granted; beside a revoked reader, others stay.
#[test]
fn readers_are_granted_together_after_revocation() {
    let mut group = Group::of(0);
    let mut writer = group.waits("LOCK.ACQUIRE key writer REPLICAS 1");
    let mut readers: Vec<Waiter> =
        (0..3).map(|number| group.waits(&format!("LOCK.ACQUIRE key reader-{number} SHARED WAIT 0"))).collect();
    // The writer's timeout is an hour, and its owner has no other request meanwhile.
    group.wait_for_replicas(1);
    assert_in_the_way(&group.control.run("LOCK.ACQUIRE key writer REPLICAS 1"), "key");
    assert!(readers.iter_mut().all(Waiter::waits) && writer.waits());
    assert_eq!(group.control.run(&format!("CLIENT UNBLOCK {}", writer.id)), Value::Int(1));
    readers.iter_mut().for_each(|reader| assert!(reader.token() > 0));
    assert_refused(&group.control.run("LOCK.ACQUIRE key one-more SHARED REPLICAS 1"), 0, 1, 1);
    let names = holders(&mut group.control, "key").into_keys().collect::<Vec<_>>();
    assert_eq!(names, ["reader-0", "reader-1", "reader-2"]);
}

/// The grants of all of its keys are revoked.
#[test]
fn waiter_for_several_keys_is_granted_after_revocation() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let mut clients = [group.primary.raw(), group.primary.raw()];
    clients[0].send_line("LOCK.ACQUIRE a one REPLICAS 1");
    clients[1].send_line("LOCK.MACQUIRE 2 b c two REPLICAS 1");
    until(SOON, "both requests are granted", || group.count("confirming") == 2);
    let mut waiter = group.primary.raw();
    waiter.send_line("LOCK.MACQUIRE 3 c b a waiter WAIT 0");
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    arrives(&mut waiter).token();
    for key in ["a", "b", "c"] {
        assert_held(&mut group.control, key, "waiter");
    }
}

/// While a request of an owner is being confirmed, its other requests for the key are refused without `WAIT`.
#[test]
fn other_requests_of_owner_are_refused_meanwhile() {
    let mut group = Group::of(0);
    for key in ["renewed", "re-entered", "shared"] {
        let how = if key == "shared" { " SHARED" } else { "" };
        group.control.get_token(&format!("LOCK.ACQUIRE {key} owner LEASE 50000 HOLDS 2{how}"));
    }
    let keys = ["new", "renewed", "re-entered", "shared"];
    let lines = [
        "LOCK.ACQUIRE new owner LEASE 50000",
        "LOCK.RENEW renewed owner LEASE 60000",
        "LOCK.ACQUIRE re-entered owner LEASE 60000",
        "LOCK.ACQUIRE shared owner LEASE 60000 SHARED",
    ];
    let mut waiters = lines.map(|line| group.waits(&format!("{line} REPLICAS 1")));
    let done = group.state(&keys);
    for key in keys {
        let how = if key == "shared" { " SHARED" } else { "" };
        let others = [
            format!("LOCK.ACQUIRE {key} owner LEASE 90000{how}"),
            format!("LOCK.ACQUIRE {key} owner LEASE 90000{how} REPLICAS 1"),
            format!("LOCK.RENEW {key} owner LEASE 90000"),
            format!("LOCK.RENEW {key} owner LEASE 90000 REPLICAS 1"),
            format!("LOCK.MRENEW 2 other {key} owner LEASE 90000"),
        ];
        for line in others {
            assert_in_the_way(&group.control.run(&line), key);
            assert_eq!(group.state(&keys), done, "{line}");
        }
    }
    assert_in_the_way(&group.control.run("LOCK.MACQUIRE 2 other new owner"), "new");
    assert!(!group.exists("other"));
    assert!(waiters.iter_mut().all(Waiter::waits));
    assert_eq!(group.count("confirming"), keys.len() as i64);
}

/// A release of all holds ends the pending request, too. Later holds are not revoked with it.
#[test]
fn release_all_ends_pending_request() {
    let mut group = Group::of(0);
    let ways = ["RELEASE $ owner ALL", "RELEASE $ owner HOLDS 0", "MRELEASE 1 $ owner ALL"];
    for (number, way) in ways.iter().enumerate() {
        for (before, request, next) in [
            ("free", "ACQUIRE", "owner"),
            ("held", "ACQUIRE", "owner"),
            ("held", "RENEW", "owner"),
            ("free", "ACQUIRE", "other"),
        ] {
            let key = format!("{before}:{request}:{next}:{number}");
            if before == "held" {
                group.control.get_token(&format!("LOCK.ACQUIRE {key} owner LEASE 50000"));
            }
            let mut waiter = group.waits(&format!("LOCK.{request} {key} owner LEASE 60000 REPLICAS 1"));
            let released = group.control.run_ok(&format!("LOCK.{}", way.replace('$', &key)));
            let left = if let Value::Array(left) = &released { &left[0] } else { &released };
            assert_eq!(*left, Value::Int(1), "{way}");
            let token = group.control.get_token(&format!("LOCK.ACQUIRE {key} {next} LEASE 90000"));
            assert_eq!(
                waiter.end().error(),
                "UNCONFIRMED the lock was released before its replicas had confirmed it",
                "{way}: {key}"
            );
            let holders = holders(&mut group.control, &key);
            assert!(holders.keys().eq([next]), "{way}: {key}: {holders:?}");
            let hold = &holders[next];
            assert_eq!((hold.field("holds").int(), hold.field("token").int()), (1, token), "{way}: {key}");
            assert!(hold.field("ttl").int() > 60_000, "{way}: {key}: {hold:?}");
        }
    }
    assert_eq!(group.count("confirming"), 0);
}

/// A lock that another client forced, deleted or replaced meanwhile is not changed.
#[test]
fn revocation_leaves_other_holds() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let keys = ["forced", "deleted", "replaced", "foreign"];
    let mut clients = keys.map(|key| {
        let mut client = group.primary.raw();
        assert_eq!(client.begin(&format!("LOCK.ACQUIRE {key} owner REPLICAS 1")), None, "{key}");
        client
    });
    group.control.run_ok("LOCK.FORCE forced");
    group.control.run_ok("DEL deleted replaced foreign");
    // Another client wrote the same owner with another token. The owner's own requests wait for the confirmation.
    let other_token = group.control.get_token("LOCK.ACQUIRE elsewhere owner");
    group.control.run_ok(&format!("HSET forced owner 2 #fence {other_token}"));
    group.control.run_ok("PEXPIRE forced 90000");
    group.control.get_token("LOCK.ACQUIRE deleted other LEASE 90000");
    group.control.run_ok("SET replaced text");
    group.control.run_ok("HSET foreign owner 3");
    let locks = group.state(&["forced", "deleted", "foreign"]);
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    assert_eq!(group.state(&["forced", "deleted", "foreign"]), locks);
    assert_eq!(group.control.run("GET replaced").text(), "text");
}

/// The hold keeps its binding.
#[test]
fn refused_request_keeps_binding() {
    let mut group = Group::of(0);
    group.wait_for_replicas(1);
    let (mut holder, mut other) = (group.primary.raw(), group.primary.raw());
    let id = holder.client_id();
    holder.get_token("LOCK.ACQUIRE unbound owner LEASE 50000");
    holder.get_token("LOCK.ACQUIRE bound owner LEASE 50000 EPHEMERAL");
    for line in ["LOCK.ACQUIRE unbound owner", "LOCK.RENEW unbound owner", "LOCK.MRENEW 1 unbound owner"] {
        let reply = holder.run(&format!("{line} EPHEMERAL REPLICAS 1"));
        assert_refused(&reply, 0, 1, 1);
        let hold = &holders(&mut group.control, "unbound")["owner"];
        assert!(hold.field("client").is_null() && !hold.field("ephemeral").truth(), "{line}: {hold:?}");
    }
    for line in ["LOCK.ACQUIRE bound owner", "LOCK.RENEW bound owner", "LOCK.MRENEW 1 bound owner"] {
        assert_refused(&other.run(&format!("{line} EPHEMERAL REPLICAS 1")), 0, 1, 1);
        let hold = &holders(&mut group.control, "bound")["owner"];
        assert_eq!(hold.field("client"), Value::Int(id), "{line}: {hold:?}");
        assert!(hold.field("ephemeral").truth() && !hold.field("watchdog").truth(), "{line}: {hold:?}");
    }
}

/// A command that must not block can't wait for replicas.
#[test]
fn replicas_option_is_refused_in_transactions_and_scripts() {
    let mut group = Group::of(1);
    group.control.get_token("LOCK.MACQUIRE 2 held also owner LEASE 50000");
    let before = group.state(&["held", "also", "free", "other"]);
    let lines = [
        "LOCK.ACQUIRE free owner",
        "LOCK.ACQUIRE held owner",
        "LOCK.ACQUIRE held other WAIT 0",
        "LOCK.RENEW held owner",
        "LOCK.RENEW free owner",
        "LOCK.MACQUIRE 2 free other owner",
        "LOCK.MRENEW 2 held also owner",
    ];
    let mut client = group.primary.raw();
    for line in lines {
        let line = format!("{line} LEASE 90000 REPLICAS 1");
        ask_ok(&mut client, "MULTI");
        assert_eq!(client.run(&line).text(), "QUEUED");
        let reply = client.run("EXEC").items()[0].error();
        assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
        let script = format!("return redis.pcall('{}')", line.replace(' ', "','"));
        let reply = client.call(&[b"EVAL", script.as_bytes(), b"4", b"free", b"held", b"also", b"other"]).error();
        assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
        assert_eq!(group.state(&["held", "also", "free", "other"]), before, "{line}");
    }
    assert_eq!((group.count("confirming"), group.count("confirmation_requests")), (0, 0));
}

#[test]
fn invalid_number_of_replicas_is_refused() {
    let mut group = Group::of(1);
    group.control.get_token("LOCK.ACQUIRE held owner LEASE 50000");
    let before = group.state(&["held", "free"]);
    let lines = [
        "LOCK.ACQUIRE free owner",
        "LOCK.ACQUIRE held owner",
        "LOCK.RENEW held owner",
        "LOCK.MACQUIRE 1 free owner",
        "LOCK.MRENEW 1 held owner",
    ];
    for line in lines {
        for wrong in ["0", "-1", "abc", "1.5", "2147483648", "99999999999999999999", "", "1 REPLICAS 1"] {
            let line = format!("{line} REPLICAS {wrong}");
            let reply = group.control.run(&line).error();
            assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
            assert_eq!(group.state(&["held", "free"]), before, "{line}");
        }
    }
    for line in ["LOCK.RELEASE held owner", "LOCK.MRELEASE 1 held owner", "LOCK.FORCE held"] {
        assert!(group.control.run(&format!("{line} REPLICAS 1")).error().starts_with("ERR "), "{line}");
        assert_eq!(group.state(&["held", "free"]), before, "{line}");
    }
    set_timeout(&mut group.control, BRIEF);
    assert_eq!(group.count("confirmation_requests"), 0);
}
