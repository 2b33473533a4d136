//! A timer that wakes a poll, to the microsecond: the timeouts of epoll count in milliseconds.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;
use std::{io, mem, ptr};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

/// One alarm, which is set anew for each wait.
pub struct Alarm(OwnedFd);

impl Alarm {
    /// An alarm that is an event of this token.
    pub fn new(registry: &Registry, token: Token) -> io::Result<Self> {
        // SAFETY: a plain call; the descriptor that it returns is nobody else's.
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

    /// Rings once, after this time; what was set before rings no more.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        // A clock that is set to nothing never rings.
        let after = after.max(Duration::from_nanos(1));
        // SAFETY: all zeros is a value of the structure, and the kernel only reads it.
        let outcome = unsafe {
            let mut setting: libc::itimerspec = mem::zeroed();
            setting.it_value.tv_sec = after.as_secs() as libc::time_t;
            setting.it_value.tv_nsec = after.subsec_nanos().into();
            libc::timerfd_settime(self.0.as_raw_fd(), 0, &setting, ptr::null_mut())
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Takes note that it rang.
    pub fn rang(&self) {
        let mut count = 0_u64;
        // SAFETY: the kernel writes these eight bytes at most. That there is nothing to read is as good.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), mem::size_of::<u64>()) };
    }
}
