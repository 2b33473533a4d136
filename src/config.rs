//! The settings `holdfast.*`.

use crate::lock::Millis;
use crate::server::config::{Choice, Number, Switch, load};
use crate::server::{Ctx, TextRef};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering::Relaxed};

/// Ten years, in ms: the longest lease unless it is set otherwise, and the longest that can be set.
const TEN_YEARS: i64 = 10 * 365 * 24 * 60 * 60 * 1000;

/// The lease where a request names none, in ms.
pub static DEFAULT_LEASE: Number = number(c"default-lease", 30_000, 1, TEN_YEARS);
/// The longest lease that a request may name, in ms.
pub static MAX_LEASE: Number = number(c"max-lease", TEN_YEARS, 1, TEN_YEARS);
/// How many may wait for one lock; 0: any number.
pub static MAX_WAITERS: Number = number(c"max-waiters", 0, 0, i64::MAX);
/// How many may hold one lock: a bound on the time that reading it anew, or ending all its holds, takes.
pub static MAX_HOLDERS: Number = number(c"max-holders", 2500, 1, i32::MAX as i64);
/// How many keys one request may name.
pub static MAX_KEYS: Number = number(c"max-keys", 1000, 1, 1_000_000);
/// How many requests may wait on behalf of one session, unread events included.
pub static MAX_SESSION_WAITS: Number = number(c"max-session-waits", 100_000, 1, i64::MAX);
/// How long replicas may take to confirm, in ms.
pub static REPLICAS_TIMEOUT: Number = number(c"replicas-timeout", 1000, 1, 24 * 60 * 60 * 1000);
/// Whether a release is published on the channel that Redisson's waiting clients listen to, and where it is heard.
pub static PUBLISH_RELEASES: Choice =
    Choice { name: c"publish-releases", value: AtomicI32::new(0), default: 0, words: &[c"yes", c"replicated", c"no"] };
/// Whether a request that would close a cycle of waits is refused.
pub static DETECT_DEADLOCKS: Switch = switch(c"detect-deadlocks");

/// The longest wait that a request may name, in ms.
pub const LONGEST_WAIT: Millis = TEN_YEARS as Millis;

const NUMBERS: [&Number; 7] =
    [&DEFAULT_LEASE, &MAX_LEASE, &MAX_WAITERS, &MAX_HOLDERS, &MAX_KEYS, &MAX_SESSION_WAITS, &REPLICAS_TIMEOUT];
const SWITCHES: [&Switch; 1] = [&DETECT_DEADLOCKS];
const CHOICES: [&Choice; 1] = [&PUBLISH_RELEASES];

const fn number(name: &'static CStr, default: i64, min: i64, max: i64) -> Number {
    Number { name, value: AtomicI64::new(default), default, min, max }
}

const fn switch(name: &'static CStr) -> Switch {
    Switch { name, value: AtomicBool::new(true), default: true }
}

impl Number {
    /// The value; no setting is negative.
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

/// Who hears of a lock that falls free: [`PUBLISH_RELEASES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publish {
    /// Those who have subscribed here, as Redisson does unless it is told otherwise.
    Here,
    /// Those as well who have subscribed at a replica.
    Replicated,
    /// Nobody.
    No,
}

/// Who hears of a lock that falls free.
pub fn publish_releases() -> Publish {
    match PUBLISH_RELEASES.value.load(Relaxed) {
        0 => Publish::Here,
        1 => Publish::Replicated,
        _ => Publish::No,
    }
}

/// The lease where a request names none, never longer than the longest allowed.
pub fn default_lease() -> Millis {
    DEFAULT_LEASE.get().min(MAX_LEASE.get())
}

/// Registers the settings with the server, which sets each to its configured value or else to its default. A module
/// argument (a name, with or without `holdfast.`, and a value) becomes the default of its setting: the server keeps
/// arguments for ever, so if they took precedence over the configuration, they would undo what `CONFIG REWRITE`
/// wrote.
///
/// # Errors
///
/// A line for the server's log that says what is wrong and what is allowed.
pub fn start(ctx: Ctx, args: &[TextRef]) -> Result<(), String> {
    // A module that is loaded again may find values that its last run left here.
    NUMBERS.iter().for_each(|it| it.value.store(it.default, Relaxed));
    SWITCHES.iter().for_each(|it| it.value.store(it.default, Relaxed));
    CHOICES.iter().for_each(|it| it.value.store(it.default, Relaxed));
    for pair in args.chunks(2) {
        let name = pair.first().map(|name| name.bytes()).unwrap_or_default();
        let value =
            pair.get(1).map(|value| value.bytes()).ok_or_else(|| format!("setting {} lacks a value", show(name)))?;
        set(name, value)?;
    }
    let known = NUMBERS.iter().all(|it| it.register(ctx))
        && SWITCHES.iter().all(|it| it.register(ctx))
        && CHOICES.iter().all(|it| it.register(ctx));
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
    if let Some(setting) = CHOICES.iter().find(|it| is(it.name)) {
        let choice = (0..).zip(setting.words).find(|(_, word)| word.to_bytes().eq_ignore_ascii_case(value));
        let (choice, _) = choice.ok_or_else(|| {
            let words: Vec<_> = setting.words.iter().map(|word| word.to_string_lossy()).collect();
            format!("{} must be one of {}, got {}", show(name), words.join(", "), show(value))
        })?;
        setting.value.store(choice, Relaxed);
        return Ok(());
    }
    Err(format!("there is no setting {}", show(name)))
}

/// Bytes made printable, escaped as `redis-cli` does it.
pub fn show(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// How many bytes of a client's input an error shows.
const SHOWN: usize = 128;

/// Like [`show`], but only the beginning.
pub fn show_start(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(start) if bytes.len() > SHOWN => format!("{}...", show(start)),
        _ => show(bytes),
    }
}
