//! Every reply in the reference, for names of arbitrary bytes, in both protocols.

use std::collections::BTreeMap;

use redis::Value;
use support::{Raw, Server};

use crate::common::{
    Bytes, Contents, NAMES, Protocol, array, ask, ask_int, ask_ok, ask_token, bytes, deadline, error, fields, int, map,
    text, token, unix_micros, unix_millis,
};
use crate::lines::Reply;

const NULL: Value = Value::Nil;
const DEFAULT_LEASE: i64 = 30_000;

/// A lock with some name, and two owners.
struct Case<'a> {
    raw: &'a mut Raw,
    protocol: Protocol,
    key: &'a [u8],
    me: &'a [u8],
    other: &'a [u8],
}

/// Runs `check` with every name as key and as owner, in both protocols. The lock is free.
fn each(check: impl Fn(&mut Case)) {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        let no_name: &[u8] = b"";
        for (index, key) in NAMES.into_iter().chain([no_name]).enumerate() {
            // The key's own name, and other names.
            for me in [index, index + 1, index + 5] {
                let [me, other] = [me, me + 1].map(|index| NAMES[index % NAMES.len()]);
                ask_ok(&mut raw, "FLUSHALL");
                check(&mut Case { raw: &mut raw, protocol, key, me, other });
            }
        }
    }
}

impl Case<'_> {
    /// `COMMAND key owner option…`
    #[track_caller]
    fn call(&mut self, command: &str, owner: &[u8], rest: &str) -> Value {
        let mut words: Vec<&[u8]> = vec![command.as_bytes(), self.key, owner];
        words.extend(rest.split_whitespace().map(str::as_bytes));
        self.raw.call(&words)
    }

    #[track_caller]
    fn acquire(&mut self, rest: &str) -> Value {
        self.call("LOCK.ACQUIRE", self.me, rest)
    }

    #[track_caller]
    fn release(&mut self, rest: &str) -> Value {
        self.call("LOCK.RELEASE", self.me, rest)
    }

    #[track_caller]
    fn renew(&mut self, rest: &str) -> Value {
        self.call("LOCK.RENEW", self.me, rest)
    }

    /// The lock is a mutex with this hold count and token, and has no other holder.
    #[track_caller]
    fn assert_held(&mut self, holds: i64, token: i64) {
        let expected = BTreeMap::from([
            (self.me.to_vec(), holds.to_string().into_bytes()),
            (b"#fence".to_vec(), token.to_string().into_bytes()),
        ]);
        assert_eq!(fields(self.raw, self.key), expected);
    }

    #[track_caller]
    fn assert_free(&mut self) {
        assert_eq!(self.raw.call(&[b"EXISTS", self.key]), Value::Int(0));
    }

    /// The key's remaining time, in ms.
    #[track_caller]
    fn ttl(&mut self) -> i64 {
        int(&self.raw.call(&[b"PTTL", self.key]))
    }

    #[track_caller]
    fn deadline(&mut self) -> i64 {
        deadline(self.raw, self.key)
    }

    /// Runs a step, and asserts that the lease which it starts is `lease` long.
    #[track_caller]
    fn starts_lease(&mut self, lease: i64, step: impl FnOnce(&mut Self) -> Value) -> Value {
        let before = unix_millis();
        let reply = step(self);
        let (deadline, after) = (self.deadline(), unix_millis());
        assert!((before + lease..=after + lease).contains(&deadline), "{deadline} of {before}..{after} + {lease}");
        reply
    }

    /// Runs a command that returns the protocol's null and changes nothing.
    #[track_caller]
    fn assert_refused(&mut self, words: &[&[u8]]) {
        let before = Contents::read(self.raw);
        assert_eq!(self.raw.call_for_bytes(words), self.protocol.null(), "{words:?}");
        assert_eq!(Contents::read(self.raw), before, "{words:?}");
    }
}

#[test]
fn acquire_returns_token_or_nil() {
    each(|case| {
        let granted = case.starts_lease(DEFAULT_LEASE, |case| case.acquire(""));
        let granted = token(&granted);
        case.assert_held(1, granted);
        assert_eq!(case.acquire(""), Value::Int(granted), "a re-entry keeps the token");
        case.assert_held(2, granted);
        case.assert_refused(&[b"LOCK.ACQUIRE", case.key, case.other]);
        case.assert_refused(&[b"LOCK.ACQUIRE", case.key, case.other, b"HOLDS", b"2", b"LEASE", b"100000"]);
    });
}

