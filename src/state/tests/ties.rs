//! Ties: each is in all its indices, or in none.

use super::{key, new_tie, owner};
use crate::lock::{Deadline, LockKey};
use crate::state::ties::{Before, Confirms};
use crate::state::{ConfirmationId, Discarded, NewTie, Tie, TieId, Ties, Tying, Why};
use proptest::prelude::*;
use std::rc::Rc;

#[derive(Clone, Debug)]
enum Act {
    Tie { client: u64, key: u8, owner: u8, token: u64, watchdog: bool, lease: u64 },
    Untie { key: u8, owner: u8 },
    UntieAll { key: u8 },
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
            |(client, key, owner, token, watchdog, lease)| Act::Tie { client, key, owner, token, watchdog, lease }
        ),
        1 => (keys.clone(), owners.clone()).prop_map(|(key, owner)| Act::Untie { key, owner }),
        1 => keys.clone().prop_map(|key| Act::UntieAll { key }),
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

fn carry_out(ties: &mut Ties, act: Act) {
    let place = |number: u8| in_db(key(number), number);
    match act {
        Act::Tie { client, key, owner: who, token, watchdog, lease } => {
            let tying = Tying { watchdog, ephemeral: !watchdog && token > 1, contention: lease % 2 == 0 };
            let of = new_tie(client, place(key), owner(who), token);
            let new = NewTie { tying, lease, ..of };
            ties.tie(new, 10);
        }
        Act::Untie { key, owner: who } => drop(ties.untie(place(key).db, &place(key).name, &owner(who))),
        Act::UntieAll { key } => drop(ties.untie_all(place(key).db, &place(key).name)),
        Act::Changed { key, owner: who, before, token } => {
            let (key, who) = (place(key), owner(who));
            ties.changed((key.db, &key.name, &who), Some(before), token, Deadline::At(70), 10);
        }
        Act::DeadlineMoved { nth, at } => ties.deadline_moved(TieId(nth), Deadline::At(at), 10),
        Act::DeadlineSeen { nth, at } => ties.deadline_seen(TieId(nth), Deadline::At(at)),
        Act::TakeDue { now } => {
            ties.take_due(now);
        }
        Act::Remove { nth } => drop(ties.remove(TieId(nth))),
        Act::ClientGone { client } => {
            ties.client_gone(client);
        }
        Act::NextEnded => drop(ties.next_ended()),
        Act::Retire => ties.retire_all(&mut Discarded::default()),
        Act::NextRetired => drop(ties.next_retired()),
        Act::Doubt { key } => ties.doubt(place(key).db, &place(key).name, Why::Changed),
        Act::NextDoubtful => {
            ties.next_doubtful();
        }
        Act::Swap => ties.swap(0, 1),
        Act::Contended { key } => drop(ties.take_asking(place(key).db, &place(key).name).cloned()),
    }
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn each_is_in_all_indices_or_in_none(acts in proptest::collection::vec(act(), 0..80)) {
        let mut ties = Ties::default();
        for act in acts {
            carry_out(&mut ties, act.clone());
            prop_assert!(ties.is_consistent(), "{act:?}: {ties:#?}");
        }
    }

    /// Every tie ends in one way, once: nothing is left when all connections are gone and all that ended is taken out.
    #[test]
    fn nothing_is_left_in_the_end(acts in proptest::collection::vec(act(), 0..80)) {
        let mut ties = Ties::default();
        acts.into_iter().for_each(|act| carry_out(&mut ties, act));
        (1..4).for_each(|client| { ties.client_gone(client); });
        while ties.next_ended().is_some() {}
        while ties.next_retired().is_some() {}
        while ties.next_doubtful().is_some() {}
        prop_assert!(ties.is_empty() && !ties.has_work() && ties.next_due().is_none());
    }
}

/// The tie of a hold of 30 ms until 50, made at 0.
fn tied(ties: &mut Ties, client: u64, token: u64, tying: Tying) -> Option<Tie> {
    let new = NewTie { tying, ..new_tie(client, key(1), owner(1), token) };
    match ties.tie(new, 0)? {
        Before::OtherHold(tie) => Some(tie),
        Before::Elsewhere(tie) => {
            assert_eq!(tie.token, token);
            None
        }
    }
}

