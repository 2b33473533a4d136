//! The order in which changed locks are served, and the refusals of their waiters.

use super::table::{Stored, Table};
use super::{Locks, demand, key, keys, owner, serve};
use crate::lock::serve::{Agenda, Change, Job, Sight, View, WaitEnd};
use crate::lock::{Ahead, Deadline, Decision, Hold, Limit, LockKey, Millis, Owner, Queue, Standing, Waiter, decide};

const NOW: Millis = 1;

/// Locks that record how waits ended.
#[derive(Default)]
struct RecordingLocks {
    table: Table,
    ends: Vec<(Owner, WaitEnd)>,
}

impl View for RecordingLocks {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        View::look(&mut self.table, key, owner)
    }
}

impl Locks for RecordingLocks {
    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        Locks::holders(&mut self.table, key)
    }

    fn settle(&mut self, waiter: &Waiter<()>, end: WaitEnd) {
        self.ends.push((waiter.owner.clone(), end));
    }
}

#[test]
fn agenda_is_empty_when_no_key_is_due() {
    let queue = Queue::<()>::default();
    let mut agenda = Agenda::default();
    assert!(agenda.is_empty());
    agenda.note(key(0), Change::Freed);
    assert!(!agenda.is_empty());
    while let Some(job) = agenda.next(&queue) {
        assert!(matches!(job, Job::Nothing), "{job:?}");
    }
    assert!(agenda.is_empty());
}

/// Otherwise locks whose names sort first would starve the others, if they keep changing.
#[test]
fn agenda_returns_first_changed_key_first() {
    let mut queue = Queue::default();
    for who in 0..4 {
        queue.join(owner(who), keys(&[who]), demand(1), NOW, None, ());
    }
    let mut agenda = Agenda::default();
    let looked_at = |agenda: &mut Agenda| match agenda.next(&queue) {
        Some(Job::Judge(attempt)) => attempt.only_key().map(|(key, _)| key),
        other => panic!("{other:?}"),
    };
    for name in [1, 3, 1, 0] {
        agenda.note(key(name), Change::Freed);
    }
    assert_eq!(looked_at(&mut agenda), Some(key(1)));
    // It was served last.
    for name in [2, 1] {
        agenda.note(key(name), Change::Freed);
    }
    for name in [3, 0, 2, 1] {
        assert_eq!(looked_at(&mut agenda), Some(key(name)));
    }
    assert!(agenda.is_empty());
}

/// The last key is not a lock any more, and the first has another limit. A waiter for both is refused because of the first
/// key, whichever change is processed first.
#[test]
fn first_refusing_key_gives_the_reason() {
    let [first, last] = [key(0), key(1)];
    let mut locks = RecordingLocks { table: Table { now: NOW, ..Table::default() }, ..RecordingLocks::default() };
    let hold = |locks: &mut RecordingLocks, who: u32, limit: u32| {
        let decision = decide(&Standing::FREE, &demand(limit), Ahead::NoRequest, NOW);
        locks.table.write(std::slice::from_ref(&first), &owner(who), &[decision]);
    };
    hold(&mut locks, 0, 1);
    let mut queue = Queue::default();
    queue.join(owner(1), keys(&[0, 1]), demand(1), NOW, None, ());
    // It waits for the first key.
    serve(&mut queue, &mut locks, [(first.clone(), Change::Freed)], NOW);
    assert!(locks.ends.is_empty());
    // Its own hold, which another client wrote, has limit 3.
    locks.table.stored.clear();
    hold(&mut locks, 1, 3);
    locks.table.stored.insert(last.clone(), Stored::SomethingElse);
    serve(&mut queue, &mut locks, [(last, Change::Foreign)], NOW);
    let refused = WaitEnd::Refused(Decision::OtherLimit(Limit::from_number(3)));
    assert_eq!(locks.ends, [(owner(1), refused)]);
}

/// The owner holds both locks under one token. Replicas have yet to confirm a renewal of the first, or another server
/// decides on it, so it is unknown whether the request re-enters both.
#[test]
fn request_for_several_waits_while_one_of_its_locks_is_undecided() {
    let own = Hold { holds: 1, token: Some(7), deadline: Deadline::At(9) };
    let held = Sight::Lock(Standing { own: Some(own), holders: 1, limit: Limit::MUTEX });
    let mut queue = Queue::default();
    queue.join(owner(0), keys(&[0, 1]), demand(1), NOW, None, ());
    for hidden in [Sight::BeingConfirmed, Sight::Elsewhere] {
        for change in [Change::Freed, Change::Foreign] {
            let mut agenda = Agenda::default();
            agenda.note(key(1), change);
            let Some(Job::Judge(attempt)) = agenda.next(&queue) else { panic!("the request is not judged") };
            let end = attempt.judge(&mut |of: &LockKey, _: &Owner| if *of == key(0) { hidden } else { held }, NOW);
            assert_eq!(end, None, "{hidden:?}, {change:?}");
        }
    }
}

/// Otherwise the next request for the same keys would be decided once for each released key, by reading all keys each
/// time.
#[test]
fn just_granted_mutexes_are_checked_for_no_other_request() {
    let mut queue = Queue::default();
    for who in 0..2 {
        queue.join(owner(who), keys(&[0, 1, 2]), demand(1), NOW, None, ());
    }
    let mut agenda = Agenda::default();
    (0..3).for_each(|name| agenda.note(key(name), Change::Freed));
    let Some(Job::Judge(attempt)) = agenda.next(&queue) else { panic!("the request is not judged") };
    let end = attempt.judge(&mut |_: &LockKey, _: &Owner| Sight::Lock(Standing::FREE), NOW).unwrap();
    agenda.ended(&mut queue, attempt.id(), &end).unwrap();
    while let Some(job) = agenda.next(&queue) {
        assert!(matches!(job, Job::Nothing), "{job:?}");
    }
}
