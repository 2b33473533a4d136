//! The context in which the server calls the module.

use super::text::{AsText, Text};
use super::{MainThread, open_keys};
use crate::lock::internal_errors;
use libc::c_int;
use redis_module::raw::{self, RedisModuleCtx};
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A context without a client, once it was needed.
static WITHOUT_CLIENT: MainThread<Option<NonNull<RedisModuleCtx>>> = MainThread::new();

/// What the server passes to each callback; valid only while the callback runs.
#[derive(Clone, Copy, Debug)]
pub struct Ctx<'a> {
    raw: *mut RedisModuleCtx,
    /// The database that [`Ctx::in_db`] has selected, if it has.
    selected: Option<i32>,
    lives: PhantomData<&'a ()>,
}

/// This server's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It decides.
    Master,
    /// It follows.
    Replica,
}

/// Properties of the place where a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(c_int);

impl Flags {
    fn has(self, flag: u32) -> bool {
        self.0 & c_int::try_from(flag).unwrap_or(0) != 0
    }

    /// Whether the client may be blocked: not in `MULTI`, in a script, or where it asked not to be.
    pub fn may_block(self) -> bool {
        !(self.has(raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING)
            || self.has(raw::REDISMODULE_CTX_FLAGS_MULTI)
            || self.has(raw::REDISMODULE_CTX_FLAGS_LUA))
    }

    /// Whether a script runs.
    pub fn in_script(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LUA)
    }

    /// Whether the append-only file is on.
    pub fn aof(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_AOF)
    }

    /// Whether the server is part of a cluster.
    pub fn cluster(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_CLUSTER)
    }

    /// Whether the server decides or follows.
    pub fn role(self) -> Role {
        if self.has(raw::REDISMODULE_CTX_FLAGS_MASTER) { Role::Master } else { Role::Replica }
    }

    /// Whether a data set is being loaded.
    pub fn loading(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LOADING)
    }
}

impl<'a> Ctx<'a> {
    /// # Safety
    ///
    /// `raw` is the context of a callback that runs for all of `'a`.
    pub(super) unsafe fn from_raw(raw: *mut RedisModuleCtx) -> Self {
        Self { raw, selected: None, lives: PhantomData }
    }

    pub(super) fn raw(self) -> *mut RedisModuleCtx {
        self.raw
    }

    /// The properties of this context. Costs some tens of nanoseconds.
    pub fn flags(self) -> Flags {
        // SAFETY: the context lives.
        Flags(unsafe { api!(RedisModule_GetContextFlags)(self.raw) })
    }

    /// The selected database.
    pub fn db(self) -> i32 {
        // SAFETY: the context lives.
        self.selected.unwrap_or_else(|| unsafe { api!(RedisModule_GetSelectedDb)(self.raw) })
    }

    /// Runs `work` with another database selected.
    ///
    /// In a transaction on Valkey 9.1, the server opens keys of that database from then on but goes on saying that the
    /// one from before is selected. So the context that `work` gets remembers which it is.
    pub fn in_db<R>(self, db: i32, work: impl FnOnce(Self) -> R) -> R {
        let before = self.db();
        if before == db {
            return work(self);
        }
        // SAFETY: the context lives; a number out of range is refused, and then `work` would see the database from
        // before; that can't happen, as `db` was once a selected database and their number is fixed.
        unsafe { api!(RedisModule_SelectDb)(self.raw, db) };
        let result = work(Self { selected: Some(db), ..self });
        // SAFETY: as above.
        unsafe { api!(RedisModule_SelectDb)(self.raw, before) };
        result
    }

    /// The id of the calling connection; ids are never used twice in a run of the server.
    pub fn client_id(self) -> u64 {
        // SAFETY: the context lives.
        unsafe { api!(RedisModule_GetClientId)(self.raw) }
    }

    /// Writes a line to the server's log.
    pub fn warn(self, line: &str) {
        let Ok(line) = CString::new(line) else { return };
        // SAFETY: the format takes one C string, and gets one.
        unsafe { api!(RedisModule_Log)(self.raw, c"warning".as_ptr(), c"%s".as_ptr(), line.as_ptr()) }
    }

    /// Replicates and logs a command, in one step with everything else that this callback replicates.
    pub fn replicate(self, command: &CStr, args: &[&dyn AsText]) {
        let (replicate, ctx, command) = (api!(RedisModule_Replicate), self.raw, command.as_ptr());
        let raw = |arg: &&dyn AsText| arg.as_text().raw();
        // SAFETY: each `s` takes a string, and `v` an array of strings and its length; the server takes references of its
        // own. It makes room for as many strings as the format has letters: an array costs a second allocation.
        match args {
            [one] => unsafe { replicate(ctx, command, c"s".as_ptr(), raw(one)) },
            [one, two] => unsafe { replicate(ctx, command, c"ss".as_ptr(), raw(one), raw(two)) },
            [one, two, three] => unsafe { replicate(ctx, command, c"sss".as_ptr(), raw(one), raw(two), raw(three)) },
            [a, b, c, d, e] => unsafe {
                replicate(ctx, command, c"sssss".as_ptr(), raw(a), raw(b), raw(c), raw(d), raw(e))
            },
            _ => {
                let mut argv: Vec<_> = args.iter().map(raw).collect();
                // SAFETY: as above.
                unsafe { replicate(ctx, command, c"v".as_ptr(), argv.as_mut_ptr(), argv.len()) }
            }
        };
    }

