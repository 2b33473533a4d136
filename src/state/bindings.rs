//! Holds bound to a connection: watched, so that the server renews their lease while the connection lives, or
//! ephemeral, so that they end with it.
//!
//! A binding names one particular hold by its token. So the watchdog never renews a later hold, and a connection that
//! ends never takes one with it.

use super::event_bytes::hold_bytes;
use super::{ConfirmationId, Why};
use crate::lock::{ByOwner, Deadline, KeyMap, Limit, LockKey, Millis, Owner, Token};
use crate::server::discarded::Discarded;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// How a hold is bound to its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindingFlags {
    /// The server renews the lease while the connection lives.
    pub watchdog: bool,
    /// The hold ends with the connection.
    pub ephemeral: bool,
    /// The session is notified once a request waits for the lock.
    pub contention: bool,
}

impl BindingFlags {
    /// Not at all.
    pub const NONE: Self = Self { watchdog: false, ephemeral: false, contention: false };

    /// Whether it says how long the hold lasts.
    fn is_a_term(self) -> bool {
        self.watchdog || self.ephemeral
    }
}

/// The name of a binding; later bindings have greater names, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BindingId(pub u64);

impl BindingId {
    /// No binding has a smaller name.
    pub const FIRST: Self = Self(0);
}

/// A bound hold.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The connection.
    pub client: u64,
    /// How it is bound.
    pub flags: BindingFlags,
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
    /// The session has been notified that a request waits for the lock.
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

/// The number of a database, shared by everything that is bound or may be revoked in it, so that `SWAPDB` changes
/// it for all of them at once.
pub type Home = Rc<Cell<i32>>;

/// What a binding is made from.
#[derive(Debug)]
pub struct NewBinding {
    /// The connection.
    pub client: u64,
    /// How it is bound.
    pub flags: BindingFlags,
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

impl Binding {
    /// The lock.
    pub fn key(&self) -> LockKey {
        LockKey { db: self.home.get(), name: self.name.clone() }
    }

    /// The bytes that are reserved for the events that it may cause.
    fn reserved(&self) -> usize {
        hold_bytes(&self.owner, &self.name)
    }

    /// Whether its session has yet to be notified that a request waits for the lock.
    fn asks(&self) -> bool {
        self.flags.contention && !self.told
    }

    /// Its place among the bindings of its connection.
    fn rank(&self, id: BindingId) -> Rank {
        (if self.flags.watchdog { self.lease } else { Millis::MAX }, self.kept_end(), id)
    }

