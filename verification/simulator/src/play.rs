//! Plays a script, and lets the checker look after every event-loop iteration.

use crate::history::History;
use crate::redis::event_loop::{Arrival, run_iteration, wakes_at};
use crate::redis::{Bytes, Generation, Replica, Slots, node, slot_of, start};
use crate::request::identity;
use crate::resp::Reply;
use crate::rules::{Checker, Violation};
use crate::scenarios;
use crate::script::{self, Line, Name, SlotChange};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// How many requests ran.
    pub commands: u64,
    /// The number of event-loop iterations.
    pub iterations: u64,
    /// The replies of each client, in order.
    pub replies: Vec<(Name, Reply)>,
    /// The replication stream.
    pub stream: Vec<Vec<Bytes>>,
    /// The lengths of `replies` and `stream` at the end of the script, before the run is wound up.
    pub script: (usize, usize),
    /// What the clients observed, as a history.
    pub history: String,
    /// The clients by connection id.
    pub ids: BTreeMap<u64, Name>,
}

/// A run that violated an invariant.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The violation.
    pub violation: Violation,
    /// The run until then.
    pub run: Run,
    /// How many lines of the script had been played.
    pub lines: usize,
}

/// A client's end of a connection.
struct Connection {
    id: u64,
    received: Bytes,
    has_vanished: bool,
    /// The last token that it received.
    token: u64,
    /// The last reply since its last request.
    reply: Option<Reply>,
    /// It has yet to send `LOCK.SESSION`; its reply is outstanding.
    needs_session: bool,
    awaits_session: bool,
}

/// Plays a script.
pub struct Player {
    connections: BTreeMap<Name, Connection>,
    /// The clients that begin with `LOCK.SESSION`.
    sessions: BTreeSet<Name>,
    /// Connections that the client has closed. The server may not have noticed it yet.
    closed: Vec<Connection>,
    arrivals: Vec<Arrival>,
    checker: Checker,
    history: History,
    run: Run,
    /// The invariant that the current scenario shows.
    rule: &'static str,
    /// Whether replies are recorded.
    records_replies: bool,
    /// Whether the run ends at the first violation.
    ends_at_violation: bool,
}

/// Plays a script on a new server of this generation. All clients disconnect at the end.
///
/// # Errors
///
/// The first violated invariant.
pub fn play(generation: Generation, lines: &[Line], records_replies: bool) -> Result<Run, Box<Failure>> {
    play_until(generation, lines, records_replies, true)
}

/// The history of a script that is played to its end, whatever it violates: for checkers that know only what clients
/// observe.
pub fn history(generation: Generation, lines: &[Line]) -> String {
    play_until(generation, lines, true, false).map_or_else(|failure| failure.run.history, |run| run.history)
}

fn play_until(
    generation: Generation,
    lines: &[Line],
    records_replies: bool,
    ends_at_violation: bool,
) -> Result<Run, Box<Failure>> {
    let in_cluster = lines.iter().any(|line| matches!(line, Line::Slot(..)));
    start(generation, in_cluster.then(Slots::default));
    let mut player = Player {
        connections: BTreeMap::new(),
        sessions: script::sessions(lines),
        closed: Vec::new(),
        arrivals: Vec::new(),
        checker: Checker::new(),
        history: History::default(),
        run: Run::default(),
        rule: scenarios::EXPECTED,
        records_replies,
        ends_at_violation,
    };
    let mut played = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        for line in lines {
            played += 1;
            player.line(line)?;
        }
        player.run.script = (player.run.replies.len(), player.run.stream.len());
        player.end()
    }));
    player.history.end(node(|node| node.clock.mono));
    if !player.history.is_ambiguous {
        player.run.history = std::mem::take(&mut player.history.text);
    }
    let violation = match result {
        Ok(Ok(())) => return Ok(player.run),
        Ok(Err(violation)) => violation,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Violation::new("a callback never panics", text.unwrap_or("a panic"))
        }
    };
    Err(Box::new(Failure { violation, run: player.run, lines: played }))
}

