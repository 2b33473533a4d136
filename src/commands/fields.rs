//! Replies that are maps of named fields.

use crate::server::Ctx;
use crate::server::reply::Replied;

/// The value of a field.
pub(super) enum Value<'a> {
    /// Null.
    Null,
    /// A number.
    Number(u64),
    /// -1, for a time without an end.
    NoEnd,
    /// Bytes.
    Bytes(&'a [u8]),
    /// An array of this length. The function replies with the elements.
    Array(usize, &'a dyn Fn()),
}

impl Value<'_> {
    /// A number, or null.
    pub(super) fn number_or_null(number: Option<u64>) -> Self {
        number.map_or(Self::Null, Self::Number)
    }

    /// A number of milliseconds, or -1 for a time without an end.
    pub(super) fn or_no_end(millis: Option<u64>) -> Self {
        millis.map_or(Self::NoEnd, Self::Number)
    }

    fn reply(&self, ctx: Ctx) -> Replied {
        match self {
            Self::Null => ctx.reply_null(),
            Self::Number(number) => ctx.reply_integer(*number),
            Self::NoEnd => ctx.reply_signed(-1),
            Self::Bytes(bytes) => ctx.reply_bytes(bytes),
            Self::Array(len, elements) => {
                let replied = ctx.reply_array(*len);
                elements();
                replied
            }
        }
    }
}

/// Replies with a map of these fields.
pub(super) fn reply_fields(ctx: Ctx, fields: &[(&str, Value)]) -> Replied {
    let map = ctx.reply_map(fields.len());
    fields.iter().fold(map, |_, (name, value)| {
        let _ = ctx.reply_bytes(name.as_bytes());
        value.reply(ctx)
    })
}
