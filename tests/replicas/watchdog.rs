//! A watchdog's renewal counts once it is confirmed.

use support::{Raw, until};

use super::group::{Group, PATIENT};
use crate::common::{ask_ok, text};
use crate::lines::{Commands, Reply, SOON, Watched, deadline, holders};
use crate::waiter::assert_held;

/// A third of it is long enough for a few commands between two renewals, in ms.
const LEASE: i64 = 6_000;

/// The state of a lock at one moment.
#[derive(Debug, PartialEq, Eq)]
struct Moment {
    deadline: i64,
    /// Whether `owner` holds the lock.
    held: bool,
    confirming: i64,
}

impl Moment {
    #[track_caller]
    fn of(client: &mut Raw, key: &str) -> Self {
        ask_ok(client, "MULTI");
        for line in [format!("PEXPIRETIME {key}"), format!("HEXISTS {key} owner"), "INFO holdfast".to_owned()] {
            client.run(&line);
        }
        let replies = client.run("EXEC");
        let [deadline, held, info] = replies.items() else { panic!("{replies:?}") };
        let info = text(info);
        let confirming = info.lines().find_map(|line| line.strip_prefix("holdfast_confirming:")).expect("INFO has it");
        let confirming = confirming.trim().parse().expect("a number");
        Self { deadline: deadline.int(), held: held.truth(), confirming }
    }

    /// The lock is held until `deadline`, and nothing is being confirmed.
    fn settled(deadline: i64) -> Self {
        Self { deadline, held: true, confirming: 0 }
    }
}

/// Disconnects the primary from its replicas right after a renewal of `key` was confirmed. Returns the deadline that they know.
#[track_caller]
fn cut_off(group: &mut Group, key: &str) -> i64 {
    let mut known = 0;
    until(SOON, "disconnected between two renewals", || {
        let before = deadline(&mut group.control, key);
        until(SOON, "a renewal is confirmed", || {
            let moment = Moment::of(&mut group.control, key);
            known = moment.deadline;
            known > before && moment.confirming == 0
        });
        let replicas: Vec<i64> = group.replicas.iter().map(|replica| deadline(&mut replica.raw(), key)).collect();
        group.stop_replicas();
        let in_time = Moment::of(&mut group.control, key) == Moment::settled(known);
        if !in_time {
            group.cont_replicas();
        }
        in_time && replicas.iter().all(|replica| *replica == known)
    });
    known
}

#[test]
fn each_renewal_is_confirmed() {
    let mut group = Group::of(2);
    let mut holder = Watched::over(group.primary.raw(), &group.primary);
    let token = holder.get_token("LOCK.ACQUIRE key owner LEASE 6000 WATCHDOG REPLICAS 2");
    until(SOON, "several renewals are confirmed", || group.count("confirmed") > 4);
    let confirmed = group.count("confirmed");
    assert!(group.count("watchdog_renewals") >= confirmed - 1, "all but the first are renewals");
    assert_eq!((group.count("revoked"), group.count("renewals_lost")), (0, 0));
    assert_eq!(holders(&mut group.control, "key")["owner"].field("token").int(), token);
}

/// The replicas are disconnected, with a timeout of `ms`: the lock expires at the deadline that they know, not at a later one.
fn runs_out(ms: i64, request: &str) {
    let mut group = Group::of(1);
    let mut holder = Watched::over(group.primary.raw(), &group.primary);
    if request.contains("RENEW") {
        holder.get_token(&format!("LOCK.ACQUIRE key owner LEASE {LEASE}"));
    }
    let token = holder.get_token(&format!("LOCK.{request} LEASE {LEASE} WATCHDOG REPLICAS 1"));
    // Another lock needs no confirmation.
    holder.get_token(&format!("LOCK.ACQUIRE beside owner LEASE {LEASE} WATCHDOG"));
    let mut next = group.waits("LOCK.ACQUIRE key next LEASE 600000 WAIT 0");
    group.wait_for_replicas(ms);
    let known = cut_off(&mut group, "key");
    let confirmed = group.count("confirmed");

    // The key has later deadlines, without confirmation.
    let mut extended = 0;
    until(SOON, "the next waiter is granted", || {
        let moment = Moment::of(&mut group.control, "key");
        if moment.held && moment.deadline > known {
            extended += 1;
        }
        !next.waits()
    });
    let granted = next.token();
    let at = granted / 1000;
    assert!(granted > token && at >= known, "{} ms too early", known - at);
    assert!(extended > 0, "a renewal was tried");
    assert_eq!((group.count("confirmed"), group.count("revoked")), (confirmed, 0));

    // The binding ended with the hold. The other hold is renewed.
    assert_held(&mut group.control, "key", "next");
    let end = deadline(&mut group.control, "key");
    let renewals = group.count("watchdog_renewals");
    until(SOON, "the watchdog renews the other hold", || group.count("watchdog_renewals") > renewals + 1);
    assert_eq!(deadline(&mut group.control, "key"), end);
    assert_held(&mut group.control, "beside", "owner");
    assert_eq!(group.count("bound_holds"), 1);
    assert!(holder.run(&format!("LOCK.RELEASE key owner TOKEN {token}")).is_null());
}

