//! Holds tied to a connection: watched, so that the server renews their lease while the connection lives, or
//! ephemeral, so that they end with it.
//!
//! A tie names one particular hold by its token. So the watchdog never renews a later hold, and a connection that
//! ends never takes one with it.

use super::event_bytes::hold_bytes;
use super::{ConfirmationId, Discarded, Why};
use crate::lock::{Deadline, KeyMap, Limit, LockKey, Millis, Owner, Token};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// How a hold is tied to its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tying {
    /// The server renews the lease while the connection lives.
    pub watchdog: bool,
    /// The hold ends with the connection.
    pub ephemeral: bool,
    /// The session is told once somebody waits for the lock.
    pub contention: bool,
}

impl Tying {
    /// Not at all.
    pub const NONE: Self = Self { watchdog: false, ephemeral: false, contention: false };

    /// Whether it says how long the hold lasts.
    fn is_a_term(self) -> bool {
        self.watchdog || self.ephemeral
    }
}

/// The name of a tie; later ties have greater names, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TieId(pub u64);

impl TieId {
    /// No tie has a smaller name.
    pub const FIRST: Self = Self(0);
}

/// A tied hold.
#[derive(Clone, Debug)]
pub struct Tie {
    /// The connection.
    pub client: u64,
    /// How it is tied.
    pub tying: Tying,
    /// The lock's key: its name.
    pub name: Rc<[u8]>,
    /// The owner.
    pub owner: Owner,
    /// The hold's token.
    pub token: Token,
    /// How long a renewal lasts, in ms.
    pub lease: Millis,
    /// How many replicas must have a renewal before it counts.
    pub replicas: u32,
    /// The hold count, and the limit of the lock: should the key expire only because the clock steps, it is written anew.
    pub holds: u64,
    /// See `holds`.
    pub limit: Limit,
    /// The end of the hold's lease, as far as this module knows.
    deadline: Deadline,
    /// What replicas have of it, if it needs any.
    confirmed: Option<Confirmed>,
    /// The session has been told that somebody waits for the lock.
    told: bool,
    /// The newest [`Read`] of any session when the hold began or was last renewed.
    since: Read,
    home: Home,
    due: Option<Millis>,
    steps: Steps,
    /// How far the clock had stepped when the key followed.
    followed: Stepped,
}

/// What replicas have of a hold's lease.
#[derive(Clone, Copy, Debug)]
struct Confirmed {
    /// The end of the lease as enough of them have it: the earliest that was written since the last confirmed write.
    deadline: Deadline,
    /// The renewal that they are being asked about, and the earliest deadline that was written since.
    asked: Option<(ConfirmationId, Deadline)>,
}

/// A `LOCK.EVENTS` of a session; later ones are greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Read(u64);

/// How far the server's clock has stepped in all, in ms: shared by everything that goes along, so that a step moves all of it
/// at once. Moments are kept by the clock as it would be without its steps.
#[derive(Clone, Debug, Default)]
struct Steps(Rc<Cell<Stepped>>);

/// How far the clock has stepped in all, and how often: a step and one back leave a key that expired in between to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stepped {
    by: i64,
    times: u64,
}

impl Steps {
    fn total(&self) -> i64 {
        self.0.get().by
    }

    /// A moment as it is kept.
    fn kept(&self, at: Millis) -> Millis {
        at.saturating_add_signed(self.total().saturating_neg())
    }

    /// The same of a deadline.
    fn kept_deadline(&self, deadline: Deadline) -> Deadline {
        deadline.stepped(self.total().saturating_neg())
    }
}

/// The number of a database, shared by everything that is tied or may be taken back in it, so that `SWAPDB` changes
/// it for all of them at once.
pub type Home = Rc<Cell<i32>>;

/// What a tie is made from.
#[derive(Debug)]
pub struct NewTie {
    /// The connection.
    pub client: u64,
    /// How it is tied.
    pub tying: Tying,
    /// The lock.
    pub key: LockKey,
    /// The owner.
    pub owner: Owner,
    /// The hold's token.
    pub token: Token,
    /// How long a renewal lasts, in ms.
    pub lease: Millis,
    /// How many replicas must have a renewal before it counts.
    pub replicas: u32,
    /// The end of the hold's lease. If replicas are needed, they have it.
    pub deadline: Deadline,
    /// The hold count.
    pub holds: u64,
    /// The limit of the lock.
    pub limit: Limit,
}

