//! What the server tells clients about the commands, and which users may run them.

use std::collections::BTreeSet;

use redis::Value;
use support::{Feature, Raw, Server};

use crate::common::{array, ask, ask_int, ask_ok, ask_token, error, int, map, text};

/// Every command of the module.
pub const NAMES: [&str; 14] = [
    "LOCK.ACQUIRE",
    "LOCK.RELEASE",
    "LOCK.RENEW",
    "LOCK.FORCE",
    "LOCK.MACQUIRE",
    "LOCK.MRELEASE",
    "LOCK.MRENEW",
    "LOCK.EVENTS",
    "LOCK.INFO",
    "LOCK.WAITERS",
    "LOCK.TOP",
    "LOCK.SESSION",
    "LOCK.VERSION",
    "LOCK.HELP",
];

/// Expected properties of a command: arity, effect, the keys of an example, its options.
struct Expected {
    name: &'static str,
    arity: i64,
    effect: Effect,
    example: &'static str,
    keys: &'static [&'static str],
    words: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Writes, and is refused when memory is full.
    Takes,
    Writes,
    Reads,
    Neither,
}

impl Expected {
    fn may_block(&self) -> bool {
        self.words.iter().any(|word| ["WAIT", "REPLICAS"].contains(word))
    }
}

const EXPECTED: [Expected; 14] = [
    Expected {
        name: "LOCK.ACQUIRE",
        arity: -3,
        effect: Effect::Takes,
        example: "LOCK.ACQUIRE k me LEASE 5 WAIT 0",
        keys: &["k"],
        words: &[
            "LEASE",
            "WAIT",
            "WAITED",
            "LIMIT",
            "SHARED",
            "HOLDS",
            "NEW",
            "WATCHDOG",
            "EPHEMERAL",
            "REPLICAS",
            "WITHWAITED",
            "CONTENTION",
            "SESSION",
        ],
    },
    Expected {
        name: "LOCK.RELEASE",
        arity: -3,
        effect: Effect::Writes,
        example: "LOCK.RELEASE k me ALL",
        keys: &["k"],
        words: &["TOKEN", "HOLDS", "ALL", "LEASE"],
    },
    Expected {
        name: "LOCK.RENEW",
        arity: -3,
        effect: Effect::Writes,
        example: "LOCK.RENEW k me LEASE 5",
        keys: &["k"],
        words: &["LEASE", "TOKEN", "WATCHDOG", "EPHEMERAL", "REPLICAS", "FENCE", "UNBIND", "CONTENTION", "SESSION"],
    },
    Expected {
        name: "LOCK.FORCE",
        arity: 2,
        effect: Effect::Writes,
        example: "LOCK.FORCE k",
        keys: &["k"],
        words: &[],
    },
    Expected {
        name: "LOCK.MACQUIRE",
        arity: -4,
        effect: Effect::Takes,
        example: "LOCK.MACQUIRE 3 k l m me LEASE 5",
        keys: &["k", "l", "m"],
        words: &[
            "LEASE",
            "WAIT",
            "WAITED",
            "HOLDS",
            "NEW",
            "WATCHDOG",
            "EPHEMERAL",
            "REPLICAS",
            "WITHWAITED",
            "CONTENTION",
            "SESSION",
        ],
    },
    Expected {
        name: "LOCK.MRELEASE",
        arity: -4,
        effect: Effect::Writes,
        example: "LOCK.MRELEASE 2 k l me ALL",
        keys: &["k", "l"],
        words: &["TOKEN", "ALL"],
    },
    Expected {
        name: "LOCK.MRENEW",
        arity: -4,
        effect: Effect::Writes,
        example: "LOCK.MRENEW 1 k me",
        keys: &["k"],
        words: &["LEASE", "TOKEN", "WATCHDOG", "EPHEMERAL", "REPLICAS", "UNBIND", "CONTENTION", "SESSION"],
    },
    Expected {
        name: "LOCK.EVENTS",
        arity: -1,
        effect: Effect::Neither,
        example: "LOCK.EVENTS WAIT 0",
        keys: &[],
        words: &["WAIT", "COUNT", "HEARTBEAT"],
    },
    Expected {
        name: "LOCK.INFO",
        arity: -2,
        effect: Effect::Reads,
        example: "LOCK.INFO k COUNT 5",
        keys: &["k"],
        words: &["COUNT"],
    },
    Expected {
        name: "LOCK.WAITERS",
        arity: -2,
        effect: Effect::Reads,
        example: "LOCK.WAITERS k COUNT 5",
        keys: &["k"],
        words: &["COUNT"],
    },
    Expected {
        name: "LOCK.TOP",
        arity: -1,
        effect: Effect::Neither,
        example: "LOCK.TOP COUNT 5",
        keys: &[],
        words: &["COUNT"],
    },
    Expected {
        name: "LOCK.SESSION",
        arity: -1,
        effect: Effect::Neither,
        example: "LOCK.SESSION REPLACES id",
        keys: &[],
        words: &["REPLACES"],
    },
    Expected {
        name: "LOCK.VERSION",
        arity: 1,
        effect: Effect::Neither,
        example: "LOCK.VERSION",
        keys: &[],
        words: &[],
    },
    Expected { name: "LOCK.HELP", arity: 1, effect: Effect::Neither, example: "LOCK.HELP", keys: &[], words: &[] },
];

