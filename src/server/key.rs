//! A key of the keyspace. The low-level API reads and writes it without running a command, after a single lookup.

use super::ctx::Ctx;
use super::open_keys;
use super::text::{Text, TextRef};
use crate::lock::Deadline;
use libc::{c_int, c_longlong, c_void};
use redis_module::raw::{self, RedisModuleKey, RedisModuleString};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::null_mut;

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The key does not exist.
    Missing,
    /// A hash.
    Hash,
    /// Any other type.
    Other,
}

const KEYTYPE_EMPTY: c_int = raw::REDISMODULE_KEYTYPE_EMPTY as c_int;
const KEYTYPE_HASH: c_int = raw::REDISMODULE_KEYTYPE_HASH as c_int;

/// The callback for each field and value of a hash.
pub type EachField<'f> = &'f mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An open key. Opening a key that has expired deletes it first, as a command would.
///
/// Code that changes the key calls [`Ctx::signal_modified`], because opening it does not notify any client.
///
/// Redis 8.4 and later open no key in a slot that an atomic migration is moving. Such a key seems to be missing, and
/// writes to it are dropped without an error. So code that would write calls [`Ctx::serves`] first.
#[derive(Debug)]
pub struct Key<'a> {
    raw: *mut RedisModuleKey,
    /// The key's expiry; `None` until it has been read. Only this handle changes it while the key is open, because no
    /// other command runs meanwhile.
    expiry: Cell<Option<Deadline>>,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> Key<'a> {
    /// Opens a key for reading and writing, whether or not it exists.
    pub fn open(ctx: Ctx<'a>, name: TextRef<'a>) -> Self {
        let mode = c_int::try_from(raw::REDISMODULE_READ | raw::REDISMODULE_WRITE).unwrap_or(0);
        // SAFETY: the context and the name are valid for 'a, and the handle is closed before its end: it does not
        // outlive 'a.
        let raw = unsafe { api!(RedisModule_OpenKey)(ctx.raw(), name.raw(), mode) };
        if !raw.is_null() {
            open_keys::opened();
        }
        Self { raw: raw.cast(), expiry: Cell::new(None), lifetime: PhantomData }
    }

    /// The type of the key.
    pub fn kind(&self) -> Kind {
        // SAFETY: the handle is open; the function treats null as a missing key.
        let kind = unsafe { api!(RedisModule_KeyType)(self.raw) };
        match kind {
            KEYTYPE_EMPTY => Kind::Missing,
            KEYTYPE_HASH => Kind::Hash,
            _ => Kind::Other,
        }
    }

    /// The number of fields of the hash.
    pub fn fields(&self) -> usize {
        // SAFETY: the handle is open; the function returns 0 for null.
        unsafe { api!(RedisModule_ValueLength)(self.raw) }
    }

    /// The value of a field.
    pub fn get(&self, field: TextRef) -> Option<Text> {
        let mut value: *mut RedisModuleString = null_mut();
        let end: *mut RedisModuleString = null_mut();
        // SAFETY: the handle is open and a hash. The arguments are pairs of a field and a pointer to its value, and end
        // with null. Automatic memory is off, so the module owns the value.
        unsafe {
            api!(RedisModule_HashGet)(self.raw, 0, field.raw(), &raw mut value, end);
            Text::from_raw(value)
        }
    }

    /// The values of two fields, in one call.
    pub fn get_both(&self, (one, other): (TextRef, TextRef)) -> (Option<Text>, Option<Text>) {
        let mut values: [*mut RedisModuleString; 2] = [null_mut(); 2];
        let [first, second] = &mut values;
        let (first, second): (*mut _, *mut _) = (first, second);
        let end: *mut RedisModuleString = null_mut();
        // SAFETY: as in `get`.
        unsafe {
            api!(RedisModule_HashGet)(self.raw, 0, one.raw(), first, other.raw(), second, end);
            (Text::from_raw(*first), Text::from_raw(*second))
        }
    }

    /// Sets fields, and creates the hash if the key is missing.
    pub fn set(&self, pairs: &[(TextRef, TextRef)]) {
        let end: *mut RedisModuleString = null_mut();
        let hash_set = api!(RedisModule_HashSet);
        // SAFETY: the handle is open for writing, and is a hash, missing or null. The function refuses null. The pairs
        // of strings end with null. The server copies fields and values.
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

    /// Deletes a field. The server deletes the key with its last field.
    pub fn delete_field(&self, field: TextRef) {
        let end: *mut RedisModuleString = null_mut();
        let delete = std::ptr::without_provenance_mut::<RedisModuleString>(1);
        // SAFETY: the handle is open for writing. The constant 1 instead of a value is REDISMODULE_HASH_DELETE.
        unsafe { api!(RedisModule_HashSet)(self.raw, 0, field.raw(), delete, end) };
    }

    /// Deletes the key.
    pub fn delete(&self) {
        if !self.raw.is_null() {
            // SAFETY: the handle is open for writing.
            unsafe { api!(RedisModule_DeleteKey)(self.raw) };
        }
        self.expiry.set(None);
    }

    /// When the key expires. `Never` if the key is missing. Only the first call looks the expiry up.
    pub fn expiry(&self) -> Deadline {
        if let Some(known) = self.expiry.get() {
            return known;
        }
        if self.kind() == Kind::Missing {
            return Deadline::Never; // Redis 8.6 crashes if it is asked for the expiry of a missing key.
        }
        // SAFETY: the handle is open, and there is a value.
        let at = unsafe { api!(RedisModule_GetAbsExpire)(self.raw) };
        let expiry = u64::try_from(at).map_or(Deadline::Never, Deadline::At);
        self.expiry.set(Some(expiry));
        expiry
    }

    /// Whether one of these fields of this hash, whose key is `name`, has an expiry of its own. Redis 8 reports only
    /// whether any field has one, so it may be another field.
    pub fn has_expiring_field(&mut self, ctx: Ctx<'a>, name: TextRef<'a>, fields: &[TextRef]) -> bool {
        if let Some(first) = newer_api!(RedisModule_HashFieldMinExpire) {
            // SAFETY: the handle is open and a hash.
            return unsafe { first(self.raw) } != i64::from(raw::REDISMODULE_NO_EXPIRE);
        }
        // The command that checks the fields could find that the key has expired, and free the value of an open handle.
        self.close();
        let (expires, expiry) = (is_any_field_expiring(ctx, name, fields), self.expiry.get());
        *self = Self::open(ctx, name);
        if self.kind() == Kind::Hash {
            self.expiry.set(expiry);
        }
        expires
    }

    fn close(&mut self) {
        if !self.raw.is_null() {
            open_keys::closed();
        }
        // SAFETY: `open` opened the handle. It is null from now on, so it is closed once. The function accepts null.
        unsafe { api!(RedisModule_CloseKey)(self.raw) };
        self.raw = null_mut();
    }

    /// Sets or removes the expiry of the key. Does nothing if the key is missing.
    pub fn set_expiry(&self, deadline: Deadline) {
        let at = match deadline {
            Deadline::At(at) => i64::try_from(at).unwrap_or(i64::MAX),
            Deadline::Never => i64::from(raw::REDISMODULE_NO_EXPIRE),
        };
        if self.kind() != Kind::Missing {
            // SAFETY: the handle is open for writing, and there is a value.
            unsafe { api!(RedisModule_SetAbsExpire)(self.raw, at) };
            self.expiry.set(Some(deadline));
        }
    }

    /// Calls `each` with every field and its value, until it returns `Break` or all fields are done. A field may occur
    /// twice.
    pub fn scan(&self, each: EachField) {
        struct Scan<'f> {
            each: EachField<'f>,
            is_stopped: bool,
        }
        unsafe extern "C" fn on_field(
            _key: *mut RedisModuleKey,
            field: *mut RedisModuleString,
            value: *mut RedisModuleString,
            scan: *mut c_void,
        ) {
            // SAFETY: `scan` is the structure below. It outlives the scan, and nothing else uses it meanwhile. The
            // strings are valid for this call.
            unsafe {
                let scan = &mut *scan.cast::<Scan>();
                let (Some(field), Some(value)) = (TextRef::from_raw(field), TextRef::from_raw(value)) else { return };
                if !scan.is_stopped {
                    scan.is_stopped = (scan.each)(field.bytes(), value.bytes()).is_break();
                }
            }
        }
        let mut scan = Scan { each, is_stopped: false };
        // SAFETY: the cursor is created and destroyed here. The key is open and not changed during the scan.
        unsafe {
            let cursor = api!(RedisModule_ScanCursorCreate)();
            while !scan.is_stopped
                && api!(RedisModule_ScanKey)(self.raw, cursor, Some(on_field), (&raw mut scan).cast()) != 0
            {
            }
            api!(RedisModule_ScanCursorDestroy)(cursor);
        }
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether the module API reports fields with an expiry of their own, so that the module need not run a command.
pub fn reports_field_expiry() -> bool {
    newer_api!(RedisModule_HashFieldMinExpire).is_some()
}

/// Runs `HPTTL` to check whether one of these fields has an expiry of its own. Returns `true` if the reply is missing
/// or incomplete.
fn is_any_field_expiring(ctx: Ctx, name: TextRef, fields: &[TextRef]) -> bool {
    let argv = TextRef::raw_of_all(fields);
    let (call, element) = (api!(RedisModule_Call), api!(RedisModule_CallReplyArrayElement));
    // SAFETY: the format takes a string, a C string, a number, and an array of strings with its length, and gets these.
    // The server only reads them. The reply's elements are read before it is freed, which happens once.
    unsafe {
        let (count, format) = (fields.len(), c"sclv".as_ptr());
        let words = (c"FIELDS".as_ptr(), c_longlong::try_from(count).unwrap_or(0));
        let reply = call(ctx.raw(), c"HPTTL".as_ptr(), format, name.raw(), words.0, words.1, argv, count);
        if reply.is_null() {
            return true;
        }
        let is_complete = api!(RedisModule_CallReplyLength)(reply) == count;
        let mut ttls = (0..count).map(|index| api!(RedisModule_CallReplyInteger)(element(reply, index)));
        let expires = !is_complete || ttls.any(|ttl| ttl >= 0);
        api!(RedisModule_FreeCallReply)(reply);
        expires
    }
}
