//! The fields of `INFO` and their names in Prometheus. The help texts are those of docs/reference.md, and a test
//! compares them.

use std::collections::BTreeMap;

/// The sections of `INFO` that are requested.
pub const SECTIONS: [&str; 6] = ["holdfast", "server", "replication", "persistence", "memory", "errorstats"];

/// Gauges of the module.
pub const NOW: [(&str, &str); 8] = [
    ("waiters", "requests that wait in a queue"),
    ("contended_locks", "locks that a request waits for"),
    ("bound_holds", "holds bound to a connection"),
    ("cached_locks", "locks that their clients may hold unused until contention"),
    ("confirming", "grants and renewals that wait for replicas"),
    ("sessions", "connections that are sessions"),
    ("session_waits", "requests of sessions that were answered WAITING and have not ended"),
    ("undelivered_events", "events that sessions have not read"),
];

/// Counters of the module, since it was loaded.
pub const SINCE: [(&str, &str); 20] = [
    ("grants_at_once", "grants without a wait, re-entries included"),
    ("grants_queued", "grants out of the queue"),
    ("refusals", "requests that got nil at once"),
    ("timeouts", "waits that timed out"),
    ("releases", "releases by an owner, whole or in part"),
    ("renewals", "renewals by an owner"),
    ("renewals_lost", "renewals, a watchdog's included, that found the lock lost"),
    ("expired", "leases that the module saw run out"),
    ("forced", "holders that lost a lock to LOCK.FORCE"),
    ("changed", "bound holds that another command deleted or overwrote"),
    ("released_by_disconnect", "holds released because their connection ended"),
    ("watchdog_renewals", "renewals by the watchdog"),
    ("deadlocks_refused", "requests refused with -DEADLOCK"),
    ("deadlock_searches", "searches for a cycle of waits, by requests that begin to wait"),
    ("deadlock_searches_given_up", "searches given up, since they would have had to look at more than 1,000 places"),
    ("grants_undelivered", "grants that went on to the next in the queue because their client was gone"),
    ("confirmed", "grants and renewals with REPLICAS that were confirmed"),
    ("revoked", "requests with REPLICAS that were not confirmed"),
    ("confirmation_requests", "how often replicas were asked for confirmation"),
    (
        "internal_errors",
        "internal errors: invariants of the module that did not hold. Each kind is logged once. It must be 0: report any other value",
    ),
];

/// Times of the module. Each is a histogram and a maximum.
pub const TIMES: [(&str, &str); 3] = [
    ("wait", "from a request's arrival in the queue to its grant"),
    ("handoff", "from a grant out of the queue to its reply, or until its session has read of it"),
    ("confirmation", "from a grant to the last confirmation that it needed"),
];

/// How long the oldest waiting request has waited.
pub const OLDEST: (&str, &str) = ("oldest_wait_msec", "how long the oldest waiting request has waited");

/// Error codes of servers that mean that locks can't be acquired, or not as requested.
const ERRORS: [&str; 8] =
    ["NOREPLICAS", "MISCONF", "OOM", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "NOPERM"];

/// The fields of `INFO`.
pub struct Info(BTreeMap<String, String>);

/// A replica, as its primary reports it.
#[derive(Debug, PartialEq, Eq)]
pub struct Replica {
    /// Its address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether it receives every write.
    pub online: bool,
    /// The offset that it has acknowledged.
    pub offset: u64,
    /// How long ago it acknowledged, in seconds.
    pub lag: u64,
}

/// A replica whose last acknowledgement is older, in seconds, is not counted, if the server itself does not count.
const GOOD_LAG: u64 = 10;

impl Info {
    /// From these fields.
    pub fn new(fields: Vec<(String, String)>) -> Self {
        Self(fields.into_iter().collect())
    }

