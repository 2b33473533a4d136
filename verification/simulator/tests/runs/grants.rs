//! Grants that were not delivered, and their revocation.

use crate::{breaks_nothing, expect_reply};
use simulator::play::play;
use simulator::redis::Generation;
use simulator::resp::Reply;
use simulator::script;

/// The waiters for all keys of one `DEL` are served in one slice of work, and not in one for each key. This happens
/// within the command or, before Redis 7.2, in the next event-loop iteration.
#[test]
fn waiters_of_deleted_keys_are_served_in_one_slice() {
    const KEYS: usize = 200;
    let each = |of: fn(usize) -> String| (0..KEYS).map(of).collect::<String>();
    let held = each(|key| format!("b LOCK.ACQUIRE k{key} h LEASE 600000\n"));
    let waited_for = each(|key| format!("b LOCK.ACQUIRE k{key} w WAIT 0 SESSION $s\n"));
    let keys = each(|key| format!(" k{key}"));
    let lines = script::parse(&format!("{held}{waited_for}+1\nx DEL{keys}\nx EXISTS{keys}\n+50\nx EXISTS{keys}\n+1"));
    for generation in Generation::ALL {
        let run = play(generation, &lines, true).unwrap_or_else(|failure| panic!("{}", failure.violation));
        let integers = run.replies[..run.script.0].iter().filter_map(|(to, reply)| match reply {
            Reply::Integer(number) if *to == 'x' => Some(*number),
            _ => None,
        });
        let integers: Vec<i64> = integers.collect();
        let [deleted, served, later] = integers[..] else { panic!("{integers:?}") };
        assert_eq!((deleted, later), (KEYS as i64, KEYS as i64), "{generation:?}");
        assert!(served < KEYS as i64 / 2, "{generation:?}: {served} requests were served");
    }
}

/// An earlier hold of the owner has ended, and its grant was not delivered. A request that repeats a later
/// grant must not take over that undelivered one.
#[test]
fn later_hold_outlives_undelivered_grant_of_an_earlier_one() {
    breaks_nothing(
        "!replicas 0
         b LOCK.ACQUIRE k2 o1 LEASE 2000 REPLICAS 1 SESSION $s
         +1200
         +1200
         b LOCK.ACQUIRE k2 o1
         +1
         b LOCK.ACQUIRE k2 o1 HOLDS 1 REPLICAS 1 SESSION $s
         s !end",
    );
}

/// A re-entry that binds is confirmed, and its client gets an error before the reply is written. The
/// earlier hold keeps its own binding, or none.
#[test]
fn binding_of_revoked_reentry_promises_nothing() {
    breaks_nothing(
        "!replicas 20 never 0
         b LOCK.ACQUIRE k0 o0
         b LOCK.ACQUIRE k0 o0 EPHEMERAL REPLICAS 1
         +0
         !slot k0 unowned
         +400",
    );
}

/// Another client has lowered the hold count, so the revocation of a re-entry ends a hold that its session relies on.
#[test]
fn session_is_notified_when_revoked_reentry_ends_its_hold() {
    breaks_nothing(
        "b HSET k0 o2 1 #fence 7
         b LOCK.ACQUIRE k0 o1 SESSION $s
         s LOCK.ACQUIRE k0 o2
         a HSET k0 o2 1
         s LOCK.ACQUIRE k0 o2 REPLICAS 1",
    );
}

/// A grant that is about to be revoked.
#[test]
fn undeliverable_grant_is_not_reentered() {
    breaks_nothing(
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
    breaks_nothing(
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

/// The session is killed before it reads the event of its grant.
#[test]
fn revoked_reentry_keeps_deadline() {
    breaks_nothing(
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

/// Another client closes the connection before any byte is sent.
#[test]
fn grant_stays_once_its_reply_is_composed() {
    expect_reply(
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

#[test]
fn grant_is_revoked_when_client_disconnects_before_reply() {
    expect_reply(
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

/// The session is closed before the reply with the event is sent.
#[test]
fn grant_stays_once_its_event_is_read() {
    expect_reply(
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

/// A re-entry that is not revoked blocks every later request of its owner.
#[test]
fn unread_reentry_is_revoked_when_withdrawn() {
    breaks_nothing(
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

/// Other requests of the owner must not re-enter a grant that ends with its connection.
#[test]
fn unsent_grant_blocks_pipelined_requests_of_owner() {
    breaks_nothing(
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

/// The client releases its re-entry, and is closed before any byte is sent: the earlier hold stays.
#[test]
fn released_reentry_is_not_revoked_again() {
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
    breaks_nothing(CLOSED);
    expect_reply(CLOSED, 'x', "1");
}

/// A session repeats an acquisition while the reply to another connection of the same owner is about to be
/// composed. When the session ends, the hold of that connection stays.
#[test]
fn revoked_repetition_takes_no_delivered_hold() {
    expect_reply(
        "!replicas 0
         d LOCK.ACQUIRE k p
         d LOCK.ACQUIRE k o WAIT 0 SESSION $s
         +1
         d LOCK.RELEASE k p
         a LOCK.ACQUIRE k o REPLICAS 1
         b LOCK.ACQUIRE k o HOLDS 1 WAIT 0 SESSION $s
         +5
         s !end
         +5
         x HGET k o
         +1",
        'x',
        "1",
    );
}

/// The same if the other connection is a session that has yet to read its event.
#[test]
fn revoked_repetition_takes_no_undelivered_hold() {
    expect_reply(
        "!replicas 0
         d LOCK.ACQUIRE k p
         d LOCK.ACQUIRE k o WAIT 0 SESSION $s
         +1
         d LOCK.RELEASE k p
         +1
         a LOCK.ACQUIRE k o REPLICAS 1 SESSION $t
         +5
         b LOCK.ACQUIRE k o HOLDS 1 REPLICAS 1 SESSION $s
         +5
         s !end
         +5
         t LOCK.EVENTS
         x HGET k o
         +1",
        'x',
        "1",
    );
}

/// Two sessions repeat an acquisition whose event a third one has not read. The second of them ends, and then the third: the hold
/// stays for the first, which has yet to read its event.
#[test]
fn revoked_repetition_leaves_hold_to_the_one_before_it() {
    expect_reply(
        "!replicas 0
         d LOCK.ACQUIRE k p
         d LOCK.ACQUIRE k o HOLDS 1 WAIT 0 SESSION $s
         +1
         d LOCK.RELEASE k p
         +1
         a LOCK.ACQUIRE k o HOLDS 1 REPLICAS 1 SESSION $t
         +5
         b LOCK.ACQUIRE k o HOLDS 1 REPLICAS 1 SESSION $u
         +5
         u !end
         +5
         s !end
         +5
         t LOCK.EVENTS
         x HGET k o
         +1",
        'x',
        "1",
    );
}

/// An owner releases one of two undelivered holds and re-enters. When the session that has not read its grants
/// ends, the re-entry stays.
#[test]
fn released_hold_is_not_revoked_as_well() {
    expect_reply(
        "!replicas 0
         a LOCK.ACQUIRE k o REPLICAS 1 SESSION $s
         a LOCK.ACQUIRE k o WAIT 0 SESSION $s
         +5
         b LOCK.RELEASE k o
         a LOCK.ACQUIRE k o
         +1
         s !end
         +5
         x HGET k o
         +1",
        'x',
        "1",
    );
}
