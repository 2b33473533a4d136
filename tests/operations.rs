//! docs/operations.md: what an operator types does what stands there.

use std::fs;

use support::{Feature, Server, skip, workspace};

use crate::common::FromFile;
use crate::console;
use crate::readme::document;

/// What stands under a heading, with the indentation of lists taken from what is typed.
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

fn without_module() -> Option<Server> {
    let server = Server::builder().without_module().start();
    if !server.can(Feature::ModuleCommand) {
        skip("this server loads no module at run time");
        return None;
    }
    Some(server)
}

#[test]
fn it_is_loaded_into_a_running_server() {
    let Some(server) = without_module() else { return };
    console::run(&chapter("Load it"), &[&server]);
}

#[test]
fn an_upgrade_takes_the_replica_first() {
    let master = Server::start();
    if !master.can(Feature::ModuleCommand) || master.is_container() {
        return skip("this server loads no module at run time, or its replica is elsewhere");
    }
    let replica = Server::start();
    replica.replica_of(&master);
    master.wait_replica_online();
    let held =
        "```console alice\n127.0.0.1:6379> LOCK.ACQUIRE printer alice LEASE 600000\n(integer) 1763632800000000\n```\n";
    console::run(&format!("{held}{}", chapter("Upgrade")), &[&master, &replica]);
}

#[test]
fn a_server_goes_back_to_what_it_was() {
    let Some(server) = without_module() else { return };
    let load = "```console master\n127.0.0.1:6379> MODULE LOAD /usr/lib/redis/modules/libholdfast.so\nOK\n```\n";
    console::run(&format!("{load}{}", chapter("Go back to a server without it")), &[&server]);
}

#[test]
fn a_lock_that_hangs_is_found_and_broken() {
    let server = Server::start();
    console::run(&chapter("A lock that hangs"), &[&server]);
}

#[test]
fn clients_move_over_one_at_a_time() {
    console::run(&chapter("Moving over"), &[&Server::start()]);
}

#[test]
fn the_check_list_is_what_the_example_configuration_sets() {
    let example = fs::read_to_string(workspace().join("redis.conf.example")).expect("the example");
    let settings = example.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mine = |line: &&str| {
        !["loadmodule", "bind", "port", "dir", "protected-mode", "holdfast."].iter().any(|it| line.starts_with(it))
    };
    let lines: Vec<&str> = settings.filter(mine).chain(["loadmodule MODULE"]).collect();
    let it = FromFile::start("check-list", &lines);
    console::run(&chapter("Check list"), &[&it.server]);
}
