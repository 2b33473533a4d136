//! Pending replies: each is sent once, or found to be undeliverable once.

use super::granted;
use crate::lock::WaiterId;
use crate::server::callbacks::Ticket;
use crate::server::clock::Now;
use crate::state::pending::{End, PendingReplies, Reader};
use crate::state::{HeartbeatMode, Outcome, Reading, Stage};
use proptest::prelude::*;
use std::collections::BTreeSet;

const NOW: Now = Now { micros: 1 };

fn waiting() -> Stage<Ticket> {
    Stage::Waiting(WaiterId::FIRST)
}

/// The end of a blocked client's request. The ticket stands for its block, too.
fn end(ticket: Ticket) -> End<Ticket> {
    End { outcome: granted(ticket.0), at: NOW, block: Some(ticket) }
}

#[derive(Clone, Debug)]
enum Act {
    Wait,
    End(u64),
    NextEnding,
    Gone(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => Just(Act::Wait),
        3 => (1..20_u64).prop_map(Act::End),
        2 => Just(Act::NextEnding),
        1 => (1..20_u64).prop_map(Act::Gone),
    ]
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn blocked_client_is_answered_once(acts in proptest::collection::vec(act(), 0..80)) {
        let mut replies: PendingReplies<Ticket> = PendingReplies::default();
        let (mut waiting, mut ending) = (BTreeSet::new(), BTreeSet::new());
        for act in acts {
            match act {
                Act::Wait => {
                    let ticket = replies.ticket();
                    replies.set(ticket, self::waiting());
                    prop_assert!(waiting.insert(ticket), "a ticket is new");
                }
                // A request ends once.
                Act::End(number) if ending.contains(&Ticket(number)) => {}
                Act::End(number) => {
                    let ticket = Ticket(number);
                    let is_pending = replies.end(ticket, end(ticket)).is_ok();
                    prop_assert_eq!(is_pending, waiting.remove(&ticket));
                    ending.extend(is_pending.then_some(ticket));
                }
                Act::NextEnding => {
                    if let Some((ticket, block)) = replies.next_ending() {
                        prop_assert!(ticket == block && ending.remove(&ticket), "answered once");
                        prop_assert!(replies.take(ticket).is_some());
                    } else {
                        prop_assert!(ending.is_empty() && !replies.is_ending());
                    }
                }
                Act::Gone(number) => {
                    let ticket = Ticket(number);
                    let is_known = waiting.remove(&ticket) | ending.remove(&ticket);
                    prop_assert_eq!(replies.take(ticket).is_some(), is_known);
                }
            }
        }
    }
}

#[test]
fn postponed_reply_is_sent_if_client_still_exists() {
    let mut replies: PendingReplies<Ticket> = PendingReplies::default();
    let [one, other] = [1, 2].map(|_| {
        let ticket = replies.ticket();
        replies.set(ticket, waiting());
        assert!(replies.end(ticket, end(ticket)).is_ok());
        let (ending, block) = replies.next_ending().expect("it ends");
        replies.postpone(ending, block);
        ticket
    });
    assert!(replies.next_ending().is_none());
    replies.take(one);
    assert_eq!(replies.next_postponed(), Some(other));
    assert_eq!(replies.next_postponed(), None);
}

/// A grant may be withdrawn before its reply is sent.
#[test]
fn end_is_changed_until_the_reply_is_sent() {
    let mut replies: PendingReplies<Ticket> = PendingReplies::default();
    let ticket = replies.ticket();
    replies.set(ticket, waiting());
    replies.end_otherwise(ticket, Outcome::TimedOut);
    assert!(matches!(replies.get(ticket), Some(Stage::Waiting(_))), "it has not ended");
    assert!(replies.end(ticket, end(ticket)).is_ok());
    replies.end_otherwise(ticket, Outcome::Withdrawn);
    assert_eq!(replies.next_ending(), Some((ticket, ticket)));
    let Some(Stage::Ending(end)) = replies.take(ticket) else { panic!("it has ended") };
    assert!(matches!(end.outcome, Outcome::Withdrawn));
}

/// A reader is answered without an outcome. A session's request is never answered as a blocked client's is.
#[test]
fn called_reader_is_answered() {
    let mut replies: PendingReplies<Ticket> = PendingReplies::default();
    let (reader, session) = (replies.ticket(), replies.ticket());
    let reading = Reading { most: 1, signs: HeartbeatMode::Unwanted, asked: 0, until: Some(5) };
    replies.set(reader, Stage::Reading(Box::new(Reader { client: 1, reading, block: Some(reader) })));
    replies.set(session, waiting());
    replies.call(session);
    replies.call(reader);
    assert!(replies.is_ending());
    assert_eq!(replies.next_ending(), Some((reader, reader)));
    assert!(replies.next_ending().is_none() && !replies.is_ending());
}

/// Other blocked clients are not overtaken by a reader, and are not answered as one.
#[test]
fn next_reader_is_taken_only_when_it_is_its_turn() {
    let mut replies: PendingReplies<Ticket> = PendingReplies::default();
    let [blocked, reader, gone] = [(); 3].map(|()| replies.ticket());
    let reading = Reading { most: 1, signs: HeartbeatMode::Unwanted, asked: 0, until: None };
    replies.set(blocked, waiting());
    assert!(replies.end(blocked, end(blocked)).is_ok());
    for (client, ticket) in [(1, reader), (2, gone)] {
        replies.set(ticket, Stage::Reading(Box::new(Reader { client, reading, block: Some(ticket) })));
        replies.call(ticket);
    }
    assert_eq!(replies.next_reader(), None, "the blocked client comes first");
    assert_eq!(replies.next_ending(), Some((blocked, blocked)));
    assert_eq!(replies.next_reader(), Some((reader, reader)));
    replies.take(gone);
    assert_eq!(replies.next_reader(), None);
    assert!(replies.next_ending().is_none() && !replies.is_ending());
}
