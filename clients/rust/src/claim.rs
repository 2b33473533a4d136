//! One acquisition: what is asked for, what it is at, and whoever waits for that to change.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::changes::Changes;
use crate::error::{Error, Why, refused_in_words};
use crate::names::{Keys, Owner};
use crate::session::{LONGEST_LEASE, SessionRef};
use crate::state::{Errand, Renewal, Stage, State};
use crate::terms::{Deadline, Lease, Terms};
use crate::wire::{News, Reply};

/// What is known of a hold without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Held,
    /// Its lease may be over, unless the server has renewed it.
    InDoubt,
    Lost(Why),
}

#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) deadline: Deadline,
    inner: Mutex<Inner>,
    changes: Changes,
}

#[derive(Debug)]
struct Inner {
    terms: Terms,
    state: State<SessionRef>,
    /// How long the lease is that was asked for last: the server's default can change.
    asked: Duration,
    /// When the request was sent that took a place in a queue, if any has.
    queued: Instant,
}

impl Claim {
    /// What becomes of it is told to `changes`.
    pub(crate) fn new(keys: Keys, owner: Owner, terms: Terms, deadline: Deadline, changes: Changes) -> Self {
        let state = State::new(terms.ending);
        let inner = Mutex::new(Inner { terms, state, asked: Duration::ZERO, queued: Instant::now() });
        Self { keys, owner, deadline, inner, changes }
    }

    /// For how long it has waited, if it has to be asked for again.
    pub(crate) fn waited(&self) -> Option<Duration> {
        let inner = self.inner();
        matches!(inner.state.stage(), Stage::Waiting).then(|| inner.queued.elapsed())
    }

    /// Its terms as they are now: a renewal can change the lease.
    pub(crate) fn terms(&self) -> Terms {
        self.inner().terms.clone()
    }

    /// The terms for a renewal that changes nothing: of a lease that nobody renews, what is left.
    pub(crate) fn terms_to_go_on(&self, now: Instant) -> Terms {
        let inner = self.inner();
        let mut terms = inner.terms.clone();
        if let (Lease::Fixed(_), Some(end)) = (terms.lease, inner.state.sure_until()) {
            terms.lease = Lease::Fixed(end.saturating_duration_since(now));
        }
        terms
    }

    pub(crate) fn stage(&self) -> Stage {
        self.inner().state.stage().clone()
    }

    pub(crate) fn token(&self) -> Option<u64> {
        self.inner().state.token()
    }

    /// The token, if the server can have no other.
    pub(crate) fn certain_token(&self) -> Option<u64> {
        self.inner().state.certain_token()
    }

    /// A renewal that raises the token to this one is about to be sent.
    pub(crate) fn raising(&self, fence: u64) {
        self.inner().state.raising(fence);
    }

    /// The server has raised it.
    pub(crate) fn raised(&self, token: u64) {
        self.update(|inner| inner.state.raised(token));
    }

    /// The session on whose behalf it waits or holds.
    pub(crate) fn session(&self) -> Option<SessionRef> {
        self.inner().state.session().cloned()
    }

    /// The sessions under which a request for it may not be over.
    pub(crate) fn open(&self) -> Vec<SessionRef> {
        self.inner().state.open().to_vec()
    }

    /// It is about to be asked for; false: nobody wants it any more.
    pub(crate) fn ask(&self, session: &SessionRef) -> bool {
        let mut inner = self.inner();
        inner.asked = session.lease(inner.terms.lease);
        if matches!(inner.state.stage(), Stage::Asking) {
            inner.queued = Instant::now();
        }
        inner.state.ask(session)
    }

    pub(crate) fn not_asked(&self, session: &SessionRef) {
        self.inner().state.not_asked(session);
    }

    pub(crate) fn unheard(&self, session: &SessionRef) {
        self.inner().state.unheard(session);
    }

    /// It was asked for, and nobody can say any more what came of it: then it waits for a session. False: more is known.
    pub(crate) fn wait_on(&self) -> bool {
        let mut inner = self.inner();
        inner.state.open().iter().all(|session| session.has_ended()) && inner.state.wait_on()
    }

    pub(crate) fn timed_out(&self) {
        self.update(|inner| inner.state.timed_out());
    }

    /// The reply to a request that was sent at this time.
    pub(crate) fn replied(&self, session: &SessionRef, reply: Reply, sent: Instant) {
        self.update(|inner| {
            let sure_until = sent + inner.lease(session);
            inner.state.replied(session, reply, sure_until);
        });
    }

    pub(crate) fn refused(&self, error: Error) {
        self.update(|inner| inner.state.refused(error));
    }

    /// An event; `lasts` is how long what was granted lasts at least, from when the session asked.
    pub(crate) fn told(&self, session: &SessionRef, news: News, lasts: Option<Duration>) {
        self.update(|inner| {
            let sure_until = match (&news, lasts, inner.terms.lease) {
                (News::Granted(_), Some(lasts), _) => session.asked_at() + lasts.min(LONGEST_LEASE),
                // How long it was on its way is not known. The session's next sign of life says more.
                (News::Granted(_), None, Lease::Watched(_)) => Instant::now() + inner.lease(session) / 2,
                (News::Untied(_), _, Lease::Watched(_)) => session.sure_of(inner.lease(session)),
                // Nobody renewed it: it runs on as it was.
                (News::Untied(_), _, Lease::Fixed(_)) => inner.state.sure_until().unwrap_or_else(Instant::now),
                _ => Instant::now() + inner.lease(session),
            };
            let refusal = |words| refused_in_words(session.server(), &self.keys, words);
            inner.state.told(session, news, sure_until, refusal);
        });
    }

