//! Bindings: each is in all its indices, or in none.

use super::{key, new_binding, owner};
use crate::lock::{Deadline, LockKey};
use crate::state::bindings::Confirms;
use crate::state::{Binding, BindingFlags, BindingId, Bindings, ConfirmationId, Discarded, LossReason, NewBinding};
use proptest::prelude::*;
use std::rc::Rc;

#[derive(Clone, Debug)]
enum Act {
    Binding { client: u64, key: u8, owner: u8, token: u64, watchdog: bool, lease: u64 },
    Unbind { key: u8, owner: u8 },
    UnbindAll { key: u8 },
    Changed { key: u8, owner: u8, before: u64, token: u64 },
    DeadlineMoved { nth: u64, at: u64 },
    DeadlineSeen { nth: u64, at: u64 },
    TakeDue { now: u64 },
    Remove { nth: u64 },
    ClientGone { client: u64 },
    NextEnded,
    Retire,
    NextRetired,
    Doubt { key: u8 },
    NextDoubtful,
    Swap,
    Contended { key: u8 },
}

fn act() -> impl Strategy<Value = Act> {
    let (clients, keys, owners, tokens, times) = (1..4_u64, 0..3_u8, 0..3_u8, 1..4_u64, 0..100_u64);
    prop_oneof![
        6 => (clients.clone(), keys.clone(), owners.clone(), tokens.clone(), any::<bool>(), 28..32_u64).prop_map(
            |(client, key, owner, token, watchdog, lease)| Act::Binding { client, key, owner, token, watchdog, lease }
        ),
        1 => (keys.clone(), owners.clone()).prop_map(|(key, owner)| Act::Unbind { key, owner }),
        1 => keys.clone().prop_map(|key| Act::UnbindAll { key }),
        1 => (keys.clone(), owners, tokens.clone(), tokens)
            .prop_map(|(key, owner, before, token)| Act::Changed { key, owner, before, token }),
        1 => (0..20_u64, times.clone()).prop_map(|(nth, at)| Act::DeadlineMoved { nth, at }),
        1 => (0..20_u64, times.clone()).prop_map(|(nth, at)| Act::DeadlineSeen { nth, at }),
        1 => times.prop_map(|now| Act::TakeDue { now }),
        1 => (0..20_u64).prop_map(|nth| Act::Remove { nth }),
        1 => clients.prop_map(|client| Act::ClientGone { client }),
        1 => Just(Act::NextEnded),
        1 => Just(Act::Retire),
        1 => Just(Act::NextRetired),
        1 => keys.clone().prop_map(|key| Act::Doubt { key }),
        1 => Just(Act::NextDoubtful),
        1 => Just(Act::Swap),
        1 => keys.prop_map(|key| Act::Contended { key }),
    ]
}

fn in_db(key: LockKey, number: u8) -> LockKey {
    LockKey { db: i32::from(number % 2), ..key }
}