impl Player {
    fn line(&mut self, line: &Line) -> Result<(), Violation> {
        match line {
            Line::Request(name, words) => {
                self.open_sessions(*name, words)?;
                let words = words.iter().map(|word| self.word(word)).collect::<Vec<_>>();
                let connection = self.connection(*name);
                connection.reply = None;
                let id = connection.id;
                self.checker.request_sent(id, &words);
                if self.records_replies {
                    self.history.request_sent(id, &words, node(|node| node.clock.mono));
                }
                self.run.commands += 1;
                match self.arrivals.last_mut() {
                    Some(Arrival::Requests(last, requests)) if *last == id => requests.push(words),
                    _ => self.arrivals.push(Arrival::Requests(id, vec![words])),
                }
            }
            Line::End(name) => {
                if let Some(connection) = self.connections.remove(name) {
                    self.checker.client_vanished(connection.id);
                    self.arrivals.push(Arrival::End(connection.id));
                    self.closed.push(Connection { has_vanished: true, ..connection });
                }
            }
            Line::Vanish(name) => {
                if let Some(connection) = self.connections.get_mut(name) {
                    connection.has_vanished = true;
                    self.checker.client_vanished(connection.id);
                }
            }
            Line::StopReading(name) | Line::ResumeReading(name) => {
                let (id, is_not_reading) = (self.connection(*name).id, matches!(line, Line::StopReading(_)));
                node(|node| node.clients.get_mut(&id).map(|client| client.is_not_reading = is_not_reading));
                self.checker.client_stopped_reading();
            }
            Line::Pass(ms) => self.pass(*ms)?,
            Line::Clock(ms) => {
                node(|node| node.clock.wall = node.clock.wall.saturating_add_signed(ms * 1000));
                self.checker.clock_stepped(*ms);
            }
            Line::Replicas(delays) => {
                node(|node| {
                    let confirmed = node.stream.offset();
                    let replica = |delay: &Option<u64>| Replica {
                        confirmed,
                        delay: *delay,
                        is_good: true,
                        confirms_at: VecDeque::new(),
                    };
                    node.replicas = delays.iter().map(replica).collect();
                });
                self.checker.replicas_changed();
            }
            Line::Good(count) => node(|node| {
                node.replicas
                    .iter_mut()
                    .enumerate()
                    .for_each(|(position, replica)| replica.is_good = position < *count);
            }),
            Line::Misconf(state) => node(|node| node.misconf = *state),
            Line::Cluster(state) => node(|node| {
                if let Some(slots) = &mut node.slots {
                    slots.is_down = !*state;
                }
            }),
            Line::Slot(key, moves) => self.slot(slot_of(&script::bytes(key)), *moves)?,
            Line::Scenario(name) => self.rule = scenarios::rule(name),
            Line::EndScenario => self.rule = scenarios::EXPECTED,
            Line::Expect(name, text) => {
                let received = self.connection(*name).reply.as_ref();
                let received = received.map_or("nothing".into(), |reply| format!("{reply:?}"));
                if !received.starts_with(text) {
                    return Err(Violation::new(self.rule, format!("{name} received {received}, expected {text}")));
                }
            }
        }
        Ok(())
    }

    fn slot(&mut self, slot: u16, moves: SlotChange) -> Result<(), Violation> {
        if matches!(moves, SlotChange::Moves | SlotChange::Goes) {
            self.checker.slot_moved(slot);
        }
        if moves == SlotChange::Goes {
            self.arrivals.push(Arrival::SlotTaken(slot));
            let arrivals = std::mem::take(&mut self.arrivals);
            return self.iteration(arrivals);
        }
        node(|node| {
            if let Some(slots) = &mut node.slots {
                slots.elsewhere.remove(&slot);
                slots.migrating.remove(&slot);
                slots.importing.remove(&slot);
                slots.unowned.remove(&slot);
                match moves {
                    SlotChange::Moves => slots.elsewhere.insert(slot),
                    SlotChange::Migrates => slots.migrating.insert(slot),
                    SlotChange::Arrives => slots.importing.insert(slot),
                    SlotChange::Unowned => slots.unowned.insert(slot),
                    SlotChange::Comes | SlotChange::Goes => false,
                };
            }
        });
        Ok(())
    }

    fn connection(&mut self, name: Name) -> &mut Connection {
        let is_open = |it: &Connection| node(|node| node.clients.contains_key(&it.id));
        if !self.connections.get(&name).is_some_and(is_open) {
            let id = node(|node| node.connect());
            self.run.ids.insert(id, name);
            let awaits_session = self.sessions.contains(&name);
            let (received, has_vanished, token, reply) = (Vec::new(), false, 0, None);
            let needs_session = awaits_session;
            self.connections
                .insert(name, Connection { id, received, has_vanished, token, reply, awaits_session, needs_session });
        }
        self.connections.entry(name).or_insert_with(|| unreachable!())
    }

    /// Opens the sessions that a request names, in an iteration of their own. Repeats that for connections that the
    /// server closes meanwhile.
    fn open_sessions(&mut self, name: Name, words: &[String]) -> Result<(), Violation> {
        let named = |word: &String| {
            let mut letters = word.chars();
            let is_name = letters.next().is_some_and(|sign| "$#@".contains(sign)) && word.chars().count() == 2;
            letters.next().filter(|_| is_name)
        };
        loop {
            let mut sessions = Vec::new();
            for name in words.iter().filter_map(named).chain([name]) {
                let connection = self.connection(name);
                if std::mem::take(&mut connection.needs_session) {
                    let (id, words) = (connection.id, vec![b"LOCK.SESSION".to_vec()]);
                    self.checker.request_sent(id, &words);
                    if self.records_replies {
                        self.history.request_sent(id, &words, node(|node| node.clock.mono));
                    }
                    sessions.push(Arrival::Requests(id, vec![words]));
                }
            }
            if sessions.is_empty() {
                return Ok(());
            }
            let arrivals = std::mem::take(&mut self.arrivals);
            self.iteration(sessions)?;
            self.arrivals = arrivals;
        }
    }

