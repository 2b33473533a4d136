//! A session ends with its connection, and with it the requests on its behalf.

use redis::Value;
use support::{Raw, Server, until};

use super::session::{Session, until_ended};
use crate::common::{deadline, info_number, words};
use crate::lines::{Reply, owners, waiters};
use crate::waiter::{Commands, SOON, Waiter, assert_held};

/// How a connection ends.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Closed,
    Reset,
    Killed,
    Quit,
    KilledWhileItListens,
    ClosedWhileItListens,
    Replaced,
    ReplacedWhileItListens,
}

impl Ending {
    const ALL: [Self; 8] = [
        Self::Closed,
        Self::Reset,
        Self::Killed,
        Self::Quit,
        Self::KilledWhileItListens,
        Self::ClosedWhileItListens,
        Self::Replaced,
        Self::ReplacedWhileItListens,
    ];

    /// Whether it blocks on events before it ends.
    fn listens(self) -> bool {
        matches!(self, Self::KilledWhileItListens | Self::ClosedWhileItListens | Self::ReplacedWhileItListens)
    }

    #[track_caller]
    fn end(self, mut session: Session, server: &Server, client: &mut Raw) {
        if self.listens() {
            session.listen(server);
        }
        match self {
            Self::Closed | Self::ClosedWhileItListens => session.raw.close(),
            Self::Reset => session.raw.reset(),
            Self::Quit => session.raw.send_lines(&["QUIT"]),
            Self::Killed | Self::KilledWhileItListens => {
                client.run_ok(&format!("CLIENT KILL ID {}", session.client));
            }
            Self::Replaced | Self::ReplacedWhileItListens => {
                Session::open(server).raw.run_ok(&format!("LOCK.SESSION REPLACES {}", session.id));
            }
        }
        until_ended(client, &session.id);
    }
}

#[test]
fn waits_of_closed_session_leave_queue() {
    let server = Server::start();
    let mut client = server.raw();
    for ending in Ending::ALL {
        let (session, mut next) = (Session::open(&server), Session::open(&server));
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0");
        session.wait(&mut client, "LOCK.MACQUIRE 2 key other second WAIT 0");
        next.wait(&mut client, "LOCK.ACQUIRE other next WAIT 0");
        ending.end(session, &server, &mut client);
        next.event().token_of(&["other"], "next");
        until(SOON, "the queue is empty", || waiters(&mut client, "key").is_empty());
        client.run_ok("LOCK.RELEASE key holder");
        assert_eq!(client.run("EXISTS key"), Value::Int(0), "{ending:?}");
        client.run_ok("DEL other");
    }
    assert_eq!(info_number(&server, "holdfast", "holdfast_session_waits"), 0);
}

#[test]
fn closed_session_releases_ephemeral_holds_and_watchdogs() {
    let server = Server::start();
    let mut client = server.raw();
    let mut watched = Vec::new();
    for ending in Ending::ALL {
        let session = Session::open(&server);
        let key = format!("watched-{ending:?}");
        session.get_token(&mut client, "LOCK.ACQUIRE ephemeral owner EPHEMERAL");
        session.get_token(&mut client, "LOCK.ACQUIRE both owner EPHEMERAL WATCHDOG LEASE 60000");
        session.get_token(&mut client, &format!("LOCK.ACQUIRE {key} owner WATCHDOG LEASE 3000"));
        session.get_token(&mut client, "LOCK.ACQUIRE neither owner LEASE 60000");
        let mut next = Waiter::start(&server, "ephemeral", "next");
        ending.end(session, &server, &mut client);
        next.token();
        until(SOON, "the ephemeral hold is released", || client.run("EXISTS both") == Value::Int(0));
        watched.push((deadline(&mut client, key.as_bytes()), key));
        assert_held(&mut client, "neither", "owner");
        client.run_ok("DEL ephemeral neither");
    }
    for (end, key) in watched {
        until(SOON, "the lease expires", || {
            let now = deadline(&mut client, key.as_bytes());
            assert!(now == end || now == -2, "{key}: renewed");
            now == -2
        });
    }
}

#[test]
fn unread_grant_goes_to_next_waiter() {
    let server = Server::start();
    let mut client = server.raw();
    for ending in Ending::ALL.into_iter().filter(|ending| !ending.listens()) {
        let (session, mut next) = (Session::open(&server), Session::open(&server));
        client.get_token("LOCK.ACQUIRE key holder");
        session.wait(&mut client, "LOCK.ACQUIRE key first WAIT 0 LEASE 3600000");
        session.wait(&mut client, "LOCK.ACQUIRE key second WAIT 0 LEASE 3600000");
        next.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0");
        client.run_ok("LOCK.RELEASE key holder");
        assert_held(&mut client, "key", "first");
        ending.end(session, &server, &mut client);
        next.event().token_of(&["key"], "next");
        client.run_ok("DEL key");
    }
    let undelivered = info_number(&server, "holdfast", "holdfast_grants_undelivered");
    assert_eq!(undelivered, 5, "each of them is undelivered");
}

