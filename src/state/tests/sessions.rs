//! Event queues: the counters match what is stored, and each event is read once.

use super::{granted as grant, key, owner, request};
use crate::lock::{Deadline, LockKey, Owner, Waiter};
use crate::server::callbacks::Ticket;
use crate::server::clock::Now;
use crate::state::event_bytes::event_bytes;
use crate::state::sessions::Remains;
use crate::state::{GrantId, Kind, Outcome, Renewal, Requester, Sessions};
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
    Asks { client: u64, owner: u8, keys: Vec<u8>, renews: bool },
    Ends { nth: usize, end: End },
    Read(u64),
    Gone(u64),
    Remains,
}

fn act() -> impl Strategy<Value = Act> {
    let (clients, owners, keys) = (1..4_u64, 0..3_u8, 0..4_u8);
    let end = prop_oneof![3 => Just(End::Granted), 1 => Just(End::TimedOut), 1 => Just(End::Refused)];
    let some_keys = proptest::collection::btree_set(keys, 1..3).prop_map(|keys| keys.into_iter().collect());
    prop_oneof![
        2 => clients.clone().prop_map(Act::Open),
        6 => (clients.clone(), owners, some_keys, proptest::bool::weighted(0.25))
            .prop_map(|(client, owner, keys, renews)| Act::Asks { client, owner, keys, renews }),
        4 => (0..10_usize, end).prop_map(|(nth, end)| Act::Ends { nth, end }),
        3 => clients.clone().prop_map(Act::Read),
        1 => clients.prop_map(Act::Gone),
        2 => Just(Act::Remains),
    ]
}

/// The keys and the owner that an event names.
type Subject = (Rc<[LockKey]>, Owner);

/// The model: what the sessions should contain.
#[derive(Debug, Default)]
struct Model {
    gone: BTreeSet<u64>,
    waiting: Vec<Waiter<Requester>>,
    /// The undelivered events of each session: their keys and owners.
    events: BTreeMap<u64, Vec<Subject>>,
    left: BTreeSet<Ticket>,
    events_left: usize,
    tickets: u64,
}

impl Model {
    fn sizes(&self) -> (usize, usize, usize) {
        (self.events.len(), self.waiting.len(), self.events.values().map(Vec::len).sum())
    }
}

fn end_request(sessions: &mut Sessions, model: &mut Model, nth: usize, end: End) {
    if model.waiting.is_empty() {
        return;
    }
    let request = model.waiting.remove(nth % model.waiting.len());
    let Ticket(ticket) = request.requester.ticket;
    let outcome = match end {
        End::Granted => grant(ticket),
        End::TimedOut => Outcome::TimedOut,
        End::Refused => Outcome::Refused("ERR".into()),
    };
    let about = (request.keys.clone(), request.owner.clone());
    model.events.get_mut(&request.requester.client).expect("open").push(about);
    assert!(sessions.notify_outcome(Box::new(request), (outcome, END), Now { micros: ticket }).is_ok());
}

fn carry_out(sessions: &mut Sessions, model: &mut Model, act: Act) {
    match act {
        // Ids of connections are never used twice.
        Act::Open(client) if model.gone.contains(&client) => {}
        Act::Open(client) => {
            sessions.open(client);
            model.events.entry(client).or_default();
        }
        Act::Asks { client, owner: who, keys, renews } => {
            if sessions.is_open(client) {
                model.tickets += 1;
                let ticket = Ticket(model.tickets);
                let mut request = request(client, ticket, owner(who), keys.into_iter().map(key).collect::<Vec<_>>());
                request.requester.reserved = 100;
                request.requester.renewal = renews.then(|| Renewal { token: None, fence: None }.into());
                sessions.add_wait(&request.requester);
                model.waiting.push(*request);
            }
        }
        Act::Ends { nth, end } => end_request(sessions, model, nth, end),
        Act::Read(client) => {
            let expected =
                model.events.get_mut(&client).filter(|events| !events.is_empty()).map(|events| events.remove(0));
            let read = sessions.read(client).map(|(event, unread_grant)| {
                assert_eq!(matches!(event.kind, Kind::Granted(..)), unread_grant.is_some());
                (event.keys, event.owner)
            });
            assert_eq!(read, expected);
        }
        Act::Gone(client) => {
            model.gone.insert(client);
            assert_eq!(sessions.client_gone(client), model.events.remove(&client).is_some());
            let left = model.waiting.extract_if(.., |it| it.requester.client == client);
            model.left.extend(left.map(|it| it.requester.ticket));
        }
        Act::Remains => match sessions.next_remains() {
            Some(Remains::Wait(ticket)) => drop(model.left.remove(&ticket)),
            Some(Remains::Grant(_) | Remains::Event) => model.events_left += 1,
            None => assert!(model.left.is_empty(), "{model:?}"),
        },
    }
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn counters_match_what_is_stored(acts in proptest::collection::vec(act(), 0..100)) {
        let (mut sessions, mut model) = (Sessions::default(), Model::default());
        for act in acts {
            carry_out(&mut sessions, &mut model, act);
            prop_assert_eq!(sessions.sizes(), model.sizes());
            prop_assert!(sessions.is_consistent(), "{:#?}", sessions);
        }
        // When all sessions have ended, nothing is left.
        for client in 1..4 {
            carry_out(&mut sessions, &mut model, Act::Gone(client));
        }
        while sessions.has_ended_sessions() {
            carry_out(&mut sessions, &mut model, Act::Remains);
        }
        prop_assert!(model.left.is_empty());
        prop_assert_eq!(sessions.sizes(), (0, 0, 0));
        prop_assert!(sessions.is_consistent());
    }
}

