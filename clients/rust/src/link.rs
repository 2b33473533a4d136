//! A pair of connections on the `redis` crate: requests go out, replies come in order.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use holdfast_core::{Bytes, Channel, Reply};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};

use crate::error::refusal;
use crate::place::Opened;

/// The pair with this number.
pub(crate) struct Link {
    pub(crate) pair: u64,
    session: Wire,
    requests: Wire,
}

struct Wire {
    connection: MultiplexedConnection,
    replies: VecDeque<Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>>,
}

impl Link {
    pub(crate) fn new(pair: u64, opened: Opened) -> Self {
        let wire = |connection| Wire { connection, replies: VecDeque::new() };
        Self { pair, session: wire(opened.session), requests: wire(opened.requests) }
    }

    /// Sends a request. The reader of the replies is woken when this one's arrives.
    pub(crate) fn send(&mut self, channel: Channel, words: &[Bytes], reader: &Waker) {
        let wire = match channel {
            Channel::Session => &mut self.session,
            Channel::Requests => &mut self.requests,
        };
        let mut cmd = Cmd::new();
        for word in words {
            cmd.arg(word);
        }
        let mut connection = wire.connection.clone();
        let mut reply: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(async move { connection.send_packed_command(&cmd).await });
        // The first poll sends the request, unless the connection is known to have ended.
        if let Poll::Ready(reply_now) = reply.as_mut().poll(&mut Context::from_waker(reader)) {
            reply = Box::pin(std::future::ready(reply_now));
            reader.wake_by_ref();
        }
        wire.replies.push_back(reply);
    }

    /// The next reply. An error is the connection's end.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<(Channel, RedisResult<Reply>)> {
        for (channel, wire) in [(Channel::Session, &mut self.session), (Channel::Requests, &mut self.requests)] {
            let Some(next) = wire.replies.front_mut() else { continue };
            if let Poll::Ready(value) = next.as_mut().poll(context) {
                wire.replies.pop_front();
                let reply = value.map(reply).or_else(|error| refusal(&error).map(Reply::Error).ok_or(error));
                return Poll::Ready((channel, reply));
            }
        }
        Poll::Pending
    }
}

/// A reply in RESP2 form for either protocol: a map is an array.
fn reply(value: Value) -> Reply {
    match value {
        Value::Nil => Reply::Null,
        Value::Int(number) => Reply::Integer(number),
        Value::BulkString(bytes) => Reply::Bulk(bytes),
        Value::VerbatimString { text, .. } => Reply::Bulk(text.into_bytes()),
        Value::SimpleString(line) => Reply::Line(line),
        Value::Array(each) | Value::Set(each) => Reply::Array(each.into_iter().map(reply).collect()),
        Value::Map(pairs) => {
            Reply::Array(pairs.into_iter().flat_map(|(key, value)| [reply(key), reply(value)]).collect())
        }
        Value::ServerError(error) => Reply::Error(refusal(&error.into()).unwrap_or_default()),
        Value::Okay => Reply::Line("OK".to_owned()),
        other => Reply::Line(format!("{other:?}")),
    }
}
