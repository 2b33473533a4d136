//! A program that uses a client, and what it was told.

use crate::plan::Act;
use holdfast_core::{Bytes, Core, Id, Input, Outcome, Settings, Terms, Wait, Why};
use std::collections::BTreeMap;

/// The time limit of cores in lives, which are short.
pub const LIMIT: u64 = 700;
/// How much later than its time a wait may end.
pub const GRACE: u64 = 100;

/// A process with one client.
pub struct Program {
    pub core: Core,
    /// What its owners begin with.
    pub by: String,
    /// Calls that have not ended, by when they must have (ms), and what they are.
    pub calls: BTreeMap<Id, Open>,
    /// What it holds, by what it was told.
    pub holds: BTreeMap<Id, Held>,
    next: Id,
    /// Its steps as text.
    pub steps: Vec<String>,
    /// The first thing that it was told and never should be.
    pub wrong: Option<String>,
}

/// A call that has not ended.
#[derive(Clone, Debug)]
pub struct Open {
    pub bound: Option<u64>,
    pub asked: Option<(Vec<Bytes>, Terms)>,
}

/// A hold.
#[derive(Clone, Debug)]
pub struct Held {
    pub keys: Vec<Bytes>,
    pub terms: Terms,
    pub token: u64,
}

impl Program {
    pub fn new(client: usize, life: u64, seed: u64) -> Self {
        let settings =
            Settings { limit: LIMIT, grace: GRACE, unanswered: if seed.is_multiple_of(3) { 2 } else { 256 }, seed };
        Self {
            steps: vec![settings.to_string()],
            core: Core::new(settings),
            by: format!("c{client}.{life}:"),
            calls: BTreeMap::new(),
            holds: BTreeMap::new(),
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
        self.calls.insert(call, Open { bound, asked });
        call
    }

    fn pick(&self, pick: usize) -> Option<Id> {
        let count = self.holds.len();
        self.holds.keys().nth(pick.checked_rem(count)?).copied()
    }

    /// What an act asks of the core, if there is anything to do it to.
    pub fn acts(&mut self, act: &Act, now: u64) -> Option<Input> {
        Some(match act {
            Act::Acquire { keys, terms, wait, .. } => {
                let keys: Vec<Bytes> = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
                let bound = match wait {
                    Wait::No => Some(now + LIMIT),
                    Wait::For(time) => Some(now + time + GRACE),
                    Wait::Forever => None,
                };
                let call = self.call(bound, Some((keys.clone(), terms.clone())));
                Input::Acquire { call, by: self.by.clone().into_bytes(), keys, terms: terms.clone(), wait: *wait }
            }
            Act::Release { pick, within, .. } => self.release(self.pick(*pick)?, *within, now),
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
                let of_calls: Vec<Id> = self.calls.keys().chain(self.holds.keys()).copied().collect();
                let call = *of_calls.get(pick.checked_rem(of_calls.len())?)?;
                self.calls.remove(&call);
                self.holds.remove(&call);
                Input::Drop { call }
            }
            Act::Close { .. } => {
                self.holds.clear();
                Input::Close { call: self.call(Some(now + 1_000), None), within: 1_000 }
            }
            _ => return None,
        })
    }

    /// It counts on the hold no more from the moment at which it gives it back.
    pub fn release(&mut self, hold: Id, within: u64, now: u64) -> Input {
        self.holds.remove(&hold);
        Input::Release { call: self.call(Some(now + within), None), hold, within }
    }

    /// A call has ended.
    pub fn ended(&mut self, call: Id, outcome: &Outcome) {
        let Some(open) = self.calls.remove(&call) else {
            self.wrong = Some(format!("call {call} ended that nobody waits for: {outcome}"));
            return;
        };
        if let (Some((keys, terms)), Outcome::Granted(token)) = (open.asked, outcome) {
            self.holds.insert(call, Held { keys, terms, token: *token });
        }
    }

    /// A hold is lost.
    pub fn lost(&mut self, hold: Id, why: Why) {
        if self.holds.remove(&hold).is_none() {
            self.wrong = Some(format!("hold {hold} was lost that nobody has: {why}"));
        }
    }
}
