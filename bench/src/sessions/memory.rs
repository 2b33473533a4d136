//! The server's memory for a waiting request of a session.

use anyhow::{Result, bail};
use support::resp;

use crate::client::Client;
use crate::contenders::{Answer, Contender, Holdfast, List, Lock, Redisson, Session};
use crate::memory::{self, LEASE};
use crate::server::{Program, Running};
use crate::settings::Scale;
use crate::stats::Spread;

/// The number of sessions.
pub const SESSIONS: usize = 10;
/// The limit on the growth of `used_memory` for one request.
const MOST: f64 = 1_200.0;

/// A line of the result.
#[derive(serde::Serialize)]
pub struct Row {
    pub server: String,
    pub name: String,
    pub count: usize,
    /// Growth of `used_memory` for one.
    pub bytes: f64,
    /// The limit, if there is one.
    pub most: Option<f64>,
}

/// Measures a waiting request of each contender, each on its own server.
pub fn measure(scale: &Scale, program: &Program) -> Result<Vec<Row>> {
    let row =
        |name: &str, count, bytes, most| Row { server: program.label.clone(), name: name.into(), count, bytes, most };
    let mut rows = Vec::new();
    for (locks, name) in [(1, "one lock"), (scale.session_waits, "a lock for each")] {
        let bytes = of_sessions(&mut memory::fresh(program)?, scale, locks)?;
        rows.push(row(&format!("{}, {name}", Session::NAME), scale.session_waits, bytes, Some(MOST)));
    }
    for name in [Holdfast::PLAIN.name(), List::NAME, "redisson"] {
        let mut server = memory::fresh(program)?;
        let contender: Box<dyn Contender> = match name {
            List::NAME => Box::new(List),
            "redisson" => Box::new(Redisson::load(&mut server.control)?),
            _ => Box::new(Holdfast::PLAIN),
        };
        let bytes = memory::waiting(&mut server, contender, scale)?;
        rows.push(row(&format!("{name}, a connection for each"), scale.waiters, bytes, None));
    }
    Ok(rows)
}

/// The limit of a row, if it has one.
pub fn goal(row: &Row) -> Option<crate::report::Goal> {
    let what = format!("bytes of a waiting request, {} of them, {} ({})", row.count, row.name, row.server);
    let measured = Spread { median: row.bytes, min: row.bytes, max: row.bytes };
    row.most.map(|most| crate::report::Goal::at_most(what, most, measured))
}

/// Requests over ten sessions that wait for this many locks, all of which are held.
fn of_sessions(server: &mut Running, scale: &Scale, locks: usize) -> Result<f64> {
    let key = |number: usize| format!("lock:{:08}", number % locks);
    let held = (0..locks).map(|number| Holdfast::PLAIN.acquire(&Lock::new(key(number), scale.session_waits, LEASE)));
    server.control.pipeline(held, 100, |reply| is(&reply, |answer| answer == Answer::Granted))?;
    let sessions = (0..SESSIONS).map(|_| Client::connect(server.port())).collect::<Result<Vec<_>>>()?;
    let mut names = Vec::new();
    for mut session in sessions {
        names.push((resp::session_id(&session.call(&["LOCK.SESSION"])?)?, session));
    }
    for (_, session) in &mut names {
        session.send(support::resp::Request::typed(Session::NEXT).bytes())?;
    }
    let before = memory::settled_memory(server, scale)?;
    let waits = (0..scale.session_waits).map(|number| {
        let mut lock = Lock::new(key(number), number, LEASE);
        lock.session = Some(names[number % SESSIONS].0.as_str().into());
        Session.wait(&lock)
    });
    server.control.pipeline(waits, 100, |reply| is(&reply, |answer| answer != Answer::Granted))?;
    let bytes = (memory::settled_memory(server, scale)? - before) / scale.session_waits as f64;
    let waiting: usize = server.control.info("holdfast", "holdfast_session_waits")?.parse()?;
    if waiting != scale.session_waits {
        bail!("of {} requests {waiting} wait", scale.session_waits);
    }
    Ok(bytes)
}

fn is(reply: &support::resp::Value, expected: impl Fn(Answer) -> bool) -> Result<()> {
    if expected(Session.answer(reply)?) { Ok(()) } else { bail!("unexpected reply {reply:?}") }
}
