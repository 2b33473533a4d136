//! Divides work on many holds or requests into slices, so that the server can run other commands in between.

use std::cell::Cell;

thread_local! {
    /// The work done since the module was loaded. A unit takes about a microsecond on the machine that runs the tests.
    static DONE: Cell<u64> = const { Cell::new(0) };
}

/// Units for an item that moves from one table to another.
const ITEM: u64 = 1;
/// Units for a key whose queue a request leaves: each queue is a table of its own.
const KEY: u64 = 2;
/// Units for looking up a lock.
const READ: u64 = 1;
/// Units for writing a lock, including its replication and its notifications.
const WRITE: u64 = 3;
/// Units for ending a request of a blocked client: the server composes and writes a reply.
const ANSWER: u64 = 7;
/// How many fields or holders are read, deleted or freed in one unit.
const FIELDS: usize = 4;

/// Counts the reading of a lock with this many fields read.
pub fn count_read(fields: usize) {
    count(READ.saturating_add(in_units(fields)));
}

/// Counts a write to a lock.
pub fn count_write() {
    count(WRITE);
}

/// Counts the end of a blocked client's request.
pub fn count_answer() {
    count(ANSWER);
}

/// Counts the keys of a request that leaves their queues.
pub fn count_keys(keys: usize) {
    count(KEY.saturating_mul(keys as u64));
}

/// Counts fields or holders that are read, deleted or freed.
pub fn count_fields(fields: usize) {
    count(in_units(fields));
}

fn in_units(fields: usize) -> u64 {
    u64::try_from(fields / FIELDS).unwrap_or(u64::MAX)
}

fn count(units: u64) {
    DONE.set(DONE.get().saturating_add(units));
}

/// A slice of work. When it is over, the caller stops and lets other work run, and continues in a later slice.
///
/// The size of a slice is a number of units, not a time. So it does not depend on how busy the machine is, and the same
/// requests always end in the same order.
#[derive(Debug)]
pub struct Slice {
    /// The size of the slice.
    units: u64,
    /// The value of [`DONE`] at which the slice must end at the latest: the end of its parent, if it is a share of one.
    latest_end: u64,
    /// The value of [`DONE`] at which the slice is over. The first call of [`Slice::is_over`] starts the slice and sets
    /// this.
    end: Cell<Option<u64>>,
    was_used: Cell<bool>,
}

impl Slice {
    /// The slice for all the work of one event-loop iteration, so that no client has to wait longer than 5 ms for it.
    ///
    /// Only the last item of work may exceed the slice. The iteration takes less than 5 ms even with the longest item
    /// and the replies. The longest items are reading a lock with the maximum number of holders again, and granting a
    /// request for the maximum number of keys.
    pub fn of_iteration() -> Self {
        Self::start_with(1_000)
    }

    /// The slice for replies that were postponed: see [`super::blocked::Blocked::may_be_ended_by_server`].
    pub fn of_replies() -> Self {
        Self::start_with(100)
    }

    /// The slice for work of any length within one command, such as serving waiters, before its client gets the reply.
    pub fn of_command() -> Self {
        Self::start_with(500)
    }

    fn start_with(units: u64) -> Self {
        Self::within(DONE.get().saturating_add(units), units)
    }

    fn within(latest_end: u64, units: u64) -> Self {
        Self { units, latest_end, end: Cell::default(), was_used: Cell::default() }
    }

    /// The share of one kind of work. No kind of work can use the whole slice and starve the others.
    pub fn piece(&self) -> Self {
        self.share(200)
    }

    /// The share for serving waiters.
    pub fn of_waiters(&self) -> Self {
        self.share(600)
    }

    /// A slice of `units`, which ends with this one at the latest.
    fn share(&self, units: u64) -> Self {
        Self::within(self.end.get().unwrap_or(self.latest_end), units)
    }

    /// Whether the slice is over. The caller checks this before each item of work. The first call always returns
    /// `false`, so that at least one item is done.
    pub fn is_over(&self) -> bool {
        let done = DONE.get();
        DONE.set(done.saturating_add(ITEM));
        let Some(end) = self.end.get() else {
            self.end.set(Some(done.saturating_add(self.units).min(self.latest_end)));
            return false;
        };
        self.was_used.set(true);
        done >= end
    }

    /// Whether at least one item was done: [`Slice::is_over`] was called again after the first item.
    pub fn was_used(&self) -> bool {
        self.was_used.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(slice: &Slice, mut each: impl FnMut()) -> usize {
        let mut items = 0;
        while !slice.is_over() {
            each();
            items += 1;
        }
        items
    }

    #[test]
    fn slice_is_over_after_the_same_number_of_items() {
        assert_eq!(items(&Slice::of_iteration().piece(), || ()), 200);
        let renewal = || {
            count_read(0);
            count_write();
        };
        assert_eq!(items(&Slice::of_iteration().piece(), renewal), 40);
        let grant = || {
            renewal();
            count_answer();
        };
        assert_eq!(items(&Slice::of_iteration().of_waiters(), grant), 50);
        assert_eq!(
            items(&Slice::of_command(), || count_read(5_000)),
            1,
            "a lock with 2,500 holders is a slice of its own"
        );
    }

    #[test]
    fn share_ends_with_its_parent_and_allows_a_first_item() {
        let whole = Slice::of_iteration();
        let piece = whole.piece();
        assert!(!piece.is_over() && !piece.was_used());
        assert!(!piece.is_over() && piece.was_used());
        assert!(!whole.is_over());
        count_fields(4_000);
        assert!(piece.is_over() && whole.is_over());
        assert_eq!(items(&whole.of_waiters(), || ()), 1);
    }
}
