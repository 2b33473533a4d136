//! What must happen in time: replies, timeouts, confirmations.

use super::fairness::no_wait_for_free_lock;
use super::records::{Belief, Binding, Wait};
use super::server::is_refusing;
use super::{
    CONFIRMED_SOON, CRON, Checker, HANDLED_WITHIN, Hold, IDLE_TIME, ONE_REPLY, POLLED, PROMPT, TIMEOUT, Violation,
};
use crate::redis::node;
use crate::request::Request;
use crate::server::Role;
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::{self, Stage};

impl Checker {
    /// Events with a deadline of their own are handled in time.
    pub(super) fn check_deadlines(&mut self) -> Result<(), Violation> {
        let is_blocked = node(|node| {
            let is_waiting = is_refusing(node) || node.is_paused() || node.clients.values().any(|it| it.is_not_reading);
            is_waiting || node.role == Role::Replica || node.slots.is_some()
        });
        if self.renewals_are_delayed || is_blocked {
            return Ok(());
        }
        self.unconfirmed_holds_end()?;
        self.confirmed_soon()?;
        let now = node(|node| node.clock.mono);
        let has_waited = now > self.last_iteration_at + HANDLED_WITHIN * 1000;
        if has_waited {
            self.ephemeral_holds_end()?;
        }
        if !has_waited && self.free_since.is_none() {
            return Ok(());
        }
        match no_wait_for_free_lock(HANDLED_WITHIN) {
            Ok(()) => self.free_since = None,
            Err(violation) if now > *self.free_since.get_or_insert(self.last_iteration_at) + HANDLED_WITHIN * 1000 => {
                return Err(violation);
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// A client that is blocked on replicas gets its reply as soon as enough prompt replicas have confirmed.
    pub(super) fn confirmed_soon(&mut self) -> Result<(), Violation> {
        if state::with(|state| state.confirmations.is_empty()) {
            self.confirming.clear();
            return Ok(());
        }
        let (now, prompt) = node(|node| {
            let is_prompt = |it: &&crate::redis::Replica| it.delay.is_some_and(|delay| delay <= PROMPT);
            (node.clock.mono, node.replicas.iter().filter(is_prompt).count() as u64)
        });
        let waiting = |(id, it): (&u64, &crate::redis::Client)| match &it.state {
            crate::redis::client::State::Blocked(block) => Some((*id, Ticket(block.ticket))),
            _ => None,
        };
        let blocked: Vec<(u64, Ticket)> = node(|node| node.clients.iter().filter_map(waiting).collect());
        let awaits_replicas = |(_, ticket): &(u64, Ticket)| {
            state::with(|state| matches!(state.pending.get(*ticket), Some(Stage::Confirming(_))))
        };
        let blocked: Vec<(u64, Ticket)> = blocked.into_iter().filter(awaits_replicas).collect();
        self.confirming.retain(|ticket, _| blocked.iter().any(|(_, it)| it == ticket));
        for (client, ticket) in blocked {
            let since = *self.confirming.entry(ticket).or_insert(now.max(self.replicas_asked_at));
            let here = self.connections.get(&client).filter(|it| !it.has_vanished);
            let request = here.and_then(|it| it.open.front()?.runs.first());
            if let Some(request) = request.filter(|it| (1..=prompt).contains(&it.replicas))
                && since + (PROMPT + HANDLED_WITHIN) * 1000 < now
            {
                return Err(Violation::new(CONFIRMED_SOON, format!("client {client} still waits: {request:?}")));
            }
        }
        Ok(())
    }

    /// `LOCK.EVENTS` replies when its timeout is over.
    pub(super) fn read_in_time(&self) -> Result<(), Violation> {
        // After the clock is set back, a reader waits longer by the length of the step.
        if self.renewals_are_delayed {
            return Ok(());
        }
        let now = node(|node| node.millis());
        for (id, connection) in self.connections.iter().filter(|(_, it)| !it.has_vanished) {
            let is_not_reading = node(|node| node.clients.get(id).is_none_or(|it| it.is_not_reading));
            let Some(open) = connection.open.front().filter(|open| open.began.is_some() && !is_not_reading) else {
                continue;
            };
            let Some(request) = open.runs.first().filter(|request| request.command == "events") else { continue };
            // A heartbeat is sent at least every ten seconds.
            let pace = request.heartbeat.then(|| connection.promised.unwrap_or(10_000));
            // Or after an eighth of the shortest lease that is renewed for the session.
            let is_its = |binding: &Binding| {
                binding.client == *id && binding.watchdog && !binding.is_unsure && Some(binding.received) < open.began
            };
            // (A request without a received reply may have given it a longer lease.)
            let longest = |((_, key, owner), belief): (&Hold, &Belief)| {
                let binding = belief.binding().filter(is_its)?;
                let binds = |it: &&Request| it.binds() && it.client == *id && it.concerns(key, owner);
                let others = self.undecided().map(|(.., it)| it).chain(self.abandoned.iter().map(|(_, it)| it));
                let others = others.filter(binds).map(|it| it.longest.unwrap_or(30_000));
                others.chain([binding.longest]).max()
            };
            let renewed = self.beliefs.iter().filter_map(longest).min();
            let eighth = renewed.map(|lease| (lease / 8).clamp(10, 10_000));
            if eighth.is_some_and(|eighth| open.at + eighth + IDLE_TIME < now) {
                return Err(Violation::new(POLLED, format!("client {id} still reads: {request:?}")));
            }
            let wait = request.wait.filter(|wait| *wait > 0).into_iter().chain(pace).min();
            if wait.is_some_and(|wait| open.at + wait + IDLE_TIME < now) {
                return Err(Violation::new(TIMEOUT, format!("client {id} still reads: {request:?}")));
            }
        }
        Ok(())
    }

    /// Every request without a reply is queued, waits for replicas, or has an event in an event queue.
    pub(super) fn all_answered(&self) -> Result<(), Violation> {
        let is_kept = |wait: &Wait| {
            let it = &wait.request;
            state::with(|state| {
                let is_it = |waiter: &crate::lock::Waiter<state::Requester>| {
                    waiter.requester.client == it.client
                        && *waiter.owner == *it.owner
                        && waiter.requester.on_behalf == OnBehalf::Session
                };
                state.queue.iter().any(is_it)
                    || !state.confirmations.is_empty()
                    || state.sessions.unread(it.client) > 0
                    || self.connections.get(&it.client).is_none_or(|it| it.has_vanished)
            })
        };
        if let Some(wait) = self.waits.iter().find(|wait| !wait.is_optional && !is_kept(wait)) {
            return Err(Violation::new(ONE_REPLY, format!("no reply is due for {:?}", wait.request)));
        }
        for (id, connection) in &self.connections {
            let is_ready = node(|node| {
                let it = node.clients.get(id);
                it.is_some_and(|it| it.state == crate::redis::client::State::Ready && it.input.is_empty())
            });
            if is_ready && !connection.has_vanished && !connection.open.is_empty() {
                let what = format!("no reply is due for {:?} of client {id}", connection.open[0].runs);
                return Err(Violation::new(ONE_REPLY, what));
            }
        }
        Ok(())
    }

    /// No client with a finished reply is still blocked, and no reader with a non-empty event queue.
    pub(super) fn answers_are_sent(&self) -> Result<(), Violation> {
        let blocked: Vec<(u64, crate::redis::Block)> = node(|node| {
            let of = |(id, it): (&u64, &crate::redis::Client)| match &it.state {
                crate::redis::client::State::Blocked(block) if !block.is_answered => Some((*id, block.clone())),
                _ => None,
            };
            node.clients.iter().filter_map(of).collect()
        });
        let is_late = |(client, block): &&(u64, crate::redis::Block)| {
            // A client that the server might have redirected gets its reply after the next run of the server's cron.
            let may_be_redirected = block.keys.iter().flatten().any(|key| !node(|node| node.serves(0, key)));
            let waits_for_cron = |at: u64| may_be_redirected && node(|node| node.millis()) <= at + CRON;
            state::with(|state| match state.pending.get(Ticket(block.ticket)) {
                Some(Stage::Ending(end)) => !waits_for_cron(end.at.millis()),
                Some(Stage::Reading(..)) => state.sessions.unread(*client) > 0,
                _ => false,
            })
        };
        match blocked.iter().find(is_late) {
            Some((client, _)) => Err(Violation::new(ONE_REPLY, format!("the reply to client {client} was not sent"))),
            None => Ok(()),
        }
    }
}

/// A wait ends when its timeout is over.
pub(super) fn waits_end_in_time() -> Result<(), Violation> {
    let now = node(|node| node.millis());
    let late = state::with(|state| {
        let is_late = |until: &u64| until + IDLE_TIME < now;
        state.queue.iter().find(|waiter| waiter.until.as_ref().is_some_and(is_late)).map(|waiter| format!("{waiter:?}"))
    });
    late.map_or(Ok(()), |waiter| Err(Violation::new(TIMEOUT, waiter)))
}

/// A replica grants nothing, and has refused the waits of sessions.
pub(super) fn no_wait_on_replica() -> Result<(), Violation> {
    let waits = state::with(|state| {
        let of_session =
            |waiter: &&crate::lock::Waiter<state::Requester>| waiter.requester.on_behalf == OnBehalf::Session;
        state.queue.iter().find(of_session).map(|waiter| format!("{waiter:?}"))
    });
    waits.map_or(Ok(()), |waiter| Err(Violation::new(ONE_REPLY, format!("on a replica, {waiter}"))))
}
