//! Not enough replicas in time: taken back exactly, and the next is served.

use std::time::{Duration, Instant};

use redis::Value;
use support::{Raw, Server, until};

use super::group::{BRIEF, Group, PATIENT, State, assert_refused, gone, set_timeout, state};
use crate::common::{ask_ok, deadline};
use crate::speak::{Reply, SOON, Speak, arrives, holders};
use crate::waiter::{Tell, Waiter, assert_held};

/// Requests that are taken back; before them, what there was. `$` is the beginning of a name of the case's own.
///
/// The fence of a lock that was free or shared may stay: tokens never go back.
const TAKEN_BACK: [(&[&str], &str); 24] = [
    (&[], "ACQUIRE $a owner"),
    (&[], "ACQUIRE $a owner HOLDS 3 WATCHDOG EPHEMERAL"),
    (&[], "ACQUIRE $a owner SHARED"),
    (&[], "ACQUIRE $a owner LIMIT 3"),
    (&[], "MACQUIRE 2 $a $b owner"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "ACQUIRE $a owner LEASE 90000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "ACQUIRE $a owner LEASE 1"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 7"], "ACQUIRE $a owner LEASE 90000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 2"], "ACQUIRE $a owner LEASE 90000 HOLDS 5"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 3"], "ACQUIRE $a owner LEASE 90000 HOLDS 1"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000", "PERSIST $a"], "ACQUIRE $a owner LEASE 90000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 SHARED"], "ACQUIRE $a owner LEASE 90000 SHARED"),
    (&["LOCK.ACQUIRE $a first LEASE 50000 SHARED"], "ACQUIRE $a owner LEASE 90000 SHARED"),
    (&["LOCK.ACQUIRE $a first LEASE 50000 LIMIT 3"], "ACQUIRE $a owner LEASE 90000 LIMIT 3"),
    (
        &["LOCK.ACQUIRE $a first LEASE 50000 SHARED", "LOCK.ACQUIRE $a owner LEASE 60000 SHARED"],
        "RENEW $a owner LEASE 90000",
    ),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "RENEW $a owner LEASE 90000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000 HOLDS 4"], "RENEW $a owner LEASE 20000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000", "PERSIST $a"], "RENEW $a owner LEASE 90000"),
    (&["HSET $a owner 2", "PEXPIRE $a 50000"], "RENEW $a owner LEASE 90000"),
    (&["HSET $a owner 2", "PEXPIRE $a 50000"], "ACQUIRE $a owner LEASE 90000"),
    (&["LOCK.MACQUIRE 2 $a $b owner LEASE 50000"], "MACQUIRE 2 $b $a owner LEASE 90000"),
    (&["LOCK.MACQUIRE 2 $a $b owner LEASE 50000"], "MRENEW 2 $a $b owner LEASE 90000"),
    (&["LOCK.MACQUIRE 2 $a $b owner LEASE 50000", "PEXPIRE $b 40000"], "MRENEW 2 $a $b owner LEASE 20000"),
    (&["LOCK.ACQUIRE $a owner LEASE 50000"], "MRENEW 2 $a $b owner LEASE 90000"),
];

/// The keys of a case, without their fences.
#[track_caller]
fn of_case(client: &mut Raw, case: usize) -> State {
    let mut state = state(client, &[&format!("{case}:a"), &format!("{case}:b")]);
    for (_, fields) in &mut state {
        fields.remove(b"#fence".as_slice());
    }
    state
}

