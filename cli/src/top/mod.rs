//! `holdfast top`: the locks with the longest queues, live.

mod state;
mod view;

use std::io::{IsTerminal, stdout};
use std::time::{Duration, Instant};

use holdfast_client::Locks;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use self::state::{LockDetails, State};
use crate::args::Top;
use crate::failure::Failure;
use crate::inspect::{Queue, Server, failed, failed_at, server_of, servers, shown};
use crate::report::print;

/// The maximum number of locks that a server returns.
const MOST: usize = 1_000;
/// The maximum number of waiters shown for one lock.
const SHOWN: usize = 200;

/// Prints the table once, or shows it until the user quits.
pub async fn top(locks: &Locks, task: &Top) -> Result<u8, Failure> {
    if task.json {
        print(&lines(locks, task.count).await?)?;
        return Ok(0);
    }
    if task.once || !stdout().is_terminal() {
        let (queues, _) = read_queues(locks, task.count).await?;
        print(&view::text(&queues))?;
        return Ok(0);
    }
    // Connection errors are printed before the screen is switched.
    read_queues(locks, task.count).await?;
    // A panic restores the screen as well.
    let mut terminal = ratatui::try_init().map_err(|error| Failure::of("terminal", &error, "use --once"))?;
    let outcome = run(&mut terminal, locks, task).await;
    ratatui::restore();
    outcome
}

async fn run(terminal: &mut DefaultTerminal, locks: &Locks, task: &Top) -> Result<u8, Failure> {
    let mut keys = keys();
    let mut state = State::default();
    let mut ticks = tokio::time::interval(task.interval.max(Duration::from_millis(1)));
    loop {
        terminal.draw(|frame| view::draw(frame, &state)).map_err(|error| Failure::here(&error))?;
        tokio::select! {
            _ = ticks.tick() => renew(locks, task, &mut state).await,
            event = keys.recv() => match event {
                None => return Ok(0),
                Some(Event::Key(key)) if key.kind == KeyEventKind::Press => {
                    if !pressed(&mut state, key) {
                        return Ok(0);
                    }
                    if state.needs_details() {
                        renew(locks, task, &mut state).await;
                    }
                }
                // The window size has changed: draw again.
                Some(_) => {}
            },
        }
    }
}

/// Handles a key. Returns false to quit.
fn pressed(state: &mut State, key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char(letter) if state.is_typing() => state.type_filter(Some(letter)),
        KeyCode::Backspace if state.is_typing() => state.type_filter(None),
        KeyCode::Enter if state.is_typing() => state.end_filter(true),
        KeyCode::Esc if state.is_typing() => state.end_filter(false),
        KeyCode::Char('q') => return false,
        KeyCode::Char('/') => state.begin_filter(),
        KeyCode::Down | KeyCode::Char('j') => state.down(),
        KeyCode::Up | KeyCode::Char('k') => state.up(),
        KeyCode::Char('s') => state.next_sort(),
        KeyCode::Enter => state.enter(),
        KeyCode::Esc | KeyCode::Backspace => state.leave(),
        _ => {}
    }
    true
}

/// Keys, read in a thread because reading blocks.
fn keys() -> UnboundedReceiver<Event> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn renew(locks: &Locks, task: &Top, state: &mut State) {
    // All queues, because the filter may choose others than the longest.
    let count = if state.filter().is_empty() && !state.is_typing() { task.count } else { MOST };
    match read_queues(locks, count).await {
        Ok((queues, ended)) => state.update(queues, ended, Instant::now()),
        Err(failure) => state.failed(failure.to_string()),
    }
    if let Some(key) = state.open_lock() {
        let key = key.to_vec();
        match read_details(locks, &key).await {
            Ok(read_queues) => state.set_details(read_queues),
            Err(failure) => state.failed(failure.to_string()),
        }
    }
}

/// The longest queues of all servers, and the number of waits that have ended, if this user may read it.
async fn read_queues(locks: &Locks, count: usize) -> Result<(Vec<Queue>, Option<u64>), Failure> {
    let (mut queues, mut ended) = (Vec::new(), Some(0));
    for mut server in servers(locks).await? {
        let mut its = server.top(count).await.map_err(|error| failed_at(&server, &error))?;
        server.add_holds(&mut its).await;
        queues.extend(its);
        ended = ended.zip(ended_waits(&mut server).await).map(|(before, here)| before + here);
    }
    queues.sort_by_key(|queue| std::cmp::Reverse(queue.waiters));
    Ok((queues, ended))
}

async fn ended_waits(server: &mut Server) -> Option<u64> {
    let info = server.info(&["holdfast"]).await.ok()?;
    let field = |name: &str| info.iter().find(|(it, _)| it == name)?.1.parse::<u64>().ok();
    Some(field("holdfast_grants_queued")? + field("holdfast_timeouts")?)
}

/// The longest queues of all servers, one line of JSON for each lock.
async fn lines(locks: &Locks, count: usize) -> Result<String, Failure> {
    let mut found = Vec::new();
    for mut server in servers(locks).await? {
        let queues = server.top(count).await.map_err(|error| failed_at(&server, &error))?;
        let keys: Vec<_> = queues.iter().map(|queue| queue.key.clone()).collect();
        // A lock that is free by now is left out.
        let (there, _) = server.locks(&keys).await.map_err(|error| failed_at(&server, &error))?;
        for lock in there {
            let oldest = queues.iter().find(|queue| queue.key == lock.key).map_or(0, |queue| queue.oldest);
            found.push((lock.waiters, lock.json().with_oldest(oldest)));
        }
    }
    found.sort_by_key(|(waiters, _)| std::cmp::Reverse(*waiters));
    Ok(found.iter().map(|(_, line)| line.to_string()).collect())
}

async fn read_details(locks: &Locks, name: &[u8]) -> Result<LockDetails, Failure> {
    let mut server = server_of(locks, name).await?;
    let lock = server.lock(name).await.map_err(|error| failed(&server, name, &error))?;
    let waiters = server.waiters(name, SHOWN).await.map_err(|error| failed(&server, name, &error))?;
    Ok(LockDetails { key: shown(name), lock, waiters })
}