    pub(crate) fn session_ended(&self, session: &SessionRef) {
        self.update(|inner| {
            let promised = inner.promised_by(session);
            inner.state.session_ended(session, promised);
        });
    }

    /// A renewal that was sent at this time with these terms succeeded.
    pub(crate) fn renewed(&self, session: &SessionRef, sent: Instant, lease: Lease) {
        self.update(|inner| {
            inner.asked = session.lease(lease);
            inner.state.renewed(session, sent + inner.asked);
        });
        self.leave_if_ended(session);
    }

    /// A session may end while the answer to a renewal is on its way: the claim was not its own yet when that was told.
    fn leave_if_ended(&self, session: &SessionRef) {
        if session.has_ended() {
            self.session_ended(session);
        }
    }

    /// The same with a lease of one's own.
    pub(crate) fn leased_anew(&self, session: &SessionRef, sent: Instant, lease: Lease) {
        self.update(|inner| {
            inner.terms.lease = lease;
            inner.state.renewed(session, sent);
            inner.asked = session.lease(lease);
            inner.state.leased_anew(sent + inner.asked);
        });
        self.leave_if_ended(session);
    }

    /// A renewal failed that was sent after this time with these terms: it may have begun its lease nevertheless.
    pub(crate) fn perhaps_leased(&self, began: Instant, lease: Lease) {
        let (Lease::Fixed(lease) | Lease::Watched(Some(lease))) = lease else { return };
        self.update(|inner| {
            inner.asked = inner.asked.min(lease);
            inner.state.ends_by(began + lease);
        });
    }

    pub(crate) fn lost(&self, why: Why) {
        self.update(|inner| inner.state.lost(why));
    }

    pub(crate) fn give_up(&self) {
        self.update(|inner| inner.state.give_up());
    }

    pub(crate) fn renewal_out(&self) {
        self.inner().state.renewal_out();
    }

    pub(crate) fn renewal(&self) -> Option<Renewal> {
        self.inner().state.renewal().cloned()
    }

    pub(crate) fn begin_carrying(&self) -> bool {
        self.inner().state.begin_carrying()
    }

    /// What has to be said to another session; none ends the carrying.
    pub(crate) fn next_errand(&self, now: Instant) -> Option<Errand> {
        // One that nobody renews may have ended.
        self.standing(now);
        self.inner().state.next_errand()
    }

    /// Whether it is between two sessions.
    pub(crate) fn adrift(&self) -> bool {
        let inner = self.inner();
        inner.state.session().is_none() && matches!(inner.state.stage(), Stage::Waiting | Stage::Held)
    }

    /// What is known of the hold, without asking.
    pub(crate) fn standing(&self, now: Instant) -> Standing {
        let inner = self.inner();
        match (inner.state.stage(), inner.terms.lease) {
            (Stage::Lost(why), _) => return Standing::Lost(*why),
            _ if !inner.lapsed(now) => return Standing::Held,
            (_, Lease::Watched(_)) => return Standing::InDoubt,
            (_, Lease::Fixed(_)) => drop(inner),
        }
        self.lost(Why::Expired);
        Standing::Lost(Why::Expired)
    }

    /// Nobody can say that it lives on, if it is still in doubt.
    pub(crate) fn lapse(&self, now: Instant) {
        if self.standing(now) == Standing::InDoubt {
            self.lost(Why::Disconnected);
        }
    }

    /// The error that says so.
    pub(crate) fn loss(&self, why: Why) -> Error {
        Error::Lost { keys: self.keys.clone(), owner: self.owner.clone(), why }
    }

    /// Until when the lease can't have run out, whatever happens to the session meanwhile.
    pub(crate) fn sure_until(&self) -> Option<Instant> {
        self.inner().sure_until()
    }

    /// How long the lease is that was asked for last.
    pub(crate) fn asked(&self) -> Duration {
        self.inner().asked
    }

    /// Waits until something changes, or until then.
    pub(crate) async fn change(&self, until: Option<Instant>, happened: impl Fn() -> bool) {
        self.changes.wait(until, happened).await;
    }

    fn update(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.inner());
        self.changes.tell();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Whoever panicked with it changed it in one step, or not at all.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// How long its lease is for certain: if the server's default became shorter since, it may have been before.
    fn lease(&self, session: &SessionRef) -> Duration {
        self.asked.min(session.lease(self.terms.lease))
    }

    /// What the session's life promises of the lease.
    fn promised_by(&self, session: &SessionRef) -> Option<Instant> {
        match self.terms.lease {
            Lease::Watched(_) => Some(session.sure_of(self.lease(session))),
            Lease::Fixed(_) => None,
        }
    }

    /// Until when the lease can't have run out, as far as this process knows.
    fn sure_until(&self) -> Option<Instant> {
        let promised = self.state.session().and_then(|session| self.promised_by(session));
        self.state.sure_until().max(promised)
    }

    fn lapsed(&self, now: Instant) -> bool {
        matches!(self.state.stage(), Stage::Held) && self.sure_until().is_some_and(|end| end <= now)
    }
}
