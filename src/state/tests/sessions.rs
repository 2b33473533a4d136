//! Mailboxes: the counters are what is stored, each event is read once, and nothing is left of what was cancelled.

use super::{TERMS, granted as grant, key, new_tie, owner};
use crate::lock::{Deadline, LockKey, Token};
use crate::server::callbacks::Ticket;
use crate::server::clock::Now;
use crate::state::owed::{About, Purpose};
use crate::state::sessions::{Claimed, Remains, hold_bytes};
use crate::state::{GrantId, Kind, NewTie, Outcome, Sessions, Ties, Tying, Why};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

const END: Deadline = Deadline::At(100);

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
    let purpose =
        prop_oneof![3 => Just(super::ACQUIRE), 1 => Just(Purpose::Renew { terms: TERMS, token: None, fence: None })];
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
        End::Granted => grant(ticket.0),
        End::TimedOut => Outcome::TimedOut,
        End::Refused => Outcome::Refused("ERR".into()),
    };
    assert!(sessions.tell(client, about.clone(), (outcome, END), Now { micros: ticket.0 }).is_ok());
    plain.mail.get_mut(&client).expect("open").push(about);
}

fn cancel(sessions: &mut Sessions, plain: &mut Plain, client: u64, who: u8, of: &LockKey) {
    if !sessions.is_open(client) {
        return;
    }
    let who = owner(who);
    let concerns = |about: &About| about.owner == who && about.keys.contains(of);
    let waits = sessions.waiting(client, &who, of);
    let expected: BTreeSet<Ticket> =
        plain.waiting.iter().filter(|it| it.0 == client && concerns(&it.2)).map(|it| it.1).collect();
    assert_eq!(waits.into_iter().collect::<BTreeSet<_>>(), expected);
    for (client, _, about) in plain.waiting.extract_if(.., |it| expected.contains(&it.1)) {
        sessions.remove_wait(client, &about);
    }
    sessions.forget_events(client, &who, of);
    plain.mail.get_mut(&client).expect("open").retain(|about| !concerns(about));
    assert_eq!(sessions.claimed(client, &who, std::slice::from_ref(of)), Claimed::Nothing);
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
            if sessions.is_open(client) && is_new {
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
                assert_eq!(matches!(event.kind, Kind::Granted(..)), unheard.is_some());
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
            Some(Remains::Wait(ticket)) => drop(plain.left.remove(&ticket)),
            Some(Remains::Grant(_)) => plain.grants_left += 1,
            Some(Remains::Event) => {}
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
    assert_eq!((sessions.next_size(1), sessions.unread(1), sessions.bytes(1)), (0, 0, 0));
    let about = About { keys: Rc::from([key(1), key(2)]), owner: owner(1), purpose: super::ACQUIRE };
    sessions.add_wait(1, &about, Ticket(1));
    let (waiting, holds) = (sessions.bytes(1), [1, 2].map(|it| hold_bytes(&owner(1), &key(it).name)));
    assert!(sessions.tell(1, about, (Outcome::TimedOut, END), Now { micros: 0 }).is_ok());
    assert_eq!((sessions.next_size(1), sessions.unread(1)), (2, 1));
    assert_eq!(sessions.bytes(1) + holds.iter().sum::<usize>(), waiting, "the event takes what was reserved for it");
    assert!(sessions.read(1).is_some());
    assert_eq!([1, 2].map(|client| (sessions.next_size(client), sessions.bytes(client))), [(0, 0), (0, 0)]);
}

/// A grant of these keys that a session was told of.
fn granted(sessions: &mut Sessions, client: u64, serial: u64, who: u8, keys: &[LockKey]) {
    let about = About { keys: keys.into(), owner: owner(who), purpose: super::ACQUIRE };
    sessions.open(client);
    sessions.add_wait(client, &about, Ticket(serial));
    assert!(sessions.tell(client, about, (grant(serial), END), Now { micros: 0 }).is_ok());
}

#[test]
fn grants_that_are_forgotten_are_taken_back() {
    let mut sessions = Sessions::default();
    let elsewhere = LockKey { db: 1, ..key(1) };
    granted(&mut sessions, 1, 1, 1, &[key(1)]);
    granted(&mut sessions, 1, 2, 1, &[key(2), key(1)]);
    granted(&mut sessions, 1, 3, 1, &[key(2)]);
    granted(&mut sessions, 1, 4, 2, &[key(1)]);
    granted(&mut sessions, 1, 5, 1, &[elsewhere]);
    granted(&mut sessions, 2, 6, 1, &[key(1)]);
    assert_eq!(sessions.forget_events(1, &owner(1), &key(1)), [GrantId(1), GrantId(2)]);
    assert_eq!((sessions.unread(1), sessions.unread(2)), (3, 1));
    assert!(sessions.forget_events(1, &owner(1), &key(1)).is_empty());
}

/// What `LOCK.CANCEL` of key 1 makes of events: what was granted in one step with it goes, too.
fn give_up(sessions: &mut Sessions, ties: &mut Ties) -> Vec<GrantId> {
    let mut unheard = sessions.forget_events(1, &owner(1), &key(1));
    let (_, together) = ties.take_together(1, &owner(1), &key(1));
    for of_step in together.iter() {
        let forget = |key| sessions.forget_events_of(1, &owner(1), key, &[of_step.token].into());
        unheard.extend(of_step.keys.iter().flat_map(forget));
    }
    unheard
}

/// The session loses this lock, which was tied to it: granted with keys 1 and 2, or apart from them.
fn loses(sessions: &mut Sessions, ties: &mut Ties, of: u8, token: Token, together: Option<Token>) {
    ties.tie(NewTie { tying: Tying::NONE, together, ..new_tie(1, key(of), owner(1), token) }, 0);
    if let Some(token) = together {
        ties.granted_together(&owner(1), token, Rc::from([key(1), key(2)]));
    }
    let tie = ties.untie(0, &key(of).name, &owner(1)).expect("it is tied");
    sessions.lost(&tie, Why::Changed);
}

/// Of several locks one is lost, another was re-entered: giving up the first gives up the re-entry, unread as both are; but
/// not if they were granted apart, though a token that others have written is the same.
#[test]
fn a_re_entry_that_is_forgotten_with_a_loss_is_taken_back() {
    for together in [Some(7), None] {
        let (mut ties, mut sessions) = (Ties::default(), Sessions::default());
        granted(&mut sessions, 1, 7, 1, &[key(2)]);
        loses(&mut sessions, &mut ties, 1, 7, together);
        let taken_back: Vec<GrantId> = together.map(|_| GrantId(7)).into_iter().collect();
        assert_eq!(give_up(&mut sessions, &mut ties), taken_back);
        assert_eq!(sessions.unread(1), usize::from(together.is_none()));
    }
}

/// With what was granted goes what was lost of it, of its other keys as well, and nothing of another grant.
#[test]
fn the_losses_of_a_grant_go_with_it() {
    for named in [1, 2] {
        let mut ties = Ties::default();
        let mut sessions = Sessions::default();
        granted(&mut sessions, 1, 7, 1, &[key(1), key(2)]);
        for (number, token, together) in [(1, 7, Some(7)), (2, 7, Some(7)), (2, 8, None)] {
            loses(&mut sessions, &mut ties, number, token, together);
        }
        if named == 2 {
            sessions.read(1); // the grant
        }
        give_up(&mut sessions, &mut ties);
        assert!(sessions.is_consistent());
        let left = sessions.read(1).map(|(event, _)| event.kind);
        assert_eq!((left, sessions.unread(1)), (Some(Kind::Lost(8, Why::Changed)), 0));
    }
}

/// What was not read yet is refused after all, in its place.
#[test]
fn an_unread_grant_can_be_refused() {
    let mut sessions = Sessions::default();
    granted(&mut sessions, 1, 1, 1, &[key(1), key(2)]);
    granted(&mut sessions, 1, 2, 2, &[key(1)]);
    granted(&mut sessions, 2, 3, 1, &[key(1)]);
    assert!(sessions.refuse_unread(1, GrantId(1), (&owner(1), &key(2)), "UNCONFIRMED"));
    assert!(!sessions.refuse_unread(1, GrantId(1), (&owner(1), &key(2)), "UNCONFIRMED"));
    assert!(sessions.is_consistent());
    let (event, unheard) = sessions.read(1).expect("it is there");
    assert!(unheard.is_none() && event.kind == Kind::Refused("UNCONFIRMED".into()) && event.keys.len() == 2);
    assert_eq!(
        [1, 2].map(|of| sessions.read(of).map(|(event, _)| event.kind)),
        [2, 3].map(|it| Some(Kind::Granted(it, END)))
    );
}

/// However many events a session has not read, one of them is removed in each step of its end.
#[test]
fn end_of_a_session_is_dealt_with_event_by_event() {
    let mut sessions = Sessions::default();
    sessions.open(1);
    for number in 0..5 {
        let about = About { keys: Rc::from([key(1), key(2)]), owner: owner(1), purpose: super::ACQUIRE };
        sessions.add_wait(1, &about, Ticket(number));
        assert!(sessions.tell(1, about, (Outcome::TimedOut, END), Now { micros: 0 }).is_ok());
    }
    assert!(sessions.client_gone(1));
    let mut steps = 0;
    while let Some(remains) = sessions.next_remains() {
        assert!(matches!(remains, Remains::Event));
        steps += 1;
    }
    assert_eq!((steps, sessions.has_departed()), (5, false));
}

/// A step of the server's clock moves what was granted and has not been read, without touching each of them.
#[test]
fn granted_events_follow_a_step_of_the_clock() {
    let mut sessions = Sessions::default();
    granted(&mut sessions, 1, 1, 1, &[key(1)]);
    sessions.stepped(30);
    granted(&mut sessions, 1, 2, 2, &[key(2)]);
    sessions.stepped(-20);
    let mut next = || sessions.read(1).map(|(event, _)| event.kind);
    assert_eq!(next(), Some(Kind::Granted(1, END.stepped(10))));
    assert_eq!(next(), Some(Kind::Granted(2, END.stepped(-20))));
}
