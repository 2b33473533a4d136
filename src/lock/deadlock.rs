//! The search for deadlocks: would a request, by waiting, close a cycle of waits among actors?
//!
//! An actor that waits goes on holding what it holds. So nobody in a cycle of waits can ever go on, unless a wait ends
//! by its own time. A request counts as waiting for
//!
//! * every holder of its locks, if it is of limit 1 or the lock is held with limit 1: then all of them have to go. (In a
//!   semaphore, one place would do, so semaphores are not followed.) Only holds that do not end by themselves before the
//!   asker's wait would are followed: for the others, waiting is enough.
//! * every request for several keys that stands ahead of it, for it waits for other locks, too. (One for a single key
//!   waits only for the same holders.)
//!
//! An example: `ann` holds `a`, `bob` holds `b` and waits for `a`. Now `ann` asks for `b`. It is held by `bob`, who waits
//! for `a`, which is held by `ann`: that is the cycle. Where it is not closed, the search ends when everybody who can be
//! reached in this way is known, or gives up after [`MOST_PLACES`].

use super::{Actor, Limit, LockKey, Owner, WaiterId, actor};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// So many keys, holders and requests are looked at.
pub const MOST_PLACES: usize = 1_000;

/// A request that waits, or is about to.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its place in the order of arrival.
    pub id: WaiterId,
    /// The owner.
    pub owner: Owner,
    /// What it waits for: keys of one database. The search does not leave it, since owners of the same name elsewhere
    /// may be others.
    pub keys: Rc<[LockKey]>,
    /// How many may hold at once.
    pub limit: Limit,
}

impl Request {
    fn is_for_several(&self, key: &LockKey) -> bool {
        self.keys.len() > 1 && self.keys.contains(key)
    }
}

/// Who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The limit under which it is held.
    pub limit: Limit,
    /// How many hold it.
    pub count: usize,
    /// Those whose holds do not end by themselves before the asker's wait would.
    pub lasting: Vec<Owner>,
}

/// Who holds and who waits, as far as the asker may know.
pub trait View {
    /// Whether the asker may read this key. If not, it is as if nobody held it and nobody waited for it.
    fn may_read(&mut self, key: &LockKey) -> bool;

    /// Who holds a lock; `None` if nobody does. Of more than `most` holders it need not say more than how many they are.
    fn held(&mut self, key: &LockKey, most: usize) -> Option<Held>;

    /// What an actor waits for, `most` requests at most.
    fn waits_of(&mut self, actor: &[u8], most: usize) -> Vec<Request>;

    /// The requests for several keys that stand ahead of this place in the queue of a key, `most` at most.
    fn several_ahead(&mut self, key: &LockKey, of: WaiterId, most: usize) -> Vec<Request>;
}

/// One wait of a cycle: this owner waits for this key because of the other owner, whose actor waits next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Who waits.
    pub owner: Owner,
    /// For what.
    pub key: LockKey,
    /// Whom it has to wait for …
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

/// Searches for the cycle that `asker` would close by waiting in its place.
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
        let asker = self.asker;
        let mut waiting = VecDeque::from([asker.clone()]);
        while let Some(request) = waiting.pop_front() {
            for key in request.keys.iter() {
                for (other, because) in self.in_the_way(&request, key)? {
                    let link = Link { owner: request.owner.clone(), key: key.clone(), other, because };
                    let who = actor::of(&link.other);
                    if *who == *actor::name(&asker.owner) {
                        return Ok(Some(self.cycle(link)));
                    }
                    if !self.reached.contains_key(&who) {
                        waiting.extend(self.waits_of(&who)?);
                        self.reached.insert(who, link);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Whom a request waits for at one of its keys.
    fn in_the_way(&mut self, request: &Request, key: &LockKey) -> Result<Vec<(Owner, Because)>, TooMuch> {
        self.spend(1)?;
        if !self.view.may_read(key) {
            return Ok(Vec::new());
        }
        let held = self.view.held(key, self.left);
        if request.limit != Limit::MUTEX && held.as_ref().is_none_or(|held| held.limit != Limit::MUTEX) {
            return Ok(Vec::new());
        }
        self.spend(held.as_ref().map_or(0, |held| held.count))?;
        let holders = held.map_or_else(Vec::new, |held| held.lasting);
        if holders.contains(&request.owner) {
            return Ok(Vec::new()); // Of several keys, this one is its own already.
        }
        let ahead = self.several_ahead(request, key)?;
        let ahead = ahead.into_iter().map(|owner| (owner, Because::Ahead));
        Ok(holders.into_iter().map(|owner| (owner, Because::Holds)).chain(ahead).collect())
    }

    /// The owners of the requests for several keys that stand ahead of a request at one of its keys.
    fn several_ahead(&mut self, request: &Request, key: &LockKey) -> Result<Vec<Owner>, TooMuch> {
        let mut ahead = self.view.several_ahead(key, request.id, self.left.saturating_add(1));
        self.spend(ahead.len())?;
        // The asker stands nowhere yet.
        ahead.extend(Some(self.asker).filter(|it| it.id < request.id && it.is_for_several(key)).cloned());
        // A request does not wait for another one of its actor, but for its holds.
        ahead.retain(|it| actor::name(&it.owner) != actor::name(&request.owner));
        Ok(ahead.into_iter().map(|it| it.owner).collect())
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
    fn cycle(mut self, last: Link) -> Vec<Link> {
        let mut links = VecDeque::new();
        let mut next = Some(last);
        while let Some(link) = next {
            next = self.reached.remove(actor::name(&link.owner));
            links.push_front(link);
        }
        links.into()
    }
}