fn carry_out(bindings: &mut Bindings, act: Act) {
    let place = |number: u8| in_db(key(number), number);
    match act {
        Act::Binding { client, key, owner: who, token, watchdog, lease } => {
            let flags = BindingFlags { watchdog, ephemeral: !watchdog && token > 1, contention: lease % 2 == 0 };
            let of = new_binding(client, place(key), owner(who), token);
            let new = NewBinding { flags, lease, ..of };
            bindings.bind(new, 10);
        }
        Act::Unbind { key, owner: who } => drop(bindings.unbind(place(key).db, &place(key).name, &owner(who))),
        Act::UnbindAll { key } => drop(bindings.unbind_all(place(key).db, &place(key).name)),
        Act::Changed { key, owner: who, before, token } => {
            let (key, who) = (place(key), owner(who));
            bindings.changed((key.db, &key.name, &who), Some(before), token, Deadline::At(70), 10);
        }
        Act::DeadlineMoved { nth, at } => bindings.deadline_moved(BindingId(nth), Deadline::At(at), 10),
        Act::DeadlineSeen { nth, at } => bindings.deadline_seen(BindingId(nth), Deadline::At(at)),
        Act::TakeDue { now } => {
            bindings.take_due(now);
        }
        Act::Remove { nth } => drop(bindings.remove(BindingId(nth))),
        Act::ClientGone { client } => {
            bindings.client_gone(client);
        }
        Act::NextEnded => drop(bindings.next_ended()),
        Act::Retire => bindings.retire_all(&mut Discarded::default()),
        Act::NextRetired => drop(bindings.next_retired()),
        Act::Doubt { key } => bindings.mark_unverified(place(key).db, &place(key).name, LossReason::Changed),
        Act::NextDoubtful => {
            bindings.next_unverified();
        }
        Act::Swap => bindings.swap(0, 1),
        Act::Contended { key } => drop(bindings.take_armed(place(key).db, &place(key).name).cloned()),
    }
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn binding_is_in_all_indices_or_in_none(acts in proptest::collection::vec(act(), 0..80)) {
        let mut bindings = Bindings::default();
        for act in acts {
            carry_out(&mut bindings, act.clone());
            prop_assert!(bindings.is_consistent(), "{act:?}: {bindings:#?}");
        }
    }

    /// Every binding ends once: nothing is left when all connections have ended and all ended bindings are removed.
    #[test]
    fn every_binding_ends_once(acts in proptest::collection::vec(act(), 0..80)) {
        let mut bindings = Bindings::default();
        acts.into_iter().for_each(|act| carry_out(&mut bindings, act));
        (1..4).for_each(|client| { bindings.client_gone(client); });
        while bindings.next_ended().is_some() {}
        while bindings.next_retired().is_some() {}
        while bindings.next_unverified().is_some() {}
        prop_assert!(bindings.is_empty() && !bindings.has_work() && bindings.next_due().is_none());
    }
}

/// Binds a hold at 0, with a lease of 30 ms, until 50. Returns the binding of an earlier hold.
fn bound(bindings: &mut Bindings, client: u64, token: u64, flags: BindingFlags) -> Option<Binding> {
    let new = NewBinding { flags, ..new_binding(client, key(1), owner(1), token) };
    bindings.bind(new, 0).filter(|before| before.token != token)
}

const WATCHED: BindingFlags = BindingFlags { watchdog: true, ephemeral: false, contention: false };
const EPHEMERAL: BindingFlags = BindingFlags { watchdog: false, ephemeral: true, contention: false };

/// Bindings with a single one, which has these flags, and its id.
fn one(flags: BindingFlags) -> (Bindings, BindingId) {
    let mut bindings = Bindings::default();
    assert!(bound(&mut bindings, 1, 7, flags).is_none());
    let id = bindings.from(BindingId(0), bindings.next_id()).expect("it is there");
    (bindings, id)
}

#[test]
fn watched_hold_is_due_after_each_third_of_its_lease() {
    let (mut bindings, id) = one(WATCHED);
    assert_eq!((bindings.len(), bindings.is_empty(), bindings.next_due()), (1, false, Some(10)));
    assert_eq!(bindings.take_due(9), None);
    assert_eq!((bindings.take_due(12), bindings.next_due()), (Some(id), Some(22)));
    // The binding is due in time for an earlier deadline. A later deadline does not postpone it.
    bindings.deadline_moved(id, Deadline::At(15), 12);
    assert_eq!((bindings.next_due(), bindings.get(id).map(Binding::end)), (Some(13), Some(Deadline::At(15))));
    bindings.deadline_moved(id, Deadline::At(900), 12);
    assert_eq!(bindings.next_due(), Some(13));
    // A deadline that another client sets is no reason to renew the hold, but the binding is due when it ends.
    let (mut bindings, id) = one(WATCHED);
    bindings.deadline_seen(id, Deadline::At(900));
    assert_eq!((bindings.next_due(), bindings.get(id).map(Binding::end)), (Some(10), Some(Deadline::At(900))));
    bindings.deadline_seen(id, Deadline::At(5));
    assert_eq!(bindings.next_due(), Some(6));
    bindings.deadline_seen(id, Deadline::Never);
    assert_eq!(bindings.next_due(), Some(6));
}

