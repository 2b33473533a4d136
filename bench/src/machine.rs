//! The machine: processor affinity, limits, and its description.

use std::fs;
use std::mem;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// The cores of this program, as it was started.
fn cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| {
        // SAFETY: the set is plain data for which zero is valid, and the kernel writes at most its size.
        unsafe {
            let mut set: libc::cpu_set_t = mem::zeroed();
            libc::sched_getaffinity(0, mem::size_of::<libc::cpu_set_t>(), &mut set);
            (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect()
        }
    })
}

fn pin(thread: libc::pid_t, cores: &[usize]) {
    // SAFETY: the set is plain data for which zero is valid, and the kernel only reads it.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        cores.iter().for_each(|&core| libc::CPU_SET(core, &mut set));
        // It fails for a thread that has just ended.
        libc::sched_setaffinity(thread, mem::size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Pins this thread, and the threads and processes that it will start, to the clients' core.
pub fn pin_clients() {
    if let [_, clients, ..] = cores() {
        pin(0, &[*clients]);
    }
}

/// Pins a server process to the core that the clients do not use.
pub fn pin_server(pid: u32) {
    let [servers, _, ..] = cores() else { return };
    threads_of(pid).into_iter().for_each(|thread| pin(thread, &[*servers]));
}

/// Lets all threads of a server process but the main one use every core.
pub fn free_helpers(pid: u32) {
    let helpers = threads_of(pid).into_iter().filter(|thread| u32::try_from(*thread) != Ok(pid));
    helpers.for_each(|thread| pin(thread, cores()));
}

fn threads_of(pid: u32) -> Vec<libc::pid_t> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Gives this thread a higher priority on its core, so that the client that measures is not delayed by the load. Returns false if
/// that is not allowed.
pub fn run_first() -> bool {
    // SAFETY: the kernel only reads the parameter.
    unsafe {
        let parameter = libc::sched_param { sched_priority: 1 };
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameter) == 0
    }
}

/// Reverses [`run_first`].
pub fn run_as_others() {
    // SAFETY: the kernel only reads the parameter.
    unsafe {
        let parameter = libc::sched_param { sched_priority: 0 };
        libc::sched_setscheduler(0, libc::SCHED_OTHER, &parameter);
    }
}

/// Raises the limit on open files as far as the system allows.
pub fn allow_many_connections() {
    // SAFETY: both calls get a valid structure.
    unsafe {
        let mut limit: libc::rlimit = mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// The processor time of this thread.
pub fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The number of bytes that this process has allocated and not freed.
pub fn allocated() -> usize {
    // SAFETY: a call without arguments.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// The machine that was measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// How many cores may be used.
    pub cores: usize,
    /// The kernel's name and version.
    pub kernel: String,
    /// Memory in MB.
    pub memory_mb: u64,
    /// Load average over a minute at the start of the run.
    pub load_before: f64,
    /// The commit of the working tree.
    pub commit: String,
    /// When the run began (UTC).
    pub started: String,
}

impl Machine {
    /// The current state of this machine.
    pub fn look() -> Self {
        Self {
            processor: line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
            cores: cores().len(),
            kernel: output("uname", &["-sr"]),
            memory_mb: line_of("/proc/meminfo", "MemTotal")
                .and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
                .map_or(0, |kilobytes| kilobytes / 1024),
            load_before: load(),
            commit: output("git", &["describe", "--always", "--dirty"]),
            started: output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
        }
    }
}

/// Load average over the last minute.
pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

fn line_of(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(|_| "unknown".into(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
