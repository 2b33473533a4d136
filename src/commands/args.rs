//! Arguments: read once, and checked completely before the command looks up anything.

use super::session;
use crate::config;
use crate::keyspace::MAX_OWNER;
use crate::lock::rule::MAX_HOLDS;
use crate::lock::{Demand, Limit, Millis, Raise, Token, fence};
use crate::server::commands::{Arg, Command};
use crate::server::text::{parse_number, show_start as show};
use crate::server::{AsText, Call, Text, TextRef, acl};
use crate::state::pending::OnBehalf;
use crate::state::{BindingFlags, HeartbeatMode, State, Terms, TokenForm};
use crate::waiting::Wait;
use std::collections::BTreeSet;
use std::ffi::CStr;

/// The longest key of a lock, in bytes. A request may name many keys, and the module copies and compares each several
/// times.
const MAX_KEY: usize = 1024;

/// How many keys a request may name, since one command execution handles all of them. All multi-key commands have this
/// limit, so a request can renew or release all that another one acquired.
const MOST_KEYS: usize = 128;

/// The error for `CONTENTION` where several owners may hold the lock. (One command would have to notify all of them,
/// perhaps thousands.)
pub const NOT_A_MUTEX: &str = "ERR CONTENTION is for a lock that has one holder: LIMIT 1, which is the default";

/// The words that options begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// `LEASE ms`
    Lease,
    /// `WAIT ms`
    Wait,
    /// `WAITED ms`
    Waited,
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
    /// `NEW`
    New,
    /// `TOKEN t`
    Token,
    /// `WATCHDOG`
    Watchdog,
    /// `EPHEMERAL`
    Ephemeral,
    /// `REPLICAS n`
    Replicas,
    /// `FENCE t`
    Fence,
    /// `SESSION id`
    Session,
    /// `COUNT n`
    Count,
    /// `HEARTBEAT`
    Heartbeat,
    /// `CONTENTION`
    Contention,
    /// `WITHWAITED`
    WithWaited,
    /// `UNBIND`
    Unbind,
}

const _: () = {
    let (mut words, mut place) = (Word::ALL.as_slice(), 0);
    while let Some((word, others)) = words.split_first() {
        assert!(*word as usize == place, "Word::ALL is not in the order of the declaration");
        (words, place) = (others, place + 1);
    }
    assert!(place <= u32::BITS as usize, "there is a bit for each word: see Options::read");
};

impl Word {
    /// In the order of the declaration: the id of an argument is the index of its word here.
    const ALL: [Self; 20] = [
        Self::Lease,
        Self::Wait,
        Self::Waited,
        Self::Limit,
        Self::Shared,
        Self::Holds,
        Self::HoldsLeft,
        Self::All,
        Self::New,
        Self::Token,
        Self::Watchdog,
        Self::Ephemeral,
        Self::Replicas,
        Self::Fence,
        Self::Session,
        Self::Count,
        Self::Heartbeat,
        Self::Contention,
        Self::WithWaited,
        Self::Unbind,
    ];

    /// The argument for this word in a command's grammar.
    pub const fn arg(self) -> Arg {
        let arg = match self {
            Self::Lease => Arg::number(c"LEASE", c"lease-ms", "ms"),
            Self::Wait => Arg::number(c"WAIT", c"wait-ms", "ms"),
            Self::Waited => Arg::number(c"WAITED", c"waited-ms", "ms"),
            Self::Limit => Arg::number(c"LIMIT", c"holders", "n"),
            Self::Shared => Arg::word(c"shared", c"SHARED"),
            Self::Holds => Arg::number(c"HOLDS", c"holds", "n"),
            Self::HoldsLeft => Arg::number(c"HOLDS", c"holds-left", "n"),
            Self::All => Arg::word(c"all", c"ALL"),
            Self::New => Arg::word(c"new", c"NEW"),
            Self::Token => Arg::number(c"TOKEN", c"token", "t"),
            Self::Watchdog => Arg::word(c"watchdog", c"WATCHDOG"),
            Self::Ephemeral => Arg::word(c"ephemeral", c"EPHEMERAL"),
            Self::Replicas => Arg::number(c"REPLICAS", c"replicas", "n"),
            Self::Fence => Arg::number(c"FENCE", c"fence", "t"),
            Self::Session => Arg::bytes(c"SESSION", c"session", "id"),
            Self::Count => Arg::number(c"COUNT", c"count", "n"),
            Self::Heartbeat => Arg::word(c"heartbeat", c"HEARTBEAT"),
            Self::Contention => Arg::word(c"contention", c"CONTENTION"),
            Self::WithWaited => Arg::word(c"with-waited", c"WITHWAITED"),
            Self::Unbind => Arg::word(c"unbind", c"UNBIND"),
        };
        arg.with_id(self as u8)
    }

