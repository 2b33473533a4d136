//! Reads a lock: the fields of the hash, and what they mean.

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
    /// It has too many holders to be read in one call together with the other locks.
    TooLarge,
}

/// Whether a lock that must be read whole may be read as one of `locks` in one call. All of them together may have as
/// many fields as the largest lock. A small lock may always be read, and so may a single one.
fn may_be_read(fields: usize, locks: usize) -> Result<(), NotRead> {
    let is_allowed = locks <= 1 || fields <= SMALL || fields <= most_fields().checked_div(locks).unwrap_or_default();
    if is_allowed { Ok(()) } else { Err(NotRead::TooLarge) }
}

/// How many holders each of `locks` may have if all must be read whole in one call.
pub fn most_holders_each(locks: usize) -> usize {
    most_holders().checked_div(locks).unwrap_or_default()
}

/// Reading this many fields costs next to nothing.
const SMALL: usize = 8;

impl From<NotALock> for NotRead {
    fn from(_: NotALock) -> Self {
        Self::NotALock
    }
}

/// A lock as one owner sees it, read once.
#[derive(Debug)]
pub struct Lock<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) db: i32,
    pub(super) name: Name<'a>,
    pub(super) key: Key<'a>,
    pub(super) now: Millis,
    pub(super) found: Found,
}

/// What a read of the key found. Code that writes the lock updates it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) form: Form,
    /// The hold of the requesting owner.
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

/// A hold without its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// How many times the owner must release it.
    pub holds: u64,
    /// Its fencing token; `None` when another client made the hold.
    pub token: Option<Token>,
}

/// How a lock is stored in the keyspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The key does not exist.
    Missing,
    /// Free: no holder counts. The next grant deletes the hash with all its fields. They are those of a lock; others
    /// occur only beside an expired hold.
    Remains,
    /// One holder, whose deadline is the key's expiry. The value is the newest token, if this module issued one.
    Mutex(Option<Token>),
    /// Holders with their own deadlines, cached in `holder_cache`.
    Many,
}

impl<'a> Lock<'a> {
    /// Reads the lock `name` of the selected database, as `owner` sees it. Takes one look-up.
    pub fn look(ctx: Ctx<'a>, name: impl Into<Name<'a>>, owner: TextRef, now: Millis) -> Result<Self, NotALock> {
        Self::look_one_of(ctx, name, owner, now, 1).map_err(|_| NotALock)
    }

    /// Like [`Lock::look`], for a call that reads this many locks.
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

    /// Like [`Lock::look`], if `owner` has a hold. Otherwise returns `None`, and reads nothing else of the key.
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

    /// Reads a lock as a client without a hold sees it.
    pub fn look_without_owner(ctx: Ctx<'a>, name: TextRef<'a>, now: Millis) -> Result<Self, NotALock> {
        Self::look(ctx, name, words().no_owner.as_text(), now)
    }

