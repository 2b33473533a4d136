//! A cluster of two nodes, and a slot that moves from one to the other.

use support::{Cluster, Raw, Server};

/// The slot of `key` moves.
pub struct MovingSlot {
    pub cluster: Cluster,
    pub slot: u16,
    /// The node that has it.
    pub from: usize,
    /// The node that gets it.
    pub to: usize,
    /// A connection to the node that has the slot.
    pub client: Raw,
}

impl MovingSlot {
    pub fn start() -> Self {
        let cluster = Cluster::start(2);
        let slot = cluster.slot_of(b"key");
        let from = cluster.owner_of(slot);
        let client = cluster.node(from).raw();
        Self { cluster, slot, from, to: 1 - from, client }
    }

    pub fn source(&self) -> &Server {
        self.cluster.node(self.from)
    }

    pub fn target(&self) -> &Server {
        self.cluster.node(self.to)
    }

    /// The redirection that clients of the wrong node get.
    pub fn moved(&self) -> String {
        format!("MOVED {} {}", self.slot, self.target().addr())
    }

    /// A key of another slot at the same node.
    pub fn key_of_other_slot(&self) -> String {
        let is_other = |slot| slot != self.slot && self.cluster.owner_of(slot) == self.from;
        let mut keys = (0..).map(|number| format!("other-{number}"));
        keys.find(|key| is_other(self.cluster.slot_of(key.as_bytes()))).expect("a node has many slots")
    }
}
