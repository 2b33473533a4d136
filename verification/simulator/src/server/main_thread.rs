//! State of the module: one value for each simulated server. A thread has one server at a time.

use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How many values there can be.
const MOST: usize = 64;

type Values = [OnceCell<Box<dyn Any>>; MOST];

thread_local! {
    static VALUES: RefCell<Values> = const { RefCell::new([const { OnceCell::new() }; MOST]) };
}

static PLACES: AtomicUsize = AtomicUsize::new(0);

/// Drops all of it, as when the server's process ends.
pub fn forget_all() {
    VALUES.with(|values| values.borrow_mut().iter_mut().for_each(|value| drop(value.take())));
}

/// A value that the module keeps between callbacks.
#[derive(Debug)]
pub struct MainThread<T> {
    position: OnceLock<usize>,
    kind: PhantomData<fn() -> T>,
}

impl<T: Default + 'static> MainThread<T> {
    /// The default value, made at the first use.
    pub const fn new() -> Self {
        Self { position: OnceLock::new(), kind: PhantomData }
    }

    fn lend<R>(&self, work: impl FnOnce(&RefCell<T>) -> R) -> R {
        let position = *self.position.get_or_init(|| PLACES.fetch_add(1, Relaxed));
        VALUES.with(|values| {
            let values = values.borrow();
            let value = values[position].get_or_init(|| Box::new(RefCell::new(T::default())));
            work(value.downcast_ref().unwrap_or_else(|| unreachable!("each has a place of its own")))
        })
    }

    /// Lends the value to `work`, which must not call this again.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        self.lend(|value| work(&mut value.borrow_mut()))
    }

    /// As [`MainThread::with`], for callbacks that may come while the value is lent: `None` then.
    pub fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.lend(|value| Some(work(&mut *value.try_borrow_mut().ok()?)))
    }
}

impl<T: Default + 'static> Default for MainThread<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A value that is made at the first use and never changes.
#[derive(Debug)]
pub struct Constant<T>(OnceLock<T>);

impl<T: Default> Constant<T> {
    /// The default value, made at the first use.
    pub const fn new() -> Self {
        Self(OnceLock::new())
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
