//! Users whose rights change while they send requests.

use fastrand::Rng;
use redis::Connection;
use support::resp::{self, Value};

use super::words::{Words, words};

/// The users below may not see keys with this in their names.
pub const SECRET: &str = "secret:";

/// The users. Each has its name as its password.
const USERS: [&str; 2] = ["red", "green"];

/// Key patterns that they get at random.
const PATTERNS: [&str; 9] =
    ["~lock:*", "~lock:1*", "%R~lock:*", "%W~lock:*", "~[^s]*", "~?ock:[0-4]", "~at:*", "~*tag*", "%R~[^s]*"];

/// Command rules that they get at random.
const COMMANDS: [&str; 5] = ["+@all", "-lock.force", "-lock.release", "-lock.macquire", "-lock.top"];

/// Creates the users.
pub fn make_users(connection: &mut Connection) {
    for user in USERS {
        let rule = rule(user, &["~[^s]*"], "+@all");
        redis::cmd("ACL").arg(&rule[1..]).exec(connection).expect("the server makes a user");
    }
}

/// The user of a sender. Every other sender has all rights.
pub fn user_of(sender: u64) -> Option<&'static str> {
    let (user, restricted) = (sender as usize / 2 % USERS.len(), sender % 2 == 1);
    restricted.then_some(USERS[user])
}

/// Changes a user's rights, or deletes the user. Its connections and waits continue otherwise.
pub fn change(rng: &mut Rng) -> Words {
    let user = USERS[rng.usize(..USERS.len())];
    if rng.u32(..30) == 0 {
        return words(&["ACL", "DELUSER", user]);
    }
    let count = rng.usize(1..4);
    let patterns = rng.choose_multiple(PATTERNS, count);
    let commands = COMMANDS[rng.usize(..COMMANDS.len())];
    rule(user, &patterns, commands)
}

fn rule(user: &str, patterns: &[&str], commands: &str) -> Words {
    let password = format!(">{user}");
    let head = ["ACL", "SETUSER", user, "reset", "on", &password, "&*", "+@all", "-acl", commands];
    words(&[&head, patterns].concat())
}

/// Whether a reply shows one of these users a key that it may not read. The reply may repeat what is in the request `asked`.
pub fn reveals_secret(asked: &[Words], reply: &Value) -> bool {
    names_secret(reply) && !asked.iter().flatten().any(|word| is_secret(word))
}

fn names_secret(reply: &Value) -> bool {
    match reply {
        Value::BulkString(bytes) => is_secret(bytes),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => is_secret(text.as_bytes()),
        Value::ServerError(_) => resp::error(reply).is_some_and(|text| is_secret(text.as_bytes())),
        Value::Array(elements) | Value::Set(elements) => elements.iter().any(names_secret),
        Value::Map(pairs) => pairs.iter().any(|(key, value)| names_secret(key) || names_secret(value)),
        _ => false,
    }
}

/// Whether the bytes name such a key.
pub fn is_secret(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(line: &str) -> Words {
        words(&line.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn secret_in_reply_is_found_unless_it_was_in_the_request() {
        let list = |name: &str| Value::Array(vec![Value::Nil, Value::BulkString(name.into())]);
        let error = redis::parse_redis_value(b"-ERR unknown option 'secret:1'\r\n").unwrap();
        assert!(reveals_secret(&[line("LOCK.TOP")], &list("secret:1")));
        assert!(reveals_secret(&[line("LOCK.TOP")], &error));
        assert!(!reveals_secret(&[line("LOCK.TOP secret:1")], &error));
        assert!(!reveals_secret(&[line("LOCK.TOP")], &list("lock:1")));
    }

    #[test]
    fn no_user_can_read_the_secret() {
        let mut rng = Rng::with_seed(1);
        for _ in 0..1_000 {
            let rule = change(&mut rng);
            let patterns = rule.iter().filter(|word| word.starts_with(b"~") || word.starts_with(b"%"));
            assert!(patterns.into_iter().all(|pattern| PATTERNS.iter().any(|known| known.as_bytes() == pattern)));
        }
    }
}
