//! Three servers, two owners, one lock: every interleaving of grants, confirmations, revocations and failovers.
//!
//! Time is discrete: all times are remaining ticks, and tokens are renumbered in each state, so that equivalent states
//! are equal. So neither time nor the number of grants needs a bound. States that differ only in the names of servers
//! or owners are equal, too. [`Rules`] names the bounds that exist.
//!
//! Not modelled: the queue, shortening renewals, sessions' event queues, different clocks. A server notices the close
//! of a connection immediately; a partition isolates a primary from all replicas together; a replica that is not in
//! sync (*Behind*) is not promoted.

use std::hash::Hash;

use stateright::{Model, Property};

/// The length of a lease, in ticks.
pub const LEASE: u8 = 2;
/// The time that the server waits for confirmations, in ticks.
const TIMEOUT: u8 = 1;

/// The active rules, and the bounds.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// `REPLICAS n`; 0: replicas are not asked.
    pub replicas: usize,
    /// Which replica may be promoted.
    pub heir: Heir,
    /// *The confirmed deadline*.
    pub confirmed_deadline: bool,
    /// *One at a time*.
    pub one_at_a_time: bool,
    /// *A confirmation counts only if the hold is still there under that token.*
    pub only_if_held: bool,
    /// The most writes that a replica may be behind.
    pub lag: usize,
    /// The greatest hold count.
    pub holds: u8,
    /// The number of failovers.
    pub failovers: u8,
    /// How often an operator forces the lock.
    pub forces: u8,
    /// How often sessions end and their clients continue.
    pub moves: u8,
}

/// Which replica may be promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heir {
    /// Any replica in sync, however far behind.
    Any,
    /// A replica that has confirmed everything that clients received.
    Confirmed,
}

pub type Owner = usize;
pub type Place = usize;

/// A lock as stored in the keyspace; none: free.
pub type Key = Option<Hold>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hold {
    pub owner: Owner,
    pub holds: u8,
    pub token: u8,
    pub left: u8,
}

/// A request that waits for replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PendingRequest {
    owner: Owner,
    token: u8,
    new: bool,
    at: usize,
    confirmed: bool,
    /// Ticks until it is revoked.
    patience: u8,
    /// How long the client will rely on it, from its request on.
    left: u8,
}

/// The data of a primary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Primary {
    /// The lock after each write that some replica may lack; the last is the current lock.
    log: Vec<Key>,
    asked: Vec<PendingRequest>,
    /// For the bound hold: the deadlines that were written, with their positions in the log, from the last confirmed
    /// one on.
    promised: Vec<(usize, u8)>,
    bound: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Server {
    Primary(Primary),
    /// In sync: its data, its position in the primary's log, and the position that the primary knows of.
    Follower {
        data: Key,
        has: usize,
        heard: Option<usize>,
    },
    /// Not in sync: it confirms nothing, and can't be promoted.
    Behind,
}

