//! Loading and unloading: arguments, settings, memory that stays allocated, and locks without the module.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;
use std::{env, fs};

use redis::Value;
use support::{Raw, Server, encode, module_path, skip, until};

use crate::common::{Contents, array, ask, ask_int, ask_ok, ask_token, error, info_number, map, text, words};

const SOON: Duration = Duration::from_secs(30);

const DEFAULTS: [(&str, &str); 9] = [
    ("default-lease", "30000"),
    ("max-lease", "315360000000"),
    ("max-waiters", "0"),
    ("max-holders", "2500"),
    ("max-session-bytes", "134217728"),
    ("publish-releases", "yes"),
    ("detect-deadlocks", "yes"),
    ("max-waited", "86400000"),
    ("replicas-timeout", "1000"),
];

/// Another value for each setting, and invalid values.
const OTHERS: [(&str, &str, &[&str]); 9] = [
    ("default-lease", "5000", &["0", "-1", "abc", "", "9223372036854775808"]),
    ("max-lease", "60000", &["0", "-1", "abc", "", "9223372036854775808"]),
    ("max-waiters", "7", &["-1", "abc", "", "9223372036854775808"]),
    ("max-holders", "8", &["0", "-1", "abc", "", "2147483648"]),
    ("max-session-bytes", "5000", &["0", "4095", "-1", "abc", ""]),
    ("publish-releases", "replicated", &["maybe", "2", ""]),
    ("detect-deadlocks", "no", &["maybe", "2", ""]),
    ("max-waited", "0", &["-1", "abc", "", "86400001"]),
    ("replicas-timeout", "250", &["0", "-1", "abc", ""]),
];

#[track_caller]
fn setting(raw: &mut Raw, name: &str) -> String {
    let reply = map(&ask(raw, &format!("CONFIG GET holdfast.{name}")));
    text(reply.values().next().unwrap_or_else(|| panic!("no setting {name}")))
}

#[track_caller]
fn has_settings(raw: &mut Raw, expected: impl IntoIterator<Item = (&'static str, &'static str)>) {
    for (name, value) in expected {
        assert_eq!(setting(raw, name), value, "{name}");
    }
}

fn others() -> impl Iterator<Item = (&'static str, &'static str)> {
    OTHERS.into_iter().map(|(name, value, _)| (name, value))
}

#[test]
fn settings_have_defaults_and_can_be_set() {
    let server = Server::start();
    let mut raw = server.raw();
    assert_eq!(map(&ask(&mut raw, "CONFIG GET holdfast.*")).len(), DEFAULTS.len());
    has_settings(&mut raw, DEFAULTS);
    for (name, value) in others() {
        ask_ok(&mut raw, &format!("CONFIG SET holdfast.{name} {value}"));
        assert_eq!(setting(&mut raw, name), value);
    }
    has_settings(&mut raw, others());
}

#[test]
fn settings_refuse_invalid_values() {
    let server = Server::start();
    let mut raw = server.raw();
    for (name, _, refused) in OTHERS {
        for bad in refused {
            let full = format!("holdfast.{name}");
            let reply = raw.call(&[b"CONFIG", b"SET", full.as_bytes(), bad.as_bytes()]);
            assert_eq!(error(&reply).0, "ERR", "{name} {bad:?}");
        }
    }
    has_settings(&mut raw, DEFAULTS);
    assert_eq!(error(&ask(&mut raw, "CONFIG SET holdfast.nothing 1")).0, "ERR");
}

#[test]
fn setting_takes_effect_immediately() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE before me");
    ask_ok(&mut raw, "CONFIG SET holdfast.default-lease 5000");
    ask_token(&mut raw, "LOCK.ACQUIRE after me");
    let left = ask_int(&mut raw, "PTTL after");
    assert!((4000..=5000).contains(&left), "{left}");
    // A renewal without LEASE does not shorten one.
    ask_token(&mut raw, "LOCK.RENEW before me");
    assert!(ask_int(&mut raw, "PTTL before") > 5000);
    ask_token(&mut raw, "LOCK.RENEW before me LEASE 100");
    ask_token(&mut raw, "LOCK.RENEW before me");
    let left = ask_int(&mut raw, "PTTL before");
    assert!((4000..=5000).contains(&left), "{left}");
}

