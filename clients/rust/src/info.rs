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
        let Reply::Bulk(owner) = fields.get("owner")? else { return None };
        Some(Self {
            owner: owner.clone().into(),
            holds: fields.number("holds")?,
            token: fields.number("token"),
            left: fields.number("ttl").map(Duration::from_millis),
            contention: fields.number("contention") == Some(1),
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

    /// None also for -1, which means no end.
    fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.number()
    }
}
