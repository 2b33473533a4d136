//! The core: requests and holds, and the pair of connections for them.

use crate::alarms::Alarms;
use crate::claim::{About, Call, Claim, Hold, Kind, Moved, Rank, Renewal, Stage};
use crate::pair::{self, Advice, Event, Greeted, Pair, Sent};
use crate::terms::certain;
use crate::{Bytes, Channel, Id, Input, LossReason, Millis, Outcome, Output, Reply, Settings, Terms, Wait};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The pause before a request is repeated.
const AGAIN: Millis = 100;
/// The longest first pause between two sessions; it doubles.
const FIRST_PAUSE: Millis = 20;
/// The longest pause, if no lease is so short that a sixteenth of it is less.
const LONGEST_PAUSE: Millis = 1_000;
/// How often the time limit is doubled at most, from the shortest one to the longest.
const DOUBLED: u32 = 5;
/// The limits of silence once the server has sent a heartbeat.
const SHORTEST_LIMIT: Millis = 50;
const LONGEST_LIMIT: Millis = 1_000;
/// The reason of a loss arrives on another connection than the reply that shows it: how long the core waits for it.
const TOLD_WITHIN: Millis = 1_000;
/// The version of the protocol that this client speaks.
const PROTOCOL: u64 = 4;
/// A wake-up that is late by more than this means that the process was paused.
const LATE: Millis = 200;

/// The key holds another type. Nothing is left of the lock, whichever arrives first: this reply, or
/// the event of its loss on the other connection.
fn is_overwritten(error: &str) -> bool {
    error.starts_with("WRONGTYPE")
}

/// The number of no call.
const NOBODY: Id = 0;

/// A client at one server.
#[derive(Debug)]
pub struct Core {
    settings: Settings,
    now: Millis,
    outputs: VecDeque<Output>,
    claims: BTreeMap<Id, Claim>,
    owners: BTreeMap<Bytes, Id>,
    calls: BTreeMap<Id, Call>,
    /// Claims that may have something to send, the first first.
    ready: BTreeSet<(Rank, Millis, Id)>,
    /// When to look at which claim or call again.
    alarms: Alarms,
    pair: Option<Pair>,
    pairs: u64,
    /// How many `LOCK.EVENTS` were sent, over all pairs.
    nexts: u64,
    /// Sessions that may not have ended.
    replaced: Vec<Bytes>,
    /// No pair is opened before.
    opens_at: Millis,
    /// No pair is opened without a pause before.
    at_once_from: Millis,
    pause: Millis,
    doubled: u32,
    /// The last wake-up time that the driver was given.
    wakes_at: Option<Millis>,
    /// This process was paused: until then no hold is lost for want of a session.
    asks_until: Millis,
    random: u64,
    /// How many unwanted claims are not released yet.
    unwanted: usize,
    /// The server's default lease, and within how many ms it answers a `LOCK.EVENTS`, by its last heartbeat.
    default_lease: Millis,
    pace: Option<Millis>,
    in_cluster: bool,
    is_closed: bool,
}

impl Core {
    /// A client without requests: nothing is opened before the first.
    pub fn new(settings: Settings) -> Self {
        Self {
            random: settings.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            settings,
            now: 0,
            outputs: VecDeque::new(),
            claims: BTreeMap::new(),
            owners: BTreeMap::new(),
            calls: BTreeMap::new(),
            ready: BTreeSet::new(),
            alarms: Alarms::default(),
            pair: None,
            pairs: 0,
            nexts: 0,
            replaced: Vec::new(),
            opens_at: 0,
            at_once_from: 0,
            pause: FIRST_PAUSE,
            doubled: 0,
            wakes_at: None,
            asks_until: 0,
            unwanted: 0,
            default_lease: 0,
            pace: None,
            in_cluster: false,
            is_closed: false,
        }
    }

    /// The same at one server of a cluster: what another one serves moves to that one's core.
    pub fn in_cluster(settings: Settings) -> Self {
        Self { in_cluster: true, ..Self::new(settings) }
    }

    /// An input at this time.
    pub fn step(&mut self, now: Millis, input: Input) {
        self.now = self.now.max(now);
        if self.wakes_at.is_some_and(|at| self.now > at.saturating_add(LATE)) {
            self.begin_anew();
        }
        match input {
            Input::Acquire { call, by, keys, terms, wait } => self.acquire(call, by, keys, terms, wait),
            Input::Release { call, hold, within } => self.release(call, hold, within),
            Input::Renew { call, hold, lease, fence, within } => {
                // One at a time; a call whose caller is gone does not count.
                let is_open = |renewal: &Renewal| self.calls.contains_key(&renewal.call);
                let is_free = !self.claims.get(&hold).and_then(|it| it.renewal.as_ref()).is_some_and(is_open);
                self.about_hold(call, About::Renew, hold, within, |claim| {
                    if is_free {
                        claim.renewal = Some(Renewal { call, lease, fence, is_sent: false });
                    }
                    is_free
                });
            }
            Input::Check { call, hold, within } => {
                if self.is_held(hold, self.now) {
                    self.outputs.push_back(Output::Ended { call, outcome: Outcome::Held });
                } else {
                    // What can be answered without the server is answered now.
                    self.claim_is_late(hold);
                    self.about_hold(call, About::Check(hold), hold, within, |claim| {
                        claim.checks.push(call);
                        true
                    });
                }
            }
            Input::Keep { hold, idle } => self.keep(hold, idle),
            Input::Use { call, hold, most } => self.use_again(call, hold, most),
            Input::Request { call, words, within } => {
                let only_looks = words.first().is_some_and(|word| word == b"LOCK.INFO");
                self.begin(call, About::Request { words, not_before: 0, again: only_looks }, Some(within));
            }
            Input::Drop { call } => self.drop_call(call),
            Input::Close { call, within } => self.close(call, within),
            Input::Opened { pair } => self.opened(pair),
            Input::Received { pair, channel, bytes } => self.received(pair, channel, &bytes),
            Input::Replied { pair, channel, reply } => self.says(pair, channel, reply),
            Input::Leave { id } => self.leave(id, "MOVED".into()),
            Input::Take { moved } => self.take_over(*moved),
            Input::Ended { pair } if self.is_current(pair) => self.end_pair(false),
            Input::Ended { .. } => {}
            Input::Wake => {
                self.wakes_at = None;
                self.judge_times();
            }
        }
        self.open();
        self.send();
        self.set_alarm();
    }

