//! How much of the work on many holds or requests is done before the server runs other commands.

use std::cell::Cell;

thread_local! {
    /// What has been done since the module was loaded, in units: one is about a microsecond on the machine of the tests.
    static DONE: Cell<u64> = const { Cell::new(0) };
}

/// Anything that is taken out of one table, and put into another.
const THING: u64 = 1;
/// A lock that is looked up.
const READ: u64 = 1;
/// A lock that is written, and that replicas and listeners receive.
const WRITE: u64 = 3;
/// A request of a blocked client that ends: the server makes and writes a reply.
const ANSWER: u64 = 7;
/// A request of a session that ends: an event is queued, which is sent with others.
const EVENT: u64 = 1;
/// How many fields, or holders, are read, deleted or freed in one unit.
const FIELDS: usize = 4;

/// Counts a look at a lock, of which so many fields were read.
pub fn count_read(fields: usize) {
    count(READ.saturating_add(in_units(fields)));
}

/// Counts a change of a lock.
pub fn count_write() {
    count(WRITE);
}

/// Counts a request of a blocked client that ends.
pub fn count_answer() {
    count(ANSWER);
}

/// Counts a request of a session that ends.
pub fn count_event() {
    count(EVENT);
}

/// Counts keys of a request that leaves their queues, or events about so many keys.
pub fn count_keys(keys: usize) {
    count(THING.saturating_mul(keys as u64));
}

/// Counts fields, or holders, that are read, deleted, or freed.
pub fn count_fields(fields: usize) {
    count(in_units(fields));
}

fn in_units(fields: usize) -> u64 {
    u64::try_from(fields / FIELDS).unwrap_or(u64::MAX)
}

fn count(units: u64) {
    DONE.set(DONE.get().saturating_add(units));
}

/// A slice of work: when so much of it is done, the others are let in, and it continues afterwards.
///
/// Work is counted and not timed, so what is done in one step depends on what there is to do, and not on how busy the
/// machine is: the same requests always end in the same order.
#[derive(Debug)]
pub struct Slice {
    /// How much may be done in it.
    units: u64,
    /// The slice that it is a share of is over when so much has been done.
    end_of_whole: u64,
    /// It is over when so much has been done; `None` until it is first asked, with which it begins.
    end: Cell<Option<u64>>,
    was_used: Cell<bool>,
}

impl Slice {
    /// What one turn of the event loop spends on all kinds of work together. Only the last thing begun in it may go on
    /// beyond that; even with the longest one (a lock with as many holders as allowed that has to be read anew, or a
    /// grant of as many keys as a request may name) and the replies, a turn stays below 5 ms: nobody should have to
    /// wait that long.
    pub fn of_turn() -> Self {
        Self::beginning_now(1_000)
    }

    /// What one turn spends on answers that were put off.
    pub fn of_replies() -> Self {
        Self::beginning_now(100)
    }

    /// What one command spends on serving others before its own client is answered.
    pub fn of_command() -> Self {
        Self::beginning_now(500)
    }

    fn beginning_now(units: u64) -> Self {
        Self::within(DONE.get().saturating_add(units), units)
    }

    fn within(end_of_whole: u64, units: u64) -> Self {
        Self { units, end_of_whole, end: Cell::default(), was_used: Cell::default() }
    }

    /// The share of one kind of work, so that none of them, however much there is of it, starves the others.
    pub fn piece(&self) -> Self {
        self.share(200)
    }

    /// The share of those who wait.
    pub fn of_crowds(&self) -> Self {
        self.share(600)
    }

    /// This much of it, or what is left.
    fn share(&self, units: u64) -> Self {
        Self::within(self.end.get().unwrap_or(self.end_of_whole), units)
    }

    /// Whether it is over: to be asked before each thing that may be done in it. The first one is done in any case.
    pub fn is_over(&self) -> bool {
        let done = DONE.get();
        DONE.set(done.saturating_add(THING));
        let Some(end) = self.end.get() else {
            self.end.set(Some(done.saturating_add(self.units).min(self.end_of_whole)));
            return false;
        };
        self.was_used.set(true);
        done >= end
    }

    /// Whether something was done in it.
    pub fn was_used(&self) -> bool {
        self.was_used.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn things(slice: &Slice, mut each: impl FnMut()) -> usize {
        let mut things = 0;
        while !slice.is_over() {
            each();
            things += 1;
        }
        things
    }

    #[test]
    fn the_same_work_takes_the_same_steps() {
        assert_eq!(things(&Slice::of_turn().piece(), || ()), 200);
        let renewal = || {
            count_read(0);
            count_write();
        };
        assert_eq!(things(&Slice::of_turn().piece(), renewal), 40);
        let grant = || {
            renewal();
            count_answer();
        };
        assert_eq!(things(&Slice::of_turn().of_crowds(), grant), 50);
        assert_eq!(
            things(&Slice::of_command(), || count_read(5_000)),
            1,
            "a lock with 2,500 holders is a slice of its own"
        );
    }

    #[test]
    fn a_share_ends_with_the_whole_and_its_first_thing_is_done_in_any_case() {
        let turn = Slice::of_turn();
        let piece = turn.piece();
        assert!(!piece.is_over() && !piece.was_used());
        assert!(!piece.is_over() && piece.was_used());
        assert!(!turn.is_over());
        count_fields(4_000);
        assert!(piece.is_over() && turn.is_over());
        assert_eq!(things(&turn.of_crowds(), || ()), 1);
    }
}
