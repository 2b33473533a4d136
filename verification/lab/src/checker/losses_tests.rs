//! Injected mistakes in the notifications of a session.

use super::tests::kinds;
use super::{PATIENCE, check};
use crate::history::{Event, Fault, ForcedLock, History, Micros};
use crate::record::parse;

const MS: Micros = 1_000;
const PATIENCE_MS: Micros = PATIENCE / MS;

/// `x` holds `k` from 10 ms on, bound to its session, and writes until 30 ms. `k` is forced at 50 ms.
fn broken(more: &[String]) -> History {
    let mut lines = vec![
        "G\t1\tk\tx\t1\t1\t9000\t9000\t10000\t2000000\t-\tplain".to_owned(),
        "S\t1".to_owned(),
        "W\t1\t30000".to_owned(),
    ];
    lines.extend_from_slice(more);
    let mut history = History::default();
    history.add(lines.iter().map(|line| parse(line, |_| 0).unwrap()));
    history.add([Event::Forced(ForcedLock { key: "k".into(), sent: 50 * MS, replied: Some(51 * MS) })]);
    history.end_forced_holds();
    history
}

fn notified(at: Micros) -> String {
    format!("T\t1\t{}\tforced", at * MS)
}

fn found(more: &[String]) -> Vec<&'static str> {
    kinds(&check(&broken(more)))
}

#[test]
fn reported_loss_is_accepted() {
    let verdict = check(&broken(&[notified(52)]));
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!((verdict.bound, verdict.notified, verdict.notified_within), (1, 1, Some(2 * MS)));
}

#[test]
fn unreported_loss_is_found() {
    assert_eq!(found(&[]), ["not notified"]);
    assert_eq!(found(&[notified(52 + PATIENCE_MS)]), ["not notified"]);
}

#[test]
fn loss_need_not_be_reported_after_release() {
    assert_eq!(found(&[format!("E\t1\t{}", 60 * MS)]), [""; 0]);
    assert_eq!(found(&[format!("E\t1\t{}", (60 + PATIENCE_MS) * MS)]), ["not notified"]);
}

#[test]
fn loss_need_not_be_reported_while_server_is_unreachable() {
    let mut history = broken(&[]);
    history.faults.push(Fault { from: 40 * MS, until: 45 * MS });
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn uncertain_loss_need_not_be_reported() {
    let mut history = broken(&[]);
    history.forced_locks[0].replied = None;
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn loss_of_unbound_hold_need_not_be_reported() {
    let mut history = broken(&[]);
    history.holds[0].bound = false;
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn write_after_reported_loss_is_found() {
    assert_eq!(found(&[notified(52), format!("W\t1\t{}", 53 * MS)]), ["wrote after loss"]);
    // A client that was not notified yet can't know. The store refuses such writes.
    assert_eq!(found(&[notified(52), format!("W\t1\t{}", 51 * MS)]), [""; 0]);
}

#[test]
fn loss_without_cause_is_found() {
    let mut history = broken(&[notified(52)]);
    history.forced_locks.clear();
    assert_eq!(kinds(&check(&history)), ["spurious event"]);
}

#[test]
fn forced_hold_has_ended() {
    let next = "G\t2\tk\ty\t1\t2\t40000\t40000\t51500\t2000000\t-\tplain".to_owned();
    assert_eq!(found(&[notified(52), next.clone()]), [""; 0]);
    let mut earlier = broken(&[notified(52), next.replace("51500", "45000")]);
    earlier.holds.retain(|hold| hold.grant.owner == "y");
    assert!(earlier.holds[0].spans.iter().all(|span| span.until <= 50 * MS), "{earlier:?}");
}
