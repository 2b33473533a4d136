//! What concerns several books at once.

use super::{TERMS, granted, home, key, owner};
use crate::books::owed::{About, OnBehalf, Ticket};
use crate::books::sessions::Reader;
use crate::books::{
    Answer, Asker, Books, Delivery, Expiry, Grant, GrantId, GrantedHold, Kind, NewTie, Outcome, Reading, Recipient,
    SignsOfLife, State, TakeBack, Tie, Tying, Why,
};
use crate::lock::serve::{Change, Job};
use crate::lock::{Deadline, WaiterId};
use crate::server::clock::Now;
use std::rc::Rc;

const NOW: Now = Now { micros: 1 };
/// A grant of key 1 in flight, on behalf of a session.
fn in_flight(books: &mut Books, client: u64, ticket: Ticket) -> GrantId {
    let holds = vec![GrantedHold { name: key(1).name, token: 7, deadline: Deadline::At(50) }];
    let (owner, on_behalf, back) = (owner(1), OnBehalf::Session, TakeBack::Hold);
    books.in_flight.begin(Grant { home: home(0), owner, client, on_behalf, ticket, back, holds })
}

/// Owes an answer to a blocked client.
fn blocked(books: &mut Books, client: u64, state: State) -> Ticket {
    let ticket = books.owed.ticket();
    books.owed.owe(ticket, Recipient::Blocked { client, block: None }, state);
    ticket
}

/// Owes an event to a session.
fn asked(books: &mut Books, client: u64) -> Ticket {
    let about = About { keys: Rc::from([key(1)]), owner: owner(1), purpose: super::ACQUIRE };
    let ticket = books.owed.ticket();
    books.sessions.open(client);
    books.sessions.add_wait(client, &about, ticket);
    books.owed.owe(ticket, Recipient::Session { client, about }, State::Beginning);
    ticket
}

/// A session that is blocked until its next event.
fn reads(books: &mut Books, client: u64) {
    books.sessions.open(client);
    let reading = Reading { most: 1, signs: SignsOfLife::Unwanted, asked: 0 };
    let ticket = blocked(books, client, State::Reading(reading, None));
    books.sessions.set_reader(client, Some(Reader { ticket, until: None }));
    assert!(!books.owed.is_ending());
}

/// A waiter in the queue for key 1, which waits until then.
fn waits(books: &mut Books, number: u8, until: Option<u64>) -> WaiterId {
    let ticket = blocked(books, u64::from(number), State::Beginning);
    let asker = Asker { ticket, client: 1, on_behalf: OnBehalf::Itself, tying: TERMS.tying, replicas: 0, arrived: NOW };
    books.owed.timeouts.extend(until.map(|until| (until, ticket)));
    books.queue.join(owner(number), [key(1)], TERMS.demand, 0, until, asker)
}

fn tied(books: &mut Books, client: u64) -> Tie {
    let tying = Tying { watchdog: true, ephemeral: false };
    let (key, owner, deadline) = (key(1), owner(1), Deadline::At(50));
    let (on_behalf, together) = (OnBehalf::Session, None);
    let new = NewTie { client, on_behalf, tying, key, owner, token: 7, lease: 9, replicas: 0, deadline, together };
    books.ties.tie(new, 0);
    books.ties.of(0, &super::key(1).name, &super::owner(1), Some(7)).expect("it is tied").clone()
}

#[test]
fn an_answer_goes_to_whoever_it_is_owed_to() {
    let mut books = Books::default();
    let ticket = blocked(&mut books, 1, State::Beginning);
    assert_eq!(books.end(ticket, granted(1), NOW), Delivery::Due);
    assert!(books.owed.is_ending() && !books.in_flight.is_owed());

    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    assert_eq!(books.end(ticket, granted(3), NOW), Delivery::Due);
    assert!(!books.owed.is_ending() && !books.in_flight.is_owed());
    let kind = books.sessions.read(2).map(|(event, _)| event.kind);
    assert!(matches!(kind, Some(Kind::Granted(3, _))), "{kind:?}");
    // It was the only one.
    assert_eq!(books.end(ticket, Outcome::TimedOut, NOW), Delivery::Undelivered);
    assert!(books.sessions.read(2).is_none() && !books.in_flight.is_owed());

    let ticket = asked(&mut books, 2);
    books.sessions.client_gone(2);
    let grant = in_flight(&mut books, 2, ticket);
    assert_eq!(books.end(ticket, Outcome::Granted(Answer::Token(7), grant), NOW), Delivery::Undelivered);
    assert!(books.in_flight.is_owed() && books.has_work());
}

#[test]
fn a_reader_is_called_for_each_kind_of_event() {
    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    reads(&mut books, 2);
    books.end(ticket, granted(1), NOW);
    assert!(books.owed.is_ending());
    for tell in [Books::lost, Books::untied] {
        let mut books = Books::default();
        reads(&mut books, 2);
        let (of_another, own) = (tied(&mut books, 3), tied(&mut books, 2));
        tell(&mut books, &of_another, Why::Changed);
        assert!(!books.owed.is_ending());
        tell(&mut books, &own, Why::Changed);
        assert!(books.owed.is_ending());
        assert_eq!(books.sessions.unread(2), 1);
    }
}

#[test]
fn a_reader_that_has_gone_is_not_called() {
    let mut books = Books::default();
    reads(&mut books, 2);
    let ticket = books.owed.ticket();
    books.owed.timeouts.extend([(30, ticket), (40, ticket)]);
    books.reads_no_more(2, ticket, Some(30));
    assert_eq!(books.owed.timeouts.iter().map(|(until, _)| *until).collect::<Vec<_>>(), [40]);
    let ticket = asked(&mut books, 2);
    books.end(ticket, granted(1), NOW);
    assert!(!books.owed.is_ending());
}

