//! The observations of a script, without what differs by nature: tokens, identities, times.

use simulator::play::Run;
use simulator::redis::Bytes;
use simulator::redis::stream::undump;
use simulator::resp::Reply;
use simulator::script::{Line, Name};
use std::collections::{BTreeMap, BTreeSet};

/// Times are rounded to multiples of this, in ms, because a real server takes longer. Leases in scripts that must not
/// expire are multiples of it.
const COARSE: u64 = 1_000_000;

/// The observations of a script.
#[derive(Default)]
pub struct Observed {
    /// The replies to each client.
    pub replies: BTreeMap<Name, Vec<Reply>>,
    /// The stream to a replica.
    pub stream: Vec<Vec<Bytes>>,
    /// The clients by connection id.
    pub ids: BTreeMap<u64, Name>,
    /// When it began, in Unix ms.
    pub began: u64,
}

impl Observed {
    /// Those of a simulated server.
    pub fn of_run(run: &Run, script: &[Line]) -> Self {
        let mut observed = Self { ids: run.ids.clone(), began: 1_800_000_000_000, ..Self::default() };
        for (name, reply) in &run.replies[..run.script.0] {
            observed.replies.entry(*name).or_default().push(reply.clone());
        }
        if !replicas(script).is_empty() {
            observed.stream = run.stream[..run.script.1].to_vec();
        }
        observed
    }

    /// As lines that are equal for equal behaviour.
    pub fn plain(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, replies) in &self.replies {
            lines.extend(replies.iter().map(|reply| format!("{name}: {:?}", self.reply(reply))));
        }
        let mut db = Vec::new();
        lines.extend(self.stream.iter().filter_map(|command| plain_command(command, &mut db)));
        rank_tokens(&lines.iter().map(|line| self.since_beginning(&self.name_clients(line))).collect::<Vec<_>>())
    }

    fn reply(&self, reply: &Reply) -> Reply {
        match reply {
            Reply::Array(elements) => Reply::Array(sort_losses(self.elements(elements))),
            // The rest of a lease, as in `PTTL`.
            Reply::Integer(1_000..1_000_000_000_000) => coarse(reply),
            Reply::Error(text) => Reply::Error(plain_error(text)),
            other => other.clone(),
        }
    }

    fn elements(&self, elements: &[Reply]) -> Vec<Reply> {
        if let [kind, rest @ .., detail] = elements
            && let Some(detail) = plain_detail(kind.bytes(), detail)
        {
            return std::iter::once(kind).chain(rest).map(|it| self.reply(it)).chain([detail]).collect();
        }
        let before = std::iter::once(None).chain(elements.iter().map(Some));
        let element = |(before, it): (Option<&Reply>, &Reply)| match before.map_or(&b""[..], Reply::bytes) {
            b"ttl" | b"remaining" => coarse(it),
            b"waited" | b"oldest" => text("a-while".into()),
            b"client" => {
                it.number().and_then(|id| self.ids.get(&id)).map_or(it.clone(), |name| text(format!("#{name}")))
            }
            _ => self.reply(it),
        };
        before.zip(elements).map(element).collect()
    }

    /// Unix milliseconds are the only numbers with 13 digits.
    fn since_beginning(&self, line: &str) -> String {
        let mut plain = line.to_owned();
        for number in numbers(line).filter(|number| number.len() == 13) {
            let ms = number.parse::<u64>().unwrap_or(0).saturating_sub(self.began);
            plain = plain.replace(number, &format!("after-{}", ms / COARSE * COARSE));
        }
        plain
    }

    /// Identities are `<uuid>:<id>`.
    fn name_clients(&self, line: &str) -> String {
        let mut plain = line.to_owned();
        while let Some((at, len, id)) = find_identity(&plain) {
            let name = self.ids.get(&id).map_or("?".into(), char::to_string);
            plain.replace_range(at..at + len, &format!("${name}"));
        }
        plain
    }
}

/// The replicas with which a script begins, and their delays.
pub fn replicas(script: &[Line]) -> &[Option<u64>] {
    match script {
        [Line::Replicas(delays), ..] => delays,
        _ => &[],
    }
}

