//! Fencing tokens: integers that only grow, across all keys, restarts and failovers.
//!
//! The idea is Kleppmann's ("How to do distributed locking", 2016); that the clock can stand in for a stored counter
//! is that of hybrid logical clocks (Kulkarni et al., 2014).

use super::Millis;

/// A fencing token; above 0 and below 2^53.
pub type Token = u64;

/// The largest token that a JavaScript client reads exactly.
pub const MAX_TOKEN: Token = (1 << 53) - 1;

/// How far ahead of the clock, in ms, a token may be and still pass for one that a server issued.
///
/// The clocks of servers that take over from one another agree better than that. Anybody who may write a key can write
/// a token there, and must not be able to use up the numbers ahead: after a restart, when only the clock is left to go
/// by, tokens would otherwise go backwards.
pub const FARTHEST_AHEAD: Millis = 60 * 60 * 1000;

/// Issues tokens: `max(previous + 1, unix time in microseconds)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fence {
    last: Token,
}

impl Fence {
    /// The next token, greater than every one before it.
    pub fn next(&mut self, unix_micros: u64) -> Token {
        self.last = self.last.saturating_add(1).max(unix_micros).clamp(1, MAX_TOKEN);
        self.last
    }

    /// Takes note of a token found in the keyspace: one from an earlier run, or from a previous master, whose clock may
    /// have been ahead. A token that can be neither changes nothing.
    pub fn observe(&mut self, token: Token, now: Millis) {
        if self.is_credible(token, now) {
            self.last = self.last.max(token);
        }
    }

    /// Whether a server may have issued this token: this one during this run, or another whose clock agrees roughly.
    pub fn is_credible(&self, token: Token, now: Millis) -> bool {
        token <= self.last || token <= now.saturating_add(FARTHEST_AHEAD).saturating_mul(1000)
    }
}
