//! The requests in the mixed queues, their outcomes, and the outcomes that are not allowed.

use std::collections::BTreeSet;

use support::resp::Value;

/// The time of a request or reply, in steps of the player.
pub type Step = u64;

/// A lock request, with its own owner.
#[derive(Debug, Default)]
pub struct LockRequest {
    /// Its keys.
    pub keys: Vec<&'static str>,
    /// The session on whose behalf it is made; `None`: a blocking client.
    pub session: Option<u64>,
    /// The blocking client.
    pub blocker: Option<u64>,
    /// It waits without a timeout.
    pub endless: bool,
    /// The newest token when it was sent: its own must be greater.
    pub floor: i64,
    /// Its token, once it was received.
    pub token: Option<i64>,
    /// Its reply was `WAITING`, and the event of its outcome has not been read, also if it was withdrawn since.
    pub waits: bool,
    /// `CLIENT UNBLOCK` was sent. A grant at the same time is revoked shortly after its reply.
    pub unblocked: bool,
    /// `LOCK.RELEASE` or `LOCK.MRELEASE` with `ALL` was sent.
    pub cancelled: bool,
    /// From then on it neither waits nor holds, and later requests get no event of it.
    pub over: Option<Step>,
    /// Its owner has begun to release it.
    pub returned: bool,
    /// Its owner released all of it, so it can't be lost.
    pub released: bool,
    /// Its holds may end without its owner: by their lease, by other clients, with a connection.
    pub may_be_lost: bool,
    /// Keys with a loss event.
    pub lost: BTreeSet<String>,
}

/// All requests. The owner of request 7 is `w7`.
#[derive(Debug, Default)]
pub struct Ledger {
    requests: Vec<LockRequest>,
    /// The requests that may still wait or hold.
    pub live: BTreeSet<usize>,
    /// The greatest token that was read.
    pub newest: i64,
    /// The number of events read.
    pub notified: u64,
}

/// The holders and waiters of a lock, as the server reports them.
#[derive(Debug)]
pub struct LockState {
    /// The limit; 0: none.
    pub limit: i64,
    /// The holders and their tokens.
    pub holders: Vec<(String, i64)>,
    /// The waiters.
    pub waiters: Vec<String>,
}

impl Ledger {
    /// Records a request before it is sent, and returns its number.
    pub fn ask(&mut self, ask: LockRequest) -> usize {
        let number = self.requests.len();
        self.requests.push(LockRequest { floor: self.newest, ..ask });
        self.live.insert(number);
        number
    }

    /// The request with this number.
    pub fn get(&mut self, number: usize) -> &mut LockRequest {
        &mut self.requests[number]
    }

    /// The request has ended without a hold.
    pub fn over(&mut self, number: usize, at: Step) {
        let ask = &mut self.requests[number];
        ask.over = ask.over.or(Some(at));
        ask.waits &= ask.cancelled;
        self.live.remove(&number);
    }

    /// The reply to a request: immediately, or, for a blocking client, at the end of its wait.
    pub fn answered(&mut self, number: usize, reply: &Value, at: Step) -> Result<(), String> {
        let ask = &mut self.requests[number];
        match reply {
            Value::Int(token) => return self.granted(number, *token),
            Value::SimpleString(word) if word == "WAITING" && ask.session.is_some() => {
                ask.waits = true;
                return Ok(());
            }
            Value::Nil => {}
            Value::ServerError(_) => {
                let error = support::resp::error(reply).unwrap_or_default();
                let code = error.split(' ').next().unwrap_or_default();
                let expected = match code {
                    "ERR" => error.contains("too many"),
                    "UNCONFIRMED" | "UNBLOCKED" => ask.session.is_none(),
                    "NOSESSION" => ask.may_be_lost,
                    _ => false,
                };
                if !expected {
                    return Err(format!("w{number} returned {error:?}: {ask:?}"));
                }
            }
            other => return Err(format!("w{number} returned {other:?}: {ask:?}")),
        }
        self.over(number, at);
        Ok(())
    }

    fn granted(&mut self, number: usize, token: i64) -> Result<(), String> {
        let ask = &mut self.requests[number];
        if token <= ask.floor {
            return Err(format!("w{number} was granted token {token}, less than the earlier {}", ask.floor));
        }
        ask.token = Some(token);
        self.newest = self.newest.max(token);
        Ok(())
    }

