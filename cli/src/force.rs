//! `holdfast force`: breaks a lock.

use std::io::{IsTerminal, Write, stderr, stdin};

use holdfast_client::Locks;
use holdfast_client::redis::cmd;

use crate::failure::Failure;
use crate::report::{print, tell};
use crate::seen::{failed, server_of};
use crate::show;

/// How many waiters the question shows.
const NEXT: usize = 3;

/// Breaks a lock; 1 if it was free, or the answer was no.
pub async fn force(locks: &Locks, key: &str, yes: bool) -> Result<u8, Failure> {
    let mut server = server_of(locks, key).await?;
    let name = key.as_bytes();
    let lock = server.lock(name).await.map_err(|error| failed(&server, name, &error))?;
    let Some(lock) = lock.filter(|lock| !lock.holders.is_empty()) else {
        tell(format_args!("{}: {key:?} is free", server.name));
        return Ok(1);
    };
    if !yes {
        if !stdin().is_terminal() {
            return Err(Failure::usage("nobody is there to be asked: say --yes"));
        }
        // Who has it then is as much of the question as who loses it.
        let next = server.waiters(name, NEXT).await.map_err(|error| failed(&server, name, &error))?;
        let asked = format!("{}\nBreak this lock? Its holder may still be writing. [y/N] ", show::text(&lock, &next));
        let _ = stderr().write_all(asked.as_bytes());
        let mut answer = String::new();
        stdin().read_line(&mut answer).map_err(|error| Failure::here(&error))?;
        if !["y", "yes"].contains(&answer.trim().to_lowercase().as_str()) {
            return Ok(1);
        }
    }
    let broken: i64 = cmd("LOCK.FORCE")
        .arg(key)
        .query_async(&mut server.connection)
        .await
        .map_err(|error| failed(&server, name, &error))?;
    print(&format!("{broken}\n"))?;
    Ok(if broken > 0 { 0 } else { 1 })
}
