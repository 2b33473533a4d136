//! Small histories, each with one fault: the checker must refuse it, and accept the same history without the fault.

use Outcome::{Count, Done, Error, Left, Null, Token, Unconfirmed, Unknown};
use histories::history::Acquire;
use histories::{Operation, Outcome, Request, read, write};

const LEASE: u64 = 1000;

fn op(at: (u64, u64), request: Request, outcome: Outcome) -> Operation {
    Operation::new("p", "k", request, at, outcome)
}

fn acquire(owner: &str, at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::acquire(owner, 1, Some(LEASE)), outcome)
}

fn limited(owner: &str, limit: u64, at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::acquire(owner, limit, Some(LEASE)), outcome)
}

fn waits(owner: &str, at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::wait(owner, 1, Some(LEASE)), outcome)
}

fn release(owner: &str, at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::release(owner), outcome)
}

fn renew(owner: &str, lease: u64, at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::renew(owner, Some(lease)), outcome)
}

fn force(at: (u64, u64), outcome: Outcome) -> Operation {
    op(at, Request::Force, outcome)
}

#[track_caller]
fn right(history: &[Operation]) {
    if let Err(violation) = histories::check(history) {
        panic!("refused: {violation}");
    }
}

#[track_caller]
fn wrong(history: &[Operation]) {
    assert!(histories::check(history).is_err(), "accepted");
}

#[test]
fn two_holders_are_refused() {
    right(&[acquire("a", (1, 2), Token(1)), acquire("b", (3, 4), Null)]);
    wrong(&[acquire("a", (1, 2), Token(1)), acquire("b", (3, 4), Token(2))]);
    // Neither came before the other, and there was no release.
    wrong(&[acquire("a", (1, 5), Token(1)), acquire("b", (2, 4), Token(2))]);
}

#[test]
fn check_of_a_lock_of_another_client_is_refused() {
    let check = |at| op(at, Request::Check { owner: "a".into() }, Done);
    let held = [acquire("a", (1, 2), Token(1)), acquire("b", (1000, 1010), Token(2))];
    // It may have been requested just before.
    right(&[&held[..], &[check((3, 4)), check((900, 1020))]].concat());
    wrong(&[&held[..], &[check((1011, 1020))]].concat());
    wrong(&[acquire("a", (1, 2), Token(1)), release("a", (3, 4), Left(0)), check((5, 6))]);
}

#[test]
fn grant_during_lease_of_other_holder_is_refused() {
    right(&[acquire("a", (1, 2), Token(1)), acquire("b", (1000, 1001), Token(2))]);
    wrong(&[acquire("a", (1, 2), Token(1)), acquire("b", (999, 1000), Token(2))]);
}

#[test]
fn grant_during_renewed_lease_is_refused() {
    let held = [acquire("a", (1, 2), Token(1)), renew("a", LEASE, (500, 501), Token(1))];
    right(&[&held[..], &[acquire("b", (1499, 1500), Token(2))]].concat());
    wrong(&[&held[..], &[acquire("b", (1498, 1499), Token(2))]].concat());
    // A renewal may shorten a lease, and so may a release for the remaining holds.
    right(&[acquire("a", (1, 2), Token(1)), renew("a", 10, (20, 21), Token(1)), acquire("b", (29, 30), Token(2))]);
    let kept = Request::Release { owner: "a".into(), token: None, holds: None, lease: Some(10) };
    let twice = [acquire("a", (1, 2), Token(1)), acquire("a", (3, 4), Token(1)), op((5, 6), kept, Left(1))];
    right(&[&twice[..], &[acquire("b", (14, 15), Token(2))]].concat());
    wrong(&[&twice[..], &[acquire("b", (13, 14), Token(2))]].concat());
}

