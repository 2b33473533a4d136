//! Fencing tokens: integers that only grow, across all keys, restarts and failovers.
//!
//! The idea is Kleppmann's ("How to do distributed locking", 2016). Using the clock in place of a stored counter comes
//! from hybrid logical clocks (Kulkarni et al., 2014).

use super::Millis;

/// A fencing token; above 0 and below 2^53.
pub type Token = u64;

/// The largest token that a JavaScript client can read exactly.
pub const MAX_TOKEN: Token = (1 << 53) - 1;

/// How far, in ms, a token may be ahead of the clock and still count as issued by a server.
///
/// A server that takes over from another has a clock that is closer than that. A client with write access to a key can
/// write any token there. It must not be able to use up all numbers ahead: after a restart only the clock is left, so
/// tokens would go backwards.
pub const FARTHEST_AHEAD: Millis = 60 * 60 * 1000;

/// Issues tokens: `max(previous + 1, unix time in microseconds)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fence {
    last: Token,
}

impl Fence {
    /// Issues a token that is greater than every one before.
    pub fn next(&mut self, unix_micros: u64) -> Token {
        self.last = self.last.saturating_add(1).max(unix_micros).clamp(1, MAX_TOKEN);
        self.last
    }

    /// Records a token found in the keyspace. It comes from an earlier run, or from a previous primary whose clock may
    /// have been ahead. Ignores a token that no server can have issued.
    pub fn observe(&mut self, token: Token, now: Millis) {
        if self.is_credible(token, now) {
            self.last = self.last.max(token);
        }
    }

    /// Whether a server can have issued this token: this server during this run, or a server whose clock roughly
    /// agrees.
    pub fn is_credible(&self, token: Token, now: Millis) -> bool {
        token <= self.last || token <= now.saturating_add(FARTHEST_AHEAD).saturating_mul(1000)
    }
}
