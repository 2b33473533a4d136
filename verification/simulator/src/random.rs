//! Random numbers from a seed, the same on every machine.

/// The generator `xorshift64*` (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled").
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed. Similar seeds give different numbers (`splitmix64`).
    pub fn new(seed: u64) -> Self {
        let mut it = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        it = (it ^ (it >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        it = (it ^ (it >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((it ^ (it >> 31)) | 1)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.any() >> 33) as usize % end.max(1)
    }

    /// True with a probability of one in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of these words.
    pub fn word(&mut self, these: &[&'static str]) -> &'static str {
        these[self.below(these.len())]
    }

    /// One of these.
    pub fn of<'a, T>(&mut self, these: &'a [T]) -> &'a T {
        &these[self.below(these.len())]
    }
}
