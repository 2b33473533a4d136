//! The processor time of another process.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// A clock that runs while the process runs, on any core, and stops while it waits for one. It separates the server's work
/// from the machine's load.
#[derive(Clone, Copy, Debug)]
pub struct ProcessorClock(libc::clockid_t);

impl ProcessorClock {
    /// The clock of the process `pid`, with all of its threads.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut clock = MaybeUninit::uninit();
        // SAFETY: the call writes a clock id to the given place, which has room for one.
        match unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, clock.as_mut_ptr()) } {
            // SAFETY: the call succeeded, so it has written the id.
            0 => Ok(Self(unsafe { clock.assume_init() })),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// The processor time that the process has used, or `None` if it has ended.
    pub fn now(self) -> Option<Duration> {
        let mut time = MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: the call writes a time to the given place, which has room for one.
        match unsafe { libc::clock_gettime(self.0, time.as_mut_ptr()) } {
            0 => {
                // SAFETY: the call succeeded, so it has written the time.
                let time = unsafe { time.assume_init() };
                Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
            }
            _ => None,
        }
    }
}

/// Keeps the calling thread on its current processor. Data that it sends within this machine then arrives in order, also
/// over different connections.
///
/// # Panics
///
/// If the system refuses.
pub fn stay_on_this_processor() {
    // SAFETY: a set of processors is plain data, for which zero is valid. Both calls get a set that outlives them, and its
    // size. The calling thread is process 0. The argument of `CPU_SET` is a processor's number.
    let result = unsafe {
        let mut here: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(usize::try_from(libc::sched_getcpu()).expect("the number of a processor"), &mut here);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const here)
    };
    assert_eq!(result, 0, "sched_setaffinity: {}", std::io::Error::last_os_error());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::until;
    use std::process::{Command, Stdio};

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn processor_clock_stops_with_its_process() {
        let mut busy = Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().unwrap();
        let clock = ProcessorClock::of(busy.id()).unwrap();
        until(SOON, "the clock runs", || clock.now().unwrap() > Duration::from_millis(50));
        let pid = libc::pid_t::try_from(busy.id()).unwrap();
        // SAFETY: takes two numbers, and touches no memory of this process.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
        let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        until(SOON, "the process is stopped", || stat().rsplit(')').next().unwrap().starts_with(" T"));
        let stopped = clock.now().unwrap();
        assert_eq!(clock.now(), Some(stopped));
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert_eq!(clock.now(), None);
    }
}
