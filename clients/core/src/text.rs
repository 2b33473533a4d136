//! Steps as text, one per line, so that scripts can be stored, compared, and played by a core in another language.
//!
//! | line | meaning |
//! |---|---|
//! | `settings limit 10000 grace 100 unanswered 256 seed 1` | the first line of a script, if they are others than these |
//! | `7 acquire 1 by vm7:312## keys k wait 5000 lease 1000 watchdog` | at 7 ms the program requests a lock; `wait forever`, `ephemeral`, `replicas n`, `limit n` (0: readers), `kept` |
//! | `7 release 2 hold 1 within 1000` | and `check`, and `renew`, which may name `lease` and `fence` |
//! | `7 keep 1 for 5000`, `7 use 2 hold 1 most 1` | hold 1 is cached; a task uses it, as one of so many uses in a row |
//! | `7 request 3 within 1000 PING`, `7 drop 1`, `7 close 4 within 1000` | the other calls |
//! | `8 opened 1`, `8 ended 1`, `8 leave 1`, `8 wake` | events of the I/O driver |
//! | `8 received 1 session :7\r\n` | what has arrived on a connection of pair 1: `session` or `requests` |
//! | `> open 1`, `> end 1`, `> wake 10008` | actions of the I/O driver |
//! | `> send 1 requests LOCK.INFO k` | a request, as words |
//! | `> moved 1 MOVED 7 b:1` | a claim that moves to another core; its input there, `take 1`, can't be read from text |
//! | `> ended 1 granted 1800000000000001`, `> lost 1 expired` | results for callers and holders |
//!
//! In a word, `\x20` stands for a byte, as do `\r`, `\n`, `\t`, `\\`, `\'` and `\"`; an empty word is `\0`. A key with the name of an
//! option (`wait`, `lease`, …) can't be distinguished from it.

use crate::step::{Channel, Input, LossReason, Outcome, Output};
use crate::{Bytes, Limit, Millis, Reply, Settings, Terms, Wait};
use std::fmt::{Display, Formatter, Result};

/// Bytes as a word.
struct Word<'a>(&'a [u8]);

impl Display for Word<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        if self.0.is_empty() {
            return out.write_str("\\0");
        }
        write!(out, "{}", self.0.escape_ascii().to_string().replace(' ', "\\x20"))
    }
}

/// Words with a space before each.
struct Line<'a>(&'a [Bytes]);

impl Display for Line<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        self.0.iter().try_for_each(|word| write!(out, " {}", Word(word)))
    }
}

impl Display for Settings {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        let Self { limit, grace, unanswered, seed } = self;
        write!(out, "settings limit {limit} grace {grace} unanswered {unanswered} seed {seed}")
    }
}

impl Settings {
    /// Parses the first line of a script. `None`: malformed.
    pub fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["settings", "limit", limit, "grace", grace, "unanswered", unanswered, "seed", seed] = words[..] else {
            return None;
        };
        Some(Self {
            limit: limit.parse().ok()?,
            grace: grace.parse().ok()?,
            unanswered: unanswered.parse().ok()?,
            seed: seed.parse().ok()?,
        })
    }
}

impl Display for Input {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self {
            Self::Acquire { call, by, keys, terms, wait } => {
                write!(out, "acquire {call} by {} keys{}", Word(by), Line(keys))?;
                match wait {
                    Wait::No => {}
                    Wait::For(time) => write!(out, " wait {time}")?,
                    Wait::Forever => write!(out, " wait forever")?,
                }
                write!(out, "{terms}")
            }
            Self::Release { call, hold, within } => write!(out, "release {call} hold {hold} within {within}"),
            Self::Renew { call, hold, lease, fence, within } => {
                write!(out, "renew {call} hold {hold} within {within}")?;
                lease.map_or(Ok(()), |lease| write!(out, " lease {lease}"))?;
                fence.map_or(Ok(()), |fence| write!(out, " fence {fence}"))
            }
            Self::Check { call, hold, within } => write!(out, "check {call} hold {hold} within {within}"),
            Self::Keep { hold, idle } => write!(out, "keep {hold} for {idle}"),
            Self::Use { call, hold, most } => write!(out, "use {call} hold {hold} most {most}"),
            Self::Request { call, words, within } => write!(out, "request {call} within {within}{}", Line(words)),
            Self::Drop { call } => write!(out, "drop {call}"),
            Self::Close { call, within } => write!(out, "close {call} within {within}"),
            Self::Opened { pair } => write!(out, "opened {pair}"),
            Self::Received { pair, channel, bytes } => write!(out, "received {pair} {channel} {}", Word(bytes)),
            Self::Replied { pair, channel, reply } => write!(out, "replied {pair} {channel} {reply}"),
            Self::Ended { pair } => write!(out, "ended {pair}"),
            Self::Leave { id } => write!(out, "leave {id}"),
            Self::Take { moved } => write!(out, "take {}", moved.id),
            Self::Wake => write!(out, "wake"),
        }
    }
}

