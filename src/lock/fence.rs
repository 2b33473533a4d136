//! Fencing tokens: integers that only grow, over all keys, restarts and failovers.
//!
//! The idea is Kleppmann's ("How to do distributed locking", 2016); that the clock can stand in for a stored counter
//! is that of hybrid logical clocks (Kulkarni et al., 2014).

/// A fencing token; above 0 and below 2^53.
pub type Token = u64;

/// The largest token that a JavaScript client reads exactly.
pub const MAX_TOKEN: Token = (1 << 53) - 1;

/// Tokens found in the keyspace count only up to here (the year 2112, as microseconds), so that no hash made by hand
/// can use up the numbers above it.
const MAX_OBSERVED: Token = 1 << 52;

/// Gives out tokens: `max(previous + 1, unix time in microseconds)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fence {
    last: Token,
}

impl Fence {
    /// The next token, greater than each before.
    pub fn next(&mut self, unix_micros: u64) -> Token {
        self.last = self.last.saturating_add(1).max(unix_micros).clamp(1, MAX_TOKEN);
        self.last
    }

    /// Tells of a token that was found in the keyspace: one of an earlier run, or of a master before this one, whose
    /// clock may have been ahead.
    pub fn observe(&mut self, token: Token) {
        if token < MAX_OBSERVED {
            self.last = self.last.max(token);
        }
    }
}
