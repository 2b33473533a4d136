//! The state of `top`, independent of terminal and server.

use std::time::Instant;

use crate::inspect::{Lock, Queue, Waiter, shown};

/// The state.
#[derive(Debug, Default)]
pub struct State {
    queues: Vec<Queue>,
    sort: Sort,
    filter: String,
    /// Whether keys are added to the filter.
    typing: bool,
    /// The selected lock, which stays selected when the order changes.
    chosen: Option<Vec<u8>>,
    open_lock: bool,
    details: Option<LockDetails>,
    /// The number of ended waits, and when it was read.
    ended: Option<(Instant, u64)>,
    rate: Option<f64>,
    failure: Option<String>,
}

/// The sort order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// Most waiters first.
    #[default]
    Waiters,
    /// Longest wait first.
    Oldest,
    /// Longest hold first.
    Held,
    /// By key.
    Key,
}

/// The details of one lock.
#[derive(Debug)]
pub struct LockDetails {
    /// Its key.
    pub key: String,
    /// The lock; `None`: it is free now.
    pub lock: Option<Lock>,
    /// The waiters.
    pub waiters: Vec<Waiter>,
}

impl State {
    /// The queues whose keys contain the filter, sorted.
    pub fn queues(&self) -> impl Iterator<Item = &Queue> {
        self.queues.iter().filter(|queue| shown(&queue.key).contains(&self.filter))
    }

    /// The filter.
    pub fn filter(&self) -> &str {
        &self.filter
    }

    /// Whether keys are added to the filter.
    pub fn is_typing(&self) -> bool {
        self.typing
    }

    /// Starts with an empty filter.
    pub fn begin_filter(&mut self) {
        if !self.open_lock {
            self.filter.clear();
            self.typing = true;
        }
    }

    /// Adds a letter to the filter; `None`: removes the last one.
    pub fn type_filter(&mut self, letter: Option<char>) {
        match letter {
            Some(letter) => self.filter.push(letter),
            None => drop(self.filter.pop()),
        }
        self.choose_one();
    }

    /// Ends the input of the filter, and keeps or clears it.
    pub fn end_filter(&mut self, stays: bool) {
        self.typing = false;
        if !stays {
            self.filter.clear();
        }
        self.choose_one();
    }

    /// The sort order.
    pub fn sort(&self) -> Sort {
        self.sort
    }

    /// The index of the selected row.
    pub fn row(&self) -> Option<usize> {
        let chosen = self.chosen.as_ref()?;
        self.queues().position(|queue| queue.key == *chosen)
    }

    /// The lock whose details are shown.
    pub fn open_lock(&self) -> Option<&[u8]> {
        self.chosen.as_deref().filter(|_| self.open_lock)
    }

    /// Its details.
    pub fn details(&self) -> Option<&LockDetails> {
        self.details.as_ref().filter(|_| self.open_lock)
    }

    /// Whether the details of a lock have to be read.
    pub fn needs_details(&self) -> bool {
        self.open_lock && self.details.is_none()
    }

    /// Ended waits per second, after two reads.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// The error of the last read.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Updates the queues.
    pub fn update(&mut self, queues: Vec<Queue>, ended: Option<u64>, now: Instant) {
        self.failure = None;
        self.queues = queues;
        self.sort_queues();
        if let Some(((before, count), ended)) = self.ended.zip(ended) {
            let seconds = now.saturating_duration_since(before).as_secs_f64();
            // Fewer than before: a server was restarted.
            self.rate = (seconds > 0.0).then(|| ended.saturating_sub(count) as f64 / seconds);
        }
        self.ended = ended.map(|ended| (now, ended));
        self.choose_one();
    }

    fn choose_one(&mut self) {
        if self.row().is_none() && !self.open_lock {
            self.choose(0);
        }
    }

    /// Updates the details of the selected lock.
    pub fn set_details(&mut self, details: LockDetails) {
        self.details = Some(details);
    }

    /// Records a failed read.
    pub fn failed(&mut self, failure: String) {
        self.failure = Some(failure);
    }

    /// Selects the next row.
    pub fn down(&mut self) {
        self.choose(self.row().map_or(0, |row| row + 1));
    }

    /// Selects the previous row.
    pub fn up(&mut self) {
        self.choose(self.row().map_or(0, |row| row.saturating_sub(1)));
    }

    /// Changes to the next sort order.
    pub fn next_sort(&mut self) {
        self.sort = match self.sort {
            Sort::Waiters => Sort::Oldest,
            Sort::Oldest => Sort::Held,
            Sort::Held => Sort::Key,
            Sort::Key => Sort::Waiters,
        };
        self.sort_queues();
    }

