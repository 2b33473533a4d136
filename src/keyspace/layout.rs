//! The fields of the hash and the lock they mean.

use super::holder_cache::{self, CachedHolders};
use super::name::Name;
use super::tokens::observe;
use super::words::{DETAILS, MARK, NO_END, words};
use crate::config;
use crate::lock::serve::NotALock;
use crate::lock::{Deadline, Hold, Holders, Limit, LockKey, Millis, Owner, Standing, Token, fence};
use crate::server::key::Kind;
use crate::server::text::parse_number;
use crate::server::{AsText, Ctx, Key, Text, TextRef, events, slice};
use foldhash::HashMap;
use std::ops::ControlFlow;

/// Why a lock could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRead {
    /// The key holds something that is not a lock.
    NotALock,
    /// It has more holders than may be read in a step with as many other locks.
    TooMuch,
}

/// Whether a lock that must be read whole may be read as one of so many in a step: all of them together may have as many
/// fields as the largest lock. A small one may always be read, and so may one alone.
fn may_be_read(fields: usize, locks: usize) -> Result<(), NotRead> {
    let is_allowed = locks <= 1 || fields <= SMALL || fields <= most_fields().checked_div(locks).unwrap_or_default();
    if is_allowed { Ok(()) } else { Err(NotRead::TooMuch) }
}

/// How many holders each of so many locks may have that must be read whole in one step.
pub fn most_holders_each(locks: usize) -> usize {
    most_holders().checked_div(locks).unwrap_or_default()
}

/// This many fields cost next to nothing to read.
const SMALL: usize = 8;

impl From<NotALock> for NotRead {
    fn from(_: NotALock) -> Self {
        Self::NotALock
    }
}

/// A lock, read once, as one owner sees it.
#[derive(Debug)]
pub struct Lock<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) db: i32,
    pub(super) name: Name<'a>,
    pub(super) key: Key<'a>,
    pub(super) now: Millis,
    pub(super) found: Found,
}

/// What a read of the key found. Code that writes the lock records here what it has become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) form: Form,
    /// What the asking owner has.
    pub(super) own: Option<Own>,
    pub(super) holders: usize,
    pub(super) limit: Limit,
}

impl Found {
    pub(super) const MISSING: Self = Self { form: Form::Missing, own: None, holders: 0, limit: Limit::Shared };
}

/// A hold as it was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    pub(super) held: Held,
    end: End,
}

impl Own {
    /// A hold in a lock of this form.
    pub(super) fn new(hold: &Hold, form: Form) -> Self {
        let held = Held { holds: hold.holds, token: hold.token };
        Self { held, end: if form == Form::Many { End::At(hold.deadline) } else { End::OfKey } }
    }
}

/// Where the deadline of a hold is stored.
#[derive(Clone, Copy, Debug)]
enum End {
    /// In the key's expiry. Reading it takes a look-up of its own, so only code that needs it pays for it.
    OfKey,
    At(Deadline),
}

/// What an owner has, except the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// How many times it must be released.
    pub holds: u64,
    /// Its fencing token; `None` when another client made the hold.
    pub token: Option<Token>,
}

/// How a lock is stored in the keyspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// There is no such key.
    Missing,
    /// It is free. The hash has no fields but those of a lock: what is left of one, which the next grant deletes.
    Remains,
    /// One holder; the deadline is the key's expiry. The newest token, if this module issued one.
    Mutex(Option<Token>),
    /// Holders with deadlines of their own, kept in `holder_cache`.
    Many,
}

impl<'a> Lock<'a> {
    /// Reads the lock `name` of the selected database, as `owner` sees it: one look-up.
    pub fn look(ctx: Ctx<'a>, name: impl Into<Name<'a>>, owner: TextRef, now: Millis) -> Result<Self, NotALock> {
        Self::look_one_of(ctx, name, owner, now, 1).map_err(|_| NotALock)
    }

    /// Like [`Lock::look`], where a step reads so many locks.
    pub fn look_one_of(
        ctx: Ctx<'a>,
        name: impl Into<Name<'a>>,
        owner: TextRef,
        now: Millis,
        locks: usize,
    ) -> Result<Self, NotRead> {
        slice::count_read(0);
        let (name, db) = (name.into(), ctx.db());
        let key = Key::open(ctx, name.text());
        let found = match key.kind() {
            Kind::Missing => Found::MISSING,
            Kind::Hash if is_owner(owner) => {
                let (holds, fence) = key.get_both((owner, words().fence.as_text()));
                read(&key, holds, fence, (ctx, (db, name.bytes())), owner, (now, locks))?
            }
            Kind::Hash => {
                let fence = key.get(words().fence.as_text());
                read(&key, None, fence, (ctx, (db, name.bytes())), owner, (now, locks))?
            }
            Kind::Other => return Err(NotRead::NotALock),
        };
        Ok(Self { ctx, db, name, key, now, found })
    }

