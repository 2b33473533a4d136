//! Helpers of the tests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use support::{Server, eventually, until};

/// Timeout for everything that has no duration of its own.
pub const SOON: Duration = Duration::from_secs(20);

/// A command of the program, for this server.
pub fn holdfast(server: &Server) -> Command {
    holdfast_at(&format!("redis://{}", server.addr()))
}

/// A command of the program, for this address.
pub fn holdfast_at(url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.env("REDIS_URL", url).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    reset_signals(&mut command);
    command
}

/// Resets all signals to their defaults. If the tests run in the background of a script or under `nohup`, some are ignored, and the
/// program respects that.
pub fn reset_signals(command: &mut Command) {
    // SAFETY: async-signal-safe calls.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
}

/// Starts `metrics` with the address and options of this command on a free port. Returns its address.
#[track_caller]
pub fn metrics_at(command: &mut Command) -> (Running, String) {
    let options: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut metrics = Command::new(command.get_program());
    for (name, value) in command.get_envs() {
        metrics.env(name, value.unwrap_or_default());
    }
    metrics.args(["metrics", "--listen", "127.0.0.1:0"]).args(options).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut running = Running::start(&mut metrics);
    let line = running.error_line();
    let address = line.rsplit("http://").next().expect("an address").trim_end_matches("/metrics").to_owned();
    running.close_error_output();
    (running, address)
}

/// The page at this path.
#[track_caller]
pub fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// A lock `a` that alice holds and bob waits for, until this is dropped.
pub fn contended(server: &Server) -> support::Raw {
    let _: i64 = say(server, "LOCK.ACQUIRE a alice LEASE 60000");
    let mut waiting = server.raw();
    waiting.send(&[b"LOCK.ACQUIRE", b"a", b"bob", b"WAIT", b"0"]).unwrap();
    until(SOON, "bob waits", || waiters(server, "a") == 1);
    waiting
}

/// Runs a command to its end.
#[track_caller]
pub fn done(command: &mut Command) -> Done {
    Running::start(command).done()
}

/// The result of a process.
#[derive(Debug)]
pub struct Done {
    /// The exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

/// A running process. Dropping it kills it.
pub struct Running {
    child: Child,
}

impl Running {
    /// Starts it.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        Self { child: command.spawn().expect("it starts") }
    }

    /// Closes its standard error.
    pub fn close_error_output(&mut self) {
        drop(self.child.stderr.take());
    }

    /// Closes its standard input.
    pub fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // It has not been reaped, so its id is still its own.
        kill(self.child.id() as libc::pid_t, signal);
    }

    /// Reads a line of its standard output.
    #[track_caller]
    pub fn line(&mut self) -> String {
        line(self.child.stdout.as_mut().expect("it is a pipe"))
    }

    /// Reads a line of its standard error.
    #[track_caller]
    pub fn error_line(&mut self) -> String {
        line(self.child.stderr.as_mut().expect("it is a pipe"))
    }

    /// Waits for its end.
    #[track_caller]
    pub fn done(mut self) -> Done {
        until(SOON, "the process ends", || self.child.try_wait().expect("a child can be waited for").is_some());
        let status = self.child.wait().expect("it has ended");
        let stdout = self.child.stdout.take().map_or_else(Vec::new, rest);
        let stderr = self.child.stderr.take().map_or_else(Vec::new, rest);
        Done::from(Output { status, stdout, stderr })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rest of the output, until no process has the pipe open.
#[track_caller]
fn rest(mut pipe: impl Read + Send + 'static) -> Vec<u8> {
    let (sender, read) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        let _ = sender.send(bytes);
    });
    read.recv_timeout(SOON).expect("no process is left that has the pipe open")
}

/// One line, read byte by byte, so that later output stays in the pipe.
fn line(pipe: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while pipe.read(&mut byte).expect("a pipe can be read") == 1 && byte != *b"\n" {
        line.extend(byte);
    }
    String::from_utf8(line).expect("text")
}

/// Runs a command, given as words separated by spaces.
#[track_caller]
pub fn say<T: redis::FromRedisValue>(server: &Server, line: &str) -> T {
    let mut words = line.split(' ');
    let mut cmd = redis::cmd(words.next().expect("a command"));
    cmd.arg(words.collect::<Vec<_>>());
    cmd.query(&mut server.connect()).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// Whether the lock has no holders and no waiters.
pub fn is_free(server: &Server, key: &str) -> bool {
    say::<redis::Value>(server, &format!("LOCK.INFO {key}")) == redis::Value::Nil
}

/// The number of waiters.
pub fn waiters(server: &Server, key: &str) -> usize {
    say::<Vec<redis::Value>>(server, &format!("LOCK.WAITERS {key}")).len()
}

/// Sends a process a signal.
pub fn kill(pid: i32, signal: i32) {
    // SAFETY: takes two numbers, and touches no memory of this process.
    unsafe { libc::kill(pid, signal) };
}

/// The fields of `/proc/PID/stat` from the state on; empty if there is no such process.
pub fn stat(pid: i32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Whether the process runs.
pub fn is_running(pid: i32) -> bool {
    // A zombie has ended.
    stat(pid).first().is_some_and(|state| state != "Z")
}

/// Waits until the process has ended.
#[track_caller]
pub fn until_gone(pid: i32) {
    assert!(eventually(SOON, || !is_running(pid)), "process {pid} still runs");
}
