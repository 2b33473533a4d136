//! Alarms: at most one time for each number, the earliest.

use crate::terms::{Id, Millis};
use std::collections::{BTreeMap, BTreeSet};

/// At most one alarm for each call or claim. When it is due, the call or claim sets its next one.
#[derive(Debug, Default)]
pub(crate) struct Alarms {
    by_time: BTreeSet<(Millis, Id)>,
    by_id: BTreeMap<Id, Millis>,
}

impl Alarms {
    /// Sets an alarm, unless an earlier one is set.
    pub(crate) fn set(&mut self, at: Millis, id: Id) {
        if self.by_id.get(&id).is_some_and(|before| *before <= at) {
            return;
        }
        if let Some(before) = self.by_id.insert(id, at) {
            self.by_time.remove(&(before, id));
        }
        self.by_time.insert((at, id));
    }

    /// Removes the alarm.
    pub(crate) fn remove(&mut self, id: Id) {
        if let Some(at) = self.by_id.remove(&id) {
            self.by_time.remove(&(at, id));
        }
    }

    /// The earliest alarm.
    pub(crate) fn first(&self) -> Option<Millis> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// The first alarm that is due now.
    pub(crate) fn take_due(&mut self, now: Millis) -> Option<Id> {
        let (at, id) = self.by_time.first().copied().filter(|(at, _)| *at <= now)?;
        self.by_time.remove(&(at, id));
        self.by_id.remove(&id)?;
        Some(id)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_time.len()
    }
}