fn find_identity(line: &str) -> Option<(usize, usize, u64)> {
    const UUID: usize = 36;
    let colons = line.match_indices(':').map(|(at, _)| at).filter(|at| *at >= UUID);
    let is_uuid = |text: &str| {
        text.bytes().enumerate().all(|(position, byte)| match position {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
    };
    let at = colons.into_iter().find(|at| line.get(at - UUID..*at).is_some_and(is_uuid))?;
    let digits: String = line[at + 1..].chars().take_while(char::is_ascii_digit).collect();
    Some((at - UUID, UUID + 1 + digits.len(), digits.parse().ok()?))
}

/// A command of the stream with its database; `None` if it says nothing about the data.
fn plain_command(command: &[Bytes], db: &mut Bytes) -> Option<String> {
    let mut words: Vec<String> = command.iter().map(|word| word.escape_ascii().to_string()).collect();
    words[0] = words[0].to_uppercase();
    match words[0].as_str() {
        "SELECT" => {
            *db = command[1].clone();
            return None;
        }
        "PING" | "REPLCONF" => return None,
        "MULTI" | "EXEC" => return Some(format!("stream: {}", words[0])),
        "UNLINK" => words[0] = "DEL".into(),
        "RESTORE" => {
            let fields = undump(&command[3]).map_or(Vec::new(), |hash| hash.pairs().to_vec());
            let field = |(name, value): &(Bytes, Bytes)| format!("{}={}", name.escape_ascii(), value.escape_ascii());
            words[3] = fields.iter().map(field).collect::<Vec<_>>().join(",");
        }
        _ => {}
    }
    Some(format!("stream: {}> {}", db.escape_ascii(), words.join(" ")))
}

fn numbers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|it: char| !it.is_ascii_digit())
}

/// Tokens are the only numbers with 16 digits: each is replaced by its rank.
fn rank_tokens(lines: &[String]) -> Vec<String> {
    let tokens: BTreeSet<&str> =
        lines.iter().flat_map(|line| numbers(line)).filter(|number| number.len() == 16).collect();
    let mut plain = lines.to_vec();
    for (rank, token) in tokens.iter().enumerate() {
        plain.iter_mut().for_each(|line| *line = line.replace(token, &format!("token-{rank}")));
    }
    plain
}

/// The detail of an event without durations: how long a hold lasts, and how much of each lease is left.
fn plain_detail(kind: &[u8], detail: &Reply) -> Option<Reply> {
    let said = String::from_utf8_lossy(detail.bytes()).into_owned();
    match kind {
        b"granted" => Some(coarse(&Reply::Integer(said.parse().ok()?))),
        b"refused" if said.starts_with("MOVED ") => Some(text(plain_error(&said))),
        b"heartbeat" => {
            let numbers: Vec<&str> = said.split(' ').collect();
            let [next, default, _, writes] = numbers.as_slice() else { return None };
            Some(text(format!("{next} {default} sure {writes}")))
        }
        _ => None,
    }
}

/// The holders of a forced lock lose it in no particular order.
fn sort_losses(mut events: Vec<Reply>) -> Vec<Reply> {
    let is_loss = |event: &Reply| event.elements().first().is_some_and(|kind| kind.bytes() == b"lost");
    for together in events.chunk_by_mut(|one, next| is_loss(one) && is_loss(next)) {
        together.sort_by_key(|event| format!("{event:?}"));
    }
    events
}

/// A remaining time or a duration, rounded.
fn coarse(reply: &Reply) -> Reply {
    match reply.number() {
        Some(ms) if ms > 0 => text(format!("up-to-{}", ms.div_ceil(COARSE) * COARSE)),
        _ => reply.clone(),
    }
}

fn text(text: String) -> Reply {
    Reply::Line(text)
}

/// The servers' own errors are worded differently; the module's are the same.
fn plain_error(error: &str) -> String {
    let code = error.split(' ').next().unwrap_or_default();
    match code {
        "NOPERM" | "EXECABORT" | "READONLY" | "UNBLOCKED" | "WRONGTYPE" | "MISCONF" => code.into(),
        "MOVED" | "ASK" => error.rsplit_once(' ').map_or(error, |(slot, _)| slot).into(),
        _ => error.into(),
    }
}