#[test]
fn reentry_never_shortens_lease() {
    each(|case| {
        case.starts_lease(60_000, |case| case.acquire("LEASE 60000"));
        let deadline = case.deadline();
        for shorter in ["LEASE 1", "LEASE 50000", "", "HOLDS 1 LEASE 1", "HOLDS 9 LEASE 1"] {
            token(&case.acquire(shorter));
            assert_eq!(case.deadline(), deadline, "{shorter}");
        }
        case.starts_lease(90_000, |case| case.acquire("LEASE 90000"));
        case.starts_lease(120_000, |case| case.acquire("LEASE 120000 HOLDS 1"));
    });
}

#[test]
fn holds_raises_count_and_is_repeatable() {
    each(|case| {
        let granted = token(&case.acquire("HOLDS 3"));
        for (request, holds) in [
            ("HOLDS 3", 3),
            ("HOLDS 3", 3),
            ("HOLDS 1", 3),
            ("HOLDS 7", 7),
            ("", 8),
            ("HOLDS 7", 8),
            ("HOLDS 2147483647", 2_147_483_647),
            ("HOLDS 2147483647", 2_147_483_647),
        ] {
            assert_eq!(case.acquire(request), Value::Int(granted), "{request}");
            case.assert_held(holds, granted);
        }
    });
}

#[test]
fn release_returns_whether_holds_are_left_or_nil() {
    each(|case| {
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me]);
        let granted = token(&case.acquire("HOLDS 3 LEASE 60000"));
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.other]);
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.other, b"ALL"]);
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.other, b"HOLDS", b"0", b"LEASE", b"5"]);
        let deadline = case.deadline();
        for left in [2, 1] {
            assert_eq!(case.release(""), Value::Int(0));
            case.assert_held(left, granted);
            assert_eq!(case.deadline(), deadline, "without LEASE the deadline stays");
        }
        assert_eq!(case.release(""), Value::Int(1));
        case.assert_free();
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me]);
    });
}

#[test]
fn release_to_count_is_repeatable() {
    each(|case| {
        let granted = token(&case.acquire("HOLDS 9"));
        for (request, left) in
            [("HOLDS 9", 9), ("HOLDS 2147483647", 9), ("HOLDS 4", 4), ("HOLDS 4", 4), ("HOLDS 6", 4), ("HOLDS 1", 1)]
        {
            assert_eq!(case.release(request), Value::Int(0), "{request}");
            case.assert_held(left, granted);
        }
        assert_eq!(case.release("HOLDS 0"), Value::Int(1));
        case.assert_free();
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me, b"HOLDS", b"0"]);
        token(&case.acquire("HOLDS 9"));
        assert_eq!(case.release("ALL"), Value::Int(1));
        case.assert_free();
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me, b"ALL"]);
    });
}

#[test]
fn release_can_restart_lease_of_remaining_holds() {
    each(|case| {
        let granted = token(&case.acquire("HOLDS 9 LEASE 60000"));
        let steps =
            [("LEASE 90000", 90_000, 8), ("LEASE 20000 HOLDS 5", 20_000, 5), ("HOLDS 5 LEASE 70000", 70_000, 5)];
        for (request, lease, left) in steps {
            assert_eq!(case.starts_lease(lease, |case| case.release(request)), Value::Int(0), "{request}");
            case.assert_held(left, granted);
        }
        assert_eq!(case.release("ALL LEASE 60000"), Value::Int(1));
        case.assert_free();
    });
}

