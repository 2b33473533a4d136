//! Helpers for several of the test files: replies, settings, the contents of a server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs};

use redis::Value;
use support::{Raw, Server, module_path};

pub type Bytes = Vec<u8>;

/// Names that break code which takes them for text, for a format, for a pattern or for the end of a line.
pub const NAMES: [&[u8]; 12] = [
    b"plain",
    b"nul\0inside",
    b"\0",
    b"100%s%n%d%",
    b"{tag}rest",
    b"}{",
    b"\r\n",
    b"+OK\r\n:1\r\n$-1\r\n",
    b"\xff\xfe\xc3\x28\x80",
    b" spaces \t",
    b"\"quo'ted\\",
    b"0:@?*[a]",
];

/// A server that is started from a configuration file. Dropping it deletes the file.
pub struct FromFile {
    pub server: Server,
    pub file: PathBuf,
}

impl FromFile {
    /// Starts from these lines; in them, `MODULE` stands for the module's path.
    #[track_caller]
    pub fn start(purpose: &str, lines: &[&str]) -> Self {
        let dir = env::temp_dir().join(format!("holdfast-{purpose}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let file = dir.join("redis.conf");
        let lines = lines.join("\n").replace("MODULE", module_path().to_str().expect("UTF-8"));
        fs::write(&file, lines + "\n").expect("a file");
        let server = Server::builder().without_module().config_file(&file).dir(dir).start();
        Self { server, file }
    }
}

impl Drop for FromFile {
    fn drop(&mut self) {
        if let Some(dir) = self.file.parent() {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// A protocol of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Resp2,
    Resp3,
}

impl Protocol {
    pub const BOTH: [Self; 2] = [Self::Resp2, Self::Resp3];

    /// A new connection with this protocol.
    pub fn connect(self, server: &Server) -> Raw {
        let mut raw = server.raw();
        if self == Self::Resp3 {
            raw.hello3();
        }
        raw
    }

    /// The null reply, as bytes.
    pub fn null(self) -> &'static [u8] {
        match self {
            Self::Resp2 => b"$-1\r\n",
            Self::Resp3 => b"_\r\n",
        }
    }
}

/// The words of a command line without quotes.
pub fn words(line: &str) -> Vec<&[u8]> {
    line.split_whitespace().map(str::as_bytes).collect()
}

/// Sends the words of `line` as a command and reads its reply.
#[track_caller]
pub fn ask(raw: &mut Raw, line: &str) -> Value {
    raw.call(&words(line))
}

/// Sends the words of `line` as a command; the reply must be a fencing token.
#[track_caller]
pub fn ask_token(raw: &mut Raw, line: &str) -> i64 {
    token(&ask(raw, line))
}

/// Sends the words of `line` as a command; the reply must be an integer.
#[track_caller]
pub fn ask_int(raw: &mut Raw, line: &str) -> i64 {
    int(&ask(raw, line))
}

/// Sends the words of `line` as a command; the reply must be `OK`.
#[track_caller]
pub fn ask_ok(raw: &mut Raw, line: &str) {
    assert_eq!(ask(raw, line), Value::Okay, "{line}");
}

#[track_caller]
pub fn int(value: &Value) -> i64 {
    match value {
        Value::Int(int) => *int,
        other => panic!("not an integer: {other:?}"),
    }
}

/// A fencing token.
#[track_caller]
pub fn token(value: &Value) -> i64 {
    let token = int(value);
    assert!(token > 0 && token < 1 << 53, "not a token: {token}");
    token
}

/// The bytes of a bulk or simple string.
#[track_caller]
pub fn bytes(value: &Value) -> &[u8] {
    match value {
        Value::BulkString(bytes) => bytes,
        Value::SimpleString(text) => text.as_bytes(),
        other => panic!("not a string: {other:?}"),
    }
}

/// A string in UTF-8.
#[track_caller]
pub fn text(value: &Value) -> String {
    match value {
        Value::VerbatimString { text, .. } => text.clone(),
        other => String::from_utf8(bytes(other).to_vec()).expect("UTF-8"),
    }
}

/// The elements of an array.
#[track_caller]
pub fn array(value: &Value) -> &[Value] {
    match value {
        Value::Array(items) | Value::Set(items) => items,
        other => panic!("not an array: {other:?}"),
    }
}

/// A map by its keys. RESP2 returns an array that alternates keys and values.
#[track_caller]
pub fn map(value: &Value) -> BTreeMap<Bytes, Value> {
    match value {
        Value::Map(pairs) => pairs.iter().map(|(key, value)| (bytes(key).to_vec(), value.clone())).collect(),
        other => array(other).chunks(2).map(|pair| (bytes(&pair[0]).to_vec(), pair[1].clone())).collect(),
    }
}

/// An error's code and message.
#[track_caller]
pub fn error(value: &Value) -> (&str, &str) {
    match value {
        Value::ServerError(error) => (error.code(), error.details().unwrap_or_default()),
        other => panic!("not an error: {other:?}"),
    }
}

/// The fields of a hash.
#[track_caller]
pub fn fields(raw: &mut Raw, key: &[u8]) -> BTreeMap<Bytes, Bytes> {
    let fields = map(&raw.call(&[b"HGETALL", key]));
    fields.into_iter().map(|(field, value)| (field, bytes(&value).to_vec())).collect()
}

/// When a key expires, Unix ms; -1: never; -2: the key does not exist.
#[track_caller]
pub fn deadline(raw: &mut Raw, key: &[u8]) -> i64 {
    int(&raw.call(&[b"PEXPIRETIME", key]))
}

/// All keys of the selected database, sorted.
#[track_caller]
pub fn keys(raw: &mut Raw) -> Vec<Bytes> {
    let mut keys: Vec<Bytes> = array(&raw.call(&[b"KEYS", b"*"])).iter().map(bytes).map(<[u8]>::to_vec).collect();
    keys.sort();
    keys
}

/// What clients can read from the server: all data, and the deadlines of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// `DEBUG DIGEST` of all databases, which leaves out expiry times.
    digest: String,
    /// Of the keys of the selected database.
    deadlines: BTreeMap<Bytes, i64>,
}

impl Contents {
    #[track_caller]
    pub fn read(raw: &mut Raw) -> Self {
        let digest = text(&raw.call(&[b"DEBUG", b"DIGEST"]));
        let deadlines = keys(raw).into_iter().map(|key| (key.clone(), deadline(raw, &key))).collect();
        Self { digest, deadlines }
    }
}

/// A numeric field of an `INFO` section.
#[track_caller]
pub fn info_number(server: &Server, section: &str, field: &str) -> i64 {
    let value = server.info(section, field).unwrap_or_else(|| panic!("INFO {section} has no {field}"));
    value.parse().unwrap_or_else(|_| panic!("no number in {field}:{value}"))
}

/// This machine's clock, in Unix microseconds.
pub fn unix_micros() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as i64
}

/// This machine's clock, in Unix milliseconds.
pub fn unix_millis() -> i64 {
    unix_micros() / 1000
}

/// Translates a replicated or logged command into plain commands: a new mutex is written as `RESTORE`.
/// `plain` is a connection to a server without the module, which decodes the dump.
pub fn spelled_out(plain: &mut Raw, command: Vec<Bytes>) -> Vec<Vec<Bytes>> {
    let [name, key, at, dump, options @ ..] = &command[..] else { return vec![command] };
    if name != b"RESTORE" {
        return vec![command];
    }
    assert_eq!(options, [b"REPLACE".to_vec(), b"ABSTTL".to_vec()]);
    assert_eq!(plain.call(&[b"RESTORE", b"it", b"0", dump, b"REPLACE"]), Value::Okay);
    let mut set = vec![b"HSET".to_vec(), key.clone()];
    set.extend(array(&plain.call(&[b"HGETALL", b"it"])).iter().map(|part| bytes(part).to_vec()));
    vec![set, vec![b"PEXPIREAT".to_vec(), key.clone(), at.clone()]]
}
