//! The server's strings, which contain any bytes.

pub use super::bytes::{parse_number, show, show_start};
use redis_module::raw::RedisModuleString;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A value that wraps a string of the server, so that the server can use it without a copy.
pub trait AsText {
    /// The string.
    fn as_text(&self) -> TextRef<'_>;
}

/// A borrowed string of the server, valid for `'a`. A slice of them has the layout of the server's arrays of strings.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TextRef<'a> {
    raw: NonNull<RedisModuleString>,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> TextRef<'a> {
    /// Wraps a string; `None` for a null pointer.
    ///
    /// # Safety
    ///
    /// `raw` must be null, or a string that stays valid and unchanged for all of `'a`.
    pub(super) unsafe fn from_raw(raw: *mut RedisModuleString) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { raw, lifetime: PhantomData })
    }

    pub(super) fn raw(self) -> *mut RedisModuleString {
        self.raw.as_ptr()
    }

    /// Converts a slice to the server's form of an array of strings. Each element has the layout of the pointer that it
    /// wraps (`repr(transparent)`). The callee may only read the array.
    pub(super) fn raw_of_all(texts: &[Self]) -> *mut *mut RedisModuleString {
        texts.as_ptr().cast_mut().cast()
    }

    /// The string's bytes.
    pub fn bytes(self) -> &'a [u8] {
        let mut len = 0;
        // SAFETY: the string is valid for 'a and does not change (the module never writes to one). The same holds for
        // the `len` bytes that the server returns. The server returns a valid pointer even for an empty string.
        unsafe {
            let bytes = api!(RedisModule_StringPtrLen)(self.raw(), &raw mut len);
            std::slice::from_raw_parts(bytes.cast::<u8>(), len)
        }
    }
}

impl AsText for TextRef<'_> {
    fn as_text(&self) -> TextRef<'_> {
        *self
    }
}

/// A string that this module owns.
#[derive(Debug)]
pub struct Text {
    raw: NonNull<RedisModuleString>,
}

impl Text {
    /// A new string with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        // SAFETY: the server copies the bytes. Without a context, only the module owns the string and frees it.
        let raw = unsafe { api!(RedisModule_CreateString)(std::ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        match NonNull::new(raw) {
            Some(raw) => Self { raw },
            None => std::process::abort(), // The server's allocator never returns null: it aborts instead.
        }
    }

    /// A new string with a number in decimal. (No number exceeds 63 bits: they are times, tokens and counts.)
    pub fn number(value: u64) -> Self {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        // SAFETY: without a context, only the module owns the string and frees it.
        let raw = unsafe { api!(RedisModule_CreateStringFromLongLong)(std::ptr::null_mut(), value) };
        match NonNull::new(raw) {
            Some(raw) => Self { raw },
            None => std::process::abort(), // As in `new`.
        }
    }

    /// A new string that concatenates `parts`. Up to 128 bytes, this needs no allocation except the string itself.
    pub fn concat(parts: &[&[u8]]) -> Self {
        let mut buffer = [0_u8; 128];
        let mut rest = buffer.as_mut_slice();
        for part in parts {
            let Some((target, remainder)) = rest.split_at_mut_checked(part.len()) else {
                return Self::new(&parts.concat());
            };
            target.copy_from_slice(part);
            rest = remainder;
        }
        let len = 128_usize.saturating_sub(rest.len());
        Self::new(buffer.get(..len).unwrap_or_default())
    }

    /// Takes ownership of a string that the server created for the module; `None` for null.
    ///
    /// # Safety
    ///
    /// `raw` must be null, or a string whose reference the module owns and must free. Automatic memory must not free
    /// it.
    pub(super) unsafe fn from_raw(raw: *mut RedisModuleString) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { raw })
    }

    /// The string's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.as_text().bytes()
    }
}

impl AsText for Text {
    fn as_text(&self) -> TextRef<'_> {
        TextRef { raw: self.raw, lifetime: PhantomData }
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: the module owns the reference (see `new` and `from_raw`), and frees it once.
        unsafe { api!(RedisModule_FreeString)(std::ptr::null_mut(), self.raw.as_ptr()) }
    }
}
