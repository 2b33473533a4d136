//! Redisson's lock as scripts, written from its description. Tests compare the module with them, and share locks with them.
//!
//! All scripts take the lock as `KEYS[1]`, the lease in milliseconds as `ARGV[1]` and the owner as `ARGV[2]`.

/// Acquires or re-enters the lock: null. If another owner holds it: the remaining time, as `PTTL` returns it, in
/// milliseconds (-1: no expiry).
///
/// `KEYS[1]` lock; `ARGV[1]` lease, `ARGV[2]` owner.
pub const ACQUIRE: &str = "\
local free = redis.call('exists', KEYS[1]) == 0
if free or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
  redis.call('hincrby', KEYS[1], ARGV[2], 1)
  redis.call('pexpire', KEYS[1], ARGV[1])
  return nil
end
return redis.call('pttl', KEYS[1])
";

/// Releases one hold. Null: this owner does not hold the lock. 0: holds are left, and the lease is restarted.
/// 1: the lock is free, and `0` was published.
///
/// `KEYS[1]` lock, `KEYS[2]` channel; `ARGV[1]` lease, `ARGV[2]` owner.
pub const RELEASE: &str = "\
if redis.call('hexists', KEYS[1], ARGV[2]) == 0 then
  return nil
end
if redis.call('hincrby', KEYS[1], ARGV[2], -1) > 0 then
  redis.call('pexpire', KEYS[1], ARGV[1])
  return 0
end
redis.call('del', KEYS[1])
redis.call('publish', KEYS[2], '0')
return 1
";

/// Restarts the lease: 1, or 0 if this owner does not hold the lock.
///
/// `KEYS[1]` lock; `ARGV[1]` lease, `ARGV[2]` owner.
pub const RENEW: &str = "\
if redis.call('hexists', KEYS[1], ARGV[2]) == 0 then
  return 0
end
redis.call('pexpire', KEYS[1], ARGV[1])
return 1
";

/// Forces the lock free: 1, or 0 if it was free.
///
/// `KEYS[1]` lock, `KEYS[2]` channel.
pub const FORCE: &str = "\
if redis.call('del', KEYS[1]) == 0 then
  return 0
end
redis.call('publish', KEYS[2], '0')
return 1
";

/// The channel on which releases of `key` are published.
pub fn channel(key: &[u8]) -> Vec<u8> {
    const PREFIX: &[u8] = b"redisson_lock__channel:";
    if key.contains(&b'{') { [PREFIX, key].concat() } else { [PREFIX, b"{", key, b"}"].concat() }
}