/// The tie that a hold had before.
#[derive(Debug)]
pub enum Before {
    /// Of the same hold, to another connection.
    Elsewhere(Tie),
    /// Of another hold of this owner, which must have ended unnoticed.
    OtherHold(Tie),
}

impl Tie {
    /// The lock.
    pub fn key(&self) -> LockKey {
        LockKey { db: self.home.get(), name: self.name.clone() }
    }

    /// The bytes that are reserved for the events that it may cause.
    fn reserved(&self) -> usize {
        hold_bytes(&self.owner, &self.name)
    }

    /// Whether its session has yet to be told that somebody waits for the lock.
    fn asks(&self) -> bool {
        self.tying.contention && !self.told
    }

    /// Its place among the ties of its connection.
    fn rank(&self, id: TieId) -> Rank {
        (if self.tying.watchdog { self.lease } else { Millis::MAX }, self.kept_end(), id)
    }

    /// When it needs attention, as it is kept: to be renewed, or because its lease has run out.
    fn next_due(&self, now: Millis) -> Option<Millis> {
        let renewal = self.tying.watchdog.then(|| now.saturating_add(interval(self.lease)));
        self.over().into_iter().chain(renewal).min()
    }

    /// The end of the lease, as far as it can be relied on: as the key says, and no later than the replicas know.
    pub fn end(&self) -> Deadline {
        self.kept_end().stepped(self.steps.total())
    }

    fn kept_end(&self) -> Deadline {
        self.confirmed.map_or(self.deadline, |confirmed| confirmed.deadline.min(self.deadline))
    }

    /// The end of the lease, as the key says it.
    pub fn deadline(&self) -> Deadline {
        self.deadline.stepped(self.steps.total())
    }

    /// Whether replicas are being asked about a renewal; the next one waits for that.
    pub fn is_being_confirmed(&self) -> bool {
        self.confirmed.is_some_and(|confirmed| confirmed.asked.is_some())
    }

    /// The first millisecond after its lease, as it is kept.
    fn over(&self) -> Option<Millis> {
        match self.kept_end() {
            Deadline::At(at) => Some(at.saturating_add(1)),
            Deadline::Never => None,
        }
    }

    /// The key has this deadline now, as it is kept.
    fn moved(&mut self, deadline: Deadline) {
        self.deadline = deadline;
        if let Some(confirmed) = &mut self.confirmed {
            confirmed.deadline = confirmed.deadline.min(deadline);
            confirmed.asked = confirmed.asked.map(|(id, since)| (id, since.min(deadline)));
        }
    }
}

/// A lease is renewed each time a third of it has passed.
fn interval(lease: Millis) -> Millis {
    (lease / 3).max(1)
}

/// Orders the ties of a connection: watched ones by their leases, then those that are not watched; those of one lease by
/// when they end.
type Rank = (Millis, Deadline, TieId);

/// Of a connection with more different leases that are renewed for it, nothing is sure: looking at each would take long.
const LEASES: usize = 1_000;

/// The ties of a lock.
#[derive(Debug, Default)]
struct OfLock {
    by_owner: BTreeMap<Owner, TieId>,
    /// How many connections had ended when those were last looked for that ended with theirs.
    looked: u64,
}

/// The ties of a connection.
#[derive(Debug, Default)]
struct OfClient {
    ranks: BTreeSet<Rank>,
    /// The bytes that are reserved for the events that they may cause, if it is a session.
    reserved: usize,
}

/// Ties, with five indices.
#[derive(Debug, Default)]
struct Tables {
    by_id: BTreeMap<TieId, Tie>,
    by_client: BTreeMap<u64, OfClient>,
    by_hold: KeyMap<OfLock>,
    /// Those whose sessions have yet to be told that somebody waits: of a lock that has one holder, the tie of that.
    asking: KeyMap<TieId>,
    due: BTreeSet<(Millis, TieId)>,
    /// Those that were due and not renewed because their session reads nothing, by connection.
    unread: BTreeMap<u64, BTreeSet<TieId>>,
}

