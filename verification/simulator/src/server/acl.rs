//! What users may do.

use super::{Ctx, Text, TextRef};
use crate::node::{User as Rights, node};

/// A user of the server, as it is now.
#[derive(Debug)]
pub struct User(Rights);

impl User {
    /// The user of a connection; `None` if there is no such connection.
    pub fn of_client(_: Ctx, client: u64) -> Option<Self> {
        node(|node| {
            let name = &node.clients.get(&client)?.user;
            node.users.get(name).cloned().map(Self)
        })
    }

    /// The user of this name, if there is one.
    pub fn named(name: TextRef) -> Option<Self> {
        node(|node| node.users.get(&*String::from_utf8_lossy(name.bytes())).cloned().map(Self))
    }

    /// Whether the user may read a key.
    pub fn may_read(&self, key: &Text) -> bool {
        self.0.may_touch(key.bytes())
    }

    /// Whether the user may run a command with these arguments: its name, then the others. Users may use all databases.
    pub fn may_run(&self, _db: i32, command: &[TextRef]) -> bool {
        let argv: Vec<Vec<u8>> = command.iter().map(|arg| arg.bytes().to_vec()).collect();
        node(|node| node.may_run(&self.0, &argv))
    }
}

/// Whether the running command was sent by the user of a connection.
pub fn is_user_of(ctx: Ctx, client: u64) -> bool {
    node(|node| {
        let asker = node.clients.get(&ctx.caller()).map(|it| &it.user);
        asker.is_some() && asker == node.clients.get(&client).map(|it| &it.user)
    })
}
