//! The server's strings: bytes of any kind.

pub use super::bytes::{parse_number, show, show_start};
use redis_module::raw::RedisModuleString;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Something that the server can take as a string without a copy.
pub trait AsText {
    /// The server's string.
    fn as_text(&self) -> TextRef<'_>;
}

/// A string that the server owns for as long as `'a`. Several of them are what the server takes as an array of strings.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct TextRef<'a> {
    raw: NonNull<RedisModuleString>,
    lives: PhantomData<&'a ()>,
}

impl<'a> TextRef<'a> {
    /// `None` for a null pointer.
    ///
    /// # Safety
    ///
    /// `raw` is null or a string that lives, unchanged, for all of `'a`.
    pub(super) unsafe fn from_raw(raw: *mut RedisModuleString) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { raw, lives: PhantomData })
    }

    pub(super) fn raw(self) -> *mut RedisModuleString {
        self.raw.as_ptr()
    }

    /// Strings as the server takes several of them: each is nothing but the pointer that it wraps (`repr(transparent)`). The callee
    /// may only read the array.
    pub(super) fn raw_of_all(texts: &[Self]) -> *mut *mut RedisModuleString {
        texts.as_ptr().cast_mut().cast()
    }

    /// The string's bytes.
    pub fn bytes(self) -> &'a [u8] {
        let mut len = 0;
        // SAFETY: the string lives for 'a and is not changed (the module never writes to one), so neither are the
        // `len` bytes that the server returns; it returns a valid pointer even for an empty string.
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
        // SAFETY: the server copies the bytes. Without a context the string is ours alone to free.
        let raw = unsafe { api!(RedisModule_CreateString)(std::ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        match NonNull::new(raw) {
            Some(raw) => Self { raw },
            None => std::process::abort(), // The server's allocator never returns null; it aborts itself.
        }
    }

    /// A number in decimal. (None exceeds 63 bits: they are times, tokens, counts.)
    pub fn number(value: u64) -> Self {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        // SAFETY: without a context the string is ours alone to free.
        let raw = unsafe { api!(RedisModule_CreateStringFromLongLong)(std::ptr::null_mut(), value) };
        match NonNull::new(raw) {
            Some(raw) => Self { raw },
            None => std::process::abort(), // As in `new`.
        }
    }

    /// A new string made of `parts`; if it is short, composing it takes no allocation.
    pub fn concat(parts: &[&[u8]]) -> Self {
        let mut buffer = [0_u8; 128];
        let mut rest = buffer.as_mut_slice();
        for part in parts {
            let Some((place, behind)) = rest.split_at_mut_checked(part.len()) else {
                return Self::new(&parts.concat());
            };
            place.copy_from_slice(part);
            rest = behind;
        }
        let len = 128_usize.saturating_sub(rest.len());
        Self::new(buffer.get(..len).unwrap_or_default())
    }

    /// Takes over a string that the server made for the module; `None` for null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a string whose reference is ours to give back, and that no automatic memory will free.
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
        TextRef { raw: self.raw, lives: PhantomData }
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: the reference is ours (see `new` and `from_raw`), and freed once.
        unsafe { api!(RedisModule_FreeString)(std::ptr::null_mut(), self.raw.as_ptr()) }
    }
}