/// The hold that an owner relies on, by the replies that it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Belief {
    pub token: u8,
    holds: u8,
    left: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State {
    pub servers: [Server; 3],
    pub primary: Place,
    pub cut: bool,
    /// The position in the primary's log up to which enough replicas have confirmed, so that clients may have replies.
    acknowledged: usize,
    pub beliefs: [Option<Belief>; 2],
    at: [Place; 2],
    /// A hold that an operator forced: its owner's reliance on it is no fault.
    broken: Option<u8>,
    failovers: u8,
    forces: u8,
    moves: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An owner sends a request to its server: a grant or a re-entry.
    Ask(Owner),
    /// It releases one hold.
    Release(Owner),
    /// It releases all but one hold (`HOLDS 1`), and receives that it has that one.
    KeepOne(Owner),
    /// It releases all, and withdraws a pending request, also if it knows of no hold.
    ReleaseAll(Owner),
    /// Its session ends, and it continues at another primary, or with a new session at the same one (`REPLACES`).
    Move(Owner, Place),
    /// A heartbeat: the server promises an owner a remaining time.
    Alive(Owner),
    /// The server renews a hold of an open connection.
    Renew(Place),
    /// A replica applies the next write.
    Replicate(Place),
    /// The primary receives the offset of a replica.
    Confirm(Place),
    /// A confirmed request gets its reply.
    Answer(Place, Owner),
    /// An operator forces the lock.
    Force(Place),
    /// A partition between the primary and its replicas.
    Cut,
    /// The partition ends.
    Heal,
    /// A replica is promoted.
    TakeOver(Place),
    /// A former primary learns of the new one, and follows it.
    ComeBack(Place),
    /// A server has loaded a copy of the primary's data.
    Sync(Place),
    /// Time passes.
    Tick,
}

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let follower = Server::Follower { data: None, has: 0, heard: Some(0) };
        let primary = Server::Primary(Primary { log: vec![None], ..Primary::default() });
        vec![State {
            servers: [primary, follower.clone(), follower],
            primary: 0,
            cut: false,
            acknowledged: 0,
            beliefs: [None; 2],
            at: [0; 2],
            broken: None,
            failovers: 0,
            forces: 0,
            moves: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // Each one copies the state, so most of those that are not possible are left out.
        for owner in 0..2 {
            actions.extend([Action::Ask(owner), Action::ReleaseAll(owner)]);
            if state.beliefs[owner].is_some() {
                actions.extend([Action::Alive(owner), Action::Release(owner), Action::KeepOne(owner)]);
            }
        }
        for (place, server) in state.servers.iter().enumerate() {
            match server {
                Server::Primary(primary) => {
                    actions.extend([Action::Renew(place), Action::Force(place), Action::ComeBack(place)]);
                    actions.extend((0..2).map(|owner| Action::Move(owner, place)));
                    actions.extend(primary.asked.iter().map(|asked| Action::Answer(place, asked.owner)));
                }
                Server::Follower { .. } => {
                    actions.extend([Action::Replicate(place), Action::Confirm(place), Action::TakeOver(place)]);
                }
                Server::Behind => actions.push(Action::Sync(place)),
            }
        }
        actions.extend([Action::Cut, Action::Heal, Action::Tick]);
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        self.act(&mut state, action)?;
        state.forget();
        let state = state.canonical();
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("never two who believe that they hold", |_, state: &State| !state.is_held_twice())]
    }
}

