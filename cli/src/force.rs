//! `holdfast force`: forces a lock free.

use std::io::{IsTerminal, Write, stderr, stdin};

use holdfast_client::Locks;
use holdfast_client::redis::cmd;

use crate::failure::Failure;
use crate::inspect::{failed, server_of, shown};
use crate::report::{print, print_message};
use crate::show;

/// The number of waiters in the question.
const NEXT: usize = 3;

/// Forces a lock free. Returns 1 if it was free already, or the answer was no.
pub async fn force(locks: &Locks, name: &[u8], yes: bool) -> Result<u8, Failure> {
    let mut server = server_of(locks, name).await?;
    let lock = server.lock(name).await.map_err(|error| failed(&server, name, &error))?;
    let Some(lock) = lock.filter(|lock| !lock.holders.is_empty()) else {
        print_message(format_args!("{}: {:?} is free", server.name, shown(name)));
        return Ok(1);
    };
    if !yes {
        if !stdin().is_terminal() {
            return Err(Failure::usage("standard input is not a terminal: use --yes"));
        }
        // The question shows who loses the lock, and who is granted it next.
        let next = server.waiters(name, NEXT).await.map_err(|error| failed(&server, name, &error))?;
        let asked =
            format!("{}\nForce this lock free? Its holder may still be writing. [y/N] ", show::text(&lock, &next));
        let _ = stderr().write_all(asked.as_bytes());
        let mut answer = String::new();
        stdin().read_line(&mut answer).map_err(|error| Failure::here(&error))?;
        if !["y", "yes"].contains(&answer.trim().to_lowercase().as_str()) {
            return Ok(1);
        }
    }
    let broken: i64 = cmd("LOCK.FORCE")
        .arg(name)
        .query_async(&mut server.connection)
        .await
        .map_err(|error| failed(&server, name, &error))?;
    print(&format!("{broken}\n"))?;
    Ok(if broken > 0 { 0 } else { 1 })
}
