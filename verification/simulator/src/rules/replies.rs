//! Replies: each is recorded when its client receives it, and processed at the end of the iteration.

use super::fairness::is_same_set;
use super::records::{Arrival, OpenRequest, Wait};
use super::{CODES, Checker, HEARTBEAT, NO_RE_ENTRY, ONE_REPLY, REPLACED, SESSIONS, Violation};
use crate::redis::{Bytes, REFUSALS, node};
use crate::request::Request;
use crate::resp::Reply;

impl Checker {
    /// Only a session reads events, and renewed holds belong to a session.
    pub(super) fn check_session(&mut self, client: u64, request: &Request, reply: &Reply) -> Result<(), Violation> {
        let is_refused = matches!(reply, Reply::Error(error) if error.starts_with("NOSESSION"));
        let is_error = matches!(reply, Reply::Error(_));
        let connection = self.connections.entry(client).or_default();
        if request.command == "session" && !is_error {
            connection.is_session = true;
        }
        let needs = request.command == "events" || request.watchdog || request.contention;
        let is_wrong = if request.over_session {
            is_refused && !request.of_session
        } else {
            needs && !request.of_session && !is_error
        };
        if is_wrong {
            return Err(Violation::new(SESSIONS, format!("{request:?} got {reply:?}")));
        }
        Ok(())
    }

    /// A client received a reply. It is processed at the end of the iteration, with all other replies, in the order of
    /// the requests.
    pub fn reply_received(&mut self, client: u64, reply: &Reply) -> Result<(), Violation> {
        self.record_log();
        let Some(open) = self.connections.get_mut(&client).and_then(|it| it.open.pop_front()) else {
            return match reply {
                // Sent to a blocked client whose connection is about to close.
                Reply::Error(error) if error.starts_with("UNBLOCKED") => Ok(()),
                _ => Err(Violation::new(ONE_REPLY, format!("client {client} received {reply:?} without a request"))),
            };
        };
        self.replies.push((client, open, reply.clone()));
        Ok(())
    }

    /// A session waits for the outcome of a request.
    pub(super) fn record_wait(&mut self, open: &OpenRequest, request: &Request, is_optional: bool) {
        let renews = request.command.contains("renew");
        let is_same = |wait: &&mut Wait| {
            let it = &wait.request;
            wait.open.db == open.db
                && (it.client, &it.owner) == (request.client, &request.owner)
                && if renews { it.keys == request.keys } else { is_same_set(&it.keys, &request.keys) }
                // A renewal is repeated with the same options, by either command if it names one lock.
                && (!renews || *it == Request { command: it.command.clone(), ..request.clone() })
                && renews == it.command.contains("renew")
        };
        match self.waits.iter_mut().find(is_same) {
            Some(known) => {
                // It may be the same request, or a new one sent before the first one's outcome was read.
                let flags = |it: &Request| (it.watchdog, it.ephemeral, it.contention, it.replicas);
                let is_unsure = known.request.is_unsure || flags(&known.request) != flags(request);
                let replicas = known.request.replicas.max(request.replicas);
                let lease = |it: &Request| it.lease.unwrap_or(30_000);
                let lease = Some(lease(&known.request).min(lease(request)));
                let longest = |it: &Request| it.longest.unwrap_or(30_000);
                let longest = Some(longest(&known.request).max(longest(request)));
                let limit = known.request.limit.max(request.limit);
                // The first of them set the waited time; which one was first is unknown.
                let waited = known.request.waited.max(request.waited);
                let new = known.request.new && request.new;
                let holds = if known.request.holds == request.holds { request.holds } else { Some(0) };
                // The grant may be for the last of them, long after the first was sent.
                let wait = request.wait.or((!renews).then_some(0));
                let (watchdog, ephemeral) =
                    (known.request.watchdog || request.watchdog, known.request.ephemeral || request.ephemeral);
                let terms =
                    Request { is_unsure, lease, longest, limit, waited, new, holds, wait, replicas, ..request.clone() };
                known.request = Request { watchdog, ephemeral, ..terms };
                known.repeats += 1;
                if renews {
                    known.left.extend(request.keys.iter().cloned());
                }
                // A client that received `WAITING` late may have sent its request first.
                known.latest = known.latest.max(open.began.unwrap_or(0));
                if open.began < known.open.began {
                    known.open = open.clone();
                }
            }
            None => {
                self.waits.push(Wait { is_optional, ..Wait::of(open.began.unwrap_or(0), open, request) });
            }
        }
    }

