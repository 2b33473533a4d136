//! Commands as lines: words between single spaces.

use std::{io, thread};

use redis::Cmd;
use support::resp::{self, Request};
use support::{Raw, Server};

/// The line as a command of the client library.
pub fn command(line: &str) -> Cmd {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap_or_default());
    words.for_each(|word| {
        command.arg(word);
    });
    command
}

/// Sends the line over a new connection, without reading the reply.
pub fn send(server: &Server, line: &str) -> io::Result<Raw> {
    let mut raw = server.raw();
    raw.send_bytes(Request::typed(line).bytes())?;
    Ok(raw)
}

/// Makes a connection a session, and returns its id. A thread reads its events for as long as the connection lasts.
pub fn reading_session(mut raw: Raw) -> io::Result<String> {
    let id = resp::session_id(&raw.call(&[b"LOCK.SESSION"]))?;
    thread::spawn(
        move || while raw.send(&[b"LOCK.EVENTS", b"WAIT", b"0", b"HEARTBEAT"]).is_ok() && raw.read().is_ok() {},
    );
    Ok(id)
}
