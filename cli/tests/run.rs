//! `holdfast run`.

use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::{Direction, Fate, NotBefore, Proxy, Server, Trio, until};

use crate::common::{
    Done, Running, SOON, done, holdfast, holdfast_at, is_free, is_running, kill, say, stat, until_gone, waiters,
};

#[test]
fn run_exits_with_code_of_command() {
    let server = Server::start();
    for (command, code) in [
        (&["true"][..], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "kill -9 $$"], 128 + 9),
        (&["sh", "-c", "kill -TERM $$"], 128 + 15),
        (&["/no/such/program"], 127),
        (&["/etc/passwd"], 126),
    ] {
        let done = done(holdfast(&server).args(["run", "a", "--"]).args(command));
        assert_eq!(done.code, Some(code), "{command:?}: {}", done.err);
        assert!(is_free(&server, "a"), "{command:?}");
        let told = !done.err.is_empty();
        assert_eq!(told, code == 126 || code == 127, "{command:?}: {}", done.err);
    }
}

#[test]
fn command_runs_with_lock_and_its_token() {
    let server = Server::start();
    let done = done(holdfast(&server).args(["run", "a", "--", "sh", "-c"]).arg(format!(
        "echo $HOLDFAST_KEY; echo $HOLDFAST_TOKEN; echo $HOLDFAST_OWNER; redis-cli -p {} HKEYS a",
        server.port()
    )));
    let lines: Vec<_> = done.out.lines().collect();
    assert_eq!(lines.first(), Some(&"a"), "{done:?}");
    assert!(lines[1].parse::<u64>().unwrap() > 0);
    assert!(lines[2].contains('@'));
    assert!(lines[3..].contains(&lines[2]), "the lock is held: {lines:?}");
    assert_eq!(done.err, "");
}

#[test]
fn owner_names_host_and_process() {
    let server = Server::start();
    for (variables, name) in [
        (&[("USER", "alice"), ("LOGNAME", "bob")][..], "alice@"),
        (&[("USER", ""), ("LOGNAME", "bob")], "bob@"),
        (&[("USER", "a##\nb")], "a???b@"),
        (&[], "uid"),
    ] {
        let mut command = holdfast(&server);
        command.env_remove("USER").env_remove("LOGNAME").envs(variables.iter().copied());
        let done = done(command.args(["run", "a", "--", "sh", "-c", "echo $HOLDFAST_OWNER"]));
        assert!(done.out.starts_with(name), "{name}: {done:?}");
    }
}

#[test]
fn arguments_and_input_are_passed_unchanged() {
    let server = Server::start();
    let done = done(holdfast(&server).args(["run", "a", "--", "printf", "%s|", "$HOME", "a b", "--wait", ""]));
    assert_eq!(done.out, "$HOME|a b|--wait||");
    let mut child = holdfast(&server).args(["run", "a", "--", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"through");
}

#[test]
fn key_may_have_any_bytes() {
    let server = Server::start();
    let bytes = |key: &[u8]| -> redis::Value { redis::cmd("LOCK.INFO").arg(key).query(&mut server.connect()).unwrap() };
    let [one, two] = [b"\xff".as_slice(), b"a\xfeb"].map(OsStr::from_bytes);
    let mut run =
        Running::start(holdfast(&server).arg("run").args([one, two]).args(["--", "cat"]).stdin(Stdio::piped()));
    until(SOON, "both are held", || bytes(b"\xff") != redis::Value::Nil && bytes(b"a\xfeb") != redis::Value::Nil);
    for arguments in [["show", "--json"], ["ls", "--json"]] {
        let found = done(holdfast(&server).args(arguments).arg(two));
        assert!(found.code == Some(0) && found.out.contains(r"a\\xfeb"), "{found:?}");
    }
    run.close_input();
    assert_eq!(run.done().code, Some(0));
    let named =
        done(holdfast(&server).arg("run").arg(one).args(["--", "printenv", "HOLDFAST_KEY"]).stdin(Stdio::null()));
    assert_eq!(named.code, Some(0));
    let _: i64 = redis::cmd("LOCK.ACQUIRE").arg(b"\xff").arg("alice").query(&mut server.connect()).unwrap();
    assert_eq!(done(holdfast(&server).args(["force", "--yes"]).arg(one)).code, Some(0));
    assert_eq!(bytes(b"\xff"), redis::Value::Nil);
}

#[test]
fn invalid_arguments_are_refused_without_a_server() {
    let nowhere = |arguments: &[&str]| done(holdfast_at("redis://127.0.0.1:1").args(arguments)).code;
    assert_eq!(nowhere(&["run", "--lease", "NaN", "a", "--", "true"]), Some(2));
    assert_eq!(nowhere(&["top", "--once", "--count", "0"]), Some(2));
    assert_eq!(nowhere(&["metrics", "--queues", "0"]), Some(2));
    assert_eq!(nowhere(&["show", "a", "--tls-cert", "a.pem"]), Some(64));
}

#[test]
fn run_asks_an_unresponsive_server_once_whatever_the_number_of_keys() {
    let server = Server::start();
    server.stop();
    let keys: Vec<_> = (0..20).map(|key| key.to_string()).collect();
    let mut run = holdfast(&server);
    run.env("HOLDFAST_OWNERS", "outer").args(["run", "--wait", "1s"]).args(keys).args(["--", "echo", "ran"]);
    let silent = done(&mut run);
    server.cont();
    assert_eq!((silent.code, silent.out.as_str()), (Some(69), ""), "{}", silent.err);
}

#[test]
fn command_does_not_run_when_lock_is_not_granted() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a other");
    for (arguments, code) in
        [(&["--no-wait"][..], 1), (&["-n", "-E", "42"], 42), (&["--wait", "1s", "-E", "0"], 0), (&["-w", "0"], 1)]
    {
        let done = done(holdfast(&server).arg("run").args(arguments).args(["a", "--", "echo", "ran"]));
        assert_eq!((done.code, done.out.as_str()), (Some(code), ""), "{arguments:?}");
        assert!(done.err.contains("\"a\": not granted"), "{}", done.err);
    }
    assert_eq!(waiters(&server, "a"), 0);
}