#[test]
fn token_identifies_hold() {
    each(|case| {
        let old = token(&case.acquire(""));
        assert_eq!(case.release(""), Value::Int(1));
        let granted = token(&case.acquire("HOLDS 3"));
        assert!(granted > old);
        for wrong in [old, granted + 1, 1, (1 << 53) - 1] {
            let wrong = wrong.to_string();
            case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me, b"TOKEN", wrong.as_bytes()]);
            case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me, b"ALL", b"TOKEN", wrong.as_bytes()]);
            case.assert_refused(&[b"LOCK.RENEW", case.key, case.me, b"TOKEN", wrong.as_bytes(), b"LEASE", b"5"]);
        }
        assert_eq!(case.renew(&format!("TOKEN {granted}")), Value::Int(granted));
        assert_eq!(case.release(&format!("TOKEN {granted}")), Value::Int(0));
        assert_eq!(case.release(&format!("HOLDS 1 TOKEN {granted}")), Value::Int(0));
        assert_eq!(case.release(&format!("TOKEN {granted} ALL")), Value::Int(1));
        case.assert_free();
    });
}

#[test]
fn renew_returns_token_or_nil() {
    each(|case| {
        case.assert_refused(&[b"LOCK.RENEW", case.key, case.me]);
        let granted = token(&case.acquire("HOLDS 2 LEASE 60000"));
        case.assert_refused(&[b"LOCK.RENEW", case.key, case.other, b"LEASE", b"100000"]);
        for (request, lease) in [("LEASE 90000", 90_000), ("LEASE 20000", 20_000), ("", DEFAULT_LEASE)] {
            assert_eq!(case.starts_lease(lease, |case| case.renew(request)), Value::Int(granted), "{request}");
            case.assert_held(2, granted);
        }
    });
}

#[test]
fn force_returns_number_of_holders() {
    each(|case| {
        let force = |case: &mut Case| case.raw.call(&[b"LOCK.FORCE", case.key]);
        assert_eq!(force(case), Value::Int(0));
        token(&case.acquire("HOLDS 5"));
        assert_eq!(force(case), Value::Int(1));
        case.assert_free();
        token(&case.acquire("SHARED"));
        token(&case.call("LOCK.ACQUIRE", case.other, "SHARED"));
        token(&case.call("LOCK.ACQUIRE", b"third", "SHARED"));
        assert_eq!(force(case), Value::Int(3));
        case.assert_free();
        assert_eq!(force(case), Value::Int(0));
    });
}

#[test]
fn info_shows_holder() {
    each(|case| {
        case.assert_refused(&[b"LOCK.INFO", case.key]);
        let granted = token(&case.acquire("HOLDS 3 LEASE 60000"));
        let reply = case.raw.call(&[b"LOCK.INFO", case.key]);
        assert_eq!(matches!(reply, Value::Map(_)), case.protocol == Protocol::Resp3, "{reply:?}");
        let info = Info::of(&reply);
        assert_eq!((info.limit, &info.fence, info.waiters), (1, &Value::Int(granted), 0));
        assert!((59_000..=60_000).contains(&info.ttl), "{info:?}");
        let [holder] = &info.holders[..] else { panic!("{info:?}") };
        assert_eq!((&holder.owner[..], holder.holds, &holder.token), (case.me, 3, &Value::Int(granted)));
        assert!((59_000..=60_000).contains(&holder.ttl), "{info:?}");
        let binding = (&holder.client, holder.watchdog, holder.ephemeral, holder.contention);
        assert_eq!(binding, (&NULL, false, false, false));
    });
}

#[test]
fn info_shows_every_holder_of_shared_lock() {
    each(|case| {
        let first = token(&case.acquire("LIMIT 3 LEASE 60000"));
        let second = token(&case.call("LOCK.ACQUIRE", case.other, "LIMIT 5 LEASE 90000 HOLDS 2"));
        let info = Info::of(&case.raw.call(&[b"LOCK.INFO", case.key]));
        assert_eq!((info.limit, &info.fence, info.waiters), (3, &Value::Int(second), 0));
        assert!((89_000..=90_000).contains(&info.ttl), "{info:?}");
        let holders: BTreeMap<Bytes, &Holder> = info.holders.iter().map(|it| (it.owner.clone(), it)).collect();
        assert_eq!(holders.len(), 2);
        let (mine, theirs) = (holders[case.me], holders[case.other]);
        assert_eq!((mine.holds, &mine.token), (1, &Value::Int(first)));
        assert!((59_000..=60_000).contains(&mine.ttl), "{info:?}");
        assert_eq!((theirs.holds, &theirs.token), (2, &Value::Int(second)));
        assert!((89_000..=90_000).contains(&theirs.ttl), "{info:?}");
    });
}

