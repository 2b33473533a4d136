//! The search for deadlocks: would a request, by waiting, close a cycle of waits among actors?
//!
//! An actor that waits goes on holding what it holds. A request waits
//!
//! * for the holder of each of its locks that is held with limit 1;
//! * for every request for several keys that stands ahead of it, since that waits for other locks, too. (A request for one
//!   key that stands ahead waits for the same holder.)
//!
//! An example: `ann` holds `a`, `bob` holds `b` and waits for `a`. Now `ann` asks for `b`. It is held by `bob`, who waits
//! for `a`, which is held by `ann`: that is the cycle.
//!
//! Leases are not considered: a cycle that a lease would end is refused all the same, since that end would be a loss. Locks
//! that several may hold are not followed: another place would do.
//!
//! The search ends when all actors that can be reached are known, or gives up after [`MOST_PLACES`].

use super::{Actor, LockKey, Owner, WaiterId, actor};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// So many keys and requests are looked at.
pub const MOST_PLACES: usize = 1_000;

/// A request that waits, or is about to.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its place in the order of arrival.
    pub id: WaiterId,
    /// The owner.
    pub owner: Owner,
    /// Keys that it is for, of one database. The search does not leave it, since owners of the same name elsewhere may be
    /// others.
    pub keys: Rc<[LockKey]>,
}

/// Who holds and who waits, as far as the requester may know.
pub trait View {
    /// Whether the requester may read this key. If not, it is as if nobody held it and nobody waited for it.
    fn may_read(&mut self, key: &LockKey) -> bool;

    /// How a lock is held.
    fn held(&mut self, key: &LockKey) -> Held;

    /// The requests of an actor that wait, `most` at most.
    fn waits_of(&mut self, actor: &Actor, most: usize) -> Vec<Request>;

    /// The requests for several keys that stand ahead of this place in the queue of a key, `most` at most.
    fn several_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request>;
}

/// How a lock is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// By nobody.
    Free,
    /// With limit 1, by this owner.
    Mutex(Owner),
    /// With another limit.
    Shared,
}

/// One wait of a cycle: this owner waits for this key because of the other owner, whose actor waits next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The owner of the request.
    pub owner: Owner,
    /// The key.
    pub key: LockKey,
    /// The owner that it waits for …
    pub other: Owner,
    /// … and why.
    pub because: Because,
}

/// Why one owner waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Because {
    /// The other one holds the key.
    Holds,
    /// The other one waits for the key and for others, and comes first.
    Ahead,
}

/// What a search has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The request closes no cycle.
    Nothing,
    /// The request would close this cycle, which begins with its owner.
    Cycle(Vec<Link>),
    /// There was too much to look at.
    GivenUp,
}

/// Searches for the cycle that `asker` would close by waiting in its place. (It may read its own keys.)
pub fn search(view: &mut impl View, asker: &Request) -> Found {
    let search = Search { view, asker, left: MOST_PLACES, reached: BTreeMap::new() };
    match search.run() {
        Ok(Some(cycle)) => Found::Cycle(cycle),
        Ok(None) => Found::Nothing,
        Err(TooMuch) => Found::GivenUp,
    }
}

struct TooMuch;

struct Search<'a, V> {
    view: &'a mut V,
    asker: &'a Request,
    /// How many places may still be looked at.
    left: usize,
    /// The actors that were met, and for each a wait for it.
    reached: BTreeMap<Actor, Link>,
}

impl<V: View> Search<'_, V> {
    fn run(mut self) -> Result<Option<Vec<Link>>, TooMuch> {
        let mut waiting = VecDeque::from([self.asker.clone()]);
        let mut is_own = true;
        while let Some(request) = waiting.pop_front() {
            for key in request.keys.iter() {
                let may_read = is_own || self.view.may_read(key);
                let in_the_way = if may_read { self.in_the_way(&request, key)? } else { Vec::new() };
                for (other, because) in in_the_way {
                    let link = Link { owner: request.owner.clone(), key: key.clone(), other, because };
                    let who = actor::of(&link.other);
                    if *who == *actor::name(&self.asker.owner) {
                        return Ok(Some(self.way_to(link)));
                    }
                    if !self.reached.contains_key(&who) {
                        waiting.extend(self.waits_of(&who)?);
                        self.reached.insert(who, link);
                    }
                }
            }
            is_own = false;
        }
        Ok(None)
    }

    /// Whom a request waits for at one of its keys.
    fn in_the_way(&mut self, request: &Request, key: &LockKey) -> Result<Vec<(Owner, Because)>, TooMuch> {
        self.spend(1)?;
        let holder = match self.view.held(key) {
            // Of several keys, this one may be its own already. Readers and permits are not followed.
            Held::Shared => return Ok(Vec::new()),
            Held::Mutex(holder) if holder == request.owner => return Ok(Vec::new()),
            Held::Mutex(holder) => Some((holder, Because::Holds)),
            Held::Free => None,
        };
        let mut ahead = self.view.several_ahead(key, request.id, self.left.saturating_add(1));
        self.spend(ahead.len())?;
        // The asker stands nowhere yet.
        let is_ahead = self.asker.id < request.id && self.asker.keys.len() > 1 && self.asker.keys.contains(key);
        ahead.extend(is_ahead.then(|| self.asker.clone()));
        // A request does not wait for another one of its actor, but for its holds.
        ahead.retain(|it| actor::name(&it.owner) != actor::name(&request.owner));
        Ok(holder.into_iter().chain(ahead.into_iter().map(|it| (it.owner, Because::Ahead))).collect())
    }

    fn waits_of(&mut self, who: &Actor) -> Result<Vec<Request>, TooMuch> {
        let mut waits = self.view.waits_of(who, self.left.saturating_add(1));
        self.spend(waits.len())?;
        let db = |request: &Request| request.keys.first().map(|key| key.db);
        waits.retain(|it| db(it) == db(self.asker));
        Ok(waits)
    }

    fn spend(&mut self, places: usize) -> Result<(), TooMuch> {
        self.left = self.left.checked_sub(places).ok_or(TooMuch)?;
        Ok(())
    }

    /// The way from the asker to the wait that leads back to it.
    fn way_to(mut self, last: Link) -> Vec<Link> {
        let mut links = VecDeque::new();
        let mut next = Some(last);
        while let Some(link) = next {
            next = self.reached.remove(actor::name(&link.owner));
            links.push_front(link);
        }
        links.into()
    }
}
