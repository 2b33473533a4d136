//! ACL rules: which users may acquire, read, and force locks. Redis 7.0 has no categories for modules' commands, so only
//! rules that name commands apply.

use std::fs;

use redis::Value;
use support::{Feature, Raw, Server, workspace};

use crate::common::{FromFile, array, text};
use crate::lines::{Commands, Reply};

/// All locking commands but `LOCK.FORCE`, by name.
const LOCKING: &str = "+lock.acquire +lock.release +lock.renew +lock.macquire +lock.mrelease +lock.mrenew";
const LOOKING: &str = "+lock.info +lock.waiters +lock.top +lock.session +lock.help";

/// A connection of a user with these rights over all keys.
#[track_caller]
fn user(server: &Server, rights: &str) -> Raw {
    let mut connection = server.raw();
    assert_eq!(connection.run(&format!("ACL SETUSER app reset on >secret ~* &* {rights}")), Value::Okay, "{rights}");
    assert_eq!(connection.run("AUTH app secret"), Value::Okay);
    connection
}

#[track_caller]
fn is_denied(connection: &mut Raw, line: &str) {
    let error = connection.run(line).error();
    assert!(error.starts_with("NOPERM"), "{line}: {error}");
}

/// A user with these rights can acquire, renew and release locks of every kind, and can't force them.
fn assert_locks_but_does_not_force(server: &Server, rights: &str) {
    let mut connection = user(server, rights);
    connection.run("LOCK.ACQUIRE key me").token();
    connection.run("LOCK.RENEW key me").token();
    is_denied(&mut connection, "LOCK.FORCE key");
    assert_eq!(connection.run("LOCK.INFO key").field("holders").items().len(), 1, "{rights}");
    assert_eq!(connection.run("LOCK.RELEASE key me"), Value::Int(1));
    connection.run("LOCK.MACQUIRE 2 one two me WAIT 1").token();
    assert_eq!(connection.run("LOCK.MRENEW 2 one two me").items().len(), 2);
    assert_eq!(connection.run("LOCK.MRELEASE 2 one two me").items(), [Value::Int(1), Value::Int(1)]);
    for line in ["LOCK.WAITERS key", "LOCK.TOP", "LOCK.SESSION", "LOCK.HELP"] {
        assert!(!matches!(connection.run(line), Value::ServerError(_)), "{rights}: {line}");
    }
}

#[test]
fn rights_that_name_commands_work_on_every_server() {
    let server = Server::start();
    assert_locks_but_does_not_force(&server, &format!("-@all {LOCKING} {LOOKING}"));
    assert_locks_but_does_not_force(&server, "+@all -@dangerous -lock.force");
    is_denied(&mut user(&server, &format!("-@all {LOCKING}")), "GET key");

    let mut looker = user(&server, &format!("-@all {LOOKING}"));
    assert!(looker.run("LOCK.INFO key").is_null());
    for line in ["LOCK.ACQUIRE key me", "LOCK.MRELEASE 1 key me", "LOCK.FORCE key"] {
        is_denied(&mut looker, line);
    }
    let mut breaker = user(&server, "-@all +lock.force");
    server.raw().run("LOCK.ACQUIRE key me").token();
    is_denied(&mut breaker, "LOCK.RELEASE key me");
    assert_eq!(breaker.run("LOCK.FORCE key"), Value::Int(1));
}

/// The user in `redis.conf.example`, with the rights in that file.
#[test]
fn example_user_cannot_force_locks() {
    let example = fs::read_to_string(workspace().join("redis.conf.example")).expect("the example");
    let line = example.lines().find_map(|line| line.strip_prefix("# user app ")).expect("the example has a user");
    let it = FromFile::start("user", &[&format!("user app {line}"), "loadmodule MODULE"]);
    let mut connection = it.server.raw();
    assert_eq!(connection.run("AUTH app secret"), Value::Okay);
    connection.run("LOCK.ACQUIRE key me").token();
    is_denied(&mut connection, "LOCK.FORCE key");
    is_denied(&mut connection, "FLUSHALL");
    assert_eq!(connection.run("LOCK.RELEASE key me"), Value::Int(1));
}

/// The categories of a command. (Valkey 8.0 leaves modules out of `ACL CAT`.)
#[track_caller]
fn categories(connection: &mut Raw, command: &str) -> Vec<String> {
    let reply = connection.run(&format!("COMMAND INFO {command}"));
    array(&array(&array(&reply)[0])[6]).iter().map(text).collect()
}

