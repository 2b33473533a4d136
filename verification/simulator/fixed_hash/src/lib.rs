//! What the module takes from `foldhash`, with a fixed seed: a map is walked in the same order in every run.

use foldhash::fast::FixedState;

/// As `foldhash::HashMap`.
pub type HashMap<K, V> = std::collections::HashMap<K, V, FixedState>;

/// As `foldhash::HashSet`.
pub type HashSet<T> = std::collections::HashSet<T, FixedState>;
