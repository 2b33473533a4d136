//! The module's section of `INFO`.

use libc::c_int;
use redis_module::raw::{self, RedisModuleInfoCtx};
use std::ffi::CStr;
use std::sync::OnceLock;

/// The section, to be filled.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    raw: *mut RedisModuleInfoCtx,
}

impl Section {
    /// Adds a line.
    pub fn number(self, name: &CStr, value: u64) {
        // SAFETY: the context lives for the callback in which the section is filled.
        unsafe { api!(RedisModule_InfoAddFieldULongLong)(self.raw, name.as_ptr(), value) };
    }

    /// Adds a line whose value is a text.
    pub fn text(self, name: &CStr, value: &CStr) {
        // SAFETY: the context lives for the callback in which the section is filled; the server copies the text.
        unsafe { api!(RedisModule_InfoAddFieldCString)(self.raw, name.as_ptr(), value.as_ptr()) };
    }
}

static FILL: OnceLock<fn(Section)> = OnceLock::new();

/// Calls `fill` to write the section whenever somebody asks for it.
pub fn register(ctx: super::Ctx, fill: fn(Section)) {
    let _ = FILL.set(fill);
    // SAFETY: the callback has the signature that the server expects.
    unsafe { api!(RedisModule_RegisterInfoFunc)(ctx.raw(), Some(on_info)) };
}

unsafe extern "C" fn on_info(ctx: *mut RedisModuleInfoCtx, for_crash_report: c_int) {
    if for_crash_report != 0 {
        return; // The crash may have come while the module was at work: its state is not to be touched.
    }
    // SAFETY: the context lives for this call. Without a name the section is that of the module.
    let open = unsafe { api!(RedisModule_InfoAddSection)(ctx, std::ptr::null()) } == raw::REDISMODULE_OK as c_int;
    if let (true, Some(fill)) = (open, FILL.get()) {
        fill(Section { raw: ctx });
    }
}
