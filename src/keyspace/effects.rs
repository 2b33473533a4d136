//! Writes locks, replicates the writes, sends keyspace notifications and publishes releases. No other code writes a
//! lock.
//!
//! It replicates effects, as standard commands with absolute times: neither a replica nor an append-only file needs
//! this module or a clock to apply them.

use super::holder_cache::{self, CachedHolders};
use super::known::known;
use super::layout::{Form, Found, Lock, Own};
use super::tokens::credible;
use super::words::{NO_END, details_field, words};
use super::{field_expiry, listeners, restore};
use crate::config::{self, Publish};
use crate::lock::{Deadline, Hold, Holders, Limit, LockKey, Millis, Owner, Token};
use crate::server::ctx::Class;
use crate::server::{AsText, Ctx, Text, TextRef, events, slice};
use std::ffi::CStr;

/// The event of a lease that has run out.
const EXPIRED: &CStr = c"lock.expired";

/// How many expired holders are removed at a time, so that other clients do not wait for long.
const SLICE: usize = 256;

/// Whether requests wait on this server for a lock that becomes free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiters {
    /// Requests wait, and the module serves them.
    Some,
    /// No request waits: the module notifies Redisson's waiting clients.
    None,
}

/// Which fields of a hold are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fields {
    /// The fields whose value changes.
    Changed,
    /// All fields that the hold depends on, since one of them may have its own expiry.
    All,
}

/// Whether a notification about this key is the one that the module is sending about its own write. Another module that
/// receives it may write other keys meanwhile. (The server passes on the string that it was given, so the address of
/// its bytes identifies it.)
pub fn is_own_notification(name: &[u8]) -> bool {
    known(|it| it.notifying == Some(name.as_ptr().addr()))
}

fn notify(ctx: Ctx, class: Class, event: &CStr, name: &dyn AsText) {
    if listeners::hears(class) {
        known(|it| it.notifying = Some(name.as_text().bytes().as_ptr().addr()));
        ctx.notify(class, event, name);
        known(|it| it.notifying = None);
    }
}