    /// All fields.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// A field, or an empty string.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).map(String::as_str).unwrap_or_default()
    }

    /// A numeric field.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.text(name).parse().ok()
    }

    /// Whether a field has this word, such as `ok` or `up`.
    pub fn has_word(&self, name: &str, word: &str) -> Option<bool> {
        self.0.get(name).map(|value| value == word)
    }

    /// Whether it is a primary.
    pub fn is_primary(&self) -> bool {
        self.text("role") == "master"
    }

    /// `master` or `replica`.
    pub fn role(&self) -> &'static str {
        if self.is_primary() { "master" } else { "replica" }
    }

    /// The program and its version, such as `redis 7.0.15`.
    pub fn software(&self) -> String {
        match self.text("valkey_version") {
            "" => format!("redis {}", self.text("redis_version")),
            version => format!("valkey {version}"),
        }
    }

    /// The replicas of a primary.
    pub fn replicas(&self) -> impl Iterator<Item = Replica> {
        let numbered = |name: &str| name.strip_prefix("slave").is_some_and(|number| number.parse::<u32>().is_ok());
        self.fields().filter(move |(name, _)| numbered(name)).filter_map(|(_, value)| replica(value))
    }

    /// How many replicas would confirm a write now.
    pub fn good_replicas(&self) -> u64 {
        let counted = || self.replicas().filter(|replica| replica.online && replica.lag <= GOOD_LAG).count() as u64;
        self.number("min_slaves_good_slaves").unwrap_or_else(counted)
    }

    /// The reasons for which a primary refuses writes, and whether each applies.
    pub fn refusals(&self) -> [(&'static str, bool); 3] {
        let (limit, used) = (self.number("maxmemory").unwrap_or(0), self.number("used_memory").unwrap_or(0));
        [
            // The server reports its count only if `min-replicas-to-write` is set. Without it, only zero replicas are certainly too few.
            ("replicas", self.number("min_slaves_good_slaves") == Some(0)),
            ("disk", self.has_word("aof_last_write_status", "ok") == Some(false)),
            ("memory", limit > 0 && used > limit),
        ]
    }

    /// The number of replies with each of these errors.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ERRORS.into_iter().map(|code| {
            let count = self.text(&format!("errorstat_{code}")).strip_prefix("count=").and_then(|it| it.parse().ok());
            (code, count.unwrap_or(0))
        })
    }
}

fn replica(value: &str) -> Option<Replica> {
    let fields: BTreeMap<_, _> = value.split(',').filter_map(|field| field.split_once('=')).collect();
    let number = |name: &str| fields.get(name).and_then(|value| value.parse().ok()).unwrap_or(0);
    Some(Replica {
        host: (*fields.get("ip")?).to_owned(),
        port: fields.get("port")?.parse().ok()?,
        online: fields.get("state") == Some(&"online"),
        offset: number("offset"),
        lag: number("lag"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(fields: &[(&str, &str)]) -> Info {
        Info::new(fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn metrics_help_matches_reference() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference.md");
        let reference = std::fs::read_to_string(path).expect("the reference");
        let rows = reference
            .lines()
            .filter_map(|line| line.strip_prefix("| `holdfast_")?.strip_suffix(" |")?.split_once("` | "));
        let mut compared = 0;
        for (field, words) in rows.filter(|(field, _)| !field.contains("_usec_") && *field != "version") {
            let words = words.replace('`', "");
            let (list, words) = match words.strip_prefix("**now**: ") {
                Some(words) => (&NOW[..], words.to_owned()),
                None => (&SINCE[..], words),
            };
            let known = list.iter().find(|(name, _)| *name == field).map(|(_, words)| *words);
            if field == OLDEST.0 {
                assert!(words.starts_with(OLDEST.1), "{words}");
            } else {
                assert_eq!(known, Some(words.as_str()), "{field}");
            }
            compared += 1;
        }
        assert_eq!(compared, NOW.len() + SINCE.len() + 1);
        for (what, words) in TIMES {
            assert!(reference.contains(&format!("| `holdfast_{what}_usec_max` | {words}: longest, µs |")), "{what}");
        }
    }

    #[test]
    fn replicas_are_parsed_and_counted() {
        let primary = info(&[
            ("role", "master"),
            ("slave0", "ip=10.0.0.2,port=6379,state=online,offset=90,lag=1"),
            ("slave1", "ip=::1,port=6380,state=wait_bgsave,offset=0,lag=0"),
            ("slave2", "ip=10.0.0.4,port=6379,state=online,offset=90,lag=11"),
            ("slave_repl_offset", "5"),
            ("master_repl_offset", "100"),
        ]);
        let found: Vec<_> = primary.replicas().map(|it| (it.host, it.port, it.online, it.offset)).collect();
        assert_eq!(found[0], ("10.0.0.2".to_owned(), 6379, true, 90));
        assert_eq!(found[1], ("::1".to_owned(), 6380, false, 0));
        assert_eq!((found.len(), primary.good_replicas()), (3, 1));
        assert_eq!(info(&[("min_slaves_good_slaves", "2")]).good_replicas(), 2);
    }

    #[test]
    fn refused_writes_are_reported() {
        let why = |fields: &[(&str, &str)]| {
            info(fields).refusals().into_iter().filter(|(_, it)| *it).map(|(why, _)| why).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(why(&[("role", "master"), ("maxmemory", "0"), ("used_memory", "9")]), "");
        assert_eq!(why(&[("min_slaves_good_slaves", "0")]), "replicas");
        assert_eq!(why(&[("min_slaves_good_slaves", "1"), ("aof_last_write_status", "err")]), "disk");
        assert_eq!(why(&[("maxmemory", "8"), ("used_memory", "9"), ("aof_last_write_status", "ok")]), "memory");
    }
}
