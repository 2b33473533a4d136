//! The allocator of the server process, if it is glibc's.

/// Makes glibc's allocator merge small blocks as soon as they are freed. By default it collects them, and merges all of
/// them during a later allocation of a large block: this took 9 ms after 100,000 holds had ended together.
///
/// The setting lasts until the process ends. Returns `false` if the C library has no such setting (musl).
///
/// Source: `mallopt(3)`, `M_MXFAST`; `malloc_consolidate` in glibc's `malloc/malloc.c`.
pub fn merge_at_once() -> bool {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes two numbers. Other threads of the server may free blocks meanwhile: they read the
    // limit, one word, for each block, and the allocator accepts a block in either list.
    return unsafe { libc::mallopt(libc::M_MXFAST, 0) } == 1;
    #[cfg(not(target_env = "gnu"))]
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// How many freed blocks are not merged yet.
    fn unmerged() -> libc::c_int {
        // SAFETY: the function takes nothing, and returns numbers.
        unsafe { libc::mallinfo() }.smblks
    }

    #[test]
    fn freed_blocks_are_merged_immediately() {
        assert!(merge_at_once());
        let before = unmerged();
        drop((0..1_000_u64).map(Box::new).collect::<Vec<_>>());
        // Other threads can only reduce the number.
        assert!(unmerged() <= before, "{} freed blocks are not merged, {before} before", unmerged());
    }
}
