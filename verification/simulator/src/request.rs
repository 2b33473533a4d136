//! A request, as the checkers read it.

use crate::redis::Bytes;
use crate::server::ctx::run_id;

/// The content of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The command, in lower case and without `lock.`. For a command of another module, its name.
    pub command: String,
    /// The locks that it names.
    pub keys: Vec<Bytes>,
    /// The owner.
    pub owner: Bytes,
    /// The connection or session on whose behalf it is made.
    pub client: u64,
    /// It names a session, which receives an event.
    pub of_session: bool,
    /// It came over the connection of a session, and not from a script: a grant is bound to that session.
    pub over_session: bool,
    pub lease: Option<u64>,
    /// The longest lease of several similar requests, if it is unknown which one counts; `lease` is the shortest.
    pub longest: Option<u64>,
    /// The count that `HOLDS` names; 0 for `ALL`.
    pub holds: Option<u64>,
    pub token: Option<u64>,
    pub fence: Option<u64>,
    pub wait: Option<u64>,
    /// The time that it has waited elsewhere, as far as it counts, in ms.
    pub waited: u64,
    /// The limit of holders: `u32::MAX` for `SHARED`.
    pub limit: u32,
    pub watchdog: bool,
    pub ephemeral: bool,
    /// The binding ends.
    pub unbind: bool,
    /// The session is notified of contention.
    pub contention: bool,
    /// The number of replicas that must confirm it.
    pub replicas: u64,
    /// Refused if the owner already holds the lock.
    pub new: bool,
    /// It asks for a heartbeat.
    pub heartbeat: bool,
    /// The connections that it replaces.
    pub replaces: Vec<u64>,
    /// It was repeated with other options.
    pub is_unsure: bool,
}

impl Request {
    /// Reads a request of a connection.
    pub fn read(client: u64, argv: &[Bytes]) -> Self {
        let number = |word: &Bytes| std::str::from_utf8(word).ok()?.parse::<u64>().ok();
        let name =
            argv.first().and_then(|name| std::str::from_utf8(name).ok()).unwrap_or_default().to_ascii_lowercase();
        if name == "eval" {
            return Self::read(client, argv.get(3..).unwrap_or_default());
        }
        let Some(command) = name.strip_prefix("lock.") else {
            return Self { command: name, client, ..Self::default() };
        };
        let several = command.starts_with('m');
        let count = if several { argv.get(1).and_then(number).unwrap_or(0) as usize } else { 1 };
        let first = if several { 2 } else { 1 };
        let keys = argv.get(first..first + count).unwrap_or_default().to_vec();
        let mut it = Self { command: command.into(), client, limit: 1, keys, ..Self::default() };
        let client_of = |id: &Bytes| number(&id.rsplit(|byte| *byte == b':').next()?.to_vec());
        if command == "session" {
            it.keys.clear();
            it.replaces = argv.iter().skip(2).filter_map(client_of).collect();
            return it;
        }
        let has_owner = matches!(command.trim_start_matches('m'), "acquire" | "release" | "renew");
        let has_keys = has_owner || matches!(command, "force" | "info" | "waiters");
        if !has_keys {
            it.keys.clear();
        }
        let owner = if has_owner { argv.get(first + count).cloned().unwrap_or_default() } else { Vec::new() };
        let options = if command == "events" { 1 } else { first + count + 1 };
        let mut rest = argv.get(options..).unwrap_or_default().iter();
        while let Some(word) = rest.next() {
            let mut number = || rest.next().and_then(number);
            match word.to_ascii_lowercase().as_slice() {
                b"lease" => it.lease = number(),
                b"holds" => it.holds = number(),
                b"all" => it.holds = Some(0),
                b"token" => it.token = number(),
                b"fence" => it.fence = number(),
                b"wait" => it.wait = number(),
                b"waited" => it.waited = number().unwrap_or(0).min(24 * 60 * 60 * 1000),
                b"limit" => it.limit = number().unwrap_or(1) as u32,
                b"shared" => it.limit = u32::MAX,
                b"watchdog" => it.watchdog = true,
                b"ephemeral" => it.ephemeral = true,
                b"unbind" => it.unbind = true,
                b"contention" => it.contention = true,
                b"new" => it.new = true,
                b"heartbeat" => it.heartbeat = true,
                b"replicas" => it.replicas = number().unwrap_or(0),
                b"session" => {
                    it.of_session = true;
                    let named = rest.next();
                    let is_own = named.is_some_and(|id| id.as_slice() == b"*");
                    it.client = if is_own { client } else { named.and_then(client_of).unwrap_or(0) };
                }
                _ => {}
            }
        }
        it.longest = it.lease;
        it.owner = if owner == b"*" { identity(it.client) } else { owner };
        it
    }

    /// Whether it binds a hold to the connection on whose behalf it is made: a grant to a session always, a renewal if
    /// it names a flag.
    pub fn binds(&self) -> bool {
        let says = self.of_session || self.watchdog || self.ephemeral || self.contention;
        (self.command.ends_with("acquire") && (self.over_session || says)) || (self.command.ends_with("renew") && says)
    }

    /// Whether a grant of it is bound to a session.
    pub fn is_of_session(&self) -> bool {
        self.of_session || self.over_session
    }

    /// Whether it may acquire or release this lock for this owner.
    pub fn concerns(&self, key: &[u8], owner: &[u8]) -> bool {
        self.owner == owner && self.keys.iter().any(|it| it == key)
    }
}

/// The identity that `LOCK.SESSION` returns to a connection.
pub fn identity(client: u64) -> Bytes {
    let digits = run_id();
    let random = u128::from_str_radix(&digits[..32], 16).unwrap_or_default();
    let uuid = uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid();
    format!("{uuid}:{client}").into_bytes()
}
