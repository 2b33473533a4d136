//! A lock as it is stored in the keyspace.

pub mod effects;
mod field_expiry;
mod known;
pub mod layout;
pub mod listeners;
mod restore;
pub mod rosters;
mod tokens;
pub mod words;

pub use layout::{Held, Lock, MAX_OWNER, NotRead, most_holders_each};
pub use tokens::{check_fence, kept_token, next_token, raise_fence};
