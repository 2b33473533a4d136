//! Bindings: holds that are bound to a connection, which is notified of their loss if it is a session. The server
//! renews the lease of a watched hold while the session reads its events. An ephemeral hold ends with its connection.
//!
//! A binding names one hold by its token. So the watchdog never renews a later hold of the same owner, and the end of a
//! connection never releases one.

use super::event_bytes::hold_bytes;
use super::{ConfirmationId, LossReason};
use crate::lock::{ByOwner, Deadline, KeyMap, Limit, LockKey, Millis, Owner, Token};
use crate::server::discarded::Discarded;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// How a hold is bound to its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindingFlags {
    /// The server renews the lease while the session reads its events.
    pub watchdog: bool,
    /// The hold ends with the connection.
    pub ephemeral: bool,
    /// The session is notified once when another request waits for the lock, or is refused because of it.
    pub contention: bool,
}

impl BindingFlags {
    /// No flags.
    pub const NONE: Self = Self { watchdog: false, ephemeral: false, contention: false };

    /// Whether a flag affects how long the hold lasts.
    fn affects_lifetime(self) -> bool {
        self.watchdog || self.ephemeral
    }
}

/// Identifies a binding. Later bindings have greater ids, and no id is used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BindingId(pub u64);

impl BindingId {
    /// No binding has a smaller id.
    pub const FIRST: Self = Self(0);
}

/// A bound hold.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The client id of the connection.
    pub client: u64,
    /// How the hold is bound.
    pub flags: BindingFlags,
    /// The name of the lock's key.
    pub name: Rc<[u8]>,
    /// The owner.
    pub owner: Owner,
    /// The hold's token.
    pub token: Token,
    /// The lease of a renewal by the watchdog, or by a client that names no lease, in ms.
    pub lease: Millis,
    /// How many replicas must confirm a renewal before it counts.
    pub replicas: u32,
    /// The hold count. If the key expires only because the server's clock steps, the key is written again with this
    /// count and limit.
    pub holds: u64,
    /// The limit of the lock; see `holds`.
    pub limit: Limit,
    /// The deadline in the key, as far as the module knows, in unstepped time (see `SharedClockSteps`).
    deadline: Deadline,
    /// The deadline that replicas have confirmed, if the hold requires replicas.
    confirmed: Option<Confirmed>,
    /// Whether the session has been notified of contention.
    notified: bool,
    /// The newest [`Read`] of any session when the hold was bound or last renewed by the watchdog.
    read_at_renewal: Read,
    home: Home,
    due: Option<Millis>,
    steps: SharedClockSteps,
    /// The clock steps that the key's expiry already includes.
    applied_steps: ClockSteps,
}

/// What replicas have confirmed of a hold's lease.
#[derive(Clone, Copy, Debug)]
struct Confirmed {
    /// The earliest of the deadlines written from the last confirmed write on.
    deadline: Deadline,
    /// The renewal that replicas are asked to confirm, and the earliest of the deadlines written from it on.
    asked: Option<(ConfirmationId, Deadline)>,
}

/// The sequence number of a `LOCK.EVENTS`. All sessions share the sequence, so later reads have greater numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Read(u64);

/// The steps of the server's clock so far, shared by all bindings, so that a step moves all their times at once. Times
/// are stored as *unstepped* time: as a clock without these steps would show them.
#[derive(Clone, Debug, Default)]
struct SharedClockSteps(Rc<Cell<ClockSteps>>);

/// The sum of all steps of the clock, in ms, and their count. After a step forward and back the sum is as before, but a
/// key that expired in between must be written again: the count reveals this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClockSteps {
    total: i64,
    count: u64,
}

impl SharedClockSteps {
    fn total(&self) -> i64 {
        self.0.get().total
    }

    /// Converts a time of the server's clock to unstepped time.
    fn unstepped(&self, at: Millis) -> Millis {
        at.saturating_add_signed(self.total().saturating_neg())
    }

    /// Converts a deadline by the server's clock to unstepped time.
    fn unstepped_deadline(&self, deadline: Deadline) -> Deadline {
        deadline.stepped(self.total().saturating_neg())
    }
}

/// The number of a database, shared by all bindings and undelivered grants in it, so that `SWAPDB` changes the number
/// for all of them at once.
pub type Home = Rc<Cell<i32>>;