impl Rules {
    /// Applies an action; none: it is not possible.
    fn act(&self, state: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Ask(owner) => self.ask(state, owner),
            Action::Release(owner) => self.release(state, owner, |holds| holds - 1),
            Action::KeepOne(owner) => self.release(state, owner, |_| 1),
            Action::ReleaseAll(owner) => {
                state.beliefs[owner] = None;
                let primary = state.served(owner)?;
                primary.asked.retain(|asked| asked.owner != owner);
                let held = primary.key().is_some_and(|hold| hold.owner == owner);
                if held { self.write(primary, None) } else { Some(()) }
            }
            Action::Move(owner, place) => {
                let here = state.at[owner];
                (state.is_primary(place) && state.moves < self.moves).then_some(())?;
                state.moves += 1;
                let mut asked = Vec::new();
                if let Server::Primary(primary) = &mut state.servers[here] {
                    asked = primary.take_pending(|asked| asked.owner == owner);
                    asked.iter().try_for_each(|asked| self.revoke(primary, asked))?;
                }
                (place != here || !asked.is_empty()).then_some(())?;
                state.at[owner] = place;
                Some(())
            }
            Action::Alive(owner) => {
                let belief = state.beliefs[owner]?;
                let primary = state.served(owner)?;
                let hold = primary.key().filter(|hold| hold.owner == owner && hold.token == belief.token)?;
                (self.replicas > 0 && primary.bound == hold.token).then_some(())?;
                let left = primary.sure()?;
                state.beliefs[owner] = Some(Belief { left: left.max(belief.left), ..belief });
                Some(())
            }
            Action::Renew(place) => {
                let at = state.at;
                let primary = state.a_primary(place)?;
                let hold = primary.key().filter(|hold| hold.token == primary.bound && hold.left < LEASE)?;
                (self.replicas > 0 && at[hold.owner] == place).then_some(())?;
                self.has_room(primary)?;
                self.write(primary, Some(Hold { left: LEASE, ..hold }))?;
                let at = primary.log.len() - 1;
                primary.promised.push((at, LEASE));
                Some(())
            }
            Action::Replicate(place) => {
                (!state.cut).then_some(())?;
                let log = state.current().log.clone();
                let Server::Follower { data, has, .. } = &mut state.servers[place] else { return None };
                *data = *log.get(*has + 1)?;
                *has += 1;
                Some(())
            }
            Action::Confirm(place) => {
                (!state.cut).then_some(())?;
                let Server::Follower { has, heard, .. } = &mut state.servers[place] else { return None };
                *heard = Some(*has);
                let mut heard: Vec<usize> = state.servers.iter().filter_map(Server::heard).collect();
                heard.sort_unstable_by(|a, b| b.cmp(a));
                if let Some(upto) = self.replicas.checked_sub(1).and_then(|others| heard.get(others)).copied() {
                    state.acknowledged = state.acknowledged.max(upto);
                    state.current().confirm(upto);
                }
                Some(())
            }
            Action::Answer(place, owner) => self.answer(state, place, owner),
            Action::Force(place) => {
                (state.forces < self.forces).then_some(())?;
                state.forces += 1;
                let primary = state.a_primary(place)?;
                let hold = primary.key()?;
                let knows = primary.asked.iter().any(|asked| asked.token == hold.token && asked.new);
                self.write(primary, None)?;
                state.broken = if knows { state.broken } else { Some(hold.token) };
                Some(())
            }
            Action::Cut => (!state.cut && state.failovers < self.failovers).then(|| state.cut = true),
            Action::Heal => state.cut.then(|| state.cut = false),
            Action::TakeOver(place) => self.take_over(state, place),
            Action::ComeBack(place) => {
                (place != state.primary && state.is_primary(place)).then(|| state.servers[place] = Server::Behind)
            }
            Action::Sync(place) => {
                (!state.cut && state.servers[place] == Server::Behind).then_some(())?;
                let (data, has) = (state.current().key(), state.current().log.len() - 1);
                state.servers[place] = Server::Follower { data, has, heard: None };
                Some(())
            }
            Action::Tick => self.tick(state),
        }
    }

    fn ask(&self, state: &mut State, owner: Owner) -> Option<()> {
        let token = state.newest() + 1;
        let primary = state.served(owner)?;
        let out = primary.asked.iter().filter(|asked| asked.owner == owner).count();
        (out < if self.one_at_a_time { 1 } else { 2 }).then_some(())?;
        self.has_room(primary)?;
        let before = primary.key();
        let hold = match before {
            None => Hold { owner, holds: 1, token, left: LEASE },
            Some(hold) if hold.owner == owner && hold.holds < self.holds => {
                Hold { holds: hold.holds + 1, left: LEASE, ..hold }
            }
            Some(_) => return None,
        };
        self.write(primary, Some(hold))?;
        let at = primary.log.len() - 1;
        if self.replicas == 0 {
            state.record_belief(owner, hold.token, LEASE);
            return Some(());
        }
        if primary.bound != hold.token {
            // A hold from before a failover has the deadline of its copy.
            primary.promised = before.iter().map(|hold| (0, hold.left)).collect();
            primary.bound = hold.token;
        }
        if !self.confirmed_deadline {
            // A renewal reads the deadline from the key, as if replicas had confirmed it.
            primary.promised.clear();
        }
        primary.promised.push((at, LEASE));
        let (new, left) = (before.is_none(), LEASE);
        let asked = PendingRequest { owner, token: hold.token, new, at, confirmed: false, patience: TIMEOUT, left };
        primary.asked.push(asked);
        Some(())
    }

    /// Lowers the hold count.
    fn release(&self, state: &mut State, owner: Owner, down: fn(u8) -> u8) -> Option<()> {
        let belief = state.beliefs[owner]?;
        let primary = state.served(owner)?;
        let out = primary.asked.iter().any(|asked| asked.owner == owner);
        (!(out && self.one_at_a_time)).then_some(())?;
        let held = primary.key().filter(|hold| hold.owner == owner && hold.token == belief.token);
        let left = held.map_or(0, |hold| down(hold.holds));
        if let Some(hold) = held.filter(|hold| hold.holds > left) {
            self.has_room(primary)?;
            self.write(primary, (left > 0).then_some(Hold { holds: left, ..hold }))?;
        }
        let holds = down(belief.holds).min(left);
        state.beliefs[owner] = (holds > 0).then_some(Belief { holds, ..belief });
        Some(())
    }

    fn answer(&self, state: &mut State, place: Place, owner: Owner) -> Option<()> {
        let only_if_held = self.only_if_held;
        let primary = state.a_primary(place)?;
        let index = primary.asked.iter().position(|asked| asked.owner == owner && asked.confirmed)?;
        let asked = primary.asked.remove(index);
        let held = primary.key().is_some_and(|hold| hold.owner == owner && hold.token == asked.token);
        if held || !only_if_held {
            state.record_belief(owner, asked.token, asked.left);
        }
        Some(())
    }

    fn revoke(&self, primary: &mut Primary, asked: &PendingRequest) -> Option<()> {
        match primary.key().filter(|hold| hold.owner == asked.owner && hold.token == asked.token) {
            Some(_) if asked.new => self.write(primary, None),
            Some(hold) => self.write(primary, (hold.holds > 1).then(|| Hold { holds: hold.holds - 1, ..hold })),
            None => Some(()),
        }
    }

    /// The server's own writes happen however far replicas are behind; clients stop at the bound.
    fn write(&self, primary: &mut Primary, key: Key) -> Option<()> {
        primary.log.push(key);
        Some(())
    }

    fn has_room(&self, primary: &Primary) -> Option<()> {
        (primary.log.len() <= self.lag).then_some(())
    }

    fn take_over(&self, state: &mut State, place: Place) -> Option<()> {
        let Server::Follower { data, has, .. } = state.servers[place] else { return None };
        (state.cut && (self.heir == Heir::Any || has >= state.acknowledged)).then_some(())?;
        let primary = state.current();
        let sure = primary.sure();
        primary.log.drain(..primary.log.len() - 1);
        primary.asked.iter_mut().for_each(|asked| asked.at = 0);
        primary.promised = sure.into_iter().map(|left| (0, left)).collect();
        for server in &mut state.servers {
            if matches!(server, Server::Follower { .. }) {
                *server = Server::Behind;
            }
        }
        state.servers[place] = Server::Primary(Primary { log: vec![data], ..Primary::default() });
        (state.primary, state.cut, state.acknowledged) = (place, false, 0);
        state.failovers += 1;
        Some(())
    }

    fn tick(&self, state: &mut State) -> Option<()> {
        for server in &mut state.servers {
            match server {
                Server::Primary(primary) => self.tick_at(primary)?,
                Server::Follower { data, .. } => tick_key(data),
                Server::Behind => {}
            }
        }
        for belief in &mut state.beliefs {
            *belief = belief.filter(|it| it.left > 1).map(|it| Belief { left: it.left - 1, ..it });
        }
        Some(())
    }

    fn tick_at(&self, primary: &mut Primary) -> Option<()> {
        // Confirmed requests get their replies before time passes; the server processes them first, too.
        primary.asked.iter().all(|asked| !asked.confirmed).then_some(())?;
        primary.log.iter_mut().for_each(tick_key);
        primary.promised.iter_mut().for_each(|(_, left)| *left = left.saturating_sub(1));
        for asked in &mut primary.asked {
            asked.patience = asked.patience.saturating_sub(1);
            asked.left = asked.left.saturating_sub(1);
        }
        let missed = primary.take_pending(|asked| asked.patience == 0);
        missed.iter().try_for_each(|asked| self.revoke(primary, asked))?;
        let over = primary.sure() == Some(0) && primary.key().is_some_and(|hold| hold.token == primary.bound);
        if over && self.confirmed_deadline { self.write(primary, None) } else { Some(()) }
    }
}

