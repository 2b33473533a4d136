//! How many bytes events take, and how many are reserved for events that may yet come.

/// The bytes that an event takes besides its owner and keys, and those that each key takes besides its name.
const EVENT_BYTES: usize = 256;
const KEY_BYTES: usize = 48;

/// The bytes that an event about keys with these names takes.
pub fn event_bytes<'a>(owner: &[u8], names: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let of_key = |name: &[u8]| name.len().saturating_add(KEY_BYTES);
    let own = owner.len().saturating_add(EVENT_BYTES);
    names.into_iter().map(of_key).fold(own, usize::saturating_add)
}

/// The bytes that are reserved for a bound hold: for `lost` or `unbound`, and for `contended`.
pub fn hold_bytes(owner: &[u8], name: &[u8]) -> usize {
    event_bytes(owner, [name]).saturating_mul(2)
}