    /// A session has read an event, by a request that was sent at `asked`, with its reply at `at`.
    pub fn event(&mut self, session: u64, event: &Value, (asked, at): (Step, Step)) -> Result<(), String> {
        self.notified += 1;
        let Value::Array(parts) = event else { return Err(format!("an event is {event:?}")) };
        let [kind, _, keys, owner, token, _] = &parts[..] else { return Err(format!("an event is {event:?}")) };
        let number = number_of(&text(owner)).filter(|number| *number < self.requests.len());
        let Some(number) = number else { return Err(format!("an event of an unknown owner: {event:?}")) };
        let ask = &mut self.requests[number];
        let wrong = |ask: &LockRequest, why: &str| Err(format!("{why}: {event:?}, to session {session}, of {ask:?}"));
        if ask.session != Some(session) {
            return wrong(ask, "sent to another session");
        }
        let kind = text(kind);
        // (What had happened before is still reported, and that the request was withdrawn.)
        if kind == "granted" && ask.cancelled && ask.over.is_some_and(|over| asked > over) {
            return wrong(ask, "granted after the reply to RELEASE … ALL");
        }
        if kind == "lost" {
            let Value::Array(keys) = keys else { return wrong(ask, "without keys") };
            let first = keys.iter().all(|key| ask.lost.insert(text(key)));
            return match (first, ask.released) {
                (false, _) => wrong(ask, "a second loss event"),
                (_, true) => wrong(ask, "lost after its release"),
                _ if !ask.may_be_lost => wrong(ask, "lost without a reason"),
                _ => Ok(()),
            };
        }
        if !std::mem::take(&mut ask.waits) {
            return wrong(ask, "a second outcome");
        }
        match (kind.as_str(), token) {
            ("granted", Value::Int(token)) => self.granted(number, *token),
            ("timeout" | "refused", _) => {
                self.over(number, at);
                Ok(())
            }
            _ => wrong(ask, "an unknown event"),
        }
    }

    /// Other clients, or a lease, or the end of a connection, may end the holds of these requests.
    pub fn allow_loss(&mut self, which: impl Fn(&LockRequest) -> bool) {
        for number in &self.live {
            let ask = &mut self.requests[*number];
            ask.may_be_lost |= which(ask);
        }
    }

    /// A session has ended, and with it its waits.
    pub fn session_ended(&mut self, session: u64) {
        for number in &self.live {
            let ask = &mut self.requests[*number];
            if ask.session == Some(session) {
                (ask.may_be_lost, ask.waits) = (true, false);
            }
        }
    }

    /// An owner has the replies to its releases, key by key.
    pub fn released(&mut self, number: usize, left: &[Value], at: Step) -> Result<(), String> {
        let ask = &mut self.requests[number];
        ask.released = left.iter().all(|left| *left == Value::Int(1));
        if !(ask.released || ask.may_be_lost || ask.cancelled) {
            return Err(format!("w{number} released its holds, and got {left:?}: {ask:?}"));
        }
        self.over(number, at);
        Ok(())
    }

    /// Compares the state of a lock on the server with the expected state.
    pub fn check(&mut self, key: &str, seen: &LockState) -> Result<(), String> {
        let wrong = |why: String| Err(format!("{key}: {why} in {seen:?}"));
        if seen.limit > 0 && seen.holders.len() as i64 > seen.limit {
            return wrong("too many holders".into());
        }
        let names: BTreeSet<&String> = seen.holders.iter().map(|(owner, _)| owner).collect();
        if names.len() < seen.holders.len() {
            return wrong("an owner holds it twice".into());
        }
        for owner in names.into_iter().chain(&seen.waiters) {
            match number_of(owner).and_then(|number| self.requests.get(number)) {
                None => return wrong(format!("{owner} made no request")),
                Some(ask) if ask.over.is_some() && !ask.unblocked => {
                    return wrong(format!("{owner} has ended: {ask:?}"));
                }
                Some(_) => {}
            }
        }
        for number in &self.live {
            let ask = &self.requests[*number];
            let Some(token) = ask.token.filter(|_| !ask.may_be_lost && ask.keys.contains(&key)) else { continue };
            if !seen.holders.contains(&(format!("w{number}"), token)) {
                return wrong(format!("w{number} lost it without an event: {ask:?}"));
            }
        }
        Ok(())
    }

    /// A request of a session whose outcome is missing.
    pub fn without_outcome(&self, session: u64) -> Option<usize> {
        self.requests.iter().position(|ask| ask.waits && ask.session == Some(session))
    }
}

/// The number of this owner's request.
pub fn number_of(owner: &str) -> Option<usize> {
    owner.strip_prefix('w')?.parse().ok()
}

