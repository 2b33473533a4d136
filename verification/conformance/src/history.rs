//! What the clients of a scenario were told, as one history, and the judgement on it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use histories::{Operation, Outcome as Told, Request, history, intervals, judge};

use crate::clock::{self, Micros};
use crate::driver::{Call, Loss, Outcome};
use crate::scenario::Terms;

/// A server rounds its clock down to a millisecond, so a lease may end this much before its client expects it.
const MARGIN: Micros = 2_000;

/// The history of a scenario.
#[derive(Debug, Default)]
pub struct History {
    asked: BTreeMap<String, Asked>,
    seen: Vec<Operation>,
    /// When somebody last did something behind the clients' backs: to a lock, or to all (none).
    meddled: BTreeMap<Option<String>, Micros>,
    /// Two uses of what was kept at the same time: to the server they are one hold.
    overlap: Option<String>,
}

/// An acquisition.
#[derive(Debug)]
struct Asked {
    client: String,
    keys: Vec<String>,
    terms: Terms,
    from: Micros,
    /// When its release began.
    released: Option<Micros>,
    stage: Stage,
    /// The token of what it became.
    fence: Option<u64>,
    /// It is another use of what was kept by this one.
    again: Option<String>,
    /// Whose use it is now, or was last: what is said of an earlier one may be read after the next one has it.
    user: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Runs,
    Held,
    /// Nobody uses it, and its client releases it at some time, or uses it again.
    Kept,
    /// The same, and its handle was dropped: that it was lost before may have been told, and not been read yet.
    GivenUp,
    /// Its end is in the history, or it never began.
    Over,
}

impl History {
    /// A client is about to ask.
    pub fn asks(&mut self, client: &str, hold: &str, keys: &[String], terms: &Terms) {
        let (keys, terms) = (keys.to_vec(), terms.clone());
        let asked = Asked {
            client: client.to_owned(),
            keys,
            terms,
            from: clock::now(),
            released: None,
            stage: Stage::Runs,
            fence: None,
            again: None,
            user: owner(client, hold),
        };
        self.asked.insert(owner(client, hold), asked);
    }

    /// The first use of a hold that was kept, if this is another one: for the server it is one hold.
    fn first_use(&self, client: &str, hold: &str, fence: u64) -> Option<String> {
        let this = owner(client, hold);
        let keys = &self.asked.get(&this).filter(|it| it.terms.keep.is_some())?.keys;
        let is_first = |it: &Asked| it.client == client && it.fence == Some(fence) && it.again.is_none();
        self.asked.iter().find(|(other, it)| **other != this && is_first(it) && it.keys == *keys).map(|it| it.0.clone())
    }

    /// The hold of which this is a use.
    fn hold_of(&self, client: &str, hold: &str) -> String {
        let owner = owner(client, hold);
        self.asked.get(&owner).and_then(|it| it.again.clone()).unwrap_or(owner)
    }

    /// How long an acquisition took that ended then.
    pub fn took(&self, client: &str, hold: &str, at: Micros) -> Micros {
        self.asked.get(&owner(client, hold)).map_or(0, |it| at.saturating_sub(it.from))
    }