#[test]
fn info_shows_unknown_token_and_missing_deadline() {
    each(|case| {
        case.raw.call(&[b"HSET", case.key, case.me, b"4"]);
        let info = Info::of(&case.raw.call(&[b"LOCK.INFO", case.key]));
        assert_eq!((info.limit, &info.fence, info.ttl, info.waiters), (1, &NULL, -1, 0));
        let [holder] = &info.holders[..] else { panic!("{info:?}") };
        assert_eq!((&holder.owner[..], holder.holds, &holder.token, holder.ttl), (case.me, 4, &NULL, -1));
    });
}

#[test]
fn redisson_lock_is_a_lock() {
    each(|case| {
        let make = |case: &mut Case| {
            case.raw.call(&[b"HSET", case.key, case.me, b"2"]);
            case.raw.call(&[b"PEXPIRE", case.key, b"60000"]);
        };
        make(case);
        case.assert_refused(&[b"LOCK.ACQUIRE", case.key, case.other]);
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.other]);
        let granted = token(&case.acquire(""));
        case.assert_held(3, granted);
        assert!(case.ttl() > 59_000, "a re-entry never shortens");
        assert_eq!(case.release("HOLDS 1"), Value::Int(0));
        assert_eq!(case.release(""), Value::Int(1));
        case.assert_free();
        make(case);
        assert_eq!(case.release(""), Value::Int(0), "released without ever being granted here");
        assert_eq!(fields(case.raw, case.key), BTreeMap::from([(case.me.to_vec(), b"1".to_vec())]));
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me, b"TOKEN", b"1"]);
        token(&case.starts_lease(90_000, |case| case.renew("LEASE 90000")));
        assert_eq!(case.raw.call(&[b"LOCK.FORCE", case.key]), Value::Int(1));
        case.assert_free();
    });
}

#[test]
fn lock_without_expiry_is_held_until_released() {
    each(|case| {
        let granted = token(&case.acquire(""));
        assert_eq!(case.raw.call(&[b"PERSIST", case.key]), Value::Int(1));
        case.assert_refused(&[b"LOCK.ACQUIRE", case.key, case.other]);
        assert_eq!(case.acquire("LEASE 5"), Value::Int(granted));
        assert_eq!(case.ttl(), -1, "a re-entry never shortens");
        assert_eq!(case.release("ALL"), Value::Int(1));
        case.assert_free();
        token(&case.call("LOCK.ACQUIRE", case.other, ""));
    });
}

#[test]
fn hash_of_leftover_fields_is_free() {
    each(|case| {
        case.raw.call(&[b"HSET", case.key, b"#fence", b"1700000000000000", b"#limit", b"0", b"#@gone", b"5:6"]);
        case.assert_refused(&[b"LOCK.RELEASE", case.key, case.me]);
        assert_eq!(case.raw.call(&[b"LOCK.FORCE", case.key]), Value::Int(0));
        let granted = token(&case.starts_lease(DEFAULT_LEASE, |case| case.acquire("")));
        case.assert_held(1, granted);
    });
}

#[test]
fn hash_stores_limit_and_deadline_of_each_holder() {
    each(|case| {
        let before = unix_millis();
        let first = token(&case.acquire("SHARED LEASE 90000"));
        let second = token(&case.call("LOCK.ACQUIRE", case.other, "LIMIT 2 LEASE 60000"));
        let after = unix_millis();
        assert_eq!(case.call("LOCK.ACQUIRE", b"third", "SHARED"), NULL, "the smallest limit named counts");
        let found = fields(case.raw, case.key);
        let details = |owner: &[u8]| text(&Value::BulkString(found[&[b"#@", owner].concat()].clone()));
        assert_eq!(found.len(), 6, "{found:?}");
        assert_eq!((&found[case.me][..], &found[case.other][..]), (&b"1"[..], &b"1"[..]));
        assert_eq!(
            (&found[&b"#limit"[..]][..], &found[&b"#fence"[..]][..]),
            (&b"2"[..], second.to_string().as_bytes())
        );
        for (owner, token, lease) in [(case.me, first, 90_000), (case.other, second, 60_000)] {
            let details = details(owner);
            let (deadline, found_token) = details.split_once(':').expect("deadline and token");
            assert_eq!(found_token, token.to_string());
            let deadline: i64 = deadline.parse().expect("a deadline");
            assert!((before + lease..=after + lease).contains(&deadline), "{details}");
            if lease == 90_000 {
                assert_eq!(case.deadline(), deadline, "the key expires with the last");
            }
        }
    });
}