const WATCHED: Tying = Tying { watchdog: true, ephemeral: false, contention: false };
const EPHEMERAL: Tying = Tying { watchdog: false, ephemeral: true, contention: false };

/// The only tie of this kind, and its name.
fn one(tying: Tying) -> (Ties, TieId) {
    let mut ties = Ties::default();
    assert!(tied(&mut ties, 1, 7, tying).is_none());
    let id = ties.from(TieId(0), ties.next_id()).expect("it is there");
    (ties, id)
}

#[test]
fn a_watched_hold_is_renewed_after_each_third_of_its_lease() {
    let (mut ties, id) = one(WATCHED);
    assert_eq!((ties.len(), ties.is_empty(), ties.next_due()), (1, false, Some(10)));
    assert_eq!(ties.take_due(9), None);
    assert_eq!((ties.take_due(12), ties.next_due()), (Some(id), Some(22)));
    // In time for a deadline that is earlier, and for one that is later: not later than it was.
    ties.deadline_moved(id, Deadline::At(15), 12);
    assert_eq!((ties.next_due(), ties.get(id).map(Tie::end)), (Some(13), Some(Deadline::At(15))));
    ties.deadline_moved(id, Deadline::At(900), 12);
    assert_eq!(ties.next_due(), Some(13));
    // Somebody else's deadline is no reason to renew it, but its end is seen.
    let (mut ties, id) = one(WATCHED);
    ties.deadline_seen(id, Deadline::At(900));
    assert_eq!((ties.next_due(), ties.get(id).map(Tie::end)), (Some(10), Some(Deadline::At(900))));
    ties.deadline_seen(id, Deadline::At(5));
    assert_eq!(ties.next_due(), Some(6));
    ties.deadline_seen(id, Deadline::Never);
    assert_eq!(ties.next_due(), Some(6));
}

#[test]
fn the_end_of_any_other_is_seen() {
    let (mut ties, id) = one(EPHEMERAL);
    assert_eq!(ties.next_due(), Some(51));
    ties.deadline_moved(id, Deadline::At(70), 12);
    assert_eq!((ties.next_due(), ties.take_due(70)), (Some(71), None));
    assert_eq!((ties.take_due(71), ties.next_due()), (Some(id), None));
    ties.deadline_moved(id, Deadline::Never, 12);
    assert_eq!(ties.next_due(), None);
}

#[test]
fn a_hold_that_changes_keeps_its_tie_under_its_new_token() {
    let hold = (0, &*key(1).name, &*owner(1));
    let (mut ties, id) = one(WATCHED);
    assert!(ties.changed(hold, Some(7), 8, Deadline::At(900), 1).is_none());
    assert_eq!(ties.get(id).map(|it| (it.token, it.end())), Some((8, Deadline::At(900))));
    assert!(ties.of(0, hold.1, hold.2, Some(8)).is_some() && ties.of(0, hold.1, hold.2, Some(7)).is_none());
    // That was another hold.
    assert_eq!(ties.changed(hold, Some(7), 9, Deadline::At(900), 1).map(|it| it.token), Some(8));
    assert!(ties.get(id).is_none() && !ties.is_tied(0, hold.1) && ties.client_of(0, hold.1, hold.2).is_none());
}

/// The same hold of the same connection: watched or ephemeral once is so from then on. Otherwise it is tied anew.
#[test]
fn what_a_hold_was_tied_by_before() {
    let tying = |ties: &Ties| ties.of(0, &key(1).name, &owner(1), Some(7)).map(|it| (it.client, it.tying));
    let both = Tying { watchdog: true, ephemeral: true, contention: false };
    for (first, second) in [(WATCHED, EPHEMERAL), (EPHEMERAL, WATCHED)] {
        let (mut ties, _) = one(first);
        assert!(tied(&mut ties, 1, 7, second).is_none());
        assert_eq!((tying(&ties), ties.len()), (Some((1, both)), 1));
        let (mut ties, _) = one(first);
        assert!(tied(&mut ties, 2, 7, second).is_none());
        assert_eq!((tying(&ties), ties.client_of(0, &key(1).name, &owner(1))), (Some((2, second)), Some(2)));
        let (mut ties, _) = one(first);
        assert_eq!(tied(&mut ties, 1, 8, second).map(|it| it.token), Some(7), "another hold");
        assert_eq!((tying(&ties), ties.len()), (None, 1));
    }
}

