//! The checker reports every injected mistake, and nothing else.

use super::*;
use crate::history::{Event, Grant, LocalFault, Probe};
use crate::record::parse;

const MS: Micros = 1_000;
const LEASE: Micros = 2_000 * MS;

/// A hold of a mutex: requested when it was granted, released at `until`.
struct Plan {
    key: &'static str,
    owner: &'static str,
    token: u64,
    from: Micros,
    until: Option<Micros>,
    limit: Limit,
    epoch: Option<&'static str>,
    assurance: Assurance,
}

fn hold(owner: &'static str, token: u64, from: Micros, until: Micros) -> Plan {
    Plan {
        key: "k",
        owner,
        token,
        from: from * MS,
        until: Some(until * MS),
        limit: Limit::Of(1),
        epoch: Some("a"),
        assurance: Assurance::Plain,
    }
}

impl Plan {
    fn on(self, epoch: &'static str) -> Plan {
        let epoch = Some(epoch);
        Plan { epoch, ..self }
    }
    fn somewhere(self) -> Plan {
        Plan { epoch: None, ..self }
    }
    fn with(self, assurance: Assurance) -> Plan {
        Plan { assurance, ..self }
    }
    fn limit(self, limit: Limit) -> Plan {
        Plan { limit, ..self }
    }
    fn never_released(self) -> Plan {
        Plan { until: None, ..self }
    }
    fn grant(&self) -> Grant {
        Grant {
            hold: 0,
            key: self.key.into(),
            owner: self.owner.into(),
            limit: self.limit,
            token: self.token,
            sent: self.from - 1,
            began: self.from - 1,
            replied: self.from,
            lease: LEASE,
            epoch: self.epoch.map(str::to_owned),
            assurance: self.assurance,
        }
    }
    fn events(&self) -> Vec<Event> {
        let mut events = vec![Event::Grant(self.grant())];
        events.extend(self.until.map(|at| Event::Ended { hold: 0, at }));
        events
    }
}

fn history(plans: &[Plan]) -> History {
    let mut history = History::default();
    for plan in plans {
        history.add(plan.events());
    }
    history
}

fn verdict_of(plans: &[Plan]) -> Verdict {
    check(&history(plans))
}

pub(super) fn kinds(verdict: &Verdict) -> Vec<&'static str> {
    verdict
        .violations
        .iter()
        .map(|violation| match violation {
            Violation::TooManyHolders { .. } => "holders",
            Violation::ConfirmedGrantLost { .. } => "confirmed",
            Violation::TokenWentBack { .. } => "back",
            Violation::TokenRepeated { .. } => "repeated",
            Violation::StaleWriteTaken { .. } => "stale",
            Violation::LostWaiter { .. } => "lost",
            Violation::NeverEnded { .. } => "never",
            Violation::NotHadAgain { .. } => "again",
            Violation::LossNotNotified { .. } => "not notified",
            Violation::SpuriousLossEvent { .. } => "spurious event",
            Violation::WroteAfterLoss { .. } => "wrote after loss",
        })
        .collect()
}

#[test]
fn sequential_holds_are_accepted() {
    let verdict = verdict_of(&[hold("x", 1, 10, 20), hold("y", 2, 20, 30)]);
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!(verdict.grants(Assurance::Plain), 2);
}

#[test]
fn overlap_of_one_millisecond_is_found() {
    let verdict = verdict_of(&[hold("x", 1, 10, 21), hold("y", 2, 20, 30)]);
    assert_eq!(kinds(&verdict), ["holders"]);
    let Violation::TooManyHolders { at, lasting, .. } = &verdict.violations[0] else { panic!("{verdict:?}") };
    assert_eq!((*at, *lasting), (20 * MS, MS));
}

#[test]
fn overlap_of_one_microsecond_is_found() {
    let mut x = hold("x", 1, 10, 20);
    x.until = Some(20 * MS + 1);
    assert_eq!(kinds(&verdict_of(&[x, hold("y", 2, 20, 30)])), ["holders"]);
}

#[test]
fn overlap_is_reported_once_despite_renewals() {
    let mut history = history(&[hold("y", 2, 20, 30)]);
    let mut events = hold("x", 1, 10, 5_000).events();
    for at in [15, 22, 24] {
        events.insert(1, renewal(at, "a", Assurance::Plain));
    }
    history.add(events);
    assert_eq!(kinds(&check(&history)), ["holders"]);
}

