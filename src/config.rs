//! The settings `holdfast.*`.

use crate::lock::Millis;
use crate::server::config::{Number, Switch, load};
use crate::server::{Ctx, TextRef};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

/// Ten years, in ms: the longest lease unless it is set otherwise, and the longest that can be set.
const TEN_YEARS: i64 = 10 * 365 * 24 * 60 * 60 * 1000;

/// The lease where a request names none, in ms.
pub static DEFAULT_LEASE: Number = number(c"default-lease", 30_000, 1, TEN_YEARS);
/// The longest lease that a request may name, in ms.
pub static MAX_LEASE: Number = number(c"max-lease", TEN_YEARS, 1, TEN_YEARS);
/// How many may wait for one lock; 0: any number.
pub static MAX_WAITERS: Number = number(c"max-waiters", 0, 0, i64::MAX);
/// How many may hold one lock, so that reading it anew, or ending all its holds, never keeps others waiting for long.
pub static MAX_HOLDERS: Number = number(c"max-holders", 2500, 1, i32::MAX as i64);
/// How many keys a request may name.
pub static MAX_KEYS: Number = number(c"max-keys", 1000, 1, 1_000_000);
/// How many requests may wait on behalf of one session, events that it has not read included.
pub static MAX_SESSION_WAITS: Number = number(c"max-session-waits", 100_000, 1, i64::MAX);
/// How long replicas may take to confirm, in ms.
pub static REPLICAS_TIMEOUT: Number = number(c"replicas-timeout", 1000, 1, 24 * 60 * 60 * 1000);
/// Whether a lock that falls free is told to those who wait in the way of Redisson.
pub static PUBLISH_RELEASES: Switch = switch(c"publish-releases");
/// Whether a request that would close a circle of waits is refused.
pub static DETECT_DEADLOCKS: Switch = switch(c"detect-deadlocks");

/// The longest wait that a request may name, in ms.
pub const LONGEST_WAIT: Millis = TEN_YEARS as Millis;

const NUMBERS: [&Number; 7] =
    [&DEFAULT_LEASE, &MAX_LEASE, &MAX_WAITERS, &MAX_HOLDERS, &MAX_KEYS, &MAX_SESSION_WAITS, &REPLICAS_TIMEOUT];
const SWITCHES: [&Switch; 2] = [&PUBLISH_RELEASES, &DETECT_DEADLOCKS];

const fn number(name: &'static CStr, default: i64, min: i64, max: i64) -> Number {
    Number { name, value: AtomicI64::new(default), default, min, max }
}

const fn switch(name: &'static CStr) -> Switch {
    Switch { name, value: AtomicBool::new(true), default: true }
}

impl Number {
    /// The value; none of the settings is negative.
    pub fn get(&self) -> u64 {
        u64::try_from(self.value.load(Relaxed)).unwrap_or(0)
    }
}

impl Switch {
    /// Whether it is on.
    pub fn is_on(&self) -> bool {
        self.value.load(Relaxed)
    }
}

/// The lease where a request names none: never longer than the longest allowed.
pub fn default_lease() -> Millis {
    DEFAULT_LEASE.get().min(MAX_LEASE.get())
}

/// Makes the settings known to the server, which sets each to what its configuration says, or else to its default. An
/// argument of the module (a name, with or without `holdfast.`, and a value) is the default of its setting: the server
/// keeps arguments for ever, so one that went before the configuration would undo what `CONFIG REWRITE` wrote there.
///
/// # Errors
///
/// A line for the server's log that names what is wrong and what is allowed.
pub fn start(ctx: Ctx, args: &[TextRef]) -> Result<(), String> {
    // A module that is loaded again may find what the last time left here.
    NUMBERS.iter().for_each(|it| it.value.store(it.default, Relaxed));
    SWITCHES.iter().for_each(|it| it.value.store(it.default, Relaxed));
    for pair in args.chunks(2) {
        let name = pair.first().map(|name| name.bytes()).unwrap_or_default();
        let value = pair.get(1).map(|value| value.bytes()).ok_or_else(|| format!("{} lacks a value", show(name)))?;
        set(name, value)?;
    }
    let known = NUMBERS.iter().all(|it| it.register(ctx)) && SWITCHES.iter().all(|it| it.register(ctx));
    if known && load(ctx) { Ok(()) } else { Err("the server refused the module's settings".into()) }
}

fn set(name: &[u8], value: &[u8]) -> Result<(), String> {
    let short = name.strip_prefix(b"holdfast.").unwrap_or(name);
    let is = |it: &CStr| it.to_bytes().eq_ignore_ascii_case(short);
    if let Some(setting) = NUMBERS.iter().find(|it| is(it.name)) {
        let number = std::str::from_utf8(value).ok().and_then(|value| value.parse().ok());
        let number = number.filter(|number| (setting.min..=setting.max).contains(number)).ok_or_else(|| {
            format!("{} must be between {} and {}, got {}", show(name), setting.min, setting.max, show(value))
        })?;
        setting.value.store(number, Relaxed);
        return Ok(());
    }
    if let Some(setting) = SWITCHES.iter().find(|it| is(it.name)) {
        let on = match value.to_ascii_lowercase().as_slice() {
            b"yes" => true,
            b"no" => false,
            _ => return Err(format!("{} must be yes or no, got {}", show(name), show(value))),
        };
        setting.value.store(on, Relaxed);
        return Ok(());
    }
    Err(format!("there is no setting {}", show(name)))
}

/// Bytes as they can be printed: the way `redis-cli` escapes them.
pub fn show(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// How much of somebody's bytes an error shows.
const SHOWN: usize = 64;

/// As [`show`], and no more than the beginning.
pub fn show_start(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(start) if bytes.len() > SHOWN => format!("{}...", show(start)),
        _ => show(bytes),
    }
}
