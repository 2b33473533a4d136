//! The core: requests and holds, and the pair of connections for them.

use crate::alarms::Alarms;
use crate::claim::{Call, CallKind, Claim, Hold, Kind, Moved, Rank, Renewal, Stage};
use crate::pair::{self, Advice, Event, Greeted, Pair, Sent};
use crate::terms::certain;
use crate::{Bytes, Channel, Id, Input, LossReason, Millis, Outcome, Output, Reply, Settings, Terms, Wait};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The pause before a request is repeated.
const RETRY_PAUSE: Millis = 100;
/// The maximum of the first pause between two sessions. It doubles each time.
const FIRST_PAUSE: Millis = 20;
/// The maximum of all pauses; a sixteenth of the shortest lease, if that is less.
const LONGEST_PAUSE: Millis = 1_000;
/// How often the limit of silence doubles at most, from the shortest one to the longest.
const DOUBLED: u32 = 5;
/// The limits of silence, once the server has sent a heartbeat.
const SHORTEST_LIMIT: Millis = 50;
const LONGEST_LIMIT: Millis = 1_000;
/// How long the core waits for the reason of a loss, which arrives on another connection than the reply that shows the
/// loss.
const REASON_TIMEOUT: Millis = 1_000;
/// The version of the protocol that this client speaks.
const PROTOCOL: u64 = 4;
/// A wake-up that is late by more than this means that the process was paused.
const LATE: Millis = 200;

/// Whether the key holds another type: the lock does not exist any more. The event of its loss, on the other
/// connection, may arrive before or after this error.
fn is_overwritten(error: &str) -> bool {
    error.starts_with("WRONGTYPE")
}

/// The number that no call has.
const NO_CALL: Id = 0;

/// A client at one server.
#[derive(Debug)]
pub struct Core {
    settings: Settings,
    now: Millis,
    outputs: VecDeque<Output>,
    claims: BTreeMap<Id, Claim>,
    owners: BTreeMap<Bytes, Id>,
    calls: BTreeMap<Id, Call>,
    /// Claims and calls that may have something to send, by priority.
    ready: BTreeSet<(Rank, Millis, Id)>,
    /// When each claim or call is checked again.
    alarms: Alarms,
    pair: Option<Pair>,
    pairs: u64,
    /// How many `LOCK.EVENTS` were sent, over all pairs.
    nexts: u64,
    /// Earlier sessions that may still exist at the server.
    replaced: Vec<Bytes>,
    /// No pair is opened before this time.
    opens_at: Millis,
    /// Before this time, each pair that ends is replaced after a pause.
    at_once_from: Millis,
    pause: Millis,
    doubled: u32,
    /// The last wake-up time that the driver was given.
    wakes_at: Option<Millis>,
    /// After a pause of this process: until this time no hold counts as lost because a session is missing.
    asks_until: Millis,
    random: u64,
    /// How many unwanted claims are not released yet.
    unwanted: usize,
    /// The server's default lease, and how many ms after its arrival the server answers a `LOCK.EVENTS` at the latest,
    /// as the last heartbeat says.
    default_lease: Millis,
    pace: Option<Millis>,
    in_cluster: bool,
    is_closed: bool,
}

impl Core {
    /// A client without requests. It opens no connection before the first one.
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

    /// The same at one server of a cluster: a claim that another server serves moves to that server's core.
    pub fn in_cluster(settings: Settings) -> Self {
        Self { in_cluster: true, ..Self::new(settings) }
    }

