//! The name of a key or an owner, for the server and for the module's tables.

use crate::server::{AsText, TextRef};
use std::cell::OnceCell;
use std::rc::Rc;

/// A name as the server's string, as its bytes, and as the copy that all tables share.
#[derive(Clone, Debug)]
pub struct Name<'a> {
    text: TextRef<'a>,
    bytes: &'a [u8],
    /// Made for the first table that needs it.
    kept: OnceCell<Rc<[u8]>>,
}

impl<'a> Name<'a> {
    /// A name that has been copied already.
    pub fn with_copy(text: TextRef<'a>, copy: &Rc<[u8]>) -> Self {
        Self { kept: OnceCell::from(copy.clone()), ..Self::from(text) }
    }

    /// The server's string.
    pub fn text(&self) -> TextRef<'a> {
        self.text
    }

    /// Its bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The shared copy, for a table.
    pub fn kept(&self) -> Rc<[u8]> {
        self.kept.get_or_init(|| self.bytes.into()).clone()
    }
}

impl<'a> From<TextRef<'a>> for Name<'a> {
    fn from(text: TextRef<'a>) -> Self {
        Self { text, bytes: text.bytes(), kept: OnceCell::new() }
    }
}

impl AsText for Name<'_> {
    fn as_text(&self) -> TextRef<'_> {
        self.text
    }
}
