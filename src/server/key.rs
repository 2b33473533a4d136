//! A key of the keyspace, through the low-level API: no command is run, nothing is looked up twice.

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

/// The callback for each field and value of a hash.
pub type EachField<'f> = &'f mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>;

/// An open key. Reading a key that has expired removes it first, as every command does.
///
/// Code that changes it calls [`Ctx::signal_modified`]: opening alone informs nobody.
///
/// Since Redis 8.4 the server opens no key in a slot that is being moved in one piece. Such a key seems to be missing,
/// and what is written to it goes nowhere: code that would write asks [`Ctx::serves`] first.
#[derive(Debug)]
pub struct Key<'a> {
    raw: *mut RedisModuleKey,
    /// `None` until it is known. Nobody but this handle changes it while it is open, since all of this runs in one
    /// step.
    expiry: Cell<Option<Deadline>>,
    lives: PhantomData<&'a ()>,
}

impl<'a> Key<'a> {
    /// Opens a key for reading and writing, whether or not it exists.
    pub fn open(ctx: Ctx<'a>, name: TextRef<'a>) -> Self {
        let mode = c_int::try_from(raw::REDISMODULE_READ | raw::REDISMODULE_WRITE).unwrap_or(0);
        // SAFETY: context and name live for 'a, and the handle is closed before: it does not outlive 'a.
        let raw = unsafe { api!(RedisModule_OpenKey)(ctx.raw(), name.raw(), mode) };
        if !raw.is_null() {
            open_keys::opened();
        }
        Self { raw: raw.cast(), expiry: Cell::new(None), lives: PhantomData }
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
        // SAFETY: the handle is open; null has none to this function.
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
        // SAFETY: the handle is open for writing and a hash or missing, or null, which this function refuses; pairs of
        // strings end with null. The server copies both.
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
        if !self.raw.is_null() {
            // SAFETY: the handle is open for writing.
            unsafe { api!(RedisModule_DeleteKey)(self.raw) };
        }
        self.expiry.set(None);
    }

    /// When the key expires; never, if it is missing. The first call takes a look-up.
    pub fn expiry(&self) -> Deadline {
        if let Some(known) = self.expiry.get() {
            return known;
        }
        if self.kind() == Kind::Missing {
            return Deadline::Never; // Redis 8.6 would crash.
        }
        // SAFETY: the handle is open, and there is a value.
        let at = unsafe { api!(RedisModule_GetAbsExpire)(self.raw) };
        let expiry = u64::try_from(at).map_or(Deadline::Never, Deadline::At);
        self.expiry.set(Some(expiry));
        expiry
    }

    /// Whether one of these fields of the hash `name`, which this is, has an expiry of its own. (Redis 8 reports all
    /// fields at once, so it may be another one.)
    pub fn has_expiring_field(&mut self, ctx: Ctx<'a>, name: TextRef<'a>, fields: &[TextRef]) -> bool {
        if let Some(first) = newer_api!(RedisModule_HashFieldMinExpire) {
            // SAFETY: the handle is open and a hash.
            return unsafe { first(self.raw) } != i64::from(raw::REDISMODULE_NO_EXPIRE);
        }
        // A command that runs could find that the key has expired, and free what an open handle points to.
        self.close();
        let (expires, expiry) = (expires(ctx, name, fields), self.expiry.get());
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
        // SAFETY: opened in `open`; null from now on, so closed once. Null is allowed.
        unsafe { api!(RedisModule_CloseKey)(self.raw) };
        self.raw = null_mut();
    }

    /// Sets or removes the expiry of the key, which exists.
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

    /// Calls `each` with every field and value until it breaks off or all have been seen. A field may be seen twice.
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
        self.close();
    }
}

/// Whether the server reports fields with an expiry of their own without a command being run.
pub fn tells_of_field_expiry() -> bool {
    newer_api!(RedisModule_HashFieldMinExpire).is_some()
}

/// Asks the server whether one of these fields has an expiry of its own; without an answer, assumes so.
fn expires(ctx: Ctx, name: TextRef, fields: &[TextRef]) -> bool {
    let argv = TextRef::raw_of_all(fields);
    let (call, element) = (api!(RedisModule_Call), api!(RedisModule_CallReplyArrayElement));
    // SAFETY: the format takes a string, a C string, a number, and an array of strings with its length, and gets these, which
    // are only read; the reply's elements are read while it lives, and it is freed once.
    unsafe {
        let (count, format) = (fields.len(), c"sclv".as_ptr());
        let words = (c"FIELDS".as_ptr(), c_longlong::try_from(count).unwrap_or(0));
        let reply = call(ctx.raw(), c"HPTTL".as_ptr(), format, name.raw(), words.0, words.1, argv, count);
        if reply.is_null() {
            return true;
        }
        let told = api!(RedisModule_CallReplyLength)(reply) == count;
        let mut left = (0..count).map(|index| api!(RedisModule_CallReplyInteger)(element(reply, index)));
        let expires = !told || left.any(|left| left >= 0);
        api!(RedisModule_FreeCallReply)(reply);
        expires
    }
}