    /// The next output. Call it until there is none, after every step.
    pub fn take(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Whether this hold is certain at this time.
    pub fn is_held(&self, hold: Id, now: Millis) -> bool {
        self.held_until(hold).is_some_and(|until| now < until)
    }

    /// Until when this hold is certain, as far as is known now. `None`: there is no such hold.
    pub fn held_until(&self, hold: Id) -> Option<Millis> {
        let claim =
            self.claims.get(&hold).filter(|claim| claim.wanted && claim.hold().is_some() && !claim.is_late(hold))?;
        // The server releases an ephemeral hold as soon as it finds the session's connection dead.
        let alive = || self.pair.as_ref().map_or(0, |pair| pair.deadline(self.limit()));
        Some(self.until(claim).min(if claim.terms.ephemeral { alive() } else { Millis::MAX }))
    }

    /// The lease of this hold.
    pub fn lease(&self, hold: Id) -> Option<Millis> {
        Some(self.claims.get(&hold)?.hold()?.lease)
    }

    /// Whether no release is pending.
    pub fn is_settled(&self) -> bool {
        self.unwanted == 0
    }

    /// Whether it was closed, and nothing is left to do.
    pub fn has_ended(&self) -> bool {
        self.is_closed && self.claims.is_empty() && self.pair.is_none()
    }

    /// All acquisitions and holds, with a key of each.
    pub fn keys(&self) -> impl Iterator<Item = (Id, &[u8])> {
        self.claims.iter().map(|(id, claim)| (*id, claim.keys.first().map_or(&[][..], |key| key)))
    }

    /// How long a hold is certain.
    fn until(&self, claim: &Claim) -> Millis {
        let Some(hold) = claim.hold() else { return 0 };
        let alive = self.pair.as_ref().and_then(|pair| pair.alive);
        let covers = |alive: &pair::Alive| claim.terms.watchdog && hold.bound && hold.known < alive.next;
        let sure =
            alive.filter(covers).map(|it| it.asked.saturating_add(certain(hold.lease.saturating_mul(it.sure) / 1000)));
        hold.until.max(sure.unwrap_or(0))
    }

    // Requests of the program.

    /// A call begins.
    fn begin(&mut self, call: Id, about: About, within: Option<Millis>) {
        if self.is_closed {
            return self.outputs.push_back(Output::Ended { call, outcome: Outcome::Closed });
        }
        let bound = within.map(|within| self.now.saturating_add(within));
        bound.into_iter().for_each(|bound| self.alarms.set(bound, call));
        self.calls.insert(call, Call { about, bound });
        self.ready.insert((Rank::New, 0, call));
    }

    /// A call ends, if its caller still waits.
    fn finish(&mut self, call: Id, outcome: Outcome) {
        if self.calls.remove(&call).is_some() {
            self.silence(call);
            self.outputs.push_back(Output::Ended { call, outcome });
        }
    }

    fn acquire(&mut self, call: Id, by: Bytes, keys: Vec<Bytes>, terms: Terms, wait: Wait) {
        let within = match wait {
            Wait::No => Some(self.settings.limit),
            Wait::For(time) => Some(time.saturating_add(self.settings.grace)),
            Wait::Forever => None,
        };
        self.begin(call, About::Acquire, within);
        if keys.is_empty() {
            self.finish(call, Outcome::Refused("ERR a lock needs a key at least".into()));
        }
        if !self.calls.contains_key(&call) {
            return;
        }
        let owner = [by, call.to_string().into_bytes()].concat();
        self.owners.insert(owner.clone(), call);
        let claim = Claim {
            owner,
            keys,
            terms,
            wait,
            since: self.now,
            wanted: true,
            stage: Stage::New,
            sent: None,
            pair: None,
            asked_before: false,
            maybe_released: false,
            refusal: None,
            is_split: false,
            has_moved: false,
            asking: false,
            not_before: 0,
            bound: None,
            renewal: None,
            checks: Vec::new(),
            release: None,
            past: None,
            called: false,
            uses: 0,
            idle: None,
        };
        self.claims.insert(call, claim);
    }

    fn release(&mut self, call: Id, hold: Id, within: Millis) {
        self.begin(call, About::Release, Some(within));
        match self.claims.get_mut(&hold).filter(|claim| claim.wanted && claim.hold().is_some()) {
            None => self.finish(call, Outcome::NotHeld),
            Some(claim) => {
                claim.release = Some(call);
                self.give_back(hold);
            }
        }
    }

    /// No task here uses it any more. If another client waits for it, it is not cached.
    fn keep(&mut self, hold: Id, idle: Millis) {
        let until = self.now.saturating_add(idle);
        match self.claims.get_mut(&hold) {
            None => {}
            Some(claim) if claim.wanted && claim.hold().is_some() && !claim.called => {
                claim.idle = Some(until);
                self.alarms.set(until, hold);
            }
            Some(_) => self.drop_call(hold),
        }
    }

    /// An uncertain hold is not used: a new request takes no longer than asking whether it is held.
    fn use_again(&mut self, call: Id, hold: Id, most: u32) {
        let is_held = self.is_held(hold, self.now);
        let outcome = match self.claims.get_mut(&hold) {
            Some(claim) if is_held && !(claim.called && claim.uses >= most) => {
                claim.idle = None;
                claim.uses = claim.uses.saturating_add(claim.called.into());
                Outcome::Held
            }
            claim => {
                if claim.is_some() {
                    self.drop_call(hold);
                }
                Outcome::NotHeld
            }
        };
        self.outputs.push_back(Output::Ended { call, outcome });
    }

    /// Another client waits for it; this may arrive before the grant.
    fn called(&mut self, id: Id) {
        match self.claims.get_mut(&id).filter(|claim| claim.wanted) {
            Some(claim) if claim.idle.is_some() => self.give_back(id),
            // Of several keys, an event comes for each, and once more after a renewal: the count does not start anew.
            Some(claim) if !claim.called => (claim.called, claim.uses) = (true, 1),
            _ => {}
        }
    }

    /// A question about a hold, which is noted there if it can be.
    fn about_hold(&mut self, call: Id, about: About, hold: Id, within: Millis, note: impl FnOnce(&mut Claim) -> bool) {
        self.begin(call, about, Some(within));
        let claim = self.claims.get_mut(&hold).filter(|claim| claim.wanted && claim.hold().is_some());
        match claim.map(note) {
            Some(true) => self.touch(hold),
            Some(false) => self.finish(call, Outcome::Refused("ERR it is being renewed".into())),
            None => self.finish(call, Outcome::NotHeld),
        }
    }

    fn drop_call(&mut self, call: Id) {
        self.calls.remove(&call);
        self.silence(call);
        if self.claims.get(&call).is_some_and(|claim| claim.wanted) {
            self.give_back(call);
        }
    }

    fn close(&mut self, call: Id, within: Millis) {
        self.begin(call, About::Close, Some(within));
        self.is_closed = true;
        let open: Vec<Id> = self.calls.keys().copied().filter(|other| *other != call).collect();
        for other in open {
            if !matches!(self.calls.get(&other), Some(Call { about: About::Release, .. })) {
                self.finish(other, Outcome::Closed);
            }
        }
        let wanted: Vec<Id> = self.claims.iter().filter(|(_, claim)| claim.wanted).map(|(id, _)| *id).collect();
        wanted.into_iter().for_each(|id| self.give_back(id));
    }

    // What becomes of claims.

    /// The program does not want it any more: it is released, at whatever stage.
    fn give_back(&mut self, id: Id) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        self.unwanted += usize::from(claim.wanted);
        claim.wanted = false;
        claim.not_before = 0;
        let within = claim.release.and_then(|call| self.calls.get(&call)?.bound);
        let bound = within.unwrap_or(self.now.saturating_add(self.settings.limit));
        claim.bound = Some(bound);
        self.alarms.set(bound, id);
        let was_sent = claim.pair.is_some();
        let ended: Vec<Id> = claim.checks.drain(..).chain(claim.renewal.take().map(|it| it.call)).collect();
        ended.into_iter().for_each(|call| self.finish(call, Outcome::NotHeld));
        if was_sent { self.touch(id) } else { self.forget(id) }
    }

