//! The commands as they are sent, and replies and events as they come.

use std::time::Duration;

use redis::{Cmd, RedisError, Value, cmd};

use crate::error::Why;
use crate::names::{Keys, Owner};
use crate::terms::{Ending, Lease, Limit, Terms, Wait};

/// What a request for a lock is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Granted(u64),
    NotGranted,
    Waiting,
}

/// The answer of `LOCK.NEXT`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) events: Vec<Event>,
    pub(crate) alive: Option<Alive>,
}

/// A sign of life of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Alive {
    /// Within this time the server answers the next question.
    pub(crate) next_within: Duration,
    /// The lease of a request that names none.
    pub(crate) default_lease: Duration,
    /// The part of its lease that every hold has left at least that the server renews for the session, counted from when the
    /// question was sent.
    pub(crate) sure: f64,
    /// Whether the server would take a write.
    pub(crate) takes_writes: bool,
    /// Whether a wait that is asked for again may say how long it has waited: not where the server is of version 0.2.
    pub(crate) takes_waited: bool,
}

/// What a server of version 0.2 says nothing about: it renews every third of a lease. What is missing to two thirds is for one
/// that stood still for a moment.
const SURE: u64 = 500;

/// What the server tells a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) owner: Owner,
    pub(crate) news: News,
    /// Of a grant: how long the hold lasts at least, from when the question was sent that this answers. A server of version
    /// 0.2 does not say it.
    pub(crate) lasts: Option<Duration>,
}

/// What happened to a request or a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Granted(u64),
    TimedOut,
    /// With the server's words.
    Refused(String),
    Lost(Option<u64>, Why),
    /// The hold may live on; this session's connection has no part in it any more.
    Untied(Option<u64>),
}

/// `LOCK.ACQUIRE` or `LOCK.MACQUIRE`. `HOLDS 1` makes it harmless to say it twice. A wait that was begun at another session
/// `waited` ago keeps its place.
pub(crate) fn acquire(
    keys: &Keys,
    owner: &Owner,
    terms: &Terms,
    wait: Wait,
    waited: Option<Duration>,
    session: &str,
) -> Cmd {
    let mut cmd = named("LOCK.ACQUIRE", "LOCK.MACQUIRE", keys);
    cmd.arg(owner.as_bytes());
    match wait {
        Wait::No => {}
        Wait::For(time) => drop(cmd.arg("WAIT").arg(milliseconds(time))),
        Wait::Forever => drop(cmd.arg("WAIT").arg(0)),
    }
    if let Some(waited) = waited.filter(|_| wait != Wait::No) {
        cmd.arg("WAITED").arg(milliseconds(waited));
    }
    match terms.limit {
        Limit::One => {}
        Limit::Of(limit) => drop(cmd.arg("LIMIT").arg(limit)),
        Limit::Shared => drop(cmd.arg("SHARED")),
    }
    cmd.arg("HOLDS").arg(1);
    with_terms(cmd, terms, session)
}

/// `LOCK.RENEW` or `LOCK.MRENEW` of this one hold, tying it to the session; of whatever the owner holds, if its token is
/// not known.
pub(crate) fn renew(keys: &Keys, owner: &Owner, token: Option<u64>, terms: &Terms, session: &str) -> Cmd {
    let mut cmd = named("LOCK.RENEW", "LOCK.MRENEW", keys);
    cmd.arg(owner.as_bytes());
    if let Some(token) = token {
        cmd.arg("TOKEN").arg(token);
    }
    with_terms(cmd, terms, session)
}

/// `LOCK.RENEW` of one key, which raises the token to at least `fence`, and all that the server gives later above it.
pub(crate) fn raise(keys: &Keys, owner: &Owner, fence: u64, terms: &Terms, session: &str) -> Cmd {
    let mut cmd = renew(keys, owner, None, terms, session);
    cmd.arg("FENCE").arg(fence);
    cmd
}