    /// An acquisition has ended.
    pub fn acquired(&mut self, client: &str, hold: &str, outcome: &Outcome) {
        if let Some(fence) = outcome.fence.filter(|_| outcome.outcome == "held")
            && let Some(first) = self.first_use(client, hold, fence)
        {
            return self.used_again(&owner(client, hold), first, outcome);
        }
        let owner = owner(client, hold);
        let Some(asked) = self.asked.get_mut(&owner).filter(|it| it.stage == Stage::Runs) else { return };
        asked.fence = outcome.fence;
        let told = match (outcome.outcome.as_str(), outcome.fence) {
            ("held", Some(fence)) => Told::Token(fence),
            // A bounded wait may have ended by the client's own clock: that says nothing of the lock.
            ("not-granted", _) if asked.terms.wait == Some(0) => Told::Null,
            ("deadlock" | "wrong-type" | "invalid", _) => Told::Error,
            // It may have been granted, and is released then.
            _ => Told::Unknown,
        };
        asked.stage = if matches!(told, Told::Token(_)) { Stage::Held } else { Stage::Over };
        let lease = asked.terms.lease.filter(|_| !asked.terms.watched);
        let acquire = history::Acquire {
            owner: owner.clone(),
            limit: if asked.terms.shared { 0 } else { asked.terms.limit.unwrap_or(1) },
            lease: lease.map(|it| (it * 1_000).saturating_sub(MARGIN)),
            wait: asked.terms.wait != Some(0),
            several: asked.keys.len() > 1,
            ..history::Acquire::default()
        };
        let (from, to) = (asked.from, (told != Told::Unknown).then_some(outcome.at));
        for key in &asked.keys {
            let (process, key, request) = (client.to_owned(), key.clone(), Request::Acquire(acquire.clone()));
            self.seen.push(Operation { process, key, request, from, to, outcome: told });
        }
        if told == Told::Unknown {
            self.end(&owner, from, None);
        }
    }

    /// What a client kept is used again: it was held all the time, by the first one's owner.
    fn used_again(&mut self, owner: &str, first: String, outcome: &Outcome) {
        let Some(asked) = self.asked.get_mut(owner).filter(|it| it.stage == Stage::Runs) else { return };
        (asked.stage, asked.again) = (Stage::Over, Some(first.clone()));
        let from = asked.from;
        if let Some(kept) = self.asked.get_mut(&first)
            && kept.stage != Stage::Over
        {
            if kept.released.is_none() {
                self.overlap = Some(format!("{owner} uses what was kept while another one uses it: {kept:?}"));
            }
            // That the one before has given it back may be read later.
            (kept.stage, kept.released, kept.user) = (Stage::Held, None, owner.to_owned());
        }
        self.holds(&first, from, outcome.at);
    }

    /// A client gives a hold back from now on: it may have ended before that is answered, whatever becomes of the call.
    pub fn releases(&mut self, client: &str, hold: &str, from: Micros) {
        if let Some(asked) = self.asked.get_mut(&self.hold_of(client, hold)) {
            asked.released = Some(from);
        }
    }

    /// A call about a hold has ended.
    pub fn about(&mut self, client: &str, hold: &str, call: &Call, from: Micros, outcome: &Outcome) {
        let (this, owner) = (owner(client, hold), self.hold_of(client, hold));
        let is_meant = |it: &&mut Asked| it.stage == Stage::Held && it.user == this;
        let Some(asked) = self.asked.get_mut(&owner).filter(is_meant) else { return };
        let told = match (call, outcome.outcome.as_str()) {
            (_, "lost") => {
                let reason = outcome.reason.clone().unwrap_or_default();
                return self.lost(client, &Loss { hold: hold.to_owned(), reason, at: outcome.at });
            }
            (Call::Check { .. }, "held") => return self.holds(&owner, from, outcome.at),
            // It may end from now on, when its client releases it.
            (Call::Release { .. }, "released") if asked.terms.keep.is_some() => {
                (asked.stage, asked.released) = (Stage::Kept, Some(from));
                return;
            }
            // A release that had to be sent again can't tell that from a force (B17 of docs/client-protocol.md).
            (Call::Release { .. }, "released")
                if asked.keys.iter().any(|it| is_meddled(&self.meddled, it, asked.from)) =>
            {
                Told::Unknown
            }
            (Call::Release { .. }, "released") => Told::Left(0),
            (Call::Release { .. }, _) => Told::Unknown,
            // Of a renewal, a history needs to know nothing: it says how long a lease is at least.
            _ => return,
        };
        let to = (told != Told::Unknown).then_some(outcome.at);
        asked.stage = Stage::Over;
        for key in asked.keys.clone() {
            let process = client.to_owned();
            self.seen.push(Operation { process, key, request: Request::release(&owner), from, to, outcome: told });
        }
        if told == Told::Unknown {
            self.end(&owner, from, None);
        }
    }