    /// The same argument, as an optional one.
    pub const fn option(self) -> Arg {
        self.arg().optional()
    }

    fn name(self) -> &'static str {
        self.arg().token().and_then(|token| token.to_str().ok()).unwrap_or_default()
    }

    /// The values that may follow the word; `None` if no number follows it.
    fn range(self) -> Option<Range> {
        const MAX_I32: u64 = i32::MAX as u64;
        Some(match self {
            Self::Lease => (1, config::MAX_LEASE.get(), " ms"),
            Self::Wait | Self::Waited => (0, config::LONGEST_WAIT, " ms"),
            Self::Limit | Self::Replicas | Self::Count => (1, MAX_I32, ""),
            Self::Holds => (1, MAX_HOLDS, ""),
            Self::HoldsLeft => (0, MAX_HOLDS, ""),
            Self::Token | Self::Fence => (1, fence::MAX_TOKEN, ""),
            Self::Shared
            | Self::All
            | Self::New
            | Self::Watchdog
            | Self::Ephemeral
            | Self::Session
            | Self::Heartbeat
            | Self::Contention
            | Self::WithWaited
            | Self::Unbind => return None,
        })
    }
}

/// The smallest and the largest value, and the unit.
type Range = (u64, u64, &'static str);

/// The options that a command was given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// `LEASE`, in ms.
    pub lease: Option<Millis>,
    /// `LIMIT` or `SHARED`.
    pub limit: Option<Limit>,
    /// `HOLDS`, or 0 for `ALL`.
    pub holds: Option<u64>,
    /// `HOLDS` or `NEW` of a request that acquires locks.
    raise: Option<Raise>,
    /// `TOKEN`.
    pub token: Option<Token>,
    /// `WATCHDOG`, `EPHEMERAL`, `CONTENTION`.
    pub flags: BindingFlags,
    /// `REPLICAS`, or 0 without it.
    pub replicas: u32,
    /// `FENCE`.
    pub fence: Option<Token>,
    /// `SESSION`.
    pub session: Option<TextRef<'a>>,
    /// `COUNT`.
    pub count: Option<usize>,
    /// `HEARTBEAT`.
    pub signs: HeartbeatMode,
    /// The form of the reply to a grant: `WITHWAITED`.
    pub form: TokenForm,
    /// `UNBIND`.
    pub unbind: bool,
    wait: Option<u64>,
    waited: Option<Millis>,
}

impl Options<'_> {
    /// How long the request may wait.
    pub fn wait(&self) -> Wait {
        match self.wait {
            None => Wait::No,
            Some(0) => Wait::Forever,
            Some(ms) => Wait::For(ms),
        }
    }

    /// How long the client had waited before it sent this request, as far as that counts (`holdfast.max-waited`).
    pub fn waited(&self) -> Millis {
        self.waited.unwrap_or(0).min(config::MAX_WAITED.get())
    }

    /// The terms of the request. Without `LIMIT` or `SHARED`, the lock is a mutex.
    pub fn terms(&self) -> Terms {
        Terms {
            demand: Demand {
                limit: self.limit.unwrap_or(Limit::MUTEX),
                raise: self.raise.unwrap_or(Raise::ByOne),
                lease: self.lease_or_default(),
            },
            flags: self.flags,
            replicas: self.replicas,
        }
    }

    /// The requested lease, or the default.
    pub fn lease_or_default(&self) -> Millis {
        self.lease.unwrap_or_else(config::default_lease)
    }
}

