//! What concerns several books at once.

use super::{key, owner, undo};
use crate::books::owed::{About, OnBehalf, Purpose, Ticket};
use crate::books::sessions::Reader;
use crate::books::{
    Answer, Asker, Books, Delivery, Expiry, IfNone, Kind, NewTie, Outcome, Reading, Recipient, State, Terms, Tie,
    Tying, Undo, Why,
};
use crate::lock::cycle::{Candidate, Search};
use crate::lock::serve::{Change, Job};
use crate::lock::{Deadline, Demand, Limit, Raise, WaiterId};
use crate::server::clock::Now;
use std::rc::Rc;

const NOW: Now = Now { micros: 1 };
const TERMS: Terms =
    Terms { demand: Demand { limit: Limit::MUTEX, raise: Raise::ByOne, lease: 1000 }, tying: Tying::NONE, replicas: 0 };

fn re_entry(serial: u64, holds: (u64, u64, u64)) -> Undo {
    undo(serial, &owner(1), &[key(1)], holds)
}

fn granted(serial: u64) -> Outcome {
    Outcome::Granted(Answer::Token(serial), re_entry(serial, (0, 1, 1)))
}

/// Owes an answer to a blocked client.
fn blocked(books: &mut Books, client: u64, state: State) -> Ticket {
    let ticket = books.owed.ticket();
    books.owed.owe(ticket, Recipient::Blocked { client, block: None }, state);
    ticket
}

/// Owes an event to a session.
fn asked(books: &mut Books, client: u64) -> Ticket {
    let about = About { keys: Rc::from([key(1)]), owner: owner(1), purpose: Purpose::Acquire };
    let ticket = books.owed.ticket();
    books.sessions.open(client);
    books.sessions.add_wait(client, &about, ticket);
    books.owed.owe(ticket, Recipient::Session { client, about }, State::Beginning);
    ticket
}

/// A session that is blocked until its next event.
fn reads(books: &mut Books, client: u64) {
    books.sessions.open(client);
    let reading = Reading { most: 1, if_none: IfNone::Null };
    let ticket = blocked(books, client, State::Reading(reading, None));
    books.sessions.set_reader(client, Some(Reader { ticket, alive_at: None }));
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
    books.ties.tie(NewTie { client, tying, key, owner, token: 7, lease: 9, replicas: 0, deadline }, 0);
    books.ties.of(0, &super::key(1).name, &super::owner(1), Some(7)).expect("it is tied").clone()
}