#[test]
fn grant_before_reported_end_is_refused() {
    let held = acquire("a", (1, 2), Token(1));
    let expired = |at| op(at, Request::expire("a", 1), Done);
    right(&[held.clone(), expired((3, 1100)), acquire("b", (1050, 1060), Token(2))]);
    wrong(&[held.clone(), expired((3, 900))]);
    wrong(&[held.clone(), expired((1200, 1300)), renew("a", LEASE, (1400, 1401), Token(1))]);
    wrong(&[held, op((1200, 1300), Request::expire("a", 2), Done)]);
}

#[test]
fn repeated_or_decreasing_token_is_refused() {
    let first = [acquire("a", (1, 2), Token(5)), release("a", (3, 4), Left(0))];
    right(&[&first[..], &[acquire("b", (5, 6), Token(6))]].concat());
    wrong(&[&first[..], &[acquire("b", (5, 6), Token(5))]].concat());
    wrong(&[&first[..], &[acquire("b", (5, 6), Token(4))]].concat());
}

#[test]
fn token_below_that_of_other_lock_is_refused() {
    let other = |at, token| Operation { key: "other".into(), ..acquire("b", at, Token(token)) };
    right(&[acquire("a", (1, 2), Token(5)), other((3, 4), 6)]);
    right(&[acquire("a", (1, 4), Token(5)), other((2, 3), 4)]);
    wrong(&[acquire("a", (1, 2), Token(5)), other((3, 4), 5)]);
    wrong(&[acquire("a", (1, 2), Token(5)), other((3, 4), 4)]);
    // A re-entry has the token of an older grant, whose reply came later or never.
    right(&[acquire("a", (1, 9), Token(5)), other((2, 3), 6), acquire("a", (4, 5), Token(5))]);
    right(&[acquire("a", (1, 9), Unknown), other((2, 3), 6), acquire("a", (4, 5), Token(5))]);
}

#[test]
fn release_by_non_holder_is_refused() {
    right(&[acquire("a", (1, 2), Token(1)), release("b", (3, 4), Null)]);
    wrong(&[acquire("a", (1, 2), Token(1)), release("b", (3, 4), Left(0))]);
    wrong(&[acquire("a", (1, 2), Token(1)), release("a", (3, 4), Null)]);
}

#[test]
fn release_with_wrong_count_is_refused() {
    let twice = [acquire("a", (1, 2), Token(1)), acquire("a", (3, 4), Token(1))];
    right(
        &[&twice[..], &[release("a", (5, 6), Left(1)), release("a", (7, 8), Left(0)), release("a", (9, 10), Null)]]
            .concat(),
    );
    wrong(&[&twice[..], &[release("a", (5, 6), Left(0))]].concat());
    wrong(&[&twice[..], &[release("a", (5, 6), Left(1)), acquire("b", (7, 8), Token(2))]].concat());
}

#[test]
fn release_without_effect_is_refused() {
    let released = [acquire("a", (1, 2), Token(1)), release("a", (3, 4), Left(0))];
    right(&[&released[..], &[acquire("b", (5, 6), Token(2))]].concat());
    wrong(&[&released[..], &[acquire("b", (5, 6), Null)]].concat());
    wrong(&[&released[..], &[renew("a", LEASE, (5, 6), Token(1))]].concat());
}

#[test]
fn reentry_with_other_token_is_refused() {
    right(&[acquire("a", (1, 2), Token(1)), acquire("a", (3, 4), Token(1))]);
    wrong(&[acquire("a", (1, 2), Token(1)), acquire("a", (3, 4), Token(2))]);
    let new = Acquire { owner: "a".into(), limit: 1, new: true, ..Acquire::default() };
    right(&[acquire("a", (1, 2), Token(1)), op((3, 4), Request::Acquire(new.clone()), Null)]);
    wrong(&[acquire("a", (1, 2), Token(1)), op((3, 4), Request::Acquire(new), Token(1))]);
}

