//! Where the slots of a cluster are served, as this node knows it.

use super::clock::Now;
use super::text::{AsText, Text};
use super::{Ctx, MainThread};
use crate::lock::Millis;
use redis_module::raw::{self, RedisModuleCallReply};
use std::ffi::{CStr, c_char};

/// What was read of the slots is good for so many ms: many may ask at once, and reading takes some ten microseconds.
const GOOD_FOR: Millis = 10;

/// Where a slot is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: i64,
    /// The node: its host and port.
    pub address: String,
}

/// Slots that a node serves, the first and the last included.
#[derive(Clone, Debug)]
struct Range {
    first: i64,
    last: i64,
    node: Vec<u8>,
    address: String,
}

#[derive(Debug, Default)]
struct Slots {
    read: Option<Millis>,
    ranges: Vec<Range>,
    own: Vec<u8>,
}

static SLOTS: MainThread<Slots> = MainThread::new();

/// Where the slot of a key is served, if another node serves it; `None` if this one does, be it that the slot is on its
/// way, or nobody.
pub fn elsewhere(ctx: Ctx, key: &Text) -> Option<Place> {
    let slot = ask(ctx, c"KEYSLOT", &[key], integer)?;
    let now = Now::read().millis();
    let is_known =
        SLOTS.with(|slots| slots.read.is_some_and(|read| (read..read.saturating_add(GOOD_FOR)).contains(&now)));
    if !is_known {
        let ranges = ask(ctx, c"SLOTS", &[], ranges).unwrap_or_default();
        let own = ask(ctx, c"MYID", &[], bytes).unwrap_or_default();
        SLOTS.with(|slots| *slots = Slots { read: Some(now), ranges, own });
    }
    SLOTS.with(|slots| {
        let range = slots.ranges.iter().find(|range| (range.first..=range.last).contains(&slot))?;
        (range.node != slots.own).then(|| Place { slot, address: range.address.clone() })
    })
}

/// Runs a subcommand of `CLUSTER` and reads its reply.
fn ask<R>(ctx: Ctx, subcommand: &CStr, args: &[&Text], read: impl FnOnce(Reply) -> Option<R>) -> Option<R> {
    let mut args: Vec<_> = args.iter().map(|arg| arg.as_text().raw()).collect();
    // SAFETY: the format takes one C string and an array of strings with its length, and gets them. The reply, if there
    // is one, is ours to free, after it was read.
    unsafe {
        let call = api!(RedisModule_Call);
        let reply =
            call(ctx.raw(), c"CLUSTER".as_ptr(), c"cv".as_ptr(), subcommand.as_ptr(), args.as_mut_ptr(), args.len());
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
struct Reply(*mut RedisModuleCallReply);

impl Reply {
    fn is(self, kind: isize) -> bool {
        // SAFETY: the reply lives.
        isize::try_from(unsafe { api!(RedisModule_CallReplyType)(self.0) }).is_ok_and(|it| it == kind)
    }

    fn len(self) -> usize {
        // SAFETY: as above.
        if self.is(raw::REDISMODULE_REPLY_ARRAY) { unsafe { api!(RedisModule_CallReplyLength)(self.0) } } else { 0 }
    }

    fn at(self, index: usize) -> Option<Self> {
        if index >= self.len() {
            return None;
        }
        // SAFETY: an array of more elements, which live as long as it does.
        let element = unsafe { api!(RedisModule_CallReplyArrayElement)(self.0, index) };
        (!element.is_null()).then_some(Self(element))
    }
}

fn integer(reply: Reply) -> Option<i64> {
    // SAFETY: the reply lives and is an integer.
    reply.is(raw::REDISMODULE_REPLY_INTEGER).then(|| unsafe { api!(RedisModule_CallReplyInteger)(reply.0) })
}

fn bytes(reply: Reply) -> Option<Vec<u8>> {
    if !reply.is(raw::REDISMODULE_REPLY_STRING) {
        return None;
    }
    let mut len = 0;
    // SAFETY: the reply lives and is a string of `len` bytes, which are copied.
    unsafe {
        let start: *const c_char = api!(RedisModule_CallReplyStringPtr)(reply.0, &raw mut len);
        (!start.is_null()).then(|| std::slice::from_raw_parts(start.cast::<u8>(), len).to_vec())
    }
}

/// The reply of `CLUSTER SLOTS`: for each range its first and last slot, and its nodes, the master first: host, port, id.
fn ranges(reply: Reply) -> Option<Vec<Range>> {
    let range = |entry: Reply| {
        let (first, last) = (integer(entry.at(0)?)?, integer(entry.at(1)?)?);
        let master = entry.at(2)?;
        let host = master.at(0).and_then(bytes).unwrap_or_default();
        let (port, node) = (integer(master.at(1)?)?, bytes(master.at(2)?)?);
        Some(Range { first, last, node, address: format!("{}:{port}", String::from_utf8_lossy(&host)) })
    };
    Some((0..reply.len()).filter_map(|index| reply.at(index)).filter_map(range).collect())
}
