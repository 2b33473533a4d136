//! The steps of Redisson's lock as scripts, written from their description: what the module is compared with, and what
//! it must share locks with.
//!
//! All take the lease in milliseconds as `ARGV[1]` and the owner as `ARGV[2]`, and the lock as `KEYS[1]`.

/// Takes the lock or re-enters it: null. Held by another owner: the time it has left as `PTTL` tells it, in milliseconds
/// (-1: no expiry).
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

/// Gives back one hold. Null: this owner does not hold it. 0: holds are left, and the lease begins anew.
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

/// Begins the lease anew: 1, or 0 if this owner does not hold the lock.
///
/// `KEYS[1]` lock; `ARGV[1]` lease, `ARGV[2]` owner.
pub const RENEW: &str = "\
if redis.call('hexists', KEYS[1], ARGV[2]) == 0 then
  return 0
end
redis.call('pexpire', KEYS[1], ARGV[1])
return 1
";

/// Breaks the lock: 1, or 0 if it was free.
///
/// `KEYS[1]` lock, `KEYS[2]` channel.
pub const FORCE: &str = "\
if redis.call('del', KEYS[1]) == 0 then
  return 0
end
redis.call('publish', KEYS[2], '0')
return 1
";

/// The channel on which the release of `key` is announced.
pub fn channel(key: &[u8]) -> Vec<u8> {
    const PREFIX: &[u8] = b"redisson_lock__channel:";
    if key.contains(&b'{') { [PREFIX, key].concat() } else { [PREFIX, b"{", key, b"}"].concat() }
}
