//! Watchdogs of many keys with short leases: each is renewed in time, however many are due at once.

use std::time::Duration;

use redis::Value;
use support::{Server, until};

use crate::common::info_number;
use crate::speak::{Reply, SOON, Speak, Watched, setting};

const KEYS: usize = 2500;

/// As many holds as that are all still there when each has been renewed so many times.
const RENEWALS: i64 = 4;

/// The lease in ms: four times the shortest one that the reference recommends for so many, as the machine may be busy.
fn lease() -> u64 {
    setting("HOLDFAST_SHORT_LEASE", 4 * 300 * KEYS as u64 / 1000)
}

fn all_are_kept(hz: &str) {
    let server = Server::builder().arg("hz", hz).arg("dynamic-hz", "no").start();
    let (holder, mut viewer) = (server.raw(), server.raw());
    let mut holder = Watched::over(holder, &server);
    let lease = lease();
    let lines: Vec<String> =
        (0..KEYS).map(|index| format!("LOCK.ACQUIRE key:{index} me LEASE {lease} WATCHDOG")).collect();
    let tokens: Vec<i64> = holder.say_all(&lines).iter().map(Reply::token).collect();
    let several = SOON + Duration::from_millis(lease * 10);
    until(several, "each is renewed several times", || {
        assert_eq!(viewer.say("DBSIZE"), Value::Int(KEYS as i64), "all are held");
        assert_eq!(info_number(&server, "holdfast", "holdfast_renewals_lost"), 0);
        info_number(&server, "holdfast", "holdfast_watchdog_renewals") >= RENEWALS * KEYS as i64
    });
    let fences: Vec<String> = (0..KEYS).map(|index| format!("HGET key:{index} #fence")).collect();
    for (reply, token) in viewer.say_all(&fences).iter().zip(&tokens) {
        assert_eq!(reply.text(), token.to_string(), "the hold of the beginning");
    }
}

#[test]
fn thousands_of_short_leases_are_renewed_in_time() {
    all_are_kept("10");
}

#[test]
fn short_leases_are_renewed_in_time_at_any_cron_rate() {
    all_are_kept("1");
}

/// So many can't be renewed every millisecond: those that come too late end, and are reported.
#[test]
fn lease_too_short_for_renewal_ends_and_session_is_notified() {
    let server = Server::start();
    let (mut session, mut sender) = (server.raw(), server.raw());
    let id = session.say("LOCK.SESSION").field("id").text();
    let line = |index| format!("LOCK.ACQUIRE key:{index} me LEASE 1 WATCHDOG SESSION {id}");
    for reply in sender.say_all(&(0..KEYS).map(line).collect::<Vec<_>>()) {
        reply.token();
    }
    let mut lost = 0;
    until(SOON, "each that is gone was reported", || {
        let events = session.say("LOCK.EVENTS");
        let events = if events.is_null() { &[][..] } else { events.items() };
        assert!(events.iter().all(|event| event.items()[0].text() == "lost"), "{events:?}");
        lost += events.len();
        lost > KEYS / 2 && sender.say("DBSIZE") == Value::Int((KEYS - lost) as i64)
    });
}
