//! Random requests: valid ones, mangled ones, and commands of other clients on the same keys.

use std::collections::VecDeque;

use fastrand::Rng;

use support::encode;

use super::near_locks::{NearLocks, field_time};
use super::rights::{self, SECRET};
use super::words::{Words, words};

/// The databases of the requests. All have the same owners' names.
pub const DATABASES: u32 = 4;

/// Databases from this one on also have keys with their number in the name, and are not swapped.
const LOCAL: u32 = 2;

/// The longest timeout of a request that blocks the rest of its batch, in milliseconds.
const SHORT_WAIT: u64 = 4;

/// A token to use until the server has returned one.
const TOKEN: i64 = 1_764_000_000_000_000;

/// How many granted tokens are remembered for later requests.
const TOKENS: usize = 32;

/// The position of a request, which decides whether it may wait for long.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Other requests of the connection follow it.
    Batch,
    /// In `MULTI` or a script, where commands do not block.
    NoBlocking,
    /// The last one of its connection.
    Last,
}

/// A source of random requests.
pub struct Requests {
    rng: Rng,
    keys: Vec<Vec<u8>>,
    owners: Vec<Vec<u8>>,
    tokens: VecDeque<i64>,
    clients: Vec<i64>,
    /// The prefix of session ids, and the id of the current connection.
    run: String,
    own: i64,
    /// The database of the current connection.
    database: u32,
}

const LOCK_COMMANDS: [&str; 13] = [
    "LOCK.ACQUIRE",
    "LOCK.RELEASE",
    "LOCK.RENEW",
    "LOCK.FORCE",
    "LOCK.MACQUIRE",
    "LOCK.MRELEASE",
    "LOCK.MRENEW",
    "LOCK.INFO",
    "LOCK.WAITERS",
    "LOCK.TOP",
    "LOCK.SESSION",
    "LOCK.EVENTS",
    "LOCK.VERSION",
];

const OPTIONS: [&str; 18] = [
    "LEASE",
    "WAIT",
    "WAITED",
    "LIMIT",
    "SHARED",
    "HOLDS",
    "NEW",
    "ALL",
    "TOKEN",
    "WATCHDOG",
    "EPHEMERAL",
    "CONTENTION",
    "REPLICAS",
    "COUNT",
    "SESSION",
    "FENCE",
    "HEARTBEAT",
    "REPLACES",
];

/// Edge values, and values that are not numbers.
const ODD_NUMBERS: [&str; 14] = [
    "-1",
    "-9223372036854775808",
    "18446744073709551616",
    "9223372036854775808",
    "1.5",
    "1e3",
    " 1",
    "1 ",
    "+1",
    "0x10",
    "",
    "nan",
    "%s%n",
    "٣",
];

/// Scripts that run the command in their arguments.
const SCRIPTS: [&str; 6] = [
    "return redis.call(unpack(ARGV))",
    "return redis.pcall(unpack(ARGV))",
    "redis.setresp(3) return redis.pcall(unpack(ARGV))",
    "redis.pcall(unpack(ARGV)) redis.call('del', KEYS[1]) return redis.pcall(unpack(ARGV))",
    "redis.pcall(unpack(ARGV)) redis.call('set', KEYS[1], 'x') return redis.pcall(unpack(ARGV))",
    "#!lua flags=no-writes\nreturn redis.pcall(unpack(ARGV))",
];

impl Requests {
    /// The same seed makes the same requests (except for tokens and client ids, which the server chooses).
    pub fn new(seed: u64) -> Requests {
        let mut rng = Rng::with_seed(seed);
        let mut keys: Vec<Vec<u8>> = (0..12).map(|n| format!("lock:{n}").into_bytes()).collect();
        keys.extend([b"{tag}a".to_vec(), b"nul\0\r\n%s".to_vec(), vec![0xff, 0xfe]]);
        keys.extend((0..3).map(|n| format!("{SECRET}{n}").into_bytes()));
        let mut owners: Vec<Vec<u8>> = (0..6).map(|n| format!("owner-{n}").into_bytes()).collect();
        owners.extend([b"*".to_vec(), b"{o}\0%n\r\n".to_vec(), vec![0xf0, 0x28]]);
        owners.push(bytes(&mut rng, 512, 512).into_iter().map(|b| b | 1).collect());
        owners.iter_mut().filter(|owner| owner.first() == Some(&b'#')).for_each(|owner| owner[0] = b'x');
        let (tokens, clients, run) = (VecDeque::new(), Vec::new(), String::new());
        Requests { rng, keys, owners, tokens, clients, run, own: 0, database: 0 }
    }

