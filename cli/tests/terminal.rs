//! Programs in a pseudo-terminal, and a screen that interprets their output.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use support::{Server, eventually, until};

use crate::common::{SOON, contended, done, holdfast, is_free, is_running, kill, reset_signals, say, stat, waiters};

/// A program in a terminal of 100 columns and 30 rows.
pub struct Terminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<vt100::Parser>>,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts the program.
    pub fn start(command: &mut Command) -> Self {
        let (rows, columns) = (NonZero::new(30).expect("more than 0"), NonZero::new(100).expect("more than 0"));
        let mut size = libc::winsize { ws_row: rows.get(), ws_col: columns.get(), ws_xpixel: 0, ws_ypixel: 0 };
        let (mut here, mut there) = (0, 0);
        // SAFETY: places for two descriptors, and a size that outlives the call.
        let made =
            unsafe { libc::openpty(&mut here, &mut there, std::ptr::null_mut(), std::ptr::null(), &raw mut size) };
        assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptors are new, and nothing else owns them.
        let (here, there) = unsafe { (File::from_raw_fd(here), OwnedFd::from_raw_fd(there)) };
        let end = || Stdio::from(there.try_clone().expect("a descriptor can be doubled"));
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm-256color");
        reset_signals(command);
        // SAFETY: two async-signal-safe calls: a new session with this terminal.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            })
        };
        let child = command.spawn().expect("it starts");
        // The command owns its descriptors, which keep the terminal open.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        drop(there);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut output, shown) = (here.try_clone().expect("a descriptor can be doubled"), screen.clone());
        let sent = Arc::new(Mutex::new(Vec::new()));
        let all = sent.clone();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                all.lock().expect("no thread panicked with the lock").extend(&buffer[..length]);
                shown.lock().expect("no thread panicked with the lock").process(&buffer[..length]);
            }
        });
        Self { child, keyboard: here, screen, sent }
    }

    /// Starts bash with this script. Its commands find the server in the environment.
    pub fn of_shell(server: &Server, script: &str) -> Self {
        let mut shell = Command::new("bash");
        Self::start(shell.args(["-c", script]).env("REDIS_URL", format!("redis://{}", server.addr())))
    }

    /// The text on the screen.
    pub fn text(&self) -> String {
        self.screen.lock().expect("no thread panicked with the lock").screen().contents()
    }

    /// All output so far.
    pub fn sent(&self) -> String {
        String::from_utf8_lossy(&self.sent.lock().expect("no thread panicked with the lock")).into_owned()
    }

    /// The text of the inverted rows.
    pub fn inverted(&self) -> String {
        let parser = self.screen.lock().expect("no thread panicked with the lock");
        let screen = parser.screen();
        let (rows, columns) = screen.size();
        let cells = (0..rows.get()).flat_map(|row| (0..columns.get()).map(move |column| (row, column)));
        let cells = cells.filter_map(|(row, column)| screen.cell(row, column)).filter(|cell| cell.inverse());
        cells.map(|cell| if cell.has_contents() { cell.contents().to_owned() } else { " ".to_owned() }).collect()
    }

    /// Types these keys.
    pub fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// Waits until this text is on the screen.
    #[track_caller]
    pub fn shows(&self, text: &str) {
        assert!(eventually(SOON, || self.text().contains(text)), "{text:?} is not shown:\n{}", self.text());
    }

    /// Waits for its end, and returns the exit code.
    #[track_caller]
    pub fn done(mut self) -> Option<i32> {
        until(SOON, "it ends", || self.child.try_wait().expect("a child can be waited for").is_some());
        self.child.wait().expect("it has ended").code()
    }
}

impl Drop for Terminal {
    /// Ends all processes of the session, including process groups, stopped processes, and those that ignore the end of the terminal.
    fn drop(&mut self) {
        println!("the screen:\n{}", self.text());
        let _ = self.child.kill();
        let _ = self.child.wait();
        let session = self.child.id();
        let ended = eventually(SOON, || {
            let left = members(session);
            for pid in &left {
                kill(*pid, libc::SIGKILL);
            }
            left.is_empty()
        });
        assert!(ended || thread::panicking(), "processes of session {session} still run");
    }
}

/// The processes of a session that have not ended.
fn members(session: u32) -> Vec<libc::pid_t> {
    let processes =
        std::fs::read_dir("/proc").expect("this is Linux").filter_map(|it| it.ok()?.file_name().into_string().ok());
    let pids = processes.filter_map(|name| name.parse().ok());
    pids.filter(|pid| is_running(*pid) && stat(*pid).get(3) == Some(&session.to_string())).collect()
}

