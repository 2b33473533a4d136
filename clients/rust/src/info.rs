//! The state of a lock, as its server reports it.

use std::time::Duration;

use holdfast_core::Reply;

use crate::names::Owner;

/// A lock that is held or waited for, as its server sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// How many may hold at once; none: any number.
    pub limit: Option<u64>,
    /// The newest token, if it is known.
    pub fence: Option<u64>,
    /// The holders; if there are very many, some of them.
    pub holders: Vec<Holder>,
    /// The number of waiters.
    pub waiters: u64,
}

/// A holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its owner.
    pub owner: Owner,
    /// Its hold count.
    pub holds: u64,
    /// The fencing token, if it is known.
    pub token: Option<u64>,
    /// The time left of its lease; none: it has no end.
    pub left: Option<Duration>,
    /// Whether its session is notified of contention: it may cache the lock without using it.
    pub contention: bool,
}

/// A request that waits for a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// Its owner.
    pub owner: Owner,
    /// The id of its connection, or of its session's.
    pub client: u64,
    /// How long it has waited.
    pub waited: Duration,
    /// How much longer it waits; none: without a limit.
    pub remaining: Option<Duration>,
    /// Its limit of holders; none: any number.
    pub limit: Option<u64>,
}

impl Info {
    /// Parses the reply of `LOCK.INFO`. None: it is malformed.
    pub(crate) fn read(reply: &Reply) -> Option<Self> {
        let fields = Fields(reply.elements()?);
        let holders = fields.get("holders")?.elements()?.iter().map(Holder::read).collect::<Option<Vec<_>>>()?;
        Some(Self {
            limit: Some(fields.number("limit")?).filter(|limit| *limit > 0),
            fence: fields.number("fence"),
            holders,
            waiters: fields.number("waiters").unwrap_or_default(),
        })
    }
}

impl Holder {
    fn read(reply: &Reply) -> Option<Self> {
        let fields = Fields(reply.elements()?);
        Some(Self {
            owner: fields.owner()?,
            holds: fields.number("holds")?,
            token: fields.number("token"),
            left: fields.number("ttl").map(Duration::from_millis),
            contention: fields.number("contention") == Some(1),
        })
    }
}

impl Waiter {
    pub(crate) fn read(reply: &Reply) -> Option<Self> {
        let fields = Fields(reply.elements()?);
        Some(Self {
            owner: fields.owner()?,
            client: fields.number("client")?,
            waited: Duration::from_millis(fields.number("waited")?),
            remaining: fields.number("remaining").map(Duration::from_millis),
            limit: fields.number("limit").filter(|limit| *limit > 0),
        })
    }
}

/// Field names, each with its value behind it.
struct Fields<'r>(&'r [Reply]);

impl<'r> Fields<'r> {
    fn get(&self, name: &str) -> Option<&'r Reply> {
        let named = |pair: &&[Reply]| pair.first().and_then(Reply::text).is_some_and(|it| it == name);
        self.0.chunks(2).find(named)?.get(1)
    }

    fn owner(&self) -> Option<Owner> {
        let Reply::Bulk(owner) = self.get("owner")? else { return None };
        Some(owner.clone().into())
    }

    /// None also for -1, which means no end.
    fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.number()
    }
}
