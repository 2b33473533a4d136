//! Runs that broke a rule once, as the simulator printed them, and that a seed gives the same run each time.

use simulator::keyspace::layout::MAX_OWNER;
use simulator::play::play;
use simulator::redis::Generation;
use simulator::resp::Reply;
use simulator::{history, scenes, script, seed, shrink, thin};

/// What clients saw can be explained by an order of the operations on a lock of a page: verification/histories/src/spec.rs. Where much
/// has no answer, there is too much to try: such runs are left out.
#[test]
fn histories_are_linearizable() {
    const UNANSWERED: usize = 1;
    let mut operations = 0;
    for number in 1..=250 {
        let run = seed::of_seed(number);
        let lines: Vec<_> = run.lines.into_iter().filter(history::can_tell).collect();
        let Ok(run) = play(run.generation, &lines, true) else { continue };
        let seen = histories::read(run.history.as_bytes()).expect("it is written in the format");
        if seen.iter().filter(|it| it.outcome == histories::Outcome::Unknown).count() > UNANSWERED {
            continue;
        }
        operations += seen.len();
        if let Err(violation) = histories::judge(&seen) {
            panic!("seed {number}: {violation}\n{}", script::print(&lines));
        }
    }
    assert!(operations > 500, "{operations} operations");
}

/// A second holder in what clients saw has no such order.
#[test]
fn a_history_with_a_fault_is_seen() {
    let lines = script::parse(
        "a LOCK.ACQUIRE k a LEASE 60000
         +1
         b LOCK.ACQUIRE k b
         +1",
    );
    let run = play(Generation::Redis72, &lines, true).expect("nothing is wrong with it");
    let mut seen = histories::read(run.history.as_bytes()).expect("it is written in the format");
    assert!(histories::judge(&seen).is_ok());
    let refused = seen.iter_mut().find(|it| it.outcome == histories::Outcome::Null).expect("b was refused");
    refused.outcome = histories::Outcome::Token(1_900_000_000_000_000);
    assert!(histories::judge(&seen).is_err());
}

/// Which rules a script breaks, on which servers.
fn broken(text: &str) -> Vec<&'static str> {
    let lines = script::parse(text);
    Generation::ALL.into_iter().filter_map(|it| play(it, &lines, false).err()).map(|it| it.violation.rule).collect()
}

/// A script that broke a rule in version 0.2.0 breaks none any more.
#[track_caller]
fn is_mended(text: &str) {
    assert_eq!(broken(text), [""; 0], "{text}");
}

/// Seed 2058179: with another `TOKEN` or `FENCE` it is another request, and its answer would not be that of the first.
#[test]
fn a_renewal_that_is_repeated_on_other_terms_is_refused() {
    const RENEWED: &str = "!replicas 20
         c LOCK.ACQUIRE k0 o1
         +20
         c LOCK.RENEW k0 o1 LEASE 2000 REPLICAS 1 SESSION $t";
    for other in ["TOKEN 7", "TOKEN @c", "FENCE 1800000060849309"] {
        let repeated = format!("{RENEWED}\nc LOCK.RENEW k0 o1 LEASE 2000 {other} REPLICAS 1 SESSION $t");
        is_mended(&repeated);
        history(&format!("{repeated}\n+1"), 'c', "is being confirmed");
    }
}

