//! What is done to a server, and undone.

use crate::engine::{Result, Site};

/// What is done to a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// `kill -9`: it comes back empty.
    Kill,
    /// `SIGSTOP`, and `SIGCONT` when another has taken over: it still takes itself for the master then.
    Stop,
    /// Off the network, for peers and clients alike.
    Cut,
    /// Cut off from its peers, but not from its clients: two masters for a while. What its peers send still reaches it.
    CutFromPeers,
    /// The other direction: nothing of what its peers send reaches it, and what it sends reaches them.
    Deaf,
}

/// All blows, in the order in which they are dealt.
pub const BLOWS: [Blow; 5] = [Blow::CutFromPeers, Blow::Kill, Blow::Stop, Blow::Deaf, Blow::Cut];

impl Blow {
    /// Deals it to a server (`process`) of a node.
    pub fn strike(self, site: &Site, node: usize, process: &str) -> Result<()> {
        match self {
            Blow::Kill => site.nodes[node].signal(process, "KILL"),
            Blow::Stop => site.nodes[node].signal(process, "STOP"),
            Blow::Cut => site.nodes[node].cut(),
            Blow::CutFromPeers => site.cut_from_peers(node),
            Blow::Deaf => site.deafen(node),
        }
    }

    /// Undoes it; a killed server is started anew by `start`.
    pub fn heal(self, site: &Site, node: usize, process: &str, start: impl FnOnce() -> Result<()>) -> Result<()> {
        match self {
            Blow::Kill => start(),
            Blow::Stop => site.nodes[node].signal(process, "CONT"),
            Blow::Cut => site.nodes[node].join(),
            Blow::CutFromPeers => site.join_peers(node),
            Blow::Deaf => site.hear(node),
        }
    }
}