#[test]
fn owner_star_is_this_connection() {
    let server = Server::start();
    let mut runs = Vec::new();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        let id = raw.client_id();
        let reply = ask(&mut raw, "LOCK.SESSION");
        let name = reply.field("id").text().into_bytes();
        let (run, client) =
            reply.field("id").text().rsplit_once(':').map(|(run, id)| (run.to_owned(), id.to_owned())).unwrap();
        assert_eq!(client, id.to_string());
        assert!(is_uuid(&run), "{run}");
        runs.push(run);
        assert_eq!(ask(&mut raw, "LOCK.SESSION"), reply, "always the same");

        let granted = ask_token(&mut raw, "LOCK.ACQUIRE key *");
        assert_eq!(raw.call(&[b"HGET", b"key", &name]), Value::BulkString(b"1".to_vec()));
        assert_eq!(token(&raw.call(&[b"LOCK.ACQUIRE", b"key", &name])), granted, "the star and the name are one owner");
        let mut stranger = protocol.connect(&server);
        assert_eq!(ask(&mut stranger, "LOCK.ACQUIRE key *"), NULL);
        assert_eq!(ask(&mut stranger, "LOCK.RELEASE key *"), NULL);
        assert_eq!(ask_token(&mut raw, "LOCK.RENEW key *"), granted);
        assert_eq!(ask_int(&mut raw, "LOCK.RELEASE key *"), 0);
        assert_eq!(ask_int(&mut raw, "LOCK.RELEASE key * ALL"), 1);
    }
    assert_eq!(runs[0], runs[1], "both ids have the same run id");
    let elsewhere = ask(&mut Server::start().raw(), "LOCK.SESSION").field("id").text();
    assert!(!elsewhere.starts_with(&runs[0]), "another server has another run id");
}

#[test]
fn help_has_a_line_for_each_command() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let reply = ask(&mut protocol.connect(&server), "LOCK.HELP");
        let lines: Vec<String> = array(&reply).iter().map(text).collect();
        for name in crate::commands::NAMES {
            let line = lines.iter().find(|line| line.to_uppercase().contains(name));
            assert!(line.is_some(), "{name} is not in {lines:?}");
        }
        for option in ["LEASE", "WAIT", "LIMIT", "SHARED", "HOLDS", "WATCHDOG", "EPHEMERAL", "REPLICAS", "TOKEN", "ALL"]
        {
            assert!(lines.iter().any(|line| line.contains(option)), "{option} is not in {lines:?}");
        }
        assert!(lines.iter().all(|line| !line.contains(['\r', '\n'])));
    }
}

/// Each of them makes a key `k` that is not a lock.
const NO_LOCKS: [&str; 23] = [
    "SET k value",
    "SET k 1",
    "RPUSH k a b",
    "SADD k a b",
    "ZADD k 1 a",
    "XADD k * a b",
    "PFADD k a",
    "HSET k me text",
    "HSET k me 1.5",
    "HSET k me -1",
    "HSET k me 0",
    "HSET k me 01",
    "HSET k me +1",
    "HSET k me 1e3",
    "HSET k me 0x1",
    "HSET k me 9223372036854775808",
    "HSET k me 99999999999999999999999",
    "HSET k me 1 you 1",
    "HSET k me 1 you text",
    "HSET k me 1 #fence text",
    "HSET k me 1 #limit text",
    "HSET k me 1 you 1 #limit -1",
    "HSET k me 1 you 1 #limit 3 #@me text",
];

const ON_NO_LOCK: [&str; 10] = [
    "LOCK.ACQUIRE k me",
    "LOCK.ACQUIRE k me SHARED",
    "LOCK.ACQUIRE k newcomer LIMIT 9 LEASE 5",
    "LOCK.RELEASE k me",
    "LOCK.RELEASE k newcomer ALL",
    "LOCK.RENEW k me",
    "LOCK.RENEW k newcomer TOKEN 5",
    "LOCK.FORCE k",
    "LOCK.INFO k",
    "LOCK.MACQUIRE 2 other k me",
];

