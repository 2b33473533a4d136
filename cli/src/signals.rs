//! Signals of this process.

use nix::sys::signal::{self, SigSet};
use nix::unistd::getpgrp;
use rustix::process::{Pid, Signal, kill_current_process_group};

/// Stops the process group of this process until it is continued. The system does not if no shell could continue it. A script that
/// started this process is in the group: its shell waits for that to stop.
pub fn stop_here() {
    stops_at_terminal(true);
    let _ = kill_current_process_group(Signal::TTIN);
    stops_at_terminal(false);
}

/// The process group of this process; `None` if it is one from outside of its container, whose number would be 0.
pub fn own_group() -> Option<Pid> {
    Pid::from_raw(getpgrp().as_raw())
}

/// Whether this process is stopped when another process has the terminal. If not, it may write there all the same, and take the terminal back.
/// Its children inherit that.
pub fn stops_at_terminal(stops: bool) {
    let signals = SigSet::from_iter([signal::SIGTTIN, signal::SIGTTOU]);
    let _ = if stops { signals.thread_unblock() } else { signals.thread_block() };
}

/// Whether this process ignores a signal. At the start, this is what its parent set, such as `nohup`, or a shell that runs it in the
/// background. Such a signal stays ignored, also by the command.
pub fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal.as_raw() - 1).is_ok_and(|bit| mask >> bit & 1 == 1)
}
