//! The fields of the hash and the lock they mean.

use super::rosters::{self, Roster};
use super::words::{DETAILS, MARK, NO_END, words};
use crate::config;
use crate::lock::serve::NotALock;
use crate::lock::{Deadline, Hold, Holders, Limit, LockKey, Millis, Owner, Standing, Token, fence};
use crate::server::key::Kind;
use crate::server::text::parse_number;
use crate::server::{AsText, Ctx, Key, Text, TextRef, events};
use foldhash::HashMap;
use std::ops::ControlFlow;

/// A lock, read once, as one owner sees it.
#[derive(Debug)]
pub struct Lock<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) db: i32,
    pub(super) name: TextRef<'a>,
    pub(super) key: Key<'a>,
    pub(super) now: Millis,
    pub(super) found: Found,
}

/// What a read of the key found. Whoever writes the lock says here what has become of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) form: Form,
    /// What the owner has who asks.
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
    /// A hold of a lock of this form.
    pub(super) fn new(hold: &Hold, form: Form) -> Self {
        let held = Held { holds: hold.holds, token: hold.token };
        Self { held, end: if form == Form::Many { End::At(hold.deadline) } else { End::OfKey } }
    }
}

/// Where the deadline of a hold stands.
#[derive(Clone, Copy, Debug)]
enum End {
    /// It is the key's expiry, which is a look-up of its own: only whoever wants to know it pays for that.
    OfKey,
    At(Deadline),
}

/// What an owner has, but for the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// How many times it must be released.
    pub holds: u64,
    /// Its fencing token; `None` when another client made the hold.
    pub token: Option<Token>,
}

/// How a lock lies in the keyspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// There is no such key.
    Missing,
    /// Nobody holds; fields of holders who are gone may be left.
    Remains,
    /// One holder; the deadline is the key's expiry. The newest token, if this module gave one.
    Mutex(Option<Token>),
    /// Holders with deadlines of their own, kept in the [`rosters`].
    Many,
}

impl<'a> Lock<'a> {
    /// Reads the lock `name` of the selected database, as `owner` sees it: one look-up.
    pub fn look(ctx: Ctx<'a>, name: TextRef<'a>, owner: TextRef, now: Millis) -> Result<Self, NotALock> {
        let key = Key::open(ctx, name);
        let found = match key.kind() {
            Kind::Missing => Found::MISSING,
            Kind::Hash => read(&key, own_field(&key, owner), (ctx, name), owner, now)?,
            Kind::Other => return Err(NotALock),
        };
        Ok(Self { ctx, db: ctx.db(), name, key, now, found })
    }

    /// As [`Lock::look`] if `owner` has a hold. `None` if not: then no more of the key is read.
    pub fn look_if_held(
        ctx: Ctx<'a>,
        name: TextRef<'a>,
        owner: TextRef,
        now: Millis,
    ) -> Result<Option<Self>, NotALock> {
        let key = Key::open(ctx, name);
        let holds = match key.kind() {
            Kind::Missing => None,
            Kind::Hash => own_field(&key, owner),
            Kind::Other => return Err(NotALock),
        };
        let Some(holds) = holds else { return Ok(None) };
        let found = read(&key, Some(holds), (ctx, name), owner, now)?;
        Ok(Some(Self { ctx, db: ctx.db(), name, key, now, found }))
    }

    /// Reads a lock for nobody in particular.
    pub fn look_around(ctx: Ctx<'a>, name: TextRef<'a>, now: Millis) -> Result<Self, NotALock> {
        Self::look(ctx, name, words().nobody.as_text(), now)
    }

    /// The key's name.
    pub fn name(&self) -> TextRef<'a> {
        self.name
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

    /// The hold of the owner who asks.
    pub fn own(&self) -> Option<Hold> {
        self.found.own.map(|Own { held: Held { holds, token }, end }| {
            let deadline = match end {
                End::OfKey => self.key.expiry(),
                End::At(deadline) => deadline,
            };
            Hold { holds, token, deadline }
        })
    }

    /// The hold of the owner who asks, for those who do not want to know its deadline.
    pub fn held(&self) -> Option<Held> {
        self.found.own.map(|own| own.held)
    }

    /// How many hold.
    pub fn count(&self) -> usize {
        self.found.holders
    }

    /// The limit; of no meaning while nobody holds.
    pub fn limit(&self) -> Limit {
        self.found.limit
    }

    /// When the key expires.
    pub fn expiry(&self) -> Deadline {
        self.key.expiry()
    }

