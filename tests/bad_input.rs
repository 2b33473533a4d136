//! Invalid arguments of every kind: each returns a clear error and changes nothing.

use redis::Value;
use support::{Raw, Server};

use crate::common::{
    Contents, Protocol, array, ask, ask_int, ask_ok, ask_token, bytes, error, info_number, text, words,
};
use crate::lines::{Reply, until_gone};

const MAX_LEASE: i64 = 315_360_000_000;

/// An option with a number, and its range.
#[derive(Clone, Copy)]
struct Number {
    word: &'static str,
    least: i64,
    most: i64,
}

const LEASE: Number = Number { word: "LEASE", least: 1, most: MAX_LEASE };
const WAIT: Number = Number { word: "WAIT", least: 0, most: MAX_LEASE };
const LIMIT: Number = Number { word: "LIMIT", least: 1, most: 2_147_483_647 };
const HOLDS: Number = Number { word: "HOLDS", least: 1, most: 2_147_483_647 };
const HOLDS_LEFT: Number = Number { least: 0, ..HOLDS };
const TOKEN: Number = Number { word: "TOKEN", least: 1, most: (1 << 53) - 1 };
const COUNT: Number = Number { word: "COUNT", least: 1, most: i64::MAX };
const REPLICAS: Number = Number { word: "REPLICAS", least: 0, most: i64::MAX };
const FENCE: Number = Number { word: "FENCE", ..TOKEN };

/// Valid requests, and the options with a number that each may have.
const REQUESTS: [(&str, &[Number]); 18] = [
    ("LOCK.ACQUIRE held me", &[LEASE, WAIT, LIMIT, HOLDS, REPLICAS]),
    ("LOCK.ACQUIRE held you", &[LEASE, WAIT, LIMIT, HOLDS, REPLICAS]),
    ("LOCK.ACQUIRE shared me SHARED", &[LEASE, WAIT, HOLDS, REPLICAS]),
    ("LOCK.ACQUIRE free me", &[LEASE, WAIT, LIMIT, HOLDS, REPLICAS]),
    ("LOCK.RELEASE held me", &[TOKEN, HOLDS_LEFT, LEASE]),
    ("LOCK.RELEASE shared me", &[TOKEN, HOLDS_LEFT, LEASE]),
    ("LOCK.RELEASE free me", &[TOKEN, HOLDS_LEFT, LEASE]),
    ("LOCK.RENEW held me", &[LEASE, TOKEN, REPLICAS, FENCE]),
    ("LOCK.RENEW shared me", &[LEASE, TOKEN, REPLICAS, FENCE]),
    ("LOCK.RENEW free me", &[LEASE, TOKEN, REPLICAS, FENCE]),
    ("LOCK.MACQUIRE 2 held free me", &[LEASE, WAIT, HOLDS, REPLICAS]),
    ("LOCK.MRELEASE 2 held free me", &[TOKEN]),
    ("LOCK.MRENEW 2 held free me", &[LEASE, TOKEN, REPLICAS]),
    ("LOCK.EVENTS", &[WAIT, COUNT]),
    ("LOCK.EVENTS HEARTBEAT", &[WAIT, COUNT]),
    ("LOCK.INFO held", &[COUNT]),
    ("LOCK.WAITERS held", &[COUNT]),
    ("LOCK.TOP", &[COUNT]),
];

/// Requests on behalf of a session, valid if a session id follows.
const OF_SESSIONS: [&str; 6] = [
    "LOCK.ACQUIRE held me SESSION",
    "LOCK.ACQUIRE free you WAIT 0 SESSION",
    "LOCK.RENEW held me SESSION",
    "LOCK.MACQUIRE 2 held free me SESSION",
    "LOCK.MACQUIRE 1 free * SESSION",
    "LOCK.MRENEW 2 held free me SESSION",
];

