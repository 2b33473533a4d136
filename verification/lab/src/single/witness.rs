//! Locks that are held throughout a fault, and compared afterwards: every deadline and token must be unchanged.

use redis::{Connection, RedisResult, Value};

/// Longer than any run of the lab.
const LEASE: u64 = 3_600_000;

/// The acknowledged state before the fault.
pub struct Witness {
    name: String,
    mutex: u64,
    permits: [u64; 2],
    several: u64,
    contents: Vec<Value>,
}

impl Witness {
    /// Acquires locks of every layout, releases one, and remembers the replies.
    pub fn take(name: &str, connection: &mut Connection) -> RedisResult<Witness> {
        let acquire = |connection: &mut Connection, key: &str, owner: &str, rest: &[&str]| -> RedisResult<u64> {
            redis::cmd("LOCK.ACQUIRE").arg(key).arg(owner).arg("LEASE").arg(LEASE).arg(rest).query(connection)
        };
        let key = |kind: &str| format!("{name}:{kind}");
        let mutex = acquire(connection, &key("mutex"), "w", &["HOLDS", "3"])?;
        let permits = [
            acquire(connection, &key("permits"), "w", &["LIMIT", "3"])?,
            acquire(connection, &key("permits"), "v\0\r\n", &["LIMIT", "3"])?,
        ];
        let several = redis::cmd("LOCK.MACQUIRE")
            .arg(2)
            .arg(&[key("one"), key("two")])
            .arg("w")
            .arg("LEASE")
            .arg(LEASE)
            .query(connection)?;
        acquire(connection, &key("released"), "w", &[])?;
        redis::cmd("LOCK.RELEASE").arg(key("released")).arg("w").exec(connection)?;
        let contents = contents(name, connection)?;
        Ok(Witness { name: name.to_owned(), mutex, permits, several, contents })
    }

    /// The differences to the state before.
    pub fn differences(&self, connection: &mut Connection) -> RedisResult<Vec<String>> {
        let name = &self.name;
        let mut wrong = Vec::new();
        let now = contents(name, connection)?;
        if now != self.contents {
            wrong.push(format!("{name}: was {:?}, is {now:?}", self.contents));
        }
        for (kind, owner, token) in [
            ("mutex", "w", self.mutex),
            ("permits", "w", self.permits[0]),
            ("permits", "v\0\r\n", self.permits[1]),
            ("one", "w", self.several),
            ("two", "w", self.several),
        ] {
            let key = format!("{name}:{kind}");
            let renewed: Option<u64> = redis::cmd("LOCK.RENEW")
                .arg(&key)
                .arg(owner)
                .arg("LEASE")
                .arg(LEASE)
                .arg("TOKEN")
                .arg(token)
                .query(connection)?;
            if renewed != Some(token) {
                wrong.push(format!("{key}: the holder of token {token} got {renewed:?} from RENEW"));
            }
            let other: Option<u64> = redis::cmd("LOCK.ACQUIRE").arg(&key).arg("somebody else").query(connection)?;
            if other.is_some() {
                wrong.push(format!("{key}: granted to another owner while it was held"));
            }
        }
        Ok(wrong)
    }

    /// Releases all of them.
    pub fn release(self, connection: &mut Connection) -> RedisResult<()> {
        for kind in KINDS {
            redis::cmd("LOCK.FORCE").arg(format!("{}:{kind}", self.name)).exec(connection)?;
        }
        Ok(())
    }
}

const KINDS: [&str; 5] = ["mutex", "permits", "one", "two", "released"];

/// Fields (in any order on the server, sorted here) and absolute deadlines.
fn contents(name: &str, connection: &mut Connection) -> RedisResult<Vec<Value>> {
    let mut contents = Vec::new();
    for kind in KINDS {
        let key = format!("{name}:{kind}");
        let mut fields: Vec<(Vec<u8>, Vec<u8>)> = redis::cmd("HGETALL").arg(&key).query(connection)?;
        fields.sort();
        contents
            .extend(fields.into_iter().flat_map(|(field, value)| [Value::BulkString(field), Value::BulkString(value)]));
        contents.push(redis::cmd("PEXPIRETIME").arg(&key).query(connection)?);
    }
    Ok(contents)
}
