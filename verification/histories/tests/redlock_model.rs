//! RedLock's protocol (`docs/redlock.md`), explored exhaustively. Clients request, send the fence, hold and release.
//! Messages are late or lost. Leases end as soon as a clock allows. Servers have different clocks, and restart.
//!
//! Time passes in steps. A lost message is one that is never delivered. The order of a client's requests and its timeouts are left
//! open: only the majority decides. A client stands for one acquisition.

use std::time::Instant;

use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

/// Tokens that a server can issue in a step of time without exceeding its clock.
const TOKENS: u8 = 8;

/// The injected bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The greatest token of the majority is not sent to the majority.
    FenceIsNotSent,
    /// A client with a majority holds the lock, however late it learns of that.
    ValidityIsNotChecked,
    /// A request that is cancelled before its reply was read is released instead of withdrawn.
    ReleasedBeforeRead,
    /// A server that granted after the fence was chosen counts for the beginning of the hold.
    LateGrantsCount,
    /// Half of the servers, rounded down, are enough.
    MinorityCounts,
    /// The reply to a fence counts from when the fence was last sent, also if it is the reply to an earlier one.
    RepetitionCounts,
}

/// Server behaviour that violates the protocol's assumptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Servers {
    /// They keep running.
    Live,
    /// One restarts with its grants. It is down for longer than clocks differ.
    Restart,
    /// It restarts earlier than that.
    RestartQuickly,
    /// One restarts without its grants.
    Forget,
    /// It stays down until every lease has expired.
    ForgetAndStayAway,
    /// A lease ends earlier, by the client's clock, than the drift allows.
    DriftApart,
}

/// Whether the replies to grants are read at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replies {
    AllRead,
    SomeLost,
}

