//! Locks as they are stored in the keyspace.

pub mod effects;
mod field_expiry;
pub mod holder_cache;
mod known;
pub mod layout;
pub mod listeners;
pub mod name;
mod restore;
mod tokens;
pub mod words;

pub use layout::{Held, Lock, MAX_OWNER, NotRead, most_holders_each};
pub use name::Name;
pub use tokens::{check_fence, kept_token, next_token, raise_fence};
