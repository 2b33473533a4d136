//! A program that uses a client, and what the client reported to it.

use crate::plan::Act;
use crate::text::Text;
use holdfast_core::{Bytes, Core, Id, Input, LossReason, Outcome, Settings, Terms, Wait};
use std::collections::BTreeMap;

/// The time limit of cores in these runs, which are short.
pub const LIMIT: u64 = 700;
/// How much later than its timeout a wait may end.
pub const GRACE: u64 = 100;

/// A process with one client.
pub struct Program {
    pub core: Core,
    /// The prefix of its owners.
    pub by: String,
    /// Calls that have not ended, with their latest end (ms).
    pub calls: BTreeMap<Id, Open>,
    /// The holds that its client has reported to it.
    pub holds: BTreeMap<Id, Held>,
    /// The cached locks, as far as it knows, and until when they are cached (ms).
    pub idle: BTreeMap<Id, (Held, u64)>,
    /// What it does if the hold that it tries to use no longer exists.
    pub then: Option<Input>,
    next: Id,
    /// Its steps as text.
    pub steps: Vec<String>,
    /// The first report that it should not have received.
    pub wrong: Option<String>,
}

/// A call that has not ended.
#[derive(Clone, Debug)]
pub struct Open {
    pub bound: Option<u64>,
    pub asked: Option<(Vec<Bytes>, Terms)>,
    pub uses: Option<Uses>,
}

/// The use of a hold, and the request to make if the hold no longer exists.
#[derive(Clone, Debug)]
pub struct Uses {
    hold: Id,
    or: Option<Wait>,
}

/// A hold.
#[derive(Clone, Debug)]
pub struct Held {
    pub keys: Vec<Bytes>,
    pub terms: Terms,
    pub token: u64,
}

impl Program {
    pub fn new(client: usize, run: u64, seed: u64) -> Self {
        let settings =
            Settings { limit: LIMIT, grace: GRACE, unanswered: if seed.is_multiple_of(3) { 2 } else { 256 }, seed };
        Self {
            steps: vec![Text(&settings).to_string()],
            core: Core::new(settings),
            by: format!("c{client}.{run}:"),
            calls: BTreeMap::new(),
            holds: BTreeMap::new(),
            idle: BTreeMap::new(),
            then: None,
            next: 1,
            wrong: None,
        }
    }

    /// The owner of a call.
    pub fn owner(&self, call: Id) -> Bytes {
        format!("{}{call}", self.by).into_bytes()
    }

    fn call(&mut self, bound: Option<u64>, asked: Option<(Vec<Bytes>, Terms)>) -> Id {
        let call = self.next;
        self.next += 1;
        self.calls.insert(call, Open { bound, asked, uses: None });
        call
    }

    fn pick(&self, pick: usize) -> Option<Id> {
        let count = self.holds.len();
        self.holds.keys().nth(pick.checked_rem(count)?).copied()
    }

