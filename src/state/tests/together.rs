//! Operations that concern several tables at once.

use super::{TERMS, granted, home, key, new_binding, owner, request, requester};
use crate::lock::serve::{Change, Job};
use crate::lock::{Deadline, Waiter, WaiterId};
use crate::server::clock::{Now, Slice};
use crate::state::confirmations::ConfirmedItem;
use crate::state::pending::{self, OnBehalf, Ticket};
use crate::state::sessions::WITHDRAWN;
use crate::state::{
    Answer, Basis, Binding, Confirmation, Expiry, Grant, GrantId, GrantedHold, HeartbeatMode, Kind, LossReason,
    NewBinding, Outcome, Progress, Reading, Requester, Stage, State, WithdrawnGrant,
};

const NOW: Now = Now { micros: 1 };

/// An undelivered grant of key 1, on behalf of a session.
fn undelivered(state: &mut State, client: u64, ticket: Ticket, progress: Progress) -> GrantId {
    let holds = vec![GrantedHold { name: key(1).name, token: 7, deadline: Deadline::At(50), undo: 1, binding: None }];
    let (owner, on_behalf, basis) = (owner(1), OnBehalf::Session, Basis::New);
    let grant = Grant { home: home(0), owner, client, on_behalf, ticket, basis, holds, event: None };
    state.undelivered.begin(grant, progress)
}

/// A request of a blocked client whose reply is pending.
fn blocked(state: &mut State, client: u64) -> Box<Waiter<Requester>> {
    let ticket = state.pending.ticket();
    state.pending.set(ticket, Stage::Waiting(WaiterId::FIRST));
    Waiter::new(owner(1), [key(1)].into(), TERMS.demand, None, requester(client, OnBehalf::Itself, ticket))
}

/// A session's request whose event is pending.
fn asked(state: &mut State, client: u64) -> Box<Waiter<Requester>> {
    let ticket = state.pending.ticket();
    let request = request(client, ticket, owner(1), [key(1)]);
    state.sessions.open(client);
    state.sessions.add_wait(&request.requester);
    state.pending.set(ticket, Stage::Waiting(WaiterId::FIRST));
    request
}

/// Grants key 1 to a request, which then awaits replicas.
fn confirming(state: &mut State, request: Box<Waiter<Requester>>) -> GrantId {
    let Requester { ticket, client, .. } = request.requester;
    let grant = undelivered(state, client, ticket, Progress::Confirming);
    let what = ConfirmedItem::Reply { request, answer: Answer::Token(7), grant };
    let id = state.confirmations.begin(Confirmation { what, needed: 1, target: None, began: NOW, until: 100 });
    state.pending.set(ticket, Stage::Confirming(id));
    grant
}

/// Blocks a session until its next event.
fn reads(state: &mut State, client: u64) {
    state.sessions.open(client);
    let reading = Reading { most: 1, signs: HeartbeatMode::Unwanted, asked: 0, until: None };
    let ticket = state.pending.ticket();
    state.pending.set(ticket, Stage::Reading(Box::new(pending::Reader { client, reading, block: None })));
    state.sessions.set_reader(client, Some(ticket));
    assert!(!state.pending.is_ending());
}

/// Queues a request for key 1, which waits until `until`.
fn waits(state: &mut State, number: u8, until: Option<u64>) -> WaiterId {
    let ticket = state.pending.ticket();
    state.pending.timeouts.extend(until.map(|until| (until, ticket)));
    let requester = requester(1, OnBehalf::Itself, ticket);
    let id = state.queue.join(owner(number), [key(1)], TERMS.demand, 0, until, requester);
    state.pending.set(ticket, Stage::Waiting(id));
    id
}