/// Runs all cases at once, on a master that gets no confirmation, up to the replies.
fn refuse_all(master: &Server, needed: u32) {
    let mut control = master.raw();
    let before: Vec<State> = (0..TAKEN_BACK.len())
        .map(|case| {
            for line in TAKEN_BACK[case].0 {
                control.order(&line.replace('$', &format!("{case}:")));
            }
            of_case(&mut control, case)
        })
        .collect();
    let begin = Instant::now();
    let mut clients: Vec<Raw> = TAKEN_BACK.iter().map(|_| master.raw()).collect();
    for (case, ((_, request), client)) in TAKEN_BACK.iter().zip(&mut clients).enumerate() {
        client.post(&format!("LOCK.{} REPLICAS {needed}", request.replace('$', &format!("{case}:"))));
    }
    for (case, client) in clients.iter_mut().enumerate() {
        let request = TAKEN_BACK[case].1;
        assert_refused(&arrives(client), 0, needed, BRIEF);
        assert!(begin.elapsed() >= Duration::from_millis(BRIEF as u64 - 1), "{request}: too early");
        assert_eq!(of_case(&mut control, case), before[case], "{request}");
    }
}

#[test]
fn while_replicas_stand_still() {
    let mut group = Group::of(2);
    group.wait_for_replicas(BRIEF);
    group.stop_replicas();
    refuse_all(&group.master, 1);
    assert_eq!(group.count("taken_back"), TAKEN_BACK.len() as i64);
    assert_eq!((group.count("confirmed"), group.count("confirming")), (0, 0));
    // When they go on they take it back as well.
    group.cont_replicas();
    for replica in &group.replicas {
        group.master.wait_for_replica(replica);
        let mut reader = replica.raw();
        assert_eq!(reader.say("DEBUG DIGEST"), group.control.say("DEBUG DIGEST"));
        for (case, (_, request)) in TAKEN_BACK.iter().enumerate() {
            assert_eq!(of_case(&mut reader, case), of_case(&mut group.control, case), "{request}");
        }
    }
}

#[test]
fn without_any_replica() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    refuse_all(&group.master, i32::MAX as u32);
    assert_eq!(group.count("taken_back"), TAKEN_BACK.len() as i64);
}

/// What is taken back was there: each request makes a difference until then.
#[test]
fn until_then_all_of_it_is_done() {
    let group = Group::of(0);
    let mut control = group.master.raw();
    let mut waiters = Vec::new();
    for (case, (before, request)) in TAKEN_BACK.iter().enumerate() {
        let name = |line: &str| line.replace('$', &format!("{case}:"));
        for line in *before {
            control.order(&name(line));
        }
        let before = of_case(&mut control, case);
        waiters.push(group.waits(&format!("LOCK.{} REPLICAS 1", name(request))));
        assert_ne!(of_case(&mut control, case), before, "{request}");
    }
    assert_eq!(group.count("confirming"), TAKEN_BACK.len() as i64);
}

#[test]
fn the_message_names_those_who_had_it() {
    let group = Group::of(2);
    group.replicas[1].stop();
    let mut client = group.master.raw();
    client.order("CONFIG SET holdfast.replicas-timeout 1000");
    let begin = Instant::now();
    assert_refused(&client.say("LOCK.ACQUIRE key owner REPLICAS 2"), 1, 2, 1000);
    assert!(begin.elapsed() >= Duration::from_millis(999));
    assert_eq!(client.say("EXISTS key"), Value::Int(0));
}

