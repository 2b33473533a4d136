//! `holdfast run`: a command under a lock.

use std::io::{self, IsTerminal};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use holdfast_client::{Guard, Lock, Locks};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::Run;
use crate::child::{Change, Child};
use crate::failure::{Failure, TEMPORARY};

/// What the command gets of what this process gets.
const HANDED_ON: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];
/// A wait that is longer is told to whoever sits at the terminal.
const PATIENCE: Duration = Duration::from_secs(1);
/// So long what was not granted yet is given back, before the end of the connection does it.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);
/// As a shell: can't be run; not found.
const NOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Runs the command under the lock; its exit code.
pub async fn run(locks: Locks, task: &Run) -> Result<u8, Failure> {
    let locks = locks.named(&whoami())?;
    let mut signals = Signals::listen()?;
    let lock = lock(&locks, task);
    let granted = tokio::select! {
        granted = lock.acquire() => granted?,
        signal = signals.next() => {
            let _ = tokio::time::timeout(SETTLED_WITHIN, locks.settle()).await;
            return Ok(signal_code(signal));
        }
        () = tell_of_waiting(&lock) => return Ok(task.conflict_exit_code),
    };
    let Some(guard) = granted else {
        eprintln!("holdfast: {}: not granted{}", lock.keys(), if task.no_wait { "" } else { " in time" });
        return Ok(task.conflict_exit_code);
    };
    let child = match Child::start(&task.command, &variables(task, &guard)) {
        Ok(child) => child,
        Err(error) => {
            eprintln!(
                "holdfast: {}: {error}",
                task.command.first().map(|name| name.display().to_string()).unwrap_or_default()
            );
            give_back(guard).await;
            return Ok(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN });
        }
    };
    watch(task, guard, child, &mut signals).await
}

fn lock(locks: &Locks, task: &Run) -> Lock {
    let mut lock = locks.lock_all(&task.keys).ephemeral();
    lock = match (task.no_wait, task.wait) {
        (true, _) => lock,
        (false, Some(time)) => lock.wait(time),
        (false, None) => lock.wait_forever(),
    };
    if let Some(lease) = task.lease {
        lock = lock.watched(lease);
    }
    if task.shared {
        lock = lock.shared();
    }
    if let Some(permits) = task.limit {
        lock = lock.limit(permits);
    }
    if let Some(count) = task.replicas {
        lock = lock.replicas(count);
    }
    lock
}

fn variables(task: &Run, guard: &Guard) -> [(&'static str, Vec<u8>); 3] {
    [
        ("HOLDFAST_KEY", task.keys.join(" ").into_bytes()),
        ("HOLDFAST_TOKEN", guard.fence().to_string().into_bytes()),
        ("HOLDFAST_OWNER", guard.owner().as_bytes().to_vec()),
    ]
}

/// Watches over the command and the lock until the command has ended.
async fn watch(task: &Run, guard: Guard, child: Child, signals: &mut Signals) -> Result<u8, Failure> {
    let status = tokio::select! {
        status = end_of(&child, signals) => status?,
        why = guard.lost() => {
            eprintln!("holdfast: {}: lost: {why}; the command is stopped", guard.keys());
            stop(&child, signals, task.grace).await?;
            child.take_terminal_back();
            drop(guard);
            return Ok(TEMPORARY);
        }
    };
    child.take_terminal_back();
    // A command that had ended before anybody knew that its lock was lost ran without one, too.
    match guard.release().await {
        Err(error @ (holdfast_client::Error::Lost { .. } | holdfast_client::Error::NotHeld { .. })) => {
            Err(error.into())
        }
        Err(error) => {
            eprintln!("holdfast: {error}\n  the lock ends with this connection");
            Ok(code(status))
        }
        Ok(()) => Ok(code(status)),
    }
}

/// Hands on signals until the command has ended.
async fn end_of(child: &Child, signals: &mut Signals) -> Result<ExitStatus, Failure> {
    loop {
        match child.change().map_err(|error| Failure::here(&error))? {
            Some(Change::Ended(status)) => return Ok(status),
            Some(Change::Stopped) => child.stop_along(),
            None => match signals.any().await {
                libc::SIGCHLD => {}
                signal => child.signal(signal),
            },
        }
    }
}

/// Ends the command: it is asked, and after a while it is not asked.
async fn stop(child: &Child, signals: &mut Signals, grace: Duration) -> Result<(), Failure> {
    child.signal(libc::SIGTERM);
    // One that stands still hears nothing.
    child.signal(libc::SIGCONT);
    let ended = tokio::time::timeout(grace, end_of(child, signals)).await;
    // Whoever of the group is left.
    child.signal(libc::SIGKILL);
    match ended {
        Ok(status) => status.map(drop),
        Err(_) => end_of(child, signals).await.map(drop),
    }
}

async fn give_back(guard: Guard) {
    if let Err(error) = guard.release().await {
        eprintln!("holdfast: {error}");
    }
}

/// Tells whoever sits at the terminal that it takes a while. Never returns.
async fn tell_of_waiting(lock: &Lock) {
    tokio::time::sleep(PATIENCE).await;
    if io::stderr().is_terminal() {
        eprintln!("holdfast: waiting for {}", lock.keys());
    }
    std::future::pending().await
}

fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        // The system keeps eight bits of it.
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, signal) => signal_code(signal.unwrap_or_default()),
    }
}

fn signal_code(signal: libc::c_int) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Who this is, for those who look at the lock: `user@host:pid`.
fn whoami() -> String {
    // Cron and containers don't all set the same.
    let user = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    let id = || std::fs::metadata("/proc/self").map_or_else(|_| "?".to_owned(), |own| format!("uid{}", own.uid()));
    let user = user.unwrap_or_else(id);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "?".to_owned());
    let short = |text: &str| text.trim().chars().take(60).collect::<String>();
    format!("{}@{}:{}", short(&user).replace('#', "?"), short(&host), std::process::id())
}

/// The signals that this process hears.
struct Signals {
    handed_on: Vec<(libc::c_int, Signal)>,
    child: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let listen = |number| signal(SignalKind::from_raw(number)).map_err(|error| Failure::here(&error));
        let handed_on =
            HANDED_ON.into_iter().map(|number| Ok((number, listen(number)?))).collect::<Result<_, Failure>>()?;
        Ok(Self { handed_on, child: listen(libc::SIGCHLD)? })
    }

    /// The next signal that is for the command.
    async fn next(&mut self) -> libc::c_int {
        std::future::poll_fn(|context| {
            let mut all = self.handed_on.iter_mut();
            let heard = all.find_map(|(number, signal)| signal.poll_recv(context).is_ready().then_some(*number));
            heard.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    }

    /// The next signal, that of a change of the command included.
    async fn any(&mut self) -> libc::c_int {
        std::future::poll_fn(|context| {
            let all = self.handed_on.iter_mut().map(|(number, signal)| (*number, signal));
            let mut all = all.chain([(libc::SIGCHLD, &mut self.child)]);
            let heard = all.find_map(|(number, signal)| signal.poll_recv(context).is_ready().then_some(number));
            heard.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    }
}
