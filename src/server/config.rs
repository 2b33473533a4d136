//! The module's settings, as the server sees them.

use super::Ctx;
use super::text::Text;
use libc::{c_char, c_int, c_longlong, c_void};
use redis_module::raw::{self, RedisModuleString};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering::Relaxed};

/// A setting that is a number.
#[derive(Debug)]
pub struct Number {
    /// Its name, without the module's.
    pub name: &'static CStr,
    /// Its value.
    pub value: AtomicI64,
    /// Its default.
    pub default: i64,
    /// Smallest value.
    pub min: i64,
    /// Largest value.
    pub max: i64,
}

/// A setting that is yes or no.
#[derive(Debug)]
pub struct Switch {
    /// Its name, without the module's.
    pub name: &'static CStr,
    /// Its value.
    pub value: AtomicBool,
    /// Its default.
    pub default: bool,
}

/// A setting that is one of a few words.
#[derive(Debug)]
pub struct Choice {
    /// Its name, without the module's.
    pub name: &'static CStr,
    /// Which of the words it is.
    pub value: AtomicI32,
    /// What it is when nobody sets it.
    pub default: i32,
    /// The words.
    pub words: &'static [&'static CStr],
}

impl Number {
    /// Registers the setting with the server (`CONFIG`, `redis.conf`, `MODULE LOADEX`), with its current value as the
    /// default.
    pub fn register(&'static self, ctx: Ctx) -> bool {
        // SAFETY: name and value live for ever; the callbacks read the value through the pointer given here.
        let status = unsafe {
            api!(RedisModule_RegisterNumericConfig)(
                ctx.raw(),
                self.name.as_ptr(),
                self.value.load(Relaxed),
                raw::REDISMODULE_CONFIG_DEFAULT,
                self.min,
                self.max,
                Some(get_number),
                Some(set_number),
                None,
                (&raw const self.value).cast_mut().cast(),
            )
        };
        status == raw::REDISMODULE_OK as c_int
    }
}

impl Switch {
    /// Registers the setting with the server, with its current value as the default.
    pub fn register(&'static self, ctx: Ctx) -> bool {
        // SAFETY: as for `Number::register`.
        let status = unsafe {
            api!(RedisModule_RegisterBoolConfig)(
                ctx.raw(),
                self.name.as_ptr(),
                c_int::from(self.value.load(Relaxed)),
                raw::REDISMODULE_CONFIG_DEFAULT,
                Some(get_switch),
                Some(set_switch),
                None,
                (&raw const self.value).cast_mut().cast(),
            )
        };
        status == raw::REDISMODULE_OK as c_int
    }
}

impl Choice {
    /// Makes the setting known to the server, with its present value as the default.
    pub fn register(&'static self, ctx: Ctx) -> bool {
        let mut words: Vec<*const c_char> = self.words.iter().map(|word| word.as_ptr()).collect();
        let numbers: Vec<c_int> = (0..).take(words.len()).collect();
        let count = c_int::try_from(words.len()).unwrap_or(0);
        // SAFETY: as for `Number::register`; the server copies words and numbers, of which there are so many.
        let status = unsafe {
            api!(RedisModule_RegisterEnumConfig)(
                ctx.raw(),
                self.name.as_ptr(),
                self.value.load(Relaxed),
                raw::REDISMODULE_CONFIG_DEFAULT,
                words.as_mut_ptr(),
                numbers.as_ptr(),
                count,
                Some(get_choice),
                Some(set_choice),
                None,
                (&raw const self.value).cast_mut().cast(),
            )
        };
        status == raw::REDISMODULE_OK as c_int
    }
}

/// Lets the server set what was registered: from its configuration, from `MODULE LOADEX`, or to the defaults.
pub fn load(ctx: Ctx) -> bool {
    // SAFETY: the context is that of loading.
    unsafe { api!(RedisModule_LoadConfigs)(ctx.raw()) == raw::REDISMODULE_OK as c_int }
}

unsafe extern "C" fn get_number(_: *const c_char, value: *mut c_void) -> c_longlong {
    // SAFETY: `value` is the static given in `register`.
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

unsafe extern "C" fn get_switch(_: *const c_char, value: *mut c_void) -> c_int {
    // SAFETY: `value` is the static given in `register`.
    unsafe { value.cast::<AtomicBool>().as_ref() }.map_or(0, |value| c_int::from(value.load(Relaxed)))
}

unsafe extern "C" fn set_switch(
    _: *const c_char,
    on: c_int,
    value: *mut c_void,
    _: *mut *mut RedisModuleString,
) -> c_int {
    // SAFETY: as in `get_switch`.
    if let Some(value) = unsafe { value.cast::<AtomicBool>().as_ref() } {
        value.store(on != 0, Relaxed);
    }
    raw::REDISMODULE_OK as c_int
}

unsafe extern "C" fn get_choice(_: *const c_char, value: *mut c_void) -> c_int {
    // SAFETY: `value` is the static given in `register`.
    unsafe { value.cast::<AtomicI32>().as_ref() }.map_or(0, |value| value.load(Relaxed))
}

unsafe extern "C" fn set_choice(
    _: *const c_char,
    choice: c_int,
    value: *mut c_void,
    _: *mut *mut RedisModuleString,
) -> c_int {
    // SAFETY: as in `get_choice`.
    if let Some(value) = unsafe { value.cast::<AtomicI32>().as_ref() } {
        value.store(choice, Relaxed);
    }
    raw::REDISMODULE_OK as c_int
}

/// Whether modules other than this one are loaded.
pub fn other_modules(ctx: Ctx, own_name: &[u8]) -> usize {
    let call = api!(RedisModule_Call);
    // SAFETY: the format takes one C string and gets one; the replies are read while the outer one lives, which is
    // freed once.
    unsafe {
        let reply = call(ctx.raw(), c"MODULE".as_ptr(), c"c".as_ptr(), c"LIST".as_ptr());
        if reply.is_null() {
            return 1; // Unknown: as if there were one.
        }
        let mut others = 0_usize;
        for index in 0..api!(RedisModule_CallReplyLength)(reply) {
            let entry = api!(RedisModule_CallReplyArrayElement)(reply, index);
            let name = api!(RedisModule_CallReplyArrayElement)(entry, 1);
            let name = Text::from_raw(api!(RedisModule_CreateStringFromCallReply)(name));
            others = others.saturating_add(usize::from(name.is_none_or(|name| name.bytes() != own_name)));
        }
        api!(RedisModule_FreeCallReply)(reply);
        others
    }
}
