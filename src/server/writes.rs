//! Whether the server takes writes.

use super::call::Reply;
use super::text::{AsText, Text};
use super::{Ctx, MainThread, Role, ctx, events, open_keys};
use std::ffi::CStr;

/// A write that changes nothing, whatever the key holds, and the key.
const COMMAND: &CStr = c"SETRANGE";
const KEY: &str = "holdfast";

/// What the errors begin with that concern every write. Others are about the key: another type, another node's slot.
const REFUSALS: [&[u8]; 3] = [b"NOREPLICAS", b"MISCONF", b"READONLY"];

/// What the errors contain where the cluster is down, whichever node has the slot of the key. (Clients get `-CLUSTERDOWN`.)
const DOWN: &[u8] = b"the cluster is down";

/// What the error contains where another node serves the slot of the key, or none: then it may say nothing of the cluster.
const NOT_HERE: &[u8] = b"non local key";

/// How often [`NOT_HERE`] was the answer.
static KEYS: MainThread<u32> = MainThread::new();

/// Whether this server decides anything now: not a replica, nor one that is loading its data or whose clients are paused.
pub fn are_possible(ctx: Ctx) -> bool {
    let flags = ctx.flags();
    flags.role() == Role::Master && !flags.loading() && !ctx::is_paused()
}

/// Whether the server would refuse a client's write now: too few good replicas (`min-replicas-to-write`), a snapshot or
/// an append-only file that can't be written, a replica, or a cluster that is down. (Paused clients: [`super::ctx::is_paused`].)
///
/// Takes less than a microsecond. Before Redis 7.2, the server can't be asked without running the command, which
/// `MONITOR` and `INFO commandstats` then show.
pub fn are_refused(ctx: Ctx) -> bool {
    open_keys::none_may_be_open();
    let Some(error) = refusal(ctx) else { return false };
    if contains(&error, NOT_HERE) {
        // Another key next time: sooner or later one of those that this node serves.
        KEYS.with(|keys| *keys = keys.wrapping_add(1));
        return false;
    }
    REFUSALS.iter().any(|refusal| error.starts_with(refusal)) || contains(&error, DOWN)
}

/// The error with which the server would answer a write, if it would.
fn refusal(ctx: Ctx) -> Option<Vec<u8>> {
    let key = match KEYS.with(|keys| *keys) {
        0 => KEY.to_owned(),
        number => format!("{KEY}:{number}"),
    };
    let (key, offset, nothing) = (Text::new(key.as_bytes()), c"0".as_ptr(), c"".as_ptr());
    // `S`: with the checks that scripts undergo, those for writes among them. `E`: errors are replies. `D`: only try.
    let format = if events::turn_end_precedes_unblock() { c"SEscc" } else { c"DSscc" };
    // SAFETY: the format takes a string and two C strings and gets them. The reply, if there is one, is read while it lives,
    // and is ours to free.
    unsafe {
        let call = api!(RedisModule_Call);
        let reply = call(ctx.raw(), COMMAND.as_ptr(), format.as_ptr(), key.as_text().raw(), offset, nothing);
        if reply.is_null() {
            return None;
        }
        let error = Reply::of(reply).error();
        api!(RedisModule_FreeCallReply)(reply);
        error
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
