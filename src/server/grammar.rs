//! The definition of a command: its name, grammar and documentation.

use super::Call;
use super::reply::Replied;
use std::ffi::{CStr, c_int};

/// A command of the module.
pub trait Command {
    /// The command's name, in lower case.
    const NAME: &'static CStr;
    /// The first version of the module that has it.
    const SINCE: &'static CStr = c"0.1.0";
    /// The flags of the command, as for `RedisModule_CreateCommand`.
    const FLAGS: &'static CStr;
    /// ACL categories besides the module's own. Redis 7.0 ignores them: see `commands::have_categories`.
    const CATEGORIES: &'static str;
    /// Which arguments are keys.
    const KEYS: Keys;
    /// The number of arguments, including the name. A negative number is a minimum.
    const ARITY: c_int;
    /// The command's grammar and documentation.
    const DOCS: Docs;

    /// Runs the command.
    ///
    /// # Errors
    ///
    /// The error reply for the client.
    fn run(call: Call) -> Result<Replied, String>;
}

/// Which arguments of a command are keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// None.
    None,
    /// The first argument.
    First(Access),
    /// The first argument is the number of keys, which follow it.
    Counted(Access),
}

/// How a command accesses its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads them.
    Read,
    /// It reads, creates or changes them.
    Update,
    /// It changes or deletes them.
    Delete,
}

/// A command's grammar and documentation. The parser, `COMMAND DOCS`, `LOCK.HELP` and error messages are all based on
/// it.
#[derive(Clone, Copy, Debug)]
pub struct Docs {
    /// What the command does, on one line.
    pub summary: &'static CStr,
    /// The time complexity: O-notation, explained in words.
    pub complexity: &'static CStr,
    /// The command's arguments.
    pub args: &'static [Arg],
}

/// An argument of a command.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    pub(super) name: &'static CStr,
    pub(super) token: Option<&'static CStr>,
    pub(super) kind: Kind,
    pub(super) count: Count,
    /// The name of its value in a line of syntax.
    shown: &'static str,
    /// The number by which the parser identifies an option.
    id: Option<u8>,
}

/// The kind of an argument.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Key,
    Text,
    Integer,
    Token,
    OneOf(&'static [Arg]),
}

/// How often an argument may occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    One,
    AtMostOne,
    Several,
    /// Several, or none.
    AnyNumber,
}

impl Arg {
    const fn new(name: &'static CStr, kind: Kind) -> Self {
        Self { name, token: None, kind, count: Count::One, shown: "", id: None }
    }

    /// A key.
    pub const fn key() -> Self {
        Self::new(c"key", Kind::Key)
    }

    /// One or more keys.
    pub const fn keys() -> Self {
        Self { count: Count::Several, ..Self::key() }
    }

    /// A string of any bytes.
    pub const fn text(name: &'static CStr) -> Self {
        Self::new(name, Kind::Text)
    }

    /// A number.
    pub const fn integer(name: &'static CStr) -> Self {
        Self::new(name, Kind::Integer)
    }

    /// A number that follows `token`. A line of syntax calls the number `shown`.
    pub const fn number(token: &'static CStr, name: &'static CStr, shown: &'static str) -> Self {
        Self { token: Some(token), shown, ..Self::integer(name) }
    }

    /// A string that follows `token`. A line of syntax calls the string `shown`.
    pub const fn bytes(token: &'static CStr, name: &'static CStr, shown: &'static str) -> Self {
        Self { token: Some(token), shown, ..Self::text(name) }
    }

    /// Makes the argument optional.
    pub const fn optional(self) -> Self {
        Self { count: Count::AtMostOne, ..self }
    }

    /// Makes the argument optional, with one or more values after its token.
    pub const fn any_number(self) -> Self {
        Self { count: Count::AnyNumber, ..self }
    }

    /// Sets the number by which the parser identifies the option.
    pub const fn with_id(self, id: u8) -> Self {
        Self { id: Some(id), ..self }
    }

    /// The number by which the parser identifies the argument, if it is an option.
    pub fn id(&self) -> Option<u8> {
        self.id
    }

    /// The word that the argument begins with, if any.
    pub fn token(&self) -> Option<&'static CStr> {
        self.token
    }

    /// The alternatives of an argument made by [`Arg::one_of`]. Empty for any other.
    pub fn choices(&self) -> &'static [Self] {
        match self.kind {
            Kind::OneOf(choices) => choices,
            _ => &[],
        }
    }

    /// The argument as a line of syntax shows it.
    pub fn syntax(&self) -> String {
        let name = self.name.to_string_lossy();
        let token = self.token.map(CStr::to_string_lossy);
        let plain = match (self.kind, token) {
            (Kind::OneOf(choices), _) => choices.iter().map(Self::syntax).collect::<Vec<_>>().join(" | "),
            (Kind::Token, Some(token)) => token.into_owned(),
            (_, Some(token)) => format!("{token} {}", self.shown),
            (_, None) => name.clone().into_owned(),
        };
        match self.count {
            Count::One => plain,
            Count::AtMostOne => format!("[{plain}]"),
            Count::Several => format!("{plain} [{plain} ...]"),
            Count::AnyNumber => format!("[{plain} [{} ...]]", self.shown),
        }
    }

    /// An option that is only a word.
    pub const fn word(name: &'static CStr, token: &'static CStr) -> Self {
        Self { token: Some(token), ..Self::new(name, Kind::Token) }
    }

    /// An optional choice between several arguments.
    pub const fn one_of(name: &'static CStr, choices: &'static [Arg]) -> Self {
        Self { count: Count::AtMostOne, ..Self::new(name, Kind::OneOf(choices)) }
    }
}
