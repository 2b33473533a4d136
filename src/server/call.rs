//! Commands of the server's own that the module runs to learn something, never on the way of a request for a lock.

use super::Ctx;
use super::text::{AsText, Text};
use libc::c_char;
use redis_module::raw::{self, RedisModuleCallReply};
use std::ffi::CStr;

/// Runs a subcommand of a container command and reads its reply; `None` if there is no reply of the expected kind.
pub(super) fn run<R>(
    ctx: Ctx,
    command: &CStr,
    subcommand: &CStr,
    args: &[&Text],
    read: impl FnOnce(Reply) -> Option<R>,
) -> Option<R> {
    let mut args: Vec<_> = args.iter().map(|arg| arg.as_text().raw()).collect();
    // SAFETY: the format takes one C string and an array of strings with its length, and gets them. The reply, if there
    // is one, is ours to free, after it was read.
    unsafe {
        let call = api!(RedisModule_Call);
        let reply =
            call(ctx.raw(), command.as_ptr(), c"cv".as_ptr(), subcommand.as_ptr(), args.as_mut_ptr(), args.len());
        if reply.is_null() {
            return None;
        }
        let result = read(Reply(reply));
        api!(RedisModule_FreeCallReply)(reply);
        result
    }
}

/// A reply while it is being read.
#[derive(Clone, Copy)]
pub(super) struct Reply(*mut RedisModuleCallReply);

impl Reply {
    /// # Safety
    ///
    /// The reply lives for as long as it is read.
    pub(super) unsafe fn of(reply: *mut RedisModuleCallReply) -> Self {
        Self(reply)
    }

    fn is(self, kind: isize) -> bool {
        // SAFETY: the reply lives.
        isize::try_from(unsafe { api!(RedisModule_CallReplyType)(self.0) }).is_ok_and(|it| it == kind)
    }

    /// An integer.
    pub(super) fn integer(self) -> Option<i64> {
        // SAFETY: the reply lives and is an integer.
        self.is(raw::REDISMODULE_REPLY_INTEGER).then(|| unsafe { api!(RedisModule_CallReplyInteger)(self.0) })
    }

    /// A string.
    pub(super) fn bytes(self) -> Option<Vec<u8>> {
        if self.is(raw::REDISMODULE_REPLY_STRING) { self.text() } else { None }
    }

    /// The message of an error.
    pub(super) fn error(self) -> Option<Vec<u8>> {
        if self.is(raw::REDISMODULE_REPLY_ERROR) { self.text() } else { None }
    }

    fn text(self) -> Option<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the reply lives and is a string or an error of `len` bytes, which are copied.
        unsafe {
            let start: *const c_char = api!(RedisModule_CallReplyStringPtr)(self.0, &raw mut len);
            (!start.is_null()).then(|| std::slice::from_raw_parts(start.cast::<u8>(), len).to_vec())
        }
    }
}
