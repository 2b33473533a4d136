//! The connection that requests to one server go over, all at once and in order. Opened when first needed, and anew after
//! it broke; a request that was on it then is not sent again.

use std::sync::{Mutex, PoisonError};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, RedisResult, Value, pipe};

pub(crate) struct Requests {
    client: Client,
    server: String,
    config: AsyncConnectionConfig,
    open: Mutex<Open>,
    /// Whoever opens it. The others wait: a thousand tasks need no thousand connections.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Open {
    connection: Option<MultiplexedConnection>,
    /// How many there were: so that a late failure closes its own connection and no newer one.
    number: u64,
}

/// Whether the server is to answer for a key that is on its way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    No,
    Asked,
}

impl Requests {
    pub(crate) fn new(client: Client, server: String, config: AsyncConnectionConfig) -> Self {
        Self { client, server, config, open: Mutex::default(), opening: tokio::sync::Mutex::default() }
    }

    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and reads its reply.
    pub(crate) async fn send(&self, cmd: &Cmd, redirect: Redirect) -> RedisResult<Value> {
        let (mut connection, number) = self.connection().await?;
        let reply = match redirect {
            Redirect::No => cmd.query_async(&mut connection).await,
            Redirect::Asked => {
                let mut both = pipe();
                both.cmd("ASKING").ignore().add_command(cmd.clone());
                both.query_async::<(Value,)>(&mut connection).await.map(|(reply,)| reply)
            }
        };
        if let Err(error) = &reply
            && error.is_unrecoverable_error()
        {
            self.close(number);
        }
        reply
    }

    /// The connection itself.
    pub(crate) async fn connection(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let _turn = self.opening.lock().await;
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let connection = self.client.get_multiplexed_async_connection_with_config(&self.config).await?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.number += 1;
        open.connection = Some(connection.clone());
        Ok((connection, open.number))
    }

    fn current(&self) -> Option<(MultiplexedConnection, u64)> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        Some((open.connection.clone()?, open.number))
    }

    fn close(&self, number: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.number == number {
            open.connection = None;
        }
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "requests to {}", self.server)
    }
}
