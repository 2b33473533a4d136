//! The results of a run.

use super::mixed::PlayerCounts;
use super::watch::Watch;

/// The results.
#[derive(Default)]
pub struct Outcome {
    /// Requests sent, including invalid ones.
    pub requests: u64,
    /// Random strings sent.
    pub garbage: u64,
    /// Connections that were closed on purpose or killed.
    pub dropped: u64,
    /// Requests that were refused for missing rights.
    pub forbidden: u64,
    /// What happened in the mixed queues.
    pub player_counts: PlayerCounts,
    /// The measured event-loop iterations.
    pub watch: Watch,
    /// How often replicas were compared with their primary.
    pub compared: u64,
    /// By how many bytes the server's memory grew.
    pub growth: i64,
    /// What the requests led to, and how often.
    pub reached: Vec<(&'static str, i64)>,
    /// Violated guarantees.
    pub violations: Vec<String>,
}

impl Outcome {
    /// Adds the results of another part of the same round.
    pub fn add(&mut self, other: Outcome) {
        self.requests += other.requests;
        self.garbage += other.garbage;
        self.dropped += other.dropped;
        self.forbidden += other.forbidden;
        self.player_counts.add(other.player_counts);
        self.watch.add(other.watch);
        self.compared += other.compared;
        self.violations.extend(other.violations);
    }
}