    /// A client says that it holds something, and so it does: unless somebody ended that, and the word of it is on its way.
    fn holds(&mut self, owner: &str, from: Micros, to: Micros) {
        let Some(asked) = self.asked.get(owner) else { return };
        for key in &asked.keys {
            if !is_meddled(&self.meddled, key, asked.from) {
                let request = Request::Check { owner: owner.to_owned() };
                self.seen.push(Operation::new(&asked.client, key, request, (from, to), Told::Done));
            }
        }
    }

    /// Somebody does something to the server that may end any hold.
    pub fn forgets(&mut self) {
        self.meddled.insert(None, clock::now());
    }

    /// A client said that a hold is lost.
    pub fn lost(&mut self, client: &str, loss: &Loss) {
        let owner = self.hold_of(client, &loss.hold);
        let Some(asked) = self.asked.get_mut(&owner) else { return };
        if !matches!(asked.stage, Stage::Held | Stage::GivenUp) {
            return;
        }
        asked.stage = Stage::Over;
        let from = asked.from;
        match loss.reason.as_str() {
            // Who broke it is in the history already. The other keys the client gives back by itself.
            "forced" | "changed" if asked.keys.len() > 1 => self.end(&owner, from, None),
            "forced" | "changed" => {}
            _ => self.end(&owner, from, Some(loss.at)),
        }
    }

    /// A client no longer wants a hold, without saying more.
    pub fn ends(&mut self, client: &str, hold: &str) {
        let owner = self.hold_of(client, hold);
        if let Some(asked) = self.asked.get_mut(&owner).filter(|it| it.stage == Stage::Held) {
            (asked.stage, asked.released) = (Stage::GivenUp, asked.released.or(Some(clock::now())));
        }
    }

    /// A client ends, and all that it holds with it.
    pub fn all_end(&mut self, client: &str) {
        let owners: Vec<(String, Micros, Stage)> = self
            .asked
            .iter()
            .filter(|(_, it)| it.client == client)
            .map(|(owner, it)| (owner.clone(), it.from, it.stage))
            .collect();
        for (owner, from, stage) in owners {
            match stage {
                Stage::Held => self.end(&owner, clock::now(), None),
                // What becomes of it is said by its own end, if that comes.
                Stage::Runs => self.end(&owner, from, None),
                // Of these it is said at the end since when they may have ended.
                Stage::Kept | Stage::GivenUp | Stage::Over => continue,
            }
            if let Some(asked) = self.asked.get_mut(&owner)
                && stage == Stage::Held
            {
                asked.stage = Stage::Over;
            }
        }
    }

    /// A client's process was killed. What it held may have ended before: it may have been paused for longer than a lease.
    pub fn killed(&mut self, client: &str) {
        let is_its = |it: &Asked| it.client == client && matches!(it.stage, Stage::Held | Stage::Kept | Stage::GivenUp);
        let asked = self.asked.iter_mut().filter(|(_, it)| is_its(it));
        let owners: Vec<(String, Micros)> = asked
            .map(|(owner, it)| {
                it.stage = Stage::Over;
                (owner.clone(), it.from)
            })
            .collect();
        owners.into_iter().for_each(|(owner, from)| self.end(&owner, from, None));
    }

    /// Somebody broke a lock.
    pub fn broken(&mut self, key: &str, from: Micros) {
        self.meddled.insert(Some(key.to_owned()), clock::now());
        self.seen.push(Operation::new("somebody", key, Request::Force, (from, clock::now()), Told::Done));
    }

    /// The end of whatever this owner may have held.
    fn end(&mut self, owner: &str, from: Micros, to: Option<Micros>) {
        let Some(asked) = self.asked.get(owner) else { return };
        for key in &asked.keys {
            let (process, key, request) =
                ("the server".to_owned(), key.clone(), Request::End { owner: owner.to_owned() });
            let outcome = if to.is_some() { Told::Done } else { Told::Unknown };
            self.seen.push(Operation { process, key, request, from, to, outcome });
        }
    }

    /// How many operations were seen.
    pub fn operations(&self) -> usize {
        self.seen.len()
    }

