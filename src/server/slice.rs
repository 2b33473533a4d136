//! How long the work on a crowd may keep everybody else waiting.

use super::processor::Moment;
use std::cell::Cell;
use std::time::Duration;

/// A slice of the processor's time: the work on a crowd stops when it is over, lets others in, and continues afterwards.
///
/// Time in which the system let another process run does not count: nobody would be served any sooner if the work
/// stopped there, and what is done in one step would depend on how busy the machine is.
#[derive(Clone, Debug)]
pub struct Slice {
    length: Duration,
    /// When it is over; of a share, unknown until something was done in it.
    end: Cell<Option<Moment>>,
    /// When the slice is over of which it is a share.
    last: Option<Moment>,
    was_asked: Cell<bool>,
}

impl Slice {
    /// What one turn of the event loop spends on all kinds of work together. Only the last thing begun in it may go on
    /// beyond that; even with the longest one (a lock with as many holders as allowed that has to be read anew, or a
    /// grant of as many keys as a request may name) and the replies, a turn stays below 5 ms: nobody should have to
    /// wait that long.
    pub fn of_turn() -> Self {
        Self::from_now(Duration::from_millis(1))
    }

    /// What one turn spends on answers that were put off, or that replicas have confirmed.
    pub fn of_replies() -> Self {
        Self::from_now(Duration::from_millis(1))
    }

    /// What one command spends on serving others before its own client is answered.
    pub fn of_command() -> Self {
        Self::from_now(Duration::from_micros(500))
    }

    fn from_now(length: Duration) -> Self {
        Self { length, end: Cell::new(Some(Moment::after(length))), last: None, was_asked: Cell::default() }
    }

    /// The share of one kind of work, so that none of them, however much there is of it, starves the others.
    pub fn piece(&self) -> Self {
        self.share(Duration::from_micros(150))
    }

    /// The share of those who wait.
    pub fn of_crowds(&self) -> Self {
        self.share(Duration::from_micros(600))
    }

    /// This much of it, or what is left.
    fn share(&self, length: Duration) -> Self {
        Self { length, end: Cell::default(), last: self.end.get().or(self.last), was_asked: Cell::default() }
    }

    /// Whether it is over: to be asked before each thing that may be done in it.
    ///
    /// Costs some 30 ns, but the first time in a share nothing: most of the time, most kinds of work have nothing to do.
    /// (The beginning of a slice costs a call of the system, 150 to 600 ns.)
    pub fn is_over(&self) -> bool {
        match self.end.get() {
            Some(end) => end.has_come(),
            None if !self.was_asked.replace(true) => false,
            None => {
                let end = Moment::after(self.length);
                let end = self.last.map_or(end, |last| last.min(end));
                self.end.set(Some(end));
                end.has_come()
            }
        }
    }

    /// Whether something was done in this share.
    pub fn was_used(&self) -> bool {
        self.end.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_begins_when_something_was_done_in_it_and_ends_with_the_whole() {
        let turn = Slice::from_now(Duration::from_secs(3600));
        let piece = turn.piece();
        assert!(!piece.is_over() && !piece.was_used());
        assert!(!piece.is_over() && piece.was_used());
        while !piece.is_over() {}
        assert!(!turn.is_over());

        let over = Slice::from_now(Duration::ZERO);
        assert!(over.is_over());
        let piece = over.of_crowds();
        assert!(!piece.is_over(), "the first thing is done in any case");
        assert!(piece.is_over() && piece.piece().piece().last == over.end.get());
    }
}
