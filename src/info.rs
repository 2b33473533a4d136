//! What `INFO holdfast` shows.

use crate::lock::internal_errors;
use crate::server::clock::steady_millis;
use crate::server::info::Section;
use crate::state::{self, State};
use crate::stats::{self, Times};
use std::ffi::{CStr, CString};

/// Fills the module's section of `INFO`.
pub fn fill(section: Section) {
    // `MODULE LIST` shows the version as one number; this is its usual form.
    section.text(c"version", env!("CARGO_PKG_VERSION"));
    stats::with(|stats| {
        let it = &stats.counts;
        let counts: [(&CStr, u64); 19] = [
            (c"grants_at_once", it.granted_at_once),
            (c"grants_queued", it.granted_queued),
            (c"refusals", it.refusals),
            (c"timeouts", it.timeouts),
            (c"releases", it.releases),
            (c"renewals", it.renewals),
            (c"renewals_lost", it.renewals_lost),
            (c"expired", it.expired),
            (c"forced", it.forced),
            (c"changed", it.changed),
            (c"released_by_disconnect", it.released_by_disconnect),
            (c"watchdog_renewals", it.watchdog_renewals),
            (c"deadlocks_refused", it.deadlocks),
            (c"deadlock_searches", it.deadlock_searches),
            (c"deadlock_searches_given_up", it.deadlock_searches_given_up),
            (c"grants_undelivered", it.grants_undelivered),
            (c"confirmed", it.confirmed),
            (c"revoked", it.revoked),
            (c"confirmation_requests", it.confirmation_requests),
        ];
        for (name, value) in counts {
            section.number(name, value);
        }
    });
    section.number(c"internal_errors", internal_errors::count());
    // (The sizes are missing if another module asks for `INFO` while this one is at work.)
    state::try_with(|state| fill_sizes(section, state));
    stats::with(|stats| {
        fill_times(section, "wait", &stats.waits);
        fill_times(section, "handoff", &stats.hand_offs);
        fill_times(section, "confirmation", &stats.confirmations);
    });
}

fn fill_sizes(section: Section, state: &State) {
    let (sessions, session_waits, unread_events) = state.sessions.sizes();
    let sizes: [(&CStr, usize); 8] = [
        (c"waiters", state.queue.len()),
        (c"contended_locks", state.queue.contended()),
        (c"bound_holds", state.bindings.len()),
        (c"cached_locks", state.bindings.cached_locks()),
        (c"confirming", state.confirmations.len()),
        (c"sessions", sessions),
        (c"session_waits", session_waits),
        (c"undelivered_events", unread_events),
    ];
    for (name, value) in sizes {
        section.number(name, value as u64);
    }
    let oldest = state.queue.iter().next().map(|first| first.id.arrived);
    section.number(c"oldest_wait_msec", oldest.map_or(0, |arrived| steady_millis().saturating_sub(arrived)));
}

fn fill_times(section: Section, what: &str, times: &Times) {
    let number = |which: &str, value| {
        if let Ok(name) = CString::new(format!("{what}_usec_{which}")) {
            section.number(&name, value);
        }
    };
    number("p50", times.quantile(0.5));
    number("p99", times.quantile(0.99));
    number("p999", times.quantile(0.999));
    number("max", times.max());
    number("sum", times.sum());
    number("count", times.count());
    let buckets: Vec<String> = bounds().map(|bound| format!("{bound}={}", times.within(bound))).collect();
    if let Ok(name) = CString::new(format!("{what}_usec_buckets")) {
        section.text(&name, &buckets.join(","));
    }
}

/// The bounds of the buckets: 1, 2 and 5 in every power of ten, from 10 µs to 1,000 s.
fn bounds() -> impl Iterator<Item = u64> {
    const LARGEST: u64 = 1_000_000_000;
    let powers = (1..10).map(|power| 10_u64.saturating_pow(power));
    powers.flat_map(|power| [1, 2, 5].map(|step: u64| power.saturating_mul(step))).filter(|bound| *bound <= LARGEST)
}
