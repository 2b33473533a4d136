//! How much is looked at.

use super::table::Table;
use super::{Locks, key, keys, owner, request, serve};
use crate::lock::serve::{Change, Sight, View, WaitEnd};
use crate::lock::{Ahead, LockKey, Millis, Owner, Queue, Standing, Waiter, decide};

/// Locks that count how often they are looked at.
#[derive(Default)]
struct Counting {
    table: Table,
    looks: usize,
    granted: Vec<Owner>,
}

impl View for Counting {
    fn look(&mut self, key: &LockKey, owner: &Owner) -> Sight {
        self.looks += 1;
        self.table.look(key, owner)
    }

    fn holders(&mut self, key: &LockKey) -> Vec<Owner> {
        self.table.holders(key)
    }
}

impl Locks for Counting {
    fn settle(&mut self, waiter: Waiter<()>, end: WaitEnd) {
        self.granted.push(waiter.owner.clone());
        self.table.settle(waiter, end);
    }
}

/// Several clients wait for the same thousand locks, which are given back together: one gets them, and the next, who
/// now heads all thousand queues, is looked at once and not a thousand times.
#[test]
fn a_thousand_locks_given_back_together_are_looked_at_a_few_times_each() {
    const LOCKS: u32 = 1000;
    const NOW: Millis = 1;
    let numbers: Vec<u32> = (0..LOCKS).collect();
    let all = keys(&numbers);
    let mut locks = Counting { table: Table { now: NOW, ..Table::default() }, ..Counting::default() };
    let decision = decide(&Standing::FREE, &request(1), Ahead::Nobody, NOW);
    locks.table.write(&all, &owner(0), &vec![decision; all.len()]);
    let mut queue = Queue::default();
    for waiter in 1..=3 {
        queue.join(owner(waiter), all.clone(), request(1), NOW, None, ());
    }
    // One of them is still held at first: nobody is served, and that costs a single pass.
    for &number in numbers.iter().skip(1) {
        locks.table.release(&key(number), &owner(0));
    }
    let freed = |from: usize| numbers.iter().skip(from).map(|&number| (key(number), Change::Freed));
    serve(&mut queue, &mut locks, freed(1), NOW);
    assert!(locks.granted.is_empty());
    assert!(locks.looks <= all.len(), "{}", locks.looks);
    locks.looks = 0;
    locks.table.release(&key(0), &owner(0));
    serve(&mut queue, &mut locks, freed(0), NOW);
    assert_eq!(locks.granted, [owner(1)]);
    assert!(locks.looks <= all.len() + 1, "{}", locks.looks);
}