/// Whoever asked is told that somebody waits, once; and once more if he asks once more.
#[test]
fn contended_is_told_once_for_each_hold() {
    let keeps = Tying { contention: true, ..WATCHED };
    let told = |ties: &mut Ties| ties.take_asking(0, &key(1).name).map(|it| it.client);
    let (mut ties, _) = one(keeps);
    assert!(ties.asks(0, &key(1).name) && !ties.asks(1, &key(1).name) && ties.kept() == 1);
    assert_eq!((told(&mut ties), told(&mut ties), ties.kept()), (Some(1), None, 0));
    // Tied once more in another way, it was told; unless that asks, too, or is another connection's.
    tied(&mut ties, 1, 7, EPHEMERAL);
    assert_eq!(told(&mut ties), None);
    tied(&mut ties, 1, 7, keeps);
    assert_eq!(told(&mut ties), Some(1));
    tied(&mut ties, 2, 7, WATCHED);
    assert_eq!(told(&mut ties), None);
    // To ask changes nothing else of what the tie promises.
    ties.tie(
        NewTie { tying: Tying { contention: true, ..Tying::NONE }, lease: 7, ..new_tie(2, key(1), owner(1), 7) },
        0,
    );
    let tie = ties.of(0, &key(1).name, &owner(1), Some(7)).map(|it| (it.tying, it.lease));
    assert_eq!(tie, Some((keeps, 30)));
    assert_eq!(told(&mut ties), Some(2));
    tied(&mut ties, 2, 7, keeps);
    // It goes along with its database, and ends with the hold.
    ties.swap(0, 1);
    assert!(ties.asks(1, &key(1).name) && !ties.asks(0, &key(1).name));
    ties.swap(0, 1);
    ties.untie(0, &key(1).name, &owner(1));
    assert_eq!((told(&mut ties), ties.kept()), (None, 0));
    // Another hold takes the place of one that has ended unnoticed, and asks by itself.
    tied(&mut ties, 1, 7, keeps);
    ties.tie(NewTie { tying: keeps, ..new_tie(3, key(1), owner(2), 8) }, 0);
    ties.untie(0, &key(1).name, &owner(1));
    assert_eq!((told(&mut ties), ties.kept()), (Some(3), 0));
}

#[test]
fn a_tie_lives_as_long_as_its_connection() {
    let (mut ties, id) = one(WATCHED);
    let tie = ties.get(id).expect("it is there").clone();
    assert!(ties.is_live(&tie));
    assert!(!ties.client_gone(2) && ties.is_live(&tie));
    assert!(ties.client_gone(1) && !ties.is_live(&tie));
    assert!(!ties.client_gone(1));
}

/// What a watched hold may count on is what its replicas have confirmed, whatever was written since.
#[test]
fn only_a_confirmation_moves_the_confirmed_deadline() {
    let mut ties = Ties::default();
    ties.tie(NewTie { replicas: 1, deadline: Deadline::At(30), ..new_tie(1, key(1), owner(1), 7) }, 0);
    let id = ties.take_due(10).expect("it is due");
    let end = |ties: &Ties| ties.get(id).map(Tie::end);
    let [first, second] = [1, 2].map(ConfirmationId);
    ties.deadline_moved(id, Deadline::At(40), 10);
    ties.asked(id, first);
    assert!(end(&ties) == Some(Deadline::At(30)) && ties.get(id).is_some_and(Tie::is_being_confirmed));
    ties.answered(id, first, Confirms::No);
    assert!(end(&ties) == Some(Deadline::At(30)) && !ties.get(id).is_some_and(Tie::is_being_confirmed));
    ties.deadline_moved(id, Deadline::At(50), 20);
    ties.asked(id, second);
    ties.answered(id, first, Confirms::Yes);
    assert_eq!(end(&ties), Some(Deadline::At(30)), "that was another one");
    // A shorter one, and a longer one again: neither is known to be confirmed when the first is.
    ties.deadline_moved(id, Deadline::At(45), 21);
    ties.deadline_moved(id, Deadline::At(60), 21);
    ties.answered(id, second, Confirms::Yes);
    assert_eq!(end(&ties), Some(Deadline::At(45)));
    ties.deadline_seen(id, Deadline::At(42));
    assert_eq!(end(&ties), Some(Deadline::At(42)));
    // It is due at its end at the latest, also when the next renewal would come later.
    ties.take_due(41);
    assert_eq!(ties.next_due(), Some(43));
}

