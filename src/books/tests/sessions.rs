//! Mailboxes: the counters are what is stored, each event is read once, and nothing is left of what was cancelled.

use super::{key, owner, undo};
use crate::books::owed::{About, Purpose};
use crate::books::sessions::{Claimed, Remains};
use crate::books::{Answer, Kind, Outcome, Sessions};
use crate::lock::LockKey;
use crate::server::callbacks::Ticket;
use crate::server::clock::Now;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

#[derive(Clone, Copy, Debug)]
enum End {
    Granted,
    TimedOut,
    Refused,
}

#[derive(Clone, Debug)]
enum Act {
    Open(u64),
    Asks { client: u64, owner: u8, keys: Vec<u8>, purpose: Purpose },
    Ends { nth: usize, end: End },
    Read(u64),
    Cancel { client: u64, owner: u8, key: u8 },
    Gone(u64),
    Remains,
}

fn act() -> impl Strategy<Value = Act> {
    let (clients, owners, keys) = (1..4_u64, 0..3_u8, 0..4_u8);
    let purpose = prop_oneof![3 => Just(Purpose::Acquire), 1 => Just(Purpose::Renew)];
    let end = prop_oneof![3 => Just(End::Granted), 1 => Just(End::TimedOut), 1 => Just(End::Refused)];
    let some_keys = proptest::collection::btree_set(keys.clone(), 1..3).prop_map(|keys| keys.into_iter().collect());
    prop_oneof![
        2 => clients.clone().prop_map(Act::Open),
        6 => (clients.clone(), owners.clone(), some_keys, purpose)
            .prop_map(|(client, owner, keys, purpose)| Act::Asks { client, owner, keys, purpose }),
        4 => (0..10_usize, end).prop_map(|(nth, end)| Act::Ends { nth, end }),
        3 => clients.clone().prop_map(Act::Read),
        1 => (clients.clone(), owners, keys).prop_map(|(client, owner, key)| Act::Cancel { client, owner, key }),
        1 => clients.prop_map(Act::Gone),
        2 => Just(Act::Remains),
    ]
}

/// What there should be.
#[derive(Debug, Default)]
struct Plain {
    gone: BTreeSet<u64>,
    waiting: Vec<(u64, Ticket, About)>,
    /// What each session has not read: of whom, and about what.
    mail: BTreeMap<u64, Vec<About>>,
    left: BTreeSet<Ticket>,
    grants_left: usize,
    tickets: u64,
}

impl Plain {
    fn sizes(&self) -> (usize, usize, usize) {
        (self.mail.len(), self.waiting.len(), self.mail.values().map(Vec::len).sum())
    }
}

fn tell(sessions: &mut Sessions, plain: &mut Plain, nth: usize, end: End) {
    if plain.waiting.is_empty() {
        return;
    }
    let (client, ticket, about) = plain.waiting.remove(nth % plain.waiting.len());
    let outcome = match end {
        End::Granted => Outcome::Granted(Answer::Token(ticket.0), undo(ticket.0, &about.owner, &about.keys, (0, 1, 1))),
        End::TimedOut => Outcome::TimedOut,
        End::Refused => Outcome::Refused("ERR".into()),
    };
    assert!(sessions.tell(client, ticket, about.clone(), outcome, Now { micros: ticket.0 }).is_ok());
    plain.mail.get_mut(&client).expect("open").push(about);
}

fn cancel(sessions: &mut Sessions, plain: &mut Plain, client: u64, who: u8, of: &LockKey) {
    if !sessions.is_open(client) {
        return;
    }
    let who = owner(who);
    let concerns = |about: &About| about.owner == who && about.keys.contains(of);
    let cancelled = sessions.cancel(client, &who, of);
    let expected: BTreeSet<Ticket> =
        plain.waiting.iter().filter(|it| it.0 == client && concerns(&it.2)).map(|it| it.1).collect();
    assert_eq!(cancelled.tickets.iter().copied().collect::<BTreeSet<_>>(), expected);
    for (client, ticket, about) in plain.waiting.extract_if(.., |it| expected.contains(&it.1)) {
        sessions.remove_wait(client, &about, ticket);
    }
    sessions.forget_events(client, &who, of);
    plain.mail.get_mut(&client).expect("open").retain(|about| !concerns(about));
    assert_eq!(sessions.claimed(client, &who, std::slice::from_ref(of)), Claimed::Cancelled);
}

