//! Raised tokens: which of them name a hold, and how many holds are remembered.

use super::{key, owner};
use crate::lock::LockKey;
use crate::state::raised::{MOST, Raised};

#[test]
fn every_token_that_a_hold_has_had_names_it() {
    let mut raised = Raised::default();
    raised.raise(&key(1), &owner(1), 5, 7);
    raised.raise(&key(1), &owner(1), 7, 9);
    let names = |raised: &Raised, who: u8, held, named| raised.is_meant((0, &key(1).name, &owner(who)), held, named);
    assert_eq!([4, 5, 7, 9, 10].map(|named| names(&raised, 1, 9, named)), [false, true, true, true, false]);
    assert!(!names(&raised, 2, 9, 5), "another owner's");
    assert!(!names(&raised, 1, 10, 5) && names(&raised, 1, 10, 10), "a later hold");
    raised.raise(&key(1), &owner(1), 10, 12);
    assert!(names(&raised, 1, 12, 10) && !names(&raised, 1, 12, 9), "what came before the later hold is forgotten");
    raised.swap(0, 3);
    assert!(!names(&raised, 1, 12, 10));
    assert!(raised.is_meant((3, &key(1).name, &owner(1)), 12, 10));
}

#[test]
fn only_the_newest_are_remembered() {
    let mut raised = Raised::default();
    let name = |number: usize| LockKey::new(0, &number.to_le_bytes());
    let names = |raised: &Raised, number: usize| raised.is_meant((0, &number.to_le_bytes(), b"me"), 9, 5);
    (0..MOST).for_each(|number| raised.raise(&name(number), b"me", 5, 9));
    assert!(names(&raised, 0) && names(&raised, MOST - 1));
    raised.raise(&name(MOST), b"me", 5, 9);
    assert!(!names(&raised, 0) && names(&raised, 1) && names(&raised, MOST));
    assert_eq!(raised.count(), MOST);
    raised.swap(0, 3);
    raised.raise(&name(0), b"me", 5, 9);
    assert_eq!(raised.count(), MOST, "what was swapped is forgotten, too");
}
