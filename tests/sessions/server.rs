//! Server events: reloads, unloading, low memory, pauses.

use redis::Value;
use support::{Server, eventually, until};

use super::session::{A_WHILE, Event, Session};
use crate::common::error;
use crate::lines::{Reply, holders, waiters};
use crate::waiter::{Commands, SOON, assert_held};

#[test]
fn debug_reload_loses_nothing() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.get_token(&mut client, "LOCK.ACQUIRE held owner WATCHDOG");
    client.get_token("LOCK.ACQUIRE wanted holder LEASE 60000");
    session.wait(&mut client, "LOCK.ACQUIRE wanted waiter WAIT 0");
    client.run_ok("DEBUG RELOAD");
    session.assert_no_event(&mut client);
    assert_eq!(waiters(&mut client, "wanted"), ["waiter"]);
    assert_eq!(holders(&mut client, "held")["owner"].field("client"), Value::Int(session.client));
    client.run_ok("LOCK.RELEASE wanted holder");
    session.event().token_of(&["wanted"], "waiter");
    client.run_ok("DEL held");
    assert_eq!(session.event(), Event::lost("held", "owner", token, "changed"));
}

/// A snapshot from before the grant is loaded.
#[test]
fn debug_reload_without_saving_loses_later_holds() {
    let server = Server::builder().arg("save", "").start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let old = session.get_token(&mut client, "LOCK.ACQUIRE old owner WATCHDOG LEASE 3600000");
    client.run_ok("SAVE");
    let new = session.get_token(&mut client, "LOCK.ACQUIRE new owner WATCHDOG LEASE 3600000");
    client.run_ok("DEBUG RELOAD NOSAVE NOFLUSH MERGE");
    session.assert_no_event(&mut client);
    client.run_ok("FLUSHALL");
    let mut received = session.events(2);
    received.sort_by_key(|event| event.token);
    assert_eq!(received, [Event::lost("old", "owner", old, "changed"), Event::lost("new", "owner", new, "changed")]);
}

mod module_unload {
    use super::*;

    #[track_caller]
    fn assert_unload_refused(client: &mut support::Raw) {
        let reply = client.run("MODULE UNLOAD holdfast");
        assert_eq!(error(&reply).0, "ERR", "{reply:?}");
    }

    /// The lock has no expiry, so there is no timer and no blocked client.
    #[test]
    fn unload_is_refused_while_session_waits() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        client.run_ok("PERSIST key");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        assert!(!eventually(A_WHILE, || client.run("MODULE UNLOAD holdfast") == Value::Okay));
        client.run_ok("LOCK.RELEASE key holder");
        assert_unload_refused(&mut client); // The grant is unread.
        session.event().token_of(&["key"], "owner");
        client.run_ok("LOCK.RELEASE key owner"); // The hold was bound.
        client.get_token("LOCK.ACQUIRE key other");
        assert_unload_refused(&mut client); // The connection is still a session.
        session.raw.close();
        until(SOON, "the module can be unloaded", || client.run("MODULE UNLOAD holdfast") == Value::Okay);
        assert_held(&mut client, "key", "other");
    }

    #[test]
    fn unload_is_refused_while_session_reads() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.listen(&server);
        assert_unload_refused(&mut client);
        session.raw.close();
        until(SOON, "the module can be unloaded", || client.run("MODULE UNLOAD holdfast") == Value::Okay);
    }

    #[test]
    fn unload_is_refused_while_hold_is_bound() {
        let server = Server::start();
        let mut client = server.raw();
        let session = Session::open(&server);
        for (key, flags) in [("plain", ""), ("ephemeral", "EPHEMERAL")] {
            session.get_token(&mut client, &format!("LOCK.ACQUIRE {key} owner {flags}"));
            client.run_ok(&format!("PERSIST {key}"));
            assert!(!eventually(A_WHILE, || client.run("MODULE UNLOAD holdfast") == Value::Okay), "{key}");
            client.run_ok(&format!("LOCK.RELEASE {key} owner"));
        }
        session.raw.close();
        until(SOON, "the module can be unloaded", || client.run("MODULE UNLOAD holdfast") == Value::Okay);
    }

    /// Also while it is idle and its timer has not fired yet: a session that a client uses is not ended silently.
    #[test]
    fn unload_is_refused_while_there_is_a_session() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.raw.run_ok("PING");
        assert_unload_refused(&mut client);
        session.get_token(&mut client, "LOCK.ACQUIRE gone owner");
        client.get_token("LOCK.ACQUIRE key owner");
        client.run_ok("LOCK.RELEASE gone owner");
        session.raw.run_ok("PING");
        assert!(!eventually(A_WHILE, || client.run("MODULE UNLOAD holdfast") == Value::Okay));
        session.raw.close();
        until(SOON, "the module can be unloaded", || client.run("MODULE UNLOAD holdfast") == Value::Okay);
        let path = support::module_path();
        client.run_ok(&format!("MODULE LOAD {}", path.display()));
        assert_held(&mut client, "key", "owner");
        Session::open(&server).wait_and_get(&mut client);
    }

    impl Session {
        #[track_caller]
        fn wait_and_get(&mut self, client: &mut support::Raw) {
            self.wait(client, "LOCK.ACQUIRE key next WAIT 0");
            client.run_ok("LOCK.RELEASE key owner");
            self.event().token_of(&["key"], "next");
        }
    }
}

/// The grant needs no memory that the server would refuse. A new request does.
#[test]
fn hand_off_works_without_memory() {
    let server = Server::builder().arg("maxmemory-policy", "noeviction").start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key given-up WAIT 0");
    client.run_ok("CONFIG SET maxmemory 1");
    assert_eq!(error(&session.request(&mut client, "LOCK.ACQUIRE another newcomer WAIT 0")).0, "OOM");
    assert_eq!(client.run("LOCK.RELEASE key given-up ALL"), Value::Int(1), "to give up needs none");
    assert!(session.event().error_of(&["key"], "given-up").starts_with("CANCELLED "));
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

/// A timeout is notified while writes are refused. A grant comes when they are accepted again.
#[test]
fn timeouts_are_notified_and_grants_delayed_during_pause() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut client, "LOCK.ACQUIRE key short WAIT 1400");
    session.wait(&mut client, "LOCK.ACQUIRE key long WAIT 0");
    client.run_ok("CLIENT PAUSE 60000 WRITE");
    assert_eq!(session.event(), Event::timeout(&["key"], "short"));
    assert_eq!(session.raw.run("LOCK.EVENTS WAIT 300"), Value::Nil);
    client.run_ok("CLIENT UNPAUSE");
    session.event().token_of(&["key"], "long");
}

/// A server restart ends the session and its waits. Holds last until their leases end.
#[test]
fn restart_ends_session_and_keeps_holds() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut client = server.raw();
    let session = Session::open(&server);
    session.get_token(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    server.kill9();
    server.restart();
    let mut client = server.raw();
    assert_held(&mut client, "key", "owner");
    assert_eq!(waiters(&mut client, "key"), [""; 0]);
    assert_eq!(error(&session.request(&mut client, "LOCK.RENEW key owner")).0, "NOSESSION");
    let new = Session::open(&server);
    new.get_token(&mut client, "LOCK.RENEW key owner EPHEMERAL");
    new.raw.reset();
    until(SOON, "the hold ends with the new session", || client.run("EXISTS key") == Value::Int(0));
}
