//! Scripts: what happens to a server, line by line. They are read and printed as text, so that a failing run
//! can be pasted into a test.
//!
//! | line | meaning |
//! |---|---|
//! | `a LOCK.ACQUIRE k o` | a request of client `a` arrives; a client connects with its first line |
//! | `a !end` | the end of its connection arrives |
//! | `a !vanish` | its host is lost: the server does not notice, and bytes sent to it never arrive |
//! | `a !stop-reading`, `a !resume-reading` | it stops reading its socket; it reads again |
//! | `+5` | all lines since the last such line arrive in one poll; then 5 ms pass |
//! | `!clock -60000` | the time of day steps by this many ms |
//! | `!replicas 0 20 never` | three replicas, which confirm after this many ms when asked |
//! | `!good 1` | `min-replicas-to-write` counts this many of them |
//! | `!misconf on`, `!misconf off` | a save has failed: the server refuses writes |
//! | `!slot k moves`, `migrates`, `comes` | the slot of `k` belongs to another node, is migrating there, belongs to this node |
//! | `!slot k arrives` | it belongs to another node, and is being imported key by key |
//! | `!slot k unowned` | no node owns it |
//! | `!cluster fail`, `!cluster ok` | the cluster is down, as seen by this node; it is up again |
//! | `!slot k goes` | another node takes it with all its keys, in one poll, after the lines since the last `+` |
//! | `!scenario NAME`, `!end-scenario` | begin and end of one of [`crate::scenarios`], whose lines belong together |
//! | `a !expect TEXT` | the last reply to `a` since its last request begins with this text; `nothing`: no reply yet |
//!
//! In a request, `$a` stands for the identity of client `a` (`LOCK.SESSION`), `#a` for its id, `@a` for the last token
//! it received.

use crate::redis::Bytes;
use std::collections::BTreeSet;
use std::fmt;

/// A line of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Request(Name, Vec<String>),
    End(Name),
    Vanish(Name),
    StopReading(Name),
    ResumeReading(Name),
    Pass(u64),
    Clock(i64),
    Replicas(Vec<Option<u64>>),
    Good(usize),
    Misconf(bool),
    Cluster(bool),
    Slot(String, SlotChange),
    Scenario(String),
    EndScenario,
    Expect(Name, String),
}

/// The name of a client: a letter.
pub type Name = char;

/// What happens to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotChange {
    Moves,
    Migrates,
    Comes,
    Goes,
    Arrives,
    Unowned,
}

impl Line {
    /// A request, of words separated by blanks.
    pub fn request(name: Name, words: &str) -> Self {
        Self::Request(name, words.split_whitespace().map(String::from).collect())
    }

    /// Reads a line; `None` if it is empty or a comment.
    ///
    /// # Panics
    ///
    /// If it is not a line of a script.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("expected a number: {text}"));
        Some(match words.as_slice() {
            [] => return None,
            [first, ..] if first.starts_with("//") => return None,
            ["!clock", ms] => Self::Clock(ms.parse().unwrap_or_else(|_| panic!("expected a number: {text}"))),
            ["!replicas", delays @ ..] => {
                Self::Replicas(delays.iter().map(|delay| (*delay != "never").then(|| number(delay))).collect())
            }
            ["!good", count] => Self::Good(number(count) as usize),
            ["!misconf", state] => Self::Misconf(*state == "on"),
            ["!cluster", state] => Self::Cluster(*state == "ok"),
            ["!scenario", name] => Self::Scenario((*name).into()),
            ["!end-scenario"] => Self::EndScenario,
            ["!slot", key, moves] => {
                let moves = match *moves {
                    "moves" => SlotChange::Moves,
                    "migrates" => SlotChange::Migrates,
                    "goes" => SlotChange::Goes,
                    "arrives" => SlotChange::Arrives,
                    "unowned" => SlotChange::Unowned,
                    _ => SlotChange::Comes,
                };
                Self::Slot((*key).into(), moves)
            }
            [ms] if ms.starts_with('+') => Self::Pass(number(&ms[1..])),
            [name, what @ ..] if name.len() == 1 && !what.is_empty() => {
                let name = name.chars().next().unwrap_or('a');
                match what {
                    ["!end"] => Self::End(name),
                    ["!vanish"] => Self::Vanish(name),
                    ["!stop-reading"] => Self::StopReading(name),
                    ["!resume-reading"] => Self::ResumeReading(name),
                    ["!expect", text @ ..] => Self::Expect(name, text.join(" ")),
                    _ => Self::Request(name, what.iter().map(|word| (*word).into()).collect()),
                }
            }
            _ => panic!("not a line of a script: {text}"),
        })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(name, words) => write!(out, "{name} {}", words.join(" ")),
            Self::End(name) => write!(out, "{name} !end"),
            Self::Vanish(name) => write!(out, "{name} !vanish"),
            Self::StopReading(name) => write!(out, "{name} !stop-reading"),
            Self::ResumeReading(name) => write!(out, "{name} !resume-reading"),
            Self::Pass(ms) => write!(out, "+{ms}"),
            Self::Clock(ms) => write!(out, "!clock {ms}"),
            Self::Replicas(delays) => {
                let delays: Vec<String> =
                    delays.iter().map(|delay| delay.map_or("never".into(), |delay| delay.to_string())).collect();
                write!(out, "!replicas {}", delays.join(" "))
            }
            Self::Good(count) => write!(out, "!good {count}"),
            Self::Misconf(state) => write!(out, "!misconf {}", if *state { "on" } else { "off" }),
            Self::Cluster(state) => write!(out, "!cluster {}", if *state { "ok" } else { "fail" }),
            Self::Scenario(name) => write!(out, "!scenario {name}"),
            Self::EndScenario => write!(out, "!end-scenario"),
            Self::Expect(name, text) => write!(out, "{name} !expect {text}"),
            Self::Slot(key, moves) => write!(out, "!slot {key} {}", format!("{moves:?}").to_lowercase()),
        }
    }
}

/// Reads a script.
pub fn parse(text: &str) -> Vec<Line> {
    text.lines().filter_map(|line| Line::parse(line.trim())).collect()
}

/// The clients whose connections are sessions from the start: those that requests name with `SESSION $s`, that read
/// events, or whose own requests use options that only sessions have.
pub fn sessions(lines: &[Line]) -> BTreeSet<Name> {
    let mut names = BTreeSet::new();
    for line in lines {
        let Line::Request(name, words) = line else { continue };
        let named = words.windows(2).filter(|two| two[0].eq_ignore_ascii_case("SESSION"));
        let named: Vec<&String> = named.map(|two| &two[1]).collect();
        names.extend(named.iter().filter_map(|id| id.strip_prefix('$')?.chars().next()));
        let has = |word: &str| words.iter().any(|it| it.eq_ignore_ascii_case(word));
        if has("LOCK.EVENTS") || named.is_empty() && (has("WATCHDOG") || has("CONTENTION")) {
            names.insert(*name);
        }
    }
    names
}

/// A script as text.
pub fn print(lines: &[Line]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// A word of a request as bytes: `
/// xNN` stands for a byte.
pub fn bytes(word: &str) -> Bytes {
    let mut rest = word;
    let mut bytes = Vec::new();
    while let Some(next) = rest.chars().next() {
        match rest.strip_prefix("\\x").and_then(|hex| u8::from_str_radix(hex.get(..2)?, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &rest[4..];
            }
            None => {
                bytes.extend_from_slice(&rest.as_bytes()[..next.len_utf8()]);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    bytes
}
