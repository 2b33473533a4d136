//! The command that runs under the lock: a process group of its own, at the terminal if there is one, that ends when this
//! process does.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

/// A running command.
pub struct Child {
    pid: libc::pid_t,
    /// Whether this process had the terminal, and gave it to the command.
    terminal: bool,
}

/// What became of a command.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// It ended.
    Ended(ExitStatus),
    /// It was stopped from the terminal, and with it this process has to stop.
    Stopped,
}

impl Child {
    /// Starts it with these variables more in its environment.
    pub fn start(command: &[OsString], variables: &[(&str, Vec<u8>)]) -> io::Result<Self> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let terminal = has_terminal();
        let mut started = Command::new(program);
        started.args(arguments);
        for (name, value) in variables {
            started.env(name, OsStr::from_bytes(value));
        }
        // SAFETY: plain call.
        let parent = unsafe { libc::getpid() };
        // SAFETY: the closure makes async-signal-safe calls only and allocates nothing.
        unsafe { started.pre_exec(move || set_up(parent, terminal)) };
        // Waited for by its process id, for stops are to be heard of too.
        let pid = started.spawn()?.id();
        let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::Other)?;
        let child = Self { pid, terminal };
        child.take_terminal_to(pid);
        Ok(child)
    }

    /// Sends a signal to its whole group.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: plain call. The group lives for as long as somebody of it does, and its number is not given to another
        // before the command has been waited for.
        unsafe { libc::killpg(self.pid, signal) };
    }

    /// What has become of it since it was last asked; none: it runs.
    pub fn change(&self) -> io::Result<Option<Change>> {
        let mut status = 0;
        // SAFETY: plain call with a place for the status.
        match unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } {
            0 => Ok(None),
            -1 => Err(io::Error::last_os_error()),
            _ if libc::WIFSTOPPED(status) => Ok(Some(Change::Stopped)),
            _ => Ok(Some(Change::Ended(ExitStatus::from_raw(status)))),
        }
    }

    /// Stops this process as the command was stopped, so that the shell has the terminal; goes on when that goes on.
    pub fn stop_along(&self) {
        self.take_terminal_back();
        // SAFETY: plain call.
        unsafe { libc::raise(libc::SIGSTOP) };
        self.take_terminal_to(self.pid);
        self.signal(libc::SIGCONT);
    }

    /// Takes the terminal back from a command that has ended.
    pub fn take_terminal_back(&self) {
        // SAFETY: plain call.
        self.take_terminal_to(unsafe { libc::getpgrp() });
    }

    fn take_terminal_to(&self, group: libc::pid_t) {
        if self.terminal {
            // Who is not at the terminal is stopped when it changes that, unless it does not listen.
            // SAFETY: plain calls; the handler is the system's own.
            unsafe {
                let before = libc::signal(libc::SIGTTOU, libc::SIG_IGN);
                libc::tcsetpgrp(libc::STDIN_FILENO, group);
                libc::signal(libc::SIGTTOU, before);
            }
        }
    }
}

/// Between fork and exec: a group of its own, at the terminal, that ends when the parent does.
fn set_up(parent: libc::pid_t, terminal: bool) -> io::Result<()> {
    // SAFETY: plain system calls, all allowed between fork and exec.
    unsafe {
        if libc::setpgid(0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        if terminal {
            libc::signal(libc::SIGTTOU, libc::SIG_IGN);
            libc::tcsetpgrp(libc::STDIN_FILENO, libc::getpid());
            libc::signal(libc::SIGTTOU, libc::SIG_DFL);
        }
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