/// The string, or an empty one for other values.
pub fn text(value: &Value) -> String {
    support::resp::text(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn event(kind: &str, owner: &str, token: Value) -> Value {
        Value::Array(vec![bulk(kind), Value::Int(4), Value::Array(vec![bulk("k")]), bulk(owner), token, Value::Nil])
    }

    /// A request that waits on behalf of session 1.
    fn waiting() -> Ledger {
        let mut ledger = Ledger { newest: 10, ..Ledger::default() };
        let number = ledger.ask(LockRequest { keys: vec!["k"], session: Some(1), ..LockRequest::default() });
        ledger.answered(number, &Value::SimpleString("WAITING".into()), 1).unwrap();
        ledger
    }

    fn seen(limit: i64, holders: &[(&str, i64)], waiters: &[&str]) -> LockState {
        let holders = holders.iter().map(|(owner, token)| ((*owner).to_owned(), *token)).collect();
        LockState { limit, holders, waiters: waiters.iter().map(|owner| (*owner).to_owned()).collect() }
    }

    #[test]
    fn event_must_come_once_to_its_session_with_new_token() {
        assert!(waiting().event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).is_ok());
        assert!(waiting().event(1, &event("timeout", "w0", Value::Nil), (2, 2)).is_ok());
        assert!(waiting().event(2, &event("granted", "w0", Value::Int(11)), (2, 2)).is_err(), "of another session");
        assert!(waiting().event(1, &event("granted", "w0", Value::Int(10)), (2, 2)).is_err(), "an earlier token");
        assert!(waiting().event(1, &event("granted", "w1", Value::Int(11)), (2, 2)).is_err(), "an unknown request");
        let mut ledger = waiting();
        ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(12)), (3, 3)).is_err(), "twice");
        assert_eq!(waiting().without_outcome(1), Some(0));
        assert_eq!(ledger.without_outcome(1), None);
        let mut ledger = waiting();
        ledger.event(1, &event("timeout", "w0", Value::Nil), (2, 2)).unwrap();
        assert!(ledger.event(1, &event("timeout", "w0", Value::Nil), (3, 3)).is_err(), "twice");
    }

    #[test]
    fn cancelled_request_is_not_granted_afterwards() {
        let mut ledger = waiting();
        ledger.get(0).cancelled = true;
        ledger.over(0, 5);
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(11)), (6, 7)).is_err());
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(11)), (4, 6)).is_ok(), "the event was already sent");
        assert!(ledger.event(1, &event("refused", "w0", Value::Nil), (6, 7)).is_err(), "a second outcome");
        assert!(ledger.check("k", &seen(1, &[], &["w0"])).is_err());
        assert!(ledger.check("k", &seen(1, &[("w0", 11)], &[])).is_err());
    }

    #[test]
    fn withdrawn_request_has_one_outcome() {
        let mut ledger = waiting();
        ledger.get(0).cancelled = true;
        ledger.over(0, 5);
        assert_eq!(ledger.without_outcome(1), Some(0));
        assert!(ledger.event(1, &event("refused", "w0", Value::Nil), (6, 7)).is_ok());
        assert!(ledger.event(1, &event("refused", "w0", Value::Nil), (6, 7)).is_err(), "twice");
    }

    #[test]
    fn loss_is_reported_once_and_not_after_release() {
        let lost = |ledger: &mut Ledger| ledger.event(1, &event("lost", "w0", Value::Int(11)), (3, 3));
        let held = || {
            let mut ledger = waiting();
            ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
            ledger
        };
        assert!(lost(&mut held()).is_err(), "without a reason");
        let mut ledger = held();
        ledger.allow_loss(|_| true);
        assert!(lost(&mut ledger).is_ok());
        assert!(lost(&mut ledger).is_err());
        let mut ledger = held();
        ledger.allow_loss(|_| true);
        ledger.get(0).released = true;
        assert!(lost(&mut ledger).is_err());
    }

    #[test]
    fn state_of_server_must_agree_with_ledger() {
        let mut ledger = waiting();
        ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
        ledger.ask(LockRequest { keys: vec!["k"], ..LockRequest::default() });
        assert!(ledger.check("k", &seen(1, &[("w0", 11)], &["w1"])).is_ok());
        assert!(ledger.check("k", &seen(1, &[("w0", 11), ("w1", 12)], &[])).is_err(), "two");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("w1", 12)], &[])).is_ok(), "any number");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("w0", 11)], &[])).is_err(), "twice");
        assert!(ledger.check("k", &seen(1, &[("w0", 12)], &[])).is_err(), "another token");
        assert!(ledger.check("k", &seen(1, &[("w1", 12)], &[])).is_err(), "w0 has lost the lock");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("x", 1)], &[])).is_err(), "an unknown owner");
        assert!(ledger.check("other", &seen(1, &[], &[])).is_ok());
    }
}
