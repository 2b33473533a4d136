//! The server's family, version and features.

use std::fmt;

/// The server's project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Redis.
    Redis,
    /// Valkey.
    Valkey,
}

/// A server's family and version, from `INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The server's project.
    pub family: Family,
    /// First part of the version number.
    pub major: u32,
    /// Second part of the version number.
    pub minor: u32,
    /// Third part of the version number.
    pub patch: u32,
}

/// A feature that some servers, or some environments, lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Commands of modules are in ACL categories: Redis 7.2 and later, every Valkey from 8.0.
    CommandCategories,
    /// Modules can add ACL categories: Redis 7.4 and later, every Valkey from 8.0.
    AclCategories,
    /// Expiry of single hash fields: Redis 7.4 and later, Valkey 9.0 and later.
    HashFieldExpiry,
    /// Atomic slot migration: Redis 8.4 and later, Valkey 9.0 and later.
    AtomicSlotMigration,
    /// Access to files of this machine, and other server programs: not in a container.
    HostFiles,
}

impl Version {
    /// Reads the reply of `INFO server`.
    pub(crate) fn from_info(info: &str) -> Option<Self> {
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let (family, number) = match field("valkey_version") {
            Some(number) => (Family::Valkey, number),
            None => (Family::Redis, field("redis_version")?),
        };
        let mut parts = number.trim().split('.').map(|part| part.parse().unwrap_or(0));
        let mut next = || parts.next().unwrap_or(0);
        Some(Self { family, major: next(), minor: next(), patch: next() })
    }

    /// Whether this is `family` in version `major.minor` or a later one.
    pub fn at_least(&self, family: Family, major: u32, minor: u32) -> bool {
        self.family == family && (self.major, self.minor) >= (major, minor)
    }

    /// Whether servers of this version have `feature`.
    pub(crate) fn has(&self, feature: Feature) -> bool {
        match feature {
            Feature::HostFiles => true,
            Feature::CommandCategories => self.at_least(Family::Redis, 7, 2) || self.at_least(Family::Valkey, 8, 0),
            Feature::AclCategories => self.at_least(Family::Redis, 7, 4) || self.at_least(Family::Valkey, 8, 0),
            Feature::AtomicSlotMigration => self.at_least(Family::Redis, 8, 4) || self.at_least(Family::Valkey, 9, 0),
            Feature::HashFieldExpiry => self.at_least(Family::Redis, 7, 4) || self.at_least(Family::Valkey, 9, 0),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, major, minor, patch } = self;
        write!(out, "{family:?} {major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_families() {
        let redis = Version::from_info("# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\n").unwrap();
        assert_eq!(redis.to_string(), "Redis 7.0.15");
        assert!(!redis.has(Feature::AclCategories));
        let valkey =
            Version::from_info("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\n").unwrap();
        assert_eq!(valkey.to_string(), "Valkey 9.1.2");
        assert!(valkey.has(Feature::HashFieldExpiry));
        assert!(Version::from_info("nothing of that").is_none());
    }
}