/// `LOCK.RELEASE` or `LOCK.MRELEASE` of all of this one hold; of whatever the owner holds, if its token is not known.
pub(crate) fn release(keys: &Keys, owner: &Owner, token: Option<u64>) -> Cmd {
    let mut cmd = named("LOCK.RELEASE", "LOCK.MRELEASE", keys);
    cmd.arg(owner.as_bytes());
    if let Some(token) = token {
        cmd.arg("TOKEN").arg(token);
    }
    cmd.arg("ALL");
    cmd
}

/// `LOCK.INFO` of the first key.
pub(crate) fn info(keys: &Keys) -> Cmd {
    let mut info = cmd("LOCK.INFO");
    info.arg(keys.first());
    info
}

/// `LOCK.FORCE` of the first key.
pub(crate) fn force(keys: &Keys) -> Cmd {
    let mut force = cmd("LOCK.FORCE");
    force.arg(keys.first());
    force
}

/// How many holders `LOCK.FORCE` has ended.
pub(crate) fn forced(value: Value) -> Result<u64, RedisError> {
    match value {
        Value::Int(count) => unsigned(count),
        other => Err(nonsense(&other)),
    }
}

/// `LOCK.CANCEL`; of several keys any one may be named.
pub(crate) fn cancel(keys: &Keys, owner: &Owner, session: &str) -> Cmd {
    let mut cancel = cmd("LOCK.CANCEL");
    cancel.arg(keys.first()).arg(owner.as_bytes()).arg("SESSION").arg(session);
    cancel
}

/// `LOCK.OWNER`, the first thing that a session says: these that were before it have ended.
pub(crate) fn begin<'s>(replaced: impl Iterator<Item = &'s str>) -> Cmd {
    let mut begin = cmd("LOCK.OWNER");
    for (number, id) in replaced.enumerate() {
        if number == 0 {
            begin.arg("REPLACES");
        }
        begin.arg(id);
    }
    begin
}

/// `LOCK.NEXT`, answered when there is something to tell, or as often as the session's leases need a sign of life; and
/// after `wait` at the latest.
pub(crate) fn next(wait: Option<Duration>) -> Cmd {
    let mut next = cmd("LOCK.NEXT");
    next.arg("WAIT").arg(wait.map_or(0, milliseconds)).arg("ALIVE");
    next
}

fn named(one: &str, several: &str, keys: &Keys) -> Cmd {
    if keys.len() == 1 {
        let mut cmd = cmd(one);
        cmd.arg(keys.first());
        return cmd;
    }
    let mut cmd = cmd(several);
    cmd.arg(keys.len());
    for key in keys.iter() {
        cmd.arg(key);
    }
    cmd
}

fn with_terms(mut cmd: Cmd, terms: &Terms, session: &str) -> Cmd {
    let (lease, watched) = match terms.lease {
        Lease::Watched(lease) => (lease, true),
        Lease::Fixed(lease) => (Some(lease), false),
    };
    if let Some(lease) = lease {
        cmd.arg("LEASE").arg(milliseconds(lease));
    }
    if watched {
        cmd.arg("WATCHDOG");
    }
    if terms.ending == Ending::Released {
        cmd.arg("EPHEMERAL");
    }
    if let Some(replicas) = terms.replicas {
        cmd.arg("REPLICAS").arg(replicas.get());
    }
    cmd.arg("SESSION").arg(session);
    cmd
}

/// Whole milliseconds, rounded up: nothing becomes 0, which means something else.
fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

/// The reply of a request for a lock.
pub(crate) fn reply(value: Value) -> Result<Reply, RedisError> {
    match value {
        Value::Int(token) => Ok(Reply::Granted(unsigned(token)?)),
        Value::Nil => Ok(Reply::NotGranted),
        Value::SimpleString(text) if text == "WAITING" => Ok(Reply::Waiting),
        other => Err(nonsense(&other)),
    }
}

/// The reply of a renewal: as the request's, and of several keys a list of them. What is gone of one is gone of all.
pub(crate) fn renewed(value: Value) -> Result<Reply, RedisError> {
    let Value::Array(each) = value else { return reply(value) };
    let each = each.into_iter().map(reply).collect::<Result<Vec<_>, _>>()?;
    Ok(each
        .iter()
        .copied()
        .find(|reply| *reply == Reply::NotGranted)
        .or(each.first().copied())
        .unwrap_or(Reply::NotGranted))
}

