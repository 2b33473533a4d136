//! The server's own commands, as far as the module can see their effects.

use crate::lock::Millis;
use crate::node::client::State;
use crate::node::stream::undump;
use crate::node::{
    Bytes, Client, DATABASES, Entry, Generation, LogEntry, Node, Place, Registered, Role, User, Value, node, slot_of,
};
use crate::server::callbacks::{Event, Ticket, Touch};
use crate::server::calls::{answer, disconnect, expire_if_needed, force_unblock, notify, report};

const OK: &str = "+OK\r\n";
const NIL: &str = "$-1\r\n";
const SYNTAX: &str = "-ERR syntax error\r\n";

/// Runs, postpones or refuses a request.
pub fn execute(client: u64, argv: Vec<Bytes>) {
    let name = lower(&argv[0]);
    let in_transaction = node(|node| node.clients[&client].multi.is_some());
    if in_transaction && !matches!(name.as_str(), "exec" | "discard" | "multi") {
        return queue(client, argv);
    }
    if let Some(error) = node(|node| refusal(node, client, &argv)) {
        request_started(client, &[]);
        if name == "exec" {
            node(|node| set(node, client, |it| it.multi = None));
        }
        return reply(client, &error);
    }
    if node(|node| node.is_paused() && would_write(node, client, &name, &argv)) {
        return node(|node| {
            if let Some(it) = node.clients.get_mut(&client) {
                it.state = State::Postponed;
                it.input.push_front(argv);
            }
        });
    }
    if name != "exec" {
        request_started(client, std::slice::from_ref(&argv));
    }
    match name.as_str() {
        "multi" => {
            node(|node| set(node, client, |it| it.multi = Some(Some(Vec::new()))));
            reply(client, OK);
        }
        "discard" => {
            node(|node| set(node, client, |it| it.multi = None));
            reply(client, OK);
        }
        "exec" => exec(client),
        _ => run(client, Place::Alone, &argv),
    }
}

/// Whether a request writes, or is a transaction or script that does.
fn would_write(node: &Node, client: u64, name: &str, argv: &[Bytes]) -> bool {
    let of = |argv: &Vec<Bytes>| writes(node, &lower(&argv[0]));
    match name {
        "exec" => {
            node.clients.get(&client).and_then(|it| it.multi.as_ref()?.as_ref()).is_some_and(|it| it.iter().any(of))
        }
        "eval" => argv.get(3).is_some_and(|name| writes(node, &lower(name))),
        _ => writes(node, name),
    }
}

/// Queues a request in a transaction, unless it is invalid.
fn queue(client: u64, argv: Vec<Bytes>) {
    let refusal = node(|node| refusal(node, client, &argv));
    request_started(client, &[]);
    node(|node| {
        set(node, client, |it| match (&mut it.multi, &refusal) {
            (Some(Some(requests)), None) => requests.push(argv),
            (multi, Some(_)) => *multi = Some(None),
            _ => {}
        });
    });
    reply(client, refusal.as_deref().unwrap_or("+QUEUED\r\n"));
}

fn exec(client: u64) {
    let requests = node(|node| node.clients.get_mut(&client).and_then(|it| it.multi.take()));
    request_started(client, requests.as_ref().and_then(Option::as_deref).unwrap_or_default());
    let Some(requests) = requests else { return reply(client, "-ERR EXEC without MULTI\r\n") };
    let Some(requests) = requests else {
        return reply(client, "-EXECABORT Transaction discarded because of previous errors.\r\n");
    };
    let refused = node(|node| {
        let any = requests.iter().any(|argv| writes(node, &lower(&argv[0])));
        node.refuses_writes().filter(|_| any)
    });
    if let Some(error) = refused {
        return reply(client, &format!("-EXECABORT Transaction discarded because of: {error}\r\n"));
    }
    reply(client, &format!("*{}\r\n", requests.len()));
    for argv in requests {
        run(client, Place::Transaction, &argv);
    }
}

