//! Holds tied to a connection: watched, so that the server renews their lease while the connection lives, or
//! ephemeral, so that they end with it.
//!
//! A tie names the very hold by its token. So the watchdog never renews a hold that came after, and a connection that
//! ends never takes one along.

use crate::confirming;
use crate::holding::{self, Grantee};
use crate::keyspace::Lock;
use crate::keyspace::effects::Ending;
use crate::lock::{Deadline, Hold, KeyMap, LockKey, Millis, Owner, Token};
use crate::server::clock::Now;
use crate::server::timer::{self, Timer};
use crate::server::{AsText, Ctx, MainThread, Text, TextRef, ctx, events};
use crate::stats::count;
use crate::undo::Undo;
use foldhash::HashMap;
use std::collections::{BTreeSet, VecDeque};

/// How many holds are renewed or released in one go, so that nobody else waits for long.
const SLICE: usize = 256;

/// What ties a hold to its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tying {
    /// The server renews the lease while the connection lives.
    pub watchdog: bool,
    /// The hold ends with the connection.
    pub ephemeral: bool,
}

impl Tying {
    /// Nothing does.
    pub const NONE: Self = Self { watchdog: false, ephemeral: false };
}

/// A tied hold.
#[derive(Clone, Debug)]
pub struct Tie {
    /// The connection.
    pub client: u64,
    /// How it is tied.
    pub tying: Tying,
    key: LockKey,
    owner: Owner,
    token: Token,
    lease: Millis,
    replicas: u32,
    due: Option<Millis>,
    renewal: Renewal,
}

/// Whether replicas are being asked about a renewal: the next one waits for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Renewal {
    Settled,
    Confirming,
}

#[derive(Debug, Default)]
struct Ties {
    next_id: u64,
    by_id: HashMap<u64, Tie>,
    by_client: HashMap<u64, BTreeSet<u64>>,
    by_hold: KeyMap<HashMap<Owner, u64>>,
    due: BTreeSet<(Millis, u64)>,
    /// Ephemeral holds whose connection has ended.
    ended: VecDeque<Tie>,
}

static TIES: MainThread<Ties> = MainThread::new();

impl Ties {
    fn add(&mut self, tie: Tie) {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.by_client.entry(tie.client).or_default().insert(id);
        self.by_hold.get_or_default(&tie.key).insert(tie.owner.clone(), id);
        self.due.extend(tie.due.map(|due| (due, id)));
        self.by_id.insert(id, tie);
    }

    fn id(&self, db: i32, name: &[u8], owner: &[u8]) -> Option<u64> {
        self.by_hold.get(db, name)?.get(owner).copied()
    }

    fn remove(&mut self, id: u64) -> Option<Tie> {
        let tie = self.by_id.remove(&id)?;
        if let Some(due) = tie.due {
            self.due.remove(&(due, id));
        }
        if let Some(of_client) = self.by_client.get_mut(&tie.client) {
            of_client.remove(&id);
            if of_client.is_empty() {
                self.by_client.remove(&tie.client);
            }
        }
        if let Some(of_key) = self.by_hold.get_mut(tie.key.db, &tie.key.name) {
            of_key.remove(&tie.owner);
            if of_key.is_empty() {
                self.by_hold.remove(tie.key.db, &tie.key.name);
            }
        }
        Some(tie)
    }

    /// Lets a watchdog come after a third of what is left, if that is earlier than it would; when.
    fn bring_forward(&mut self, id: u64, deadline: Deadline, now: Now) -> Option<Millis> {
        let left = deadline.remaining(now.millis())?;
        let due = now.millis().saturating_add(interval(left));
        self.by_id.get(&id).and_then(|tie| tie.due).filter(|before| due < *before)?;
        self.set_due(id, due);
        Some(due)
    }

    fn set_due(&mut self, id: u64, due: Millis) {
        if let Some(tie) = self.by_id.get_mut(&id) {
            if let Some(before) = tie.due.replace(due) {
                self.due.remove(&(before, id));
            }
            self.due.insert((due, id));
        }
    }
}

/// Ties a hold to the connection of `grantee`, whatever it was tied to before. What tied it to the same connection
/// stays as well.
pub fn tie(lock: &Lock, token: Token, grantee: Grantee, now: Now) {
    events::watch_keys(lock.ctx());
    let key = LockKey::new(lock.db(), lock.name().bytes());
    let mut tie = Tie {
        client: grantee.client,
        tying: grantee.terms.tying,
        key,
        owner: grantee.owner.bytes().into(),
        token,
        lease: grantee.terms.request.lease,
        replicas: grantee.terms.replicas,
        due: None,
        renewal: Renewal::Settled,
    };
    TIES.with(|ties| {
        let id = ties.id(tie.key.db, &tie.key.name, &tie.owner);
        if let Some(before) = id.and_then(|id| ties.remove(id))
            && (before.client, before.token) == (tie.client, tie.token)
        {
            tie.tying.watchdog |= before.tying.watchdog;
            tie.tying.ephemeral |= before.tying.ephemeral;
        }
        tie.due = tie.tying.watchdog.then(|| now.millis().saturating_add(interval(tie.lease)));
        if let Some(due) = tie.due {
            timer::wake(lock.ctx(), Timer::Work, due);
        }
        ties.add(tie);
    });
}

