//! Runs the examples of the guide and of the README.

use std::env;
use std::path::Path;
use std::process::Command;

use support::{Server, workspace};

#[test]
fn guide_session_runs_as_printed() {
    let server = Server::start();
    let readme = std::fs::read_to_string(workspace().join("docs/clients/command.md")).unwrap();
    let blocks = readme.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut steps = 0;
    let blocks: Vec<String> = blocks.map(|block| format!("\n{block}")).collect();
    for step in blocks.iter().flat_map(|block| block.split("\n$ ").skip(1)) {
        let (command, expected) = step.split_once('\n').unwrap_or((step, ""));
        let seen = shell(&server, command);
        assert_eq!(normal(&seen), normal(expected), "{command}");
        steps += 1;
    }
    assert_eq!(steps, 17);
}

#[test]
fn project_readme_command_runs_under_lock() {
    let server = Server::start();
    let readme = std::fs::read_to_string(workspace().join("README.md")).unwrap();
    let (_, rest) = readme.split_once("A shell (`cli`): `").unwrap();
    let (command, _) = rest.split_once('`').unwrap();
    // In place of a printer, the program prints the lock.
    let lpr = r"printf '#!/bin/sh\nredis-cli HKEYS printer\n' >$PWD/lpr; chmod +x lpr; PATH=$PWD:$PATH";
    let seen = shell(&server, &format!("cd $TMPDIR; {lpr}; {command}"));
    assert!(seen.contains("#fence"), "{command}: {seen}");
}

/// Runs a command in a shell with a temporary directory, which is removed then.
fn shell(server: &Server, command: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_holdfast"));
    let path = format!("{}:{}", program.parent().unwrap().display(), env::var("PATH").unwrap());
    // The README's server uses the default port.
    let command = command.replace("redis-cli", &format!("redis-cli -p {}", server.port()));
    let output = Command::new("bash")
        .args(["-c", &format!("exec 2>&1; export TMPDIR=$(mktemp -d); trap 'rm -r $TMPDIR' EXIT; {command}")])
        .env("PATH", path)
        .env("REDIS_URL", format!("redis://{}", server.addr()))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Replaces what differs from run to run: long numbers, times, addresses, column widths.
fn normal(text: &str) -> String {
    let words = text.split_whitespace().map(|word| {
        let differs = word.len() > 12 && word.bytes().all(|byte| byte.is_ascii_digit());
        match word.trim_matches(['(', ')']) {
            _ if differs => "NUMBER".to_owned(),
            inner if inner.starts_with("127.0.0.1:") => "ADDRESS".to_owned(),
            inner if inner.ends_with('s') && inner.contains('.') && inner.starts_with('5') => "TIME".to_owned(),
            _ => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}
