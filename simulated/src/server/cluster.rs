//! Where the slots of a cluster are served.

use super::Ctx;
use super::text::Text;
use crate::redis::node;

/// Where a slot is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: i64,
    /// The node: its host and port.
    pub address: String,
}

/// Where the slot of a key is served, if another node serves it.
pub fn elsewhere(_: Ctx, key: &Text) -> Option<Place> {
    node(|node| {
        let slots = node.slots.as_ref()?;
        let slot = crate::redis::slot_of(key.bytes());
        slots.elsewhere.contains(&slot).then(|| Place { slot: i64::from(slot), address: crate::redis::OTHER.into() })
    })
}
