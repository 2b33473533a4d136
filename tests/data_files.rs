//! RDB and AOF files of this version and of every earlier one load, with the module and without it, with all their locks.
//! `tests/data/make` makes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use redis::{Connection, Value};
use support::{Server, skip, workspace};

/// The files of one version.
struct Data {
    dir: PathBuf,
    fields: BTreeMap<(u32, Bytes), BTreeMap<Bytes, Bytes>>,
    deadlines: BTreeMap<(u32, Bytes), i64>,
    holders: Vec<Holder>,
    free: Vec<(u32, Bytes)>,
}

type Bytes = Vec<u8>;

struct Holder {
    database: u32,
    key: Bytes,
    owner: Bytes,
    holds: i64,
    token: Option<i64>,
    limit: i64,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Rdb,
    Aof,
}

#[test]
fn files_of_every_version_load_with_the_module() {
    each(|data, kind| {
        let Some(server) = Loaded::start(data, kind, Server::builder()) else {
            return;
        };
        let mut connection = server.connect();
        has_the_same_contents(data, &mut connection);
        for holder in &data.holders {
            assert_held(data, holder, &mut connection);
        }
        for (database, key) in &data.free {
            select(*database, &mut connection);
            assert_eq!(acquire(key, b"newcomer", &mut connection), Reply::Token, "{}", key.escape_ascii());
        }
        let newest = data.holders.iter().filter_map(|holder| holder.token).max().expect("there are tokens");
        for holder in &data.holders {
            assert_releasable(holder, newest, &mut connection);
        }
    });
}

#[test]
fn files_of_every_version_load_without_the_module() {
    each(|data, kind| {
        let Some(server) = Loaded::start(data, kind, Server::builder().without_module()) else {
            return;
        };
        has_the_same_contents(data, &mut server.connect());
    });
}

/// Runs `check` with every set of files, as RDB and as AOF.
fn each(check: impl Fn(&Data, Kind)) {
    let versions: Vec<PathBuf> = fs::read_dir(workspace().join("tests/data"))
        .expect("tests/data")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.join("locks.tsv").exists())
        .collect();
    let here = workspace().join("tests/data").join(env!("CARGO_PKG_VERSION"));
    assert!(
        versions.iter().any(|path| path.ends_with(env!("CARGO_PKG_VERSION"))),
        "no files of this version in {}: tests/data/make",
        here.display()
    );
    for data in versions.iter().map(|dir| Data::read(dir)) {
        for kind in [Kind::Rdb, Kind::Aof] {
            check(&data, kind);
        }
    }
}

fn has_the_same_contents(data: &Data, connection: &mut Connection) {
    let databases: BTreeSet<u32> = data.fields.keys().map(|(database, _)| *database).collect();
    for database in databases {
        select(database, connection);
        let keys: BTreeSet<Bytes> = redis::cmd("KEYS").arg("*").query(connection).unwrap();
        let expected: BTreeSet<Bytes> =
            data.fields.keys().filter(|(at, _)| *at == database).map(|(_, key)| key.clone()).collect();
        assert_eq!(keys, expected, "keys of database {database}");
    }
    for ((database, key), fields) in &data.fields {
        select(*database, connection);
        let found: BTreeMap<Bytes, Bytes> = redis::cmd("HGETALL").arg(key).query(connection).unwrap();
        assert_eq!(&found, fields, "{}", key.escape_ascii());
        let deadline: i64 = redis::cmd("PEXPIRETIME").arg(key).query(connection).unwrap();
        assert_eq!(Some(&deadline), data.deadlines.get(&(*database, key.clone())), "{}", key.escape_ascii());
    }
}

fn assert_held(data: &Data, holder: &Holder, connection: &mut Connection) {
    let name = holder.key.escape_ascii().to_string();
    select(holder.database, connection);
    assert_eq!(acquire(&holder.key, b"another owner", connection), Reply::Null, "{name}");

    let info = map(redis::cmd("LOCK.INFO").arg(&holder.key).query(connection).unwrap());
    assert_eq!(info[&b"limit"[..]], Value::Int(holder.limit), "{name}");
    let Value::Array(holders) = &info[&b"holders"[..]] else { panic!("{name}: {info:?}") };
    let beside =
        data.holders.iter().filter(|other| other.database == holder.database && other.key == holder.key).count();
    assert_eq!(holders.len(), beside, "{name}");
    let found = holders
        .iter()
        .map(|holder| map(holder.clone()))
        .find(|found| found[&b"owner"[..]] == Value::BulkString(holder.owner.clone()))
        .unwrap_or_else(|| panic!("{name}: {holders:?}"));
    assert_eq!(found[&b"holds"[..]], Value::Int(holder.holds), "{name}");
    let token = holder.token.map_or(Value::Nil, Value::Int);
    assert_eq!(found[&b"token"[..]], token, "{name}");
    assert_eq!(found[&b"client"[..]], Value::Nil, "{name}");
}

