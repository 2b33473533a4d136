//! What clients observed of their locks, in one format, and two independent checkers.
//!
//! [`history`] is the format: one operation a line, specified in verification/histories/README.md. [`spec`] specifies a
//! lock on one page. [`check()`] asks stateright's `LinearizabilityTester` whether any order of the operations explains
//! what the clients observed. [`intervals`] checks fewer rules, on millions of operations.
//!
//! ```
//! use histories::{Operation, Outcome, Request, check};
//!
//! let acquire = |owner: &str| Request::acquire(owner, 1, Some(10_000_000));
//! let mut seen = vec![
//!     Operation::new("p1", "printer", acquire("alice"), (100, 200), Outcome::Token(7)),
//!     Operation::new("p2", "printer", acquire("bob"), (300, 400), Outcome::Null),
//!     Operation::new("p1", "printer", Request::release("alice"), (500, 600), Outcome::Left(0)),
//! ];
//! assert!(check(&seen).is_ok());
//!
//! seen[1].outcome = Outcome::Token(8); // A second holder.
//! assert!(check(&seen).is_err());
//! ```
#![forbid(unsafe_code)]

pub mod checker;
pub mod history;
pub mod intervals;
mod search;
pub mod spec;
mod tokens;
mod violation;

pub use checker::check;
pub use history::{Operation, Outcome, Request, Time, read, write};
pub use violation::Violation;
