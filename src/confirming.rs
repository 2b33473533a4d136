//! Grants and renewals that count only once enough replicas have them.
//!
//! The replies wait in a book. One request for acknowledgement per turn of the event loop covers everything written
//! before it. While anything is pending, the replicas' progress is read at the end of each turn at first, then every
//! millisecond; otherwise nothing runs.

use crate::answering::end_request;
use crate::books::confirmations::{Confirmation, ConfirmationId, Settled, What};
use crate::books::ties::Renewal;
use crate::books::{self, Outcome, Undo};
use crate::config;
use crate::lock::Millis;
use crate::server::Ctx;
use crate::server::clock::{Now, Slice};
use crate::server::replicas::{Offsets, request_acks};
use crate::server::timer::{self, Timer};
use crate::stats::{count, time};
use crate::undo::roll_back;

/// After this many ms without enough confirmations, the replicas are asked again: one may just have reconnected.
const ASK_AGAIN: Millis = 100;

/// How many are settled at a time.
const AT_ONCE: usize = 64;

/// Withholds an answer, or a watchdog's next renewal, until `needed` replicas have confirmed: at most until `latest`,
/// and at most for the time that the settings allow.
pub fn begin(ctx: Ctx, what: What, undo: Undo, needed: u32, latest: Millis, now: Now) -> ConfirmationId {
    let until = now.millis().saturating_add(config::REPLICAS_TIMEOUT.get()).min(latest);
    timer::wake(ctx, Timer::Ask, timer::THIS_TURN);
    timer::wake(ctx, Timer::Work, now.millis().saturating_add(1));
    let confirmation = Confirmation { what, undo, needed, target: None, began: now, until };
    books::with(|books| books.confirmations.begin(confirmation))
}

/// Asks the replicas, and notes what it asks about. Must be alone in its step.
pub fn ask_replicas(ctx: Ctx, now: Now) {
    if books::with(|books| books.confirmations.is_empty()) {
        return;
    }
    let written = Offsets::read(ctx).written;
    books::with(|books| books.confirmations.asked(written, now.millis()));
    request_acks(ctx);
    count(|it| &mut it.confirmation_requests);
    ask_later(ctx, ASK_AGAIN);
}

/// Asks after this many ms, if there is still something to ask about by then.
pub fn ask_later(ctx: Ctx, after: Millis) {
    if books::with(|books| books.confirmations.is_empty()) {
        timer::stop(ctx, Timer::Ask);
    } else {
        timer::wake(ctx, Timer::Ask, Now::read().millis().saturating_add(after));
    }
}

/// At the end of a turn of the event loop, checks whether anything that arrived in it settles a confirmation. Writes
/// nothing.
pub fn has_news(ctx: Ctx) -> bool {
    if !books::with(|books| books.confirmations.expects_news(Now::read().millis())) {
        return false;
    }
    let offsets = Offsets::read(ctx);
    books::with(|books| books.confirmations.any_confirmed(&offsets))
}

/// Settles what was confirmed, and what was not confirmed in time, which is rolled back.
pub fn settle(ctx: Ctx, now: Now, slice: &Slice) {
    work_through(ctx, now.millis(), now, slice);
}

/// Settles what was confirmed. Writes nothing.
pub fn confirm_all(ctx: Ctx, slice: &Slice) {
    work_through(ctx, 0, Now::read(), slice);
}

/// Settles what was confirmed, and what had to be confirmed by `due`.
fn work_through(ctx: Ctx, due: Millis, now: Now, slice: &Slice) {
    if books::with(|books| books.confirmations.is_empty()) {
        return;
    }
    let offsets = Offsets::read(ctx);
    while !slice.is_over() {
        let ids = books::with(|books| books.confirmations.settled(&offsets, due, AT_ONCE));
        if ids.is_empty() {
            break;
        }
        for id in ids {
            if slice.is_over() {
                break; // What is taken back may have to be read first, which is slow if others have written it.
            }
            match books::with(|books| books.confirmations.take(id, &offsets)) {
                Some(Settled::Confirmed(it)) => confirmed(ctx, it, now),
                Some(Settled::Missed(it, having)) => missed(ctx, it, having, now),
                None => {}
            }
        }
    }
    ask_later(ctx, ASK_AGAIN);
}

fn confirmed(ctx: Ctx, it: Confirmation, now: Now) {
    count(|it| &mut it.confirmed);
    time(|stats| &mut stats.confirmations, now.micros.saturating_sub(it.began.micros));
    match it.what {
        What::Reply(ticket, answer) => end_request(ctx, ticket, Outcome::Granted(answer, it.undo), now),
        What::Renewal(tie) => books::with(|books| books.ties.set_renewal(tie, Renewal::Settled)),
    }
}

fn missed(ctx: Ctx, it: Confirmation, having: usize, now: Now) {
    count(|it| &mut it.taken_back);
    match it.what {
        What::Reply(ticket, _) => {
            let time = it.until.saturating_sub(it.began.millis());
            let message = format!("NOREPLICAS {having} of {} replicas confirmed within {time} ms", it.needed);
            end_request(ctx, ticket, Outcome::Refused(message), now);
        }
        What::Renewal(tie) => books::with(|books| books.ties.set_renewal(tie, Renewal::Settled)),
    }
    roll_back(ctx, &it.undo, now);
}