/// Whether a release found the hold, all of it.
pub(crate) fn released(value: Value) -> Result<bool, RedisError> {
    match value {
        Value::Int(_) => Ok(true),
        Value::Nil => Ok(false),
        Value::Array(each) => Ok(each.iter().all(|one| matches!(one, Value::Int(_)))),
        other => Err(nonsense(&other)),
    }
}

/// The reply of `LOCK.NEXT`. A kind of event that this client does not know is left out.
pub(crate) fn answer(value: Value) -> Result<Answer, RedisError> {
    let Value::Array(events) = value else { return Err(nonsense(&value)) };
    let mut answer = Answer::default();
    for value in events {
        match sign_of_life(&value) {
            Some(alive) => answer.alive = Some(alive),
            None => answer.events.extend(event(value)?),
        }
    }
    Ok(answer)
}

/// The reply of a `LOCK.NEXT` that nothing can have happened before.
pub(crate) fn alive(value: Value) -> Result<Alive, RedisError> {
    let nonsense = nonsense(&value);
    answer(value)?.alive.ok_or(nonsense)
}

fn sign_of_life(event: &Value) -> Option<Alive> {
    let Value::Array(fields) = event else { return None };
    let [kind, _database, _keys, _owner, _token, detail, ..] = fields.as_slice() else { return None };
    let detail = text(detail).filter(|_| bytes(kind) == Some(b"alive"))?;
    // Version 0.2 says the first two only; later versions say more behind these.
    let mut numbers = detail.split(' ').map_while(|number| number.parse().ok());
    let mut time = || numbers.next().map(Duration::from_millis);
    let (next_within, default_lease) = (time()?, time()?);
    let sure = numbers.next();
    let takes_waited = sure.is_some();
    let sure = sure.unwrap_or(SURE).min(1_000) as f64 / 1_000.0;
    let takes_writes = numbers.next() != Some(0);
    Some(Alive { next_within, default_lease, sure, takes_writes, takes_waited })
}

/// The events that this client knows.
const KINDS: [&str; 5] = ["granted", "timeout", "refused", "lost", "untied"];

fn event(value: Value) -> Result<Option<Event>, RedisError> {
    let fields = match &value {
        Value::Array(fields) => fields.as_slice(),
        _ => return Err(nonsense(&value)),
    };
    let [kind, _database, _keys, owner, token, detail, ..] = fields else { return Err(nonsense(&value)) };
    let kind = text(kind).ok_or_else(|| nonsense(&value))?;
    // What a later version tells may have another shape.
    if !KINDS.contains(&kind.as_str()) {
        return Ok(None);
    }
    let owner = bytes(owner).ok_or_else(|| nonsense(&value))?.to_vec().into();
    let token = match token {
        Value::Int(token) => Some(unsigned(*token)?),
        _ => None,
    };
    let detail = text(detail);
    let lasts =
        detail.as_deref().filter(|_| kind == "granted").and_then(|ms| ms.parse().ok()).map(Duration::from_millis);
    let news = match (kind.as_str(), token) {
        ("granted", Some(token)) => News::Granted(token),
        ("timeout", _) => News::TimedOut,
        ("refused", _) => News::Refused(detail.unwrap_or_default()),
        ("lost", token) => News::Lost(token, why(detail.as_deref())),
        ("untied", token) => News::Untied(token),
        _ => return Ok(None),
    };
    Ok(Some(Event { owner, news, lasts }))
}

fn why(detail: Option<&str>) -> Why {
    match detail {
        Some("expired") => Why::Expired,
        Some("forced") => Why::Forced,
        Some("disconnected") => Why::Disconnected,
        _ => Why::Changed,
    }
}

pub(crate) fn text(value: &Value) -> Option<String> {
    match value {
        Value::SimpleString(text) => Some(text.clone()),
        Value::VerbatimString { text, .. } => Some(text.clone()),
        Value::ServerError(error) => Some(match error.details() {
            Some(details) => format!("{} {details}", error.code()),
            None => error.code().to_owned(),
        }),
        _ => bytes(value).map(|bytes| String::from_utf8_lossy(bytes).into_owned()),
    }
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}

