//! `holdfast run`: runs a command while holding a lock.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use holdfast_client::{Guard, Lock, Locks};
use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

use crate::args::{Run, Target};
use crate::child::{Change, Child};
use crate::failure::{Failure, TEMPORARY};
use crate::inspect::{server_of, shown};
use crate::login;
use crate::nested_runs;
use crate::report::{print_aside, print_message};
use crate::signals::{is_ignored, stop_here, stops_at_terminal};

/// The signals that are forwarded to the command. If the command is not in the foreground, only this process receives Ctrl-Z.
const FORWARDED: [Signal; 7] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2, Signal::TSTP];
/// A longer wait is announced on a terminal.
const PATIENCE: Duration = Duration::from_secs(1);
/// Timeout for withdrawing a request. Afterwards, the end of the connection withdraws it.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);
/// The interval at which the end of the remaining processes is polled, after the command has ended.
const GROUP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// As in a shell: the command can't be run, or was not found.
const NOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// The outcome of a run. The exit code alone does not tell the command's own code from `holdfast`'s.
enum Outcome {
    /// The command ended with this code.
    Ended(u8),
    /// A signal ended the command.
    Signal(i32),
    /// The command can't be run.
    NotStarted(u8),
    NotGranted(u8),
    /// A signal ended the wait.
    Interrupted(i32),
    /// The lock was lost. The command was stopped, or had ended before the loss was known.
    Lost,
}

impl Outcome {
    fn code(&self) -> u8 {
        match self {
            Self::Ended(code) | Self::NotStarted(code) | Self::NotGranted(code) => *code,
            Self::Signal(signal) | Self::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Lost => TEMPORARY,
        }
    }
}

/// The format is in the README.
impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(code) => write!(out, "ended {code}"),
            Self::Signal(signal) => write!(out, "killed {signal}"),
            Self::NotStarted(code) => write!(out, "not-started {code}"),
            Self::NotGranted(code) => write!(out, "not-granted {code}"),
            Self::Interrupted(signal) => write!(out, "interrupted {signal}"),
            Self::Lost => write!(out, "lost {TEMPORARY}"),
        }
    }
}

/// Runs the command while holding the lock, and returns the exit code. Writes the outcome to the report, if requested.
pub async fn run(target: &Target, task: &Run) -> Result<u8, Failure> {
    let name = task.report.as_deref().map(|file| file.display().to_string()).unwrap_or_default();
    let failed = |error: &io::Error| Failure::of(&name, error, "use a writable file");
    // The file is emptied first: an earlier report must not be taken for this run's.
    let file = task.report.as_deref().map(File::create).transpose().map_err(|error| failed(&error))?;
    let outcome = under_lock(target, task).await;
    let report = match &outcome {
        Ok(outcome) => outcome.to_string(),
        Err(failure) => format!("failed {}", failure.code()),
    };
    if let Some(mut file) = file
        && let Err(error) = writeln!(file, "{report}")
    {
        print_message(failed(&error));
    }
    outcome.map(|outcome| outcome.code())
}

async fn under_lock(target: &Target, task: &Run) -> Result<Outcome, Failure> {
    stops_at_terminal(false);
    let locks = login::open(target)?.named(&whoami())?;
    let mut signals = Signals::listen()?;
    let lock = lock(&locks, task);
    let acquire = async {
        tokio::select! {
            granted = lock.acquire() => granted.map_err(Failure::from),
            Err(failure) = check_server(&locks, task) => Err(failure),
        }
    };
    let granted = tokio::select! {
        granted = acquire => match granted {
            Ok(granted) => granted,
            Err(failure) => {
                let _ = tokio::time::timeout(SETTLED_WITHIN, locks.settle()).await;
                return Err(failure);
            }
        },
        signal = signals.next() => {
            let _ = tokio::time::timeout(SETTLED_WITHIN, locks.settle()).await;
            return Ok(Outcome::Interrupted(signal.as_raw()));
        }
        () = announce_wait(&lock) => return Ok(Outcome::NotGranted(task.conflict_exit_code)),
    };
    let Some(guard) = granted else {
        print_message(format_args!("{}: not granted{}", lock.keys(), if task.no_wait { "" } else { " in time" }));
        return Ok(Outcome::NotGranted(task.conflict_exit_code));
    };
    let child = match Child::start(&task.command, &variables(task, &guard), task.kill_group).await {
        Ok(child) => child,
        Err(error) => {
            let name = task.command.first().map(|name| name.display().to_string()).unwrap_or_default();
            print_message(format_args!("{name}: {error}"));
            release(guard).await;
            let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
            return Ok(Outcome::NotStarted(code));
        }
    };
    watch(task, guard, child, &mut signals).await
}

/// Fails if the server can't be reached, since a wait would continue until it can be, even if the address is wrong. Fails also if the
/// wait would never end.
async fn check_server(locks: &Locks, task: &Run) -> Result<(), Failure> {
    let mut server = server_of(locks, task.keys.first().map_or(&[], |key| key.as_bytes())).await?;
    if !task.no_wait
        && let Some(key) = nested_runs::key_of_outer_run(&mut server, task).await
    {
        return Err(Failure::waits_for_itself(&shown(key.as_bytes())));
    }
    Ok(())
}

