//! `REPLICAS n` on behalf of a session: the outcome is an event when the replicas have confirmed. And the demotion of the
//! server itself.

use redis::Value;
use support::{Raw, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, events, until_ended, waiting};
use crate::common::{deadline, error, info_number, words};
use crate::lines::{Reply, holders, waiters};
use crate::replicas::group::{BRIEF, Group};
use crate::waiter::{Commands, SOON, Waiter, assert_held, until_no_waiters};

mod confirming {
    use super::*;

    const MISSED: &str = "UNCONFIRMED 0 of 1 replicas confirmed within 250 ms";

    #[test]
    fn immediate_grant_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        let line = "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG";
        session.wait(&mut group.control, line);
        let token = session.event().token_of(&["key"], "owner");
        assert_eq!(group.replicas[0].raw().run("HGET key #fence").text(), token.to_string());
    }

    #[test]
    fn queued_grant_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        group.control.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WAIT 0");
        group.stop_replicas();
        group.control.run_ok("LOCK.RELEASE key holder");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil, "the event is pending");
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
    }

    /// The deadline stays, and no binding is made.
    #[test]
    fn unconfirmed_reentry_loses_the_hold_it_added() {
        let mut group = Group::of(0);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.primary);
        let token = group.control.get_token("LOCK.ACQUIRE key owner LEASE 50000");
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner LEASE 90000 WATCHDOG REPLICAS 1");
        let later = deadline(&mut group.control, b"key");
        // Any other request of the owner is refused meanwhile, over any connection.
        for line in
            ["LOCK.ACQUIRE key owner HOLDS 1 LEASE 99000", "LOCK.RENEW key owner WATCHDOG", "LOCK.RELEASE key owner"]
        {
            assert!(error(&session.raw.run(line)).1.contains("is being confirmed"), "{line}");
        }
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        let hold = &holders(&mut group.control, "key")["owner"];
        assert_eq!(hold.field("holds"), Value::Int(1), "{hold:?}");
        assert_eq!(hold.field("token"), Value::Int(token), "{hold:?}");
        assert_eq!(hold.field("client"), Value::Nil, "{hold:?}");
        assert_eq!(deadline(&mut group.control, b"key"), later);
        assert_eq!(session.raw.get_token("LOCK.ACQUIRE key owner"), token, "and it may ask again");
    }

    #[test]
    fn transaction_waits_for_replicas_by_event() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        group.control.run_ok("MULTI");
        let line = session.with_session("LOCK.ACQUIRE key owner REPLICAS 1");
        group.control.run_ok(&line);
        assert_eq!(group.control.run_ok("EXEC").items(), [waiting()]);
        session.event().token_of(&["key"], "owner");
    }

    #[test]
    fn unconfirmed_grant_is_refused_and_revoked() {
        let mut group = Group::of(1);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.primary);
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG");
        let mut next = group.waits("LOCK.ACQUIRE key next WAIT 0");
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        next.token();
        session.assert_no_event(&mut group.control);
        assert_eq!(info_number(&group.primary, "holdfast", "holdfast_session_waits"), 0);
    }

    /// The session was not notified of the grant.
    #[test]
    fn deleted_key_of_unconfirmed_grant_is_no_loss() {
        for cause in ["FLUSHALL", "SET key text"] {
            let server = Server::builder().module_args(&["replicas-timeout", "250"]).start();
            let mut client = server.raw();
            let mut session = Session::open(&server);
            session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1 EPHEMERAL");
            // When both are complete, the time for the confirmation has passed as well.
            client.call_all(&[words("DEBUG SLEEP 0.3"), words(cause)]);
            let refused = Event::refused(&["key"], "owner", MISSED);
            let mut received = session.next();
            // Since 7.2, the effects of a command are notified within it, so this has happened already.
            if received != [refused.clone()] && cause != "FLUSHALL" {
                let lost = received.remove(0);
                assert_eq!((&lost.kind[..], lost.detail.as_deref()), ("lost", Some("changed")));
                received = if received.is_empty() { session.next() } else { received };
            }
            assert_eq!(received, [refused], "{cause}");
            session.assert_no_event(&mut client);
        }
    }

    #[test]
    fn grant_without_replicas_is_refused() {
        let server = Server::builder().module_args(&["replicas-timeout", "250"]).start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner REPLICAS 1");
        assert_eq!(session.event(), Event::refused(&["a", "b"], "owner", MISSED));
        assert_eq!(client.run("EXISTS a b"), Value::Int(0));
    }

    #[test]
    fn renewal_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        let token = session.get_token(&mut group.control, "LOCK.ACQUIRE key owner LEASE 50000");
        session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 90000");
        assert_eq!(session.event(), Event::granted(&["key"], "owner", token));
        let nothing = session.request(&mut group.control, "LOCK.RENEW none owner REPLICAS 1");
        assert_eq!(nothing, Value::Nil, "releasing without a hold needs no confirmation");
    }

    /// An unconfirmed renewal revokes nothing.
    #[test]
    fn unconfirmed_renewal_revokes_nothing() {
        let mut group = Group::of(1);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.primary);
        let token = session.get_token(&mut group.control, "LOCK.ACQUIRE key owner LEASE 50000");
        let before = deadline(&mut group.control, b"key");
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 90000 WATCHDOG");
        let later = deadline(&mut group.control, b"key");
        assert!(later - before >= 39_000, "{before} {later}");
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        assert_eq!(deadline(&mut group.control, b"key"), later);
        let hold = &holders(&mut group.control, "key")["owner"];
        assert_eq!((hold.field("holds"), hold.field("token")), (Value::Int(1), Value::Int(token)));
        assert_eq!(hold.field("client"), Value::Int(session.client), "the earlier binding stays");
        assert!(!hold.field("watchdog").truth(), "{hold:?}");
    }

    /// A request without flags and `REPLICAS` does not weaken the binding: the watchdog's renewals still count only once
    /// replicas have confirmed them.
    #[test]
    fn plain_reentry_keeps_replicas_of_binding() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG LEASE 4000");
        let token = session.event().token_of(&["key"], "owner");
        assert_eq!(session.get_token(&mut group.control, "LOCK.ACQUIRE key owner LEASE 4000"), token);
        group.stop_replicas();
        assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"), "although the session reads events");
    }

    #[test]
    fn renewal_of_several_keys_is_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        let a = session.get_token(&mut group.control, "LOCK.ACQUIRE a owner");
        let c = session.get_token(&mut group.control, "LOCK.ACQUIRE c owner");
        session.wait(&mut group.control, "LOCK.MRENEW 3 a b c owner REPLICAS 1");
        let events = session.events(3);
        assert_eq!(events[0], Event::granted(&["a"], "owner", a));
        assert!(events[1].error_of(&["b"], "owner").starts_with("NOTHELD "));
        assert_eq!(events[2], Event::granted(&["c"], "owner", c));
    }

    /// The same renewal is a repetition. Every other request of the owner is refused.
    #[test]
    fn other_requests_during_renewal_are_refused() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        let token = session.get_token(&mut group.control, "LOCK.ACQUIRE key owner");
        group.stop_replicas();
        for _ in 0..2 {
            session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 50000");
        }
        let renewed = deadline(&mut group.control, b"key");
        let other_terms = "LOCK.RENEW key owner REPLICAS 1 LEASE 90000";
        assert!(error(&session.request(&mut group.control, other_terms)).1.contains("is being confirmed"));
        for line in ["LOCK.RENEW key owner LEASE 90000", "LOCK.ACQUIRE key owner", "LOCK.RELEASE key owner HOLDS 1"] {
            assert!(error(&group.control.run(line)).1.contains("is being confirmed"), "{line}");
        }
        assert_eq!(deadline(&mut group.control, b"key"), renewed);
        assert_eq!(group.control.run("HGET key owner").text(), "1");
        group.cont_replicas();
        assert_eq!(session.event(), Event::granted(&["key"], "owner", token));
        assert_eq!(session.get_token(&mut group.control, "LOCK.ACQUIRE key owner"), token, "a re-entry");
        assert_eq!(group.control.run("HGET key owner").text(), "2");
        assert_eq!(info_number(&group.primary, "holdfast", "holdfast_session_waits"), 0);
        session.assert_no_event(&mut group.control);
    }

    /// The repetition gets the same reply, and waits for the same confirmation.
    #[test]
    fn repeated_request_is_granted_once() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.primary);
        group.stop_replicas();
        for _ in 0..2 {
            session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WAIT 0");
        }
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
        assert_eq!(group.control.run("HGET key owner").text(), "1");
        session.assert_no_event(&mut group.control);
    }

    #[test]
    fn unconfirmed_grant_is_revoked_when_session_closes() {
        let mut group = Group::of(1);
        let session = Session::open(&group.primary);
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1");
        let mut next = group.waits("LOCK.ACQUIRE key next WAIT 0");
        session.raw.reset();
        next.token();
        assert_eq!(group.count("confirming"), 0);
    }

    /// The reply to the first request was lost with its connection. The second request gets it, so the hold stays.
    fn repeat_confirmed_request(first: impl Fn(&Group, &str)) {
        let mut group = Group::of(1);
        group.stop_replicas();
        let mut session = Session::open(&group.primary);
        let line = "LOCK.ACQUIRE key owner HOLDS 1 REPLICAS 1 LEASE 3600000";
        first(&group, &session.with_session(line));
        session.wait(&mut group.control, line);
        assert_eq!(group.count("confirming"), 1);
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(group.control.run("LOCK.ACQUIRE key other"), Value::Nil);
    }

    #[test]
    fn unconfirmed_request_is_repeated_over_other_connection() {
        repeat_confirmed_request(|group, line| {
            let mut lost = group.primary.raw();
            assert_eq!(lost.run(line), waiting());
            lost.reset();
        });
    }

    /// As above, but the first request blocked, and was not made on behalf of the session. The second one is refused until the
    /// server has noticed the disconnect, and is then decided as if the first had never been granted.
    #[test]
    fn unconfirmed_blocked_request_is_repeated_by_session() {
        let mut group = Group::of(1);
        group.stop_replicas();
        let line = "LOCK.ACQUIRE key owner HOLDS 1 REPLICAS 1 LEASE 3600000";
        let first = group.waits(line);
        let undelivered = group.control.run("HGET key #fence").text();
        assert!(error(&group.control.run(line)).1.contains("is being confirmed"));
        assert_eq!(group.count("confirming"), 1);
        first.raw.reset();
        until(SOON, "the server has noticed the disconnect", || group.count("confirming") == 0);
        let mut second = group.waits(line);
        group.cont_replicas();
        let token = second.token();
        assert_ne!(token.to_string(), undelivered, "a new hold");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(group.control.run("HGET key #fence").text(), token.to_string());
    }
}