#[test]
fn run_waits_without_limit_by_default() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a other");
    let waiting: Vec<_> = (0..3)
        .map(|number| {
            let run = Running::start(holdfast(&server).args(["run", "a", "--", "echo"]).arg(number.to_string()));
            until(SOON, "the run waits", || waiters(&server, "a") == number + 1);
            run
        })
        .collect();
    let _: i64 = say(&server, "LOCK.RELEASE a other");
    for (number, run) in waiting.into_iter().enumerate() {
        let done = run.done();
        assert_eq!((done.code, done.out), (Some(0), format!("{number}\n")), "{}", done.err);
    }
    assert!(is_free(&server, "a"));
}

#[test]
fn signal_ends_wait_and_leaves_no_request() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a other");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let run = Running::start(holdfast(&server).args(["run", "a", "--", "echo", "ran"]));
        until(SOON, "the run waits", || waiters(&server, "a") == 1);
        run.signal(signal);
        let done = run.done();
        assert_eq!((done.code, done.out.as_str()), (Some(128 + signal), ""));
        until(SOON, "no request waits", || waiters(&server, "a") == 0);
    }
}

#[test]
fn signals_reach_whole_process_group() {
    let server = Server::start();
    for (name, signal) in [
        ("INT", libc::SIGINT),
        ("TERM", libc::SIGTERM),
        ("HUP", libc::SIGHUP),
        ("QUIT", libc::SIGQUIT),
        ("USR1", libc::SIGUSR1),
        ("USR2", libc::SIGUSR2),
    ] {
        // A command and a child of it, in one group: the command's own trap runs when the child has ended.
        let script = format!(
            "trap 'exit 3' {name}; sh -c \"trap 'exit 0' {name}; echo begun; while :; do sleep 0.01; done\"; sleep 1000"
        );
        let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", &script]));
        run.line();
        run.signal(signal);
        let done = run.done();
        assert_eq!(done.code, Some(3), "{name}: {}", done.err);
        assert!(is_free(&server, "a"));
    }
}

/// As under `nohup`, or in the background of a shell without job control.
#[test]
fn signal_ignored_at_start_stays_ignored_by_command() {
    let server = Server::start();
    for (name, signal) in
        [("HUP", libc::SIGHUP), ("INT", libc::SIGINT), ("QUIT", libc::SIGQUIT), ("TERM", libc::SIGTERM)]
    {
        let _: i64 = say(&server, "LOCK.ACQUIRE a other LEASE 600000");
        let mut command = holdfast(&server);
        // SAFETY: an async-signal-safe call.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_IGN);
                Ok(())
            })
        };
        let script = format!("kill -{name} $$; kill -{name} $PPID; echo ran");
        let run = Running::start(command.args(["run", "a", "--", "sh", "-c", &script]));
        until(SOON, "the run waits", || waiters(&server, "a") == 1);
        run.signal(signal);
        let _: i64 = say(&server, "LOCK.RELEASE a other");
        let done = run.done();
        assert_eq!((done.code, done.out.as_str()), (Some(0), "ran\n"), "{name}: {}", done.err);
    }
}