#[test]
fn module_registers_documented_commands() {
    let server = Server::start();
    let mut raw = server.raw();
    let reply = ask(&mut raw, "COMMAND LIST FILTERBY MODULE holdfast");
    let mut listed: BTreeSet<String> = array(&reply).iter().map(|name| text(name).to_uppercase()).collect();
    assert!(listed.remove("LOCK.OWNER"), "clients of earlier versions get an error that says what to do");
    assert_eq!(listed, NAMES.map(String::from).into());
    assert_eq!(listed, EXPECTED.map(|it| it.name.to_owned()).into());
}

/// A client of version 0.3 sends this command first.
#[test]
fn lock_owner_says_to_update_the_client() {
    let server = Server::start();
    for line in ["LOCK.OWNER", "LOCK.OWNER REPLACES 17"] {
        let reply = ask(&mut server.raw(), line);
        let (code, message) = error(&reply);
        assert_eq!(code, "ERR", "{line}");
        assert!(message.contains("update the client"), "{line}: {message}");
    }
}

#[test]
fn command_info_is_complete() {
    let server = Server::start();
    let mut raw = server.raw();
    for expected in EXPECTED {
        let reply = ask(&mut raw, &format!("COMMAND INFO {}", expected.name));
        let info = array(&array(&reply)[0]);
        let name = expected.name;
        assert_eq!(text(&info[0]).to_uppercase(), name);
        assert_eq!(int(&info[1]), expected.arity, "{name}");
        let flags: BTreeSet<String> = array(&info[2]).iter().map(text).collect();
        let has = |flag: &str| flags.contains(flag);
        assert_eq!(has("write"), matches!(expected.effect, Effect::Takes | Effect::Writes), "{name}: {flags:?}");
        match expected.effect {
            Effect::Reads => assert!(has("readonly"), "{name}: {flags:?}"),
            Effect::Takes | Effect::Writes => assert!(!has("readonly"), "{name}: {flags:?}"),
            Effect::Neither => {}
        }
        assert_eq!(has("denyoom"), expected.effect == Effect::Takes, "{name}: {flags:?}");
        assert_eq!(has("blocking"), expected.may_block(), "{name}: {flags:?}");
        let (first, last, step) = match expected.keys {
            [] => (0, 0, 0),
            [_] if !name.starts_with("LOCK.M") => (1, 1, 1),
            _ => {
                assert!(has("movablekeys"), "{name}: {flags:?}");
                continue;
            }
        };
        assert_eq!([&info[3], &info[4], &info[5]].map(int), [first, last, step], "{name}");
    }
}