#[test]
fn the_timeout_is_what_it_was_when_the_request_was_granted() {
    let mut group = Group::of(0);
    let default = group.master.raw().say("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(default.items()[1].text(), PATIENT.to_string());
    let mut patient = group.waits("LOCK.ACQUIRE patient owner REPLICAS 1");
    for ms in [50, 300, 1] {
        group.wait_for_replicas(ms);
        let begin = Instant::now();
        assert_refused(&group.control.say("LOCK.ACQUIRE key owner REPLICAS 1"), 0, 1, ms);
        assert!(begin.elapsed() >= Duration::from_millis(ms as u64 - 1));
    }
    assert!(patient.waits());
    assert!(group.exists("patient"));
    for wrong in ["-1", "abc", "1.5"] {
        let reply = group.control.say(&format!("CONFIG SET holdfast.replicas-timeout {wrong}"));
        assert!(reply.error().starts_with("ERR"), "{wrong}: {reply:?}");
    }
    let ms = group.control.say("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(ms.items()[1].text(), "1");
}

#[test]
fn a_fresh_server_waits_for_a_second() {
    let server = Server::start();
    let ms = server.raw().say("CONFIG GET holdfast.replicas-timeout");
    assert_eq!(ms.items()[1].text(), "1000");
    let server = Server::builder().module_args(&["replicas-timeout", "20"]).start();
    assert_refused(&server.raw().say("LOCK.ACQUIRE key owner REPLICAS 3"), 0, 3, 20);
}

#[test]
fn the_next_in_the_queue_is_served() {
    let mut group = Group::of(1);
    group.wait_for_replicas(BRIEF);
    group.stop_replicas();
    let mut first = group.master.raw();
    first.post("LOCK.ACQUIRE key first REPLICAS 1");
    until(SOON, "it is granted", || group.count("confirming") == 1);
    let mut others = ["second", "third"].map(|owner| {
        let mut other = group.master.raw();
        other.post(&format!("LOCK.ACQUIRE key {owner} WAIT 0 REPLICAS 1"));
        other
    });
    // All of them are in the queue while others are still being confirmed, or they come to a free lock: it is the same.
    let mut last = group.waits("LOCK.ACQUIRE key last LEASE 600000 WAIT 0");
    assert_refused(&arrives(&mut first), 0, 1, BRIEF);
    for other in &mut others {
        assert_refused(&arrives(other), 0, 1, BRIEF);
    }
    last.token();
    assert_held(&mut group.control, "key", "last");
    assert_eq!(group.count("taken_back"), 3);
    assert_eq!(group.count("waiters"), 0);
}

/// Readers behind a writer that is taken back; and beside a reader that is, nobody is disturbed.
#[test]
fn readers_behind_it_are_served_together() {
    let mut group = Group::of(0);
    let mut writer = group.waits("LOCK.ACQUIRE key writer REPLICAS 1");
    let mut readers: Vec<Waiter> =
        (0..3).map(|number| group.waits(&format!("LOCK.ACQUIRE key reader-{number} SHARED WAIT 0"))).collect();
    // The writer's timeout is an hour: another that is taken back at once shows that only its own place becomes free.
    group.wait_for_replicas(1);
    assert_refused(&group.control.say("LOCK.ACQUIRE key writer REPLICAS 1"), 0, 1, 1);
    assert!(readers.iter_mut().all(Waiter::waits) && writer.waits());
    assert_eq!(group.control.say(&format!("CLIENT UNBLOCK {}", writer.id)), Value::Int(1));
    readers.iter_mut().for_each(|reader| assert!(reader.token() > 0));
    assert_refused(&group.control.say("LOCK.ACQUIRE key one-more SHARED REPLICAS 1"), 0, 1, 1);
    let names = holders(&mut group.control, "key").into_keys().collect::<Vec<_>>();
    assert_eq!(names, ["reader-0", "reader-1", "reader-2"]);
}

/// Waiters of several keys, each of which another one is taken back from.
#[test]
fn a_waiter_for_several_is_served() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let mut clients = [group.master.raw(), group.master.raw()];
    clients[0].post("LOCK.ACQUIRE a one REPLICAS 1");
    clients[1].post("LOCK.MACQUIRE 2 b c two REPLICAS 1");
    until(SOON, "both are granted", || group.count("confirming") == 2);
    let mut waiter = group.master.raw();
    waiter.post("LOCK.MACQUIRE 3 c b a waiter WAIT 0");
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    arrives(&mut waiter).token();
    for key in ["a", "b", "c"] {
        assert_held(&mut group.control, key, "waiter");
    }
}

/// Several requests of one owner are under way at once, and none comes about.
#[test]
fn all_of_several_at_once() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    group.control.take("LOCK.ACQUIRE renewed owner LEASE 50000");
    group.control.take("LOCK.ACQUIRE re-entered owner LEASE 50000");
    group.control.take("LOCK.ACQUIRE both owner LEASE 50000");
    let keys = ["new", "renewed", "re-entered", "both"];
    let mut before = group.state(&keys);
    before[0] = gone();
    let lines = [
        "LOCK.ACQUIRE new owner LEASE 50000",
        "LOCK.ACQUIRE new owner LEASE 90000",
        "LOCK.RENEW new owner LEASE 60000",
        "LOCK.RENEW renewed owner LEASE 60000",
        "LOCK.RENEW renewed owner LEASE 90000",
        "LOCK.ACQUIRE re-entered owner LEASE 60000",
        "LOCK.ACQUIRE re-entered owner LEASE 90000",
        "LOCK.ACQUIRE both owner LEASE 60000",
        "LOCK.RENEW both owner LEASE 70000",
        "LOCK.ACQUIRE both owner LEASE 80000",
    ];
    let mut clients: Vec<Raw> = lines
        .iter()
        .map(|line| {
            let mut client = group.master.raw();
            assert_eq!(client.begin(&format!("{line} REPLICAS 1")), None, "{line}");
            client
        })
        .collect();
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    let after = group.state(&keys);
    let differ = keys.iter().zip(before.iter().zip(&after)).filter(|(_, (before, after))| before != after);
    assert_eq!(differ.collect::<Vec<_>>(), []);
}