impl Lock<'_> {
    /// Makes `owner` the first holder, or a further one.
    pub fn grant(&mut self, owner: TextRef, hold: &Hold, limit: Limit) {
        if self.found.form == Form::Remains {
            self.delete_key();
            self.mark_free();
        }
        if limit == Limit::MUTEX && self.found.form == Form::Missing {
            self.write_mutex(owner, hold);
            self.found.form = Form::Mutex(hold.token);
        } else {
            let fields = if self.found.form == Form::Many { self.fields_to_write(owner) } else { Fields::Changed };
            self.write_many(owner, hold, limit, fields);
            self.found.form = Form::Many;
        }
        let holders = self.found.holders.saturating_add(usize::from(self.found.own.is_none()));
        let form = self.found.form;
        self.found = Found { form, own: Some(Own::new(hold, form)), holders, limit };
        self.finish();
        self.notify(Class::Module, c"lock.acquired");
    }

    /// Changes the hold of `owner`.
    pub fn update(&mut self, owner: TextRef, old: &Hold, new: &Hold) {
        // A release of some holds that keeps the deadline promises nothing new.
        let promises = new.holds >= old.holds || new.deadline != old.deadline;
        let fields = if promises { self.fields_to_write(owner) } else { Fields::Changed };
        if old == new && fields == Fields::Changed {
            return;
        }
        match self.found.form {
            Form::Many => self.write_many(owner, new, self.found.limit, fields),
            _ => {
                if new.token != old.token || fields == Fields::All {
                    self.set_with_token(owner, new);
                } else if new.holds != old.holds {
                    let holds = Text::number(new.holds);
                    self.set(&[(owner, holds.as_text())]);
                }
                if new.deadline != old.deadline {
                    self.expire(new.deadline);
                }
                self.found.form = Form::Mutex(new.token);
            }
        }
        self.found.own = Some(Own::new(new, self.found.form));
        self.finish();
    }

    /// Lowers the hold count of a holder. The token and the deadline stay.
    pub fn lower(&mut self, owner: TextRef, holds: u64) {
        match self.found.form {
            Form::Many => {
                let Some(own) = self.own() else { return };
                self.write_many(owner, &Hold { holds, ..own }, self.found.limit, Fields::Changed);
            }
            _ => {
                let count = Text::number(holds);
                self.set(&[(owner, count.as_text())]);
            }
        }
        if let Some(own) = &mut self.found.own {
            own.held.holds = holds;
        }
        self.finish();
    }

    /// Removes a holder whose hold was released or revoked.
    pub fn remove(&mut self, owner: TextRef, waiters: Waiters) {
        let free = self.found.holders <= 1;
        if free {
            self.delete_key();
            self.mark_free();
        } else {
            self.delete_holders(&[owner.bytes().into()]);
            self.found.own = None;
            self.found.holders = self.found.holders.saturating_sub(1);
        }
        self.finish();
        self.notify(Class::Module, c"lock.released");
        if free && waiters == Waiters::None {
            self.publish();
        }
    }

    /// Removes all holders, because a client has broken the lock.
    pub fn clear(&mut self, waiters: Waiters) {
        self.delete_key();
        self.mark_free();
        self.finish();
        self.notify(Class::Module, c"lock.forced");
        if waiters == Waiters::None {
            self.publish();
        }
    }

    fn mark_free(&mut self) {
        self.found = Found::MISSING;
    }

    /// Removes holders whose lease has run out, one slice at a time, and returns them. Expired holders that remain no
    /// longer count either.
    pub fn purge(&mut self, now: Millis) -> Vec<Owner> {
        let expired = self.expired(now, SLICE);
        if !expired.is_empty() {
            self.delete_holders(&expired);
            self.finish();
        }
        for _ in &expired {
            self.notify(Class::Module, EXPIRED);
        }
        expired
    }

    /// Sends the notification that a lock's key has expired.
    pub fn notify_expired(ctx: Ctx, name: &Text) {
        notify(ctx, Class::Module, EXPIRED, name);
    }

    fn write_mutex(&self, owner: TextRef, hold: &Hold) {
        let followed = listeners::must_replicate();
        let Some(dump) = followed.then(|| restore::dump_of_mutex(owner.bytes(), hold)).flatten() else {
            self.set_with_token(owner, hold);
            return self.expire(hold.deadline);
        };
        Self::with_fields(owner, hold, |pairs| self.key.set(pairs));
        self.key.set_expiry(hold.deadline);
        let at = match hold.deadline {
            Deadline::At(at) => at,
            Deadline::Never => 0,
        };
        let (at, dump, words) = (Text::number(at), Text::new(&dump), words());
        self.ctx.replicate(c"RESTORE", &[&self.name, &at, &dump, &words.replace, &words.absolute]);
        self.notify(Class::Hash, c"hset");
        self.notify(Class::Generic, c"expire");
    }

    fn set_with_token(&self, owner: TextRef, hold: &Hold) {
        Self::with_fields(owner, hold, |pairs| self.set(pairs));
    }

    /// Calls `work` with the fields and values of a mutex.
    fn with_fields(owner: TextRef, hold: &Hold, work: impl FnOnce(&[(TextRef, TextRef)])) {
        let other;
        let holds = if hold.holds == 1 {
            words().one.as_text()
        } else {
            other = Text::number(hold.holds);
            other.as_text()
        };
        match hold.token {
            Some(token) => {
                let token = Text::number(token);
                work(&[(owner, holds), (words().fence.as_text(), token.as_text())]);
            }
            None => work(&[(owner, holds)]),
        }
    }

    /// Which fields must be written so that none of them expires before the promised deadline.
    fn fields_to_write(&mut self, owner: TextRef) -> Fields {
        if !field_expiry::is_possible() {
            return Fields::Changed;
        }
        let (db, name) = (self.db, self.name.bytes());
        // The query covers all fields of a mutex, so its answer holds for the key. Of many holders, it covers only one.
        let is_mutex = self.found.form != Form::Many;
        if is_mutex && holder_cache::with(|cache| cache.is_without_field_expiry(db, name)) {
            return Fields::Changed;
        }
        let (details, fence, limit) = (details_field(owner.bytes()), words().fence.as_text(), words().limit.as_text());
        let all = [owner, fence, limit, details.as_text()];
        let of_mutex = all.get(..2).unwrap_or_default();
        let fields = if is_mutex { of_mutex } else { &all };
        let expires = self.key.has_expiring_field(self.ctx, self.name.text(), fields);
        if expires {
            return Fields::All;
        }
        if is_mutex && !field_expiry::is_cheap_to_ask() {
            events::watch_keys(self.ctx);
            holder_cache::with(|cache| cache.keep_without_field_expiry(LockKey::new(db, name)));
        }
        Fields::Changed
    }

    fn write_many(&mut self, owner: TextRef, hold: &Hold, limit: Limit, fields: Fields) {
        let name = self.name.bytes();
        let newest = self.newest_token(hold);
        let holds = Text::number(hold.holds);
        let mut pairs = vec![(owner, holds.as_text())];
        let (fence, limit_text, field, details);
        if let Some(token) = newest {
            fence = Text::number(token);
            pairs.push((words().fence.as_text(), fence.as_text()));
        }
        if fields == Fields::All || self.cached(|cached| cached.holders.limit()) != Some(limit) {
            limit_text = Text::number(u64::from(limit.number()));
            pairs.push((words().limit.as_text(), limit_text.as_text()));
        }
        if let Some(token) = hold.token {
            let at = match hold.deadline {
                Deadline::At(at) => at,
                Deadline::Never => NO_END,
            };
            (field, details) = (details_field(owner.bytes()), Text::new(format!("{at}:{token}").as_bytes()));
            pairs.push((field.as_text(), details.as_text()));
        }
        let was_missing = self.found.form == Form::Missing;
        events::watch_keys(self.ctx);
        self.set(&pairs);
        let fields = self.key.fields();
        holder_cache::with(|cache| {
            if was_missing || cache.get(self.db, name).is_none() {
                let cached = CachedHolders { holders: Holders::new(limit), fence: None, fields, has_foreign: false };
                cache.keep(LockKey::new(self.db, name), cached);
            }
            cache.change(self.db, name, |cached| {
                cached.holders.insert(owner.bytes().into(), *hold);
                cached.holders.tighten(limit);
                cached.fence = newest.or(cached.fence);
                cached.fields = fields;
            });
        });
        self.expire_with_last(was_missing);
    }

    /// The newest token once `hold` is written. Drops a token that no server can have issued.
    fn newest_token(&self, hold: &Hold) -> Option<Token> {
        let before = self.cached(|cached| cached.fence).flatten();
        credible(hold.token, self.now).max(credible(before, self.now))
    }

    fn delete_holders(&mut self, owners: &[Owner]) {
        let name = self.name.bytes();
        let mut fields = Vec::new();
        for owner in owners {
            fields.push(Text::new(owner));
            fields.push(details_field(owner));
        }
        slice::count_fields(fields.len());
        for field in &fields {
            self.key.delete_field(field.as_text());
        }
        if listeners::must_replicate() {
            let mut args: Vec<&dyn AsText> = vec![&self.name];
            args.extend(fields.iter().map(|field| field as &dyn AsText));
            self.ctx.replicate(c"HDEL", &args);
        }
        self.notify(Class::Hash, c"hdel");
        let count = self.key.fields();
        holder_cache::with(|cache| {
            cache.change(self.db, name, |cached| {
                for owner in owners {
                    cached.holders.remove(owner);
                }
                cached.fields = count;
            })
        });
        self.expire_with_last(false);
    }

    /// Makes the key expire with the last of its holders. A key that has no expiry gets none, unless it is new.
    /// While a holder without its own deadline remains, the key never expires earlier than before.
    fn expire_with_last(&self, new: bool) {
        let (expiry, last) = (self.key.expiry(), self.cached(|cached| cached.holders.last_end()).flatten());
        let endless = self.cached(|cached| cached.holders.last_deadline()).flatten() == Some(Deadline::Never);
        let last = if endless && !new { last.map(|last| last.max(expiry)) } else { last };
        if let Some(last) = last
            && (new || expiry != Deadline::Never)
            && expiry != last
        {
            self.expire(last);
        }
    }

    fn set(&self, pairs: &[(TextRef, TextRef)]) {
        self.key.set(pairs);
        if listeners::must_replicate() {
            let mut args: Vec<&dyn AsText> = vec![&self.name];
            args.extend(pairs.iter().flat_map(|(field, value)| [field as &dyn AsText, value]));
            self.ctx.replicate(c"HSET", &args);
        }
        self.notify(Class::Hash, c"hset");
    }

    fn expire(&self, deadline: Deadline) {
        self.key.set_expiry(deadline);
        match deadline {
            Deadline::At(at) => {
                if listeners::must_replicate() {
                    let at = Text::number(at);
                    self.ctx.replicate(c"PEXPIREAT", &[&self.name, &at]);
                }
                self.notify(Class::Generic, c"expire");
            }
            Deadline::Never => {
                if listeners::must_replicate() {
                    self.ctx.replicate(c"PERSIST", &[&self.name]);
                }
                self.notify(Class::Generic, c"persist");
            }
        }
    }

    fn delete_key(&self) {
        slice::count_fields(self.key.fields());
        self.key.delete();
        if !holder_cache::with(|cache| cache.is_empty()) {
            holder_cache::with(|cache| cache.forget(self.db, self.name.bytes()));
        }
        if listeners::must_replicate() {
            self.ctx.replicate(c"DEL", &[&self.name]);
        }
        self.notify(Class::Generic, c"del");
    }

    /// Completes a write: informs clients that watch or cache the key, and counts the change for `save` if no
    /// replicated command does.
    fn finish(&self) {
        slice::count_write();
        self.ctx.signal_modified(&self.name);
        if !listeners::must_replicate() {
            self.ctx.count_change();
        }
    }

    fn notify(&self, class: Class, event: &CStr) {
        notify(self.ctx, class, event, &self.name);
    }

    /// Notifies Redisson's waiting clients.
    fn publish(&self) {
        let publish = config::publish_releases();
        if publish == Publish::No {
            return;
        }
        let name = self.name.bytes();
        let (open, close): (&[u8], &[u8]) = if name.contains(&b'{') { (b"", b"") } else { (b"{", b"}") };
        let channel = Text::concat(&[b"redisson_lock__channel:", open, name, close]);
        let sharded = listeners::in_cluster();
        self.ctx.publish(&channel, &words().zero, sharded);
        // In a cluster, the message reaches replicas over the cluster bus.
        if publish == Publish::Replicated && !sharded && listeners::must_replicate() {
            self.ctx.replicate_only(c"PUBLISH", &[&channel, &words().zero]);
        }
    }
}
