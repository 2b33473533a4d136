//! Faults of a primary, and how they are undone.

use crate::engine::{Result, Site};

/// A fault that is injected into a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterFault {
    /// `kill -9`: the server restarts empty.
    Kill,
    /// `SIGSTOP`, and `SIGCONT` after the failover: the server still considers itself the primary then.
    Stop,
    /// Off the network, for peers and clients.
    Cut,
    /// Cut off from its peers, but not from its clients: two primaries for a while. It still receives what its peers send.
    CutFromPeers,
    /// The other direction: it receives nothing from its peers, and they receive what it sends.
    CutIncoming,
}

/// All faults, in the order of injection.
pub const MASTER_FAULTS: [MasterFault; 5] =
    [MasterFault::CutFromPeers, MasterFault::Kill, MasterFault::Stop, MasterFault::CutIncoming, MasterFault::Cut];

impl MasterFault {
    /// Injects the fault into a server (`process`) of a node.
    pub fn inject(self, site: &Site, node: usize, process: &str) -> Result<()> {
        match self {
            MasterFault::Kill => site.nodes[node].signal(process, "KILL"),
            MasterFault::Stop => site.nodes[node].signal(process, "STOP"),
            MasterFault::Cut => site.nodes[node].cut(),
            MasterFault::CutFromPeers => site.cut_from_peers(node),
            MasterFault::CutIncoming => site.cut_incoming(node),
        }
    }

    /// Undoes the fault. `start` restarts a killed server.
    pub fn heal(self, site: &Site, node: usize, process: &str, start: impl FnOnce() -> Result<()>) -> Result<()> {
        match self {
            MasterFault::Kill => start(),
            MasterFault::Stop => site.nodes[node].signal(process, "CONT"),
            MasterFault::Cut => site.nodes[node].join(),
            MasterFault::CutFromPeers => site.join_peers(node),
            MasterFault::CutIncoming => site.join_incoming(node),
        }
    }
}
