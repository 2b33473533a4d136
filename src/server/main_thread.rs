//! State of the module that only the server's main thread accesses.

use std::cell::{OnceCell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A value that the module keeps between callbacks.
///
/// It is meant for statics instead of thread-locals. A static in a shared library is faster to access, and registers no
/// destructor, which would prevent the library from being unloaded.
#[derive(Debug)]
pub struct MainThread<T>(OnceCell<RefCell<T>>);

// SAFETY: the server runs commands, timers, events and notifications of the module on its main thread, with its global
// lock held. There is one exception: a thread of another module that has taken the lock can run a command. A command of
// this module is refused there ([`is_current`]). Any other command can cause a notification or an event on that thread.
// The callback still has exclusive access to the value, because no other thread holds the lock. This module starts no
// thread and never releases the lock.
unsafe impl<T> Sync for MainThread<T> {}

/// The system's identifier of the server's main thread; 0 until the module is loaded.
static MAIN: AtomicUsize = AtomicUsize::new(0);

/// Records the current thread as the server's main thread. The server loads the module on it.
pub(super) fn begin() {
    MAIN.store(this_thread(), Relaxed);
}

/// Whether the current thread is the server's main thread. Another module may call a command from a thread of its own.
pub(super) fn is_current() -> bool {
    MAIN.load(Relaxed) == this_thread()
}

fn this_thread() -> usize {
    // SAFETY: the function takes nothing, and returns an identifier.
    unsafe { libc::pthread_self() as usize }
}

impl<T: Default> MainThread<T> {
    /// The default value, created at the first use.
    pub const fn new() -> Self {
        Self(OnceCell::new())
    }

    /// Lends the value to `work`. `work` must not access the same value again, so it must not call a function of the
    /// server that calls the module.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.0.get_or_init(RefCell::default).borrow_mut())
    }

    /// Like [`MainThread::with`], but returns `None` if the value is already lent, as it can be in some callbacks.
    pub fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        Some(work(&mut *self.0.get_or_init(RefCell::default).try_borrow_mut().ok()?))
    }
}

impl<T: Default> Default for MainThread<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A value that is created at the first use and never changes. Unlike [`MainThread`], it does not track borrows.
#[derive(Debug)]
pub struct Constant<T>(OnceCell<T>);

// SAFETY: only the server's main thread accesses it, as for `MainThread`. So two threads never fill the cell at the
// same time, and the value never changes afterwards.
unsafe impl<T> Sync for Constant<T> {}

impl<T: Default> Constant<T> {
    /// The default value, created at the first use.
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
    use super::{begin, is_current};

    #[test]
    fn another_thread_is_not_the_main_thread() {
        begin();
        assert!(is_current());
        assert!(!std::thread::spawn(is_current).join().expect("it answers"));
    }
}