    /// Handles an input at this time.
    pub fn step(&mut self, now: Millis, input: Input) {
        self.now = self.now.max(now);
        if self.wakes_at.is_some_and(|at| self.now > at.saturating_add(LATE)) {
            self.restart_limits();
        }
        match input {
            Input::Acquire { call, by, keys, terms, wait } => self.acquire(call, by, keys, terms, wait),
            Input::Release { call, hold, within } => self.release(call, hold, within),
            Input::Renew { call, hold, lease, fence, within } => {
                // One renewal at a time. One whose caller is gone does not count.
                let is_open = |renewal: &Renewal| self.calls.contains_key(&renewal.call);
                let is_free = !self.claims.get(&hold).and_then(|it| it.renewal.as_ref()).is_some_and(is_open);
                self.begin_hold_call(call, CallKind::Renew, hold, within, |claim| {
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
                    // A check that needs no reply of the server is answered now.
                    self.claim_is_late(hold);
                    self.begin_hold_call(call, CallKind::Check(hold), hold, within, |claim| {
                        claim.checks.push(call);
                        true
                    });
                }
            }
            Input::Keep { hold, idle } => self.keep(hold, idle),
            Input::Use { call, hold, most } => self.use_again(call, hold, most),
            Input::Request { call, words, within } => {
                let only_looks = words.first().is_some_and(|word| word == b"LOCK.INFO");
                self.begin(call, CallKind::Request { words, not_before: 0, again: only_looks }, Some(within));
            }
            Input::Drop { call } => self.drop_call(call),
            Input::Close { call, within } => self.close(call, within),
            Input::Opened { pair } => self.opened(pair),
            Input::Replied { pair, channel, reply } => self.handle_reply(pair, channel, reply),
            Input::Leave { id } => self.leave(id, "MOVED".into()),
            Input::Take { moved } => self.take_over(*moved),
            Input::Ended { pair } if self.is_current(pair) => self.end_pair(false),
            Input::Ended { .. } => {}
            Input::Wake => {
                self.wakes_at = None;
                self.check_times();
            }
        }
        self.open();
        self.send();
        self.set_alarm();
    }

    /// The next output. The driver calls this after every step, until there is none.
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
        // The server releases an ephemeral hold as soon as it notices that the session's connection has ended.
        let alive_until = || self.pair.as_ref().map_or(0, |pair| pair.deadline(self.limit()));
        Some(self.until(claim).min(if claim.terms.ephemeral { alive_until() } else { Millis::MAX }))
    }

    /// The lease of this hold.
    pub fn lease(&self, hold: Id) -> Option<Millis> {
        Some(self.claims.get(&hold)?.hold()?.lease)
    }

    /// Whether no release is pending.
    pub fn is_settled(&self) -> bool {
        self.unwanted == 0
    }

    /// Whether the client is closed, and nothing is left to do.
    pub fn has_ended(&self) -> bool {
        self.is_closed && self.claims.is_empty() && self.pair.is_none()
    }

    /// All acquisitions and holds, with a key of each.
    pub fn keys(&self) -> impl Iterator<Item = (Id, &[u8])> {
        self.claims.iter().map(|(id, claim)| (*id, claim.keys.first().map_or(&[][..], |key| key)))
    }

    /// Until when the hold of this claim is certain; 0: it has none.
    fn until(&self, claim: &Claim) -> Millis {
        let Some(hold) = claim.hold() else { return 0 };
        let heartbeat = self.pair.as_ref().and_then(|pair| pair.heartbeat);
        let covers = |heartbeat: &pair::Heartbeat| claim.terms.watchdog && hold.bound && hold.known < heartbeat.next;
        let sure = heartbeat
            .filter(covers)
            .map(|it| it.asked.saturating_add(certain(hold.lease.saturating_mul(it.sure) / 1000)));
        hold.until.max(sure.unwrap_or(0))
    }

    // Calls of the program.

    /// Begins a call.
    fn begin(&mut self, call: Id, kind: CallKind, within: Option<Millis>) {
        if self.is_closed {
            return self.outputs.push_back(Output::Ended { call, outcome: Outcome::Closed });
        }
        let bound = within.map(|within| self.now.saturating_add(within));
        bound.into_iter().for_each(|bound| self.alarms.set(bound, call));
        self.calls.insert(call, Call { kind, bound });
        self.ready.insert((Rank::New, 0, call));
    }

    /// Ends a call, if its caller still waits.
    fn finish(&mut self, call: Id, outcome: Outcome) {
        if self.calls.remove(&call).is_some() {
            self.clear_alarm(call);
            self.outputs.push_back(Output::Ended { call, outcome });
        }
    }