/// Strings that are not a 64-bit integer in plain decimal digits.
const NO_NUMBERS: [&str; 14] = [
    "abc",
    "1.5",
    "1e3",
    "+1",
    "0x10",
    "01",
    "-",
    "1-",
    "--1",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551616",
    "18446744073709551617",
    "123456789012345678901234567890123456789012345678901234567890",
];

/// Byte strings that are not an integer, and that the error does not print as they are.
const NO_TEXTS: [&[u8]; 9] =
    [b"", b" 1", b"1 ", b"1\n", b"1\0", b"\xff", b"%s%s%n", b"1\r\n+OK\r\n", b"\xd9\xa1\xd9\xa2"];

impl Number {
    fn too_small_and_too_large(self) -> impl Iterator<Item = String> {
        let below = [self.least - 1, -1, -2_147_483_649, i64::MIN].into_iter().filter(move |&bad| bad < self.least);
        let above = [self.most.saturating_add(1), i64::MAX].into_iter().filter(move |&bad| bad > self.most);
        below.chain(above).map(|bad| bad.to_string())
    }
}

/// A server with a mutex `held` by `me`, and a lock `shared` by `me` and `you`.
struct TestServer {
    server: Server,
    raw: Raw,
    before: Contents,
    changes: i64,
}

impl TestServer {
    fn new(protocol: Protocol) -> Self {
        let server = Server::start();
        let mut raw = protocol.connect(&server);
        ask_token(&mut raw, "LOCK.ACQUIRE held me HOLDS 2 LEASE 1000000");
        ask_token(&mut raw, "LOCK.ACQUIRE shared me SHARED LEASE 1000000");
        ask_token(&mut raw, "LOCK.ACQUIRE shared you SHARED LEASE 2000000");
        let before = Contents::read(&mut raw);
        let changes = info_number(&server, "persistence", "rdb_changes_since_last_save");
        Self { server, raw, before, changes }
    }

    /// The command is refused with a one-line message that contains all of `mentions`, and changes nothing.
    #[track_caller]
    fn refuses(&mut self, command: &[&[u8]], mentions: &[&str]) {
        self.refuses_as("ERR", command, mentions);
    }

    /// The same, with another error code.
    #[track_caller]
    fn refuses_as(&mut self, expected: &str, command: &[&[u8]], mentions: &[&str]) {
        let shown: Vec<String> = command.iter().map(|word| word.escape_ascii().to_string()).collect();
        let reply = self.raw.call(command);
        assert!(matches!(reply, Value::ServerError(_)), "{shown:?}: {reply:?}");
        let (code, message) = error(&reply);
        assert_eq!(code, expected, "{shown:?}: {message}");
        for mention in mentions {
            assert!(message.contains(mention), "{shown:?}: no {mention} in {message:?}");
        }
        assert!(message.len() < 1000, "{shown:?}: {} bytes", message.len());
        // A line break in the message would start another reply.
        assert_eq!(ask(&mut self.raw, "ECHO still-in-step"), Value::BulkString(b"still-in-step".to_vec()), "{shown:?}");
        assert_eq!(Contents::read(&mut self.raw), self.before, "{shown:?} has changed something: {message}");
    }

    #[track_caller]
    fn refuses_line(&mut self, line: &str, mentions: &[&str]) {
        self.refuses(&words(line), mentions);
    }

    /// The id of a session whose connection has ended.
    fn ended_session(&self) -> String {
        let mut other = self.server.raw();
        let (id, client) = (ask(&mut other, "LOCK.SESSION").field("id").text(), other.client_id());
        other.close();
        until_gone(&mut self.server.raw(), client);
        id
    }

    /// No key was written, not even with the same value.
    fn ends_untouched(self) {
        let changes = info_number(&self.server, "persistence", "rdb_changes_since_last_save");
        assert_eq!(changes, self.changes);
        assert_eq!(info_number(&self.server, "clients", "blocked_clients"), 0);
    }
}

