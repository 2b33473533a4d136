//! Steps as text, one per line, so that scripts of a client's core can be stored and compared.
//!
//! | line | meaning |
//! |---|---|
//! | `settings limit 10000 grace 100 unanswered 256 seed 1` | the first line of a script, if they are others than these |
//! | `7 acquire 1 by vm7:312## keys k wait 5000 lease 1000 watchdog` | at 7 ms the program requests a lock; `wait forever`, `ephemeral`, `replicas n`, `limit n` (0: readers), `kept` |
//! | `7 release 2 hold 1 within 1000` | and `check`, and `renew`, which may name `lease` and `fence` |
//! | `7 keep 1 for 5000`, `7 use 2 hold 1 most 1` | hold 1 is cached; a task uses it, as one of so many uses in a row |
//! | `7 request 3 within 1000 PING`, `7 drop 1`, `7 close 4 within 1000` | the other calls |
//! | `8 opened 1`, `8 ended 1`, `8 leave 1`, `8 wake` | events of the I/O driver |
//! | `8 replied 1 session :7\r\n` | a reply on a connection of pair 1: `session` or `requests` |
//! | `> open 1`, `> end 1`, `> wake 10008` | actions of the I/O driver |
//! | `> send 1 requests LOCK.INFO k` | a request, as words |
//! | `> moved 1 MOVED 7 b:1` | a claim that moves to another core; its input there, `take 1`, can't be read from text |
//! | `> ended 1 granted 1800000000000001`, `> lost 1 expired` | results for callers and holders |
//!
//! In a word, `\x20` stands for a byte, as do `\r`, `\n`, `\t`, `\\`, `\'` and `\"`; an empty word is `\0`. A key with the name of an
//! option (`wait`, `lease`, …) can't be distinguished from it.

use holdfast_core::{Bytes, Channel, Input, Limit, Millis, Outcome, Output, Reply, Settings, Terms, Wait};
use simulator::resp;
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

/// A step, or a part of one, as text.
pub struct Text<'a, T>(pub &'a T);

/// Words with a space before each.
struct Line<'a>(&'a [Bytes]);

impl Display for Line<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        self.0.iter().try_for_each(|word| write!(out, " {}", Word(word)))
    }
}

impl Display for Text<'_, Settings> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        let Settings { limit, grace, unanswered, seed } = self.0;
        write!(out, "settings limit {limit} grace {grace} unanswered {unanswered} seed {seed}")
    }
}

/// Parses the first line of a script. `None`: malformed.
pub fn parse_settings(line: &str) -> Option<Settings> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["settings", "limit", limit, "grace", grace, "unanswered", unanswered, "seed", seed] = words[..] else {
        return None;
    };
    Some(Settings {
        limit: limit.parse().ok()?,
        grace: grace.parse().ok()?,
        unanswered: unanswered.parse().ok()?,
        seed: seed.parse().ok()?,
    })
}
impl Display for Text<'_, Input> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self.0 {
            Input::Acquire { call, by, keys, terms, wait } => {
                write!(out, "acquire {call} by {} keys{}", Word(by), Line(keys))?;
                match wait {
                    Wait::No => {}
                    Wait::For(time) => write!(out, " wait {time}")?,
                    Wait::Forever => write!(out, " wait forever")?,
                }
                write!(out, "{}", Text(terms))
            }
            Input::Release { call, hold, within } => write!(out, "release {call} hold {hold} within {within}"),
            Input::Renew { call, hold, lease, fence, within } => {
                write!(out, "renew {call} hold {hold} within {within}")?;
                lease.map_or(Ok(()), |lease| write!(out, " lease {lease}"))?;
                fence.map_or(Ok(()), |fence| write!(out, " fence {fence}"))
            }
            Input::Check { call, hold, within } => write!(out, "check {call} hold {hold} within {within}"),
            Input::Keep { hold, idle } => write!(out, "keep {hold} for {idle}"),
            Input::Use { call, hold, most } => write!(out, "use {call} hold {hold} most {most}"),
            Input::Request { call, words, within } => write!(out, "request {call} within {within}{}", Line(words)),
            Input::Drop { call } => write!(out, "drop {call}"),
            Input::Close { call, within } => write!(out, "close {call} within {within}"),
            Input::Opened { pair } => write!(out, "opened {pair}"),
            Input::Replied { pair, channel, reply } => {
                write!(out, "replied {pair} {} {}", Text(channel), Word(&encoded(reply)))
            }
            Input::Ended { pair } => write!(out, "ended {pair}"),
            Input::Leave { id } => write!(out, "leave {id}"),
            Input::Take { moved } => write!(out, "take {}", moved.id),
            Input::Wake => write!(out, "wake"),
        }
    }
}

impl Display for Text<'_, Terms> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        self.0.lease.map_or(Ok(()), |lease| write!(out, " lease {lease}"))?;
        if self.0.watchdog {
            write!(out, " watchdog")?;
        }
        if self.0.ephemeral {
            write!(out, " ephemeral")?;
        }
        if self.0.replicas > 0 {
            write!(out, " replicas {}", self.0.replicas)?;
        }
        match self.0.limit {
            Limit::One => {}
            limit => write!(out, " limit {}", limit.number())?,
        }
        if self.0.kept { write!(out, " kept") } else { Ok(()) }
    }
}

impl Display for Text<'_, Channel> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        out.write_str(if *self.0 == Channel::Session { "session" } else { "requests" })
    }
}

