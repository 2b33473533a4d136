//! `REPLICAS n` on behalf of a session: the answer comes as an event when they have it. And a server that becomes a
//! replica itself.

use redis::Value;
use support::{Raw, Server, eventually, until};

use super::session::{A_WHILE, Event, Session, events, until_ended, waiting};
use crate::common::{deadline, error, info_number, words};
use crate::replicas::group::{BRIEF, Group};
use crate::speak::{Reply, holders, waiters};
use crate::waiter::{SOON, Speak, Tell, Waiter, assert_held, until_nobody_waits};

mod confirming {
    use super::*;

    const MISSED: &str = "UNCONFIRMED 0 of 1 replicas confirmed within 250 ms";

    #[test]
    fn immediate_grant_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        let line = "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG";
        session.wait(&mut group.control, line);
        let token = session.event().token_of(&["key"], "owner");
        assert_eq!(group.replicas[0].raw().say("HGET key #fence").text(), token.to_string());
    }

    #[test]
    fn queued_grant_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        group.control.take("LOCK.ACQUIRE key holder");
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WAIT 0");
        group.stop_replicas();
        group.control.order("LOCK.RELEASE key holder");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil, "it is held, and not yet told");
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
    }

    /// The deadline stays, and it makes no binding.
    #[test]
    fn unconfirmed_reentry_loses_the_hold_it_added() {
        let mut group = Group::of(0);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.master);
        let token = group.control.take("LOCK.ACQUIRE key owner LEASE 50000");
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner LEASE 90000 WATCHDOG REPLICAS 1");
        let later = deadline(&mut group.control, b"key");
        // Whatever the owner asks for meanwhile is refused, on whichever connection.
        for line in
            ["LOCK.ACQUIRE key owner HOLDS 1 LEASE 99000", "LOCK.RENEW key owner WATCHDOG", "LOCK.RELEASE key owner"]
        {
            assert!(error(&session.raw.say(line)).1.contains("is being confirmed"), "{line}");
        }
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        let hold = &holders(&mut group.control, "key")["owner"];
        assert_eq!(hold.field("holds"), Value::Int(1), "{hold:?}");
        assert_eq!(hold.field("token"), Value::Int(token), "{hold:?}");
        assert_eq!(hold.field("client"), Value::Nil, "{hold:?}");
        assert_eq!(deadline(&mut group.control, b"key"), later);
        assert_eq!(session.raw.take("LOCK.ACQUIRE key owner"), token, "and it may ask again");
    }

    #[test]
    fn transaction_waits_for_replicas_by_event() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        group.control.order("MULTI");
        let line = session.naming("LOCK.ACQUIRE key owner REPLICAS 1");
        group.control.order(&line);
        assert_eq!(group.control.order("EXEC").items(), [waiting()]);
        session.event().token_of(&["key"], "owner");
    }

    #[test]
    fn unconfirmed_grant_is_refused_and_revoked() {
        let mut group = Group::of(1);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.master);
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG");
        let mut next = group.waits("LOCK.ACQUIRE key next WAIT 0");
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        next.token();
        session.hears_nothing(&mut group.control);
        assert_eq!(info_number(&group.master, "holdfast", "holdfast_session_waits"), 0);
    }

    /// The session was not notified of the grant.
    #[test]
    fn deleted_key_of_unconfirmed_grant_is_no_loss() {
        for cause in ["FLUSHALL", "SET key text"] {
            let server = Server::builder().module_args(&["replicas-timeout", "250"]).start();
            let mut client = server.raw();
            let mut session = Session::open(&server);
            session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1 EPHEMERAL");
            // When both are done, the time for the confirmation is over as well.
            client.call_all(&[words("DEBUG SLEEP 0.3"), words(cause)]);
            let refused = Event::refused(&["key"], "owner", MISSED);
            let mut told = session.next();
            // Since 7.2, what a command ends is told in its own step: that was before.
            if told != [refused.clone()] && cause != "FLUSHALL" {
                let lost = told.remove(0);
                assert_eq!((&lost.kind[..], lost.detail.as_deref()), ("lost", Some("changed")));
                told = if told.is_empty() { session.next() } else { told };
            }
            assert_eq!(told, [refused], "{cause}");
            session.hears_nothing(&mut client);
        }
    }

    #[test]
    fn grant_without_replicas_is_refused() {
        let server = Server::builder().module_args(&["replicas-timeout", "250"]).start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner REPLICAS 1");
        assert_eq!(session.event(), Event::refused(&["a", "b"], "owner", MISSED));
        assert_eq!(client.say("EXISTS a b"), Value::Int(0));
    }

    #[test]
    fn renewal_is_an_event_once_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        let token = session.take(&mut group.control, "LOCK.ACQUIRE key owner LEASE 50000");
        session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 90000");
        assert_eq!(session.event(), Event::granted(&["key"], "owner", token));
        let nothing = session.ask(&mut group.control, "LOCK.RENEW none owner REPLICAS 1");
        assert_eq!(nothing, Value::Nil, "what is not held needs no replica");
    }

    /// Nothing of it is revoked.
    #[test]
    fn unconfirmed_renewal_revokes_nothing() {
        let mut group = Group::of(1);
        group.wait_for_replicas(BRIEF);
        let mut session = Session::open(&group.master);
        let token = session.take(&mut group.control, "LOCK.ACQUIRE key owner LEASE 50000");
        let before = deadline(&mut group.control, b"key");
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 90000 WATCHDOG");
        let later = deadline(&mut group.control, b"key");
        assert!(later - before >= 39_000, "{before} {later}");
        assert_eq!(session.event(), Event::refused(&["key"], "owner", MISSED));
        assert_eq!(deadline(&mut group.control, b"key"), later);
        let hold = &holders(&mut group.control, "key")["owner"];
        assert_eq!((hold.field("holds"), hold.field("token")), (Value::Int(1), Value::Int(token)));
        assert_eq!(hold.field("client"), Value::Int(session.client), "the binding from before stands");
        assert!(!hold.field("watchdog").truth(), "{hold:?}");
    }

    /// A request that names neither flags nor replicas takes nothing from what the binding promises: the watchdog's renewals
    /// count only if replicas have them, as before.
    #[test]
    fn plain_reentry_keeps_replicas_of_binding() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WATCHDOG LEASE 1500");
        let token = session.event().token_of(&["key"], "owner");
        assert_eq!(session.take(&mut group.control, "LOCK.ACQUIRE key owner LEASE 1500"), token);
        group.stop_replicas();
        assert_eq!(session.event(), Event::lost("key", "owner", token, "expired"), "though it reads all the time");
    }

    #[test]
    fn renewal_of_several_keys_is_confirmed() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        let a = session.take(&mut group.control, "LOCK.ACQUIRE a owner");
        let c = session.take(&mut group.control, "LOCK.ACQUIRE c owner");
        session.wait(&mut group.control, "LOCK.MRENEW 3 a b c owner REPLICAS 1");
        let events = session.events(3);
        assert_eq!(events[0], Event::granted(&["a"], "owner", a));
        assert!(events[1].error_of(&["b"], "owner").starts_with("NOTHELD "));
        assert_eq!(events[2], Event::granted(&["c"], "owner", c));
    }

    /// The same renewal is a repetition; every other request of the owner is refused.
    #[test]
    fn other_requests_during_renewal_are_refused() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        let token = session.take(&mut group.control, "LOCK.ACQUIRE key owner");
        group.stop_replicas();
        for _ in 0..2 {
            session.wait(&mut group.control, "LOCK.RENEW key owner REPLICAS 1 LEASE 50000");
        }
        let renewed = deadline(&mut group.control, b"key");
        let other_terms = "LOCK.RENEW key owner REPLICAS 1 LEASE 90000";
        assert!(error(&session.ask(&mut group.control, other_terms)).1.contains("is being confirmed"));
        for line in ["LOCK.RENEW key owner LEASE 90000", "LOCK.ACQUIRE key owner", "LOCK.RELEASE key owner HOLDS 1"] {
            assert!(error(&group.control.say(line)).1.contains("is being confirmed"), "{line}");
        }
        assert_eq!(deadline(&mut group.control, b"key"), renewed);
        assert_eq!(group.control.say("HGET key owner").text(), "1");
        group.cont_replicas();
        assert_eq!(session.event(), Event::granted(&["key"], "owner", token));
        assert_eq!(session.take(&mut group.control, "LOCK.ACQUIRE key owner"), token, "a re-entry");
        assert_eq!(group.control.say("HGET key owner").text(), "2");
        assert_eq!(info_number(&group.master, "holdfast", "holdfast_session_waits"), 0);
        session.hears_nothing(&mut group.control);
    }

    /// It gets the same reply while replicas are asked.
    #[test]
    fn repeated_request_is_granted_once() {
        let mut group = Group::of(1);
        let mut session = Session::open(&group.master);
        group.stop_replicas();
        for _ in 0..2 {
            session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1 WAIT 0");
        }
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
        assert_eq!(group.control.say("HGET key owner").text(), "1");
        session.hears_nothing(&mut group.control);
    }

    #[test]
    fn unconfirmed_grant_is_revoked_when_session_closes() {
        let mut group = Group::of(1);
        let session = Session::open(&group.master);
        group.stop_replicas();
        session.wait(&mut group.control, "LOCK.ACQUIRE key owner REPLICAS 1");
        let mut next = group.waits("LOCK.ACQUIRE key next WAIT 0");
        session.raw.reset();
        next.token();
        assert_eq!(group.count("confirming"), 0);
    }

    /// The answer to the first request was lost with its connection; the second is told, so the hold stays.
    fn asked_again(first: impl Fn(&Group, &str)) {
        let mut group = Group::of(1);
        group.stop_replicas();
        let mut session = Session::open(&group.master);
        let line = "LOCK.ACQUIRE key owner HOLDS 1 REPLICAS 1 LEASE 3600000";
        first(&group, &session.naming(line));
        session.wait(&mut group.control, line);
        assert_eq!(group.count("confirming"), 1);
        group.cont_replicas();
        session.event().token_of(&["key"], "owner");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(group.control.say("LOCK.ACQUIRE key other"), Value::Nil);
    }

    #[test]
    fn unconfirmed_request_is_repeated_over_other_connection() {
        asked_again(|group, line| {
            let mut lost = group.master.raw();
            assert_eq!(lost.say(line), waiting());
            lost.reset();
        });
    }

    /// As above, where the first request was not made on behalf of the session but blocked: the second one is refused
    /// until the server has noticed that its client is gone, and then judged as if the first had never been granted.
    #[test]
    fn unconfirmed_blocked_request_is_repeated_by_session() {
        let mut group = Group::of(1);
        group.stop_replicas();
        let line = "LOCK.ACQUIRE key owner HOLDS 1 REPLICAS 1 LEASE 3600000";
        let first = group.waits(line);
        let unheard = group.control.say("HGET key #fence").text();
        assert!(error(&group.control.say(line)).1.contains("is being confirmed"));
        assert_eq!(group.count("confirming"), 1);
        first.raw.reset();
        until(SOON, "the server has noticed", || group.count("confirming") == 0);
        let mut second = group.waits(line);
        group.cont_replicas();
        let token = second.token();
        assert_ne!(token.to_string(), unheard, "it is another hold");
        assert_held(&mut group.control, "key", "owner");
        assert_eq!(group.control.say("HGET key #fence").text(), token.to_string());
    }
}

