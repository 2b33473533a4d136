//! How many bytes events take, and how many are reserved for those that may yet come.

/// What an event takes beside its owner and its keys, and what each of its keys takes beside its name, in bytes.
const EVENT_BYTES: usize = 256;
const KEY_BYTES: usize = 48;

/// How many bytes an event about these keys takes, by their names.
pub fn event_bytes<'a>(owner: &[u8], names: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let of_key = |name: &[u8]| name.len().saturating_add(KEY_BYTES);
    let own = owner.len().saturating_add(EVENT_BYTES);
    names.into_iter().map(of_key).fold(own, usize::saturating_add)
}

/// How many bytes are reserved for a bound hold: for `lost` or `unbound`, and for `contended`.
pub fn hold_bytes(owner: &[u8], name: &[u8]) -> usize {
    event_bytes(owner, [name]).saturating_mul(2)
}