    /// The key's name.
    pub fn name(&self) -> &Name<'a> {
        &self.name
    }

    /// The lock's database and key, for use in a table.
    pub fn lock_key(&self) -> LockKey {
        LockKey { db: self.db, name: self.name.kept() }
    }

    /// The context in which the lock was read.
    pub fn ctx(&self) -> Ctx<'a> {
        self.ctx
    }

    /// The lock's database.
    pub fn db(&self) -> i32 {
        self.db
    }

    /// All that the admission rule needs to know.
    pub fn standing(&self) -> Standing {
        Standing { own: self.own(), holders: self.found.holders, limit: self.found.limit }
    }

    /// The hold of the requesting owner. Its deadline counts only if the key has an expiry: see [`Lock::own_end`].
    pub fn own(&self) -> Option<Hold> {
        self.found.own.map(|Own { held: Held { holds, token }, end }| {
            let deadline = match end {
                End::OfKey => self.key.expiry(),
                End::At(deadline) => deadline,
            };
            Hold { holds, token, deadline }
        })
    }

    /// The effective deadline of the requesting owner's hold: the key's expiry if that is earlier, and never if the key
    /// has none.
    pub fn own_end(&self) -> Option<Deadline> {
        self.own().map(|hold| effective(hold, self.key.expiry()).deadline)
    }

    /// The hold of the requesting owner, without its deadline.
    pub fn held(&self) -> Option<Held> {
        self.found.own.map(|own| own.held)
    }

    /// How many holders count.
    pub fn count(&self) -> usize {
        self.found.holders
    }

    /// The limit under which the lock is held; `None` while it is free.
    pub fn limit(&self) -> Option<Limit> {
        (self.found.holders > 0).then_some(self.found.limit)
    }

    /// When the key expires.
    pub fn expiry(&self) -> Deadline {
        self.key.expiry()
    }

    /// When the next lease ends, unless its owner renews or releases it before. `None` if the lock is free.
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

    /// The holders at `now`, latest deadline first.
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

    /// The first holders past their deadline whose fields are still there, at most `most`.
    pub fn expired(&self, now: Millis, most: usize) -> Vec<Owner> {
        match self.found.form {
            Form::Many if self.key.expiry() != Deadline::Never => {
                self.cached(|cached| cached.holders.expired(now).take(most).cloned().collect()).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the lock has as many holders as allowed (`holdfast.max-holders`). Expired holders count until they are
    /// removed, since they have to be read as well.
    pub fn is_full(&self) -> bool {
        self.found.form == Form::Many && self.cached(|cached| cached.holders.len() >= most_holders()) == Some(true)
    }

    pub(super) fn cached<R>(&self, work: impl FnOnce(&CachedHolders) -> R) -> Option<R> {
        holder_cache::with(|cache| cache.get(self.db, self.name.bytes()).map(work))
    }
}

/// How many fields that are not owners a lock may have. Some that other clients added do no harm, but a million of them
/// would slow every read.
const MOST_MARKED: usize = 1000;

/// How many bytes such fields and their values may have in total.
const MOST_MARKED_BYTES: usize = 1 << 20;

/// The longest owner, in bytes. A hash with a longer one is not a lock.
pub const MAX_OWNER: usize = 512;

fn most_holders() -> usize {
    usize::try_from(config::MAX_HOLDERS.get()).unwrap_or(usize::MAX)
}

/// How many fields a lock with the most holders has: two for each holder, and those that are not owners.
fn most_fields() -> usize {
    most_holders().saturating_mul(2).saturating_add(MOST_MARKED)
}

fn is_owner(field: TextRef) -> bool {
    field.bytes().first() != Some(&MARK)
}

/// Interprets a hash. `holds` is the value of the requesting owner's field, `fence` that of the newest token.
fn read(
    key: &Key,
    holds: Option<Text>,
    fence: Option<Text>,
    (ctx, lock): (Ctx, (i32, &[u8])),
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
        _ => read_more(key, fields, fence, (ctx, lock), owner, (now, locks)),
    }
}

/// A mutex that the requesting owner holds.
fn own_mutex(holds: &Text, token: Option<Token>) -> Result<Found, NotALock> {
    let held = Held { holds: parse_holds(holds.bytes())?, token };
    let own = Some(Own { held, end: End::OfKey });
    Ok(Found { form: Form::Mutex(token), own, holders: 1, limit: Limit::MUTEX })
}

/// The time to compare the holders' own deadlines with: if the key has no expiry, none has passed.
fn seen_from(expiry: Deadline, now: Millis) -> Millis {
    if expiry == Deadline::Never { 0 } else { now }
}

/// A hold in a lock with many holders, with its effective deadline. If the key has no expiry, no lease ends. When the
/// key expires, all end.
fn effective(hold: Hold, expiry: Deadline) -> Hold {
    let deadline = if expiry == Deadline::Never { expiry } else { hold.deadline.min(expiry) };
    Hold { deadline, ..hold }
}

/// Reads a hash that has more fields than the requesting owner's hold and the token.
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
        may_be_read(fields, locks)?; // A grant deletes all of its fields.
    }
    Ok(Found { form, own, holders, limit })
}

