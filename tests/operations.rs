//! docs/operations.md: its commands do what the text says.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{Builder, Server, module_path, server_program, skip, workspace};

use crate::common::FromFile;
use crate::console;
use crate::readme::document;

/// The text of a chapter, with the indentation of lists removed.
#[track_caller]
fn chapter(heading: &str) -> String {
    let text = document("docs/operations.md");
    let chapters = text.split("\n## ").find(|chapter| chapter.starts_with(&format!("{heading}\n")));
    unindented(chapters.expect("there is such a chapter"))
}

fn unindented(text: &str) -> String {
    let mut indent = 0;
    let mut lines = Vec::new();
    for line in text.lines() {
        let bare = line.trim_start();
        if bare.starts_with("```") && bare.len() > 3 {
            indent = line.len() - bare.len();
        }
        lines.push(line.get(indent..).unwrap_or(bare));
        if bare == "```" {
            indent = 0;
        }
    }
    lines.join("\n")
}

#[test]
fn module_is_loaded_into_running_server() {
    let server = Server::builder().without_module().start();
    console::run(&chapter("Load it"), &[&server]);
}

#[test]
fn upgrade_starts_with_replica() {
    let primary = Server::start();
    if primary.is_container() {
        return skip("a server in a container has no replica here");
    }
    let replica = Server::start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let held =
        "```console alice\n127.0.0.1:6379> LOCK.ACQUIRE printer alice LEASE 600000\n(integer) 1763632800000000\n```\n";
    console::run(&format!("{held}{}", chapter("Upgrade")), &[&primary, &replica]);
}

#[test]
fn server_returns_to_state_before_module() {
    let server = Server::builder().without_module().start();
    let load = "```console primary\n127.0.0.1:6379> MODULE LOAD /usr/lib/redis/modules/libholdfast.so\nOK\n```\n";
    console::run(&format!("{load}{}", chapter("Go back to a server without it")), &[&server]);
}

#[test]
fn stuck_lock_is_found_and_forced() {
    let server = Server::start();
    console::run(&chapter("A lock that hangs"), &[&server]);
}

#[test]
fn clients_migrate_one_at_a_time() {
    console::run(&chapter("Moving over"), &[&Server::start()]);
}

#[test]
fn check_list_matches_example_configuration() {
    let example = fs::read_to_string(workspace().join("redis.conf.example")).expect("the example");
    let settings = example.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mine = |line: &&str| {
        !["loadmodule", "bind", "port", "dir", "protected-mode", "holdfast."].iter().any(|it| line.starts_with(it))
    };
    let lines: Vec<&str> = settings.filter(mine).chain(["loadmodule MODULE"]).collect();
    let it = FromFile::start("check-list", &lines);
    console::run(&chapter("Check list"), &[&it.server]);
}

/// Whether the lock and the other key exist.
fn has_both(server: &Server) -> bool {
    let keys =
        ["printer", "value"].map(|key| redis::cmd("EXISTS").arg(key).query::<bool>(&mut server.connect()).unwrap());
    keys == [true, true]
}

/// A server with a lock and another key, both saved in a snapshot.
#[track_caller]
fn with_data(purpose: &str) -> FromFile {
    let it = FromFile::start(purpose, &["save 3600 1", "loadmodule MODULE"]);
    for line in ["LOCK.ACQUIRE printer alice LEASE 600000", "SET value 1", "SAVE"] {
        let mut words = line.split(' ');
        let () =
            redis::cmd(words.next().unwrap()).arg(words.collect::<Vec<_>>()).query(&mut it.server.connect()).unwrap();
    }
    it
}

#[test]
fn append_only_file_is_enabled_without_losing_data() {
    let mut it = with_data("has-data");
    if it.server.is_container() {
        return skip("the configuration file is not in the container");
    }
    let text = chapter("A server that has data");
    let blocks: Vec<&str> = text.split_inclusive("\n```\n").filter(|block| block.contains("```console")).collect();
    let [turn_on, keep] = blocks.as_slice() else { panic!("{} blocks", blocks.len()) };
    console::run(turn_on, &[&it.server]);
    let is = |field: &str, value: &str| it.server.info("persistence", field).as_deref() == Some(value);
    support::until(std::time::Duration::from_secs(20), "the append-only file is written", || {
        is("aof_rewrite_in_progress", "0") && is("aof_rewrite_scheduled", "0") && is("aof_last_bgrewrite_status", "ok")
    });
    console::run(keep, &[&it.server]);
    it.server.restart();
    assert!(has_both(&it.server));
    assert_eq!(it.server.info("persistence", "aof_enabled").as_deref(), Some("1"));
}

/// The mistake that the document warns of, and how to recover.
#[test]
fn append_only_file_enabled_in_the_file_alone_hides_data() {
    let mut it = with_data("hides-data");
    if it.server.is_container() {
        return skip("the configuration file is not in the container");
    }
    let lines = fs::read_to_string(&it.file).unwrap();
    fs::write(&it.file, format!("{lines}appendonly yes\n")).unwrap();
    it.server.restart();
    assert!(!has_both(&it.server), "no data is hidden: the document's warning is wrong");
    // The connection ends with the server.
    let _ = redis::cmd("SHUTDOWN").arg("NOSAVE").query::<()>(&mut it.server.connect());
    it.server.wait_until_ended();
    fs::rename(it.server.dir().join("appendonlydir"), it.server.dir().join("aside")).unwrap();
    fs::write(&it.file, lines).unwrap();
    it.server.restart();
    assert!(has_both(&it.server));
}

