//! Users do not learn of keys that they may not read, nor of what happens to them.

use redis::Value;
use support::{Raw, Server};

use crate::lines::{Commands, Reply, arrives, waiters};

/// A connection of a user with all rights, over keys that begin with `app:` only.
#[track_caller]
fn of_app(server: &Server) -> Raw {
    let mut connection = server.raw();
    assert_eq!(connection.run("ACL SETUSER app reset on >secret ~app:* &* +@all"), Value::Okay);
    assert_eq!(connection.run("AUTH app secret"), Value::Okay);
    connection
}

/// Clients that wait for one of these keys each, while another client holds them.
fn waiting_for(server: &Server, keys: &[&str]) -> Vec<Raw> {
    let mut connection = server.raw();
    let wait = |key: &&str| {
        connection.run(&format!("LOCK.ACQUIRE {key} holder LEASE 600000"));
        let mut waiter = server.raw();
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {key} waiter WAIT 0")), None);
        waiter
    };
    keys.iter().map(wait).collect()
}

fn top(connection: &mut Raw, options: &str) -> Vec<String> {
    let rows = connection.run(&format!("LOCK.TOP {options}"));
    rows.items().iter().map(|row| row.field("key").text()).collect()
}

#[test]
fn lock_top_shows_the_keys_that_the_user_may_read() {
    let server = Server::start();
    let keys = ["secret:a", "secret:a", "secret:a", "app:b", "app:b", "secret:c", "app:d", "apple"];
    let _waiting = waiting_for(&server, &keys);
    assert_eq!(top(&mut server.raw(), ""), ["secret:a", "app:b", "secret:c", "app:d", "apple"]);
    let mut app = of_app(&server);
    assert_eq!(top(&mut app, ""), ["app:b", "app:d"]);
    assert_eq!(top(&mut app, "COUNT 1"), ["app:b"], "unreadable keys do not count");
    app.run("MULTI");
    app.run("LOCK.TOP");
    let rows = app.run("EXEC").items()[0].items().len();
    assert_eq!(rows, 2);

    let mut nobody = server.raw();
    nobody.run("ACL SETUSER nobody reset on >secret +@all");
    nobody.run("AUTH nobody secret");
    assert_eq!(top(&mut nobody, ""), Vec::<String>::new());
    // The rights at the time of the command count.
    server.raw().run("ACL SETUSER nobody ~secret:c");
    assert_eq!(top(&mut nobody, ""), ["secret:c"]);
}

/// Some servers distinguish rights to read and to write.
#[test]
fn lock_top_needs_right_to_read() {
    let server = Server::start();
    let _waiting = waiting_for(&server, &["read:a", "write:b"]);
    let mut app = server.raw();
    app.run("ACL SETUSER app reset on >secret %R~read:* %W~write:* +@all");
    app.run("AUTH app secret");
    assert_eq!(top(&mut app, ""), ["read:a"]);
}

/// A script has its caller's rights, but the keys that it reads are not known in advance.
#[test]
fn lock_top_is_refused_in_scripts() {
    let server = Server::start();
    let _waiting = waiting_for(&server, &["secret:a"]);
    for mut connection in [server.raw(), of_app(&server)] {
        for command in ["EVAL", "EVAL_RO"] {
            let reply = connection.call(&[command.as_bytes(), b"return redis.call('LOCK.TOP')", b"0"]);
            let error = reply.error();
            assert!(error.contains("not allowed from script"), "{error}");
        }
    }
}

/// A server where the owner `one` holds the first key and waits for the other, which the owner `two##1` holds; and the
/// connection on which it waits.
fn about_to_close(one: &str, other: &str) -> (Server, Raw) {
    let server = Server::start();
    let mut connection = server.raw();
    connection.run(&format!("LOCK.ACQUIRE {one} one LEASE 600000")).token();
    connection.run(&format!("LOCK.ACQUIRE {other} two##1 LEASE 600000")).token();
    let mut waits = server.raw();
    assert_eq!(waits.begin(&format!("LOCK.ACQUIRE {other} one WAIT 60000")), None);
    (server, waits)
}

#[test]
fn cycle_through_an_unreadable_key_is_not_reported() {
    let (server, mut waits) = about_to_close("app:x", "secret:y");
    let mut app = of_app(&server);
    let line = "LOCK.ACQUIRE app:x two##1 WAIT 60000";
    assert_eq!(app.begin(line), None, "the error would name unreadable keys");
    // A user that may read both keys gets the full message. (The same owner would take over the queue position.)
    let mut connection = server.raw();
    let line = "LOCK.ACQUIRE app:x two##2 WAIT 60000";
    let error = connection.begin(line).expect("an error").error();
    assert!(error.starts_with("DEADLOCK") && error.contains("app:x") && error.contains("secret:y"), "{error}");

    connection.run("LOCK.RELEASE secret:y two##1");
    arrives(&mut waits).token();
    connection.run("LOCK.RELEASE app:x one");
    arrives(&mut app).token();
}

#[test]
fn readable_cycle_is_reported_without_other_keys() {
    let (server, _waits) = about_to_close("app:x", "app:y");
    // Other owners whose waits lead to the cycle.
    let mut connection = server.raw();
    connection.run("LOCK.ACQUIRE secret:z one LEASE 600000").token();
    let mut others = [server.raw(), server.raw()];
    assert_eq!(others[0].begin("LOCK.ACQUIRE secret:z fourth WAIT 60000"), None);
    assert_eq!(others[1].begin("LOCK.ACQUIRE app:x third WAIT 60000"), None);
    let mut app = of_app(&server);
    let error = app.begin("LOCK.MACQUIRE 2 app:x app:w two##1 WAIT 60000").expect("it does not wait").error();
    assert!(error.starts_with("DEADLOCK") && error.contains("app:x") && error.contains("app:y"), "{error}");
    assert!(!error.contains("secret"), "{error}");
    assert_eq!(waiters(&mut connection, "app:x"), ["third"]);
}

/// Where rights to read and to write differ, the right to write does not allow to read.
#[test]
fn cycle_through_a_write_only_key_is_not_reported() {
    let (server, _waits) = about_to_close("app:x", "write:y");
    let mut app = server.raw();
    app.run("ACL SETUSER app reset on >secret ~app:* %W~write:* +@all");
    app.run("AUTH app secret");
    assert_eq!(app.begin("LOCK.ACQUIRE app:x two##1 WAIT 60000"), None);
}
