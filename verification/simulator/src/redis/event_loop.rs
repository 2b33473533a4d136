//! The event loop: the order in which a server processes requests, calls the module, and sends replies.
//!
//! | | Redis 7.0 | later servers |
//! |---|---|---|
//! | it has slept | `IterationBegins` | the same |
//! | what arrived in this poll, in order of arrival: requests, closed connections, acknowledgements | commands run | the same, and jobs after each |
//! | timers, then the cron | | |
//! | before it sleeps | how long to sleep; `IterationEnds`; clients are unblocked; their next commands run | clients are unblocked; their next commands run; `IterationEnds`; how long to sleep |
//! | replies are sent; connections marked for closing are closed | | |
//!
//! Sources: `ae.c`, `server.c` (`beforeSleep`, `afterSleep`), `blocked.c`, `networking.c`, `module.c` of these servers.

use super::commands::execute;
use crate::node::client::State;
use crate::node::{Bytes, Client, Generation, LogEntry, Slots, node, slot_of};
use crate::server::callbacks::{Event, Ticket, Touch};
use crate::server::calls::{answer, disconnect, end_of_step, expire_if_needed, force_unblock, notify, report};

/// The period of the cron, in µs.
const CRON: u64 = 100_000;

/// What arrives in a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Requests of a client, in one piece.
    Requests(u64, Vec<Vec<Bytes>>),
    /// A connection was closed.
    End(u64),
    /// The cluster bus reports that another node has taken a slot.
    SlotTaken(u16),
}

/// One event-loop iteration with everything that has arrived since the last one.
pub fn run_iteration(arrivals: Vec<Arrival>) {
    node(|node| {
        node.iteration_is_over = false;
        node.runs_again = false;
    });
    if node(|node| node.is_watched) {
        report(Event::IterationBegins);
        end_of_step();
    }
    confirm();
    for arrival in in_order_of_readiness(arrivals) {
        match arrival {
            Arrival::Requests(client, requests) => {
                node(|node| {
                    if let Some(client) = node.clients.get_mut(&client) {
                        client.input.extend(requests);
                    }
                });
                process(client);
            }
            Arrival::End(client) => disconnect(client),
            Arrival::SlotTaken(slot) => take_slot(slot),
        }
    }
    fire_timers();
    cron();
    before_sleep();
}

/// All bytes of a connection are read where its first part arrived. A close behind them is noticed in the next
/// iteration.
fn in_order_of_readiness(arrivals: Vec<Arrival>) -> Vec<Arrival> {
    let ends = node(|node| std::mem::take(&mut node.unseen_ends));
    let mut ready: Vec<Arrival> = ends.into_iter().map(Arrival::End).collect();
    for arrival in arrivals {
        let (Arrival::Requests(client, _) | Arrival::End(client)) = arrival else {
            ready.push(arrival);
            continue;
        };
        let is_of_client = |it: &&mut Arrival| matches!(it, Arrival::Requests(other, _) if *other == client);
        match (ready.iter_mut().find(is_of_client), arrival) {
            (Some(Arrival::Requests(_, read)), Arrival::Requests(_, requests)) => read.extend(requests),
            (Some(_), _) => node(|node| node.unseen_ends.push(client)),
            (None, arrival) => ready.push(arrival),
        }
    }
    ready
}

/// When the event loop wakes up if nothing arrives, by the monotonic clock; immediately if it must not sleep.
pub fn wakes_at() -> u64 {
    node(|node| {
        let now = node.clock.mono;
        if node.runs_again || !node.unseen_ends.is_empty() {
            return now;
        }
        let acks = node.replicas.iter().filter_map(|replica| replica.confirms_at.front()).map(|(at, _)| *at).min();
        let pause = Some(node.paused_until).filter(|until| *until > now);
        [Some(node.cron_due), node.timers.due(), acks, pause].into_iter().flatten().min().map_or(now, |at| at.max(now))
    })
}

/// Processes the acknowledgements of replicas.
fn confirm() {
    node(|node| {
        let now = node.clock.mono;
        for replica in &mut node.replicas {
            while let Some(&(_, offset)) = replica.confirms_at.front().filter(|(at, _)| *at <= now) {
                replica.confirms_at.pop_front();
                replica.confirmed = replica.confirmed.max(offset);
            }
        }
    });
}

/// Runs the requests of a client, until one blocks.
pub fn process(client: u64) {
    loop {
        let next = node(|node| {
            let it = node.clients.get_mut(&client)?;
            if it.state != State::Ready || it.is_closing || it.closes_after_reply { None } else { it.input.pop_front() }
        });
        let Some(argv) = next else { break };
        node(|node| node.work(1));
        execute(client, argv);
        end_of_step();
    }
}

