//! Holds tied to a connection: watched, so that the server renews their lease while the connection lives, or
//! ephemeral, so that they end with it.
//!
//! A tie names one particular hold by its token. So the watchdog never renews a later hold, and a connection that
//! ends never takes one with it.

use super::Why;
use crate::lock::{Deadline, KeyMap, LockKey, Map, Millis, Owner, Token};
use foldhash::HashMap;
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
}

impl Tying {
    /// Not at all.
    pub const NONE: Self = Self { watchdog: false, ephemeral: false };
}

/// The name of a tie; later ties have greater names, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TieId(pub u64);

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
    /// The end of the hold's lease, as far as this module knows.
    pub deadline: Deadline,
    /// Whether replicas are being asked about a renewal; the next one waits for that.
    pub renewal: Renewal,
    home: Home,
    due: Option<Millis>,
}

/// The number of a database, shared by everything that is tied or may be rolled back in it, so that `SWAPDB` changes
/// it for all of them at once.
pub type Home = Rc<Cell<i32>>;

/// Whether replicas are being asked about a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// No.
    Settled,
    /// Yes.
    Confirming,
}

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
    /// The end of the hold's lease.
    pub deadline: Deadline,
}

impl Tie {
    /// The lock.
    pub fn key(&self) -> LockKey {
        LockKey { db: self.home.get(), name: self.name.clone() }
    }

    /// Its place among the ties of its connection.
    fn rank(&self, id: TieId) -> Rank {
        (if self.tying.watchdog { self.lease } else { Millis::MAX }, id)
    }

    /// When it needs attention: to be renewed, or because its lease has run out.
    fn next_due(&self, now: Millis) -> Option<Millis> {
        let renewal = self.tying.watchdog.then(|| now.saturating_add(interval(self.lease)));
        self.over().into_iter().chain(renewal).min()
    }

    /// The first millisecond after its lease.
    fn over(&self) -> Option<Millis> {
        match self.deadline {
            Deadline::At(at) => Some(at.saturating_add(1)),
            Deadline::Never => None,
        }
    }
}

/// A lease is renewed each time a third of it has passed.
fn interval(lease: Millis) -> Millis {
    (lease / 3).max(1)
}

/// Orders the ties of a connection: watched ones by their leases, then those that are not watched.
type Rank = (Millis, TieId);

/// Ties, with four indices.
#[derive(Debug, Default)]
struct Tables {
    by_id: BTreeMap<TieId, Tie>,
    by_client: Map<u64, BTreeSet<Rank>>,
    by_hold: KeyMap<HashMap<Owner, TieId>>,
    due: BTreeSet<(Millis, TieId)>,
}

