//! What was asked for in the mixed queues, what became of it, and what must not.

use std::collections::BTreeSet;

use support::resp::Value;

/// When a request was sent or a reply read, in steps of the one who sends and reads.
pub type Step = u64;

/// A request for locks, under an owner of its own.
#[derive(Debug, Default)]
pub struct Ask {
    /// What it asks for.
    pub keys: Vec<&'static str>,
    /// The session on whose behalf it is; none: a client that blocks.
    pub session: Option<u64>,
    /// The client that blocks.
    pub blocker: Option<u64>,
    /// It waits for as long as it takes.
    pub endless: bool,
    /// The newest token when it was sent: its own must be newer.
    pub floor: i64,
    /// Its token, once it was told.
    pub token: Option<i64>,
    /// `WAITING` was answered, and nothing has been told since.
    pub waits: bool,
    /// `CLIENT UNBLOCK` was sent: if it was granted just then, that is revoked a moment after its reply.
    pub unblocked: bool,
    /// `LOCK.CANCEL` was sent.
    pub cancelled: bool,
    /// Nothing of it waits or holds since then, nor is told by what was asked for later.
    pub over: Option<Step>,
    /// Its owner has begun to release it.
    pub returned: bool,
    /// Its owner gave all of it back, so it can't be lost.
    pub released: bool,
    /// What it has may end without its owner's doing: by its lease, by other clients, with a connection.
    pub frail: bool,
    /// Of these keys it was told that they are lost.
    pub lost: BTreeSet<String>,
}

/// All requests. The owner of the one with the number 7 is called `w7`.
#[derive(Debug, Default)]
pub struct Ledger {
    asks: Vec<Ask>,
    /// Those that may still wait or hold.
    pub live: BTreeSet<usize>,
    /// The newest token that was read.
    pub newest: i64,
    /// How many events were read.
    pub told: u64,
}

/// Who holds a lock and who waits for it, in the server's words.
#[derive(Debug)]
pub struct Seen {
    /// How many may hold; 0: any number.
    pub limit: i64,
    /// Those that hold, and their tokens.
    pub holders: Vec<(String, i64)>,
    /// Those that wait.
    pub waiters: Vec<String>,
}

impl Ledger {
    /// Notes a request that is about to be sent, and returns its number.
    pub fn ask(&mut self, ask: Ask) -> usize {
        let number = self.asks.len();
        self.asks.push(Ask { floor: self.newest, ..ask });
        self.live.insert(number);
        number
    }

    /// A request by its number.
    pub fn get(&mut self, number: usize) -> &mut Ask {
        &mut self.asks[number]
    }

    /// Nothing of a request is left.
    pub fn over(&mut self, number: usize, at: Step) {
        let ask = &mut self.asks[number];
        ask.over = ask.over.or(Some(at));
        ask.waits = false;
        self.live.remove(&number);
    }