/// The parameters of a new binding.
#[derive(Debug)]
pub struct NewBinding {
    /// The client id of the connection.
    pub client: u64,
    /// How the hold is bound.
    pub flags: BindingFlags,
    /// The lock.
    pub key: LockKey,
    /// The owner.
    pub owner: Owner,
    /// The hold's token.
    pub token: Token,
    /// The lease of a renewal by the watchdog, or by a client that names no lease, in ms.
    pub lease: Millis,
    /// How many replicas must confirm a renewal before it counts.
    pub replicas: u32,
    /// The hold's deadline. If the hold requires replicas, they have confirmed it.
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

    /// The bytes reserved for the events that this binding may cause.
    fn reserved(&self) -> usize {
        hold_bytes(&self.owner, &self.name)
    }

    /// Whether the session must still be notified of contention.
    fn is_armed(&self) -> bool {
        self.flags.contention && !self.notified
    }

    /// The sort key of this binding among those of its connection.
    fn rank(&self, id: BindingId) -> Rank {
        (if self.flags.watchdog { self.lease } else { Millis::MAX }, self.unstepped_end(), id)
    }

    /// When the binding needs attention, in unstepped time: for a renewal, or because its lease has run out.
    fn next_due(&self, now: Millis) -> Option<Millis> {
        let renewal = self.flags.watchdog.then(|| now.saturating_add(interval(self.lease)));
        self.over().into_iter().chain(renewal).min()
    }

    /// The deadline that the owner can rely on: the one in the key, or the one that replicas have confirmed if that is
    /// earlier.
    pub fn end(&self) -> Deadline {
        self.unstepped_end().stepped(self.steps.total())
    }

    fn unstepped_end(&self) -> Deadline {
        self.confirmed.map_or(self.deadline, |confirmed| confirmed.deadline.min(self.deadline))
    }

    /// The deadline in the key, as far as the module knows.
    pub fn deadline(&self) -> Deadline {
        self.deadline.stepped(self.steps.total())
    }

    /// The renewal that replicas are asked to confirm. The watchdog starts the next one only when this one is settled.
    pub fn renewal(&self) -> Option<ConfirmationId> {
        self.confirmed?.asked.map(|(renewal, _)| renewal)
    }

    /// The first millisecond after the lease, in unstepped time.
    fn over(&self) -> Option<Millis> {
        match self.unstepped_end() {
            Deadline::At(at) => Some(at.saturating_add(1)),
            Deadline::Never => None,
        }
    }

    /// Records the key's new deadline, in unstepped time.
    fn moved(&mut self, deadline: Deadline) {
        self.deadline = deadline;
        if let Some(confirmed) = &mut self.confirmed {
            confirmed.deadline = confirmed.deadline.min(deadline);
            confirmed.asked = confirmed.asked.map(|(id, since)| (id, since.min(deadline)));
        }
    }
}

/// The interval between two renewals of a lease: a third of it.
fn interval(lease: Millis) -> Millis {
    (lease / 3).max(1)
}

/// The sort key of a connection's bindings. Watched bindings come first, by lease. Bindings with the same lease are
/// sorted by deadline.
type Rank = (Millis, Deadline, BindingId);

/// [`Bindings::sure`] examines at most this many different leases of a connection, which bounds its time. If there are
/// more, it returns 0.
const MAX_LEASES: usize = 1_000;

/// The bindings of a lock.
#[derive(Debug, Default)]
struct LockBindings {
    by_owner: ByOwner<BindingId>,
    /// `Bindings::ends` when [`Bindings::take_broken`] last scanned this lock.
    ends_at_scan: u64,
}

/// The bindings of a connection.
#[derive(Debug, Default)]
struct ClientBindings {
    ranks: BTreeSet<Rank>,
    /// The bytes reserved for the events that these bindings may cause, if the connection is a session.
    reserved: usize,
}

/// Bindings and their five indices.
#[derive(Debug, Default)]
struct Tables {
    /// Boxed, because the nodes of a tree that grows only at its end are hardly more than half full.
    by_id: BTreeMap<BindingId, Box<Binding>>,
    by_client: BTreeMap<u64, ClientBindings>,
    by_hold: KeyMap<LockBindings>,
    /// Armed bindings: their sessions must still be notified of contention. There is one for each lock, because
    /// `CONTENTION` is only for locks with one holder.
    armed: KeyMap<BindingId>,
    due: BTreeSet<(Millis, BindingId)>,
    /// Bindings that were due, but were not renewed because their session had not read its events, by connection.
    unread: BTreeMap<u64, BTreeSet<BindingId>>,
}

