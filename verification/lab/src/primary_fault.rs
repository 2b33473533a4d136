//! Faults of a primary, and how they are undone.

use crate::engine::{Result, Site};

/// A fault that is injected into a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrimaryFault {
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
pub const PRIMARY_FAULTS: [PrimaryFault; 5] =
    [PrimaryFault::CutFromPeers, PrimaryFault::Kill, PrimaryFault::Stop, PrimaryFault::CutIncoming, PrimaryFault::Cut];

impl PrimaryFault {
    /// Injects the fault into a server (`process`) of a node.
    pub fn inject(self, site: &Site, node: usize, process: &str) -> Result<()> {
        match self {
            PrimaryFault::Kill => site.nodes[node].signal(process, "KILL"),
            PrimaryFault::Stop => site.nodes[node].signal(process, "STOP"),
            PrimaryFault::Cut => site.nodes[node].cut(),
            PrimaryFault::CutFromPeers => site.cut_from_peers(node),
            PrimaryFault::CutIncoming => site.cut_incoming(node),
        }
    }

    /// Undoes the fault. `start` restarts a killed server.
    pub fn heal(self, site: &Site, node: usize, process: &str, start: impl FnOnce() -> Result<()>) -> Result<()> {
        match self {
            PrimaryFault::Kill => start(),
            PrimaryFault::Stop => site.nodes[node].signal(process, "CONT"),
            PrimaryFault::Cut => site.nodes[node].join(),
            PrimaryFault::CutFromPeers => site.join_peers(node),
            PrimaryFault::CutIncoming => site.join_incoming(node),
        }
    }
}