/// All ties.
#[derive(Debug, Default)]
pub struct Ties {
    next_id: u64,
    /// How many connections that had any have ended.
    ends: u64,
    reads: Read,
    steps: Steps,
    /// The first tie that may have a key which has yet to follow a step of the clock; all before it have none.
    to_follow: Option<TieId>,
    live: Tables,
    /// Those that were due when nothing could be renewed, and are to be as soon as it can.
    overdue: VecDeque<BTreeSet<TieId>>,
    homes: BTreeMap<i32, Home>,
    /// Ties of connections that have ended.
    ended: VecDeque<BTreeSet<Rank>>,
    /// Ties from before this server's role changed.
    retired: VecDeque<Tables>,
    /// Ties whose hold somebody else may have ended.
    doubtful: BTreeMap<TieId, Why>,
}

impl Tables {
    fn add(&mut self, id: TieId, tie: Tie) {
        let of_client = self.by_client.entry(tie.client).or_default();
        of_client.ranks.insert(tie.rank(id));
        of_client.reserved = of_client.reserved.saturating_add(tie.reserved());
        self.by_hold.get_or_default(&tie.key()).by_owner.insert(tie.owner.clone(), id);
        if tie.asks() {
            self.asking.insert(tie.key(), id);
        }
        self.due.extend(tie.due.map(|due| (due, id)));
        self.by_id.insert(id, tie);
    }

    fn remove(&mut self, id: TieId) -> Option<Tie> {
        let tie = self.by_id.remove(&id)?;
        if let Some(due) = tie.due {
            self.due.remove(&(due, id));
        }
        if let Some(of_client) = self.by_client.get_mut(&tie.client) {
            if of_client.ranks.remove(&tie.rank(id)) {
                of_client.reserved = of_client.reserved.saturating_sub(tie.reserved());
            }
            if of_client.ranks.is_empty() {
                self.by_client.remove(&tie.client);
            }
        }
        if let Some(unread) = self.unread.get_mut(&tie.client) {
            unread.remove(&id);
            if unread.is_empty() {
                self.unread.remove(&tie.client);
            }
        }
        let db = tie.home.get();
        if self.asking.get(db, &tie.name) == Some(&id) {
            self.asking.remove(db, &tie.name);
        }
        if let Some(of_lock) = self.by_hold.get_mut(db, &tie.name) {
            of_lock.by_owner.remove(&tie.owner);
            if of_lock.by_owner.is_empty() {
                self.by_hold.remove(db, &tie.name);
            }
        }
        Some(tie)
    }

    /// Its session is to be told once somebody waits.
    fn ask(&mut self, id: TieId) {
        if let Some(tie) = self.by_id.get_mut(&id) {
            (tie.tying.contention, tie.told) = (true, false);
            self.asking.insert(tie.key(), id);
        }
    }

    /// Changes a tie's deadline, and its place among the ties of its connection.
    fn change(&mut self, id: TieId, change: impl FnOnce(&mut Tie)) {
        let Some(tie) = self.by_id.get_mut(&id) else { return };
        let before = tie.rank(id);
        change(tie);
        let after = tie.rank(id);
        if before != after
            && let Some(of_client) = self.by_client.get_mut(&tie.client)
            && of_client.ranks.remove(&before)
        {
            of_client.ranks.insert(after);
        }
    }

    fn of_lock(&self, db: i32, name: &[u8]) -> impl Iterator<Item = TieId> + '_ {
        self.by_hold.get(db, name).into_iter().flat_map(|of_lock| of_lock.by_owner.values().copied())
    }

    fn set_due(&mut self, id: TieId, due: Option<Millis>) {
        if let Some(tie) = self.by_id.get_mut(&id) {
            if let Some(before) = std::mem::replace(&mut tie.due, due) {
                self.due.remove(&(before, id));
            }
            self.due.extend(due.map(|due| (due, id)));
        }
    }
}

/// Whether enough replicas have a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirms {
    /// They have it.
    Yes,
    /// They have not had it in time.
    No,
}