#[test]
fn different_locks_do_not_overlap() {
    let mut y = hold("y", 2, 15, 30);
    y.key = "other";
    assert_eq!(kinds(&verdict_of(&[hold("x", 1, 10, 20), y])), [""; 0]);
}

#[test]
fn unreleased_hold_ends_with_its_lease() {
    let end = 10 + LEASE / MS;
    let abandoned = || hold("x", 1, 10, 0).never_released();
    assert_eq!(kinds(&verdict_of(&[abandoned(), hold("y", 2, end, end + 5)])), [""; 0]);
    assert_eq!(kinds(&verdict_of(&[abandoned(), hold("y", 2, end - 5, end + 5)])), ["holders"]);
}

fn renewal(at: Micros, epoch: &str, assurance: Assurance) -> Event {
    Event::Renewed { hold: 0, sent: at * MS, replied: at * MS, lease: LEASE, epoch: Some(epoch.into()), assurance }
}

#[test]
fn renewal_extends_hold() {
    let end = 10 + LEASE / MS;
    let mut history = history(&[hold("y", 2, end + 500, end + 510)]);
    let mut events = hold("x", 1, 10, end + 900).events();
    events.insert(1, renewal(1_000, "a", Assurance::Plain));
    history.add(events);
    assert_eq!(kinds(&check(&history)), ["holders"]);
}

#[test]
fn readers_may_overlap_and_writer_beside_them_is_found() {
    let reader = |owner, token| hold(owner, token, 10, 30).limit(Limit::Shared);
    assert_eq!(kinds(&verdict_of(&[reader("x", 1), reader("y", 2)])), [""; 0]);
    let writer = hold("w", 3, 20, 25);
    assert_eq!(kinds(&verdict_of(&[reader("x", 1), reader("y", 2), writer])), ["holders"]);
    let late_reader = hold("r", 2, 15, 25).limit(Limit::Shared);
    assert_eq!(kinds(&verdict_of(&[hold("w", 1, 10, 20), late_reader])), ["holders"]);
}

#[test]
fn semaphore_has_at_most_limit_holders() {
    let owners = ["p", "q", "r", "s"];
    let permits = |n: usize| -> Vec<Plan> {
        (0..n).map(|i| hold(owners[i], i as u64 + 1, 10 + i as u64, 50).limit(Limit::Of(3))).collect()
    };
    assert_eq!(kinds(&verdict_of(&permits(3))), [""; 0]);
    assert_eq!(kinds(&verdict_of(&permits(4))), ["holders"]);
}

#[test]
fn double_hold_counts_for_guarantee_of_lost_grant() {
    for assurance in [Assurance::Plain, Assurance::Unconfirmed, Assurance::Confirmed] {
        let verdict = verdict_of(&[hold("x", 1, 10, 100).with(assurance), hold("y", 2, 50, 60).on("b")]);
        assert_eq!(kinds(&verdict), [""; 0]);
        assert_eq!(verdict.doubles(assurance), 1, "{verdict:?}");
        assert_eq!(verdict.doubles.values().sum::<u64>(), 1);
        assert_eq!(verdict.doubled_at.len(), 1);
    }
}

#[test]
fn late_grant_of_old_primary_counts_for_its_own_guarantee() {
    let verdict = verdict_of(&[
        hold("w", 1, 1, 2).on("old"),
        hold("x", 2, 10, 100).on("new").with(Assurance::Replicas),
        hold("y", 3, 50, 60).on("old").with(Assurance::Unconfirmed),
    ]);
    assert_eq!(verdict.doubles(Assurance::Unconfirmed), 1);
    assert_eq!(kinds(&verdict), [""; 0]);
}

#[test]
fn loss_of_confirmed_grant_is_a_violation() {
    let verdict = verdict_of(&[hold("x", 1, 10, 100).with(Assurance::Replicas), hold("y", 2, 50, 60).on("b")]);
    assert_eq!(kinds(&verdict), ["confirmed"]);
    assert_eq!(verdict.doubles(Assurance::Replicas), 1);
}