/// The process id that a command has printed: `process 12 begun`.
#[track_caller]
fn printed_pid(terminal: &Terminal) -> libc::pid_t {
    let text = terminal.text();
    let number = text.split("process ").nth(1).and_then(|rest| rest.split(' ').next()).expect("its process id");
    number.parse().expect("a number")
}

#[test]
fn closed_terminal_ends_all_processes() {
    let script = "set -m; sh -c 'trap \"\" HUP; echo process $$ begun; while :; do kill -STOP $$; done'; echo stopped; read line";
    let terminal = Terminal::start(Command::new("bash").args(["-c", script]));
    terminal.shows("stopped");
    let pid = printed_pid(&terminal);
    assert!(is_running(pid));
    drop(terminal);
    assert!(!is_running(pid));
}

#[test]
fn command_has_the_terminal() {
    let server = Server::start();
    let script =
        "echo ready; read line; echo got $line; trap 'echo interrupted; exit 3' INT; while :; do sleep 0.01; done";
    let mut terminal = Terminal::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    terminal.shows("ready");
    terminal.keys("words\n");
    terminal.shows("got words");
    terminal.keys("\x03");
    terminal.shows("interrupted");
    assert_eq!(terminal.done(), Some(3));
    assert!(is_free(&server, "a"));
}

#[test]
fn run_stops_and_continues_with_shell_job_control() {
    let server = Server::start();
    // A shell with job control runs it, notices the stop, and continues it.
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!(
        "set -m; {program} run a -- sh -c 'echo begun; read line; echo got $line'; echo stopped; fg; echo ended $?"
    );
    let mut terminal = Terminal::of_shell(&server, &script);
    terminal.shows("begun");
    terminal.keys("\x1a");
    terminal.shows("stopped");
    terminal.keys("words\n");
    terminal.shows("got words");
    terminal.shows("ended 0");
    assert_eq!(terminal.done(), Some(0));
}

/// The command's input is a pipe, and it asks the user at the terminal, for a password, say.
#[test]
fn command_with_redirected_input_may_read_the_terminal() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let asks = "echo ready; read line < /dev/tty; echo got $line; cat";
    for script in [
        format!("echo piped | {program} run a -- sh -c '{asks}'; read line; echo and $line"),
        format!("{program} run a -- sh -c '{asks}' < <(echo piped) 2>&1 | cat; read line; echo and $line"),
    ] {
        let mut terminal = Terminal::of_shell(&server, &script);
        terminal.shows("ready");
        terminal.keys("words\n");
        terminal.shows("got words");
        terminal.shows("piped");
        // The next process is in the foreground again.
        terminal.keys("others\n");
        terminal.shows("and others");
        assert_eq!(terminal.done(), Some(0));
    }
}

#[test]
fn command_without_terminal_use_leaves_it_to_others() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!("true | {program} run a -- sleep 1000 | (echo ready; read line < /dev/tty; echo got $line)");
    let mut terminal = Terminal::of_shell(&server, &script);
    terminal.shows("ready");
    until(SOON, "the command runs", || !is_free(&server, "a"));
    terminal.keys("words\n");
    terminal.shows("got words");
    // Ctrl-C is sent to all of them.
    terminal.keys("\x03");
    until(SOON, "the command has ended", || is_free(&server, "a"));
}

#[test]
fn reader_of_output_may_read_the_terminal() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let reader = "read line; echo ready > /dev/tty; read line < /dev/tty; echo got $line > /dev/tty";
    let script = format!("{program} run a -- sh -c 'echo begun; exec sleep 1000' | ({reader})");
    let mut terminal = Terminal::of_shell(&server, &script);
    terminal.shows("ready");
    terminal.keys("words\n");
    terminal.shows("got words");
}

/// As with `ssh -t host holdfast run …`.
#[test]
fn command_goes_on_after_ctrl_z_where_no_shell_could_continue_it() {
    let server = Server::start();
    // With `exec`, as below.
    let script = "echo begun; exec sleep 1000";
    let mut terminal = Terminal::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    terminal.shows("begun");
    terminal.keys("\x1a");
    terminal.keys("\x03");
    assert_eq!(terminal.done(), Some(128 + libc::SIGINT));
    assert!(is_free(&server, "a"));
}

