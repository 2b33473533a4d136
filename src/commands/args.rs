//! Arguments: read once, checked whole, before anything is looked at.

use super::owner;
use crate::config;
use crate::lock::rule::MAX_HOLDS;
use crate::lock::{Limit, Millis, Token, fence};
use crate::server::text::parse_number;
use crate::server::{AsText, Call, Text, TextRef};
use crate::ties::Tying;
use std::collections::BTreeSet;

/// The longest owner, in bytes.
const MAX_OWNER: usize = 512;
/// How much of a wrong argument an error shows, in bytes.
const SHOWN: usize = 64;

/// The words that options begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// `LEASE ms`
    Lease,
    /// `WAIT ms`
    Wait,
    /// `LIMIT n`
    Limit,
    /// `SHARED`
    Shared,
    /// `HOLDS n`, at least 1
    Holds,
    /// `HOLDS n`, where 0 means none
    HoldsLeft,
    /// `ALL`
    All,
    /// `TOKEN t`
    Token,
    /// `WATCHDOG`
    Watchdog,
    /// `EPHEMERAL`
    Ephemeral,
    /// `REPLICAS n`
    Replicas,
    /// `COUNT n`
    Count,
}

impl Word {
    fn name(self) -> &'static str {
        match self {
            Self::Lease => "LEASE",
            Self::Wait => "WAIT",
            Self::Limit => "LIMIT",
            Self::Shared => "SHARED",
            Self::Holds | Self::HoldsLeft => "HOLDS",
            Self::All => "ALL",
            Self::Token => "TOKEN",
            Self::Watchdog => "WATCHDOG",
            Self::Ephemeral => "EPHEMERAL",
            Self::Replicas => "REPLICAS",
            Self::Count => "COUNT",
        }
    }

    /// What may follow; `None` for a word that stands alone.
    fn range(self) -> Option<Range> {
        const MAX_I32: u64 = i32::MAX as u64;
        Some(match self {
            Self::Lease => (1, config::MAX_LEASE.get(), " ms"),
            Self::Wait => (0, config::LONGEST_WAIT, " ms"),
            Self::Limit | Self::Replicas | Self::Count => (1, MAX_I32, ""),
            Self::Holds => (1, MAX_HOLDS, ""),
            Self::HoldsLeft => (0, MAX_HOLDS, ""),
            Self::Token => (1, fence::MAX_TOKEN, ""),
            Self::Shared | Self::All | Self::Watchdog | Self::Ephemeral => return None,
        })
    }
}

/// The smallest and the largest value, and the unit.
type Range = (u64, u64, &'static str);

/// How long a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// So many milliseconds.
    For(Millis),
    /// As long as it takes.
    Forever,
}

/// The options of a command, as far as they were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `LEASE`, in ms.
    pub lease: Option<Millis>,
    /// `LIMIT` or `SHARED`.
    pub limit: Option<Limit>,
    /// `HOLDS`, or 0 for `ALL`.
    pub holds: Option<u64>,
    /// `TOKEN`.
    pub token: Option<Token>,
    /// `WATCHDOG`, `EPHEMERAL`.
    pub tying: Tying,
    /// `REPLICAS`, 0 if it was not given.
    pub replicas: u32,
    /// `COUNT`.
    pub count: Option<usize>,
    wait: Option<u64>,
}

impl Options {
    /// How long the request may wait.
    pub fn wait(&self) -> Wait {
        match self.wait {
            None => Wait::No,
            Some(0) => Wait::Forever,
            Some(ms) => Wait::For(ms),
        }
    }

    /// The lease asked for, or the default.
    pub fn lease_or_default(&self) -> Millis {
        self.lease.unwrap_or_else(config::default_lease)
    }
}

/// Reads the options from position `from` on; only those `allowed` are known.
///
/// # Errors
///
/// The reply that tells what is wrong and what is allowed.
pub fn options(call: Call, from: usize, allowed: &[Word]) -> Result<Options, String> {
    let mut options = Options::default();
    let mut given: u16 = 0;
    let mut at = from;
    while let Some(text) = call.get(at) {
        let bytes = text.bytes();
        let word = allowed.iter().copied().find(|word| bytes.eq_ignore_ascii_case(word.name().as_bytes()));
        let word = word.ok_or_else(|| unknown(bytes, allowed))?;
        let bit = 1_u16 << (word as u16);
        if given & bit != 0 {
            return Err(format!("ERR {} is given twice", word.name()));
        }
        given |= bit;
        at = at.saturating_add(1);
        let value = match word.range() {
            None => 0,
            Some(range) => {
                let value = number(word.name(), range, call.get(at))?;
                at = at.saturating_add(1);
                value
            }
        };
        options.take(word, value)?;
    }
    Ok(options)
}

