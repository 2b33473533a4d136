//! Many clients of one contender, each with its own connection, in one thread.
//!
//! Clients with sessions (`LOCK.EVENTS`) are tasks of processes. The tasks of one process share a connection for requests, which are
//! sent together once all incoming data is processed, and one for events.
//!
//! [`want`](ClientPool::want) makes a client request its lock, and [`release`](ClientPool::release) makes it release it. [`next`](ClientPool::next)
//! returns the outcomes. In between, clients wait as their contender does: in the server's queue, by polling, by subscribing to the
//! channel, or by reading the events of a session.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use mio::{Events, Interest, Poll, Token, net::TcpStream};
use support::Random;
use support::resp::{self, Replies, Request, Value};

use crate::alarm::Alarm;
use crate::contenders::{Answer, Contender, Lock, Redisson, Session, Waiting};

/// Waiting Redisson clients are threads of at most this many processes. Up to this number, each is a process of its own.
const PROCESSES: usize = 100;

/// An outcome for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The client has its lock. The instant is when the reply was read.
    Granted(usize, Instant),
    /// The server has confirmed the release.
    Released(usize),
    /// The client waits for its lock. With a queue in the server, this is returned when the request is sent: the server reads it before
    /// all that is sent later.
    Waits(usize),
}

/// The network traffic of all connections.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    /// Requests sent.
    pub requests: u64,
    /// Bytes in both directions.
    pub bytes: u64,
}

impl std::ops::Sub for Traffic {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self { requests: self.requests - earlier.requests, bytes: self.bytes - earlier.bytes }
    }
}

/// The state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// It has requested the lock. Redisson tries once more when it has subscribed.
    Asking,
    /// Its process is subscribing.
    Subscribing,
    /// It sleeps until its timer, or until a message wakes it.
    Sleeping,
    Holding,
    Releasing,
}

struct Member {
    lock: Lock,
    state: State,
    /// Whether it was refused since its request. A client that subscribes keeps its process' subscription until it has the lock.
    refused: bool,
    /// The number of the current sleep. A timer of an earlier sleep is ignored.
    sleep: u64,
}

/// The subscription of one process to one lock's channel, shared by its threads.
#[derive(Default)]
struct Subscription {
    listeners: usize,
    confirmed: bool,
    awaiting_confirmation: Vec<usize>,
    sleepers: VecDeque<usize>,
    /// Messages without a sleeping thread: the next thread that would sleep tries again instead.
    permits: usize,
}

struct Connection {
    stream: TcpStream,
    replies: Replies,
    unsent: Vec<u8>,
    /// The clients of pending requests, in order; `None` for a request of the process itself.
    asked: VecDeque<usize>,
}

/// Clients 0 to n-1 of one contender.
pub struct ClientPool {
    contender: Box<dyn Contender>,
    poll: Poll,
    events: Events,
    connections: Vec<Connection>,
    members: Vec<Member>,
    /// The first connections are for requests of members. The processes' own connections follow.
    requests: usize,
    processes: usize,
    /// Connections whose requests are sent together.
    unflushed: Vec<usize>,
    alarm: Alarm,
    subscriptions: HashMap<(usize, String), Subscription>,
    timers: BinaryHeap<Reverse<(Instant, usize, u64)>>,
    outcomes: VecDeque<ClientEvent>,
    traffic: Traffic,
    random: Random,
    chunk: Vec<u8>,
}

impl ClientPool {
    /// Connects one client for each lock. Each is a process of its own, up to the limit.
    pub fn connect(port: u16, contender: Box<dyn Contender>, locks: Vec<Lock>) -> Result<Self> {
        let processes = match contender.waiting() {
            Waiting::Listening => locks.len().min(PROCESSES),
            Waiting::Notified | Waiting::Queued | Waiting::Polling(_) => locks.len(),
        };
        Self::of_processes(port, contender, locks, processes)
    }

