//! 10,000 watched locks are renewed, and the server stays responsive.

use redis::Value;
use support::{Server, until};

use crate::lines::{Commands, Reply, SOON, Watched, now, until_gone};

const LOCKS: usize = 10_000;
/// The lease in ms: five times the shortest that the reference recommends for this number of locks, so that none is
/// lost on a busy machine.
const LEASE: i64 = 15_000;

#[test]
fn watched_locks_are_renewed_while_the_server_answers() {
    let server = Server::start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    acquire_all(&mut holder, LEASE);
    // Past the first deadlines, remaining locks have been renewed.
    let end = now() + LEASE + LEASE / 4;
    until(SOON, "their first leases have passed, and the server replies", || {
        assert_eq!(viewer.run("PING"), Value::SimpleString("PONG".into()));
        now() > end
    });
    assert_eq!(viewer.run("DBSIZE"), Value::Int(LOCKS as i64), "a watched lock was lost");
    let lines: Vec<String> = (0..LOCKS).map(|index| format!("PEXPIRETIME key:{index}")).collect();
    let late = viewer.run_all(&lines).iter().filter(|at| at.int() <= end).count();
    assert_eq!(late, 0, "so many overdue leases");

    let id = holder.client_id();
    holder.reset();
    until_gone(&mut viewer, id);
    let ends = viewer.run_all(&lines);
    // Long enough for a renewal of each lock to be due.
    let noticed = now();
    until(SOON, "half a lease has passed", || now() > noticed + LEASE / 2);
    let later = viewer.run_all(&lines);
    assert!(later.iter().zip(&ends).all(|(later, end)| later.int() == -2 || later == end), "renewed without a session");
}

fn acquire_all(holder: &mut Watched, lease: i64) {
    let lines: Vec<String> =
        (0..LOCKS).map(|index| format!("LOCK.ACQUIRE key:{index} owner LEASE {lease} WATCHDOG")).collect();
    for reply in holder.run_all(&lines) {
        reply.token();
    }
}
