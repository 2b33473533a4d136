//! Plays a script to a server, and lets the judges look after every turn of its event loop.

use crate::history::History;
use crate::redis::turn::{Arrival, turn, wakes_at};
use crate::redis::{Bytes, Generation, Replica, Slots, node, slot_of, start};
use crate::resp::Reply;
use crate::rules::{Judge, Violation};
use crate::scenes;
use crate::script::{self, Line, Moves, Name};
use crate::server::ctx::run_id;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a run amounts to.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// How many requests were carried out.
    pub commands: u64,
    /// How many turns the event loop made.
    pub turns: u64,
    /// What each client was told, in order.
    pub told: Vec<(Name, Reply)>,
    /// What the replicas were sent.
    pub stream: Vec<Vec<Bytes>>,
    /// How much of `told` and of `stream` there was when the script was over, and only the end of the run was left.
    pub script: (usize, usize),
    /// What the clients saw of their locks.
    pub history: String,
    /// The ids of the clients.
    pub ids: BTreeMap<u64, Name>,
}

/// How a run ended that broke a rule.
#[derive(Clone, Debug)]
pub struct Broken {
    /// Which rule, and how.
    pub violation: Violation,
    /// Its run until then.
    pub run: Run,
    /// How many lines of the script had been played.
    pub lines: usize,
}

/// A connection of a client, as the client sees it.
struct Connection {
    id: u64,
    received: Bytes,
    has_vanished: bool,
    /// The last token that it was told.
    token: u64,
    /// What it was told last, since it asked.
    told: Option<Reply>,
    /// It has yet to begin with `LOCK.SESSION`; the reply to that is still to come.
    is_new: bool,
    is_beginning: bool,
}

/// Somebody who plays a script.
pub struct Player {
    connections: BTreeMap<Name, Connection>,
    /// Those that begin with `LOCK.SESSION`.
    sessions: BTreeSet<Name>,
    /// Those whose clients have closed them: the server may not have seen it yet.
    left: Vec<Connection>,
    arrivals: Vec<Arrival>,
    judge: Judge,
    history: History,
    run: Run,
    /// What the scene is about that is being played.
    rule: &'static str,
    /// Whether what clients are told is kept.
    keeps: bool,
}

/// Plays a script to a new server of this generation: `Err` if a rule is broken. At the end, everybody goes.
pub fn play(generation: Generation, lines: &[Line], keeps: bool) -> Result<Run, Box<Broken>> {
    let in_cluster = lines.iter().any(|line| matches!(line, Line::Slot(..)));
    start(generation, in_cluster.then(Slots::default));
    let mut player = Player {
        connections: BTreeMap::new(),
        sessions: script::sessions(lines),
        left: Vec::new(),
        arrivals: Vec::new(),
        judge: Judge::new(),
        history: History::default(),
        run: Run::default(),
        rule: scenes::TOLD,
        keeps,
    };
    let mut played = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        for line in lines {
            played += 1;
            player.line(line)?;
        }
        player.run.script = (player.run.told.len(), player.run.stream.len());
        player.end()
    }));
    player.history.end(node(|node| node.clock.mono));
    if !player.history.is_unclear {
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
    Err(Box::new(Broken { violation, run: player.run, lines: played }))
}