/// What somebody was told meanwhile is not taken back with it.
#[test]
fn only_what_it_added_goes() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    for key in ["re-entered", "renewed", "released", "given-up"] {
        group.control.take(&format!("LOCK.ACQUIRE {key} owner LEASE 50000"));
    }
    let lines = [
        "LOCK.ACQUIRE re-entered owner LEASE 60000",
        "LOCK.RENEW renewed owner LEASE 60000",
        "LOCK.ACQUIRE released owner LEASE 60000",
        "LOCK.ACQUIRE given-up owner LEASE 60000",
    ];
    let mut clients = lines.map(|line| {
        let mut client = group.master.raw();
        assert_eq!(client.begin(&format!("{line} REPLICAS 1")), None, "{line}");
        client
    });
    group.control.take("LOCK.ACQUIRE re-entered owner LEASE 90000");
    group.control.take("LOCK.RENEW renewed owner LEASE 90000");
    assert_eq!(group.control.say("LOCK.RELEASE released owner"), Value::Int(1));
    assert_eq!(group.control.say("LOCK.RELEASE given-up owner ALL"), Value::Int(0));
    let theirs = group.control.take("LOCK.ACQUIRE given-up other LEASE 90000");
    let promised = ["re-entered", "renewed", "given-up"].map(|key| deadline(&mut group.control, key.as_bytes()));
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    let left = ["re-entered", "renewed", "given-up"].map(|key| deadline(&mut group.control, key.as_bytes()));
    assert_eq!(left, promised);
    assert_eq!(holders(&mut group.control, "re-entered")["owner"].field("holds").int(), 2);
    assert!(!group.exists("released"), "one was released, one taken back");
    assert_eq!(holders(&mut group.control, "given-up")["other"].field("token").int(), theirs);
}

/// A lock that somebody broke, deleted or replaced meanwhile is not touched.
#[test]
fn what_is_another_hold_by_now_stays() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let keys = ["forced", "deleted", "replaced", "foreign"];
    let mut clients = keys.map(|key| {
        let mut client = group.master.raw();
        assert_eq!(client.begin(&format!("LOCK.ACQUIRE {key} owner REPLICAS 1")), None, "{key}");
        client
    });
    group.control.order("LOCK.FORCE forced");
    group.control.order("DEL deleted replaced foreign");
    group.control.take("LOCK.ACQUIRE forced owner LEASE 90000");
    group.control.take("LOCK.ACQUIRE deleted other LEASE 90000");
    group.control.order("SET replaced text");
    group.control.order("HSET foreign owner 3");
    let locks = group.state(&["forced", "deleted", "foreign"]);
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    assert_eq!(group.state(&["forced", "deleted", "foreign"]), locks);
    assert_eq!(group.control.say("GET replaced").text(), "text");
}

