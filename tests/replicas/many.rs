//! Many requests are confirmed at once; and none.

use std::thread;
use std::time::Duration;

use support::{Raw, until};

use super::group::Group;
use crate::lines::{Commands, Reply, SOON, arrives};

const MANY: usize = 1000;

/// That many clients wait behind a holder.
fn gather(group: &mut Group, words: &str) -> Vec<Raw> {
    group.control.get_token("LOCK.ACQUIRE key control LEASE 600000");
    let mut members: Vec<Raw> = (0..MANY).map(|_| group.primary.raw()).collect();
    for (number, member) in members.iter_mut().enumerate() {
        member.send_line(&format!("LOCK.ACQUIRE key owner-{number} LEASE 600000 WAIT 0 {words} REPLICAS 1"));
    }
    until(SOON, "all requests wait", || group.count("waiters") == MANY as i64);
    members
}

#[test]
fn one_confirmation_serves_all_grants_of_an_iteration() {
    let mut group = Group::of(1);
    let mut members = gather(&mut group, "SHARED");
    let requests = group.count("confirmation_requests");
    group.control.run_ok("LOCK.RELEASE key control");
    let mut tokens: Vec<i64> = members.iter_mut().map(|member| arrives(member).token()).collect();
    let requests = group.count("confirmation_requests") - requests;
    // Each time slice with grants asks the replicas once, and so does each tenth of a second: not each request.
    assert!(requests >= 1 && requests < MANY as i64 / 2, "{requests} questions");
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), MANY, "each has its own token");
    assert_eq!((group.count("confirmed"), group.count("confirming")), (MANY as i64, 0));
    let fields = group.replicas[0].raw().run("HLEN key").int();
    assert_eq!(fields, group.control.run("HLEN key").int());
}

/// None is confirmed: all are revoked, and the requests behind them are granted.
#[test]
fn all_unconfirmed_grants_are_revoked() {
    let mut group = Group::of(1);
    let mut members = gather(&mut group, "SHARED");
    let mut last = group.waits("LOCK.ACQUIRE key last WAIT 0");
    group.wait_for_replicas(200);
    group.stop_replicas();
    group.control.run_ok("LOCK.RELEASE key control");
    for member in &mut members {
        assert!(arrives(member).error().starts_with("UNCONFIRMED 0 of 1 "));
    }
    last.token();
    assert_eq!(group.count("revoked"), MANY as i64);
    assert!(group.control.run("LOCK.INFO key").field("holders").items().len() == 1);
}

#[test]
fn confirmed_requests_are_served_one_after_another() {
    let mut group = Group::of(1);
    let mut members = gather(&mut group, "");
    let order: Vec<usize> = group
        .control
        .run(&format!("LOCK.WAITERS key COUNT {MANY}"))
        .items()
        .iter()
        .map(|waiter| waiter.field("owner").text().trim_start_matches("owner-").parse().expect("a number"))
        .collect();
    assert_eq!(order.len(), MANY);
    group.control.run_ok("LOCK.RELEASE key control");
    let mut last = 0;
    for number in order {
        let token = arrives(&mut members[number]).token();
        assert!(token > last);
        last = token;
        assert_eq!(members[number].run(&format!("LOCK.RELEASE key owner-{number}")).int(), 1);
    }
    assert_eq!((group.count("confirmed"), group.count("waiters")), (MANY as i64, 0));
    assert!(group.control.run("LOCK.INFO key").is_null());
}

/// A request waited for replicas before. Another one waits for a lock, and a hold is bound.
#[test]
fn no_timer_runs_when_no_request_waits_for_replicas() {
    let mut group = Group::of(1);
    group.control.get_token("LOCK.ACQUIRE key owner LEASE 600000 EPHEMERAL REPLICAS 1");
    let mut waiter = group.waits("LOCK.ACQUIRE key other WAIT 0 REPLICAS 1");
    group.wait_for_replicas(1);
    let mut client = group.primary.raw();
    client.run("LOCK.ACQUIRE another owner LEASE 600000 REPLICAS 2").error();
    until(SOON, "nothing is being confirmed", || group.count("confirming") == 0);
    let seen = |group: &Group| {
        let offset = group.primary.info("replication", "master_repl_offset");
        (group.count("confirmation_requests"), offset)
    };
    let before = seen(&group);
    assert!(before.0 > 0);
    thread::sleep(Duration::from_millis(1200)); // A timer can't be observed. The server's own pings are off.
    assert_eq!(seen(&group), before);
    assert!(waiter.waits());
}
