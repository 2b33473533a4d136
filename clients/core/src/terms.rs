//! The options of a request, and its words on the wire.

/// A time in whole milliseconds, rounded down, by a monotonic clock that also runs while the machine sleeps.
pub type Millis = u64;

/// How much of a lease is certain: 1 % less, for clocks that run at different speeds.
pub(crate) fn certain(lease: Millis) -> Millis {
    lease - lease.div_ceil(100)
}

/// The number of a call. The driver chooses it, and uses each once. A hold has the number of the call that acquired it.
pub type Id = u64;

/// Any bytes: keys, owners, requests and replies.
pub type Bytes = Vec<u8>;

/// The options of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Terms {
    /// Its lease; `None`: the server's default lease.
    pub lease: Option<Millis>,
    /// The server renews it while the client reads its events.
    pub watchdog: bool,
    /// It is released when the session ends.
    pub ephemeral: bool,
    /// How many replicas must have confirmed it; 0: none.
    pub replicas: u32,
    /// How many may hold at once.
    pub limit: Limit,
    /// It may be cached while unused: the server notifies the client of contention.
    pub kept: bool,
}

/// How many may hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Limit {
    /// A mutex, a writer.
    #[default]
    One,
    /// One of `n` permits.
    Of(u32),
    /// Readers.
    Shared,
}

/// How long a request waits in the server's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// No wait.
    No,
    /// At most this long.
    For(Millis),
    /// Without a limit.
    Forever,
}

/// A request that is being written.
pub(crate) struct Words(pub(crate) Vec<Bytes>);

impl Words {
    /// `LOCK.<verb>` of one key, or `LOCK.M<verb>` of several, for this owner.
    pub(crate) fn of(verb: &str, keys: &[Bytes], owner: &[u8]) -> Self {
        let mut words = Self(Vec::new());
        match keys {
            [_] => words.word(&format!("LOCK.{verb}")),
            _ => words.word(&format!("LOCK.M{verb}")).word(&keys.len().to_string()),
        };
        words.0.extend(keys.iter().cloned());
        words.0.push(owner.to_vec());
        words
    }

    pub(crate) fn word(&mut self, word: &str) -> &mut Self {
        self.0.push(word.as_bytes().to_vec());
        self
    }

    pub(crate) fn option(&mut self, name: &str, value: u64) -> &mut Self {
        self.word(name).word(&value.to_string())
    }

    /// Adds the options that an acquisition and a renewal share.
    pub(crate) fn terms(&mut self, terms: &Terms, lease: Millis, session: &[u8]) {
        self.option("LEASE", lease);
        if terms.watchdog {
            self.word("WATCHDOG");
        }
        if terms.ephemeral {
            self.word("EPHEMERAL");
        }
        if terms.replicas > 0 {
            self.option("REPLICAS", terms.replicas.into());
        }
        if terms.kept {
            self.word("CONTENTION");
        }
        self.word("SESSION").0.push(session.to_vec());
    }
}
