//! The module's section of `INFO`.

use libc::c_int;
use redis_module::raw::{self, RedisModuleInfoCtx};
use std::ffi::{CStr, CString};

/// The section while the module fills it.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    raw: *mut RedisModuleInfoCtx,
}

impl Section {
    /// Adds a field with a number.
    pub fn number(self, name: &CStr, value: u64) {
        // SAFETY: the context is valid for the callback that fills the section.
        unsafe { api!(RedisModule_InfoAddFieldULongLong)(self.raw, name.as_ptr(), value) };
    }

    /// Adds a field with a text, escaped as the server escapes its own fields.
    pub fn text(self, name: &CStr, value: &str) {
        let value = CString::new(escape(value)).unwrap_or_default();
        // SAFETY: the context is valid for the callback that fills the section. The server copies the text.
        unsafe { api!(RedisModule_InfoAddFieldCString)(self.raw, name.as_ptr(), value.as_ptr()) };
    }
}

/// Replaces characters that would end the value, or begin another field or section. (Source: `getSafeInfoString` in
/// `server.c`.)
fn escape(value: &str) -> String {
    value.replace(['#', ':', '\n', '\r', '\0'], "_")
}

impl Section {
    /// Begins the section, which has the module's name. Returns `None` if the client has not asked for this section.
    ///
    /// # Safety
    ///
    /// `ctx` must be the context of a callback that fills the section. The section may be used only while that callback
    /// runs.
    pub(super) unsafe fn begin(ctx: *mut RedisModuleInfoCtx) -> Option<Self> {
        // SAFETY: the context is valid, as the caller guarantees.
        let begun = unsafe { api!(RedisModule_InfoAddSection)(ctx, std::ptr::null()) };
        (begun == raw::REDISMODULE_OK as c_int).then_some(Self { raw: ctx })
    }
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn text_of_info_is_escaped() {
        assert_eq!(escape("a:b\r\n# c\0d"), "a_b___ c_d");
        assert_eq!(escape("10=1,20=2"), "10=1,20=2");
    }
}
