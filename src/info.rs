//! What `INFO holdfast` tells.

use crate::books;
use crate::server::info::Section;
use crate::stats::{self, Times};
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
    let now: [(&CStr, usize); 7] = books::with(|books| {
        let (sessions, session_waits, unread_events) = books.sessions.sizes();
        [
            (c"waiters", books.queue.len()),
            (c"contended_locks", books.queue.contended()),
            (c"tied_holds", books.ties.len()),
            (c"confirming", books.confirmations.len()),
            (c"sessions", sessions),
            (c"session_waits", session_waits),
            (c"unread_events", unread_events),
        ]
    });
    for (name, value) in now {
        section.number(name, value as u64);
    }
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
