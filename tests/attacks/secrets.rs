//! Nobody is shown a key that it may not read, and nothing that is done to such a key.

use redis::Value;
use support::{Raw, Server};

use crate::speak::{Reply, Speak, arrives, waiters};

/// A connection of a user who may do anything, with keys that begin with `app:` only.
#[track_caller]
fn of_app(server: &Server) -> Raw {
    let mut connection = server.raw();
    assert_eq!(connection.say("ACL SETUSER app reset on >secret ~app:* &* +@all"), Value::Okay);
    assert_eq!(connection.say("AUTH app secret"), Value::Okay);
    connection
}

/// Clients that wait, each for one of these keys, which somebody else holds.
fn waiting_for(server: &Server, keys: &[&str]) -> Vec<Raw> {
    let mut connection = server.raw();
    let wait = |key: &&str| {
        connection.say(&format!("LOCK.ACQUIRE {key} holder LEASE 600000"));
        let mut waiter = server.raw();
        assert_eq!(waiter.begin(&format!("LOCK.ACQUIRE {key} waiter WAIT 0")), None);
        waiter
    };
    keys.iter().map(wait).collect()
}

fn top(connection: &mut Raw, options: &str) -> Vec<String> {
    let rows = connection.say(&format!("LOCK.TOP {options}"));
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
    assert_eq!(top(&mut app, "COUNT 1"), ["app:b"], "those that it may not read take nobody's place");
    app.say("MULTI");
    app.say("LOCK.TOP");
    let rows = app.say("EXEC").items()[0].items().len();
    assert_eq!(rows, 2);

    let mut nobody = server.raw();
    nobody.say("ACL SETUSER nobody reset on >secret +@all");
    nobody.say("AUTH nobody secret");
    assert_eq!(top(&mut nobody, ""), Vec::<String>::new());
    // Rights are those of now.
    server.raw().say("ACL SETUSER nobody ~secret:c");
    assert_eq!(top(&mut nobody, ""), ["secret:c"]);
}

/// Some servers tell rights to read from rights to write.
#[test]
fn lock_top_needs_right_to_read() {
    let server = Server::start();
    let _waiting = waiting_for(&server, &["read:a", "write:b"]);
    let mut app = server.raw();
    app.say("ACL SETUSER app reset on >secret %R~read:* %W~write:* +@all");
    app.say("AUTH app secret");
    assert_eq!(top(&mut app, ""), ["read:a"]);
}

/// A script's rights are its caller's, but which keys it asks for is not known beforehand.
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
    connection.say(&format!("LOCK.ACQUIRE {one} one LEASE 600000")).token();
    connection.say(&format!("LOCK.ACQUIRE {other} two##1 LEASE 600000")).token();
    let mut waits = server.raw();
    assert_eq!(waits.begin(&format!("LOCK.ACQUIRE {other} one WAIT 60000")), None);
    (server, waits)
}

#[test]
fn cycle_through_an_unreadable_key_is_not_reported() {
    let (server, mut waits) = about_to_close("app:x", "secret:y");
    let mut app = of_app(&server);
    let line = "LOCK.ACQUIRE app:x two##1 WAIT 60000";
    assert_eq!(app.begin(line), None, "it would learn who holds, and waits for, what it may not read");
    // Who may read all of it is told all of it. (The same owner would take the other's place in the queue.)
    let mut connection = server.raw();
    let line = "LOCK.ACQUIRE app:x two##2 WAIT 60000";
    let error = connection.begin(line).expect("it does not wait").error();
    assert!(error.starts_with("DEADLOCK") && error.contains("app:x") && error.contains("secret:y"), "{error}");

    connection.say("LOCK.RELEASE secret:y two##1");
    arrives(&mut waits).token();
    connection.say("LOCK.RELEASE app:x one");
    arrives(&mut app).token();
}

#[test]
fn readable_cycle_is_reported_without_other_keys() {
    let (server, _waits) = about_to_close("app:x", "app:y");
    // Others whose waits lead to it.
    let mut connection = server.raw();
    connection.say("LOCK.ACQUIRE secret:z one LEASE 600000").token();
    let mut others = [server.raw(), server.raw()];
    assert_eq!(others[0].begin("LOCK.ACQUIRE secret:z fourth WAIT 60000"), None);
    assert_eq!(others[1].begin("LOCK.ACQUIRE app:x third WAIT 60000"), None);
    let mut app = of_app(&server);
    let error = app.begin("LOCK.MACQUIRE 2 app:x app:w two##1 WAIT 60000").expect("it does not wait").error();
    assert!(error.starts_with("DEADLOCK") && error.contains("app:x") && error.contains("app:y"), "{error}");
    assert!(!error.contains("secret"), "{error}");
    assert_eq!(waiters(&mut connection, "app:x"), ["third"]);
}

/// Where the server can tell them apart, the right to write a key is none to hear of it.
#[test]
fn cycle_through_a_write_only_key_is_not_reported() {
    let (server, _waits) = about_to_close("app:x", "write:y");
    let mut app = server.raw();
    app.say("ACL SETUSER app reset on >secret ~app:* %W~write:* +@all");
    app.say("AUTH app secret");
    assert_eq!(app.begin("LOCK.ACQUIRE app:x two##1 WAIT 60000"), None);
}