/// A request of an owner whose grant is in flight is refused, but for what the same connection has sent behind it.
#[test]
fn a_grant_is_in_the_way_until_it_is_handed_over() {
    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    let grant = in_flight(&mut books, 2, ticket);
    let (name, who) = (key(1).name, owner(1));
    let hold = (0, &*name, &*who);
    assert_eq!([2, 3].map(|client| books.in_the_way(hold, Some(client))), [Some(grant); 2]);
    assert_eq!(books.in_the_way((1, hold.1, hold.2), None), None);
    books.owed.sending(2, grant);
    assert_eq!([2, 3].map(|client| books.in_the_way(hold, Some(client))), [None, Some(grant)]);
    books.sent();
    assert!(books.in_the_way(hold, None).is_none() && books.in_flight.is_empty());
}

/// Nothing is judged by a grant whose session has ended, also before that end has been dealt with.
#[test]
fn what_an_ended_session_was_granted_is_owed() {
    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    let grant = in_flight(&mut books, 2, ticket);
    books.end(ticket, Outcome::Granted(Answer::Token(7), grant), NOW);
    assert!(books.take_owed(0, &key(1).name).is_empty());
    books.sessions.client_gone(2);
    let owed = books.take_owed(0, &key(1).name);
    assert_eq!(owed.iter().map(|it| (it.token, it.back)).collect::<Vec<_>>(), [(7, TakeBack::Hold)]);
    assert!(books.take_owed(0, &key(1).name).is_empty());
}

/// Those behind whoever gives up have their turn; a look at the lock is due as long as anybody waits for it.
#[test]
fn whoever_leaves_makes_way() {
    let mut books = Books::default();
    books.looks.schedule(&key(1), Some(100));
    let [first, second] = [(1, Some(30)), (2, Some(40))].map(|(number, until)| waits(&mut books, number, until));
    assert!(books.is_contended(0, &key(1).name) && !books.is_contended(1, &key(1).name));
    let waiter = books.queue.leave(first).expect("it waits");
    books.gave_up(&waiter);
    assert_eq!(books.owed.timeouts.iter().map(|(until, _)| *until).collect::<Vec<_>>(), [40]);
    assert_eq!(books.looks.first(), Some(100));
    assert!(matches!(books.agenda.next(&books.queue), Some(Job::Judge(attempt)) if attempt.id() == second));
    let waiter = books.queue.leave(second).expect("it waits");
    books.gave_up(&waiter);
    assert!(books.owed.timeouts.is_empty() && !books.is_contended(0, &key(1).name));
    assert_eq!(books.looks.first(), None);
    assert!(books.agenda.is_empty());
}

/// Each kind of work is noticed.
#[test]
fn work_is_noticed() {
    assert!(!Books::default().has_work());
    let kinds: [&dyn Fn(&mut Books); 4] = [
        &|books| {
            let grant = in_flight(books, 1, Ticket(1));
            books.in_flight.owe(grant);
        },
        &|books| books.agenda.note(key(1), Change::Freed),
        &|books| books.expired.push_back((key(1), Expiry::Key { holders: 1 })),
        &|books| books.sweep.begin(None, (WaiterId::FIRST.next(), books.ties.next_id())),
    ];
    for kind in kinds {
        let mut books = Books::default();
        kind(&mut books);
        assert!(books.has_work() && !books.has_news_to_tell());
    }
    let mut books = Books::default();
    tied(&mut books, 1);
    assert!(!books.has_work());
    books.ties.client_gone(1);
    assert!(books.has_work() && !books.has_news_to_tell());
}

/// So is what is only told, which a replica does as well.
#[test]
fn news_are_noticed() {
    let mut books = Books::default();
    asked(&mut books, 2);
    assert!(!books.has_news_to_tell());
    books.sessions.client_gone(2);
    assert!(books.has_news_to_tell() && books.has_work());

    let mut books = Books::default();
    waits(&mut books, 1, None);
    books.forget_work();
    assert!(books.has_news_to_tell() && books.has_work());

    let mut books = Books::default();
    tied(&mut books, 1);
    books.forget_work();
    assert!(books.has_news_to_tell() && books.has_work() && books.ties.is_empty());
}

#[test]
fn a_role_that_changes_ends_the_work_and_not_the_waits() {
    let mut books = Books::default();
    let [first, last] = [1, 2].map(|number| waits(&mut books, number, None));
    books.looks.schedule(&key(1), Some(100));
    books.agenda.note(key(1), Change::Freed);
    books.expired.push_back((key(1), Expiry::Key { holders: 1 }));
    let grant = in_flight(&mut books, 1, Ticket(1));
    books.in_flight.owe(grant);
    books.forget_work();
    assert!(books.looks.first().is_none() && books.agenda.is_empty() && books.expired.is_empty());
    assert!(books.in_flight.is_owed() && books.sweep.is_over());
    books.forget_changes();
    assert!(books.in_flight.is_empty());
    let (from, end) = books.undecided.waiters.expect("they are to be refused");
    assert!(from <= first && last < end);
    assert_eq!(books.queue.len(), 2);
}

/// The module may be unloaded only when nothing is lost with it.
#[test]
fn whatever_would_be_lost_is_in_use() {
    assert!(!Books::default().are_in_use());
    let mut books = Books::default();
    waits(&mut books, 1, None);
    assert!(books.are_in_use());

    let mut books = Books::default();
    tied(&mut books, 1);
    assert!(books.are_in_use());

    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    assert!(!books.are_in_use());
    books.end(ticket, granted(1), NOW);
    assert!(books.are_in_use());
}
