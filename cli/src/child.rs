//! The command that runs while the lock is held. It has its own process group, in the foreground of the terminal if there is one,
//! and ends with this process. Its parent is a [`supervisor`].

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{self, Command, ExitStatus};

use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, Signal, getpid, kill_process_group, set_child_subreaper};
use rustix::termios::{isatty, tcgetpgrp, tcsetpgrp};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use crate::report::print_aside;
use crate::signals::{is_ignored, own_group, stop_here};
use crate::supervisor::{self, MESSAGE, Message};

/// This program, even if its file has been replaced.
const PROGRAM: &str = "/proc/self/exe";

/// A running command. If this process ends, the supervisor kills it.
pub struct Child {
    /// The supervisor, which leads the command's process group. It is reaped only at the end, so that its process id stays valid.
    supervisor: process::Child,
    pid: Pid,
    /// Whether to end all processes that the command has started, not only its process group.
    all: bool,
    /// The descendants that this process had before.
    before: Vec<Pid>,
    socket: UnixStream,
    /// The part of a message that was read.
    read: Vec<u8>,
    /// The terminal of this process, if there is one.
    terminal: Option<OwnedFd>,
    /// Whether this process was in the foreground, and gave the terminal to the command.
    given: Cell<bool>,
}

/// A change of the command's state.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// The command has ended.
    Ended(ExitStatus),
    /// The command was stopped by this signal.
    Stopped(Signal),
}

impl Child {
    /// Starts the command with these additional environment variables.
    pub async fn start(command: &[OsString], variables: &[(&str, Vec<u8>)], all: bool) -> io::Result<Self> {
        let begins_at_terminal = has_terminal();
        let terminal = if begins_at_terminal {
            io::stdin().as_fd().try_clone_to_owned().ok()
        } else {
            File::open("/dev/tty").ok().map(OwnedFd::from)
        };
        let mut before = Vec::new();
        if all {
            before = supervisor::descendants(getpid());
            // If the supervisor is killed, the command's processes become children of this one.
            set_child_subreaper(Some(getpid()))?;
        }
        let (here, there) = net::UnixStream::pair()?;
        let supervisor = {
            let mut started = Command::new(PROGRAM);
            started.arg0("lock-watcher").arg("supervise").args(all.then_some("--all")).arg("--").args(command);
            started.envs(variables.iter().map(|(name, value)| (name, OsStr::from_bytes(value))));
            // The other end of the socket is closed when this is dropped.
            started.stdin(OwnedFd::from(there)).process_group(0).spawn()?
        };
        here.set_nonblocking(true)?;
        let (pid, socket) = (Pid::from_child(&supervisor), UnixStream::from_std(here.try_clone()?)?);
        let given = Cell::new(begins_at_terminal);
        let mut child = Self { supervisor, pid, all, before, socket, read: Vec::new(), terminal, given };
        // Before the supervisor is ready, a key at the terminal would end or stop it.
        child.message().await?;
        if begins_at_terminal {
            child.move_terminal_to(pid);
        }
        supervisor::send_input(&here, io::stdin().as_fd())?;
        drop(here);
        match child.message().await? {
            Some(Message::NotStarted(error)) => {
                child.end(false).await;
                Err(io::Error::from_raw_os_error(error))
            }
            // A supervisor that was killed may have started it: `change` sees to that.
            _ => Ok(child),
        }
    }