/// All bindings.
#[derive(Debug, Default)]
pub struct Bindings {
    next_id: u64,
    /// How many connections that had bindings have ended.
    ends: u64,
    reads: Read,
    steps: SharedClockSteps,
    /// The bindings whose keys may lag behind a step of the clock: earlier ones have followed it, later ones have none to
    /// follow.
    lagging: Range<BindingId>,
    live: Tables,
    /// Bindings that were due, but could not be renewed then: the server took no writes, or the session had not read.
    /// They are due at once.
    overdue: VecDeque<BTreeSet<BindingId>>,
    homes: BTreeMap<i32, Home>,
    /// Bindings of connections that have ended, which must still be removed.
    ended: VecDeque<BTreeSet<Rank>>,
    /// Bindings from before the server's role changed, which must still be removed.
    retired: VecDeque<Tables>,
    /// Bindings that must be verified, because the module may not have noticed the end of their hold; and the reason to
    /// report if it has ended.
    unverified: BTreeMap<BindingId, LossReason>,
}

impl Tables {
    fn add(&mut self, id: BindingId, binding: Binding) {
        let of_client = self.by_client.entry(binding.client).or_default();
        of_client.ranks.insert(binding.rank(id));
        of_client.reserved = of_client.reserved.saturating_add(binding.reserved());
        self.by_hold.get_or_default(&binding.key()).by_owner.insert(binding.owner.clone(), id);
        if binding.is_armed() {
            self.armed.insert(binding.key(), id);
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
        if self.armed.get(db, &binding.name) == Some(&id) {
            self.armed.remove(db, &binding.name);
        }
        if let Some(of_lock) = self.by_hold.get_mut(db, &binding.name) {
            of_lock.by_owner.remove(&binding.owner, id);
            if of_lock.by_owner.is_empty() {
                self.by_hold.remove(db, &binding.name);
            }
        }
        Some(binding)
    }

    /// Arms the notification of contention for a binding.
    fn arm(&mut self, id: BindingId) {
        if let Some(binding) = self.by_id.get_mut(&id) {
            (binding.flags.contention, binding.notified) = (true, false);
            self.armed.insert(binding.key(), id);
        }
    }

    /// Changes a binding's deadline, and with it the binding's rank.
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

/// Whether enough replicas have confirmed a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirms {
    /// They have.
    Yes,
    /// They have not confirmed it in time.
    No,
}

impl Bindings {
    /// Binds a hold to a connection. This replaces the binding that the owner had for this lock.
    ///
    /// If the same hold was bound to the same connection, the flags of the earlier binding are kept as well. Without
    /// `WATCHDOG` and `EPHEMERAL` such a request keeps the lease, too; if it also names no replicas, nothing changes
    /// but `CONTENTION`. Returns the earlier binding if it belonged to another hold or another connection.
    pub fn bind(&mut self, new: NewBinding, now: Millis) -> Option<Binding> {
        let id = self.id(new.key.db, &new.key.name, &new.owner);
        let bound = id.and_then(|id| self.get(id)).filter(|it| it.token == new.token);
        let keeps = bound.is_some_and(|it| it.client == new.client && !new.flags.affects_lifetime());
        if keeps && new.replicas == 0 {
            // The request renews the lease once, or adds a hold. The binding's lease and flags stay.
            id.filter(|_| new.flags.contention).into_iter().for_each(|id| self.live.arm(id));
            return None;
        }
        let before = id.and_then(|id| self.live.remove(id));
        let of_hold = before.as_ref().filter(|it| it.token == new.token);
        let (deadline, steps) = (self.steps.unstepped_deadline(new.deadline), self.steps.clone());
        let applied_steps = of_hold.map_or(steps.0.get(), |it| it.applied_steps);
        let mut flags = new.flags;
        let notified = !flags.contention && of_hold.is_some_and(|it| it.notified);
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
            notified,
            read_at_renewal: self.reads,
            home,
            due: None,
            steps,
            applied_steps,
        };
        let (id, client, token) = (self.next_id(), binding.client, binding.token);
        self.add(binding, now);
        if keeps {
            self.deadline_moved(id, new.deadline, now);
        }
        before.filter(|it| it.client != client || it.token != token)
    }

