//! Sessions, their events and heartbeats.

use crate::{breaks_nothing, expect_reply};
use simulator::play::play;
use simulator::redis::Generation;
use simulator::resp::Reply;
use simulator::script;

#[test]
fn request_gets_reply_when_role_changes() {
    breaks_nothing(
        "c LOCK.ACQUIRE k1 o1 REPLICAS 1 SESSION $s
         a REPLICAOF 127.0.0.1 1
         a REPLICAOF NO ONE
         +2000",
    );
}

#[test]
fn heartbeat_counts_lease_shortened_before_confirmation() {
    expect_reply(
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

/// History A6: requests on behalf of a replaced session arrive late.
#[test]
fn late_request_of_replaced_session_binds_nothing() {
    const REPLACED: &str = "r LOCK.ACQUIRE k o WATCHDOG SESSION $s
         +10
         t LOCK.SESSION REPLACES $s
         r LOCK.RENEW k o TOKEN @r WATCHDOG SESSION $t
         r LOCK.RENEW k o WATCHDOG SESSION $s
         +1
         t LOCK.EVENTS WAIT 50 HEARTBEAT
         b LOCK.ACQUIRE k b
         +500";
    expect_reply(REPLACED, 'r', "NOSESSION");
    expect_reply(REPLACED, 'b', "null");
}

/// History A6: no other session replaces it, because its host is lost.
#[test]
fn silent_session_is_closed() {
    expect_reply(
        "r LOCK.ACQUIRE k o LEASE 3600000 EPHEMERAL SESSION $s
         s LOCK.EVENTS HEARTBEAT
         +50000
         b LOCK.ACQUIRE k b
         +1",
        'b',
        "180000005",
    );
}

/// History A7: a late `granted` event is recognizable, because clients use a new owner for each acquisition.
#[test]
fn cancelled_grant_names_its_own_owner() {
    expect_reply(
        "b LOCK.ACQUIRE k b
         r LOCK.ACQUIRE k o##1 WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +1
         s !stop-reading
         b LOCK.RELEASE k b
         +1
         r LOCK.RELEASE k o##1 ALL
         b LOCK.ACQUIRE k b
         +1
         r LOCK.ACQUIRE k o##2 WAIT 0 SESSION $s
         +1
         s !resume-reading
         +1",
        's',
        "o##1",
    );
}

/// History A8: a reply with events ends with a heartbeat, too.
#[test]
fn busy_session_gets_heartbeats() {
    expect_reply(
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

/// History A8: one short lease does not limit the long ones.
#[test]
fn heartbeat_counts_thousandths_of_each_lease() {
    expect_reply(
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

/// History A8: the lease in a `granted` event counts from when `LOCK.EVENTS` was sent.
#[test]
fn granted_event_counts_lease_from_events_request() {
    expect_reply(
        "b LOCK.ACQUIRE k b LEASE 5000
         r LOCK.ACQUIRE k o LEASE 30000 WAIT 0 SESSION $s
         s LOCK.EVENTS WAIT 0
         +6000",
        's',
        "\"35",
    );
}

/// History B7: without `HEARTBEAT`, `LOCK.EVENTS` returns null in time, so that the session reads before its hold
/// expires.
#[test]
fn reader_without_heartbeats_returns_in_time_for_renewal() {
    expect_reply(
        "r LOCK.ACQUIRE k o LEASE 400 WATCHDOG SESSION $s
         +1
         s LOCK.EVENTS WAIT 0
         +60",
        's',
        "null",
    );
}

#[test]
fn session_of_other_user_is_refused() {
    for (session, expected) in [("$s", "-NOPERM"), ("1", "-NOSESSION")] {
        expect_reply(
            &format!(
                "s LOCK.EVENTS
                 g ACL SETUSER guest on nopass +@all ~*
                 g AUTH guest x
                 g LOCK.ACQUIRE k o SESSION {session}
                 +1"
            ),
            'g',
            expected,
        );
    }
}

#[test]
fn session_request_closes_no_other_connection() {
    expect_reply(
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
fn events_returns_at_most_count_events() {
    let script = |count| format!("a LOCK.MACQUIRE 3 k l m a LEASE 50 SESSION $s\n+100\ns LOCK.EVENTS {count}\n+1");
    for (count, expected) in [("", 3), ("COUNT 2", 2), ("COUNT 1", 1)] {
        let run = play(Generation::Redis70, &script::parse(&script(count)), true);
        let replies = run.unwrap_or_else(|failure| panic!("{failure:?}")).replies;
        let read = replies.iter().find(|(to, reply)| *to == 's' && matches!(reply, Reply::Array(_)));
        assert_eq!(read.map(|(_, events)| events.elements().len()), Some(expected), "{count}");
    }
}