/// Why a request is refused before it runs: unknown, too few arguments, no permission, another slot, no writes.
fn refusal(node: &Node, client: u64, argv: &[Bytes]) -> Option<String> {
    let name = lower(&argv[0]);
    if let Some(command) = node.commands.get(name.as_bytes()) {
        let (count, arity) = (argv.len() as i32, command.arity);
        if (arity >= 0 && count != arity) || count < -arity {
            return Some(format!("-ERR wrong number of arguments for '{name}' command\r\n"));
        }
    }
    let user = node.clients.get(&client).and_then(|it| node.users.get(&it.user));
    if user.is_none_or(|user| !node.may_run(user, argv)) {
        return Some(format!("-NOPERM this user has no permissions to run the '{name}' command\r\n"));
    }
    if let Some(slots) = &node.slots {
        let refusal = |key: &Bytes| slots.refusal(slot_of(key), node.get(0, key).is_some());
        // For `EXEC`, the slots of the queued commands' keys count as they are now.
        let multi = node.clients.get(&client).and_then(|it| it.multi.as_ref()?.as_ref()).filter(|_| name == "exec");
        let queued = multi.into_iter().flatten().flat_map(|it| node.keys_of(it));
        if let Some(refusal) = node.keys_of(argv).into_iter().chain(queued).find_map(|key| refusal(&key)) {
            return Some(refusal);
        }
    }
    // A script is refused at the first command that would write.
    let inner = if name == "eval" { argv.get(3).map(|name| lower(name)).unwrap_or_default() } else { name };
    let refuses = node.refuses_writes().filter(|_| writes(node, &inner));
    refuses.map(|error| format!("-{error}\r\n"))
}

fn writes(node: &Node, name: &str) -> bool {
    const WRITES: [&str; 14] = [
        "set",
        "del",
        "hset",
        "hdel",
        "pexpire",
        "pexpireat",
        "persist",
        "rename",
        "move",
        "restore",
        "flushall",
        "flushdb",
        "swapdb",
        "rpush",
    ];
    WRITES.contains(&name) || node.commands.get(name.as_bytes()).is_some_and(|it| it.writes)
}

/// Runs a request that is not refused.
fn run(client: u64, place: Place, argv: &[Bytes]) {
    let name = lower(&argv[0]);
    let db = node(|node| node.clients[&client].db);
    match node(|node| node.commands.get(name.as_bytes()).copied()) {
        Some(Registered { run, .. }) => {
            // A script runs as a client of its own, which is not a connection.
            let id = if let Place::Script(_) = place { 0 } else { client };
            run(id, db, place, argv);
        }
        None => own(client, db, &name, argv),
    }
}

/// The next request of a client has begun. `commands` is what it runs: empty if it is refused or queued.
fn request_started(client: u64, commands: &[Vec<Bytes>]) {
    let is_session = crate::state::with(|state| state.sessions.is_open(client));
    node(|node| {
        let db = node.clients[&client].db;
        *node.started_requests.entry(client).or_default() += 1;
        let (at, steady) = (node.millis(), node.clock.mono / 1000);
        node.log.push(LogEntry::Started { client, db, at, steady, is_session, commands: commands.to_vec() });
    });
}

