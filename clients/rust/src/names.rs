//! Keys and owners: bytes, which are escaped when printed.

use std::fmt;
use std::sync::Arc;

/// The separator between an actor and the number of its request.
pub(crate) const ACTOR_ENDS: &[u8] = b"##";

/// The keys of a request, in its order. Any bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Keys(Arc<[Box<[u8]>]>);

/// The owner of a hold or request: 1 to 512 bytes. The client makes a new one for each acquisition.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Owner(Arc<[u8]>);

impl Keys {
    /// The keys, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|key| &**key)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn first(&self) -> &[u8] {
        self.0.first().map_or(&[], |key| key)
    }
}

impl<K: AsRef<[u8]>> FromIterator<K> for Keys {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        Self(keys.into_iter().map(|key| Box::from(key.as_ref())).collect())
    }
}

impl Owner {
    /// The bytes, as the server has them.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The actor, as the server understands it: all before the first `##`.
    pub(crate) fn actor(&self) -> &[u8] {
        let end = self.0.windows(ACTOR_ENDS.len()).position(|part| part == ACTOR_ENDS);
        self.0.get(..end.unwrap_or(self.0.len())).unwrap_or_default()
    }
}

impl From<Vec<u8>> for Owner {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

/// In quotation marks, with escapes for bytes that can't be printed.
impl fmt::Display for Keys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, key) in self.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(out, "{separator}\"{}\"", key.escape_ascii())?;
        }
        Ok(())
    }
}

/// In quotation marks, with escapes for bytes that can't be printed.
impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "\"{}\"", self.0.escape_ascii())
    }
}

/// As it is shown: an error that `main` returns is printed in this way.
impl fmt::Debug for Keys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// As it is shown.
impl fmt::Debug for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}