/// All ties.
#[derive(Debug, Default)]
pub struct Ties {
    next_id: u64,
    live: Tables,
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
        self.by_client.get_or_insert_with(tie.client, BTreeSet::new).insert(tie.rank(id));
        self.by_hold.get_or_default(&tie.key()).insert(tie.owner.clone(), id);
        self.due.extend(tie.due.map(|due| (due, id)));
        self.by_id.insert(id, tie);
    }

    fn remove(&mut self, id: TieId) -> Option<Tie> {
        let tie = self.by_id.remove(&id)?;
        if let Some(due) = tie.due {
            self.due.remove(&(due, id));
        }
        if let Some(of_client) = self.by_client.get_mut(&tie.client) {
            of_client.remove(&tie.rank(id));
            if of_client.is_empty() {
                self.by_client.remove(&tie.client);
            }
        }
        let db = tie.home.get();
        if let Some(of_key) = self.by_hold.get_mut(db, &tie.name) {
            of_key.remove(&tie.owner);
            if of_key.is_empty() {
                self.by_hold.remove(db, &tie.name);
            }
        }
        Some(tie)
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

impl Ties {
    /// Ties a hold to a connection, whatever it was tied to before. If the same hold was tied to the same connection,
    /// that tie's flags stay as well. Returns the tie of another hold of this owner, if there was one: that hold must
    /// have ended unnoticed.
    pub fn tie(&mut self, new: NewTie, now: Millis) -> Option<Tie> {
        let before = self.untie(new.key.db, &new.key.name, &new.owner);
        let mut tying = new.tying;
        let same_hold = |it: &Tie| it.token == new.token;
        if let Some(before) = before.as_ref().filter(|it| same_hold(it) && it.client == new.client) {
            tying.watchdog |= before.tying.watchdog;
            tying.ephemeral |= before.tying.ephemeral;
        }
        let home = self.home(new.key.db);
        let tie = Tie {
            client: new.client,
            tying,
            name: new.key.name,
            owner: new.owner,
            token: new.token,
            lease: new.lease,
            replicas: new.replicas,
            deadline: new.deadline,
            renewal: Renewal::Settled,
            home,
            due: None,
        };
        self.add(tie, now);
        before.filter(|it| !same_hold(it))
    }

    /// The database with this number, for everything that must follow it when it is swapped with another.
    pub fn home(&mut self, db: i32) -> Home {
        self.homes.entry(db).or_insert_with(|| Rc::new(Cell::new(db))).clone()
    }

    /// Restores the tie from before something that is being rolled back.
    pub fn put_back(&mut self, tie: Tie, deadline: Deadline, now: Millis) {
        self.add(Tie { renewal: Renewal::Settled, deadline, ..tie }, now);
    }

    fn add(&mut self, mut tie: Tie, now: Millis) {
        let id = self.next_id();
        self.next_id = self.next_id.wrapping_add(1);
        tie.due = tie.next_due(now);
        self.live.add(id, tie);
    }

    /// The name that the next tie gets.
    pub fn next_id(&self) -> TieId {
        TieId(self.next_id)
    }

    fn id(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<TieId> {
        self.live.by_hold.get(db, name)?.get(owner).copied()
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

    /// The shortest lease that is renewed for a connection.
    pub fn shortest_lease(&self, client: u64) -> Option<Millis> {
        let (lease, id) = self.live.by_client.get(&client)?.first()?;
        self.get(*id).filter(|tie| tie.tying.watchdog).map(|_| *lease)
    }

    /// Forgets the tie of a hold, and returns it if there was one.
    pub fn untie(&mut self, db: i32, name: &[u8], owner: &[u8]) -> Option<Tie> {
        self.live.remove(self.id(db, name, owner)?)
    }

    /// Forgets the ties of all holds of a lock, and returns them.
    pub fn untie_all(&mut self, db: i32, name: &[u8]) -> Vec<Tie> {
        let ids: Vec<TieId> = self.live.by_hold.get(db, name).into_iter().flat_map(|it| it.values().copied()).collect();
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
        let Some(tie) = self.live.by_id.get_mut(&id) else { return };
        tie.deadline = deadline;
        let left = deadline.remaining(now).map(|left| now.saturating_add(interval(left)));
        let renewal = if tie.tying.watchdog { tie.due.into_iter().chain(left).min() } else { None };
        let due = renewal.or_else(|| tie.next_due(now));
        self.live.set_due(id, due);
    }

    /// Somebody else gave a tied hold another deadline. Its end must not be missed, but that is no reason to renew it
    /// earlier.
    pub fn deadline_seen(&mut self, id: TieId, deadline: Deadline) {
        let Some(tie) = self.live.by_id.get_mut(&id) else { return };
        tie.deadline = deadline;
        let due = tie.due.into_iter().chain(tie.over()).min();
        self.live.set_due(id, due);
    }

    /// A tie that is due. A watched one is due again a third of its lease later, whatever happens now.
    pub fn take_due(&mut self, now: Millis) -> Option<TieId> {
        let (_, id) = *self.live.due.first().filter(|(due, _)| *due <= now)?;
        let watched = self.get(id).filter(|tie| tie.tying.watchdog);
        let next = watched.map(|tie| now.saturating_add(interval(tie.lease)));
        self.live.set_due(id, next);
        Some(id)
    }

    /// Records the state of a renewal.
    pub fn set_renewal(&mut self, id: TieId, renewal: Renewal) {
        if let Some(tie) = self.live.by_id.get_mut(&id) {
            tie.renewal = renewal;
        }
    }

    /// When the next tie is due.
    pub fn next_due(&self) -> Option<Millis> {
        self.live.due.first().map(|(due, _)| *due)
    }

    /// Whether there is work to do at once.
    pub fn has_work(&self) -> bool {
        !(self.ended.is_empty() && self.retired.is_empty() && self.doubtful.is_empty())
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
        let any = ended.is_some();
        self.ended.extend(ended);
        any
    }

    /// Whether the connection of a tie still exists.
    pub fn is_live(&self, tie: &Tie) -> bool {
        self.live.by_client.contains_key(&tie.client)
    }

    /// Removes the next tie of a connection that has ended.
    pub fn next_ended(&mut self) -> Option<Tie> {
        loop {
            let Some((_, id)) = self.ended.front_mut()?.pop_first() else {
                self.ended.pop_front();
                continue;
            };
            if let Some(tie) = self.live.remove(id) {
                return Some(tie);
            }
        }
    }

    /// Ends all ties because this server's role has changed. They are removed by [`Ties::next_retired`].
    pub fn retire_all(&mut self) {
        self.ended.clear();
        self.doubtful.clear();
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
        let ids = self.live.by_hold.get(db, name).into_iter().flat_map(|it| it.values());
        self.doubtful.extend(ids.map(|id| (*id, why)));
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
        let ended = |rank: &Rank| self.ended.iter().any(|ranks| ranks.contains(rank));
        let each = it.by_id.iter().all(|(id, tie)| {
            let rank = tie.rank(*id);
            let of_client = it.by_client.get(&tie.client).is_some_and(|ranks| ranks.contains(&rank));
            let of_hold = it.by_hold.get(tie.home.get(), &tie.name).and_then(|it| it.get(&tie.owner)) == Some(id);
            (of_client || ended(&rank)) && of_hold && tie.due.is_none_or(|due| it.due.contains(&(due, *id)))
        });
        let holds: usize = it.by_hold.keys().map(|key| it.by_hold.get(key.db, &key.name).map_or(0, HashMap::len)).sum();
        let clients = it.by_client.values().flatten().all(|(_, id)| it.by_id.contains_key(id));
        let shortest = |client| {
            let ids = it.by_client.get(client).into_iter().flatten().filter_map(|(_, id)| it.by_id.get(id));
            ids.filter(|tie| tie.tying.watchdog).map(|tie| tie.lease).min()
        };
        let leases = it.by_client.keys().all(|client| self.shortest_lease(*client) == shortest(client));
        let due = it.by_id.values().filter(|tie| tie.due.is_some()).count();
        each && leases
            && holds == it.by_id.len()
            && clients
            && due == it.due.len()
            && it.by_client.values().all(|it| !it.is_empty())
    }
}