mod demotion {
    use super::*;

    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";

    fn demote(client: &mut Raw) {
        // The port is closed: the link stays down, and the data stay as they are.
        client.run_ok("REPLICAOF 127.0.0.1 1");
    }

    #[test]
    fn session_is_notified_of_waits_and_holds_at_demotion() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        let token = session.get_token(&mut client, "LOCK.ACQUIRE held owner WATCHDOG");
        let other = session.get_token(&mut client, "LOCK.ACQUIRE other owner EPHEMERAL");
        let plain = session.get_token(&mut client, "LOCK.ACQUIRE plain owner");
        client.get_token("LOCK.ACQUIRE unbound owner");
        client.get_token("LOCK.ACQUIRE wanted holder");
        session.wait(&mut client, "LOCK.ACQUIRE wanted waiter WAIT 0");
        session.wait(&mut client, "LOCK.MACQUIRE 2 wanted more both WAIT 0");
        demote(&mut client);
        let mut events = session.events(5);
        events.sort_by_key(|event| (event.kind.clone(), event.keys.clone()));
        let expected = [
            Event::refused(&["wanted"], "waiter", UNBLOCKED),
            Event::refused(&["wanted", "more"], "both", UNBLOCKED),
            Event::unbound("held", "owner", token, "replica"),
            Event::unbound("other", "owner", other, "replica"),
            Event::unbound("plain", "owner", plain, "replica"),
        ];
        assert_eq!(events, expected);
        assert_held(&mut client, "held", "owner");
        assert_eq!(waiters(&mut client, "wanted"), [""; 0]);
        assert_eq!(error(&session.request(&mut client, "LOCK.ACQUIRE wanted waiter WAIT 0")).0, "READONLY");
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil, "it goes on reading");
        until_no_waiters(&server);
    }

    /// A server that becomes a replica unblocks all clients with an error and disconnects them, including those of BLPOP. A
    /// session that is blocked on events has to reconnect.
    #[test]
    fn blocked_reader_is_disconnected_at_demotion_as_blpop() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.get_token(&mut client, "LOCK.ACQUIRE held owner EPHEMERAL");
        session.listen(&server);
        let mut blpop = Waiter::sending(&server, "BLPOP list 0");
        demote(&mut client);
        let received = session.raw.read().unwrap();
        assert_eq!(error(&received), error(&blpop.end()));
        assert_eq!(error(&received).0, "UNBLOCKED");
        assert!(session.raw.read().is_err() && blpop.raw.read().is_err(), "the connections are closed");
        until_ended_on_replica(&server, &mut client);
        assert_held(&mut client, "held", "owner");
    }

    #[track_caller]
    fn until_ended_on_replica(server: &Server, _: &mut Raw) {
        until(SOON, "the session has ended", || info_number(server, "holdfast", "holdfast_sessions") == 0);
    }

    /// Sessions that end on a replica leave no state.
    #[test]
    fn sessions_that_close_on_replica_leave_nothing() {
        let server = Server::start();
        let mut client = server.raw();
        let session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key unread WAIT 0 LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key waits WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        demote(&mut client);
        session.raw.reset();
        until_ended_on_replica(&server, &mut client);
        assert!(!eventually(A_WHILE * 3, || client.run("EXISTS key") == Value::Int(0)), "a replica revokes nothing");
        for name in ["waiters", "session_waits", "undelivered_events", "bound_holds"] {
            assert_eq!(info_number(&server, "holdfast", &format!("holdfast_{name}")), 0, "{name}");
        }
        client.run_ok("REPLICAOF NO ONE");
        assert!(!eventually(A_WHILE, || client.run("EXISTS key") == Value::Int(0)));
        assert_held(&mut client, "key", "unread");
    }

    #[test]
    fn unconfirmed_requests_are_refused_at_demotion() {
        let server = Server::builder().module_args(&["replicas-timeout", "3600000"]).start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1");
        demote(&mut client);
        assert_eq!(session.event(), Event::refused(&["key"], "owner", UNBLOCKED));
        assert_held(&mut client, "key", "owner");
        assert_eq!(info_number(&server, "holdfast", "holdfast_confirming"), 0);
    }

    #[test]
    fn demoted_and_promoted_server_grants_again() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
        for round in 0..3 {
            session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
            demote(&mut client);
            client.run_ok("REPLICAOF NO ONE");
            assert_eq!(session.event(), Event::refused(&["key"], "owner", UNBLOCKED), "round {round}");
        }
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "owner");
    }

    /// Each demotion refuses the pending requests.
    #[test]
    fn demotion_and_promotion_in_one_iteration() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE wanted holder LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1 LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE wanted owner WAIT 0");
        client.send_lines(&["REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"]);
        for _ in 0..2 {
            assert_eq!(client.read().expect("a reply"), Value::Okay);
        }
        let mut received = session.events(2);
        received.sort_by_key(|event| event.keys.clone());
        let refused = |key| Event::refused(&[key], "owner", UNBLOCKED);
        assert_eq!(received, [refused("key"), refused("wanted")]);
        assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
    }

    /// The hold lasts until its lease ends.
    #[test]
    fn unread_grant_can_be_read_after_demotion() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
        client.run_ok("LOCK.RELEASE key holder");
        demote(&mut client);
        let received = session.events(2);
        let token = received[0].token_of(&["key"], "owner");
        assert_eq!(received[1], Event::unbound("key", "owner", token, "replica"));
        assert_eq!(holders(&mut client, "key")["owner"].field("client"), Value::Nil);
    }

    /// While the server replies to other clients.
    #[test]
    fn twenty_thousand_waits_are_refused_at_demotion() {
        const MANY: usize = 20_000;
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.get_token("LOCK.ACQUIRE key holder LEASE 600000");
        let lines: Vec<String> =
            (0..MANY).map(|number| session.with_session(&format!("LOCK.ACQUIRE key owner-{number} WAIT 0"))).collect();
        client.run_all(&lines);
        demote(&mut client);
        let events = session.events(MANY);
        assert!(events.iter().all(|event| event.detail.as_deref() == Some(UNBLOCKED)));
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
    }

    /// On a replica there are no events, and `LOCK.EVENTS` is allowed.
    #[test]
    fn events_on_replica_returns_nothing() {
        let (primary, replica) = (Server::start(), Server::start());
        replica.replica_of(&primary);
        let mut session = Session::open(&replica);
        assert_eq!(session.raw.run("LOCK.EVENTS WAIT 20"), Value::Nil);
        assert_eq!(session.raw.run("LOCK.EVENTS"), Value::Nil);
        let (id, mut client) = (session.id.clone(), replica.raw());
        replica.replica_of_no_one();
        session.get_token(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.run_ok("LOCK.FORCE key");
        assert_eq!(events(&session.raw.run("LOCK.EVENTS WAIT 20000"))[0].kind, "lost");
        session.raw.close();
        until_ended(&mut client, &id);
    }
}