/// A command of the server's own.
fn own(client: u64, db: i32, name: &str, argv: &[Bytes]) {
    let args: Vec<&[u8]> = argv[1..].iter().map(Vec::as_slice).collect();
    args.iter().take(2).for_each(|key| expire_if_needed(db, key));
    let answer = match (name, args.as_slice()) {
        ("ping", []) => "+PONG\r\n".into(),
        // Blocks the server and all its clients.
        ("debug", [_, seconds]) => {
            let seconds: f64 = String::from_utf8_lossy(seconds).parse().unwrap_or(0.0);
            node(|node| node.work((seconds * 1e6) as u64));
            OK.into()
        }
        ("select" | "move" | "swapdb", args) if node(|node| node.slots.is_some()) && !matches!(args, [b"0"]) => {
            format!("-ERR {} is not allowed in cluster mode\r\n", name.to_uppercase())
        }
        ("select", [to]) => {
            node(|node| set(node, client, |it| it.db = number(to) as i32));
            OK.into()
        }
        ("get", [key]) => node(|node| match node.get(db, key).map(|entry| &entry.value) {
            None => NIL.into(),
            Some(Value::Other(value)) => bulk(value),
            Some(Value::Hash(_)) => WRONGTYPE.into(),
        }),
        ("hget", [key, field]) => node(|node| match node.get(db, key).map(|entry| &entry.value) {
            Some(Value::Hash(hash)) => hash.get(field).map_or(NIL.into(), bulk),
            None => NIL.into(),
            Some(Value::Other(_)) => WRONGTYPE.into(),
        }),
        ("hgetall", [key]) => node(|node| match node.get(db, key).map(|entry| &entry.value) {
            Some(Value::Hash(hash)) => {
                let pairs = hash.pairs().iter().map(|(field, value)| bulk(field) + &bulk(value));
                pairs.fold(format!("*{}\r\n", hash.len() * 2), |text, pair| text + &pair)
            }
            None => "*0\r\n".into(),
            Some(Value::Other(_)) => WRONGTYPE.into(),
        }),
        ("exists", keys) => integer(node(|node| keys.iter().filter(|key| node.get(db, key).is_some()).count() as i64)),
        ("pttl", [key]) => integer(node(|node| match node.get(db, key) {
            None => -2,
            Some(Entry { expiry: None, .. }) => -1,
            Some(Entry { expiry: Some(at), .. }) => (at - node.millis()) as i64,
        })),
        ("set", [key, value]) => {
            let entry = Entry { value: Value::Other(value.to_vec()), expiry: None };
            node(|node| node.db(db).insert(key.to_vec(), entry));
            changed(db, &[key], argv);
            OK.into()
        }
        ("rpush", [key, _]) if node(|node| node.get(db, key).is_some()) => WRONGTYPE.into(),
        ("rpush", [key, value]) => {
            let entry = Entry { value: Value::Other(value.to_vec()), expiry: None };
            node(|node| node.db(db).insert(key.to_vec(), entry));
            changed(db, &[key], argv);
            integer(1)
        }
        ("del", keys) => {
            let gone: Vec<&[u8]> = keys.iter().copied().filter(|key| node(|node| node.remove(db, key))).collect();
            if !gone.is_empty() {
                changed(db, &gone, argv);
            }
            integer(gone.len() as i64)
        }
        ("hset", [key, pairs @ ..]) if !pairs.is_empty() && pairs.len() % 2 == 0 => hset(db, key, pairs, argv),
        ("hdel", [key, ..]) if node(|node| matches!(node.get(db, key), Some(Entry { value: Value::Other(_), .. }))) => {
            WRONGTYPE.into()
        }
        ("hdel", [key, fields @ ..]) => {
            let gone = fields.iter().filter(|field| node(|node| node.delete_field(db, key, field))).count();
            if gone > 0 {
                changed(db, &[key], argv);
            }
            integer(gone as i64)
        }
        ("pexpire", [key, ms]) => {
            let at = node(|node| node.millis()) + number(ms);
            expire_at(db, key, Some(at))
        }
        ("pexpireat", [key, at]) => expire_at(db, key, Some(number(at))),
        ("persist", [key]) => expire_at(db, key, None),
        ("rename", [from, to]) => rename((db, from), (db, to), argv),
        ("move", [key, to]) => {
            let to = number(to) as i32;
            if to == db {
                SAME.into()
            } else if node(|node| node.get(db, key).is_none() || node.get(to, key).is_some()) {
                integer(0)
            } else {
                rename((db, key), (to, key), argv);
                integer(1)
            }
        }
        ("restore", [key, ttl, dump, rest @ ..]) => restore(db, key, number(ttl), dump, rest),
        ("subscribe", [channel]) => {
            let count = node(|node| {
                node.clients.get_mut(&client).map_or(0, |it| {
                    it.channels.push(channel.to_vec());
                    it.channels.len()
                })
            });
            format!("*3\r\n{}{}{}", bulk(b"subscribe"), bulk(channel), integer(count as i64))
        }
        ("flushall", _) => flush(db, None),
        ("flushdb", _) => flush(db, Some(db)),
        ("swapdb", [one, other]) => swap(db, number(one) as i32, number(other) as i32),
        ("replicaof", [host, _]) => become_role(client, if *host == b"NO" { Role::Primary } else { Role::Replica }),
        ("client", [what, rest @ ..]) => of_client(client, &lower(what), rest),
        ("config", [_, what, value]) => configure(&lower(what), value),
        ("acl", [_, user, rules @ ..]) => set_user(user, rules),
        ("auth", [user, _]) => {
            let user = String::from_utf8_lossy(user).into_owned();
            node(|node| {
                node.reconfigured = true;
                set(node, client, |it| it.user = user);
            });
            OK.into()
        }
        ("eval", [_, count, rest @ ..]) => {
            let command: Vec<Bytes> = rest[number(count) as usize..].iter().map(|arg| arg.to_vec()).collect();
            match node(|node| refusal(node, client, &command)) {
                Some(error) => error,
                None => return run(client, Place::Script(client), &command),
            }
        }
        _ => format!("-ERR unknown command '{name}'\r\n"),
    };
    reply(client, &answer);
}

