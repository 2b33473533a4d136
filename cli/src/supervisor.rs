//! The supervisor: a process between `holdfast run` and its command, started as `holdfast supervise`. It is the command's parent,
//! reports stops and the end of the command over a socket, and ends the command when that socket is closed, even if `holdfast run`
//! was killed.
//!
//! It leads the command's process group, so that the group's number is not reused while it may be signalled. Its signal handlers do
//! nothing, so a signal to the group ends the command only; SIGKILL ends both.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_current_process_group, kill_process, set_child_subreaper, wait,
};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{self, SignalKind};

use crate::failure::Failure;
use crate::report::print_message;
use crate::signals::{is_ignored, stops_at_terminal};

/// The name that `ps` shows: killing all processes named `holdfast` does not kill this one.
const NAME: &str = "lock-watcher";
/// The signals that end or stop a process and can be handled.
const HANDLED: [Signal; 17] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::TERM,
    Signal::TSTP,
    Signal::TTIN,
    Signal::TTOU,
    Signal::XCPU,
    Signal::XFSZ,
    Signal::VTALARM,
    Signal::PROF,
    Signal::IO,
    Signal::ABORT,
    Signal::TRAP,
];
/// Pause between two attempts to end processes, and the number of attempts. Processes of other users cannot be ended.
const PAUSE: Duration = Duration::from_millis(2);
const ATTEMPTS: u32 = 2_500;

/// A message from the supervisor: five bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Signals to its group do not end or stop it any more.
    Ready,
    /// The command runs.
    Started,
    /// The command could not be started; the system's error number.
    NotStarted(i32),
    /// A signal stopped the command.
    Stopped(i32),
    /// The command ended, with this wait status.
    Ended(i32),
}

/// Its length in bytes.
pub const MESSAGE: usize = 5;

impl Message {
    fn bytes(self) -> [u8; MESSAGE] {
        let (kind, value) = match self {
            Self::Ready => (b'r', 0),
            Self::Started => (b's', 0),
            Self::NotStarted(error) => (b'n', error),
            Self::Stopped(signal) => (b't', signal),
            Self::Ended(status) => (b'e', status),
        };
        let [a, b, c, d] = value.to_ne_bytes();
        [kind, a, b, c, d]
    }

