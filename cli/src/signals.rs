//! Signals of this process.

use rustix::process::{Signal, getpid, kill_process};

/// Stops this process until it is continued.
pub fn stop_here() {
    let _ = kill_process(getpid(), Signal::STOP);
}

/// Whether this process ignores a signal. At the start, this is what its parent set, such as `nohup`, or a shell that runs it in the
/// background. Such a signal stays ignored, also by the command.
pub fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal.as_raw() - 1).is_ok_and(|bit| mask >> bit & 1 == 1)
}
