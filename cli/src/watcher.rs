//! A process that ends the command's whole group when this one is gone, however it went: nothing of it works on without the
//! lock. The death signal of Linux reaches only the command itself, and not what that has started.
//!
//! It is forked before the command, and waits at a pipe that only this process holds open. The command, before it begins, tells
//! it through that pipe which group is its own, and the watcher joins it: so the number of the group is not given to another
//! one while somebody may be sent a signal by it.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What others see in place of the program's name: whoever kills all that are called `holdfast` has not killed this one.
#[cfg(target_os = "linux")]
const NAME: &std::ffi::CStr = c"lock-watcher";
/// Where files can't be closed all at once, as many are.
const FILES: libc::c_int = 65_536;

/// A running watcher. It ends the group when this is dropped, or this process ends.
pub struct Watcher {
    pid: libc::pid_t,
    pipe: OwnedFd,
}

impl Watcher {
    /// Starts it.
    pub fn start() -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: a place for two descriptors.
        if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: they are new and nobody else's.
        let [here, pipe] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        for end in [&here, &pipe] {
            // SAFETY: plain call. Nobody forks meanwhile: there is one thread that does.
            unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        // It hears no signal, not even those that come before it is itself: the handlers are this process's.
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: places for two sets; the child makes async-signal-safe calls only.
        let pid = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            let pid = libc::fork();
            if pid == 0 {
                watch(here.as_raw_fd());
            }
            let failed = io::Error::last_os_error();
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
            if pid < 0 {
                return Err(failed);
            }
            pid
        };
        Ok(Self { pid, pipe })
    }

    /// Where the command tells its group.
    pub fn pipe(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// What is left of the group may live on.
    pub fn end(&self) {
        // SAFETY: plain calls; it has not been waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// Tells the watcher at the other end that the process that calls this leads the group. Async-signal-safe.
pub fn lead(pipe: RawFd) {
    // SAFETY: plain calls, with bytes that live. A pipe takes so few at once.
    unsafe {
        let group = libc::getpid().to_ne_bytes();
        libc::write(pipe, group.as_ptr().cast(), group.len());
    }
}

/// The watcher. Nothing but system calls: other threads of the process that it was forked from may have held locks.
fn watch(pipe: RawFd) -> ! {
    // SAFETY: plain system calls, with places for what they read.
    unsafe {
        // Whoever waits for the end of what this process writes, or of its connections, does not wait for this one.
        libc::dup2(pipe, 0);
        close_from(1);
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        let mut group = [0; size_of::<libc::pid_t>()];
        if read(&mut group) == group.len() && libc::setpgid(0, libc::pid_t::from_ne_bytes(group)) == 0 {
            while read(&mut group) > 0 {}
            // Itself as well.
            libc::kill(0, libc::SIGKILL);
        }
        libc::_exit(0)
    }
}

/// How much was read; 0 at the end.
fn read(place: &mut [u8]) -> usize {
    loop {
        // SAFETY: a place of that length.
        let length = unsafe { libc::read(0, place.as_mut_ptr().cast(), place.len()) };
        match usize::try_from(length) {
            Ok(length) => return length,
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return 0,
        }
    }
}

/// Closes this descriptor and all behind it.
fn close_from(first: libc::c_int) {
    // SAFETY: plain calls; nothing in this process uses them any more.
    unsafe {
        #[cfg(target_os = "linux")]
        if libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) == 0 {
            return;
        }
        for descriptor in first..FILES {
            libc::close(descriptor);
        }
    }
}