#[test]
fn next_size_counts_keys_of_next_event() {
    let mut sessions = Sessions::default();
    sessions.open(1);
    assert_eq!((sessions.next_size(1), sessions.unread(1), sessions.bytes(1)), (0, 0, 0));
    let mut request = request(1, Ticket(1), owner(1), [key(1), key(2)]);
    request.requester.reserved = event_bytes(&owner(1), [key(1), key(2)].iter().map(|it| &*it.name));
    sessions.add_wait(&request.requester);
    let waiting = sessions.bytes(1);
    assert!(sessions.notify_outcome(request, (Outcome::TimedOut, END), Now { micros: 0 }).is_ok());
    assert_eq!((sessions.next_size(1), sessions.unread(1)), (2, 1));
    assert_eq!(sessions.bytes(1), waiting, "the event takes what was reserved for it");
    assert!(sessions.read(1).is_some());
    assert_eq!([1, 2].map(|client| (sessions.next_size(client), sessions.bytes(client))), [(0, 0), (0, 0)]);
}

/// Notifies a session of a grant of these keys. Returns the position of the event.
fn granted(sessions: &mut Sessions, client: u64, serial: u64, who: u8, keys: &[LockKey]) -> u64 {
    let request = request(client, Ticket(serial), owner(who), keys);
    sessions.open(client);
    sessions.add_wait(&request.requester);
    let event = sessions.notify_outcome(request, (grant(serial), END), Now { micros: 0 });
    event.ok().flatten().expect("it is open")
}

/// When a grant is withdrawn, its undelivered event becomes a refusal, in the same position. An event that was read, or
/// that is about another grant, stays.
#[test]
fn unread_grant_is_refused_in_its_place() {
    let mut sessions = Sessions::default();
    let first = granted(&mut sessions, 1, 1, 1, &[key(1), key(2)]);
    granted(&mut sessions, 1, 2, 2, &[key(1)]);
    let other = granted(&mut sessions, 2, 3, 1, &[key(1)]);
    sessions.refuse(1, first, GrantId(1), "CANCELLED");
    sessions.refuse(2, other, GrantId(1), "CANCELLED");
    assert!(sessions.is_consistent());
    let (event, unread_grant) = sessions.read(1).expect("it is there");
    assert!(unread_grant.is_none() && event.kind == Kind::Refused("CANCELLED".into()) && event.keys.len() == 2);
    sessions.refuse(1, first, GrantId(1), "CANCELLED");
    assert_eq!(
        [1, 2].map(|of| sessions.read(of).map(|(event, _)| event.kind)),
        [2, 3].map(|it| Some(Kind::Granted(it, END)))
    );
}

/// However many undelivered events an ended session has, each call removes one of them.
#[test]
fn ended_session_is_removed_event_by_event() {
    let mut sessions = Sessions::default();
    sessions.open(1);
    for number in 0..5 {
        let request = request(1, Ticket(number), owner(1), [key(1), key(2)]);
        sessions.add_wait(&request.requester);
        assert!(sessions.notify_outcome(request, (Outcome::TimedOut, END), Now { micros: 0 }).is_ok());
    }
    assert!(sessions.client_gone(1));
    let mut steps = 0;
    while let Some(remains) = sessions.next_remains() {
        assert!(matches!(remains, Remains::Event));
        steps += 1;
    }
    assert_eq!((steps, sessions.has_ended_sessions()), (5, false));
}

/// A step of the server's clock moves the deadlines in undelivered events, without touching each event.
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