#[test]
fn lost_lock_stops_command() {
    let server = Server::start();
    let script = "trap 'echo asked; exit 0' TERM; echo begun; while :; do sleep 0.01; done";
    let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    assert_eq!(run.line(), "begun");
    let _: i64 = say(&server, "LOCK.FORCE a");
    let done = run.done();
    assert_eq!((done.code, done.out.as_str()), (Some(75), "asked\n"));
    assert!(done.err.contains("\"a\": lost: forced"), "{}", done.err);
}

/// The supervisor must survive a closed standard error.
#[test]
fn lost_lock_stops_command_when_output_is_closed() {
    let server = Server::start();
    // The shell's message "Terminated" would then end it.
    let script = "exec 2> /dev/null; trap 'echo asked; exit 0' TERM; echo begun; while :; do sleep 0.01; done";
    let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    run.close_error_output();
    assert_eq!(run.line(), "begun");
    let _: i64 = say(&server, "LOCK.FORCE a");
    let done = run.done();
    assert_eq!((done.code, done.out.as_str()), (Some(75), "asked\n"));
}

/// The server renews for longer than half a lease. The program asks it before it decides.
#[test]
fn lost_lock_stops_command_when_message_is_not_read() {
    let server = Server::start();
    let (_reader, mut full) = UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[0; 4096]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    let mut command = holdfast(&server);
    command.args(["run", "--grace", "1s", "a", "--", "sh", "-c", "echo $$; exec sleep 1000"]);
    let mut run = Running::start(command.stderr(OwnedFd::from(full)));
    let pid: i32 = run.line().parse().unwrap();
    let _: i64 = say(&server, "LOCK.FORCE a");
    until_gone(pid);
    assert_eq!(run.done().code, Some(75));
}

#[test]
fn lost_lock_gives_all_processes_the_grace_period() {
    let server = Server::start();
    // The shell itself ends at once.
    let script = "(trap 'sleep 0.2; echo cleaned up; exit' TERM; echo begun; while :; do sleep 0.01; done) & wait";
    let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    assert_eq!(run.line(), "begun");
    let _: i64 = say(&server, "LOCK.FORCE a");
    let done = run.done();
    assert_eq!((done.code, done.out.as_str()), (Some(75), "cleaned up\n"));
}

#[test]
fn command_that_was_stopped_and_continued_is_stopped_when_its_lock_is_lost() {
    let server = Server::start();
    let script = "echo $$; exec sleep 1000";
    let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    let pid: i32 = run.line().parse().unwrap();
    kill(pid, libc::SIGSTOP);
    until(SOON, "it is stopped", || stat(pid)[0] == "T");
    kill(pid, libc::SIGCONT);
    until(SOON, "it goes on", || stat(pid)[0] != "T");
    let _: i64 = say(&server, "LOCK.FORCE a");
    assert_eq!(run.done().code, Some(75));
}

#[test]
fn end_of_command_is_noticed_when_ends_of_children_are_ignored() {
    let server = Server::start();
    let mut command = holdfast(&server);
    // SAFETY: an async-signal-safe call.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            Ok(())
        })
    };
    assert_eq!(done(command.args(["run", "a", "--", "sh", "-c", "exit 7"])).code, Some(7));
    assert!(is_free(&server, "a"));
}

#[test]
fn command_paused_for_less_than_its_lease_keeps_its_lock() {
    const LEASE: Duration = Duration::from_secs(10);
    let server = Server::start();
    let script =
        format!("echo begun; until redis-cli -p {} EXISTS go | grep -q 1; do sleep 0.1; done; exit 7", server.port());
    let mut run = Running::start(holdfast(&server).args(["run", "--lease", "10s", "a", "--", "sh", "-c", &script]));
    assert_eq!(run.line(), "begun");
    // Until the grant promises less than the newest heartbeat.
    let begin = Instant::now();
    until(SOON, "more than a third of the lease has passed", || begin.elapsed() > LEASE * 4 / 10);
    run.signal(libc::SIGSTOP);
    let begin = Instant::now();
    until(SOON, "more than two thirds of the lease have passed", || begin.elapsed() > LEASE * 72 / 100);
    run.signal(libc::SIGCONT);
    let begin = Instant::now();
    until(SOON, "the program had time to decide", || begin.elapsed() > LEASE / 10);
    let () = say(&server, "SET go 1");
    let done = run.done();
    assert_eq!(done.code, Some(7), "{}", done.err);
    assert!(is_free(&server, "a"));
}