const SAME: &str = "-ERR source and destination objects are the same\r\n";
const WRONGTYPE: &str = "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n";

fn hset(db: i32, key: &[u8], pairs: &[&[u8]], argv: &[Bytes]) -> String {
    let added = node(|node| match &mut node.make(db, key).value {
        Value::Other(_) => None,
        Value::Hash(hash) => {
            let before = hash.len();
            pairs.chunks(2).for_each(|pair| hash.set(pair[0], pair[1]));
            Some(hash.len() - before)
        }
    });
    let Some(added) = added else { return WRONGTYPE.into() };
    changed(db, &[key], argv);
    integer(added as i64)
}

/// Sets or removes an expiry: one that has passed removes the key, as a `DEL` would.
fn expire_at(db: i32, key: &[u8], at: Option<Millis>) -> String {
    let Some(before) = node(|node| node.get(db, key).map(|entry| entry.expiry)) else { return integer(0) };
    if at.is_none() && before.is_none() {
        return integer(0);
    }
    if at.is_some_and(|at| at <= node(|node| node.millis())) {
        let valkey = node(|node| {
            node.remove(db, key);
            node.log.push(LogEntry::Written { db, key: key.to_vec(), expired: false });
            node.generation == Generation::Valkey9
        });
        // Valkey reports such a key as expired, Redis as deleted.
        notify(db, key, if valkey { Touch::Expired } else { Touch::Changed });
        note(db, &[b"DEL".to_vec(), key.to_vec()]);
        return integer(1);
    }
    node(|node| node.get_mut(db, key).map(|entry| entry.expiry = at));
    let command = match at {
        Some(at) => vec![b"PEXPIREAT".to_vec(), key.to_vec(), at.to_string().into_bytes()],
        None => vec![b"PERSIST".to_vec(), key.to_vec()],
    };
    node(|node| node.log.push(LogEntry::ExpiryChanged { db, key: key.to_vec(), at }));
    notify(db, key, Touch::Changed);
    note(db, &command);
    integer(1)
}