    fn word(&mut self, word: &str) -> Bytes {
        let mut name = word.chars();
        match (name.next(), name.next(), name.next()) {
            (Some('$'), Some(name), None) => identity(self.connection(name).id),
            (Some('#'), Some(name), None) => self.connection(name).id.to_string().into_bytes(),
            (Some('@'), Some(name), None) => self.connection(name).token.to_string().into_bytes(),
            _ => script::bytes(word),
        }
    }

    /// Lets `ms` pass, with all event-loop iterations that the server makes meanwhile: at least one.
    fn pass(&mut self, ms: u64) -> Result<(), Violation> {
        let end = node(|node| node.clock.mono) + ms * 1000;
        let arrivals = std::mem::take(&mut self.arrivals);
        self.iteration(arrivals)?;
        loop {
            let (now, next) = (node(|node| node.clock.mono), wakes_at());
            if next > end {
                node(|node| node.clock.advance(end.saturating_sub(now)));
                break;
            }
            node(|node| node.clock.advance(next - now));
            self.iteration(Vec::new())?;
        }
        let checked = if ms >= crate::rules::IDLE_TIME { self.checker.check_idle() } else { Ok(()) };
        self.after(checked)
    }

    /// The result of a check, if the run ends at the first violation.
    fn after(&self, checked: Result<(), Violation>) -> Result<(), Violation> {
        if self.ends_at_violation { checked } else { Ok(()) }
    }

    fn iteration(&mut self, arrivals: Vec<Arrival>) -> Result<(), Violation> {
        let checked = self.checker.before_iteration();
        self.after(checked)?;
        let before = node(|node| node.clock.mono);
        run_iteration(arrivals);
        self.run.iterations += 1;
        let closed = self.closed.iter_mut().map(|it| (&' ', it));
        for (name, connection) in self.connections.iter_mut().chain(closed) {
            let sent = node(|node| match node.clients.get_mut(&connection.id) {
                Some(client) => Some(std::mem::take(&mut client.sent)),
                None => node.final_output.remove(&connection.id),
            });
            connection.received.extend(sent.unwrap_or_default());
            while let Some(reply) = Reply::take(&mut connection.received) {
                self.checker.bytes_sent(&reply);
                if connection.has_vanished {
                    continue;
                }
                // A published message is no reply.
                if reply.elements().first().is_none_or(|first| first.bytes() != b"message") {
                    let checked = self.checker.reply_received(connection.id, &reply);
                    if self.ends_at_violation {
                        checked?;
                    }
                }
                if self.records_replies {
                    self.history.reply_received(connection.id, &reply, node(|node| node.clock.mono));
                }
                if std::mem::take(&mut connection.awaits_session) {
                    continue;
                }
                connection.token = reply.last_token().unwrap_or(connection.token);
                if self.records_replies {
                    self.run.replies.push((*name, reply.clone()));
                }
                connection.reply = Some(reply);
            }
        }
        if self.records_replies {
            let ended = self.run.ids.keys().filter(|id| node(|node| !node.clients.contains_key(id)));
            let now = node(|node| node.clock.mono);
            ended.for_each(|id| self.history.disconnected(*id, (before, now)));
        }
        self.closed.retain(|it| node(|node| node.clients.contains_key(&it.id)));
        if self.records_replies {
            // The checker may have collected the sent commands; the offset continues.
            node(|node| {
                let new = (node.stream.offset() as usize).saturating_sub(self.run.stream.len());
                let sent = &node.stream.sent;
                self.run.stream.extend_from_slice(&sent[sent.len().saturating_sub(new)..]);
            });
        }
        let checked = self.checker.after_iteration();
        self.after(checked)
    }

    /// Winds the run up: time passes until nothing more can happen, sessions read their events, and all clients
    /// disconnect.
    fn end(&mut self) -> Result<(), Violation> {
        self.pass(0)?;
        end_refusals();
        self.pass(2_000)?;
        end_refusals();
        self.pass(1_000)?;
        let names: Vec<Name> = self.connections.keys().copied().collect();
        for ms in [500, 1] {
            for name in &names {
                let it = self.connections.get(name).filter(|it| !it.has_vanished);
                let idle = it.is_some_and(|it| self.checker.is_idle(it.id) && self.checker.is_session(it.id));
                if idle {
                    self.line(&Line::request(*name, "LOCK.EVENTS"))?;
                }
            }
            self.pass(ms)?;
        }
        let checked = self.checker.losses_are_notified();
        self.after(checked)?;
        for name in names {
            self.line(&Line::End(name))?;
        }
        self.pass(0)?;
        end_refusals();
        self.pass(1_000)?;
        let checked = self.checker.nothing_is_left();
        self.after(checked)
    }
}

/// Ends pauses and refusals of writes, so that pending work can finish.
fn end_refusals() {
    node(|node| {
        node.paused_until = 0;
        node.misconf = false;
        node.min_replicas = 0;
        if let Some(slots) = &mut node.slots {
            slots.is_down = false;
            slots.unowned.clear();
        }
        node.clients.values_mut().for_each(|client| client.is_not_reading = false);
    });
}