#[test]
fn unwatched_hold_is_due_when_its_lease_ends() {
    let (mut bindings, id) = one(EPHEMERAL);
    assert_eq!(bindings.next_due(), Some(51));
    bindings.deadline_moved(id, Deadline::At(70), 12);
    assert_eq!((bindings.next_due(), bindings.take_due(70)), (Some(71), None));
    assert_eq!((bindings.take_due(71), bindings.next_due()), (Some(id), None));
    bindings.deadline_moved(id, Deadline::Never, 12);
    assert_eq!(bindings.next_due(), None);
}

#[test]
fn changed_hold_keeps_its_binding_under_its_new_token() {
    let hold = (0, &*key(1).name, &*owner(1));
    let (mut bindings, id) = one(WATCHED);
    assert!(bindings.changed(hold, Some(7), 8, Deadline::At(900), 1).is_none());
    assert_eq!(bindings.get(id).map(|it| (it.token, it.end())), Some((8, Deadline::At(900))));
    assert!(bindings.of(0, hold.1, hold.2, Some(8)).is_some() && bindings.of(0, hold.1, hold.2, Some(7)).is_none());
    // The binding belonged to another hold.
    assert_eq!(bindings.changed(hold, Some(7), 9, Deadline::At(900), 1).map(|it| it.token), Some(8));
    assert!(
        bindings.get(id).is_none() && !bindings.is_bound(0, hold.1) && bindings.client_of(0, hold.1, hold.2).is_none()
    );
}

/// Flags of a hold add up while it is bound to the same connection. Otherwise it is bound anew.
#[test]
fn bind_keeps_the_flags_of_an_earlier_binding_of_the_same_connection() {
    let flags = |bindings: &Bindings| bindings.of(0, &key(1).name, &owner(1), Some(7)).map(|it| (it.client, it.flags));
    let both = BindingFlags { watchdog: true, ephemeral: true, contention: false };
    for (first, second) in [(WATCHED, EPHEMERAL), (EPHEMERAL, WATCHED)] {
        let (mut bindings, _) = one(first);
        assert!(bound(&mut bindings, 1, 7, second).is_none());
        assert_eq!((flags(&bindings), bindings.len()), (Some((1, both)), 1));
        let (mut bindings, _) = one(first);
        assert!(bound(&mut bindings, 2, 7, second).is_none());
        assert_eq!((flags(&bindings), bindings.client_of(0, &key(1).name, &owner(1))), (Some((2, second)), Some(2)));
        let (mut bindings, _) = one(first);
        assert_eq!(bound(&mut bindings, 1, 8, second).map(|it| it.token), Some(7), "another hold");
        assert_eq!((flags(&bindings), bindings.len()), (None, 1));
    }
}

/// A session that asks for it is notified of contention once, and once more if it asks again.
#[test]
fn contention_is_reported_once_for_each_hold() {
    let keeps = BindingFlags { contention: true, ..WATCHED };
    let notified = |bindings: &mut Bindings| bindings.take_armed(0, &key(1).name).map(|it| it.client);
    let (mut bindings, _) = one(keeps);
    assert!(bindings.is_armed(0, &key(1).name) && !bindings.is_armed(1, &key(1).name) && bindings.cached_locks() == 1);
    assert_eq!((notified(&mut bindings), notified(&mut bindings), bindings.cached_locks()), (Some(1), None, 0));
    // A hold that is bound again stays notified, unless the new binding asks, too.
    bound(&mut bindings, 1, 7, EPHEMERAL);
    assert_eq!(notified(&mut bindings), None);
    bound(&mut bindings, 1, 7, keeps);
    assert_eq!(notified(&mut bindings), Some(1));
    bound(&mut bindings, 2, 7, WATCHED);
    assert_eq!(notified(&mut bindings), None);
    // Asking for notification changes nothing else of the binding.
    bindings.bind(
        NewBinding {
            flags: BindingFlags { contention: true, ..BindingFlags::NONE },
            lease: 7,
            ..new_binding(2, key(1), owner(1), 7)
        },
        0,
    );
    let binding = bindings.of(0, &key(1).name, &owner(1), Some(7)).map(|it| (it.flags, it.lease));
    assert_eq!(binding, Some((keeps, 30)));
    assert_eq!(notified(&mut bindings), Some(2));
    bound(&mut bindings, 2, 7, keeps);
    // The request for notification follows its database, and ends with the hold.
    bindings.swap(0, 1);
    assert!(bindings.is_armed(1, &key(1).name) && !bindings.is_armed(0, &key(1).name));
    bindings.swap(0, 1);
    bindings.unbind(0, &key(1).name, &owner(1));
    assert_eq!((notified(&mut bindings), bindings.cached_locks()), (None, 0));
    // Another hold replaces one that has ended unnoticed, and asks on its own.
    bound(&mut bindings, 1, 7, keeps);
    bindings.bind(NewBinding { flags: keeps, ..new_binding(3, key(1), owner(2), 8) }, 0);
    bindings.unbind(0, &key(1).name, &owner(1));
    assert_eq!((notified(&mut bindings), bindings.cached_locks()), (Some(3), 0));
}