#[test]
fn other_types_are_wrongtype_and_stay() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        for make in NO_LOCKS {
            ask_ok(&mut raw, "FLUSHALL");
            ask(&mut raw, make);
            ask(&mut raw, "PEXPIRE k 100000");
            let before = Contents::read(&mut raw);
            for command in ON_NO_LOCK {
                let reply = ask(&mut raw, command);
                assert!(matches!(reply, Value::ServerError(_)), "{command} after {make}: {reply:?}");
                assert_eq!(error(&reply).0, "WRONGTYPE", "{command} after {make}");
                assert_eq!(Contents::read(&mut raw), before, "{command} after {make}");
            }
        }
    }
}

#[test]
fn tokens_increase_and_follow_clock() {
    let mut server = Server::builder().arg("appendonly", "yes").start();
    let mut raw = server.raw();
    let mut last = 0;
    let mut grows = |raw: &mut Raw, line: &str| {
        let before = unix_micros();
        let token = ask_token(raw, line);
        assert!(token > last, "{line}: {token} after {last}");
        assert!(token >= before, "{line}: {token} at {before}");
        assert!(token < unix_micros() + 1_000_000, "{line}: {token} is ahead of the clock");
        last = token;
    };
    for round in 0..200 {
        grows(&mut raw, &format!("LOCK.ACQUIRE {round} me"));
        grows(&mut raw, &format!("LOCK.ACQUIRE shared {round} SHARED"));
        grows(&mut raw, "LOCK.ACQUIRE once me");
        assert_eq!(ask_int(&mut raw, "LOCK.RELEASE once me"), 1);
    }
    for (key, forget) in ["DEL 0 shared", "FLUSHDB", "FLUSHALL ASYNC", "SELECT 3", "SWAPDB 0 3"].into_iter().enumerate()
    {
        ask(&mut raw, forget);
        grows(&mut raw, &format!("LOCK.ACQUIRE {key} newcomer"));
    }
    server.restart();
    grows(&mut server.raw(), "LOCK.ACQUIRE after me");
}

#[test]
fn options_come_in_any_order_and_case() {
    let server = Server::start();
    let mut raw = server.raw();
    for (line, holds, least, most) in [
        ("lock.acquire a me lease 60000 holds 2", 2, 59_000, 60_000),
        ("Lock.Acquire b me Holds 2 Lease 60000", 2, 59_000, 60_000),
        ("LOCK.ACQUIRE c me LIMIT 1 HOLDS 1", 1, 29_000, 30_000),
        ("LOCK.ACQUIRE d me WAIT 5 HOLDS 1", 1, 29_000, 30_000),
    ] {
        let key = line.split_whitespace().nth(1).expect("a key");
        let token = ask_token(&mut raw, line);
        assert_eq!(fields(&mut raw, key.as_bytes())[&b"me"[..]], holds.to_string().as_bytes(), "{line}");
        let ttl = ask_int(&mut raw, &format!("PTTL {key}"));
        assert!((least..=most).contains(&ttl), "{line}: {ttl}");
        assert_eq!(ask_int(&mut raw, &format!("lock.release {key} me lease 5 token {token} all")), 1, "{line}");
    }
}

#[test]
fn owner_has_at_most_512_bytes() {
    let server = Server::start();
    let mut raw = server.raw();
    for owner in [vec![0xff; 512], b"*".repeat(512), b"*#".to_vec(), b"**".to_vec()] {
        token(&raw.call(&[b"LOCK.ACQUIRE", b"key", &owner]));
        assert_eq!(raw.call(&[b"HGET", b"key", &owner]), Value::BulkString(b"1".to_vec()));
        assert_eq!(raw.call(&[b"LOCK.RELEASE", b"key", &owner]), Value::Int(1));
    }
}

