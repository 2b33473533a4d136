//! What all handles, guards and tasks of one client share: who waits or holds, and how something is said to the server
//! that has the key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use redis::{Cmd, RedisError, Value, cmd};
use tokio::sync::watch;

use crate::changes::Changes;
use crate::claim::{Claim, Standing};
use crate::error::{Error, Why, is_confirming, refused};
use crate::health::Health;
use crate::names::{Keys, Owner};
use crate::order::Name;
use crate::place::Failure;
use crate::reader::Listener;
use crate::requests::{Redirect, SILENT};
use crate::servers::Servers;
use crate::session::SessionRef;
use crate::state::{Errand, Stage};
use crate::terms::{Deadline, Terms, Wait};
use crate::wire::{self, Event, Reply};

/// So often a request follows when it is sent elsewhere.
const HOPS: u32 = 8;
/// Between attempts to reach a server that does not answer: from the first to the longest, twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// So long after the end of a wait the server need not say any more that it is over.
const GRACE: Duration = Duration::from_secs(2);

pub(crate) struct Shared {
    pub(crate) name: Name,
    pub(crate) servers: Servers,
    pub(crate) health: Arc<Health>,
    /// How soon it is to be seen that a session died, where somebody wants to know it.
    missed_within: Mutex<Option<Duration>>,
    made: AtomicU64,
    claims: Mutex<HashMap<Owner, Arc<Claim>>>,
    giving_back: watch::Sender<usize>,
}

/// A reply, from whom, and when it was asked for.
pub(crate) struct Said {
    pub(crate) session: SessionRef,
    pub(crate) sent: Instant,
    pub(crate) value: Value,
}

/// Why a request was not answered as it should.
pub(crate) enum Unsaid {
    /// Nobody wants the answer any more.
    Pointless,
    Failed(Failure),
}

impl From<Failure> for Unsaid {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Shared {
    /// `servers` is told who listens to them.
    pub(crate) fn new(name: Name, servers: impl FnOnce(Weak<dyn Listener>) -> Servers) -> Arc<Self> {
        Arc::new_cyclic(|listener: &Weak<Self>| Self {
            name,
            servers: servers(listener.clone()),
            health: Health::new(),
            missed_within: Mutex::default(),
            made: AtomicU64::new(0),
            claims: Mutex::default(),
            giving_back: watch::Sender::new(0),
        })
    }

    /// An owner that nobody else has.
    pub(crate) fn owner(&self, prefix: &str) -> Owner {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        Owner::from(format!("{prefix}{number}").into_bytes())
    }

    /// A new acquisition, by an owner of its own. From here on what is told of it is heard.
    pub(crate) fn claim(
        &self,
        owner: Owner,
        keys: Keys,
        terms: Terms,
        deadline: Deadline,
        changes: Changes,
    ) -> Arc<Claim> {
        let claim = Arc::new(Claim::new(keys, owner, terms, deadline, changes));
        self.claims().insert(claim.owner.clone(), claim.clone());
        claim
    }

    /// What is told of it now is none of our business any more.
    pub(crate) fn forget(&self, claim: &Claim) {
        self.claims().remove(&claim.owner);
    }

    /// Asks for it. What comes of that is in the claim.
    pub(crate) async fn ask(self: &Arc<Self>, claim: &Arc<Claim>) -> Result<(), Unsaid> {
        let said = self.say(&claim.keys, Some(claim), |session| {
            let wait = claim.deadline.left(Instant::now());
            self.mind(session);
            let waited = claim.waited().filter(|_| session.takes_waited());
            let cmd = || wire::acquire(&claim.keys, &claim.owner, &claim.terms(), wait, waited, session.id());
            claim.ask(session).then(cmd)
        });
        let Said { session, sent, value } = said.await?;
        let reply = wire::reply(value).map_err(|error| {
            claim.unheard(&session);
            fail(&session, error)
        })?;
        claim.replied(&session, reply, sent);
        self.carry_if_adrift(claim);
        Ok(())
    }

