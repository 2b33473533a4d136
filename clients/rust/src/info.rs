//! What a server says of a lock.

use std::time::Duration;

use redis::{RedisError, Value};

use crate::names::Owner;
use crate::wire::nonsense;

/// A lock that is held or waited for, as its server sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// How many may hold at once; none: any number.
    pub limit: Option<u64>,
    /// The newest token, if it is known.
    pub fence: Option<u64>,
    /// Who holds it. Of very many, some.
    pub holders: Vec<Holder>,
    /// How many wait for it.
    pub waiters: u64,
}

/// Who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// In whose name.
    pub owner: Owner,
    /// How often.
    pub holds: u64,
    /// The fencing token, if it is known.
    pub token: Option<u64>,
    /// What is left of its lease; none: it has no end.
    pub left: Option<Duration>,
}

impl Info {
    /// The reply of `LOCK.INFO`; none if the lock is neither held nor waited for.
    pub(crate) fn read(reply: &Value) -> Result<Option<Self>, RedisError> {
        if *reply == Value::Nil {
            return Ok(None);
        }
        let fields = Fields::of(reply).ok_or_else(|| nonsense(reply))?;
        let holders = match fields.get("holders") {
            Some(Value::Array(each)) => each.iter().map(Holder::read).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        let limit = fields.number("limit").ok_or_else(|| nonsense(reply))?;
        Ok(Some(Self {
            limit: Some(limit).filter(|limit| *limit > 0),
            fence: fields.number("fence"),
            holders: holders.ok_or_else(|| nonsense(reply))?,
            waiters: fields.number("waiters").unwrap_or_default(),
        }))
    }
}

impl Holder {
    fn read(value: &Value) -> Option<Self> {
        let fields = Fields::of(value)?;
        let owner = match fields.get("owner")? {
            Value::BulkString(owner) => owner.clone(),
            Value::SimpleString(owner) => owner.clone().into_bytes(),
            _ => return None,
        };
        Some(Self {
            owner: owner.into(),
            holds: fields.number("holds")?,
            token: fields.number("token"),
            left: fields.number("ttl").map(Duration::from_millis),
        })
    }
}

/// A map, as either protocol has it.
struct Fields<'v>(Vec<(&'v Value, &'v Value)>);

impl<'v> Fields<'v> {
    fn of(value: &'v Value) -> Option<Self> {
        match value {
            Value::Map(pairs) => Some(Self(pairs.iter().map(|(name, value)| (name, value)).collect())),
            Value::Array(flat) => {
                let (names, values) = (flat.iter().step_by(2), flat.iter().skip(1).step_by(2));
                Some(Self(names.zip(values).collect()))
            }
            _ => None,
        }
    }

    fn get(&self, name: &str) -> Option<&'v Value> {
        let is = |key: &Value| match key {
            Value::BulkString(bytes) => bytes == name.as_bytes(),
            Value::SimpleString(text) => text == name,
            _ => false,
        };
        self.0.iter().find(|(key, _)| is(key)).map(|(_, value)| *value)
    }

    /// None also for -1, which says that there is no end.
    fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }
}