    /// Replicates a command, but keeps it out of the append-only file because it says nothing about the data.
    pub fn replicate_only(self, command: &CStr, args: &[&dyn AsText; 2]) {
        let [one, two] = args.map(|arg| arg.as_text().raw());
        // SAFETY: as in `replicate`; `A` takes no argument.
        unsafe { api!(RedisModule_Replicate)(self.raw, command.as_ptr(), c"ssA".as_ptr(), one, two) };
    }

    /// Counts a change for the snapshot rules (`save`) where nothing needs to be sent: the caller knows that there is
    /// neither a replica, nor a backlog, nor an append-only file, so the server would drop the command anyway.
    pub fn count_change(self) {
        // SAFETY: the context lives and belongs to a command.
        unsafe { api!(RedisModule_ReplicateVerbatim)(self.raw) };
    }

    /// Sends a keyspace notification.
    pub fn notify(self, class: Class, event: &CStr, key: &dyn AsText) {
        // SAFETY: context, event and key live for the call.
        unsafe { api!(RedisModule_NotifyKeyspaceEvent)(self.raw, class.bits(), event.as_ptr(), key.as_text().raw()) };
    }

    /// Informs clients that watch or cache a key that it has changed.
    pub fn signal_modified(self, key: &dyn AsText) {
        // SAFETY: context and key live for the call.
        unsafe { api!(RedisModule_SignalModifiedKey)(self.raw, key.as_text().raw()) };
    }

    /// Publishes on a channel of this server and its cluster (`sharded`: of this shard only, where servers can do
    /// that).
    pub fn publish(self, channel: &Text, message: &Text, sharded: bool) {
        let publish = match newer_api!(RedisModule_PublishMessageShard) {
            Some(shard) if sharded => shard,
            _ => api!(RedisModule_PublishMessage),
        };
        // SAFETY: context and strings live for the call.
        unsafe { publish(self.raw, channel.as_text().raw(), message.as_text().raw()) };
    }

    /// Whether this node of a cluster serves a key: not if its slot is elsewhere or nowhere, nor if the cluster is down, nor
    /// if the key does not exist while its slot is being moved here or away. ([`super::cluster::served`] tells these apart.)
    ///
    /// Asked without a client: one that has sent `ASKING` may use a missing key here, but those who wait or hold may not,
    /// since it may be at the other node.
    pub fn serves(self, key: &Text) -> bool {
        open_keys::none_may_be_open();
        let Some(ctx) = self.without_client().filter(|_| can_access(key)) else { return false };
        let call = api!(RedisModule_Call);
        // SAFETY: the context is the module's own, and the main thread holds the lock that its use needs. The database is one that
        // was selected. The format takes one string and gets one. The server checks the slot as for a client's command, and
        // returns null if it is not to be served here; a reply is ours to free.
        unsafe {
            api!(RedisModule_SelectDb)(ctx.as_ptr(), self.db());
            let reply = call(ctx.as_ptr(), c"EXISTS".as_ptr(), c"s".as_ptr(), key.as_text().raw());
            if !reply.is_null() {
                api!(RedisModule_FreeCallReply)(reply);
            }
            !reply.is_null()
        }
    }

    /// A context of the module without a client.
    fn without_client(self) -> Option<NonNull<RedisModuleCtx>> {
        let made = WITHOUT_CLIENT.with(|made| {
            // SAFETY: this context lives for the call, which only reads of which module it is. The new one lives until
            // `unloaded` frees it.
            *made = made.or_else(|| NonNull::new(unsafe { api!(RedisModule_GetDetachedThreadSafeContext)(self.raw) }));
            *made
        });
        internal_errors::expect(made, "there is no context without a client")
    }

    /// How many modules other than this one are loaded. Where the server does not say, assumes that there is one.
    pub fn other_modules(self, own_name: &[u8]) -> usize {
        let call = api!(RedisModule_Call);
        // SAFETY: the format takes one C string and gets one; the replies are read while the outer one lives, which is
        // freed once.
        unsafe {
            let reply = call(self.raw, c"MODULE".as_ptr(), c"c".as_ptr(), c"LIST".as_ptr());
            if reply.is_null() {
                return 1;
            }
            let mut others = 0_usize;
            for index in 0..api!(RedisModule_CallReplyLength)(reply) {
                let entry = api!(RedisModule_CallReplyArrayElement)(reply, index);
                let name = api!(RedisModule_CallReplyArrayElement)(entry, 1);
                let name = Text::from_raw(api!(RedisModule_CreateStringFromCallReply)(name));
                others = others.saturating_add(usize::from(name.is_none_or(|name| name.bytes() != own_name)));
            }
            api!(RedisModule_FreeCallReply)(reply);
            others
        }
    }