#[test]
fn module_arguments_are_settings() {
    let arguments: Vec<&str> = others().flat_map(|(name, value)| [name, value]).collect();
    let server = Server::builder().module_args(&arguments).start();
    has_settings(&mut server.raw(), others());
}

#[test]
fn configuration_directives_are_settings() {
    let builder =
        others().fold(Server::builder(), |builder, (name, value)| builder.arg(&format!("holdfast.{name}"), value));
    has_settings(&mut builder.start().raw(), others());
}

#[test]
fn config_rewrite_writes_settings() {
    let dir = temporary_directory("rewrite");
    let file = dir.join("redis.conf");
    fs::write(&file, format!("loadmodule {}\nholdfast.max-waiters 3\n", module_path().display())).expect("a file");
    let mut server = Server::builder().without_module().config_file(&file).dir(&dir).start();
    let mut raw = server.raw();
    assert_eq!(setting(&mut raw, "max-waiters"), "3");
    for (name, value) in others() {
        ask_ok(&mut raw, &format!("CONFIG SET holdfast.{name} {value}"));
    }
    ask_ok(&mut raw, "CONFIG REWRITE");
    server.restart();
    has_settings(&mut server.raw(), others());
    drop(server);
    fs::remove_dir_all(dir).expect("removed");
}