    /// Like [`Lock::look`] if `owner` has a hold; `None` if not, without reading any more of the key.
    pub fn look_if_held(
        ctx: Ctx<'a>,
        name: TextRef<'a>,
        owner: TextRef,
        now: Millis,
    ) -> Result<Option<Self>, NotALock> {
        slice::count_read(0);
        let key = Key::open(ctx, name);
        let holds = match key.kind() {
            Kind::Missing => None,
            Kind::Hash if is_owner(owner) => key.get(owner),
            Kind::Hash => None,
            Kind::Other => return Err(NotALock),
        };
        let Some(holds) = holds else { return Ok(None) };
        let fence = key.get(words().fence.as_text());
        let (name, db) = (Name::from(name), ctx.db());
        let found = read(&key, Some(holds), fence, (ctx, (db, name.bytes())), owner, (now, 1)).map_err(|_| NotALock)?;
        Ok(Some(Self { ctx, db, name, key, now, found }))
    }

    /// Reads a lock on behalf of no particular owner.
    pub fn look_as_nobody(ctx: Ctx<'a>, name: TextRef<'a>, now: Millis) -> Result<Self, NotALock> {
        Self::look(ctx, name, words().nobody.as_text(), now)
    }

    /// The key's name.
    pub fn name(&self) -> &Name<'a> {
        &self.name
    }

    /// The key, for a table.
    pub fn lock_key(&self) -> LockKey {
        LockKey { db: self.db, name: self.name.kept() }
    }

    /// The context it was read in.
    pub fn ctx(&self) -> Ctx<'a> {
        self.ctx
    }

    /// The lock's database.
    pub fn db(&self) -> i32 {
        self.db
    }

    /// All that the rule needs to know.
    pub fn standing(&self) -> Standing {
        Standing { own: self.own(), holders: self.found.holders, limit: self.found.limit }
    }

    /// The hold of the asking owner.
    pub fn own(&self) -> Option<Hold> {
        self.found.own.map(|Own { held: Held { holds, token }, end }| {
            let deadline = match end {
                End::OfKey => self.key.expiry(),
                End::At(deadline) => deadline,
            };
            Hold { holds, token, deadline }
        })
    }

    /// When the hold of the asking owner ends, whatever stands beside its name: with the key at the latest, and never
    /// if the key has no expiry.
    pub fn own_end(&self) -> Option<Deadline> {
        self.own().map(|hold| effective(hold, self.key.expiry()).deadline)
    }

    /// The hold of the asking owner, without its deadline.
    pub fn held(&self) -> Option<Held> {
        self.found.own.map(|own| own.held)
    }

    /// How many hold.
    pub fn count(&self) -> usize {
        self.found.holders
    }

    /// The limit under which it is held; `None` while it is free.
    pub fn limit(&self) -> Option<Limit> {
        (self.found.holders > 0).then_some(self.found.limit)
    }

    /// When the key expires.
    pub fn expiry(&self) -> Deadline {
        self.key.expiry()
    }

    /// When a place becomes free by itself, at the latest; `None` if it is free.
    pub fn next_deadline(&self, now: Millis) -> Option<Deadline> {
        if matches!(self.found.form, Form::Missing | Form::Remains) {
            return None;
        }
        let expiry = self.key.expiry();
        if self.found.form != Form::Many || expiry == Deadline::Never {
            return Some(expiry);
        }
        let next = self.cached(|cached| cached.holders.next_deadline(now)).flatten();
        Some(next.map_or(expiry, |next| next.min(expiry)))
    }

    /// The newest token, if this module issued one.
    pub fn fence(&self) -> Option<Token> {
        match self.found.form {
            Form::Missing => None,
            Form::Remains => self.key.get(words().fence.as_text()).and_then(|fence| parse_token(fence.bytes()).ok()),
            Form::Mutex(fence) => fence,
            Form::Many => self.cached(|cached| cached.fence).flatten(),
        }
    }

    /// The holders at `now`, those with the latest deadline first.
    pub fn holders(&self, now: Millis) -> Vec<(Owner, Hold)> {
        let expiry = self.key.expiry();
        slice::count_fields(self.found.holders);
        let mut holders = match self.found.form {
            Form::Missing | Form::Remains => Vec::new(),
            Form::Mutex(fence) => {
                let mut holders = Vec::new();
                self.key.scan(&mut |field, value| {
                    if field.first() != Some(&MARK)
                        && let Ok(holds) = parse_holds(value)
                    {
                        holders.push((Owner::from(field), Hold { holds, token: fence, deadline: expiry }));
                        return ControlFlow::Break(());
                    }
                    ControlFlow::Continue(())
                });
                holders
            }
            Form::Many => self
                .cached(|cached| {
                    let all = cached.holders.iter().map(|(owner, hold)| (owner.clone(), effective(*hold, expiry)));
                    all.filter(|(_, hold)| !hold.deadline.has_passed(now)).collect()
                })
                .unwrap_or_default(),
        };
        holders.sort_by(|(a, x), (b, y)| y.deadline.cmp(&x.deadline).then_with(|| a.cmp(b)));
        holders
    }

    /// Holders past their deadline whose fields are still there: the first of them, at most this many.
    pub fn expired(&self, now: Millis, most: usize) -> Vec<Owner> {
        match self.found.form {
            Form::Many if self.key.expiry() != Deadline::Never => {
                self.cached(|cached| cached.holders.expired(now).take(most).cloned().collect()).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Whether there are as many holders as the server keeps (`holdfast.max-holders`). Holders whose lease has just
    /// run out count until they are removed, since they have to be read as well.
    pub fn is_full(&self) -> bool {
        self.found.form == Form::Many && self.cached(|cached| cached.holders.len() >= most_holders()) == Some(true)
    }

    pub(super) fn cached<R>(&self, work: impl FnOnce(&CachedHolders) -> R) -> Option<R> {
        holder_cache::with(|cache| cache.get(self.db, self.name.bytes()).map(work))
    }
}

/// Fields that are not owners and that somebody else added do no harm, but their number is capped, so that a million
/// of them can't slow every read.
const MOST_MARKED: usize = 1000;

/// How long such fields and their values may be in total, in bytes.
const MOST_MARKED_BYTES: usize = 1 << 20;

/// The longest owner, in bytes. A hash with a longer one is not a lock.
pub const MAX_OWNER: usize = 512;

fn most_holders() -> usize {
    usize::try_from(config::MAX_HOLDERS.get()).unwrap_or(usize::MAX)
}

/// The number of fields of a lock with as many holders as allowed: two for each, and those that are not owners.
fn most_fields() -> usize {
    most_holders().saturating_mul(2).saturating_add(MOST_MARKED)
}

fn is_owner(field: TextRef) -> bool {
    field.bytes().first() != Some(&MARK)
}

/// Reads a hash in which `holds` stands for the owner who asks, and `fence` for the newest token.
fn read(
    key: &Key,
    holds: Option<Text>,
    fence: Option<Text>,
    (ctx, of): (Ctx, (i32, &[u8])),
    owner: TextRef,
    (now, locks): (Millis, usize),
) -> Result<Found, NotRead> {
    let fields = key.fields();
    if let (Some(holds), 1) = (&holds, fields) {
        return Ok(own_mutex(holds, None)?);
    }
    let fence = fence.map(|fence| parse_token(fence.bytes())).transpose()?;
    observe(fence, now);
    match (holds, fence) {
        (Some(holds), Some(_)) if fields == 2 => Ok(own_mutex(&holds, fence)?),
        _ => read_more(key, fields, fence, (ctx, of), owner, (now, locks)),
    }
}

/// A mutex held by the asking owner.
fn own_mutex(holds: &Text, token: Option<Token>) -> Result<Found, NotALock> {
    let held = Held { holds: parse_holds(holds.bytes())?, token };
    let own = Some(Own { held, end: End::OfKey });
    Ok(Found { form: Form::Mutex(token), own, holders: 1, limit: Limit::MUTEX })
}

/// The time by which the deadlines stored beside owners are judged: if the key has no expiry, none has passed.
fn seen_from(expiry: Deadline, now: Millis) -> Millis {
    if expiry == Deadline::Never { 0 } else { now }
}

/// The effective deadline of a hold in a lock with many holders: if the key has no expiry, nobody's lease ends, and
/// when the key expires, everybody's does.
fn effective(hold: Hold, expiry: Deadline) -> Hold {
    let deadline = if expiry == Deadline::Never { expiry } else { hold.deadline.min(expiry) };
    Hold { deadline, ..hold }
}

/// Reads a hash that has more fields than the asking owner's hold and the token.
fn read_more(
    key: &Key,
    fields: usize,
    fence: Option<Token>,
    (ctx, (db, name)): (Ctx, (i32, &[u8])),
    owner: TextRef,
    (now, locks): (Millis, usize),
) -> Result<Found, NotRead> {
    let Some(limit) = key.get(words().limit.as_text()) else {
        may_be_read(fields.min(MOST_MARKED), locks)?;
        return Ok(read_mutex(key, fence, owner)?);
    };
    let limit = parse_limit(&limit)?;
    events::watch_keys(ctx);
    let up_to_date = |it: &CachedHolders| it.fields == fields && it.fence == fence && it.holders.limit() == limit;
    let is_known = holder_cache::with(|cache| cache.get(db, name).is_some_and(up_to_date));
    if !is_known {
        if fields > most_fields() {
            return Err(NotRead::NotALock);
        }
        may_be_read(fields, locks)?;
        let (holders, has_foreign) = read_holders(key, fields, limit, now)?;
        let cached = CachedHolders { holders, fence, fields, has_foreign };
        holder_cache::with(|cache| cache.keep(LockKey::new(db, name), cached));
    }
    let expiry = key.expiry();
    let seen_from = seen_from(expiry, now);
    let standing = holder_cache::with(|cache| {
        let cached = cache.get(db, name).filter(|cached| !(cached.has_foreign && cached.holders.is_empty()))?;
        Some(cached.holders.standing(owner.bytes(), seen_from))
    });
    let Standing { own, holders, limit } = standing.ok_or(NotRead::NotALock)?;
    // While the key has no expiry this deadline does not count, but it will once the key gets one again.
    let own = own.map(|own| Own::new(&Hold { deadline: own.deadline.min(expiry), ..own }, Form::Many));
    let form = if holders == 0 { Form::Remains } else { Form::Many };
    if is_known && form == Form::Remains {
        may_be_read(fields, locks)?; // A grant deletes them all.
    }
    Ok(Found { form, own, holders, limit })
}

/// Reads a hash with one holder, or with none.
fn read_mutex(key: &Key, fence: Option<Token>, owner: TextRef) -> Result<Found, NotALock> {
    let mut found = Found { form: Form::Remains, limit: Limit::MUTEX, ..Found::MISSING };
    let mut verdict = Ok(());
    let mut marked = Marked::default();
    slice::count_fields(key.fields().min(MOST_MARKED));
    key.scan(&mut |field, value| {
        if field.first() == Some(&MARK) && marked.may_be(field, value) {
            return ControlFlow::Continue(());
        }
        match parse_holds(value).and_then(|holds| may_own(field).map(|()| holds)) {
            Ok(holds) if found.holders == 0 => {
                (found.holders, found.form) = (1, Form::Mutex(fence));
                if field == owner.bytes() {
                    found.own = Some(Own { held: Held { holds, token: fence }, end: End::OfKey });
                }
                ControlFlow::Continue(())
            }
            _ => {
                verdict = Err(NotALock);
                ControlFlow::Break(())
            }
        }
    });
    verdict?;
    if found.holders == 0 && marked.foreign { Err(NotALock) } else { Ok(found) }
}

/// The fields of a lock that are not owners.
#[derive(Debug, Default)]
struct Marked {
    fields: usize,
    bytes: usize,
    /// Whether one of them is not a field of a lock. Without an owner's field, the hash is not a lock then, nor the
    /// remains of one.
    foreign: bool,
}

impl Marked {
    /// Counts one more. Returns whether there may be that many.
    fn may_be(&mut self, field: &[u8], value: &[u8]) -> bool {
        self.fields = self.fields.saturating_add(1);
        self.bytes = self.bytes.saturating_add(field.len()).saturating_add(value.len());
        self.foreign |= !is_of_lock(field, value);
        self.fields <= MOST_MARKED && self.bytes <= MOST_MARKED_BYTES
    }
}

/// Whether a field that is not an owner is one of a lock: `#fence`, `#limit`, or the details of a holder, `#@<owner>`.
fn is_of_lock(field: &[u8], value: &[u8]) -> bool {
    let of_holder = |owner: &[u8]| !owner.is_empty() && may_own(owner).is_ok() && parse_details(value).is_ok();
    [words().fence.bytes(), words().limit.bytes()].contains(&field)
        || field.strip_prefix(DETAILS).is_some_and(of_holder)
}

fn may_own(field: &[u8]) -> Result<(), NotALock> {
    if field.len() <= MAX_OWNER && field.first() != Some(&MARK) { Ok(()) } else { Err(NotALock) }
}

/// Reads all holders of a lock with many, in one pass, since there may be thousands; and whether the hash has fields that
/// are none of a lock.
fn read_holders(key: &Key, fields: usize, limit: Limit, now: Millis) -> Result<(Holders, bool), NotALock> {
    let mut found: HashMap<Owner, Fields> = HashMap::with_capacity_and_hasher(fields / 2, Default::default());
    let mut verdict = Ok(());
    let mut marked = Marked::default();
    slice::count_fields(fields);
    key.scan(
        &mut |field, value| match found_in(field, value, &mut marked).map(|part| put_together(&mut found, part)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(NotALock) => {
                verdict = Err(NotALock);
                ControlFlow::Break(())
            }
        },
    );
    verdict?;
    let holds = found.into_iter().filter_map(|(owner, found)| Some((owner, found.hold()?)));
    let holders = Holders::collect(limit, holds);
    for (_, hold) in holders.iter() {
        observe(hold.token, now);
    }
    Ok((holders, marked.foreign))
}

/// What the two fields of a holder say; either may come first, or not at all.
#[derive(Default)]
struct Fields {
    holds: Option<u64>,
    details: Option<(Deadline, Token)>,
}

impl Fields {
    /// Without an owner's field there is no hold.
    fn hold(self) -> Option<Hold> {
        let (deadline, token) =
            self.details.map_or((Deadline::Never, None), |(deadline, token)| (deadline, Some(token)));
        Some(Hold { holds: self.holds?, token, deadline })
    }
}

/// What one field of the hash says.
enum Part<'a> {
    Holds(&'a [u8], u64),
    Details(&'a [u8], (Deadline, Token)),
    Other,
}

fn found_in<'a>(field: &'a [u8], value: &[u8], marked: &mut Marked) -> Result<Part<'a>, NotALock> {
    if let Some(owner) = field.strip_prefix(DETAILS) {
        may_own(owner)?;
        return parse_details(value).map(|details| Part::Details(owner, details));
    }
    if field.first() == Some(&MARK) {
        return if marked.may_be(field, value) { Ok(Part::Other) } else { Err(NotALock) };
    }
    may_own(field)?;
    parse_holds(value).map(|holds| Part::Holds(field, holds))
}

fn put_together(found: &mut HashMap<Owner, Fields>, part: Part) {
    let (owner, part) = match part {
        Part::Holds(owner, holds) => (owner, Fields { holds: Some(holds), details: None }),
        Part::Details(owner, details) => (owner, Fields { holds: None, details: Some(details) }),
        Part::Other => return,
    };
    match found.get_mut(owner) {
        Some(found) => *found = Fields { holds: part.holds.or(found.holds), details: part.details.or(found.details) },
        None => drop(found.insert(owner.into(), part)),
    }
}

fn parse_holds(value: &[u8]) -> Result<u64, NotALock> {
    parse_number(value).filter(|&holds| holds > 0 && i64::try_from(holds).is_ok()).ok_or(NotALock)
}

fn parse_token(value: &[u8]) -> Result<Token, NotALock> {
    parse_number(value).filter(|&token| token > 0 && token <= fence::MAX_TOKEN).ok_or(NotALock)
}

fn parse_limit(value: &Text) -> Result<Limit, NotALock> {
    let number = parse_number(value.bytes()).and_then(|number| u32::try_from(number).ok());
    number.filter(|&number| i32::try_from(number).is_ok()).map(Limit::from_number).ok_or(NotALock)
}

/// More than 63 bits is not a time to a server: a replica and an append-only file would refuse it as an expiry.
fn parse_deadline(value: &[u8]) -> Result<Deadline, NotALock> {
    match parse_number(value).ok_or(NotALock)? {
        NO_END => Ok(Deadline::Never),
        at if at < NO_END => Ok(Deadline::At(at)),
        _ => Err(NotALock),
    }
}

fn parse_details(value: &[u8]) -> Result<(Deadline, Token), NotALock> {
    let colon = value.iter().position(|&byte| byte == b':').ok_or(NotALock)?;
    let (deadline, token) = value.split_at(colon);
    let deadline = parse_deadline(deadline)?;
    Ok((deadline, parse_token(token.get(1..).unwrap_or_default())?))
}
