//! Who receives writes and notifications, so that the module prepares none without a receiver.
//!
//! Handing a command to the server for replication costs more than the write itself, even with neither a replica nor an
//! append-only file. The module may skip it only while it is *certain* that no receiver can miss the command.
//!
//! The server drops such commands while it has no replica (including those that wait for their first copy), no
//! replication backlog and no append-only file. A replica that connects later needs a full copy, for which the server
//! forks. An append-only file is turned on by a setting, and also begins with a fork. The server notifies the module of
//! both before the next command runs. From then on the module hands over every command, until the server's cron finds
//! again that nothing receives them.
//!
//! In a cluster, slots can be exported in other ways, so the module always hands over everything.

use super::known::{Followers, Known, known};
use super::{field_expiry, restore};
use crate::server::Ctx;
use crate::server::ctx::{Class, Role};
use std::ffi::CStr;

/// The commands that the module replicates. (It also replicates a new mutex as `RESTORE`, if the server has that.)
pub const REPLICATED: [&CStr; 7] = [c"HSET", c"HDEL", c"DEL", c"PEXPIREAT", c"PERSIST", c"PUBLISH", c"REPLCONF"];

/// Whether the module must hand its writes over for replication.
pub fn must_replicate() -> bool {
    known(|it| it.followers == Followers::Possible)
}

/// Whether a keyspace notification of this class has a listener: a client, according to the server's setting, or
/// another module.
pub fn hears(class: Class) -> bool {
    class.is_enabled() || known(|it| it.other_modules > 0)
}

/// Records that a replica, file or monitor may receive writes from now on.
pub fn assume_followers() {
    known(|it| it.followers = Followers::Possible);
}

/// Checks whether anything receives writes. Takes some ten microseconds while something may, and no time otherwise.
pub fn recheck(ctx: Ctx) {
    if !must_replicate() {
        return;
    }
    let flags = ctx.flags();
    if flags.cluster() || flags.aof() || flags.loading() || flags.role() == Role::Replica {
        return;
    }
    let [replicas, backlog] = ctx.server_info(c"replication", [c"connected_slaves", c"repl_backlog_active"]);
    if replicas == "0" && backlog == "0" {
        known(|it| it.followers = Followers::None);
    }
}

/// Whether the server is part of a cluster.
pub fn in_cluster() -> bool {
    known(|it| it.in_cluster)
}

/// Finds out, at load, the facts that do not change or whose changes are reported.
pub fn start(ctx: Ctx, own_name: &[u8]) {
    let (in_cluster, other_modules) = (ctx.flags().cluster(), ctx.other_modules(own_name));
    let (has_field_expiry, has_restore) = (field_expiry::exists(ctx), restore::exists(ctx));
    known(|it| {
        // The last token may be left from before the module was unloaded.
        *it = Known {
            in_cluster,
            other_modules,
            has_field_expiry,
            has_restore,
            fence: it.fence.clone(),
            ..Known::default()
        };
    });
}

/// Records that another module was loaded.
pub fn module_loaded() {
    known(|it| it.other_modules = it.other_modules.saturating_add(1));
}

/// Records that another module was unloaded.
pub fn module_unloaded() {
    known(|it| it.other_modules = it.other_modules.saturating_sub(1));
}