/// Requests that leave the queues count by their keys. Otherwise, one call may end 5,000 waits for 128 keys each, which
/// takes 50 ms.
#[test]
fn wait_counts_once_for_each_of_its_keys() {
    let mut state = State::default();
    let ids: Vec<WaiterId> = (0..3)
        .map(|number| {
            let one = waits(&mut state, number, None);
            let requester = state.queue.leave(one).expect("it waits").requester;
            state.queue.join(owner(number), (0..50).map(key).collect::<Vec<_>>(), TERMS.demand, 0, None, requester)
        })
        .collect();
    let slice = Slice::of_iteration().piece();
    let left = ids.iter().take_while(|_| !slice.is_over()).filter(|id| state.leave(**id).is_some()).count();
    assert_eq!(left, 2, "a hundred keys are a piece");
}

/// The next request that the agenda hands out.
fn next_to_judge(state: &mut State) -> Option<WaiterId> {
    loop {
        match state.agenda.next(&state.queue)? {
            Job::Judge(attempt) => return Some(attempt.id()),
            Job::Nothing | Job::FindHolders(_) => {}
        }
    }
}

fn bound(state: &mut State, client: u64) -> Binding {
    state.bindings.bind(NewBinding { lease: 9, ..new_binding(client, key(1), owner(1), 7) }, 0);
    state.bindings.of(0, &key(1).name, &owner(1), Some(7)).expect("it is bound").clone()
}

#[test]
fn end_of_a_request_reaches_its_recipient() {
    let mut state = State::default();
    let request = blocked(&mut state, 1);
    assert_eq!(state.end(request, granted(1), NOW), None);
    assert!(state.pending.is_ending() && !state.undelivered.is_revoked());

    let mut state = State::default();
    let request = asked(&mut state, 2);
    let ticket = request.requester.ticket;
    assert_eq!(state.end(request, granted(3), NOW), None);
    assert!(!state.pending.is_ending() && !state.undelivered.is_revoked());
    let kind = state.sessions.read(2).map(|(event, _)| event.kind);
    assert!(matches!(kind, Some(Kind::Granted(3, _))), "{kind:?}");
    assert!(state.pending.get(ticket).is_none());

    let request = asked(&mut state, 2);
    state.sessions.client_gone(2);
    let grant = undelivered(&mut state, 2, request.requester.ticket, Progress::Delivering);
    assert_eq!(state.end(request, Outcome::Granted(Answer::Token(7), grant), NOW), Some(grant));
    assert!(state.undelivered.is_revoked() && state.has_work());
}

/// A grant to a client that is gone is revoked, even if the client left while its request was being granted.
#[test]
fn grant_to_a_client_that_is_gone_is_revoked() {
    for is_session in [false, true] {
        let mut state = State::default();
        let request = if is_session { asked(&mut state, 2) } else { blocked(&mut state, 2) };
        let grant = undelivered(&mut state, 2, request.requester.ticket, Progress::Delivering);
        state.withdraw(request.requester.ticket);
        assert_eq!(state.end(request, Outcome::Granted(Answer::Token(7), grant), NOW), Some(grant));
        assert!(!state.pending.is_ending() && state.sessions.unread(2) == 0);
    }
}

#[test]
fn reader_is_answered_for_each_kind_of_event() {
    let mut state = State::default();
    let request = asked(&mut state, 2);
    reads(&mut state, 2);
    state.end(request, granted(1), NOW);
    assert!(state.pending.is_ending());
    for kind in [Kind::Lost(1, LossReason::Changed), Kind::Unbound(1, LossReason::Taken), Kind::Contended(1)] {
        let mut state = State::default();
        reads(&mut state, 2);
        let (of_another, own) = (bound(&mut state, 3), bound(&mut state, 2));
        state.notify(&of_another, kind.clone());
        assert!(!state.pending.is_ending());
        state.notify(&own, kind);
        assert!(state.pending.is_ending());
        assert_eq!(state.sessions.unread(2), 1);
    }
}

#[test]
fn reader_that_is_gone_is_not_answered() {
    let mut state = State::default();
    reads(&mut state, 2);
    let ticket = state.pending.ticket();
    state.pending.timeouts.extend([(30, ticket), (40, ticket)]);
    state.end_reading(2, ticket, Some(30));
    assert_eq!(state.pending.timeouts.iter().map(|(until, _)| *until).collect::<Vec<_>>(), [40]);
    let request = asked(&mut state, 2);
    state.end(request, granted(1), NOW);
    assert!(!state.pending.is_ending());
}

