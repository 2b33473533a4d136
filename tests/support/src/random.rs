//! Reproducible random numbers.

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

/// A stream of random numbers (SplitMix64), the same for the same seed.
///
/// Dropped during a panic, it prints the seed. `HOLDFAST_SEED` sets it.
#[derive(Debug)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// A stream from `HOLDFAST_SEED`, or else from the clock.
    ///
    /// # Panics
    ///
    /// If `HOLDFAST_SEED` is not a number.
    pub fn new() -> Self {
        Self::from_seed(env::var("HOLDFAST_SEED").map_or_else(|_| clock(), |seed| seed.parse().expect("a number")))
    }

    /// The stream with this seed.
    pub fn from_seed(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// An index below `bound`, which is not 0.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// True with a probability of `percent` in a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// An independent stream, determined by the same seed.
    pub fn fork(&mut self) -> Self {
        Self { seed: self.seed, state: self.number() }
    }

    /// Up to `count` different elements of `choices`, in random order.
    pub fn some<T: Clone>(&mut self, choices: &[T], count: usize) -> Vec<T> {
        let mut left = choices.to_vec();
        (0..count.min(choices.len())).map(|_| left.swap_remove(self.index(left.len()))).collect()
    }

    /// One of `choices`, which must not be empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to reproduce: HOLDFAST_SEED={}", self.seed);
        }
    }
}

fn clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64
}
