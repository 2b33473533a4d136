//! Internal errors: violated invariants of the module. Each one is counted (`INFO holdfast`, `internal_errors`), and
//! each kind is logged once. A correct module reports none.
//!
//! A report needs no server, so that every part of the module can make one. The event loop logs new kinds.

use std::cell::Cell;

/// How many kinds are distinguished. Errors of further kinds are counted, but not logged.
const MOST_KINDS: usize = 32;

thread_local! {
    // Cells, because they have no destructor: a destructor would keep the library from being unloaded.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// In the order in which they were first reported.
    static KINDS: [Cell<Option<&'static str>>; MOST_KINDS] = const { [const { Cell::new(None) }; MOST_KINDS] };
    /// How many of the kinds have been logged.
    static LOGGED: Cell<usize> = const { Cell::new(0) };
}

/// Reports a violated invariant. `kind` says which one, and is logged as it is.
#[cold]
pub fn report(kind: &'static str) {
    COUNT.set(COUNT.get().saturating_add(1));
    let is_new = |place: &&Cell<Option<&str>>| place.get().is_none_or(|known| known == kind);
    KINDS.with(|kinds| kinds.iter().find(is_new).into_iter().for_each(|place| place.set(Some(kind))));
}

/// Returns `value`, which must be present. Reports an absent value as an error of this kind.
pub fn expect<T>(value: Option<T>, kind: &'static str) -> Option<T> {
    if value.is_none() {
        report(kind);
    }
    value
}

/// How many errors have been reported since the module was loaded.
pub fn count() -> u64 {
    COUNT.get()
}

/// The kinds of error that have been reported, in order.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.with(|kinds| kinds.each_ref().map(Cell::get)).into_iter().flatten()
}

/// The next kind to log. Each kind is returned once. (The event loop asks at each run of the server's cron.)
pub fn next_to_log() -> Option<&'static str> {
    let logged = LOGGED.get();
    let kind = KINDS.with(|kinds| kinds.get(logged).and_then(Cell::get))?;
    LOGGED.set(logged.saturating_add(1));
    Some(kind)
}

/// Clears all errors, because the module is about to be unloaded.
pub fn forget() {
    COUNT.set(0);
    LOGGED.set(0);
    KINDS.with(|kinds| kinds.iter().for_each(|kind| kind.set(None)));
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