/// The token of a hold is what it was, also if several keys were to share a new one.
#[test]
fn the_token_of_a_hold_stays() {
    let mut group = Group::of(0);
    group.wait_for_replicas(1);
    let token = group.control.take("LOCK.ACQUIRE a owner LEASE 50000");
    let before = group.state(&["a", "b"]);
    assert_refused(&group.control.say("LOCK.MACQUIRE 2 a b owner LEASE 90000 REPLICAS 1"), 0, 1, 1);
    assert_eq!(group.state(&["a", "b"]), before);
    assert_eq!(group.control.say(&format!("LOCK.RELEASE a owner TOKEN {token}")), Value::Int(0));
}

/// A hold that several keys gave another token meanwhile is found under that.
#[test]
fn a_hold_with_another_token_by_now_goes_as_well() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let mut clients = ["told", "refused"].map(|key| {
        let mut client = group.master.raw();
        assert_eq!(client.begin(&format!("LOCK.ACQUIRE {key} owner LEASE 60000 REPLICAS 1")), None, "{key}");
        client
    });
    let token = group.control.take("LOCK.MACQUIRE 2 told other owner LEASE 90000");
    let mut several = group.master.raw();
    assert_eq!(several.begin("LOCK.MACQUIRE 2 refused another owner LEASE 90000 REPLICAS 1"), None);
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    assert_refused(&arrives(&mut several), 0, 1, BRIEF);
    assert_eq!(group.control.say(&format!("LOCK.RELEASE told owner TOKEN {token}")), Value::Int(0), "it had one hold");
    assert!(!group.exists("refused") && !group.exists("another"));
}

/// Whoever re-entered meanwhile was told the newer token and keeps it; the older one comes back if nobody was.
#[test]
fn the_newer_token_stays_if_it_was_told() {
    let mut group = Group::of(0);
    group.wait_for_replicas(BRIEF);
    let mut holder = group.master.raw();
    let older = holder.take("LOCK.ACQUIRE told owner LEASE 50000 EPHEMERAL");
    group.control.take("LOCK.ACQUIRE refused owner LEASE 50000");
    let before = group.state(&["refused"]);
    let mut clients = Vec::new();
    let mut begins = |line: &str| {
        let mut client = group.master.raw();
        assert_eq!(client.begin(line), None, "{line}");
        clients.push(client);
    };
    begins("LOCK.MACQUIRE 2 told one owner LEASE 90000 REPLICAS 1");
    begins("LOCK.MACQUIRE 2 refused another owner LEASE 90000 REPLICAS 1");
    begins("LOCK.ACQUIRE refused owner LEASE 90000 REPLICAS 1");
    let newer = group.control.take("LOCK.ACQUIRE told owner LEASE 90000");
    assert!(newer > older);
    clients.iter_mut().for_each(|client| assert_refused(&arrives(client), 0, 1, BRIEF));
    assert_eq!(group.control.say(&format!("LOCK.RELEASE told owner TOKEN {newer}")), Value::Int(1));
    assert_eq!(group.state(&["refused"]), before);
    // It is tied as it was, and found under that token when somebody has touched the key.
    group.control.order("PEXPIRE told 40000");
    holder.close();
    until(SOON, "it is released with its connection", || !group.exists("told"));
}

/// Whoever else a hold is tied to keeps it under the token that the hold has again.
#[test]
fn the_tie_of_another_connection_follows_the_token_back() {
    let mut group = Group::of(0);
    group.wait_for_replicas(1);
    let (mut holder, mut watcher, mut other) = (group.master.raw(), group.master.raw(), group.master.raw());
    holder.take("LOCK.ACQUIRE ephemeral owner LEASE 50000 EPHEMERAL");
    watcher.take("LOCK.ACQUIRE watched owner LEASE 1500 WATCHDOG");
    for key in ["ephemeral", "watched"] {
        let before = group.state(&[key]);
        let line = format!("LOCK.MACQUIRE 2 {key} beside owner LEASE 90000 REPLICAS 1");
        assert_refused(&other.say(&line), 0, 1, 1);
        if key == "ephemeral" {
            assert_eq!(group.state(&[key]), before);
        }
        // Somebody has touched the key, so its ties are compared with it.
        group.control.say(&format!("PEXPIRE {key} 1200"));
    }
    let hold = &holders(&mut group.control, "ephemeral")["owner"];
    assert_eq!(hold.field("client"), Value::Int(holder.client_id()), "{hold:?}");
    until(SOON, "the watchdog renews", || group.control.say("PTTL watched").int() > 1_200);
    group.control.say("PERSIST ephemeral");
    holder.close();
    until(SOON, "it is released with its connection", || !group.exists("ephemeral"));
}

