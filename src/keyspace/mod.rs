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

/// A token may be raised to at most so far ahead of the clock, in microseconds: an hour.
const MOST_AHEAD: Token = 60 * 60 * 1_000_000;

/// Whether a token may be raised to `fence`.
///
/// # Errors
///
/// The reply that tells what is allowed.
pub fn check_fence(fence: Token, now: Now) -> Result<(), String> {
    let most = now.micros.saturating_add(MOST_AHEAD);
    if fence > most {
        return Err(format!("ERR FENCE must be at most {most}, an hour ahead of this server's clock, got {fence}"));
    }
    Ok(())
}

/// From now on, tokens are greater than this one.
pub fn raise_fence(fence: Token, _now: Now) {
    observe(Some(fence));
}
