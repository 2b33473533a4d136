//! What a command is: its name, its grammar, and what it says of itself.

use super::Call;
use super::reply::Replied;
use std::ffi::{CStr, c_int};

/// A command of the module.
pub trait Command {
    /// Its name, in lower case.
    const NAME: &'static CStr;
    /// The first version of the module that has it.
    const SINCE: &'static CStr = c"0.1.0";
    /// The server's flags, as for `RedisModule_CreateCommand`.
    const FLAGS: &'static CStr;
    /// ACL categories besides the module's own. (Redis 7.0 puts it into none: see `commands::have_categories`.)
    const CATEGORIES: &'static str;
    /// Where its keys are.
    const KEYS: Keys;
    /// How many arguments, the name included; negative: at least that many.
    const ARITY: c_int;
    /// Its grammar, and what `COMMAND DOCS` and `LOCK.HELP` say about it.
    const DOCS: Docs;

    /// Runs it.
    ///
    /// # Errors
    ///
    /// The error that the client gets.
    fn run(call: Call) -> Result<Replied, String>;
}

/// Where a command's keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// It has none.
    None,
    /// The first argument.
    First(Access),
    /// The first argument says how many follow.
    Counted(Access),
}

/// What happens to a command's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They are read.
    Read,
    /// They are read, created or changed.
    Update,
    /// They are changed or deleted.
    Delete,
}

/// A command's grammar and documentation: what the parser accepts, what `COMMAND DOCS` and `LOCK.HELP` print and what
/// error messages name all comes from here.
#[derive(Clone, Copy, Debug)]
pub struct Docs {
    /// One line.
    pub summary: &'static CStr,
    /// In O-notation, with words.
    pub complexity: &'static CStr,
    /// Its arguments.
    pub args: &'static [Arg],
}

/// An argument of a command.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    pub(super) name: &'static CStr,
    pub(super) token: Option<&'static CStr>,
    pub(super) kind: Kind,
    pub(super) count: Count,
    /// What a line of syntax calls its value.
    shown: &'static str,
    /// What the parser knows it by, if it is an option.
    id: Option<u8>,
}

/// What an argument is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Key,
    Text,
    Integer,
    Token,
    OneOf(&'static [Arg]),
}

/// How often an argument may stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    One,
    AtMostOne,
    Several,
    /// Several, or none at all.
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

    /// One key or more.
    pub const fn keys() -> Self {
        Self { count: Count::Several, ..Self::key() }
    }

    /// Any bytes.
    pub const fn text(name: &'static CStr) -> Self {
        Self::new(name, Kind::Text)
    }

    /// A number.
    pub const fn integer(name: &'static CStr) -> Self {
        Self::new(name, Kind::Integer)
    }

    /// A number after a word; a line of syntax calls it `shown`.
    pub const fn number(token: &'static CStr, name: &'static CStr, shown: &'static str) -> Self {
        Self { token: Some(token), shown, ..Self::integer(name) }
    }

    /// Bytes after a word; a line of syntax calls them `shown`.
    pub const fn bytes(token: &'static CStr, name: &'static CStr, shown: &'static str) -> Self {
        Self { token: Some(token), shown, ..Self::text(name) }
    }

    /// The same, but optional.
    pub const fn optional(self) -> Self {
        Self { count: Count::AtMostOne, ..self }
    }

    /// The same, but optional, and with one value or more behind the word.
    pub const fn any_number(self) -> Self {
        Self { count: Count::AnyNumber, ..self }
    }

    /// The same, known to the parser by this number.
    pub const fn with_id(self, id: u8) -> Self {
        Self { id: Some(id), ..self }
    }

    /// What the parser knows it by, if it is an option.
    pub fn id(&self) -> Option<u8> {
        self.id
    }

    /// The word that it begins with, if any.
    pub fn token(&self) -> Option<&'static CStr> {
        self.token
    }

    /// The alternatives, if it is a choice.
    pub fn choices(&self) -> &'static [Self] {
        match self.kind {
            Kind::OneOf(choices) => choices,
            _ => &[],
        }
    }

    /// As a line of syntax shows it.
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

    /// A word.
    pub const fn word(name: &'static CStr, token: &'static CStr) -> Self {
        Self { token: Some(token), ..Self::new(name, Kind::Token) }
    }

    /// One of several, optional.
    pub const fn one_of(name: &'static CStr, choices: &'static [Arg]) -> Self {
        Self { count: Count::AtMostOne, ..Self::new(name, Kind::OneOf(choices)) }
    }
}