/// A lease is renewed every third of it.
fn interval(lease: Millis) -> Millis {
    (lease / 3).max(1)
}

/// Tells that a hold that may be tied got a new token; a tie that was not this very hold's is forgotten.
pub fn retoken(lock: &Lock, owner: TextRef, before: &Hold, token: Token) {
    TIES.with(|ties| {
        if ties.by_id.is_empty() {
            return;
        }
        let Some(id) = ties.id(lock.db(), lock.name().bytes(), owner.bytes()) else { return };
        match ties.by_id.get_mut(&id) {
            Some(tie) if Some(tie.token) == before.token => tie.token = token,
            _ => drop(ties.remove(id)),
        }
    });
}

/// A command has moved the deadline of a hold: its watchdog comes in time for the new one.
pub fn deadline_moved(lock: &Lock, owner: TextRef, deadline: Deadline, now: Now) {
    if let Some(due) = TIES.with(|ties| {
        let id = if ties.by_id.is_empty() { None } else { ties.id(lock.db(), lock.name().bytes(), owner.bytes()) };
        ties.bring_forward(id?, deadline, now)
    }) {
        timer::wake(lock.ctx(), Timer::Work, due);
    }
}

/// Puts the tie of a hold back to what it was before something that is being undone, if its connection is still there.
pub fn put_back(lock: &Lock, owner: TextRef, before: Option<&Tie>, now: Now) {
    untie(lock.db(), lock.name().bytes(), owner.bytes());
    let Some(tie) = before.filter(|tie| ctx::is_connected(tie.client)) else { return };
    let mut tie = tie.clone();
    tie.renewal = Renewal::Settled;
    tie.due = tie.tying.watchdog.then(|| now.millis().saturating_add(interval(tie.lease)));
    if let Some(due) = tie.due {
        timer::wake(lock.ctx(), Timer::Work, due);
    }
    TIES.with(|ties| ties.add(tie));
}

/// Forgets the tie of a hold, if there is one.
pub fn untie(db: i32, name: &[u8], owner: &[u8]) {
    TIES.with(|ties| {
        if !ties.by_id.is_empty()
            && let Some(id) = ties.id(db, name, owner)
        {
            ties.remove(id);
        }
    });
}

/// Forgets the ties of all holds of a lock.
pub fn untie_all(db: i32, name: &[u8]) {
    TIES.with(|ties| {
        let ids: Vec<u64> = ties.by_hold.get(db, name).into_iter().flat_map(|it| it.values().copied()).collect();
        for id in ids {
            ties.remove(id);
        }
    });
}

/// Forgets all ties: the server follows another one now.
pub fn clear() {
    TIES.with(|ties| *ties = Ties::default());
}

/// Two databases changed places, and their locks with them.
pub fn swap(one: i32, other: i32) {
    TIES.with(|ties| {
        let ids: Vec<u64> = ties.by_id.keys().copied().collect();
        let moved: Vec<Tie> = ids
            .into_iter()
            .filter(|id| ties.by_id.get(id).is_some_and(|tie| tie.key.db == one || tie.key.db == other))
            .collect::<Vec<_>>()
            .into_iter()
            .filter_map(|id| ties.remove(id))
            .collect();
        for mut tie in moved {
            tie.key.db = if tie.key.db == one { other } else { one };
            ties.add(tie);
        }
    });
}

/// The tie of the hold that `owner` has under `token`.
pub fn of(db: i32, name: &[u8], owner: &[u8], token: Option<Token>) -> Option<Tie> {
    let tie = TIES.with(|ties| ties.id(db, name, owner).and_then(|id| ties.by_id.get(&id)).cloned());
    tie.filter(|tie| Some(tie.token) == token)
}

/// The locks of which a hold is tied.
pub fn tied_keys() -> Vec<LockKey> {
    TIES.with(|ties| ties.by_hold.keys().collect())
}

/// Whether any hold of a lock is tied. For callbacks: when in doubt, yes.
pub fn is_tied(db: i32, name: &[u8]) -> bool {
    TIES.try_with(|ties| ties.by_hold.get(db, name).is_some()).unwrap_or(true)
}

/// How many holds are tied.
pub fn tied() -> u64 {
    TIES.with(|ties| ties.by_id.len() as u64)
}

/// A connection has ended; returns whether there is something to release. Writes nothing.
pub fn client_gone(client: u64) -> bool {
    TIES.with(|ties| {
        for id in ties.by_client.remove(&client).unwrap_or_default() {
            if let Some(tie) = ties.remove(id)
                && tie.tying.ephemeral
            {
                ties.ended.push_back(tie);
            }
        }
        !ties.ended.is_empty()
    })
}