/// A grant of an ended session is revoked before anything is decided by it, even if the end was not processed yet.
#[test]
fn grant_of_ended_session_is_revoked() {
    let mut state = State::default();
    let request = asked(&mut state, 2);
    let grant = undelivered(&mut state, 2, request.requester.ticket, Progress::Delivering);
    state.end(request, Outcome::Granted(Answer::Token(7), grant), NOW);
    assert!(state.take_revoked(0, &key(1).name).is_empty());
    state.sessions.client_gone(2);
    let revoked = state.take_revoked(0, &key(1).name);
    assert_eq!(revoked.iter().map(|it| (it.token, it.undo)).collect::<Vec<_>>(), [(7, 1)]);
    assert!(state.take_revoked(0, &key(1).name).is_empty());
}

/// A grant that awaits replicas makes other requests of its owner wait. These are judged once it is confirmed or
/// revoked.
#[test]
fn grant_that_awaits_replicas_delays_other_requests_of_its_owner() {
    for is_confirmed in [true, false] {
        let mut state = State::default();
        let request = asked(&mut state, 2);
        let grant = confirming(&mut state, request);
        let waiter = waits(&mut state, 1, None);
        assert!(
            state.awaits_replicas(0, &key(1).name, &owner(1)) && !state.awaits_replicas(1, &key(1).name, &owner(1))
        );
        assert!(state.awaiting_replicas(&owner(1), &key(1)).is_some());
        if is_confirmed {
            state.confirmed(grant)
        } else {
            state.revoke(grant)
        }
        assert!(!state.awaits_replicas(0, &key(1).name, &owner(1)));
        assert_eq!(next_to_judge(&mut state), Some(waiter));
        assert_eq!(state.undelivered.is_revoked(), !is_confirmed);
    }
}

/// The withdrawal of a grant reaches the client in the way that the grant would have.
#[test]
fn withdrawal_of_grant_is_reported_to_its_client() {
    let mut state = State::default();
    let request = asked(&mut state, 2);
    let grant = undelivered(&mut state, 2, request.requester.ticket, Progress::Delivering);
    state.end(request, Outcome::Granted(Answer::Token(7), grant), NOW);
    assert!(matches!(state.withdraw_granted(grant, &key(1)), Some(WithdrawnGrant::Answered)));
    let kind = state.sessions.read(2).map(|(event, _)| event.kind);
    assert_eq!(kind, Some(Kind::Refused(WITHDRAWN.into())));
    assert!(state.undelivered.is_empty());

    let request = blocked(&mut state, 1);
    let ticket = request.requester.ticket;
    let grant = undelivered(&mut state, 1, ticket, Progress::Delivering);
    state.end(request, Outcome::Granted(Answer::Token(7), grant), NOW);
    assert!(matches!(state.withdraw_granted(grant, &key(1)), Some(WithdrawnGrant::Answered)));
    let Some(Stage::Ending(end)) = state.pending.get(ticket) else { panic!("it has ended") };
    assert!(matches!(end.outcome, Outcome::Withdrawn));

    let request = blocked(&mut state, 1);
    let ticket = request.requester.ticket;
    let grant = confirming(&mut state, request);
    let Some(WithdrawnGrant::Unconfirmed(request)) = state.withdraw_granted(grant, &key(1)) else {
        panic!("it awaited replicas")
    };
    assert_eq!(request.requester.ticket, ticket);
    assert!(state.confirmations.is_empty() && state.withdraw_granted(grant, &key(1)).is_none());
}