/// As after `docker exec`: its session and group are those of a process outside.
#[test]
fn command_runs_in_a_container_entered_from_outside() {
    let enter = ["--user", "--map-root-user", "--pid", "--fork"];
    let may_enter = Command::new("unshare").args(enter).arg("true").status().expect("unshare runs").success();
    if !may_enter {
        println!("this machine allows no namespaces");
        return;
    }
    let server = Server::start();
    for program in [vec![], vec!["sh", "-c", r#""$@"; exit $?"#, "sh"]] {
        // No shell could continue it.
        let mut command = Command::new("unshare");
        command.args(enter).args(program).arg(env!("CARGO_BIN_EXE_holdfast"));
        command.args(["run", "a", "--", "sh", "-c", "kill -TSTP $$; exit 3"]);
        let terminal = Terminal::start(command.env("REDIS_URL", format!("redis://{}", server.addr())));
        assert_eq!(terminal.done(), Some(3));
    }
}

#[test]
fn command_with_redirected_input_can_be_suspended() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    // Without a `fork`, as below.
    let command = "echo process $$ begun; exec sleep 1000";
    let script = format!("set -m; true | {program} run a -- sh -c '{command}'; echo stopped; read line");
    let mut terminal = Terminal::of_shell(&server, &script);
    terminal.shows("begun");
    let pid = printed_pid(&terminal);
    terminal.keys("\x1a");
    terminal.shows("stopped");
    assert_eq!(stat(pid)[0], "T");
}

#[test]
fn script_stops_with_its_command() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!("{program} run a -- sh -c \"echo begun; read line; echo got \\$line\"; echo over");
    let mut terminal = Terminal::of_shell(&server, &format!("set -m; sh -c '{script}'; echo stopped; read line; fg"));
    terminal.shows("begun");
    terminal.keys("\x1a");
    terminal.shows("stopped");
    terminal.keys("\nwords\n");
    terminal.shows("got words");
    terminal.shows("over");
    assert_eq!(terminal.done(), Some(0));
}

/// A stopped process can't know whether it holds the lock, like one that hangs.
#[test]
fn command_suspended_beyond_its_lease_is_ended_when_resumed() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    // With `exec`: if `sh` is dash, it starts other programs with `vfork`. It then waits in the kernel, where it can't be stopped, for a
    // child that Ctrl-Z has stopped already.
    let run = format!("{program} run --lease 3s a -- sh -c 'echo begun; exec sleep 1000'");
    let script = format!("set -m; {run}; echo stopped; read line; fg; echo ended $?");
    let mut terminal = Terminal::of_shell(&server, &script);
    terminal.shows("begun");
    terminal.keys("\x1a");
    terminal.shows("stopped");
    until(SOON, "the lease has expired", || is_free(&server, "a"));
    terminal.keys("\n");
    terminal.shows("ended 75");
    assert_eq!(terminal.done(), Some(0));
}

#[test]
fn terminal_shows_that_run_waits() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a other");
    let mut terminal = Terminal::start(holdfast(&server).args(["run", "a", "--", "echo", "ran"]));
    terminal.shows("waiting for \"a\"");
    terminal.keys("\x03");
    assert_eq!(terminal.done(), Some(130));
}

#[test]
fn terminal_shows_colours_and_progress() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a alice");
    let terminal = Terminal::start(holdfast(&server).arg("--help"));
    terminal.shows("Usage");
    assert!(terminal.sent().contains('\x1b'), "{}", terminal.sent());
    assert_eq!(terminal.done(), Some(0));
    for arguments in [&["ls"][..], &["ls", "--json"]] {
        let terminal = Terminal::start(holdfast(&server).args(arguments));
        terminal.shows("alice");
        assert!(terminal.sent().contains("1 of 1 keys"), "{}", terminal.sent());
        // It is cleared when the list is printed.
        assert!(!terminal.text().contains("1 of 1 keys"), "{}", terminal.text());
        assert_eq!(terminal.done(), Some(0));
    }
}

#[test]
fn terminal_asks_before_force() {
    let server = Server::start();
    let _waiting = contended(&server);
    for (answer, code) in [("n\n", 1), ("y\n", 0)] {
        let mut terminal = Terminal::start(holdfast(&server).args(["force", "a"]));
        for said in ["alice", "WAITER", "bob", "Force this lock free?"] {
            terminal.shows(said);
        }
        terminal.keys(answer);
        assert_eq!(terminal.done(), Some(code));
        let holders = done(holdfast(&server).args(["show", "--json", "a"])).out;
        assert!(holders.contains(if code == 0 { "\"owner\":\"bob\"" } else { "\"owner\":\"alice\"" }), "{holders}");
        assert_eq!(waiters(&server, "a"), usize::from(code == 1));
    }
}