/// Runs in which nothing was wrong but what the judge said, by their seeds.
#[test]
fn no_rule_is_broken_by() {
    let runs = [
        // 71272. What was granted in one step is not given up in one step once one of it has been released.
        "c LOCK.MACQUIRE 2 k0 k1 o1
         b LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 LEASE 50 WAIT 300
         +0
         b LOCK.RELEASE k0 o1 ALL
         c LOCK.RELEASE k1 o1 ALL
         b LOCK.ACQUIRE k0 o1 WAIT 0 SESSION $s",
        // 124690. A grant that was read as it was given up is not the end of what was asked for anew in the same turn.
        r"c LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k0 o1 WAIT 0
         d RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         +400
         b SWAPDB 0 1
         +120
         b SWAPDB 0 1
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         d EVAL return_redis.call(unpack(ARGV)) 0 LOCK.FORCE k0
         +1200
         b LOCK.ACQUIRE k0 o2
         s LOCK.EVENTS WAIT 50
         c LOCK.RELEASE k0 o0 ALL
         b LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.ACQUIRE k0 o0 WAIT 20 SESSION $s
         d LOCK.RELEASE k0 o0 ALL",
        // 143662. What is repeated without REPLICAS, before its grant was read, may have been granted with them.
        "!replicas 0 never 2000
         d LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +1
         a PERSIST k2
         c SWAPDB 0 1
         b LOCK.ACQUIRE k0 o1
         a PERSIST k0
         s LOCK.EVENTS WAIT 0
         d LOCK.ACQUIRE k0 o0 WAIT 300 SESSION $s",
        // 157543. A cycle that is closed by a grant: its owner waits by two requests at once.
        "a LOCK.ACQUIRE k1 o3 WATCHDOG
         b LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k2 o0
         b LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $s
         c LOCK.ACQUIRE k2 o1 WAIT 300
         +20
         c PEXPIRE k0 30
         b LOCK.ACQUIRE k2 o2 WAIT 300
         b LOCK.ACQUIRE k0 o1 WATCHDOG WAIT 20 WAITED 60000
         a LOCK.ACQUIRE k0 o3 WAIT 0",
        // 129782. A client that hears late that it waits has asked first.
        "s LOCK.EVENTS WAIT 50
         e LOCK.ACQUIRE k0 o2 LEASE 50
         s !deaf
         c !deaf
         s LOCK.EVENTS WAIT 50
         c LOCK.ACQUIRE k0 o1 LEASE 50 WAIT 0 SESSION $s
         +1200
         e LOCK.ACQUIRE k0 o2
         a LOCK.ACQUIRE k0 o1 WAIT 300 SESSION $s",
        // 1050980. The same as 124690, with a count that is named.
        "!replicas 0
         a LOCK.ACQUIRE k0 o1
         a LOCK.MACQUIRE 1 k0 o0 WAIT 300 SESSION $s
         c LOCK.ACQUIRE k0 o0 WAIT 20
         a LOCK.RELEASE k0 o0 ALL
         b LOCK.RELEASE k0 o1
         +0
         b LOCK.ACQUIRE k0 o0 HOLDS 1 REPLICAS 1 SESSION $s",
        // 157063. A heartbeat that is heard late was said before somebody set an expiry.
        "c LOCK.ACQUIRE k2 o1 LEASE 7200000 WATCHDOG SESSION $s
         b LOCK.ACQUIRE k1 o0
         +400
         c LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $s
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         s !deaf
         +400
         b PEXPIRE k2 100000",
        // 159674. A renewal that shortens a lease comes after the heartbeat that was asked for before it in the same poll.
        "a LOCK.ACQUIRE k1 o1 LEASE 50 SESSION $s
         e LOCK.ACQUIRE k0 o0 WATCHDOG SESSION $s
         +120
         s LOCK.EVENTS WAIT 0 HEARTBEAT
         d LOCK.MRENEW 1 k0 o0 LEASE 50",
        // 1020778. It takes a confirmation that is missing for the end of a request that needs none.
        "b LOCK.ACQUIRE k0 o0 LEASE 50 SESSION $s
         b LOCK.ACQUIRE k0 o2 WAIT 0 SESSION $s
         a !deaf
         a LOCK.ACQUIRE k0 o2 WAIT 0 WAITED 60000
         a LOCK.RENEW k0 o2 LEASE 400 REPLICAS 1 SESSION $s
         s LOCK.EVENTS WAIT 0
         +1200
         b LOCK.ACQUIRE k0 o1
         a LOCK.ACQUIRE k0 o2 WAIT 20 SESSION $s",
        // 1047202, 1099358. Whom Redis 7.2 might redirect is answered when its cron has come by.
        "b LOCK.ACQUIRE k0 o1 REPLICAS 1
         a DEBUG SLEEP 0.5
         a CLIENT PAUSE 5
         +20
         !slot k0 migrates
         +120
         +400",
        "b LOCK.ACQUIRE k0 o1
         +20
         a LOCK.ACQUIRE k0 o2 WAIT 0
         c LOCK.ACQUIRE k0 o1 REPLICAS 1
         c CLIENT UNBLOCK #a
         +120
         !slot k0 migrates
         a LOCK.FORCE k0
         c LOCK.ACQUIRE k0 o2 WAIT 300
         +120
         +20
         +120
         +120
         +400
         +1
         +400",
        // 95291. A request that waits was repeated behind one that has bound the hold, and moves the binding.
        "!replicas 20 2000
         b LOCK.ACQUIRE k0 o1 SESSION $s
         b LOCK.ACQUIRE k0 o0 WAIT 300 SESSION $s
         b LOCK.ACQUIRE k0 o0 LEASE 400 WAIT 0
         b LOCK.ACQUIRE k0 o0 LEASE 400 WATCHDOG
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +400
         a LOCK.RELEASE k0 o1 ALL",
        // 1039331, 1066216. A request whose answer nobody heard has given the binding a shorter lease.
        "b LOCK.ACQUIRE k2 o1 LEASE 2000 WATCHDOG SESSION $s
         +120
         b !vanish
         b LOCK.ACQUIRE k2 o1 LEASE 400 WATCHDOG SESSION $s
         s LOCK.EVENTS WAIT 50",
        "!replicas 2000 0
         b LOCK.ACQUIRE k2 o1 LEASE 400 WATCHDOG SESSION $s
         a LOCK.ACQUIRE k2 o1 LEASE 50 WATCHDOG REPLICAS 1 SESSION $s
         s !deaf
         +400
         s LOCK.EVENTS WAIT 0
         +1200",
        // 1009142. A renewal that is given up where its lock was has bound it where it is.
        "!replicas 0
         d LOCK.ACQUIRE k2 o1
         d LOCK.RENEW k2 o1 EPHEMERAL REPLICAS 1 SESSION $t
         +3
         b SWAPDB 0 1
         b LOCK.RELEASE k2 o1 ALL",
        // 1052270. A client is redirected when what it asked for was confirmed and bound.
        "!replicas 20
         d LOCK.ACQUIRE k1 o1
         c LOCK.ACQUIRE k1 o1 EPHEMERAL REPLICAS 1
         +1
         !slot k1 moves",
        // 1077791. A wait that came behind a cancel is not given up by it.
        "b LOCK.MACQUIRE 2 k2 k1 o1
         b LOCK.FORCE k1
         +0
         d LOCK.ACQUIRE k2 o2
         b LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $s
         d LOCK.RELEASE k2 o1 ALL
         d LOCK.ACQUIRE k1 o0 EPHEMERAL
         d CLIENT KILL ID #d SKIPME",
        // 31664. A hold that others have written anew, and whose token is raised, is another one.
        r"c LOCK.ACQUIRE k1 o0 SESSION $s
         b RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         b LOCK.RENEW k1 o0 FENCE 1800000060613967
         a LOCK.FORCE k1",
        // 1069079. A lease ends, and when the clock was set back ends once more; both is read at once.
        "c HDEL k2 #fence
         d CLIENT PAUSE 1000
         c LOCK.ACQUIRE k2 o0 LEASE 400 SESSION $s
         +120
         a LOCK.MRENEW 2 k2 k1 o0 LEASE 2000 SESSION $s
         +400
         !clock -60000",
        // 1095153. A request that had to wait behind another of its client was carried out just now.
        "b LOCK.ACQUIRE k3 o2 REPLICAS 1
         b LOCK.ACQUIRE k0 o2 SESSION $s
         +0
         b DEL k0
         !clock -200
         +1200",
        // 2000143, 2037302. What was granted in one step is given up in one step, whatever `FENCE` has made of its token,
        // and in whatever session it is by now.
        "a LOCK.MACQUIRE 2 k0 k2 o0 SESSION $s
         b LOCK.RENEW k0 o0 FENCE 1800000060534282
         b LOCK.RELEASE k2 o0 ALL",
        "c LOCK.MACQUIRE 2 k1 k2 o1 SESSION $s
         b LOCK.RENEW k2 o1 FENCE 1800001200580526
         c LOCK.ACQUIRE k2 o0 WAIT 300
         c LOCK.RELEASE k1 o1 ALL
         d LOCK.MACQUIRE 1 k2 o1 SESSION $t
         b LOCK.RELEASE k1 o1",
        // 2007209. So is an undelivered grant that another request has re-entered.
        "a LOCK.ACQUIRE k1 o1 LEASE 50
         b LOCK.MACQUIRE 2 k0 k1 o0 WAIT 0 SESSION $s
         s !vanish
         +20
         a LOCK.MACQUIRE 2 k0 k3 o0 WAIT 0
         a LOCK.ACQUIRE k1 o1 WAIT 20
         s LOCK.EVENTS WAIT 0
         a LOCK.ACQUIRE k0 o0
         a LOCK.RELEASE k1 o0 ALL",
        // 2010557. Of two requests alike, the one whose end nobody heard of was ephemeral.
        "b LOCK.ACQUIRE k2 o1 REPLICAS 1 SESSION $s
         +3
         a LOCK.MACQUIRE 2 k2
         b LOCK.ACQUIRE k0 o0 EPHEMERAL WAIT 300 SESSION $s
         a LOCK.ACQUIRE k0 o1
         +0
         c LOCK.ACQUIRE k1 o0
         b LOCK.ACQUIRE k1 o0 REPLICAS 1
         c LOCK.RELEASE k1 o0
         b LOCK.ACQUIRE k0 o0 SESSION $s
         c LOCK.RENEW k0 o1 LEASE 50
         s !vanish
         s LOCK.EVENTS WAIT 0
         b LOCK.ACQUIRE k0 o0 REPLICAS 1 SESSION $s",
        // 2028161. A reply that is read late tells of a hold that has ended since.
        "!replicas 20
         a LOCK.ACQUIRE k2 o3 EPHEMERAL REPLICAS 1 SESSION $s
         s LOCK.EVENTS WAIT 0
         a !deaf
         +1200
         a LOCK.MRENEW 3 k2 k1 k0 o3
         +400
         b CLIENT KILL ID #s",
        // 2058243. What bound a hold before its token was raised is read after that.
        "c LOCK.ACQUIRE k1 o2 EPHEMERAL
         c !deaf
         b LOCK.ACQUIRE k1 o2
         c LOCK.RENEW k1 o2 FENCE 1800000060849309",
        "c LOCK.ACQUIRE k1 o2 EPHEMERAL
         +0
         c !deaf
         c LOCK.ACQUIRE k3 o0
         b LOCK.ACQUIRE k1 o2
         c LOCK.RENEW k1 o2 FENCE 1800000060849309",
        // 2007110. A request that was answered behind another one like it has moved the binding, and asked for replicas.
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 LEASE 2000 WATCHDOG WAIT 300 WAITED 60000
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0
         b LOCK.RELEASE k0 o0",
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 LEASE 2000 WATCHDOG WAIT 300 WAITED 60000
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0 SESSION $s
         b LOCK.RELEASE k0 o0",
        // What was granted to the second was taken for old news of what had been released in between.
        "!replicas 20
         a LOCK.ACQUIRE k0 o1 SESSION $s
         a LOCK.ACQUIRE k0 o0 WAIT 0 SESSION $s
         b FLUSHALL
         b LOCK.ACQUIRE k0 o0 WAIT 300 WAITED 60000
         b LOCK.RELEASE k0 o0
         b LOCK.ACQUIRE k0 o0 LEASE 2000 REPLICAS 1 SESSION $s
         +120
         s LOCK.EVENTS WAIT 50
         +3
         a LOCK.ACQUIRE k0 o0",
        // 25460. A release that nobody heard of has shortened the lease.
        "a LOCK.ACQUIRE k1 o0
         b LOCK.RELEASE k1 o0 LEASE 100
         c CLIENT KILL ID #b
         b DEBUG SLEEP 0.5
         a LOCK.ACQUIRE k1 o0",
        // 1007073. A replica that was asked once more before it had answered confirmed late.
        "!replicas 2000 20
         d LOCK.ACQUIRE k3 o2
         d LOCK.ACQUIRE k3 o3 REPLICAS 1 WAIT 0
         a FLUSHDB
         +0
         +20
         b LOCK.ACQUIRE k1 o3 REPLICAS 1",
        // 2016278. A hold that was restored from a copy is lost twice, and told of the database in which it was.
        r"d RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00
         e LOCK.ACQUIRE k1 o0 LEASE 50 SESSION $t
         +1200
         a RESTORE k1 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00
         e LOCK.ACQUIRE k1 o0 LEASE 400 SESSION $t
         +1200
         b SWAPDB 0 1",
        // Two requests of one transaction for the same lock: the second waits for replicas, and not on the first one's terms.
        "!replicas 20
         a MULTI
         a LOCK.ACQUIRE k2 o3 SHARED WAIT 0 SESSION $s
         a LOCK.ACQUIRE k2 o3 SHARED HOLDS 1 REPLICAS 1 SESSION $s
         a EXEC",
        // 4800001144. Somebody waits in a database that is swapped for another, in which he holds the same lock, watched.
        // His wait stays where it is, so it becomes a re-entry of that hold, and binds it to his session without WATCHDOG:
        // nothing renews it any more, as he asked.
        "a LOCK.ACQUIRE k1 o1 LEASE 2000 WATCHDOG
         c SWAPDB 0 1
         +1200
         a LOCK.ACQUIRE k1 o3
         c LOCK.ACQUIRE k1 o1 LEASE 400 WAIT 0 SESSION $t
         c SWAPDB 0 1",
        // 4800021569. A wait has timed out. Then somebody whom nobody tells so, since he takes nothing from the network, may not
        // give it up, nor ask for the same in that session. When the timeout is read at last, it is the end of that wait, and
        // what was refused has none.
        "d !deaf
         b LOCK.ACQUIRE k1 o0
         c LOCK.ACQUIRE k1 o1 WAIT 20 SESSION $t
         d ACL SETUSER guest
         d AUTH guest x
         +1200
         d LOCK.RELEASE k1 o1 ALL
         d LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $t
         t LOCK.EVENTS WAIT 0",
        // 4800024498. A renewal by the watchdog waits for replicas that are gone. When the clock is set back by a minute, this
        // wait lasts longer by a minute, as every wait may that began before: longer than all clients are there.
        "!replicas never never 20
         b LOCK.ACQUIRE k0 o1 LEASE 2000 WATCHDOG REPLICAS 1
         +400
         !replicas
         +1200
         !clock -60000",
        // 4800030061. A cycle that is closed by a grant at once: o3 waits for k1, o1 waits for o3, and is granted a place of k1
        // before o3, since it has WAITED longer. It does not wait there, so no cycle is searched for.
        "a LOCK.ACQUIRE k1 o2 LIMIT 3
         a LOCK.ACQUIRE k0 o3 WATCHDOG
         b LOCK.ACQUIRE k1 o3 WAIT 0 SESSION $s
         a LOCK.ACQUIRE k0 o1 WAIT 0
         b LOCK.ACQUIRE k1 o1 LIMIT 2 WATCHDOG WAIT 300 WAITED 5",
        // 4800051299. A lock was broken, and its owner has it again, by a request without EPHEMERAL whose answer nobody hears.
        // Then its token is raised: that is the token of the new hold, and not of the ephemeral one from before.
        "c LOCK.MACQUIRE 2 k0 k1 o0 EPHEMERAL
         +1
         c !vanish
         c LOCK.FORCE k1
         c LOCK.ACQUIRE k1 o0
         a LOCK.RENEW k1 o0 FENCE 1800000060790588",
        // 4800052263. A lease runs out during a pause, in which the key can't be removed, and the session is told so. Then the
        // clock is set back, and the key is there again, bound to nobody. Its owner releases it before the session has read
        // the event of its loss, which came first.
        "b LOCK.RELEASE k2 o2
         d CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o2 LEASE 50 SESSION $t
         +120
         !clock -60000
         d LOCK.RELEASE k1 o2",
        // 4800054564. A session reads at once that it was granted a lock, that the binding of it ended when the server became a
        // replica, and that its next request for it, with REPLICAS, was granted, too: so it is bound again. Then somebody gives
        // it an end of 1 ms, and a request that asks no replicas moves the end of the key, but not what replicas have
        // confirmed. By that the hold ends.
        "c LOCK.ACQUIRE k0 o2 LEASE 1
         a LOCK.ACQUIRE k0 o1 WAIT 300 SESSION $s
         +1200
         d LOCK.ACQUIRE k0 o1
         a REPLICAOF 127.0.0.1 1
         !replicas 20 2000 never
         +20
         d REPLICAOF NO ONE
         d LOCK.ACQUIRE k0 o1 REPLICAS 1 SESSION $s
         +1200
         s LOCK.EVENTS
         +0
         b PEXPIRE k0 1
         b LOCK.ACQUIRE k0 o1",
        // 4800085267. The clock is set back by a minute just before the server refuses writes. What was left of a watched hold
        // is over before its key could follow; so the hold ends as soon as anything may be written, although its key would last
        // for another minute. Its client hears only then that it was granted.
        "a LOCK.ACQUIRE k2 o0 LEASE 50 WATCHDOG
         a !deaf
         +400
         b CONFIG SET min-replicas-to-write 1
         !clock -60000
         +400",
        // 4800095347. A client takes nothing from the network. What it hears at last is that it re-entered a hold that has ended
        // since, with the session that it was bound to.
        "b LOCK.ACQUIRE k0 o0 EPHEMERAL SESSION $s
         a !deaf
         a LOCK.ACQUIRE k0 o0 WAIT 0
         s !end",
        // 4800104567. A lease has run out, but not the key, to which others gave a later end. Its owner is granted the lock anew,
        // and goes before replicas have confirmed that. What is revoked is the second hold, and not the first.
        "b LOCK.ACQUIRE k2 o1 SHARED LEASE 50
         b PEXPIRE k2 100000
         +1200
         b LOCK.ACQUIRE k2 o1 REPLICAS 1
         +1
         b !end",
        // 4800232624. The server becomes a replica, and a master again in the same turn. Somebody who has waited since before
        // that is granted the lock after it, with EPHEMERAL; a renewal without flags in the same session leaves that as it is.
        "a LOCK.ACQUIRE k0 o3
         b LOCK.ACQUIRE k0 o2 EPHEMERAL WAIT 0 SESSION $s
         +400
         d REPLICAOF 127.0.0.1 1
         d REPLICAOF NO ONE
         a LOCK.RELEASE k0 o3
         s LOCK.EVENTS
         +0
         e LOCK.MRENEW 2 k0 k2 o2 SESSION $s",
        // 4800334013. Somebody waits for a lock that others then write to be his, and re-enters it by another request, watched.
        // His wait ends behind that: it binds the hold to his session, and there it is not watched. Nobody has read that yet.
        r"b LOCK.ACQUIRE k0 o1
         e LOCK.ACQUIRE k0 o0 LEASE 2000 WAIT 0 SESSION $t
         +0
         b RESTORE k0 400 \x10\x40\x1f\x1f\x00\x00\x00\x04\x00\x82o0\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\x0a\x06\x00\x09\xff\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00 REPLACE
         e LOCK.MACQUIRE 1 k0 o0 LEASE 2000 WATCHDOG",
        // 4800380069. A renewal of two locks finds that its owner does not hold one of them; its client is gone. That
        // event is none of the request that waits for this lock, and times out later.
        "!replicas 20 20 2000
         b LOCK.ACQUIRE k1 o0 SESSION $s
         b LOCK.MRENEW 2 k1 k0 o0 REPLICAS 1 SESSION $s
         a LOCK.ACQUIRE k0 o1
         b !end
         +1200
         b LOCK.ACQUIRE k0 o0 WAIT 20 SESSION $s",
        // 4800398877. Two locks are granted in one step to a client that goes before it hears of it. A session renews one of
        // them, and gives up the other: so it gives up the one that it has, too, which was granted in the same step.
        "b LOCK.MACQUIRE 2 k2 k0 o0 WATCHDOG
         b !end
         +400
         a LOCK.RENEW k0 o0 SESSION $t
         a LOCK.RELEASE k2 o0 ALL",
        // 4800479194. A hold whose grant replicas have yet to confirm is not renewed yet, and may end by itself. So no cycle is
        // closed when two wait for each other's locks; it is when the replicas confirm it.
        "!replicas 20
         e LOCK.ACQUIRE k1 o1 WATCHDOG
         e LOCK.ACQUIRE k2 o0 WATCHDOG REPLICAS 1
         c LOCK.ACQUIRE k2 o1 WAIT 0
         d LOCK.ACQUIRE k1 o0 WAIT 0",
        // 4800485829. The same, but the binding has ended with its session: then the key says when the hold ends.
        "b LOCK.ACQUIRE k0 o0
         a LOCK.ACQUIRE k0 o1 LEASE 7200000 WAIT 0 SESSION $t
         +1
         !clock -60000
         t LOCK.EVENTS WAIT 50
         a LOCK.FORCE k0
         +1
         t !end
         +400
         a PEXPIRE k0 1",
        // 4800451212. A session holds, watched, and re-enters with REPLICAS. It reads once before they have confirmed that. The
        // re-entry binds the hold anew, and the session reads no more, so it is taken for dead.
        "!replicas 20
         e LOCK.MACQUIRE 1 k0 o0 LEASE 400 WATCHDOG SESSION $s
         e LOCK.ACQUIRE k0 o0 LEASE 400 REPLICAS 1 SESSION $s
         +3
         s LOCK.EVENTS",
        // 4800480512. A grant with REPLICAS has bound a hold to a session that does not hear it any more. Its owner gives a part
        // back and shortens the lease; then he re-enters without REPLICAS, which moves the end of the key, but not what they
        // have confirmed.
        "!replicas 0 never 0
         c LOCK.ACQUIRE k1 o0 REPLICAS 1 SESSION $s
         s !vanish
         +1
         s LOCK.EVENTS
         +3
         b LOCK.ACQUIRE k1 o0
         +1
         c LOCK.RELEASE k1 o0 LEASE 100
         b LOCK.ACQUIRE k1 o0",
        // 4800704048. MRENEW of one lock, and RENEW of it on the same terms: the second repeats the first, and both have one end.
        "a LOCK.ACQUIRE k0 o0
         b LOCK.MRENEW 1 k0 o0 REPLICAS 1 SESSION $s
         d LOCK.RENEW k0 o0 REPLICAS 1 SESSION $s",
        // 4800658221. A hold is over where nothing may be written, before its key could follow a step of the clock; its session
        // is told so. Then the server becomes a replica, which writes nothing by itself: so the key stays as it is.
        "b LOCK.ACQUIRE k1 o0 LEASE 2000 WATCHDOG SESSION $s
         +400
         !clock -60000
         c CONFIG SET min-replicas-to-write 1
         +3
         +400
         t LOCK.EVENTS WAIT 0
         +1200
         c REPLICAOF 127.0.0.1 1",
        // 4800013843. Of two waits that a change of role ends, and a renewal that finds nothing to renew, each has its end, though
        // nobody can say of which of them the first is.
        "c LOCK.ACQUIRE k2 o0
         d LOCK.ACQUIRE k2 o2 WAIT 20 SESSION $t
         +120
         e LOCK.ACQUIRE k2 o2 WAIT 20 SESSION $t
         c REPLICAOF 127.0.0.1 1
         c REPLICAOF NO ONE
         +0
         !replicas 0 20
         e LOCK.RELEASE k1 o0
         c LOCK.MRENEW 2 k0 k2 o2 REPLICAS 1 SESSION $t
         e LOCK.ACQUIRE k0 o2",
        // 28790. A request that waited behind another one of its owner has re-entered what replicas confirmed: it lasts no longer by it.
        "!replicas 20
         s LOCK.ACQUIRE k0 o0 REPLICAS 1
         c LOCK.ACQUIRE k0 o0 LEASE 7200000 WAIT 0 SESSION $s
         +1200
         s LOCK.EVENTS",
        // 31755. A renewal without REPLICAS has shortened the lease before the grant was read: by that the hold ends.
        "!replicas 0 20 0
         b LOCK.ACQUIRE k0 o0 REPLICAS 1 WATCHDOG SESSION $t
         +20
         a LOCK.MRENEW 2 k0 k1 o0 LEASE 400
         !replicas
         +20
         +120
         t LOCK.EVENTS",
    ];
    runs.into_iter().for_each(is_mended);
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    for number in 0..50 {
        let run = seed::of_seed(number);
        let told = || {
            let played = play(run.generation, &run.lines, true);
            played.map_or_else(|broken| format!("{broken:?}"), |run| format!("{run:?}"))
        };
        assert_eq!(told(), told(), "seed {number}");
    }
}

