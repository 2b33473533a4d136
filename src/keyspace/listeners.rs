//! Who follows what is written, so that nothing is prepared without a receiver.
//!
//! Handing a command to the server for replication costs more than the write itself, even with neither a replica nor
//! an append-only file. It may be skipped only while it is *certain* that nobody could ever miss it. That is known as
//! follows: with no replica (including those that wait for their first copy), no replication backlog and no
//! append-only file, the server drops such commands. A replica that connects later needs a full copy, for which the
//! server forks; an append-only file is turned on by a setting, and is begun by a fork as well. The server notifies the module of
//! both before the next command runs. From that moment everything is handed over again, until the cron has found the
//! server alone once more. In a cluster, slots can be exported in other ways, so there everything is always handed
//! over.

use super::known::{Followers, Known, known};
use super::{field_expiry, restore};
use crate::server::Ctx;
use crate::server::ctx::{Class, Role};
use std::ffi::CStr;

/// The commands that the module replicates. (A new mutex also goes as `RESTORE`, if the server has that.)
pub const REPLICATED: [&CStr; 7] = [c"HSET", c"HDEL", c"DEL", c"PEXPIREAT", c"PERSIST", c"PUBLISH", c"REPLCONF"];

/// Whether writes must be handed over for replication.
pub fn must_replicate() -> bool {
    known(|it| it.followers == Followers::Possible)
}

/// Whether a keyspace notification of this class has a listener: a client, according to the server's setting, or a
/// module.
pub fn hears(class: Class) -> bool {
    class.is_enabled() || known(|it| it.other_modules > 0)
}

/// Something happened after which a replica, file or monitor may follow the data.
pub fn assume_followers() {
    known(|it| it.followers = Followers::Possible);
}

/// Checks whether anything follows the data. Takes some ten microseconds while that is possible, and nothing otherwise.
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

/// Finds out, at load, what does not change or is reported later.
pub fn start(ctx: Ctx, own_name: &[u8]) {
    let (in_cluster, other_modules) = (ctx.flags().cluster(), ctx.other_modules(own_name));
    let (has_field_expiry, has_restore) = (field_expiry::exists(ctx), restore::exists(ctx));
    known(|it| {
        // The last token may be there from before the module was unloaded.
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

/// Another module was loaded.
pub fn module_loaded() {
    known(|it| it.other_modules = it.other_modules.saturating_add(1));
}

/// Another module was unloaded.
pub fn module_unloaded() {
    known(|it| it.other_modules = it.other_modules.saturating_sub(1));
}