/// Another node serves a slot from now on; the keys in it are deleted one by one. Only the module is notified of that.
/// Redis 7.0 does not even notify it, nor does it replicate the deletion. Valkey 9 reports at the end that slots have
/// moved.
fn take_slot(slot: u16) {
    let keys: Vec<Vec<u8>> = node(|node| {
        if let Some(slots) = &mut node.slots {
            slots.migrating.remove(&slot);
            slots.importing.remove(&slot);
            slots.unowned.remove(&slot);
            slots.elsewhere.insert(slot);
        }
        node.dbs[0].keys().filter(|key| slot_of(key) == slot).cloned().collect()
    });
    for key in keys {
        let is_notified = node(|node| {
            node.remove(0, &key);
            node.log.push(LogEntry::Written { db: 0, key: key.clone(), expired: false });
            let is_notified = node.generation != Generation::Redis70;
            if is_notified {
                node.stream.note(0, vec![b"DEL".to_vec(), key.clone()]);
            } else {
                node.stream.forget(0, &key);
            }
            is_notified
        });
        if is_notified {
            notify(0, &key, Touch::Changed);
        }
        end_of_step();
    }
    if node(|node| node.generation == Generation::Valkey9) {
        report(Event::SlotsMoved);
        end_of_step();
    }
}

fn fire_timers() {
    if node(|node| node.timers.due().is_none_or(|due| due > node.clock.mono)) {
        return;
    }
    while let Some(timer) = node(|node| node.timers.take(&node.clock)) {
        timer();
        end_of_step();
    }
    node(|node| node.timers.done(&node.clock));
}

/// Ten times a second: removes expired keys, redirects blocked clients of moved slots, calls the module.
fn cron() {
    if node(|node| node.cron_due > node.clock.mono) {
        return;
    }
    node(|node| node.cron_due = node.clock.mono + CRON);
    let blocked: Vec<(u64, String)> = node(|node| {
        let generation = node.generation;
        // (As `clusterRedirectBlockedClientIfNeeded`: while a slot migrates, no client is redirected. But Valkey 9 also
        // reports a cluster that is down to a client that waits for no key.)
        let error = |client: &mut Client, slots: &Slots| {
            let keys =
                client.blocked().filter(|block| block.may_end_without_module())?.keys.clone().unwrap_or_default();
            if slots.is_down && (!keys.is_empty() || generation != Generation::Valkey9) {
                return Some("-CLUSTERDOWN The cluster is down\r\n".to_owned());
            }
            let slot = keys.iter().map(|key| slot_of(key)).find(|slot| !slots.importing.contains(slot))?;
            slots.refusal(slot, true)
        };
        let Some(slots) = node.slots.clone() else { return Vec::new() };
        node.clients.iter_mut().filter_map(|(id, client)| Some((*id, error(client, &slots)?))).collect()
    });
    for (client, error) in blocked {
        node(|node| node.reply(client, error.as_bytes()));
        force_unblock(client);
        end_of_step();
    }
    let expired: Vec<(i32, Vec<u8>)> = node(|node| {
        let now = node.clock.millis();
        let dbs = (0..).zip(&node.dbs);
        dbs.flat_map(|(db, keys)| {
            keys.iter().filter(move |(_, entry)| entry.has_expired(now)).map(move |(key, _)| (db, key.clone()))
        })
        .collect()
    });
    for (db, key) in expired {
        expire_if_needed(db, &key);
        end_of_step();
    }
    report(Event::Cron);
    end_of_step();
}

fn before_sleep() {
    if node(|node| node.generation == Generation::Redis70) {
        end_iteration();
        end_blocks();
    } else {
        end_blocks();
        end_iteration();
    }
    hand_over();
    let closing: Vec<u64> = node(|node| {
        let all = node.clients.iter();
        all.filter(|(_, client)| client.is_closing || client.closes_after_reply).map(|(id, _)| *id).collect()
    });
    for client in closing {
        disconnect(client);
        end_of_step();
    }
}

fn end_iteration() {
    node(|node| node.iteration_is_over = true);
    if node(|node| node.is_watched) {
        report(Event::IterationEnds);
        end_of_step();
    }
}

/// Clients that the module has unblocked continue with their pending requests, and so do those that a pause has
/// delayed.
fn end_blocks() {
    while let Some((client, block)) = node(|node| node.unblocked.pop_front()) {
        let is_current = node(|node| {
            let it = node.clients.get_mut(&client).and_then(Client::blocked);
            it.is_some_and(|it| it.ticket == block.ticket)
        });
        if !is_current {
            continue;
        }
        if block.keys.is_none() {
            answer(client, Ticket(block.ticket));
            end_of_step();
        }
        node(|node| {
            if let Some(it) = node.clients.get_mut(&client) {
                it.state = State::Ready;
            }
            node.resumed.push_back(client);
        });
    }
    node(|node| {
        if !node.is_paused() {
            for (id, client) in &mut node.clients {
                if client.state == State::Postponed {
                    client.state = State::Ready;
                    node.resumed.push_back(*id);
                }
            }
        }
    });
    while let Some(client) = node(|node| node.resumed.pop_front()) {
        process(client);
    }
}

/// Sends the replies, and asks the replicas for confirmation if the module has requested it.
fn hand_over() {
    node(|node| {
        for client in node.clients.values_mut().filter(|client| !client.is_not_reading) {
            client.sent.append(&mut client.output);
        }
        if let Some(offset) = node.stream.ack_requested.take() {
            let now = node.clock.mono;
            for replica in &mut node.replicas {
                if let Some(delay) = replica.delay {
                    replica.confirms_at.push_back((now + delay * 1000, offset));
                }
            }
        }
    });
}
