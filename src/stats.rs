//! Counts since the module was loaded, and how long things took.

use crate::server::MainThread;
use hdrhistogram::Histogram;

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Grants that needed no waiting, re-entries included.
    pub granted_at_once: u64,
    /// Grants out of the queue.
    pub granted_queued: u64,
    /// Requests that were answered with null at once.
    pub refusals: u64,
    /// Waits whose time was over.
    pub timeouts: u64,
    /// Releases by an owner, whole or in part.
    pub releases: u64,
    /// Renewals by an owner.
    pub renewals: u64,
    /// Renewals, a watchdog's included, that found the lock lost.
    pub renewals_lost: u64,
    /// Leases that ran out under the module's eyes.
    pub expired: u64,
    /// Holders who lost a lock that was broken.
    pub forced: u64,
    /// Holds released because their connection ended.
    pub released_by_disconnect: u64,
    /// Renewals by a watchdog.
    pub watchdog_renewals: u64,
    /// Requests refused because they would have closed a circle.
    pub deadlocks: u64,
    /// Grants that went back because nobody was there to take them.
    pub grants_undelivered: u64,
    /// Grants and renewals that enough replicas confirmed.
    pub confirmed: u64,
    /// Grants and renewals taken back for want of replicas.
    pub taken_back: u64,
    /// How often replicas were asked to confirm.
    pub confirmation_requests: u64,
}

/// How long something took, in microseconds. Costs no memory until something has.
#[derive(Debug, Default)]
pub struct Times(Option<Histogram<u64>>);

impl Times {
    /// Notes one.
    pub fn record(&mut self, micros: u64) {
        if self.0.is_none() {
            self.0 = Histogram::new_with_max(24 * 60 * 60 * 1_000_000, 2).ok();
        }
        if let Some(histogram) = &mut self.0 {
            histogram.saturating_record(micros);
        }
    }

    /// The value below which so large a part of them lies; 0 if there was none.
    pub fn quantile(&self, quantile: f64) -> u64 {
        self.0.as_ref().map_or(0, |histogram| histogram.value_at_quantile(quantile))
    }

    /// The longest.
    pub fn max(&self) -> u64 {
        self.0.as_ref().map_or(0, Histogram::max)
    }
}

/// All of it.
#[derive(Debug, Default)]
pub struct Stats {
    /// Counts.
    pub counts: Counts,
    /// From a request's arrival in the queue to its grant.
    pub waits: Times,
    /// From a grant out of the queue to its reply.
    pub hand_offs: Times,
    /// From a grant to the last confirmation it needed.
    pub confirmations: Times,
}

static STATS: MainThread<Stats> = MainThread::new();

/// Counts one.
pub fn count(which: impl FnOnce(&mut Counts) -> &mut u64) {
    add(which, 1);
}

/// Counts several.
pub fn add(which: impl FnOnce(&mut Counts) -> &mut u64, many: u64) {
    STATS.with(|stats| {
        let it = which(&mut stats.counts);
        *it = it.wrapping_add(many);
    });
}

/// Notes how long something took.
pub fn time(which: impl FnOnce(&mut Stats) -> &mut Times, micros: u64) {
    STATS.with(|stats| which(stats).record(micros));
}

/// Forgets everything; the module is about to be unloaded.
pub fn clear() {
    STATS.with(|stats| *stats = Stats::default());
}

/// Lends the figures; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&Stats) -> R) -> R {
    STATS.with(|stats| work(stats))
}