#[test]
fn all_ties_of_a_lock_at_once() {
    let mut ties = Ties::default();
    let of = |name: u8, who: u8| new_tie(1, key(name), owner(who), 7);
    assert_eq!((ties.len(), ties.is_empty()), (0, true));
    assert!(!ties.is_tied(0, &key(1).name));
    for new in [of(1, 1), of(1, 2), of(2, 1)] {
        assert!(ties.tie(new, 0).is_none());
    }
    assert!(!ties.is_empty() && ties.len() == 3 && ties.is_tied(0, &key(1).name) && !ties.is_tied(1, &key(1).name));
    let mut owners: Vec<_> = ties.untie_all(0, &key(1).name).into_iter().map(|tie| tie.owner).collect();
    owners.sort();
    assert_eq!(owners, [owner(1), owner(2)]);
    assert!(ties.len() == 1 && !ties.is_tied(0, &key(1).name) && ties.is_tied(0, &key(2).name));
    assert!(ties.untie_all(0, &key(1).name).is_empty());
}

/// Those of a lock whose connection has ended are found, once after each end.
#[test]
fn what_ends_with_a_connection_is_found_at_the_next_look() {
    let mut ties = Ties::default();
    let broken = |ties: &mut Ties| {
        let broken = ties.take_broken(0, &key(1).name).into_iter().map(|tie| tie.client);
        broken.collect::<Vec<u64>>()
    };
    let tie = |ties: &mut Ties, client: u8, tying| {
        ties.tie(NewTie { tying, ..new_tie(client.into(), key(1), owner(client), 7) }, 0);
    };
    [1, 2, 3].into_iter().for_each(|client| tie(&mut ties, client, EPHEMERAL));
    tie(&mut ties, 4, WATCHED);
    assert!(broken(&mut ties).is_empty());
    for client in [1, 2] {
        assert!(ties.client_gone(client) && !ties.client_gone(client));
        assert_eq!((broken(&mut ties), broken(&mut ties)), (vec![client], vec![]));
    }
    // One that is tied after a look, too; and nothing that only was renewed.
    tie(&mut ties, 5, EPHEMERAL);
    assert!([4, 3, 5].into_iter().all(|client| ties.client_gone(client)));
    let mut both = broken(&mut ties);
    both.sort_unstable();
    assert_eq!((both, broken(&mut ties)), (vec![3, 5], vec![]));
    assert!(ties.is_consistent() && ties.len() == 1);
}

/// What is tied in a database, or may be taken back there, follows it.
#[test]
fn databases_that_are_swapped() {
    let (mut ties, id) = one(WATCHED);
    let [first, other] = [0, 1].map(|db| ties.home(db));
    let at = |ties: &Ties| [0, 1, 2].map(|db| ties.of(db, &key(1).name, &owner(1), Some(7)).map(|it| it.key().db));
    assert_eq!(at(&ties), [Some(0), None, None]);
    for (one, two, there, homes) in [(0, 1, [None, Some(1), None], (1, 0)), (1, 2, [None, None, Some(2)], (2, 0))] {
        ties.swap(one, two);
        assert_eq!((at(&ties), (first.get(), other.get())), (there, homes));
        assert!(ties.get(id).is_some() && ties.is_consistent());
    }
    assert_eq!((ties.home(2).get(), ties.home(0).get(), ties.home(1).get()), (2, 0, 1));
    assert!(Rc::ptr_eq(&ties.home(2), &first) && Rc::ptr_eq(&ties.home(0), &other));
}

#[test]
fn one_in_doubt() {
    let (mut ties, id) = one(WATCHED);
    ties.doubt_one(id);
    assert_eq!((ties.next_doubtful(), ties.next_doubtful()), (Some((id, Why::Changed)), None));
}

