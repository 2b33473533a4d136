//! The command that runs under the lock: a process group of its own, at the terminal if there is one, that ends when this
//! process does.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

use crate::watcher::{self, Watcher};

/// A running command. Dropped before its end, it is killed with all of its group.
pub struct Child {
    pid: libc::pid_t,
    watcher: Watcher,
    /// The terminal that this process belongs to, if there is one.
    terminal: Option<OwnedFd>,
    /// Whether this process had the terminal, and gave it to the command.
    given: Cell<bool>,
}

/// What became of a command.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// It ended.
    Ended(ExitStatus),
    /// It was stopped, by this signal.
    Stopped(libc::c_int),
}

impl Child {
    /// Starts it with these variables more in its environment.
    pub fn start(command: &[OsString], variables: &[(&str, Vec<u8>)]) -> io::Result<Self> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let begins_at_terminal = has_terminal();
        let mut started = Command::new(program);
        started.args(arguments);
        for (name, value) in variables {
            started.env(name, OsStr::from_bytes(value));
        }
        let watcher = Watcher::start()?;
        // SAFETY: plain call.
        let (parent, pipe) = (unsafe { libc::getpid() }, watcher.pipe());
        // SAFETY: the closure makes async-signal-safe calls only and allocates nothing.
        unsafe { started.pre_exec(move || set_up(parent, pipe, begins_at_terminal)) };
        // Waited for by its process id, for stops are to be heard of too.
        let pid = started.spawn()?.id();
        let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::Other)?;
        let terminal = if begins_at_terminal {
            io::stdin().as_fd().try_clone_to_owned().ok()
        } else {
            File::open("/dev/tty").ok().map(OwnedFd::from)
        };
        let child = Self { pid, watcher, terminal, given: Cell::new(begins_at_terminal) };
        if begins_at_terminal {
            child.move_terminal_to(pid);
        }
        Ok(child)
    }

    /// Sends a signal to its whole group.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: plain call. The group lives for as long as somebody of it does: the watcher, say.
        unsafe { libc::killpg(self.pid, signal) };
    }

    /// What has become of it since it was last asked; none: it runs.
    pub fn change(&self) -> io::Result<Option<Change>> {
        let mut status = 0;
        // SAFETY: plain call with a place for the status.
        match unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } {
            0 => Ok(None),
            -1 => Err(io::Error::last_os_error()),
            _ if libc::WIFSTOPPED(status) => Ok(Some(Change::Stopped(libc::WSTOPSIG(status)))),
            _ => Ok(Some(Change::Ended(ExitStatus::from_raw(status)))),
        }
    }

    /// The command was stopped. One that needs the terminal, which it does not begin with if its input comes from elsewhere,
    /// gets it and goes on. Else this process stops as well, so that the shell has the terminal, until it is to go on.
    pub fn stopped(&self, by: libc::c_int) {
        let needs_terminal = matches!(by, libc::SIGTTIN | libc::SIGTTOU);
        if !(needs_terminal && self.give_terminal()) {
            self.take_terminal_back();
            stop_here();
            self.give_terminal();
        }
        self.signal(libc::SIGCONT);
    }

    /// Gives the terminal to the command, if it is this process's to give: one in the background has none, and who was told
    /// by its shell to ignore INT is in the background of a script.
    fn give_terminal(&self) -> bool {
        let Some(terminal) = &self.terminal else { return false };
        // SAFETY: plain calls.
        let ours = unsafe { libc::tcgetpgrp(terminal.as_raw_fd()) == libc::getpgrp() };
        if !ours || is_ignored(libc::SIGINT) {
            return false;
        }
        self.given.set(true);
        self.move_terminal_to(self.pid);
        true
    }

    /// The command has ended: what it has left behind is nobody's business.
    pub fn has_ended(self) {
        self.take_terminal_back();
        self.watcher.end();
    }

    /// Takes the terminal back from a command that had it.
    fn take_terminal_back(&self) {
        if self.given.replace(false) {
            // SAFETY: plain call.
            self.move_terminal_to(unsafe { libc::getpgrp() });
        }
    }

    fn move_terminal_to(&self, group: libc::pid_t) {
        if let Some(terminal) = &self.terminal {
            // Who is not at the terminal is stopped when it changes that, unless it does not listen.
            // SAFETY: plain calls; the handler is the system's own.
            unsafe {
                let before = libc::signal(libc::SIGTTOU, libc::SIG_IGN);
                libc::tcsetpgrp(terminal.as_raw_fd(), group);
                libc::signal(libc::SIGTTOU, before);
            }
        }
    }
}

/// Between fork and exec: a group of its own, at the terminal, that ends when the parent does.
fn set_up(parent: libc::pid_t, pipe: RawFd, terminal: bool) -> io::Result<()> {
    // SAFETY: plain system calls, all allowed between fork and exec.
    unsafe {
        if libc::setpgid(0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        watcher::lead(pipe);
        if terminal {
            let before = libc::signal(libc::SIGTTOU, libc::SIG_IGN);
            libc::tcsetpgrp(libc::STDIN_FILENO, libc::getpid());
            libc::signal(libc::SIGTTOU, before);
        }
        // Sooner than the watcher, where there is such a signal.
        #[cfg(target_os = "linux")]
        {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // It may have ended before that.
            if libc::getppid() != parent {
                libc::raise(libc::SIGKILL);
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = parent;
    }
    Ok(())
}

/// Whether standard input is a terminal, and this process is at it.
fn has_terminal() -> bool {
    // SAFETY: plain calls.
    unsafe { libc::isatty(libc::STDIN_FILENO) == 1 && libc::tcgetpgrp(libc::STDIN_FILENO) == libc::getpgrp() }
}

/// Stops this process, until somebody lets it go on.
pub fn stop_here() {
    // SAFETY: plain call.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Whether this process ignores a signal. Asked at the start, it says what whoever started it wanted, such as `nohup`, or a
/// shell that runs it in the background: what is ignored then stays ignored, and the command inherits that.
pub fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a place for the answer, which is all zeros before.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}
