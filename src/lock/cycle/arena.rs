//! Tables whose rows name each other by number. A number of one table can't be used for another.

use std::marker::PhantomData;

/// The number of a row in some table.
pub trait Index: Copy {
    /// The number of the row at this position.
    fn new(position: usize) -> Self;

    /// Its position.
    fn position(self) -> usize;
}

/// A row number with a type of its own. Four bytes: there are many, and never as many as four bytes can count.
macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $crate::lock::cycle::arena::Index for $name {
            fn new(position: usize) -> Self {
                Self(u32::try_from(position).unwrap_or(u32::MAX))
            }

            fn position(self) -> usize {
                self.0 as usize
            }
        }
    };
}
pub(crate) use index;

/// The number of the row after this one.
pub fn next<I: Index>(index: I) -> I {
    I::new(index.position().saturating_add(1))
}

/// A table that only grows.
#[derive(Debug)]
pub struct Arena<I, T> {
    rows: Vec<T>,
    index: PhantomData<I>,
}

impl<I, T> Default for Arena<I, T> {
    fn default() -> Self {
        Self { rows: Vec::new(), index: PhantomData }
    }
}

impl<I: Index, T> Arena<I, T> {
    /// Adds a row; its number.
    pub fn push(&mut self, row: T) -> I {
        let index = self.end();
        self.rows.push(row);
        index
    }

    /// The number that the next row will have.
    pub fn end(&self) -> I {
        I::new(self.rows.len())
    }

    /// A row.
    pub fn get(&self, index: I) -> Option<&T> {
        self.rows.get(index.position())
    }

    /// A row, to be changed.
    pub fn get_mut(&mut self, index: I) -> Option<&mut T> {
        self.rows.get_mut(index.position())
    }
}