fn tick_key(key: &mut Key) {
    *key = key.filter(|hold| hold.left > 1).map(|hold| Hold { left: hold.left - 1, ..hold });
}

impl Primary {
    fn key(&self) -> Key {
        self.log.last().copied().flatten()
    }

    /// The confirmed deadline: the earliest that was written since the last confirmed write.
    fn sure(&self) -> Option<u8> {
        self.promised.iter().map(|(_, left)| *left).min()
    }

    fn confirm(&mut self, upto: usize) {
        for asked in &mut self.asked {
            asked.confirmed |= asked.at <= upto;
        }
        let known = self.promised.iter().rposition(|(at, _)| *at <= upto).unwrap_or(0);
        self.promised.drain(..known);
    }

    /// Of deadlines that will be confirmed together, only the earliest and the last written matter.
    fn forget_promises(&mut self) {
        let mut kept: Vec<(usize, u8)> = Vec::new();
        for (at, left) in std::mem::take(&mut self.promised) {
            let together = kept.partition_point(|(before, _)| *before < at);
            let earliest = kept[together..].iter().map(|(_, left)| *left).min().filter(|earliest| *earliest < left);
            kept.truncate(together);
            kept.extend(earliest.map(|earliest| (at, earliest)));
            kept.push((at, left));
        }
        self.promised = kept;
    }

