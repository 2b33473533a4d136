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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is handed on.
    Pass,
    /// It waits, and those behind it, until the rule says otherwise. It is handed on then even if who sent it is gone.
    Hold,
    /// It is lost, and the sender does not hear of it.
    Drop,
    /// It is lost, and both sides are told by the end of their connections.
    Cut,
}

type Rule = Box<dyn FnMut(Toward, &[u8]) -> Fate + Send>;

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
    streams: Vec<TcpStream>,
}

impl Proxy {
    /// Hands everything on to this address until told otherwise.
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the system has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let state = State { target, rule: Box::new(|_, _| Fate::Pass), refusing: false, streams: Vec::new() };
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
    pub fn rule(&self, rule: impl FnMut(Toward, &[u8]) -> Fate + Send + 'static) {
        self.inner.state().rule = Box::new(rule);
        self.inner.changed.notify_all();
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

    /// Takes new connections again.
    pub fn accept(&self) {
        self.inner.state().refusing = false;
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
        self.pass();
        self.cut();
        let target = self.address;
        self.inner = Arc::new(Inner {
            state: Mutex::new(State { target, rule: Box::new(|_, _| Fate::Pass), refusing: true, streams: Vec::new() }),
            changed: Condvar::new(),
        });
        // Wakes the listener, which finds that it is alone.
        let _ = TcpStream::connect(target);
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What becomes of a message, once that is decided.
    fn fate(&self, toward: Toward, message: &[u8]) -> Fate {
        let mut state = self.state();
        loop {
            match (state.rule)(toward, message) {
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
    inner.state().streams.extend([client.try_clone()?, server.try_clone()?]);
    let ways = [(Toward::Server, client.try_clone()?, server.try_clone()?), (Toward::Client, server, client)];
    for (toward, from, to) in ways {
        let inner = inner.clone();
        thread::spawn(move || {
            let _ = hand_on(&inner, toward, &from, &to);
            let _ = from.shutdown(Shutdown::Read);
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(())
}

fn hand_on(inner: &Inner, toward: Toward, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    let mut messages = Replies::default();
    let mut buffer = [0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        messages.feed(buffer.get(..length).unwrap_or_default());
        while let Some(message) = messages.next_bytes()? {
            match inner.fate(toward, &message) {
                Fate::Pass | Fate::Hold => to.write_all(&message)?,
                Fate::Drop => {}
                Fate::Cut => {
                    from.shutdown(Shutdown::Both)?;
                    to.shutdown(Shutdown::Both)?;
                    return Ok(());
                }
            }
        }
    }
}
