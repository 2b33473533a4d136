//! The words of the layout, as strings of the server: made once, so that writing a lock allocates no more than it
//! must.

use crate::lock::Millis;
use crate::server::{Constant, Text};

/// The first character of fields that are not owners.
pub const MARK: u8 = b'#';
/// The prefix of the field with a holder's deadline and token, where the limit is not 1.
pub const DETAILS: &[u8] = b"#@";

/// The deadline of a holder without one of its own, whose hold lasts as long as the key: the latest time that servers
/// know.
pub const NO_END: Millis = i64::MAX as Millis;

/// The strings.
#[derive(Debug)]
pub struct Words {
    /// Field: the newest token.
    pub fence: Text,
    /// Field: the limit.
    pub limit: Text,
    /// A name that no owner can have.
    pub nobody: Text,
    /// A hold count of one.
    pub one: Text,
    /// What is published when a lock becomes free.
    pub zero: Text,
    /// An option of `RESTORE`: whatever the key holds is replaced.
    pub replace: Text,
    /// An option of `RESTORE`: its expiry is a point in time.
    pub absolute: Text,
    /// The command that asks for a lock.
    pub acquire: Text,
    /// The command that asks for several.
    pub macquire: Text,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            fence: Text::new(b"#fence"),
            limit: Text::new(b"#limit"),
            nobody: Text::new(&[MARK]),
            one: Text::new(b"1"),
            zero: Text::new(b"0"),
            replace: Text::new(b"REPLACE"),
            absolute: Text::new(b"ABSTTL"),
            acquire: Text::new(b"lock.acquire"),
            macquire: Text::new(b"lock.macquire"),
        }
    }
}

static WORDS: Constant<Words> = Constant::new();

/// The strings, for as long as the module is loaded.
pub fn words() -> &'static Words {
    WORDS.get()
}

/// The field with a holder's details.
pub fn details_field(owner: &[u8]) -> Text {
    Text::concat(&[DETAILS, owner])
}
