//! A request as it is sent.

/// A request: the command's name and its arguments.
pub type Words = Vec<Vec<u8>>;
