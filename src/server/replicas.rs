//! Replication offsets of the replicas, and requests for acknowledgements.

use super::Ctx;
use super::text::{AsText, Text};
use std::ffi::{CStr, CString};

/// An offset in the replication stream, in bytes.
pub type Offset = u64;

/// The end of the replication stream, and how much of it each online replica has confirmed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// The end of what this server has written.
    pub written: Offset,
    /// The offset that each online replica has confirmed.
    pub confirmed: Vec<Offset>,
}

impl Offsets {
    /// Reads the offsets from `INFO`, which takes some ten microseconds.
    pub fn read(ctx: Ctx) -> Self {
        ctx.with_server_info(c"replication", |info| {
            let count: usize = info.field(c"connected_slaves").parse().unwrap_or(0);
            let confirmed = (0..count).filter_map(|index| {
                let name = CString::new(format!("slave{index}")).ok()?;
                confirmed_offset(&info.field(&name))
            });
            let confirmed = confirmed.collect();
            Self { written: info.field(c"master_repl_offset").parse().unwrap_or(0), confirmed }
        })
    }

    /// The number of replicas that have confirmed everything up to `offset`.
    pub fn having(&self, offset: Offset) -> usize {
        self.confirmed.iter().filter(|&&confirmed| confirmed >= offset).count()
    }
}

/// The offset in a line like `ip=127.0.0.1,port=6380,state=online,offset=42,lag=0`, if the replica is online.
fn confirmed_offset(line: &str) -> Option<Offset> {
    let value = |name: &str| line.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    if value("state")? != "online" {
        return None;
    }
    value("offset")?.parse().ok()
}

/// Asks all replicas to confirm their offsets. The calling callback must replicate nothing else: the server would wrap
/// both in `MULTI`, and replicas do not answer inside `MULTI`.
pub fn request_acks(ctx: Ctx) {
    const COMMAND: &CStr = c"REPLCONF";
    let (getack, all) = (Text::new(b"GETACK"), Text::new(b"*"));
    ctx.replicate_only(COMMAND, &[&getack as &dyn AsText, &all]);
}
