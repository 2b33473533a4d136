//! The clocks, and the timers of modules as in the server's `module.c`. The timers are sorted by the time of day, but
//! the event loop waits for the first of them by the monotonic clock.

use crate::lock::Millis;
use std::collections::BTreeMap;

/// The start of every run, in Unix microseconds.
const BEGINNING: u64 = 1_800_000_000_000_000;

/// Two clocks, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// The time of day, since 1970. It can be stepped.
    pub wall: u64,
    /// Since the beginning. It never steps.
    pub mono: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { wall: BEGINNING, mono: 0 }
    }
}

impl Clock {
    /// Lets time pass.
    pub fn advance(&mut self, micros: u64) {
        self.wall += micros;
        self.mono += micros;
    }

    /// The time of day in Unix milliseconds.
    pub fn millis(&self) -> Millis {
        self.wall / 1000
    }
}

/// The id of a timer: its due time by the time of day, and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimerId(u64, u64);

/// The timers of the module.
#[derive(Default)]
pub struct Timers {
    pending: BTreeMap<TimerId, fn()>,
    made: u64,
    /// When the event loop calls them, by the monotonic clock.
    due: Option<u64>,
}

impl Timers {
    /// Makes a timer.
    pub fn create(&mut self, clock: &Clock, period: Millis, data: fn()) -> TimerId {
        self.made += 1;
        let id = TimerId(clock.wall.saturating_add(period.saturating_mul(1000)), self.made);
        self.pending.insert(id, data);
        if self.due.is_none() || self.pending.keys().next() == Some(&id) {
            self.due = Some(clock.mono.saturating_add(period.saturating_mul(1000)));
        }
        id
    }

    /// Cancels a timer.
    pub fn cancel(&mut self, id: TimerId) {
        self.pending.remove(&id);
    }

    /// When the event loop has to wake up for them, by the monotonic clock.
    pub fn due(&self) -> Option<u64> {
        self.due
    }

    /// Takes the next timer that is due by the time of day.
    pub fn take(&mut self, clock: &Clock) -> Option<fn()> {
        let first = self.pending.first_entry().filter(|first| first.key().0 <= clock.wall)?;
        Some(first.remove())
    }

    /// All due timers have run: sets when the event loop has to wake up next.
    pub fn done(&mut self, clock: &Clock) {
        let next = self.pending.keys().next().map(|next| (next.0.saturating_sub(clock.wall) / 1000).max(1));
        self.due = next.map(|next| clock.mono.saturating_add(next.saturating_mul(1000)));
    }
}