impl Ties {
    /// Ties a hold to a connection, whatever it was tied to before. If the same hold was tied to the same connection,
    /// that tie's flags stay as well; and of a request without flags its lease, and the replicas if it names none.
    pub fn tie(&mut self, new: NewTie, now: Millis) -> Option<Before> {
        let id = self.id(new.key.db, &new.key.name, &new.owner);
        let tied = id.and_then(|id| self.get(id)).filter(|it| it.token == new.token);
        let keeps = tied.is_some_and(|it| it.client == new.client && !new.tying.is_a_term());
        if keeps && new.replicas == 0 {
            // A lease for once, or a hold more: what the tie promises stays.
            id.filter(|_| new.tying.contention).into_iter().for_each(|id| self.live.ask(id));
            return None;
        }
        let before = id.and_then(|id| self.live.remove(id));
        let of_hold = before.as_ref().filter(|it| it.token == new.token);
        let (deadline, steps) = (self.steps.kept_deadline(new.deadline), self.steps.clone());
        let followed = of_hold.map_or(steps.0.get(), |it| it.followed);
        let mut tying = new.tying;
        let told = !tying.contention && of_hold.is_some_and(|it| it.told);
        let lease = of_hold.filter(|_| keeps).map_or(new.lease, |it| it.lease);
        if let Some(before) = of_hold.filter(|it| it.client == new.client) {
            tying.watchdog |= before.tying.watchdog;
            tying.ephemeral |= before.tying.ephemeral;
            tying.contention |= before.tying.contention;
        }
        let home = self.home(new.key.db);
        let tie = Tie {
            client: new.client,
            tying,
            name: new.key.name,
            owner: new.owner,
            token: new.token,
            lease,
            replicas: new.replicas,
            holds: new.holds,
            limit: new.limit,
            deadline,
            confirmed: (new.replicas > 0).then_some(Confirmed { deadline, asked: None }),
            told,
            since: self.reads,
            home,
            due: None,
            steps,
            followed,
        };
        let (id, client, token) = (self.next_id(), tie.client, tie.token);
        self.add(tie, now);
        if keeps {
            self.deadline_moved(id, new.deadline, now);
        }
        let before = before.filter(|it| it.client != client || it.token != token)?;
        Some(if before.token == token { Before::Elsewhere(before) } else { Before::OtherHold(before) })
    }

    /// The database with this number, for everything that must follow it when it is swapped with another.
    pub fn home(&mut self, db: i32) -> Home {
        self.homes.entry(db).or_insert_with(|| Rc::new(Cell::new(db))).clone()
    }

    fn add(&mut self, mut tie: Tie, now: Millis) {
        let id = self.next_id();
        self.next_id = self.next_id.wrapping_add(1);
        tie.due = tie.next_due(self.steps.kept(now));
        self.live.add(id, tie);
    }

    /// The name that the next tie gets.
    pub fn next_id(&self) -> TieId {
        TieId(self.next_id)
    }

