//! The checkers' report about a wrong history.

use std::fmt;

use crate::history::{Operation, Time};
use crate::spec::Lock;

/// A history that can't have happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule that it violates.
    pub rule: &'static str,
    /// The lock.
    pub key: Box<str>,
    /// The part of the history that can't be explained.
    pub between: (Time, Time),
    /// The operations of the longest possible order, in the order of the history.
    pub explained: Vec<Operation>,
    /// The other operations: the fault shows in one of these.
    pub stuck: Vec<Operation>,
    /// The possible states of the lock before that part.
    pub before: Vec<Lock>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = self.between;
        writeln!(f, "{}: {} between {from} and {to}", self.key, self.rule)?;
        let lines = |operations: &[Operation]| -> String {
            let line = |operation| serde_json::to_string(operation).unwrap_or_default();
            operations.iter().map(|operation| format!("    {}\n", line(operation))).collect()
        };
        for lock in &self.before {
            writeln!(f, "  before: {lock:?}")?;
        }
        write!(f, "  what could be explained:\n{}", lines(&self.explained))?;
        write!(f, "  what could not:\n{}", lines(&self.stuck))
    }
}

impl std::error::Error for Violation {}
