//! The module's section of `INFO`.

use crate::node::node;
use std::ffi::CStr;

/// The section, to be filled.
#[derive(Clone, Copy, Debug)]
pub struct Section(pub(crate) ());

impl Section {
    /// Adds a line.
    pub fn number(self, name: &CStr, value: u64) {
        node(|node| node.info.insert(name.to_string_lossy().into_owned(), value));
    }

    /// Adds a line whose value is a text.
    pub fn text(self, _: &CStr, _: &str) {}
}