fn unsigned(token: i64) -> Result<u64, RedisError> {
    u64::try_from(token).map_err(|_| nonsense(&Value::Int(token)))
}

/// The server answered what it never should: as good as no answer.
pub(crate) fn nonsense(value: &Value) -> RedisError {
    (redis::ErrorKind::UnexpectedReturnType, "an answer that makes no sense", format!("{value:?}")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(cmd: &Cmd) -> String {
        let words = cmd.args_iter().map(|arg| match arg {
            redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            other => panic!("{other:?}"),
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn requests_are_harmless_to_repeat_and_name_their_session() {
        let (one, two) = (Keys::from_iter(["a"]), Keys::from_iter(["a", "b"]));
        let owner = Owner::from(b"me".to_vec());
        let plain = Terms::default();
        let second = Wait::For(Duration::from_secs(1));
        assert_eq!(
            words(&acquire(&one, &owner, &plain, second, None, "s")),
            "LOCK.ACQUIRE a me WAIT 1000 HOLDS 1 WATCHDOG SESSION s"
        );
        assert_eq!(
            words(&acquire(&one, &owner, &plain, Wait::No, None, "s")),
            "LOCK.ACQUIRE a me HOLDS 1 WATCHDOG SESSION s"
        );
        let waited = Some(Duration::from_millis(70));
        assert_eq!(
            words(&acquire(&one, &owner, &plain, second, waited, "s")),
            "LOCK.ACQUIRE a me WAIT 1000 WAITED 70 HOLDS 1 WATCHDOG SESSION s"
        );
        assert_eq!(
            words(&acquire(&one, &owner, &plain, Wait::No, waited, "s")),
            "LOCK.ACQUIRE a me HOLDS 1 WATCHDOG SESSION s"
        );
        let terms = Terms {
            lease: Lease::Fixed(Duration::from_micros(1)),
            limit: Limit::Of(3),
            ending: Ending::Released,
            replicas: std::num::NonZeroU32::new(2),
        };
        assert_eq!(
            words(&acquire(&one, &owner, &terms, Wait::Forever, None, "s")),
            "LOCK.ACQUIRE a me WAIT 0 LIMIT 3 HOLDS 1 LEASE 1 EPHEMERAL REPLICAS 2 SESSION s"
        );
        assert_eq!(
            words(&acquire(&two, &owner, &plain, Wait::Forever, None, "s")),
            "LOCK.MACQUIRE 2 a b me WAIT 0 HOLDS 1 WATCHDOG SESSION s"
        );
        assert_eq!(words(&renew(&one, &owner, Some(7), &plain, "s")), "LOCK.RENEW a me TOKEN 7 WATCHDOG SESSION s");
        assert_eq!(words(&raise(&one, &owner, 9, &plain, "s")), "LOCK.RENEW a me WATCHDOG SESSION s FENCE 9");
        assert_eq!(words(&release(&two, &owner, Some(7))), "LOCK.MRELEASE 2 a b me TOKEN 7 ALL");
        assert_eq!(words(&cancel(&two, &owner, "s")), "LOCK.CANCEL a me SESSION s");
        assert_eq!(words(&begin([].into_iter())), "LOCK.OWNER");
        assert_eq!(words(&begin(["s", "t"].into_iter())), "LOCK.OWNER REPLACES s t");
        assert_eq!(words(&next(None)), "LOCK.NEXT WAIT 0 ALIVE");
        assert_eq!(words(&next(Some(Duration::from_secs(5)))), "LOCK.NEXT WAIT 5000 ALIVE");
    }

    #[test]
    fn replies_are_what_they_are() {
        assert_eq!(reply(Value::Int(7)).unwrap(), Reply::Granted(7));
        assert_eq!(reply(Value::Nil).unwrap(), Reply::NotGranted);
        assert_eq!(reply(Value::SimpleString("WAITING".into())).unwrap(), Reply::Waiting);
        assert!(reply(Value::Int(-1)).is_err());
        assert!(reply(Value::Okay).is_err());
        let both = |first, second| renewed(Value::Array(vec![first, second])).unwrap();
        assert_eq!(both(Value::Int(7), Value::Int(7)), Reply::Granted(7));
        assert_eq!(both(Value::Int(7), Value::Nil), Reply::NotGranted);
        assert!(!released(Value::Array(vec![Value::Int(0), Value::Nil])).unwrap());
        assert!(released(Value::Array(vec![Value::Int(0), Value::Int(0)])).unwrap());
        assert!(released(Value::Okay).is_err());
    }

    #[test]
    fn events_are_read_by_their_six_fields() {
        let event = |kind: &str, token, detail| {
            Value::Array(vec![bulk(kind), Value::Int(0), Value::Array(vec![bulk("a")]), bulk("me"), token, detail])
        };
        let told = answer(Value::Array(vec![
            event("granted", Value::Int(7), Value::Nil),
            event("timeout", Value::Nil, Value::Nil),
            event("refused", Value::Nil, bulk("WRONGTYPE no")),
            event("lost", Value::Int(7), bulk("forced")),
            event("untied", Value::Int(7), bulk("moved")),
            event("of a later version", Value::Nil, Value::Nil),
            Value::Array([bulk("of another shape")].into_iter().chain([const { Value::Nil }; 5]).collect()),
        ]))
        .unwrap();
        assert_eq!(told.alive, None);
        let told = told.events;
        let news: Vec<_> = told.iter().map(|event| &event.news).collect();
        let expected = [
            &News::Granted(7),
            &News::TimedOut,
            &News::Refused("WRONGTYPE no".into()),
            &News::Lost(Some(7), Why::Forced),
            &News::Untied(Some(7)),
        ];
        assert_eq!(news, expected);
        assert!(told.iter().all(|event| event.owner.as_bytes() == b"me" && event.lasts.is_none()));
        assert!(answer(Value::Okay).is_err());
        assert!(answer(Value::Array(vec![Value::Array(vec![bulk("granted")])])).is_err());
    }

    #[test]
    fn a_sign_of_life_says_when_the_next_one_comes_and_the_default_lease() {
        let told = |detail| {
            let fields = [bulk("alive"), Value::Int(0), Value::Array(Vec::new()), Value::Nil, Value::Nil, detail];
            Value::Array(vec![Value::Array(fields.to_vec())])
        };
        let (next_within, default_lease) = (Duration::from_millis(3750), Duration::from_secs(30));
        let expected = Alive { next_within, default_lease, sure: 0.667, takes_writes: true, takes_waited: true };
        assert_eq!(alive(told(bulk("3750 30000"))).unwrap(), Alive { sure: 0.5, takes_waited: false, ..expected });
        assert_eq!(alive(told(bulk("3750 30000 667 1 of a later version"))).unwrap(), expected);
        assert!(!alive(told(bulk("3750 30000 667 0 1"))).unwrap().takes_writes);
        let only = answer(told(bulk("3750 30000 667 1"))).unwrap();
        assert_eq!((only.events.len(), only.alive), (0, Some(expected)));
        // It stands behind events, and these may have more fields than six.
        let Value::Array(mut both) = told(bulk("3750 30000 667 1")) else { unreachable!() };
        let keys = Value::Array(vec![bulk("a")]);
        let granted = [bulk("granted"), Value::Int(0), keys, bulk("me"), Value::Int(7), bulk("29990"), bulk("more")];
        both.insert(0, Value::Array(granted.to_vec()));
        let both = answer(Value::Array(both)).unwrap();
        let news: Vec<_> = both.events.iter().map(|event| &event.news).collect();
        assert_eq!((news, both.alive), (vec![&News::Granted(7)], Some(expected)));
        assert_eq!(both.events[0].lasts, Some(Duration::from_millis(29990)));
        for nonsense in [bulk("3750"), bulk(""), bulk("a b"), Value::Nil] {
            assert!(alive(told(nonsense)).is_err());
        }
        assert!(alive(Value::Array(Vec::new())).is_err());
    }
}
