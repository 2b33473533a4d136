//! The server's strings: bytes of any kind.

pub use super::bytes::{parse_number, show, show_start};

/// Something that the server can take as a string without a copy.
pub trait AsText {
    /// The server's string.
    fn as_text(&self) -> TextRef<'_>;
}

/// A string that the server owns for as long as `'a`.
#[derive(Clone, Copy, Debug)]
pub struct TextRef<'a>(pub(crate) &'a [u8]);

impl<'a> TextRef<'a> {
    /// The string's bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }
}

impl AsText for TextRef<'_> {
    fn as_text(&self) -> TextRef<'_> {
        *self
    }
}

/// A string that this module owns.
#[derive(Debug)]
pub struct Text(Vec<u8>);

impl Text {
    /// A new string with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// A number in decimal.
    pub fn number(value: u64) -> Self {
        Self(value.to_string().into_bytes())
    }

    /// A new string made of `parts`.
    pub fn concat(parts: &[&[u8]]) -> Self {
        Self(parts.concat())
    }

    /// The string's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl AsText for Text {
    fn as_text(&self) -> TextRef<'_> {
        TextRef(&self.0)
    }
}