    /// The initial database of a new connection.
    pub fn starts_in(&mut self) -> u32 {
        self.database = self.rng.u32(..DATABASES);
        self.database
    }

    /// Remembers a token for later requests.
    pub fn learn_token(&mut self, token: i64) {
        if self.tokens.len() == TOKENS {
            self.tokens.pop_front();
        }
        self.tokens.push_back(token);
    }

    /// Ids of connections to unblock or kill.
    pub fn learn_clients(&mut self, clients: Vec<i64>) {
        self.clients = clients;
    }

    /// The session id of the current connection.
    pub fn learn_session(&mut self, session: &str) {
        if let Some((run, own)) = session.rsplit_once(':') {
            self.run = run.to_owned();
            self.own = own.parse().unwrap_or(0);
        }
    }

    /// The next request of a connection, or several that belong together, such as `MULTI` … `EXEC`.
    pub fn next(&mut self) -> Vec<Words> {
        match self.rng.u32(..100) {
            0..5 => self.transaction(),
            5..11 => vec![self.script()],
            11..15 => self.near_lock(),
            _ => vec![self.single(Place::Batch)],
        }
    }

    /// A request without a timeout, for a connection that closes before its reply.
    pub fn endless(&mut self) -> Words {
        self.acquire(Place::Last)
    }

    /// Random bytes.
    pub fn garbage(&mut self) -> Vec<u8> {
        let mut output = encode([self.single(Place::NoBlocking)]);
        match self.rng.u32(..4) {
            0 => bytes(&mut self.rng, 1, 200),
            1 => {
                output.truncate(self.rng.usize(..output.len()));
                output
            }
            2 => {
                for _ in 0..self.rng.u32(1..8) {
                    let at = self.rng.usize(..output.len());
                    output[at] = self.rng.u8(..);
                }
                output
            }
            _ => {
                let mut line = self.single(Place::NoBlocking).join(&b' ');
                line.extend_from_slice(b"\r\n");
                line
            }
        }
    }

    fn single(&mut self, place: Place) -> Words {
        match self.rng.u32(..100) {
            0..64 => self.sensible(place),
            64..80 => self.mangled(place),
            80..87 => self.noise(),
            _ => self.disturbance(place),
        }
    }

    fn transaction(&mut self) -> Vec<Words> {
        let mut requests = vec![words(&["MULTI"])];
        for _ in 0..self.rng.u32(1..6) {
            let request = if self.rng.u32(..5) == 0 { self.script() } else { self.single(Place::NoBlocking) };
            requests.push(request);
        }
        let end = if self.rng.u32(..8) == 0 { "DISCARD" } else { "EXEC" };
        requests.push(words(&[end]));
        requests
    }

    /// A hash that is almost a lock, written in one transaction.
    fn near_lock(&mut self) -> Vec<Words> {
        let key = self.key();
        let mut requests = vec![words(&["MULTI"])];
        requests.extend(self.near_locks().lock(&key));
        requests.push(words(&["EXEC"]));
        requests
    }