    /// The number of this database, shared by everything that must follow `SWAPDB`.
    pub fn home(&mut self, db: i32) -> Home {
        self.homes.entry(db).or_insert_with(|| Rc::new(Cell::new(db))).clone()
    }

    fn add(&mut self, mut binding: Binding, now: Millis) {
        let id = self.next_id();
        self.next_id = self.next_id.wrapping_add(1);
        if binding.applied_steps != self.steps.0.get() {
            self.lagging.end = self.next_id(); // It replaces one that has yet to follow a step.
        }
        binding.due = binding.next_due(self.steps.unstepped(now));
        self.live.add(id, binding);
    }

    /// The id that the next binding gets.
    pub fn next_id(&self) -> BindingId {
        BindingId(self.next_id)
    }

    /// The id of the binding of a hold of `owner`, whatever its token.
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

    /// Whether a session that holds this lock must still be notified of contention.
    pub fn is_armed(&self, db: i32, name: &[u8]) -> bool {
        self.live.armed.get(db, name).is_some()
    }

    /// Returns the binding of a lock whose session must still be notified of contention, and records that it is
    /// notified now.
    pub fn take_armed(&mut self, db: i32, name: &[u8]) -> Option<&Binding> {
        // Usually no notification is armed, and this check costs less than a removal that finds nothing.
        let id = *self.live.armed.get(db, name)?;
        self.live.armed.remove(db, name);
        let binding = self.live.by_id.get_mut(&id)?;
        binding.notified = true;
        Some(binding)
    }

    /// How many locks a client may hold unused, because its session will be notified of contention.
    pub fn cached_locks(&self) -> usize {
        self.live.armed.len()
    }

    /// The shortest lease that the server renews for a connection.
    pub fn shortest_lease(&self, client: u64) -> Option<Millis> {
        let (lease, ..) = self.live.by_client.get(&client)?.ranks.first()?;
        Some(*lease).filter(|lease| *lease != Millis::MAX)
    }

    /// Whether any hold is bound to a connection.
    pub fn has_any(&self, client: u64) -> bool {
        self.live.by_client.contains_key(&client)
    }

    /// The bytes reserved for the events that a connection's holds may cause.
    pub fn reserved(&self, client: u64) -> usize {
        self.live.by_client.get(&client).map_or(0, |it| it.reserved)
    }

    /// The least fraction of its lease that any watched hold of a connection has left, in thousandths, counted from
    /// `since`. Returns 0 if no hold is watched: another connection may have released a hold that the client believes
    /// it has.
    pub fn sure(&self, client: u64, since: Millis) -> u64 {
        const WHOLE: u64 = 1_000;
        let Some(of_client) = self.live.by_client.get(&client) else { return 0 };
        let since = self.steps.unstepped(since);
        let mut least = None;
        let mut longer_than: Millis = 0;
        for _ in 0..MAX_LEASES {
            let next = (longer_than.saturating_add(1), Deadline::At(0), BindingId(0));
            let watched = of_client.ranks.range(next..).next().filter(|(lease, ..)| *lease != Millis::MAX);
            let Some((lease, deadline, _)) = watched else { return least.unwrap_or(0) };
            let left = deadline.remaining(since).and_then(|left| left.saturating_mul(WHOLE).checked_div(*lease));
            least = Some(left.unwrap_or(WHOLE).min(least.unwrap_or(WHOLE)));
            longer_than = *lease;
        }
        0
    }

    /// Removes the binding of a hold, and returns it if there was one.
    pub fn unbind(&mut self, db: i32, name: &[u8], owner: &[u8]) -> Option<Binding> {
        self.live.remove(self.id(db, name, owner)?)
    }

    /// Removes the bindings of all holds of a lock, and returns them.
    pub fn unbind_all(&mut self, db: i32, name: &[u8]) -> Vec<Binding> {
        let ids: Vec<BindingId> = self.live.of_lock(db, name).collect();
        ids.into_iter().filter_map(|id| self.live.remove(id)).collect()
    }

    /// Removes a binding, and returns it.
    pub fn remove(&mut self, id: BindingId) -> Option<Binding> {
        self.live.remove(id)
    }

