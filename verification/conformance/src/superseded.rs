//! Replies to superseded requests that arrive after the grant of the request that superseded them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::{Direction, Fate, Proxy};

/// From now on, every `-SUPERSEDED` is held back, until another rule is set. Returns their number.
pub fn hold_back(proxy: &Proxy) -> Arc<AtomicUsize> {
    let held_back = Arc::new(AtomicUsize::new(0));
    let count = held_back.clone();
    proxy.rule(move |toward, message| {
        if toward == Direction::Client && message.starts_with(b"-SUPERSEDED") {
            count.fetch_add(1, Ordering::SeqCst);
            return Fate::Hold;
        }
        Fate::Pass
    });
    held_back
}
