//! What the server must keep: rights, replication, refused writes, bounded work, consistent tables.

use super::{Checker, EMPTY_TABLES, REFUSED, REPLICAS_TIMEOUT, REPLICATED, RIGHTS, STATE, Violation, WORK, show};
use crate::redis::{Node, node};
use crate::request::Request;
use crate::server::Role;
use crate::server::replicas::Offsets;
use crate::state::{self, Stage, State};

impl Checker {
    /// The user of each request that was granted in this iteration may acquire the key. Checked only if no right
    /// changed in it.
    pub(super) fn check_rights(&self) -> Result<(), Violation> {
        for ((db, key, owner), _) in self.new_holds.iter().filter(|_| node(|node| !node.reconfigured)) {
            let of_it = |on: i32, request: &Request| {
                on == *db && request.command.ends_with("acquire") && request.concerns(key, owner)
            };
            let undecided = self.undecided().map(|(_, open, request)| (open.db, request));
            let others = self.replied.iter().chain(&self.abandoned).map(|(db, request)| (*db, request));
            let all = undecided.chain(others);
            let mut requesters = all.filter(|(on, request)| of_it(*on, request)).peekable();
            let may = |client: u64| {
                let argv = [b"lock.acquire".to_vec(), key.clone(), owner.clone()];
                node(|node| {
                    let user = node.clients.get(&client).map(|it| &it.user);
                    user.and_then(|user| node.users.get(user)).is_none_or(|user| node.may_run(user, &argv))
                })
            };
            if requesters.peek().is_some()
                && requesters.all(|(_, request)| request.command == "acquire" && !may(request.client))
            {
                return Err(Violation::new(RIGHTS, show(&(*db, key.clone(), owner.clone()))));
            }
        }
        Ok(())
    }

    pub(super) fn check_replication(&self) -> Result<(), Violation> {
        node(|node| {
            let sorted = |entry: &crate::redis::Entry| {
                let mut entry = entry.clone();
                if let crate::redis::Value::Hash(hash) = &mut entry.value {
                    hash.sort();
                }
                entry
            };
            for (db, (ours, theirs)) in node.dbs.iter().zip(node.stream.copy()).enumerate() {
                // Usually, the fields have the same order.
                if ours == theirs {
                    continue;
                }
                for key in ours.keys().chain(theirs.keys()) {
                    let (ours, theirs) = (ours.get(key).map(sorted), theirs.get(key).map(sorted));
                    if ours != theirs && node.role == Role::Primary && !node.was_replica {
                        let what = format!("{} in {db}: {ours:?} here, {theirs:?} on the replica", key.escape_ascii());
                        return Err(Violation::new(REPLICATED, what));
                    }
                }
            }
            Ok(())
        })
    }

    pub(super) fn check_refused_writes(&self, was_refusing: bool) -> Result<(), Violation> {
        node(|node| {
            let is_refusing = is_refusing(node);
            if was_refusing && is_refusing && !node.reconfigured && node.writes > 0 {
                return Err(Violation::new(REFUSED, format!("{} writes", node.writes)));
            }
            Ok(())
        })
    }

    /// Limits the number of look-ups and writes for each request, waiter and binding.
    pub(super) fn check_work(&mut self) -> Result<(), Violation> {
        const EACH: usize = 40;
        let (waiters, bindings) = state::with(|state| (state.queue.len(), state.bindings.len()));
        let most = (std::mem::take(&mut self.requests) + waiters + bindings + 10) * EACH;
        let done = node(|node| node.look_ups + node.writes);
        if done > most {
            return Err(Violation::new(WORK, format!("{done} look-ups and writes, at most {most} are allowed")));
        }
        let jobs = node(|node| node.most_jobs);
        if jobs > 1 {
            return Err(Violation::new(WORK, format!("{jobs} jobs after one command, at most 1 is allowed")));
        }
        Ok(())
    }

    /// All clients have disconnected.
    pub fn nothing_is_left(&self) -> Result<(), Violation> {
        let handles = node(|node| node.handles);
        // A clock step backwards prolongs the wait for replicas by its length (`docs/guarantees.md`). Then only
        // confirmed or expired requests must have left the table.
        let (now, offsets) = node(|node| {
            let confirmed = node.replicas.iter().map(|it| it.confirmed).collect();
            (node.millis(), Offsets { written: node.stream.offset(), confirmed })
        });
        let lasts_longer = now < self.set_back + REPLICAS_TIMEOUT;
        let left = state::with(|state| {
            let (sessions, waits, unread) = state.sessions.sizes();
            let confirmations = match lasts_longer {
                true => state.confirmations.settled(&offsets, now, usize::MAX).len(),
                false => state.confirmations.len(),
            };
            [
                ("waiters", state.queue.len()),
                ("bindings", state.bindings.len()),
                ("confirmations", confirmations),
                ("undelivered grants", state.undelivered.len()),
                ("sessions", sessions),
                ("waits of sessions", waits),
                ("undelivered events", unread),
                ("timeouts", state.pending.timeouts.len()),
                ("pending replies", state.pending.len()),
                ("looks at leases", usize::from(state.queue.first_look().is_some())),
                ("work", usize::from(state.has_work())),
            ]
        });
        match left.iter().find(|(_, count)| *count > 0) {
            Some((what, count)) => Err(Violation::new(EMPTY_TABLES, format!("{what}: {count}"))),
            None if handles != 0 => Err(Violation::new(EMPTY_TABLES, format!("{handles} blocked clients not freed"))),
            None => Ok(()),
        }
    }
}

pub(super) fn is_refusing(node: &Node) -> bool {
    let is_down = node.slots.as_ref().is_some_and(|slots| slots.is_down);
    node.role == Role::Primary && (is_down || node.refuses_writes().is_some())
}

/// The module's tables agree with one another, as far as they show it.
pub(super) fn tables_agree() -> Result<(), Violation> {
    state::with(|state| {
        for waiter in state.queue.iter() {
            let pending = state.pending.get(waiter.requester.ticket);
            if !matches!(pending, Some(Stage::Waiting(id)) if *id == waiter.id) {
                return Err(Violation::new(STATE, format!("the pending reply of {waiter:?} is {pending:?}")));
            }
            let limit = |state: &State| {
                waiter.until.is_none_or(|at| state.pending.timeouts.contains(&(at, waiter.requester.ticket)))
            };
            if !limit(state) {
                return Err(Violation::new(STATE, format!("no timeout is registered for {waiter:?}")));
            }
        }
        Ok(())
    })
}