    fn id(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<TieId> {
        self.live.by_hold.get(db, name)?.by_owner.get(owner).copied()
    }

    /// A tie.
    pub fn get(&self, id: TieId) -> Option<&Tie> {
        self.live.by_id.get(&id)
    }

    /// The tie of the hold that `owner` has under `token`.
    pub fn of(&self, db: i32, name: &[u8], owner: &[u8], token: Option<Token>) -> Option<&Tie> {
        self.get(self.id(db, name, owner)?).filter(|tie| Some(tie.token) == token)
    }

    /// Whether any hold of a lock is tied.
    pub fn is_tied(&self, db: i32, name: &[u8]) -> bool {
        self.live.by_hold.get(db, name).is_some()
    }

    /// The connection that a hold of `owner` is tied to, whatever its token.
    pub fn client_of(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<u64> {
        Some(self.get(self.id(db, name, owner)?)?.client)
    }

    /// Whether a session that holds a lock has yet to be told that somebody waits for it.
    pub fn asks(&self, db: i32, name: &[u8]) -> bool {
        self.live.asking.get(db, name).is_some()
    }

    /// The tie of a lock whose session has yet to be told that somebody waits for it: it is being told.
    pub fn take_asking(&mut self, db: i32, name: &[u8]) -> Option<&Tie> {
        // Mostly nobody asks, and to find that out costs less than to remove nothing.
        let id = *self.live.asking.get(db, name)?;
        self.live.asking.remove(db, name);
        let tie = self.live.by_id.get_mut(&id)?;
        tie.told = true;
        Some(tie)
    }

    /// How many locks may be held unused until somebody waits for them.
    pub fn kept(&self) -> usize {
        self.live.asking.len()
    }

    /// The shortest lease that is renewed for a connection.
    pub fn shortest_lease(&self, client: u64) -> Option<Millis> {
        let (lease, ..) = self.live.by_client.get(&client)?.ranks.first()?;
        Some(*lease).filter(|lease| *lease != Millis::MAX)
    }

    /// Whether any hold is tied to a connection.
    pub fn has_any(&self, client: u64) -> bool {
        self.live.by_client.contains_key(&client)
    }

    /// The bytes that are reserved for the events that a connection's holds may cause.
    pub fn reserved(&self, client: u64) -> usize {
        self.live.by_client.get(&client).map_or(0, |it| it.reserved)
    }

    /// How many thousandths of its lease every hold that is renewed for a connection has left at least, counted from
    /// `since`; 0 if there is none: a hold that the client believes in may have been released by another one meanwhile.
    pub fn sure(&self, client: u64, since: Millis) -> u64 {
        const WHOLE: u64 = 1_000;
        let Some(of_client) = self.live.by_client.get(&client) else { return 0 };
        let since = self.steps.kept(since);
        let mut least = None;
        let mut longer_than: Millis = 0;
        for _ in 0..LEASES {
            let next = (longer_than.saturating_add(1), Deadline::At(0), TieId(0));
            let watched = of_client.ranks.range(next..).next().filter(|(lease, ..)| *lease != Millis::MAX);
            let Some((lease, deadline, _)) = watched else { return least.unwrap_or(0) };
            let left = deadline.remaining(since).and_then(|left| left.saturating_mul(WHOLE).checked_div(*lease));
            least = Some(left.unwrap_or(WHOLE).min(least.unwrap_or(WHOLE)));
            longer_than = *lease;
        }
        0
    }

    /// Forgets the tie of a hold, and returns it if there was one.
    pub fn untie(&mut self, db: i32, name: &[u8], owner: &[u8]) -> Option<Tie> {
        self.live.remove(self.id(db, name, owner)?)
    }

    /// Forgets the ties of all holds of a lock, and returns them.
    pub fn untie_all(&mut self, db: i32, name: &[u8]) -> Vec<Tie> {
        let ids: Vec<TieId> = self.live.of_lock(db, name).collect();
        ids.into_iter().filter_map(|id| self.live.remove(id)).collect()
    }

    /// Forgets a tie, and returns it.
    pub fn remove(&mut self, id: TieId) -> Option<Tie> {
        self.live.remove(id)
    }

    /// This module changed the hold of `owner`: it has this token and deadline now. If the tie belonged to another
    /// hold, forgets it and returns it.
    pub fn changed(
        &mut self,
        (db, name, owner): (i32, &[u8], &[u8]),
        before: Option<Token>,
        token: Token,
        deadline: Deadline,
        now: Millis,
    ) -> Option<Tie> {
        let id = self.id(db, name, owner)?;
        let tie = self.live.by_id.get_mut(&id)?;
        if Some(tie.token) != before {
            return self.live.remove(id);
        }
        tie.token = token;
        self.deadline_moved(id, deadline, now);
        None
    }

    /// The deadline of a tied hold has moved: its watchdog comes in time for the new one, if that is earlier.
    pub fn deadline_moved(&mut self, id: TieId, deadline: Deadline, now: Millis) {
        let (deadline, now) = (self.steps.kept_deadline(deadline), self.steps.kept(now));
        self.live.change(id, |tie| tie.moved(deadline));
        let Some(tie) = self.get(id) else { return };
        let left = deadline.remaining(now).map(|left| now.saturating_add(interval(left)));
        let over = tie.over();
        let renewal = if tie.tying.watchdog { tie.due.into_iter().chain(left).chain(over).min() } else { None };
        let due = renewal.or_else(|| tie.next_due(now));
        self.live.set_due(id, due);
    }

    /// The hold of `owner`, if it is tied, has this count now, and its lock this limit.
    pub fn counted(&mut self, (db, name, owner): (i32, &[u8], &[u8]), holds: u64, limit: Option<Limit>) {
        let id = self.id(db, name, owner);
        if let Some(tie) = id.and_then(|id| self.live.by_id.get_mut(&id)) {
            (tie.holds, tie.limit) = (holds, limit.unwrap_or(tie.limit));
        }
    }

    /// The server's clock has stepped by so many ms: all ties go along, and their keys have to follow.
    pub fn stepped(&mut self, by: i64) {
        let Stepped { by: before, times } = self.steps.0.get();
        self.steps.0.set(Stepped { by: before.saturating_add(by), times: times.wrapping_add(1) });
        self.to_follow = Some(TieId(0));
    }

    /// Whether any key may have yet to follow a step of the clock.
    pub fn any_lags(&self) -> bool {
        self.to_follow.is_some_and(|from| self.live.by_id.range(from..).next().is_some())
    }

    /// Whether the key of this tie has.
    pub fn lags(&self, id: TieId) -> bool {
        self.get(id).is_some_and(|tie| tie.followed != self.steps.0.get())
    }

    /// Whether the key of the hold of `owner` has.
    pub fn lags_of(&self, db: i32, name: &[u8], owner: &[u8]) -> bool {
        self.id(db, name, owner).is_some_and(|id| self.lags(id))
    }

    /// The next tie whose key may have.
    pub fn next_lagging(&mut self) -> Option<TieId> {
        let next = self.live.by_id.range(self.to_follow?..).next().map(|(id, _)| *id);
        self.to_follow = next.map(|TieId(id)| TieId(id.wrapping_add(1)));
        next
    }

    /// The ties of this lock whose key has.
    pub fn lagging_of(&self, db: i32, name: &[u8]) -> Vec<TieId> {
        self.live.of_lock(db, name).filter(|id| self.lags(*id)).collect()
    }

    /// The key of a tie is about to follow. Returns the tie and by how many ms; `None` if it has, or if others have just
    /// touched it.
    pub fn follows(&mut self, id: TieId) -> Option<(Tie, i64)> {
        let now = self.steps.0.get();
        let tie = self.live.by_id.get_mut(&id)?;
        let before = std::mem::replace(&mut tie.followed, now);
        let is_touched = self.doubtful.get(&id).is_some_and(|why| *why != Why::Expired);
        (before != now && !is_touched).then(|| (tie.clone(), now.by.saturating_sub(before.by)))
    }

    /// Somebody else gave a tied hold another deadline. Its end must not be missed, but that is no reason to renew it
    /// earlier. (A key that has yet to follow a step of the clock says nothing.)
    pub fn deadline_seen(&mut self, id: TieId, deadline: Deadline) {
        if self.lags(id) {
            return;
        }
        let deadline = self.steps.kept_deadline(deadline);
        self.live.change(id, |tie| tie.moved(deadline));
        let Some(tie) = self.get(id) else { return };
        let due = tie.due.into_iter().chain(tie.over()).min();
        self.live.set_due(id, due);
    }

    /// A tie that is due. A watched one is due again a third of its lease later, or at its end, whatever happens now.
    pub fn take_due(&mut self, now: Millis) -> Option<TieId> {
        let id = self.take_overdue().or_else(|| self.first_due(now))?;
        let now = self.steps.kept(now);
        let watched = self.get(id).filter(|tie| tie.tying.watchdog);
        let next = watched.and_then(|tie| {
            let over = tie.over().filter(|over| *over > now);
            over.into_iter().chain([now.saturating_add(interval(tie.lease))]).min()
        });
        self.live.set_due(id, next);
        Some(id)
    }

    /// The tie that is due for longest.
    pub fn first_due(&self, now: Millis) -> Option<TieId> {
        self.live.due.first().filter(|(due, _)| *due <= self.steps.kept(now)).map(|(_, id)| *id)
    }

    fn take_overdue(&mut self) -> Option<TieId> {
        loop {
            match self.overdue.front_mut()?.pop_first() {
                Some(id) if self.live.by_id.contains_key(&id) => return Some(id),
                Some(_) => {}
                None => drop(self.overdue.pop_front()),
            }
        }
    }

    /// A session asks for its events. What was not renewed only because it had not asked is due at once.
    pub fn read_by(&mut self, client: u64) -> Read {
        self.reads = Read(self.reads.0.wrapping_add(1));
        self.overdue.extend(self.live.unread.remove(&client));
        self.reads
    }

    /// Whether a hold's session, whose last read this was, has read nothing since the hold was renewed.
    pub fn is_unread(&self, tie: &Tie, last: Read) -> bool {
        last <= tie.since
    }

    /// A hold was renewed.
    pub fn renewed(&mut self, id: TieId) {
        let reads = self.reads;
        if let Some(tie) = self.live.by_id.get_mut(&id) {
            tie.since = reads;
        }
    }

    /// A tie that is due is not renewed before its session reads. Until then, only its end is of interest.
    pub fn wait_for_reader(&mut self, id: TieId) {
        let Some(tie) = self.get(id) else { return };
        let (client, over) = (tie.client, tie.over());
        self.live.unread.entry(client).or_default().insert(id);
        self.live.set_due(id, over);
    }

    /// A tie that is due can't be renewed now. Until it can, only its end is of interest.
    pub fn put_off(&mut self, id: TieId) {
        let over = self.get(id).and_then(Tie::over);
        self.live.set_due(id, over);
        match self.overdue.back_mut() {
            Some(last) => drop(last.insert(id)),
            None => self.overdue.push_back(BTreeSet::from([id])),
        }
    }

    /// A tie whose hold is over needs no more attention.
    pub fn is_over(&mut self, id: TieId) {
        self.live.set_due(id, None);
    }

    /// Replicas are being asked whether they have the renewal of a hold that was just made.
    pub fn asked(&mut self, id: TieId, renewal: ConfirmationId) {
        if let Some(tie) = self.live.by_id.get_mut(&id)
            && let Some(confirmed) = &mut tie.confirmed
        {
            confirmed.asked = Some((renewal, tie.deadline));
        }
    }

    /// Enough replicas have a renewal. Or not: then what they knew before stands.
    pub fn answered(&mut self, id: TieId, renewal: ConfirmationId, answer: Confirms) {
        self.live.change(id, |tie| {
            if let Some(confirmed) = &mut tie.confirmed
                && let Some((_, since)) = confirmed.asked.take_if(|(asked, _)| *asked == renewal)
                && answer == Confirms::Yes
            {
                confirmed.deadline = since;
            }
        });
    }

    /// When the next tie is due.
    pub fn next_due(&self) -> Option<Millis> {
        if !self.overdue.is_empty() {
            return Some(0);
        }
        self.live.due.first().map(|(due, _)| due.saturating_add_signed(self.steps.total()))
    }

    /// Whether there is work to do at once.
    pub fn has_work(&self) -> bool {
        !(self.ended.is_empty() && self.retired.is_empty() && self.doubtful.is_empty()) || self.any_lags()
    }

    /// Whether there are ties that ended with this server's role.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// How many holds are tied.
    pub fn len(&self) -> usize {
        self.live.by_id.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.live.by_id.is_empty()
    }

    /// A connection has ended, and its ties with it. Returns whether it had any. They no longer count, and are
    /// removed one at a time by [`Ties::next_ended`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        let ended = self.live.by_client.remove(&client);
        self.live.unread.remove(&client);
        let any = ended.is_some();
        self.ends = self.ends.wrapping_add(u64::from(any));
        self.ended.extend(ended.map(|it| it.ranks));
        any
    }

    /// Whether the connection of a tie still exists.
    pub fn is_live(&self, tie: &Tie) -> bool {
        self.live.by_client.contains_key(&tie.client)
    }

    /// Whether there are ties of connections that have ended.
    pub fn have_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Removes those ties of a lock whose connection has ended and took the hold along. All are gone through once after each
    /// end, and not at each look.
    pub fn take_broken(&mut self, db: i32, name: &[u8]) -> Vec<Tie> {
        let Some(of_lock) = self.live.by_hold.get_mut(db, name) else { return Vec::new() };
        if std::mem::replace(&mut of_lock.looked, self.ends) == self.ends {
            return Vec::new();
        }
        let is_broken = |tie: &Tie| tie.tying.ephemeral && !self.is_live(tie);
        let broken: Vec<TieId> =
            self.live.of_lock(db, name).filter(|id| self.get(*id).is_some_and(is_broken)).collect();
        broken.into_iter().filter_map(|id| self.live.remove(id)).collect()
    }

    /// Removes the next tie of a connection that has ended.
    pub fn next_ended(&mut self) -> Option<Tie> {
        loop {
            let Some((.., id)) = self.ended.front_mut()?.pop_first() else {
                self.ended.pop_front();
                continue;
            };
            if let Some(tie) = self.live.remove(id) {
                return Some(tie);
            }
        }
    }

    /// Ends all ties because this server's role has changed. They are removed by [`Ties::next_retired`].
    pub fn retire_all(&mut self, discarded: &mut Discarded) {
        discarded.add(std::mem::take(&mut self.ended).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.overdue).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.doubtful));
        let live = std::mem::take(&mut self.live);
        if !live.by_id.is_empty() {
            self.retired.push_back(live);
        }
    }

    /// Removes the next tie that ended with this server's role.
    pub fn next_retired(&mut self) -> Option<Tie> {
        loop {
            let tables = self.retired.front_mut()?;
            if let Some(id) = tables.by_id.keys().next().copied() {
                return tables.remove(id);
            }
            self.retired.pop_front();
        }
    }

    /// Somebody else wrote a lock, or a part of it expired: the ties of its holds must be verified.
    pub fn doubt(&mut self, db: i32, name: &[u8], why: Why) {
        for id in self.live.of_lock(db, name) {
            // What somebody has written may expire in the same turn.
            let before = self.doubtful.entry(id).or_insert(why);
            *before = if why == Why::Expired { *before } else { why };
        }
    }

    /// Marks one tie to be verified.
    pub fn doubt_one(&mut self, id: TieId) {
        self.doubtful.entry(id).or_insert(Why::Changed);
    }

    /// The next tie to be verified, and why its hold was lost if it was.
    pub fn next_doubtful(&mut self) -> Option<(TieId, Why)> {
        self.doubtful.pop_first()
    }

    /// The first tie from `id` on, before `end`.
    pub fn from(&self, id: TieId, end: TieId) -> Option<TieId> {
        if id >= end {
            return None;
        }
        self.live.by_id.range(id..end).next().map(|(id, _)| *id)
    }

    /// Two databases were swapped, and their locks with them.
    pub fn swap(&mut self, one: i32, other: i32) {
        self.live.by_hold.swap(one, other);
        self.live.asking.swap(one, other);
        let (first, second) = (self.homes.remove(&one), self.homes.remove(&other));
        for (home, db) in [(first, other), (second, one)] {
            if let Some(home) = home {
                home.set(db);
                self.homes.insert(db, home);
            }
        }
    }
}