    /// Fields of a section of `INFO`, as text; empty where a field is missing.
    pub fn server_info<const N: usize>(self, section: &CStr, fields: [&CStr; N]) -> [String; N] {
        self.with_server_info(section, |info| fields.map(|field| info.field(field)))
    }

    /// Reads a section of `INFO`.
    pub fn with_server_info<R>(self, section: &CStr, read: impl FnOnce(&ServerInfo) -> R) -> R {
        // SAFETY: the context lives; the data is freed below, after the last use.
        let info = ServerInfo(unsafe { api!(RedisModule_GetServerInfo)(self.raw, section.as_ptr()) });
        let result = read(&info);
        // SAFETY: made above, freed once.
        unsafe { api!(RedisModule_FreeServerInfo)(self.raw, info.0) };
        result
    }
}

/// Whether the slot of a key is open to modules: not while it is moved in one piece. `true` where the server has no
/// such moves (before Redis 8.4), or closes no slot to modules (Valkey).
fn can_access(key: &Text) -> bool {
    let (Some(slot_of), Some(can_access)) =
        (newer_api!(RedisModule_ClusterKeySlot), newer_api!(RedisModule_ClusterCanAccessKeysInSlot))
    else {
        return true;
    };
    // SAFETY: the string lives for the call.
    let slot = unsafe { slot_of(key.as_text().raw()) };
    // SAFETY: takes a number.
    c_int::try_from(slot).is_ok_and(|slot| unsafe { can_access(slot) } != 0)
}

/// A section of `INFO`, read once.
#[derive(Debug)]
pub struct ServerInfo(*mut raw::RedisModuleServerInfoData);

impl ServerInfo {
    /// A field, as text; empty where it is missing.
    pub fn field(&self, name: &CStr) -> String {
        // SAFETY: the data lives as long as `self`; with a null context the string is ours to free.
        let value = unsafe {
            Text::from_raw(api!(RedisModule_ServerInfoGetField)(std::ptr::null_mut(), self.0, name.as_ptr()))
        };
        value.map(|value| String::from_utf8_lossy(value.bytes()).into_owned()).unwrap_or_default()
    }
}

/// The module is being unloaded.
pub(super) fn unloaded() {
    if let Some(ctx) = WITHOUT_CLIENT.with(Option::take) {
        // SAFETY: the server made it, and it is freed once: it was just taken from the only place that has it.
        unsafe { api!(RedisModule_FreeThreadSafeContext)(ctx.as_ptr()) };
    }
}

/// The classes of keyspace notifications that the module sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `g`: `del`, `expire`.
    Generic,
    /// `h`: `hset`, `hdel`.
    Hash,
    /// `d`: the module's own.
    Module,
}

impl Class {
    fn bits(self) -> c_int {
        let bits = match self {
            Self::Generic => raw::REDISMODULE_NOTIFY_GENERIC,
            Self::Hash => raw::REDISMODULE_NOTIFY_HASH,
            Self::Module => raw::REDISMODULE_NOTIFY_MODULE,
        };
        c_int::try_from(bits).unwrap_or(0)
    }

    /// Whether the server currently passes this class on to clients.
    pub fn is_enabled(self) -> bool {
        // SAFETY: takes nothing, reads a setting.
        unsafe { api!(RedisModule_GetNotifyKeyspaceEvents)() & self.bits() != 0 }
    }
}

/// The name of this run of the server: 40 random hexadecimal digits.
pub fn run_id() -> String {
    // SAFETY: without a context, the server leaves freeing to the caller; it is done below, after the last use.
    let info = ServerInfo(unsafe { api!(RedisModule_GetServerInfo)(std::ptr::null_mut(), c"server".as_ptr()) });
    let id = info.field(c"run_id");
    // SAFETY: made above, freed once.
    unsafe { api!(RedisModule_FreeServerInfo)(std::ptr::null_mut(), info.0) };
    id
}

/// Whether the data set must stand still: clients are paused, or a failover is under way.
pub fn is_paused() -> bool {
    // SAFETY: takes nothing, reads a state.
    unsafe { api!(RedisModule_AvoidReplicaTraffic)() != 0 }
}

/// Whether `id` is a living connection: those of scripts and of other modules are not.
pub fn is_connected(id: u64) -> bool {
    // SAFETY: with a null pointer the server only looks whether there is such a client.
    unsafe { api!(RedisModule_GetClientInfoById)(std::ptr::null_mut(), id) == raw::REDISMODULE_OK as c_int }
}