    /// The same, for as long as was asked for, and a moment. A wait whose request was not answered before its session ended
    /// is taken along like any other: the next session lets nothing more come of it.
    pub(crate) async fn ask_in_time(self: &Arc<Self>, claim: &Arc<Claim>) -> Result<(), Unsaid> {
        let asked = match claim.deadline {
            Deadline::At(end) => tokio::time::timeout_at((end + GRACE).into(), self.ask(claim)).await,
            Deadline::Past | Deadline::Never => Ok(self.ask(claim).await),
        };
        match asked {
            Ok(Err(Unsaid::Failed(failure)))
                if claim.deadline != Deadline::Past && failure.error.code().is_none() && claim.wait_on() =>
            {
                self.carry_if_adrift(claim);
                Ok(())
            }
            Ok(asked) => asked,
            Err(_late) => Err(Failure { server: server_of(claim), error: late() }.into()),
        }
    }

    /// Waits until it is granted or not, at most for as long as was asked for.
    pub(crate) async fn settled(&self, claim: &Claim) -> Stage {
        let settled = || !matches!(claim.stage(), Stage::Asking | Stage::Waiting);
        let end = match claim.deadline {
            Deadline::At(end) => Some(end),
            Deadline::Past => Some(Instant::now()),
            Deadline::Never => None,
        };
        while !settled() && end.is_none_or(|end| Instant::now() < end) {
            claim.change(end, settled).await;
        }
        let patience = end.map(|end| end + GRACE);
        while !settled() {
            // The time is over, and no server has it in a queue, or the one that has says nothing. It is given back.
            if claim.adrift() || patience.is_some_and(|end| end <= Instant::now()) {
                return Stage::NotGranted;
            }
            claim.change(patience, || settled() || claim.adrift()).await;
        }
        claim.stage()
    }

    /// Says something to whoever serves the key, on behalf of the session there, and follows where that sends it. `claim`
    /// is told where it did not take effect. `build` may find that there is nothing to be said any more.
    pub(crate) async fn say(
        self: &Arc<Self>,
        keys: &Keys,
        claim: Option<&Claim>,
        mut build: impl FnMut(&SessionRef) -> Option<Cmd>,
    ) -> Result<Said, Unsaid> {
        let mut redirected = None;
        let mut attempts = Attempts::default();
        let mut hops = 0;
        loop {
            hops += 1;
            let (node, redirect) = match redirected.take() {
                Some(other) => other,
                None => (self.servers.node_for(keys.first()).await?, Redirect::No),
            };
            let session = match node.session().await {
                Ok(session) => session,
                Err(failure) => {
                    self.servers.doubt();
                    // Nothing was sent. Another node may serve the key by now.
                    if hops == HOPS || !self.servers.several() {
                        return Err(failure.into());
                    }
                    attempts.again().await;
                    continue;
                }
            };
            let cmd = build(&session).ok_or(Unsaid::Pointless)?;
            let sent = Instant::now();
            let error = match session.requests().send(&cmd, redirect).await {
                Ok(value) => return Ok(Said { session, sent, value }),
                Err(error) => error,
            };
            if hops == HOPS || !sent_away(&error) {
                if error.is_unrecoverable_error() {
                    self.servers.doubt();
                }
                if let Some(claim) = claim {
                    claim.unheard(&session);
                }
                return Err(fail(&session, error).into());
            }
            if let Some(claim) = claim {
                claim.not_asked(&session);
            }
            match error.code() {
                Some(code @ ("MOVED" | "ASK")) => {
                    let redirect = if code == "ASK" { Redirect::Asked } else { Redirect::No };
                    match self.servers.redirected(&error, session.server()) {
                        Some(node) => redirected = Some((node, redirect)),
                        // A cluster, but not to this client.
                        None => return Err(fail(&session, error).into()),
                    }
                }
                _ => {
                    node.leave(&session).await;
                    attempts.again().await;
                }
            }
        }
    }

    /// A session of this client that dies is to be seen within this time.
    pub(crate) fn missed_within(&self, time: Duration) {
        let mut within = self.missed_within.lock().unwrap_or_else(PoisonError::into_inner);
        *within = Some(within.map_or(time, |before| before.min(time)));
    }

    fn mind(&self, session: &SessionRef) {
        if let Some(time) = *self.missed_within.lock().unwrap_or_else(PoisonError::into_inner) {
            session.missed_within(time);
        }
    }

    /// Whether the server of this key answers within this time.
    pub(crate) async fn answers(self: &Arc<Self>, keys: &Keys, within: Duration) -> bool {
        let said = self.say(keys, None, |_| Some(cmd("LOCK.OWNER")));
        matches!(tokio::time::timeout(within, said).await, Ok(Ok(_)))
    }