#[test]
fn lock_belongs_to_its_database() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE key me");
    ask_token(&mut raw, "LOCK.ACQUIRE shared me SHARED");
    ask_ok(&mut raw, "SELECT 1");
    assert_eq!(ask(&mut raw, "LOCK.RELEASE key me"), NULL);
    ask_token(&mut raw, "LOCK.ACQUIRE key you");
    ask_token(&mut raw, "LOCK.ACQUIRE shared you");
    ask_ok(&mut raw, "SELECT 0");
    assert_eq!(ask(&mut raw, "LOCK.ACQUIRE key you"), NULL);
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE key me"), 1);
}

#[test]
fn commands_work_in_transactions_and_scripts() {
    let server = Server::start();
    for protocol in Protocol::BOTH {
        let mut raw = protocol.connect(&server);
        ask_ok(&mut raw, "MULTI");
        for line in ["LOCK.ACQUIRE k me", "LOCK.ACQUIRE k you WAIT 0", "LOCK.RELEASE k me", "LOCK.ACQUIRE k you"] {
            assert_eq!(ask(&mut raw, line), Value::SimpleString("QUEUED".into()));
        }
        let reply = ask(&mut raw, "EXEC");
        let [first, refused, left, second] = array(&reply) else { panic!("{reply:?}") };
        assert!(token(second) > token(first));
        assert_eq!((refused, left), (&NULL, &Value::Int(1)), "WAIT is ignored where commands can't block");

        let script = "local refused = redis.call('LOCK.ACQUIRE', KEYS[1], 'me', 'WAIT', 0)
            local left = redis.call('LOCK.RELEASE', KEYS[1], 'you')
            return {refused == false, left, redis.call('LOCK.ACQUIRE', KEYS[1], 'me')}";
        let reply = raw.call(&[b"EVAL", script.as_bytes(), b"1", b"k"]);
        let [refused, left, granted] = array(&reply) else { panic!("{reply:?}") };
        assert_eq!((refused, left), (&Value::Int(1), &Value::Int(1)));
        assert!(token(granted) > token(second));
        ask_ok(&mut raw, "FLUSHALL");
    }
}

/// The reply of `LOCK.INFO`, with these fields and no others.
#[derive(Debug)]
struct Info {
    limit: i64,
    fence: Value,
    ttl: i64,
    holders: Vec<Holder>,
    waiters: i64,
}

#[derive(Debug)]
struct Holder {
    owner: Bytes,
    holds: i64,
    token: Value,
    ttl: i64,
    client: Value,
    watchdog: bool,
    ephemeral: bool,
    contention: bool,
}

impl Info {
    #[track_caller]
    fn of(reply: &Value) -> Self {
        let mut fields = map(reply);
        let mut take = |name: &str| fields.remove(name.as_bytes()).unwrap_or_else(|| panic!("no {name} in {reply:?}"));
        let info = Self {
            limit: int(&take("limit")),
            fence: take("fence"),
            ttl: int(&take("ttl")),
            holders: array(&take("holders")).iter().map(Holder::of).collect(),
            waiters: int(&take("waiters")),
        };
        assert_eq!(int(&take("holder_count")), i64::try_from(info.holders.len()).unwrap());
        assert!(fields.is_empty(), "{fields:?}");
        info
    }
}

impl Holder {
    #[track_caller]
    fn of(reply: &Value) -> Self {
        let mut fields = map(reply);
        let mut take = |name: &str| fields.remove(name.as_bytes()).unwrap_or_else(|| panic!("no {name} in {reply:?}"));
        let holder = Self {
            owner: bytes(&take("owner")).to_vec(),
            holds: int(&take("holds")),
            token: take("token"),
            ttl: int(&take("ttl")),
            client: take("client"),
            watchdog: flag(&take("watchdog")),
            ephemeral: flag(&take("ephemeral")),
            contention: flag(&take("contention")),
        };
        assert!(fields.is_empty(), "{fields:?}");
        holder
    }
}

/// A boolean, in either protocol.
#[track_caller]
fn flag(value: &Value) -> bool {
    match value {
        Value::Boolean(flag) => *flag,
        Value::Int(0) => false,
        Value::Int(1) => true,
        other => panic!("not a boolean: {other:?}"),
    }
}

fn is_uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12] && text.chars().all(|digit| digit == '-' || digit.is_ascii_hexdigit())
}
