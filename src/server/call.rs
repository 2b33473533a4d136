//! Runs subcommands of the server, such as `CLUSTER NODES`, and reads their replies. An uncontended acquire or release
//! runs none of them.

use super::Ctx;
use super::text::{AsText, Text};
use libc::c_char;
use redis_module::raw::{self, RedisModuleCallReply};
use std::ffi::CStr;

/// Runs a subcommand of a container command, and returns what `read` makes of its reply. `None` if there is no reply.
pub(super) fn run<R>(
    ctx: Ctx,
    command: &CStr,
    subcommand: &CStr,
    args: &[&Text],
    read: impl FnOnce(Reply) -> Option<R>,
) -> Option<R> {
    let mut args: Vec<_> = args.iter().map(|arg| arg.as_text().raw()).collect();
    // SAFETY: the format takes one C string and an array of strings with its length, and gets them. The module owns the
    // reply, if there is one, and frees it after reading it.
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

/// A reply of the server that has not been freed yet.
#[derive(Clone, Copy)]
pub(super) struct Reply(*mut RedisModuleCallReply);

impl Reply {
    /// # Safety
    ///
    /// The reply must be valid for as long as it is read.
    pub(super) unsafe fn of(reply: *mut RedisModuleCallReply) -> Self {
        Self(reply)
    }

    fn is(self, kind: isize) -> bool {
        // SAFETY: the reply is valid.
        isize::try_from(unsafe { api!(RedisModule_CallReplyType)(self.0) }).is_ok_and(|it| it == kind)
    }

    /// The value of an integer reply.
    pub(super) fn integer(self) -> Option<i64> {
        // SAFETY: the reply is valid and is an integer.
        self.is(raw::REDISMODULE_REPLY_INTEGER).then(|| unsafe { api!(RedisModule_CallReplyInteger)(self.0) })
    }

    /// The bytes of a string reply.
    pub(super) fn bytes(self) -> Option<Vec<u8>> {
        if self.is(raw::REDISMODULE_REPLY_STRING) { self.text() } else { None }
    }

    /// The bytes of the second element of an array.
    pub(super) fn second(self) -> Option<Vec<u8>> {
        // SAFETY: the reply is valid. The function returns null if it is no array, or has no such element. An element is
        // valid as long as the array.
        let element = unsafe { api!(RedisModule_CallReplyArrayElement)(self.0, 1) };
        if element.is_null() { None } else { Self(element).bytes() }
    }

    /// The message of an error reply.
    pub(super) fn error(self) -> Option<Vec<u8>> {
        if self.is(raw::REDISMODULE_REPLY_ERROR) { self.text() } else { None }
    }

    fn text(self) -> Option<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the reply is valid and is a string or an error of `len` bytes, which are copied.
        unsafe {
            let start: *const c_char = api!(RedisModule_CallReplyStringPtr)(self.0, &raw mut len);
            (!start.is_null()).then(|| std::slice::from_raw_parts(start.cast::<u8>(), len).to_vec())
        }
    }
}
