//! A proxy between clients and a server that forwards, delays, drops or cuts, message by message.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::resp::Replies;

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A request.
    Server,
    /// A reply.
    Client,
}

/// What the proxy does with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Forwards it.
    Pass,
    /// Holds it, and those behind it, until the rule decides otherwise. It is then forwarded even if its sender is gone.
    Hold,
    /// Drops it without notice to the sender.
    Drop,
    /// Drops it, and closes the connections to both sides.
    Cut,
    /// Forwards it, and then closes the connections to both sides.
    Last,
    /// Forwards these bytes instead.
    Instead(Vec<u8>),
}

type Rule = Box<dyn FnMut(usize, Direction, &[u8]) -> Fate + Send>;

/// A proxy with its own port. Every connection to it is one to the server. Dropping it ends it.
pub struct Proxy {
    address: SocketAddr,
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    target: SocketAddr,
    rule: Rule,
    refusing: bool,
    silent: bool,
    streams: Vec<TcpStream>,
    /// The number of connections so far.
    flows: usize,
    /// Each direction of each connection has an entry.
    open: Arc<()>,
}

impl Proxy {
    /// Forwards everything to this address until a rule is set.
    pub fn to(target: SocketAddr) -> Self {
        Self::at(Ipv4Addr::LOCALHOST, target)
    }

    /// The same, listening on this address of the machine.
    pub fn at(own: Ipv4Addr, target: SocketAddr) -> Self {
        let listener = TcpListener::bind((own, 0)).expect("the system has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let state = State::new(target, false);
        let inner = Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() });
        let accepting = inner.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if Arc::strong_count(&accepting) == 1 {
                    return;
                }
                // If the server is not there, the connection is closed.
                let _ = accept(&accepting, stream);
            }
        });
        Self { address, inner }
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Sets the rule for every message, including held ones. Messages are complete.
    pub fn rule(&self, mut rule: impl FnMut(Direction, &[u8]) -> Fate + Send + 'static) {
        let mut whole =
            move |toward, message: &[u8]| if message.is_empty() { Fate::Pass } else { rule(toward, message) };
        self.rule_by_flow(move |_, toward, message| whole(toward, message));
    }

    /// The same, with the connection's number, in order of arrival. The end of a side's connection is an empty message.
    pub fn rule_by_flow(&self, rule: impl FnMut(usize, Direction, &[u8]) -> Fate + Send + 'static) {
        self.inner.state().rule = Box::new(rule);
        self.inner.changed.notify_all();
    }

    /// The number of connections so far.
    pub fn flows(&self) -> usize {
        self.inner.state().flows
    }

    /// The number of connections that have not ended in both directions.
    pub fn connections(&self) -> usize {
        (Arc::strong_count(&self.inner.state().open) - 1).div_ceil(2)
    }

    /// Forwards everything from now on, including held messages.
    pub fn pass(&self) {
        self.rule(|_, _| Fate::Pass);
    }

    /// Closes all connections, and refuses new ones until [`accept`](Self::accept).
    pub fn refuse(&self) {
        self.inner.state().refusing = true;
        self.cut();
    }

    /// Forwards nothing in either direction, not even the end of a connection, until [`accept`](Self::accept): then all of it.
    pub fn silence(&self) {
        self.inner.state().silent = true;
    }

    /// Accepts new connections again, and forwards what arrived while it was silent.
    pub fn accept(&self) {
        let mut state = self.inner.state();
        (state.refusing, state.silent) = (false, false);
        drop(state);
        self.inner.changed.notify_all();
    }

    /// Forwards new connections to another server, and closes the existing ones.
    pub fn redirect_to(&self, target: SocketAddr) {
        self.inner.state().target = target;
        self.cut();
    }

    /// Closes all connections. New ones are accepted.
    pub fn cut(&self) {
        for stream in self.inner.state().streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accept();
        self.pass();
        self.cut();
        let target = self.address;
        self.inner = Arc::new(Inner { state: Mutex::new(State::new(target, true)), changed: Condvar::new() });
        // Wakes the listener, which then ends.
        let _ = TcpStream::connect(target);
    }
}

impl State {
    fn new(target: SocketAddr, refusing: bool) -> Self {
        Self {
            target,
            rule: Box::new(|_, _, _| Fate::Pass),
            refusing,
            silent: false,
            streams: Vec::new(),
            flows: 0,
            open: Arc::default(),
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on a message, and waits while it is held.
    fn fate(&self, flow: usize, toward: Direction, message: &[u8]) -> Fate {
        let mut state = self.state();
        loop {
            if state.silent {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            match (state.rule)(flow, toward, message) {
                Fate::Hold => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                fate => return fate,
            }
        }
    }
}

fn accept(inner: &Arc<Inner>, client: TcpStream) -> io::Result<()> {
    let target = {
        let state = inner.state();
        if state.refusing {
            return Ok(());
        }
        state.target
    };
    let server = TcpStream::connect(target)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (flow, open) = {
        let mut state = inner.state();
        state.streams.extend([client.try_clone()?, server.try_clone()?]);
        state.flows += 1;
        (state.flows, state.open.clone())
    };
    let ways = [(Direction::Server, client.try_clone()?, server.try_clone()?), (Direction::Client, server, client)];
    for (toward, from, to) in ways {
        let (inner, open) = (inner.clone(), open.clone());
        thread::spawn(move || {
            let _ = hand_on(&inner, flow, toward, &from, &to);
            let _ = from.shutdown(Shutdown::Read);
            let _ = to.shutdown(Shutdown::Write);
            drop(open);
        });
    }
    Ok(())
}

fn hand_on(inner: &Inner, flow: usize, toward: Direction, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    let mut messages = Replies::default();
    let mut buffer = [0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            inner.fate(flow, toward, &[]);
            return Ok(());
        }
        messages.feed(buffer.get(..length).unwrap_or_default());
        while let Some(message) = messages.next_bytes()? {
            let fate = inner.fate(flow, toward, &message);
            match &fate {
                Fate::Pass | Fate::Hold | Fate::Last => to.write_all(&message)?,
                Fate::Instead(other) => to.write_all(other)?,
                Fate::Drop | Fate::Cut => {}
            }
            match fate {
                Fate::Pass | Fate::Hold | Fate::Drop | Fate::Instead(_) => {}
                Fate::Cut | Fate::Last => {
                    from.shutdown(Shutdown::Both)?;
                    to.shutdown(Shutdown::Both)?;
                    return Ok(());
                }
            }
        }
    }
}