fn assert_releasable(holder: &Holder, newest: i64, connection: &mut Connection) {
    let name = holder.key.escape_ascii().to_string();
    select(holder.database, connection);
    let mut release = redis::cmd("LOCK.RELEASE");
    release.arg(&holder.key).arg(&holder.owner).arg("ALL");
    if let Some(token) = holder.token {
        let mut wrong = release.clone();
        let left: Option<i64> = wrong.arg("TOKEN").arg(token + 1).query(connection).unwrap();
        assert_eq!(left, None, "{name}: released under a token that is not its own");
        release.arg("TOKEN").arg(token);
    }
    let left: Option<i64> = release.query(connection).unwrap();
    assert_eq!(left, Some(1), "{name}");
    let token: i64 = redis::cmd("LOCK.ACQUIRE").arg("the next one").arg(name).arg("SHARED").query(connection).unwrap();
    assert!(token > newest, "{token} after {newest}");
}

#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Token,
    Null,
}

fn acquire(key: &[u8], owner: &[u8], connection: &mut Connection) -> Reply {
    match redis::cmd("LOCK.ACQUIRE").arg(key).arg(owner).query(connection).unwrap() {
        Value::Int(token) if token > 0 => Reply::Token,
        Value::Nil => Reply::Null,
        other => panic!("{}: {other:?}", key.escape_ascii()),
    }
}

fn select(database: u32, connection: &mut Connection) {
    redis::cmd("SELECT").arg(database).exec(connection).unwrap();
}

/// A map as RESP2 returns it: names and values alternate.
fn map(value: Value) -> BTreeMap<Bytes, Value> {
    let Value::Array(items) = value else { panic!("not a map: {value:?}") };
    items
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| match pair {
            [Value::BulkString(name), value] => (name.clone(), value.clone()),
            [Value::SimpleString(name), value] => (name.clone().into_bytes(), value.clone()),
            other => panic!("not a pair: {other:?}"),
        })
        .collect()
}

impl Data {
    fn read(dir: &Path) -> Data {
        let text = fs::read_to_string(dir.join("locks.tsv")).expect("locks.tsv");
        let mut data = Data {
            dir: dir.to_owned(),
            fields: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            holders: Vec::new(),
            free: Vec::new(),
        };
        for line in text.lines() {
            data.read_line(line);
        }
        assert!(data.holders.len() > 10, "{} lists the contents of the files", dir.display());
        data
    }

    fn read_line(&mut self, line: &str) {
        let words: Vec<&str> = line.split('\t').collect();
        let number = |word: &str| word.parse::<i64>().unwrap_or_else(|_| panic!("no number {word:?} in {line:?}"));
        let place = || (number(words[1]) as u32, unhex(words[2]));
        match words[..] {
            ["F", _, _, field, value] => {
                self.fields.entry(place()).or_default().insert(unhex(field), unhex(value));
            }
            ["D", _, _, deadline] => {
                self.deadlines.insert(place(), number(deadline));
            }
            ["L", _, _, owner, holds, token, limit] => self.holders.push(Holder {
                database: place().0,
                key: place().1,
                owner: unhex(owner),
                holds: number(holds),
                token: (token != "-").then(|| number(token)),
                limit: number(limit),
            }),
            ["A", _, _] => self.free.push(place()),
            _ => panic!("not a line of locks.tsv: {line:?}"),
        }
    }
}

fn unhex(text: &str) -> Bytes {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal")).collect()
}

/// A server with a copy of the files, which is deleted with it.
struct Loaded {
    server: Server,
    _copy: Copied,
}

impl Loaded {
    /// `None` if the server can't read files of this machine.
    fn start(data: &Data, kind: Kind, builder: support::Builder) -> Option<Loaded> {
        if support::in_containers() {
            skip("files of this machine are not in the container");
            return None;
        }
        let copy = Copied::of(&data.dir);
        let appendonly = match kind {
            Kind::Rdb => "no",
            Kind::Aof => "yes",
        };
        let server = builder.dir(copy.0.clone()).arg("appendonly", appendonly).start();
        Some(Loaded { server, _copy: copy })
    }

    fn connect(&self) -> Connection {
        self.server.connect()
    }
}

struct Copied(PathBuf);

impl Copied {
    fn of(dir: &Path) -> Copied {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let to = std::env::temp_dir().join(format!("holdfast-data-{}-{number}", std::process::id()));
        copy(dir, &to);
        Copied(to)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory for the copy");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("a file copied");
        }
    }
}
