//! Whether the server takes writes.

use super::call::Reply;
use super::{Ctx, Role, ctx, events};
use std::ffi::CStr;

/// A write that changes nothing, whatever the key holds.
const COMMAND: [&CStr; 4] = [c"SETRANGE", c"holdfast", c"0", c""];

/// What the errors begin with that concern every write. Others are about the key: another type, another node's slot.
const REFUSALS: [&[u8]; 3] = [b"NOREPLICAS", b"MISCONF", b"READONLY"];

/// Whether this server decides anything now: not a replica, nor one that is loading its data or whose clients are paused.
pub fn are_possible(ctx: Ctx) -> bool {
    let flags = ctx.flags();
    flags.role() == Role::Master && !flags.loading() && !ctx::is_paused()
}

/// Whether the server would refuse a client's write now: too few good replicas (`min-replicas-to-write`), a snapshot or
/// an append-only file that can't be written, or a replica. (Paused clients: [`super::ctx::is_paused`].)
///
/// Takes less than a microsecond. Before Redis 7.2, the server can't be asked without running the command, which
/// `MONITOR` and `INFO commandstats` then show.
pub fn are_refused(ctx: Ctx) -> bool {
    // `S`: with the checks that scripts undergo, those for writes among them. `E`: errors are replies. `D`: only try.
    let format = if events::turn_end_precedes_unblock() { c"SEccc" } else { c"DSccc" };
    let [command, key, offset, nothing] = COMMAND.map(CStr::as_ptr);
    // SAFETY: the format takes three C strings and gets them. The reply, if there is one, is read while it lives, and is
    // ours to free.
    unsafe {
        let reply = api!(RedisModule_Call)(ctx.raw(), command, format.as_ptr(), key, offset, nothing);
        if reply.is_null() {
            return false;
        }
        let error = Reply::of(reply).error();
        api!(RedisModule_FreeCallReply)(reply);
        error.is_some_and(|error| REFUSALS.iter().any(|refusal| error.starts_with(refusal)))
    }
}
