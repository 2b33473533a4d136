//! State of the module: touched on the server's main thread only.

use std::cell::{OnceCell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A value that the module keeps between callbacks.
///
/// A static rather than a thread-local: it is faster to reach from a shared library, and it registers no destructor,
/// which would keep the library from being unloaded.
#[derive(Debug)]
pub struct MainThread<T>(OnceCell<RefCell<T>>);

// SAFETY: the server calls the module with its global lock held, on its main thread: commands, timers, events and
// notifications. Only another module's thread, which has taken that lock, can make it call on that thread instead, by a
// command: one of this module is refused there ([`is_here`]), and a notification or event of another one still has the
// value to itself, since no other thread has the lock. The module starts no thread and never releases the lock.
unsafe impl<T> Sync for MainThread<T> {}

/// The server's main thread, as the system names it; 0 until the module is loaded.
static MAIN: AtomicUsize = AtomicUsize::new(0);

/// Notes that this is the server's main thread: the module is being loaded on it.
pub(super) fn begin() {
    MAIN.store(this_thread(), Relaxed);
}

/// Whether this is the server's main thread. Another module may call a command from a thread of its own.
pub(super) fn is_here() -> bool {
    MAIN.load(Relaxed) == this_thread()
}

fn this_thread() -> usize {
    // SAFETY: takes nothing, returns a name.
    unsafe { libc::pthread_self() as usize }
}

impl<T: Default> MainThread<T> {
    /// The default value, made at the first use.
    pub const fn new() -> Self {
        Self(OnceCell::new())
    }

    /// Lends the value to `work`, which must not come back here: it calls no function of the server that calls the
    /// module.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.0.get_or_init(RefCell::default).borrow_mut())
    }

    /// As [`MainThread::with`], for callbacks that may come while the value is lent: `None` then.
    pub fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        Some(work(&mut *self.0.get_or_init(RefCell::default).try_borrow_mut().ok()?))
    }
}

impl<T: Default> Default for MainThread<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A value that is made at the first use and never changes: as [`MainThread`], but without keeping track of who has
/// borrowed it.
#[derive(Debug)]
pub struct Constant<T>(OnceCell<T>);

// SAFETY: only the server's main thread reaches it, as for `MainThread`: the cell is never filled by two threads at
// once, and what it gives out is never changed afterwards.
unsafe impl<T> Sync for Constant<T> {}

impl<T: Default> Constant<T> {
    /// The default value, made at the first use.
    pub const fn new() -> Self {
        Self(OnceCell::new())
    }

    /// The value.
    pub fn get(&self) -> &T {
        self.0.get_or_init(T::default)
    }
}

impl<T: Default> Default for Constant<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::{begin, is_here};

    #[test]
    fn another_thread_is_not_the_main_thread() {
        begin();
        assert!(is_here());
        assert!(!std::thread::spawn(is_here).join().expect("it answers"));
    }
}
