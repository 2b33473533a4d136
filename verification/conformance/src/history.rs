//! The observations of a scenario's clients as one history, and its check.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use histories::{Operation, Outcome as Observed, Request, check, history, intervals};

use crate::clock::{self, Micros};
use crate::driver::{Call, Loss, Outcome};
use crate::scenario::Terms;

/// A server rounds its clock down to a millisecond, so a lease may end this much before its client expects it.
const MARGIN: Micros = 2_000;

/// The history of a scenario.
#[derive(Debug, Default)]
pub struct History {
    asked: BTreeMap<String, Acquisition>,
    seen: Vec<Operation>,
    /// When another client last acted on a lock, or on all locks (none).
    changed_by_others: BTreeMap<Option<String>, Micros>,
    /// Two simultaneous uses of a cached lock: to the server they are one hold.
    overlap: Option<String>,
}

/// An acquisition.
#[derive(Debug)]
struct Acquisition {
    client: String,
    keys: Vec<String>,
    terms: Terms,
    from: Micros,
    /// When its release was sent.
    released: Option<Micros>,
    stage: Stage,
    /// The token of its grant.
    fence: Option<u64>,
    /// It is another use of the lock that this one cached.
    again: Option<String>,
    /// The current or last use. A report about an earlier use may be read after the next one has started.
    user: String,
    /// A step of the server's clock may have ended it.
    stepped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Runs,
    Held,
    /// No use: the client releases it at some time, or uses it again.
    Cached,
    /// The same, and its handle was dropped. The report of an earlier loss may not have been read yet.
    Dropped,
    /// Its end is in the history, or it never started.
    Over,
}

impl History {
    /// A client is about to send a request.
    pub fn asks(&mut self, client: &str, hold: &str, keys: &[String], terms: &Terms) {
        let (keys, terms) = (keys.to_vec(), terms.clone());
        let asked = Acquisition {
            client: client.to_owned(),
            keys,
            terms,
            from: clock::now(),
            released: None,
            stage: Stage::Runs,
            fence: None,
            again: None,
            user: owner(client, hold),
            stepped: false,
        };
        self.asked.insert(owner(client, hold), asked);
    }

    /// The first use of a cached hold, if this is a later one: to the server they are one hold.
    fn first_use(&self, client: &str, hold: &str, fence: u64) -> Option<String> {
        let this = owner(client, hold);
        let keys = &self.asked.get(&this).filter(|it| it.terms.keep.is_some())?.keys;
        let is_first = |it: &Acquisition| it.client == client && it.fence == Some(fence) && it.again.is_none();
        self.asked.iter().find(|(other, it)| **other != this && is_first(it) && it.keys == *keys).map(|it| it.0.clone())
    }

    /// The hold that this use belongs to.
    fn hold_of(&self, client: &str, hold: &str) -> String {
        let owner = owner(client, hold);
        self.asked.get(&owner).and_then(|it| it.again.clone()).unwrap_or(owner)
    }

