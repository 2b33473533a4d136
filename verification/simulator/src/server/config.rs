//! The module's settings, as the server sees them: they keep their defaults.

use super::Ctx;
use std::ffi::CStr;
use std::sync::atomic::AtomicI64;

/// A setting.
#[derive(Debug)]
pub struct Setting {
    /// Its name, without the module's.
    pub name: &'static CStr,
    /// Its value: a number, or which of the words.
    pub value: AtomicI64,
    /// Its default.
    pub default: i64,
    /// What it may be.
    pub allowed: Allowed,
}

/// What a setting may be.
#[derive(Debug)]
pub enum Allowed {
    /// A number from the first to the second.
    Numbers(i64, i64),
    /// One of these words.
    Words(&'static [&'static CStr]),
}

impl Setting {
    /// Registers the setting with the server.
    pub fn register(&'static self, _: Ctx) -> bool {
        true
    }
}

/// Lets the server set what was registered.
pub fn load(_: Ctx) -> bool {
    true
}