fn carry_out(sessions: &mut Sessions, plain: &mut Plain, act: Act) {
    match act {
        // Ids of connections are never used twice.
        Act::Open(client) if plain.gone.contains(&client) => {}
        Act::Open(client) => {
            sessions.open(client);
            plain.mail.entry(client).or_default();
        }
        Act::Asks { client, owner: who, keys, purpose } => {
            let keys: Rc<[LockKey]> = keys.into_iter().map(key).collect();
            let about = About { keys, owner: owner(who), purpose };
            let is_new = sessions.claimed(client, &about.owner, &about.keys) == Claimed::Nothing;
            if sessions.is_open(client) && (is_new || purpose == Purpose::Renew) {
                plain.tickets += 1;
                let ticket = Ticket(plain.tickets);
                sessions.add_wait(client, &about, ticket);
                plain.waiting.push((client, ticket, about));
            }
        }
        Act::Ends { nth, end } => tell(sessions, plain, nth, end),
        Act::Read(client) => {
            let expected = plain.mail.get_mut(&client).filter(|mail| !mail.is_empty()).map(|mail| mail.remove(0));
            let read = sessions.read(client).map(|(event, unheard)| {
                assert_eq!(matches!(event.kind, Kind::Granted(_)), unheard.is_some());
                (event.keys, event.owner)
            });
            assert_eq!(read, expected.map(|about| (about.keys, about.owner)));
        }
        Act::Cancel { client, owner, key: number } => cancel(sessions, plain, client, owner, &key(number)),
        Act::Gone(client) => {
            plain.gone.insert(client);
            assert_eq!(sessions.client_gone(client), plain.mail.remove(&client).is_some());
            plain.left.extend(plain.waiting.extract_if(.., |it| it.0 == client).map(|it| it.1));
        }
        Act::Remains => match sessions.next_remains() {
            Some(Remains::Waits(tickets)) => tickets.iter().for_each(|ticket| {
                plain.left.remove(ticket);
            }),
            Some(Remains::Grant(_)) => plain.grants_left += 1,
            None => assert!(plain.left.is_empty(), "{plain:?}"),
        },
    }
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn the_counters_are_what_is_stored(acts in proptest::collection::vec(act(), 0..100)) {
        let (mut sessions, mut plain) = (Sessions::default(), Plain::default());
        for act in acts {
            carry_out(&mut sessions, &mut plain, act);
            prop_assert_eq!(sessions.sizes(), plain.sizes());
            prop_assert!(sessions.is_consistent(), "{:#?}", sessions);
        }
        // In the end all of them go, and nothing is left.
        for client in 1..4 {
            carry_out(&mut sessions, &mut plain, Act::Gone(client));
        }
        while sessions.has_departed() {
            carry_out(&mut sessions, &mut plain, Act::Remains);
        }
        prop_assert!(plain.left.is_empty());
        prop_assert_eq!(sessions.sizes(), (0, 0, 0));
        prop_assert!(sessions.is_consistent());
    }
}

#[test]
fn how_large_the_next_event_is() {
    let mut sessions = Sessions::default();
    sessions.open(1);
    assert_eq!((sessions.next_size(1), sessions.unread(1), sessions.load(1)), (0, 0, 0));
    let about = About { keys: Rc::from([key(1), key(2)]), owner: owner(1), purpose: Purpose::Acquire };
    sessions.add_wait(1, &about, Ticket(1));
    assert_eq!(sessions.load(1), 1);
    assert!(sessions.tell(1, Ticket(1), about, Outcome::TimedOut, Now { micros: 0 }).is_ok());
    assert_eq!((sessions.next_size(1), sessions.unread(1), sessions.load(1)), (2, 1, 1));
    assert_eq!((sessions.next_size(2), sessions.unread(2), sessions.load(2)), (0, 0, 0));
}

/// A grant of these keys that a session was told of.
fn granted(sessions: &mut Sessions, client: u64, serial: u64, who: u8, keys: &[LockKey]) {
    let about = About { keys: keys.into(), owner: owner(who), purpose: Purpose::Acquire };
    let undo = undo(serial, &about.owner, keys, (0, 1, 1));
    sessions.open(client);
    sessions.add_wait(client, &about, Ticket(serial));
    let outcome = Outcome::Granted(Answer::Token(serial), undo);
    assert!(sessions.tell(client, Ticket(serial), about, outcome, Now { micros: 0 }).is_ok());
}

