//! What the clients of a run observed, in the format of `verification/histories/README.md`, for independent checkers.
//!
//! Times are microseconds of the simulated monotonic clock. An unknown outcome is written as what may have happened: a
//! reply that never arrived, and the end of a hold that was revoked because of that.

use crate::redis::{Bytes, node};
use crate::request::Request;
use crate::resp::Reply;
use crate::script::Line;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;

/// A server counts whole milliseconds, rounded down, at both ends of a lease.
const ROUNDING: u64 = 2_000;

/// The longest time, in µs, until an undelivered grant is revoked, if nothing delays the server.
const REVOCATION_DELAY: u64 = 100_000;

/// Whether a history can express the effect of a line. The format has no locks that other commands wrote, no second
/// database or server, and no transactions. Late replies would leave a checker too many orders to try.
pub fn is_expressible(line: &Line) -> bool {
    const COMMANDS: [&str; 11] = [
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
        // The specification has neither `NEW`, nor refusals while another request is being confirmed, nor holds with
        // two valid tokens after `FENCE`.
        Line::Request(_, words) if words.iter().any(|word| ["NEW", "REPLICAS", "FENCE"].contains(&word.as_str())) => {
            false
        }
        Line::Request(_, words) => {
            COMMANDS.contains(&words[0].to_lowercase().as_str()) && words.get(1).is_none_or(|word| word != "PAUSE")
        }
        Line::End(_) | Line::Pass(_) | Line::Replicas(_) => true,
        _ => false,
    }
}

/// A request that has no reply yet.
#[derive(Clone, Debug)]
struct OpenRequest {
    request: Request,
    /// The keys of a `DEL`.
    deleted: Vec<Bytes>,
    from: u64,
    /// When its session read `WAITING`.
    queued: Option<u64>,
}

/// All requests and replies of a run's clients.
#[derive(Debug, Default)]
pub struct History {
    open: BTreeMap<u64, VecDeque<OpenRequest>>,
    /// How many requests of each connection have a reply.
    answered: BTreeMap<u64, usize>,
    /// The queued requests of sessions.
    waits: Vec<OpenRequest>,
    /// Holds that may end with a connection.
    ephemeral: BTreeSet<(u64, Bytes, Bytes)>,
    keys: BTreeSet<Bytes>,
    /// The run has requests that the format can't tell apart.
    pub is_ambiguous: bool,
    /// The history, one operation a line.
    pub text: String,
}

impl History {
    /// A client sent a request.
    pub fn request_sent(&mut self, client: u64, argv: &[Bytes], now: u64) {
        let request = Request::read(client, argv);
        let deleted = if request.command == "del" { argv[1..].to_vec() } else { Vec::new() };
        self.keys.extend(request.keys.iter().cloned());
        if request.ephemeral {
            self.ephemeral.extend(request.keys.iter().map(|key| (request.client, key.clone(), request.owner.clone())));
        }
        // What a request has waited elsewhere counts for its place in the queue.
        let from = now.saturating_sub(request.waited * 1000);
        self.open.entry(client).or_default().push_back(OpenRequest { request, deleted, from, queued: None });
    }

    /// A client received a reply.
    pub fn reply_received(&mut self, client: u64, reply: &Reply, now: u64) {
        let Some(mut open) = self.open.get_mut(&client).and_then(VecDeque::pop_front) else { return };
        *self.answered.entry(client).or_default() += 1;
        match (open.request.command.as_str(), reply) {
            (_, Reply::Line(line)) if line == "WAITING" => {
                open.queued = Some(now);
                self.waits.push(open);
            }
            ("events", Reply::Array(events)) => {
                events.iter().for_each(|event| self.event(client, event.elements(), now));
            }
            ("events" | "session", _) => {}
            _ => self.answer(&open, reply, now),
        }
    }

    /// A session read the outcome of a request.
    fn event(&mut self, session: u64, event: &[Reply], now: u64) {
        let [kind, _, keys, owner, token, detail, ..] = event else { return };
        let keys: Vec<Bytes> = keys.elements().iter().map(|key| key.bytes().to_vec()).collect();
        let is_it = |open: &OpenRequest| {
            let it = &open.request;
            it.client == session && it.owner == owner.bytes() && it.keys == keys && !it.command.contains("renew")
        };
        let answer = match kind.bytes() {
            b"granted" => token.clone(),
            b"timeout" => Reply::Null,
            b"refused" => Reply::Error(String::from_utf8_lossy(detail.bytes()).into_owned()),
            _ => return,
        };
        // Which of several similar requests ended is unknown: only what they have in common is written.
        let alike: Vec<&OpenRequest> = self.waits.iter().filter(|open| is_it(open)).collect();
        let is_alone = alike.len() == 1;
        let lease = alike.iter().map(|open| open.request.lease.unwrap_or(30_000)).min();
        self.is_ambiguous |= alike.windows(2).any(|two| {
            let of = |open: &OpenRequest| (open.request.limit, open.request.holds);
            of(two[0]) != of(two[1])
        });
        if let Some(at) = self.waits.iter().position(is_it) {
            let mut first = self.waits.remove(at);
            first.request.lease = lease;
            first.queued = first.queued.filter(|_| is_alone);
            self.answer(&first, &answer, now);
        }
    }