#[test]
fn an_answer_goes_to_whoever_it_is_owed_to() {
    let mut books = Books::default();
    let ticket = blocked(&mut books, 1, State::Beginning);
    assert_eq!(books.end(ticket, granted(1), NOW), Delivery::Due);
    assert!(books.owed.is_ending() && books.owed.undelivered.is_empty());

    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    assert_eq!(books.end(ticket, granted(3), NOW), Delivery::Due);
    assert!(!books.owed.is_ending() && books.owed.undelivered.is_empty());
    assert_eq!(books.sessions.read(2).map(|(event, _)| event.kind), Some(Kind::Granted(3)));
    // It was the only one.
    assert_eq!(books.end(ticket, Outcome::TimedOut, NOW), Delivery::Undelivered);
    assert!(books.sessions.read(2).is_none() && books.owed.undelivered.is_empty());

    let ticket = asked(&mut books, 2);
    books.sessions.client_gone(2);
    assert_eq!(books.end(ticket, granted(4), NOW), Delivery::Undelivered);
    assert_eq!(books.owed.undelivered.iter().map(|undo| undo.serial).collect::<Vec<_>>(), [4]);
    assert!(books.has_work());
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

/// What an owner was given lies in three books, and what it is told concerns all of them.
#[test]
fn what_an_owner_was_not_told_is_found_wherever_it_is() {
    let mut books = Books::default();
    let ticket = asked(&mut books, 2);
    books.end(ticket, Outcome::Granted(Answer::Token(5), re_entry(5, (0, 2, 2))), NOW);
    books.owed.undelivered.push_back(re_entry(6, (0, 3, 3)));
    books.owed.sending(1, re_entry(7, (0, 4, 4)));
    let hold = (0, b"k\x01".as_slice(), b"o\x01".as_slice());
    assert_eq!([4, 5, 6, 7].map(|serial| books.promised(hold, serial)), [4, 4, 4, 0]);
    for other in [(1, hold.1, hold.2), (0, b"k\x02".as_slice(), hold.2), (0, hold.1, b"o\x02".as_slice())] {
        assert_eq!(books.promised(other, 0), 0, "{other:?}");
        books.acknowledge(other, 9);
    }
    let added = |books: &mut Books| {
        let mut added = Vec::new();
        books.outstanding(hold, |undo| added.push((undo.serial, undo.steps[0].added())));
        added.sort();
        added
    };
    assert_eq!(added(&mut books), [(5, 2), (6, 3), (7, 4)]);
    books.acknowledge(hold, 1);
    assert_eq!(added(&mut books), [(5, 1), (6, 2), (7, 3)]);
}

/// A roll-back changes what came after it, and nothing before.
#[test]
fn what_came_later_is_adjusted() {
    let mut books = Books::default();
    books.owed.undelivered.extend([re_entry(4, (1, 2, 1)), re_entry(5, (1, 2, 1)), re_entry(6, (1, 2, 1))]);
    let gone = &re_entry(5, (0, 1, 1)).steps[0];
    books.rebase((0, b"k\x01", b"o\x01"), 5, gone, 1);
    let given: Vec<u64> = books.owed.undelivered.iter().map(|undo| undo.steps[0].given.holds).collect();
    assert_eq!(given, [2, 2, 1]);
}

/// Once the answer to a re-entry is on the network, its owner knows of the holds from before as well.
#[test]
fn what_was_sent_is_told() {
    let mut books = Books::default();
    books.owed.undelivered.push_back(re_entry(1, (0, 1, 1)));
    books.owed.sending(1, re_entry(2, (1, 1, 1)));
    assert_eq!(books.owed.undelivered[0].steps[0].told, 0);
    books.sent();
    assert_eq!(books.owed.undelivered[0].steps[0].told, 1);

    // As many of them as it was promised.
    for (holds, told) in [((4, 4, 3), 3), ((3, 4, 3), 2), ((3, 4, 1), 0)] {
        let mut books = Books::default();
        books.owed.undelivered.push_back(re_entry(1, (0, 5, 5)));
        books.owed.sending(1, re_entry(2, holds));
        books.sent();
        assert_eq!(books.owed.undelivered[0].steps[0].told, told, "{holds:?}");
    }
}

/// A callback that comes while the books are lent gets none. (The only test of the books that the module has.)
#[test]
fn lent_books_are_not_lent_again() {
    assert_eq!(crate::books::try_with(|books| books.has_work()), Some(false));
    assert_eq!(crate::books::with(|_| crate::books::try_with(|_| ())), None);
    assert_eq!(crate::books::try_with(|_| ()), Some(()));
}

#[test]
fn later_names_are_greater() {
    let mut books = Books::default();
    let names = [books.next_undo(), books.next_undo(), books.next_undo()];
    assert!(names.is_sorted_by(|one, next| one < next), "{names:?}");
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
    assert!(matches!(books.agenda.next(&mut books.queue), Some(Job::Judge(attempt)) if attempt.id() == second));
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
    let me = owner(1);
    let search = || Search::new(Candidate { owner: &me, keys: &[key(1)], limit: Limit::MUTEX });
    let kinds: [&dyn Fn(&mut Books); 6] = [
        &|books| books.owed.undelivered.push_back(re_entry(1, (0, 1, 1))),
        &|books| books.agenda.note(key(1), Change::Freed),
        &|books| books.expired.push_back((key(1), Expiry::Key)),
        &|books| books.searches.push_back((WaiterId(0), search())),
        &|books| books.searched.push_back(search()),
        &|books| books.sweep.begin(None, (WaiterId(1), books.ties.next_id())),
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
    books.expired.push_back((key(1), Expiry::Key));
    books.owed.undelivered.push_back(re_entry(1, (0, 1, 1)));
    books.forget_work();
    assert!(books.looks.first().is_none() && books.agenda.is_empty() && books.expired.is_empty());
    assert!(books.owed.undelivered.is_empty() && books.sweep.is_over());
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
