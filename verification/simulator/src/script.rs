//! Scripts: what happens to a server, line by line. They are printed and read as text, so that a run that went wrong
//! can be pasted into a test.
//!
//! | line | meaning |
//! |---|---|
//! | `a LOCK.ACQUIRE k o` | a request of client `a` arrives; a client connects with its first line |
//! | `a !end` | the end of its connection arrives |
//! | `a !vanish` | it is gone, and the server does not know: what is sent from now on never arrives |
//! | `a !deaf`, `a !hears` | it takes nothing from the network; it does again |
//! | `+5` | all lines since the last such line arrive in one poll; then 5 ms pass |
//! | `!clock -60000` | the time of day steps by so many ms |
//! | `!replicas 0 20 never` | there are three replicas; they confirm what they are asked for after so many ms |
//! | `!good 1` | `min-replicas-to-write` counts so many of them |
//! | `!misconf on`, `!misconf off` | a save has failed: the server refuses writes |
//! | `!slot k moves`, `migrates`, `comes` | the slot of `k` is another node's, is being moved key by key, is this node's |
//! | `!slot k arrives` | it is another node's, and is being moved here key by key |
//! | `!slot k unowned` | no node owns it |
//! | `!cluster fail`, `!cluster ok` | the cluster is down, as this node sees it; it is not any more |
//! | `!slot k goes` | it becomes another node's with all that is in it, behind what has not arrived yet, in one poll |
//! | `!scene NAME`, `!over` | here begins and ends one of [`crate::scenes`], whose lines belong together |
//! | `a !told TEXT` | what `a` was told since its last request begins like this; `nothing`: it still waits |
//!
//! In a request, `$a` stands for the identity of client `a` (`LOCK.SESSION`), `#a` for its id, `@a` for the last token that
//! it was told.

use crate::redis::Bytes;
use std::collections::BTreeSet;
use std::fmt;

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Request(Name, Vec<String>),
    End(Name),
    Vanish(Name),
    Deaf(Name),
    Hears(Name),
    Pass(u64),
    Clock(i64),
    Replicas(Vec<Option<u64>>),
    Good(usize),
    Misconf(bool),
    Cluster(bool),
    Slot(String, Moves),
    Scene(String),
    Over,
    Told(Name, String),
}

/// The name of a client: a letter.
pub type Name = char;

/// What becomes of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
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
    /// If it is no line of a script.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let number = |word: &str| word.parse().unwrap_or_else(|_| panic!("not a number: {text}"));
        Some(match words.as_slice() {
            [] => return None,
            [first, ..] if first.starts_with("//") => return None,
            ["!clock", ms] => Self::Clock(ms.parse().unwrap_or_else(|_| panic!("not a number: {text}"))),
            ["!replicas", delays @ ..] => {
                Self::Replicas(delays.iter().map(|delay| (*delay != "never").then(|| number(delay))).collect())
            }
            ["!good", count] => Self::Good(number(count) as usize),
            ["!misconf", state] => Self::Misconf(*state == "on"),
            ["!cluster", state] => Self::Cluster(*state == "ok"),
            ["!scene", name] => Self::Scene((*name).into()),
            ["!over"] => Self::Over,
            ["!slot", key, moves] => {
                let moves = match *moves {
                    "moves" => Moves::Moves,
                    "migrates" => Moves::Migrates,
                    "goes" => Moves::Goes,
                    "arrives" => Moves::Arrives,
                    "unowned" => Moves::Unowned,
                    _ => Moves::Comes,
                };
                Self::Slot((*key).into(), moves)
            }
            [ms] if ms.starts_with('+') => Self::Pass(number(&ms[1..])),
            [name, what @ ..] if name.len() == 1 && !what.is_empty() => {
                let name = name.chars().next().unwrap_or('a');
                match what {
                    ["!end"] => Self::End(name),
                    ["!vanish"] => Self::Vanish(name),
                    ["!deaf"] => Self::Deaf(name),
                    ["!hears"] => Self::Hears(name),
                    ["!told", text @ ..] => Self::Told(name, text.join(" ")),
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
            Self::Deaf(name) => write!(out, "{name} !deaf"),
            Self::Hears(name) => write!(out, "{name} !hears"),
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
            Self::Scene(name) => write!(out, "!scene {name}"),
            Self::Over => write!(out, "!over"),
            Self::Told(name, text) => write!(out, "{name} !told {text}"),
            Self::Slot(key, moves) => write!(out, "!slot {key} {}", format!("{moves:?}").to_lowercase()),
        }
    }
}

/// Reads a script.
pub fn parse(text: &str) -> Vec<Line> {
    text.lines().filter_map(|line| Line::parse(line.trim())).collect()
}

/// The clients whose connections are sessions from their beginning: those that requests name as such (`SESSION $s`), that read
/// events, or that ask on their own connection for what only sessions may have.
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

/// A word of a request as bytes: `\xNN` stands for a byte.
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