    /// Shows the details of the selected lock.
    pub fn enter(&mut self) {
        self.open_lock = self.chosen.is_some();
        self.details = None;
    }

    /// Goes back to the table, and from there clears the filter.
    pub fn leave(&mut self) {
        if !std::mem::take(&mut self.open_lock) {
            self.end_filter(false);
        }
    }

    fn choose(&mut self, row: usize) {
        if self.open_lock {
            return;
        }
        let row = row.min(self.queues().count().saturating_sub(1));
        let chosen = self.queues().nth(row).map(|queue| queue.key.clone());
        self.chosen = chosen;
    }

    fn sort_queues(&mut self) {
        match self.sort {
            Sort::Waiters => self.queues.sort_by(|a, b| b.waiters.cmp(&a.waiters).then_with(|| a.key.cmp(&b.key))),
            Sort::Oldest => self.queues.sort_by(|a, b| b.oldest.cmp(&a.oldest).then_with(|| a.key.cmp(&b.key))),
            Sort::Held => self.queues.sort_by(|a, b| b.held.cmp(&a.held).then_with(|| a.key.cmp(&b.key))),
            Sort::Key => self.queues.sort_by(|a, b| a.key.cmp(&b.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn queue(key: &str, waiters: i64, oldest: i64) -> Queue {
        Queue {
            server: "s".to_owned(),
            key: key.into(),
            waiters,
            oldest,
            holders: Vec::new(),
            cached: 0,
            ttl: -1,
            held: Some(waiters),
        }
    }

    fn keys(state: &State) -> String {
        state.queues().map(|queue| String::from_utf8_lossy(&queue.key).into_owned()).collect()
    }

    #[test]
    fn selection_stays_when_order_changes() {
        let mut state = State::default();
        state.update(vec![queue("a", 1, 30), queue("b", 3, 20), queue("c", 2, 10)], Some(0), Instant::now());
        assert_eq!((keys(&state).as_str(), state.row()), ("bca", Some(0)));
        state.down();
        state.next_sort();
        assert_eq!((keys(&state).as_str(), state.row()), ("abc", Some(2)));
        state.next_sort();
        assert_eq!((keys(&state).as_str(), state.row()), ("bca", Some(1)), "by hold");
        state.next_sort();
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
    fn detail_view_stays_until_closed() {
        let mut state = State::default();
        state.enter();
        assert_eq!(state.open_lock(), None, "no row is selected");
        state.update(vec![queue("a", 1, 1)], Some(0), Instant::now());
        state.enter();
        assert!(state.needs_details());
        state.set_details(LockDetails { key: "a".to_owned(), lock: None, waiters: Vec::new() });
        state.update(Vec::new(), Some(0), Instant::now());
        assert_eq!(state.open_lock(), Some(&b"a"[..]));
        assert!(state.details().is_some());
        state.leave();
        assert!(state.details().is_none());
    }

    #[test]
    fn filter_shows_keys_that_contain_its_text() {
        let mut state = State::default();
        state.update(vec![queue("job:1", 3, 1), queue("job:2", 2, 1), queue("cart", 1, 1)], Some(0), Instant::now());
        state.begin_filter();
        assert!(state.is_typing());
        "car".chars().for_each(|letter| state.type_filter(Some(letter)));
        assert_eq!((keys(&state).as_str(), state.row()), ("cart", Some(0)));
        state.end_filter(true);
        assert_eq!((state.is_typing(), state.filter(), keys(&state).as_str()), (false, "car", "cart"));
        state.begin_filter();
        state.type_filter(Some('x'));
        assert_eq!((keys(&state).as_str(), state.row()), ("", None));
        state.type_filter(None);
        assert_eq!(keys(&state), "job:1job:2cart");
        state.type_filter(Some('2'));
        state.end_filter(true);
        state.enter();
        assert_eq!(state.open_lock(), Some(&b"job:2"[..]));
        state.leave();
        assert_eq!(state.filter(), "2");
        state.leave();
        assert_eq!(state.filter(), "");
    }

    #[test]
    fn hand_offs_are_counted_between_refreshes() {
        let mut state = State::default();
        let now = Instant::now();
        state.update(Vec::new(), Some(100), now);
        assert_eq!(state.rate(), None);
        state.update(Vec::new(), Some(150), now + Duration::from_secs(2));
        assert_eq!(state.rate(), Some(25.0));
        state.update(Vec::new(), Some(3), now + Duration::from_secs(3));
        assert_eq!(state.rate(), Some(0.0));
    }
}