/// What a script says that somebody is told is a rule, too; and a scene is cut down as a whole.
#[test]
fn what_is_not_told_as_the_script_says_is_seen() {
    const ASKED: &str = "!scene raised
         a LOCK.ACQUIRE k a
         +1
         b LOCK.ACQUIRE k b
         +1
         b !told";
    assert_eq!(broken(&format!("{ASKED} null")), [""; 0]);
    let lines = script::parse(&format!("c LOCK.SESSION\n{ASKED} 1\n!over\n+1"));
    for generation in Generation::ALL {
        let broken = play(generation, &lines, false).expect_err("b was told null");
        assert_eq!(broken.violation.rule, scenes::RAISED);
        let (cut, _) = shrink::shrink(generation, &lines, broken);
        assert_eq!(cut, script::parse(&format!("{ASKED} 1")));
    }
}

#[test]
fn scripts_are_read_as_they_are_printed() {
    for number in 0..200 {
        let run = seed::of_seed(number);
        assert_eq!(script::parse(&script::print(&run.lines)), run.lines, "seed {number}");
    }
}

/// F1 of the second look.
#[test]
fn nothing_is_written_where_the_server_would_refuse_it() {
    is_mended(
        "b LOCK.ACQUIRE k2 o3 LEASE 50
         b LOCK.MACQUIRE 1 k2 o0 WAIT 300
         +3
         !misconf on
         +400",
    );
    is_mended(
        "a LOCK.ACQUIRE k1 o1
         a LOCK.RENEW k1 o1 LEASE 400 WATCHDOG
         +400
         a CONFIG SET min-replicas-to-write 1
         +300",
    );
}