#[test]
fn refusal_of_free_lock_is_refused() {
    wrong(&[acquire("a", (1, 2), Null)]);
    wrong(&[waits("a", (1, 100), Null)]);
    // Another request may have been queued before it.
    right(&[limited("r", 0, (1, 2), Token(1)), waits("w", (3, 20), Null), limited("s", 0, (10, 11), Null)]);
    wrong(&[limited("r", 0, (1, 2), Token(1)), waits("w", (3, 9), Null), limited("s", 0, (10, 11), Null)]);
}

#[test]
fn more_holders_than_limit_are_refused() {
    let two = [limited("a", 2, (1, 2), Token(1)), limited("b", 2, (3, 4), Token(2))];
    right(&[&two[..], &[limited("c", 2, (5, 6), Null)]].concat());
    wrong(&[&two[..], &[limited("c", 2, (5, 6), Token(3))]].concat());
    wrong(&[&two[..], &[limited("c", 3, (5, 6), Token(3))]].concat());
    // Readers and a writer.
    let readers = [limited("a", 0, (1, 2), Token(1)), limited("b", 0, (3, 4), Token(2))];
    wrong(&[&readers[..], &[limited("w", 1, (5, 6), Token(3))]].concat());
    wrong(&[limited("w", 1, (1, 2), Token(1)), limited("r", 0, (3, 4), Token(2))]);
    // A re-entry names the lock's limit.
    right(&[limited("a", 2, (1, 2), Token(1)), limited("a", 3, (3, 4), Error)]);
    wrong(&[limited("a", 2, (1, 2), Token(1)), limited("a", 3, (3, 4), Token(1))]);
}

#[test]
fn force_with_wrong_count_or_without_effect_is_refused() {
    let held = acquire("a", (1, 2), Token(1));
    right(&[held.clone(), force((3, 4), Count(1)), acquire("b", (5, 6), Token(2))]);
    right(&[held.clone(), force((3, 4), Done), acquire("b", (5, 6), Token(2))]);
    wrong(&[held.clone(), force((3, 4), Count(0))]);
    wrong(&[held.clone(), force((3, 4), Count(1)), release("a", (5, 6), Left(0))]);
    wrong(&[force((3, 4), Count(1))]);
    let semaphore = [limited("a", 2, (1, 9), Token(1)), limited("b", 2, (1, 9), Token(2)), force((2, 8), Count(1))];
    right(&[&semaphore[..], &[release("a", (10, 11), Null), release("b", (12, 13), Left(0))]].concat());
    wrong(&[&semaphore[..], &[release("a", (10, 11), Null), release("b", (12, 13), Null)]].concat());
    // The one with the greater token came later: it was not the only holder.
    wrong(&[&semaphore[..], &[release("a", (10, 11), Left(0)), release("b", (12, 13), Null)]].concat());
}

#[test]
fn unknown_outcome_may_have_taken_effect() {
    let lost = |at| release("a", at, Unknown);
    let held = acquire("a", (1, 2), Token(1));
    right(&[held.clone(), lost((3, 9)), acquire("b", (5, 6), Token(2))]);
    right(&[held.clone(), lost((3, 9)), acquire("b", (5, 6), Null)]);
    wrong(&[held.clone(), lost((3, 4)), acquire("b", (5, 6), Null), acquire("b", (7, 8), Token(2))]);
    right(&[held, Operation { to: None, ..lost((3, 4)) }, acquire("b", (5, 6), Null), acquire("b", (7, 8), Token(2))]);
    // A grant without a received reply excludes other owners, and can be used by its own.
    let ghost = acquire("a", (1, 2), Unknown);
    right(&[ghost.clone(), acquire("b", (5, 6), Null), acquire("a", (7, 8), Token(3)), release("a", (9, 10), Left(1))]);
    wrong(&[ghost.clone(), acquire("b", (5, 6), Null), acquire("a", (7, 8), Token(3)), release("a", (9, 10), Left(0))]);
    wrong(&[ghost, acquire("b", (5, 6), Null), acquire("b", (7, 8), Token(3))]);
}