    /// When, at the latest, a place becomes free of itself; `None` if nobody holds.
    pub fn next_deadline(&self, now: Millis) -> Option<Deadline> {
        if matches!(self.found.form, Form::Missing | Form::Remains) {
            return None;
        }
        let expiry = self.key.expiry();
        if self.found.form != Form::Many || expiry == Deadline::Never {
            return Some(expiry);
        }
        let next = self.roster(|roster| roster.holders.next_deadline(now)).flatten();
        Some(next.map_or(expiry, |next| next.min(expiry)))
    }

    /// The newest token, if this module gave one.
    pub fn fence(&self) -> Option<Token> {
        match self.found.form {
            Form::Missing => None,
            Form::Remains => self.key.get(words().fence.as_text()).and_then(|fence| parse_token(fence.bytes()).ok()),
            Form::Mutex(fence) => fence,
            Form::Many => self.roster(|roster| roster.fence).flatten(),
        }
    }

    /// Those who hold it at `now`, those whose lease ends last first.
    pub fn holders(&self, now: Millis) -> Vec<(Owner, Hold)> {
        let expiry = self.key.expiry();
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
                .roster(|roster| {
                    let all = roster.holders.iter().map(|(owner, hold)| (owner.clone(), effective(*hold, expiry)));
                    all.filter(|(_, hold)| !hold.deadline.has_passed(now)).collect()
                })
                .unwrap_or_default(),
        };
        holders.sort_by(|(a, x), (b, y)| y.deadline.cmp(&x.deadline).then_with(|| a.cmp(b)));
        holders
    }

    /// Up to `most` of those who hold it at `now`, by deadline and name: those after the given one.
    pub fn holders_after(&self, after: Option<&(Deadline, Owner)>, now: Millis, most: usize) -> Vec<(Deadline, Owner)> {
        if self.found.form == Form::Many {
            let seen_from = seen_from(self.key.expiry(), now);
            return self.roster(|roster| roster.holders.page(after, seen_from, most)).unwrap_or_default();
        }
        let holders = self.holders(now).into_iter().map(|(owner, hold)| (hold.deadline, owner));
        holders.filter(|it| after.is_none_or(|after| it > after)).take(most).collect()
    }

    /// Holders past their deadline, whose fields are still there: the first of them, at most so many.
    pub fn expired(&self, now: Millis, most: usize) -> Vec<Owner> {
        match self.found.form {
            Form::Many if self.key.expiry() != Deadline::Never => {
                self.roster(|roster| roster.holders.expired(now).take(most).cloned().collect()).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Whether there are as many holders as the server keeps (`holdfast.max-holders`). Those count whose lease has just
    /// run out, until they are taken out: they have to be read as well.
    pub fn is_full(&self) -> bool {
        self.found.form == Form::Many && self.roster(|roster| roster.holders.len() >= most_holders()) == Some(true)
    }

    pub(super) fn roster<R>(&self, work: impl FnOnce(&Roster) -> R) -> Option<R> {
        rosters::with(|rosters| rosters.get(self.db, self.name.bytes()).map(work))
    }
}

/// Fields that are no owners and that somebody else added do no harm, but their number is capped, so that a million of
/// them can't slow every read.
const MOST_MARKED: usize = 1000;

fn most_holders() -> usize {
    usize::try_from(config::MAX_HOLDERS.get()).unwrap_or(usize::MAX)
}

/// The fields of a lock with as many holders as may be: two for each, and those that are no owners.
fn most_fields() -> usize {
    most_holders().saturating_mul(2).saturating_add(MOST_MARKED)
}

/// The hold count of `owner`, as it stands.
fn own_field(key: &Key, owner: TextRef) -> Option<Text> {
    let is_owner = owner.bytes().first() != Some(&MARK);
    if is_owner { key.get(owner) } else { None }
}

/// Reads a hash in which `holds` stands for the owner who asks.
fn read(
    key: &Key,
    holds: Option<Text>,
    (ctx, name): (Ctx, TextRef),
    owner: TextRef,
    now: Millis,
) -> Result<Found, NotALock> {
    let fields = key.fields();
    if let (Some(holds), 1) = (&holds, fields) {
        return own_mutex(holds, None);
    }
    let fence = key.get(words().fence.as_text());
    let fence = fence.map(|fence| parse_token(fence.bytes())).transpose()?;
    super::observe(fence, now);
    match (holds, fence) {
        (Some(holds), Some(_)) if fields == 2 => own_mutex(&holds, fence),
        _ => read_more(key, fields, fence, (ctx, name), owner, now),
    }
}

/// A mutex of the one who asks.
fn own_mutex(holds: &Text, token: Option<Token>) -> Result<Found, NotALock> {
    let held = Held { holds: parse_holds(holds.bytes())?, token };
    let own = Some(Own { held, end: End::OfKey });
    Ok(Found { form: Form::Mutex(token), own, holders: 1, limit: Limit::MUTEX })
}

/// The moment by which deadlines are judged that stand beside owners: without expiry of the key none has passed.
fn seen_from(expiry: Deadline, now: Millis) -> Millis {
    if expiry == Deadline::Never { 0 } else { now }
}

/// A hold of a lock with many holders, as it counts: without expiry of the key nobody's lease ends, and with the key
/// everybody's does.
fn effective(hold: Hold, expiry: Deadline) -> Hold {
    let deadline = if expiry == Deadline::Never { expiry } else { hold.deadline.min(expiry) };
    Hold { deadline, ..hold }
}

/// Reads a hash in which more stands than the asking owner's hold and the token.
fn read_more(
    key: &Key,
    fields: usize,
    fence: Option<Token>,
    (ctx, name): (Ctx, TextRef),
    owner: TextRef,
    now: Millis,
) -> Result<Found, NotALock> {
    let Some(limit) = key.get(words().limit.as_text()) else { return read_mutex(key, fence, owner) };
    let limit = parse_limit(&limit)?;
    let (db, name) = (ctx.db(), name.bytes());
    events::watch_keys(ctx);
    let up_to_date = |it: &Roster| it.fields == fields && it.fence == fence && it.holders.limit() == limit;
    if !rosters::with(|rosters| rosters.get(db, name).is_some_and(up_to_date)) {
        if fields > most_fields() {
            return Err(NotALock);
        }
        let roster = Roster { holders: read_holders(key, fields, limit, now)?, fence, fields };
        rosters::with(|rosters| rosters.keep(LockKey::new(db, name), roster));
    }
    let expiry = key.expiry();
    let seen_from = seen_from(expiry, now);
    let standing =
        rosters::with(|rosters| rosters.get(db, name).map(|roster| roster.holders.standing(owner.bytes(), seen_from)));
    let Standing { own, holders, limit } = standing.ok_or(NotALock)?;
    // Without expiry of the key this deadline does not count at present, but it will once the key gets one again.
    let own = own.map(|own| Own::new(&Hold { deadline: own.deadline.min(expiry), ..own }, Form::Many));
    let form = if holders == 0 { Form::Remains } else { Form::Many };
    Ok(Found { form, own, holders, limit })
}

/// Reads a hash with one holder, or with none.
fn read_mutex(key: &Key, fence: Option<Token>, owner: TextRef) -> Result<Found, NotALock> {
    let mut found = Found { form: Form::Remains, limit: Limit::MUTEX, ..Found::MISSING };
    let mut verdict = Ok(());
    let mut marked = 0_usize;
    key.scan(&mut |field, value| {
        let is_marked = field.first() == Some(&MARK);
        marked = marked.saturating_add(usize::from(is_marked));
        match parse_holds(value) {
            _ if is_marked && marked <= MOST_MARKED => ControlFlow::Continue(()),
            Ok(holds) if found.holders == 0 && !is_marked => {
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
    verdict.map(|()| found)
}

/// Reads all holders of a lock with many: in one pass, for there may be thousands.
fn read_holders(key: &Key, fields: usize, limit: Limit, now: Millis) -> Result<Holders, NotALock> {
    let mut found: HashMap<Owner, Fields> = HashMap::with_capacity_and_hasher(fields / 2, Default::default());
    let mut verdict = Ok(());
    key.scan(&mut |field, value| match found_in(field, value).map(|part| put_together(&mut found, part)) {
        Ok(()) => ControlFlow::Continue(()),
        Err(NotALock) => {
            verdict = Err(NotALock);
            ControlFlow::Break(())
        }
    });
    verdict?;
    let holds = found.into_iter().filter_map(|(owner, found)| Some((owner, found.hold()?)));
    let holders = Holders::collect(limit, holds);
    for (_, hold) in holders.iter() {
        super::observe(hold.token, now);
    }
    Ok(holders)
}

/// What the two fields of a holder say, of which either may come first, or never.
#[derive(Default)]
struct Fields {
    holds: Option<u64>,
    details: Option<(Deadline, Token)>,
}

impl Fields {
    /// Without the field of an owner nobody holds.
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

fn found_in<'a>(field: &'a [u8], value: &[u8]) -> Result<Part<'a>, NotALock> {
    match field.strip_prefix(DETAILS) {
        Some(owner) => parse_details(value).map(|details| Part::Details(owner, details)),
        None if field.first() == Some(&MARK) => Ok(Part::Other),
        None => parse_holds(value).map(|holds| Part::Holds(field, holds)),
    }
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

/// Beyond 63 bits is no time to a server: a replica and an append-only file would refuse it as an expiry.
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