/// Reads the options from position `from` on, according to the command's grammar.
///
/// # Errors
///
/// The reply that says what is wrong and what is allowed.
pub fn options<'a>(call: Call<'a>, from: usize, grammar: &[Arg]) -> Result<Options<'a>, String> {
    let mut options = Options::default();
    options.read(call, from, grammar)?;
    Ok(options)
}

/// The options of a grammar, with each alternative on its own.
fn words(grammar: &[Arg]) -> impl Iterator<Item = &Arg> {
    grammar.iter().flat_map(|arg| std::iter::once(arg).chain(arg.choices())).filter(|arg| arg.token().is_some())
}

/// The option that begins with these bytes.
fn word_of(bytes: &[u8], grammar: &[Arg]) -> Option<Word> {
    let is_word = |word: &[u8]| word == bytes || word.eq_ignore_ascii_case(bytes); // The former costs less.
    let is = |arg: &&Arg| arg.token().is_some_and(|it| is_word(it.to_bytes()));
    let arg = grammar.iter().find_map(|arg| Some(arg).filter(is).or_else(|| arg.choices().iter().find(is)))?;
    arg.id().and_then(|id| Word::ALL.get(usize::from(id)).copied())
}

impl<'a> Options<'a> {
    fn read(&mut self, call: Call<'a>, from: usize, grammar: &[Arg]) -> Result<(), String> {
        let mut given: u32 = 0;
        let mut at = from;
        while let Some(text) = call.get(at) {
            let bytes = text.bytes();
            let word = word_of(bytes, grammar).ok_or_else(|| unknown(bytes, grammar))?;
            let bit = 1_u32 << (word as u32);
            if given & bit != 0 {
                return Err(format!("ERR {} is given twice", word.name()));
            }
            given |= bit;
            at = at.saturating_add(1);
            let value = match word.range() {
                None => 0,
                Some(range) => {
                    let value = number(word, range, call.get(at))?;
                    at = at.saturating_add(1);
                    value
                }
            };
            if word == Word::Session {
                self.session = Some(call.get(at).ok_or(
                    "ERR SESSION must be followed by the id of a session, as LOCK.SESSION returns it, or by * for this connection",
                )?);
                at = at.saturating_add(1);
            }
            self.take(word, value)?;
        }
        if self.flags.contention && self.limit.is_some_and(|limit| limit != Limit::MUTEX) {
            return Err(NOT_A_MUTEX.into());
        }
        if self.unbind && (self.flags != BindingFlags::NONE || self.session.is_some()) {
            return Err("ERR UNBIND can't be given together with SESSION or with what binds to it".into());
        }
        match (self.waited, self.wait) {
            (Some(_), None) => {
                Err("ERR WAITED says how long a request has waited already; it must be given with WAIT".into())
            }
            _ => Ok(()),
        }
    }

    fn take(&mut self, word: Word, value: u64) -> Result<(), String> {
        match word {
            Word::Lease => self.lease = Some(value),
            Word::Wait => self.wait = Some(value),
            Word::Waited => self.waited = Some(value),
            Word::Limit | Word::Shared if self.limit.is_some() => {
                return Err("ERR LIMIT and SHARED can't be given together".into());
            }
            Word::Limit => self.limit = Some(Limit::from_number(u32::try_from(value).unwrap_or(u32::MAX))),
            Word::Shared => self.limit = Some(Limit::Shared),
            Word::HoldsLeft | Word::All if self.holds.is_some() => {
                return Err("ERR HOLDS and ALL can't be given together".into());
            }
            Word::HoldsLeft => self.holds = Some(value),
            Word::Holds | Word::New if self.raise.is_some() => {
                return Err("ERR HOLDS and NEW can't be given together".into());
            }
            Word::Holds => self.raise = Some(Raise::To(value)),
            Word::New => self.raise = Some(Raise::New),
            Word::All => self.holds = Some(0),
            Word::Token => self.token = Some(value),
            Word::Watchdog => self.flags.watchdog = true,
            Word::Ephemeral => self.flags.ephemeral = true,
            Word::Replicas => self.replicas = u32::try_from(value).unwrap_or(u32::MAX),
            Word::Count => self.count = Some(usize::try_from(value).unwrap_or(usize::MAX)),
            Word::Fence => self.fence = Some(value),
            Word::Heartbeat => self.signs = HeartbeatMode::Wanted,
            Word::Contention => self.flags.contention = true,
            Word::WithWaited => self.form = TokenForm::WithWaited,
            Word::Unbind => self.unbind = true,
            Word::Session => {}
        }
        Ok(())
    }
}