#[derive(Clone, Debug)]
struct Protocol {
    clients: usize,
    /// By how many steps each server's clock is ahead.
    ahead: &'static [u8],
    /// For how many steps a client counts on a lease, by its own clock: the lease less the drift.
    valid: u8,
    time: u8,
    servers: Servers,
    answers: Replies,
    /// How often a client sends its fence to a server again, because it has not read the reply.
    repeats: u8,
    fault: Option<Fault>,
    /// The steps before the exploration: some counterexamples are long.
    begin: &'static [Action],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    servers: Vec<Server>,
    clients: Vec<Client>,
    /// The fence of the last hold.
    fence: u8,
    restarts_left: u8,
    repeats_left: u8,
    wrong: Option<Violation>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Server {
    holder: Option<u8>,
    /// When the lease began.
    since: u8,
    /// The last token.
    token: u8,
    back_at: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Client {
    phase: Phase,
    fence: u8,
    /// When the requests that its validity counts from were sent, and the end of the validity.
    asked: u8,
    until: u8,
    /// Its exchange with each server.
    talks: Vec<Exchange>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    Idle,
    Asking,
    Fencing,
    Holding,
    /// It has released everything, or has cancelled.
    Done,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Exchange {
    ask: Message,
    /// The replies that the client has read.
    token: Option<u8>,
    fence: Message,
    sent: u8,
    /// The fence was confirmed, and the reply is pending.
    confirming: bool,
    confirmed: bool,
    cancel: Message,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    #[default]
    Unsent,
    Flying,
    Arrived,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Violation {
    FenceDecreased,
    HeldAfterRelease,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    Ask(usize),
    /// A request arrives, and the reply is read or lost.
    Grant {
        client: usize,
        server: usize,
        read: bool,
    },
    SendFence(usize),
    /// Over another connection, so that no reply to the earlier one is read.
    RepeatFence {
        client: usize,
        server: usize,
    },
    Confirm {
        client: usize,
        server: usize,
    },
    Read {
        client: usize,
        server: usize,
    },
    Release(usize),
    Cancel {
        client: usize,
        server: usize,
    },
    Expire(usize),
    Restart(usize),
}

impl Protocol {
    fn majority(&self) -> usize {
        match self.fault {
            Some(Fault::MinorityCounts) => self.ahead.len() / 2,
            _ => self.ahead.len() / 2 + 1,
        }
    }

    /// For how many steps a server keeps a grant, at least.
    fn kept(&self) -> u8 {
        if self.servers == Servers::DriftApart { self.valid - 1 } else { self.valid }
    }

    fn next_token(&self, state: &State, server: usize) -> u8 {
        (state.servers[server].token + 1).max((state.now + self.ahead[server]) * TOKENS)
    }

    /// For how long a restarting server is down.
    fn away(&self) -> u8 {
        let clocks = self.ahead.iter().max().map_or(0, |most| most + 1);
        match self.servers {
            Servers::Restart => clocks,
            Servers::ForgetAndStayAway => clocks.max(self.valid),
            Servers::Live | Servers::RestartQuickly | Servers::Forget | Servers::DriftApart => 0,
        }
    }

    fn act(&self, state: &mut State, action: Action) {
        let now = state.now;
        match action {
            Action::Tick => state.now += 1,
            Action::Ask(client) => {
                let client = &mut state.clients[client];
                (client.phase, client.asked) = (Phase::Asking, now);
                client.talks.iter_mut().for_each(|exchange| exchange.ask = Message::Flying);
            }
            Action::Grant { client, server, read } => {
                let token = self.next_token(state, server);
                state.servers[server] = Server { holder: Some(client as u8), since: now, token, back_at: 0 };
                let Client { phase, talks, .. } = &mut state.clients[client];
                let exchange = &mut talks[server];
                exchange.ask = Message::Arrived;
                if *phase != Phase::Done && read {
                    exchange.token = Some(token);
                }
                if exchange.cancel == Message::Arrived {
                    state.wrong = Some(Violation::HeldAfterRelease);
                }
                // A server that grants later joins.
                let joins = matches!(phase, Phase::Fencing | Phase::Holding) && read;
                if joins && self.fault != Some(Fault::FenceIsNotSent) {
                    (exchange.fence, exchange.sent) = (Message::Flying, now);
                }
            }
            Action::SendFence(client) => self.send_fence(state, client),
            Action::RepeatFence { client, server } => {
                state.repeats_left -= 1;
                let exchange = &mut state.clients[client].talks[server];
                (exchange.fence, exchange.sent) = (Message::Flying, now);
                exchange.confirming &= self.fault == Some(Fault::RepetitionCounts);
            }
            Action::Confirm { client, server } => {
                let fence = state.clients[client].fence;
                let exchange = &mut state.clients[client].talks[server];
                exchange.fence = Message::Arrived;
                let at = &mut state.servers[server];
                if at.holder == Some(client as u8) {
                    at.since = now;
                    at.token = at.token.max(fence);
                    exchange.confirming = true;
                }
            }
            Action::Read { client, server } => {
                let exchange = &mut state.clients[client].talks[server];
                (exchange.confirming, exchange.confirmed) = (false, true);
                self.count(state, client);
            }
            Action::Release(client) => {
                let client = &mut state.clients[client];
                client.phase = Phase::Done;
                for exchange in &mut client.talks {
                    let nothing = exchange.ask == Message::Unsent;
                    exchange.cancel = if nothing { Message::Arrived } else { Message::Flying };
                }
            }
            Action::Cancel { client, server } => {
                let exchange = &mut state.clients[client].talks[server];
                exchange.cancel = Message::Arrived;
                if self.fault != Some(Fault::ReleasedBeforeRead) {
                    exchange.ask = Message::Arrived;
                }
                if state.servers[server].holder == Some(client as u8) {
                    state.servers[server].holder = None;
                }
            }
            Action::Expire(server) => state.servers[server].holder = None,
            Action::Restart(server) => {
                state.restarts_left -= 1;
                let at = &mut state.servers[server];
                at.back_at = now + self.away();
                if matches!(self.servers, Servers::Forget | Servers::ForgetAndStayAway) {
                    at.holder = None;
                }
                // Only holds contain earlier tokens.
                if at.holder.is_none() {
                    at.token = 0;
                }
            }
        }
    }

    fn send_fence(&self, state: &mut State, number: usize) {
        let now = state.now;
        let client = &mut state.clients[number];
        client.fence = client.talks.iter().filter_map(|exchange| exchange.token).max().unwrap_or_default();
        client.phase = Phase::Fencing;
        if self.fault == Some(Fault::FenceIsNotSent) {
            if now < client.asked + self.valid {
                let until = client.asked + self.valid;
                self.begin(state, number, until);
            }
            return;
        }
        for exchange in client.talks.iter_mut().filter(|exchange| exchange.token.is_some()) {
            (exchange.fence, exchange.sent) = (Message::Flying, now);
        }
    }

    /// A confirmation was read: a client with a valid majority of them holds the lock. At the beginning, servers that granted after the
    /// fence was chosen do not count.
    fn count(&self, state: &mut State, number: usize) {
        let client = &mut state.clients[number];
        let (begins, fence) = (client.phase == Phase::Fencing, client.fence);
        let late =
            |exchange: &Exchange| begins && self.fault != Some(Fault::LateGrantsCount) && exchange.token > Some(fence);
        let mut ends: Vec<u8> = client
            .talks
            .iter()
            .filter(|exchange| exchange.confirmed && !late(exchange))
            .map(|exchange| exchange.sent + self.valid)
            .collect();
        ends.sort_unstable_by(|one, other| other.cmp(one));
        let Some(end) = ends.get(self.majority() - 1).copied() else { return };
        let end = if self.fault == Some(Fault::ValidityIsNotChecked) { state.now + self.valid } else { end };
        match client.phase {
            Phase::Fencing if state.now < end => self.begin(state, number, end),
            Phase::Holding if state.now < client.until => client.until = client.until.max(end),
            _ => {}
        }
    }

    fn begin(&self, state: &mut State, number: usize, until: u8) {
        let client = &mut state.clients[number];
        (client.phase, client.until) = (Phase::Holding, until);
        if client.fence <= state.fence {
            state.wrong = Some(Violation::FenceDecreased);
        }
        state.fence = state.fence.max(client.fence);
    }

    /// The same state without irrelevant parts, and with equal clients and servers in a canonical order.
    fn canonical(&self, mut state: State) -> State {
        let State { clients, servers, now, .. } = &mut state;
        for (number, client) in clients.iter_mut().enumerate() {
            if client.phase != Phase::Done {
                continue;
            }
            (client.asked, client.until) = (0, 0);
            for (exchange, server) in client.talks.iter_mut().zip(servers.iter()) {
                let held = server.holder == Some(number as u8);
                let fence = if held && exchange.fence == Message::Flying { Message::Flying } else { Message::Arrived };
                *exchange = Exchange { ask: exchange.ask, fence, cancel: exchange.cancel, ..Exchange::default() };
            }
            if client.talks.iter().all(|exchange| exchange.fence != Message::Flying) {
                client.fence = 0;
            }
        }
        for server in servers.iter_mut() {
            if server.back_at <= *now {
                server.back_at = 0;
            }
            if server.holder.is_none() {
                server.since = 0;
            }
        }
        sort_clients(&mut state);
        self.sort_servers(&mut state);
        state
    }

    fn sort_servers(&self, state: &mut State) {
        let key = |state: &State, server: usize| {
            let talks: Vec<Exchange> = state.clients.iter().map(|client| client.talks[server]).collect();
            (self.ahead[server], state.servers[server], talks)
        };
        let mut order: Vec<usize> = (0..self.ahead.len()).collect();
        order.sort_by_cached_key(|server| key(state, *server));
        state.servers = order.iter().map(|server| state.servers[*server]).collect();
        for client in &mut state.clients {
            client.talks = order.iter().map(|server| client.talks[*server]).collect();
        }
    }
}

fn sort_clients(state: &mut State) {
    let mut order: Vec<usize> = (0..state.clients.len()).collect();
    order.sort_by(|one, other| state.clients[*one].cmp(&state.clients[*other]));
    for server in &mut state.servers {
        server.holder = server.holder.map(|holder| {
            let place = order.iter().position(|client| *client == usize::from(holder));
            place.unwrap_or_default() as u8
        });
    }
    state.clients = order.iter().map(|client| state.clients[*client].clone()).collect();
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let talks = vec![Exchange::default(); self.ahead.len()];
        let client = Client { phase: Phase::Idle, fence: 0, asked: 0, until: 0, talks };
        let state = State {
            now: 0,
            servers: vec![Server::default(); self.ahead.len()],
            clients: vec![client; self.clients],
            fence: 0,
            restarts_left: u8::from(!matches!(self.servers, Servers::Live | Servers::DriftApart)),
            repeats_left: self.repeats,
            wrong: None,
        };
        let next = |state: State, action: &Action| {
            let mut possible = Vec::new();
            self.actions(&state, &mut possible);
            assert!(possible.contains(action), "{action:?} is not one of {possible:?}");
            self.next_state(&state, *action).expect("the step changes the state")
        };
        vec![self.begin.iter().fold(state, next)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // Time begins with the first request.
        let begun = state.clients.iter().any(|client| client.phase != Phase::Idle);
        actions.extend((begun && state.now < self.time).then_some(Action::Tick));
        for (server, at) in state.servers.iter().enumerate() {
            let over = at.holder.is_some() && at.since + self.kept() <= state.now;
            actions.extend(over.then_some(Action::Expire(server)));
            actions.extend((state.restarts_left > 0).then_some(Action::Restart(server)));
        }
        let mut idle = false;
        for (number, client) in state.clients.iter().enumerate() {
            match client.phase {
                // Clients that have not begun are equal.
                Phase::Idle if !std::mem::replace(&mut idle, true) => actions.push(Action::Ask(number)),
                Phase::Asking if client.talks.iter().filter(|it| it.token.is_some()).count() >= self.majority() => {
                    actions.extend([Action::SendFence(number), Action::Release(number)]);
                }
                Phase::Asking | Phase::Fencing | Phase::Holding => actions.push(Action::Release(number)),
                Phase::Idle | Phase::Done => {}
            }
            for (server, exchange) in client.talks.iter().enumerate() {
                let at = &state.servers[server];
                actions.extend(exchange.confirming.then_some(Action::Read { client: number, server }));
                let is_asked = matches!(client.phase, Phase::Fencing | Phase::Holding);
                let is_open = is_asked && exchange.fence != Message::Unsent && !exchange.confirmed;
                actions.extend(
                    (is_open && state.repeats_left > 0).then_some(Action::RepeatFence { client: number, server }),
                );
                if state.now < at.back_at {
                    continue;
                }
                if exchange.ask == Message::Flying && at.holder.is_none() {
                    actions.push(Action::Grant { client: number, server, read: true });
                    if client.phase != Phase::Done && self.answers == Replies::SomeLost {
                        actions.push(Action::Grant { client: number, server, read: false });
                    }
                }
                if exchange.fence == Message::Flying {
                    actions.push(Action::Confirm { client: number, server });
                }
                if exchange.cancel == Message::Flying {
                    actions.push(Action::Cancel { client: number, server });
                }
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        // After a violation, later states are not of interest.
        if last.wrong.is_some() {
            return None;
        }
        let mut state = last.clone();
        self.act(&mut state, action);
        let state = self.canonical(state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_HOLDS, |_, state: &State| holding(state) <= 1),
            Property::always(FENCES_GROW, |_, state: &State| state.wrong != Some(Violation::FenceDecreased)),
            Property::always(RELEASED, |_, state: &State| state.wrong != Some(Violation::HeldAfterRelease)),
            Property::sometimes("a client holds the lock after another has released it", |_, state: &State| {
                holding(state) == 1 && state.clients.iter().any(|client| client.phase == Phase::Done)
            }),
            Property::sometimes(
                "a client holds the lock after another one's validity has ended",
                |_, state: &State| {
                    let over = |client: &Client| client.phase == Phase::Holding && client.until <= state.now;
                    holding(state) == 1 && state.clients.iter().any(over)
                },
            ),
            Property::sometimes("a client waits for a holder", |_, state: &State| {
                holding(state) == 1 && state.clients.iter().any(|client| client.phase == Phase::Asking)
            }),
        ]
    }
}

/// The number of holders, as they see it.
fn holding(state: &State) -> usize {
    state.clients.iter().filter(|client| client.phase == Phase::Holding && state.now < client.until).count()
}

const ONE_HOLDS: &str = "at most one holder";
const FENCES_GROW: &str = "fences increase";
const RELEASED: &str = "a released lock is not held";

/// Explores all states, until a property fails or after `at_most` states. Returns the failures with their steps.
fn explore(protocol: Protocol, at_most: usize) -> Vec<(&'static str, Vec<Action>)> {
    let (label, begin) = (format!("{protocol:?}"), Instant::now());
    let mut checker = protocol.checker().threads(2).finish_when(HasDiscoveries::AnyFailures);
    if at_most < EVERYTHING {
        checker = checker.target_state_count(at_most);
    }
    let checker = checker.spawn_bfs().join();
    println!(
        "{label}: {} states, {} steps deep, in {:?}",
        checker.unique_state_count(),
        checker.max_depth() - 1,
        begin.elapsed()
    );
    let always = |name: &&'static str| checker.model().property(name).expectation == Expectation::Always;
    let failed = checker.discoveries().into_iter().filter(|(name, _)| always(name));
    let failed: Vec<_> = failed.map(|(name, path)| (name, path.into_actions())).collect();
    if failed.is_empty() && at_most == EVERYTHING {
        checker.assert_properties();
    }
    failed
}

/// The steps by which this property fails.
fn counterexample(protocol: Protocol, broken: &'static str) -> Option<Vec<Action>> {
    let (label, begin) = (format!("{protocol:?}"), Instant::now());
    let found = HasDiscoveries::AllOf([broken].into());
    let checker = protocol.checker().threads(2).finish_when(found).spawn_bfs().join();
    let way = checker.discovery(broken).map(|path| path.into_actions());
    println!("{label}: {} states in {:?}: {way:?}", checker.unique_state_count(), begin.elapsed());
    way
}

/// A lease counts for one step of time.
const SMALL: Protocol = Protocol {
    clients: 2,
    ahead: &[0, 0, 1],
    valid: 1,
    time: 1,
    servers: Servers::Live,
    answers: Replies::SomeLost,
    repeats: 0,
    fault: None,
    begin: &[],
};
/// The first half of the steps to a client that learns of its majority too late.
const LEARNS_LATE: &[Action] = &[
    Action::Ask(0),
    Action::Grant { client: 1, server: 0, read: true },
    Action::Grant { client: 1, server: 0, read: true },
    Action::SendFence(1),
    Action::Confirm { client: 1, server: 0 },
    Action::Tick,
    Action::Expire(1),
    Action::Ask(0),
];
/// The first half of the steps to a fence that was chosen before another hold, for a majority that came after it.
const CHOSEN_EARLY: &[Action] = &[
    Action::Ask(0),
    Action::Grant { client: 1, server: 2, read: true },
    Action::Tick,
    Action::Expire(2),
    Action::Ask(0),
    Action::Grant { client: 0, server: 0, read: true },
    Action::SendFence(0),
    Action::Grant { client: 0, server: 0, read: true },
    Action::Grant { client: 0, server: 2, read: true },
    Action::SendFence(0),
];
/// One client has chosen its fence, and another one requests later.
const CHOSEN_AS_ANOTHER_REQUESTS: &[Action] = &[
    Action::Ask(0),
    Action::Tick,
    Action::Ask(0),
    Action::Grant { client: 0, server: 0, read: true },
    Action::Grant { client: 0, server: 0, read: true },
    Action::SendFence(0),
    Action::Grant { client: 0, server: 2, read: true },
];
/// One client holds the lock, also at the server whose clock is ahead, and another one's requests are pending.
const HELD_WHERE_CLOCKS_DIFFER: &[Action] = &[
    Action::Ask(0),
    Action::Tick,
    Action::Ask(0),
    Action::Grant { client: 0, server: 0, read: true },
    Action::Grant { client: 1, server: 0, read: true },
    Action::Grant { client: 1, server: 2, read: true },
    Action::SendFence(1),
    Action::Confirm { client: 1, server: 1 },
    Action::Read { client: 1, server: 1 },
    Action::Confirm { client: 1, server: 2 },
    Action::Read { client: 1, server: 2 },
];
/// One server of the majority has confirmed the fence, and another client requests.
const CONFIRMED_BY_ONE: &[Action] = &[
    Action::Ask(0),
    Action::Grant { client: 1, server: 0, read: true },
    Action::Grant { client: 1, server: 0, read: true },
    Action::SendFence(1),
    Action::Confirm { client: 1, server: 0 },
    Action::Ask(0),
];
/// Both servers of the majority have confirmed the fence. Neither reply was read, and a step later the fence is sent again.
const SENT_AGAIN: &[Action] = &[
    Action::Ask(0),
    Action::Grant { client: 1, server: 0, read: true },
    Action::Grant { client: 1, server: 0, read: true },
    Action::SendFence(1),
    Action::Confirm { client: 1, server: 0 },
    Action::Ask(0),
    Action::Confirm { client: 1, server: 0 },
    Action::Tick,
];
/// A lease counts for two steps, so events can happen early and late in it.
const LARGE: Protocol = Protocol { valid: 2, time: 3, ..SMALL };
/// If the exploration can't be complete: this many steps, first from the states that need the fewest.
const MANY: usize = 200_000;
const EVERYTHING: usize = usize::MAX;

#[test]
fn two_clients_and_three_servers_violate_nothing() {
    assert_eq!(explore(SMALL, MANY), vec![]);
    assert_eq!(explore(LARGE, MANY), vec![]);
}

#[test]
fn states_after_first_confirmation_violate_nothing() {
    assert_eq!(explore(Protocol { begin: CONFIRMED_BY_ONE, ..SMALL }, EVERYTHING), vec![]);
}

#[test]
fn repeated_fences_violate_nothing() {
    let once = Protocol { repeats: 1, ..SMALL };
    assert_eq!(explore(once.clone(), MANY), vec![]);
    assert_eq!(explore(Protocol { begin: CONFIRMED_BY_ONE, ..once }, MANY), vec![]);
    let right = Protocol { repeats: 2, answers: Replies::AllRead, begin: SENT_AGAIN, ..SMALL };
    assert_eq!(explore(right.clone(), MANY), vec![]);
    let fault = Some(Fault::RepetitionCounts);
    assert!(counterexample(Protocol { fault, ..right }, ONE_HOLDS).is_some());
}

#[test]
fn more_clients_or_servers_violate_nothing() {
    assert_eq!(explore(Protocol { clients: 3, ..SMALL }, MANY), vec![]);
    assert_eq!(explore(Protocol { ahead: &[0, 0, 0, 1, 1], ..SMALL }, MANY), vec![]);
}

#[test]
fn restarts_with_grants_or_after_every_lease_violate_nothing() {
    for servers in [Servers::Restart, Servers::ForgetAndStayAway] {
        let protocol = Protocol { servers, time: 2, ..SMALL };
        assert_eq!(explore(protocol.clone(), MANY), vec![]);
        let (answers, begin) = (Replies::AllRead, HELD_WHERE_CLOCKS_DIFFER);
        assert_eq!(explore(Protocol { answers, begin, ..protocol }, EVERYTHING), vec![]);
    }
}

#[test]
fn violated_assumptions_break_exclusion() {
    for (servers, broken, begin) in [
        (Servers::Forget, ONE_HOLDS, CHOSEN_AS_ANOTHER_REQUESTS),
        (Servers::RestartQuickly, FENCES_GROW, HELD_WHERE_CLOCKS_DIFFER),
        (Servers::DriftApart, ONE_HOLDS, HELD_WHERE_CLOCKS_DIFFER),
    ] {
        let right = Protocol { answers: Replies::AllRead, begin, ..SMALL };
        assert_eq!(explore(right.clone(), MANY), vec![], "{begin:?}");
        assert!(counterexample(Protocol { servers, ..right }, broken).is_some(), "{servers:?}");
    }
}

#[test]
fn each_injected_bug_is_found() {
    for (fault, broken, begin) in [
        (Fault::FenceIsNotSent, FENCES_GROW, &[][..]),
        (Fault::ValidityIsNotChecked, ONE_HOLDS, LEARNS_LATE),
        (Fault::ReleasedBeforeRead, RELEASED, &[]),
        (Fault::LateGrantsCount, FENCES_GROW, CHOSEN_EARLY),
        (Fault::MinorityCounts, ONE_HOLDS, &[]),
    ] {
        let right = Protocol { answers: Replies::AllRead, begin, ..SMALL };
        if !begin.is_empty() {
            assert_eq!(explore(right.clone(), MANY), vec![], "{begin:?}");
        }
        assert!(counterexample(Protocol { fault: Some(fault), ..right }, broken).is_some(), "{fault:?}");
    }
}