    fn acquire(&mut self, call: Id, by: Bytes, keys: Vec<Bytes>, terms: Terms, wait: Wait) {
        let within = match wait {
            Wait::No => Some(self.settings.limit),
            Wait::For(time) => Some(time.saturating_add(self.settings.grace)),
            Wait::Forever => None,
        };
        self.begin(call, CallKind::Acquire, within);
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
            contended: false,
            uses: 0,
            idle: None,
        };
        self.claims.insert(call, claim);
    }

    fn release(&mut self, call: Id, hold: Id, within: Millis) {
        self.begin(call, CallKind::Release, Some(within));
        match self.claims.get_mut(&hold).filter(|claim| claim.wanted && claim.hold().is_some()) {
            None => self.finish(call, Outcome::NotHeld),
            Some(claim) => {
                claim.release = Some(call);
                self.begin_release(hold);
            }
        }
    }

    /// The use of a hold ends. The hold is cached, or released if another client waits for it.
    fn keep(&mut self, hold: Id, idle: Millis) {
        let until = self.now.saturating_add(idle);
        match self.claims.get_mut(&hold) {
            None => {}
            Some(claim) if claim.wanted && claim.hold().is_some() && !claim.contended => {
                claim.idle = Some(until);
                self.alarms.set(until, hold);
            }
            Some(_) => self.drop_call(hold),
        }
    }

    /// Uses a cached hold. An uncertain one is released instead: a new request takes no longer than asking whether it
    /// is held.
    fn use_again(&mut self, call: Id, hold: Id, most: u32) {
        let is_held = self.is_held(hold, self.now);
        let outcome = match self.claims.get_mut(&hold) {
            Some(claim) if is_held && !(claim.contended && claim.uses >= most) => {
                claim.idle = None;
                claim.uses = claim.uses.saturating_add(claim.contended.into());
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

    /// Another client waits for the lock. This event may arrive before the grant.
    fn contended(&mut self, id: Id) {
        match self.claims.get_mut(&id).filter(|claim| claim.wanted) {
            Some(claim) if claim.idle.is_some() => self.begin_release(id),
            // Several keys cause an event each, and a renewal causes them again. The count of uses does not restart.
            Some(claim) if !claim.contended => (claim.contended, claim.uses) = (true, 1),
            _ => {}
        }
    }

    /// Begins a call about a hold. `note` records it there, and returns false if the hold is being renewed already.
    fn begin_hold_call(
        &mut self,
        call: Id,
        kind: CallKind,
        hold: Id,
        within: Millis,
        note: impl FnOnce(&mut Claim) -> bool,
    ) {
        self.begin(call, kind, Some(within));
        let claim = self.claims.get_mut(&hold).filter(|claim| claim.wanted && claim.hold().is_some());
        match claim.map(note) {
            Some(true) => self.touch(hold),
            Some(false) => self.finish(call, Outcome::Refused("ERR it is being renewed".into())),
            None => self.finish(call, Outcome::NotHeld),
        }
    }

    fn drop_call(&mut self, call: Id) {
        self.calls.remove(&call);
        self.clear_alarm(call);
        if self.claims.get(&call).is_some_and(|claim| claim.wanted) {
            self.begin_release(call);
        }
    }

    fn close(&mut self, call: Id, within: Millis) {
        self.begin(call, CallKind::Close, Some(within));
        self.is_closed = true;
        let open: Vec<Id> = self.calls.keys().copied().filter(|other| *other != call).collect();
        for other in open {
            if !matches!(self.calls.get(&other), Some(Call { kind: CallKind::Release, .. })) {
                self.finish(other, Outcome::Closed);
            }
        }
        let wanted: Vec<Id> = self.claims.iter().filter(|(_, claim)| claim.wanted).map(|(id, _)| *id).collect();
        wanted.into_iter().for_each(|id| self.begin_release(id));
    }

    // The states of claims.

    /// The program does not want this claim any more: the core withdraws or releases it, at whatever stage.
    fn begin_release(&mut self, id: Id) {
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

    /// Removes a claim of which the server has neither a hold nor a request.
    fn forget(&mut self, id: Id) {
        if let Some(claim) = self.claims.remove(&id) {
            self.owners.remove(&claim.owner);
            self.unwanted -= usize::from(!claim.wanted);
        }
        self.clear_alarm(id);
    }

    /// Handles the loss of a hold. What may be left at the server is released: other keys, or, without `is_gone`, the
    /// hold itself.
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
        if is_gone && is_all { self.forget(id) } else { self.begin_release(id) }
    }

    /// A late grant did not count: the lock is requested again, or the call ends if it does not wait.
    fn ask_again(&mut self, id: Id) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        (claim.stage, claim.renewal, claim.asked_before) = (Stage::New, None, true);
        if claim.wait == Wait::No {
            self.finish(id, Outcome::NotGranted);
            return self.begin_release(id);
        }
        self.touch(id);
    }

    /// Gives up a claim that another server serves: the driver hands it to that server's core.
    fn leave(&mut self, id: Id, error: String) {
        let until = self.claims.get(&id).map_or(0, |claim| self.until(claim));
        let Some(mut claim) = self.claims.remove(&id) else { return };
        self.owners.remove(&claim.owner);
        self.unwanted -= usize::from(!claim.wanted);
        if let Some(pair) = &mut self.pair {
            // A pending reply is ignored: the claim may have returned by the time it arrives.
            pair.unanswered.iter_mut().filter(|sent| sent.id == id).for_each(|sent| sent.id = NO_CALL);
        }
        claim.detach(until);
        // Two servers that redirect to each other: a pause precedes each further request.
        if claim.has_moved {
            claim.not_before = self.now.saturating_add(RETRY_PAUSE);
        }
        (claim.has_moved, claim.asking) = (true, error.starts_with("ASK"));
        let renewal = claim.renewal.as_ref().map(|renewal| renewal.call);
        let calls = claim.checks.iter().copied().chain(claim.release).chain(renewal).chain([id]);
        let calls: Vec<_> = calls.filter_map(|call| Some((call, self.calls.remove(&call)?))).collect();
        calls.iter().map(|(call, _)| *call).chain([id]).for_each(|id| self.clear_alarm(id));
        self.outputs.push_back(Output::Moved { moved: Box::new(Moved { id, claim, calls }), error });
    }

    fn take_over(&mut self, Moved { id, mut claim, calls }: Moved) {
        claim.asked_before = true;
        // At whatever stage it is, it counts as requested: its hold or request moves here with the slot.
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
            self.begin_release(id);
        }
    }

    fn is_elsewhere(&self, error: &str) -> bool {
        self.in_cluster && (error.starts_with("MOVED") || error.starts_with("ASK "))
    }

    /// Marks a claim that may have something to send.
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
        // A grant with less than half of its lease left does not count before a renewal is answered.
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

    /// The server does not renew a hold for this session any more: a renewal binds it again.
    fn unbound(&mut self, id: Id) {
        let until = self.claims.get(&id).map_or(0, |claim| self.until(claim));
        if let Some(hold) = self.claims.get_mut(&id).and_then(Claim::hold_mut) {
            (hold.until, hold.bound) = (until, false);
        }
        self.touch(id);
    }

    /// Handles an error, in a reply or an event, for an acquisition or a renewal.
    fn refused(&mut self, id: Id, error: String) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let is_unsure = claim.asked_before || error.starts_with("UNCONFIRMED");
        if claim.hold().is_some() && is_overwritten(&error) {
            return self.lose(id, LossReason::Changed, true);
        }
        if let Stage::Held(hold) = &mut claim.stage {
            // A refused renewal revokes nothing.
            (hold.confirming, hold.left) = (false, 0);
            claim.not_before = self.now.saturating_add(RETRY_PAUSE);
            if claim.is_late(id) {
                if claim.wait == Wait::No || !pair::is_passing(&error) {
                    self.finish(id, Outcome::Refused(error));
                    return self.begin_release(id);
                }
                claim.renewal.iter_mut().for_each(|renewal| renewal.is_sent = false);
            } else if let Some(renewal) = claim.renewal.take_if(|renewal| renewal.is_sent) {
                self.finish(renewal.call, Outcome::Refused(error));
            }
            return self.unbound(id);
        }
        if claim.wanted && claim.wait != Wait::No && pair::is_passing(&error) {
            (claim.stage, claim.refusal) = (Stage::New, Some(error));
            claim.not_before = self.now.saturating_add(RETRY_PAUSE);
            return self.touch(id);
        }
        claim.stage = Stage::New;
        self.finish(id, Outcome::Refused(error));
        if is_unsure { self.begin_release(id) } else { self.forget(id) }
    }

    // Replies and events.

    fn is_current(&self, number: u64) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.number == number)
    }

    fn opened(&mut self, number: u64) {
        let replaced = Pair::greeting(&self.replaced);
        let now = self.now;
        let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
        pair.stage = pair::Stage::Greeting;
        pair.promised = now;
        self.push_request(Channel::Session, replaced);
        self.ask_for_events(false);
    }

    fn push_request(&mut self, channel: Channel, words: Vec<Bytes>) {
        let pair = self.pair.as_ref().map(|pair| pair.number);
        self.outputs.extend(pair.map(|pair| Output::Send { pair, channel, words }));
    }

    fn ask_for_events(&mut self, waits: bool) {
        self.nexts += 1;
        if let Some(pair) = &mut self.pair {
            pair.asked = self.now;
        }
        self.push_request(Channel::Session, Pair::events_request(waits));
    }

    fn handle_reply(&mut self, number: u64, channel: Channel, reply: Reply) {
        let Some(pair) = self.pair.as_mut().filter(|pair| pair.number == number) else { return };
        let serves = channel == Channel::Requests && !matches!(reply, Reply::Error(_));
        let makes_sense = match channel {
            Channel::Session => self.handle_session_reply(reply),
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

    /// Handles a reply on the session's connection. `None`: it is malformed, or an error that ends the session.
    fn handle_session_reply(&mut self, reply: Reply) -> Option<()> {
        let pair = self.pair.as_mut()?;
        if let Reply::Error(error) = reply {
            return self.handle_session_error(error);
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
        // An operator unblocked the connection, or the server speaks another version.
        if reply == Reply::Null {
            pair.asks_at = Some(self.now.saturating_add(RETRY_PAUSE));
            return Some(());
        }
        let (asked, next, now) = (pair.asked, self.nexts, self.now);
        let mut events = Vec::new();
        for element in reply.elements()? {
            let event = Event::read(element)?;
            if event.kind == "heartbeat" { pair.read_heartbeat(&event.detail, next, now)? } else { events.push(event) }
        }
        (self.default_lease, self.pace) = (pair.default_lease, Some(pair.pace));
        let begins = pair.stage == pair::Stage::Greeting;
        pair.stage = pair::Stage::Standing;
        for event in events {
            self.event(event, asked)?;
        }
        self.ask_for_events(true);
        if begins {
            self.resume_claims();
        }
        Some(())
    }

    /// Handles an error reply to one of the session's own requests. `None`: the session ends.
    fn handle_session_error(&mut self, error: String) -> Option<()> {
        match (Advice::of(&error), self.pair.as_ref()?.stage) {
            (Advice::Retry, pair::Stage::Standing) => {
                self.pair.as_mut()?.asks_at = Some(self.now.saturating_add(RETRY_PAUSE));
                return Some(());
            }
            (Advice::Final, pair::Stage::Opening | pair::Stage::Greeting) if !pair::is_passing(&error) => {
                // Without the module, or with a wrong password, unsent requests can't succeed.
                self.end_unsent(Outcome::Refused(error));
            }
            _ => {}
        }
        None
    }

    /// Ends the calls that need a session, because the attempt to open one failed. An acquisition that began after the
    /// attempt waits for the next one. So does an acquisition with a wait, unless the server refused the session before
    /// the request was first sent. A release fails only if the server refused the session.
    fn end_unsent(&mut self, outcome: Outcome) {
        let began = self.pair.as_ref().map_or(self.now, |pair| pair.heard);
        let is_final = matches!(outcome, Outcome::Refused(_));
        let ends = |(id, call): (&Id, &Call)| match call.kind {
            CallKind::Acquire => self.claims.get(id).is_some_and(|claim| {
                claim.since <= began && (claim.wait == Wait::No || (is_final && claim.pair.is_none()))
            }),
            CallKind::Request { .. } => true,
            CallKind::Release => is_final,
            _ => false,
        };
        let ended: Vec<Id> = self.calls.iter().filter(|call| ends(*call)).map(|(id, _)| *id).collect();
        for call in ended {
            self.finish(call, outcome.clone());
            self.drop_call(call);
        }
    }

    /// The session is open: it takes over wanted holds, releases unwanted ones, and sends the requests that wait.
    fn resume_claims(&mut self) {
        let ids: Vec<Id> = self.claims.keys().copied().collect();
        ids.iter().for_each(|id| self.touch(*id));
        let waiting: Vec<Id> = self.calls.keys().copied().collect();
        self.ready.extend(waiting.into_iter().map(|call| (Rank::New, 0, call)));
    }

    fn event(&mut self, event: Event, asked: Millis) -> Option<()> {
        // Events of a claim that was removed are ignored.
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
                        self.begin_release(id);
                    }
                }
            }
            "unbound" => self.unbound(id),
            "contended" => self.contended(id),
            _ => {}
        }
        Some(())
    }

    /// Handles the reply to the oldest pending request. `None`: it is malformed, or an error that ends the session.
    fn replied(&mut self, reply: Reply) -> Option<()> {
        let Sent { id, kind, at } = self.pair.as_mut()?.unanswered.pop_front()?;
        let Some(kind) = kind else { return self.answered(id, reply) };
        let is_elsewhere = matches!(&reply, Reply::Error(error) if self.is_elsewhere(error));
        // An event that overtook the reply has ended the claim.
        let Some(claim) = self.claims.get_mut(&id) else { return Some(()) };
        claim.sent = None;
        if let Reply::Error(error) = &reply {
            if is_elsewhere {
                self.leave(id, error.clone());
                return Some(());
            }
            return match Advice::of(error) {
                Advice::End => None,
                Advice::Final if !matches!(kind, Kind::Release(_)) => {
                    self.refused(id, error.clone());
                    Some(())
                }
                _ => {
                    // The request is sent again after a pause; a release, until it succeeds.
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
                    claim.not_before = self.now.saturating_add(RETRY_PAUSE);
                    // The caller gets a lasting error immediately. The release is still repeated: the session renews
                    // the hold.
                    let call =
                        claim.release.take_if(|_| !pair::is_passing(error) && Advice::of(error) == Advice::Final);
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
            Kind::Release(_) => self.released(id, &reply)?,
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
        // The event of its loss came first, and the lock is requested again.
        if claim.hold().is_none() {
            self.touch(id);
            return Some(());
        }
        if is_waiting {
            if let Some(hold) = claim.hold_mut() {
                // The events of the confirmation may have arrived before.
                hold.confirming = hold.left > 0;
            }
            self.touch(id);
            return Some(());
        }
        let replies = reply.elements().unwrap_or(std::slice::from_ref(reply));
        if replies.contains(&Reply::Null) {
            let claim = self.claims.get(&id)?;
            let why = match claim.hold() {
                // It was lost between two sessions, or with a server instance that another one replaced.
                Some(hold) if !hold.bound => LossReason::Disconnected,
                _ if self.until(claim) <= self.now => LossReason::Expired,
                _ => LossReason::Changed,
            };
            self.lose(id, why, true);
            return Some(());
        }
        let token = replies.iter().map(Reply::number).collect::<Option<Vec<u64>>>()?.into_iter().max()?;
        let claim = self.claims.get(&id)?;
        // A hold without a watchdog is taken over with its remaining lease, which is not the lease that the program
        // named.
        let is_named = claim.terms.watchdog || claim.renewal.as_ref().is_some_and(|renewal| renewal.is_sent);
        let named = if is_named { lease } else { claim.hold().map_or(lease, |hold| hold.lease) };
        self.granted(id, token, named, at.saturating_add(certain(lease)));
        Some(())
    }

    fn released(&mut self, id: Id, reply: &Reply) -> Option<()> {
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
            claim.not_before = self.now.saturating_add(REASON_TIMEOUT);
            self.alarms.set(claim.not_before, id);
            return Some(());
        }
        call.into_iter().for_each(|call| self.finish(call, Outcome::Released));
        self.forget(id);
        Some(())
    }

    /// Continues a release of which one key is done, or one of several keys holds another type. In the latter case, the
    /// keys are released one by one from now on.
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
        let Some(Call { kind: CallKind::Request { not_before, .. }, .. }) = self.calls.get_mut(&call) else {
            return Some(());
        };
        match &reply {
            Reply::Error(error) if Advice::of(error) == Advice::Retry => {
                *not_before = self.now.saturating_add(RETRY_PAUSE);
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

    // Begin and end of sessions.

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

    /// Ends all calls and the session: everything is released, or the time for it is over.
    fn closed(&mut self) {
        let open: Vec<Id> = self.calls.keys().copied().collect();
        open.into_iter().for_each(|call| self.finish(call, Outcome::Closed));
        (self.claims, self.owners, self.unwanted) = (BTreeMap::new(), BTreeMap::new(), 0);
        self.alarms = Alarms::default();
        self.outputs.extend(self.pair.take().map(|pair| Output::End { pair: pair.number }));
    }

    /// Ends both connections. The next session resumes the claims. `by_limit`: the server was silent for too long.
    fn end_pair(&mut self, by_limit: bool) {
        if self.pair.as_ref().is_some_and(|pair| pair.stage == pair::Stage::Opening) {
            self.end_unsent(Outcome::Unanswered);
        }
        let ids: Vec<Id> = self.claims.keys().copied().collect();
        let mut failed_tries = Vec::new();
        for id in &ids {
            let until = self.claims.get(id).map_or(0, |claim| self.until(claim));
            let Some(claim) = self.claims.get_mut(id) else { continue };
            // An acquisition without a wait is sent again once, since a server may close idle connections. The second
            // time, it fails and is withdrawn.
            let is_last = matches!(claim.stage, Stage::Asked) && claim.asked_before || claim.is_late(*id);
            if claim.wait == Wait::No && claim.wanted && is_last {
                failed_tries.push(*id);
            }
            claim.detach(until);
            if claim.hold().is_some() {
                self.alarms.set(until, *id);
            }
        }
        let Some(pair) = self.pair.take() else { return };
        self.outputs.push_back(Output::End { pair: pair.number });
        self.replaced.extend(pair.id);
        let plain: Vec<Id> = pair.unanswered.iter().filter(|sent| sent.kind.is_none()).map(|sent| sent.id).collect();
        for call in plain {
            match self.calls.get_mut(&call).map(|call| &mut call.kind) {
                // It is sent once more, in the next session.
                Some(CallKind::Request { not_before, again, .. }) if *again => (*not_before, *again) = (0, false),
                _ => self.finish(call, Outcome::Unanswered),
            }
        }
        for id in failed_tries {
            self.finish(id, Outcome::Unanswered);
            self.begin_release(id);
        }
        for id in ids {
            if self.claims.get(&id).is_some_and(|it| it.wanted && it.terms.ephemeral && it.hold().is_some()) {
                self.lose(id, LossReason::Disconnected, false);
            }
        }
        // A pair that served a request, such as an idle one, is replaced immediately, but not more often than once in
        // LONGEST_PAUSE.
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

    // Requests to the server.

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
                pair.unanswered.push_back(Sent { id: NO_CALL, kind: None, at: now });
                let number = pair.number;
                let words = vec![b"ASKING".to_vec()];
                self.outputs.push_back(Output::Send { pair: number, channel: Channel::Requests, words });
            }
            pair.unanswered.push_back(Sent { id, kind, at: now });
            self.push_request(Channel::Requests, words);
        }
    }

    /// The next request of this claim or call; notes that it is sent.
    fn next_words(&mut self, id: Id, pair: u64, default: Millis, session: &[u8]) -> Option<(Option<Kind>, Vec<Bytes>)> {
        let now = self.now;
        if let Some(Call { kind: CallKind::Request { words, not_before, .. }, .. }) = self.calls.get_mut(&id) {
            if words.is_empty() || *not_before > now {
                return None;
            }
            // The words stay until the reply, because the request may have to be sent again.
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
                // The lease may be shorter from now on, and heartbeats may refer to the shorter one.
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

    /// Restarts all limits after a pause of this process. The core asks the server about holds before they count as
    /// lost.
    fn restart_limits(&mut self) {
        let now = self.now;
        self.asks_until = now.saturating_add(self.settings.limit);
        if let Some(pair) = &mut self.pair {
            (pair.heard, pair.promised) = (now, pair.promised.max(now));
        }
    }

    /// How long the server may be silent: an eighth of the shortest lease, as its last heartbeat says. The limit
    /// doubles with each session that it ends, so that a slow server gets more time.
    fn limit(&self) -> Millis {
        let limit =
            self.pace.map_or(self.settings.limit, |pace| (pace.max(SHORTEST_LIMIT) << self.doubled).min(LONGEST_LIMIT));
        limit.min(self.settings.limit)
    }

    fn check_times(&mut self) {
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

    /// Sets the alarm for the next deadline of this call or claim.
    fn set_next_alarm(&mut self, id: Id) {
        let of_call = self.calls.get(&id).map_or([None; 2], |call| match call.kind {
            CallKind::Request { not_before, .. } => [call.bound, Some(not_before)],
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

    /// Removes the alarm of a call or claim that has ended, unless a claim or call with the same number is left.
    fn clear_alarm(&mut self, id: Id) {
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
        match call.kind {
            CallKind::Close => {
                self.claims.clear();
                self.closed();
            }
            CallKind::Acquire => {
                // The request was queued, or it waits between two sessions.
                let has_waited = |it: &Claim| match it.stage {
                    _ if it.wait == Wait::No => false,
                    Stage::Asked => it.sent.is_none(),
                    _ => it.asked_before,
                };
                let has_waited = self.claims.get(&id).is_some_and(has_waited);
                let refusal = self.claims.get_mut(&id).and_then(|claim| claim.refusal.take());
                let unanswered = refusal.map_or(Outcome::Unanswered, Outcome::Refused);
                self.finish(id, if has_waited { Outcome::NotGranted } else { unanswered });
                self.begin_release(id);
            }
            // A check ends at its deadline, with a loss, so that its caller does not wait forever. A heartbeat may have
            // confirmed the hold meanwhile.
            CallKind::Check(hold) if self.is_held(hold, self.now) => self.finish(id, Outcome::Held),
            CallKind::Check(hold) => {
                self.finish(id, Outcome::Lost(LossReason::Disconnected));
                self.lose(hold, LossReason::Disconnected, false);
            }
            CallKind::Release => {
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
                // The release is overdue, and the session renews the hold: the session ends, unless the server takes no
                // writes.
                Some(pair) if claim.bound.is_some_and(|bound| bound <= now) => {
                    if pair.takes_writes {
                        return self.end_pair(false);
                    }
                    self.alarms.set(now.saturating_add(RETRY_PAUSE), id);
                }
                // No session renews it, and the next one replaces those that did. A lease after the deadline of its
                // release, it has expired.
                None if claim.bound.is_some_and(|bound| bound.saturating_add(lease) <= now) => return self.forget(id),
                _ => {}
            }
            return self.touch(id);
        }
        if claim.idle.is_some_and(|idle| idle <= now) {
            return self.begin_release(id);
        }
        let Some(hold) = claim.hold() else { return self.touch(id) };
        let until = self.until(claim);
        if until > now {
            return self.touch(id);
        }
        // Only a renewal counts: the acquisition's reply may be pending, too, if the event of the grant came first.
        let is_asked = matches!(claim.sent, Some(Kind::Renew(_))) || hold.confirming || claim.renewal.is_some();
        let stands = self.pair.as_ref().is_some_and(|pair| pair.stage == pair::Stage::Standing);
        // A silent server may have renewed the hold. The core asks it if it answers again within a quarter of the
        // lease.
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

    /// Outputs when to wake this core, if that is earlier than the driver knows. A core that is woken too early outputs
    /// the later time then.
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

    /// An ended call or claim leaves no alarm, and each other one has at most one, however often its time changes.
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