    /// Sends a signal to its whole group.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid, signal);
    }

    /// Waits for its next change. Cancel-safe.
    pub async fn change(&mut self) -> io::Result<Change> {
        loop {
            match self.message().await? {
                Some(Message::Ended(status)) => return Ok(Change::Ended(ExitStatus::from_raw(status))),
                Some(Message::Stopped(signal)) => {
                    return Ok(Change::Stopped(Signal::from_named_raw(signal).unwrap_or(Signal::STOP)));
                }
                Some(_) => {}
                None => {
                    self.kill();
                    print_aside("the supervisor was killed; the command is killed, too").await;
                    return Ok(Change::Ended(ExitStatus::from_raw(Signal::KILL.as_raw())));
                }
            }
        }
    }

    /// The next message of the supervisor, or `None` if it has ended.
    async fn message(&mut self) -> io::Result<Option<Message>> {
        while self.read.len() < MESSAGE {
            let mut bytes = [0; MESSAGE];
            let rest = MESSAGE - self.read.len();
            match self.socket.read(&mut bytes[..rest]).await {
                Ok(0) | Err(_) => return Ok(None),
                Ok(length) => self.read.extend_from_slice(&bytes[..length]),
            }
        }
        let bytes = <[u8; MESSAGE]>::try_from(self.read.as_slice()).map_err(io::Error::other)?;
        self.read.clear();
        Message::read(bytes).map(Some)
    }

    /// Handles a stop of the command. If it needs the terminal, it gets it and continues. (It starts without it if its input is not the
    /// terminal.) Otherwise this process stops as well, so that the shell has the terminal until it is continued. Without a terminal, the
    /// process that stopped the command continues it.
    pub fn stopped(&self, by: Signal) {
        let needs_terminal = matches!(by, Signal::TTIN | Signal::TTOU);
        if !(needs_terminal && self.give_terminal()) {
            if self.terminal.is_none() {
                return;
            }
            self.take_terminal_back();
            stop_here();
            self.give_terminal();
        }
        self.signal(Signal::CONT);
    }

    /// Whether processes of the command's group are left.
    pub fn has_other_processes(&self) -> bool {
        supervisor::has_other_processes(self.pid)
    }

    /// Gives the terminal to the command if this process is in the foreground. A process that ignores INT was started in the background
    /// of a script.
    fn give_terminal(&self) -> bool {
        let Some(terminal) = &self.terminal else { return false };
        if !is_foreground(terminal) || is_ignored(Signal::INT) {
            return false;
        }
        self.given.set(true);
        self.move_terminal_to(self.pid);
        true
    }

    /// Ends the remaining processes of the command: with `all`, every process that it has started; otherwise, if the
    /// lock is `lost`, its process group. Returns when they have ended.
    pub async fn end(mut self, lost: bool) {
        self.take_terminal_back();
        if self.all {
            let _ = shutdown(&self.socket, Shutdown::Write);
            while let Ok(Some(_)) = self.message().await {}
            if !self.supervisor.wait().is_ok_and(|status| status.success()) {
                self.kill();
            }
        } else if lost {
            self.signal(Signal::KILL);
        } else {
            let _ = self.supervisor.kill();
        }
        let _ = self.supervisor.wait();
    }

    /// Kills the processes that a supervisor has left behind.
    fn kill(&self) {
        if self.all {
            supervisor::end_all_of(self.pid, &self.before);
        } else {
            self.signal(Signal::KILL);
        }
    }

    /// Takes the terminal back from the command, if it had it.
    fn take_terminal_back(&self) {
        if self.given.replace(false)
            && let Some(group) = own_group()
        {
            self.move_terminal_to(group);
        }
    }

    fn move_terminal_to(&self, group: Pid) {
        if let Some(terminal) = &self.terminal {
            let _ = tcsetpgrp(terminal, group);
        }
    }
}

/// Whether standard input is a terminal, and this process is in its foreground, alone: the other end of a pipe may need the terminal, too, and the
/// command gets it when it asks for it.
fn has_terminal() -> bool {
    let input = io::stdin();
    let is_alone = !is_pipe(io::stdout()) && !is_pipe(io::stderr());
    is_alone && isatty(&input) && is_foreground(&input)
}

fn is_foreground(terminal: impl AsFd) -> bool {
    tcgetpgrp(terminal).is_ok_and(|group| own_group() == Some(group))
}

fn is_pipe(output: impl AsFd) -> bool {
    let file = output.as_fd().try_clone_to_owned().map(File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|metadata| metadata.file_type().is_fifo())
}