    /// Clears the flags of a binding; its hold goes on. The binding itself is removed unless it `is_kept` for a
    /// session, which is notified if the hold is lost.
    pub fn clear_flags(&mut self, id: BindingId, is_kept: bool, now: Millis) {
        if let Some(binding) = self.live.remove(id).filter(|_| is_kept) {
            self.add(Binding { flags: BindingFlags::NONE, ..binding }, now);
        }
    }

    /// Records that the module changed the hold of `owner`, which had the token `before`: it has this token and
    /// deadline now. If the binding belongs to another hold, removes it and returns it.
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

    /// Records the new deadline of a bound hold. Its next renewal comes after a third of the time left, unless it is
    /// due earlier.
    pub fn deadline_moved(&mut self, id: BindingId, deadline: Deadline, now: Millis) {
        let (deadline, now) = (self.steps.unstepped_deadline(deadline), self.steps.unstepped(now));
        self.live.change(id, |binding| binding.moved(deadline));
        let Some(binding) = self.get(id) else { return };
        let left = deadline.remaining(now).map(|left| now.saturating_add(interval(left)));
        let over = binding.over();
        let renewal = if binding.flags.watchdog { binding.due.into_iter().chain(left).chain(over).min() } else { None };
        let due = renewal.or_else(|| binding.next_due(now));
        self.live.set_due(id, due);
    }

    /// Records the hold count of `owner`, if its hold is bound, and the limit of the lock.
    pub fn counted(&mut self, (db, name, owner): (i32, &[u8], &[u8]), holds: u64, limit: Option<Limit>) {
        let id = self.id(db, name, owner);
        if let Some(binding) = id.and_then(|id| self.live.by_id.get_mut(&id)) {
            (binding.holds, binding.limit) = (holds, limit.unwrap_or(binding.limit));
        }
    }

    /// Records that the server's clock has stepped by so many ms. The times of all bindings move by the step, and their
    /// keys must follow.
    pub fn stepped(&mut self, by: i64) {
        let ClockSteps { total: before, count } = self.steps.0.get();
        self.steps.0.set(ClockSteps { total: before.saturating_add(by), count: count.wrapping_add(1) });
        self.lagging = BindingId::FIRST..self.next_id();
    }

    /// Whether the key of any binding may still lag behind a step of the clock.
    pub fn any_lags(&self) -> bool {
        self.from(self.lagging.start, self.lagging.end).is_some()
    }

    /// Whether the key of this binding lags behind a step of the clock.
    pub fn lags(&self, id: BindingId) -> bool {
        self.get(id).is_some_and(|binding| binding.applied_steps != self.steps.0.get())
    }

    /// Whether the key of the hold of `owner`, if it is bound, lags behind a step of the clock.
    pub fn lags_of(&self, db: i32, name: &[u8], owner: &[u8]) -> bool {
        self.id(db, name, owner).is_some_and(|id| self.lags(id))
    }

    /// Takes the next binding whose key may lag behind a step of the clock.
    pub fn next_lagging(&mut self) -> Option<BindingId> {
        let next = self.from(self.lagging.start, self.lagging.end);
        self.lagging.start = next.map_or(self.lagging.end, |BindingId(id)| BindingId(id.wrapping_add(1)));
        next
    }

    /// The bindings of this lock whose key lags behind a step of the clock.
    pub fn lagging_of(&self, db: i32, name: &[u8]) -> Vec<BindingId> {
        self.live.of_lock(db, name).filter(|id| self.lags(*id)).collect()
    }

    /// Records that the caller adjusts the key of a binding to all steps of the clock. Returns the binding and by how
    /// many ms its key lags; `None` if it does not lag.
    pub fn follows(&mut self, id: BindingId) -> Option<(Binding, i64)> {
        let now = self.steps.0.get();
        let binding = self.live.by_id.get_mut(&id)?;
        let before = std::mem::replace(&mut binding.applied_steps, now);
        (before != now).then(|| (Binding::clone(binding), now.total.saturating_sub(before.total)))
    }

    /// Whether another client has touched the key of a binding, and the module has not verified the binding since. If
    /// the hold is gone, that client may have ended it.
    pub fn is_touched(&self, id: BindingId) -> bool {
        self.unverified.get(&id).is_some_and(|why| *why != LossReason::Expired)
    }