    /// Processes the replies of this iteration in the order of their requests; events come last.
    pub(super) fn process_replies(&mut self) -> Result<(), Violation> {
        let mut replies = std::mem::take(&mut self.replies);
        let is_read = |open: &OpenRequest| open.runs.iter().any(|request| request.command == "events");
        replies.sort_by_key(|(_, open, _)| (is_read(open), open.began));
        for (client, open, reply) in replies {
            // If it is not there, the request had already ended, and this reply was received late.
            let began = open.began.unwrap_or(0);
            let is_its = |wait: &Wait| wait.open.began.is_some_and(|at| (began..began + open.runs.len()).contains(&at));
            let unacknowledged: Vec<Wait> = self.unacknowledged.extract_if(.., |wait| is_its(wait)).collect();
            let replies = if open.is_exec { reply.elements() } else { std::slice::from_ref(&reply) };
            for (position, (request, reply)) in (began..).zip(open.runs.iter().zip(replies)) {
                check_reply(request, reply)?;
                self.check_session(client, request, reply)?;
                match (request.command.as_str(), reply) {
                    ("events", Reply::Array(events)) => {
                        let kind = |event: &Reply| event.elements().first().map(|kind| kind.bytes().to_vec());
                        let signs = events.iter().filter(|event| kind(event).as_deref() == Some(b"heartbeat")).count();
                        let is_last = events.last().and_then(kind).as_deref() == Some(b"heartbeat");
                        if signs != usize::from(request.heartbeat) || is_last != request.heartbeat {
                            return Err(Violation::new(HEARTBEAT, format!("{events:?}")));
                        }
                        for event in events {
                            self.read_event(client, event.elements(), &open)?;
                        }
                    }
                    ("events", Reply::Null) if request.heartbeat => return Err(Violation::new(HEARTBEAT, "null")),
                    (_, Reply::Line(line)) if line == "WAITING" => {
                        if let Some(unacknowledged) =
                            unacknowledged.iter().find(|wait| wait.open.began == Some(position))
                        {
                            self.record_wait(&unacknowledged.open, &unacknowledged.request, unacknowledged.is_optional);
                        }
                    }
                    _ => self.received.push((
                        position,
                        open.clone(),
                        request.clone(),
                        request.keys.clone(),
                        reply.clone(),
                    )),
                }
            }
        }
        self.process_outcomes()?;
        self.process_unbound_events()?;
        for (session, said, request) in std::mem::take(&mut self.heartbeats) {
            self.apply_heartbeat(session, &said, request);
        }
        self.process_lost_events()
    }

    /// Processes the outcomes of requests, in the order of the requests.
    pub(super) fn process_outcomes(&mut self) -> Result<(), Violation> {
        let mut received = std::mem::take(&mut self.received);
        received.sort_by_key(|(position, ..)| *position);
        self.replied = received.iter().map(|(_, open, request, ..)| (open.db, request.clone())).collect();
        for (position, open, request, keys, reply) in received {
            match (request.command.as_str(), reply) {
                ("acquire" | "macquire", Reply::Integer(token)) => {
                    let is_new =
                        |key: &&Bytes| !self.beliefs.contains_key(&(open.db, (*key).clone(), request.owner.clone()));
                    let new = keys.iter().filter(is_new).cloned().collect();
                    if request.new && self.tokens.get(&(token as u64)).is_some_and(|(_, seen)| *seen < position) {
                        return Err(Violation::new(NO_RE_ENTRY, format!("token {token} existed before {request:?}")));
                    }
                    keys.iter().for_each(|key| self.record_grant(position, &open, &request, key, token as u64));
                    self.answered.push((request.owner.clone(), token as u64));
                    let arrival = Arrival::of(position, &open, &request);
                    self.granted.push((arrival, open.db, Request { keys: new, ..request }, keys.len(), token as u64));
                }
                ("renew" | "mrenew", Reply::Integer(token)) => {
                    keys.iter().for_each(|key| self.record_grant(position, &open, &request, key, token as u64));
                }
                ("mrenew", Reply::Array(tokens)) => {
                    for (key, token) in keys.iter().zip(tokens) {
                        match token.number() {
                            Some(token) => self.record_grant(position, &open, &request, key, token),
                            None => self.forget_move(position, &request, std::slice::from_ref(key)),
                        }
                    }
                }
                // Redirected after the replicas had confirmed the request: the binding has been made. (So it may be if no node
                // serves the slot by then, unless the request was refused when it arrived.)
                ("acquire" | "macquire" | "renew" | "mrenew", Reply::Error(error))
                    if (error.starts_with("MOVED")
                        || error.starts_with("CLUSTERDOWN") && position <= self.iteration)
                        && request.replicas > 0
                        && request.binds() =>
                {
                    self.abandoned.push((open.db, request));
                }
                ("acquire" | "macquire" | "renew" | "mrenew", Reply::Null | Reply::Error(_)) => {
                    self.forget_move(position, &request, &keys);
                }
                ("release", Reply::Integer(0)) if request.lease.is_some() => {
                    let hold = (open.db, keys[0].clone(), request.owner.clone());
                    let ends = open.at + request.lease.unwrap_or(0);
                    let belief = self.beliefs.get_mut(&hold).filter(|it| it.since < position);
                    belief.into_iter().for_each(|it| {
                        (it.promised, it.deadline) = (ends, Some(ends));
                        // (The longer lease before hides whether the watchdog had renewed the hold.)
                        it.renewed = it.renewed.max(open.at);
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Checks a reply on its own, without the history of the run.
pub(super) fn check_reply(request: &Request, reply: &Reply) -> Result<(), Violation> {
    let detail = |event: &Reply| event.elements().get(5).map(|it| String::from_utf8_lossy(it.bytes()).into_owned());
    let refusals: Vec<String> = match reply {
        Reply::Error(error) => vec![error.clone()],
        Reply::Array(events) if request.command == "events" => events.iter().filter_map(detail).collect(),
        _ => Vec::new(),
    };
    let is_code = |code: Option<&str>| REFUSALS.iter().any(|its| its.split(' ').next() == code);
    for refusal in refusals.iter().filter(|it| is_code(it.split(' ').next())) {
        if !REFUSALS.contains(&refusal.as_str()) {
            return Err(Violation::new(CODES, format!("{request:?} got {refusal}")));
        }
    }
    let is_here = |client: &&u64| node(|node| node.clients.contains_key(client));
    match request.replaces.iter().find(is_here).filter(|_| matches!(reply, Reply::Bulk(_))) {
        Some(client) => Err(Violation::new(REPLACED, format!("client {client} is still connected"))),
        None => Ok(()),
    }
}
