//! The search for deadlocks: would a waiting request close a cycle of waits among actors?
//!
//! An actor that waits keeps its holds. A request waits for
//!
//! * the holder of each of its locks that is held with limit 1;
//! * each multi-key request ahead of it in the queue of such a lock or of a free one, since that request also waits for
//!   other locks. (A single-key request ahead waits for the same holder.)
//!
//! An example: `ann` holds `a`; `bob` holds `b` and waits for `a`. Now `ann` requests `b`. `ann` would wait for `bob`,
//! and `bob` waits for `ann`: that is the cycle.
//!
//! The search ignores leases: it refuses a cycle that the end of a lease would break, since that end would be a loss.
//! It doesn't follow locks that several owners may hold, since any of their holders can make room.
//!
//! The search ends when it has reached all actors that it can, or after it has examined [`MOST_PLACES`] keys and
//! requests.

use super::{Actor, LockKey, Owner, WaiterId, actor};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// How many keys and requests one search may examine.
pub const MOST_PLACES: usize = 1_000;

/// A request that waits, or is about to wait.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its position in the order of arrival.
    pub id: WaiterId,
    /// The owner.
    pub owner: Owner,
    /// Its keys, all of one database. The search stays in that database, since the same owner name may belong to
    /// another owner in another database.
    pub keys: Rc<[LockKey]>,
}

/// The locks and the queues, as far as the requester may see them.
pub trait View {
    /// Whether the requester may read this key. The search treats an unreadable key as free and without waiters.
    fn may_read(&mut self, key: &LockKey) -> bool;

    /// How a lock is held.
    fn held(&mut self, key: &LockKey) -> Held;

    /// Waiting requests of an actor, at most `most`.
    fn waits_of(&mut self, actor: &Actor, most: usize) -> Vec<Request>;

    /// The multi-key requests ahead of position `of` in the queue of a key, at most `most`.
    fn multi_key_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request>;
}

/// How a lock is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// It has no holder.
    Free,
    /// With limit 1, by this owner.
    Mutex(Owner),
    /// With another limit.
    Shared,
}

/// One wait in a cycle: `owner` waits for `key` because of `other`, whose actor has the next wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The owner of the request.
    pub owner: Owner,
    /// The key.
    pub key: LockKey,
    /// The owner that it waits for.
    pub other: Owner,
    /// Why it waits for that owner.
    pub because: WaitReason,
}

/// Why one owner waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// The other owner holds the key.
    Holds,
    /// The other owner has a multi-key request for the key that is ahead in the queue.
    Ahead,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The request closes no cycle.
    Nothing,
    /// The request would close this cycle, which begins with the request's owner.
    Cycle(Vec<Link>),
    /// The search was aborted: it examined [`MOST_PLACES`] keys and requests without a result.
    Aborted,
}

/// Searches for the cycle that `requester` would close by waiting at its position. (The requester may always read its own
/// keys.)
pub fn search(view: &mut impl View, requester: &Request) -> Found {
    let search = Search { view, requester, left: MOST_PLACES, reached: BTreeMap::new() };
    match search.run() {
        Ok(Some(cycle)) => Found::Cycle(cycle),
        Ok(None) => Found::Nothing,
        Err(LimitReached) => Found::Aborted,
    }
}

struct LimitReached;

struct Search<'a, V> {
    view: &'a mut V,
    requester: &'a Request,
    /// How many keys and requests the search may still examine.
    left: usize,
    /// The actors that the search has reached, each with a wait that leads to it.
    reached: BTreeMap<Actor, Link>,
}

impl<V: View> Search<'_, V> {
    fn run(mut self) -> Result<Option<Vec<Link>>, LimitReached> {
        let mut waiting = VecDeque::from([self.requester.clone()]);
        let mut is_own = true;
        while let Some(request) = waiting.pop_front() {
            for key in request.keys.iter() {
                let may_read = is_own || self.view.may_read(key);
                let blockers = if may_read { self.blockers(&request, key)? } else { Vec::new() };
                for (other, because) in blockers {
                    let link = Link { owner: request.owner.clone(), key: key.clone(), other, because };
                    let blocker = actor::of(&link.other);
                    if *blocker == *actor::name(&self.requester.owner) {
                        return Ok(Some(self.path_to(link)));
                    }
                    if !self.reached.contains_key(&blocker) {
                        waiting.extend(self.waits_of(&blocker)?);
                        self.reached.insert(blocker, link);
                    }
                }
            }
            is_own = false;
        }
        Ok(None)
    }

    /// The owners that a request waits for at one of its keys, and why.
    fn blockers(&mut self, request: &Request, key: &LockKey) -> Result<Vec<(Owner, WaitReason)>, LimitReached> {
        self.spend(1)?;
        let holder = match self.view.held(key) {
            // A multi-key request may hold this key already. The search doesn't follow shared locks.
            Held::Shared => return Ok(Vec::new()),
            Held::Mutex(holder) if holder == request.owner => return Ok(Vec::new()),
            Held::Mutex(holder) => Some((holder, WaitReason::Holds)),
            Held::Free => None,
        };
        let mut ahead = self.view.multi_key_ahead(key, request.id, self.left.saturating_add(1));
        self.spend(ahead.len())?;
        // The requester is not in the queue yet.
        let is_ahead =
            self.requester.id < request.id && self.requester.keys.len() > 1 && self.requester.keys.contains(key);
        ahead.extend(is_ahead.then(|| self.requester.clone()));
        // A request waits for the holds of its own actor, but not for its other requests.
        ahead.retain(|it| actor::name(&it.owner) != actor::name(&request.owner));
        Ok(holder.into_iter().chain(ahead.into_iter().map(|it| (it.owner, WaitReason::Ahead))).collect())
    }

    fn waits_of(&mut self, actor: &Actor) -> Result<Vec<Request>, LimitReached> {
        let mut waits = self.view.waits_of(actor, self.left.saturating_add(1));
        self.spend(waits.len())?;
        let db = |request: &Request| request.keys.first().map(|key| key.db);
        waits.retain(|it| db(it) == db(self.requester));
        Ok(waits)
    }

    fn spend(&mut self, places: usize) -> Result<(), LimitReached> {
        self.left = self.left.checked_sub(places).ok_or(LimitReached)?;
        Ok(())
    }

    /// The waits from the requester to `last`, which leads back to the requester.
    fn path_to(mut self, last: Link) -> Vec<Link> {
        let mut links = VecDeque::new();
        let mut next = Some(last);
        while let Some(link) = next {
            next = self.reached.remove(actor::name(&link.owner));
            links.push_front(link);
        }
        links.into()
    }
}
