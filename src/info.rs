//! What `INFO holdfast` tells.

use crate::server::info::Section;
use crate::stats::{self, Times};
use crate::{confirming, ties, waiting};
use std::ffi::{CStr, CString};

/// Fills the section.
pub fn fill(section: Section) {
    stats::with(|stats| {
        let it = &stats.counts;
        let counts: [(&CStr, u64); 16] = [
            (c"grants_at_once", it.granted_at_once),
            (c"grants_queued", it.granted_queued),
            (c"refusals", it.refusals),
            (c"timeouts", it.timeouts),
            (c"releases", it.releases),
            (c"renewals", it.renewals),
            (c"renewals_lost", it.renewals_lost),
            (c"expired", it.expired),
            (c"forced", it.forced),
            (c"released_by_disconnect", it.released_by_disconnect),
            (c"watchdog_renewals", it.watchdog_renewals),
            (c"deadlocks_refused", it.deadlocks),
            (c"grants_undelivered", it.grants_undelivered),
            (c"confirmed", it.confirmed),
            (c"taken_back", it.taken_back),
            (c"confirmation_requests", it.confirmation_requests),
        ];
        for (name, value) in counts {
            section.number(name, value);
        }
    });
    let (waiters, contended) = waiting::sizes();
    section.number(c"waiters", waiters);
    section.number(c"contended_locks", contended);
    section.number(c"tied_holds", ties::tied());
    section.number(c"confirming", confirming::count());
    stats::with(|stats| {
        tell(section, "wait", &stats.waits);
        tell(section, "handoff", &stats.hand_offs);
        tell(section, "confirmation", &stats.confirmations);
    });
}

fn tell(section: Section, name: &str, times: &Times) {
    let values = [
        ("p50", times.quantile(0.5)),
        ("p99", times.quantile(0.99)),
        ("p999", times.quantile(0.999)),
        ("max", times.max()),
    ];
    for (which, value) in values {
        if let Ok(name) = CString::new(format!("{name}_usec_{which}")) {
            section.number(&name, value);
        }
    }
}