    /// Connects one client for each lock. They are threads or tasks of this many processes, alternately.
    pub fn of_processes(
        port: u16,
        contender: Box<dyn Contender>,
        mut locks: Vec<Lock>,
        processes: usize,
    ) -> Result<Self> {
        let (requests, processes) = match contender.waiting() {
            Waiting::Listening => (locks.len(), processes),
            Waiting::Notified => (processes, processes),
            Waiting::Queued | Waiting::Polling(_) => (locks.len(), 0),
        };
        let poll = Poll::new()?;
        let alarm = Alarm::new(poll.registry(), Token(requests + processes))?;
        let mut connections =
            (0..requests).map(|index| Connection::open(port, &poll, index)).collect::<Result<Vec<_>>>()?;
        for process in 0..processes {
            let mut connection = Connection::open(port, &poll, requests + process)?;
            if contender.waiting() == Waiting::Notified {
                let session: Arc<str> = connection.begin_session()?.into();
                locks.iter_mut().skip(process).step_by(processes).for_each(|lock| lock.session = Some(session.clone()));
            }
            connections.push(connection);
        }
        let member = |lock| Member { lock, state: State::Idle, refused: false, sleep: 0 };
        Ok(Self {
            contender,
            poll,
            events: Events::with_capacity(1024),
            connections,
            members: locks.into_iter().map(member).collect(),
            requests,
            processes,
            unflushed: Vec::new(),
            alarm,
            subscriptions: HashMap::new(),
            timers: BinaryHeap::new(),
            outcomes: VecDeque::new(),
            traffic: Traffic::default(),
            random: Random::new(),
            chunk: vec![0; 1 << 16],
        })
    }

    /// The number of clients.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// The traffic so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// The client requests its lock.
    pub fn want(&mut self, client: usize) -> Result<()> {
        self.members[client].state = State::Asking;
        let request = self.contender.wait(&self.members[client].lock);
        self.ask(client, &request)?;
        if matches!(self.contender.waiting(), Waiting::Queued | Waiting::Notified) {
            self.outcomes.push_back(ClientEvent::Waits(client));
        }
        Ok(())
    }

    /// An idle client uses the lock `key` from now on.
    pub fn switch_to(&mut self, client: usize, key: &str) {
        key.clone_into(&mut self.members[client].lock.key);
    }

    /// The client releases its lock.
    pub fn release(&mut self, client: usize) -> Result<()> {
        self.members[client].state = State::Releasing;
        let request = self.contender.release(&self.members[client].lock);
        self.ask(client, &request)
    }