    /// The input to the core for an event, if there is an object for it.
    pub fn acts(&mut self, act: &Act, now: u64) -> Option<Input> {
        Some(match act {
            Act::Acquire { keys, terms, wait, most, .. } => {
                let keys: Vec<Bytes> = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
                // Often a cached lock, so that it gets used.
                let suits = |held: &Held| terms.kept && (held.keys == keys || *most > 1);
                match self.idle.iter().find(|(_, (held, _))| suits(held)).map(|(hold, _)| *hold) {
                    Some(hold) => self.uses(Uses { hold, or: Some(*wait) }, *most, now),
                    None => self.asks(keys, terms.clone(), *wait, now),
                }
            }
            Act::Release { pick, within, keep, .. } => {
                let hold = self.pick(*pick)?;
                match self.holds.get(&hold) {
                    Some(held) if held.terms.kept && *keep == 0 => self.uses(Uses { hold, or: None }, 1, now),
                    Some(held) if held.terms.kept => self.keeps(hold, *keep, now),
                    _ => self.release(hold, *within, now),
                }
            }
            Act::Renew { pick, lease, .. } => {
                let hold = self.pick(*pick)?;
                Input::Renew { call: self.call(Some(now + 500), None), hold, lease: *lease, fence: None, within: 500 }
            }
            Act::Check { pick, .. } => {
                let hold = self.pick(*pick)?;
                Input::Check { call: self.call(Some(now + 500), None), hold, within: 500 }
            }
            Act::Ask { .. } => {
                let words = vec![b"LOCK.INFO".to_vec(), b"k".to_vec()];
                Input::Request { call: self.call(Some(now + 500), None), words, within: 500 }
            }
            Act::Drop { pick, .. } => {
                let of_calls: Vec<Id> =
                    self.calls.keys().chain(self.holds.keys()).chain(self.idle.keys()).copied().collect();
                let call = *of_calls.get(pick.checked_rem(of_calls.len())?)?;
                self.calls.remove(&call);
                self.holds.remove(&call);
                self.idle.remove(&call);
                Input::Drop { call }
            }
            Act::Close { .. } => {
                self.holds.clear();
                self.idle.clear();
                Input::Close { call: self.call(Some(now + 1_000), None), within: 1_000 }
            }
            _ => return None,
        })
    }

    fn asks(&mut self, keys: Vec<Bytes>, terms: Terms, wait: Wait, now: u64) -> Input {
        let bound = match wait {
            Wait::No => Some(now + LIMIT),
            Wait::For(time) => Some(now + time + GRACE),
            Wait::Forever => None,
        };
        let call = self.call(bound, Some((keys.clone(), terms.clone())));
        Input::Acquire { call, by: self.by.clone().into_bytes(), keys, terms, wait }
    }

    /// Uses a cached lock, or one that another use here has just released. The core replies immediately.
    fn uses(&mut self, uses: Uses, most: u32, now: u64) -> Input {
        let (call, hold) = (self.call(Some(now), None), uses.hold);
        self.calls.entry(call).and_modify(|open| open.uses = Some(uses));
        Input::Use { call, hold, most }
    }

    /// The program no longer relies on the hold, but may use it again.
    pub fn keeps(&mut self, hold: Id, idle: u64, now: u64) -> Input {
        let held = self.holds.remove(&hold);
        self.idle.extend(held.map(|held| (hold, (held, now + idle))));
        Input::Keep { hold, idle }
    }

    /// The program no longer relies on the hold once it releases it.
    pub fn release(&mut self, hold: Id, within: u64, now: u64) -> Input {
        self.holds.remove(&hold);
        Input::Release { call: self.call(Some(now + within), None), hold, within }
    }

    /// A call has ended.
    pub fn ended(&mut self, call: Id, outcome: &Outcome) {
        let Some(open) = self.calls.remove(&call) else {
            self.wrong = Some(format!("call {call} ended that nobody waits for: {outcome:?}"));
            return;
        };
        if let (Some((keys, terms)), Outcome::Granted(token)) = (open.asked, outcome) {
            self.holds.insert(call, Held { keys, terms, token: *token });
        }
        let Some(Uses { hold, or }) = open.uses else { return };
        let held = self.idle.remove(&hold).map(|(held, _)| held).or(self.holds.remove(&hold));
        match (outcome, held, or) {
            (Outcome::Held, Some(held), _) => drop(self.holds.insert(hold, held)),
            (Outcome::NotHeld, Some(held), Some(wait)) => {
                self.then = Some(self.asks(held.keys, held.terms, wait, open.bound.unwrap_or_default()));
            }
            (Outcome::NotHeld, Some(_), None) => {}
            _ => self.wrong = Some(format!("the use of hold {hold} ended so: {outcome:?}")),
        }
    }

    /// A hold is lost.
    pub fn lost(&mut self, hold: Id, why: LossReason) {
        if self.holds.remove(&hold).is_none() && self.idle.remove(&hold).is_none() {
            self.wrong = Some(format!("hold {hold} was lost that nobody has: {why}"));
        }
    }
}