/// Runs `check` on a server for each protocol.
fn each(check: impl Fn(&mut TestServer)) {
    for protocol in Protocol::BOTH {
        let mut server = TestServer::new(protocol);
        check(&mut server);
        server.ends_untouched();
    }
}

/// Runs `check` for every number of every request.
fn each_number(check: impl Fn(&mut TestServer, &str, Number)) {
    each(|server| {
        for (request, numbers) in REQUESTS {
            for number in numbers {
                check(server, request, *number);
            }
        }
    });
}

#[test]
fn missing_number_is_refused() {
    each_number(|server, request, number| {
        server.refuses_line(&format!("{request} {}", number.word), &[number.word]);
    });
}

#[test]
fn numbers_out_of_range_are_refused() {
    each_number(|server, request, number| {
        for bad in number.too_small_and_too_large() {
            server.refuses_line(&format!("{request} {} {bad}", number.word), &[number.word, &bad]);
        }
    });
}

#[test]
fn non_numbers_and_numbers_beyond_64_bits_are_refused() {
    each_number(|server, request, number| {
        for bad in NO_NUMBERS {
            server.refuses_line(&format!("{request} {} {bad}", number.word), &[number.word, bad]);
        }
        for bad in NO_TEXTS {
            let mut command = words(request);
            command.extend([number.word.as_bytes(), bad]);
            server.refuses(&command, &[number.word]);
        }
    });
}

#[test]
fn repeated_number_option_is_refused() {
    each_number(|server, request, number| {
        let word = number.word;
        for (first, second) in [(number.least, number.least), (5, 6), (number.least, 5)] {
            server.refuses_line(&format!("{request} {word} {first} {word} {second}"), &[word]);
            server.refuses_line(&format!("{request} {word} {first} {} {second}", word.to_lowercase()), &[word]);
        }
    });
}

#[test]
fn error_names_allowed_values() {
    let mut server = TestServer::new(Protocol::Resp2);
    for (line, allowed) in [
        ("LOCK.ACQUIRE free me LEASE 0", ["1", "315360000000"]),
        ("LOCK.ACQUIRE free me LEASE 315360000001", ["1", "315360000000"]),
        ("LOCK.ACQUIRE free me LIMIT 0", ["1", "2147483647"]),
        ("LOCK.ACQUIRE free me HOLDS 2147483648", ["1", "2147483647"]),
        ("LOCK.RELEASE held me HOLDS -1", ["0", "2147483647"]),
        ("LOCK.RELEASE held me TOKEN 0", ["1", "9007199254740991"]),
        ("LOCK.RENEW held me LEASE -5", ["1", "315360000000"]),
        ("LOCK.RENEW held me FENCE 9007199254740992", ["1", "9007199254740991"]),
        ("LOCK.RENEW held me FENCE 9007199254740991", ["FENCE", "an hour ahead"]),
        ("LOCK.EVENTS COUNT 0", ["1", "2147483647"]),
    ] {
        server.refuses_line(line, &allowed);
    }
    server.ends_untouched();
}

#[test]
fn repeated_flag_is_refused() {
    each(|server| {
        for (request, flags) in [
            ("LOCK.ACQUIRE held me", &["WATCHDOG", "EPHEMERAL"][..]),
            ("LOCK.ACQUIRE free me", &["SHARED", "WATCHDOG", "EPHEMERAL"]),
            ("LOCK.RELEASE held me", &["ALL"]),
            ("LOCK.RENEW held me", &["WATCHDOG", "EPHEMERAL"]),
            ("LOCK.MACQUIRE 1 free me", &["WATCHDOG", "EPHEMERAL"]),
            ("LOCK.MRELEASE 1 held me", &["ALL"]),
            ("LOCK.MRENEW 1 held me", &["WATCHDOG", "EPHEMERAL"]),
        ] {
            for flag in flags {
                server.refuses_line(&format!("{request} {flag} {flag}"), &[flag]);
            }
        }
    });
}

