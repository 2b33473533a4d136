//! The offsets of replicas, and requests for confirmation.

use super::{AsText, Ctx, Text};
use crate::node::node;

/// An offset in the replication stream: here in commands, not in bytes.
pub type Offset = u64;

/// The end of the stream, and how much of it each online replica has confirmed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// What this server has written.
    pub written: Offset,
    /// What each replica has confirmed.
    pub confirmed: Vec<Offset>,
}

impl Offsets {
    /// Reads it.
    pub fn read(_: Ctx) -> Self {
        node(|node| {
            node.work(10);
            Self { written: node.stream.offset(), confirmed: node.replicas.iter().map(|it| it.confirmed).collect() }
        })
    }

    /// How many replicas have confirmed everything up to `offset`.
    pub fn having(&self, offset: Offset) -> usize {
        self.confirmed.iter().filter(|&&confirmed| confirmed >= offset).count()
    }
}

/// Asks all replicas to confirm their offsets. Must be alone in its unit: inside `MULTI` they would not reply.
pub fn request_acks(ctx: Ctx) {
    let (getack, all) = (Text::new(b"GETACK"), Text::new(b"*"));
    ctx.replicate_only(c"REPLCONF", &[&getack as &dyn AsText, &all]);
}