#[test]
fn isolated_primary_lets_watched_hold_expire() {
    runs_out(100, "ACQUIRE key owner");
}

/// The timeout for replicas is longer than the lease.
#[test]
fn isolated_primary_with_long_timeout_lets_hold_expire() {
    runs_out(PATIENT, "ACQUIRE key owner");
}

#[test]
fn hold_bound_by_renewal_expires_on_isolated_primary() {
    runs_out(100, "RENEW key owner");
}

/// Without waiters, the key is deleted at the deadline.
#[test]
fn expired_lock_without_waiters_is_deleted() {
    let mut group = Group::of(1);
    let mut holder = Watched::over(group.primary.raw(), &group.primary);
    holder.get_token(&format!("LOCK.MACQUIRE 2 a b owner LEASE {LEASE} WATCHDOG REPLICAS 1"));
    group.wait_for_replicas(50);
    let known = ["a", "b"].map(|key| {
        group.cont_replicas();
        cut_off(&mut group, key)
    });
    for (key, known) in ["a", "b"].iter().zip(known) {
        until(SOON, "the key is deleted", || !group.exists(key));
        let now = crate::lines::now();
        assert!(now >= known, "{key}: {} ms too early", known - now);
    }
    until(SOON, "nothing is bound", || group.count("bound_holds") == 0);
    assert!(holder.run("LOCK.RENEW a owner").is_null());
}

#[test]
fn renewals_continue_when_replicas_return() {
    let mut group = Group::of(1);
    let mut holder = Watched::over(group.primary.raw(), &group.primary);
    let token = holder.get_token(&format!("LOCK.ACQUIRE key owner LEASE {LEASE} WATCHDOG REPLICAS 1"));
    let mut next = group.waits("LOCK.ACQUIRE key next WAIT 0");
    group.wait_for_replicas(50);
    let known = cut_off(&mut group, "key");
    until(SOON, "a renewal times out", || {
        let moment = Moment::of(&mut group.control, "key");
        moment.deadline > known && moment.confirming == 0
    });
    group.cont_replicas();
    group.wait_for_replicas(PATIENT);
    until(SOON, "the lease has been extended", || crate::lines::now() > known + LEASE / 2);
    assert_eq!(holders(&mut group.control, "key")["owner"].field("token").int(), token);
    assert!(next.waits());
    until(SOON, "replicas know the new deadline", || deadline(&mut group.replicas[0].raw(), "key") > known + LEASE / 2);
    assert_eq!(holder.run(&format!("LOCK.RELEASE key owner TOKEN {token}")).int(), 1);
    next.token();
}

/// An unconfirmed renewal does not touch the next holder.
#[test]
fn release_during_renewal_leaves_next_holder() {
    let mut group = Group::of(1);
    let mut holder = Watched::over(group.primary.raw(), &group.primary);
    holder.get_token(&format!("LOCK.ACQUIRE key owner LEASE {LEASE} WATCHDOG REPLICAS 1"));
    group.wait_for_replicas(300);
    group.stop_replicas();
    until(SOON, "a renewal is being confirmed", || group.count("confirming") == 1);
    assert_eq!(holder.run("LOCK.RELEASE key owner").int(), 1);
    holder.get_token("LOCK.ACQUIRE key owner LEASE 600000");
    let end = deadline(&mut holder, "key");
    until(SOON, "the renewal times out", || group.count("confirming") == 0);
    assert_eq!(deadline(&mut holder, "key"), end);
    assert_eq!(holders(&mut group.control, "key")["owner"].field("holds").int(), 1);
}
