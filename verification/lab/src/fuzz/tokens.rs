//! Tokens increase, and stay near the clock, whatever other clients write into locks.

use std::time::{SystemTime, UNIX_EPOCH};

use redis::Connection;

/// How far ahead of the clock a token may be, in microseconds: a token that was written an hour ahead still counts.
const AHEAD: i64 = 3_600_000_000 + SLACK;
/// For tokens issued in between, and differences between clocks.
const SLACK: i64 = 60_000_000;

/// The newest token of a lock that only this probe uses.
#[derive(Default)]
pub struct Tokens {
    newest: i64,
}

impl Tokens {
    /// Acquires the lock, and checks its token.
    pub fn probe(&mut self, connection: &mut Connection) -> Result<(), String> {
        let key = format!("probe:{}", self.newest);
        let mut request = redis::cmd("LOCK.ACQUIRE");
        let token = request.arg(key).arg("prober").arg("LEASE").arg(1).query(connection);
        let token: i64 = token.map_err(|error| format!("a free lock can't be acquired: {error}"))?;
        self.check(token, now())
    }

    fn check(&mut self, token: i64, now: i64) -> Result<(), String> {
        let before = std::mem::replace(&mut self.newest, token);
        if token <= before {
            return Err(format!("token {token} follows {before}"));
        }
        if token > now + AHEAD {
            return Err(format!("token {token} is {} minutes ahead of the clock", (token - now) / 60_000_000));
        }
        Ok(())
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decreasing_or_far_tokens_are_found() {
        let mut tokens = Tokens::default();
        let now = 1_764_000_000_000_000;
        assert!(tokens.check(now, now).is_ok());
        assert!(tokens.check(now + 3_600_000_000, now).is_ok());
        assert!(tokens.check(now + 3_600_000_000, now).is_err());
        assert!(tokens.check(now + 2 * AHEAD, now).is_err());
    }
}