fn temporary_directory(purpose: &str) -> PathBuf {
    let dir = env::temp_dir().join(format!("holdfast-{purpose}-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    dir
}

#[test]
fn module_is_not_loaded_with_invalid_arguments() {
    for (arguments, received) in [
        (&["default-lease"][..], "default-lease"),
        (&["nothing", "5"], "nothing"),
        (&["default-lease", "0"], "default-lease"),
        (&["default-lease", "abc"], "abc"),
        (&["max-lease", "9223372036854775808"], "9223372036854775808"),
        (&["max-holders", "0"], "max-holders"),
        (&["max-session-bytes", "0"], "max-session-bytes"),
        (&["publish-releases", "maybe"], "maybe"),
        (&["max-waiters", "5", "nothing", "6"], "nothing"),
    ] {
        let Err(log) = Server::builder().module_args(arguments).try_start() else {
            panic!("{arguments:?} was accepted")
        };
        assert!(log.lines().any(|line| line.contains("holdfast") && line.contains(received)), "{arguments:?}: {log}");
    }
}

/// A server without the module, and the path from which it can load it.
fn plain() -> (Server, String) {
    let server = Server::builder().without_module().start();
    (server, module_path().to_str().expect("UTF-8").to_owned())
}

#[test]
fn module_loadex_takes_settings_and_arguments() {
    let (server, path) = plain();
    let mut raw = server.raw();
    let config: Vec<String> = others().map(|(name, value)| format!("CONFIG holdfast.{name} {value}")).collect();
    ask_ok(&mut raw, &format!("MODULE LOADEX {path} {}", config.join(" ")));
    has_settings(&mut raw, others());
    ask_ok(&mut raw, "MODULE UNLOAD holdfast");
    ask_ok(&mut raw, &format!("MODULE LOADEX {path} CONFIG holdfast.default-lease 7000 ARGS max-waiters 9"));
    assert_eq!(setting(&mut raw, "default-lease"), "7000");
    assert_eq!(setting(&mut raw, "max-waiters"), "9");
    assert_eq!(setting(&mut raw, "publish-releases"), "yes");
    ask_ok(&mut raw, "MODULE UNLOAD holdfast");
    for wrong in
        ["CONFIG holdfast.default-lease 0", "CONFIG holdfast.nothing 1", "ARGS nothing 1", "ARGS default-lease"]
    {
        assert_eq!(error(&ask(&mut raw, &format!("MODULE LOADEX {path} {wrong}"))).0, "ERR", "{wrong}");
        assert_eq!(error(&ask(&mut raw, "LOCK.HELP")).0, "ERR", "{wrong}");
    }
    ask_ok(&mut raw, &format!("MODULE LOAD {path}"));
    has_settings(&mut raw, DEFAULTS);
}

#[test]
fn module_warns_of_eviction_policy() {
    let warns = |policy: &str| {
        let server = Server::builder().arg("maxmemory-policy", policy).start();
        server.log().lines().any(|line| line.contains("holdfast") && line.contains("maxmemory-policy"))
    };
    for policy in [
        "volatile-lru",
        "volatile-lfu",
        "volatile-random",
        "volatile-ttl",
        "allkeys-lru",
        "allkeys-lfu",
        "allkeys-random",
    ] {
        assert!(warns(policy), "{policy}");
    }
    assert!(!warns("noeviction"));
}

#[test]
fn module_logs_allocator_setting() {
    let server = Server::start();
    let memory = text(&ask(&mut server.raw(), "INFO memory"));
    let received = server.log().lines().any(|line| line.contains("holdfast") && line.contains("M_MXFAST"));
    assert_eq!(received, memory.contains("mem_allocator:libc"), "{}", server.log());
}

#[test]
fn unload_and_load_lose_no_lock() {
    let (server, path) = plain();
    let mut raw = server.raw();
    let load = format!("MODULE LOAD {path}");
    ask_ok(&mut raw, &load);
    let mutex = ask_token(&mut raw, "LOCK.ACQUIRE mutex me HOLDS 3 LEASE 1000000");
    let first = ask_token(&mut raw, "LOCK.ACQUIRE shared me SHARED LEASE 1000000");
    let second = ask_token(&mut raw, "LOCK.ACQUIRE shared you LIMIT 2 LEASE 2000000");
    let before = Contents::read(&mut raw);
    for _ in 0..5 {
        ask_ok(&mut raw, "MODULE UNLOAD holdfast");
        let modules = ask(&mut raw, "MODULE LIST");
        let names: Vec<String> = array(&modules).iter().map(|module| text(&map(module)[&b"name"[..]])).collect();
        assert!(!names.contains(&"holdfast".into()), "{names:?}");
        assert!(error(&ask(&mut raw, "LOCK.INFO mutex")).1.contains("unknown command"));
        assert_eq!(Contents::read(&mut raw), before);
        ask_ok(&mut raw, &load);
        assert_eq!(Contents::read(&mut raw), before);
        assert_eq!(ask(&mut raw, "LOCK.ACQUIRE mutex you"), Value::Nil);
        assert_eq!(ask(&mut raw, "LOCK.ACQUIRE shared third SHARED"), Value::Nil);
    }
    assert_eq!(ask_token(&mut raw, "LOCK.RENEW mutex me LEASE 1000000"), mutex);
    assert_eq!(ask_int(&mut raw, &format!("LOCK.RELEASE mutex me TOKEN {mutex} ALL")), 1);
    assert_eq!(ask_int(&mut raw, &format!("LOCK.RELEASE shared me TOKEN {first}")), 1);
    assert_eq!(ask_int(&mut raw, &format!("LOCK.RELEASE shared you TOKEN {second}")), 1);
    assert!(ask_token(&mut raw, "LOCK.ACQUIRE mutex me") > second);
}

#[test]
fn unload_and_load_leak_no_memory() {
    let (server, path) = plain();
    let mut raw = server.raw();
    let load = format!("MODULE LOAD {path}");
    let round = |raw: &mut Raw| {
        ask_ok(raw, &load);
        ask_token(raw, "LOCK.ACQUIRE mutex me");
        ask_token(raw, "LOCK.ACQUIRE shared me SHARED");
        ask_token(raw, "LOCK.ACQUIRE shared you SHARED");
        assert_eq!(ask_int(raw, "LOCK.FORCE mutex"), 1);
        assert_eq!(ask_int(raw, "LOCK.FORCE shared"), 2);
        ask_ok(raw, "MODULE UNLOAD holdfast");
    };
    const WARM: usize = 20;
    const ROUNDS: usize = 100;
    for _ in 0..WARM {
        round(&mut raw);
    }
    let before = info_number(&server, "memory", "used_memory");
    for _ in 0..ROUNDS {
        round(&mut raw);
    }
    let each = (info_number(&server, "memory", "used_memory") - before) / ROUNDS as i64;
    // `redis_module!` creates a detached context (a client of the server, 17 KB) at each load and never frees it.
    const DETACHED_CONTEXT: i64 = 17 << 10;
    assert!(each < DETACHED_CONTEXT + (7 << 10), "{each} bytes a round");
}

/// The server keeps a pointer to the last command of each connection, and to those queued in a transaction. Redis 8.0 and
/// later run the last command again without a lookup.
#[test]
fn unload_is_refused_while_a_command_may_run() {
    let (server, path) = plain();
    let mut raw = server.raw();
    let load = format!("MODULE LOAD {path}");
    ask_ok(&mut raw, &load);
    let mut other = server.raw();
    for lines in [&["LOCK.HELP"][..], &["lock.info none"], &["LOCK.TOP none"], &["MULTI", "LOCK.INFO none", "PING"]] {
        for line in lines {
            ask(&mut other, line);
        }
        let refusal = ask(&mut raw, "MODULE UNLOAD holdfast");
        assert!(error(&refusal).1.contains("not possible"), "{lines:?}: {refusal:?}");
    }
    // (A container's log arrives later than the reply.)
    until(SOON, "four refusals are logged", || server.log().matches("not unloaded: 1 connection").count() == 4);
    assert_eq!(array(&ask(&mut other, "EXEC")).len(), 2);
    // The server may have looked up the second command already.
    other.send_bytes(&encode(["BLPOP list 0", "LOCK.INFO none"].map(words))).unwrap();
    until(SOON, "the client is blocked", || info_number(&server, "clients", "blocked_clients") == 1);
    assert!(error(&ask(&mut raw, "MODULE UNLOAD holdfast")).1.contains("not possible"));
    ask(&mut raw, "RPUSH list element");
    assert_eq!((array(&other.read().unwrap()).len(), other.read().unwrap()), (2, Value::Nil));
    ask(&mut other, "PING");
    for _ in 0..5 {
        ask_ok(&mut raw, "MODULE UNLOAD holdfast");
        ask_ok(&mut raw, &load);
        ask(&mut other, "LOCK.INFO none");
        ask(&mut other, "PING");
    }
}

/// A request, and another that reverses it, on the locks number `#`.
const PAIRS: [[&str; 2]; 10] = [
    ["LOCK.ACQUIRE a-# me-#", "LOCK.RELEASE a-# me-#"],
    ["LOCK.ACQUIRE b-# me LEASE 5000", "LOCK.RELEASE b-# me ALL"],
    ["LOCK.ACQUIRE c-# me HOLDS 3", "LOCK.RELEASE c-# me HOLDS 0"],
    ["LOCK.ACQUIRE d-# * WAIT 0", "LOCK.RELEASE d-# *"],
    ["LOCK.ACQUIRE e-{#} me", "LOCK.RELEASE e-{#} me"],
    ["LOCK.ACQUIRE f-# me", "LOCK.FORCE f-#"],
    ["LOCK.ACQUIRE g-# me-# SHARED", "LOCK.RELEASE g-# me-#"],
    ["LOCK.ACQUIRE h-# me LIMIT 5", "LOCK.FORCE h-#"],
    ["LOCK.ACQUIRE i-# me LIMIT 2", "DEL i-#"],
    ["LOCK.MACQUIRE 2 j-# k-# me", "LOCK.MRELEASE 2 j-# k-# me"],
];

/// The pairs for the locks of these numbers.
fn pairs(numbers: Range<u32>) -> Vec<String> {
    numbers
        .flat_map(|number| PAIRS.concat().into_iter().map(move |line| line.replace('#', &number.to_string())))
        .collect()
}

/// Invalid requests. `held` is a lock of `me`, `text` is a string.
const BAD: [&str; 18] = [
    "LOCK.ACQUIRE",
    "LOCK.ACQUIRE free #me",
    "LOCK.ACQUIRE free me LEASE 0",
    "LOCK.ACQUIRE free me LEASE 99999999999999999999999999",
    "LOCK.ACQUIRE free me LIMIT 2 SHARED",
    "LOCK.ACQUIRE free me LEASE 5 LEASE 6",
    "LOCK.ACQUIRE held me SHARED",
    "LOCK.ACQUIRE text me",
    "LOCK.RELEASE held me TOKEN abc",
    "LOCK.RELEASE held me HOLDS 1 ALL",
    "LOCK.RENEW text me",
    "LOCK.MACQUIRE 2 free free me",
    "LOCK.MACQUIRE 3 free held text me",
    "LOCK.RENEW held me FENCE 9007199254740991",
    "LOCK.ACQUIRE held me WAIT 0 SESSION nobody",
    "LOCK.RENEW held me SESSION",
    "LOCK.EVENTS COUNT 0",
    "LOCK.NOTHING held me",
];

#[test]
fn memory_returns_after_many_pairs_and_bad_requests() {
    let server = Server::builder().arg("slowlog-log-slower-than", "-1").start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE held me LEASE 100000000");
    ask_ok(&mut raw, "SET text value");
    let bad = BAD.map(str::to_owned);
    assert!(replies(&mut raw, &bad).iter().all(|reply| matches!(reply, Value::ServerError(_))));
    let warm = pairs(0..1000);
    for (line, reply) in warm.iter().zip(replies(&mut raw, &warm)) {
        assert!(!matches!(reply, Value::ServerError(_) | Value::Nil), "{line}: {reply:?}");
    }
    repeat(&server, &warm, 50_000);
    repeat(&server, &bad, 10_000);

    let before = info_number(&server, "memory", "used_memory");
    let grants = || info_number(&server, "holdfast", "holdfast_grants_at_once");
    let errors = || info_number(&server, "stats", "total_error_replies");
    let (granted, failed) = (grants(), errors());
    // Names that are new to the module.
    repeat(&server, &pairs(1000..2000), 300_000);
    repeat(&server, &bad, 100_000);
    assert!(grants() - granted >= 150_000, "{} grants", grants() - granted);
    assert!(errors() - failed >= 100_000, "{} errors", errors() - failed);
    assert_eq!(ask_int(&mut raw, "DBSIZE"), 2);
    // The server's own buffers grow and shrink in steps of 24 KB. A leak of 16 bytes in one kind of pair would be 240 KB, in
    // one kind of invalid request 114 KB.
    const SLACK: i64 = 100 << 10;
    let mut after = 0;
    until(SOON, "memory is freed", || {
        after = info_number(&server, "memory", "used_memory");
        after - before < SLACK
    });
    println!("used_memory: {before} bytes before, {after} after");
}

fn replies(raw: &mut Raw, lines: &[String]) -> Vec<Value> {
    raw.call_all(&lines.iter().map(|line| words(line)).collect::<Vec<_>>())
}

/// Sends commands repeatedly, at least `count` in all, over a connection that gets no replies.
fn repeat(server: &Server, lines: &[String], count: usize) {
    let mut raw = server.raw();
    raw.send(&[b"CLIENT", b"REPLY", b"OFF"]).expect("sent");
    const AT_ONCE: usize = 1000;
    let times = AT_ONCE.div_ceil(lines.len());
    let packet = encode(lines.iter().map(|line| words(line))).repeat(times);
    for _ in 0..count.div_ceil(times * lines.len()) {
        raw.send_bytes(&packet).expect("sent");
    }
    ask_ok(&mut raw, "CLIENT REPLY ON");
    let id = raw.client_id();
    raw.close();
    until(SOON, "the connection is closed", || {
        text(&ask(&mut server.raw(), "CLIENT LIST")).lines().all(|line| !line.starts_with(&format!("id={id} ")))
    });
}

/// With `HDEL` renamed, replicas and the append-only file would lose the module's writes without an error.
#[test]
fn load_is_refused_when_a_needed_command_was_renamed() {
    if Server::start().is_container() {
        return skip("the configuration file is not in the container");
    }
    for command in ["HSET", "HDEL", "DEL", "PEXPIREAT", "PERSIST", "PUBLISH", "REPLCONF", "CLIENT", "SETRANGE"] {
        let log = match start_without(command) {
            Ok(_) => panic!("the module was loaded without {command}"),
            Err(log) => log,
        };
        assert!(log.contains(&format!("this server has no command {command}, which the module needs")), "{log}");
    }
    for command in ["RESTORE", "COMMAND", "FLUSHALL"] {
        let server = start_without(command).unwrap_or_else(|log| panic!("not loaded without {command}: {log}"));
        assert!(ask_token(&mut server.raw(), "LOCK.ACQUIRE k o") > 0);
    }
}

/// Starts a server with the module and a configuration that renames a command to nothing. The error is the log.
fn start_without(command: &str) -> Result<Server, String> {
    let dir = temporary_directory(&format!("renamed-{command}"));
    let file = dir.join("redis.conf");
    let lines = format!("save \"\"\nrename-command {command} \"\"\nloadmodule {}\n", module_path().display());
    fs::write(&file, lines).expect("a file");
    let started = Server::builder().without_module().config_file(&file).try_start();
    fs::remove_dir_all(dir).expect("removed");
    started
}