/// Someone else wrote a lock: ties of holds that are gone are forgotten.
pub fn verify(ctx: Ctx, key: &LockKey, now: Now) {
    let tied: Vec<(u64, Owner, Token)> = TIES.with(|ties| {
        let ids = ties.by_hold.get(key.db, &key.name).into_iter().flatten();
        ids.filter_map(|(owner, id)| ties.by_id.get(id).map(|tie| (*id, owner.clone(), tie.token))).collect()
    });
    if tied.is_empty() {
        return;
    }
    let holders: HashMap<Owner, Hold> = ctx.in_db(key.db, |ctx| {
        let name = Text::new(&key.name);
        let lock = Lock::look_around(ctx, name.as_text(), now.millis());
        lock.map(|lock| lock.holders(now.millis()).into_iter().collect()).unwrap_or_default()
    });
    for (id, owner, token) in tied {
        if holders.get(&owner).is_none_or(|hold| hold.token != Some(token)) {
            TIES.with(|ties| ties.remove(id));
        }
    }
}

fn held(lock: &Lock, token: Token) -> Option<Hold> {
    lock.standing.own.filter(|own| own.token == Some(token))
}

/// Reads the lock `key` as `owner` sees it; `None` if it is no lock.
fn with_lock<R>(
    ctx: Ctx,
    key: &LockKey,
    owner: &Owner,
    now: Now,
    work: impl FnOnce(&mut Lock, TextRef) -> R,
) -> Option<R> {
    ctx.in_db(key.db, |ctx| {
        let (name, owner) = (Text::new(&key.name), Text::new(owner));
        let mut lock = Lock::look(ctx, name.as_text(), owner.as_text(), now.millis()).ok()?;
        Some(work(&mut lock, owner.as_text()))
    })
}

/// Releases ephemeral holds whose connection has ended, a slice at a time; the locks that changed.
pub fn release_ended(ctx: Ctx, now: Now) -> Vec<LockKey> {
    let ended: Vec<Tie> = TIES.with(|ties| {
        let slice = ties.ended.len().min(SLICE);
        ties.ended.drain(..slice).collect()
    });
    let mut changed = Vec::new();
    for tie in ended {
        let released = with_lock(ctx, &tie.key, &tie.owner, now, |lock, owner| {
            if held(lock, tie.token).is_none() {
                return false;
            }
            holding::end(lock, owner, Ending::Released);
            true
        });
        if released == Some(true) {
            count(|it| &mut it.released_by_disconnect);
            changed.push(tie.key);
        }
    }
    changed
}

/// When something is to be done next.
pub fn next_due(now: Millis) -> Option<Millis> {
    TIES.with(|ties| if ties.ended.is_empty() { ties.due.first().map(|(due, _)| *due) } else { Some(now) })
}

/// Renews what is due, a slice at a time.
pub fn renew_due(ctx: Ctx, now: Now) {
    let due: Vec<u64> = TIES.with(|ties| {
        let due = ties.due.iter().take_while(|(due, _)| *due <= now.millis());
        due.take(SLICE).map(|(_, id)| *id).collect()
    });
    for id in due {
        let Some(tie) = TIES.with(|ties| ties.by_id.get(&id).cloned()) else { continue };
        TIES.with(|ties| ties.set_due(id, now.millis().saturating_add(interval(tie.lease))));
        if tie.renewal == Renewal::Settled {
            renew(ctx, id, &tie, now);
        }
    }
}

fn renew(ctx: Ctx, id: u64, tie: &Tie, now: Now) {
    let renewed = with_lock(ctx, &tie.key, &tie.owner, now, |lock, owner| {
        let own = held(lock, tie.token)?;
        let deadline = own.deadline.max(Deadline::after(now.millis(), tie.lease));
        let undo = Undo::before_renewal(std::slice::from_ref(lock), owner, deadline).under(tie.token);
        lock.update(owner, &own, &Hold { deadline, ..own });
        Some(undo)
    });
    let Some(undo) = renewed.flatten() else {
        count(|it| &mut it.renewals_lost);
        TIES.with(|ties| ties.remove(id));
        return;
    };
    count(|it| &mut it.watchdog_renewals);
    if tie.replicas > 0 {
        set_renewal(id, Renewal::Confirming);
        confirming::begin_renewal(ctx, id, undo, tie.replicas, now);
    }
}

fn set_renewal(id: u64, renewal: Renewal) {
    TIES.with(|ties| {
        if let Some(tie) = ties.by_id.get_mut(&id) {
            tie.renewal = renewal;
        }
    });
}

/// Replicas have confirmed a renewal, or it was taken back: the next one may come.
pub fn renewal_settled(id: u64) {
    set_renewal(id, Renewal::Settled);
}