#[test]
fn unconfirmed_acquisition_is_revoked() {
    let missed = acquire("a", (1, 9), Unconfirmed);
    right(&[missed.clone(), acquire("b", (4, 5), Null), acquire("b", (10, 11), Token(2))]);
    wrong(&[missed.clone(), acquire("b", (10, 11), Null)]);
    wrong(&[missed, release("a", (10, 11), Left(0))]);
    let held = [acquire("a", (1, 2), Token(1)), acquire("a", (3, 9), Unconfirmed)];
    right(&[&held[..], &[release("a", (10, 11), Left(0))]].concat());
    wrong(&[&held[..], &[release("a", (10, 11), Left(1))]].concat());
}

#[test]
fn end_of_connection_ends_ephemeral_hold() {
    let held = op((1, 2), Request::acquire("a", 1, None), Token(1));
    let gone = op((5, 20), Request::End { owner: "a".into() }, Done);
    right(&[held.clone(), gone.clone(), acquire("b", (10, 11), Token(2))]);
    right(&[held.clone(), gone.clone(), acquire("b", (10, 11), Null)]);
    wrong(&[held.clone(), gone.clone(), acquire("b", (3, 4), Token(2))]);
    wrong(&[held, gone, acquire("b", (21, 22), Null)]);
}

#[test]
fn raised_token_is_that_of_the_hold() {
    let raise = Request::Renew { owner: "a".into(), token: Some(1), lease: Some(LEASE), fence: Some(9) };
    let raised = [acquire("a", (1, 2), Token(1)), op((3, 4), raise, Token(9))];
    right(&[&raised[..], &[acquire("a", (5, 6), Token(9)), acquire("b", (1005, 1006), Token(10))]].concat());
    wrong(&[&raised[..], &[acquire("a", (5, 6), Token(1))]].concat());
    wrong(&[&raised[..], &[acquire("b", (1005, 1006), Token(8))]].concat());
}

#[test]
fn violation_names_unexplained_operation() {
    let history = [acquire("a", (1, 2), Token(1)), acquire("b", (3, 4), Token(2)), release("a", (5, 6), Left(0))];
    let violation = histories::check(&history).expect_err("two holders");
    assert_eq!((&*violation.key, &violation.stuck[..]), ("k", &history[1..]));
    assert!(violation.to_string().contains(r#""owner":"b","limit":1"#), "{violation}");
}

#[test]
fn documented_format_is_read_and_written() {
    let page = include_str!("../README.md");
    let example = page.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let operations = read(example.as_bytes()).expect("the example can be read");
    right(&operations);
    let mut written = Vec::new();
    write(&operations, &mut written).expect("memory takes it");
    assert_eq!(String::from_utf8_lossy(&written), example);
    // Every field and outcome that is written has a row in the README.
    let all = [
        op((1, 2), Request::Renew { owner: "a".into(), token: Some(1), lease: Some(LEASE), fence: Some(9) }, Token(9)),
        op((1, 2), Request::Force, Count(1)),
        op((1, 2), Request::Force, Done),
        op((1, 2), Request::expire("a", 1), Done),
        op((1, 2), Request::End { owner: "a".into() }, Unknown),
        op((1, 2), Request::Check { owner: "a".into() }, Done),
        acquire("a", (1, 2), Null),
        acquire("a", (1, 2), Error),
        acquire("a", (1, 2), Unconfirmed),
        release("a", (1, 2), Left(0)),
    ];
    written.clear();
    write(&all, &mut written).expect("memory takes it");
    let written = String::from_utf8_lossy(&written);
    for word in written.split(['"', '{', '}', ',', ':', '\n']).filter(|it| it.len() > 1 && it.parse::<u64>().is_err()) {
        assert!(
            page.contains(&format!("`{word}`")) || page.contains(&format!("\"{word}\"")),
            "{word} is not in the page"
        );
    }
}