    /// Parses a message.
    pub fn read([kind, a, b, c, d]: [u8; MESSAGE]) -> io::Result<Self> {
        let value = i32::from_ne_bytes([a, b, c, d]);
        match kind {
            b'r' => Ok(Self::Ready),
            b's' => Ok(Self::Started),
            b'n' => Ok(Self::NotStarted(value)),
            b't' => Ok(Self::Stopped(value)),
            b'e' => Ok(Self::Ended(value)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Sends the command's standard input to the supervisor, which then starts the command.
pub fn send_input(socket: &UnixStream, input: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let input = [input];
    control.push(SendAncillaryMessage::ScmRights(&input));
    sendmsg(socket, &[IoSlice::new(b"i")], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Waits for the input; `None` if `holdfast run` has ended.
fn receive_input(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

/// Runs the command as `holdfast run` requests it over standard input, which is the socket. `all`: ends all processes that the command
/// has started, not only its process group.
pub fn supervise(command: &[OsString], all: bool) -> Result<u8, Failure> {
    let failed = |error: io::Error| Failure::here(&error);
    let _ = fs::write("/proc/self/comm", NAME);
    stops_at_terminal(true);
    let _handlers = handle_signals().map_err(failed)?;
    if all {
        set_child_subreaper(Some(getpid())).map_err(|error| failed(error.into()))?;
    }
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    let mut reports = socket.try_clone().map_err(failed)?;
    // If the socket is closed, the other thread ends all.
    let mut report = move |message: Message| drop(reports.write_all(&message.bytes()));
    report(Message::Ready);
    let Some(input) = receive_input(&socket).map_err(failed)? else { return Ok(0) };

    let group = all.then(Cgroup::enter).flatten();
    let Some((program, arguments)) = command.split_first() else { return Ok(0) };
    let started = Command::new(program).args(arguments).stdin(input).spawn();
    if let Some(group) = &group {
        group.leave();
    }
    let child = match started {
        Ok(child) => Pid::from_child(&child),
        Err(error) => {
            report(Message::NotStarted(error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error())));
            group.iter().for_each(Cgroup::remove);
            return Ok(0);
        }
    };
    report(Message::Started);
    thread::spawn(move || end_with(socket, all, group.as_ref()));
    loop {
        match wait(WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            // The process that continues the command may not know that `holdfast run` has stopped with it.
            Ok(Some((pid, status))) if pid == child && status.continued() => {
                let _ = getppid().map(|parent| kill_process(parent, Signal::CONT));
            }
            Ok(Some((pid, status))) if pid == child => match status.stopping_signal() {
                Some(signal) => report(Message::Stopped(signal)),
                None => {
                    report(Message::Ended(status.as_raw()));
                    if !all {
                        return Ok(0);
                    }
                }
            },
            // An orphaned process of the command.
            Ok(_) | Err(Errno::INTR) => {}
            // All have ended. The other thread ends this process.
            Err(_) => loop {
                thread::park();
            },
        }
    }
}

/// Installs handlers that do nothing. Unlike a signal mask or ignored signals, handlers are not inherited by the command. Signals that
/// are ignored already stay ignored, also by the command.
fn handle_signals() -> io::Result<(Runtime, Vec<unix::Signal>)> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let handlers = {
        let _context = runtime.enter();
        // If SIGCHLD were ignored, the kernel would not report the end of the command.
        let handled = HANDLED.into_iter().filter(|signal| !is_ignored(*signal)).chain([Signal::CHILD]);
        handled.map(|signal| unix::signal(SignalKind::from_raw(signal.as_raw()))).collect::<Result<_, _>>()?
    };
    Ok((runtime, handlers))
}

/// Waits until the socket is closed, then ends the command, and this process.
fn end_with(mut socket: UnixStream, all: bool, group: Option<&Cgroup>) {
    let mut byte = [0];
    loop {
        match socket.read(&mut byte) {
            Ok(1) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    if all {
        end_descendants(group, &[]);
        std::process::exit(0);
    }
    let _ = kill_current_process_group(Signal::KILL);
}

/// Ends what a killed supervisor has left behind. This process became a subreaper before it started the supervisor, and had the
/// descendants `before` then.
pub fn end_all_of(supervisor: Pid, before: &[Pid]) {
    end_descendants(Cgroup::of(supervisor).as_ref(), before);
}

/// Ends all descendants of this process except `spared`. It is a subreaper: a process whose parent has ended becomes its child. So
/// without children it has no descendants.
fn end_descendants(group: Option<&Cgroup>, spared: &[Pid]) {
    let mut left = Vec::new();
    for _ in 0..ATTEMPTS {
        group.iter().for_each(|group| group.kill());
        left = descendants(getpid());
        left.retain(|pid| !spared.contains(pid));
        for pid in &left {
            let _ = kill_process(*pid, Signal::KILL);
        }
        if !has_children() || (left.is_empty() && !spared.is_empty()) {
            group.iter().for_each(|group| group.remove());
            return;
        }
        thread::sleep(PAUSE);
    }
    let left: Vec<_> = left.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
    print_message(format_args!("processes that could not be killed: {}", left.join(" ")));
}

/// Whether this process has children. Reaps those that have ended.
fn has_children() -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            other => return !matches!(other, Err(Errno::CHILD)),
        }
    }
}

/// A process, as `/proc` has it.
struct Process {
    pid: i32,
    /// One that has ended and was not reaped yet.
    is_zombie: bool,
    parent: i32,
    group: i32,
}

fn processes() -> impl Iterator<Item = Process> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name of a program may contain spaces and parentheses.
        let mut fields = stat.rsplit(')').next()?.split_whitespace();
        let is_zombie = fields.next()? == "Z";
        Some(Process { pid, is_zombie, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
    })
}

/// Whether any process but the supervisor is left in its group.
pub fn has_other_processes(supervisor: Pid) -> bool {
    let supervisor = supervisor.as_raw_nonzero().get();
    processes().any(|it| it.group == supervisor && it.pid != supervisor && !it.is_zombie)
}

/// All descendants of a process.
pub fn descendants(of: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for Process { pid, parent, .. } in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let (mut found, mut next) = (Vec::new(), vec![of.as_raw_nonzero().get()]);
    while let Some(pid) = next.pop() {
        let of_it = children.remove(&pid).unwrap_or_default();
        found.extend(of_it.iter().filter_map(|pid| Pid::from_raw(*pid)));
        next.extend(of_it);
    }
    found
}

/// A control group (cgroup v2) for the command. The kernel ends all of its processes in one step, other users' included.
struct Cgroup {
    parent: PathBuf,
    own: PathBuf,
}

impl Cgroup {
    /// Creates a group and moves this process into it. `None` without the right to, or if the kernel has no `cgroup.kill` (5.14).
    fn enter() -> Option<Self> {
        let group = Self::of(getpid())?;
        fs::create_dir(&group.own).ok()?;
        if group.own.join("cgroup.kill").exists() && move_to(&group.own).is_ok() {
            return Some(group);
        }
        let _ = fs::remove_dir(&group.own);
        None
    }

    /// The group of this supervisor.
    fn of(supervisor: Pid) -> Option<Self> {
        let parent = own_group()?;
        let own = parent.join(format!("holdfast-{}", supervisor.as_raw_nonzero()));
        Some(Self { parent, own })
    }

    /// Moves this process back. The command stays in the group.
    fn leave(&self) {
        let _ = move_to(&self.parent);
    }

    fn kill(&self) {
        let _ = fs::write(self.own.join("cgroup.kill"), "1");
    }

    /// Removes the group, which must be empty.
    fn remove(&self) {
        let _ = fs::remove_dir(&self.own);
    }
}

fn move_to(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), "0")
}

/// The folder of this process's control group.
fn own_group() -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    let mut fields = mount.split(' ').skip(3);
    let (root, target) = (fields.next()?, fields.next()?);
    let below = path.strip_prefix(root.trim_end_matches('/'))?;
    Some(Path::new(target).join(below.trim_start_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_parsed_as_written() {
        for message in
            [Message::Ready, Message::Started, Message::NotStarted(2), Message::Stopped(19), Message::Ended(-1)]
        {
            assert_eq!(Message::read(message.bytes()).unwrap(), message);
        }
        assert!(Message::read([b'?', 0, 0, 0, 0]).is_err());
    }
}
