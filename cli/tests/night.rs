//! docs/operations.md, "What to watch": each alert has a section, and its commands run.

use std::fs;
use std::process::{Command, Stdio};

use support::{Trio, workspace};

use crate::common::{Running, contended, done};

/// Commands about the machine, which may lack the unit or the log.
const OF_THE_MACHINE: [&str; 4] = ["systemctl ", "journalctl ", "tail ", "curl "];

/// The sections by their names, and the commands in each.
fn sections() -> Vec<(String, Vec<String>)> {
    let text = fs::read_to_string(workspace().join("docs/operations.md")).unwrap();
    let chapter = text.split("\n## ").find(|chapter| chapter.starts_with("What to watch\n")).expect("the chapter");
    let section = |text: &str| {
        let (name, rest) = text.split_once('\n').unwrap();
        let typed = rest.split("```").nth(1).and_then(|block| block.strip_prefix("sh\n")).unwrap_or_default();
        (name.to_owned(), typed.lines().map(|line| line.split(" #").next().unwrap().trim().to_owned()).collect())
    };
    chapter.split("\n### ").skip(1).map(section).collect()
}

#[test]
fn each_alert_links_to_its_runbook() {
    let alerts = fs::read_to_string(workspace().join("deploy/prometheus/alerts.yaml")).unwrap();
    let sections = sections();
    let mut named = 0;
    let text = fs::read_to_string(workspace().join("docs/operations.md")).unwrap();
    for alert in alerts.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap();
        let runbook = format!("runbook_url: \"{{{{ $externalLabels.holdfast_runbooks }}}}#{}\"\n", name.to_lowercase());
        assert!(alert.contains(&runbook), "{name} has no {runbook}");
        let section = sections.iter().find(|(section, _)| section == name);
        assert!(section.is_some_and(|(_, typed)| !typed.is_empty()), "{name}: a section with something to type");
        let section = text.split(&format!("\n### {name}\n")).nth(1).unwrap().split("\n### ").next().unwrap();
        for part in ["**Symptom.**", "**Meaning.**", "**What to do.**"] {
            assert!(section.contains(part), "{name} has no {part}");
        }
        named += 1;
    }
    assert_eq!(named, sections.len(), "a section without an alert");
}

#[test]
fn runbook_commands_of_each_alert_work() {
    let trio = Trio::start();
    let [primary, replica] = trio.servers();
    let _waiting = contended(primary);
    // A command for MONITOR to show.
    let mut looks = Command::new("redis-cli");
    looks.args(["-p", &primary.port().to_string(), "-r", "-1", "-i", "0.05", "HLEN", "a"]);
    let _looks = Running::start(looks.stdin(Stdio::null()).stdout(Stdio::null()));
    for (name, typed) in sections() {
        for line in typed.iter().filter(|line| !OF_THE_MACHINE.iter().any(|it| line.starts_with(it))) {
            let here = line
                .replace("timeout 5 redis-cli", &format!("timeout 1 redis-cli -p {}", primary.port()))
                .replace("-p 26379", &format!("-p {}", trio.sentinel().port()))
                .replace("-h OLD-HOST", &format!("-p {}", replica.port()))
                .replace("-h REPLICA", &format!("-p {}", replica.port()))
                .replace("NEW-HOST 6379", &format!("127.0.0.1 {}", primary.port()))
                .replace(" NAME", &format!(" {}", trio.name()))
                .replace("KEY", "a");
            let script = format!(
                "holdfast() {{ {} \"$@\"; }}\nredis-cli() {{ command redis-cli -e -p {} \"$@\"; }}\n{here}",
                env!("CARGO_BIN_EXE_holdfast"),
                primary.port()
            );
            let mut shell = Command::new("bash");
            shell.args(["-c", &script]).env("REDIS_URL", format!("redis://{}", primary.addr()));
            let said = done(shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
            // These servers have no configuration file.
            let no_file = line.ends_with("CONFIG REWRITE") && said.err.contains("without a config file");
            assert!(said.code == Some(0) || no_file, "{name}: {here}: {said:?}");
        }
    }
}
