//! Where the slots of a cluster are served.

use super::text::Text;
use super::{Ctx, calls};
use crate::node::{OTHER, node, slot_of};

/// Where a slot is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: i64,
    /// The node: its host and port.
    pub address: String,
}

/// Which node of a cluster decides on a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// This one.
    Here,
    /// Another one.
    Elsewhere(Place),
    /// The slot is being moved to another node, and the key is not here any more, if it ever was.
    Leaving,
    /// The slot is being moved here, and the key is not here yet, if it exists.
    Arriving,
    /// None: no node owns the slot, or the cluster is down.
    Nowhere,
}

/// Which node decides on a key of the selected database.
pub fn served(ctx: Ctx, key: &Text) -> Served {
    if ctx.serves(key) {
        return Served::Here;
    }
    let slot = slot_of(key.bytes());
    let Some(slots) = node(|node| node.slots.clone()) else { return Served::Here };
    if slots.importing.contains(&slot) {
        let is_here = calls::exists(ctx.db(), key.bytes());
        return if is_here { Served::Here } else { Served::Arriving };
    }
    if slots.elsewhere.contains(&slot) {
        return Served::Elsewhere(Place { slot: i64::from(slot), address: OTHER.into() });
    }
    if slots.migrating.contains(&slot) && !slots.is_down { Served::Leaving } else { Served::Nowhere }
}