impl Player {
    fn line(&mut self, line: &Line) -> Result<(), Violation> {
        match line {
            Line::Request(name, words) => {
                self.greet(*name, words)?;
                let words = words.iter().map(|word| self.word(word)).collect::<Vec<_>>();
                let connection = self.connection(*name);
                connection.told = None;
                let id = connection.id;
                self.judge.asked(id, &words);
                if self.keeps {
                    self.history.asked(id, &words, node(|node| node.clock.mono));
                }
                self.run.commands += 1;
                match self.arrivals.last_mut() {
                    Some(Arrival::Requests(last, requests)) if *last == id => requests.push(words),
                    _ => self.arrivals.push(Arrival::Requests(id, vec![words])),
                }
            }
            Line::End(name) => {
                if let Some(connection) = self.connections.remove(name) {
                    self.judge.vanished(connection.id);
                    self.arrivals.push(Arrival::End(connection.id));
                    self.left.push(Connection { has_vanished: true, ..connection });
                }
            }
            Line::Vanish(name) => {
                if let Some(connection) = self.connections.get_mut(name) {
                    connection.has_vanished = true;
                    self.judge.vanished(connection.id);
                }
            }
            Line::Deaf(name) | Line::Hears(name) => {
                let (id, deaf) = (self.connection(*name).id, matches!(line, Line::Deaf(_)));
                node(|node| node.clients.get_mut(&id).map(|client| client.is_deaf = deaf));
                self.judge.deaf();
            }
            Line::Pass(ms) => self.pass(*ms)?,
            Line::Clock(ms) => {
                node(|node| node.clock.wall = node.clock.wall.saturating_add_signed(ms * 1000));
                self.judge.stepped(*ms);
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
                self.judge.replicas_changed();
            }
            Line::Good(count) => node(|node| {
                node.replicas.iter_mut().enumerate().for_each(|(place, replica)| replica.is_good = place < *count);
            }),
            Line::Misconf(state) => node(|node| node.misconf = *state),
            Line::Cluster(state) => node(|node| {
                if let Some(slots) = &mut node.slots {
                    slots.is_down = !*state;
                }
            }),
            Line::Slot(key, moves) => self.slot(slot_of(&script::bytes(key)), *moves)?,
            Line::Scene(name) => self.rule = scenes::rule(name),
            Line::Over => self.rule = scenes::TOLD,
            Line::Told(name, text) => {
                let told = self.connection(*name).told.as_ref();
                let told = told.map_or("nothing".into(), |reply| format!("{reply:?}"));
                if !told.starts_with(text) {
                    return Err(Violation::new(self.rule, format!("{name} was told {told}, and not {text}")));
                }
            }
        }
        Ok(())
    }

