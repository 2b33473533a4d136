//! A lock as it lies in the keyspace.

pub mod effects;
pub mod layout;
pub mod listeners;
pub mod rosters;
pub mod words;

pub use layout::{Detail, Form, Lock};

use crate::lock::{Fence, Token};
use crate::server::{MainThread, clock::Now};

static FENCE: MainThread<Fence> = MainThread::new();

/// The next fencing token.
pub fn next_token(now: Now) -> Token {
    FENCE.with(|fence| fence.next(now.micros))
}

/// Tells of a token that stands in the keyspace.
fn observe(token: Option<Token>) {
    if let Some(token) = token {
        FENCE.with(|fence| fence.observe(token));
    }
}