#[test]
fn acl_categories_apply_if_server_supports_them() {
    let server = Server::start();
    let warns = |line: &str| line.contains("holdfast") && line.contains("ACL category") && line.contains("-lock.force");
    let warned = server.log().lines().any(warns);
    if server.can(Feature::AclCategories) {
        assert_locks_but_does_not_force(&server, "+@lock -@dangerous");
        is_denied(&mut user(&server, "+@lock -@dangerous"), "GET key");
    }
    if server.can(Feature::CommandCategories) {
        assert_locks_but_does_not_force(&server, "+@all -@dangerous");
        is_denied(&mut user(&server, "+@all -@write"), "LOCK.ACQUIRE key me");
        assert!(user(&server, "-@all +@read").run("LOCK.INFO key").is_null());
        assert!(!warned, "the log warns of missing rights");
        return;
    }
    assert!(warned, "{}", server.log());
    // The rule in the log and in the documents.
    for command in ["LOCK.ACQUIRE", "LOCK.FORCE", "LOCK.INFO"] {
        assert_eq!(categories(&mut server.raw(), command), Vec::<String>::new(), "{command}");
    }
    user(&server, "+@all -@write").run("LOCK.ACQUIRE key me").token();
    is_denied(&mut user(&server, "-@all +@read +@write"), "LOCK.INFO key");
    assert_eq!(user(&server, "+@all -@dangerous").run("LOCK.FORCE key"), Value::Int(1));
}

const LOCKS: [&str; 12] = [
    "LOCK.ACQUIRE app:lock me",
    "LOCK.RENEW app:lock me",
    "LOCK.RELEASE app:lock me",
    "LOCK.MACQUIRE 1 app:lock me",
    "LOCK.MRENEW 1 app:lock me",
    "LOCK.MRELEASE 1 app:lock me",
    "LOCK.EVENTS",
    "LOCK.VERSION",
    "LOCK.INFO app:lock",
    "LOCK.WAITERS app:lock",
    "LOCK.TOP",
    "LOCK.SESSION",
];
const BREAKS: &str = "LOCK.FORCE app:lock";
/// How clients find the server of a key, in a cluster and with Sentinel.
const FINDS: [&str; 3] = ["CLUSTER SLOTS", "ASKING", "ROLE"];

/// What the users in docs/operations.md may do, by their names, and what they may not do.
fn allowed_and_denied(user: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    match user {
        "app" => (
            [&LOCKS[..], &FINDS, &["SET app:value 1", "GET app:value"]].concat(),
            vec![BREAKS, "FLUSHALL", "LOCK.INFO other"],
        ),
        "locker" => {
            ([&LOCKS[..], &FINDS, &["COMMAND COUNT"]].concat(), vec![BREAKS, "GET app:value", "LOCK.ACQUIRE other me"])
        }
        "looker" => {
            let looks = [&LOCKS[8..], &FINDS, &["LOCK.HELP", "INFO holdfast", "SCAN 0"]].concat();
            (looks, vec![LOCKS[0], LOCKS[2], BREAKS, "GET app:value", "LOCK.INFO other"])
        }
        "breaker" => ([&[BREAKS], &LOCKS[8..11], &FINDS].concat(), vec![LOCKS[0], LOCKS[2], "LOCK.FORCE other"]),
        other => panic!("unknown user {other}"),
    }
}

/// Whether the user of an ACL line has exactly the intended rights.
fn has_intended_rights(server: &Server, line: &str) -> bool {
    let mut words = line.split_whitespace().skip(1);
    let user = words.next().expect("a name");
    let rights = words.collect::<Vec<_>>().join(" ");
    let mut connection = server.raw();
    if connection.run(&format!("ACL SETUSER {user} reset {rights}")) != Value::Okay {
        return false;
    }
    assert_eq!(connection.run(&format!("AUTH {user} secret")), Value::Okay);
    let (allowed, denied) = allowed_and_denied(user);
    let mut refused =
        |line: &&str| matches!(connection.run(line), Value::ServerError(error) if error.code() == "NOPERM");
    !allowed.iter().any(&mut refused) && denied.iter().all(&mut refused)
}

#[test]
fn documented_acl_rules_grant_exactly_what_they_say() {
    let server = Server::start();
    let version = server.version().to_string().to_lowercase().replace(' ', "-");
    let mut lines = 0;
    for file in ["docs/operations.md", "SECURITY.md"] {
        let text = fs::read_to_string(workspace().join(file)).expect("the document");
        for block in text.split("```acl ").skip(1) {
            let (servers, rest) = block.split_once('\n').expect("lines");
            let here = servers.split(' ').any(|it| it == "every-server" || version.starts_with(it));
            for line in rest.split("```").next().expect("an end").lines() {
                assert_eq!(has_intended_rights(&server, line), here, "{file}, {version}: {line}");
                lines += 1;
            }
        }
    }
    assert!(lines >= 6, "{lines}");
}
