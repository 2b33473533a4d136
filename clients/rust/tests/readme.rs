//! The README's examples.
