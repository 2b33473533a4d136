//! What a run has done and seen.

use super::mixed::Played;
use super::watch::Watch;

/// What was done and seen.
#[derive(Default)]
pub struct Outcome {
    /// Requests sent, garbage included.
    pub requests: u64,
    /// Strings sent that need not be requests.
    pub garbage: u64,
    /// Connections that ended on purpose or were killed.
    pub dropped: u64,
    /// Requests that their user had no right to.
    pub forbidden: u64,
    /// What was done in the mixed queues.
    pub played: Played,
    /// What somebody else on the server saw.
    pub watch: Watch,
    /// How often replicas were compared with their master.
    pub compared: u64,
    /// By how many bytes the server's memory grew.
    pub growth: i64,
    /// What the requests led to, and how often.
    pub reached: Vec<(&'static str, i64)>,
    /// Promises that were broken.
    pub violations: Vec<String>,
}

impl Outcome {
    /// Adds what another part of the same round has done and seen.
    pub fn add(&mut self, other: Outcome) {
        self.requests += other.requests;
        self.garbage += other.garbage;
        self.dropped += other.dropped;
        self.forbidden += other.forbidden;
        self.played.add(other.played);
        self.watch.add(other.watch);
        self.compared += other.compared;
        self.violations.extend(other.violations);
    }
}
