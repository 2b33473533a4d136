//! What happens to the server: reloads, unloading, a lack of memory, pauses.

use redis::Value;
use support::{Server, eventually, until};

use super::session::{A_WHILE, Event, Session};
use crate::common::error;
use crate::speak::{Reply, holders, waiters};
use crate::waiter::{SOON, Speak, Tell, assert_held};

#[test]
fn debug_reload_loses_nothing() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let token = session.take(&mut client, "LOCK.ACQUIRE held owner WATCHDOG");
    client.take("LOCK.ACQUIRE wanted holder LEASE 60000");
    session.wait(&mut client, "LOCK.ACQUIRE wanted waiter WAIT 0");
    client.order("DEBUG RELOAD");
    session.hears_nothing(&mut client);
    assert_eq!(waiters(&mut client, "wanted"), ["waiter"]);
    assert_eq!(holders(&mut client, "held")["owner"].field("client"), Value::Int(session.client));
    client.order("LOCK.RELEASE wanted holder");
    session.event().token_of(&["wanted"], "waiter");
    client.order("DEL held");
    assert_eq!(session.event(), Event::lost("held", "owner", token, "changed"));
}

/// A snapshot from before the grant is loaded.
#[test]
fn debug_reload_without_saving_loses_later_holds() {
    let server = Server::builder().arg("save", "").start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    let old = session.take(&mut client, "LOCK.ACQUIRE old owner WATCHDOG LEASE 3600000");
    client.order("SAVE");
    let new = session.take(&mut client, "LOCK.ACQUIRE new owner WATCHDOG LEASE 3600000");
    client.order("DEBUG RELOAD NOSAVE NOFLUSH MERGE");
    session.hears_nothing(&mut client);
    client.order("FLUSHALL");
    let mut told = session.events(2);
    told.sort_by_key(|event| event.token);
    assert_eq!(told, [Event::lost("old", "owner", old, "changed"), Event::lost("new", "owner", new, "changed")]);
}

mod module_unload {
    use super::*;

    #[track_caller]
    fn is_refused(client: &mut support::Raw) {
        let reply = client.say("MODULE UNLOAD holdfast");
        assert_eq!(error(&reply).0, "ERR", "{reply:?}");
    }

    /// For a lock that never ends: there is no timer and no blocked client.
    #[test]
    fn unload_is_refused_while_session_waits() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder");
        client.order("PERSIST key");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        assert!(!eventually(A_WHILE, || client.say("MODULE UNLOAD holdfast") == Value::Okay));
        client.order("LOCK.RELEASE key holder");
        is_refused(&mut client); // The grant is to be read.
        session.event().token_of(&["key"], "owner");
        client.order("LOCK.RELEASE key owner"); // It was bound.
        client.take("LOCK.ACQUIRE key other");
        is_refused(&mut client); // The session's connection has sent LOCK.EVENTS last.
        session.raw.order("PING");
        until(SOON, "it can be unloaded", || client.say("MODULE UNLOAD holdfast") == Value::Okay);
        assert_held(&mut client, "key", "other");
    }

    #[test]
    fn unload_is_refused_while_session_reads() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.listen(&server);
        is_refused(&mut client);
        session.raw.close();
        until(SOON, "it can be unloaded", || client.say("MODULE UNLOAD holdfast") == Value::Okay);
    }

    #[test]
    fn unload_is_refused_while_hold_is_bound() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.raw.order("PING");
        for (key, flags) in [("plain", ""), ("ephemeral", "EPHEMERAL")] {
            session.take(&mut client, &format!("LOCK.ACQUIRE {key} owner {flags}"));
            client.order(&format!("PERSIST {key}"));
            assert!(!eventually(A_WHILE, || client.say("MODULE UNLOAD holdfast") == Value::Okay), "{key}");
            client.order(&format!("LOCK.RELEASE {key} owner"));
        }
        until(SOON, "it can be unloaded", || client.say("MODULE UNLOAD holdfast") == Value::Okay);
    }

    /// They have ended when the module is loaded again.
    #[test]
    fn idle_sessions_do_not_prevent_unload() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.take(&mut client, "LOCK.ACQUIRE gone owner");
        client.take("LOCK.ACQUIRE key owner");
        client.order("LOCK.RELEASE gone owner");
        session.raw.order("PING");
        until(SOON, "it can be unloaded", || client.say("MODULE UNLOAD holdfast") == Value::Okay);
        let path = support::module_path();
        client.order(&format!("MODULE LOAD {}", path.display()));
        assert_eq!(session.raw.say("LOCK.SESSION").field("id").text(), session.id, "its name stays");
        session.wait_and_get(&mut client);
    }

    impl Session {
        #[track_caller]
        fn wait_and_get(&mut self, client: &mut support::Raw) {
            self.wait(client, "LOCK.ACQUIRE key next WAIT 0");
            client.order("LOCK.RELEASE key owner");
            self.event().token_of(&["key"], "next");
        }
    }
}

/// The grant needs no memory that the server would refuse; a new request does.
#[test]
fn hand_off_works_without_memory() {
    let server = Server::builder().arg("maxmemory-policy", "noeviction").start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    session.wait(&mut client, "LOCK.ACQUIRE key given-up WAIT 0");
    client.order("CONFIG SET maxmemory 1");
    assert_eq!(error(&session.ask(&mut client, "LOCK.ACQUIRE another newcomer WAIT 0")).0, "OOM");
    assert_eq!(client.say("LOCK.RELEASE key given-up ALL"), Value::Int(1), "to give up needs none");
    assert!(session.event().error_of(&["key"], "given-up").starts_with("CANCELLED "));
    client.order("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

/// A wait that is over is told while nothing may be written; a grant comes when it may again.
#[test]
fn timeouts_are_notified_and_grants_delayed_during_pause() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.take("LOCK.ACQUIRE key holder LEASE 1500");
    session.wait(&mut client, "LOCK.ACQUIRE key short WAIT 1400");
    session.wait(&mut client, "LOCK.ACQUIRE key long WAIT 0");
    client.order("CLIENT PAUSE 60000 WRITE");
    assert_eq!(session.event(), Event::timeout(&["key"], "short"));
    assert_eq!(session.raw.say("LOCK.EVENTS WAIT 300"), Value::Nil);
    client.order("CLIENT UNPAUSE");
    session.event().token_of(&["key"], "long");
}

/// The server goes down and comes back: the session is gone, and with it its waits; holds are there until their lease
/// ends.
#[test]
fn restart_ends_session_and_keeps_holds() {
    let mut server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "always").start();
    let mut client = server.raw();
    let session = Session::open(&server);
    session.take(&mut client, "LOCK.ACQUIRE key owner EPHEMERAL LEASE 600000");
    session.wait(&mut client, "LOCK.ACQUIRE key other WAIT 0");
    server.kill9();
    server.restart();
    let mut client = server.raw();
    assert_held(&mut client, "key", "owner");
    assert_eq!(waiters(&mut client, "key"), [""; 0]);
    assert_eq!(error(&session.ask(&mut client, "LOCK.RENEW key owner")).0, "NOSESSION");
    let new = Session::open(&server);
    new.take(&mut client, "LOCK.RENEW key owner EPHEMERAL");
    new.raw.reset();
    until(SOON, "it ends with the new session", || client.say("EXISTS key") == Value::Int(0));
}
