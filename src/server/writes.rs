//! Checks whether the server accepts writes.

use super::call::Reply;
use super::text::{AsText, Text};
use super::{Ctx, MainThread, Role, ctx, events, open_keys};
use std::ffi::CStr;

/// A write command that changes nothing, whatever the type of the key.
const COMMAND: &CStr = c"SETRANGE";
/// The key of that command, or the start of its name.
const KEY: &str = "holdfast";

/// Codes of the errors that concern every write. Other errors concern only the key: its type, or its slot.
const REFUSALS: [&[u8]; 3] = [b"NOREPLICAS", b"MISCONF", b"READONLY"];

/// Part of the error if the cluster is down, whichever node owns the slot of the key. (Clients get `-CLUSTERDOWN`.)
const CLUSTER_DOWN: &[u8] = b"the cluster is down";

/// Part of the error if another node or no node owns the slot of the key. This error says nothing about the cluster.
const NOT_LOCAL: &[u8] = b"non local key";

/// How often the error was [`NOT_LOCAL`]. The number selects the key of the next check.
static KEY_NUMBER: MainThread<u32> = MainThread::new();

/// Whether this server may decide on locks now: it is a primary, is not loading its data, and its clients are not
/// paused.
pub fn are_possible(ctx: Ctx) -> bool {
    let flags = ctx.flags();
    flags.role() == Role::Primary && !flags.loading() && !ctx::is_paused()
}

/// Whether the server would refuse a client's write now. It does so if:
///
/// * there are too few good replicas (`min-replicas-to-write`);
/// * it can't write its snapshot or append-only file;
/// * it is a replica; or
/// * the cluster is down.
///
/// [`super::ctx::is_paused`] checks for paused clients.
///
/// The check takes less than a microsecond. Before Redis 7.2, the module must run the command for it, so `MONITOR` and
/// `INFO commandstats` show the command.
pub fn are_refused(ctx: Ctx) -> bool {
    open_keys::check_none_open();
    let Some(error) = refusal(ctx) else { return false };
    if contains(&error, NOT_LOCAL) {
        // The next check uses another key, until this node serves the slot of one.
        KEY_NUMBER.with(|keys| *keys = keys.wrapping_add(1));
        return false;
    }
    REFUSALS.iter().any(|refusal| error.starts_with(refusal)) || contains(&error, CLUSTER_DOWN)
}

/// The error with which the server would refuse a write; `None` if it would accept it.
fn refusal(ctx: Ctx) -> Option<Vec<u8>> {
    let key = match KEY_NUMBER.with(|keys| *keys) {
        0 => KEY.to_owned(),
        number => format!("{KEY}:{number}"),
    };
    let (key, offset, nothing) = (Text::new(key.as_bytes()), c"0".as_ptr(), c"".as_ptr());
    // `S` (script mode) checks what the server checks for scripts, including whether writes are accepted. `E` returns
    // errors as replies. `D` is a dry run.
    let format = if events::iteration_end_precedes_unblock() { c"SEscc" } else { c"DSscc" };
    // SAFETY: the format takes a string and two C strings, and gets them. The module owns the reply, if there is one,
    // and reads it before freeing it.
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