    /// The duration of an acquisition that ended at this time.
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
        let observed = match (outcome.outcome.as_str(), outcome.fence) {
            ("held", Some(fence)) => Observed::Token(fence),
            ("held", None) => Observed::Done,
            // A wait with a timeout may have ended by the client's own clock, which says nothing about the lock.
            ("not-granted", _) if asked.terms.wait == Some(0) => Observed::Null,
            ("deadlock" | "wrong-type" | "invalid", _) => Observed::Error,
            // It may have been granted, and is then released.
            _ => Observed::Unknown,
        };
        asked.stage = if matches!(observed, Observed::Token(_) | Observed::Done) { Stage::Held } else { Stage::Over };
        // Redisson does not notice that its watchdog was too late. A later reply that shows the hold makes it certain
        // until then.
        let lease = asked.terms.lease.filter(|_| !asked.terms.watched || observed == Observed::Done);
        let acquire = history::Acquire {
            owner: owner.clone(),
            limit: if asked.terms.shared { 0 } else { asked.terms.limit.unwrap_or(1) },
            lease: lease.map(|it| (it * 1_000).saturating_sub(MARGIN)),
            wait: asked.terms.wait != Some(0),
            several: asked.keys.len() > 1,
            ..history::Acquire::default()
        };
        let (from, to) = (asked.from, (observed != Observed::Unknown).then_some(outcome.at));
        for key in &asked.keys {
            let (process, key, request) = (client.to_owned(), key.clone(), Request::Acquire(acquire.clone()));
            self.seen.push(Operation { process, key, request, from, to, outcome: observed });
        }
        if observed == Observed::Unknown {
            self.end(&owner, from, None);
        }
    }

    /// A cached lock is used again: the first use's owner held it all the time.
    fn used_again(&mut self, owner: &str, first: String, outcome: &Outcome) {
        let Some(asked) = self.asked.get_mut(owner).filter(|it| it.stage == Stage::Runs) else { return };
        (asked.stage, asked.again) = (Stage::Over, Some(first.clone()));
        let from = asked.from;
        if let Some(cached) = self.asked.get_mut(&first)
            && cached.stage != Stage::Over
        {
            if cached.released.is_none() {
                self.overlap = Some(format!("{owner} uses a cached lock while another use has it: {cached:?}"));
            }
            // The release of the previous use may be read later.
            (cached.stage, cached.released, cached.user) = (Stage::Held, None, owner.to_owned());
        }
        self.holds(&first, from, outcome.at);
    }

    /// A client releases a hold from now on. It may end before the call returns, whatever its outcome.
    pub fn releases(&mut self, client: &str, hold: &str, from: Micros) {
        if let Some(asked) = self.asked.get_mut(&self.hold_of(client, hold)) {
            asked.released = Some(from);
        }
    }

    /// A call about a hold has ended.
    pub fn about(&mut self, client: &str, hold: &str, call: &Call, from: Micros, outcome: &Outcome) {
        let (this, owner) = (owner(client, hold), self.hold_of(client, hold));
        let is_meant = |it: &&mut Acquisition| it.stage == Stage::Held && it.user == this;
        let Some(asked) = self.asked.get_mut(&owner).filter(is_meant) else { return };
        let observed = match (call, outcome.outcome.as_str()) {
            (_, "lost") => {
                let reason = outcome.reason.clone().unwrap_or_default();
                return self.lost(client, &Loss { hold: hold.to_owned(), reason, at: outcome.at });
            }
            (Call::Check { .. }, "held") => return self.holds(&owner, from, outcome.at),
            // It may end from now on, when its client releases it.
            (Call::Release { .. }, "released") if asked.terms.keep.is_some() => {
                (asked.stage, asked.released) = (Stage::Cached, Some(from));
                return;
            }
            // A release that had to be sent again can't tell that from a force or a clock step (B17 of
            // docs/client-protocol.md).
            (Call::Release { .. }, "released")
                if asked.stepped
                    || asked.keys.iter().any(|it| is_changed_by_others(&self.changed_by_others, it, asked.from)) =>
            {
                Observed::Unknown
            }
            (Call::Release { .. }, "released") => Observed::Left(0),
            (Call::Release { .. }, _) => Observed::Unknown,
            // A history need not record a renewal: it has the least duration of a lease.
            _ => return,
        };
        let to = (observed != Observed::Unknown).then_some(outcome.at);
        asked.stage = Stage::Over;
        // A client that can't release a hold may have lost it before: its process was paused, and no report has come.
        let ends = if outcome.outcome == "released" { from } else { asked.from };
        for key in asked.keys.clone() {
            let process = client.to_owned();
            self.seen.push(Operation { process, key, request: Request::release(&owner), from, to, outcome: observed });
        }
        if observed == Observed::Unknown {
            self.end(&owner, ends, None);
        }
    }

    /// A client reports a hold, and so it holds the lock, unless another client or a clock step ended the hold and the
    /// report of that is on its way.
    fn holds(&mut self, owner: &str, from: Micros, to: Micros) {
        let Some(asked) = self.asked.get(owner).filter(|it| !it.stepped) else { return };
        for key in &asked.keys {
            if !is_changed_by_others(&self.changed_by_others, key, asked.from) {
                let request = Request::Check { owner: owner.to_owned() };
                self.seen.push(Operation::new(&asked.client, key, request, (from, to), Observed::Done));
            }
        }
    }

    /// Another client runs a command that may end any hold.
    pub fn forgets(&mut self) {
        self.changed_by_others.insert(None, clock::now());
    }

    /// A client reported the loss of a hold.
    pub fn lost(&mut self, client: &str, loss: &Loss) {
        let owner = self.hold_of(client, &loss.hold);
        let Some(asked) = self.asked.get_mut(&owner) else { return };
        if !matches!(asked.stage, Stage::Held | Stage::Dropped) {
            return;
        }
        asked.stage = Stage::Over;
        let (from, released) = (asked.from, asked.released);
        match loss.reason.as_str() {
            // Redisson gives no reason. Its own release may be the cause: a check that runs at the same time may find its
            // effect. The history has all other causes already.
            "" => {
                if let Some(from) = released.filter(|from| *from <= loss.at) {
                    self.end(&owner, from, Some(loss.at));
                }
            }
            // The history has the force-release already. The client releases the other keys by itself.
            "forced" | "changed" if asked.keys.len() > 1 => self.end(&owner, from, None),
            "forced" | "changed" => {}
            _ => self.end(&owner, from, Some(loss.at)),
        }
    }

    /// A client dropped a hold without a report.
    pub fn ends(&mut self, client: &str, hold: &str) {
        let owner = self.hold_of(client, hold);
        if let Some(asked) = self.asked.get_mut(&owner).filter(|it| it.stage == Stage::Held) {
            (asked.stage, asked.released) = (Stage::Dropped, asked.released.or(Some(clock::now())));
        }
    }

    /// A client ends with all its holds.
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
                // Its outcome is recorded when its call ends, if it does.
                Stage::Runs => self.end(&owner, from, None),
                // The end of the history records when these may have ended.
                Stage::Cached | Stage::Dropped | Stage::Over => continue,
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
        let is_its =
            |it: &Acquisition| it.client == client && matches!(it.stage, Stage::Held | Stage::Cached | Stage::Dropped);
        let asked = self.asked.iter_mut().filter(|(_, it)| is_its(it));
        let owners: Vec<(String, Micros)> = asked
            .map(|(owner, it)| {
                it.stage = Stage::Over;
                (owner.clone(), it.from)
            })
            .collect();
        owners.into_iter().for_each(|(owner, from)| self.end(&owner, from, None));
    }

    /// Another client force-released a lock.
    pub fn broken(&mut self, key: &str, from: Micros) {
        let last = self.changed_by_others.entry(Some(key.to_owned())).or_default();
        *last = clock::now().max(*last);
        self.seen.push(Operation::new("another client", key, Request::Force, (from, clock::now()), Observed::Done));
    }

    /// A client sends a request that force-releases a lock. It may take effect at any time until
    /// [`forced`](Self::forced).
    pub fn forces(&mut self, key: &str) {
        self.changed_by_others.insert(Some(key.to_owned()), Micros::MAX);
    }

    /// A client has force-released a lock, or may have done so if it got no reply (`to` is `None`).
    pub fn forced(&mut self, client: &str, key: &str, from: Micros, to: Option<Micros>) {
        if to.is_some() {
            self.changed_by_others.insert(Some(key.to_owned()), clock::now());
        }
        // Redisson repeats a request without a reply, so it may take effect twice.
        for outcome in
            [Observed::Unknown, Observed::Done].into_iter().filter(|it| to.is_some() || *it == Observed::Unknown)
        {
            let (process, key) = (client.to_owned(), key.to_owned());
            self.seen.push(Operation { process, key, request: Request::Force, from, to, outcome });
        }
    }

    /// The server's clock steps forward: the lease of each hold that is not bound to a session may expire. `is_bound` is
    /// asked about a key and a token.
    pub fn stepped(&mut self, from: Micros, mut is_bound: impl FnMut(&str, u64) -> bool) {
        let mut ended = Vec::new();
        for (owner, it) in self.asked.iter_mut().filter(|(_, it)| it.stage != Stage::Over) {
            if !it.fence.is_some_and(|token| it.keys.iter().all(|key| is_bound(key, token))) {
                it.stepped = true;
                ended.push(owner.clone());
            }
        }
        ended.iter().for_each(|owner| self.end(owner, from, None));
    }

    /// The end of any hold of this owner.
    fn end(&mut self, owner: &str, from: Micros, to: Option<Micros>) {
        let Some(asked) = self.asked.get(owner) else { return };
        for key in &asked.keys {
            let (process, key, request) =
                ("the server".to_owned(), key.clone(), Request::End { owner: owner.to_owned() });
            let outcome = if to.is_some() { Observed::Done } else { Observed::Unknown };
            self.seen.push(Operation { process, key, request, from, to, outcome });
        }
    }

    /// The number of observed operations.
    pub fn operations(&self) -> usize {
        self.seen.len()
    }

    /// Writes the observations in the format of histories.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        history::write(&self.seen, to)
    }

    /// Whether some order of all operations explains the observations. An acquisition without an end may have been
    /// granted.
    ///
    /// # Errors
    ///
    /// A description of the violation.
    pub fn verify(&mut self) -> Result<(), String> {
        self.settle();
        self.overlap.clone().map_or(Ok(()), Err)?;
        intervals::check(&self.seen).map_err(|violation| violation.to_string())?;
        check(&self.seen).map_err(|violation| violation.to_string())
    }

    /// Checks a long history by its intervals. Then keeps only operations that a search can order in a short time. It
    /// removes acquisitions with an unknown outcome, and refusals that those may explain. If all operations have an
    /// order, the remaining ones have one, too.
    ///
    /// # Errors
    ///
    /// A description of the violation.
    pub fn verify_intervals(&mut self) -> Result<(), String> {
        self.settle();
        self.overlap.clone().map_or(Ok(()), Err)?;
        let checked = intervals::check(&self.seen);
        let granted: BTreeSet<String> = self.seen.iter().filter_map(granted_to).map(str::to_owned).collect();
        self.seen.retain(|it| match &it.request {
            Request::Acquire(_) => granted_to(it).is_some(),
            Request::End { owner } => granted.contains(owner),
            // An `End` in the history allows for the effect of such a release.
            Request::Release { .. } => it.outcome != Observed::Unknown,
            _ => true,
        });
        checked.map_err(|violation| violation.to_string())
    }

    /// Running calls have no further effect.
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
        let unused = self.asked.iter_mut().filter(|(_, it)| matches!(it.stage, Stage::Cached | Stage::Dropped));
        let unused: Vec<(String, Micros)> = unused
            .map(|(owner, it)| {
                it.stage = Stage::Over;
                (owner.clone(), it.released.unwrap_or(it.from))
            })
            .collect();
        unused.into_iter().for_each(|(owner, from)| self.end(&owner, from, None));
    }
}