    /// The server of this key did not answer. It is asked again in the background until it does.
    pub(crate) fn suspect(self: &Arc<Self>, keys: &Keys, why: Error, answers_within: Duration) {
        let Some(watch) = self.health.suspect(why) else { return };
        let (client, keys) = (Arc::downgrade(self), keys.clone());
        tokio::spawn(async move {
            let mut attempts = Attempts::default();
            loop {
                attempts.again().await;
                let Some(client) = client.upgrade() else { break };
                if client.answers(&keys, answers_within).await {
                    break;
                }
            }
            drop(watch);
        });
    }

    /// Takes it to another session, if its own has ended meanwhile.
    pub(crate) fn carry_if_adrift(self: &Arc<Self>, claim: &Arc<Claim>) {
        if claim.begin_carrying() {
            tokio::spawn(self.clone().carry(claim.clone()));
        }
    }

    fn carry_all(self: &Arc<Self>, claims: Vec<Arc<Claim>>) {
        for claim in claims {
            tokio::spawn(self.clone().carry(claim));
        }
    }

    /// Takes a wait or a hold that has no session to one, for as long as that makes sense.
    async fn carry(self: Arc<Self>, claim: Arc<Claim>) {
        let mut attempts = Attempts::default();
        while let Some(errand) = claim.next_errand(Instant::now()) {
            let outcome = match errand {
                Errand::AskAgain if claim.deadline.left(Instant::now()) == Wait::No => {
                    claim.timed_out();
                    continue;
                }
                Errand::AskAgain => self.ask(&claim).await,
                Errand::Renew(token) => self.take_along(&claim, token).await,
            };
            match outcome {
                Ok(()) | Err(Unsaid::Pointless) => continue,
                Err(Unsaid::Failed(failure)) if passes(&failure.error) => {}
                Err(Unsaid::Failed(failure)) => {
                    claim.refused(refused(&failure.server, &claim.keys, failure.error));
                }
            }
            attempts.again().await;
        }
    }

    /// Asks until it is known whether it is held.
    pub(crate) async fn ask_whether_held(self: &Arc<Self>, claim: &Arc<Claim>) {
        let mut attempts = Attempts::default();
        while claim.standing(Instant::now()) == Standing::InDoubt {
            if self.take_along(claim, claim.certain_token()).await.is_err() {
                attempts.again().await;
            }
        }
    }

    /// Ties a hold to the session of whoever has its key now.
    async fn take_along(self: &Arc<Self>, claim: &Arc<Claim>, token: Option<u64>) -> Result<(), Unsaid> {
        let mut terms = claim.terms_to_go_on(Instant::now());
        // Waiting for replicas is the caller's business; what they have confirmed, they have.
        terms.replicas = None;
        let renew = |session: &SessionRef| Some(wire::renew(&claim.keys, &claim.owner, token, &terms, session.id()));
        let Said { session, sent, value } = self.say(&claim.keys, None, renew).await?;
        match wire::renewed(value).map_err(|error| fail(&session, error))? {
            Reply::NotGranted => claim.lost(Why::Disconnected),
            Reply::Granted(_) | Reply::Waiting => claim.renewed(&session, sent, terms.lease),
        }
        Ok(())
    }

    /// Nobody wants this any more. Never waits, and needs no runtime around it.
    pub(crate) fn give_back_soon(self: &Arc<Self>, claim: Arc<Claim>) {
        claim.give_up();
        self.forget(&claim);
        // Any node's task will do. If there is none, nothing was sent.
        if let Some(node) = self.servers.known().first() {
            let count = Count::of(self.clone());
            node.spawn(async move { count.0.clone().give_back(claim).await });
        }
    }

    /// Sees to it that nothing of a claim is left at any server: no wait, no hold, and nothing of a request that is still
    /// on its way.
    async fn give_back(self: Arc<Self>, claim: Arc<Claim>) {
        for session in claim.open() {
            if self.cancelled(&claim, &session).await {
                claim.not_asked(&session);
            }
        }
        if claim.token().is_some() || !claim.open().is_empty() {
            self.released(&claim).await;
        }
    }

    /// Says to the server that nothing may come of what was asked under this session. False: the session has ended or the
    /// key has moved away from its server, and what it got may be there still. It is released then where it is, and not
    /// cancelled there: the server that has the key now knows of no request by this session.
    async fn cancelled(&self, claim: &Claim, session: &SessionRef) -> bool {
        let cancel = wire::cancel(&claim.keys, &claim.owner, session.id());
        let mut attempts = Attempts::default();
        loop {
            match session.requests().send(&cancel, Redirect::No).await {
                Ok(_) => return true,
                Err(error) if sent_away(&error) || !passes(&error) => return false,
                // The session ends if there is no answer: this is no loop without an end.
                Err(_) => attempts.again().await,
            }
        }
    }

