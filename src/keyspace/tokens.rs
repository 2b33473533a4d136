//! Fencing tokens: issues them, and checks those that are found in keys.

use super::known::known;
use crate::lock::{Millis, Token, fence};
use crate::server::clock::Now;

/// Issues the next fencing token.
pub fn next_token(now: Now) -> Token {
    known(|it| it.fence.next(now.micros))
}

/// The token that a hold keeps when its owner re-enters it; `None` if it gets a new one. A client with write access to
/// the key may have written any token there, and the module never returns one that no server can have issued.
pub fn kept_token(token: Option<Token>, now: Now) -> Option<Token> {
    credible(token, now.millis())
}

/// `token` if a server can have issued it; see [`fence::Fence::is_credible`].
pub fn credible(token: Option<Token>, now: Millis) -> Option<Token> {
    token.filter(|token| known(|it| it.fence.is_credible(*token, now)))
}

/// Records a token found in the keyspace.
pub fn observe(token: Option<Token>, now: Millis) {
    if let Some(token) = token {
        known(|it| it.fence.observe(token, now));
    }
}

/// Checks whether a hold's token may be raised to `token`: it must be one that a server can have issued.
///
/// # Errors
///
/// The reply that says what is allowed.
pub fn check_fence(token: Token, now: Now) -> Result<(), String> {
    let most = now.millis().saturating_add(fence::FARTHEST_AHEAD).saturating_mul(1000);
    if token > most {
        return Err(format!("ERR FENCE must be at most {most}, an hour ahead of this server's clock, got {token}"));
    }
    Ok(())
}

/// Makes all later tokens greater than this one.
pub fn raise_fence(token: Token, now: Now) {
    observe(Some(token), now.millis());
}
