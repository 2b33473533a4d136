//! What the clients of a run saw of their locks, in the format of `verification/histories/README.md`, for judges that are not ours.
//!
//! Times are microseconds of the simulated monotonic clock. What is unknown is written as what may have happened: an
//! answer that never came, and the end of what was revoked because of that.

use crate::asked::Asked;
use crate::redis::{Bytes, node};
use crate::resp::Reply;
use crate::script::Line;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;

/// A server counts whole milliseconds, rounded down, at both ends of a lease.
const ROUNDING: u64 = 2_000;

/// How long it takes at most, in µs, until an undelivered grant is revoked, where nothing keeps the server from it.
const TAKEN_BACK: u64 = 100_000;

/// Whether a history can tell what a line does. The format knows no locks that were written by hand, no second database
/// or server, and no transaction; and where answers stay away for long, a judge has too much to try.
pub fn can_tell(line: &Line) -> bool {
    const TOLD: [&str; 11] = [
        "lock.acquire",
        "lock.macquire",
        "lock.release",
        "lock.mrelease",
        "lock.renew",
        "lock.mrenew",
        "lock.force",
        "lock.events",
        "del",
        "client",
        "flushall",
    ];
    match line {
        // The specification knows neither `NEW`, nor requests that are refused while another one is being confirmed, nor that
        // a token from before `FENCE` raised it still names its hold.
        Line::Request(_, words) if words.iter().any(|word| ["NEW", "REPLICAS", "FENCE"].contains(&word.as_str())) => {
            false
        }
        Line::Request(_, words) => {
            TOLD.contains(&words[0].to_lowercase().as_str()) && words.get(1).is_none_or(|word| word != "PAUSE")
        }
        Line::End(_) | Line::Pass(_) | Line::Replicas(_) => true,
        _ => false,
    }
}

/// A request that has no answer yet.
#[derive(Clone, Debug)]
struct Open {
    asked: Asked,
    /// The keys of a `DEL`.
    deleted: Vec<Bytes>,
    from: u64,
}

/// Everything that the clients of a run asked and were told.
#[derive(Debug, Default)]
pub struct History {
    open: BTreeMap<u64, VecDeque<Open>>,
    /// How many requests of a connection were answered.
    answered: BTreeMap<u64, usize>,
    /// What sessions wait for.
    waits: Vec<Open>,
    /// What ends with a connection, as far as anybody knows.
    ephemeral: BTreeSet<(u64, Bytes, Bytes)>,
    keys: BTreeSet<Bytes>,
    /// Requests were made that the format can't tell apart.
    pub is_unclear: bool,
    /// The history, a line an operation.
    pub text: String,
}

impl History {
    /// A client sends a request.
    pub fn asked(&mut self, client: u64, argv: &[Bytes], now: u64) {
        let asked = Asked::read(client, argv);
        let deleted = if asked.command == "del" { argv[1..].to_vec() } else { Vec::new() };
        self.keys.extend(asked.keys.iter().cloned());
        if asked.ephemeral {
            self.ephemeral.extend(asked.keys.iter().map(|key| (asked.client, key.clone(), asked.owner.clone())));
        }
        self.open.entry(client).or_default().push_back(Open { asked, deleted, from: now });
    }

    /// A client is told something.
    pub fn told(&mut self, client: u64, reply: &Reply, now: u64) {
        let Some(open) = self.open.get_mut(&client).and_then(VecDeque::pop_front) else { return };
        *self.answered.entry(client).or_default() += 1;
        match (open.asked.command.as_str(), reply) {
            (_, Reply::Line(line)) if line == "WAITING" => self.waits.push(open),
            ("events", Reply::Array(events)) => {
                events.iter().for_each(|event| self.event(client, event.elements(), now));
            }
            ("events" | "session", _) => {}
            _ => self.answer(&open, reply, now),
        }
    }

    /// A session is told how a request ended.
    fn event(&mut self, session: u64, event: &[Reply], now: u64) {
        let [kind, _, keys, owner, token, detail, ..] = event else { return };
        let keys: Vec<Bytes> = keys.elements().iter().map(|key| key.bytes().to_vec()).collect();
        let is_it = |open: &Open| {
            let it = &open.asked;
            it.client == session && it.owner == owner.bytes() && it.keys == keys && !it.command.contains("renew")
        };
        let answer = match kind.bytes() {
            b"granted" => token.clone(),
            b"timeout" => Reply::Null,
            b"refused" => Reply::Error(String::from_utf8_lossy(detail.bytes()).into_owned()),
            _ => return,
        };
        // Which of several that are alike was answered, nobody can say: what is true of all of them is.
        let alike: Vec<&Open> = self.waits.iter().filter(|open| is_it(open)).collect();
        let lease = alike.iter().map(|open| open.asked.lease.unwrap_or(30_000)).min();
        self.is_unclear |= alike.windows(2).any(|two| {
            let of = |open: &Open| (open.asked.limit, open.asked.holds);
            of(two[0]) != of(two[1])
        });
        if let Some(at) = self.waits.iter().position(is_it) {
            let mut first = self.waits.remove(at);
            first.asked.lease = lease;
            self.answer(&first, &answer, now);
        }
    }