    /// What was seen so far, in the format of histories.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        history::write(&self.seen, to)
    }

    /// Whether there is an order of all that explains what was told. What never ended may have been granted.
    ///
    /// # Errors
    ///
    /// The violation, in words.
    pub fn judge(&mut self) -> Result<(), String> {
        self.settle();
        self.overlap.clone().map_or(Ok(()), Err)?;
        intervals::check(&self.seen).map_err(|violation| violation.to_string())?;
        judge(&self.seen).map_err(|violation| violation.to_string())
    }

    /// The same for long histories, without that for which the judge would need exponential time: acquisitions of which nobody knows
    /// whether they were granted, and refusals, which those may explain. If all has an order, so has the rest.
    ///
    /// # Errors
    ///
    /// The violation, in words.
    pub fn judge_what_is_certain(&mut self) -> Result<(), String> {
        self.settle();
        self.overlap.clone().map_or(Ok(()), Err)?;
        let checked = intervals::check(&self.seen);
        let granted: BTreeSet<String> = self.seen.iter().filter_map(granted_to).map(str::to_owned).collect();
        self.seen.retain(|it| match &it.request {
            Request::Acquire(_) => granted_to(it).is_some(),
            Request::End { owner } => granted.contains(owner),
            // That it may have ended is said by an end of its own.
            Request::Release { .. } => it.outcome != Told::Unknown,
            _ => true,
        });
        checked.and_then(|()| judge(&self.seen)).map_err(|violation| violation.to_string())
    }

    /// Nothing more comes of what still runs.
    fn settle(&mut self) {
        let running: Vec<(String, Micros)> = self
            .asked
            .iter()
            .filter(|(_, it)| it.stage == Stage::Runs)
            .map(|(owner, it)| (owner.clone(), it.from))
            .collect();
        for (owner, from) in running {
            let unknown = Outcome { outcome: "unknown".to_owned(), at: from, ..Outcome::default() };
            let (client, hold) = owner.split_once('/').unwrap_or_default();
            self.acquired(client, hold, &unknown);
        }
        let unused = self.asked.iter_mut().filter(|(_, it)| matches!(it.stage, Stage::Kept | Stage::GivenUp));
        let unused: Vec<(String, Micros)> = unused
            .map(|(owner, it)| {
                it.stage = Stage::Over;
                (owner.clone(), it.released.unwrap_or(it.from))
            })
            .collect();
        unused.into_iter().for_each(|(owner, from)| self.end(&owner, from, None));
    }
}

/// Whether somebody has done something to a lock, or to all of them, since then.
fn is_meddled(meddled: &BTreeMap<Option<String>, Micros>, key: &str, since: Micros) -> bool {
    [Some(key.to_owned()), None].iter().filter_map(|it| meddled.get(it)).any(|at| *at >= since)
}

/// The owner of an acquisition that was granted.
fn granted_to(operation: &Operation) -> Option<&str> {
    match (&operation.request, operation.outcome) {
        (Request::Acquire(ask), Told::Token(_)) => Some(&ask.owner),
        _ => None,
    }
}