    fn answer(&mut self, open: &OpenRequest, reply: &Reply, now: u64) {
        let keys = if open.deleted.is_empty() { open.request.keys.clone() } else { open.deleted.clone() };
        let keys = if open.request.command == "flushall" { self.keys.iter().cloned().collect() } else { keys };
        for (position, key) in keys.iter().enumerate() {
            let reply = reply.elements().get(position).unwrap_or(reply);
            let outcome = match (open.request.command.trim_start_matches('m'), reply) {
                (_, Reply::Error(error)) if error.starts_with("NOREPLICAS Not") => "\"error\"".into(),
                (_, Reply::Error(error)) if error.starts_with("UNCONFIRMED") => "\"unconfirmed\"".into(),
                // A client that was unblocked by `CLIENT UNBLOCK` may have been granted the lock before. The grant was
                // then revoked.
                (_, Reply::Error(error)) if error.starts_with("UNBLOCKED") => {
                    return self.unknown(open, (open.from, now));
                }
                (_, Reply::Error(_)) => "\"error\"".into(),
                (_, Reply::Null) => "\"null\"".into(),
                ("acquire" | "renew", Reply::Integer(token)) => format!("{{\"token\":{token}}}"),
                ("release", Reply::Integer(released)) => format!("{{\"left\":{}}}", 1 - released),
                ("force", Reply::Integer(count)) => format!("{{\"count\":{count}}}"),
                _ => "\"done\"".into(),
            };
            self.write(open, key, now, &outcome);
        }
    }

    /// The outcome of a request will never be known: it may have been granted and revoked.
    fn unknown(&mut self, open: &OpenRequest, (from, to): (u64, u64)) {
        let keys = if open.deleted.is_empty() { open.request.keys.clone() } else { open.deleted.clone() };
        for key in &keys {
            self.write(open, key, to, "\"unknown\"");
            if open.request.command.ends_with("acquire") && open.request.wait.is_some() {
                self.may_end(key, &open.request.owner, (from, to));
            }
        }
    }

    fn write(&mut self, open: &OpenRequest, key: &[u8], to: u64, outcome: &str) {
        let request = &open.request;
        let operation = match request.command.trim_start_matches('m') {
            "del" | "flushall" => "force",
            it @ ("acquire" | "release" | "renew" | "force") => it,
            _ => return,
        };
        let is_one_hold = request.holds.is_none();
        let number =
            |name: &str, value: Option<u64>| value.map_or(String::new(), |value| format!(",\"{name}\":{value}"));
        let lease = match operation {
            "release" => request.lease,
            _ => Some(request.lease.unwrap_or(30_000)),
        };
        let mut terms = number("lease", lease.map(|ms| (ms * 1000).saturating_sub(ROUNDING)));
        if operation == "acquire" {
            terms += &number("limit", Some(if request.limit == u32::MAX { 0 } else { u64::from(request.limit) }));
            terms += if request.wait.is_some() { ",\"wait\":true" } else { "" };
            terms += &number("queued", open.queued);
            terms += if request.command == "macquire" { ",\"several\":true" } else { "" };
        }
        if operation == "acquire" || operation == "release" && !is_one_hold {
            terms += &number("holds", request.holds);
        }
        if operation == "release" || operation == "renew" {
            terms += &number("token", request.token);
        }
        if operation == "renew" {
            terms += &number("fence", request.fence);
        }
        if operation != "force" {
            terms = format!(",\"owner\":\"{}\"{terms}", plain(&request.owner));
        } else {
            terms.clear();
        }
        let (process, key, from) = (request.client, plain(key), open.from);
        let _ = writeln!(
            self.text,
            "{{\"process\":\"c{process}\",\"key\":\"{key}\",\"what\":\"{operation}\"{terms},\"from\":{from},\"to\":{to},\"outcome\":{outcome}}}"
        );
    }

    fn may_end(&mut self, key: &[u8], owner: &[u8], (from, to): (u64, u64)) {
        let to = to + REVOCATION_DELAY;
        let (key, owner) = (plain(key), plain(owner));
        let _ = writeln!(
            self.text,
            "{{\"process\":\"server\",\"key\":\"{key}\",\"what\":\"end\",\"owner\":\"{owner}\",\"from\":{from},\"to\":{to},\"outcome\":\"unknown\"}}"
        );
    }

    /// A connection closed between these two times. Replies that it has not received are lost.
    pub fn disconnected(&mut self, client: u64, when: (u64, u64)) {
        // Requests behind a blocked one have not begun.
        let started = node(|node| node.started_requests.get(&client).copied().unwrap_or(0));
        let started = started.saturating_sub(self.answered.get(&client).copied().unwrap_or(0));
        for open in self.open.remove(&client).unwrap_or_default().into_iter().take(started) {
            self.unknown(&open, when);
        }
        for open in self.waits.extract_if(.., |open| open.request.client == client).collect::<Vec<_>>() {
            self.unknown(&open, when);
        }
        let ended: Vec<_> = self.ephemeral.iter().filter(|(of, ..)| *of == client).cloned().collect();
        ended.iter().for_each(|(_, key, owner)| self.may_end(key, owner, when));
        self.ephemeral.retain(|(of, ..)| *of != client);
    }

    /// The run is over.
    pub fn end(&mut self, now: u64) {
        let clients: BTreeSet<u64> =
            self.open.keys().copied().chain(self.waits.iter().map(|it| it.request.client)).collect();
        clients.into_iter().for_each(|client| self.disconnected(client, (now, now)));
    }
}

/// Bytes, escaped for a JSON string.
fn plain(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string().replace('\\', "\\\\")
}
