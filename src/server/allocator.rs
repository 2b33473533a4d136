//! The allocator of the server's process, where that is glibc's.

/// Makes glibc's allocator merge what is freed at once. Otherwise it keeps small pieces apart and merges all of them in
/// one step when somebody asks for a large one: 9 ms after 100,000 holds have ended together. Stays so for the life of the
/// process. `false` if the C library has no such setting (musl).
///
/// Source: `mallopt(3)`, `M_MXFAST`; `malloc_consolidate` in glibc's `malloc/malloc.c`.
pub fn merge_at_once() -> bool {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two numbers. Other threads of the server that free meanwhile read the limit, one word, for each
    // piece, and a piece is right in either place.
    return unsafe { libc::mallopt(libc::M_MXFAST, 0) } == 1;
    #[cfg(not(target_env = "gnu"))]
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// How many pieces wait to be merged.
    fn waiting() -> libc::c_int {
        // SAFETY: takes nothing, returns numbers.
        unsafe { libc::mallinfo() }.smblks
    }

    #[test]
    fn what_is_freed_is_merged_at_once() {
        assert!(merge_at_once());
        let before = waiting();
        drop((0..1_000_u64).map(Box::new).collect::<Vec<_>>());
        // Other threads can only make it less.
        assert!(waiting() <= before, "{} pieces wait to be merged, {before} before", waiting());
    }
}