    /// When it needs attention, as it is kept: to be renewed, or because its lease has run out.
    fn next_due(&self, now: Millis) -> Option<Millis> {
        let renewal = self.flags.watchdog.then(|| now.saturating_add(interval(self.lease)));
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

    /// The renewal that replicas are being asked about; the next one waits for that.
    pub fn renewal(&self) -> Option<ConfirmationId> {
        self.confirmed?.asked.map(|(renewal, _)| renewal)
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

/// Orders the bindings of a connection: watched ones by their leases, then those that are not watched; those of one lease by
/// when they end.
type Rank = (Millis, Deadline, BindingId);

/// Of a connection with more different leases that are renewed for it, nothing is sure: looking at each would take long.
const LEASES: usize = 1_000;

/// The bindings of a lock.
#[derive(Debug, Default)]
struct OfLock {
    by_owner: ByOwner<BindingId>,
    /// How many connections had ended when those were last looked for that ended with theirs.
    looked: u64,
}

/// The bindings of a connection.
#[derive(Debug, Default)]
struct OfClient {
    ranks: BTreeSet<Rank>,
    /// The bytes that are reserved for the events that they may cause, if it is a session.
    reserved: usize,
}

/// Bindings, with five indices.
#[derive(Debug, Default)]
struct Tables {
    /// In boxes: a tree that grows at its end is hardly more than half full.
    by_id: BTreeMap<BindingId, Box<Binding>>,
    by_client: BTreeMap<u64, OfClient>,
    by_hold: KeyMap<OfLock>,
    /// Those whose sessions have yet to be notified that a request waits: of a lock that has one holder, the binding of that.
    asking: KeyMap<BindingId>,
    due: BTreeSet<(Millis, BindingId)>,
    /// Those that were due and not renewed because their session reads nothing, by connection.
    unread: BTreeMap<u64, BTreeSet<BindingId>>,
}

/// All bindings.
#[derive(Debug, Default)]
pub struct Bindings {
    next_id: u64,
    /// How many connections that had any have ended.
    ends: u64,
    reads: Read,
    steps: Steps,
    /// The first binding that may have a key which has yet to follow a step of the clock; all before it have none.
    to_follow: Option<BindingId>,
    live: Tables,
    /// Those that were due when nothing could be renewed, and are to be as soon as it can.
    overdue: VecDeque<BTreeSet<BindingId>>,
    homes: BTreeMap<i32, Home>,
    /// Bindings of connections that have ended.
    ended: VecDeque<BTreeSet<Rank>>,
    /// Bindings from before this server's role changed.
    retired: VecDeque<Tables>,
    /// Bindings whose hold another client may have ended.
    doubtful: BTreeMap<BindingId, Why>,
}

impl Tables {
    fn add(&mut self, id: BindingId, binding: Binding) {
        let of_client = self.by_client.entry(binding.client).or_default();
        of_client.ranks.insert(binding.rank(id));
        of_client.reserved = of_client.reserved.saturating_add(binding.reserved());
        self.by_hold.get_or_default(&binding.key()).by_owner.insert(binding.owner.clone(), id);
        if binding.asks() {
            self.asking.insert(binding.key(), id);
        }
        self.due.extend(binding.due.map(|due| (due, id)));
        self.by_id.insert(id, Box::new(binding));
    }

    fn remove(&mut self, id: BindingId) -> Option<Binding> {
        let binding = *self.by_id.remove(&id)?;
        if let Some(due) = binding.due {
            self.due.remove(&(due, id));
        }
        if let Some(of_client) = self.by_client.get_mut(&binding.client) {
            if of_client.ranks.remove(&binding.rank(id)) {
                of_client.reserved = of_client.reserved.saturating_sub(binding.reserved());
            }
            if of_client.ranks.is_empty() {
                self.by_client.remove(&binding.client);
            }
        }
        if let Some(unread) = self.unread.get_mut(&binding.client) {
            unread.remove(&id);
            if unread.is_empty() {
                self.unread.remove(&binding.client);
            }
        }
        let db = binding.home.get();
        if self.asking.get(db, &binding.name) == Some(&id) {
            self.asking.remove(db, &binding.name);
        }
        if let Some(of_lock) = self.by_hold.get_mut(db, &binding.name) {
            of_lock.by_owner.remove(&binding.owner, id);
            if of_lock.by_owner.is_empty() {
                self.by_hold.remove(db, &binding.name);
            }
        }
        Some(binding)
    }

    /// Its session is to be notified once a request waits.
    fn ask(&mut self, id: BindingId) {
        if let Some(binding) = self.by_id.get_mut(&id) {
            (binding.flags.contention, binding.told) = (true, false);
            self.asking.insert(binding.key(), id);
        }
    }

    /// Changes a binding's deadline, and its place among the bindings of its connection.
    fn change(&mut self, id: BindingId, change: impl FnOnce(&mut Binding)) {
        let Some(binding) = self.by_id.get_mut(&id) else { return };
        let before = binding.rank(id);
        change(binding);
        let after = binding.rank(id);
        if before != after
            && let Some(of_client) = self.by_client.get_mut(&binding.client)
            && of_client.ranks.remove(&before)
        {
            of_client.ranks.insert(after);
        }
    }

    fn of_lock(&self, db: i32, name: &[u8]) -> impl Iterator<Item = BindingId> + '_ {
        self.by_hold.get(db, name).into_iter().flat_map(|of_lock| of_lock.by_owner.all().rev())
    }

    fn set_due(&mut self, id: BindingId, due: Option<Millis>) {
        if let Some(binding) = self.by_id.get_mut(&id) {
            if let Some(before) = std::mem::replace(&mut binding.due, due) {
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

impl Bindings {
    /// Binds a hold to a connection, whatever it was bound to before. If the same hold was bound to the same connection,
    /// that binding's flags stay as well; and of a request without flags its lease, and the replicas if it names none. Returns the
    /// binding that the owner had before, if it was of another hold or to another connection.
    pub fn bind(&mut self, new: NewBinding, now: Millis) -> Option<Binding> {
        let id = self.id(new.key.db, &new.key.name, &new.owner);
        let bound = id.and_then(|id| self.get(id)).filter(|it| it.token == new.token);
        let keeps = bound.is_some_and(|it| it.client == new.client && !new.flags.is_a_term());
        if keeps && new.replicas == 0 {
            // A lease for once, or a hold more: what the binding promises stays.
            id.filter(|_| new.flags.contention).into_iter().for_each(|id| self.live.ask(id));
            return None;
        }
        let before = id.and_then(|id| self.live.remove(id));
        let of_hold = before.as_ref().filter(|it| it.token == new.token);
        let (deadline, steps) = (self.steps.kept_deadline(new.deadline), self.steps.clone());
        let followed = of_hold.map_or(steps.0.get(), |it| it.followed);
        let mut flags = new.flags;
        let told = !flags.contention && of_hold.is_some_and(|it| it.told);
        let lease = of_hold.filter(|_| keeps).map_or(new.lease, |it| it.lease);
        if let Some(before) = of_hold.filter(|it| it.client == new.client) {
            flags.watchdog |= before.flags.watchdog;
            flags.ephemeral |= before.flags.ephemeral;
            flags.contention |= before.flags.contention;
        }
        let home = self.home(new.key.db);
        let binding = Binding {
            client: new.client,
            flags,
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
        let (id, client, token) = (self.next_id(), binding.client, binding.token);
        self.add(binding, now);
        if keeps {
            self.deadline_moved(id, new.deadline, now);
        }
        before.filter(|it| it.client != client || it.token != token)
    }

    /// The database with this number, for everything that must follow it when it is swapped with another.
    pub fn home(&mut self, db: i32) -> Home {
        self.homes.entry(db).or_insert_with(|| Rc::new(Cell::new(db))).clone()
    }

    fn add(&mut self, mut binding: Binding, now: Millis) {
        let id = self.next_id();
        self.next_id = self.next_id.wrapping_add(1);
        binding.due = binding.next_due(self.steps.kept(now));
        self.live.add(id, binding);
    }

    /// The name that the next binding gets.
    pub fn next_id(&self) -> BindingId {
        BindingId(self.next_id)
    }

    /// The name of the binding of a hold of `owner`, whatever its token.
    pub fn id(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<BindingId> {
        self.live.by_hold.get(db, name)?.by_owner.of(owner).next()
    }

    /// A binding.
    pub fn get(&self, id: BindingId) -> Option<&Binding> {
        self.live.by_id.get(&id).map(Box::as_ref)
    }

    /// The binding of the hold that `owner` has under `token`.
    pub fn of(&self, db: i32, name: &[u8], owner: &[u8], token: Option<Token>) -> Option<&Binding> {
        self.get(self.id(db, name, owner)?).filter(|binding| Some(binding.token) == token)
    }

    /// Whether any hold of a lock is bound.
    pub fn is_bound(&self, db: i32, name: &[u8]) -> bool {
        self.live.by_hold.get(db, name).is_some()
    }

    /// The connection that a hold of `owner` is bound to, whatever its token.
    pub fn client_of(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<u64> {
        Some(self.get(self.id(db, name, owner)?)?.client)
    }

    /// Whether a session that holds a lock has yet to be notified that a request waits for it.
    pub fn asks(&self, db: i32, name: &[u8]) -> bool {
        self.live.asking.get(db, name).is_some()
    }

    /// The binding of a lock whose session has yet to be notified that a request waits for it: it is being notified.
    pub fn take_asking(&mut self, db: i32, name: &[u8]) -> Option<&Binding> {
        // Mostly no session asks, and to find that out costs less than to remove nothing.
        let id = *self.live.asking.get(db, name)?;
        self.live.asking.remove(db, name);
        let binding = self.live.by_id.get_mut(&id)?;
        binding.told = true;
        Some(binding)
    }

    /// How many locks may be held unused until a request waits for them.
    pub fn kept(&self) -> usize {
        self.live.asking.len()
    }

    /// The shortest lease that is renewed for a connection.
    pub fn shortest_lease(&self, client: u64) -> Option<Millis> {
        let (lease, ..) = self.live.by_client.get(&client)?.ranks.first()?;
        Some(*lease).filter(|lease| *lease != Millis::MAX)
    }

    /// Whether any hold is bound to a connection.
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
            let next = (longer_than.saturating_add(1), Deadline::At(0), BindingId(0));
            let watched = of_client.ranks.range(next..).next().filter(|(lease, ..)| *lease != Millis::MAX);
            let Some((lease, deadline, _)) = watched else { return least.unwrap_or(0) };
            let left = deadline.remaining(since).and_then(|left| left.saturating_mul(WHOLE).checked_div(*lease));
            least = Some(left.unwrap_or(WHOLE).min(least.unwrap_or(WHOLE)));
            longer_than = *lease;
        }
        0
    }

    /// Forgets the binding of a hold, and returns it if there was one.
    pub fn unbind(&mut self, db: i32, name: &[u8], owner: &[u8]) -> Option<Binding> {
        self.live.remove(self.id(db, name, owner)?)
    }

    /// Forgets the bindings of all holds of a lock, and returns them.
    pub fn unbind_all(&mut self, db: i32, name: &[u8]) -> Vec<Binding> {
        let ids: Vec<BindingId> = self.live.of_lock(db, name).collect();
        ids.into_iter().filter_map(|id| self.live.remove(id)).collect()
    }

    /// Forgets a binding, and returns it.
    pub fn remove(&mut self, id: BindingId) -> Option<Binding> {
        self.live.remove(id)
    }

    /// What a binding promised is withdrawn, and its hold goes on. It stays if the connection is to learn of a loss.
    pub fn promise_nothing(&mut self, id: BindingId, stays: bool, now: Millis) {
        if let Some(binding) = self.live.remove(id).filter(|_| stays) {
            self.add(Binding { flags: BindingFlags::NONE, ..binding }, now);
        }
    }

    /// This module changed the hold of `owner`: it has this token and deadline now. If the binding belonged to another
    /// hold, forgets it and returns it.
    pub fn changed(
        &mut self,
        (db, name, owner): (i32, &[u8], &[u8]),
        before: Option<Token>,
        token: Token,
        deadline: Deadline,
        now: Millis,
    ) -> Option<Binding> {
        let id = self.id(db, name, owner)?;
        let binding = self.live.by_id.get_mut(&id)?;
        if Some(binding.token) != before {
            return self.live.remove(id);
        }
        binding.token = token;
        self.deadline_moved(id, deadline, now);
        None
    }

    /// The deadline of a bound hold has moved: its watchdog comes in time for the new one, if that is earlier.
    pub fn deadline_moved(&mut self, id: BindingId, deadline: Deadline, now: Millis) {
        let (deadline, now) = (self.steps.kept_deadline(deadline), self.steps.kept(now));
        self.live.change(id, |binding| binding.moved(deadline));
        let Some(binding) = self.get(id) else { return };
        let left = deadline.remaining(now).map(|left| now.saturating_add(interval(left)));
        let over = binding.over();
        let renewal = if binding.flags.watchdog { binding.due.into_iter().chain(left).chain(over).min() } else { None };
        let due = renewal.or_else(|| binding.next_due(now));
        self.live.set_due(id, due);
    }

    /// The hold of `owner`, if it is bound, has this count now, and its lock this limit.
    pub fn counted(&mut self, (db, name, owner): (i32, &[u8], &[u8]), holds: u64, limit: Option<Limit>) {
        let id = self.id(db, name, owner);
        if let Some(binding) = id.and_then(|id| self.live.by_id.get_mut(&id)) {
            (binding.holds, binding.limit) = (holds, limit.unwrap_or(binding.limit));
        }
    }

    /// The server's clock has stepped by so many ms: all bindings go along, and their keys have to follow.
    pub fn stepped(&mut self, by: i64) {
        let Stepped { by: before, times } = self.steps.0.get();
        self.steps.0.set(Stepped { by: before.saturating_add(by), times: times.wrapping_add(1) });
        self.to_follow = Some(BindingId(0));
    }

    /// Whether any key may have yet to follow a step of the clock.
    pub fn any_lags(&self) -> bool {
        self.to_follow.is_some_and(|from| self.live.by_id.range(from..).next().is_some())
    }

    /// Whether the key of this binding has.
    pub fn lags(&self, id: BindingId) -> bool {
        self.get(id).is_some_and(|binding| binding.followed != self.steps.0.get())
    }

    /// Whether the key of the hold of `owner` has.
    pub fn lags_of(&self, db: i32, name: &[u8], owner: &[u8]) -> bool {
        self.id(db, name, owner).is_some_and(|id| self.lags(id))
    }

    /// The next binding whose key may have.
    pub fn next_lagging(&mut self) -> Option<BindingId> {
        let next = self.live.by_id.range(self.to_follow?..).next().map(|(id, _)| *id);
        self.to_follow = next.map(|BindingId(id)| BindingId(id.wrapping_add(1)));
        next
    }

    /// The bindings of this lock whose key has.
    pub fn lagging_of(&self, db: i32, name: &[u8]) -> Vec<BindingId> {
        self.live.of_lock(db, name).filter(|id| self.lags(*id)).collect()
    }

    /// The key of a binding is about to follow. Returns the binding and by how many ms; `None` if it has.
    pub fn follows(&mut self, id: BindingId) -> Option<(Binding, i64)> {
        let now = self.steps.0.get();
        let binding = self.live.by_id.get_mut(&id)?;
        let before = std::mem::replace(&mut binding.followed, now);
        (before != now).then(|| (Binding::clone(binding), now.by.saturating_sub(before.by)))
    }

    /// Others have touched the key of a binding, and that has not been verified yet: if the hold is gone, they may have ended it.
    pub fn is_touched(&self, id: BindingId) -> bool {
        self.doubtful.get(&id).is_some_and(|why| *why != Why::Expired)
    }

    /// Another client gave a bound hold another deadline. Its end must not be missed, but that is no reason to renew it
    /// earlier. (A key that has yet to follow a step of the clock says nothing.)
    pub fn deadline_seen(&mut self, id: BindingId, deadline: Deadline) {
        if self.lags(id) {
            return;
        }
        let deadline = self.steps.kept_deadline(deadline);
        self.live.change(id, |binding| binding.moved(deadline));
        let Some(binding) = self.get(id) else { return };
        let due = binding.due.into_iter().chain(binding.over()).min();
        self.live.set_due(id, due);
    }

    /// A binding that is due. A watched one is due again a third of its lease later, or at its end, whatever happens now.
    pub fn take_due(&mut self, now: Millis) -> Option<BindingId> {
        let id = self.take_overdue().or_else(|| self.first_due(now))?;
        let now = self.steps.kept(now);
        let watched = self.get(id).filter(|binding| binding.flags.watchdog);
        let next = watched.and_then(|binding| {
            let over = binding.over().filter(|over| *over > now);
            over.into_iter().chain([now.saturating_add(interval(binding.lease))]).min()
        });
        self.live.set_due(id, next);
        Some(id)
    }

    /// The binding that is due for longest.
    pub fn first_due(&self, now: Millis) -> Option<BindingId> {
        self.live.due.first().filter(|(due, _)| *due <= self.steps.kept(now)).map(|(_, id)| *id)
    }

    fn take_overdue(&mut self) -> Option<BindingId> {
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
    pub fn is_unread(&self, binding: &Binding, last: Read) -> bool {
        last <= binding.since
    }

    /// A hold was renewed.
    pub fn renewed(&mut self, id: BindingId) {
        let reads = self.reads;
        if let Some(binding) = self.live.by_id.get_mut(&id) {
            binding.since = reads;
        }
    }

    /// A binding that is due is not renewed before its session reads. Until then, only its end is of interest.
    pub fn wait_for_reader(&mut self, id: BindingId) {
        let Some(binding) = self.get(id) else { return };
        let (client, over) = (binding.client, binding.over());
        self.live.unread.entry(client).or_default().insert(id);
        self.live.set_due(id, over);
    }

    /// A binding that is due can't be renewed now. Until it can, only its end is of interest.
    pub fn put_off(&mut self, id: BindingId) {
        let over = self.get(id).and_then(Binding::over);
        self.live.set_due(id, over);
        match self.overdue.back_mut() {
            Some(last) => drop(last.insert(id)),
            None => self.overdue.push_back(BTreeSet::from([id])),
        }
    }

    /// A binding whose hold is over needs no more attention.
    pub fn is_over(&mut self, id: BindingId) {
        self.live.set_due(id, None);
    }

    /// Replicas are being asked whether they have the renewal of a hold that was just made.
    pub fn asked(&mut self, id: BindingId, renewal: ConfirmationId) {
        if let Some(binding) = self.live.by_id.get_mut(&id)
            && let Some(confirmed) = &mut binding.confirmed
        {
            confirmed.asked = Some((renewal, binding.deadline));
        }
    }

    /// Enough replicas have a renewal. Or not: then what they knew before stands.
    pub fn answered(&mut self, id: BindingId, renewal: ConfirmationId, answer: Confirms) {
        self.live.change(id, |binding| {
            if let Some(confirmed) = &mut binding.confirmed
                && let Some((_, since)) = confirmed.asked.take_if(|(asked, _)| *asked == renewal)
                && answer == Confirms::Yes
            {
                confirmed.deadline = since;
            }
        });
    }

    /// When the next binding is due.
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

    /// Whether there are bindings that ended with this server's role.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// How many holds are bound.
    pub fn len(&self) -> usize {
        self.live.by_id.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.live.by_id.is_empty()
    }

    /// A connection has ended, and its bindings with it. Returns whether it had any. They no longer count, and are
    /// removed one at a time by [`Bindings::next_ended`].
    pub fn client_gone(&mut self, client: u64) -> bool {
        let ended = self.live.by_client.remove(&client);
        self.live.unread.remove(&client);
        let any = ended.is_some();
        self.ends = self.ends.wrapping_add(u64::from(any));
        self.ended.extend(ended.map(|it| it.ranks));
        any
    }

    /// Whether the connection of a binding still exists.
    pub fn is_live(&self, binding: &Binding) -> bool {
        self.live.by_client.contains_key(&binding.client)
    }

    /// Whether there are bindings of connections that have ended.
    pub fn have_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Removes those bindings of a lock whose connection has ended and took the hold along. All are gone through once after each
    /// end, and not at each look.
    pub fn take_broken(&mut self, db: i32, name: &[u8]) -> Vec<Binding> {
        let Some(of_lock) = self.live.by_hold.get_mut(db, name) else { return Vec::new() };
        if std::mem::replace(&mut of_lock.looked, self.ends) == self.ends {
            return Vec::new();
        }
        let is_broken = |binding: &Binding| binding.flags.ephemeral && !self.is_live(binding);
        let broken: Vec<BindingId> =
            self.live.of_lock(db, name).filter(|id| self.get(*id).is_some_and(is_broken)).collect();
        broken.into_iter().filter_map(|id| self.live.remove(id)).collect()
    }

    /// Removes the next binding of a connection that has ended.
    pub fn next_ended(&mut self) -> Option<Binding> {
        loop {
            let Some((.., id)) = self.ended.front_mut()?.pop_first() else {
                self.ended.pop_front();
                continue;
            };
            if let Some(binding) = self.live.remove(id) {
                return Some(binding);
            }
        }
    }

    /// Ends all bindings because this server's role has changed. They are removed by [`Bindings::next_retired`].
    pub fn retire_all(&mut self, discarded: &mut Discarded) {
        discarded.add(std::mem::take(&mut self.ended).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.overdue).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.doubtful));
        let live = std::mem::take(&mut self.live);
        if !live.by_id.is_empty() {
            self.retired.push_back(live);
        }
    }

    /// Removes the next binding that ended with this server's role.
    pub fn next_retired(&mut self) -> Option<Binding> {
        loop {
            let tables = self.retired.front_mut()?;
            if let Some(id) = tables.by_id.keys().next().copied() {
                return tables.remove(id);
            }
            self.retired.pop_front();
        }
    }

    /// Another client wrote a lock, or a part of it expired: the bindings of its holds must be verified. What a client wrote
    /// follows no step of the clock that was before it, but all that come later.
    pub fn doubt(&mut self, db: i32, name: &[u8], why: Why) {
        if why != Why::Expired && self.any_lags() {
            self.lagging_of(db, name).into_iter().for_each(|id| self.stays(id));
        }
        for id in self.live.of_lock(db, name) {
            // What a client has written may expire in the same turn.
            let before = self.doubtful.entry(id).or_insert(why);
            *before = if why == Why::Expired { *before } else { why };
        }
    }

    /// The key of a binding stays as it is, whatever step of the clock it had yet to follow.
    fn stays(&mut self, id: BindingId) {
        let now = self.steps.0.get();
        self.live.by_id.get_mut(&id).into_iter().for_each(|binding| binding.followed = now);
    }

    /// Marks one binding to be verified, because the data set was replaced.
    pub fn doubt_one(&mut self, id: BindingId) {
        self.stays(id);
        self.doubtful.entry(id).or_insert(Why::Changed);
    }

    /// The next binding to be verified, and why its hold was lost if it was.
    pub fn next_doubtful(&mut self) -> Option<(BindingId, Why)> {
        self.doubtful.pop_first()
    }

    /// The first binding from `id` on, before `end`.
    pub fn from(&self, id: BindingId, end: BindingId) -> Option<BindingId> {
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
impl Bindings {
    /// Whether every binding is in all its indices, and nothing else is in them.
    pub fn is_consistent(&self) -> bool {
        let it = &self.live;
        let ended = |rank: &Rank| self.ended.iter().flatten().any(|(.., id)| *id == rank.2);
        let each = it.by_id.iter().all(|(id, binding)| {
            let rank = binding.rank(*id);
            let of_client = it.by_client.get(&binding.client).is_some_and(|it| it.ranks.contains(&rank));
            let of_hold = self.id(binding.home.get(), &binding.name, &binding.owner) == Some(*id);
            (of_client || ended(&rank)) && of_hold && binding.due.is_none_or(|due| it.due.contains(&(due, *id)))
        });
        let holds: usize = it.by_hold.keys().map(|key| it.of_lock(key.db, &key.name).count()).sum();
        let clients = it.by_client.values().all(|of_client| {
            let bindings = of_client.ranks.iter().map(|(.., id)| it.by_id.get(id));
            let reserved: Option<usize> = bindings.map(|binding| binding.map(|it| it.reserved())).sum();
            reserved == Some(of_client.reserved)
        });
        let shortest = |client| {
            let ranks = it.by_client.get(client).into_iter().flat_map(|it| &it.ranks);
            let ids = ranks.filter_map(|(.., id)| it.by_id.get(id));
            ids.filter(|binding| binding.flags.watchdog).map(|binding| binding.lease).min()
        };
        let leases = it.by_client.keys().all(|client| self.shortest_lease(*client) == shortest(client));
        let due = it.by_id.values().filter(|binding| binding.due.is_some()).count();
        // (What has ended unnoticed may have asked, too, for the same lock.)
        let asks = |key: LockKey| {
            let binding = it.asking.get(key.db, &key.name).and_then(|id| it.by_id.get(id));
            binding.is_some_and(|binding| binding.asks() && binding.key() == key)
        };
        let unread = it.unread.iter().all(|(client, ids)| {
            !ids.is_empty() && ids.iter().all(|id| it.by_id.get(id).is_some_and(|binding| binding.client == *client))
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