    /// The server has replied to a request: at once, or, if its client blocked, at the end of its wait.
    pub fn answered(&mut self, number: usize, reply: &Value, at: Step) -> Result<(), String> {
        let ask = &mut self.asks[number];
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
                    "NOSESSION" => ask.frail,
                    _ => false,
                };
                if !expected {
                    return Err(format!("w{number} was answered {error:?}: {ask:?}"));
                }
            }
            other => return Err(format!("w{number} was answered {other:?}: {ask:?}")),
        }
        self.over(number, at);
        Ok(())
    }

    fn granted(&mut self, number: usize, token: i64) -> Result<(), String> {
        let ask = &mut self.asks[number];
        if token <= ask.floor {
            return Err(format!(
                "w{number} was granted token {token}, older than {}, which was given before",
                ask.floor
            ));
        }
        ask.token = Some(token);
        self.newest = self.newest.max(token);
        Ok(())
    }

    /// A session has read an event, by a request that was sent at `asked` and answered at `at`.
    pub fn event(&mut self, session: u64, event: &Value, (asked, at): (Step, Step)) -> Result<(), String> {
        self.told += 1;
        let Value::Array(parts) = event else { return Err(format!("an event is {event:?}")) };
        let [kind, _, keys, owner, token, _] = &parts[..] else { return Err(format!("an event is {event:?}")) };
        let number = number_of(&text(owner)).filter(|number| *number < self.asks.len());
        let Some(number) = number else { return Err(format!("an event of nobody: {event:?}")) };
        let ask = &mut self.asks[number];
        let wrong = |ask: &Ask, why: &str| Err(format!("{why}: {event:?}, to session {session}, of {ask:?}"));
        if ask.session != Some(session) {
            return wrong(ask, "another session was told");
        }
        if ask.cancelled && ask.over.is_some_and(|over| asked > over) {
            return wrong(ask, "told after LOCK.CANCEL was answered");
        }
        let kind = text(kind);
        if kind == "lost" {
            let Value::Array(keys) = keys else { return wrong(ask, "of no key") };
            let first = keys.iter().all(|key| ask.lost.insert(text(key)));
            return match (first, ask.released) {
                (false, _) => wrong(ask, "told twice of a loss"),
                (_, true) => wrong(ask, "lost what was released"),
                _ if !ask.frail => wrong(ask, "lost for no reason"),
                _ => Ok(()),
            };
        }
        // A cancel that has just been answered may have met an event that was on its way.
        let on_its_way = ask.cancelled && ask.over.is_some();
        if !std::mem::take(&mut ask.waits) && !on_its_way {
            return wrong(ask, "told twice how it ended");
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

    /// Other clients, or a lease, or the end of a connection, may end what these have.
    pub fn make_frail(&mut self, which: impl Fn(&Ask) -> bool) {
        for number in &self.live {
            let ask = &mut self.asks[*number];
            ask.frail |= which(ask);
        }
    }

    /// A session is gone, and with it whatever it waited for.
    pub fn session_ended(&mut self, session: u64) {
        for number in &self.live {
            let ask = &mut self.asks[*number];
            if ask.session == Some(session) {
                (ask.frail, ask.waits) = (true, false);
            }
        }
    }

    /// An owner has been answered what is left of what it gave back, key by key.
    pub fn gave_back(&mut self, number: usize, left: &[Value], at: Step) -> Result<(), String> {
        let ask = &mut self.asks[number];
        ask.released = left.iter().all(|left| *left == Value::Int(0));
        if !(ask.released || ask.frail || ask.cancelled) {
            return Err(format!("w{number} gave back what it held, and was told {left:?}: {ask:?}"));
        }
        self.over(number, at);
        Ok(())
    }

    /// Compares what the server shows of a lock with what is known of it.
    pub fn check(&mut self, key: &str, seen: &Seen) -> Result<(), String> {
        let wrong = |why: String| Err(format!("{key}: {why} in {seen:?}"));
        if seen.limit > 0 && seen.holders.len() as i64 > seen.limit {
            return wrong("more hold than may".into());
        }
        let names: BTreeSet<&String> = seen.holders.iter().map(|(owner, _)| owner).collect();
        if names.len() < seen.holders.len() {
            return wrong("one holds it twice".into());
        }
        for owner in names.into_iter().chain(&seen.waiters) {
            match number_of(owner).and_then(|number| self.asks.get(number)) {
                None => return wrong(format!("{owner} never asked")),
                Some(ask) if ask.over.is_some() && !ask.unblocked => {
                    return wrong(format!("{owner} is through: {ask:?}"));
                }
                Some(_) => {}
            }
        }
        for number in &self.live {
            let ask = &self.asks[*number];
            let Some(token) = ask.token.filter(|_| !ask.frail && ask.keys.contains(&key)) else { continue };
            if !seen.holders.contains(&(format!("w{number}"), token)) {
                return wrong(format!("w{number} lost it without a word: {ask:?}"));
            }
        }
        Ok(())
    }

    /// A request of a session whose wait nobody has told the end of.
    pub fn untold(&self, session: u64) -> Option<usize> {
        let waits = |number: &&usize| self.asks[**number].waits && self.asks[**number].session == Some(session);
        self.live.iter().find(waits).copied()
    }
}

/// The number of the request that this owner made.
pub fn number_of(owner: &str) -> Option<usize> {
    owner.strip_prefix('w')?.parse().ok()
}

/// A string; of anything else, none.
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

    /// One that waits on behalf of session 1.
    fn waiting() -> Ledger {
        let mut ledger = Ledger { newest: 10, ..Ledger::default() };
        let number = ledger.ask(Ask { keys: vec!["k"], session: Some(1), ..Ask::default() });
        ledger.answered(number, &Value::SimpleString("WAITING".into()), 1).unwrap();
        ledger
    }

    fn seen(limit: i64, holders: &[(&str, i64)], waiters: &[&str]) -> Seen {
        let holders = holders.iter().map(|(owner, token)| ((*owner).to_owned(), *token)).collect();
        Seen { limit, holders, waiters: waiters.iter().map(|owner| (*owner).to_owned()).collect() }
    }

    #[test]
    fn event_must_come_once_to_its_session_with_new_token() {
        assert!(waiting().event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).is_ok());
        assert!(waiting().event(1, &event("timeout", "w0", Value::Nil), (2, 2)).is_ok());
        assert!(waiting().event(2, &event("granted", "w0", Value::Int(11)), (2, 2)).is_err(), "of another session");
        assert!(waiting().event(1, &event("granted", "w0", Value::Int(10)), (2, 2)).is_err(), "an old token");
        assert!(waiting().event(1, &event("granted", "w1", Value::Int(11)), (2, 2)).is_err(), "nobody asked");
        let mut ledger = waiting();
        ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(12)), (3, 3)).is_err(), "twice");
        assert_eq!(waiting().untold(1), Some(0));
        assert_eq!(ledger.untold(1), None);
        let mut ledger = waiting();
        ledger.event(1, &event("timeout", "w0", Value::Nil), (2, 2)).unwrap();
        assert!(ledger.event(1, &event("timeout", "w0", Value::Nil), (3, 3)).is_err(), "twice");
    }

    #[test]
    fn cancelled_request_gets_no_more_events() {
        let mut ledger = waiting();
        ledger.get(0).cancelled = true;
        ledger.over(0, 5);
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(11)), (4, 6)).is_ok(), "it was on its way");
        assert!(ledger.event(1, &event("granted", "w0", Value::Int(11)), (6, 7)).is_err());
        assert!(ledger.check("k", &seen(1, &[], &["w0"])).is_err());
        assert!(ledger.check("k", &seen(1, &[("w0", 11)], &[])).is_err());
    }

    #[test]
    fn loss_is_reported_once_and_not_after_release() {
        let lost = |ledger: &mut Ledger| ledger.event(1, &event("lost", "w0", Value::Int(11)), (3, 3));
        let held = || {
            let mut ledger = waiting();
            ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
            ledger
        };
        assert!(lost(&mut held()).is_err(), "for no reason");
        let mut ledger = held();
        ledger.make_frail(|_| true);
        assert!(lost(&mut ledger).is_ok());
        assert!(lost(&mut ledger).is_err());
        let mut ledger = held();
        ledger.make_frail(|_| true);
        ledger.get(0).released = true;
        assert!(lost(&mut ledger).is_err());
    }

    #[test]
    fn state_of_server_must_agree_with_ledger() {
        let mut ledger = waiting();
        ledger.event(1, &event("granted", "w0", Value::Int(11)), (2, 2)).unwrap();
        ledger.ask(Ask { keys: vec!["k"], ..Ask::default() });
        assert!(ledger.check("k", &seen(1, &[("w0", 11)], &["w1"])).is_ok());
        assert!(ledger.check("k", &seen(1, &[("w0", 11), ("w1", 12)], &[])).is_err(), "two");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("w1", 12)], &[])).is_ok(), "any number");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("w0", 11)], &[])).is_err(), "twice");
        assert!(ledger.check("k", &seen(1, &[("w0", 12)], &[])).is_err(), "another token");
        assert!(ledger.check("k", &seen(1, &[("w1", 12)], &[])).is_err(), "w0 has lost it");
        assert!(ledger.check("k", &seen(0, &[("w0", 11), ("x", 1)], &[])).is_err(), "a stranger");
        assert!(ledger.check("other", &seen(1, &[], &[])).is_ok());
    }
}