    fn slot(&mut self, slot: u16, moves: Moves) -> Result<(), Violation> {
        if moves == Moves::Goes {
            self.arrivals.push(Arrival::Taken(slot));
            let arrivals = std::mem::take(&mut self.arrivals);
            return self.turn(arrivals);
        }
        node(|node| {
            if let Some(slots) = &mut node.slots {
                slots.elsewhere.remove(&slot);
                slots.migrating.remove(&slot);
                slots.importing.remove(&slot);
                slots.unowned.remove(&slot);
                match moves {
                    Moves::Moves => slots.elsewhere.insert(slot),
                    Moves::Migrates => slots.migrating.insert(slot),
                    Moves::Arrives => slots.importing.insert(slot),
                    Moves::Unowned => slots.unowned.insert(slot),
                    Moves::Comes | Moves::Goes => false,
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
            let is_beginning = self.sessions.contains(&name);
            let (received, has_vanished, token, told) = (Vec::new(), false, 0, None);
            let is_new = is_beginning;
            self.connections.insert(name, Connection { id, received, has_vanished, token, told, is_beginning, is_new });
        }
        self.connections.entry(name).or_insert_with(|| unreachable!())
    }

    /// The sessions that a request is about begin, in a turn of their own.
    fn greet(&mut self, name: Name, words: &[String]) -> Result<(), Violation> {
        let named = |word: &String| {
            let mut letters = word.chars();
            let is_name = letters.next().is_some_and(|sign| "$#@".contains(sign)) && word.chars().count() == 2;
            letters.next().filter(|_| is_name)
        };
        let mut greetings = Vec::new();
        for name in words.iter().filter_map(named).chain([name]) {
            let connection = self.connection(name);
            if std::mem::take(&mut connection.is_new) {
                let (id, words) = (connection.id, vec![b"LOCK.SESSION".to_vec()]);
                self.judge.asked(id, &words);
                if self.keeps {
                    self.history.asked(id, &words, node(|node| node.clock.mono));
                }
                greetings.push(Arrival::Requests(id, vec![words]));
            }
        }
        if !greetings.is_empty() {
            let arrivals = std::mem::take(&mut self.arrivals);
            self.turn(greetings)?;
            self.arrivals = arrivals;
        }
        Ok(())
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

    /// Lets `ms` pass, with as many turns as the server makes meanwhile: at least one.
    fn pass(&mut self, ms: u64) -> Result<(), Violation> {
        let end = node(|node| node.clock.mono) + ms * 1000;
        let arrivals = std::mem::take(&mut self.arrivals);
        self.turn(arrivals)?;
        loop {
            let (now, next) = (node(|node| node.clock.mono), wakes_at());
            if next > end {
                node(|node| node.clock.advance(end.saturating_sub(now)));
                break;
            }
            node(|node| node.clock.advance(next - now));
            self.turn(Vec::new())?;
        }
        if ms >= crate::rules::CALM { self.judge.calm() } else { Ok(()) }
    }

    fn turn(&mut self, arrivals: Vec<Arrival>) -> Result<(), Violation> {
        self.judge.before_turn()?;
        let before = node(|node| node.clock.mono);
        turn(arrivals);
        self.run.turns += 1;
        let left = self.left.iter_mut().map(|it| (&' ', it));
        for (name, connection) in self.connections.iter_mut().chain(left) {
            let sent = node(|node| match node.clients.get_mut(&connection.id) {
                Some(client) => Some(std::mem::take(&mut client.sent)),
                None => node.farewells.remove(&connection.id),
            });
            connection.received.extend(sent.unwrap_or_default());
            while let Some(reply) = Reply::take(&mut connection.received) {
                self.judge.sent(&reply);
                if connection.has_vanished {
                    continue;
                }
                // What was published answers nothing.
                if reply.elements().first().is_none_or(|first| first.bytes() != b"message") {
                    self.judge.hears(connection.id, &reply)?;
                }
                if self.keeps {
                    self.history.told(connection.id, &reply, node(|node| node.clock.mono));
                }
                if std::mem::take(&mut connection.is_beginning) {
                    continue;
                }
                connection.token = reply.last_token().unwrap_or(connection.token);
                if self.keeps {
                    self.run.told.push((*name, reply.clone()));
                }
                connection.told = Some(reply);
            }
        }
        if self.keeps {
            let ended = self.run.ids.keys().filter(|id| node(|node| !node.clients.contains_key(id)));
            let now = node(|node| node.clock.mono);
            ended.for_each(|id| self.history.gone(*id, (before, now)));
        }
        self.left.retain(|it| node(|node| node.clients.contains_key(&it.id)));
        if self.keeps {
            // Judges may collect what was sent; the count goes on.
            node(|node| {
                let new = (node.stream.offset() as usize).saturating_sub(self.run.stream.len());
                let sent = &node.stream.sent;
                self.run.stream.extend_from_slice(&sent[sent.len().saturating_sub(new)..]);
            });
        }
        self.judge.after_turn()
    }

    /// Time passes until nothing more can happen; sessions read what is left; then everybody goes.
    fn end(&mut self) -> Result<(), Violation> {
        self.pass(0)?;
        all_is_well();
        self.pass(2_000)?;
        all_is_well();
        self.pass(1_000)?;
        let names: Vec<Name> = self.connections.keys().copied().collect();
        for ms in [500, 1] {
            for name in &names {
                let it = self.connections.get(name).filter(|it| !it.has_vanished);
                let idle = it.is_some_and(|it| self.judge.is_idle(it.id) && self.judge.is_session(it.id));
                if idle {
                    self.line(&Line::request(*name, "LOCK.EVENTS"))?;
                }
            }
            self.pass(ms)?;
        }
        self.judge.losses_are_told()?;
        for name in names {
            self.line(&Line::End(name))?;
        }
        self.pass(0)?;
        all_is_well();
        self.pass(1_000)?;
        self.judge.nothing_is_left()
    }
}

/// Ends pauses and refusals, so that what is still to be done can be done.
fn all_is_well() {
    node(|node| {
        node.paused_until = 0;
        node.misconf = false;
        node.min_replicas = 0;
        if let Some(slots) = &mut node.slots {
            slots.is_down = false;
            slots.unowned.clear();
        }
        node.clients.values_mut().for_each(|client| client.is_deaf = false);
    });
}

/// What `LOCK.SESSION` says on a connection.
pub fn identity(client: u64) -> Bytes {
    let digits = run_id();
    let random = u128::from_str_radix(&digits[..32], 16).unwrap_or_default();
    let uuid = uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid();
    format!("{uuid}:{client}").into_bytes()
}