#[test]
fn command_that_ignores_signal_is_killed_after_grace_period() {
    let server = Server::start();
    let script = "trap '' TERM; (trap '' TERM; sleep 1000) & echo $$ $!; wait; wait; sleep 1000";
    let mut run = Running::start(holdfast(&server).args(["run", "--grace", "200ms", "a", "--", "sh", "-c", script]));
    let pids: Vec<i32> = run.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let grace = NotBefore::millis(200);
    let _: i64 = say(&server, "LOCK.FORCE a");
    let done = run.done();
    assert_eq!(done.code, Some(75));
    grace.is_over("the end of its grace");
    pids.into_iter().for_each(until_gone);
}

#[test]
fn run_loses_an_ephemeral_lock_when_its_connection_breaks() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let script = "echo begun; while :; do sleep 0.01; done";
    let url = format!("redis://{}", proxy.addr());
    let mut run = Running::start(holdfast_at(&url).args(["run", "--ephemeral", "a", "--", "sh", "-c", script]));
    assert_eq!(run.line(), "begun");
    proxy.cut();
    let done = run.done();
    assert_eq!(done.code, Some(75));
    assert!(done.err.contains("lost: disconnected"), "{}", done.err);
    assert!(is_free(&server, "a"));
}

/// Applies `fate` to the reply to the first request of this name. The result is set when it has come.
fn on_the_reply_to(proxy: &Proxy, command: &'static str, fate: Fate) -> Arc<AtomicBool> {
    let come = Arc::new(AtomicBool::new(false));
    let (seen, mut asked) = (come.clone(), false);
    proxy.rule(move |toward, message| {
        let names_it = message.windows(command.len()).any(|part| part == command.as_bytes());
        asked |= toward == Direction::Server && names_it;
        // The program's other requests do not return a number.
        if !asked || toward == Direction::Server || !message.starts_with(b":") {
            return Fate::Pass;
        }
        let first = !seen.swap(true, Ordering::SeqCst);
        if first || fate == Fate::Hold { fate.clone() } else { Fate::Pass }
    });
    come
}

#[test]
fn late_grant_starts_command_late() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let come = on_the_reply_to(&proxy, "LOCK.ACQUIRE", Fate::Hold);
    let script = format!("redis-cli -p {} SET ran yes", server.port());
    let url = format!("redis://{}", proxy.addr());
    let run = Running::start(holdfast_at(&url).args(["run", "a", "--", "sh", "-c", &script]));
    until(SOON, "the grant was sent", || come.load(Ordering::SeqCst));
    assert!(!is_free(&server, "a"));
    assert_eq!(say::<i64>(&server, "EXISTS ran"), 0, "the program does not know that it has the lock");
    proxy.pass();
    let done = run.done();
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert_eq!(say::<i64>(&server, "EXISTS ran"), 1);
    assert!(is_free(&server, "a"));
}

/// The request is sent again over the next connection.
#[test]
fn lost_grant_is_recovered() {
    for wait in [&[][..], &["--no-wait"]] {
        let server = Server::start();
        let proxy = Proxy::to(server.addr());
        let come = on_the_reply_to(&proxy, "LOCK.ACQUIRE", Fate::Drop);
        let url = format!("redis://{}", proxy.addr());
        let script = format!("redis-cli -p {} EXISTS a", server.port());
        let done = done(holdfast_at(&url).arg("run").args(wait).args(["a", "--", "sh", "-c", &script]));
        assert!(come.load(Ordering::SeqCst), "the grant was lost");
        assert_eq!((done.code, done.out.trim()), (Some(0), "1"), "{}", done.err);
        until(SOON, "the lock is free", || is_free(&server, "a"));
    }
}

#[test]
fn lost_grants_run_nothing_and_hold_nothing() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    proxy.rule(|_, message| if message.starts_with(b":") { Fate::Drop } else { Fate::Pass });
    let url = format!("redis://{}", proxy.addr());
    let done = done(holdfast_at(&url).args(["run", "--no-wait", "a", "--", "echo", "ran"]));
    assert_eq!((done.code, done.out.as_str()), (Some(69), ""), "{}", done.err);
    assert!(done.err.contains(&proxy.addr().to_string()), "{}", done.err);
    until(SOON, "the lock is free before its lease ends", || is_free(&server, "a"));
}

#[test]
fn failed_release_is_reported_and_does_not_change_the_exit_code() {
    let server = Server::start();
    let script = format!("kill -9 {}; exit 7", server.pid());
    let done = done(holdfast(&server).args(["run", "a", "--", "sh", "-c", &script]));
    assert_eq!(done.code, Some(7), "{}", done.err);
    assert!(done.err.contains("the lock ends when its lease expires"), "{}", done.err);
}