/// Whether another client has changed a lock, or all of them, since then.
fn is_changed_by_others(changed_by_others: &BTreeMap<Option<String>, Micros>, key: &str, since: Micros) -> bool {
    [Some(key.to_owned()), None].iter().filter_map(|it| changed_by_others.get(it)).any(|at| *at >= since)
}

/// The owner of an acquisition that was granted.
fn granted_to(operation: &Operation) -> Option<&str> {
    match (&operation.request, operation.outcome) {
        (Request::Acquire(ask), Observed::Token(_) | Observed::Done) => Some(&ask.owner),
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
        history.verify()
    }

    #[test]
    fn two_holders_are_refused() {
        assert!(a_then_b(|_| {}, 8).is_err());
    }

    /// Redisson's holds have no token.
    #[test]
    fn holder_beside_one_without_token_is_refused() {
        let seen = |lease, between: fn(&mut History, Micros), after: fn(&mut History, Micros)| {
            let mut history = History::default();
            let terms = Terms { wait: Some(0), lease: Some(lease), watched: true, ..Terms::default() };
            history.asks("R", "r", &["k".to_owned()], &terms);
            history.acquired("R", "r", &outcome("held", None, None));
            between(&mut history, a_moment_later());
            a_moment_later();
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            after(&mut history, a_moment_later());
            history.verify()
        };
        let release = |history: &mut History, from| {
            history.releases("R", "r", from);
            let call = Call::Release { hold: "r".to_owned() };
            history.about("R", "r", &call, from, &outcome("released", None, None));
        };
        let check = |history: &mut History, from| {
            history.about("R", "r", &Call::Check { hold: "r".to_owned() }, from, &outcome("held", None, None));
        };
        assert!(seen(60_000, |_, _| {}, |_, _| {}).is_err(), "during its lease");
        assert_eq!(seen(60_000, release, |_, _| {}), Ok(()));
        assert_eq!(seen(60_000, |history, from| history.forced("R", "k", from, Some(clock::now())), |_, _| {}), Ok(()));
        assert_eq!(seen(60_000, |history, from| history.forced("R", "k", from, None), |_, _| {}), Ok(()));
        assert_eq!(seen(2, |_, _| {}, |_, _| {}), Ok(()), "its watchdog may have come too late");
        assert!(seen(2, |_, _| {}, check).is_err(), "it did not");
        assert!(seen(2, |_, _| {}, release).is_err(), "it did not");
    }

    /// Redisson finds its hold lost. Its own release explains that from when it was sent, and a force does. Nothing else
    /// does during its lease.
    #[test]
    fn loss_without_reason_is_explained_by_release_or_force() {
        let seen = |before: fn(&mut History), after: fn(&mut History), call: fn(String) -> Call| {
            let mut history = History::default();
            let terms = Terms { wait: Some(0), lease: Some(60_000), ..Terms::default() };
            history.asks("R", "r", &["k".to_owned()], &terms);
            history.acquired("R", "r", &outcome("held", None, None));
            a_moment_later();
            before(&mut history);
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            a_moment_later();
            after(&mut history);
            let call = call("r".to_owned());
            history.about("R", "r", &call, a_moment_later(), &outcome("lost", None, None));
            // The reply of the release is read last.
            let release = Call::Release { hold: "r".to_owned() };
            history.about("R", "r", &release, clock::now(), &outcome("released", None, None));
            history.verify()
        };
        let release = |history: &mut History| history.releases("R", "r", clock::now());
        let force = |history: &mut History| history.broken("k", clock::now());
        for call in [|hold| Call::Check { hold }, |hold| Call::Release { hold }] {
            assert_eq!(seen(release, |_| {}, call), Ok(()));
            assert_eq!(seen(force, release, call), Ok(()));
            assert!(seen(|_| {}, release, call).is_err(), "the next holder was granted it before");
        }
        assert!(seen(|_| {}, |_| {}, |hold| Call::Check { hold }).is_err(), "it was not released");
        let release_later = |history: &mut History| history.releases("R", "r", Micros::MAX);
        assert!(seen(release_later, |_| {}, |hold| Call::Check { hold }).is_err(), "it was released after the reply");
        assert_eq!(seen(force, release_later, |hold| Call::Check { hold }), Ok(()));
    }

    /// A forward step may end the lease of a hold that is not bound to a session.
    #[test]
    fn clock_step_may_end_unbound_hold() {
        for is_bound in [false, true] {
            let stepped = a_then_b(|history| history.stepped(clock::now(), |_, _| is_bound), 8);
            assert_eq!(stepped.is_err(), is_bound);
        }
    }

    /// The first request of a release may have met a hold that was there, and its reply was lost.
    #[test]
    fn release_after_clock_step_shows_no_hold() {
        let seen = |is_bound| {
            let mut history = History::default();
            asks(&mut history, "A", "a");
            history.acquired("A", "a", &outcome("held", Some(7), None));
            history.stepped(a_moment_later(), |_, _| is_bound);
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            let call = Call::Release { hold: "a".to_owned() };
            history.about("A", "a", &call, a_moment_later(), &outcome("released", None, None));
            history.verify()
        };
        assert_eq!(seen(false), Ok(()));
        assert!(seen(true).is_err());
    }

    /// Its process may have been paused for longer than the lease.
    #[test]
    fn hold_that_could_not_be_released_may_have_ended_before() {
        let seen = |released| {
            a_then_b(
                |history| {
                    let (from, call) = (a_moment_later(), Call::Release { hold: "a".to_owned() });
                    asks(history, "C", "c");
                    history.acquired("C", "c", &outcome("held", Some(8), None));
                    history.about("A", "a", &call, from + 1, &outcome(released, None, None));
                },
                9,
            )
        };
        assert!(seen("connection").is_err_and(|it| it.contains('b')), "C holds it");
        assert!(seen("released").is_err());
    }

    #[test]
    fn fence_that_does_not_increase_is_refused() {
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

    /// Every use of a cached lock is one of the same hold, which ends some time after the last of them.
    #[test]
    fn cached_lock_is_one_hold_until_released() {
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
            history.verify()
        };
        assert_eq!(seen(7, false, 8), Ok(()));
        assert_eq!(seen(8, false, 9), Ok(()));
        let mut history = History::default();
        for hold in ["a", "a2"] {
            history.asks("A", hold, &["k".to_owned()], &Terms { keep: Some(1_000), ..Terms::default() });
            history.acquired("A", hold, &outcome("held", Some(7), None));
        }
        assert!(history.verify().is_err_and(|it| it.contains("another use has it")), "both at once");
        assert!(seen(7, true, 8).is_err(), "it is in use");
        assert!(seen(7, false, 7).is_err(), "another hold with the same fence");
        assert!(seen(6, false, 8).is_err(), "an earlier one");
    }

    /// The next use in a process starts before the release of the previous one is read. Then the hold is lost, and only
    /// the next use is notified.
    #[test]
    fn report_about_earlier_use_does_not_concern_next_use() {
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
            // Another client force-releases the first lock, so the client releases the second.
            history.broken("j", clock::now());
            a_moment_later();
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            let from = a_moment_later();
            history.releases("A", "a2", from);
            let end = if is_told { outcome("lost", None, Some("forced")) } else { outcome("released", None, None) };
            history.about("A", "a2", &release("a2"), from, &end);
            history.verify()
        };
        assert_eq!(seen(true), Ok(()));
        assert!(seen(false).is_err(), "it was not notified");
    }

    fn a_moment_later() -> Micros {
        let now = clock::now();
        while clock::now() == now {}
        clock::now()
    }

    #[test]
    fn check_of_a_lock_of_another_client_is_refused() {
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
            history.verify()
        };
        assert!(seen(a_moment_later, |_| {}).is_err());
        assert_eq!(seen(|| 0, |_| {}), Ok(()));
        // The report of another client's action may still arrive.
        assert_eq!(seen(a_moment_later, |history| history.broken("k", clock::now())), Ok(()));
        assert_eq!(seen(a_moment_later, History::forgets), Ok(()));
    }

    /// Two locks in one hold: another client force-releases the first, so the client releases the second, and the next
    /// client is granted it. The report of this is read after the handle was dropped.
    #[test]
    fn loss_read_after_drop_happened_before_it() {
        let seen = |is_reported: bool, keep: Option<u64>| {
            let mut history = History::default();
            let terms = Terms { wait: Some(0), keep, ..Terms::default() };
            history.asks("A", "a", &["j".to_owned(), "k".to_owned()], &terms);
            history.acquired("A", "a", &outcome("held", Some(7), None));
            history.broken("j", clock::now());
            asks(&mut history, "B", "b");
            history.acquired("B", "b", &outcome("held", Some(8), None));
            a_moment_later();
            history.ends("A", "a");
            if is_reported {
                history.lost("A", &Loss { hold: "a".to_owned(), reason: "forced".to_owned(), at: clock::now() });
            }
            history.verify()
        };
        for keep in [None, Some(1_000)] {
            assert_eq!(seen(true, keep), Ok(()));
            assert!(seen(false, keep).is_err());
        }
    }

    /// Between two sessions, the client ends a wait by its own clock.
    #[test]
    fn timed_out_wait_says_nothing_about_lock() {
        let seen = |wait| {
            let mut history = History::default();
            history.asks("A", "a", &["k".to_owned()], &Terms { wait: Some(wait), ..Terms::default() });
            history.acquired("A", "a", &outcome("not-granted", None, None));
            history.verify()
        };
        assert!(seen(0).is_err());
        assert_eq!(seen(500), Ok(()));
    }

    #[test]
    fn failed_call_may_have_taken_effect() {
        let mut history = History::default();
        asks(&mut history, "A", "a");
        history.acquired("A", "a", &outcome("connection", None, None));
        asks(&mut history, "B", "b");
        history.acquired("B", "b", &outcome("held", Some(8), None));
        assert_eq!(history.verify(), Ok(()));
    }

    #[test]
    fn two_holders_are_found_among_many_unknown_outcomes() {
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
            history.verify_intervals()
        };
        assert_eq!(seen(8), Ok(()));
        assert!(seen(9).is_err());
    }
}