#[test]
fn contradictory_options_are_refused() {
    each(|server| {
        for (line, both) in [
            ("LOCK.ACQUIRE free me LIMIT 2 SHARED", ["LIMIT", "SHARED"]),
            ("LOCK.ACQUIRE free me SHARED LIMIT 2", ["LIMIT", "SHARED"]),
            ("LOCK.ACQUIRE free me LIMIT 1 LEASE 5 SHARED", ["LIMIT", "SHARED"]),
            ("LOCK.RELEASE held me HOLDS 1 ALL", ["HOLDS", "ALL"]),
            ("LOCK.RELEASE held me ALL HOLDS 0", ["HOLDS", "ALL"]),
            ("LOCK.RELEASE held me ALL LEASE 5 HOLDS 1", ["HOLDS", "ALL"]),
        ] {
            server.refuses_line(line, &both);
        }
    });
}

#[test]
fn other_limit_than_the_locks_is_refused() {
    each(|server| {
        for line in [
            "LOCK.ACQUIRE held me SHARED",
            "LOCK.ACQUIRE held me LIMIT 2",
            "LOCK.ACQUIRE held me LIMIT 2147483647 LEASE 5000000 HOLDS 9",
            "LOCK.ACQUIRE held me SHARED WAIT 0",
            "LOCK.ACQUIRE shared me",
            "LOCK.ACQUIRE shared me LIMIT 1",
            "LOCK.ACQUIRE shared me LIMIT 2 LEASE 5000000",
            "LOCK.MACQUIRE 2 free shared me",
        ] {
            server.refuses_line(line, &[]);
        }
    });
}

#[test]
fn unknown_option_is_refused() {
    each(|server| {
        for (request, words) in [
            (
                "LOCK.ACQUIRE held me",
                &["FOO", "ALL", "TOKEN", "COUNT", "HEARTBEAT", "FENCE", "LEASES", "LEAS", "SESSIONS", "5"][..],
            ),
            ("LOCK.ACQUIRE free me LEASE 5", &["FOO", "ALL", "TOKEN", "7"]),
            (
                "LOCK.RELEASE held me",
                &["FOO", "WAIT", "LIMIT", "SHARED", "WATCHDOG", "EPHEMERAL", "REPLICAS", "SESSION", "0"],
            ),
            ("LOCK.RENEW held me", &["FOO", "WAIT", "LIMIT", "SHARED", "HOLDS", "ALL"]),
            ("LOCK.MACQUIRE 1 free me", &["FOO", "LIMIT", "SHARED", "ALL", "TOKEN"]),
            ("LOCK.MRELEASE 1 held me", &["FOO", "HOLDS", "LEASE", "WATCHDOG", "SESSION"]),
            ("LOCK.MRENEW 1 held me", &["FOO", "WAIT", "HOLDS", "SHARED", "ALL", "FENCE"]),
            ("LOCK.EVENTS", &["FOO", "SESSION", "LEASE", "TOKEN"]),
            ("LOCK.INFO held", &["FOO", "LIMIT", "SESSION"]),
            ("LOCK.WAITERS held", &["FOO", "LIMIT"]),
            ("LOCK.TOP", &["FOO", "LIMIT"]),
        ] {
            for word in words {
                server.refuses_line(&format!("{request} {word}"), &[word]);
                server.refuses_line(&format!("{request} {word} 5"), &[word]);
            }
        }
    });
}

