//! Options and owners of requests.

use crate::expect_reply;
use simulator::keyspace::layout::MAX_OWNER;

/// History A10: the owner comes to hold the lock while its request with `NEW` waits.
#[test]
fn new_request_is_refused_when_owner_holds_at_grant() {
    expect_reply(
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

/// History B1: the reply to the first one was lost.
#[test]
fn repeated_request_with_holds_counts_once() {
    expect_reply(
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

/// History B8: an owner requests two locks while it waits for one of them.
#[test]
fn wait_for_several_is_checked_again_when_owner_gets_one() {
    expect_reply(
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

#[test]
fn owner_is_refused_when_too_long() {
    let script = |bytes| format!("a LOCK.ACQUIRE k {}\n+1", "o".repeat(bytes));
    expect_reply(&script(MAX_OWNER), 'a', "1800000000");
    expect_reply(&script(MAX_OWNER + 1), 'a', "owner must be 1 to ");
}

#[test]
fn unknown_option_error_lists_allowed_options() {
    expect_reply("a LOCK.ACQUIRE k a NONSENSE\n+1", 'a', "allowed here are LEASE, WAIT");
    expect_reply("a LOCK.ACQUIRE k a LEASE x\n+1", 'a', "LEASE must be between 1 and 315360000000 ms, got x");
}