impl Options {
    fn take(&mut self, word: Word, value: u64) -> Result<(), String> {
        match word {
            Word::Lease => self.lease = Some(value),
            Word::Wait => self.wait = Some(value),
            Word::Limit | Word::Shared if self.limit.is_some() => {
                return Err("ERR LIMIT and SHARED can't be given together".into());
            }
            Word::Limit => self.limit = Some(Limit::from_number(u32::try_from(value).unwrap_or(u32::MAX))),
            Word::Shared => self.limit = Some(Limit::Shared),
            Word::HoldsLeft | Word::All if self.holds.is_some() => {
                return Err("ERR HOLDS and ALL can't be given together".into());
            }
            Word::Holds | Word::HoldsLeft => self.holds = Some(value),
            Word::All => self.holds = Some(0),
            Word::Token => self.token = Some(value),
            Word::Watchdog => self.tying.watchdog = true,
            Word::Ephemeral => self.tying.ephemeral = true,
            Word::Replicas => self.replicas = u32::try_from(value).unwrap_or(u32::MAX),
            Word::Count => self.count = Some(usize::try_from(value).unwrap_or(usize::MAX)),
        }
        Ok(())
    }
}

fn unknown(bytes: &[u8], allowed: &[Word]) -> String {
    let names: Vec<&str> = allowed.iter().map(|word| word.name()).collect();
    match names.as_slice() {
        [] => format!("ERR unknown argument '{}': there are no further ones", show(bytes)),
        names => format!("ERR unknown argument '{}', allowed are {}", show(bytes), names.join(", ")),
    }
}

fn number(name: &str, (min, max, unit): Range, text: Option<TextRef>) -> Result<u64, String> {
    let Some(text) = text else {
        return Err(format!("ERR {name} must be followed by an integer between {min} and {max}{unit}"));
    };
    let value = parse_number(text.bytes()).filter(|value| (min..=max).contains(value));
    value.ok_or_else(|| format!("ERR {name} must be between {min} and {max}{unit}, got {}", show(text.bytes())))
}

/// The part of an argument that an error shows, escaped for printing.
pub fn show(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(start) if bytes.len() > SHOWN => format!("{}...", config::show(start)),
        _ => config::show(bytes),
    }
}

/// An owner: as it was given, or the connection's identity.
#[derive(Debug)]
pub enum OwnerArg<'a> {
    /// As it was given.
    Given(TextRef<'a>),
    /// `*`
    Connection(Text),
}

impl AsText for OwnerArg<'_> {
    fn as_text(&self) -> TextRef<'_> {
        match self {
            Self::Given(text) => *text,
            Self::Connection(text) => text.as_text(),
        }
    }
}

/// Reads the owner at a position.
///
/// # Errors
///
/// The reply that tells what is wrong and what is allowed.
pub fn owner(call: Call<'_>, at: usize) -> Result<OwnerArg<'_>, String> {
    let Some(text) = call.get(at) else { return Err("ERR owner is missing".into()) };
    match text.bytes() {
        b"*" => owner::identity(call.ctx).map(OwnerArg::Connection),
        bytes if bytes.is_empty() || bytes.len() > MAX_OWNER => {
            Err(format!("ERR owner must be 1 to {MAX_OWNER} bytes long, got {} bytes: '{}'", bytes.len(), show(bytes)))
        }
        [b'#', ..] => Err(format!("ERR owner must not begin with '#', got '{}'", show(text.bytes()))),
        _ => Ok(OwnerArg::Given(text)),
    }
}

/// Reads the key at a position.
///
/// # Errors
///
/// The reply that tells that it is missing.
pub fn key(call: Call<'_>, at: usize) -> Result<TextRef<'_>, String> {
    call.get(at).ok_or_else(|| "ERR key is missing".into())
}

/// Reads `numkeys key [key …]` from position 1 on; the keys, and the position behind them.
///
/// # Errors
///
/// The reply that tells what is wrong and what is allowed.
pub fn keys(call: Call<'_>) -> Result<(Vec<TextRef<'_>>, usize), String> {
    let most = call.count().saturating_sub(3);
    let text = call.get(1).map(|text| text.bytes()).unwrap_or_default();
    let count =
        parse_number(text).and_then(|count| usize::try_from(count).ok()).filter(|count| (1..=most).contains(count));
    let count = count.ok_or_else(|| {
        format!(
            "ERR numkeys must be between 1 and the number of keys that follow (here at most {most}), got {}",
            show(text)
        )
    })?;
    let end = count.saturating_add(2);
    let keys: Vec<TextRef> = (2..end).filter_map(|at| call.get(at)).collect();
    let mut seen = BTreeSet::new();
    match keys.iter().find(|key| !seen.insert(key.bytes())) {
        Some(twice) => Err(format!("ERR key '{}' is named twice", show(twice.bytes()))),
        None => Ok((keys, end)),
    }
}

/// Refuses what a request can't ask for where it runs: a tie without a connection, a reply later on where a command
/// must not block.
///
/// # Errors
///
/// The reply that tells what is wrong.
pub fn fit_for(call: Call, options: &Options) -> Result<(), String> {
    if options.tying != Tying::NONE && !owner::is_connection(call.ctx) {
        return Err("ERR WATCHDOG and EPHEMERAL tie a hold to a connection, and a script has none of its own".into());
    }
    if options.replicas > 0 && !call.ctx.flags().may_block() {
        return Err("ERR REPLICAS is not allowed where a command may not block: in MULTI, in a script".into());
    }
    Ok(())
}