#[test]
fn binding_lasts_as_long_as_its_connection() {
    let (mut bindings, id) = one(WATCHED);
    let binding = bindings.get(id).expect("it is there").clone();
    assert!(bindings.is_live(&binding));
    assert!(!bindings.client_gone(2) && bindings.is_live(&binding));
    assert!(bindings.client_gone(1) && !bindings.is_live(&binding));
    assert!(!bindings.client_gone(1));
}

/// A watched hold lasts as long as its replicas have confirmed, whatever was written since.
#[test]
fn only_a_confirmation_moves_the_confirmed_deadline() {
    let mut bindings = Bindings::default();
    bindings.bind(NewBinding { replicas: 1, deadline: Deadline::At(30), ..new_binding(1, key(1), owner(1), 7) }, 0);
    let id = bindings.take_due(10).expect("it is due");
    let end = |bindings: &Bindings| bindings.get(id).map(Binding::end);
    let [first, second] = [1, 2].map(ConfirmationId);
    bindings.deadline_moved(id, Deadline::At(40), 10);
    bindings.asked(id, first);
    assert!(end(&bindings) == Some(Deadline::At(30)) && bindings.get(id).and_then(Binding::renewal).is_some());
    bindings.answered(id, first, Confirms::No);
    assert!(end(&bindings) == Some(Deadline::At(30)) && bindings.get(id).and_then(Binding::renewal).is_none());
    bindings.deadline_moved(id, Deadline::At(50), 20);
    bindings.asked(id, second);
    bindings.answered(id, first, Confirms::Yes);
    assert_eq!(end(&bindings), Some(Deadline::At(30)), "that was another one");
    // The lease was shortened, and then extended, since that renewal. The confirmation reaches only to the shortest.
    bindings.deadline_moved(id, Deadline::At(45), 21);
    bindings.deadline_moved(id, Deadline::At(60), 21);
    bindings.answered(id, second, Confirms::Yes);
    assert_eq!(end(&bindings), Some(Deadline::At(45)));
    bindings.deadline_seen(id, Deadline::At(42));
    assert_eq!(end(&bindings), Some(Deadline::At(42)));
    // The binding is due at its end at the latest, even if the next renewal would come later.
    bindings.take_due(41);
    assert_eq!(bindings.next_due(), Some(43));
}

#[test]
fn unbind_all_removes_every_binding_of_a_lock() {
    let mut bindings = Bindings::default();
    let of = |name: u8, who: u8| new_binding(1, key(name), owner(who), 7);
    assert_eq!((bindings.len(), bindings.is_empty()), (0, true));
    assert!(!bindings.is_bound(0, &key(1).name));
    for new in [of(1, 1), of(1, 2), of(2, 1)] {
        assert!(bindings.bind(new, 0).is_none());
    }
    assert!(
        !bindings.is_empty()
            && bindings.len() == 3
            && bindings.is_bound(0, &key(1).name)
            && !bindings.is_bound(1, &key(1).name)
    );
    let mut owners: Vec<_> = bindings.unbind_all(0, &key(1).name).into_iter().map(|binding| binding.owner).collect();
    owners.sort();
    assert_eq!(owners, [owner(1), owner(2)]);
    assert!(bindings.len() == 1 && !bindings.is_bound(0, &key(1).name) && bindings.is_bound(0, &key(2).name));
    assert!(bindings.unbind_all(0, &key(1).name).is_empty());
}

