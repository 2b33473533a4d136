//! The users of docs/operations.md, with the programs that they are for: alone, in a cluster, with Sentinel.

use std::process::Command;

use support::{Cluster, Server, Trio, until, workspace};

use crate::common::{SOON, done, get, holdfast_at, metrics_at, say};

const KEY: &str = "app:printer";

/// Makes the users that work on every server, as the document has them.
fn make_users(servers: &[&Server]) {
    let document = std::fs::read_to_string(workspace().join("docs/operations.md")).unwrap();
    let block = document.split("```acl every-server\n").nth(1).expect("the block").split("```").next().unwrap();
    let mut users = 0;
    for line in block.lines().filter_map(|line| line.strip_prefix("user ")) {
        for server in servers {
            let () = say(server, &format!("ACL SETUSER {}", line.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        users += 1;
    }
    assert_eq!(users, 4);
}

/// `address`: of a user.
fn everybody_can_do_what_they_are_for(address: impl Fn(&str) -> String, master: &Server) {
    let as_user = |user: &str, arguments: &[&str]| -> Command {
        let mut command = holdfast_at(&address(user));
        command.args(arguments);
        command
    };
    let works = |user: &str, arguments: &[&str], code: i32, words: &str| {
        let done = done(&mut as_user(user, arguments));
        assert_eq!(done.code, Some(code), "{user} {arguments:?}: {done:?}");
        assert!(done.out.contains(words) && !done.err.contains("NOPERM"), "{user} {arguments:?}: {done:?}");
    };
    for user in ["app", "locker"] {
        works(user, &["run", KEY, "--", "echo", "ran"], 0, "ran");
        works(user, &["run", "--limit", "2", KEY, "--", "echo", "ran"], 0, "ran");
    }
    let _: i64 = say(master, &format!("LOCK.ACQUIRE {KEY} alice LEASE 600000"));
    let _: i64 = say(master, "LOCK.ACQUIRE {app:printer}other alice LEASE 600000");
    for user in ["locker", "looker", "breaker"] {
        works(user, &["show", KEY], 0, "alice");
        works(user, &["top", "--once"], 0, "KEY");
    }
    let listed = done(&mut as_user("looker", &["ls"]));
    assert!(listed.out.contains(KEY) && !listed.out.contains("other"), "{listed:?}");
    assert!(listed.err.contains("1 keys are not shown"), "{listed:?}");
    let (metrics, at) = metrics_at(&mut as_user("looker", &[]));
    let page = get(&at, "/metrics");
    assert!(page.contains(&format!("holdfast_up{{server=\"{}\"}} 1", master.addr())), "{page}");
    drop(metrics);
    // And no more than that.
    let refused = done(&mut as_user("locker", &["force", "--yes", KEY]));
    assert_eq!(refused.code, Some(69), "{refused:?}");
    assert!(refused.err.contains("NOPERM") && refused.err.contains("ACL SETUSER"), "{refused:?}");
    works("breaker", &["force", "--yes", KEY], 0, "1");
    let refused = done(&mut as_user("looker", &["run", KEY, "--", "true"]));
    assert_eq!(refused.code, Some(69), "{refused:?}");
}

#[test]
fn the_users_of_the_document_work_with_the_program() {
    let server = Server::start();
    make_users(&[&server]);
    everybody_can_do_what_they_are_for(|user| format!("redis://{user}:secret@{}", server.addr()), &server);
}

#[test]
fn they_work_in_a_cluster() {
    let cluster = Cluster::start(3);
    make_users(&cluster.nodes().iter().collect::<Vec<_>>());
    let master = cluster.node(cluster.owner_of(cluster.slot_of(KEY.as_bytes())));
    let other = cluster.node((cluster.owner_of(cluster.slot_of(KEY.as_bytes())) + 1) % 3);
    // The address names another one than that which is asked in the end.
    everybody_can_do_what_they_are_for(|user| format!("redis+cluster://{user}:secret@{}", other.addr()), master);
}

#[test]
fn they_work_with_sentinel() {
    let trio = Trio::start();
    make_users(&trio.servers().iter().collect::<Vec<_>>());
    let url = |user: &str| format!("redis+sentinel://{user}:secret@{}/{}", trio.sentinel().addr(), trio.name());
    everybody_can_do_what_they_are_for(url, &trio.servers()[0]);
}

#[test]
fn who_only_looks_is_no_session() {
    let server = Server::start();
    let (metrics, at) = metrics_at(&mut holdfast_at(&format!("redis://{}", server.addr())));
    until(SOON, "it answers", || get(&at, "/metrics").contains("holdfast_sessions{"));
    assert!(get(&at, "/metrics").contains(&format!("holdfast_sessions{{server=\"{}\"}} 0\n", server.addr())));
    drop(metrics);
}