    fn take_pending(&mut self, which: impl Fn(&PendingRequest) -> bool) -> Vec<PendingRequest> {
        let (taken, left) = self.asked.iter().partition(|asked| which(asked));
        self.asked = left;
        taken
    }
}

impl Server {
    fn heard(&self) -> Option<usize> {
        match self {
            Server::Follower { heard, .. } => *heard,
            _ => None,
        }
    }
}

impl State {
    /// Whether both owners rely on the lock, and no operator has forced it.
    pub fn is_held_twice(&self) -> bool {
        self.beliefs.iter().all(|belief| belief.is_some_and(|belief| Some(belief.token) != self.broken))
    }

    fn is_primary(&self, place: Place) -> bool {
        matches!(self.servers[place], Server::Primary(_))
    }

    fn a_primary(&mut self, place: Place) -> Option<&mut Primary> {
        match &mut self.servers[place] {
            Server::Primary(primary) => Some(primary),
            _ => None,
        }
    }

    fn current(&mut self) -> &mut Primary {
        self.a_primary(self.primary).expect("it is a primary")
    }

    /// The primary that an owner is connected to.
    fn served(&mut self, owner: Owner) -> Option<&mut Primary> {
        self.a_primary(self.at[owner])
    }

    fn record_belief(&mut self, owner: Owner, token: u8, left: u8) {
        let before = self.beliefs[owner].filter(|belief| belief.token == token);
        let (holds, more) = before.map_or((0, 0), |belief| (belief.holds, belief.left));
        let belief = Belief { token, holds: holds + 1, left: left.max(more) };
        self.beliefs[owner] = (belief.left > 0).then_some(belief);
    }

    fn newest(&mut self) -> u8 {
        let mut newest = 0;
        self.each_token(|token| newest = newest.max(*token));
        newest
    }