/// Bindings of a lock whose connection has ended are found once after each end.
#[test]
fn ephemeral_bindings_of_ended_connection_are_found_at_next_look() {
    let mut bindings = Bindings::default();
    let broken = |bindings: &mut Bindings| {
        let broken = bindings.take_broken(0, &key(1).name).into_iter().map(|binding| binding.client);
        broken.collect::<Vec<u64>>()
    };
    let binding = |bindings: &mut Bindings, client: u8, flags| {
        bindings.bind(NewBinding { flags, ..new_binding(client.into(), key(1), owner(client), 7) }, 0);
    };
    [1, 2, 3].into_iter().for_each(|client| binding(&mut bindings, client, EPHEMERAL));
    binding(&mut bindings, 4, WATCHED);
    assert!(broken(&mut bindings).is_empty());
    for client in [1, 2] {
        assert!(bindings.client_gone(client) && !bindings.client_gone(client));
        assert_eq!((broken(&mut bindings), broken(&mut bindings)), (vec![client], vec![]));
    }
    // A binding that is made after a look is found, too. One that is only renewed is not.
    binding(&mut bindings, 5, EPHEMERAL);
    assert!([4, 3, 5].into_iter().all(|client| bindings.client_gone(client)));
    let mut both = broken(&mut bindings);
    both.sort_unstable();
    assert_eq!((both, broken(&mut bindings)), (vec![3, 5], vec![]));
    assert!(bindings.is_consistent() && bindings.len() == 1);
}

/// Bindings, and homes that grants share, follow their database.
#[test]
fn bindings_follow_their_database() {
    let (mut bindings, id) = one(WATCHED);
    let [first, other] = [0, 1].map(|db| bindings.home(db));
    let at = |bindings: &Bindings| {
        [0, 1, 2].map(|db| bindings.of(db, &key(1).name, &owner(1), Some(7)).map(|it| it.key().db))
    };
    assert_eq!(at(&bindings), [Some(0), None, None]);
    for (one, two, there, homes) in [(0, 1, [None, Some(1), None], (1, 0)), (1, 2, [None, None, Some(2)], (2, 0))] {
        bindings.swap(one, two);
        assert_eq!((at(&bindings), (first.get(), other.get())), (there, homes));
        assert!(bindings.get(id).is_some() && bindings.is_consistent());
    }
    assert_eq!((bindings.home(2).get(), bindings.home(0).get(), bindings.home(1).get()), (2, 0, 1));
    assert!(Rc::ptr_eq(&bindings.home(2), &first) && Rc::ptr_eq(&bindings.home(0), &other));
}

#[test]
fn binding_to_be_verified_is_returned_once() {
    let (mut bindings, id) = one(WATCHED);
    bindings.mark_one_unverified(id);
    assert_eq!((bindings.next_unverified(), bindings.next_unverified()), (Some((id, LossReason::Changed)), None));
}

/// A key that a client has written may expire in the same event-loop iteration: the hold is then lost because of the
/// write.
#[test]
fn change_counts_more_than_expiry_as_loss_reason() {
    let (mut bindings, id) = one(WATCHED);
    assert!(!bindings.has_work());
    bindings.mark_one_unverified(id);
    bindings.mark_unverified(0, &key(1).name, LossReason::Expired);
    bindings.mark_unverified(0, &key(2).name, LossReason::Forced);
    assert!(bindings.has_work());
    assert_eq!((bindings.next_unverified(), bindings.next_unverified()), (Some((id, LossReason::Changed)), None));
    assert!(!bindings.has_work());
    bindings.mark_unverified(0, &key(1).name, LossReason::Expired);
    bindings.mark_one_unverified(id);
    assert_eq!((bindings.next_unverified(), bindings.next_unverified()), (Some((id, LossReason::Expired)), None));
    bindings.mark_unverified(0, &key(1).name, LossReason::Expired);
    bindings.mark_unverified(0, &key(1).name, LossReason::Forced);
    assert_eq!((bindings.next_unverified(), bindings.next_unverified()), (Some((id, LossReason::Forced)), None));
    assert_eq!((bindings.from(id, id), bindings.from(BindingId(id.0 + 1), BindingId(id.0 + 2))), (None, None));
}