fn rename((from_db, from): (i32, &[u8]), (to_db, to): (i32, &[u8]), argv: &[Bytes]) -> String {
    if (from_db, from) == (to_db, to) && node(|node| node.get(to_db, to).is_some()) {
        return OK.into();
    }
    let Some(entry) = node(|node| node.db(from_db).remove(from)) else { return "-ERR no such key\r\n".into() };
    node(|node| node.db(to_db).insert(to.to_vec(), entry));
    touched(from_db, from);
    touched(to_db, to);
    note(from_db, argv);
    OK.into()
}

fn restore(db: i32, key: &[u8], ttl: Millis, dump: &[u8], rest: &[&[u8]]) -> String {
    let is = |word: &str| rest.iter().any(|it| lower(it) == word);
    let now = node(|node| node.millis());
    if !is("replace") && node(|node| node.get(db, key).is_some()) {
        return "-BUSYKEY Target key name already exists.\r\n".into();
    }
    let Some(hash) = undump(dump) else { return "-ERR DUMP payload version or checksum are wrong\r\n".into() };
    let expiry = (ttl > 0).then_some(if is("absttl") { ttl } else { now + ttl });
    node(|node| node.db(db).insert(key.to_vec(), Entry { value: Value::Hash(hash), expiry }));
    let at = expiry.unwrap_or(0).to_string().into_bytes();
    let words = [b"RESTORE".to_vec(), key.to_vec(), at, dump.to_vec(), b"REPLACE".to_vec(), b"ABSTTL".to_vec()];
    changed(db, &[key], &words);
    OK.into()
}

fn flush(selected: i32, db: Option<i32>) -> String {
    node(|node| {
        for (number, keys) in (0..).zip(&mut node.dbs) {
            if db.is_none_or(|db| db == number) {
                keys.clear();
            }
        }
        node.log.push(LogEntry::Flushed(db));
    });
    report(Event::Flushed(db));
    let name = if db.is_some() { "FLUSHDB" } else { "FLUSHALL" };
    note(selected, &[name.as_bytes().to_vec()]);
    OK.into()
}

fn swap(selected: i32, one: i32, other: i32) -> String {
    if one.max(other) as usize >= DATABASES {
        return "-ERR DB index is out of range\r\n".into();
    }
    node(|node| {
        node.dbs.swap(one as usize, other as usize);
        node.log.push(LogEntry::Swapped(one, other));
    });
    report(Event::Swapped(one, other));
    let words = [b"SWAPDB".to_vec(), one.to_string().into_bytes(), other.to_string().into_bytes()];
    note(selected, &words);
    OK.into()
}

/// Changes the role. Blocked clients get an error, and their connections are closed: on Redis before the role changes,
/// on Valkey 9 afterwards.
fn become_role(client: u64, role: Role) -> String {
    let before = node(|node| node.role);
    if before == role {
        return OK.into();
    }
    let valkey = node(|node| node.generation == Generation::Valkey9);
    if valkey {
        node(|node| node.role = role);
    }
    if role == Role::Replica {
        let blocked: Vec<u64> =
            node(|node| node.clients.iter_mut().filter_map(|(id, it)| it.blocked().is_some().then_some(*id)).collect());
        for id in blocked.into_iter().filter(|id| *id != client) {
            reply(
                id,
                "-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n",
            );
            force_unblock(id);
            node(|node| set(node, id, |it| it.closes_after_reply = true));
        }
    }
    node(|node| {
        node.role = role;
        node.was_replica = true;
        node.log.push(LogEntry::RoleChanged);
    });
    report(Event::RoleChanged);
    OK.into()
}

