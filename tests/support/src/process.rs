//! A server as a process of this machine.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fs, thread};

use crate::launch::{Launch, Running};

/// A cluster node's bus port is its port plus this offset.
const BUS_OFFSET: u16 = 10_000;

pub(crate) struct Process {
    program: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    /// Where this server's part of the log begins: a given directory may contain the log of another one.
    log_start: u64,
    port: u16,
    child: Mutex<Child>,
}

impl Process {
    /// Starts the server. It may not accept connections yet, or may have ended already.
    pub(crate) fn start(launch: &Launch) -> Self {
        let port = free_port();
        let log = launch.dir.join("server.log");
        let arguments = arguments(launch, port);
        let log_start = fs::metadata(&log).map_or(0, |file| file.len());
        let child = spawn(&launch.program, &arguments, &log);
        Self { program: launch.program.clone(), arguments, log, log_start, port, child: Mutex::new(child) }
    }
}

impl Process {
    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running for Process {
    fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    fn pid(&self) -> u32 {
        self.child().id()
    }

    fn signal(&self, signal: i32) {
        let mut child = self.child();
        if !has_ended(&mut child) {
            // SAFETY: a call with two numbers. The id is still the child's: no thread has waited for it, because `child` is locked.
            let result = unsafe { libc::kill(child.id() as libc::pid_t, signal) };
            assert_eq!(result, 0, "signal {signal}: {}", io::Error::last_os_error());
        }
    }

    fn ended(&self) -> bool {
        has_ended(&mut self.child())
    }

    fn start_again(&self) {
        *self.child() = spawn(&self.program, &self.arguments, &self.log);
    }

    fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let own = bytes.get(self.log_start as usize..).unwrap_or_default();
        String::from_utf8_lossy(own).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn has_ended(child: &mut Child) -> bool {
    child.try_wait().expect("a child can be waited for").is_some()
}

fn arguments(launch: &Launch, port: u16) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = launch.config_file.iter().map(|path| path.into()).collect();
    if launch.sentinel {
        arguments.push("--sentinel".into());
    }
    let mut add = |name: &str, value: &str| arguments.extend([format!("--{name}").into(), value.into()]);
    add("bind", "127.0.0.1");
    add("port", &port.to_string());
    add("enable-debug-command", "local");
    add("enable-module-command", "local");
    for (name, value) in &launch.settings {
        add(name, value);
    }
    arguments.extend(["--dir".into(), launch.dir.clone().into()]);
    if let Some(module) = &launch.module {
        arguments.extend(["--loadmodule".into(), module.path.clone().into()]);
        arguments.extend(module.arguments.iter().map(OsString::from));
    }
    arguments
}

/// A port that the system reports as free, with a cluster bus port above it. If another process takes it first, the server
/// can't bind, and the caller tries another port.
fn free_port() -> u16 {
    let taken = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| Ok(listener.local_addr()?.port()));
    std::iter::repeat_with(|| taken().expect("the system has a free port"))
        .take(1000)
        .find(|port| *port < u16::MAX - BUS_OFFSET)
        .expect("the system returns ports below 55,535")
}

type Order = (Command, Sender<io::Result<Child>>);

/// Starts a server from a thread that lasts as long as the process. The parent-death signal, which ends the servers of a
/// killed test run, is sent when the thread that started them ends, and a test's thread may end before its server.
fn spawn(program: &Path, arguments: &[OsString], log: &Path) -> Child {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, orders) = mpsc::channel::<Order>();
        thread::spawn(move || {
            for (mut command, reply) in orders {
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (sender, reply) = mpsc::channel();
    let order = (command(program, arguments, log), sender);
    spawner.lock().expect("the spawner runs").send(order).expect("the spawner runs");
    let child = reply.recv().expect("the spawner runs");
    child.unwrap_or_else(|error| panic!("can't start {}: {error}", program.display()))
}

fn command(program: &Path, arguments: &[OsString], log: &Path) -> Command {
    let open =
        || -> File { OpenOptions::new().create(true).append(true).open(log).expect("the server's log can be written") };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(open()).stderr(open());
    let die_with_parent = || {
        // SAFETY: a system call that is allowed between fork and exec.
        match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes one async-signal-safe call and allocates nothing.
    unsafe { command.pre_exec(die_with_parent) };
    command
}