/// The server does not start, and its message is in the document.
#[track_caller]
fn assert_start_fails(builder: Builder, quoted: &str) {
    let Err(log) = builder.try_start() else { panic!("it starts, without the error {quoted}") };
    assert!(log.contains(quoted), "{log}");
    let text = chapter("A server that does not start");
    assert!(text.contains(quoted), "the document has no {quoted}");
}

#[test]
fn server_that_does_not_start_logs_documented_message() {
    if Server::start().is_container() {
        return skip("the log is not on this machine");
    }
    let plain = || Server::builder().without_module();
    assert_start_fails(plain().arg("loadmodule", "/nowhere/libholdfast.so"), "cannot open shared object file");
    let again = module_path();
    assert_start_fails(Server::builder().arg("loadmodule", again.to_str().unwrap()), "initialization failed");
    assert_start_fails(
        plain().arg("holdfast.default-lease", "20000"),
        "Module Configuration detected without loadmodule directive",
    );
    let misspelt = Server::builder().arg("holdfast.misspelt", "1");
    assert_start_fails(misspelt, "Module Configuration detected without loadmodule directive");
}

#[test]
fn damaged_append_only_file_is_repaired_as_documented() {
    let mut it = FromFile::start("damaged", &["appendonly yes", "loadmodule MODULE"]);
    if it.server.is_container() {
        return skip("the data directory is not on this machine");
    }
    let acquire = |server: &Server, key: &str| {
        redis::cmd("LOCK.ACQUIRE").arg(&[key, "alice", "LEASE", "600000"]).exec(&mut server.connect()).unwrap();
    };
    let files = it.server.dir().join("appendonlydir");
    acquire(&it.server, "printer");
    let increment = fs::read_dir(&files).unwrap().map(|entry| entry.unwrap().path());
    let increment = increment.into_iter().find(|path| path.to_string_lossy().ends_with(".incr.aof")).unwrap();
    let damage = fs::metadata(&increment).unwrap().len();
    acquire(&it.server, "value");
    let _ = redis::cmd("SHUTDOWN").arg("NOSAVE").query::<()>(&mut it.server.connect());
    it.server.wait_until_ended();
    let mut bytes = fs::read(&increment).unwrap();
    bytes[usize::try_from(damage).unwrap()] = b'?';
    fs::write(&increment, bytes).unwrap();

    let from_file = || Server::builder().without_module().config_file(&it.file).dir(it.server.dir().to_owned());
    assert_start_fails(from_file(), "Bad file format reading the append only file");
    // The installed tool reads the files of the installed server.
    if server_program() != Path::new("redis-server") {
        return;
    }
    let manifest = fs::read_dir(&files).unwrap().map(|entry| entry.unwrap().path());
    let manifest = manifest.into_iter().find(|path| path.to_string_lossy().ends_with(".manifest")).unwrap();
    let mut check = Command::new("redis-check-aof");
    let check = check.arg("--fix").arg(manifest).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut check = check.expect("the tool is installed with the server");
    check.stdin.take().unwrap().write_all(b"y\n").unwrap();
    assert!(check.wait_with_output().unwrap().status.success());
    it.server.restart();
    let there = |key: &str| redis::cmd("EXISTS").arg(key).query::<bool>(&mut it.server.connect()).unwrap();
    assert_eq!([there("printer"), there("value")], [true, false], "commands before the damage are kept");
}

/// A directory takes the place of the snapshot file.
#[test]
fn failed_snapshot_stops_locks_until_setting_allows_it() {
    let it = FromFile::start("failed-save", &["save 3600 1", "appendonly yes", "loadmodule MODULE"]);
    if it.server.is_container() {
        return skip("the data directory is not on this machine");
    }
    let say = |line: &str| {
        let mut words = line.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        command.arg(words.collect::<Vec<_>>()).query::<redis::Value>(&mut it.server.connect())
    };
    say("LOCK.ACQUIRE printer alice LEASE 600000").unwrap();
    fs::create_dir(it.server.dir().join("dump.rdb")).unwrap();
    say("BGSAVE").unwrap();
    let status = |field: &str| it.server.info("persistence", field);
    support::until(std::time::Duration::from_secs(20), "the snapshot fails", || {
        status("rdb_last_bgsave_status").as_deref() == Some("err")
    });
    assert_eq!(status("aof_last_write_status").as_deref(), Some("ok"));
    for line in [
        "LOCK.ACQUIRE other alice",
        "LOCK.RELEASE printer alice",
        "LOCK.RENEW printer alice",
        "LOCK.FORCE printer",
        "DEL printer",
    ] {
        assert_eq!(say(line).unwrap_err().code(), Some("MISCONF"), "{line}");
    }
    assert!(say("LOCK.INFO printer").is_ok());
    // It tries to save first, and continues when that fails.
    assert!(Command::new("kill").arg(it.server.pid().to_string()).status().unwrap().success());
    support::until(std::time::Duration::from_secs(20), "the server refuses to shut down", || {
        it.server.log().contains("Error trying to save the DB, can't exit")
    });
    say("CONFIG SET stop-writes-on-bgsave-error no").unwrap();
    say("LOCK.RELEASE printer alice").unwrap();
}