fn lock(locks: &Locks, task: &Run) -> Lock {
    let mut lock = locks.lock_all(task.keys.iter().map(|key| key.as_bytes()));
    if task.ephemeral {
        lock = lock.ephemeral();
    }
    lock = match (task.no_wait, task.wait) {
        (true, _) => lock.wait(Duration::ZERO),
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

fn variables(task: &Run, guard: &Guard) -> [(&'static str, Vec<u8>); 4] {
    [
        ("HOLDFAST_KEY", task.keys.join(OsStr::new(" ")).into_vec()),
        ("HOLDFAST_TOKEN", guard.fence().to_string().into_bytes()),
        ("HOLDFAST_OWNER", guard.owner().as_bytes().to_vec()),
        (nested_runs::OWNERS, nested_runs::owners_with(guard.owner())),
    ]
}

/// Watches the command and the lock until the command has ended.
async fn watch(task: &Run, guard: Guard, mut child: Child, signals: &mut Signals) -> Result<Outcome, Failure> {
    let status = tokio::select! {
        status = end_of(&mut child, signals) => status?,
        why = guard.lost() => {
            let message = format!("{}: lost: {why}; the command is stopped", guard.keys());
            tokio::join!(stop(child, signals, task.grace), print_aside(message));
            drop(guard);
            return Ok(Outcome::Lost);
        }
    };
    child.end(false).await;
    match guard.release().await {
        // If the command had ended before the loss was known, it also ran without the lock.
        Err(error @ (holdfast_client::Error::Lost { .. } | holdfast_client::Error::NotHeld { .. })) => {
            print_message(Failure::from(error));
            return Ok(Outcome::Lost);
        }
        Err(error) => {
            let until = if task.ephemeral { "with this connection" } else { "when its lease expires" };
            print_message(format_args!("{error}\n  the lock ends {until}"));
        }
        Ok(()) => {}
    }
    Ok(ended(status))
}

/// Forwards signals until the command has ended.
async fn end_of(child: &mut Child, signals: &mut Signals) -> Result<ExitStatus, Failure> {
    loop {
        tokio::select! {
            change = child.change() => match change.map_err(|error| Failure::here(&error))? {
                Change::Ended(status) => return Ok(status),
                Change::Stopped(by) => child.stopped(by),
            },
            signal = signals.any() => child.signal(signal),
        }
    }
}

/// Ends the command by TERM, and after the grace period by KILL.
async fn stop(mut child: Child, signals: &mut Signals, grace: Duration) {
    child.signal(Signal::TERM);
    // A stopped process receives TERM only when it is continued.
    child.signal(Signal::CONT);
    let all_end = async {
        let _ = end_of(&mut child, signals).await;
        while child.has_other_processes() {
            tokio::time::sleep(GROUP_POLL_INTERVAL).await;
        }
    };
    let _ = tokio::time::timeout(grace, all_end).await;
    child.end(true).await;
}

async fn release(guard: Guard) {
    if let Err(error) = guard.release().await {
        print_message(error);
    }
}

/// Announces on a terminal that the wait takes long. Never returns.
async fn announce_wait(lock: &Lock) {
    tokio::time::sleep(PATIENCE).await;
    if io::stderr().is_terminal() {
        print_message(format_args!("waiting for {}", lock.keys()));
    }
    std::future::pending().await
}

fn ended(status: ExitStatus) -> Outcome {
    match (status.code(), status.signal()) {
        // The kernel keeps eight bits of the code.
        (Some(code), _) => Outcome::Ended(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, signal) => Outcome::Signal(signal.unwrap_or_default()),
    }
}

/// The name that `show` and `ls` print for this owner: `user@host:pid`.
fn whoami() -> String {
    // Cron and containers set different variables.
    let user = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok().filter(|it| !it.is_empty()));
    let id = || std::fs::metadata("/proc/self").map_or_else(|_| "?".to_owned(), |own| format!("uid{}", own.uid()));
    let user = user.unwrap_or_else(id);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "?".to_owned());
    // An owner may not contain `##`, and stands on one line of `HOLDFAST_OWNERS`.
    let visible = |letter: char| if letter == '#' || letter.is_control() { '?' } else { letter };
    let short = |text: &str| text.trim().chars().take(60).map(visible).collect::<String>();
    format!("{}@{}:{}", short(&user), short(&host), std::process::id())
}

/// The signals that this process handles.
struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    /// If this process ignored SIGCHLD, the kernel would reap the supervisor, and its process id could be reused.
    _children: unix::Signal,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let listen =
            |number: Signal| signal(SignalKind::from_raw(number.as_raw())).map_err(|error| Failure::here(&error));
        // With a handler here, the command would no longer ignore the signal.
        let wanted = FORWARDED.into_iter().filter(|number| !is_ignored(*number));
        let forwarded = wanted.map(|number| Ok((number, listen(number)?))).collect::<Result<_, Failure>>()?;
        Ok(Self { forwarded, _children: listen(Signal::CHILD)? })
    }

    /// The next signal that ends a wait. A stop signal stops this process.
    async fn next(&mut self) -> Signal {
        loop {
            match self.any().await {
                Signal::TSTP => stop_here(),
                signal => return signal,
            }
        }
    }

    /// The next signal.
    async fn any(&mut self) -> Signal {
        std::future::poll_fn(|context| {
            let mut all = self.forwarded.iter_mut();
            let heard = all.find_map(|(number, signal)| signal.poll_recv(context).is_ready().then_some(*number));
            heard.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    }
}
