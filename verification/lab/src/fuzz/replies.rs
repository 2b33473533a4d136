//! The replies that the protocol allows.

use support::resp::{Value, errors};

use super::requests::{DATABASES, local_key};

/// Checks that the reply is one of those of the command `name`, if that is a command of the module.
pub fn not_in_protocol(name: &[u8], reply: &Value) -> Result<(), String> {
    use Value::{Array, Int, Map, Nil, ServerError};
    let allowed = match name {
        b"LOCK.ACQUIRE" | b"LOCK.MACQUIRE" | b"LOCK.RENEW" => {
            matches!(reply, Nil) || matches!(reply, Int(1..)) || is_waiting(reply)
        }
        b"LOCK.EVENTS" => matches!(reply, Nil | Array(_)),
        b"LOCK.RELEASE" => matches!(reply, Nil | Int(0 | 1)),
        b"LOCK.FORCE" => matches!(reply, Int(0..)),
        b"LOCK.INFO" => matches!(reply, Nil | Array(_) | Map(_)),
        // While it waits for replicas, CLIENT UNBLOCK makes it null.
        b"LOCK.MRENEW" => matches!(reply, Nil | Array(_)) || is_waiting(reply),
        b"LOCK.MRELEASE" | b"LOCK.WAITERS" | b"LOCK.TOP" | b"LOCK.HELP" => matches!(reply, Array(_)),
        b"LOCK.SESSION" | b"LOCK.VERSION" => matches!(reply, Array(_) | Map(_)),
        _ => true,
    };
    if allowed || matches!(reply, ServerError(_)) {
        return Ok(());
    }
    Err(format!("{} replied {reply:?}", String::from_utf8_lossy(name)))
}

/// The reply to a queued request of a session.
fn is_waiting(reply: &Value) -> bool {
    matches!(reply, Value::SimpleString(word) if word == "WAITING")
}

/// Checks that every error begins with a known code.
pub fn unknown_error(reply: &Value) -> Result<(), String> {
    const CODES: [&str; 13] = [
        "ERR",
        "WRONGTYPE",
        "DEADLOCK",
        "NOREPLICAS",
        "UNCONFIRMED",
        "UNBLOCKED",
        "EXECABORT",
        "NOPROTO",
        "OOM",
        "NOSCRIPT",
        "NOPERM",
        "NOSESSION",
        "SUPERSEDED",
    ];
    let known = |error: &String| CODES.contains(&error.split(' ').next().unwrap_or_default());
    match errors(reply).into_iter().find(|error| !known(error)) {
        Some(error) => Err(format!("unknown error {error:?}")),
        None => Ok(()),
    }
}

/// Checks that no key of another database is reported. Such keys have the database in their names.
pub fn other_database(database: u32, reply: &Value) -> Result<(), String> {
    let notified = |error: &String| {
        (0..DATABASES)
            .find(|other| *other != database && error.contains(&String::from_utf8_lossy(&local_key(*other, ""))[..]))
    };
    match errors(reply).into_iter().find(|error| notified(error).is_some()) {
        Some(error) => Err(format!("in database {database}: {error:?}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_outside_the_protocol_are_named() {
        assert!(not_in_protocol(b"LOCK.ACQUIRE", &Value::Int(0)).is_err());
        assert!(not_in_protocol(b"LOCK.RELEASE", &Value::Okay).is_err());
        assert!(not_in_protocol(b"LOCK.TOP", &Value::Nil).is_err());
        assert!(not_in_protocol(b"LOCK.RELEASE", &Value::Int(0)).is_ok());
        let error = redis::parse_redis_value(b"-ERR no\r\n").unwrap();
        assert!(not_in_protocol(b"LOCK.ACQUIRE", &error).is_ok());
    }

    #[test]
    fn errors_with_unknown_codes_are_named() {
        let nested = |error: &[u8]| Value::Array(vec![redis::parse_redis_value(error).unwrap()]);
        assert!(unknown_error(&nested(b"-HOLDFAST is odd\r\n")).unwrap_err().contains("HOLDFAST is odd"));
        assert!(unknown_error(&nested(b"-DEADLOCK a\r\n")).is_ok());
    }

    #[test]
    fn keys_of_other_databases_are_named() {
        let error = redis::parse_redis_value(b"-DEADLOCK a waits for at:2:0\r\n").unwrap();
        assert!(other_database(3, &error).is_err());
        assert!(other_database(2, &error).is_ok());
    }
}
