//! The users of docs/operations.md with their programs: on one server, in a cluster, with Sentinel.

use std::collections::BTreeSet;
use std::process::Command;

use redis::Value;
use support::{Cluster, Feature, Server, Trio, until, workspace};

use crate::common::{SOON, done, get, holdfast_at, metrics_at, say};

const KEY: &str = "app:printer";

/// Creates the users of the document that exist on every server.
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

/// Runs every program as its user. `address`: the address with a user's login.
fn each_user_can_run_its_program(address: impl Fn(&str) -> String, primary: &Server) {
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
    let _: i64 = say(primary, &format!("LOCK.ACQUIRE {KEY} alice LEASE 600000"));
    let _: i64 = say(primary, "LOCK.ACQUIRE {app:printer}other alice LEASE 600000");
    for user in ["locker", "looker", "breaker"] {
        works(user, &["show", KEY], 0, "alice");
        works(user, &["top", "--once"], 0, "KEY");
    }
    let listed = done(&mut as_user("looker", &["ls"]));
    assert!(listed.out.contains(KEY) && !listed.out.contains("other"), "{listed:?}");
    assert!(listed.err.contains("1 keys are not shown"), "{listed:?}");
    let (metrics, at) = metrics_at(&mut as_user("looker", &[]));
    let page = get(&at, "/metrics");
    assert!(page.contains(&format!("holdfast_up{{server=\"{}\"}} 1", primary.addr())), "{page}");
    drop(metrics);
    // And has no further rights.
    let refused = done(&mut as_user("locker", &["force", "--yes", KEY]));
    assert_eq!(refused.code, Some(69), "{refused:?}");
    assert!(refused.err.contains("NOPERM") && refused.err.contains("ACL SETUSER"), "{refused:?}");
    works("breaker", &["force", "--yes", KEY], 0, "1");
    let refused = done(&mut as_user("looker", &["run", KEY, "--", "true"]));
    assert_eq!(refused.code, Some(69), "{refused:?}");
}

#[test]
fn documented_users_work_with_cli() {
    let server = Server::start();
    make_users(&[&server]);
    each_user_can_run_its_program(|user| format!("redis://{user}:secret@{}", server.addr()), &server);
}

#[test]
fn documented_users_work_in_cluster() {
    let cluster = Cluster::start(3);
    make_users(&cluster.nodes().iter().collect::<Vec<_>>());
    let primary = cluster.node(cluster.owner_of(cluster.slot_of(KEY.as_bytes())));
    let other = cluster.node((cluster.owner_of(cluster.slot_of(KEY.as_bytes())) + 1) % 3);
    // The address names another node than the one that is used.
    each_user_can_run_its_program(|user| format!("redis+cluster://{user}:secret@{}", other.addr()), primary);
}

#[test]
fn documented_users_work_with_sentinel() {
    let trio = Trio::start();
    make_users(&trio.servers().iter().collect::<Vec<_>>());
    let url = |user: &str| format!("redis+sentinel://{user}:secret@{}/{}", trio.sentinel().addr(), trio.name());
    each_user_can_run_its_program(url, &trio.servers()[0]);
}

#[test]
fn read_only_user_opens_no_session() {
    let server = Server::start();
    let (metrics, at) = metrics_at(&mut holdfast_at(&format!("redis://{}", server.addr())));
    until(SOON, "the page has metrics", || get(&at, "/metrics").contains("holdfast_sessions{"));
    assert!(get(&at, "/metrics").contains(&format!("holdfast_sessions{{server=\"{}\"}} 0\n", server.addr())));
    drop(metrics);
}

/// A row of the table in SECURITY.md: the command, its categories besides `@lock`, and the rights to its keys.
fn commands_of_the_table() -> Vec<(String, BTreeSet<String>, String)> {
    let document = std::fs::read_to_string(workspace().join("SECURITY.md")).unwrap();
    let table = document.split("| command | categories besides `@lock` | keys |\n").nth(1).expect("the table");
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let read = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let categories = cells[1].split(' ').map(|name| name.trim_matches('`').to_owned()).collect();
        (cells[0].trim_matches('`').to_owned(), categories, cells[2].to_owned())
    };
    rows.map(read).collect()
}

/// A valid command for a lock that `alice` holds at these keys.
fn typed(command: &str, key: &str) -> String {
    let arguments = match command {
        "LOCK.FORCE" | "LOCK.INFO" | "LOCK.WAITERS" => key.to_owned(),
        "LOCK.MACQUIRE" | "LOCK.MRELEASE" | "LOCK.MRENEW" => format!("2 {key} own:other alice"),
        "LOCK.ACQUIRE" | "LOCK.RELEASE" | "LOCK.RENEW" => format!("{key} alice"),
        _ => return command.to_owned(),
    };
    format!("{command} {arguments}")
}

