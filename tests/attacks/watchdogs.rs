//! Many watched keys with short leases: each is renewed in time, even if many are due at once.

use std::time::Duration;

use redis::Value;
use support::{Server, until};

use crate::common::info_number;
use crate::lines::{Commands, Reply, SOON, Watched, setting};

const KEYS: usize = 2500;

/// After this many renewals of each, all holds are still there.
const RENEWALS: i64 = 4;

/// The lease in ms: four times the shortest that the reference recommends for this number of keys, because the machine
/// may be busy.
fn lease() -> u64 {
    setting("HOLDFAST_SHORT_LEASE", 4 * 300 * KEYS as u64 / 1000)
}

fn assert_all_are_renewed(hz: &str) {
    let server = Server::builder().arg("hz", hz).arg("dynamic-hz", "no").start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let lease = lease();
    let lines: Vec<String> =
        (0..KEYS).map(|index| format!("LOCK.ACQUIRE key:{index} me LEASE {lease} WATCHDOG")).collect();
    let tokens: Vec<i64> = holder.run_all(&lines).iter().map(Reply::token).collect();
    let several = SOON + Duration::from_millis(lease * 10);
    until(several, "each is renewed several times", || {
        assert_eq!(viewer.run("DBSIZE"), Value::Int(KEYS as i64), "all are held");
        assert_eq!(info_number(&server, "holdfast", "holdfast_renewals_lost"), 0);
        info_number(&server, "holdfast", "holdfast_watchdog_renewals") >= RENEWALS * KEYS as i64
    });
    let fences: Vec<String> = (0..KEYS).map(|index| format!("HGET key:{index} #fence")).collect();
    for (reply, token) in viewer.run_all(&fences).iter().zip(&tokens) {
        assert_eq!(reply.text(), token.to_string(), "the first hold");
    }
}

#[test]
fn thousands_of_short_leases_are_renewed_in_time() {
    assert_all_are_renewed("10");
}

#[test]
fn short_leases_are_renewed_in_time_at_any_cron_rate() {
    assert_all_are_renewed("1");
}

/// The server can't renew this many leases every millisecond. Leases that are not renewed in time end, and are
/// reported.
#[test]
fn lease_too_short_for_renewal_ends_and_session_is_notified() {
    let server = Server::start();
    let (mut session, mut sender) = (server.raw(), server.raw());
    let id = session.run("LOCK.SESSION").field("id").text();
    let line = |index| format!("LOCK.ACQUIRE key:{index} me LEASE 1 WATCHDOG SESSION {id}");
    for reply in sender.run_all(&(0..KEYS).map(line).collect::<Vec<_>>()) {
        reply.token();
    }
    let mut lost = 0;
    until(SOON, "each lost hold was reported", || {
        let events = session.run("LOCK.EVENTS");
        let events = if events.is_null() { &[][..] } else { events.items() };
        assert!(events.iter().all(|event| event.items()[0].text() == "lost"), "{events:?}");
        lost += events.len();
        lost > KEYS / 2 && sender.run("DBSIZE") == Value::Int((KEYS - lost) as i64)
    });
}
