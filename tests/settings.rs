//! Where a setting may be given, and what has precedence: the server's configuration over the module's arguments.

use std::fs;

use support::{Raw, Server, module_path};

use crate::common::{FromFile, ask, ask_ok, map, text};

#[track_caller]
fn has(raw: &mut Raw, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        let reply = map(&ask(raw, &format!("CONFIG GET holdfast.{name}")));
        assert_eq!(reply.values().map(text).collect::<Vec<_>>(), [*value], "{name}");
    }
}

#[test]
fn rewritten_settings_count_besides_arguments() {
    let arguments = "loadmodule MODULE default-lease 10000 max-lease 60000 max-waiters 7 publish-releases no";
    let mut it = FromFile::start("arguments", &[arguments]);
    let mut raw = it.server.raw();
    has(&mut raw, &[("default-lease", "10000"), ("max-lease", "60000"), ("publish-releases", "no")]);
    // To another value, and back to the default.
    for (name, value) in [("default-lease", "5000"), ("max-lease", "315360000000"), ("publish-releases", "yes")] {
        ask_ok(&mut raw, &format!("CONFIG SET holdfast.{name} {value}"));
    }
    ask_ok(&mut raw, "CONFIG REWRITE");
    for _ in 0..2 {
        it.server.restart();
        let mut raw = it.server.raw();
        has(&mut raw, &[("default-lease", "5000"), ("max-lease", "315360000000"), ("publish-releases", "yes")]);
        has(&mut raw, &[("max-waiters", "7"), ("detect-deadlocks", "yes")]);
        ask_ok(&mut raw, "CONFIG REWRITE");
    }
    // Back to the module's argument.
    let mut raw = it.server.raw();
    ask_ok(&mut raw, "CONFIG SET holdfast.default-lease 10000");
    ask_ok(&mut raw, "CONFIG REWRITE");
    it.server.restart();
    has(&mut it.server.raw(), &[("default-lease", "10000"), ("max-lease", "315360000000")]);
    let file = fs::read_to_string(&it.file).expect("the file");
    assert!(file.lines().any(|line| line.starts_with("loadmodule ") && line.contains("max-waiters 7")), "{file}");
}

#[test]
fn configuration_takes_precedence_over_arguments() {
    for (purpose, lines) in [
        ("after", ["loadmodule MODULE default-lease 10000 detect-deadlocks no", "holdfast.default-lease 5000"]),
        ("before", ["holdfast.default-lease 5000", "loadmodule MODULE default-lease 10000 detect-deadlocks no"]),
    ] {
        let mut it = FromFile::start(purpose, &lines);
        has(&mut it.server.raw(), &[("default-lease", "5000"), ("detect-deadlocks", "no")]);
        // A setting that was not rewritten is lost.
        ask_ok(&mut it.server.raw(), "CONFIG SET holdfast.detect-deadlocks yes");
        it.server.restart();
        has(&mut it.server.raw(), &[("default-lease", "5000"), ("detect-deadlocks", "no")]);
    }
}

#[test]
fn module_loadex_config_takes_precedence_over_arguments() {
    let server = Server::builder().without_module().start();
    let path = module_path().to_str().expect("UTF-8").to_owned();
    let mut raw = server.raw();
    let arguments = "ARGS default-lease 10000 max-waiters 7";
    ask_ok(&mut raw, &format!("MODULE LOADEX {path} CONFIG holdfast.default-lease 5000 {arguments}"));
    has(&mut raw, &[("default-lease", "5000"), ("max-waiters", "7")]);
    ask_ok(&mut raw, "CONFIG SET holdfast.max-waiters 8");
    ask_ok(&mut raw, "MODULE UNLOAD holdfast");
    // No setting of the last round remains.
    ask_ok(&mut raw, &format!("MODULE LOAD {path}"));
    has(&mut raw, &[("default-lease", "30000"), ("max-waiters", "0")]);
}