fn unknown(bytes: &[u8], grammar: &[Arg]) -> String {
    let names: Vec<_> = words(grammar).filter_map(|arg| arg.token()).map(CStr::to_string_lossy).collect();
    match names.as_slice() {
        [] => format!("ERR unknown argument '{}': no further arguments are allowed", show(bytes)),
        names => format!("ERR unknown argument '{}': allowed here are {}", show(bytes), names.join(", ")),
    }
}

fn number(word: Word, (min, max, unit): Range, text: Option<TextRef>) -> Result<u64, String> {
    let Some(text) = text else {
        return Err(format!("ERR {} must be followed by an integer between {min} and {max}{unit}", word.name()));
    };
    let bytes = text.bytes();
    let value = parse_number(bytes).filter(|value| (min..=max).contains(value));
    value.ok_or_else(|| format!("ERR {} must be between {min} and {max}{unit}, got {}", word.name(), show(bytes)))
}

/// An owner as it was given, or the identity of the connection.
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

/// Reads the owner at a position. `*` stands for the connection that makes the request, or for the session that it
/// names.
///
/// # Errors
///
/// The reply that says what is wrong and what is allowed.
fn owner<'a>(call: Call<'a>, at: usize, options: &Options<'a>) -> Result<OwnerArg<'a>, String> {
    let Some(text) = call.get(at) else { return Err("ERR owner is missing".into()) };
    match (text.bytes(), options.session) {
        (b"*", Some(session)) if session.bytes() != b"*" => Ok(OwnerArg::Given(session)),
        (b"*", _) => session::identity(call.ctx).map(OwnerArg::Connection),
        (bytes, _) if bytes.is_empty() || bytes.len() > MAX_OWNER => {
            Err(format!("ERR owner must be 1 to {MAX_OWNER} bytes long, got {} bytes: '{}'", bytes.len(), show(bytes)))
        }
        ([b'#', ..], _) => Err(format!("ERR owner must not begin with '#', got '{}'", show(text.bytes()))),
        _ => Ok(OwnerArg::Given(text)),
    }
}

/// Determines on whose behalf a request is made: the connection, and whether the outcome is an event of its session. A
/// session may send a request on its own connection without naming itself. The outcome is then a reply, but the holds
/// are bound to the session all the same.
///
/// # Errors
///
/// The reply that says that the session does not exist or belongs to another user, that a binding needs a connection or
/// a session, or that `REPLICAS` needs a command that can block.
pub fn requester(state: &State, call: Call, options: &Options) -> Result<(u64, OnBehalf), String> {
    let ctx = call.ctx;
    if let Some(session) = options.session {
        return Ok((session_of(state, call, session)?, OnBehalf::Session));
    }
    // A script's client may have the id of the connection that called the script, but it represents no connection.
    let client = ctx.client_id();
    let is_open = state.sessions.is_open(client);
    if (options.flags != BindingFlags::NONE || is_open) && !session::is_connection(ctx) {
        if options.flags != BindingFlags::NONE {
            return Err(
                "ERR WATCHDOG, EPHEMERAL and CONTENTION bind a hold to a connection, and a script has none of its \
                        own: name one by SESSION"
                    .into(),
            );
        }
        return Ok((NO_CLIENT, OnBehalf::Itself));
    }
    if (options.flags.watchdog || options.flags.contention) && !is_open {
        return Err(
            "NOSESSION WATCHDOG and CONTENTION are for sessions: this connection has not sent LOCK.SESSION".into()
        );
    }
    if options.replicas > 0 && !ctx.flags().may_block() {
        return Err("ERR REPLICAS is not allowed where a command can't block, as in MULTI or in a script".into());
    }
    Ok((client, OnBehalf::Itself))
}