    fn answer(&mut self, open: &Open, reply: &Reply, now: u64) {
        let keys = if open.deleted.is_empty() { open.asked.keys.clone() } else { open.deleted.clone() };
        let keys = if open.asked.command == "flushall" { self.keys.iter().cloned().collect() } else { keys };
        for (place, key) in keys.iter().enumerate() {
            let reply = reply.elements().get(place).unwrap_or(reply);
            let outcome = match (open.asked.command.trim_start_matches('m'), reply) {
                (_, Reply::Error(error)) if error.starts_with("NOREPLICAS Not") => "\"error\"".into(),
                (_, Reply::Error(error)) if error.starts_with("UNCONFIRMED") => "\"unconfirmed\"".into(),
                // A client that is unblocked by force may have been granted it meanwhile: then it was revoked.
                (_, Reply::Error(error)) if error.starts_with("UNBLOCKED") => {
                    return self.unknown(open, (open.from, now));
                }
                (_, Reply::Error(_)) => "\"error\"".into(),
                (_, Reply::Null) => "\"null\"".into(),
                ("acquire" | "renew", Reply::Integer(token)) => format!("{{\"token\":{token}}}"),
                ("release", Reply::Integer(gone)) => format!("{{\"left\":{}}}", 1 - gone),
                ("force", Reply::Integer(count)) => format!("{{\"count\":{count}}}"),
                _ => "\"done\"".into(),
            };
            self.write(open, key, now, &outcome);
        }
    }

    /// Nobody will ever hear what became of a request: it may have been done, and revoked.
    fn unknown(&mut self, open: &Open, (from, to): (u64, u64)) {
        let keys = if open.deleted.is_empty() { open.asked.keys.clone() } else { open.deleted.clone() };
        for key in &keys {
            self.write(open, key, to, "\"unknown\"");
            if open.asked.command.ends_with("acquire") && open.asked.wait.is_some() {
                self.may_end(key, &open.asked.owner, (from, to));
            }
        }
    }

    fn write(&mut self, open: &Open, key: &[u8], to: u64, outcome: &str) {
        let asked = &open.asked;
        let what = match asked.command.trim_start_matches('m') {
            "del" | "flushall" => "force",
            it @ ("acquire" | "release" | "renew" | "force") => it,
            _ => return,
        };
        let is_one_hold = asked.holds.is_none();
        let number =
            |name: &str, value: Option<u64>| value.map_or(String::new(), |value| format!(",\"{name}\":{value}"));
        let lease = match what {
            "release" => asked.lease,
            _ => Some(asked.lease.unwrap_or(30_000)),
        };
        let mut terms = number("lease", lease.map(|ms| (ms * 1000).saturating_sub(ROUNDING)));
        if what == "acquire" {
            terms += &number("limit", Some(if asked.limit == u32::MAX { 0 } else { u64::from(asked.limit) }));
            terms += if asked.wait.is_some() { ",\"wait\":true" } else { "" };
            terms += if asked.command == "macquire" { ",\"several\":true" } else { "" };
        }
        if what == "acquire" || what == "release" && !is_one_hold {
            terms += &number("holds", asked.holds);
        }
        if what == "release" || what == "renew" {
            terms += &number("token", asked.token);
        }
        if what == "renew" {
            terms += &number("fence", asked.fence);
        }
        if what != "force" {
            terms = format!(",\"owner\":\"{}\"{terms}", plain(&asked.owner));
        } else {
            terms.clear();
        }
        let (process, key, from) = (asked.client, plain(key), open.from);
        let _ = writeln!(
            self.text,
            "{{\"process\":\"c{process}\",\"key\":\"{key}\",\"what\":\"{what}\"{terms},\"from\":{from},\"to\":{to},\"outcome\":{outcome}}}"
        );
    }

    fn may_end(&mut self, key: &[u8], owner: &[u8], (from, to): (u64, u64)) {
        let to = to + TAKEN_BACK;
        let (key, owner) = (plain(key), plain(owner));
        let _ = writeln!(
            self.text,
            "{{\"process\":\"server\",\"key\":\"{key}\",\"what\":\"end\",\"owner\":\"{owner}\",\"from\":{from},\"to\":{to},\"outcome\":\"unknown\"}}"
        );
    }

    /// A connection has ended between these moments: whatever it was owed is not told any more.
    pub fn gone(&mut self, client: u64, when: (u64, u64)) {
        // What stands behind a request that is still blocked has not begun.
        let begun = node(|node| node.begun.get(&client).copied().unwrap_or(0));
        let begun = begun.saturating_sub(self.answered.get(&client).copied().unwrap_or(0));
        for open in self.open.remove(&client).unwrap_or_default().into_iter().take(begun) {
            self.unknown(&open, when);
        }
        for open in self.waits.extract_if(.., |open| open.asked.client == client).collect::<Vec<_>>() {
            self.unknown(&open, when);
        }
        let ended: Vec<_> = self.ephemeral.iter().filter(|(of, ..)| *of == client).cloned().collect();
        ended.iter().for_each(|(_, key, owner)| self.may_end(key, owner, when));
        self.ephemeral.retain(|(of, ..)| *of != client);
    }

    /// The run is over.
    pub fn end(&mut self, now: u64) {
        let clients: BTreeSet<u64> =
            self.open.keys().copied().chain(self.waits.iter().map(|it| it.asked.client)).collect();
        clients.into_iter().for_each(|client| self.gone(client, (now, now)));
    }
}

/// Bytes as a JSON string can hold them.
fn plain(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string().replace('\\', "\\\\")
}
