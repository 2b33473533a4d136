//! Injected bugs in what a session is told.

use super::tests::kinds;
use super::{PATIENCE, check};
use crate::history::{Break, Event, Fault, History, Micros};
use crate::record::parse;

const MS: Micros = 1_000;
const PATIENCE_MS: Micros = PATIENCE / MS;

/// `x` holds `k` from 10 ms on, bound to its session, and writes until 30 ms; `k` is broken at 50 ms.
fn broken(more: &[String]) -> History {
    let mut lines = vec![
        "G\t1\tk\tx\t1\t1\t9000\t9000\t10000\t2000000\t-\tplain".to_owned(),
        "S\t1".to_owned(),
        "W\t1\t30000".to_owned(),
    ];
    lines.extend_from_slice(more);
    let mut history = History::default();
    history.add(lines.iter().map(|line| parse(line, |_| 0).unwrap()));
    history.add([Event::Broke(Break { key: "k".into(), sent: 50 * MS, replied: Some(51 * MS) })]);
    history.end_broken_holds();
    history
}

fn told(at: Micros) -> String {
    format!("T\t1\t{}\tforced", at * MS)
}

fn found(more: &[String]) -> Vec<&'static str> {
    kinds(&check(&broken(more)))
}

#[test]
fn a_loss_that_was_told_is_clean() {
    let verdict = check(&broken(&[told(52)]));
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!((verdict.bound, verdict.told, verdict.told_within), (1, 1, Some(2 * MS)));
}

#[test]
fn a_loss_that_was_not_told_is_seen() {
    assert_eq!(found(&[]), ["not told"]);
    assert_eq!(found(&[told(52 + PATIENCE_MS)]), ["not told"]);
}

#[test]
fn who_gives_back_meanwhile_need_not_be_told() {
    assert_eq!(found(&[format!("E\t1\t{}", 60 * MS)]), [""; 0]);
    assert_eq!(found(&[format!("E\t1\t{}", (60 + PATIENCE_MS) * MS)]), ["not told"]);
}

#[test]
fn while_a_server_is_away_nobody_can_tell() {
    let mut history = broken(&[]);
    history.faults.push(Fault { from: 40 * MS, until: 45 * MS });
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn what_may_not_have_been_done_need_not_be_told() {
    let mut history = broken(&[]);
    history.breaks[0].replied = None;
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn an_unbound_hold_is_not_reported() {
    let mut history = broken(&[]);
    history.holds[0].bound = false;
    assert_eq!(kinds(&check(&history)), [""; 0]);
}

#[test]
fn a_write_after_the_loss_was_told_is_seen() {
    assert_eq!(found(&[told(52), format!("W\t1\t{}", 53 * MS)]), ["wrote after"]);
    // One that was not told yet can't know: that is what the store is for.
    assert_eq!(found(&[told(52), format!("W\t1\t{}", 51 * MS)]), [""; 0]);
}

#[test]
fn a_loss_that_nobody_caused_is_seen() {
    let mut history = broken(&[told(52)]);
    history.breaks.clear();
    assert_eq!(kinds(&check(&history)), ["told of nothing"]);
}

#[test]
fn what_was_broken_is_held_no_more() {
    let next = "G\t2\tk\ty\t1\t2\t40000\t40000\t51500\t2000000\t-\tplain".to_owned();
    assert_eq!(found(&[told(52), next.clone()]), [""; 0]);
    let mut earlier = broken(&[told(52), next.replace("51500", "45000")]);
    earlier.holds.retain(|hold| hold.grant.owner == "y");
    assert!(earlier.holds[0].spans.iter().all(|span| span.until <= 50 * MS), "{earlier:?}");
}
