//! A timer that wakes a poll with microsecond resolution. The timeouts of epoll are in milliseconds.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;
use std::{io, mem, ptr};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

/// A timer, which is set again for each wait.
pub struct Alarm(OwnedFd);

impl Alarm {
    /// A timer that is an event with this token.
    pub fn new(registry: &Registry, token: Token) -> io::Result<Self> {
        // SAFETY: a call with two numbers. Nothing else owns the returned descriptor.
        let alarm = unsafe {
            let fd = libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Self(OwnedFd::from_raw_fd(fd))
        };
        registry.register(&mut SourceFd(&alarm.0.as_raw_fd()), token, Interest::READABLE)?;
        Ok(alarm)
    }

    /// Fires once, after this time. Replaces the earlier setting.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        // A timer that is set to zero never fires.
        let after = after.max(Duration::from_nanos(1));
        // SAFETY: zero is a valid value of the structure, and the kernel only reads it.
        let outcome = unsafe {
            let mut setting: libc::itimerspec = mem::zeroed();
            setting.it_value.tv_sec = after.as_secs() as libc::time_t;
            setting.it_value.tv_nsec = after.subsec_nanos().into();
            libc::timerfd_settime(self.0.as_raw_fd(), 0, &setting, ptr::null_mut())
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Acknowledges that it fired.
    pub fn rang(&self) {
        let mut count = 0_u64;
        // SAFETY: the kernel writes at most eight bytes. There may be nothing to read.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), mem::size_of::<u64>()) };
    }
}