#[test]
fn lost_release_reply_does_not_change_the_exit_code() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let come = on_the_reply_to(&proxy, "LOCK.RELEASE", Fate::Drop);
    let url = format!("redis://{}", proxy.addr());
    let done = done(holdfast_at(&url).args(["run", "a", "--", "sh", "-c", "exit 7"]));
    assert!(come.load(Ordering::SeqCst), "the reply was lost");
    assert_eq!((done.code, done.err.as_str()), (Some(7), ""));
    assert!(is_free(&server, "a"));
}

#[test]
fn loss_before_end_is_reported_at_end() {
    let server = Server::start();
    let script = format!("redis-cli -p {} LOCK.FORCE a >/dev/null", server.port());
    let done = done(holdfast(&server).args(["run", "--grace", "10s", "a", "--", "sh", "-c", &script]));
    assert_eq!(done.code, Some(75));
    assert!(done.err.contains("forced"), "{}", done.err);
}

#[test]
fn killed_run_ends_its_command_and_frees_an_ephemeral_lock() {
    let server = Server::start();
    let mut run = Running::start(holdfast(&server).args([
        "run",
        "--ephemeral",
        "a",
        "--",
        "sh",
        "-c",
        "echo $$; exec sleep 1000",
    ]));
    let pid: i32 = run.line().parse().unwrap();
    assert!(is_running(pid) && !is_free(&server, "a"));
    run.signal(libc::SIGKILL);
    until_gone(pid);
    until(SOON, "the lock is free before its lease ends", || is_free(&server, "a"));
}

#[test]
fn killed_run_ends_processes_of_its_command() {
    let server = Server::start();
    for script in [
        "sleep 1000 & echo $$ $!; wait",
        // A process that ignores signals and has closed its files, and a stopped one.
        "(trap '' TERM INT HUP QUIT; exec 0<&- 2>&-; echo $$ $BASHPID; exec 1>&-; while :; do sleep 1; done) & wait",
        "sleep 1000 & kill -STOP $!; echo $$ $!; wait",
        // The command has become another program by then.
        "sleep 1000 & echo $$ $!; exec sleep 1000",
    ] {
        let mut run = Running::start(holdfast(&server).args(["run", "--ephemeral", "a", "--", "bash", "-c", script]));
        let pids: Vec<i32> = run.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
        assert!(pids.iter().all(|pid| is_running(*pid)), "{script}");
        run.signal(libc::SIGKILL);
        pids.into_iter().for_each(until_gone);
        until(SOON, "the lock is free before its lease ends", || is_free(&server, "a"));
    }
}

/// A command that prints `begun`, and exits with 7 when this file exists.
fn until_there(file: &Path) -> String {
    format!("echo begun; until [ -e {} ]; do sleep 0.05; done; exit 7", file.display())
}

/// Waits until the server shows the lock as bound to the client's session.
#[track_caller]
fn until_bound(server: &Server, key: &str) {
    until(SOON, "the lock is bound to a connection", || {
        let lock = done(holdfast(server).args(["show", "--json", key])).out;
        lock.contains("\"client\":") && !lock.contains("\"client\":null")
    });
}

#[test]
fn run_keeps_its_lock_over_twenty_restarts_of_the_server() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let file = server.dir().join("go");
    let script = until_there(&file);
    let mut run = Running::start(holdfast(&server).args(["run", "--lease", "10m", "a", "--", "sh", "-c", &script]));
    assert_eq!(run.line(), "begun");
    let before: Vec<String> = say(&server, "HGETALL a");
    for restart in 0..20 {
        server.kill9();
        server.restart();
        // Every other time before the client has reconnected.
        if restart % 2 == 0 {
            until_bound(&server, "a");
        }
        assert_eq!(say::<Vec<String>>(&server, "HGETALL a"), before, "restart {restart}");
    }
    std::fs::write(&file, "").unwrap();
    let done = run.done();
    assert_eq!((done.code, done.err.as_str()), (Some(7), ""));
    until(SOON, "the lock is free", || is_free(&server, "a"));
}

#[test]
fn run_keeps_its_lock_when_its_connections_are_cut() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let file = server.dir().join("go");
    let url = format!("redis://{}", proxy.addr());
    let script = until_there(&file);
    let mut run = Running::start(holdfast_at(&url).args(["run", "--lease", "10m", "a", "--", "sh", "-c", &script]));
    assert_eq!(run.line(), "begun");
    for _ in 0..3 {
        proxy.cut();
        until_bound(&server, "a");
    }
    std::fs::write(&file, "").unwrap();
    let done = run.done();
    assert_eq!((done.code, done.err.as_str()), (Some(7), ""));
    assert!(is_free(&server, "a"));
}