fn owner(client: &str, hold: &str) -> String {
    format!("{client}/{hold}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(history: &mut History, client: &str, hold: &str) {
        let terms = Terms { wait: Some(0), ..Terms::default() };
        history.asks(client, hold, &["k".to_owned()], &terms);
    }

    fn outcome(outcome: &str, fence: Option<u64>, reason: Option<&str>) -> Outcome {
        Outcome {
            outcome: outcome.to_owned(),
            fence,
            reason: reason.map(str::to_owned),
            at: clock::now(),
            ..Outcome::default()
        }
    }

    /// A holds, then B is granted it.
    fn a_then_b(between: impl FnOnce(&mut History), fence: u64) -> Result<(), String> {
        let mut history = History::default();
        asks(&mut history, "A", "a");
        history.acquired("A", "a", &outcome("held", Some(7), None));
        between(&mut history);
        asks(&mut history, "B", "b");
        history.acquired("B", "b", &outcome("held", Some(fence), None));
        history.judge()
    }

    #[test]
    fn two_holders_can_not_be_explained() {
        assert!(a_then_b(|_| {}, 8).is_err());
    }

    #[test]
    fn a_fence_that_does_not_grow_can_not_be_explained() {
        let release = |history: &mut History| {
            let call = Call::Release { hold: "a".to_owned() };
            history.about("A", "a", &call, clock::now(), &outcome("released", None, None));
        };
        assert_eq!(a_then_b(release, 8), Ok(()));
        assert!(a_then_b(release, 7).is_err());
    }

    #[test]
    fn reported_loss_ends_the_hold() {
        let check = |history: &mut History| {
            let call = Call::Check { hold: "a".to_owned() };
            history.about("A", "a", &call, clock::now(), &outcome("lost", None, Some("expired")));
        };
        assert_eq!(a_then_b(check, 8), Ok(()));
        assert_eq!(a_then_b(|history| history.broken("k", clock::now()), 8), Ok(()));
        assert_eq!(a_then_b(|history| history.all_end("A"), 8), Ok(()));
    }

    /// Each use of what is kept is one of the same hold, which ends at some time after the last of them.
    #[test]
    fn what_is_kept_is_one_hold_until_its_client_gives_it_back() {
        let seen = |again: u64, is_used: bool, fence: u64| {
            let mut history = History::default();
            let terms = Terms { wait: Some(0), keep: Some(1_000), ..Terms::default() };
            let release = |history: &mut History, hold: &str| {
                let call = Call::Release { hold: hold.to_owned() };
                history.releases("A", hold, clock::now());
                history.about("A", hold, &call, clock::now(), &outcome("released", None, None));
            };
            history.asks("A", "a", &["k".to_owned()], &terms);
            history.acquired("A", "a", &outcome("held", Some(7), None));
            release(&mut history, "a");
            a_moment_later();
            history.asks("A", "a2", &["k".to_owned()], &terms);
            history.acquired("A", "a2", &outcome("held", Some(again), None));
            if !is_used {
                release(&mut history, "a2");
            }
            a_moment_later();
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(fence), None));
            history.judge()
        };
        assert_eq!(seen(7, false, 8), Ok(()));
        assert_eq!(seen(8, false, 9), Ok(()));
        let mut history = History::default();
        for hold in ["a", "a2"] {
            history.asks("A", hold, &["k".to_owned()], &Terms { keep: Some(1_000), ..Terms::default() });
            history.acquired("A", hold, &outcome("held", Some(7), None));
        }
        assert!(history.judge().is_err_and(|it| it.contains("another one uses it")), "both at once");
        assert!(seen(7, true, 8).is_err(), "it is in use");
        assert!(seen(7, false, 7).is_err(), "another has the same fence");
        assert!(seen(6, false, 8).is_err(), "an older one");
    }

    /// The next one of a process has what is kept before it is read that the one before has given it back; then it is lost, of which
    /// only the next one is told.
    #[test]
    fn what_is_said_of_an_earlier_use_is_not_said_of_the_next_one() {
        let seen = |is_told: bool| {
            let mut history = History::default();
            let terms = Terms { wait: Some(500), keep: Some(1_000), ..Terms::default() };
            let release = |hold: &str| Call::Release { hold: hold.to_owned() };
            for hold in ["a", "a2"] {
                history.asks("A", hold, &["j".to_owned(), "k".to_owned()], &terms);
            }
            history.acquired("A", "a", &outcome("held", Some(7), None));
            let from = a_moment_later();
            history.releases("A", "a", from);
            history.acquired("A", "a2", &outcome("held", Some(7), None));
            history.about("A", "a", &release("a"), from, &outcome("released", None, None));
            // Somebody breaks the first lock, so the client gives back the second.
            history.broken("j", clock::now());
            a_moment_later();
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            let from = a_moment_later();
            history.releases("A", "a2", from);
            let end = if is_told { outcome("lost", None, Some("forced")) } else { outcome("released", None, None) };
            history.about("A", "a2", &release("a2"), from, &end);
            history.judge()
        };
        assert_eq!(seen(true), Ok(()));
        assert!(seen(false).is_err(), "it was not told");
    }

    fn a_moment_later() -> Micros {
        let now = clock::now();
        while clock::now() == now {}
        clock::now()
    }

    #[test]
    fn who_says_that_he_holds_what_another_has_is_found() {
        let check = |history: &mut History, from| {
            let call = Call::Check { hold: "a".to_owned() };
            history.about("A", "a", &call, from, &outcome("held", None, None));
        };
        let seen = |asked: fn() -> Micros, before: fn(&mut History)| {
            let mut history = History::default();
            asks(&mut history, "A", "a");
            history.acquired("A", "a", &outcome("held", Some(7), None));
            before(&mut history);
            let early = clock::now();
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            check(&mut history, asked().max(early));
            history.lost("A", &Loss { hold: "a".to_owned(), reason: "expired".to_owned(), at: clock::now() });
            history.judge()
        };
        assert!(seen(a_moment_later, |_| {}).is_err());
        assert_eq!(seen(|| 0, |_| {}), Ok(()));
        // The word of what somebody did to it may be on its way.
        assert_eq!(seen(a_moment_later, |history| history.broken("k", clock::now())), Ok(()));
        assert_eq!(seen(a_moment_later, History::forgets), Ok(()));
    }

    /// Two locks as one: somebody breaks the first, so the client gives back the second, and the next one has it. That this was
    /// told is read after the handle was dropped.
    #[test]
    fn loss_read_after_the_drop_happened_before_it() {
        let seen = |told: bool, keep: Option<u64>| {
            let mut history = History::default();
            let terms = Terms { wait: Some(0), keep, ..Terms::default() };
            history.asks("A", "a", &["j".to_owned(), "k".to_owned()], &terms);
            history.acquired("A", "a", &outcome("held", Some(7), None));
            history.broken("j", clock::now());
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            a_moment_later();
            history.ends("A", "a");
            if told {
                history.lost("A", &Loss { hold: "a".to_owned(), reason: "forced".to_owned(), at: clock::now() });
            }
            history.judge()
        };
        for keep in [None, Some(1_000)] {
            assert_eq!(seen(true, keep), Ok(()));
            assert!(seen(false, keep).is_err());
        }
    }

    /// It may be his own clock that says so, between two sessions.
    #[test]
    fn timed_out_wait_proves_nothing_about_the_lock() {
        let seen = |wait| {
            let mut history = History::default();
            history.asks("A", "a", &["k".to_owned()], &Terms { wait: Some(wait), ..Terms::default() });
            history.acquired("A", "a", &outcome("not-granted", None, None));
            history.judge()
        };
        assert!(seen(0).is_err());
        assert_eq!(seen(500), Ok(()));
    }

    #[test]
    fn a_call_that_fails_may_have_done_something() {
        let mut history = History::default();
        asks(&mut history, "A", "a");
        history.acquired("A", "a", &outcome("connection", None, None));
        asks(&mut history, "B", "b");
        history.acquired("B", "b", &outcome("held", Some(8), None));
        assert_eq!(history.judge(), Ok(()));
    }

    #[test]
    fn two_holders_are_found_among_many_of_whom_nobody_knows() {
        let seen = |fence| {
            let mut history = History::default();
            for number in 0..200 {
                let hold = number.to_string();
                asks(&mut history, "C", &hold);
                let ended = ["cancelled", "connection", "not-granted"][number % 3];
                history.acquired("C", &hold, &outcome(ended, None, None));
            }
            asks(&mut history, "A", "a");
            history.acquired("A", "a", &outcome("held", Some(7), None));
            if fence == 8 {
                let call = Call::Release { hold: "a".to_owned() };
                history.about("A", "a", &call, clock::now(), &outcome("connection", None, None));
            }
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(fence), None));
            history.judge_what_is_certain()
        };
        assert_eq!(seen(8), Ok(()));
        assert!(seen(9).is_err());
    }
}