/// What somebody wrote may expire in the same turn: then it is lost since that was written.
#[test]
fn those_in_doubt_come_once_and_a_change_counts_more_than_an_expiry() {
    let (mut ties, id) = one(WATCHED);
    assert!(!ties.has_work());
    ties.doubt_one(id);
    ties.doubt(0, &key(1).name, Why::Expired);
    ties.doubt(0, &key(2).name, Why::Forced);
    assert!(ties.has_work());
    assert_eq!((ties.next_doubtful(), ties.next_doubtful()), (Some((id, Why::Changed)), None));
    assert!(!ties.has_work());
    ties.doubt(0, &key(1).name, Why::Expired);
    ties.doubt_one(id);
    assert_eq!((ties.next_doubtful(), ties.next_doubtful()), (Some((id, Why::Expired)), None));
    ties.doubt(0, &key(1).name, Why::Expired);
    ties.doubt(0, &key(1).name, Why::Forced);
    assert_eq!((ties.next_doubtful(), ties.next_doubtful()), (Some((id, Why::Forced)), None));
    assert_eq!((ties.from(id, id), ties.from(TieId(id.0 + 1), TieId(id.0 + 2))), (None, None));
}

#[test]
fn what_a_session_holds_waits_for_its_reader() {
    let (mut ties, id) = one(WATCHED);
    let last = ties.read_by(1);
    let is_unread = |ties: &Ties| ties.is_unread(ties.get(id).expect("it is there"), last);
    assert!(!is_unread(&ties), "it has read since the hold began");
    ties.renewed(id);
    assert!(is_unread(&ties), "but not since it was renewed");
    assert_eq!(ties.take_due(10), Some(id));
    ties.wait_for_reader(id);
    assert_eq!(ties.next_due(), Some(51), "only its end is of interest");
    ties.read_by(2);
    assert_eq!(ties.next_due(), Some(51), "somebody else has read");
    ties.read_by(1);
    assert_eq!((ties.next_due(), ties.take_due(11), ties.take_due(11)), (Some(0), Some(id), None));
    assert_eq!(ties.next_due(), Some(21));
    // Nothing is left of one that ended meanwhile.
    ties.wait_for_reader(id);
    assert!(ties.remove(id).is_some() && ties.is_consistent());
    ties.read_by(1);
    assert_eq!((ties.take_due(1000), ties.next_due()), (None, None));
}

#[test]
fn what_is_due_when_nothing_can_be_renewed() {
    let (mut ties, id) = one(WATCHED);
    assert_eq!((ties.first_due(9), ties.first_due(10)), (None, Some(id)));
    ties.put_off(id);
    assert_eq!((ties.next_due(), ties.first_due(50), ties.first_due(51)), (Some(0), None, Some(id)));
    ties.is_over(id);
    assert_eq!(ties.first_due(1000), None);
    assert_eq!((ties.take_due(52), ties.take_due(52)), (Some(id), None));
}

/// Of what is renewed for a connection, the hold counts that has least of its lease left; with replicas, by the deadline that
/// they have confirmed.
#[test]
fn what_is_sure() {
    let mut ties = Ties::default();
    let tie = |ties: &mut Ties, number, tying, lease, replicas| {
        let (of, deadline) = (new_tie(1, key(number), owner(1), 7), Deadline::At(1000 + lease));
        ties.tie(NewTie { tying, lease, replicas, deadline, ..of }, 1000);
        TieId(ties.next_id().0 - 1)
    };
    assert_eq!(ties.sure(1, 1000), 0, "nothing is renewed");
    tie(&mut ties, 1, EPHEMERAL, 10, 0);
    assert_eq!(ties.sure(1, 1000), 0, "it is not renewed");
    let long = tie(&mut ties, 2, WATCHED, 900, 0);
    let short = tie(&mut ties, 3, WATCHED, 300, 1);
    assert_eq!([900, 1000, 1150, 1300, 9999].map(|since| ties.sure(1, since)), [1000, 1000, 500, 0, 0]);
    // A renewal counts once it is confirmed.
    ties.deadline_moved(short, Deadline::At(1500), 1200);
    assert_eq!(ties.sure(1, 1150), 500);
    let renewal = ConfirmationId(1);
    ties.asked(short, renewal);
    ties.answered(short, renewal, Confirms::Yes);
    assert_eq!(ties.sure(1, 1200), 777, "of 900, 700 are left");
    ties.deadline_moved(long, Deadline::Never, 1200);
    assert_eq!(ties.sure(1, 1200), 1000);
    // What was shortened since is not confirmed by what was asked before.
    ties.asked(short, renewal);
    ties.deadline_moved(short, Deadline::At(1260), 1200);
    ties.answered(short, renewal, Confirms::Yes);
    assert_eq!(ties.sure(1, 1200), 200);
    assert!(ties.is_consistent());
    // Of too many different leases nothing is said.
    let of = |number: u64| {
        let of = new_tie(2, LockKey::new(0, &number.to_be_bytes()), owner(1), 7);
        NewTie { lease: 1000 + number, deadline: Deadline::At(10_000), ..of }
    };
    (0..999).for_each(|number| drop(ties.tie(of(number), 0)));
    assert_eq!(ties.sure(2, 0), 1000);
    ties.tie(of(999), 0);
    assert_eq!(ties.sure(2, 0), 0);
}