impl Display for Terms {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        self.lease.map_or(Ok(()), |lease| write!(out, " lease {lease}"))?;
        if self.watchdog {
            write!(out, " watchdog")?;
        }
        if self.ephemeral {
            write!(out, " ephemeral")?;
        }
        if self.replicas > 0 {
            write!(out, " replicas {}", self.replicas)?;
        }
        match self.limit {
            Limit::One => {}
            limit => write!(out, " limit {}", limit.number())?,
        }
        if self.kept { write!(out, " kept") } else { Ok(()) }
    }
}

impl Display for Channel {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        out.write_str(if *self == Self::Session { "session" } else { "requests" })
    }
}

impl Display for Output {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self {
            Self::Open { pair } => write!(out, "open {pair}"),
            Self::End { pair } => write!(out, "end {pair}"),
            Self::Send { pair, channel, words } => write!(out, "send {pair} {channel}{}", Line(words)),
            Self::Ended { call, outcome } => write!(out, "ended {call} {outcome}"),
            Self::Lost { hold, why } => write!(out, "lost {hold} {why}"),
            Self::Moved { moved, error } => write!(out, "moved {} {error}", moved.id),
            Self::Wake { at } => write!(out, "wake {at}"),
        }
    }
}

impl Display for Outcome {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self {
            Self::Granted(token) => write!(out, "granted {token}"),
            Self::NotGranted => write!(out, "not granted"),
            Self::Refused(error) => write!(out, "refused {error}"),
            Self::Unanswered => write!(out, "unanswered"),
            Self::Closed => write!(out, "closed"),
            Self::Released => write!(out, "released"),
            Self::NotHeld => write!(out, "not held"),
            Self::Lost(why) => write!(out, "lost {why}"),
            Self::Renewed(token) => write!(out, "renewed {token}"),
            Self::Held => write!(out, "held"),
            Self::Answer(reply) => write!(out, "answer {reply}"),
        }
    }
}

impl Display for LossReason {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        out.write_str(match self {
            Self::Expired => "expired",
            Self::Forced => "forced",
            Self::Changed => "changed",
            Self::Disconnected => "disconnected",
        })
    }
}

impl Display for Reply {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self {
            Self::Integer(number) => write!(out, "{number}"),
            Self::Bulk(bytes) => write!(out, "\"{}\"", Word(bytes)),
            Self::Null => write!(out, "null"),
            Self::Line(line) => write!(out, "+{line}"),
            Self::Error(error) => write!(out, "-{error}"),
            Self::Array(elements) => {
                write!(out, "[")?;
                for (place, element) in elements.iter().enumerate() {
                    write!(out, "{}{element}", if place > 0 { " " } else { "" })?;
                }
                write!(out, "]")
            }
        }
    }
}

