//! `show`, `ls`, `force`, `completions`, the man page.

use serde_json::Value;
use support::{Server, until, workspace};

use crate::common::{SOON, contended, done, holdfast, is_free, say, waiters};
use crate::schema;

#[test]
fn show_lists_holders_and_waiters() {
    let server = Server::start();
    let _waiting = contended(&server);
    let text = done(holdfast(&server).args(["show", "a"]));
    assert_eq!(text.code, Some(0), "{}", text.err);
    for word in ["mutex", &server.addr().to_string(), "alice", "bob", "no limit", "59."] {
        assert!(text.out.contains(word), "{word}: {}", text.out);
    }
    let json = done(holdfast(&server).args(["show", "--json", "a"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["holders"][0]["owner"], "alice");
    assert_eq!(json["queue"][0]["owner"], "bob");
    let free = done(holdfast(&server).args(["show", "b"]));
    assert_eq!(free.code, Some(1));
    assert!(free.out.contains("b is free"), "{}", free.out);
}

#[test]
fn ls_finds_locks_among_other_keys() {
    let server = Server::start();
    let mut connection = server.connect();
    let mut all = redis::pipe();
    for number in 0..3000 {
        all.cmd("HSET").arg(format!("hash:{number}")).arg("field").arg("not a count").ignore();
    }
    for number in 0..50 {
        all.cmd("LOCK.ACQUIRE").arg(format!("lock:{number}")).arg("me").ignore();
    }
    all.exec(&mut connection).unwrap();
    let json = done(holdfast(&server).args(["ls", "--json"]));
    assert_eq!(json.out.lines().count(), 50, "{}", json.err);
    assert!(json.out.lines().all(|line| serde_json::from_str::<Value>(line).unwrap()["holders"][0]["owner"] == "me"));
    let text = done(holdfast(&server).args(["ls", "lock:1*"]));
    assert_eq!(text.out.lines().count(), 1 + 11, "{}", text.out);
    assert_eq!(text.err, "", "no progress without a terminal");
}

#[test]
fn force_asks_for_confirmation_without_yes() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a alice");
    let refused = done(holdfast(&server).args(["force", "a"]));
    assert_eq!(refused.code, Some(64));
    assert!(refused.err.contains("--yes") && !is_free(&server, "a"), "{}", refused.err);
    let broken = done(holdfast(&server).args(["force", "--yes", "a"]));
    assert_eq!((broken.code, broken.out.as_str()), (Some(0), "1\n"));
    assert!(is_free(&server, "a"));
    assert_eq!(done(holdfast(&server).args(["force", "--yes", "a"])).code, Some(1));
}

#[test]
fn top_once_prints_table_or_json() {
    let server = Server::start();
    let _waiting = contended(&server);
    let text = done(holdfast(&server).args(["top", "--once"]));
    assert!(text.out.starts_with("KEY  WAITERS") && text.out.contains("alice"), "{}", text.out);
    let json = done(holdfast(&server).args(["top", "--once", "--json"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((json["key"].as_str(), json["waiters"].as_i64()), (Some("a"), Some(1)));
}

/// The text names cached locks, because their holders are idle.
#[test]
fn show_marks_cached_lock() {
    let server = Server::start();
    let mut session = server.raw();
    let id = support::resp::session_id(&session.call(&[b"LOCK.SESSION"])).unwrap();
    let _: i64 = say(&server, &format!("LOCK.ACQUIRE a alice CONTENTION SESSION {id}"));
    let text = done(holdfast(&server).args(["show", "a"]));
    assert!(text.out.contains("(cached)"), "{}", text.out);
    let json = done(holdfast(&server).args(["show", "--json", "a"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["holders"][0]["cached"], true);
    let mut waiting = server.raw();
    waiting.send(&[b"LOCK.ACQUIRE", b"a", b"bob", b"WAIT", b"0"]).unwrap();
    until(SOON, "bob waits", || waiters(&server, "a") == 1);
    let top = done(holdfast(&server).args(["top", "--once"]));
    assert!(top.out.contains("alice (cached)"), "{}", top.out);
}

/// All three print the same documented format.
#[test]
fn json_output_matches_schema() {
    let schema = std::fs::read_to_string(workspace().join("cli/lock.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let server = Server::start();
    let _waiting = contended(&server);
    let _: i64 = say(&server, "LOCK.ACQUIRE shared reader SHARED LEASE 60000");
    let () = say(&server, "HSET for-ever owner 1");
    let mut seen = 0;
    for arguments in [
        &["show", "--json", "a"][..],
        &["show", "--json", "free"],
        &["show", "--json", "for-ever"],
        &["ls", "--json"],
        &["top", "--once", "--json"],
    ] {
        let said = done(holdfast(&server).args(arguments));
        for line in said.out.lines() {
            let value: Value = serde_json::from_str(line).unwrap();
            schema::check(&schema, &value, &format!("{arguments:?}"));
            seen += 1;
        }
    }
    assert_eq!(seen, 3 + 3 + 1);
    let mut wrong: Value = serde_json::from_str(&done(holdfast(&server).args(["show", "--json", "a"])).out).unwrap();
    wrong["waiters"] = "many".into();
    assert!(std::panic::catch_unwind(|| schema::check(&schema, &wrong, "wrong")).is_err(), "the check can fail");
}

#[test]
fn closed_output_pipe_is_no_error() {
    let server = Server::start();
    let mut connection = server.connect();
    let mut all = redis::pipe();
    for number in 0..20_000 {
        all.cmd("LOCK.ACQUIRE").arg(format!("lock:{number}")).arg("me").arg("LEASE").arg(600_000).ignore();
    }
    all.exec(&mut connection).unwrap();
    let program = env!("CARGO_BIN_EXE_holdfast");
    for task in ["ls", "ls --json", "top --once", "--help", "man", "completions bash", "show lock:1"] {
        // The output is shorter than a pipe's buffer, or empty. Both exit codes are allowed.
        let script = format!("{program} {task} | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}");
        let closed = format!("{program} {task} | true; echo ${{PIPESTATUS[0]}}");
        for script in [script, closed] {
            let mut bash = std::process::Command::new("bash");
            let output = bash.args(["-c", &script]).env("REDIS_URL", format!("redis://{}", server.addr())).output();
            let output = output.unwrap();
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert_eq!((out.trim(), err.trim()), ("0", ""), "{task}");
        }
    }
}

#[test]
fn full_disk_is_reported_as_error() {
    let server = Server::start();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let said = done(holdfast(&server).args(["show", "a"]).stdout(full));
    assert_eq!(said.code, Some(69));
    assert!(said.err.contains("standard output"), "{}", said.err);
}

#[test]
fn colours_are_used_on_terminals_only() {
    let server = Server::start();
    for arguments in [&["--help"][..], &["run", "--help"], &["no-such-command"], &["show", "a"], &["top", "--once"]] {
        let done = done(holdfast(&server).args(arguments));
        assert!(!done.out.contains('\x1b') && !done.err.contains('\x1b'), "{arguments:?}: {done:?}");
    }
}

#[test]
fn help_shows_server_options_after_those_of_the_subcommand() {
    let server = Server::start();
    let help = done(holdfast(&server).args(["run", "--help"])).out;
    let places: Vec<_> = ["--wait", "--report", "--url", "--tls-ca", "--tls-key", "--help"]
        .map(|it| help.find(&format!("{it} ")).unwrap())
        .into();
    assert!(places.is_sorted(), "{places:?}\n{help}");
}

#[test]
fn shell_completions_complete() {
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!(
        "source <({program} completions bash); COMP_WORDS=(holdfast run --gr); COMP_CWORD=2; _holdfast holdfast --gr run; \
         echo ${{COMPREPLY[*]}}"
    );
    let bash = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stdout).trim(), "--grace", "{bash:?}");
}

#[test]
fn completions_and_man_page_have_every_command() {
    let server = Server::start();
    let man = done(holdfast(&server).arg("man"));
    for shell in ["bash", "zsh", "fish"] {
        let done = done(holdfast(&server).args(["completions", shell]));
        for word in ["run", "show", "ls", "top", "force", "metrics"] {
            assert!(done.out.contains(word), "{shell}: {word}");
            assert!(man.out.contains(word), "man: {word}");
        }
    }
    for word in [
        ".TH holdfast",
        "grace",
        "HOLDFAST_TOKEN",
        "exit code",
        "REDIS_URL",
        "SSL_CERT_FILE",
        "HOLDFAST_PASSWORD",
        "HOLDFAST_TLS_CA",
    ] {
        assert!(man.out.contains(word), "{word}: {}", man.out);
    }
    assert!(!man.out.contains("holdfast\\-run(1)"), "there is only one page: {}", man.out);
}