#[test]
fn unconfirmed_renewal_adds_no_confirmed_time() {
    let end = 10 + LEASE / MS;
    let mut events = hold("x", 1, 10, end + 900).with(Assurance::Replicas).events();
    events.insert(1, renewal(1_000, "a", Assurance::Plain));
    let mut history = history(&[hold("y", 2, end + 100, end + 200).on("b")]);
    history.add(events);
    let verdict = check(&history);
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!(verdict.doubles(Assurance::Plain), 1);
}

#[test]
fn hold_renewed_on_new_primary_is_held_there() {
    let mut events = hold("x", 1, 10, 900).events();
    events.insert(1, renewal(100, "b", Assurance::Plain));
    let mut history = history(&[hold("y", 2, 200, 300).on("b")]);
    history.add(events);
    assert_eq!(kinds(&check(&history)), ["holders"]);
}

fn fault(from: Micros, until: Micros) -> Fault {
    Fault { from: from * MS, until: until * MS }
}

#[test]
fn fault_of_other_shard_excuses_no_double_hold() {
    let on = |key, tags: &[&str]| {
        let plan = |mut plan: Plan| {
            plan.key = key;
            plan.somewhere()
        };
        let mut history = history(&[plan(hold("x", 1, 10, 100)), plan(hold("y", 2, 50, 60))]);
        history
            .local_faults
            .push(LocalFault { fault: fault(30, 40), tags: tags.iter().map(|tag| (*tag).to_owned()).collect() });
        kinds(&check(&history))
    };
    assert_eq!(on("m:{1}", &["1", "2"]), [""; 0]);
    assert_eq!(on("m:{3}", &["1", "2"]), ["holders"]);
    assert_eq!(on("m", &["1", "2"]), ["holders"]);
}

#[test]
fn unknown_server_counts_as_two_only_with_a_fault() {
    let plans = || [hold("x", 1, 10, 100).somewhere(), hold("y", 2, 50, 60).somewhere()];
    assert_eq!(kinds(&verdict_of(&plans())), ["holders"]);
    let mut with_fault = history(&plans());
    with_fault.faults.push(fault(30, 40));
    let verdict = check(&with_fault);
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!(verdict.doubles(Assurance::Plain), 1);
    let mut fault_elsewhere = history(&plans());
    fault_elsewhere.faults.push(fault(60, 70));
    assert_eq!(kinds(&check(&fault_elsewhere)), ["holders"]);
}

#[test]
fn decreasing_token_is_found_across_failover() {
    assert_eq!(kinds(&verdict_of(&[hold("x", 5, 10, 20), hold("y", 4, 30, 40)])), ["back", "back"]);
    assert_eq!(kinds(&verdict_of(&[hold("x", 5, 10, 20), hold("y", 4, 30, 40).on("b")])), ["back"]);
}

#[test]
fn decreasing_token_of_queued_grant_is_found() {
    let mut queued = hold("y", 4, 30, 40);
    queued.key = "k";
    let mut grant = queued.grant();
    grant.sent = 5 * MS;
    let mut history = history(&[hold("x", 5, 10, 20)]);
    history.add([Event::Grant(grant)]);
    assert_eq!(kinds(&check(&history)), ["back"]);
}

#[test]
fn repeated_token_is_found() {
    let elsewhere = || {
        let mut same = hold("y", 1, 10, 20);
        same.key = "other";
        same
    };
    assert_eq!(kinds(&verdict_of(&[hold("x", 1, 10, 20), elsewhere()])), ["repeated"]);
    assert_eq!(kinds(&verdict_of(&[hold("x", 1, 10, 20), elsewhere().on("b")])), [""; 0]);
    assert_eq!(kinds(&verdict_of(&[hold("x", 1, 10, 20).somewhere(), elsewhere().somewhere()])), [""; 0]);
    let verdict = verdict_of(&[hold("x", 1, 10, 20), hold("y", 1, 20, 30)]);
    assert!(kinds(&verdict).contains(&"repeated"), "{verdict:?}");
    // Two primaries: one after the other must not return the same token, but in the same microsecond they may.
    let verdict = verdict_of(&[hold("x", 1, 10, 20), hold("y", 1, 20, 30).on("b")]);
    assert!(kinds(&verdict).contains(&"repeated"), "{verdict:?}");
    let verdict = verdict_of(&[hold("x", 1, 10, 20), hold("y", 1, 10, 30).on("b")]);
    assert!(!kinds(&verdict).contains(&"repeated"), "{verdict:?}");
    let verdict = verdict_of(&[hold("x", 1, 10, 20), hold("y", 1, 10, 30).somewhere()]);
    assert!(kinds(&verdict).contains(&"repeated"), "{verdict:?}");
}