#[test]
fn run_keeps_its_lock_over_a_failover_that_kept_it() {
    let trio = Trio::start();
    let file = trio.sentinel().dir().join("go");
    let url = format!("redis+sentinel://127.0.0.1:{}/{}", trio.sentinel().port(), trio.name());
    let script = until_there(&file);
    let mut command = holdfast_at(&url);
    command.args(["run", "--lease", "10m", "--replicas", "1", "a", "--", "sh", "-c", &script]);
    let mut run = Running::start(&mut command);
    assert_eq!(run.line(), "begun");
    trio.fail_over();
    let [_, promoted] = trio.servers();
    until_bound(promoted, "a");
    std::fs::write(&file, "").unwrap();
    let done = run.done();
    assert_eq!(done.code, Some(7), "{}", done.err);
    until(SOON, "the lock is free", || is_free(promoted, "a"));
}

#[test]
fn run_ends_its_command_when_the_server_has_lost_the_lock() {
    let mut server = Server::builder().arg("save", "").start();
    let script = "trap 'echo asked; exit 0' TERM; echo begun; while :; do sleep 0.01; done";
    let mut run = Running::start(holdfast(&server).args(["run", "--lease", "10m", "a", "--", "sh", "-c", script]));
    assert_eq!(run.line(), "begun");
    server.kill9();
    server.restart();
    let done = run.done();
    assert_eq!((done.code, done.out.as_str()), (Some(75), "asked\n"), "{}", done.err);
}

#[test]
fn run_ends_its_command_when_the_lease_expires_without_a_server() {
    let server = Server::start();
    let proxy = Proxy::to(server.addr());
    let url = format!("redis://{}", proxy.addr());
    let script = "trap 'echo asked; exit 0' TERM; echo begun; while :; do sleep 0.01; done";
    let mut run = Running::start(holdfast_at(&url).args(["run", "--lease", "3s", "a", "--", "sh", "-c", script]));
    assert_eq!(run.line(), "begun");
    proxy.refuse();
    let done = run.done();
    assert_eq!((done.code, done.out.as_str()), (Some(75), "asked\n"), "{}", done.err);
    assert!(done.err.contains("\"a\": lost"), "{}", done.err);
}

/// Prints its own process id, and those of a process in its own session, of a daemon, whose parent has ended, and of one that handles
/// no signal and changes its name.
const LEAVES: &str = "
    setsid sleep 1000 & one=$!
    (setsid sh -c 'echo $$ > $0; exec sleep 1000' $1 &)
    until [ -s $1 ]; do sleep 0.01; done
    setsid bash -c 'trap \"\" TERM INT HUP QUIT; exec -a \") Z 1 (\" sleep 1000' & two=$!
    echo $$ $one $(cat $1) $two";

/// Runs the command with `--kill-group`, runs `act`, and waits until none of its processes is left.
fn with_kill_group(script: &str, unprivileged: bool, act: impl FnOnce(&Server, &Running, &[i32])) -> Done {
    let server = Server::start();
    let file = std::env::temp_dir().join(format!("holdfast-test-{}-{}", std::process::id(), server.port()));
    let mut command = holdfast(&server);
    command.args(["run", "--kill-group", "--ephemeral", "--grace", "200ms", "a", "--", "bash", "-c", script, "bash"]);
    command.arg(&file);
    // Without the right to create a control group.
    // SAFETY: takes nothing.
    if unprivileged && unsafe { libc::geteuid() } == 0 {
        command.uid(65_534);
    }
    let mut run = Running::start(&mut command);
    let pids: Vec<i32> = run.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(pids.len(), 4);
    act(&server, &run, &pids);
    let done = run.done();
    // The output ends when no process has the pipe open.
    pids.into_iter().for_each(until_gone);
    until(SOON, "the lock is free", || is_free(&server, "a"));
    let _ = std::fs::remove_file(file);
    done
}

/// The supervisor of the command.
fn supervisor_of(command: i32) -> i32 {
    stat(command)[1].parse().unwrap()
}

#[test]
fn kill_group_ends_all_processes_of_command() {
    for unprivileged in [false, true] {
        let waits = format!("{LEAVES}; exec sleep 1000");
        // The command ends by itself.
        let done = with_kill_group(&format!("{LEAVES}; exit 7"), unprivileged, |_, _, _| {});
        assert_eq!(done.code, Some(7));
        // The lock is lost.
        let done = with_kill_group(&waits, unprivileged, |server, _, _| {
            let _: i64 = say(server, "LOCK.FORCE a");
        });
        assert_eq!(done.code, Some(75));
        // `holdfast` is terminated or killed, or its supervisor is killed.
        let done = with_kill_group(&waits, unprivileged, |_, run, _| run.signal(libc::SIGTERM));
        assert_eq!(done.code, Some(128 + libc::SIGTERM));
        let done = with_kill_group(&waits, unprivileged, |_, run, _| run.signal(libc::SIGKILL));
        assert_eq!(done.code, None);
        let done = with_kill_group(&waits, unprivileged, |_, _, pids| kill(supervisor_of(pids[0]), libc::SIGKILL));
        assert_eq!(done.code, Some(128 + libc::SIGKILL));
        assert!(done.err.contains("the supervisor was killed"), "{}", done.err);
    }
}