/// An id that no connection has.
const NO_CLIENT: u64 = 0;

/// The connection of a session: the one with this id, or for `*` the calling connection.
fn session_of(state: &State, call: Call, session: TextRef) -> Result<u64, String> {
    if session.bytes() == b"*" {
        session::identity(call.ctx)?;
        return session::of_connection(state, call.ctx);
    }
    let client = session::client_of(session.bytes()).filter(|client| state.sessions.is_open(*client));
    match client {
        Some(client) if acl::is_user_of(call.ctx, client) => Ok(client),
        Some(_) => Err("NOPERM this session belongs to another user".into()),
        None => Err(format!("NOSESSION '{}' is not a session of this server", show(session.bytes()))),
    }
}

/// Reads the arguments of a command for one lock: `key owner`, and its options. The caller provides the memory for the
/// options, because they are large.
///
/// # Errors
///
/// The reply that says what is wrong and what is allowed.
pub fn read_one<'a, C: Command>(
    call: Call<'a>,
    options: &mut Options<'a>,
) -> Result<(TextRef<'a>, OwnerArg<'a>), String> {
    let name = key(call, 1)?;
    options.read(call, 3, C::DOCS.args)?;
    Ok((name, owner(call, 2, options)?))
}

/// Reads the arguments of a command for several locks: `numkeys key [key …] owner`, and its options.
///
/// # Errors
///
/// The reply that says what is wrong and what is allowed.
pub fn read_several<'a, C: Command>(
    call: Call<'a>,
    options: &mut Options<'a>,
) -> Result<(Vec<TextRef<'a>>, OwnerArg<'a>), String> {
    let (names, at) = keys(call)?;
    options.read(call, at.saturating_add(1), C::DOCS.args)?;
    Ok((names, owner(call, at, options)?))
}

/// Reads the key at a position.
///
/// # Errors
///
/// The reply that says that it is missing or too long.
pub fn key(call: Call<'_>, at: usize) -> Result<TextRef<'_>, String> {
    let key = call.get(at).ok_or("ERR key is missing")?;
    match key.bytes().len() {
        ..=MAX_KEY => Ok(key),
        len => Err(format!("ERR key must be at most {MAX_KEY} bytes long, got {len} bytes: '{}'", show(key.bytes()))),
    }
}

/// Reads `numkeys key [key …]` from position 1 on. Returns the keys and the position after them.
///
/// # Errors
///
/// The reply that says what is wrong and what is allowed.
fn keys(call: Call<'_>) -> Result<(Vec<TextRef<'_>>, usize), String> {
    let most = call.count().saturating_sub(3);
    let text = call.get(1).map(|text| text.bytes()).unwrap_or_default();
    let count =
        parse_number(text).and_then(|count| usize::try_from(count).ok()).filter(|count| (1..=most).contains(count));
    let count = count.ok_or_else(|| {
        format!("ERR numkeys must be between 1 and {most} here, since the owner follows the keys, got {}", show(text))
    })?;
    if count > MOST_KEYS {
        return Err(format!("ERR numkeys must be at most {MOST_KEYS}, got {count}"));
    }
    let end = count.saturating_add(2);
    let keys = (2..end).map(|at| key(call, at)).collect::<Result<Vec<TextRef>, String>>()?;
    let mut seen = BTreeSet::new();
    match keys.iter().find(|key| !seen.insert(key.bytes())) {
        Some(twice) => Err(format!("ERR key '{}' is named twice", show(twice.bytes()))),
        None => Ok((keys, end)),
    }
}