    /// The next outcome, or `None` at the deadline.
    pub fn next(&mut self, deadline: Instant) -> Result<Option<ClientEvent>> {
        loop {
            if let Some(event) = self.outcomes.pop_front() {
                return Ok(Some(event));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            for connection in std::mem::take(&mut self.unflushed) {
                self.connections[connection].flush()?;
            }
            let until = self.timers.peek().map_or(deadline, |Reverse((at, ..))| deadline.min(*at));
            self.wait_for_events(until.saturating_duration_since(now))?;
            self.ring_timers()?;
        }
    }

    fn wait_for_events(&mut self, timeout: Duration) -> Result<()> {
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        // epoll's timeout is in milliseconds.
        self.alarm.set(timeout)?;
        let polled = self.poll.poll(&mut events, None);
        if let Err(error) = polled
            && error.kind() != ErrorKind::Interrupted
        {
            return Err(error.into());
        }
        for event in &events {
            let connection = event.token().0;
            if connection == self.connections.len() {
                self.alarm.rang();
                continue;
            }
            if event.is_writable() {
                self.connections[connection].flush()?;
            }
            if event.is_readable() {
                self.read(connection)?;
            }
        }
        self.events = events;
        Ok(())
    }

    fn ring_timers(&mut self) -> Result<()> {
        let now = Instant::now();
        while let Some(Reverse((at, client, sleep))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            if self.members[client].sleep == sleep && self.members[client].state == State::Sleeping {
                self.wake(client)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, connection: usize) -> Result<()> {
        loop {
            let length = match self.connections[connection].stream.read(&mut self.chunk) {
                Ok(0) => bail!("the server closed the connection of client {connection}"),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("reading from the server"),
            };
            let at = Instant::now();
            self.traffic.bytes += length as u64;
            self.connections[connection].replies.feed(&self.chunk[..length]);
            while let Some(reply) = self.connections[connection].replies.next()? {
                if connection < self.requests {
                    let client = self.connections[connection].asked.pop_front();
                    self.replied(client.context("a reply without a request")?, &reply, at)?;
                } else if self.contender.waiting() == Waiting::Notified {
                    self.read_events(connection, &reply, at)?;
                } else {
                    self.pushed(connection - self.requests, reply)?;
                }
            }
            // A short read has emptied the socket. More data causes another event.
            if length < self.chunk.len() {
                return Ok(());
            }
        }
    }

    fn replied(&mut self, client: usize, reply: &Value, at: Instant) -> Result<()> {
        // The grant may have arrived already, over the other connection.
        if self.contender.waiting() == Waiting::Notified && self.contender.answer(reply).is_ok_and(is_busy) {
            return Ok(());
        }
        match self.members[client].state {
            State::Asking => match self.contender.answer(reply)? {
                Answer::Granted => self.granted(client, at),
                Answer::Busy(left) => self.refused(client, left),
            },
            State::Releasing => {
                self.contender.check_released(reply)?;
                self.members[client].state = State::Idle;
                self.outcomes.push_back(ClientEvent::Released(client));
                Ok(())
            }
            state => bail!("{}: {reply:?} for client {client}, which is {state:?}", self.contender.name()),
        }
    }

    fn granted(&mut self, client: usize, at: Instant) -> Result<()> {
        self.members[client].state = State::Holding;
        self.outcomes.push_back(ClientEvent::Granted(client, at));
        let refused = std::mem::take(&mut self.members[client].refused);
        if refused && self.contender.waiting() == Waiting::Listening { self.unsubscribe(client) } else { Ok(()) }
    }

    fn refused(&mut self, client: usize, left: Option<Duration>) -> Result<()> {
        let first = !self.members[client].refused;
        if first {
            self.members[client].refused = true;
            self.outcomes.push_back(ClientEvent::Waits(client));
        }
        match self.contender.waiting() {
            Waiting::Queued | Waiting::Notified => {
                bail!("{}: refused, although the wait has no timeout", self.contender.name())
            }
            Waiting::Polling(pause) => {
                // Clients here request in step with the hand-offs, so they would also poll in step. A first pause of
                // random length makes them independent.
                let pause = if first { pause * self.random.below(1_000) as u32 / 1_000 } else { pause };
                self.sleep(client, Some(pause));
                Ok(())
            }
            Waiting::Listening if first => self.subscribe(client),
            Waiting::Listening => self.listen(client, left),
        }
    }

    fn sleep(&mut self, client: usize, pause: Option<Duration>) {
        let member = &mut self.members[client];
        member.state = State::Sleeping;
        member.sleep += 1;
        if let Some(pause) = pause {
            self.timers.push(Reverse((Instant::now() + pause, client, member.sleep)));
        }
    }

    fn wake(&mut self, client: usize) -> Result<()> {
        if self.contender.waiting() == Waiting::Listening {
            let channel = self.channel_of(client);
            self.subscription(client, &channel).sleepers.retain(|&sleeper| sleeper != client);
        }
        self.ask_again(client)
    }

    fn ask_again(&mut self, client: usize) -> Result<()> {
        self.members[client].state = State::Asking;
        let request = self.contender.acquire(&self.members[client].lock);
        self.ask(client, &request)
    }

    fn process_of(&self, client: usize) -> usize {
        client % self.processes
    }

    fn channel_of(&self, client: usize) -> String {
        Redisson::channel(&self.members[client].lock.key)
    }

    fn subscription(&mut self, client: usize, channel: &str) -> &mut Subscription {
        self.subscriptions.entry((self.process_of(client), channel.to_owned())).or_default()
    }

    /// After the first refusal, a thread makes sure that its process is subscribed, and tries again.
    fn subscribe(&mut self, client: usize) -> Result<()> {
        let channel = self.channel_of(client);
        let subscription = self.subscription(client, &channel);
        subscription.listeners += 1;
        if subscription.confirmed {
            return self.ask_again(client);
        }
        subscription.awaiting_confirmation.push(client);
        let first = subscription.listeners == 1;
        self.members[client].state = State::Subscribing;
        if first { self.send_of_process(client, "SUBSCRIBE", &channel) } else { Ok(()) }
    }

    /// After each further refusal, it sleeps until a message wakes it or the holder's lease has expired.
    fn listen(&mut self, client: usize, left: Option<Duration>) -> Result<()> {
        let channel = self.channel_of(client);
        let subscription = self.subscription(client, &channel);
        if subscription.permits > 0 {
            subscription.permits -= 1;
            return self.ask_again(client);
        }
        subscription.sleepers.push_back(client);
        self.sleep(client, left);
        Ok(())
    }

    fn unsubscribe(&mut self, client: usize) -> Result<()> {
        let channel = self.channel_of(client);
        let subscription = self.subscription(client, &channel);
        subscription.listeners -= 1;
        if subscription.listeners > 0 {
            return Ok(());
        }
        *subscription = Subscription::default();
        self.send_of_process(client, "UNSUBSCRIBE", &channel)
    }

    fn send_of_process(&mut self, client: usize, command: &str, channel: &str) -> Result<()> {
        self.send(self.requests + self.process_of(client), &Request::new(&[command, channel]))
    }

    /// Handles data on a process' subscription.
    fn pushed(&mut self, process: usize, reply: Value) -> Result<()> {
        let Value::Array(parts) = &reply else { bail!("not a message: {reply:?}") };
        let [kind, channel, _] = parts.as_slice() else { bail!("not a message: {reply:?}") };
        let Some(subscription) = self.subscriptions.get_mut(&(process, resp::text(channel)?)) else {
            bail!("a message on a channel without a subscription: {reply:?}")
        };
        match resp::text(kind)?.as_str() {
            "subscribe" => {
                subscription.confirmed = subscription.listeners > 0;
                for client in std::mem::take(&mut subscription.awaiting_confirmation) {
                    self.ask_again(client)?;
                }
            }
            "message" => match subscription.sleepers.pop_front() {
                Some(client) => self.ask_again(client)?,
                None if subscription.listeners > 0 => subscription.permits += 1,
                None => {}
            },
            "unsubscribe" => {}
            other => bail!("a message of unknown kind {other}"),
        }
        Ok(())
    }

    /// Handles events of a session, and reads on.
    fn read_events(&mut self, connection: usize, reply: &Value, at: Instant) -> Result<()> {
        let Value::Array(events) = reply else { bail!("not a list of events: {reply:?}") };
        for event in events {
            let Value::Array(fields) = event else { bail!("not an event: {event:?}") };
            let [kind, _, _, owner, ..] = fields.as_slice() else { bail!("not an event: {event:?}") };
            let client = Lock::client_of(&resp::text(owner)?).context("an event of an unknown owner")?;
            if resp::text(kind)? != "granted" || self.members[client].state != State::Asking {
                bail!("{event:?} for client {client}, which is {:?}", self.members[client].state);
            }
            self.granted(client, at)?;
        }
        self.send(connection, &Request::typed(Session::NEXT))
    }

    /// Sends a client's request.
    fn ask(&mut self, client: usize, request: &Request) -> Result<()> {
        let connection = client % self.requests;
        self.connections[connection].asked.push_back(client);
        self.send(connection, request)
    }

    fn send(&mut self, connection: usize, request: &Request) -> Result<()> {
        self.traffic.requests += 1;
        self.traffic.bytes += request.bytes().len() as u64;
        if connection < self.requests && self.requests < self.members.len() {
            self.connections[connection].unsent.extend_from_slice(request.bytes());
            self.unflushed.push(connection);
            return Ok(());
        }
        self.connections[connection].send(request.bytes())
    }
}

fn is_busy(answer: Answer) -> bool {
    matches!(answer, Answer::Busy(_))
}

impl Connection {
    fn open(port: u16, poll: &Poll, index: usize) -> Result<Self> {
        let stream = std::net::TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)))
            .with_context(|| format!("connecting client {index}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        poll.registry().register(&mut stream, Token(index), Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { stream, replies: Replies::default(), unsent: Vec::new(), asked: VecDeque::new() })
    }

    /// Opens a session on the connection, and reads its events from then on.
    fn begin_session(&mut self) -> Result<String> {
        self.send(Request::typed("LOCK.SESSION").bytes())?;
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut chunk = [0; 256];
        let name = loop {
            if let Some(reply) = self.replies.next()? {
                break resp::session_id(&reply)?;
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("the server closed a session's connection"),
                Ok(length) => self.replies.feed(&chunk[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(50));
                }
                Err(error) => return Err(error).context("opening a session"),
            }
        };
        self.send(Request::typed(Session::NEXT).bytes())?;
        Ok(name)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.unsent.extend_from_slice(bytes);
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(length) => drop(self.unsent.drain(..length)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("writing to the server"),
            }
        }
        Ok(())
    }
}