fn of_client(client: u64, what: &str, args: &[&[u8]]) -> String {
    match (what, args) {
        ("id", []) => integer(client as i64),
        // It spares the client itself, unless `SKIPME no` is given.
        ("kill", [_, id, skip_me @ ..]) => {
            let id = number(id);
            if !node(|node| node.clients.contains_key(&id)) || (id == client && skip_me.is_empty()) {
                return integer(0);
            }
            if id == client {
                node(|node| set(node, id, |it| it.is_closing = true));
            } else {
                disconnect(id);
            }
            integer(1)
        }
        ("unblock", [id, rest @ ..]) => {
            let id = number(id);
            let block = node(|node| node.clients.get_mut(&id).and_then(|it| it.blocked().cloned()));
            let Some(block) = block.filter(|it| it.may_end_without_module()) else { return integer(0) };
            if rest.first().is_some_and(|word| lower(word) == "error") {
                reply(id, "-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n");
            } else if block.is_answered {
                return integer(1); // Its reply comes at the end of the iteration.
            } else {
                answer(id, Ticket(block.ticket));
                node(|node| set(node, id, |it| it.blocked().into_iter().for_each(|block| block.is_answered = true)));
            }
            force_unblock(id);
            integer(1)
        }
        ("pause", [ms, ..]) => {
            node(|node| node.paused_until = node.clock.mono + number(ms) * 1000);
            OK.into()
        }
        ("unpause", []) => {
            node(|node| node.paused_until = 0);
            OK.into()
        }
        _ => SYNTAX.into(),
    }
}

fn configure(what: &str, value: &[u8]) -> String {
    node(|node| node.reconfigured = true);
    match what {
        "min-replicas-to-write" => node(|node| node.min_replicas = number(value) as usize),
        "notify-keyspace-events" => node(|node| node.notifies = String::from_utf8_lossy(value).into_owned()),
        _ => return "-ERR Unknown option or number of arguments for CONFIG SET\r\n".into(),
    }
    report(Event::ListenersMayHaveChanged);
    OK.into()
}

/// `ACL SETUSER name rule …`, with the rules that scripts use.
fn set_user(user: &[u8], rules: &[&[u8]]) -> String {
    node(|node| {
        node.reconfigured = true;
        let user = node.users.entry(String::from_utf8_lossy(user).into_owned()).or_default();
        for rule in rules.iter().map(|rule| String::from_utf8_lossy(rule).into_owned()) {
            match rule.as_str() {
                "reset" => *user = User { denied: vec!["lock.".into()], prefix: None },
                "+@all" => user.denied.clear(),
                "resetkeys" => user.prefix = None,
                _ => match (rule.strip_prefix('-'), rule.strip_prefix('~')) {
                    (Some(command), _) => user.denied.push(command.to_lowercase()),
                    (_, Some(pattern)) => user.prefix = Some(pattern.trim_end_matches('*').into()),
                    _ => {}
                },
            }
        }
    });
    OK.into()
}

/// Another command has changed keys: they are reported, and the command is replicated.
fn changed(db: i32, keys: &[&[u8]], command: &[Bytes]) {
    keys.iter().for_each(|key| touched(db, key));
    note(db, command);
}

fn touched(db: i32, key: &[u8]) {
    node(|node| node.log.push(LogEntry::Written { db, key: key.to_vec(), expired: false }));
    notify(db, key, Touch::Changed);
}

fn note(db: i32, command: &[Bytes]) {
    let mut command = command.to_vec();
    command[0].make_ascii_uppercase();
    node(|node| node.stream.note(db, command));
}

fn set(node: &mut Node, client: u64, work: impl FnOnce(&mut Client)) {
    if let Some(it) = node.clients.get_mut(&client) {
        work(it);
    }
}

fn reply(client: u64, text: &str) {
    node(|node| node.reply(client, text.as_bytes()));
}

fn bulk(bytes: &[u8]) -> String {
    format!("${}\r\n{}\r\n", bytes.len(), String::from_utf8_lossy(bytes))
}

fn integer(number: i64) -> String {
    format!(":{number}\r\n")
}

fn lower(text: &[u8]) -> String {
    String::from_utf8_lossy(text).to_lowercase()
}

fn number(text: &[u8]) -> u64 {
    String::from_utf8_lossy(text).parse().unwrap_or(0)
}