/// F3.
#[test]
fn a_hold_whose_connection_has_ended_is_not_re_entered() {
    is_mended(
        "b LOCK.MACQUIRE 2 k0 k2 o1 EPHEMERAL
         b !end
         d LOCK.ACQUIRE k2 o1
         +10",
    );
}

/// F4.
#[test]
fn a_request_is_answered_whatever_becomes_of_the_role() {
    is_mended(
        "c LOCK.ACQUIRE k1 o1 REPLICAS 1 SESSION $s
         a REPLICAOF 127.0.0.1 1
         a REPLICAOF NO ONE
         +2000",
    );
}

/// F8.
#[test]
fn a_request_that_is_repeated_closes_no_cycle() {
    is_mended(
        "c LOCK.ACQUIRE l c LIMIT 2 WATCHDOG
         d LOCK.ACQUIRE l d LIMIT 2 WATCHDOG
         a LOCK.ACQUIRE x a WATCHDOG
         e LOCK.ACQUIRE l a LIMIT 2 WAIT 0 SESSION $s
         e LOCK.ACQUIRE x d WAIT 0 SESSION $s
         e LOCK.ACQUIRE l a WAIT 0 SESSION $s
         +500",
    );
}

/// Found by seed 22176: one hold without an end kept the watchdog from renewing any other.
#[test]
fn a_hold_without_end_keeps_no_other_from_being_renewed() {
    is_mended(
        "a LOCK.ACQUIRE k1 o2 LEASE 50 LIMIT 2 WATCHDOG
         e LOCK.ACQUIRE k1 o1 LIMIT 3 WATCHDOG
         c LOCK.ACQUIRE k2 o2 LEASE 2000 SHARED EPHEMERAL
         b PERSIST k2
         +2100
         +100",
    );
}

/// F2b: locks that were taken one by one, and are renewed together, are released one by one.
#[test]
fn release_all_during_a_renewal_of_several_releases_one() {
    const RENEWED: &str = "!replicas 20
         a LOCK.ACQUIRE u o SESSION $s
         a LOCK.ACQUIRE v o SESSION $s
         a LOCK.ACQUIRE w o SESSION $s
         +5
         a LOCK.MRENEW 3 u v w o REPLICAS 1 SESSION $s
         a LOCK.RELEASE u o ALL
         +50
         x EXISTS u v w
         +5";
    is_mended(RENEWED);
    history(RENEWED, 'x', "2");
}

/// F7: the waiters for all keys that one command deletes are served in one slice within its step, and not in one for each
/// key. (Before Redis 7.2, all of them in the next turn.)
#[test]
fn keys_that_are_deleted_together_are_followed_up_in_one_slice() {
    const KEYS: usize = 200;
    let each = |of: fn(usize) -> String| (0..KEYS).map(of).collect::<String>();
    let held = each(|key| format!("b LOCK.ACQUIRE k{key} h LEASE 600000\n"));
    let waited_for = each(|key| format!("b LOCK.ACQUIRE k{key} w WAIT 0 SESSION $s\n"));
    let keys = each(|key| format!(" k{key}"));
    let lines = script::parse(&format!("{held}{waited_for}+1\nx DEL{keys}\nx EXISTS{keys}\n+50\nx EXISTS{keys}\n+1"));
    for generation in Generation::ALL {
        let run = play(generation, &lines, true).unwrap_or_else(|broken| panic!("{}", broken.violation));
        let told: Vec<i64> = run.told[..run.script.0].iter().filter_map(|(of, reply)| of_x(*of, reply)).collect();
        let [deleted, in_its_step, later] = told[..] else { panic!("{told:?}") };
        assert_eq!((deleted, later), (KEYS as i64, KEYS as i64), "{generation:?}");
        assert!(in_its_step < KEYS as i64 / 2, "{generation:?}: {in_its_step} were served");
    }
}