#[test]
fn hold_of_session_is_not_renewed_until_it_reads() {
    let (mut bindings, id) = one(WATCHED);
    let last = bindings.read_by(1);
    let is_unread = |bindings: &Bindings| bindings.is_unread(bindings.get(id).expect("it is there"), last);
    assert!(!is_unread(&bindings), "it has read since the hold began");
    bindings.renewed(id);
    assert!(is_unread(&bindings), "but not since it was renewed");
    assert_eq!(bindings.take_due(10), Some(id));
    bindings.wait_for_reader(id);
    assert_eq!(bindings.next_due(), Some(51), "only its end is of interest");
    bindings.read_by(2);
    assert_eq!(bindings.next_due(), Some(51), "another session has read");
    bindings.read_by(1);
    assert_eq!((bindings.next_due(), bindings.take_due(11), bindings.take_due(11)), (Some(0), Some(id), None));
    assert_eq!(bindings.next_due(), Some(21));
    // A binding that ended meanwhile leaves nothing behind.
    bindings.wait_for_reader(id);
    assert!(bindings.remove(id).is_some() && bindings.is_consistent());
    bindings.read_by(1);
    assert_eq!((bindings.take_due(1000), bindings.next_due()), (None, None));
}

#[test]
fn postponed_renewal_is_due_again_at_once() {
    let (mut bindings, id) = one(WATCHED);
    assert_eq!((bindings.first_due(9), bindings.first_due(10)), (None, Some(id)));
    bindings.postpone(id);
    assert_eq!((bindings.next_due(), bindings.first_due(50), bindings.first_due(51)), (Some(0), None, Some(id)));
    bindings.is_over(id);
    assert_eq!(bindings.first_due(1000), None);
    assert_eq!((bindings.take_due(52), bindings.take_due(52)), (Some(id), None));
}

/// Among the holds that are renewed for a connection, the one with the smallest part of its lease left counts. With
/// replicas, the deadline that they have confirmed counts.
#[test]
fn sure_is_least_part_of_a_lease_left() {
    let mut bindings = Bindings::default();
    let binding = |bindings: &mut Bindings, number, flags, lease, replicas| {
        let (of, deadline) = (new_binding(1, key(number), owner(1), 7), Deadline::At(1000 + lease));
        bindings.bind(NewBinding { flags, lease, replicas, deadline, ..of }, 1000);
        BindingId(bindings.next_id().0 - 1)
    };
    assert_eq!(bindings.sure(1, 1000), 0, "nothing is renewed");
    binding(&mut bindings, 1, EPHEMERAL, 10, 0);
    assert_eq!(bindings.sure(1, 1000), 0, "it is not renewed");
    let long = binding(&mut bindings, 2, WATCHED, 900, 0);
    let short = binding(&mut bindings, 3, WATCHED, 300, 1);
    assert_eq!([900, 1000, 1150, 1300, 9999].map(|since| bindings.sure(1, since)), [1000, 1000, 500, 0, 0]);
    // A renewal counts once it is confirmed.
    bindings.deadline_moved(short, Deadline::At(1500), 1200);
    assert_eq!(bindings.sure(1, 1150), 500);
    let renewal = ConfirmationId(1);
    bindings.asked(short, renewal);
    bindings.answered(short, renewal, Confirms::Yes);
    assert_eq!(bindings.sure(1, 1200), 777, "of 900, 700 are left");
    bindings.deadline_moved(long, Deadline::Never, 1200);
    assert_eq!(bindings.sure(1, 1200), 1000);
    // A confirmation of an earlier renewal does not undo a deadline that was shortened since.
    bindings.asked(short, renewal);
    bindings.deadline_moved(short, Deadline::At(1260), 1200);
    bindings.answered(short, renewal, Confirms::Yes);
    assert_eq!(bindings.sure(1, 1200), 200);
    assert!(bindings.is_consistent());
    // With too many different leases, nothing is sure.
    let of = |number: u64| {
        let of = new_binding(2, LockKey::new(0, &number.to_be_bytes()), owner(1), 7);
        NewBinding { lease: 1000 + number, deadline: Deadline::At(10_000), ..of }
    };
    (0..999).for_each(|number| drop(bindings.bind(of(number), 0)));
    assert_eq!(bindings.sure(2, 0), 1000);
    bindings.bind(of(999), 0);
    assert_eq!(bindings.sure(2, 0), 0);
}

