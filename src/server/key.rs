//! A key of the keyspace, through the low-level API: no command is run, nothing is looked up twice.

use super::ctx::Ctx;
use super::text::{Text, TextRef};
use crate::lock::Deadline;
use redis_module::raw::{self, RedisModuleKey, RedisModuleString};
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::null_mut;

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// There is no such key.
    Missing,
    /// A hash.
    Hash,
    /// Anything else.
    Other,
}

const KEYTYPE_EMPTY: c_int = raw::REDISMODULE_KEYTYPE_EMPTY as c_int;
const KEYTYPE_HASH: c_int = raw::REDISMODULE_KEYTYPE_HASH as c_int;

/// What is done with each field and value of a hash.
pub type EachField<'f> = &'f mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An open key. Reading a key that has expired removes it first, as every command does.
///
/// Whoever changes it calls [`Ctx::signal_modified`]: opening alone tells nobody.
#[derive(Debug)]
pub struct Key<'a> {
    raw: *mut RedisModuleKey,
    lives: PhantomData<&'a ()>,
}

impl<'a> Key<'a> {
    /// Opens a key for reading and writing, whether or not it exists.
    pub fn open(ctx: Ctx<'a>, name: TextRef<'a>) -> Self {
        let mode = c_int::try_from(raw::REDISMODULE_READ | raw::REDISMODULE_WRITE).unwrap_or(0);
        // SAFETY: context and name live for 'a, and the handle is closed before: it does not outlive 'a.
        let raw = unsafe { api!(RedisModule_OpenKey)(ctx.raw(), name.raw(), mode) };
        Self { raw: raw.cast(), lives: PhantomData }
    }

    /// What it holds.
    pub fn kind(&self) -> Kind {
        // SAFETY: the handle is open; null means missing to this function.
        let kind = unsafe { api!(RedisModule_KeyType)(self.raw) };
        match kind {
            KEYTYPE_EMPTY => Kind::Missing,
            KEYTYPE_HASH => Kind::Hash,
            _ => Kind::Other,
        }
    }

    /// How many fields the hash has.
    pub fn fields(&self) -> usize {
        // SAFETY: the handle is open.
        unsafe { api!(RedisModule_ValueLength)(self.raw) }
    }

    /// The value of a field.
    pub fn get(&self, field: TextRef) -> Option<Text> {
        let mut value: *mut RedisModuleString = null_mut();
        let end: *mut RedisModuleString = null_mut();
        // SAFETY: the handle is open and a hash; the list is pairs of a field and of where to put its value, and ends
        // with null. Automatic memory is off, so the value is ours.
        unsafe {
            api!(RedisModule_HashGet)(self.raw, 0, field.raw(), &raw mut value, end);
            Text::from_raw(value)
        }
    }

    /// Sets fields; makes the hash if the key is missing.
    pub fn set(&self, pairs: &[(TextRef, TextRef)]) {
        let end: *mut RedisModuleString = null_mut();
        let hash_set = api!(RedisModule_HashSet);
        // SAFETY: the handle is open for writing and a hash or missing; pairs of strings end with null. The server
        // copies both.
        match pairs {
            [(f1, v1), (f2, v2)] => unsafe {
                hash_set(self.raw, 0, f1.raw(), v1.raw(), f2.raw(), v2.raw(), end);
            },
            _ => {
                for (field, value) in pairs {
                    // SAFETY: as above.
                    unsafe { hash_set(self.raw, 0, field.raw(), value.raw(), end) };
                }
            }
        }
    }

    /// Deletes a field; with the last one the key goes too.
    pub fn delete_field(&self, field: TextRef) {
        let end: *mut RedisModuleString = null_mut();
        let delete = std::ptr::without_provenance_mut::<RedisModuleString>(1);
        // SAFETY: the handle is open for writing; the constant 1 in place of a value is REDISMODULE_HASH_DELETE.
        unsafe { api!(RedisModule_HashSet)(self.raw, 0, field.raw(), delete, end) };
    }

    /// Deletes the key.
    pub fn delete(&self) {
        // SAFETY: the handle is open for writing.
        unsafe { api!(RedisModule_DeleteKey)(self.raw) };
    }

    /// When the key expires.
    pub fn expiry(&self) -> Deadline {
        // SAFETY: the handle is open.
        let at = unsafe { api!(RedisModule_GetAbsExpire)(self.raw) };
        u64::try_from(at).map_or(Deadline::Never, Deadline::At)
    }

    /// Whether a field of the hash, which exists, has an expiry of its own; `None` where the server can't tell.
    pub fn has_expiring_field(&self) -> Option<bool> {
        let first = newer_api!(RedisModule_HashFieldMinExpire)?;
        // SAFETY: the handle is open and a hash.
        Some(unsafe { first(self.raw) } != i64::from(raw::REDISMODULE_NO_EXPIRE))
    }

    /// Lets the key, which exists, expire at a moment, or never.
    pub fn set_expiry(&self, deadline: Deadline) {
        let at = match deadline {
            Deadline::At(at) => i64::try_from(at).unwrap_or(i64::MAX),
            Deadline::Never => i64::from(raw::REDISMODULE_NO_EXPIRE),
        };
        // SAFETY: the handle is open for writing.
        unsafe { api!(RedisModule_SetAbsExpire)(self.raw, at) };
    }

    /// Calls `each` with every field and value until it breaks off or all were seen. A field may be seen twice.
    pub fn scan(&self, each: EachField) {
        struct Scan<'f> {
            each: EachField<'f>,
            broken_off: bool,
        }
        unsafe extern "C" fn on_field(
            _key: *mut RedisModuleKey,
            field: *mut RedisModuleString,
            value: *mut RedisModuleString,
            scan: *mut c_void,
        ) {
            // SAFETY: `scan` is the structure below, which outlives the scan and is used by nobody else meanwhile;
            // the strings live for this call.
            unsafe {
                let scan = &mut *scan.cast::<Scan>();
                let (Some(field), Some(value)) = (TextRef::from_raw(field), TextRef::from_raw(value)) else { return };
                if !scan.broken_off {
                    scan.broken_off = (scan.each)(field.bytes(), value.bytes()).is_break();
                }
            }
        }
        let mut scan = Scan { each, broken_off: false };
        // SAFETY: the cursor is made and destroyed here; the key is open and not changed during the scan.
        unsafe {
            let cursor = api!(RedisModule_ScanCursorCreate)();
            while !scan.broken_off
                && api!(RedisModule_ScanKey)(self.raw, cursor, Some(on_field), (&raw mut scan).cast()) != 0
            {
            }
            api!(RedisModule_ScanCursorDestroy)(cursor);
        }
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        // SAFETY: opened in `open`, closed once. Null is allowed.
        unsafe { api!(RedisModule_CloseKey)(self.raw) };
    }
}