fn of_x(name: char, reply: &Reply) -> Option<i64> {
    match reply {
        Reply::Integer(number) if name == 'x' => Some(*number),
        _ => None,
    }
}

/// An undeliverable grant was re-entered before it was revoked (seeds 1992, 18806).
#[test]
fn what_is_owed_to_be_taken_back_is_not_re_entered() {
    is_mended(
        "b LOCK.ACQUIRE k0 o0
         c LOCK.ACQUIRE k0 o1 WAIT 0
         c LOCK.ACQUIRE k0 o2 WAIT 0 SESSION $s
         +0
         b LOCK.RELEASE k0 o2
         a CLIENT UNBLOCK #c ERROR
         b LOCK.FORCE k0
         c LOCK.ACQUIRE k0 o1
         +10",
    );
    is_mended(
        "c LOCK.ACQUIRE k0 o0
         c LOCK.MACQUIRE 1 k0 mk0 WAIT 0
         b EVAL return_redis.call(unpack(ARGV)) 0 LOCK.FORCE k0
         b REPLICAOF 127.0.0.1 1
         b REPLICAOF NO ONE
         b LOCK.ACQUIRE k0 o1 WAIT 0 SESSION $t
         b LOCK.MACQUIRE 1 k0 mk0
         +10",
    );
}

/// Taking back a re-entry set the deadline back to what it was before (seed 9938, and 39277 in another way).
#[test]
fn no_deadline_is_set_back() {
    is_mended(
        "c LOCK.ACQUIRE k1 o0
         c LOCK.ACQUIRE k1 o1 LEASE 50 WAIT 0
         b LOCK.ACQUIRE k1 o1 WAIT 0 SESSION $s
         +0
         a LOCK.FORCE k1
         b DEBUG SLEEP 3
         c CLIENT KILL ID #s
         +10",
    );
}

/// Some of several that their owner holds get another token, and keep their bindings (seed 15754).
#[test]
fn several_of_which_some_are_held_are_seen() {
    is_mended(
        "a LOCK.MACQUIRE 2 k2 k1 mk2k1 WATCHDOG EPHEMERAL
         +0
         b LOCK.ACQUIRE k0 o2 LEASE 50
         a RENAME k0 k1
         a LOCK.MACQUIRE 2 k2 k1 mk2k1 WAIT 300
         +10",
    );
}

/// A binding that was made before its request was answered: `rules-tried`, A3.
#[test]
fn a_binding_that_is_made_too_early_is_seen() {
    is_mended(
        "a LOCK.ACQUIRE k0 o2 LIMIT 2
         a LOCK.ACQUIRE k0 o1 LEASE 400 LIMIT 2 WATCHDOG
         b LOCK.ACQUIRE k0 o1 LEASE 50 LIMIT 2 EPHEMERAL REPLICAS 1
         +2000",
    );
}

/// A reply to a grant is composed for a client that another one closes before anything is sent: the grant stands.
#[test]
fn grant_stands_once_its_reply_is_composed() {
    history(
        "a LOCK.MACQUIRE 2 k k2 a
         +1
         c LOCK.ACQUIRE k o WAIT 0
         x LOCK.ACQUIRE k2 p WAIT 0
         x CLIENT KILL ID #c
         +1
         a LOCK.MRELEASE 2 k k2 a
         +5
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "null",
    );
}

/// A grant whose client goes before its reply was composed is revoked.
#[test]
fn a_grant_whose_client_goes_before_its_answer_is_taken_back() {
    history(
        "a LOCK.ACQUIRE k a
         +1
         b LOCK.ACQUIRE k o WAIT 0
         c LOCK.ACQUIRE k c WAIT 0
         +1
         a LOCK.RELEASE k a
         a CLIENT KILL ID #b
         +5",
        'c',
        "180000000",
    );
}

/// A session that was read the event of a grant, and is closed before that is sent: the grant stands.
#[test]
fn grant_stands_once_its_event_is_read() {
    history(
        "a LOCK.ACQUIRE k a
         a LOCK.ACQUIRE k o WAIT 0 SESSION $s
         +1
         a LOCK.RELEASE k a
         +1
         s LOCK.EVENTS
         b CLIENT KILL ID #s
         +5
         c LOCK.ACQUIRE k c
         +1",
        'c',
        "null",
    );
}

/// A connection that ends takes along the hold that it was bound to, and no other that has come into its place (seen on
/// Redis 7.0, where what is renamed is looked at later in the same turn).
#[test]
fn a_hold_that_was_renamed_to_the_key_of_an_ephemeral_one_stays() {
    history(
        "a LOCK.ACQUIRE k1 o EPHEMERAL
         b LOCK.ACQUIRE k2 o
         +1
         b RENAME k2 k1
         a !end
         c LOCK.ACQUIRE k1 c
         +1",
        'c',
        "null",
    );
}

/// A holder that somebody wrote by hand has no end of its own: it holds as long as the key, which does not end earlier
/// because another holder goes.
#[test]
fn a_key_ends_no_earlier_than_its_holder_without_an_end() {
    history(
        "a LOCK.ACQUIRE k a SHARED LEASE 30000
         +1
         b HSET k b 1
         +1
         c LOCK.ACQUIRE k c SHARED LEASE 50
         +1
         a LOCK.RELEASE k a
         +200
         b EXISTS k
         +1",
        'b',
        "1",
    );
}

/// A lock of several is lost, another re-entered, and neither is read yet when the owner releases it all: the re-entry was
/// forgotten without being revoked, and every later request of its owner refused for ever (seed 80581).
#[test]
fn a_re_entry_that_is_withdrawn_unread_is_revoked() {
    is_mended(
        "!replicas 0
         a LOCK.MACQUIRE 2 k0 k1 o LEASE 60000 SESSION $s
         +1
         b LOCK.FORCE k0
         +1
         a LOCK.ACQUIRE k1 o LEASE 60000 REPLICAS 1 SESSION $s
         +5
         a LOCK.RELEASE k1 o ALL
         +5
         a LOCK.ACQUIRE k1 o LEASE 60000
         +5",
    );
}

/// A connection goes on behind a grant that is written and not sent. When what it asked behind it ended first, others of
/// its owner re-entered what was revoked with the connection (seed 1037094).
#[test]
fn behind_its_own_pipeline_a_grant_still_stands_in_the_way() {
    is_mended(
        "e LOCK.ACQUIRE k0 o1 LEASE 1
         c LOCK.ACQUIRE k0 o0 WAIT 0
         d LOCK.ACQUIRE k0 o0 WAIT 0 WAITED 60000
         c REPLICAOF 127.0.0.1 1
         c REPLICAOF NO ONE
         c LOCK.ACQUIRE k0 o0
         d LOCK.ACQUIRE k0 o0 REPLICAS 1
         +10",
    );
}

/// Behind the answer to its re-entry, a client gives one hold back, and is closed before anything is sent: the hold that
/// was there before stays.
#[test]
fn a_re_entry_that_was_given_back_is_not_taken_back_as_well() {
    const CLOSED: &str = "!replicas 5
         a LOCK.ACQUIRE k o
         d LOCK.SESSION
         +5
         c LOCK.ACQUIRE k o REPLICAS 1
         c LOCK.RELEASE k o
         r LOCK.ACQUIRE z d REPLICAS 1 SESSION $d
         d LOCK.EVENTS WAIT 0
         d CLIENT KILL ID #c
         +50
         x HGET k o
         +5";
    is_mended(CLOSED);
    history(CLOSED, 'x', "1");
}

/// An `EPHEMERAL` hold whose session was replaced in the same turn closes no cycle.
#[test]
fn a_hold_that_is_over_closes_no_cycle() {
    history(
        "r LOCK.ACQUIRE x o##1 EPHEMERAL SESSION $s
         y LOCK.ACQUIRE y y
         z LOCK.ACQUIRE x y WAIT 0
         +5
         b LOCK.SESSION REPLACES $s
         r LOCK.ACQUIRE y o##2 WAIT 5000 SESSION $b
         +5",
        'r',
        "WAITING",
    );
}

/// Another client has shortened the lease while replicas confirmed the grant: what is sure goes by that.
#[test]
fn a_lease_that_others_shorten_before_its_confirmation() {
    history(
        "!replicas 5
         r LOCK.ACQUIRE k o LEASE 30000 REPLICAS 1 WATCHDOG SESSION $s
         x PEXPIRE k 500
         +20
         s LOCK.EVENTS HEARTBEAT
         +5",
        's',
        "3750 30000 16 1",
    );
}