#[test]
fn key_specifications_find_the_keys() {
    let server = Server::start();
    let mut raw = server.raw();
    for expected in EXPECTED {
        let name = expected.name;
        let reply = ask(&mut raw, &format!("COMMAND INFO {name}"));
        let specs = array(&array(&array(&reply)[0])[8]);
        assert_eq!(specs.len(), usize::from(!expected.keys.is_empty()), "{name}: {specs:?}");
        for spec in specs {
            let flags: BTreeSet<String> = array(&map(spec)[&b"flags"[..]]).iter().map(text).collect();
            let access = if expected.effect == Effect::Reads { "RO" } else { "RW" };
            assert!(flags.contains(access), "{name}: {flags:?}");
        }
        let reply = ask(&mut raw, &format!("COMMAND GETKEYS {}", expected.example));
        match expected.keys {
            [] => assert_eq!(error(&reply).0, "ERR", "{name}"),
            keys => assert_eq!(array(&reply).iter().map(text).collect::<Vec<_>>(), keys, "{name}"),
        }
    }
}

#[test]
fn command_docs_are_complete() {
    let server = Server::start();
    let mut raw = server.raw();
    for expected in EXPECTED {
        let name = expected.name;
        let reply = ask(&mut raw, &format!("COMMAND DOCS {name}"));
        let docs = map(map(&reply).values().next().unwrap_or_else(|| panic!("{name} has no documentation")));
        let field = |field: &str| text(docs.get(field.as_bytes()).unwrap_or_else(|| panic!("{name} has no {field}")));
        assert!(field("summary").len() > 10, "{name}");
        assert!(field("complexity").starts_with("O("), "{name}");
        assert_eq!((field("group").as_str(), field("module").as_str()), ("module", "holdfast"), "{name}");
        let since = field("since");
        let expected_since = match name {
            "LOCK.SESSION" | "LOCK.VERSION" => "0.4.0",
            "LOCK.EVENTS" => "0.2.0",
            _ => "0.1.0",
        };
        assert_eq!(since, expected_since, "{name}");
        let mut found = Arguments::default();
        if let Some(arguments) = docs.get(&b"arguments"[..]) {
            found.read(arguments, Place::Command);
        }
        assert_eq!(found.words, expected.words.iter().map(|word| word.to_string()).collect(), "{name}");
        assert_eq!(found.keys, usize::from(!expected.keys.is_empty()), "{name}");
        let named: BTreeSet<&str> = found.names.iter().map(String::as_str).collect();
        assert_eq!(
            named.contains("owner"),
            expected.example.ends_with("me") || expected.example.contains(" me "),
            "{name}"
        );
        assert_eq!(named.contains("numkeys"), name.starts_with("LOCK.M"), "{name}");
    }
}

/// The arguments in `COMMAND DOCS`, alternatives included.
#[derive(Default)]
struct Arguments {
    words: BTreeSet<String>,
    names: BTreeSet<String>,
    keys: usize,
}

/// The parent of an argument. Alternatives are not optional, but their group may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Command,
    Choice,
}

impl Arguments {
    fn read(&mut self, arguments: &Value, place: Place) {
        for argument in array(arguments) {
            let argument = map(argument);
            let field = |name: &str| argument.get(name.as_bytes());
            self.names.insert(text(&argument[&b"name"[..]]));
            self.words.extend(field("token").map(text));
            let is_key = text(&argument[&b"type"[..]]) == "key";
            self.keys += usize::from(is_key);
            assert_eq!(is_key, field("key_spec_index").is_some(), "{argument:?}");
            let flags: Vec<String> = field("flags").map(|it| array(it).iter().map(text).collect()).unwrap_or_default();
            let may_be_missing = field("token").is_some() || field("arguments").is_some();
            assert_eq!(flags.contains(&"optional".into()), may_be_missing && place == Place::Command, "{argument:?}");
            if let Some(choices) = field("arguments") {
                self.read(choices, Place::Choice);
            }
        }
    }
}

