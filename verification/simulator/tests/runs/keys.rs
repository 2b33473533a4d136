//! Locks as keys, and keys that other clients wrote.

use crate::{breaks_nothing, expect_reply};
use simulator::play::play;
use simulator::redis::Generation;
use simulator::resp::Reply;
use simulator::script;

/// A holder that another client wrote has no deadline, and holds as long as the key.
#[test]
fn key_lasts_as_long_as_holder_without_deadline() {
    expect_reply(
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

#[test]
fn holders_count_until_they_release() {
    const TWO: &str = "a LOCK.ACQUIRE k a LIMIT 2
         b LOCK.ACQUIRE k b LIMIT 2
         +1";
    const TWO_MORE: &str = "c LOCK.ACQUIRE k c LIMIT 2
         +1
         d LOCK.ACQUIRE k d LIMIT 2
         +1";
    expect_reply(TWO, 'b', "18000000000");
    expect_reply(&format!("{TWO}\nb FLUSHALL\n+1\n{TWO_MORE}"), 'd', "18000000000");
    expect_reply(&format!("{TWO}\na LOCK.RELEASE k a\n+1\nb LOCK.RELEASE k b\n+1\n{TWO_MORE}"), 'd', "18000000000");
    expect_reply(&format!("{TWO}\na LOCK.ACQUIRE k a SHARED\n+1"), 'a', "the owner holds this lock under LIMIT 2");
}

/// A holder whose place another owner was granted must not hold the lock again when another client
/// removes the key's expiry.
#[test]
fn grant_removes_holder_whose_place_it_takes() {
    breaks_nothing(
        "!replicas 2000
         c CONFIG SET min-replicas-to-write
         b CLIENT PAUSE 1000
         c LOCK.ACQUIRE k1 o1 LIMIT 2
         b LOCK.ACQUIRE k0 o0
         b CLIENT PAUSE 1000
         b LOCK.ACQUIRE k1 o2 SHARED
         c LOCK.ACQUIRE k1 o0 LEASE 50 SHARED
         b PERSIST k1",
    );
}

#[test]
fn hash_with_too_many_marked_fields_is_no_lock() {
    let fields = |count: u64| (0..count).map(|at| format!(" #f{at} 1")).collect::<String>();
    let script = |count| format!("a HSET k a 1{}\nb LOCK.ACQUIRE k b\n+1", fields(count));
    expect_reply(&script(1000), 'b', "null");
    expect_reply(&script(1001), 'b', "WRONGTYPE");
}

#[test]
fn grant_deletes_leftover_fields() {
    breaks_nothing(
        "a HSET k #junk 1
         a LOCK.ACQUIRE k a
         +1",
    );
}

#[test]
fn info_shows_fence_of_module_locks_only() {
    let script = "a LOCK.ACQUIRE k a\nx HSET h a 1\n+1\na LOCK.INFO k\nx LOCK.INFO h\n+1";
    let run = play(Generation::Redis70, &script::parse(script), true).unwrap_or_else(|failure| panic!("{failure:?}"));
    let fence = |name| run.replies.iter().filter(|(of, _)| *of == name).find_map(|(_, reply)| reply.elements().get(3));
    assert_eq!(fence('a').and_then(Reply::number), Some(1_800_000_000_000_001));
    assert_eq!(fence('x').map(|fence| matches!(fence, Reply::Null)), Some(true));
}

/// History D: only the leftover fields of a lock are deleted.
#[test]
fn foreign_hash_is_not_deleted() {
    const HASH: &str = "a HSET k #red 1 #blue 2
         +1
         b LOCK.ACQUIRE k o
         +1
         c HGETALL k
         +1";
    expect_reply(HASH, 'b', "WRONGTYPE");
    expect_reply(HASH, 'c', "red");
    const REMAINS: &str = "a HSET k #fence 7 #limit 0 #@p 1800000000000:7
         +1
         b LOCK.ACQUIRE k o
         +1";
    expect_reply(REMAINS, 'b', "1800000000");
}
