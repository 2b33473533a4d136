//! When a session must get a heartbeat.

use super::{key, new_binding, owner};
use crate::lock::{Deadline, Millis};
use crate::server::callbacks::Ticket;
use crate::state::pending::Reader;
use crate::state::sessions::pace;
use crate::state::{BindingFlags, HeartbeatMode, NewBinding, Reading, Stage, State};

const SESSION: u64 = 1;
const NOW: Millis = 1000;

fn binding(number: u8, lease: Millis, watchdog: bool) -> NewBinding {
    let flags = BindingFlags { watchdog, ephemeral: !watchdog, contention: false };
    let deadline = Deadline::At(NOW + lease);
    NewBinding { flags, lease, deadline, ..new_binding(SESSION, key(number), owner(number), 1) }
}

/// The state with a session whose reader gets its heartbeat at `until`.
fn state(until: Option<Millis>) -> State {
    let mut state = State::default();
    state.sessions.open(SESSION);
    let reading = Reading { most: 1, signs: HeartbeatMode::Wanted, asked: 0, until };
    state.pending.set(Ticket(7), Stage::Reading(Box::new(Reader { client: SESSION, reading, block: None })));
    state.sessions.set_reader(SESSION, Some(Ticket(7)));
    state
}

#[test]
fn pace_is_an_eighth_of_lease_within_bounds() {
    assert_eq!([0, 1, 80, 88, 800, 80_000, Millis::MAX].map(pace), [10, 10, 10, 11, 100, 10_000, 10_000]);
}

#[test]
fn reader_is_answered_when_heartbeat_would_be_late() {
    for (until, answered) in [(Some(NOW + 101), true), (Some(NOW + 100), false), (None, true)] {
        let mut state = state(until);
        state.bind(binding(1, 800, true), NOW);
        assert_eq!(state.pending.is_ending(), answered, "{until:?}");
    }
    let mut state = state(Some(NOW + 5000));
    state.bind(binding(1, 800, false), NOW);
    assert!(!state.pending.is_ending(), "no read keeps it alive");
}

#[test]
fn pace_is_that_of_shortest_lease() {
    let mut state = state(None);
    assert_eq!(state.pace(SESSION, 1600), 200, "that of the default");
    state.bind(binding(1, 800, true), NOW);
    state.bind(binding(2, 2400, true), NOW);
    assert_eq!(state.pace(SESSION, 1600), 100);
}

/// A longer lease makes no heartbeat later than was promised.
#[test]
fn promised_pace_is_kept() {
    let mut state = state(None);
    assert_eq!(state.sessions.promised_pace(SESSION, 100), 100);
    state.sessions.promise_pace(SESSION, 50);
    assert_eq!([20, 50, 100].map(|pace| state.sessions.promised_pace(SESSION, pace)), [20, 50, 50]);
    assert_eq!(state.sessions.promised_pace(SESSION + 1, 100), 100);
}

/// A session that was promised a heartbeat has to ask for it.
#[test]
fn session_that_does_not_ask_is_silent() {
    let mut state = state(None);
    state.sessions.open(2);
    state.sessions.expect_within(SESSION, 50, 0);
    state.sessions.expect_within(2, 40, 0);
    state.sessions.expect_within(SESSION, 60, 0);
    assert_eq!((state.sessions.first_silence(), state.sessions.take_silent(39)), (Some(40), None));
    assert_eq!((state.sessions.take_silent(40), state.sessions.take_silent(40)), (Some(2), None));
    state.read_by(SESSION);
    assert_eq!(state.sessions.first_silence(), None);
    state.sessions.expect_within(SESSION, 70, 0);
    state.sessions.client_gone(SESSION);
    state.sessions.expect_within(SESSION, 80, 0);
    assert_eq!(state.sessions.first_silence(), None);
}

/// A session with no bound hold and no waiting request is not silent. Once it has one, its time starts anew.
#[test]
fn idle_session_is_expected_once_a_hold_is_bound() {
    let mut state = state(None);
    state.sessions.expect_within(SESSION, 50, 0);
    assert_eq!(state.sessions.take_silent(60), Some(SESSION));
    assert!(!state.is_needed(SESSION));
    state.sessions.expect_nothing(SESSION);
    assert_eq!(state.sessions.first_silence(), None);
    state.bind(binding(1, 800, true), NOW);
    assert!(state.is_needed(SESSION));
    assert_eq!(state.sessions.first_silence(), Some(NOW + 50));
    assert_eq!(state.sessions.take_silent(NOW + 50), Some(SESSION));
    state.bind(binding(2, 800, true), NOW + 60);
    assert_eq!(state.sessions.first_silence(), None, "once");
}

/// A session that is blocked in another command can't ask. After that, its time starts once more.
#[test]
fn session_that_was_blocked_in_another_command_is_expected_again() {
    let mut state = state(None);
    state.sessions.expect_within(SESSION, 50, 0);
    for (now, is_blocked, may_be) in [(50, true, true), (100, true, true), (150, false, true), (200, false, false)] {
        assert_eq!(state.sessions.take_silent(now), Some(SESSION), "at {now}");
        assert_eq!(state.sessions.excuse_blocked(SESSION, is_blocked, now), may_be, "at {now}");
    }
    assert_eq!(state.sessions.first_silence(), None);
}

/// The deadline of a silent session follows a step of the server's clock.
#[test]
fn silence_follows_a_step_of_the_clock() {
    let mut state = state(None);
    state.sessions.expect_within(SESSION, 50, 0);
    state.sessions.stepped(1_000);
    assert_eq!((state.sessions.first_silence(), state.sessions.take_silent(1_049)), (Some(1_050), None));
    assert_eq!(state.sessions.take_silent(1_050), Some(SESSION));
}
