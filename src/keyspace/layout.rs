//! The fields of the hash and the lock they mean.

use super::rosters::{self, Roster};
use super::words::{DETAILS, MARK, NO_END, words};
use crate::lock::serve::NotALock;
use crate::lock::{Deadline, Hold, Holders, Limit, LockKey, Millis, Owner, Standing, Token, fence};
use crate::server::key::Kind;
use crate::server::text::parse_number;
use crate::server::{AsText, Ctx, Key, Text, TextRef, events};
use std::collections::HashMap;
use std::ops::ControlFlow;

/// A lock, read once, as one owner sees it.
#[derive(Debug)]
pub struct Lock<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) db: i32,
    pub(super) name: TextRef<'a>,
    pub(super) key: Key<'a>,
    pub(super) now: Millis,
    /// What the rule needs to know.
    pub standing: Standing,
    /// How it lies in the keyspace.
    pub form: Form,
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
    /// A hash in which the one who asks holds nothing; no more was read ([`Detail::Own`]).
    Unread,
}

impl<'a> Lock<'a> {
    /// Reads the lock `name` of the selected database, as `owner` sees it: one look-up.
    pub fn look(ctx: Ctx<'a>, name: TextRef<'a>, owner: TextRef, now: Millis) -> Result<Self, NotALock> {
        Self::look_for(ctx, name, owner, now, Detail::All)
    }

