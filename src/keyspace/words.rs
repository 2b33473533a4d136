//! Words of the layout and of commands, as strings of the server. They are made once, so that a write allocates as
//! little as possible.

use crate::lock::Millis;
use crate::server::{Constant, Text};

/// The first character of the fields that are not owners.
pub const MARK: u8 = b'#';
/// The prefix of a holder's details field (its deadline and token), in a lock whose limit is not 1.
pub const DETAILS: &[u8] = b"#@";

/// The deadline of a holder without its own deadline, whose hold lasts as long as the key: the latest time that servers
/// accept.
pub const NO_END: Millis = i64::MAX as Millis;

/// The strings.
#[derive(Debug)]
pub struct Words {
    /// Field: the newest token.
    pub fence: Text,
    /// Field: the limit.
    pub limit: Text,
    /// A name that is not a valid owner.
    pub no_owner: Text,
    /// A hold count of one.
    pub one: Text,
    /// The message that is published when a lock becomes free.
    pub zero: Text,
    /// An option of `RESTORE`: replace the value of the key.
    pub replace: Text,
    /// An option of `RESTORE`: the expiry is a point in time.
    pub absolute: Text,
    /// The name of the default user.
    pub default_user: Text,
    /// The command that acquires a lock.
    pub acquire: Text,
    /// The command that acquires several locks.
    pub macquire: Text,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            fence: Text::new(b"#fence"),
            limit: Text::new(b"#limit"),
            no_owner: Text::new(&[MARK]),
            one: Text::new(b"1"),
            zero: Text::new(b"0"),
            replace: Text::new(b"REPLACE"),
            absolute: Text::new(b"ABSTTL"),
            default_user: Text::new(b"default"),
            acquire: Text::new(b"lock.acquire"),
            macquire: Text::new(b"lock.macquire"),
        }
    }
}

static WORDS: Constant<Words> = Constant::new();

/// The strings, which last as long as the module is loaded.
pub fn words() -> &'static Words {
    WORDS.get()
}

/// The name of a holder's details field.
pub fn details_field(owner: &[u8]) -> Text {
    Text::concat(&[DETAILS, owner])
}
