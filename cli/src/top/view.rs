//! The view of `top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use super::state::{LockDetails, Sort, State};
use crate::inspect::{Queue, shown};
use crate::report::table;
use crate::show;
use crate::times;

const TITLES: [&str; 6] = ["KEY", "WAITERS", "OLDEST", "HELD", "LEASE", "HOLDER"];

/// The table as text.
pub fn text(queues: &[Queue]) -> String {
    table(&TITLES, &queues.iter().map(|queue| cells(queue).to_vec()).collect::<Vec<_>>())
}

/// The screen.
pub fn draw(frame: &mut Frame, state: &State) {
    let areas = Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]);
    let [head, body, foot] = areas.areas(frame.area());
    frame.render_widget(Paragraph::new(summary(state)).style(Modifier::BOLD), head);
    match state.details() {
        Some(details) => frame.render_widget(Paragraph::new(Text::from(details_text(details))), body),
        None => {
            let mut chosen = TableState::default().with_selected(state.row());
            frame.render_stateful_widget(queues(state), body, &mut chosen);
        }
    }
    frame.render_widget(last_line(state), foot);
}

fn summary(state: &State) -> String {
    let waiters: i64 = state.queues().map(|queue| queue.waiters).sum();
    let rate = state.rate().map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
    let longest = state.queues().filter_map(|queue| queue.held).max().map_or_else(|| "-".to_owned(), times::show);
    let (locks, waiters) = (counted(state.queues().count() as i64, "contended lock"), counted(waiters, "waiter"));
    format!("{locks}, {waiters}, {rate} waits/s, longest hold {longest}")
}

fn counted(count: i64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn queues(state: &State) -> Table<'_> {
    let title = |name: &str| {
        let sort = match state.sort() {
            Sort::Waiters => "WAITERS",
            Sort::Oldest => "OLDEST",
            Sort::Held => "HELD",
            Sort::Key => "KEY",
        };
        let sorted = sort == name;
        Cell::from(if sorted { format!("{name} ▾") } else { name.to_owned() })
    };
    let [number, time] = [9, 8].map(Constraint::Length);
    let widths = [Constraint::Fill(2), number, time, time, time, Constraint::Fill(3)];
    Table::new(state.queues().map(|queue| Row::new(cells(queue))), widths)
        .header(Row::new(TITLES.map(title)).style(Color::Cyan))
        .row_highlight_style(Modifier::REVERSED)
}

fn cells(queue: &Queue) -> [String; 6] {
    let holders = match queue.holders.as_slice() {
        [] => "-".to_owned(),
        [one] => shown(one),
        [first, others @ ..] => format!("{} and {} more", shown(first), others.len()),
    };
    // The client was notified of contention, and releases the lock as soon as it is unused.
    let holders = if queue.cached > 0 { format!("{holders} (cached)") } else { holders };
    let held = queue.held.map_or_else(|| "-".to_owned(), times::show);
    [shown(&queue.key), queue.waiters.to_string(), times::show(queue.oldest), held, times::show(queue.ttl), holders]
}

fn details_text(details: &LockDetails) -> String {
    match &details.lock {
        Some(lock) => show::text(lock, &details.waiters),
        None => format!("{} is free", details.key),
    }
}

fn last_line(state: &State) -> Line<'_> {
    let red = Style::from(Color::Red);
    match (state.failure(), state.open_lock()) {
        (Some(failure), _) => Line::styled(failure.lines().next().unwrap_or_default(), red),
        (None, Some(_)) => Line::from("Esc back  q quit"),
        (None, None) if state.is_typing() => Line::from(format!("/{}▏  Enter keep  Esc all", state.filter())),
        (None, None) if state.filter().is_empty() => Line::from("↑↓ select  Enter details  s sort  / filter  q quit"),
        (None, None) => Line::from(format!("/{}  Esc all  ↑↓ select  Enter details  s sort  q quit", state.filter())),
    }
}