mod demotion {
    use super::*;

    const UNBLOCKED: &str = "UNBLOCKED this server is now a replica and grants no locks";

    fn demote(client: &mut Raw) {
        // Nobody listens there: the link stays down, and the data as they are.
        client.order("REPLICAOF 127.0.0.1 1");
    }

    #[test]
    fn session_is_notified_of_waits_and_holds_at_demotion() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        let token = session.take(&mut client, "LOCK.ACQUIRE held owner WATCHDOG");
        let other = session.take(&mut client, "LOCK.ACQUIRE other owner EPHEMERAL");
        let plain = session.take(&mut client, "LOCK.ACQUIRE plain owner");
        client.take("LOCK.ACQUIRE unbound owner");
        client.take("LOCK.ACQUIRE wanted holder");
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
        assert_eq!(error(&session.ask(&mut client, "LOCK.ACQUIRE wanted waiter WAIT 0")).0, "READONLY");
        assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil, "it goes on reading");
        until_nobody_waits(&server);
    }

    /// A server that becomes a replica unblocks everybody with an error and ends their connections, whatever they are
    /// blocked for; BLPOP's too. So a session that listens has to connect anew.
    #[test]
    fn blocked_reader_is_disconnected_at_demotion_as_blpop() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        session.take(&mut client, "LOCK.ACQUIRE held owner EPHEMERAL");
        session.listen(&server);
        let mut blpop = Waiter::sending(&server, "BLPOP list 0");
        demote(&mut client);
        let told = session.raw.read().unwrap();
        assert_eq!(error(&told), error(&blpop.end()));
        assert_eq!(error(&told).0, "UNBLOCKED");
        assert!(session.raw.read().is_err() && blpop.raw.read().is_err(), "and the connections end");
        until_ended_on_replica(&server, &mut client);
        assert_held(&mut client, "held", "owner");
    }

    #[track_caller]
    fn until_ended_on_replica(server: &Server, _: &mut Raw) {
        until(SOON, "the session has ended", || info_number(server, "holdfast", "holdfast_sessions") == 0);
    }

    /// Nothing is kept on a replica for sessions that end there.
    #[test]
    fn sessions_that_close_on_replica_leave_nothing() {
        let server = Server::start();
        let mut client = server.raw();
        let session = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key unread WAIT 0 LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key waits WAIT 0");
        client.order("LOCK.RELEASE key holder");
        demote(&mut client);
        session.raw.reset();
        until_ended_on_replica(&server, &mut client);
        assert!(!eventually(A_WHILE * 3, || client.say("EXISTS key") == Value::Int(0)), "a replica takes nothing back");
        for name in ["waiters", "session_waits", "undelivered_events", "bound_holds"] {
            assert_eq!(info_number(&server, "holdfast", &format!("holdfast_{name}")), 0, "{name}");
        }
        client.order("REPLICAOF NO ONE");
        assert!(!eventually(A_WHILE, || client.say("EXISTS key") == Value::Int(0)));
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
        client.take("LOCK.ACQUIRE key holder LEASE 3600000");
        for round in 0..3 {
            session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
            demote(&mut client);
            client.order("REPLICAOF NO ONE");
            assert_eq!(session.event(), Event::refused(&["key"], "owner", UNBLOCKED), "round {round}");
        }
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
        client.order("LOCK.RELEASE key holder");
        session.event().token_of(&["key"], "owner");
    }

    /// Each of them refuses the undecided requests.
    #[test]
    fn demotion_and_promotion_in_one_iteration() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE wanted holder LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1 LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE wanted owner WAIT 0");
        client.tell(&["REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"]);
        for _ in 0..2 {
            assert_eq!(client.read().expect("a reply"), Value::Okay);
        }
        let mut told = session.events(2);
        told.sort_by_key(|event| event.keys.clone());
        let refused = |key| Event::refused(&[key], "owner", UNBLOCKED);
        assert_eq!(told, [refused("key"), refused("wanted")]);
        assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
    }

    /// The hold lasts until its lease ends.
    #[test]
    fn unread_grant_can_be_read_after_demotion() {
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
        client.order("LOCK.RELEASE key holder");
        demote(&mut client);
        let told = session.events(2);
        let token = told[0].token_of(&["key"], "owner");
        assert_eq!(told[1], Event::unbound("key", "owner", token, "replica"));
        assert_eq!(holders(&mut client, "key")["owner"].field("client"), Value::Nil);
    }

    /// While the server replies to other clients.
    #[test]
    fn twenty_thousand_waits_are_refused_at_demotion() {
        const MANY: usize = 20_000;
        let server = Server::start();
        let mut client = server.raw();
        let mut session = Session::open(&server);
        client.take("LOCK.ACQUIRE key holder LEASE 600000");
        let lines: Vec<String> =
            (0..MANY).map(|number| session.naming(&format!("LOCK.ACQUIRE key owner-{number} WAIT 0"))).collect();
        client.say_all(&lines);
        demote(&mut client);
        let events = session.events(MANY);
        assert!(events.iter().all(|event| event.detail.as_deref() == Some(UNBLOCKED)));
        assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil);
    }

    /// On a replica there is nothing to be told, and asking does no harm.
    #[test]
    fn events_on_replica_returns_nothing() {
        let (master, replica) = (Server::start(), Server::start());
        replica.replica_of(&master);
        let mut session = Session::open(&replica);
        assert_eq!(session.raw.say("LOCK.EVENTS WAIT 20"), Value::Nil);
        assert_eq!(session.raw.say("LOCK.EVENTS"), Value::Nil);
        let (id, mut client) = (session.id.clone(), replica.raw());
        replica.replica_of_no_one();
        session.take(&mut client, "LOCK.ACQUIRE key owner WATCHDOG");
        client.order("LOCK.FORCE key");
        assert_eq!(events(&session.raw.say("LOCK.EVENTS WAIT 20000"))[0].kind, "lost");
        session.raw.close();
        until_ended(&mut client, &id);
    }
}
