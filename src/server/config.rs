//! Registers the module's settings with the server.

use super::Ctx;
use libc::{c_char, c_int, c_longlong, c_void};
use redis_module::raw::{self, RedisModuleString};
use std::ffi::CStr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// A setting.
#[derive(Debug)]
pub struct Setting {
    /// The setting's name, without the module's prefix.
    pub name: &'static CStr,
    /// The current value: a number, or the index of a word.
    pub value: AtomicI64,
    /// The default value.
    pub default: i64,
    /// The values that the setting accepts.
    pub allowed: Allowed,
}

/// The values that a setting accepts.
#[derive(Debug)]
pub enum Allowed {
    /// A number from the first to the second, both included.
    Numbers(i64, i64),
    /// One of these words.
    Words(&'static [&'static CStr]),
}

impl Setting {
    /// Registers the setting with the server (`CONFIG`, `redis.conf`, `MODULE LOADEX`), with its current value as the
    /// default.
    pub fn register(&'static self, ctx: Ctx) -> bool {
        let (ctx, name, value) = (ctx.raw(), self.name.as_ptr(), self.value.load(Relaxed));
        let (flags, pointer) = (raw::REDISMODULE_CONFIG_DEFAULT, (&raw const self.value).cast_mut().cast());
        let status = match self.allowed {
            // SAFETY: the name and the value are static. The callbacks read and set the value through the pointer
            // passed here.
            Allowed::Numbers(min, max) => unsafe {
                let (get, set) = (Some(get_number as _), Some(set_number as _));
                api!(RedisModule_RegisterNumericConfig)(ctx, name, value, flags, min, max, get, set, None, pointer)
            },
            Allowed::Words(words) => {
                let mut texts: Vec<*const c_char> = words.iter().map(|word| word.as_ptr()).collect();
                let numbers: Vec<c_int> = (0..).take(words.len()).collect();
                let (value, count) = (word_index(value), c_int::try_from(words.len()).unwrap_or(0));
                let (texts, numbers, get, set) =
                    (texts.as_mut_ptr(), numbers.as_ptr(), Some(get_word as _), Some(set_word as _));
                // SAFETY: as above. The server copies the words and the numbers, of which there are `count` each.
                unsafe {
                    let register = api!(RedisModule_RegisterEnumConfig);
                    register(ctx, name, value, flags, texts, numbers, count, get, set, None, pointer)
                }
            }
        };
        status == raw::REDISMODULE_OK as c_int
    }
}

/// Converts the index of a word to the server's type.
fn word_index(value: i64) -> c_int {
    c_int::try_from(value).unwrap_or(0)
}

/// Lets the server set the registered settings: from its configuration, from `MODULE LOADEX`, or to the defaults.
pub fn load(ctx: Ctx) -> bool {
    // SAFETY: the context is that of loading.
    unsafe { api!(RedisModule_LoadConfigs)(ctx.raw()) == raw::REDISMODULE_OK as c_int }
}

unsafe extern "C" fn get_number(_: *const c_char, value: *mut c_void) -> c_longlong {
    // SAFETY: `value` points to the static value that `register` passed.
    unsafe { value.cast::<AtomicI64>().as_ref() }.map_or(0, |value| value.load(Relaxed))
}

unsafe extern "C" fn set_number(
    _: *const c_char,
    number: c_longlong,
    value: *mut c_void,
    _: *mut *mut RedisModuleString,
) -> c_int {
    // SAFETY: as in `get_number`.
    if let Some(value) = unsafe { value.cast::<AtomicI64>().as_ref() } {
        value.store(number, Relaxed);
    }
    raw::REDISMODULE_OK as c_int
}

unsafe extern "C" fn get_word(name: *const c_char, value: *mut c_void) -> c_int {
    // SAFETY: as in `get_number`, which takes the same arguments.
    word_index(unsafe { get_number(name, value) })
}

unsafe extern "C" fn set_word(
    name: *const c_char,
    word: c_int,
    value: *mut c_void,
    error: *mut *mut RedisModuleString,
) -> c_int {
    // SAFETY: as in `set_number`, which takes the same arguments.
    unsafe { set_number(name, c_longlong::from(word), value, error) }
}