    fn near_locks(&mut self) -> NearLocks<'_> {
        let token = self.tokens.back().copied().unwrap_or(TOKEN);
        NearLocks { rng: &mut self.rng, owners: &self.owners, token }
    }

    fn script(&mut self) -> Words {
        let script = SCRIPTS[self.rng.usize(..SCRIPTS.len())];
        let mut request = words(&["EVAL", script, "1"]);
        request.push(self.key());
        let inner = match self.rng.u32(..10) {
            0..7 => self.sensible(Place::NoBlocking),
            7 => self.mangled(Place::NoBlocking),
            _ => self.disturbance(Place::NoBlocking),
        };
        request.extend(inner);
        request
    }

    fn sensible(&mut self, place: Place) -> Words {
        match self.rng.u32(..100) {
            0..36 => self.acquire(place),
            36..40 => {
                let mut request = words(&["LOCK.EVENTS"]);
                self.option(&mut request, 3, "COUNT", 1, 5);
                if self.rng.u32(..4) == 0 {
                    request.push(self.any_case("HEARTBEAT"));
                }
                request
            }
            40..43 => {
                vec![b"LOCK.RELEASE".to_vec(), self.key(), self.owner(), self.any_case("ALL")]
            }
            43..58 => self.release(),
            58..68 => self.renew(),
            68..70 => vec![b"LOCK.FORCE".to_vec(), self.key()],
            70..82 => self.macquire(place),
            82..88 => self.mrelease(),
            88..91 => self.mrenew(),
            91..94 => vec![b"LOCK.INFO".to_vec(), self.key()],
            94..97 => {
                let mut request = vec![b"LOCK.WAITERS".to_vec(), self.key()];
                self.option(&mut request, 3, "COUNT", 0, 5);
                request
            }
            97 => {
                let mut request = words(&["LOCK.TOP"]);
                self.option(&mut request, 2, "COUNT", 0, 5);
                request
            }
            98 => {
                let mut request = words(&["LOCK.SESSION"]);
                for number in 0..self.rng.u32(..3) {
                    if number == 0 {
                        request.push(self.any_case("REPLACES"));
                    }
                    let client = self.client();
                    request.push(format!("{}:{client}", self.run).into_bytes());
                }
                request
            }
            _ => words(&["LOCK.HELP"]),
        }
    }

    fn acquire(&mut self, place: Place) -> Words {
        let mut request = vec![b"LOCK.ACQUIRE".to_vec(), self.key(), self.owner()];
        self.lease(&mut request);
        self.wait(&mut request, place);
        match self.rng.u32(..6) {
            0 => request.push(b"SHARED".to_vec()),
            1 | 2 => self.option(&mut request, 1, "LIMIT", 1, 4),
            _ => {}
        }
        self.re_entry(&mut request);
        self.binds(&mut request, place);
        self.session(&mut request, 4);
        request
    }

    fn re_entry(&mut self, request: &mut Words) {
        if self.rng.u32(..10) == 0 {
            request.push(b"NEW".to_vec());
        } else {
            self.option(request, 5, "HOLDS", 1, 4);
        }
    }

    fn release(&mut self) -> Words {
        let mut request = vec![b"LOCK.RELEASE".to_vec(), self.key(), self.owner()];
        self.token(&mut request);
        match self.rng.u32(..6) {
            0 => request.push(b"ALL".to_vec()),
            1 => self.option(&mut request, 1, "HOLDS", 0, 3),
            _ => {}
        }
        if self.rng.u32(..5) == 0 {
            self.lease(&mut request);
        }
        request
    }

    fn renew(&mut self) -> Words {
        let mut request = vec![b"LOCK.RENEW".to_vec(), self.key(), self.owner()];
        self.lease(&mut request);
        self.token(&mut request);
        self.binds(&mut request, Place::Batch);
        self.session(&mut request, 4);
        if self.rng.u32(..12) == 0
            && let Some(token) = self.rng.choice(self.tokens.iter()).copied()
        {
            request.push(b"FENCE".to_vec());
            request.push((token + self.rng.i64(0..1_000_000)).to_string().into_bytes());
        }
        request
    }

    fn macquire(&mut self, place: Place) -> Words {
        let mut request = self.several("LOCK.MACQUIRE");
        self.lease(&mut request);
        self.wait(&mut request, place);
        self.re_entry(&mut request);
        self.binds(&mut request, place);
        self.session(&mut request, 4);
        request
    }

    fn mrelease(&mut self) -> Words {
        let mut request = self.several("LOCK.MRELEASE");
        self.token(&mut request);
        if self.rng.bool() {
            request.push(b"ALL".to_vec());
        }
        request
    }

    fn mrenew(&mut self) -> Words {
        let mut request = self.several("LOCK.MRENEW");
        self.lease(&mut request);
        self.token(&mut request);
        self.binds(&mut request, Place::Batch);
        self.session(&mut request, 4);
        request
    }

    /// A command with several keys, sometimes with a wrong number of keys or a repeated key.
    fn several(&mut self, name: &str) -> Words {
        let count = self.rng.usize(1..5);
        let mut keys = self.rng.choose_multiple(self.keys.iter().cloned(), count);
        if self.rng.u32(..16) == 0 {
            keys.push(self.key());
        }
        let notified = if self.rng.u32(..30) == 0 { self.rng.usize(..9) } else { keys.len() };
        let mut request = words(&[name, &notified.to_string()]);
        request.extend(keys);
        request.push(self.owner());
        self.without_secret_owner(request)
    }

    /// Replaces an owner with a secret key's name: every user that may read the lock may see its owner.
    fn without_secret_owner(&mut self, mut request: Words) -> Words {
        let keys = match request.first() {
            Some(name) if name.starts_with(b"LOCK.M") => {
                let notified = request.get(1).and_then(|notified| std::str::from_utf8(notified).ok()?.parse().ok());
                notified.map_or(1, |notified: u8| usize::from(notified) + 1)
            }
            _ => 1,
        };
        if let Some(owner) = request.get_mut(keys + 1).filter(|owner| rights::is_secret(owner)) {
            *owner = self.owners[0].clone();
        }
        request
    }

    /// Random options, with random values and positions.
    fn mangled(&mut self, place: Place) -> Words {
        let name = LOCK_COMMANDS[self.rng.usize(..LOCK_COMMANDS.len())];
        let mut request = words(&[name]);
        for _ in 0..self.rng.u32(..4) {
            let word = match self.rng.u32(..4) {
                0 => self.owner(),
                1 => bytes(&mut self.rng, 0, 600),
                _ => self.key(),
            };
            request.push(word);
        }
        let mut request = self.without_secret_owner(request);
        for _ in 0..self.rng.u32(..5) {
            let option = OPTIONS[self.rng.usize(..OPTIONS.len())];
            request.push(self.any_case(option));
            if self.rng.u32(..6) > 0 {
                let holds_up_the_batch = option == "WAIT" && place == Place::Batch;
                request.push(self.odd_number(holds_up_the_batch));
            }
        }
        request
    }

    /// A lock command with arbitrary bytes as arguments.
    fn noise(&mut self) -> Words {
        let name = LOCK_COMMANDS[self.rng.usize(..LOCK_COMMANDS.len())];
        let mut request = words(&[name]);
        for _ in 0..self.rng.u32(..9) {
            request.push(bytes(&mut self.rng, 0, 40));
        }
        request
    }

    /// Commands of other clients on the keys, the connection and the configuration.
    fn disturbance(&mut self, place: Place) -> Words {
        let key = self.key();
        let owner = self.owner();
        let milliseconds = self.rng.i64(-2..60).to_string().into_bytes();
        let with = |name: &str, rest: Vec<Vec<u8>>| {
            let mut request = vec![name.as_bytes().to_vec(), key.clone()];
            request.extend(rest);
            request
        };
        match self.rng.u32(..1000) {
            0..100 => with("DEL", vec![]),
            100..180 => with("HGETALL", vec![]),
            180..220 => self.near_locks().hash(&key),
            220..280 => {
                let field = self.near_locks().field();
                field_time(&mut self.rng, &key, &field)
            }
            280..300 => rights::change(&mut self.rng),
            300..360 => with("PEXPIRE", vec![milliseconds]),
            360..400 => with("PERSIST", vec![]),
            400..460 => with("HSET", vec![owner, self.number()]),
            460..490 => with("HINCRBY", vec![owner, milliseconds]),
            490..520 => with("HDEL", vec![owner]),
            520..540 => with("HSET", vec![b"#limit".to_vec(), self.odd_number(false)]),
            540..560 => {
                let value = format!("{}:{}", self.rng.i64(..), self.rng.i64(..)).into_bytes();
                with("HSET", vec![[b"#@".as_slice(), &owner].concat(), value])
            }
            560..580 => with("HSET", vec![b"#fence".to_vec(), self.odd_number(false)]),
            580..600 => with("HDEL", vec![[b"#limit", b"#fence"][self.rng.usize(..2)][..].to_vec()]),
            600..620 => with("SET", vec![b"a string".to_vec()]),
            620..630 => with("RPUSH", vec![b"a list".to_vec()]),
            630..680 => with("RENAME", vec![self.key()]),
            680..720 => with("COPY", vec![self.key(), b"REPLACE".to_vec()]),
            720..740 if !is_local(&key) => with("MOVE", vec![self.number_below(DATABASES)]),
            740..770 => with("UNLINK", vec![self.key()]),
            770..790 => with("PTTL", vec![]),
            790..795 => words(&["SWAPDB", "0", "1"]),
            // CLIENT UNBLOCK of a client that is blocked in FLUSHALL fails an assertion of Redis 8.0.2. The player of the mixed queues
            // sends FLUSHALL, because it knows the consequences.
            795..798 => words(&["FLUSHDB", "ASYNC"]),
            798..850 => self.configuration(),
            850..870 => words(&["INFO", "holdfast"]),
            870..880 => words(&["COMMAND", "DOCS", "lock.acquire"]),
            880..890 => with("DUMP", vec![]),
            // Redis does not support scripts or transactions that change the protocol or database of their connection.
            _ if place != Place::Batch => with("EXISTS", vec![]),
            890..930 => {
                self.database = self.rng.u32(..DATABASES);
                words(&["SELECT", &self.database.to_string()])
            }
            930..950 => words(&["HELLO", ["2", "3"][self.rng.usize(..2)]]),
            950..985 => self.unblock(),
            985..990 => self.kill(),
            _ => words(&["CLIENT", "LIST"]),
        }
    }

    fn configuration(&mut self) -> Words {
        let (name, value) = match self.rng.u32(..7) {
            0 => ("holdfast.default-lease", self.rng.u32(1..40_000).to_string()),
            1 => ("holdfast.replicas-timeout", self.rng.u32(1..20).to_string()),
            2 => ("holdfast.max-waiters", self.rng.u32(..4).to_string()),
            3 => ("holdfast.publish-releases", ["yes", "replicated", "no"][self.rng.usize(..3)].to_owned()),
            // Mostly on: few requests close a cycle.
            4 => ("holdfast.detect-deadlocks", ["yes", "yes", "yes", "no"][self.rng.usize(..4)].to_owned()),
            5 => ("holdfast.max-lease", self.rng.u64(40_000..400_000_000_000).to_string()),
            _ => ("holdfast.default-lease", ODD_NUMBERS[self.rng.usize(..ODD_NUMBERS.len())].to_owned()),
        };
        words(&["CONFIG", "SET", name, &value])
    }

    fn unblock(&mut self) -> Words {
        let client = self.client();
        let how = ["TIMEOUT", "ERROR"][self.rng.usize(..2)];
        words(&["CLIENT", "UNBLOCK", &client, how])
    }

    fn kill(&mut self) -> Words {
        let client = self.client();
        words(&["CLIENT", "KILL", "ID", &client])
    }

    fn client(&mut self) -> String {
        self.rng.choice(self.clients.iter()).copied().unwrap_or(0).to_string()
    }

    /// A few keys get most of the requests, so that these meet.
    fn key(&mut self) -> Vec<u8> {
        if self.database >= LOCAL && self.rng.u32(..4) == 0 {
            return local_key(self.database, ["0", "1", "2"][self.rng.usize(..3)]);
        }
        let below = if self.rng.bool() { 4 } else { self.keys.len() };
        self.keys[self.rng.usize(..below)].clone()
    }

    fn owner(&mut self) -> Vec<u8> {
        self.owners[self.rng.usize(..self.owners.len())].clone()
    }

    fn lease(&mut self, request: &mut Words) {
        let lease = match self.rng.u32(..10) {
            0..6 => self.rng.u32(1..40),
            6 | 7 => self.rng.u32(40..100_000),
            _ => return,
        };
        request.push(self.any_case("LEASE"));
        request.push(lease.to_string().into_bytes());
    }

    fn wait(&mut self, request: &mut Words, place: Place) {
        let wait = match place {
            Place::Batch if self.rng.u32(..5) == 0 => self.rng.u64(1..=SHORT_WAIT),
            Place::Batch => return,
            Place::NoBlocking if self.rng.bool() => self.rng.u64(..2000),
            Place::NoBlocking => return,
            Place::Last => self.rng.choice([0, 10_000, 4_000_000_000_000]).unwrap_or(0),
        };
        request.push(self.any_case("WAIT"));
        request.push(wait.to_string().into_bytes());
        self.option(request, 4, "WAITED", 0, 100_000);
    }

    fn binds(&mut self, request: &mut Words, place: Place) {
        if self.rng.u32(..6) == 0 {
            request.push(b"WATCHDOG".to_vec());
        }
        if self.rng.u32(..6) == 0 {
            request.push(b"EPHEMERAL".to_vec());
        }
        let one_in = if place == Place::NoBlocking { 12 } else { 40 };
        self.option(request, one_in, "REPLICAS", 0, 4);
    }

    /// With a probability of one in `one_in`, on behalf of a session: mostly of the connection itself, sometimes another one.
    fn session(&mut self, request: &mut Words, one_in: u32) {
        if self.rng.u32(..one_in) == 0 {
            let client = if self.rng.u32(..3) > 0 { self.own.to_string() } else { self.client() };
            let verb = request.first().map(|verb| verb.to_ascii_uppercase()).unwrap_or_default();
            if (verb.ends_with(b"ACQUIRE") || verb.ends_with(b"RENEW")) && self.rng.u32(..4) == 0 {
                request.push(self.any_case("CONTENTION"));
            }
            request.push(self.any_case("SESSION"));
            request.push(format!("{}:{client}", self.run).into_bytes());
        }
    }

    fn token(&mut self, request: &mut Words) {
        if self.rng.u32(..4) == 0
            && let Some(token) = self.rng.choice(self.tokens.iter()).copied()
        {
            request.push(b"TOKEN".to_vec());
            request.push(token.to_string().into_bytes());
        }
    }

    /// With a probability of one in `one_in`, the option with a value from `low` to `high` (exclusive).
    fn option(&mut self, request: &mut Words, one_in: u32, name: &str, low: u32, high: u32) {
        if self.rng.u32(..one_in) == 0 {
            request.push(self.any_case(name));
            request.push(self.rng.u32(low..high).to_string().into_bytes());
        }
    }

    fn any_case(&mut self, word: &str) -> Vec<u8> {
        if self.rng.u32(..4) == 0 { word.to_lowercase().into_bytes() } else { word.as_bytes().to_vec() }
    }

    fn number(&mut self) -> Vec<u8> {
        self.rng.i64(-1..5).to_string().into_bytes()
    }

    fn number_below(&mut self, end: u32) -> Vec<u8> {
        self.rng.u32(..end).to_string().into_bytes()
    }

    /// `must_fail`: a value that every option refuses.
    fn odd_number(&mut self, must_fail: bool) -> Vec<u8> {
        match self.rng.u32(..3) {
            0 if !must_fail => self.number(),
            1 if !must_fail => i64::MAX.to_string().into_bytes(),
            _ => ODD_NUMBERS[self.rng.usize(..ODD_NUMBERS.len())].as_bytes().to_vec(),
        }
    }
}

