//! Connections between clients and the server, and what is on its way.

use holdfast_core::Channel;
use simulator::random::Random;
use simulator::redis::{Bytes, node};
use simulator::resp::Reply;
use std::collections::BTreeMap;

/// A time in µs of the monotonic clock.
pub type Micros = u64;

/// A connection.
#[derive(Clone, Debug)]
pub struct Wire {
    pub client: usize,
    pub pair: u64,
    pub channel: Channel,
    /// Nothing arrives any more, and neither side is notified.
    pub swallows: bool,
    /// The client has closed it.
    pub is_closed: bool,
    /// The server has noticed the close.
    pub is_notified: bool,
    /// When the last request or reply arrives, at the server and at the client.
    at_server: Micros,
    at_client: Micros,
    /// The incomplete reply that the server has sent.
    pub unread: Bytes,
}

/// Something on its way.
#[derive(Clone, Debug)]
pub enum Parcel {
    /// A request arrives at the server.
    Request(u64, Vec<Bytes>),
    /// A close arrives at the server.
    End(u64),
    /// A reply arrives at the client.
    Reply(u64, Reply),
    /// A close arrives at the client.
    Ended(u64),
    /// Both connections of a pair are open, or can't be opened.
    Opened(usize, u64, bool),
}

/// All connections by their id at the server.
pub struct Network {
    pub wires: BTreeMap<u64, Wire>,
    /// What is on its way, in order of arrival.
    pub parcels: BTreeMap<(Micros, u64), Parcel>,
    /// Until when nothing of a client arrives and it can't connect.
    pub held_up: BTreeMap<usize, Micros>,
    pub unreachable: BTreeMap<usize, (Micros, bool)>,
    sent: u64,
    pub random: Random,
    /// The longest delay.
    pub delay: Micros,
}

impl Network {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x0e77);
        let delay = *random.of(&[0, 200, 3_000, 20_000]);
        Self {
            wires: BTreeMap::new(),
            parcels: BTreeMap::new(),
            held_up: BTreeMap::new(),
            unreachable: BTreeMap::new(),
            sent: 0,
            random,
            delay,
        }
    }

    /// Sends something.
    pub fn post(&mut self, at: Micros, parcel: Parcel) {
        self.sent += 1;
        self.parcels.insert((at, self.sent), parcel);
    }

    fn arrival(&mut self, client: usize, now: Micros) -> Micros {
        let delay = self.random.below(self.delay as usize + 1) as u64;
        now.max(self.held_up.get(&client).copied().unwrap_or(0)) + delay
    }

    /// A client opens a pair.
    pub fn open(&mut self, client: usize, pair: u64, now: Micros) {
        let at = self.arrival(client, now);
        match self.unreachable.get(&client).copied().filter(|(until, _)| *until > now) {
            Some((_, true)) => {}
            Some((_, false)) => self.post(at, Parcel::Opened(client, pair, false)),
            None => self.post(at, Parcel::Opened(client, pair, true)),
        }
    }

    /// Opens both connections.
    pub fn connect(&mut self, client: usize, pair: u64) {
        for channel in [Channel::Session, Channel::Requests] {
            let id = node(|node| node.connect());
            let (at_server, at_client) = (0, 0);
            let wire = Wire {
                client,
                pair,
                channel,
                swallows: false,
                is_closed: false,
                is_notified: false,
                at_server,
                at_client,
                unread: Vec::new(),
            };
            self.wires.insert(id, wire);
        }
    }

    /// The connection of a client's pair.
    pub fn wire(&self, client: usize, pair: u64, channel: Channel) -> Option<u64> {
        let is_it = |wire: &Wire| (wire.client, wire.pair, wire.channel) == (client, pair, channel) && !wire.is_closed;
        self.wires.iter().find(|(_, wire)| is_it(wire)).map(|(id, _)| *id)
    }

    /// The newest connection of a client.
    pub fn newest(&self, client: usize, channel: Channel) -> Option<u64> {
        let is_it = |wire: &Wire| (wire.client, wire.channel) == (client, channel) && !wire.is_closed;
        self.wires.iter().rev().find(|(_, wire)| is_it(wire)).map(|(id, _)| *id)
    }

    /// A client sends this, or closes the connection. All arrives in order.
    pub fn to_server(&mut self, id: u64, parcel: Parcel, now: Micros) {
        let Some(client) = self.wires.get(&id).filter(|wire| !wire.swallows).map(|wire| wire.client) else { return };
        let at = self.arrival(client, now);
        let Some(wire) = self.wires.get_mut(&id) else { return };
        wire.at_server = wire.at_server.max(at);
        let at = wire.at_server;
        self.post(at, parcel);
    }

    /// The server sends this, or closes the connection.
    pub fn to_client(&mut self, id: u64, parcel: Parcel, now: Micros) {
        let Some(client) = self.wires.get(&id).filter(|wire| !wire.swallows).map(|wire| wire.client) else { return };
        let at = self.arrival(client, now);
        let Some(wire) = self.wires.get_mut(&id) else { return };
        wire.at_client = wire.at_client.max(at);
        let at = wire.at_client;
        self.post(at, parcel);
    }

    /// A connection breaks: some requests on their way to the server are lost, and all replies on their way to the client.
    pub fn cut(&mut self, id: u64, now: Micros) {
        let keeps = self.random.one_in(2);
        self.parcels.retain(|_, parcel| match parcel {
            Parcel::Request(to, _) => *to != id || keeps,
            Parcel::Reply(from, _) => *from != id,
            _ => true,
        });
        self.to_server(id, Parcel::End(id), now);
        if let Some(wire) = self.wires.get_mut(&id) {
            wire.is_notified = true;
            wire.at_client = 0;
        }
        self.to_client(id, Parcel::Ended(id), now);
    }

    /// Nothing arrives on it any more.
    pub fn swallow(&mut self, id: u64) {
        let is_of = |parcel: &Parcel| match parcel {
            Parcel::Request(it, _) | Parcel::End(it) | Parcel::Reply(it, _) | Parcel::Ended(it) => *it == id,
            Parcel::Opened(..) => false,
        };
        self.parcels.retain(|_, parcel| !is_of(parcel));
        if let Some(wire) = self.wires.get_mut(&id) {
            wire.swallows = true;
        }
    }

    /// A client closes its ends of a pair.
    pub fn close(&mut self, client: usize, pair: u64, now: Micros) {
        for channel in [Channel::Session, Channel::Requests] {
            if let Some(id) = self.wire(client, pair, channel) {
                self.to_server(id, Parcel::End(id), now);
                if let Some(wire) = self.wires.get_mut(&id) {
                    wire.is_closed = true;
                }
            }
        }
    }

    /// All faults end, but connections that drop bytes stay so.
    pub fn heal(&mut self) {
        self.unreachable.clear();
    }
}