impl Display for Text<'_, Output> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self.0 {
            Output::Open { pair } => write!(out, "open {pair}"),
            Output::End { pair } => write!(out, "end {pair}"),
            Output::Send { pair, channel, words } => write!(out, "send {pair} {}{}", Text(channel), Line(words)),
            Output::Ended { call, outcome } => write!(out, "ended {call} {}", Text(outcome)),
            Output::Lost { hold, why } => write!(out, "lost {hold} {why}"),
            Output::Moved { moved, error } => write!(out, "moved {} {error}", moved.id),
            Output::Wake { at } => write!(out, "wake {at}"),
        }
    }
}

impl Display for Text<'_, Outcome> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self.0 {
            Outcome::Granted(token) => write!(out, "granted {token}"),
            Outcome::NotGranted => write!(out, "not granted"),
            Outcome::Refused(error) => write!(out, "refused {error}"),
            Outcome::Unanswered => write!(out, "unanswered"),
            Outcome::Closed => write!(out, "closed"),
            Outcome::Released => write!(out, "released"),
            Outcome::NotHeld => write!(out, "not held"),
            Outcome::Lost(why) => write!(out, "lost {why}"),
            Outcome::Renewed(token) => write!(out, "renewed {token}"),
            Outcome::Held => write!(out, "held"),
            Outcome::Answer(reply) => write!(out, "answer {}", Text(reply)),
        }
    }
}

impl Display for Text<'_, Reply> {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self.0 {
            Reply::Integer(number) => write!(out, "{number}"),
            Reply::Bulk(bytes) => write!(out, "\"{}\"", Word(bytes)),
            Reply::Null => write!(out, "null"),
            Reply::Line(line) => write!(out, "+{line}"),
            Reply::Error(error) => write!(out, "-{error}"),
            Reply::Array(elements) => {
                write!(out, "[")?;
                for (place, element) in elements.iter().enumerate() {
                    write!(out, "{}{}", if place > 0 { " " } else { "" }, Text(element))?;
                }
                write!(out, "]")
            }
        }
    }
}

/// Parses a line of a script: the time and the input. `None`: malformed.
pub fn parse_input(line: &str) -> Option<(Millis, Input)> {
    let mut words = line.split_whitespace();
    let (at, what) = (words.next()?.parse().ok()?, words.next()?);
    let rest: Vec<&str> = words.collect();
    let number = |place: usize| rest.get(place)?.parse::<u64>().ok();
    let named = |name: &str| rest[rest.iter().position(|word| *word == name)? + 1..].first().copied();
    let value = |name: &str| named(name)?.parse::<u64>().ok();
    let bytes = |words: &[&str]| words.iter().map(|word| unescape(word)).collect::<Option<Vec<Bytes>>>();
    let input = match what {
        "wake" => Input::Wake,
        "opened" => Input::Opened { pair: number(0)? },
        "ended" => Input::Ended { pair: number(0)? },
        "leave" => Input::Leave { id: number(0)? },
        "replied" => {
            let channel = if *rest.get(1)? == "session" { Channel::Session } else { Channel::Requests };
            let reply = resp::Reply::take(&mut unescape(rest.get(2)?)?)?;
            Input::Replied { pair: number(0)?, channel, reply: of_core(&reply) }
        }
        "drop" => Input::Drop { call: number(0)? },
        "close" => Input::Close { call: number(0)?, within: value("within")? },
        "request" => Input::Request { call: number(0)?, within: number(2)?, words: bytes(rest.get(3..)?)? },
        "release" => Input::Release { call: number(0)?, hold: number(2)?, within: number(4)? },
        "check" => Input::Check { call: number(0)?, hold: number(2)?, within: number(4)? },
        "keep" => Input::Keep { hold: number(0)?, idle: value("for")? },
        "use" => Input::Use { call: number(0)?, hold: number(2)?, most: number(4)?.try_into().ok()? },
        "renew" => {
            let (lease, fence) = (value("lease"), value("fence"));
            Input::Renew { call: number(0)?, hold: number(2)?, within: number(4)?, lease, fence }
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
            Input::Acquire {
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

/// A reply as the core's type.
pub fn of_core(reply: &resp::Reply) -> Reply {
    match reply {
        resp::Reply::Integer(number) => Reply::Integer(*number),
        resp::Reply::Bulk(bytes) => Reply::Bulk(bytes.clone()),
        resp::Reply::Null => Reply::Null,
        resp::Reply::Line(line) => Reply::Line(line.clone()),
        resp::Reply::Error(error) => Reply::Error(error.clone()),
        resp::Reply::Array(elements) => Reply::Array(elements.iter().map(of_core).collect()),
    }
}

/// A reply in RESP 2.
fn encoded(reply: &Reply) -> Bytes {
    match reply {
        Reply::Integer(number) => format!(":{number}\r\n").into_bytes(),
        Reply::Bulk(bytes) => [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat(),
        Reply::Null => b"$-1\r\n".to_vec(),
        Reply::Line(line) => format!("+{line}\r\n").into_bytes(),
        Reply::Error(error) => format!("-{error}\r\n").into_bytes(),
        Reply::Array(elements) => {
            let elements: Vec<Bytes> = elements.iter().map(encoded).collect();
            [format!("*{}\r\n", elements.len()).into_bytes(), elements.concat()].concat()
        }
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
            "8 replied 1 session *3\\r\\n$1\\r\\n\\xff\\r\\n$-1\\r\\n+OK\\r\\n",
            "8 replied 2 requests :7\\r\\n",
            "9 ended 1",
            "9 leave 1",
            "9 wake",
        ] {
            let (at, input) = parse_input(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!(format!("{at} {}", Text(&input)), line);
        }
        assert_eq!(parse_input("7 nothing"), None);
        let settings = Settings { limit: 700, grace: 1, unanswered: 2, seed: 5 };
        assert_eq!(parse_settings(&Text(&settings).to_string()), Some(settings));
    }
}
