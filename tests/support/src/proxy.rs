//! A proxy between a client and a server, that hands on, holds up, drops or cuts, message by message.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::resp::Replies;

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toward {
    /// A request.
    Server,
    /// A reply.
    Client,
}

/// What becomes of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is handed on.
    Pass,
    /// It waits, and those behind it, until the rule says otherwise. It is handed on then even if who sent it is gone.
    Hold,
    /// It is lost, and the sender does not hear of it.
    Drop,
    /// It is lost, and both sides are told by the end of their connections.
    Cut,
    /// It is handed on, and then both sides are told by the end of their connections.
    Last,
    /// This is handed on in its place.
    Instead(Vec<u8>),
}

type Rule = Box<dyn FnMut(usize, Toward, &[u8]) -> Fate + Send>;

/// A proxy on a port of its own. Every connection to it is one to the server. It ends when dropped.
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
    /// How many connections there were.
    flows: usize,
    /// Each way of each connection has a part in it.
    open: Arc<()>,
}

impl Proxy {
    /// Hands everything on to this address until told otherwise.
    pub fn to(target: SocketAddr) -> Self {
        Self::at(Ipv4Addr::LOCALHOST, target)
    }

    /// The same, with this address of the machine's own.
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
                // A server that is not there is a connection that ends.
                let _ = accept(&accepting, stream);
            }
        });
        Self { address, inner }
    }

    /// Where to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// From now on this decides on every message, those that are held included. Messages come whole.
    pub fn rule(&self, mut rule: impl FnMut(Toward, &[u8]) -> Fate + Send + 'static) {
        let mut whole =
            move |toward, message: &[u8]| if message.is_empty() { Fate::Pass } else { rule(toward, message) };
        self.rule_by_flow(move |_, toward, message| whole(toward, message));
    }

    /// The same, told which connection it is: they are numbered as they come. That a side has ended its connection is a message
    /// without bytes.
    pub fn rule_by_flow(&self, rule: impl FnMut(usize, Toward, &[u8]) -> Fate + Send + 'static) {
        self.inner.state().rule = Box::new(rule);
        self.inner.changed.notify_all();
    }

    /// How many connections there were so far.
    pub fn flows(&self) -> usize {
        self.inner.state().flows
    }

    /// How many connections there are that have not ended in both directions.
    pub fn connections(&self) -> usize {
        (Arc::strong_count(&self.inner.state().open) - 1).div_ceil(2)
    }

    /// Hands on everything from now on, what is held included.
    pub fn pass(&self) {
        self.rule(|_, _| Fate::Pass);
    }

    /// Ends all connections, and refuses new ones until [`accept`](Self::accept).
    pub fn refuse(&self) {
        self.inner.state().refusing = true;
        self.cut();
    }

    /// Hands on nothing more in either direction, not even that a connection has ended, until [`accept`](Self::accept): then all of it.
    pub fn silence(&self) {
        self.inner.state().silent = true;
    }

    /// Takes new connections again, and hands on what came while it was silent.
    pub fn accept(&self) {
        let mut state = self.inner.state();
        (state.refusing, state.silent) = (false, false);
        drop(state);
        self.inner.changed.notify_all();
    }

    /// Hands new connections on to another server, and ends those that there are.
    pub fn turn_to(&self, target: SocketAddr) {
        self.inner.state().target = target;
        self.cut();
    }

    /// Ends all connections. New ones are taken.
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
        // Wakes the listener, which finds that it is alone.
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

    /// What becomes of a message, once that is decided.
    fn fate(&self, flow: usize, toward: Toward, message: &[u8]) -> Fate {
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
    let ways = [(Toward::Server, client.try_clone()?, server.try_clone()?), (Toward::Client, server, client)];
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

fn hand_on(inner: &Inner, flow: usize, toward: Toward, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
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