#[test]
fn commands_have_categories_and_key_checks_of_security_md() {
    let server = Server::start();
    let table = commands_of_the_table();
    let listed: BTreeSet<String> =
        say::<Vec<String>>(&server, "COMMAND LIST FILTERBY MODULE holdfast").into_iter().collect();
    assert_eq!(table.iter().map(|(name, ..)| name.to_lowercase()).collect::<BTreeSet<_>>(), listed);

    let denied = |user: &str, line: &str| {
        let mut connection = server.connect();
        let words = |line: &str| {
            let mut words = line.split(' ');
            let mut cmd = redis::cmd(words.next().unwrap());
            cmd.arg(words.collect::<Vec<_>>());
            cmd
        };
        let () = words(&format!("AUTH {user} secret")).query(&mut connection).unwrap();
        let said: redis::RedisResult<Value> = words(line).query(&mut connection);
        said.is_err_and(|error| error.code() == Some("NOPERM"))
    };
    let all = listed.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    let () = say(&server, &format!("ACL SETUSER both reset on >secret ~own:* {all}"));
    let () = say(&server, &format!("ACL SETUSER reader reset on >secret %R~own:* {all}"));
    for (name, categories, keys) in &table {
        assert!(!denied("both", &typed(name, "own:a")), "{name} of a key of its own");
        assert_eq!(denied("both", &typed(name, "others:a")), keys != "none", "{name} of a key of others");
        assert_eq!(denied("reader", &typed(name, "own:a")), keys == "read, write", "{name} with the right to read");
        if server.can(Feature::CommandCategories) {
            let said: Vec<Vec<Value>> = say(&server, &format!("COMMAND INFO {name}"));
            let Value::Array(said) = &said[0][6] else { panic!("{name}: {said:?}") };
            let text = |value: &Value| match value {
                Value::SimpleString(text) => text.clone(),
                Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                other => panic!("{other:?}"),
            };
            let mut said: BTreeSet<String> = said.iter().map(text).collect();
            said.remove("@lock");
            assert_eq!(&said, categories, "{name}");
        }
    }
}

/// A user with only `@lock` can't affect other users' keys.
#[test]
fn user_with_lock_rights_changes_only_locks_of_its_keys() {
    let server = Server::start();
    let all: Vec<String> = say(&server, "COMMAND LIST FILTERBY MODULE holdfast");
    let all = all.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    let () = say(&server, &format!("ACL SETUSER locker reset on >secret ~app:* {all} -lock.force"));
    let () = say(&server, "SET app:data value");
    let _: i64 = say(&server, "HSET app:hash field value");
    let _: i64 = say(&server, "LOCK.ACQUIRE other:lock alice");
    let _: i64 = say(&server, "LOCK.ACQUIRE app:lock alice");
    let mut connection = server.connect();
    let mut tried = |line: &str| -> String {
        let mut words = line.split(' ');
        let mut cmd = redis::cmd(words.next().unwrap());
        cmd.arg(words.collect::<Vec<_>>());
        match cmd.query::<Value>(&mut connection) {
            Ok(_) => "done".to_owned(),
            Err(error) => error.code().unwrap_or_default().to_owned(),
        }
    };
    assert_eq!(tried("AUTH locker secret"), "done");
    for (line, expected) in [
        ("LOCK.ACQUIRE app:data me", "WRONGTYPE"),
        ("LOCK.ACQUIRE app:hash me", "WRONGTYPE"),
        ("LOCK.RELEASE app:hash field ALL", "WRONGTYPE"),
        ("LOCK.MACQUIRE 2 app:new other:lock me", "NOPERM"),
        ("LOCK.RELEASE other:lock alice ALL", "NOPERM"),
        ("LOCK.INFO other:lock", "NOPERM"),
        ("LOCK.FORCE app:lock", "NOPERM"),
        ("GET app:data", "NOPERM"),
        ("CONFIG SET holdfast.default-lease 1", "NOPERM"),
        ("CLIENT KILL TYPE normal", "NOPERM"),
        // Owners are names, not credentials.
        ("LOCK.RELEASE app:lock alice", "done"),
    ] {
        assert_eq!(tried(line), expected, "{line}");
    }
    assert_eq!(say::<String>(&server, "GET app:data"), "value");
    assert_eq!(say::<Vec<String>>(&server, "HGETALL app:hash"), ["field", "value"]);
    assert_eq!(say::<i64>(&server, "EXISTS other:lock app:lock"), 1);
}