/// When a waiter leaves the queue, the next one is judged. A look at the lock stays scheduled while any request waits.
#[test]
fn next_waiter_is_judged_when_one_leaves() {
    let mut state = State::default();
    let [first, second] = [(1, Some(30)), (2, Some(40))].map(|(number, until)| waits(&mut state, number, until));
    state.queue.look_at(&key(1), Some(100));
    assert!(state.is_contended(0, &key(1).name) && !state.is_contended(1, &key(1).name));
    let waiter = state.queue.leave(first).expect("it waits");
    state.left_without_grant(&waiter);
    assert_eq!(state.pending.timeouts.iter().map(|(until, _)| *until).collect::<Vec<_>>(), [40]);
    assert_eq!(state.queue.first_look(), Some(100));
    assert_eq!(next_to_judge(&mut state), Some(second));
    let waiter = state.queue.leave(second).expect("it waits");
    state.left_without_grant(&waiter);
    assert!(state.pending.timeouts.is_empty() && !state.is_contended(0, &key(1).name));
    assert_eq!(state.queue.first_look(), None);
    assert!(state.agenda.is_empty());
}

/// Each kind of work is noticed.
#[test]
fn work_is_noticed() {
    assert!(!State::default().has_work());
    let kinds: [&dyn Fn(&mut State); 4] = [
        &|state| {
            let grant = undelivered(state, 1, Ticket(1), Progress::Delivering);
            state.revoke(grant);
        },
        &|state| state.agenda.note(key(1), Change::Freed),
        &|state| state.expired.push_back((key(1), Expiry::Key { holders: 1 })),
        &|state| state.sweep.begin(None, (WaiterId::FIRST.next(), state.bindings.next_id())),
    ];
    for kind in kinds {
        let mut state = State::default();
        kind(&mut state);
        assert!(state.has_work() && !state.has_readonly_work());
    }
    let mut state = State::default();
    bound(&mut state, 1);
    assert!(!state.has_work());
    state.bindings.client_gone(1);
    assert!(state.has_work() && !state.has_readonly_work());
}

/// Work that writes nothing, which a replica does as well, is noticed, too.
#[test]
fn work_without_writes_is_noticed() {
    let mut state = State::default();
    asked(&mut state, 2);
    assert!(!state.has_readonly_work());
    state.sessions.client_gone(2);
    assert!(state.has_readonly_work() && state.has_work());

    let mut state = State::default();
    waits(&mut state, 1, None);
    state.forget_work();
    assert!(state.has_readonly_work() && state.has_work());

    let mut state = State::default();
    bound(&mut state, 1);
    state.forget_work();
    assert!(state.has_readonly_work() && state.has_work() && state.bindings.is_empty());
}

#[test]
fn role_change_ends_work_but_not_waits() {
    let mut state = State::default();
    let [first, last] = [1, 2].map(|number| waits(&mut state, number, None));
    state.agenda.note(key(1), Change::Freed);
    state.expired.push_back((key(1), Expiry::Key { holders: 1 }));
    let grant = undelivered(&mut state, 1, Ticket(1), Progress::Delivering);
    state.revoke(grant);
    state.forget_work();
    assert!(state.agenda.is_empty() && state.expired.is_empty());
    assert!(state.undelivered.is_revoked() && state.sweep.is_over());
    state.forget_changes();
    assert!(state.undelivered.is_empty());
    // A later request is not undecided. Once the role changes again, all of them are.
    let later = waits(&mut state, 3, None);
    let tickets = [first, last, later].map(|id| state.queue.get(id).expect("it waits").requester.ticket);
    assert_eq!(state.next_undecided(), Some(tickets[0]));
    state.forget_work();
    assert_eq!(std::iter::from_fn(|| state.next_undecided()).collect::<Vec<_>>(), tickets);
    assert!(state.undecided.is_empty() && state.queue.len() == 3);
}

/// The module may be unloaded only when nothing is lost with it.
#[test]
fn state_is_in_use_while_unloading_would_lose_something() {
    assert!(!State::default().are_in_use());
    let mut state = State::default();
    waits(&mut state, 1, None);
    assert!(state.are_in_use());

    let mut state = State::default();
    bound(&mut state, 1);
    assert!(state.are_in_use());

    // A session.
    let mut state = State::default();
    asked(&mut state, 2);
    assert!(state.are_in_use());
}