#[test]
fn commands_have_acl_categories_if_server_supports_them() {
    let server = Server::start();
    let mut raw = server.raw();
    // By command: Valkey 8.0 leaves modules out of `ACL CAT`.
    let categories = |raw: &mut Raw, name: &str| -> BTreeSet<String> {
        let reply = ask(raw, &format!("COMMAND INFO {name}"));
        array(&array(&array(&reply)[0])[6]).iter().map(text).collect()
    };
    for expected in EXPECTED {
        let (name, found) = (expected.name, categories(&mut raw, expected.name));
        if !server.can(Feature::CommandCategories) {
            // Redis 7.0 has no categories for modules. rights.rs shows the rules to use there.
            assert!(found.is_empty(), "{name}: {found:?}");
            continue;
        }
        let has = |category: &str| found.contains(category);
        assert_eq!(has("@lock"), server.can(Feature::AclCategories), "{name}: {found:?}");
        for category in ["@admin", "@dangerous"] {
            assert_eq!(has(category), name == "LOCK.FORCE", "{name}: {found:?}");
        }
        let (writes, reads) = match expected.effect {
            Effect::Takes | Effect::Writes => (true, false),
            Effect::Reads => (false, true),
            Effect::Neither => (false, has("@read")),
        };
        assert_eq!((has("@write"), has("@read")), (writes, reads), "{name}: {found:?}");
        assert!(has("@fast") != has("@slow"), "{name}: {found:?}");
        assert_eq!(has("@blocking"), expected.may_block(), "{name}: {found:?}");
    }
}

#[test]
fn user_reaches_only_permitted_keys() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_ok(&mut raw, "ACL SETUSER app on >secret ~mine:* &* +@all");
    ask_ok(&mut raw, "ACL SETUSER reader on >secret %R~* &* +@all");
    let mut app = server.raw();
    ask_ok(&mut app, "AUTH app secret");
    ask_token(&mut app, "LOCK.ACQUIRE mine:k me");
    for line in [
        "LOCK.ACQUIRE k me",
        "LOCK.RELEASE k me",
        "LOCK.RENEW k me",
        "LOCK.FORCE k",
        "LOCK.INFO k",
        "LOCK.WAITERS k",
        "LOCK.MACQUIRE 2 mine:a k me",
        "LOCK.MRELEASE 2 mine:a k me",
        "LOCK.MRENEW 2 mine:a k me",
    ] {
        assert_eq!(error(&ask(&mut app, line)).0, "NOPERM", "{line}");
    }
    let mut reader = server.raw();
    ask_ok(&mut reader, "AUTH reader secret");
    assert_eq!(map(&ask(&mut reader, "LOCK.INFO mine:k")).len(), 6);
    for line in ["LOCK.ACQUIRE k me", "LOCK.RELEASE mine:k me", "LOCK.RENEW mine:k me", "LOCK.FORCE mine:k"] {
        assert_eq!(error(&ask(&mut reader, line)).0, "NOPERM", "{line}");
    }
}

#[test]
fn locks_are_released_but_not_granted_without_memory() {
    let server = Server::start();
    let mut raw = server.raw();
    ask_token(&mut raw, "LOCK.ACQUIRE held me HOLDS 2");
    ask_ok(&mut raw, "CONFIG SET maxmemory 1");
    for line in ["LOCK.ACQUIRE free me", "LOCK.ACQUIRE held me", "LOCK.MACQUIRE 2 a b me"] {
        assert_eq!(error(&ask(&mut raw, line)).0, "OOM", "{line}");
    }
    ask_token(&mut raw, "LOCK.RENEW held me");
    assert_eq!(map(&ask(&mut raw, "LOCK.INFO held")).len(), 6);
    assert_eq!(ask(&mut raw, "LOCK.WAITERS held"), Value::Array(vec![]));
    assert_eq!(ask_int(&mut raw, "LOCK.RELEASE held me"), 0);
    assert_eq!(array(&ask(&mut raw, "LOCK.MRENEW 1 held me")).len(), 1);
    assert_eq!(ask(&mut raw, "LOCK.MRELEASE 1 held you"), Value::Array(vec![Value::Nil]));
    assert_eq!(ask_int(&mut raw, "LOCK.FORCE held"), 1);
}
