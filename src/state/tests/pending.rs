//! Answers that are owed: each is given once, or found to be undeliverable once.

use super::{granted, key, owner};
use crate::server::callbacks::Ticket;
use crate::server::clock::Now;
use crate::state::pending::{About, Ended, PendingReplies};
use crate::state::{Reading, Recipient, SignsOfLife, Stage};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::rc::Rc;

const NOW: Now = Now { micros: 1 };

#[derive(Clone, Debug)]
enum Act {
    OweBlocked,
    OweSession,
    End(u64),
    NextEnding,
    Gone(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => Just(Act::OweBlocked),
        2 => Just(Act::OweSession),
        3 => (1..20_u64).prop_map(Act::End),
        2 => Just(Act::NextEnding),
        1 => (1..20_u64).prop_map(Act::Gone),
    ]
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn each_ticket_is_answered_once(acts in proptest::collection::vec(act(), 0..80)) {
        let mut owed: PendingReplies<Ticket> = PendingReplies::default();
        let (mut blocked, mut sessions) = (BTreeSet::new(), BTreeSet::new());
        let mut ending = BTreeSet::new();
        for act in acts {
            match act {
                Act::OweBlocked => {
                    let ticket = owed.ticket();
                    owed.owe(ticket, Recipient::Blocked { client: 1, block: Some(ticket) }, Stage::Beginning);
                    prop_assert!(blocked.insert(ticket), "a ticket is new");
                }
                Act::OweSession => {
                    let ticket = owed.ticket();
                    let about = About { keys: Rc::from([key(1)]), owner: owner(1), purpose: super::ACQUIRE };
                    owed.owe(ticket, Recipient::Session { client: 1, about: about.into() }, Stage::Beginning);
                    prop_assert!(sessions.insert(ticket), "a ticket is new");
                }
                Act::End(number) => {
                    let ticket = Ticket(number);
                    let is_ending = ending.contains(&ticket);
                    match owed.end(ticket, granted(number), NOW) {
                        _ if is_ending => {}
                        Ended::Reply => prop_assert!(blocked.contains(&ticket) && ending.insert(ticket)),
                        Ended::Event(..) => prop_assert!(sessions.remove(&ticket)),
                        Ended::Nobody(_) => prop_assert!(!blocked.contains(&ticket) && !sessions.contains(&ticket)),
                    }
                }
                Act::NextEnding => {
                    if let Some((_, ticket)) = owed.next_ending() {
                        prop_assert!(ending.remove(&ticket) && blocked.remove(&ticket), "answered once");
                        prop_assert!(owed.take(ticket).is_some());
                    } else {
                        prop_assert!(ending.is_empty() && !owed.is_ending());
                    }
                }
                Act::Gone(number) => {
                    let ticket = Ticket(number);
                    let known = blocked.remove(&ticket) | sessions.remove(&ticket);
                    ending.remove(&ticket);
                    prop_assert_eq!(owed.take(ticket).is_some(), known);
                }
            }
        }
    }
}

#[test]
fn an_answer_that_is_put_off_is_given_if_the_client_is_still_there() {
    let mut owed: PendingReplies<Ticket> = PendingReplies::default();
    let [one, other] = [1, 2].map(|client| {
        let ticket = owed.ticket();
        owed.owe(ticket, Recipient::Blocked { client, block: Some(ticket) }, Stage::Beginning);
        owed.end(ticket, granted(client), NOW);
        let (ending, block) = owed.next_ending().expect("it ends");
        owed.put_off(ending, block);
        ticket
    });
    assert!(owed.next_ending().is_none());
    owed.take(one);
    assert_eq!(owed.next_put_off(), Some(other));
    assert_eq!(owed.next_put_off(), None);
}

/// A reader is called without an outcome, and a session is never answered like a client.
#[test]
fn whoever_is_called_is_answered() {
    let mut owed: PendingReplies<Ticket> = PendingReplies::default();
    let (reader, session) = (owed.ticket(), owed.ticket());
    let about = About { keys: Rc::from([key(1)]), owner: owner(1), purpose: super::ACQUIRE };
    owed.owe(reader, Recipient::Blocked { client: 1, block: Some(reader) }, Stage::Beginning);
    owed.owe(session, Recipient::Session { client: 1, about: about.into() }, Stage::Beginning);
    let reading = Reading { most: 1, signs: SignsOfLife::Unwanted, asked: 0, until: Some(5) };
    owed.set(reader, Stage::Reading(reading.into()));
    let Some(Stage::Reading(reading)) = owed.get(reader).map(|it| &it.stage) else { panic!("it reads") };
    assert_eq!((reading.most, reading.until), (1, Some(5)));
    owed.call(session);
    owed.call(reader);
    assert!(owed.is_ending());
    assert_eq!(owed.next_ending(), Some((reader, reader)));
    assert!(owed.next_ending().is_none() && !owed.is_ending());
}