#[test]
fn one_token_for_several_locks_is_accepted() {
    let mut second = hold("x", 1, 10, 20);
    second.key = "other";
    assert_eq!(kinds(&verdict_of(&[hold("x", 1, 10, 20), second])), [""; 0]);
}

fn with_write(plan: Plan, at: Micros) -> Vec<Event> {
    let mut events = plan.events();
    events.push(Event::Write { hold: 0, at: at * MS });
    events
}

#[test]
fn store_refuses_late_writer() {
    let mut history = History::default();
    history.add(with_write(hold("x", 1, 10, 20), 50));
    history.add(with_write(hold("y", 2, 30, 40), 35));
    let verdict = check(&history);
    assert_eq!(kinds(&verdict), [""; 0]);
    assert_eq!((verdict.writes_taken, verdict.writes_refused), (1, 1));
}

#[test]
fn accepted_stale_write_is_found() {
    let mut history = History::default();
    history.add(with_write(hold("x", 3, 10, 20), 50));
    history.add(with_write(hold("y", 2, 30, 40).on("b"), 35));
    assert!(kinds(&check(&history)).contains(&"stale"));
}

fn request(ended: Option<Micros>, outcome: Outcome) -> History {
    let mut history = History::default();
    history.add([Event::Request(Request {
        sent: 100 * MS,
        allowed: 500 * MS,
        ended: ended.map(|at| at * MS),
        outcome,
    })]);
    history
}

#[test]
fn lost_waiter_is_found() {
    assert_eq!(kinds(&check(&request(Some(601), Outcome::Refused))), [""; 0]);
    assert_eq!(kinds(&check(&request(Some(2_700), Outcome::Unanswered))), ["lost"]);
    assert_eq!(kinds(&check(&request(Some(2_700), Outcome::Granted))), ["lost"]);
    assert_eq!(kinds(&check(&request(None, Outcome::Unanswered))), ["never"]);
}

#[test]
fn waiter_of_paused_server_may_be_late_but_must_end() {
    let mut late = request(Some(2_700), Outcome::Unanswered);
    late.faults.push(fault(200, 1_000));
    assert_eq!(kinds(&check(&late)), [""; 0]);
    let mut never = request(None, Outcome::Unanswered);
    never.faults.push(fault(200, 1_000));
    assert_eq!(kinds(&check(&never)), ["never"]);
}

#[test]
fn abandoned_lock_must_be_granted_again_in_time() {
    let probe = |had| {
        let mut history = History::default();
        history.probes.push(Probe { key: "k".into(), due: 100, had });
        kinds(&check(&history))
    };
    assert_eq!(probe(Some(99)), [""; 0]);
    assert_eq!(probe(Some(101)), ["again"]);
    assert_eq!(probe(None), ["again"]);
}

#[test]
fn record_of_other_language_is_read() {
    let lines = [
        "G\t7\tk\tx\t1\t5\t100\t200\t300\t2000000\ta\tplain",
        "N\t7\t1000\t1100\t2000000\t-\treplicas",
        "W\t7\t1200",
        "E\t7\t1300",
        "Q\t100\t500\t-\tunanswered",
    ];
    let mut history = History::default();
    history.add(lines.iter().map(|line| parse(line, |token| token * 50).unwrap()));
    let grant = &history.holds[0].grant;
    assert_eq!((grant.sent, grant.began, grant.replied), (100, 250, 300));
    assert_eq!(history.holds[0].spans[0].until, 1_100);
    assert_eq!(history.holds[0].spans[1].until, 1_300);
    assert_eq!(history.writes.len(), 1);
    assert_eq!(kinds(&check(&history)), ["never"]);
    assert!(parse("G\t7", |_| 0).is_err());
    assert!(parse("E\t7\tx", |_| 0).is_err());
}