    /// As [`Lock::look`], by someone who does not care for everything.
    pub fn look_for(
        ctx: Ctx<'a>,
        name: TextRef<'a>,
        owner: TextRef,
        now: Millis,
        detail: Detail,
    ) -> Result<Self, NotALock> {
        let key = Key::open(ctx, name);
        let deadline = |key: &Key| if detail == Detail::Holds { Deadline::Never } else { key.expiry() };
        let (standing, form) = match key.kind() {
            Kind::Missing => (Standing::FREE, Form::Missing),
            Kind::Other => return Err(NotALock),
            Kind::Hash => {
                let fields = key.fields();
                let holds = if is_owner(owner) { key.get(owner) } else { None };
                match holds {
                    None if detail == Detail::Own => (Standing { holders: 1, ..Standing::FREE }, Form::Unread),
                    Some(holds) if fields == 1 => own_mutex(&holds, None, deadline(&key))?,
                    holds => {
                        let fence = key.get(words().fence.as_text());
                        let fence = fence.map(|fence| parse_token(fence.bytes())).transpose()?;
                        super::observe(fence, now);
                        match (holds, fence) {
                            (Some(holds), Some(_)) if fields == 2 => own_mutex(&holds, fence, deadline(&key))?,
                            _ => read(&key, fields, fence, (ctx, name), owner, now)?,
                        }
                    }
                }
            }
        };
        Ok(Self { ctx, db: ctx.db(), name, key, now, standing, form })
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

    /// When the key expires.
    pub fn expiry(&self) -> Deadline {
        self.key.expiry()
    }

    /// When, at the latest, a place becomes free of itself; `None` if nobody holds.
    pub fn next_deadline(&self, now: Millis) -> Option<Deadline> {
        if matches!(self.form, Form::Missing | Form::Remains | Form::Unread) {
            return None;
        }
        let expiry = self.key.expiry();
        if self.form != Form::Many || expiry == Deadline::Never {
            return Some(expiry);
        }
        let next = self.roster(|roster| roster.holders.next_deadline(now)).flatten();
        Some(next.map_or(expiry, |next| next.min(expiry)))
    }

    /// The newest token, if this module gave one.
    pub fn fence(&self) -> Option<Token> {
        match self.form {
            Form::Missing | Form::Unread => None,
            Form::Remains => self.key.get(words().fence.as_text()).and_then(|fence| parse_token(fence.bytes()).ok()),
            Form::Mutex(fence) => fence,
            Form::Many => self.roster(|roster| roster.fence).flatten(),
        }
    }

    /// Those who hold it at `now`, those whose lease ends last first.
    pub fn holders(&self, now: Millis) -> Vec<(Owner, Hold)> {
        let expiry = self.key.expiry();
        let mut holders = match self.form {
            Form::Missing | Form::Remains | Form::Unread => Vec::new(),
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

    /// Holders past their deadline, whose fields are still there.
    pub fn expired(&self, now: Millis) -> Vec<Owner> {
        match self.form {
            Form::Many if self.key.expiry() != Deadline::Never => {
                self.roster(|roster| roster.holders.expired(now).cloned().collect()).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn roster<R>(&self, work: impl FnOnce(&Roster) -> R) -> Option<R> {
        rosters::with(|rosters| rosters.get(self.db, self.name.bytes()).map(work))
    }
}

/// A mutex has one field that is no owner, and others made by hand do no harm; but nobody is to make every look at a
/// lock slow with a million of them.
const MOST_MARKED: usize = 1000;

/// What whoever reads a mutex of its own wants to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Everything.
    All,
    /// All but the deadline, which may be shown as if there were none.
    Holds,
    /// What the one who asks holds. If that is nothing, who else holds does not matter: for one who has to stand behind
    /// others in any case.
    Own,
}

fn is_owner(name: TextRef) -> bool {
    name.bytes().first() != Some(&MARK)
}

/// A mutex of the one who asks.
fn own_mutex(holds: &Text, token: Option<Token>, deadline: Deadline) -> Result<(Standing, Form), NotALock> {
    let own = Hold { holds: parse_holds(holds.bytes())?, token, deadline };
    Ok((Standing { own: Some(own), holders: 1, limit: Limit::MUTEX }, Form::Mutex(token)))
}

/// A hold of a lock with many holders, as it counts: without expiry of the key nobody's lease ends, and with the key
/// everybody's does.
fn effective(hold: Hold, expiry: Deadline) -> Hold {
    let deadline = if expiry == Deadline::Never { expiry } else { hold.deadline.min(expiry) };
    Hold { deadline, ..hold }
}

/// Reads a hash in which more stands than the asking owner's hold and the token.
fn read(
    key: &Key,
    fields: usize,
    fence: Option<Token>,
    (ctx, name): (Ctx, TextRef),
    owner: TextRef,
    now: Millis,
) -> Result<(Standing, Form), NotALock> {
    let Some(limit) = key.get(words().limit.as_text()) else { return read_mutex(key, fence, owner) };
    let limit = parse_limit(&limit)?;
    let (db, name) = (ctx.db(), name.bytes());
    events::watch_keys(ctx);
    let up_to_date = |it: &Roster| it.fields == fields && it.fence == fence && it.holders.limit() == limit;
    if !rosters::with(|rosters| rosters.get(db, name).is_some_and(up_to_date)) {
        let roster = Roster { holders: read_holders(key, limit, now)?, fence, fields };
        rosters::with(|rosters| rosters.keep(LockKey::new(db, name), roster));
    }
    let expiry = key.expiry();
    let seen_from = if expiry == Deadline::Never { 0 } else { now };
    let standing =
        rosters::with(|rosters| rosters.get(db, name).map(|roster| roster.holders.standing(owner.bytes(), seen_from)));
    let mut standing = standing.ok_or(NotALock)?;
    // Without expiry of the key this deadline does not count at present, but it will once the key gets one again.
    standing.own = standing.own.map(|own| Hold { deadline: own.deadline.min(expiry), ..own });
    let form = if standing.holders == 0 { Form::Remains } else { Form::Many };
    Ok((standing, form))
}

/// Reads a hash with one holder, or with none.
fn read_mutex(key: &Key, fence: Option<Token>, owner: TextRef) -> Result<(Standing, Form), NotALock> {
    let mut standing = Standing { limit: Limit::MUTEX, ..Standing::FREE };
    let mut verdict = Ok(());
    let mut marked = 0_usize;
    key.scan(&mut |field, value| {
        let is_marked = field.first() == Some(&MARK);
        marked = marked.saturating_add(usize::from(is_marked));
        match parse_holds(value) {
            _ if is_marked && marked <= MOST_MARKED => ControlFlow::Continue(()),
            Ok(holds) if standing.holders == 0 && !is_marked => {
                standing.holders = 1;
                if field == owner.bytes() {
                    standing.own = Some(Hold { holds, token: fence, deadline: key.expiry() });
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
    Ok((standing, if standing.holders == 0 { Form::Remains } else { Form::Mutex(fence) }))
}

/// Reads all holders of a lock with many.
fn read_holders(key: &Key, limit: Limit, now: Millis) -> Result<Holders, NotALock> {
    let mut counts: HashMap<Owner, u64> = HashMap::new();
    let mut details: HashMap<Owner, (Deadline, Option<Token>)> = HashMap::new();
    let mut verdict = Ok(());
    key.scan(&mut |field, value| {
        let read = match field.strip_prefix(DETAILS) {
            Some(owner) => parse_details(value).map(|it| details.insert(owner.into(), it)).map(drop),
            None if field.first() == Some(&MARK) => Ok(()),
            None => parse_holds(value).map(|holds| counts.insert(field.into(), holds)).map(drop),
        };
        match read {
            Ok(()) => ControlFlow::Continue(()),
            Err(NotALock) => {
                verdict = Err(NotALock);
                ControlFlow::Break(())
            }
        }
    });
    verdict?;
    let mut holders = Holders::new(limit);
    for (owner, holds) in counts {
        let (deadline, token) = details.get(&owner).copied().unwrap_or((Deadline::Never, None));
        super::observe(token, now);
        holders.insert(owner, Hold { holds, token, deadline });
    }
    Ok(holders)
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

fn parse_details(value: &[u8]) -> Result<(Deadline, Option<Token>), NotALock> {
    let colon = value.iter().position(|&byte| byte == b':').ok_or(NotALock)?;
    let (deadline, token) = value.split_at(colon);
    let deadline = parse_deadline(deadline)?;
    Ok((deadline, Some(parse_token(token.get(1..).unwrap_or_default())?)))
}