#[test]
fn unread_grant_of_several_keys_goes_to_next_waiter() {
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE a holder");
    session.wait(&mut client, "LOCK.MACQUIRE 2 a b owner WAIT 0");
    client.run_ok("LOCK.RELEASE a holder");
    let (mut one, mut other) = (Waiter::start(&server, "a", "one"), Waiter::start(&server, "b", "other"));
    session.raw.reset();
    one.token();
    other.token();
}

/// The hold count decreases.
#[test]
fn undelivered_reentry_is_revoked() {
    let server = Server::builder().module_args(&["replicas-timeout", "3600000"]).start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let token = client.get_token("LOCK.ACQUIRE key owner LEASE 3600000");
    session.wait(&mut client, "LOCK.ACQUIRE key owner REPLICAS 1 EPHEMERAL");
    assert_eq!(client.run("HGET key owner").text(), "2");
    session.raw.reset();
    until(SOON, "the undelivered hold is revoked", || client.run("HGET key owner").text() == "1");
    assert_eq!(client.get_token("LOCK.ACQUIRE key owner"), token, "nothing is in the way any more");
    assert_eq!(client.run("HGET key owner").text(), "2");
}

#[test]
fn read_grant_stays() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
    let id = session.id.clone();
    session.raw.reset();
    until_ended(&mut client, &id);
    client.run("LOCK.INFO key");
    assert_held(&mut client, "key", "owner");
}

#[test]
fn requesting_connection_may_close() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    let mut asking = server.raw();
    session.wait(&mut asking, "LOCK.ACQUIRE key owner WAIT 0 WATCHDOG");
    session.get_token(&mut asking, "LOCK.ACQUIRE other owner EPHEMERAL");
    let id = asking.client_id();
    asking.reset();
    crate::lines::until_gone(&mut client, id);
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
    assert_held(&mut client, "other", "owner");
}

#[test]
fn reset_does_not_close_session() {
    let server = Server::start();
    let mut client = server.raw();
    let mut session = Session::open(&server);
    client.get_token("LOCK.ACQUIRE key holder");
    session.wait(&mut client, "LOCK.ACQUIRE key owner WAIT 0");
    let token = session.get_token(&mut client, "LOCK.ACQUIRE other owner EPHEMERAL");
    assert_eq!(session.raw.run("RESET"), Value::SimpleString("RESET".into()));
    assert_eq!(session.raw.run("LOCK.SESSION").field("id").text(), session.id);
    assert_eq!(session.get_token(&mut client, "LOCK.RENEW other owner"), token);
    client.run_ok("LOCK.RELEASE key holder");
    session.event().token_of(&["key"], "owner");
}

/// Ten thousand waits and as many holds end with one connection, while the server replies to others.
#[test]
fn many_waits_and_holds_end_with_session() {
    const MANY: usize = 10_000;
    let server = Server::start();
    let mut client = server.raw();
    let session = Session::open(&server);
    let each = |line: &str| (0..MANY).map(|number| line.replace('?', &number.to_string())).collect::<Vec<_>>();
    client.run_all(&each("LOCK.ACQUIRE wanted-? holder LEASE 600000"));
    client.run_all(&each(&session.with_session("LOCK.ACQUIRE wanted-? owner-? WAIT 0")));
    client.run_all(&each(&session.with_session("LOCK.ACQUIRE held-? owner-? EPHEMERAL LEASE 600000")));
    client.run_all(&each("LOCK.ACQUIRE unread-? holder LEASE 600000"));
    client.run_all(&each(&session.with_session("LOCK.ACQUIRE unread-? owner-? WAIT 0 LEASE 600000")));
    client.run_all(&each("LOCK.RELEASE unread-? holder"));
    assert_eq!(client.run("DBSIZE"), Value::Int(3 * MANY as i64));
    session.raw.reset();
    until(SOON, "its ephemeral holds are released", || client.run("DBSIZE") == Value::Int(MANY as i64));
    until(SOON, "no request waits", || info_number(&server, "holdfast", "holdfast_waiters") == 0);
    assert_eq!(owners(&mut client, "wanted-0"), ["holder"]);
    for name in ["sessions", "session_waits", "undelivered_events", "bound_holds"] {
        assert_eq!(info_number(&server, "holdfast", &format!("holdfast_{name}")), 0, "{name}");
    }
}

/// A lock that becomes free in the command in which a session closes goes to the next connected waiter.
#[test]
fn closing_session_is_granted_nothing() {
    let server = Server::start();
    let mut client = server.raw();
    let (dying, mut next) = (Session::open(&server), Session::open(&server));
    client.get_token("LOCK.ACQUIRE key holder LEASE 3600000");
    dying.wait(&mut client, "LOCK.ACQUIRE key dying WAIT 0 LEASE 3600000");
    next.wait(&mut client, "LOCK.ACQUIRE key next WAIT 0 LEASE 3600000");
    let kill = format!("CLIENT KILL ID {}", dying.client);
    let replies = client.call_all(&["MULTI", &kill, "LOCK.RELEASE key holder", "HEXISTS key next", "EXEC"].map(words));
    assert_eq!(replies[4].items(), [1, 1, 1].map(Value::Int));
    next.event().token_of(&["key"], "next");
}
