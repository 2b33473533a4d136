//! The settings `holdfast.*`.

use crate::lock::Millis;
use crate::server::config::{Allowed, Setting, load};
use crate::server::text::show;
use crate::server::{Ctx, TextRef};
use std::ffi::CStr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// Ten years, in ms: the longest lease unless it is set otherwise, and the longest that can be set.
const TEN_YEARS: i64 = 10 * 365 * 24 * 60 * 60 * 1000;

/// The lease of a request that names none, in ms.
pub static DEFAULT_LEASE: Setting = number(c"default-lease", 30_000, 1, TEN_YEARS);
/// The longest lease that a request may name, in ms.
pub static MAX_LEASE: Setting = number(c"max-lease", TEN_YEARS, 1, TEN_YEARS);
/// The most requests that may wait for one lock; 0: any number.
pub static MAX_WAITERS: Setting = number(c"max-waiters", 0, 0, i64::MAX);
/// The most holders that one lock may have. Bounds the time that it takes to reread a lock, or to end all its holds.
pub static MAX_HOLDERS: Setting = number(c"max-holders", 2500, 1, i32::MAX as i64);
/// The most bytes that a session's events may take: undelivered events, and the bytes reserved for its waiting requests
/// and its bound holds.
pub static MAX_SESSION_BYTES: Setting = number(c"max-session-bytes", 128 * 1024 * 1024, 4096, i64::MAX);
/// The limit, in ms, up to which a request's time spent waiting elsewhere (`WAITED`) counts; 0: it does not count.
pub static MAX_WAITED: Setting = number(c"max-waited", 24 * 60 * 60 * 1000, 0, 24 * 60 * 60 * 1000);
/// How long replicas may take to confirm, in ms.
pub static REPLICAS_TIMEOUT: Setting = number(c"replicas-timeout", 1000, 1, 24 * 60 * 60 * 1000);
static PUBLISH_RELEASES: Setting = words(c"publish-releases", &[c"yes", c"replicated", c"no"]);
static DETECT_DEADLOCKS: Setting = words(c"detect-deadlocks", &[c"yes", c"no"]);

/// The longest wait that a request may name, in ms.
pub const LONGEST_WAIT: Millis = TEN_YEARS as Millis;

const ALL: [&Setting; 9] = [
    &DEFAULT_LEASE,
    &MAX_LEASE,
    &MAX_WAITERS,
    &MAX_HOLDERS,
    &MAX_SESSION_BYTES,
    &MAX_WAITED,
    &REPLICAS_TIMEOUT,
    &PUBLISH_RELEASES,
    &DETECT_DEADLOCKS,
];

const fn number(name: &'static CStr, default: i64, min: i64, max: i64) -> Setting {
    Setting { name, value: AtomicI64::new(default), default, allowed: Allowed::Numbers(min, max) }
}

/// The first word is the default.
const fn words(name: &'static CStr, words: &'static [&'static CStr]) -> Setting {
    Setting { name, value: AtomicI64::new(0), default: 0, allowed: Allowed::Words(words) }
}

impl Setting {
    /// The value as a number, which is never negative.
    pub fn get(&self) -> u64 {
        u64::try_from(self.value.load(Relaxed)).unwrap_or(0)
    }
}

/// Which clients are notified when a lock becomes free, on the channel that Redisson's waiting clients listen to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publish {
    /// Clients that have subscribed on this server, as Redisson does by default.
    Here,
    /// Also clients that have subscribed on a replica.
    Replicated,
    /// No client.
    No,
}

/// Which clients are notified when a lock becomes free.
pub fn publish_releases() -> Publish {
    match PUBLISH_RELEASES.get() {
        0 => Publish::Here,
        1 => Publish::Replicated,
        _ => Publish::No,
    }
}

/// Whether a request that would close a cycle of waits is refused.
pub fn detects_deadlocks() -> bool {
    DETECT_DEADLOCKS.get() == 0
}

/// The lease of a request that names none: never longer than the longest allowed.
pub fn default_lease() -> Millis {
    DEFAULT_LEASE.get().min(MAX_LEASE.get())
}

/// Registers the settings with the server, which sets each to its configured value or else to its default. A module
/// argument (a name, with or without `holdfast.`, and a value) becomes the default of its setting. The server keeps
/// arguments for ever: if they took precedence over the configuration, they would undo what `CONFIG REWRITE` wrote.
///
/// # Errors
///
/// A line for the server's log that says what is wrong and what is allowed.
pub fn start(ctx: Ctx, args: &[TextRef]) -> Result<(), String> {
    // The values of an earlier load may still be here.
    ALL.iter().for_each(|it| it.value.store(it.default, Relaxed));
    for pair in args.chunks(2) {
        let name = pair.first().map(|name| name.bytes()).unwrap_or_default();
        let value =
            pair.get(1).map(|value| value.bytes()).ok_or_else(|| format!("setting {} lacks a value", show(name)))?;
        set(name, value)?;
    }
    let known = ALL.iter().all(|it| it.register(ctx));
    if known && load(ctx) { Ok(()) } else { Err("the server refused the module's settings".into()) }
}

fn set(name: &[u8], value: &[u8]) -> Result<(), String> {
    let short = name.strip_prefix(b"holdfast.").unwrap_or(name);
    let setting = ALL.iter().find(|it| it.name.to_bytes().eq_ignore_ascii_case(short));
    let setting = setting.ok_or_else(|| format!("there is no setting {}", show(name)))?;
    let (parsed, allowed) = match setting.allowed {
        Allowed::Numbers(min, max) => {
            let number = std::str::from_utf8(value).ok().and_then(|value| value.parse().ok());
            (number.filter(|number| (min..=max).contains(number)), format!("between {min} and {max}"))
        }
        Allowed::Words(words) => {
            let word = (0..).zip(words).find(|(_, word)| word.to_bytes().eq_ignore_ascii_case(value));
            let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
            (word.map(|(place, _)| place), format!("one of {}", words.join(", ")))
        }
    };
    let value = parsed.ok_or_else(|| format!("{} must be {allowed}, got {}", show(name), show(value)))?;
    setting.value.store(value, Relaxed);
    Ok(())
}