/// A key with its database in the name.
pub fn local_key(database: u32, name: &str) -> Vec<u8> {
    format!("at:{database}:{name}").into_bytes()
}

fn is_local(key: &[u8]) -> bool {
    key.starts_with(b"at:")
}

fn bytes(rng: &mut Rng, least: usize, most: usize) -> Vec<u8> {
    let length = rng.usize(least..=most);
    std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_owner_has_the_name_of_a_secret_key() {
        let mut requests = Requests::new(1);
        let owners = requests.owners.clone();
        let mut made = |line: &str| requests.without_secret_owner(words(&line.split(' ').collect::<Vec<_>>()));
        assert_eq!(made("LOCK.ACQUIRE secret:1 secret:2")[1..], [b"secret:1".to_vec(), owners[0].clone()]);
        assert_eq!(made("LOCK.MACQUIRE 1 lock:1 secret:2 owner")[3..], [owners[0].clone(), b"owner".to_vec()]);
        let right = "LOCK.MACQUIRE 2 lock:1 secret:2 owner";
        assert_eq!(made(right), words(&right.split(' ').collect::<Vec<_>>()));
    }

    #[test]
    fn same_seed_makes_same_requests() {
        let (mut one, mut two) = (Requests::new(7), Requests::new(7));
        for _ in 0..1000 {
            assert_eq!(one.next(), two.next());
        }
    }
}