    /// Records the deadline that the key has, which another client may have changed. The binding is due at that
    /// deadline, but is not renewed earlier because of it. (A key that lags behind a step of the clock is ignored.)
    pub fn deadline_seen(&mut self, id: BindingId, deadline: Deadline) {
        if self.lags(id) {
            return;
        }
        let deadline = self.steps.unstepped_deadline(deadline);
        self.live.change(id, |binding| binding.moved(deadline));
        let Some(binding) = self.get(id) else { return };
        let due = binding.due.into_iter().chain(binding.over()).min();
        self.live.set_due(id, due);
    }

    /// Takes a binding that is due. A watched binding is due again after a third of its lease, or at its deadline if
    /// that comes first, whatever the caller does now.
    pub fn take_due(&mut self, now: Millis) -> Option<BindingId> {
        let id = self.take_overdue().or_else(|| self.first_due(now))?;
        let now = self.steps.unstepped(now);
        let watched = self.get(id).filter(|binding| binding.flags.watchdog);
        let next = watched.and_then(|binding| {
            let over = binding.over().filter(|over| *over > now);
            over.into_iter().chain([now.saturating_add(interval(binding.lease))]).min()
        });
        self.live.set_due(id, next);
        Some(id)
    }

    /// The binding that has been due for longest.
    pub fn first_due(&self, now: Millis) -> Option<BindingId> {
        self.live.due.first().filter(|(due, _)| *due <= self.steps.unstepped(now)).map(|(_, id)| *id)
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

    /// Records that a session reads its events. Bindings that were not renewed only because the session had not read
    /// are due at once.
    pub fn read_by(&mut self, client: u64) -> Read {
        self.reads = Read(self.reads.0.wrapping_add(1));
        self.overdue.extend(self.live.unread.remove(&client));
        self.reads
    }

    /// Whether the session of a hold has not read its events since the hold was bound or last renewed. `last` is the
    /// session's last read.
    pub fn is_unread(&self, binding: &Binding, last: Read) -> bool {
        last <= binding.read_at_renewal
    }

    /// Records that the watchdog renewed a hold.
    pub fn renewed(&mut self, id: BindingId) {
        let reads = self.reads;
        if let Some(binding) = self.live.by_id.get_mut(&id) {
            binding.read_at_renewal = reads;
        }
    }

    /// Defers the renewal of a due binding until its session reads its events. Until then, the binding is due only at
    /// its deadline.
    pub fn wait_for_reader(&mut self, id: BindingId) {
        let Some(binding) = self.get(id) else { return };
        let (client, over) = (binding.client, binding.over());
        self.live.unread.entry(client).or_default().insert(id);
        self.live.set_due(id, over);
    }

    /// Defers the renewal of a due binding until the server takes writes. Until then, the binding is due only at its
    /// deadline.
    pub fn postpone(&mut self, id: BindingId) {
        let over = self.get(id).and_then(Binding::over);
        self.live.set_due(id, over);
        match self.overdue.back_mut() {
            Some(last) => drop(last.insert(id)),
            None => self.overdue.push_back(BTreeSet::from([id])),
        }
    }

    /// Records that the lease of a hold is over: its binding is not due again.
    pub fn is_over(&mut self, id: BindingId) {
        self.live.set_due(id, None);
    }

    /// Records that replicas are asked to confirm the renewal that was just made.
    pub fn asked(&mut self, id: BindingId, renewal: ConfirmationId) {
        if let Some(binding) = self.live.by_id.get_mut(&id)
            && let Some(confirmed) = &mut binding.confirmed
        {
            confirmed.asked = Some((renewal, binding.deadline));
        }
    }

    /// Records whether enough replicas have confirmed a renewal. If not, the deadline that they confirmed before stays.
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

    /// When the next binding is due; 0 if one is overdue.
    pub fn next_due(&self) -> Option<Millis> {
        if !self.overdue.is_empty() {
            return Some(0);
        }
        self.live.due.first().map(|(due, _)| due.saturating_add_signed(self.steps.total()))
    }

    /// Whether there is work to do now.
    pub fn has_work(&self) -> bool {
        !(self.ended.is_empty() && self.retired.is_empty() && self.unverified.is_empty()) || self.any_lags()
    }

    /// Whether bindings from before a change of the server's role must still be removed.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// How many holds are bound.
    pub fn len(&self) -> usize {
        self.live.by_id.len()
    }

    /// Whether no hold is bound.
    pub fn is_empty(&self) -> bool {
        self.live.by_id.is_empty()
    }

    /// Records that a connection has ended. Its bindings are no longer live; [`Bindings::next_ended`] removes them one
    /// at a time. Returns whether there were any.
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

    /// Whether bindings of ended connections must still be removed.
    pub fn have_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Removes the ephemeral bindings of a lock whose connections have ended, and returns them. The bindings of a lock
    /// are scanned once after connections have ended, not at each look at the lock.
    pub fn take_broken(&mut self, db: i32, name: &[u8]) -> Vec<Binding> {
        let Some(of_lock) = self.live.by_hold.get_mut(db, name) else { return Vec::new() };
        if std::mem::replace(&mut of_lock.ends_at_scan, self.ends) == self.ends {
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

    /// Retires all bindings, because the server's role has changed. [`Bindings::next_retired`] removes them.
    pub fn retire_all(&mut self, discarded: &mut Discarded) {
        discarded.add(std::mem::take(&mut self.ended).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.overdue).into_iter().flatten());
        discarded.add(std::mem::take(&mut self.unverified));
        let live = std::mem::take(&mut self.live);
        if !live.by_id.is_empty() {
            self.retired.push_back(live);
        }
    }

    /// Removes the next retired binding.
    pub fn next_retired(&mut self) -> Option<Binding> {
        loop {
            let tables = self.retired.front_mut()?;
            if let Some(id) = tables.by_id.keys().next().copied() {
                return tables.remove(id);
            }
            self.retired.pop_front();
        }
    }

    /// Marks the bindings of a lock to be verified: another client wrote the lock, or a part of it expired. What a
    /// client wrote is not adjusted to earlier steps of the clock, but to all later ones.
    pub fn mark_unverified(&mut self, db: i32, name: &[u8], why: LossReason) {
        if why != LossReason::Expired && self.any_lags() {
            self.lagging_of(db, name).into_iter().for_each(|id| self.skip_steps(id));
        }
        for id in self.live.of_lock(db, name) {
            // What a client has written may expire in the same event-loop iteration. The write counts.
            let before = self.unverified.entry(id).or_insert(why);
            *before = if why == LossReason::Expired { *before } else { why };
        }
    }

    /// Records that the key of a binding is not to be adjusted to the steps of the clock so far.
    fn skip_steps(&mut self, id: BindingId) {
        let now = self.steps.0.get();
        self.live.by_id.get_mut(&id).into_iter().for_each(|binding| binding.applied_steps = now);
    }

    /// Marks one binding to be verified, because the data set was replaced.
    pub fn mark_one_unverified(&mut self, id: BindingId) {
        self.skip_steps(id);
        self.unverified.entry(id).or_insert(LossReason::Changed);
    }

    /// Takes the next binding to be verified, and the reason to report if its hold is lost.
    pub fn next_unverified(&mut self) -> Option<(BindingId, LossReason)> {
        self.unverified.pop_first()
    }

    /// The first binding from `id` on, before `end`.
    pub fn from(&self, id: BindingId, end: BindingId) -> Option<BindingId> {
        if id >= end {
            return None;
        }
        self.live.by_id.range(id..end).next().map(|(id, _)| *id)
    }

    /// Follows `SWAPDB`: two databases were swapped, and their locks with them.
    pub fn swap(&mut self, one: i32, other: i32) {
        self.live.by_hold.swap(one, other);
        self.live.armed.swap(one, other);
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
        // (The index may lack an armed binding: if its hold ended unnoticed, the binding of the next hold replaced it.)
        let is_armed = |key: LockKey| {
            let binding = it.armed.get(key.db, &key.name).and_then(|id| it.by_id.get(id));
            binding.is_some_and(|binding| binding.is_armed() && binding.key() == key)
        };
        let unread = it.unread.iter().all(|(client, ids)| {
            !ids.is_empty() && ids.iter().all(|id| it.by_id.get(id).is_some_and(|binding| binding.client == *client))
        });
        each && leases
            && unread
            && holds == it.by_id.len()
            && clients
            && due == it.due.len()
            && it.armed.keys().all(is_armed)
            && it.by_client.values().all(|it| !it.ranks.is_empty())
    }
}