#[test]
fn kill_group_spares_earlier_processes() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!("sleep 1000 >/dev/null 2>&1 & echo $!; exec {program} run --kill-group a -- true");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script]).env("REDIS_URL", format!("redis://{}", server.addr()));
    let done = done(shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!((done.code, done.err.as_str()), (Some(0), ""));
    let pid: i32 = done.out.trim().parse().unwrap();
    assert!(is_running(pid));
    kill(pid, libc::SIGKILL);
}

#[test]
fn run_ends_its_command_when_its_supervisor_is_killed() {
    let server = Server::start();
    let script = "sleep 1000 & echo $$ $!; wait";
    let mut run = Running::start(holdfast(&server).args(["run", "a", "--", "bash", "-c", script]));
    let pids: Vec<i32> = run.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
    kill(supervisor_of(pids[0]), libc::SIGKILL);
    let done = run.done();
    assert_eq!(done.code, Some(128 + libc::SIGKILL), "{}", done.err);
    pids.into_iter().for_each(until_gone);
    assert!(is_free(&server, "a"));
}

#[test]
fn background_processes_survive_end_of_command() {
    let server = Server::start();
    let script = "sleep 1000 > /dev/null 2>&1 & echo $!";
    let done = done(holdfast(&server).args(["run", "a", "--", "sh", "-c", script]));
    assert_eq!(done.code, Some(0), "{}", done.err);
    let pid: i32 = done.out.trim().parse().unwrap();
    assert!(is_running(pid) && is_free(&server, "a"));
    kill(pid, libc::SIGKILL);
}

#[test]
fn report_names_origin_of_exit_code() {
    let server = Server::start();
    let file = server.dir().join("report");
    let free = format!("redis-cli -p {} LOCK.FORCE a", server.port());
    let lost = format!("{free}; sleep 1000");
    let _: i64 = say(&server, "LOCK.ACQUIRE taken other LEASE 600000");
    let () = say(&server, "SET text value");
    for (key, options, command, code, report) in [
        ("a", &[][..], &["sh", "-c", "exit 75"][..], 75, "ended 75\n"),
        ("a", &[], &["true"], 0, "ended 0\n"),
        ("a", &[], &["sh", "-c", "exit 137"], 137, "ended 137\n"),
        ("a", &[], &["sh", "-c", "kill -9 $$"], 137, "killed 9\n"),
        ("a", &[], &["sh", "-c", &lost], 75, "lost 75\n"),
        ("a", &[], &["sh", "-c", &free], 75, "lost 75\n"),
        ("a", &[], &["sh", "-c", "exit 127"], 127, "ended 127\n"),
        ("a", &[], &["/no/such/program"], 127, "not-started 127\n"),
        ("a", &[], &["/etc/passwd"], 126, "not-started 126\n"),
        ("taken", &["-n", "-E", "75"], &["true"], 75, "not-granted 75\n"),
        ("text", &[], &["true"], 69, "failed 69\n"),
        ("a", &["--url", "nonsense"], &["true"], 64, "failed 64\n"),
    ] {
        std::fs::write(&file, "ended 0\n").unwrap();
        let mut run = holdfast(&server);
        run.arg("run").arg("--report").arg(&file).args(options).args([key, "--"]).args(command);
        let done = done(&mut run);
        assert_eq!(done.code, Some(code), "{options:?} {command:?}: {}", done.err);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), report, "{options:?} {command:?}: {}", done.err);
    }
    // While it runs, or after it was killed, an earlier report must not remain.
    let mut run = Running::start(holdfast(&server).args(["run", "--report"]).arg(&file).args([
        "a",
        "--",
        "sh",
        "-c",
        "echo begun; sleep 1000",
    ]));
    assert_eq!(run.line(), "begun");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    drop(run);
    let run = Running::start(holdfast(&server).args(["run", "--report"]).arg(&file).args(["taken", "--", "true"]));
    until(SOON, "the run waits", || waiters(&server, "taken") == 1);
    run.signal(libc::SIGTERM);
    assert_eq!(run.done().code, Some(128 + libc::SIGTERM));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("interrupted {}\n", libc::SIGTERM));
    let unwritable = done(holdfast(&server).args(["run", "--report", "/no/such/place", "a", "--", "echo", "ran"]));
    assert_eq!((unwritable.code, unwritable.out.as_str()), (Some(69), ""));
    assert!(unwritable.err.contains("/no/such/place"), "{}", unwritable.err);
}

