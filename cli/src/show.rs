//! `holdfast show`: the holders and waiters of a lock.

use holdfast_client::Locks;

use crate::failure::Failure;
use crate::inspect::{Holder, Line, Lock, Waiter, failed, server_of, shown};
use crate::report::{print, table};
use crate::times;

/// The maximum number of waiters to show.
const SHOWN: usize = 100;

/// Shows one lock. Returns 1 if it is free.
pub async fn show(locks: &Locks, name: &[u8], json: bool) -> Result<u8, Failure> {
    let mut server = server_of(locks, name).await?;
    let lock = server.lock(name).await.map_err(|error| failed(&server, name, &error))?;
    let waiters = server.waiters(name, SHOWN).await.map_err(|error| failed(&server, name, &error))?;
    let said = match (&lock, json) {
        (None, true) => Line::free(&server.name, name).with_queue(&[]).to_string(),
        (None, false) => format!("{} is free ({})\n", shown(name), server.name),
        (Some(lock), true) => lock.json().with_queue(&waiters).to_string(),
        (Some(lock), false) => text(lock, &waiters),
    };
    print(&said)?;
    Ok(if lock.is_some() { 0 } else { 1 })
}

/// A lock as text.
pub fn text(lock: &Lock, waiters: &[Waiter]) -> String {
    let mut text = format!("{}  {}  {}\n\n", shown(&lock.key), lock.kind(), lock.server);
    let titles = ["HOLDER", "TOKEN", "HOLDS", "LEASE", "BOUND TO"];
    text += &table(&titles, &lock.holders.iter().map(holder).collect::<Vec<_>>());
    let titles = ["WAITER", "WAITED", "REMAINING", "CLIENT"];
    if !waiters.is_empty() {
        text += "\n";
        text += &table(&titles, &waiters.iter().map(waiter).collect::<Vec<_>>());
    }
    let more = lock.waiters - waiters.len() as i64;
    if more > 0 {
        text += &format!("… and {more} more\n");
    }
    text
}

fn holder(holder: &Holder) -> Vec<String> {
    let bindings = [(holder.watchdog, "watchdog"), (holder.ephemeral, "ephemeral"), (holder.cached, "cached")];
    let bindings: Vec<_> = bindings.iter().filter(|(bound, _)| *bound).map(|(_, name)| *name).collect();
    let bound = holder.client.map_or_else(String::new, |client| format!("client {client} ({})", bindings.join(", ")));
    let token = holder.token.map_or_else(|| "-".to_owned(), |token| token.to_string());
    vec![shown(&holder.owner), token, holder.holds.to_string(), times::show(holder.ttl), bound]
}

fn waiter(waiter: &Waiter) -> Vec<String> {
    let remaining = if waiter.remaining < 0 { "no limit".to_owned() } else { times::show(waiter.remaining) };
    let client = waiter.client.map_or_else(|| "-".to_owned(), |client| client.to_string());
    vec![shown(&waiter.owner), times::show(waiter.waited), remaining, client]
}