#[test]
fn grants_that_are_forgotten_are_rolled_back() {
    let mut sessions = Sessions::default();
    let elsewhere = LockKey { db: 1, ..key(1) };
    granted(&mut sessions, 1, 1, 1, &[key(1)]);
    granted(&mut sessions, 1, 2, 1, &[key(2), key(1)]);
    granted(&mut sessions, 1, 3, 1, &[key(2)]);
    granted(&mut sessions, 1, 4, 2, &[key(1)]);
    granted(&mut sessions, 1, 5, 1, &[elsewhere]);
    granted(&mut sessions, 2, 6, 1, &[key(1)]);
    let undos = sessions.forget_events(1, &owner(1), &key(1));
    assert_eq!(undos.iter().map(|undo| undo.serial).collect::<BTreeSet<_>>(), BTreeSet::from([1, 2]));
    assert_eq!((sessions.unread(1), sessions.unread(2)), (3, 1));
    assert!(sessions.forget_events(1, &owner(1), &key(1)).is_empty());
}

/// An owner may be told by one connection what it has not read on another, or on one that has ended.
#[test]
fn unread_grants_are_found_on_any_session() {
    let mut sessions = Sessions::default();
    granted(&mut sessions, 1, 1, 1, &[key(1)]);
    granted(&mut sessions, 2, 2, 1, &[key(2), key(1)]);
    granted(&mut sessions, 2, 3, 2, &[key(1)]);
    granted(&mut sessions, 3, 4, 1, &[key(1)]);
    let found = |sessions: &mut Sessions, number: u8| {
        let mut serials = BTreeSet::new();
        sessions.unread_grants(&key(number).name, &owner(1), |undo| {
            serials.insert(undo.serial);
        });
        serials
    };
    assert_eq!(found(&mut sessions, 1), BTreeSet::from([1, 2, 4]));
    assert!(sessions.client_gone(2) && sessions.client_gone(3));
    assert_eq!((found(&mut sessions, 1), found(&mut sessions, 2)), (BTreeSet::from([1, 2, 4]), BTreeSet::from([2])));
    sessions.unread_grants(&key(1).name, &owner(1), |undo| undo.acknowledge(&key(1).name, 1));
    let left = std::iter::from_fn(|| sessions.next_remains()).filter_map(|it| match it {
        Remains::Grant(undo) => Some((undo.serial, undo.steps.iter().map(|step| step.told).collect::<Vec<_>>())),
        Remains::Waits(_) => None,
    });
    assert_eq!(left.collect::<Vec<_>>(), [(2, vec![0, 1]), (3, vec![0]), (4, vec![1])]);
}

/// So whoever gives up one of several keys gives up all of them.
#[test]
fn what_was_granted_together_is_remembered() {
    let mut sessions = Sessions::default();
    granted(&mut sessions, 1, 1, 1, &[key(1), key(2)]);
    granted(&mut sessions, 1, 2, 1, &[key(3)]);
    let mut together = |who: u8, number: u8| sessions.cancel(1, &owner(who), &key(number)).granted_together;
    let both: Rc<[LockKey]> = Rc::from([key(1), key(2)]);
    assert_eq!([together(1, 1), together(1, 2)], [Some(both.clone()), Some(both)]);
    assert_eq!([together(1, 3), together(2, 1)], [None, None]);
}

#[test]
fn the_newest_thousand_cancelled_owners_are_remembered() {
    let mut sessions = Sessions::default();
    sessions.open(1);
    let key = |number: u32| LockKey::new(0, &number.to_be_bytes());
    let cancel = |sessions: &mut Sessions, number| drop(sessions.cancel(1, &owner(1), &key(number)));
    let is_known = |sessions: &Sessions, number| {
        sessions.claimed(1, &owner(1), std::slice::from_ref(&key(number))) == Claimed::Cancelled
    };
    (0..1000).for_each(|number| cancel(&mut sessions, number));
    assert!((0..1000).all(|number| is_known(&sessions, number)));
    // The first one becomes the newest, and takes no second place.
    cancel(&mut sessions, 0);
    assert!((0..1000).all(|number| is_known(&sessions, number)));
    cancel(&mut sessions, 1000);
    assert!(!is_known(&sessions, 1));
    assert!([0, 2, 999, 1000].iter().all(|number| is_known(&sessions, *number)));
}
