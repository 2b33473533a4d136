//! Who hears what is written, so that nothing is prepared for nobody.
//!
//! Handing a command to the server for replication costs more than the write itself, even when there is neither a
//! replica nor an append-only file. It may be left out only while it is *certain* that nobody could ever miss it, and
//! that is known thus: with no replica (those that wait for their first copy included), no replication backlog and no
//! append-only file, the server drops such commands. A replica that comes then needs a full copy, for which the server
//! forks; an append-only file is turned on by a setting, and is begun by a fork as well. Both tell the module before
//! the next command runs, and from that moment everything is handed over again, until the cron has found the server
//! alone once more. In a cluster, slots can be exported in other ways: there everything is always handed over.

use super::field_expiry;
use crate::server::ctx::{Class, Role};
use crate::server::{Ctx, MainThread, config};

/// Who may follow the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Followers {
    /// Somebody may.
    #[default]
    Possible,
    /// Certainly nobody does.
    None,
}

static FOLLOWERS: MainThread<Followers> = MainThread::new();
static IN_CLUSTER: MainThread<bool> = MainThread::new();
static OTHER_MODULES: MainThread<usize> = MainThread::new();

/// Whether what is written must be handed over for replication.
pub fn must_replicate() -> bool {
    FOLLOWERS.with(|followers| *followers == Followers::Possible)
}

/// Whether a keyspace notification of this class has a listener: a client, by the server's setting, or a module.
pub fn hears(class: Class) -> bool {
    class.is_enabled() || OTHER_MODULES.with(|others| *others > 0)
}

/// Something happened after which somebody may follow the data.
pub fn doubt() {
    FOLLOWERS.with(|followers| *followers = Followers::Possible);
}

/// Looks whether anybody follows the data. Takes some ten microseconds while somebody may, and nothing otherwise.
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
        FOLLOWERS.with(|followers| *followers = Followers::None);
    }
}

/// Whether the server is part of a cluster.
pub fn in_cluster() -> bool {
    IN_CLUSTER.with(|in_cluster| *in_cluster)
}

/// Learns, at load, what does not change or is told of later.
pub fn start(ctx: Ctx, own_name: &[u8]) {
    doubt();
    IN_CLUSTER.with(|in_cluster| *in_cluster = ctx.flags().cluster());
    let count = config::other_modules(ctx, own_name);
    OTHER_MODULES.with(|others| *others = count);
    field_expiry::start(ctx);
}

/// Another module came.
pub fn module_loaded() {
    OTHER_MODULES.with(|others| *others = others.saturating_add(1));
}

/// Another module went.
pub fn module_unloaded() {
    OTHER_MODULES.with(|others| *others = others.saturating_sub(1));
}
