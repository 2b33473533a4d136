//! 10,000 watched locks are renewed, and the server answers meanwhile.

use redis::Value;
use support::{Server, until};

use crate::speak::{Reply, SOON, Speak, Watched, now, until_gone};

const LOCKS: usize = 10_000;
/// Five times the shortest one that the reference names for so many: a busy machine loses none.
const LEASE: i64 = 15_000;

#[test]
fn watched_locks_are_renewed_while_the_server_answers() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    take(&mut holder, LEASE);
    // Past the first deadlines: what still stands has been renewed.
    let end = now() + LEASE + LEASE / 4;
    until(SOON, "their first leases are over, and the server answers", || {
        assert_eq!(viewer.say("PING"), Value::SimpleString("PONG".into()));
        now() > end
    });
    assert_eq!(viewer.say("DBSIZE"), Value::Int(LOCKS as i64), "a watched lock was lost");
    let lines: Vec<String> = (0..LOCKS).map(|index| format!("PEXPIRETIME key:{index}")).collect();
    let late = viewer.say_all(&lines).iter().filter(|at| at.int() <= end).count();
    assert_eq!(late, 0, "so many have a lease that is over");

    let id = holder.client_id();
    holder.reset();
    until_gone(&mut viewer, id);
    let ends = viewer.say_all(&lines);
    // Long enough for each to have come round once.
    let noticed = now();
    until(SOON, "half a lease has passed", || now() > noticed + LEASE / 2);
    let later = viewer.say_all(&lines);
    assert!(later.iter().zip(&ends).all(|(later, end)| later.int() == -2 || later == end), "renewed with nobody there");
}

fn take(holder: &mut Watched, lease: i64) {
    let lines: Vec<String> =
        (0..LOCKS).map(|index| format!("LOCK.ACQUIRE key:{index} owner LEASE {lease} WATCHDOG")).collect();
    for reply in holder.say_all(&lines) {
        reply.token();
    }
}