/// A release that names the token of another lock ends no request that is being confirmed for both.
#[test]
fn a_release_under_the_token_of_another_lock() {
    history(
        "!replicas 20
         r LOCK.ACQUIRE a o SESSION $s
         +5
         p LOCK.ACQUIRE b o SESSION $s
         +5
         r LOCK.MRENEW 2 a b o REPLICAS 1 SESSION $s
         +5
         r LOCK.RELEASE a o ALL TOKEN @p
         +50
         s LOCK.EVENTS
         +5",
        's',
        "granted",
    );
}

/// Histories that broke a draft of the rules of 0.3, each with the rule that closes it: no rule of the judges is broken,
/// and what this client is told last begins like this.
#[track_caller]
fn history(text: &str, name: char, told: &str) {
    let lines = script::parse(text);
    for generation in Generation::ALL {
        let run = play(generation, &lines, true).unwrap_or_else(|broken| panic!("{}\n{text}", broken.violation));
        let mut in_script = run.told[..run.script.0].iter();
        let last = in_script.rfind(|(of, _)| *of == name).map(|(_, reply)| format!("{reply:?}"));
        assert!(last.as_ref().is_some_and(|last| last.contains(told)), "{generation:?}: {last:?}, not {told}\n{text}");
    }
}

/// A1. Of a renewal that was not confirmed, its owner counts on the earlier of the two deadlines.
#[test]
fn a1_a_shorter_lease_that_is_not_confirmed() {
    history(
        "!replicas 0
         a LOCK.ACQUIRE k a LEASE 30000 REPLICAS 1
         +5
         !replicas never
         a LOCK.RENEW k a LEASE 1000 REPLICAS 1
         b LOCK.ACQUIRE k b WAIT 0
         +3000",
        'b',
        "1800000001",
    );
}

/// A1. A request that names a token from before `FENCE` raised it finds nothing.
#[test]
fn a1_a_token_that_was_raised_names_no_hold() {
    history(
        "r LOCK.ACQUIRE k o
         +1
         b LOCK.RENEW k o FENCE 1800000060000007
         r LOCK.RELEASE k o TOKEN @r
         +1",
        'r',
        "null",
    );
}

/// A2. A bound hold with `REPLICAS` ends at the deadline that they have confirmed, whatever is asked meanwhile.
#[test]
fn a2_a_re_entry_that_is_not_confirmed_prolongs_nothing() {
    history(
        "!replicas 0
         a LOCK.ACQUIRE k a LEASE 2000 WATCHDOG REPLICAS 1
         +5
         !replicas never
         +300
         c LOCK.ACQUIRE k a LEASE 60000 REPLICAS 1
         +1500
         +500
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "1800000002305",
    );
}

/// A3. A request that is refused has bound nothing: what its connection takes along is not the hold from before.
#[test]
fn a3_a_binding_of_a_request_that_is_refused() {
    history(
        "!replicas 0
         c LOCK.ACQUIRE k o LEASE 2000 WATCHDOG REPLICAS 1
         +5
         !replicas never
         d LOCK.ACQUIRE k o EPHEMERAL REPLICAS 1
         +1100
         d !end
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "null",
    );
}

/// A4. What is lost before its replicas have confirmed it is refused; nobody is told `lost` first, or `granted` after it.
#[test]
fn a4_a_confirmation_of_what_is_lost() {
    history(
        "!replicas 20
         a LOCK.ACQUIRE k a REPLICAS 1 SESSION $s
         +1
         b LOCK.FORCE k
         b LOCK.ACQUIRE k b
         +50
         s LOCK.EVENTS
         +1",
        's',
        "UNCONFIRMED the lock was lost",
    );
}

/// A5. One request at a time for a key and an owner: what is revoked is exact.
#[test]
fn a5_two_requests_of_one_owner() {
    const RE_ENTERED: &str = "!replicas never
         c LOCK.ACQUIRE k o WATCHDOG REPLICAS 1
         +10
         d LOCK.ACQUIRE k o
         +1100
         b LOCK.ACQUIRE k b
         +1";
    history(RE_ENTERED, 'd', "is being confirmed");
    history(RE_ENTERED, 'b', "1800000001110");
    history(
        "!replicas 0
         c LOCK.ACQUIRE k o REPLICAS 1
         +5
         !replicas never
         c LOCK.ACQUIRE k o REPLICAS 1
         +10
         d LOCK.RELEASE k o HOLDS 1
         +1100
         d LOCK.RELEASE k o
         +1",
        'd',
        "1",
    );
}

/// A6. `LOCK.SESSION REPLACES` ends the session before: what arrives for it afterwards binds nothing to it.
#[test]
fn a6_late_bytes_of_a_session_that_was_replaced() {
    const REPLACED: &str = "r LOCK.ACQUIRE k o WATCHDOG SESSION $s
         +10
         t LOCK.SESSION REPLACES $s
         r LOCK.RENEW k o TOKEN @r WATCHDOG SESSION $t
         r LOCK.RENEW k o WATCHDOG SESSION $s
         +1
         t LOCK.EVENTS WAIT 50 HEARTBEAT
         b LOCK.ACQUIRE k b
         +500";
    history(REPLACED, 'r', "NOSESSION");
    history(REPLACED, 'b', "null");
}

/// A6. Nobody replaces a session whose host is gone: one that was promised a heartbeat and asks for none any more is ended.
#[test]
fn a6_a_session_that_is_silent_is_ended() {
    history(
        "r LOCK.ACQUIRE k o LEASE 3600000 EPHEMERAL SESSION $s
         s LOCK.EVENTS HEARTBEAT
         +50000
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "180000005",
    );
}

/// A7. What was granted and not read yet when it was given up is not taken for the grant of a later request, which is an
/// owner's of its own, as is the duty of clients.
#[test]
fn a7_a_grant_that_is_read_after_it_was_given_up() {
    history(
        "b LOCK.ACQUIRE k b
         r LOCK.ACQUIRE k o##1 WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +1
         s !deaf
         b LOCK.RELEASE k b
         +1
         r LOCK.RELEASE k o##1 ALL
         b LOCK.ACQUIRE k b
         +1
         r LOCK.ACQUIRE k o##2 WAIT 0 SESSION $s
         +1
         s !hears
         +1",
        's',
        "o##1",
    );
}

/// A8. A session that has events all the time hears with each of them that it is alive.
#[test]
fn a8_a_session_that_always_has_events_hears_that_it_is_alive() {
    history(
        "r LOCK.ACQUIRE k o WAIT 20 SESSION $s
         b LOCK.ACQUIRE k b
         r LOCK.ACQUIRE k p WAIT 20 SESSION $s
         +30
         s LOCK.EVENTS HEARTBEAT
         +1",
        's',
        "heartbeat",
    );
}

/// A8. One short lease says nothing about the long ones: `sure` counts in thousandths of each.
#[test]
fn a8_sure_counts_thousandths_of_each_lease() {
    history(
        "r LOCK.ACQUIRE long o LEASE 60000 WATCHDOG SESSION $s
         r LOCK.ACQUIRE short o LEASE 3000 WATCHDOG SESSION $s
         s LOCK.EVENTS HEARTBEAT
         +900
         s LOCK.EVENTS HEARTBEAT
         +200
         s LOCK.EVENTS HEARTBEAT
         +900
         s LOCK.EVENTS HEARTBEAT
         +200
         s LOCK.EVENTS HEARTBEAT
         +900
         s LOCK.EVENTS HEARTBEAT
         +1",
        's',
        "30000 948 1",
    );
}

/// A8. How long a grant lasts after a wait is counted from when `LOCK.EVENTS` was sent, which its reader knows.
#[test]
fn a8_how_long_a_grant_lasts_is_counted_from_the_question() {
    history(
        "b LOCK.ACQUIRE k b LEASE 5000
         r LOCK.ACQUIRE k o LEASE 30000 WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +6000",
        's',
        "\"35",
    );
}

/// A10. With `NEW`, an owner that comes to hold the lock while it waits is refused, too.
#[test]
fn a10_an_owner_that_holds_at_its_turn_with_new() {
    history(
        "a LOCK.ACQUIRE k x LEASE 60000
         a LOCK.ACQUIRE l o LEASE 60000
         b LOCK.ACQUIRE k o NEW WAIT 0 SESSION $s
         +1
         a RENAME l k
         +1
         s LOCK.EVENTS
         +1",
        's',
        "timeout",
    );
}

/// B1. What may have been granted already, and its answer lost, is asked for again with the same owner and `HOLDS 1`: it
/// counts once.
#[test]
fn b1_what_is_asked_again_counts_once() {
    history(
        "r LOCK.ACQUIRE k o HOLDS 1 WATCHDOG WAIT 0 SESSION $s
         +1
         s !end
         +1
         r LOCK.ACQUIRE k o HOLDS 1 WATCHDOG WAIT 0 WAITED 5 SESSION $t
         +1
         r LOCK.RELEASE k o
         +1",
        'r',
        "1",
    );
}

