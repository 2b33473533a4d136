//! `LOCK.HELP`

use crate::server::Call;
use crate::server::commands::{Command, Docs, Keys};
use crate::server::reply::Replied;
use std::ffi::{CStr, c_int};

/// `LOCK.HELP`
#[derive(Debug)]
pub struct Help;

const FIRST: &str =
    "LOCK commands. All times are milliseconds; the owner * stands for this connection. The commands are:";
const LAST: [&str; 3] = [
    "A lock is an ordinary hash with an ordinary expiry: EXISTS, PTTL, HGETALL, DEL and SCAN work as usual.",
    "Settings: CONFIG GET holdfast.*",
    "Statistics: INFO holdfast",
];

impl Command for Help {
    const NAME: &'static CStr = c"lock.help";
    const FLAGS: &'static CStr = c"allow-loading allow-stale";
    const CATEGORIES: &'static str = "slow";
    const KEYS: Keys = Keys::None;
    const ARITY: c_int = 1;
    const DOCS: Docs =
        Docs { summary: c"Returns the syntax and a summary of each command.", complexity: c"O(1)", args: &[] };

    fn run(call: Call) -> Result<Replied, String> {
        let commands =
            super::ALL.iter().flat_map(|it| [it.syntax(), format!("    {}", it.docs.summary.to_string_lossy())]);
        let last = LAST.into_iter().map(String::from);
        let lines: Vec<String> = std::iter::once(FIRST.into()).chain(commands).chain(last).collect();
        let array = call.ctx.reply_array(lines.len());
        Ok(lines.iter().fold(array, |_, line| call.ctx.reply_text_line(line)))
    }
}