    fn each_token(&mut self, mut each: impl FnMut(&mut u8)) {
        for server in &mut self.servers {
            match server {
                Server::Primary(primary) => {
                    primary.log.iter_mut().flatten().for_each(|hold| each(&mut hold.token));
                    primary.asked.iter_mut().for_each(|asked| each(&mut asked.token));
                    each(&mut primary.bound);
                }
                Server::Follower { data, .. } => data.iter_mut().for_each(|hold| each(&mut hold.token)),
                Server::Behind => {}
            }
        }
        self.beliefs.iter_mut().flatten().for_each(|belief| each(&mut belief.token));
        self.broken.iter_mut().for_each(each);
    }

    /// Makes states equal that differ only in irrelevant parts.
    fn forget(&mut self) {
        let last = self.current().log.len() - 1;
        let known = self.servers.iter().filter_map(|server| match server {
            Server::Follower { has, heard, .. } => Some(heard.unwrap_or(last).min(*has)),
            _ => None,
        });
        let known = known.min().unwrap_or(last);
        let acknowledged = self.acknowledged;
        let primary = self.current();
        primary.log.drain(..known);
        primary.asked.iter_mut().for_each(|asked| asked.at = asked.at.saturating_sub(known));
        primary.promised.iter_mut().for_each(|(at, _)| *at = at.saturating_sub(known));
        primary.forget_promises();
        self.acknowledged = acknowledged.saturating_sub(known);
        for server in &mut self.servers {
            match server {
                Server::Follower { has, heard, .. } => {
                    *has -= known;
                    *heard = heard.map(|heard| heard - known);
                }
                Server::Primary(primary) => {
                    if primary.key().is_none_or(|hold| hold.token != primary.bound) {
                        (primary.bound, primary.promised) = (0, Vec::new());
                    }
                }
                Server::Behind => {}
            }
        }
        let place = self.primary;
        for (other, server) in self.servers.iter_mut().enumerate() {
            if let Server::Primary(primary) = server
                && other != place
            {
                // An old primary: no replica follows it, and it receives no more confirmations.
                primary.log.drain(..primary.log.len() - 1);
                primary.promised = primary.sure().into_iter().map(|left| (0, left)).collect();
            }
        }
        let mut tokens = vec![0];
        self.each_token(|token| tokens.push(*token));
        tokens.sort_unstable();
        tokens.dedup();
        self.each_token(|token| *token = tokens.iter().position(|it| it == token).unwrap_or(0) as u8);
    }

    /// The same state with servers and owners numbered by their state: two servers, or both owners, may change places.
    fn canonical(self) -> Self {
        let swapped = self.clone().with_owners_swapped().with_servers_sorted();
        self.with_servers_sorted().min(swapped)
    }

    fn with_owners_swapped(mut self) -> Self {
        self.beliefs.swap(0, 1);
        self.at.swap(0, 1);
        self.each_owner(|owner| *owner = 1 - *owner);
        self
    }

    fn with_servers_sorted(mut self) -> Self {
        let mut order = [0, 1, 2];
        order.sort_by_key(|&place| (&self.servers[place], place == self.primary, self.at.map(|at| at == place)));
        let number = |place: Place| order.iter().position(|it| *it == place).unwrap_or(place);
        (self.primary, self.at) = (number(self.primary), self.at.map(number));
        self.servers = order.map(|place| std::mem::replace(&mut self.servers[place], Server::Behind));
        self
    }

    fn each_owner(&mut self, mut each: impl FnMut(&mut Owner)) {
        for server in &mut self.servers {
            match server {
                Server::Primary(primary) => {
                    primary.log.iter_mut().flatten().for_each(|hold| each(&mut hold.owner));
                    primary.asked.iter_mut().for_each(|asked| each(&mut asked.owner));
                }
                Server::Follower { data, .. } => data.iter_mut().for_each(|hold| each(&mut hold.owner)),
                Server::Behind => {}
            }
        }
    }
}