/// B3. The server's own refusal of a write says that nothing happened; the module's of a grant has another code.
#[test]
fn b3_what_was_not_confirmed_has_a_code_of_its_own() {
    history(
        "!replicas never
         a LOCK.ACQUIRE k o REPLICAS 1
         +1100",
        'a',
        "UNCONFIRMED",
    );
}

/// B4. What is to be revoked while writes are refused is revoked before anything else is judged by the lock.
#[test]
fn b4_what_is_owed_while_writes_are_refused() {
    history(
        "!replicas never
         a LOCK.ACQUIRE k o REPLICAS 1
         +500
         b CONFIG SET min-replicas-to-write 2
         +1000
         b CONFIG SET min-replicas-to-write 0
         c LOCK.ACQUIRE k o
         c LOCK.RELEASE k o
         +1",
        'c',
        "1",
    );
}

/// B7. A reader without heartbeats is asked to read again in time for what is renewed for it.
#[test]
fn b7_a_reader_without_heartbeats() {
    history(
        "r LOCK.ACQUIRE k o LEASE 400 WATCHDOG SESSION $s
         +1
         s LOCK.EVENTS WAIT 0
         +60",
        's',
        "null",
    );
}

/// Seeds 4800393044 and 4800596028: a bound hold goes along when databases are swapped, and then follows a step of the clock as any other,
/// whether writes are refused meanwhile or both happen in one turn.
#[test]
fn a_step_of_the_clock_after_a_swap_loses_no_bound_hold() {
    is_mended(
        "a LOCK.ACQUIRE k2 o0 WATCHDOG
         +120
         d SWAPDB 0 1
         a CONFIG SET min-replicas-to-write 1
         +1200
         !clock 60000",
    );
    is_mended(
        "b LOCK.ACQUIRE k1 o0 EPHEMERAL
         b LOCK.ACQUIRE k1 o2 WAIT 300
         +1
         c LOCK.ACQUIRE k1 o2
         !clock 60000
         b SWAPDB 0 1
         +0
         !clock 60000",
    );
}

/// Seed 4800155577: what somebody deleted is told also if the server takes no writes from that moment on.
#[test]
fn a_loss_is_told_while_writes_are_refused() {
    history(
        "b LOCK.ACQUIRE k o LEASE 60000 SESSION $s
         +1
         c MULTI
         c DEL k
         c CONFIG SET min-replicas-to-write 1
         c EXEC
         +20
         s LOCK.EVENTS
         +1",
        's',
        "lost",
    );
}

/// A session of another user is refused; a name that no connection has is no session.
#[test]
fn a_session_of_another_user_is_not_lent() {
    for (session, told) in [("$s", "-NOPERM"), ("1", "-NOSESSION")] {
        history(
            &format!(
                "s LOCK.EVENTS
                 g ACL SETUSER guest on nopass +@all ~*
                 g AUTH guest x
                 g LOCK.ACQUIRE k o SESSION {session}
                 +1"
            ),
            'g',
            told,
        );
    }
}

/// B8. A wait for several is judged again when its owner is granted one of them.
#[test]
fn b8_a_wait_for_what_its_owner_comes_to_hold() {
    history(
        "a LOCK.ACQUIRE k1 x
         y LOCK.ACQUIRE k2 y
         +1
         c LOCK.ACQUIRE k2 o WAIT 0
         +1
         b LOCK.MACQUIRE 2 k1 k2 o WAIT 0
         +1
         y LOCK.RELEASE k2 y
         +10",
        'b',
        "-ERR",
    );
}

/// C1. With `WAITED`, a request is searched for cycles as if it stood in its place.
#[test]
fn c1_a_cycle_through_waited() {
    const OVERTAKES: &str = "h LOCK.ACQUIRE a h LEASE 600000
         y LOCK.ACQUIRE b y LEASE 600000
         +1
         h LOCK.ACQUIRE b h WAIT 0
         +1
         n LOCK.MACQUIRE 2 a b n WAIT 0 WAITED 60000
         +1
         y LOCK.RELEASE b y
         +500";
    history(OVERTAKES, 'n', "DEADLOCK");
    history(OVERTAKES, 'h', "1800000000003001");
}

/// C2. A lease is not considered: a cycle that it would end is refused.
#[test]
fn c2_a_lease_that_ends_by_itself() {
    history(
        "t LOCK.ACQUIRE x o##1 LEASE 1000
         u LOCK.ACQUIRE x o##2 WAIT 5000
         +1500",
        'u',
        "DEADLOCK",
    );
}

/// C4. A reader waits for an exclusive holder.
#[test]
fn c4_a_cycle_of_readers() {
    history(
        "a LOCK.ACQUIRE x a WATCHDOG
         b LOCK.ACQUIRE y b WATCHDOG
         +1
         a LOCK.ACQUIRE y a SHARED WAIT 0
         +1
         b LOCK.ACQUIRE x b SHARED WAIT 0
         +500",
        'b',
        "DEADLOCK",
    );
}

/// A key that is waited for gets another holder by another client's command: the search follows that one.
#[test]
fn search_for_deadlocks_follows_the_holder_that_another_client_wrote() {
    history(
        "a LOCK.ACQUIRE k a
         z LOCK.ACQUIRE other z
         d LOCK.ACQUIRE m d
         +1
         b LOCK.ACQUIRE k b WAIT 0
         c LOCK.ACQUIRE k c WAIT 0
         z LOCK.ACQUIRE m z WAIT 0
         +1
         x RENAME other k
         +1
         d LOCK.ACQUIRE k d WAIT 0
         +500",
        'd',
        "DEADLOCK owner 'd' waits for 'k' held by 'z'",
    );
}

/// A bound hold has as much left after a step of the clock as before it, whatever is asked meanwhile, and wherever nothing
/// can be written.
#[test]
fn a_bound_hold_follows_a_clock_step() {
    for by in ["60000", "-60000", "200"] {
        for flag in ["WATCHDOG", "EPHEMERAL", "SESSION $s"] {
            is_mended(&format!(
                "a LOCK.ACQUIRE k o {flag}
                 b LOCK.ACQUIRE k p WAIT 0
                 +20
                 !clock {by}
                 c LOCK.ACQUIRE k q
                 +400
                 a LOCK.RELEASE k o"
            ));
        }
        is_mended(&format!(
            "a LOCK.ACQUIRE k o WATCHDOG
             a CONFIG SET min-replicas-to-write 1
             +20
             !clock {by}
             +400
             !clock {by}
             +400
             a CONFIG SET min-replicas-to-write 0
             b LOCK.ACQUIRE k p
             +400"
        ));
    }
    // 1039626. The key expires, and the clock is set back before anything else happens.
    is_mended(
        "c LOCK.ACQUIRE k o SESSION $s
         +3
         c PERSIST k
         !clock 60000
         +3
         !clock -60000
         +400",
    );
}

/// Seeds 3210, 11606: what is written anew keeps the limit that is left.
#[test]
fn what_is_written_anew_keeps_its_limit() {
    is_mended(
        "c LOCK.ACQUIRE k a SHARED WATCHDOG
         c LOCK.ACQUIRE k b LIMIT 2 WATCHDOG
         +3
         !clock 60000
         d LOCK.ACQUIRE k c LIMIT 3
         +400",
    );
    is_mended(
        "d LOCK.ACQUIRE k a LIMIT 3 EPHEMERAL
         a LOCK.ACQUIRE k b LEASE 3600001 LIMIT 2
         +3
         !clock 60000
         c LOCK.ACQUIRE k c SHARED
         +400",
    );
}

/// Also the limit that its owner named when it re-entered, over a connection to which nothing is bound: the binding kept the one from before.
#[test]
fn what_is_written_anew_keeps_the_limit_of_its_re_entry() {
    history(
        "a LOCK.ACQUIRE k a SHARED WATCHDOG
         b LOCK.ACQUIRE k b LIMIT 2
         c LOCK.ACQUIRE k a LIMIT 2
         +400
         !clock 60000
         d LOCK.ACQUIRE k d SHARED
         +1
         e LOCK.ACQUIRE k e SHARED
         +400",
        'e',
        "null",
    );
}