#[cfg(test)]
impl Ties {
    /// Whether every tie is in all its indices, and nothing else is in them.
    pub fn is_consistent(&self) -> bool {
        let it = &self.live;
        let ended = |rank: &Rank| self.ended.iter().flatten().any(|(.., id)| *id == rank.2);
        let each = it.by_id.iter().all(|(id, tie)| {
            let rank = tie.rank(*id);
            let of_client = it.by_client.get(&tie.client).is_some_and(|it| it.ranks.contains(&rank));
            let of_hold = self.id(tie.home.get(), &tie.name, &tie.owner) == Some(*id);
            (of_client || ended(&rank)) && of_hold && tie.due.is_none_or(|due| it.due.contains(&(due, *id)))
        });
        let holds: usize = it.by_hold.keys().map(|key| it.of_lock(key.db, &key.name).count()).sum();
        let clients = it.by_client.values().all(|of_client| {
            let ties = of_client.ranks.iter().map(|(.., id)| it.by_id.get(id));
            let reserved: Option<usize> = ties.map(|tie| tie.map(Tie::reserved)).sum();
            reserved == Some(of_client.reserved)
        });
        let shortest = |client| {
            let ranks = it.by_client.get(client).into_iter().flat_map(|it| &it.ranks);
            let ids = ranks.filter_map(|(.., id)| it.by_id.get(id));
            ids.filter(|tie| tie.tying.watchdog).map(|tie| tie.lease).min()
        };
        let leases = it.by_client.keys().all(|client| self.shortest_lease(*client) == shortest(client));
        let due = it.by_id.values().filter(|tie| tie.due.is_some()).count();
        // (What has ended unnoticed may have asked, too, for the same lock.)
        let asks = |key: LockKey| {
            let tie = it.asking.get(key.db, &key.name).and_then(|id| it.by_id.get(id));
            tie.is_some_and(|tie| tie.asks() && tie.key() == key)
        };
        let unread = it.unread.iter().all(|(client, ids)| {
            !ids.is_empty() && ids.iter().all(|id| it.by_id.get(id).is_some_and(|tie| tie.client == *client))
        });
        each && leases
            && unread
            && holds == it.by_id.len()
            && clients
            && due == it.due.len()
            && it.asking.keys().all(asks)
            && it.by_client.values().all(|it| !it.ranks.is_empty())
    }
}