#[test]
fn bindings_follow_clock_steps() {
    let mut bindings = Bindings::default();
    let of = |name: u8, deadline: Deadline, replicas: u32| NewBinding {
        lease: 300,
        replicas,
        deadline,
        holds: 2,
        ..new_binding(1, key(name), owner(1), 7)
    };
    bindings.bind(of(1, Deadline::At(1_300), 0), 1_000);
    bindings.bind(of(2, Deadline::At(1_300), 1), 1_000);
    bindings.bind(of(3, Deadline::Never, 0), 1_000);
    let ids = [BindingId(0), BindingId(1), BindingId(2)];
    assert!(!bindings.any_lags() && !bindings.has_work());
    for by in [60_000, -20_000] {
        bindings.stepped(by);
        assert!(bindings.is_consistent() && bindings.has_work() && ids.iter().all(|id| bindings.lags(*id)));
    }
    let ends = ids.map(|id| bindings.get(id).map(Binding::end));
    assert_eq!(ends, [Deadline::At(41_300), Deadline::At(41_300), Deadline::Never].map(Some));
    // The holds are renewed, and end, as they would have without the steps.
    assert_eq!((bindings.next_due(), bindings.sure(1, 41_000)), (Some(41_100), 1_000));
    // The deadline of a key that has not followed yet is stale.
    bindings.deadline_seen(ids[0], Deadline::At(1_300));
    assert_eq!(bindings.get(ids[0]).map(Binding::end), ends[0]);
    // A hold that is bound to another connection still has to follow. One that a client has just written does not.
    bindings.bind(NewBinding { client: 2, ..of(1, Deadline::At(41_300), 0) }, 41_000);
    assert_eq!(bindings.lagging_of(0, &key(1).name), [BindingId(3)]);
    assert_eq!(bindings.follows(BindingId(3)).map(|(binding, by)| (binding.holds, by)), Some((2, 40_000)));
    bindings.mark_unverified(0, &key(2).name, LossReason::Changed);
    bindings.mark_unverified(0, &key(2).name, LossReason::Expired);
    assert!(bindings.follows(ids[1]).is_none() && !bindings.lags(ids[1]));
    // Bindings that have already followed are skipped.
    assert_eq!(std::iter::from_fn(|| bindings.next_lagging()).collect::<Vec<_>>(), [ids[1], ids[2], BindingId(3)]);
    assert!(bindings.lags(ids[2]) && !bindings.lags(BindingId(3)) && !bindings.any_lags() && bindings.is_consistent());
}

/// A key that expired between a clock step and a step back must be written again, although its deadline is the same.
#[test]
fn clock_step_and_step_back_are_both_followed() {
    let mut bindings = Bindings::default();
    bindings.bind(NewBinding { deadline: Deadline::At(1_300), ..new_binding(1, key(1), owner(1), 7) }, 1_000);
    [60_000, -60_000].into_iter().for_each(|by| bindings.stepped(by));
    assert_eq!(bindings.lagging_of(0, &key(1).name), [BindingId(0)]);
    assert_eq!(bindings.next_lagging(), Some(BindingId(0)));
    let by = bindings.follows(BindingId(0)).map(|(binding, by)| (binding.deadline(), by));
    assert_eq!((by, bindings.lags(BindingId(0))), (Some((Deadline::At(1_300), 0)), false));
}

/// A hold that a client wrote follows no earlier clock step, but follows later ones, even before it is verified.
#[test]
fn hold_that_a_client_wrote_follows_only_later_clock_steps() {
    let mut bindings = Bindings::default();
    bindings.bind(NewBinding { deadline: Deadline::At(1_300), ..new_binding(1, key(1), owner(1), 7) }, 1_000);
    bindings.stepped(200);
    bindings.mark_unverified(0, &key(1).name, LossReason::Changed);
    assert!(bindings.any_lags() && !bindings.lags(BindingId(0)) && bindings.is_touched(BindingId(0)));
    bindings.stepped(300);
    assert_eq!(bindings.follows(BindingId(0)).map(|(_, by)| by), Some(300));
}