/// What changes of the module in small ways (scripts/mutants) would have got wrong without any run that shows it.
#[test]
fn several_holders_are_known_as_long_as_they_hold_and_no_longer() {
    const TWO: &str = "a LOCK.ACQUIRE k a LIMIT 2
         b LOCK.ACQUIRE k b LIMIT 2
         +1";
    const TWO_MORE: &str = "c LOCK.ACQUIRE k c LIMIT 2
         +1
         d LOCK.ACQUIRE k d LIMIT 2
         +1";
    history(TWO, 'b', "18000000000");
    history(&format!("{TWO}\nb FLUSHALL\n+1\n{TWO_MORE}"), 'd', "18000000000");
    history(&format!("{TWO}\na LOCK.RELEASE k a\n+1\nb LOCK.RELEASE k b\n+1\n{TWO_MORE}"), 'd', "18000000000");
    history(&format!("{TWO}\na LOCK.ACQUIRE k a SHARED\n+1"), 'a', "the owner holds this lock under LIMIT 2");
}

#[test]
fn a_hash_with_too_many_marked_fields_is_no_lock() {
    let fields = |count: u64| (0..count).map(|at| format!(" #f{at} 1")).collect::<String>();
    let asked = |count| format!("a HSET k a 1{}\nb LOCK.ACQUIRE k b\n+1", fields(count));
    history(&asked(1000), 'b', "null");
    history(&asked(1001), 'b', "WRONGTYPE");
}

#[test]
fn who_asks_for_its_identity_ends_nobody() {
    history(
        "a LOCK.ACQUIRE k a EPHEMERAL
         +1
         d LOCK.SESSION
         +1
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "null",
    );
}

#[test]
fn a_request_that_is_being_confirmed_ends_with_a_release_of_all() {
    history(
        "!replicas 200
         a LOCK.ACQUIRE k a REPLICAS 1
         +1
         b LOCK.RELEASE k a ALL
         +1",
        'a',
        "the lock was released before its replicas had confirmed it",
    );
}

#[test]
fn a_grant_deletes_what_remains_of_a_lock() {
    is_mended(
        "a HSET k #junk 1
         a LOCK.ACQUIRE k a
         +1",
    );
}

#[test]
fn an_owner_of_more_bytes_than_are_allowed_is_refused() {
    let asked = |bytes| format!("a LOCK.ACQUIRE k {}\n+1", "o".repeat(bytes));
    history(&asked(MAX_OWNER), 'a', "1800000000");
    history(&asked(MAX_OWNER + 1), 'a', "owner must be 1 to ");
}

#[test]
fn a_session_is_told_that_the_slot_it_waits_in_has_moved() {
    history(
        "a LOCK.ACQUIRE k a
         b LOCK.ACQUIRE k b WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +20
         !slot k migrates
         x DEL k
         +300
         !slot k moves
         +500",
        's',
        "MOVED",
    );
}

#[test]
fn a_session_reads_as_many_events_as_it_asks_for() {
    let asked = |count| format!("a LOCK.MACQUIRE 3 k l m a LEASE 50 SESSION $s\n+100\ns LOCK.EVENTS {count}\n+1");
    for (count, expected) in [("", 3), ("COUNT 2", 2), ("COUNT 1", 1)] {
        let run = play(Generation::Redis70, &script::parse(&asked(count)), true);
        let told = run.unwrap_or_else(|broken| panic!("{broken:?}")).told;
        let read = told.iter().find(|(of, reply)| *of == 's' && matches!(reply, Reply::Array(_)));
        assert_eq!(read.map(|(_, events)| events.elements().len()), Some(expected), "{count}");
    }
}

#[test]
fn the_newest_token_of_a_lock_is_shown_where_the_module_gave_one() {
    let script = "a LOCK.ACQUIRE k a\nx HSET h a 1\n+1\na LOCK.INFO k\nx LOCK.INFO h\n+1";
    let run = play(Generation::Redis70, &script::parse(script), true).unwrap_or_else(|broken| panic!("{broken:?}"));
    let fence = |name| run.told.iter().filter(|(of, _)| *of == name).find_map(|(_, reply)| reply.elements().get(3));
    assert_eq!(fence('a').and_then(Reply::number), Some(1_800_000_000_000_001));
    assert_eq!(fence('x').map(|fence| matches!(fence, Reply::Null)), Some(true));
}

#[test]
fn an_unknown_argument_is_told_with_those_that_are_known() {
    history("a LOCK.ACQUIRE k a NONSENSE\n+1", 'a', "allowed here are LEASE, WAIT");
    history("a LOCK.ACQUIRE k a LEASE x\n+1", 'a', "LEASE must be between 1 and 315360000000 ms, got x");
}

/// T1. A cluster that is down: what is watched is not renewed, and is lost at its deadline; nobody is granted anything.
#[test]
fn what_is_held_is_lost_at_its_deadline_when_the_cluster_is_down() {
    const DOWN: &str = "!slot k comes
         a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         a LOCK.ACQUIRE k p WAIT 0 SESSION $t
         +400
         s LOCK.EVENTS HEARTBEAT
         +1
         !cluster fail
         +300
         s LOCK.EVENTS HEARTBEAT
         +700
         s LOCK.EVENTS HEARTBEAT
         +1";
    is_mended(DOWN);
    history(DOWN, 's', "lost");
    history(DOWN, 's', "expired");
}

/// A slot that no node owns: the same, and the hold is not called unbound. If the slot comes back in time, the hold goes on.
#[test]
fn what_is_held_is_lost_at_its_deadline_in_a_slot_that_no_node_owns() {
    const UNOWNED: &str = "a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         +100
         s LOCK.EVENTS
         !slot k unowned
         +300
         s LOCK.EVENTS
         +300
         s LOCK.EVENTS
         +1";
    is_mended(UNOWNED);
    history(UNOWNED, 's', "expired");
}

/// A renewal changes what binds a hold only if it says so, whatever connection it comes over; and `UNBIND` leaves nothing.
#[test]
fn renewal_without_a_word_keeps_the_binding() {
    const HELD: &str = "r LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         t LOCK.EVENTS
         +1";
    let renewed = format!("{HELD}\nt LOCK.RENEW k o\n+1\ns LOCK.EVENTS\n+1");
    is_mended(&renewed);
    history(&renewed, 's', "null");
    let unbound = format!("{HELD}\ns LOCK.RENEW k o LEASE 500 UNBIND\n+600\ns LOCK.EVENTS\n+1\nb LOCK.ACQUIRE k b\n+1");
    is_mended(&unbound);
    history(&unbound, 's', "null");
    history(&unbound, 'b', "1800000000");
}

/// Seed 36830: a session ends while replicas confirm its renewal, and the lock is judged before what it leaves is dealt with. Then
/// the request that waited behind the renewal was never looked at again.
#[test]
fn request_behind_a_renewal_is_served_when_its_session_ends() {
    is_mended(
        "c LOCK.MACQUIRE 2 k1 k0 o0
         a LOCK.MACQUIRE 3 k2 k1 k0 o1 WAIT 0
         b DEL k0 k1
         b LOCK.RENEW k2 o1 REPLICAS 1 SESSION $s
         b LOCK.ACQUIRE k2 o1 WAIT 0
         +20
         c CLIENT KILL ID #s
         c DEL k0 k1 k2
         c LOCK.RELEASE k2 o1",
    );
}

/// A hold in a slot that is being imported counts as served here.
#[test]
fn a_hold_in_a_slot_that_is_being_imported_is_renewed() {
    is_mended(
        "a LOCK.ACQUIRE k o LEASE 600 WATCHDOG SESSION $s
         +100
         s LOCK.EVENTS
         !slot k arrives
         +200
         s LOCK.EVENTS
         +300
         s LOCK.EVENTS
         !slot k comes
         +300
         s LOCK.EVENTS
         +1",
    );
}

/// D. A hash that is not the remains of a lock stays as it is.
#[test]
fn a_hash_that_is_no_lock_stays() {
    const HASH: &str = "a HSET k #red 1 #blue 2
         +1
         b LOCK.ACQUIRE k o
         +1
         c HGETALL k
         +1";
    history(HASH, 'b', "WRONGTYPE");
    history(HASH, 'c', "red");
    const REMAINS: &str = "a HSET k #fence 7 #limit 0 #@p 1800000000000:7
         +1
         b LOCK.ACQUIRE k o
         +1";
    history(REMAINS, 'b', "1800000000");
}

/// Clients of the basic profile.
#[test]
fn thin_clients_break_no_rule() {
    for seed in 1..=300 {
        thin::play(seed, None).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
}

/// Each rule that they do not follow is missed.
#[test]
fn thin_clients_that_break_a_rule_are_seen() {
    for fault in thin::Fault::ALL {
        let found = (1..=1_000).find_map(|seed| Some((seed, thin::play(seed, Some(fault)).err()?)));
        let (seed, violation) = found.unwrap_or_else(|| panic!("{fault:?} is not found"));
        println!("{fault:?}: seed {seed}: {}", violation.rule);
    }
}