    /// Nothing of it is left at the server.
    fn forget(&mut self, id: Id) {
        if let Some(claim) = self.claims.remove(&id) {
            self.owners.remove(&claim.owner);
            self.unwanted -= usize::from(!claim.wanted);
        }
        self.silence(id);
    }

    /// A hold is lost. Something of it may be left: other keys, or what can't be seen from here.
    fn lose(&mut self, id: Id, why: LossReason, is_gone: bool) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        if claim.is_late(id) {
            claim.past = claim.hold().filter(|_| is_gone).map(|hold| hold.token);
            return self.ask_again(id);
        }
        let ended: Vec<Id> =
            claim.checks.drain(..).chain(claim.renewal.take().map(|it| it.call)).chain(claim.release.take()).collect();
        let was_wanted = claim.wanted;
        let is_all = claim.keys.len() == 1 || matches!(claim.stage, Stage::Gone);
        ended.into_iter().for_each(|call| self.finish(call, Outcome::Lost(why)));
        if was_wanted {
            self.outputs.push_back(Output::Lost { hold: id, why });
        }
        if is_gone && is_all { self.forget(id) } else { self.give_back(id) }
    }

    /// A late grant did not count.
    fn ask_again(&mut self, id: Id) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        (claim.stage, claim.renewal, claim.asked_before) = (Stage::New, None, true);
        if claim.wait == Wait::No {
            self.finish(id, Outcome::NotGranted);
            return self.give_back(id);
        }
        self.touch(id);
    }

    /// Another server serves it.
    fn leave(&mut self, id: Id, error: String) {
        let until = self.claims.get(&id).map_or(0, |claim| self.until(claim));
        let Some(mut claim) = self.claims.remove(&id) else { return };
        self.owners.remove(&claim.owner);
        self.unwanted -= usize::from(!claim.wanted);
        if let Some(pair) = &mut self.pair {
            // A reply that is still pending is dropped: the claim may be back by then.
            pair.unanswered.iter_mut().filter(|sent| sent.id == id).for_each(|sent| sent.id = NOBODY);
        }
        claim.set_adrift(until);
        // Two servers that redirect to each other are asked with a pause.
        if claim.has_moved {
            claim.not_before = self.now.saturating_add(AGAIN);
        }
        (claim.has_moved, claim.asking) = (true, error.starts_with("ASK"));
        let renewal = claim.renewal.as_ref().map(|renewal| renewal.call);
        let calls = claim.checks.iter().copied().chain(claim.release).chain(renewal).chain([id]);
        let calls: Vec<_> = calls.filter_map(|call| Some((call, self.calls.remove(&call)?))).collect();
        calls.iter().map(|(call, _)| *call).chain([id]).for_each(|id| self.silence(id));
        self.outputs.push_back(Output::Moved { moved: Box::new(Moved { id, claim, calls }), error });
    }

    fn take_over(&mut self, Moved { id, mut claim, calls }: Moved) {
        claim.asked_before = true;
        // Whatever its state, it was requested here, and the result moves with the key.
        claim.pair = Some(0);
        self.unwanted += usize::from(!claim.wanted);
        self.owners.insert(claim.owner.clone(), id);
        self.claims.insert(id, claim);
        for (call, it) in calls {
            self.calls.insert(call, it);
            self.set_next_alarm(call);
        }
        self.set_next_alarm(id);
        self.touch(id);
        if self.is_closed {
            self.give_back(id);
        }
    }

    fn is_elsewhere(&self, error: &str) -> bool {
        self.in_cluster && (error.starts_with("MOVED") || error.starts_with("ASK "))
    }

    /// It may have something to send.
    fn touch(&mut self, id: Id) {
        let Some(claim) = self.claims.get(&id) else { return };
        let until = self.until(claim);
        let (rank, order) = claim.rank(until);
        if claim.not_before > self.now {
            self.alarms.set(claim.not_before, id);
        }
        self.ready.insert((rank, order, id));
    }

    fn granted(&mut self, id: Id, token: u64, lease: Millis, until: Millis) {
        let known = self.nexts;
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let hold = Hold { token, lease, until, known, bound: true, confirming: false, left: 0, lasts: Millis::MAX };
        let was_held = matches!(std::mem::replace(&mut claim.stage, Stage::Held(hold)), Stage::Held(_));
        claim.refusal = None;
        // With less than half of its lease, it does not count before the answer to a renewal.
        let is_late = !was_held && claim.wanted && until < self.now.saturating_add(lease / 2);
        if is_late {
            claim.renewal = Some(Renewal { call: id, lease: Some(lease), fence: None, is_sent: false });
        }
        let renewal = claim.renewal.take_if(|renewal| renewal.is_sent);
        let checks = if until > self.now { std::mem::take(&mut claim.checks) } else { Vec::new() };
        self.alarms.set(until, id);
        if !was_held && !is_late {
            self.finish(id, Outcome::Granted(token));
        }
        if let Some(Renewal { call, .. }) = renewal {
            self.finish(call, if call == id { Outcome::Granted(token) } else { Outcome::Renewed(token) });
        }
        checks.into_iter().for_each(|call| self.finish(call, Outcome::Held));
        self.touch(id);
    }

    /// The session does not renew it any more: it is to be taken over.
    fn unbound(&mut self, id: Id) {
        let until = self.claims.get(&id).map_or(0, |claim| self.until(claim));
        if let Some(hold) = self.claims.get_mut(&id).and_then(Claim::hold_mut) {
            (hold.until, hold.bound) = (until, false);
        }
        self.touch(id);
    }

    /// A request for it got an error.
    fn refused(&mut self, id: Id, error: String) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let is_unsure = claim.asked_before || error.starts_with("UNCONFIRMED");
        if claim.hold().is_some() && is_overwritten(&error) {
            return self.lose(id, LossReason::Changed, true);
        }
        if let Stage::Held(hold) = &mut claim.stage {
            // A renewal: nothing is revoked.
            (hold.confirming, hold.left) = (false, 0);
            claim.not_before = self.now.saturating_add(AGAIN);
            if claim.is_late(id) {
                if claim.wait == Wait::No || !pair::is_passing(&error) {
                    self.finish(id, Outcome::Refused(error));
                    return self.give_back(id);
                }
                claim.renewal.iter_mut().for_each(|renewal| renewal.is_sent = false);
            } else if let Some(renewal) = claim.renewal.take_if(|renewal| renewal.is_sent) {
                self.finish(renewal.call, Outcome::Refused(error));
            }
            return self.unbound(id);
        }
        if claim.wanted && claim.wait != Wait::No && pair::is_passing(&error) {
            (claim.stage, claim.refusal) = (Stage::New, Some(error));
            claim.not_before = self.now.saturating_add(AGAIN);
            return self.touch(id);
        }
        claim.stage = Stage::New;
        self.finish(id, Outcome::Refused(error));
        if is_unsure { self.give_back(id) } else { self.forget(id) }
    }

    // What arrives.

    fn is_current(&self, number: u64) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.number == number)
    }

    fn opened(&mut self, number: u64) {
        let replaced = Pair::greeting(&self.replaced);
        let now = self.now;
        let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
        pair.stage = pair::Stage::Greeting;
        pair.promised = now;
        self.say(Channel::Session, replaced);
        self.ask_for_events(false);
    }

    fn say(&mut self, channel: Channel, words: Vec<Bytes>) {
        let pair = self.pair.as_ref().map(|pair| pair.number);
        self.outputs.extend(pair.map(|pair| Output::Send { pair, channel, words }));
    }

    fn ask_for_events(&mut self, waits: bool) {
        self.nexts += 1;
        if let Some(pair) = &mut self.pair {
            pair.asked = self.now;
        }
        self.say(Channel::Session, Pair::question(waits));
    }

    fn received(&mut self, number: u64, channel: Channel, bytes: &[u8]) {
        let now = self.now;
        let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
        match channel {
            Channel::Session => pair.session_bytes.extend_from_slice(bytes),
            Channel::Requests => {
                pair.heard = now;
                pair.request_bytes.extend_from_slice(bytes);
            }
        }
        loop {
            let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
            let from = match channel {
                Channel::Session => &mut pair.session_bytes,
                Channel::Requests => &mut pair.request_bytes,
            };
            match Reply::take(from) {
                Ok(None) => return,
                Ok(Some(reply)) => self.says(number, channel, reply),
                Err(_) => return self.end_pair(false),
            }
        }
    }

    fn says(&mut self, number: u64, channel: Channel, reply: Reply) {
        let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
        let serves = channel == Channel::Requests && !matches!(reply, Reply::Error(_));
        let makes_sense = match channel {
            Channel::Session => self.session_says(reply),
            Channel::Requests => {
                pair.heard = self.now;
                self.replied(reply)
            }
        };
        match (makes_sense, &mut self.pair) {
            (None, _) => self.end_pair(false),
            (Some(()), Some(pair)) if serves => (pair.has_served, self.pause, self.doubled) = (true, FIRST_PAUSE, 0),
            (Some(()), _) => {}
        }
    }

    /// A reply of the session. `None`: malformed.
    fn session_says(&mut self, reply: Reply) -> Option<()> {
        let pair = self.pair.as_mut()?;
        if let Reply::Error(error) = reply {
            return self.session_fails(error);
        }
        if pair.id.is_none() {
            let Greeted { id, protocol: [lowest, highest] } = Greeted::read(&reply)?;
            if !(lowest..=highest).contains(&PROTOCOL) {
                let what = if highest < PROTOCOL { "SERVERTOOOLD" } else { "CLIENTTOOOLD" };
                let spoken = format!("the server speaks protocol {lowest} to {highest}, this client {PROTOCOL}");
                self.end_unsent(Outcome::Refused(format!("{what} {spoken}")));
                return None;
            }
            pair.id = Some(id);
            self.replaced.clear();
            return Some(());
        }
        // Unblocked by an operator, or not of this version.
        if reply == Reply::Null {
            pair.asks_at = Some(self.now.saturating_add(AGAIN));
            return Some(());
        }
        let (asked, next, now) = (pair.asked, self.nexts, self.now);
        let mut events = Vec::new();
        for element in reply.elements()? {
            let event = Event::read(element)?;
            if event.kind == "heartbeat" { pair.hear_alive(&event.detail, next, now)? } else { events.push(event) }
        }
        (self.default_lease, self.pace) = (pair.default_lease, Some(pair.pace));
        let begins = pair.stage == pair::Stage::Greeting;
        pair.stage = pair::Stage::Standing;
        for event in events {
            self.event(event, asked)?;
        }
        self.ask_for_events(true);
        if begins {
            self.begin_to_carry();
        }
        Some(())
    }

    /// The session's own requests fail: it can't be had, or not now.
    fn session_fails(&mut self, error: String) -> Option<()> {
        match (Advice::of(&error), self.pair.as_ref()?.stage) {
            (Advice::Again, pair::Stage::Standing) => {
                self.pair.as_mut()?.asks_at = Some(self.now.saturating_add(AGAIN));
                return Some(());
            }
            (Advice::Tell, pair::Stage::Opening | pair::Stage::Greeting) if !pair::is_passing(&error) => {
                // Without the module, or with a wrong password, unsent requests can't succeed.
                self.end_unsent(Outcome::Refused(error));
            }
            _ => {}
        }
        None
    }

    /// The session that was being opened can't be had, and calls that need one end, unless they began after the attempt. Without a
    /// connection, what may wait waits for the next attempt; the server's refusal is final.
    fn end_unsent(&mut self, outcome: Outcome) {
        let began = self.pair.as_ref().map_or(self.now, |pair| pair.heard);
        let is_final = matches!(outcome, Outcome::Refused(_));
        let ends = |(id, call): (&Id, &Call)| match call.about {
            About::Acquire => self.claims.get(id).is_some_and(|claim| {
                claim.since <= began && (claim.wait == Wait::No || (is_final && claim.pair.is_none()))
            }),
            About::Request { .. } => true,
            About::Release => is_final,
            _ => false,
        };
        let ended: Vec<Id> = self.calls.iter().filter(|call| ends(*call)).map(|(id, _)| *id).collect();
        for call in ended {
            self.finish(call, outcome.clone());
            self.drop_call(call);
        }
    }

    /// The session is open: wanted holds are taken over, unwanted ones are released.
    fn begin_to_carry(&mut self) {
        let ids: Vec<Id> = self.claims.keys().copied().collect();
        ids.iter().for_each(|id| self.touch(*id));
        let waiting: Vec<Id> = self.calls.keys().copied().collect();
        self.ready.extend(waiting.into_iter().map(|call| (Rank::New, 0, call)));
    }

    fn event(&mut self, event: Event, asked: Millis) -> Option<()> {
        // A claim that was dropped says nothing any more.
        let Some(id) = self.owners.get(&event.owner).copied() else { return Some(()) };
        let default = self.pair.as_ref()?.default_lease;
        let is_elsewhere = self.is_elsewhere(&event.detail);
        let claim = self.claims.get_mut(&id)?;
        match event.kind.as_str() {
            "granted" => {
                let lasts: Millis = event.detail.parse().ok()?;
                let mut until = asked.saturating_add(certain(lasts));
                let mut lease = claim.terms.lease.unwrap_or(default);
                if let Stage::Held(hold) = &mut claim.stage {
                    hold.left = hold.left.saturating_sub(event.keys);
                    hold.lasts = hold.lasts.min(until);
                    let renewed = claim.renewal.as_ref().filter(|renewal| renewal.is_sent);
                    (until, lease) = (hold.lasts, renewed.and_then(|it| it.lease).unwrap_or(hold.lease));
                    if hold.left > 0 {
                        return Some(());
                    }
                }
                self.granted(id, event.token?, lease, until);
            }
            "timeout" if claim.hold().is_none() => {
                self.finish(id, Outcome::NotGranted);
                self.forget(id);
            }
            // The reply to its release gives the outcome.
            "refused" if !claim.wanted && event.detail.starts_with("CANCELLED") => {}
            "refused" if is_elsewhere => self.leave(id, event.detail),
            "refused" if claim.hold().is_some() && event.detail.starts_with("NOTHELD") => {
                self.lose(id, LossReason::Changed, true)
            }
            "refused" if Advice::of(&event.detail) == Advice::End => return None,
            "refused" => self.refused(id, event.detail),
            "lost" if event.token.is_some() && event.token == claim.past => {}
            "lost" => {
                let why = match event.detail.as_str() {
                    "expired" => LossReason::Expired,
                    "forced" => LossReason::Forced,
                    "disconnected" => LossReason::Disconnected,
                    _ => LossReason::Changed,
                };
                match claim.stage {
                    Stage::Held(_) | Stage::Gone => self.lose(id, why, true),
                    // The event overtook the reply of its grant.
                    _ => {
                        self.finish(id, Outcome::Lost(why));
                        self.give_back(id);
                    }
                }
            }
            "unbound" => self.unbound(id),
            "contended" => self.called(id),
            _ => {}
        }
        Some(())
    }

    /// A reply to the oldest request. `None`: malformed.
    fn replied(&mut self, reply: Reply) -> Option<()> {
        let Sent { id, kind, at } = self.pair.as_mut()?.unanswered.pop_front()?;
        let Some(kind) = kind else { return self.answered(id, reply) };
        let is_elsewhere = matches!(&reply, Reply::Error(error) if self.is_elsewhere(error));
        // It ended by an event that overtook the reply.
        let Some(claim) = self.claims.get_mut(&id) else { return Some(()) };
        claim.sent = None;
        if let Reply::Error(error) = &reply {
            if is_elsewhere {
                self.leave(id, error.clone());
                return Some(());
            }
            return match Advice::of(error) {
                Advice::End => None,
                Advice::Tell if !matches!(kind, Kind::Release(_)) => {
                    self.refused(id, error.clone());
                    Some(())
                }
                _ => {
                    // An unwanted claim is released: again, until it is done.
                    if kind == Kind::Acquire {
                        claim.stage = Stage::New;
                    }
                    if is_overwritten(error) {
                        let was_held = claim.maybe_released;
                        let outcome = if was_held { Outcome::Released } else { Outcome::Lost(LossReason::Changed) };
                        self.release_others(id, outcome);
                        return Some(());
                    }
                    claim.refusal = Some(error.clone());
                    claim.not_before = self.now.saturating_add(AGAIN);
                    // The caller gets an error that does not pass at once. The release is still repeated: the session renews the hold.
                    let call = claim.release.take_if(|_| !pair::is_passing(error) && Advice::of(error) == Advice::Tell);
                    call.into_iter().for_each(|call| self.finish(call, Outcome::Refused(error.clone())));
                    self.touch(id);
                    Some(())
                }
            };
        }
        claim.has_moved = false;
        let default = self.pair.as_ref()?.default_lease;
        match kind {
            Kind::Acquire => self.acquired(id, &reply, at, default)?,
            Kind::Renew(lease) => self.renewed(id, &reply, lease, at)?,
            Kind::Release(_) => self.given_back(id, &reply)?,
        }
        Some(())
    }

    fn acquired(&mut self, id: Id, reply: &Reply, at: Millis, default: Millis) -> Option<()> {
        let claim = self.claims.get_mut(&id)?;
        match reply {
            Reply::Integer(token) => {
                let token = u64::try_from(*token).ok().filter(|token| *token > 0)?;
                let lease = claim.terms.lease.unwrap_or(default);
                self.granted(id, token, lease, at.saturating_add(certain(lease)));
            }
            Reply::Null => {
                self.finish(id, Outcome::NotGranted);
                self.forget(id);
            }
            Reply::Line(line) if line == "WAITING" => self.touch(id),
            _ => return None,
        }
        Some(())
    }

    fn renewed(&mut self, id: Id, reply: &Reply, lease: Millis, at: Millis) -> Option<()> {
        let is_waiting = matches!(reply, Reply::Line(line) if line == "WAITING");
        let claim = self.claims.get_mut(&id)?;
        // The event of its loss came first, and it is requested again.
        if claim.hold().is_none() {
            self.touch(id);
            return Some(());
        }
        if is_waiting {
            if let Some(hold) = claim.hold_mut() {
                // The event may have arrived before.
                hold.confirming = hold.left > 0;
            }
            self.touch(id);
            return Some(());
        }
        let replies = reply.elements().unwrap_or(std::slice::from_ref(reply));
        if replies.contains(&Reply::Null) {
            let claim = self.claims.get(&id)?;
            let why = match claim.hold() {
                // Between two sessions, or in an instance that was followed by another one.
                Some(hold) if !hold.bound => LossReason::Disconnected,
                _ if self.until(claim) <= self.now => LossReason::Expired,
                _ => LossReason::Changed,
            };
            self.lose(id, why, true);
            return Some(());
        }
        let token = replies.iter().map(Reply::number).collect::<Option<Vec<u64>>>()?.into_iter().max()?;
        let claim = self.claims.get(&id)?;
        // The remaining lease of a hold that was taken over is not one that the program named.
        let is_named = claim.terms.watchdog || claim.renewal.as_ref().is_some_and(|renewal| renewal.is_sent);
        let named = if is_named { lease } else { claim.hold().map_or(lease, |hold| hold.lease) };
        self.granted(id, token, named, at.saturating_add(certain(lease)));
        Some(())
    }

    fn given_back(&mut self, id: Id, reply: &Reply) -> Option<()> {
        let replies = reply.elements().unwrap_or(std::slice::from_ref(reply));
        if !replies.iter().all(|reply| matches!(reply, Reply::Integer(_) | Reply::Null)) {
            return None;
        }
        let claim = self.claims.get_mut(&id)?;
        if claim.is_split {
            self.release_others(id, Outcome::Released);
            return Some(());
        }
        let was_held = claim.maybe_released || !replies.contains(&Reply::Null);
        let call = claim.release.filter(|call| self.calls.contains_key(call));
        if call.is_some() && !was_held {
            claim.stage = Stage::Gone;
            claim.not_before = self.now.saturating_add(TOLD_WITHIN);
            self.alarms.set(claim.not_before, id);
            return Some(());
        }
        call.into_iter().for_each(|call| self.finish(call, Outcome::Released));
        self.forget(id);
        Some(())
    }

    /// Nothing of its first key is left to release. Of several, the others are released one by one.
    fn release_others(&mut self, id: Id, outcome: Outcome) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let release = claim.release;
        if claim.is_split || claim.keys.len() == 1 {
            claim.keys.remove(0);
        }
        claim.is_split = true;
        let is_done = claim.keys.is_empty();
        release.into_iter().for_each(|call| self.finish(call, outcome.clone()));
        if is_done { self.forget(id) } else { self.touch(id) }
    }

    fn answered(&mut self, call: Id, reply: Reply) -> Option<()> {
        let Some(Call { about: About::Request { not_before, .. }, .. }) = self.calls.get_mut(&call) else {
            return Some(());
        };
        match &reply {
            Reply::Error(error) if Advice::of(error) == Advice::Again => {
                *not_before = self.now.saturating_add(AGAIN);
                self.alarms.set(*not_before, call);
            }
            Reply::Error(error) if Advice::of(error) == Advice::End => {
                self.finish(call, Outcome::Answer(reply));
                return None;
            }
            _ => self.finish(call, Outcome::Answer(reply)),
        }
        Some(())
    }

    // Sessions begin and end.

    fn open(&mut self) {
        let is_needed = !self.claims.is_empty() || !self.calls.is_empty();
        if self.is_closed && self.claims.is_empty() {
            self.closed();
        } else if self.pair.is_none() && is_needed && self.now >= self.opens_at {
            self.pairs += 1;
            self.pair = Some(Pair::new(self.pairs, self.now));
            self.outputs.push_back(Output::Open { pair: self.pairs });
        }
    }

    /// Everything is released, or the time for it is over.
    fn closed(&mut self) {
        let open: Vec<Id> = self.calls.keys().copied().collect();
        open.into_iter().for_each(|call| self.finish(call, Outcome::Closed));
        (self.claims, self.owners, self.unwanted) = (BTreeMap::new(), BTreeMap::new(), 0);
        self.alarms = Alarms::default();
        self.outputs.extend(self.pair.take().map(|pair| Output::End { pair: pair.number }));
    }

    /// Both connections end, and wanted claims go to the next session.
    fn end_pair(&mut self, by_limit: bool) {
        if self.pair.as_ref().is_some_and(|pair| pair.stage == pair::Stage::Opening) {
            self.end_unsent(Outcome::Unanswered);
        }
        let ids: Vec<Id> = self.claims.keys().copied().collect();
        let mut in_vain = Vec::new();
        for id in &ids {
            let until = self.claims.get(id).map_or(0, |claim| self.until(claim));
            let Some(claim) = self.claims.get_mut(id) else { continue };
            // A call without a wait is asked again once, since a server may close idle connections. Then it fails, and is withdrawn.
            let is_last = matches!(claim.stage, Stage::Asked) && claim.asked_before || claim.is_late(*id);
            if claim.wait == Wait::No && claim.wanted && is_last {
                in_vain.push(*id);
            }
            claim.set_adrift(until);
            if claim.hold().is_some() {
                self.alarms.set(until, *id);
            }
        }
        let Some(pair) = self.pair.take() else { return };
        self.outputs.push_back(Output::End { pair: pair.number });
        self.replaced.extend(pair.id);
        let plain: Vec<Id> = pair.unanswered.iter().filter(|sent| sent.kind.is_none()).map(|sent| sent.id).collect();
        for call in plain {
            match self.calls.get_mut(&call).map(|call| &mut call.about) {
                // Once more, in the next session.
                Some(About::Request { not_before, again, .. }) if *again => (*not_before, *again) = (0, false),
                _ => self.finish(call, Outcome::Unanswered),
            }
        }
        for id in in_vain {
            self.finish(id, Outcome::Unanswered);
            self.give_back(id);
        }
        for id in ids {
            if self.claims.get(&id).is_some_and(|it| it.wanted && it.terms.ephemeral && it.hold().is_some()) {
                self.lose(id, LossReason::Disconnected, false);
            }
        }
        // One that served is replaced at once, such as an idle one, but not again and again.
        let pause = if pair.has_served && !by_limit && self.now >= self.at_once_from {
            self.at_once_from = self.now.saturating_add(LONGEST_PAUSE);
            0
        } else {
            self.random_below(self.pause)
        };
        let longest = self.pace.map_or(LONGEST_PAUSE, |pace| (pace / 2).clamp(FIRST_PAUSE, LONGEST_PAUSE));
        self.pause = (self.pause * 2).min(longest);
        self.doubled = if by_limit { (self.doubled + 1).min(DOUBLED) } else { self.doubled };
        self.opens_at = self.now.saturating_add(pause);
    }

    /// `xorshift64*`.
    fn random_below(&mut self, end: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end.max(1)
    }

    // What is sent.

    fn send(&mut self) {
        let most = self.settings.unanswered;
        loop {
            let now = self.now;
            let Some(pair) = self.pair.as_ref().filter(|pair| pair.stage == pair::Stage::Standing) else { return };
            if pair.unanswered.len() >= most {
                return;
            }
            let Some((_, _, id)) = self.ready.pop_first() else { return };
            let Some(session) = pair.id.clone() else { return };
            let (number, default) = (pair.number, pair.default_lease);
            let Some((kind, mut words)) = self.next_words(id, number, default, &session) else { continue };
            let Some(pair) = &mut self.pair else { return };
            if pair.unanswered.is_empty() {
                pair.heard = now;
            }
            let asks = words.extract_if(..1, |word| word == b"ASKING").count() > 0;
            if asks || self.claims.get_mut(&id).is_some_and(|claim| std::mem::take(&mut claim.asking)) {
                pair.unanswered.push_back(Sent { id: NOBODY, kind: None, at: now });
                let number = pair.number;
                let words = vec![b"ASKING".to_vec()];
                self.outputs.push_back(Output::Send { pair: number, channel: Channel::Requests, words });
            }
            pair.unanswered.push_back(Sent { id, kind, at: now });
            self.say(Channel::Requests, words);
        }
    }

    /// The next request of this claim or call; notes that it is sent.
    fn next_words(&mut self, id: Id, pair: u64, default: Millis, session: &[u8]) -> Option<(Option<Kind>, Vec<Bytes>)> {
        let now = self.now;
        if let Some(Call { about: About::Request { words, not_before, .. }, .. }) = self.calls.get_mut(&id) {
            if words.is_empty() || *not_before > now {
                return None;
            }
            // Kept until the reply, since it may have to be sent again.
            *not_before = Millis::MAX;
            return Some((None, words.clone()));
        }
        let until = self.until(self.claims.get(&id)?);
        let claim = self.claims.get_mut(&id)?;
        let kind = claim.next(until, now)?;
        let words = claim.words(kind, claim.terms.lease.unwrap_or(default), session, now);
        claim.sent = Some(kind);
        if claim.wanted {
            claim.pair = Some(pair);
        }
        match (&mut claim.stage, kind) {
            (stage @ Stage::New, Kind::Acquire) => *stage = Stage::Asked,
            (Stage::Held(hold), Kind::Renew(lease)) => {
                // It may be shorter from now on, and heartbeats may speak of the shorter one.
                (hold.left, hold.lasts) = (claim.keys.len(), Millis::MAX);
                hold.until = until.min(now.saturating_add(certain(lease)));
                hold.known = if lease < hold.lease { u64::MAX } else { hold.known };
                if hold.until > now {
                    self.alarms.set(hold.until, id);
                }
                if let Some(renewal) = &mut claim.renewal {
                    renewal.is_sent = true;
                }
            }
            _ => {}
        }
        Some((Some(kind), words))
    }

    // Time.

    /// This process was paused: all limits restart, and holds are asked about before they count as lost.
    fn begin_anew(&mut self) {
        let now = self.now;
        self.asks_until = now.saturating_add(self.settings.limit);
        if let Some(pair) = &mut self.pair {
            (pair.heard, pair.promised) = (now, pair.promised.max(now));
        }
    }

    /// How long the server may be silent: an eighth of the shortest lease, as its last heartbeat says. A server that is slower gets more
    /// time at each attempt.
    fn limit(&self) -> Millis {
        let limit =
            self.pace.map_or(self.settings.limit, |pace| (pace.max(SHORTEST_LIMIT) << self.doubled).min(LONGEST_LIMIT));
        limit.min(self.settings.limit)
    }

    fn judge_times(&mut self) {
        let now = self.now;
        if self.pair.as_ref().is_some_and(|pair| pair.deadline(self.limit()) <= now) {
            self.end_pair(true);
        }
        if self.pair.as_mut().is_some_and(|pair| pair.asks_at.take_if(|at| *at <= now).is_some()) {
            self.ask_for_events(true);
        }
        while let Some(id) = self.alarms.take_due(now) {
            self.call_is_late(id);
            self.claim_is_late(id);
            self.set_next_alarm(id);
        }
    }

    /// Looks at it when its next time is over.
    fn set_next_alarm(&mut self, id: Id) {
        let of_call = self.calls.get(&id).map_or([None; 2], |call| match call.about {
            About::Request { not_before, .. } => [call.bound, Some(not_before)],
            _ => [call.bound, None],
        });
        let of_claim = self.claims.get(&id).map_or([None; 3], |claim| {
            let until = claim.hold().map(|_| self.until(claim));
            let ended = claim.bound.map(|bound| bound.saturating_add(self.lease_of(claim)));
            let [first, second] = if claim.wanted { [until, claim.idle] } else { [claim.bound, ended] };
            [Some(claim.not_before), first, second]
        });
        let next = of_call.into_iter().chain(of_claim).flatten().filter(|at| *at > self.now).min();
        next.into_iter().for_each(|at| self.alarms.set(at, id));
    }

    /// A call or a claim has ended: another one with its number sets its own alarm.
    fn silence(&mut self, id: Id) {
        if !self.claims.contains_key(&id) && !self.calls.contains_key(&id) {
            self.alarms.remove(id);
        }
    }

    fn call_is_late(&mut self, id: Id) {
        let Some(call) = self.calls.get(&id) else { return };
        if call.bound.is_none_or(|bound| bound > self.now) {
            self.ready.insert((Rank::New, 0, id));
            return;
        }
        match call.about {
            About::Close => {
                self.claims.clear();
                self.closed();
            }
            About::Acquire => {
                // In a queue, or in none between two sessions.
                let has_waited = |it: &Claim| match it.stage {
                    _ if it.wait == Wait::No => false,
                    Stage::Asked => it.sent.is_none(),
                    _ => it.asked_before,
                };
                let has_waited = self.claims.get(&id).is_some_and(has_waited);
                let refusal = self.claims.get_mut(&id).and_then(|claim| claim.refusal.take());
                let unanswered = refusal.map_or(Outcome::Unanswered, Outcome::Refused);
                self.finish(id, if has_waited { Outcome::NotGranted } else { unanswered });
                self.give_back(id);
            }
            // A caller that asks whether it may go on does not wait forever.
            // A heartbeat may have said meanwhile that it is held.
            About::Check(hold) if self.is_held(hold, self.now) => self.finish(id, Outcome::Held),
            About::Check(hold) => {
                self.finish(id, Outcome::Lost(LossReason::Disconnected));
                self.lose(hold, LossReason::Disconnected, false);
            }
            About::Release => {
                let claim = self.claims.values().find(|claim| claim.release == Some(id));
                let outcome = match claim.map(|claim| (&claim.stage, &claim.refusal)) {
                    Some((Stage::Gone, _)) => Outcome::NotHeld,
                    Some((_, Some(error))) => Outcome::Refused(error.clone()),
                    _ => Outcome::Unanswered,
                };
                self.finish(id, outcome);
            }
            _ => self.finish(id, Outcome::Unanswered),
        }
    }

    fn lease_of(&self, claim: &Claim) -> Millis {
        claim.hold().map(|hold| hold.lease).or(claim.terms.lease).unwrap_or(self.default_lease)
    }

    fn claim_is_late(&mut self, id: Id) {
        let now = self.now;
        let Some(claim) = self.claims.get(&id) else { return };
        let lease = self.lease_of(claim);
        if let Stage::Gone = claim.stage {
            if now < claim.not_before {
                return;
            }
            claim.release.into_iter().for_each(|call| self.finish(call, Outcome::NotHeld));
            return self.forget(id);
        }
        if !claim.wanted {
            let here = self.pair.as_ref().filter(|pair| claim.pair == Some(pair.number));
            match here {
                // It was not released in time, and the session renews it: the session ends, unless the server takes no writes.
                Some(pair) if claim.bound.is_some_and(|bound| bound <= now) => {
                    if pair.takes_writes {
                        return self.end_pair(false);
                    }
                    self.alarms.set(now.saturating_add(AGAIN), id);
                }
                // No session renews it, and the next one replaces those that did: it has ended by itself.
                None if claim.bound.is_some_and(|bound| bound.saturating_add(lease) <= now) => return self.forget(id),
                _ => {}
            }
            return self.touch(id);
        }
        if claim.idle.is_some_and(|idle| idle <= now) {
            return self.give_back(id);
        }
        let Some(hold) = claim.hold() else { return self.touch(id) };
        let until = self.until(claim);
        if until > now {
            return self.touch(id);
        }
        // The reply of its acquisition may be pending, since the event of its grant came first.
        let is_asked = matches!(claim.sent, Some(Kind::Renew(_))) || hold.confirming || claim.renewal.is_some();
        let stands = self.pair.as_ref().is_some_and(|pair| pair.stage == pair::Stage::Standing);
        // A server that was silent may have renewed it. It is asked when it answers again, if it does within a quarter of the lease.
        let asks_until = self.asks_until.max(until.saturating_add(hold.lease / 4));
        if !claim.terms.watchdog && !is_asked {
            self.lose(id, LossReason::Expired, false);
        } else if stands {
            self.touch(id);
        } else if asks_until > now {
            self.alarms.set(asks_until, id);
        } else {
            self.lose(id, LossReason::Disconnected, false);
        }
    }

    /// Tells the driver when to wake this core. A later time is not told: woken too early, this core says so then.
    fn set_alarm(&mut self) {
        let pair = match &self.pair {
            Some(pair) => Some(pair.deadline(self.limit())).into_iter().chain(pair.asks_at).min(),
            None if self.claims.is_empty() && self.calls.is_empty() => None,
            None => Some(self.opens_at),
        };
        let next = pair.into_iter().chain(self.alarms.first()).min().map(|at| at.max(self.now));
        let earlier = next.filter(|at| self.wakes_at.is_none_or(|before| *at < before));
        if let Some(at) = earlier {
            self.wakes_at = Some(at);
            self.outputs.push_back(Output::Wake { at });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is over leaves no alarm, and what goes on has at most one, however often its time changes.
    #[test]
    fn alarms_do_not_pile_up() {
        let mut core = Core::new(Settings::default());
        let said = |reply: Reply| Input::Replied { pair: 1, channel: Channel::Requests, reply };
        let mut step = |now, input| {
            core.step(now, input);
            while core.take().is_some() {}
            assert!(core.alarms.len() <= core.calls.len() + core.claims.len(), "at {now}");
            core.alarms.len()
        };
        let acquire = |call, wait| Input::Acquire {
            call,
            by: b"a##".to_vec(),
            keys: vec![b"k".to_vec()],
            terms: Terms { watchdog: true, ..Terms::default() },
            wait,
        };
        step(0, Input::Request { call: 1, words: vec![b"PING".to_vec()], within: 1_000 });
        step(0, Input::Opened { pair: 1 });
        let bulk = |text: &str| Reply::Bulk(text.into());
        let protocol = Reply::Array(vec![Reply::Integer(4), Reply::Integer(4)]);
        let reply = Reply::Array(vec![bulk("id"), bulk("run:1"), bulk("protocol"), protocol]);
        step(0, Input::Replied { pair: 1, channel: Channel::Session, reply });
        step(0, Input::Replied { pair: 1, channel: Channel::Session, reply: Reply::Array(Vec::new()) });
        step(0, said(Reply::Line("PONG".into())));
        for round in 1..1_000 {
            let (now, hold) = (round * 2, round * 10);
            step(now, acquire(hold, Wait::For(5_000)));
            step(now, said(Reply::Integer(7)));
            for call in hold + 1..hold + 4 {
                step(now, Input::Renew { call, hold, lease: Some(1_000 + round), fence: None, within: 1_000 });
                step(now, said(Reply::Integer(7)));
            }
            for call in hold + 4..hold + 8 {
                step(now, Input::Keep { hold, idle: call });
                step(now, Input::Use { call, hold, most: 1 });
            }
            step(now, Input::Release { call: hold + 8, hold, within: 1_000 });
            step(now, said(Reply::Integer(0)));
            step(now, acquire(hold + 9, Wait::Forever));
            step(now, Input::Drop { call: hold + 9 });
            step(now, said(Reply::Line("WAITING".into())));
            assert_eq!(step(now + 1, said(Reply::Integer(1))), 0);
        }
    }
}
