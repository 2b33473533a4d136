//! What `top` shows and where in it one is. No terminal, no server.

use std::time::Instant;

use crate::seen::{Lock, Queue, Waiter};

/// What is shown.
#[derive(Debug, Default)]
pub struct State {
    queues: Vec<Queue>,
    sort: Sort,
    /// The lock that is chosen, which stays chosen when the order changes.
    chosen: Option<Vec<u8>>,
    inside: bool,
    look: Option<Look>,
    /// When there were how many grants out of queues.
    grants: Option<(Instant, u64)>,
    rate: Option<f64>,
    failure: Option<String>,
}

/// In which order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// Most waiters first.
    #[default]
    Waiters,
    /// Longest wait first.
    Oldest,
    /// By key.
    Key,
}

/// One lock, looked into.
#[derive(Debug)]
pub struct Look {
    /// Its key.
    pub key: String,
    /// What it is; none: it is free now.
    pub lock: Option<Lock>,
    /// Who waits.
    pub waiters: Vec<Waiter>,
}

impl State {
    /// The queues, in order.
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// The order.
    pub fn sort(&self) -> Sort {
        self.sort
    }

    /// Which row is chosen.
    pub fn row(&self) -> Option<usize> {
        let chosen = self.chosen.as_ref()?;
        self.queues.iter().position(|queue| queue.key == *chosen)
    }

    /// The lock that is looked into.
    pub fn inside(&self) -> Option<&[u8]> {
        self.chosen.as_deref().filter(|_| self.inside)
    }

    /// What was seen in it.
    pub fn look(&self) -> Option<&Look> {
        self.look.as_ref().filter(|_| self.inside)
    }

    /// Whether a lock is to be looked into that nothing has been seen of.
    pub fn wants_look(&self) -> bool {
        self.inside && self.look.is_none()
    }

    /// Hand-offs a second, once there were two looks.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// What went wrong when it was last looked.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// What is there now.
    pub fn seen(&mut self, queues: Vec<Queue>, grants: Option<u64>, now: Instant) {
        self.failure = None;
        self.queues = queues;
        self.put_in_order();
        if let Some(((before, count), grants)) = self.grants.zip(grants) {
            let seconds = now.saturating_duration_since(before).as_secs_f64();
            // Fewer than before: a server began anew.
            self.rate = (seconds > 0.0).then(|| grants.saturating_sub(count) as f64 / seconds);
        }
        self.grants = grants.map(|grants| (now, grants));
        if self.row().is_none() && !self.inside {
            self.choose(0);
        }
    }

    /// What is in the chosen lock now.
    pub fn looked(&mut self, look: Look) {
        self.look = Some(look);
    }

    /// It could not be looked.
    pub fn failed(&mut self, failure: String) {
        self.failure = Some(failure);
    }

    /// Chooses the next one.
    pub fn down(&mut self) {
        self.choose(self.row().map_or(0, |row| row + 1));
    }

    /// Chooses the one before.
    pub fn up(&mut self) {
        self.choose(self.row().map_or(0, |row| row.saturating_sub(1)));
    }

    /// The next order.
    pub fn sort_otherwise(&mut self) {
        self.sort = match self.sort {
            Sort::Waiters => Sort::Oldest,
            Sort::Oldest => Sort::Key,
            Sort::Key => Sort::Waiters,
        };
        self.put_in_order();
    }

    /// Looks into the chosen lock.
    pub fn enter(&mut self) {
        self.inside = self.chosen.is_some();
        self.look = None;
    }

    /// Goes back to the table.
    pub fn leave(&mut self) {
        self.inside = false;
    }

    fn choose(&mut self, row: usize) {
        if self.inside {
            return;
        }
        let row = row.min(self.queues.len().saturating_sub(1));
        self.chosen = self.queues.get(row).map(|queue| queue.key.clone());
    }

    fn put_in_order(&mut self) {
        match self.sort {
            Sort::Waiters => self.queues.sort_by(|a, b| b.waiters.cmp(&a.waiters).then_with(|| a.key.cmp(&b.key))),
            Sort::Oldest => self.queues.sort_by(|a, b| b.oldest.cmp(&a.oldest).then_with(|| a.key.cmp(&b.key))),
            Sort::Key => self.queues.sort_by(|a, b| a.key.cmp(&b.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn queue(key: &str, waiters: i64, oldest: i64) -> Queue {
        Queue { server: "s".to_owned(), key: key.into(), waiters, oldest, holders: Vec::new(), cached: 0, ttl: -1 }
    }

    fn keys(state: &State) -> String {
        state.queues().iter().map(|queue| String::from_utf8_lossy(&queue.key).into_owned()).collect()
    }

    #[test]
    fn what_is_chosen_stays_chosen_in_another_order() {
        let mut state = State::default();
        state.seen(vec![queue("a", 1, 30), queue("b", 3, 20), queue("c", 2, 10)], Some(0), Instant::now());
        assert_eq!((keys(&state).as_str(), state.row()), ("bca", Some(0)));
        state.down();
        state.sort_otherwise();
        assert_eq!((keys(&state).as_str(), state.row()), ("abc", Some(2)));
        state.sort_otherwise();
        assert_eq!(keys(&state), "abc");
        for _ in 0..5 {
            state.down();
        }
        assert_eq!(state.row(), Some(2));
        for _ in 0..5 {
            state.up();
        }
        assert_eq!(state.row(), Some(0));
    }

    #[test]
    fn who_looks_into_a_lock_stays_there_until_he_leaves() {
        let mut state = State::default();
        state.enter();
        assert_eq!(state.inside(), None, "there is none");
        state.seen(vec![queue("a", 1, 1)], Some(0), Instant::now());
        state.enter();
        assert!(state.wants_look());
        state.looked(Look { key: "a".to_owned(), lock: None, waiters: Vec::new() });
        state.seen(Vec::new(), Some(0), Instant::now());
        assert_eq!(state.inside(), Some(&b"a"[..]));
        assert!(state.look().is_some());
        state.leave();
        assert!(state.look().is_none());
    }

    #[test]
    fn hand_offs_are_counted_from_look_to_look() {
        let mut state = State::default();
        let now = Instant::now();
        state.seen(Vec::new(), Some(100), now);
        assert_eq!(state.rate(), None);
        state.seen(Vec::new(), Some(150), now + Duration::from_secs(2));
        assert_eq!(state.rate(), Some(25.0));
        state.seen(Vec::new(), Some(3), now + Duration::from_secs(3));
        assert_eq!(state.rate(), Some(0.0));
    }
}