/// Reads a hash with one holder or none.
fn read_mutex(key: &Key, fence: Option<Token>, owner: TextRef) -> Result<Found, NotALock> {
    let mut found = Found { form: Form::Remains, limit: Limit::MUTEX, ..Found::MISSING };
    let mut verdict = Ok(());
    let mut marked = Marked::default();
    slice::count_fields(key.fields().min(MOST_MARKED));
    key.scan(&mut |field, value| {
        if field.first() == Some(&MARK) && marked.admit(field, value) {
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
    /// Whether one of them is not a field of a lock. If the hash has no owner's field either, it is neither a lock nor
    /// what is left of one.
    foreign: bool,
}

impl Marked {
    /// Counts one more field. Returns whether the lock may have that many.
    fn admit(&mut self, field: &[u8], value: &[u8]) -> bool {
        self.fields = self.fields.saturating_add(1);
        self.bytes = self.bytes.saturating_add(field.len()).saturating_add(value.len());
        self.foreign |= !is_of_lock(field, value);
        self.fields <= MOST_MARKED && self.bytes <= MOST_MARKED_BYTES
    }
}

/// Whether a field that is not an owner belongs to a lock: `#fence`, `#limit`, or the details of a holder, `#@<owner>`.
fn is_of_lock(field: &[u8], value: &[u8]) -> bool {
    let of_holder = |owner: &[u8]| !owner.is_empty() && may_own(owner).is_ok() && parse_details(value).is_ok();
    [words().fence.bytes(), words().limit.bytes()].contains(&field)
        || field.strip_prefix(DETAILS).is_some_and(of_holder)
}

fn may_own(field: &[u8]) -> Result<(), NotALock> {
    if field.len() <= MAX_OWNER && field.first() != Some(&MARK) { Ok(()) } else { Err(NotALock) }
}

/// Reads all holders of a lock with many, in one pass, since there may be thousands. Also returns whether the hash has
/// fields that are not those of a lock.
fn read_holders(key: &Key, fields: usize, limit: Limit, now: Millis) -> Result<(Holders, bool), NotALock> {
    let mut found: HashMap<Owner, Fields> = HashMap::with_capacity_and_hasher(fields / 2, Default::default());
    let mut verdict = Ok(());
    let mut marked = Marked::default();
    slice::count_fields(fields);
    key.scan(
        &mut |field, value| match parse_field(field, value, &mut marked).map(|part| merge_part(&mut found, part)) {
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

/// The values of a holder's two fields. Either may come first, or be missing.
#[derive(Default)]
struct Fields {
    holds: Option<u64>,
    details: Option<(Deadline, Token)>,
}

impl Fields {
    /// The hold, if the owner's own field is there.
    fn hold(self) -> Option<Hold> {
        let (deadline, token) =
            self.details.map_or((Deadline::Never, None), |(deadline, token)| (deadline, Some(token)));
        Some(Hold { holds: self.holds?, token, deadline })
    }
}

/// The meaning of one field of the hash.
enum Part<'a> {
    Holds(&'a [u8], u64),
    Details(&'a [u8], (Deadline, Token)),
    Other,
}

fn parse_field<'a>(field: &'a [u8], value: &[u8], marked: &mut Marked) -> Result<Part<'a>, NotALock> {
    if let Some(owner) = field.strip_prefix(DETAILS) {
        may_own(owner)?;
        return parse_details(value).map(|details| Part::Details(owner, details));
    }
    if field.first() == Some(&MARK) {
        return if marked.admit(field, value) { Ok(Part::Other) } else { Err(NotALock) };
    }
    may_own(field)?;
    parse_holds(value).map(|holds| Part::Holds(field, holds))
}

fn merge_part(found: &mut HashMap<Owner, Fields>, part: Part) {
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

/// A server takes no time of more than 63 bits: a replica and an append-only file would refuse it as an expiry.
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