#[test]
fn invalid_session_id_is_refused() {
    let long = [b'x'; 100_000];
    let bytes: [&[u8]; 6] = [b"", b"\0", b"\xff\xfe", b"%s%n", b"a\r\n+OK\r\n", &long];
    each(|server| {
        let own = ask(&mut server.raw, "LOCK.SESSION").field("id").text();
        let (run, client) = own.split_once(':').expect("run and client");
        let other_run = format!("00000000-0000-4000-8000-000000000000:{client}");
        let mut bad = vec![run.to_owned(), format!("{run}:"), client.to_owned(), format!("{own} "), format!("+{own}")];
        bad.extend([format!("{run}:0"), format!("{run}:-1"), format!("{run}:18446744073709551616"), other_run]);
        bad.extend([own.to_uppercase(), "me".into(), server.ended_session()]);
        for request in OF_SESSIONS {
            for bad in bad.iter().map(String::as_bytes).chain(bytes) {
                let mut command = words(request);
                command.push(bad);
                server.refuses_as("NOSESSION", &command, &["not a session of this server"]);
            }
            server.refuses_line(request, &["SESSION"]);
            server.refuses_line(&format!("{request} {own} SESSION {own}"), &["SESSION", "twice"]);
            server.refuses_line(&format!("{request} {own} session {own}"), &["SESSION", "twice"]);
        }
    });
}

#[test]
fn option_with_arbitrary_bytes_is_refused() {
    let long = b"x".repeat(100_000);
    let bad: [&[u8]; 9] =
        [b"", b"\0", b"LEASE\0", b"\xff\xfe", b"%s%n%d%x", b"a\r\n+OK\r\n:1", b"\r\n-ERR other", b"{}{0}{name}", &long];
    each(|server| {
        for request in REQUESTS.map(|(request, _)| request) {
            for word in bad {
                let mut command = words(request);
                command.push(word);
                server.refuses(&command, &[]);
                command.push(b"5");
                server.refuses(&command, &[]);
            }
        }
    });
}

#[test]
fn invalid_owner_is_refused() {
    let long = [b'o'; 513];
    let longest = vec![b'o'; 1 << 20];
    let bad: [&[u8]; 8] = [b"", b"#", b"#fence", b"#limit", b"#@me", b"#\0", &long, &longest];
    each(|server| {
        for owner in bad {
            for before in [
                "LOCK.ACQUIRE held",
                "LOCK.ACQUIRE free",
                "LOCK.RELEASE held",
                "LOCK.RELEASE free",
                "LOCK.RENEW held",
                "LOCK.MACQUIRE 1 free",
                "LOCK.MRELEASE 1 held",
                "LOCK.MRENEW 1 held",
            ] {
                let mut command = words(before);
                command.push(owner);
                server.refuses(&command, &["owner"]);
                command.extend([&b"LEASE"[..], b"5"]);
                server.refuses(&command, &[]);
            }
        }
    });
}

#[test]
fn wrong_number_of_arguments_is_refused() {
    each(|server| {
        for line in [
            "LOCK.ACQUIRE",
            "LOCK.ACQUIRE held",
            "LOCK.RELEASE",
            "LOCK.RELEASE held",
            "LOCK.RENEW",
            "LOCK.RENEW held",
            "LOCK.FORCE",
            "LOCK.FORCE held shared",
            "LOCK.MACQUIRE",
            "LOCK.MACQUIRE 1",
            "LOCK.MACQUIRE 1 free",
            "LOCK.MRELEASE 1 held",
            "LOCK.MRENEW 1 held",
            "LOCK.INFO",
            "LOCK.WAITERS",
            "LOCK.VERSION me",
            "LOCK.HELP me",
        ] {
            server.refuses_line(line, &["wrong number of arguments"]);
        }
        server.refuses_line("LOCK.NOTHING held me", &["unknown command"]);
    });
}

#[test]
fn invalid_numkeys_is_refused() {
    each(|server| {
        for name in ["LOCK.MACQUIRE", "LOCK.MRELEASE", "LOCK.MRENEW"] {
            for bad in
                ["0", "-1", "abc", "1.5", "3", "4", "5", "2147483648", "9223372036854775807", "9223372036854775808"]
            {
                server.refuses_line(&format!("{name} {bad} free held me"), &[]);
            }
            for bad in NO_TEXTS {
                server.refuses(&[name.as_bytes(), bad, b"free", b"me"], &[]);
            }
            // Without an owner, the last key is taken for it.
            server.refuses_line(&format!("{name} 2 free held"), &["between 1 and 1", "owner"]);
            server.refuses_line(&format!("{name} 2 held held me"), &[]);
            server.refuses_line(&format!("{name} 3 free held free me"), &[]);
            let many: Vec<String> = (0..129).map(|number| format!("key-{number}")).collect();
            server.refuses_line(&format!("{name} 129 {} me", many.join(" ")), &["128", "129"]);
        }
    });
}