#[test]
fn ties_go_along_with_a_step_of_the_clock() {
    let mut ties = Ties::default();
    let of = |name: u8, deadline: Deadline, replicas: u32| NewTie {
        lease: 300,
        replicas,
        deadline,
        holds: 2,
        ..new_tie(1, key(name), owner(1), 7)
    };
    ties.tie(of(1, Deadline::At(1_300), 0), 1_000);
    ties.tie(of(2, Deadline::At(1_300), 1), 1_000);
    ties.tie(of(3, Deadline::Never, 0), 1_000);
    let ids = [TieId(0), TieId(1), TieId(2)];
    assert!(!ties.any_lags() && !ties.has_work());
    for by in [60_000, -20_000] {
        ties.stepped(by);
        assert!(ties.is_consistent() && ties.has_work() && ids.iter().all(|id| ties.lags(*id)));
    }
    let ends = ids.map(|id| ties.get(id).map(Tie::end));
    assert_eq!(ends, [Deadline::At(41_300), Deadline::At(41_300), Deadline::Never].map(Some));
    // They are renewed when they would have been, and last as long as they would have.
    assert_eq!((ties.next_due(), ties.sure(1, 41_000)), (Some(41_100), 1_000));
    // What a key says that has not followed yet is old.
    ties.deadline_seen(ids[0], Deadline::At(1_300));
    assert_eq!(ties.get(ids[0]).map(Tie::end), ends[0]);
    // A hold that is tied to another connection has as far to go; one that others have just written stays.
    ties.tie(NewTie { client: 2, ..of(1, Deadline::At(41_300), 0) }, 41_000);
    assert_eq!(ties.lagging_of(0, &key(1).name), [TieId(3)]);
    assert_eq!(ties.follows(TieId(3)).map(|(tie, by)| (tie.holds, by)), Some((2, 40_000)));
    ties.doubt(0, &key(2).name, Why::Changed);
    ties.doubt(0, &key(2).name, Why::Expired);
    assert!(ties.follows(ids[1]).is_none() && !ties.lags(ids[1]));
    // Those that have followed with their lock are passed over.
    assert_eq!(std::iter::from_fn(|| ties.next_lagging()).collect::<Vec<_>>(), [ids[1], ids[2], TieId(3)]);
    assert!(ties.lags(ids[2]) && !ties.lags(TieId(3)) && !ties.any_lags() && ties.is_consistent());
}

/// A key that expired between a step of the clock and one back has to be written anew, although its deadline is the same.
#[test]
fn a_step_of_the_clock_and_one_back_are_two() {
    let mut ties = Ties::default();
    ties.tie(NewTie { deadline: Deadline::At(1_300), ..new_tie(1, key(1), owner(1), 7) }, 1_000);
    [60_000, -60_000].into_iter().for_each(|by| ties.stepped(by));
    assert_eq!(ties.lagging_of(0, &key(1).name), [TieId(0)]);
    assert_eq!(ties.next_lagging(), Some(TieId(0)));
    let by = ties.follows(TieId(0)).map(|(tie, by)| (tie.deadline(), by));
    assert_eq!((by, ties.lags(TieId(0))), (Some((Deadline::At(1_300), 0)), false));
}