    /// Gives back what is held: until the server has said what became of it, or it has ended by itself, since the session
    /// that it was renewed for has. A session for which that is refused for too long is ended for it.
    async fn released(self: &Arc<Self>, claim: &Claim) {
        let release = wire::release(&claim.keys, &claim.owner, claim.certain_token());
        let mut attempts = Attempts::default();
        let (began, mut over) = (Instant::now(), None);
        loop {
            let answered = match self.say(&claim.keys, None, |_| Some(release.clone())).await {
                Ok(Said { value, .. }) => wire::released(value).is_ok(),
                Err(Unsaid::Pointless) => true,
                Err(Unsaid::Failed(_)) => false,
            };
            if answered {
                return;
            }
            let mut renewing = claim.open();
            renewing.extend(claim.session());
            renewing.retain(|session| !session.has_ended());
            if renewing.is_empty() {
                let over = *over.get_or_insert_with(|| Instant::now() + claim.asked());
                if over <= Instant::now() {
                    return;
                }
            } else if began.elapsed() >= SILENT {
                for session in renewing {
                    self.leave(&session).await;
                }
            }
            attempts.again().await;
        }
    }

    /// This session is of no use any more.
    async fn leave(&self, session: &SessionRef) {
        for node in self.servers.known() {
            if node.has(session) {
                node.leave(session).await;
            }
        }
    }

    /// Returns when nothing is being given back.
    pub(crate) async fn all_given_back(&self) {
        // The sender is this one's own.
        let _ = self.giving_back.subscribe().wait_for(|count| *count == 0).await;
    }

    fn claims(&self) -> MutexGuard<'_, HashMap<Owner, Arc<Claim>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for Shared {
    fn session_begins(self: Arc<Self>, session: &SessionRef) {
        self.mind(session);
    }

    fn told(self: Arc<Self>, session: &SessionRef, events: Vec<Event>) {
        let mut adrift = Vec::new();
        for Event { owner, news, lasts } in events {
            let Some(claim) = self.claims().get(&owner).cloned() else { continue };
            claim.told(session, news, lasts);
            if claim.begin_carrying() {
                adrift.push(claim);
            }
        }
        self.carry_all(adrift);
    }

    fn session_ended(self: Arc<Self>, session: &SessionRef) {
        self.servers.doubt();
        let claims: Vec<_> = self.claims().values().cloned().collect();
        let mut adrift = Vec::new();
        for claim in claims {
            claim.session_ended(session);
            if claim.begin_carrying() {
                adrift.push(claim);
            }
        }
        self.carry_all(adrift);
    }
}

/// Attempts to reach a server that does not answer, further and further apart.
struct Attempts {
    pause: Duration,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE }
    }
}

impl Attempts {
    /// Waits until it is time for another.
    async fn again(&mut self) {
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// One thing that is being given back.
struct Count(Arc<Shared>);

impl Count {
    fn of(shared: Arc<Shared>) -> Self {
        shared.giving_back.send_modify(|count| *count += 1);
        Self(shared)
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.giving_back.send_modify(|count| *count -= 1);
    }
}

/// The server that it was asked of, if it was sent to one.
fn server_of(claim: &Claim) -> String {
    let session = claim.session().or_else(|| claim.open().into_iter().next());
    session.map_or_else(|| "no server".to_owned(), |session| session.server().to_owned())
}

fn fail(session: &SessionRef, error: RedisError) -> Failure {
    Failure { server: session.server().to_owned(), error }
}

/// There was no answer in time.
pub(crate) fn late() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// Whether the server did not take the request because another one has to, or another session.
fn sent_away(error: &RedisError) -> bool {
    matches!(error.code(), Some("MOVED" | "ASK" | "NOSESSION" | "READONLY"))
}

/// Whether it may go better the next time.
fn passes(error: &RedisError) -> bool {
    match error.code() {
        Some("ERR") => error.detail().is_some_and(is_confirming),
        Some(code) => {
            ["MOVED", "ASK", "NOSESSION", "READONLY", "LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY"]
                .contains(&code)
        }
        None => true,
    }
}