#[test]
fn too_long_lease_is_refused() {
    each(|server| {
        ask_ok(&mut server.raw, "CONFIG SET holdfast.max-lease 1000");
        for request in ["LOCK.ACQUIRE held me", "LOCK.ACQUIRE free me", "LOCK.RELEASE held me", "LOCK.RENEW held me"] {
            for bad in ["1001", "30000", "315360000000", "9223372036854775807"] {
                server.refuses_line(&format!("{request} LEASE {bad}"), &["LEASE", "1000", bad]);
            }
        }
    });
    let server = Server::builder().module_args(&["max-lease", "1000"]).start();
    ask_token(&mut server.raw(), "LOCK.ACQUIRE free me LEASE 1000");
}

#[test]
fn too_large_hold_count_is_refused() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE k me HOLDS 2147483647");
    let before = Contents::read(&mut raw);
    for line in ["LOCK.ACQUIRE k me", "LOCK.ACQUIRE k me LEASE 1000000"] {
        assert_eq!(error(&ask(&mut raw, line)).0, "ERR", "{line}");
        assert_eq!(Contents::read(&mut raw), before, "{line}");
    }
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE k me"), 0);
    ask_token(&mut raw, "LOCK.ACQUIRE k me");
}

#[test]
fn replicas_option_is_refused_where_blocking_is_impossible() {
    each(|server| {
        for line in
            ["LOCK.ACQUIRE free me REPLICAS 1", "LOCK.RENEW held me REPLICAS 1", "LOCK.MACQUIRE 1 free me REPLICAS 1"]
        {
            ask_ok(&mut server.raw, "MULTI");
            assert_eq!(text(&ask(&mut server.raw, line)), "QUEUED");
            let reply = ask(&mut server.raw, "EXEC");
            let [reply] = array(&reply) else { panic!("{reply:?}") };
            assert_eq!(error(reply).0, "ERR", "{line}");
            assert_eq!(Contents::read(&mut server.raw), server.before, "{line}");
            let script = format!("return redis.pcall('{}')", line.replace(' ', "','"));
            let reply = server.raw.call(&[b"EVAL", script.as_bytes(), b"0"]);
            assert_eq!(error(&reply).0, "ERR", "{line}");
            assert_eq!(Contents::read(&mut server.raw), server.before, "{line}");
        }
    });
}

#[test]
fn largest_allowed_values_are_accepted() {
    let server = Server::start();
    let mut raw = server.raw();
    for (line, deadline) in [
        ("LOCK.ACQUIRE a me LEASE 315360000000 WAIT 315360000000 LIMIT 2147483647 HOLDS 2147483647", "a"),
        ("LOCK.RENEW a me LEASE 315360000000", "a"),
        ("LOCK.ACQUIRE b me LEASE 315360000000 HOLDS 2147483647", "b"),
    ] {
        let token = ask_token(&mut raw, line);
        assert!(token > 0);
        let left = ask_int(&mut raw, &format!("PTTL {deadline}"));
        assert!((MAX_LEASE - 60_000..=MAX_LEASE).contains(&left), "{line}: {left}");
    }
    assert_eq!(ask(&mut raw, "LOCK.RELEASE b me TOKEN 9007199254740991"), Value::Nil);
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE b me HOLDS 2147483647 LEASE 315360000000"), 0);
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE b me ALL"), 1);
    assert_eq!(bytes(&ask(&mut raw, "HGET a me")), b"2147483647");
}