#[test]
fn several_keys_are_acquired_all_or_none() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE b other");
    let refused = done(holdfast(&server).args(["run", "-n", "a", "b", "--", "true"]));
    assert_eq!(refused.code, Some(1));
    let _: i64 = say(&server, "LOCK.RELEASE b other");
    let script = format!("echo $HOLDFAST_KEY; redis-cli -p {} EXISTS a b", server.port());
    let ran = done(holdfast(&server).args(["run", "-n", "a", "b", "--", "sh", "-c", &script]));
    assert_eq!(ran.out, "a b\n2\n");
}

#[test]
fn run_accepts_shared_limit_and_replicas() {
    let server = Server::start();
    let inner = |option: &[&str]| {
        let mut command = holdfast(&server);
        command.args(["run"]).args(option).args(["a", "--", env!("CARGO_BIN_EXE_holdfast"), "run", "-n"]).args(option);
        command.args(["a", "--", "echo", "both"]);
        done(&mut command)
    };
    assert_eq!(inner(&["--shared"]).out, "both\n");
    assert_eq!(inner(&["--limit", "2"]).out, "both\n");
    assert_eq!(inner(&["--limit", "1"]).code, Some(1));
    let alone = done(holdfast(&server).args(["run", "-n", "--replicas", "1", "a", "--", "echo", "ran"]));
    assert_eq!((alone.code, alone.out.as_str()), (Some(75), ""));
    assert!(alone.err.contains("ask for fewer replicas"), "{}", alone.err);
}

/// Runs one run as the command of another, with the arguments of both.
fn inside(server: &Server, outer: &str, inner: &str) -> Done {
    let script = format!("{} {inner}; echo $?", env!("CARGO_BIN_EXE_holdfast"));
    done(holdfast(server).arg("run").args(outer.split(' ')).args(["--", "sh", "-c", &script]))
}

#[test]
fn nested_run_on_same_key_is_refused() {
    let server = Server::start();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let other_name = format!("--url redis://localhost:{} run a -- echo ran", server.port());
    let through_another = format!("run b -- {program} run a -- echo ran");
    let two_and_two = format!("run --limit 2 a -- {program} run --limit 2 a -- echo ran");
    for (outer, inner) in [
        ("a", "run a -- echo ran"),
        ("a", "run --wait 1h b a -- echo ran"),
        ("a", "run --shared a -- echo ran"),
        ("--shared a", "run a -- echo ran"),
        ("--limit 2 a", "run a -- echo ran"),
        ("--limit 2 a", &*two_and_two),
        ("a", &*through_another),
        ("a", &*other_name),
    ] {
        let done = inside(&server, outer, inner);
        assert_eq!((done.code, done.out.as_str()), (Some(0), "70\n"), "{outer}, {inner}: {}", done.err);
        assert!(done.err.contains("\"a\": waiting would never end"), "{}", done.err);
        assert!(is_free(&server, "a") && is_free(&server, "b"));
    }
}

#[test]
fn nested_run_on_other_key_runs() {
    let (server, other) = (Server::start(), Server::start());
    let elsewhere = format!("--url redis://{} run a -- echo ran", other.addr());
    for (outer, inner) in [
        ("a", "run b -- echo ran"),
        ("a", &*elsewhere),
        ("--shared a", "run --shared a -- echo ran"),
        ("--limit 2 a", "run --limit 2 a -- echo ran"),
        ("--limit 2 a", "run --shared a -- echo ran"),
    ] {
        let done = inside(&server, outer, inner);
        assert_eq!(done.out, "ran\n0\n", "{outer}, {inner}: {}", done.err);
    }
    // The outer run has ended. The current holder releases the lock.
    let _: i64 = say(&server, "LOCK.ACQUIRE a other");
    let waits = done(holdfast(&server).env("HOLDFAST_OWNERS", "gone").args(["run", "-w", "1s", "a", "--", "true"]));
    assert_eq!(waits.code, Some(1), "{}", waits.err);
}

#[test]
fn lease_bounds_time_without_server() {
    let server = Server::start();
    let script = format!("redis-cli -p {} PTTL a", server.port());
    let done = done(holdfast(&server).args(["run", "--lease", "100s", "a", "--", "sh", "-c", &script]));
    let ttl: i64 = done.out.trim().parse().unwrap();
    assert!((90_000..=100_000).contains(&ttl), "{ttl}");
}
