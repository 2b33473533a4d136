//! Internal errors: invariants of the module that do not hold. They are counted (`INFO holdfast`, `internal_errors`), and
//! each kind is written to the server's log once. None may ever be reported.
//!
//! Reporting needs no server, so that every part of the module can do it. The event loop writes to the log what is new.

use std::cell::Cell;

/// How many kinds are distinguished. Errors of further kinds are counted, and not logged.
const MOST_KINDS: usize = 32;

/// What was reported.
#[derive(Clone, Copy)]
struct Errors {
    count: u64,
    /// In the order in which they were first reported.
    kinds: [Option<&'static str>; MOST_KINDS],
    /// How many of the kinds are in the log.
    logged: usize,
}

thread_local! {
    // In a cell, which has no destructor: one would keep the library from being unloaded.
    static ERRORS: Cell<Errors> = const { Cell::new(Errors { count: 0, kinds: [None; MOST_KINDS], logged: 0 }) };
}

/// Reports that an invariant does not hold; `kind` says which, and is written to the log as it is.
#[cold]
pub fn report(kind: &'static str) {
    let mut errors = ERRORS.get();
    errors.count = errors.count.saturating_add(1);
    let is_new = |place: &&mut Option<&str>| place.is_none_or(|known| known == kind);
    if let Some(place) = errors.kinds.iter_mut().find(is_new) {
        *place = Some(kind);
    }
    ERRORS.set(errors);
}

/// `value`, which must be there: its absence is reported as an error of this kind.
pub fn expect<T>(value: Option<T>, kind: &'static str) -> Option<T> {
    if value.is_none() {
        report(kind);
    }
    value
}

/// How many errors were reported since the module was loaded.
pub fn count() -> u64 {
    ERRORS.get().count
}

/// The kinds of error that were reported, in order.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    ERRORS.get().kinds.into_iter().flatten()
}

/// The next kind that has to be logged. It is not returned again.
pub fn next_to_log() -> Option<&'static str> {
    let mut errors = ERRORS.get();
    let kind = errors.kinds.get(errors.logged).copied().flatten()?;
    errors.logged = errors.logged.saturating_add(1);
    ERRORS.set(errors);
    Some(kind)
}

/// Forgets all errors: the module is about to be unloaded.
pub fn forget() {
    ERRORS.set(Errors { count: 0, kinds: [None; MOST_KINDS], logged: 0 });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_counted_and_each_kind_logged_once() {
        forget();
        assert_eq!((count(), next_to_log()), (0, None));
        ["one", "two", "one"].into_iter().for_each(report);
        assert_eq!(expect(Some(3), "three"), Some(3));
        assert_eq!(expect(None::<u8>, "two"), None);
        assert_eq!(count(), 4);
        assert!(kinds().eq(["one", "two"]));
        assert_eq!([next_to_log(), next_to_log(), next_to_log()], [Some("one"), Some("two"), None]);
        report("one");
        assert_eq!((count(), next_to_log()), (5, None));
        forget();
        assert_eq!((count(), next_to_log()), (0, None));
    }
}