impl Input {
    /// Parses a line of a script: the time and the input. `None`: malformed.
    pub fn parse(line: &str) -> Option<(Millis, Self)> {
        let mut words = line.split_whitespace();
        let (at, what) = (words.next()?.parse().ok()?, words.next()?);
        let rest: Vec<&str> = words.collect();
        let number = |place: usize| rest.get(place)?.parse::<u64>().ok();
        let named = |name: &str| rest[rest.iter().position(|word| *word == name)? + 1..].first().copied();
        let value = |name: &str| named(name)?.parse::<u64>().ok();
        let bytes = |words: &[&str]| words.iter().map(|word| unescape(word)).collect::<Option<Vec<Bytes>>>();
        let input = match what {
            "wake" => Self::Wake,
            "opened" => Self::Opened { pair: number(0)? },
            "ended" => Self::Ended { pair: number(0)? },
            "leave" => Self::Leave { id: number(0)? },
            "received" => {
                let channel = if *rest.get(1)? == "session" { Channel::Session } else { Channel::Requests };
                Self::Received { pair: number(0)?, channel, bytes: unescape(rest.get(2)?)? }
            }
            "drop" => Self::Drop { call: number(0)? },
            "close" => Self::Close { call: number(0)?, within: value("within")? },
            "request" => Self::Request { call: number(0)?, within: number(2)?, words: bytes(rest.get(3..)?)? },
            "release" => Self::Release { call: number(0)?, hold: number(2)?, within: number(4)? },
            "check" => Self::Check { call: number(0)?, hold: number(2)?, within: number(4)? },
            "keep" => Self::Keep { hold: number(0)?, idle: value("for")? },
            "use" => Self::Use { call: number(0)?, hold: number(2)?, most: number(4)?.try_into().ok()? },
            "renew" => {
                let (lease, fence) = (value("lease"), value("fence"));
                Self::Renew { call: number(0)?, hold: number(2)?, within: number(4)?, lease, fence }
            }
            "acquire" => {
                const OPTIONS: [&str; 7] = ["wait", "lease", "watchdog", "ephemeral", "replicas", "limit", "kept"];
                let keys = rest.get(4..)?;
                let end = keys.iter().position(|word| OPTIONS.contains(word)).unwrap_or(keys.len());
                let has = |name: &str| keys[end..].contains(&name);
                let value = |name: &str| {
                    let place = keys[end..].iter().position(|word| *word == name)?;
                    keys.get(end + place + 1)?.parse::<u64>().ok()
                };
                Self::Acquire {
                    call: number(0)?,
                    by: unescape(rest.get(2)?)?,
                    keys: bytes(&keys[..end])?,
                    wait: match value("wait") {
                        Some(time) => Wait::For(time),
                        None if has("wait") => Wait::Forever,
                        None => Wait::No,
                    },
                    terms: Terms {
                        lease: value("lease"),
                        watchdog: has("watchdog"),
                        ephemeral: has("ephemeral"),
                        replicas: value("replicas").and_then(|it| it.try_into().ok()).unwrap_or(0),
                        limit: match value("limit") {
                            None => Limit::One,
                            Some(0) => Limit::Shared,
                            Some(limit) => Limit::Of(limit.try_into().ok()?),
                        },
                        kept: has("kept"),
                    },
                }
            }
            _ => return None,
        };
        Some((at, input))
    }
}

/// The bytes of a word.
fn unescape(word: &str) -> Option<Bytes> {
    let mut bytes = Vec::new();
    let mut rest = word.as_bytes().iter().copied();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next()? {
            b'0' => {}
            b'r' => bytes.push(b'\r'),
            b'n' => bytes.push(b'\n'),
            b't' => bytes.push(b'\t'),
            b'x' => {
                let digits = [rest.next()?, rest.next()?];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
            }
            other => bytes.push(other),
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_parsed_as_printed() {
        for line in [
            "7 acquire 1 by vm7:312## keys k l\\x20\\\\ wait 5000 lease 1000 watchdog ephemeral replicas 2",
            "7 acquire 1 by \\0 keys k wait forever limit 0",
            "7 acquire 1 by a keys k limit 3",
            "7 acquire 1 by a keys k watchdog limit 3 kept",
            "7 keep 1 for 5000",
            "7 use 2 hold 1 most 1",
            "7 release 2 hold 1 within 1000",
            "7 renew 2 hold 1 within 1000 lease 5 fence 6",
            "7 check 2 hold 1 within 1000",
            "7 request 2 within 1000 LOCK.INFO \\x00\\r\\n",
            "7 drop 1",
            "7 close 3 within 0",
            "8 opened 1",
            "8 received 1 session *1\\r\\n$1\\r\\n\\xff\\r\\n",
            "8 received 2 requests :7\\r\\n",
            "9 ended 1",
            "9 leave 1",
            "9 wake",
        ] {
            let (at, input) = Input::parse(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!(format!("{at} {input}"), line);
        }
        assert_eq!(Input::parse("7 nothing"), None);
        let settings = Settings { limit: 700, grace: 1, unanswered: 2, seed: 5 };
        assert_eq!(Settings::parse(&settings.to_string()), Some(settings));
    }
}
