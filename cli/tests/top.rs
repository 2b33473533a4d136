//! `holdfast top` at a terminal.

use std::path::PathBuf;
use std::process::Command;

use support::{Server, eventually, until};

use crate::common::{SOON, contended, done, holdfast, say, waiters};
use crate::terminal::Terminal;

#[test]
fn top_shows_contended_locks_and_their_details() {
    let server = Server::start();
    let mut waiting = Vec::new();
    for (key, count) in [("busy", 3), ("calm", 1), ("also", 2)] {
        let _: i64 = say(&server, &format!("LOCK.ACQUIRE {key} holder-of-{key} LEASE 600000"));
        for number in 0..count {
            let mut raw = server.raw();
            let owner = format!("waiter-{number}-of-{key}");
            raw.send(&[b"LOCK.ACQUIRE", key.as_bytes(), owner.as_bytes(), b"WAIT", b"0"]).unwrap();
            waiting.push(raw);
        }
        until(SOON, "all requests wait", || waiters(&server, key) == count);
    }
    let mut terminal = Terminal::start(holdfast(&server).args(["top", "--interval", "100ms"]));
    terminal.shows("3 contended locks, 6 waiters");
    let order = |terminal: &Terminal| {
        let text = terminal.text();
        let mut keys: Vec<_> =
            ["busy ", "calm ", "also "].into_iter().filter_map(|key| Some((text.find(key)?, key))).collect();
        keys.sort();
        keys.into_iter().map(|(_, key)| key.trim()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(order(&terminal), "busy also calm");
    assert!(terminal.text().contains("holder-of-busy"));
    assert!(terminal.inverted().contains("busy"), "{}", terminal.inverted());
    // Down and up, twice each: by letter and by arrow.
    for (key, chosen) in [("j", "also"), ("\x1b[B", "calm"), ("k", "also"), ("\x1b[A", "busy"), ("j", "also")] {
        terminal.keys(key);
        assert!(eventually(SOON, || terminal.inverted().contains(chosen)), "{key:?}: {}", terminal.inverted());
    }
    terminal.keys("\r");
    terminal.shows("waiter-1-of-also");
    terminal.shows("Esc back");
    assert!(!terminal.text().contains("busy"));
    terminal.keys("\x1b");
    terminal.shows("busy");
    terminal.keys("s");
    terminal.shows("OLDEST ▾");
    terminal.keys("s");
    terminal.shows("HELD ▾");
    terminal.keys("s");
    assert!(eventually(SOON, || order(&terminal) == "also busy calm"), "{}", terminal.text());
    // Live: a released lock leaves the table, and is granted to the next waiter.
    let _: i64 = say(&server, "LOCK.RELEASE calm holder-of-calm");
    terminal.shows("2 contended locks, 5 waiters");
    assert!(!terminal.text().contains("calm "));
    terminal.keys("q");
    assert_eq!(terminal.done(), Some(0));
}

#[test]
fn top_filters_by_key() {
    let server = Server::start();
    let mut waiting = Vec::new();
    for key in ["job:q1", "job:q2", "cart:1"] {
        let _: i64 = say(&server, &format!("LOCK.ACQUIRE {key} holder-of-{key} LEASE 600000"));
        let mut raw = server.raw();
        raw.send(&[b"LOCK.ACQUIRE", key.as_bytes(), b"waiter", b"WAIT", b"0"]).unwrap();
        waiting.push(raw);
        until(SOON, "the request waits", || waiters(&server, key) == 1);
    }
    let mut terminal = Terminal::start(holdfast(&server).args(["top", "--interval", "100ms", "--count", "1"]));
    terminal.shows("1 contended lock, 1 waiter,");
    // These letters are commands outside of the filter. The filter applies to all locks, not only to the first ones.
    terminal.keys("/job:q");
    terminal.shows("/job:q▏");
    terminal.shows("2 contended locks, 2 waiters");
    assert!(!terminal.text().contains("cart:1"), "{}", terminal.text());
    terminal.keys("\x7f2\x7fq2\r");
    terminal.shows("/job:q2  Esc all");
    terminal.shows("1 contended lock, 1 waiter,");
    terminal.keys("/cart\r");
    terminal.shows("/cart  Esc all");
    terminal.shows("holder-of-cart:1");
    terminal.keys("\x1b");
    terminal.shows("/ filter");
    terminal.keys("q");
    assert_eq!(terminal.done(), Some(0));
}

#[test]
fn top_prints_the_table_once_when_its_output_is_no_terminal() {
    let server = Server::start();
    let _waiting = contended(&server);
    let done = done(holdfast(&server).arg("top"));
    assert_eq!((done.code, done.err.as_str()), (Some(0), ""));
    let lines: Vec<Vec<&str>> = done.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["KEY", "WAITERS", "OLDEST", "HELD", "LEASE", "HOLDER"]);
    assert_eq!((lines[1][0], lines[1][1], lines[1][5], lines.len()), ("a", "1", "alice", 2), "{}", done.out);
    assert!(lines[1][3].ends_with('s'), "a time: {}", done.out);
    assert!(!done.out.contains('\x1b'));
}

#[test]
fn top_reports_lost_server_and_continues_when_it_returns() {
    let mut server = Server::start();
    let mut terminal = Terminal::start(holdfast(&server).args(["top", "--interval", "100ms"]));
    terminal.shows("0 contended locks");
    server.kill9();
    terminal.shows(&server.addr().to_string());
    server.restart();
    assert!(eventually(SOON, || !terminal.text().contains(&server.addr().to_string())), "{}", terminal.text());
    terminal.keys("\x03");
    assert_eq!(terminal.done(), Some(0));
}

/// A tmux that is started for the test, as a real terminal.
struct Tmux {
    socket: PathBuf,
}

impl Tmux {
    fn start(script: &str, server: &Server) -> Self {
        let socket = std::env::temp_dir().join(format!("holdfast-tmux-{}", std::process::id()));
        let tmux = Self { socket };
        let mut command = tmux.command(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", script]);
        let started = command.env("REDIS_URL", format!("redis://{}", server.addr())).status();
        assert!(started.expect("tmux is installed (make install)").success());
        tmux
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command.arg("-u").arg("-S").arg(&self.socket).args(arguments).env_remove("TMUX");
        command
    }

    fn says(&self, arguments: &[&str]) -> String {
        String::from_utf8(self.command(arguments).output().expect("tmux runs").stdout).expect("tmux prints UTF-8")
    }

    fn keys(&self, keys: &str) {
        self.says(&["send-keys", keys]);
    }

    #[track_caller]
    fn shows(&self, text: &str) {
        let screen = || self.says(&["capture-pane", "-p"]);
        assert!(eventually(SOON, || screen().contains(text)), "{text:?} is not shown:\n{}", screen());
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.says(&["kill-server"]);
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[test]
fn top_refreshes_in_place_and_takes_keys_in_tmux() {
    let server = Server::start();
    let _waiting = contended(&server);
    let program = env!("CARGO_BIN_EXE_holdfast");
    let tmux = Tmux::start(&format!("{program} top --interval 100ms; echo ended $?; read line"), &server);
    tmux.shows("1 contended lock, 1 waiter,");
    tmux.shows("WAITERS ▾");
    tmux.keys("s");
    tmux.shows("OLDEST ▾");
    tmux.keys("/");
    tmux.keys("z");
    tmux.shows("0 contended locks");
    tmux.keys("Escape");
    tmux.shows("1 contended lock, 1 waiter,");
    let mut other = server.raw();
    other.send(&[b"LOCK.ACQUIRE", b"a", b"another", b"WAIT", b"0"]).unwrap();
    tmux.shows("1 contended lock, 2 waiters,");
    tmux.shows("waits/s, longest hold");
    assert_eq!(tmux.says(&["display-message", "-p", "#{history_size}"]).trim(), "0", "nothing has scrolled");
    tmux.keys("q");
    tmux.shows("ended 0");
}

#[test]
fn top_without_a_keyboard_is_an_error() {
    let server = Server::start();
    let script = format!("setsid -w {} top < /dev/null; echo code $?", env!("CARGO_BIN_EXE_holdfast"));
    let terminal = Terminal::of_shell(&server, &script);
    terminal.shows("use --once");
    terminal.shows("code 69");
}