/// A hold is tied as it was.
#[test]
fn the_tie_of_a_hold_stays() {
    let mut group = Group::of(0);
    group.wait_for_replicas(1);
    let (mut holder, mut other) = (group.master.raw(), group.master.raw());
    let id = holder.client_id();
    holder.take("LOCK.ACQUIRE untied owner LEASE 50000");
    holder.take("LOCK.ACQUIRE tied owner LEASE 50000 EPHEMERAL");
    for line in ["LOCK.ACQUIRE untied owner", "LOCK.RENEW untied owner", "LOCK.MRENEW 1 untied owner"] {
        let reply = holder.say(&format!("{line} WATCHDOG EPHEMERAL REPLICAS 1"));
        assert_refused(&reply, 0, 1, 1);
        let hold = &holders(&mut group.control, "untied")["owner"];
        assert!(hold.field("client").is_null() && !hold.field("ephemeral").truth(), "{line}: {hold:?}");
    }
    for line in ["LOCK.ACQUIRE tied owner", "LOCK.RENEW tied owner", "LOCK.MRENEW 1 tied owner"] {
        assert_refused(&other.say(&format!("{line} WATCHDOG REPLICAS 1")), 0, 1, 1);
        let hold = &holders(&mut group.control, "tied")["owner"];
        assert_eq!(hold.field("client"), Value::Int(id), "{line}: {hold:?}");
        assert!(hold.field("ephemeral").truth() && !hold.field("watchdog").truth(), "{line}: {hold:?}");
    }
}

/// Where a command may not block nobody can wait for replicas.
#[test]
fn in_transactions_and_scripts() {
    let mut group = Group::of(1);
    group.control.take("LOCK.MACQUIRE 2 held also owner LEASE 50000");
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
    let mut client = group.master.raw();
    for line in lines {
        let line = format!("{line} LEASE 90000 REPLICAS 1");
        ask_ok(&mut client, "MULTI");
        assert_eq!(client.say(&line).text(), "QUEUED");
        let reply = client.say("EXEC").items()[0].error();
        assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
        let script = format!("return redis.pcall('{}')", line.replace(' ', "','"));
        let reply = client.call(&[b"EVAL", script.as_bytes(), b"4", b"free", b"held", b"also", b"other"]).error();
        assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
        assert_eq!(group.state(&["held", "also", "free", "other"]), before, "{line}");
    }
    assert_eq!((group.count("confirming"), group.count("confirmation_requests")), (0, 0));
}

#[test]
fn wrong_numbers() {
    let mut group = Group::of(1);
    group.control.take("LOCK.ACQUIRE held owner LEASE 50000");
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
            let reply = group.control.say(&line).error();
            assert!(reply.starts_with("ERR ") && reply.contains("REPLICAS"), "{line}: {reply}");
            assert_eq!(group.state(&["held", "free"]), before, "{line}");
        }
    }
    for line in ["LOCK.RELEASE held owner", "LOCK.MRELEASE 1 held owner", "LOCK.FORCE held"] {
        assert!(group.control.say(&format!("{line} REPLICAS 1")).error().starts_with("ERR "), "{line}");
        assert_eq!(group.state(&["held", "free"]), before, "{line}");
    }
    set_timeout(&mut group.control, BRIEF);
    assert_eq!(group.count("confirmation_requests"), 0);
}
