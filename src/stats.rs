//! Counts since the module was loaded, and how long things took.

use crate::server::MainThread;
use hdrhistogram::Histogram;

/// The counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Grants without a wait, re-entries included.
    pub granted_at_once: u64,
    /// Grants to queued requests.
    pub granted_queued: u64,
    /// Requests answered with null at once.
    pub refusals: u64,
    /// Waits that timed out.
    pub timeouts: u64,
    /// Releases by an owner, whole or in part.
    pub releases: u64,
    /// Renewals by an owner.
    pub renewals: u64,
    /// Renewals, including the watchdog's, that found the lock lost.
    pub renewals_lost: u64,
    /// Leases that the module saw run out.
    pub expired: u64,
    /// Holders that lost a lock because it was force-released.
    pub forced: u64,
    /// Bound holds that another command ended.
    pub changed: u64,
    /// Holds released because their connection ended.
    pub released_by_disconnect: u64,
    /// Renewals by a watchdog.
    pub watchdog_renewals: u64,
    /// Requests refused because they would have closed a cycle.
    pub deadlocks: u64,
    /// Searches for a cycle.
    pub deadlock_searches: u64,
    /// Searches that were abandoned because they became too long.
    pub deadlock_searches_given_up: u64,
    /// Grants revoked because their client was gone.
    pub grants_undelivered: u64,
    /// Grants and renewals that enough replicas confirmed.
    pub confirmed: u64,
    /// Requests with `REPLICAS` that were not confirmed, because replicas were late or the lock was lost.
    pub revoked: u64,
    /// How often the module asked the replicas to confirm.
    pub confirmation_requests: u64,
}

/// The distribution of durations, in microseconds. Takes no memory until a duration is recorded.
#[derive(Debug, Default)]
pub struct Times {
    histogram: Option<Histogram<u64>>,
    sum: u64,
}

impl Times {
    /// Records one duration.
    pub fn record(&mut self, micros: u64) {
        if self.histogram.is_none() {
            self.histogram = Histogram::new_with_max(24 * 60 * 60 * 1_000_000, 2).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(micros);
            self.sum = self.sum.saturating_add(micros);
        }
    }

    /// The number of durations of at most `micros`, to the histogram's two significant digits.
    pub fn within(&self, micros: u64) -> u64 {
        self.histogram.as_ref().map_or(0, |histogram| histogram.count_between(0, micros))
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.histogram.as_ref().map_or(0, Histogram::len)
    }

    /// The sum of the durations.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The value below which this fraction of the durations lies; 0 if there are none.
    pub fn quantile(&self, quantile: f64) -> u64 {
        self.histogram.as_ref().map_or(0, |histogram| histogram.value_at_quantile(quantile))
    }

    /// The longest duration.
    pub fn max(&self) -> u64 {
        self.histogram.as_ref().map_or(0, Histogram::max)
    }
}

/// All counters and durations.
#[derive(Debug, Default)]
pub struct Stats {
    /// The counters.
    pub counts: Counts,
    /// From a request's entry into the queue to its grant.
    pub waits: Times,
    /// From a grant to a queued request to its reply, or until the session has read its event.
    pub hand_offs: Times,
    /// From a grant to the last confirmation it needed.
    pub confirmations: Times,
}

static STATS: MainThread<Stats> = MainThread::new();

/// Adds one to a counter.
pub fn count(which: impl FnOnce(&mut Counts) -> &mut u64) {
    add(which, 1);
}

/// Adds `many` to a counter.
pub fn add(which: impl FnOnce(&mut Counts) -> &mut u64, many: u64) {
    STATS.with(|stats| {
        let it = which(&mut stats.counts);
        *it = it.wrapping_add(many);
    });
}

/// Records a duration.
pub fn time(which: impl FnOnce(&mut Stats) -> &mut Times, micros: u64) {
    STATS.with(|stats| which(stats).record(micros));
}

/// Clears all statistics: the module is about to be unloaded.
pub fn clear() {
    STATS.with(|stats| *stats = Stats::default());
}

/// Lends the statistics; see [`MainThread::with`].
pub fn with<R>(work: impl FnOnce(&Stats) -> R) -> R {
    STATS.with(|stats| work(stats))
}
