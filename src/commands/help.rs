//! `LOCK.HELP`

use crate::server::Call;
use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use std::ffi::{CStr, c_int};

/// `LOCK.HELP`
#[derive(Debug)]
pub struct Help;

const LINES: [&CStr; 28] = [
    c"LOCK commands. All times are milliseconds; the owner * stands for this connection. The commands are:",
    c"LOCK.ACQUIRE key owner [LEASE ms] [WAIT ms] [LIMIT n | SHARED] [HOLDS n] [WATCHDOG] [EPHEMERAL] [REPLICAS n]",
    c"    Acquire a lock: a fencing token, or null. WAIT queues on the server (0: as long as it takes).",
    c"LOCK.RELEASE key owner [TOKEN t] [HOLDS n | ALL] [LEASE ms]",
    c"    Give back one hold, or all but n, or all: the holds left, or null if this owner holds nothing.",
    c"LOCK.RENEW key owner [LEASE ms] [TOKEN t] [WATCHDOG] [EPHEMERAL] [REPLICAS n]",
    c"    Renew the lease: the token, or null if the lock is lost.",
    c"LOCK.FORCE key",
    c"    Break the lock, whoever holds it: how many holders lost it.",
    c"LOCK.MACQUIRE numkeys key [key ...] owner [LEASE ms] [WAIT ms] [HOLDS n] [WATCHDOG] [EPHEMERAL] [REPLICAS n]",
    c"    Acquire several locks, all or none: one token for all, or null.",
    c"LOCK.MRELEASE numkeys key [key ...] owner [TOKEN t] [ALL]",
    c"    Release several locks: an array of what RELEASE would return.",
    c"LOCK.MRENEW numkeys key [key ...] owner [LEASE ms] [TOKEN t] [WATCHDOG] [EPHEMERAL] [REPLICAS n]",
    c"    Renew several locks: an array of what RENEW would return.",
    c"LOCK.INFO key",
    c"    Who holds the lock, since which token, for how long, and how many wait.",
    c"LOCK.WAITERS key [COUNT n]",
    c"    Who waits for the lock, in order.",
    c"LOCK.TOP [COUNT n]",
    c"    The locks of this database that most clients wait for.",
    c"LOCK.OWNER",
    c"    The identity of this connection.",
    c"LOCK.HELP",
    c"    Print this help.",
    c"A lock is an ordinary hash with an ordinary expiry: EXISTS, PTTL, HGETALL, DEL, SCAN do what they say.",
    c"Settings: CONFIG GET holdfast.*",
    c"Figures: INFO holdfast",
];

impl Command for Help {
    const NAME: &'static CStr = c"lock.help";
    const FLAGS: &'static CStr = c"allow-loading allow-stale";
    const CATEGORIES: &'static str = "slow";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = 1;
    const DOCS: Docs =
        Docs { summary: c"Returns a line or two about each of the commands.", complexity: c"O(1)", args: &[] };

    fn run(call: Call) -> Replied {
        let array = call.ctx.reply_array(LINES.len());
        LINES.iter().fold(array, |_, line| call.ctx.reply_line(line))
    }
}
