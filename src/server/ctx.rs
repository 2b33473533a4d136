//! The context that the server passes to the module's callbacks.

use super::text::{AsText, Text};
use super::{MainThread, open_keys};
use crate::lock::internal_errors;
use libc::c_int;
use redis_module::raw::{self, RedisModuleCtx};
use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A context without a client. The first use creates it.
static DETACHED_CONTEXT: MainThread<Option<NonNull<RedisModuleCtx>>> = MainThread::new();

/// The context of a callback. It is valid only while the callback runs.
#[derive(Clone, Copy, Debug)]
pub struct Ctx<'a> {
    raw: *mut RedisModuleCtx,
    /// The database that [`Ctx::in_db`] selected, if it did.
    selected: Option<i32>,
    lifetime: PhantomData<&'a ()>,
}

/// This server's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It takes writes, and decides on locks.
    Primary,
    /// It copies a primary.
    Replica,
}

/// The flags of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(c_int);

impl Flags {
    fn has(self, flag: u32) -> bool {
        self.0 & c_int::try_from(flag).unwrap_or(0) != 0
    }

    /// Whether the client may be blocked. It may not in `MULTI`, in a script, or where blocking is denied.
    pub fn may_block(self) -> bool {
        !(self.has(raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING)
            || self.has(raw::REDISMODULE_CTX_FLAGS_MULTI)
            || self.has(raw::REDISMODULE_CTX_FLAGS_LUA))
    }

    /// Whether a script calls the command.
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

    /// Whether the server is a primary or a replica.
    pub fn role(self) -> Role {
        if self.has(raw::REDISMODULE_CTX_FLAGS_MASTER) { Role::Primary } else { Role::Replica }
    }

    /// Whether a data set is being loaded.
    pub fn loading(self) -> bool {
        self.has(raw::REDISMODULE_CTX_FLAGS_LOADING)
    }
}

impl<'a> Ctx<'a> {
    /// # Safety
    ///
    /// `raw` must be the context of a callback that runs for all of `'a`.
    pub(super) unsafe fn from_raw(raw: *mut RedisModuleCtx) -> Self {
        Self { raw, selected: None, lifetime: PhantomData }
    }

    pub(super) fn raw(self) -> *mut RedisModuleCtx {
        self.raw
    }

    /// The flags of this context. Reading them takes some tens of nanoseconds.
    pub fn flags(self) -> Flags {
        // SAFETY: the context is valid.
        Flags(unsafe { api!(RedisModule_GetContextFlags)(self.raw) })
    }

    /// The selected database.
    pub fn db(self) -> i32 {
        // SAFETY: the context is valid.
        self.selected.unwrap_or_else(|| unsafe { api!(RedisModule_GetSelectedDb)(self.raw) })
    }

    /// Runs `work` with another database selected.
    ///
    /// In a transaction on Valkey 9.1, the server then opens keys of `db`, but still reports the previous database as
    /// selected. So the context that `work` receives remembers `db`.
    pub fn in_db<R>(self, db: i32, work: impl FnOnce(Self) -> R) -> R {
        let before = self.db();
        if before == db {
            return work(self);
        }
        // SAFETY: the context is valid. The server refuses a number out of range, and `work` would then see the
        // previous database. This can't happen: `db` was once a selected database, and the number of databases is
        // fixed.
        unsafe { api!(RedisModule_SelectDb)(self.raw, db) };
        let result = work(Self { selected: Some(db), ..self });
        // SAFETY: as above.
        unsafe { api!(RedisModule_SelectDb)(self.raw, before) };
        result
    }

    /// The id of the calling connection. A server process never reuses an id.
    pub fn client_id(self) -> u64 {
        // SAFETY: the context is valid.
        unsafe { api!(RedisModule_GetClientId)(self.raw) }
    }

    /// Writes a warning to the server's log.
    pub fn warn(self, line: &str) {
        let Ok(line) = CString::new(line) else { return };
        // SAFETY: the format takes one C string, and gets one.
        unsafe { api!(RedisModule_Log)(self.raw, c"warning".as_ptr(), c"%s".as_ptr(), line.as_ptr()) }
    }

    /// Replicates a command and appends it to the append-only file, as one transaction with everything else that this
    /// callback replicates.
    pub fn replicate(self, command: &CStr, args: &[&dyn AsText]) {
        let (replicate, ctx, command) = (api!(RedisModule_Replicate), self.raw, command.as_ptr());
        let raw = |arg: &&dyn AsText| arg.as_text().raw();
        // SAFETY: each `s` takes a string, and `v` an array of strings and its length. The server takes its own
        // references. It allocates room for one string per letter of the format, so `v` costs a second allocation.
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

    /// Replicates a command, but keeps it out of the append-only file because it does not change the data.
    pub fn replicate_only(self, command: &CStr, args: &[&dyn AsText; 2]) {
        let [one, two] = args.map(|arg| arg.as_text().raw());
        // SAFETY: as in `replicate`; `A` takes no argument.
        unsafe { api!(RedisModule_Replicate)(self.raw, command.as_ptr(), c"ssA".as_ptr(), one, two) };
    }

    /// Counts a change for the snapshot rules (`save`), where no command needs to be replicated. The caller must know
    /// that there is no replica, no backlog and no append-only file, so that the server drops the replicated command.
    pub fn count_change(self) {
        // SAFETY: the context is valid and belongs to a command.
        unsafe { api!(RedisModule_ReplicateVerbatim)(self.raw) };
    }

    /// Sends a keyspace notification.
    pub fn notify(self, class: Class, event: &CStr, key: &dyn AsText) {
        // SAFETY: the context, the event and the key are valid for the call.
        unsafe { api!(RedisModule_NotifyKeyspaceEvent)(self.raw, class.bits(), event.as_ptr(), key.as_text().raw()) };
    }

    /// Notifies clients that watch a key (`WATCH`) or cache it (client-side caching) that it has changed.
    pub fn signal_modified(self, key: &dyn AsText) {
        // SAFETY: the context and the key are valid for the call.
        unsafe { api!(RedisModule_SignalModifiedKey)(self.raw, key.as_text().raw()) };
    }

    /// Publishes a message on a channel, in the whole cluster if there is one. If `sharded`, the message stays in this
    /// shard, where the server supports sharded channels.
    pub fn publish(self, channel: &Text, message: &Text, sharded: bool) {
        let publish = match newer_api!(RedisModule_PublishMessageShard) {
            Some(shard) if sharded => shard,
            _ => api!(RedisModule_PublishMessage),
        };
        // SAFETY: the context and the strings are valid for the call.
        unsafe { publish(self.raw, channel.as_text().raw(), message.as_text().raw()) };
    }

    /// Whether this node of a cluster serves a key. It does not if another node or no node owns the slot, or if the
    /// cluster is down. It does not either if the key is missing while its slot is being imported or migrated.
    /// [`super::cluster::served`] distinguishes these cases.
    ///
    /// The check runs without a client. A client that has sent `ASKING` may use a missing key here, but waiters and
    /// holders may not: the key may be at the other node.
    pub fn serves(self, key: &Text) -> bool {
        open_keys::check_none_open();
        let Some(ctx) = self.detached_context().filter(|_| can_access(key)) else { return false };
        let call = api!(RedisModule_Call);
        // SAFETY: the context is the module's own, and the main thread holds the lock that its use needs. The database
        // is one that was selected. The format takes one string and gets one. The server checks the slot as for a
        // client's command, and returns null if this node does not serve it. The module owns a reply, and frees it.
        unsafe {
            api!(RedisModule_SelectDb)(ctx.as_ptr(), self.db());
            let reply = call(ctx.as_ptr(), c"EXISTS".as_ptr(), c"s".as_ptr(), key.as_text().raw());
            if !reply.is_null() {
                api!(RedisModule_FreeCallReply)(reply);
            }
            !reply.is_null()
        }
    }

    /// A context of the module without a client. It is created once.
    fn detached_context(self) -> Option<NonNull<RedisModuleCtx>> {
        let raw = DETACHED_CONTEXT.with(|raw| {
            // SAFETY: this context is valid for the call, which only reads the context's module. The new one is valid
            // until `unloaded` frees it.
            *raw = raw.or_else(|| NonNull::new(unsafe { api!(RedisModule_GetDetachedThreadSafeContext)(self.raw) }));
            *raw
        });
        internal_errors::expect(raw, "there is no context without a client")
    }

    /// The number of other loaded modules. Returns 1 if `MODULE LIST` gets no reply.
    pub fn other_modules(self, own_name: &[u8]) -> usize {
        let call = api!(RedisModule_Call);
        // SAFETY: the format takes one C string and gets one. The inner replies are read before the outer one is freed,
        // which happens once.
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

    /// Fields of a section of `INFO`, as text. A missing field is empty.
    pub fn server_info<const N: usize>(self, section: &CStr, fields: [&CStr; N]) -> [String; N] {
        self.with_server_info(section, |info| fields.map(|field| info.field(field)))
    }

    /// Reads a section of `INFO`.
    pub fn with_server_info<R>(self, section: &CStr, read: impl FnOnce(&ServerInfo) -> R) -> R {
        // SAFETY: the context is valid. The data is freed below, after the last use.
        let info = ServerInfo(unsafe { api!(RedisModule_GetServerInfo)(self.raw, section.as_ptr()) });
        let result = read(&info);
        // SAFETY: the data was created above and is freed once.
        unsafe { api!(RedisModule_FreeServerInfo)(self.raw, info.0) };
        result
    }
}

/// Whether modules can access the slot of a key. They can't during an atomic slot migration. Returns `true` where the
/// server has no such migrations (before Redis 8.4), or does not hide slots from modules (Valkey).
fn can_access(key: &Text) -> bool {
    let (Some(slot_of), Some(can_access)) =
        (newer_api!(RedisModule_ClusterKeySlot), newer_api!(RedisModule_ClusterCanAccessKeysInSlot))
    else {
        return true;
    };
    // SAFETY: the string is valid for the call.
    let slot = unsafe { slot_of(key.as_text().raw()) };
    // SAFETY: the function takes a number.
    c_int::try_from(slot).is_ok_and(|slot| unsafe { can_access(slot) } != 0)
}

/// A section of `INFO`, read once.
#[derive(Debug)]
pub struct ServerInfo(*mut raw::RedisModuleServerInfoData);

impl ServerInfo {
    /// A field, as text. A missing field is empty.
    pub fn field(&self, name: &CStr) -> String {
        // SAFETY: the data is valid as long as `self`. With a null context, the module owns the string and frees it.
        let value = unsafe {
            Text::from_raw(api!(RedisModule_ServerInfoGetField)(std::ptr::null_mut(), self.0, name.as_ptr()))
        };
        value.map(|value| String::from_utf8_lossy(value.bytes()).into_owned()).unwrap_or_default()
    }
}

/// Frees the detached context when the module is unloaded.
pub(super) fn unloaded() {
    if let Some(ctx) = DETACHED_CONTEXT.with(Option::take) {
        // SAFETY: the server created it, and it is freed once: it was just taken from the only place that stores it.
        unsafe { api!(RedisModule_FreeThreadSafeContext)(ctx.as_ptr()) };
    }
}

/// A class of keyspace notifications that the module sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `g`: `del`, `expire`.
    Generic,
    /// `h`: `hset`, `hdel`.
    Hash,
    /// `d`: events of modules.
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

    /// Whether the server currently publishes this class to clients (`notify-keyspace-events`).
    pub fn is_enabled(self) -> bool {
        // SAFETY: the function takes nothing, and reads a setting.
        unsafe { api!(RedisModule_GetNotifyKeyspaceEvents)() & self.bits() != 0 }
    }
}

/// The run id of the server process: 40 random hexadecimal digits.
pub fn run_id() -> String {
    // SAFETY: without a context, the caller must free the data. It is freed below, after the last use.
    let info = ServerInfo(unsafe { api!(RedisModule_GetServerInfo)(std::ptr::null_mut(), c"server".as_ptr()) });
    let id = info.field(c"run_id");
    // SAFETY: the data was created above and is freed once.
    unsafe { api!(RedisModule_FreeServerInfo)(std::ptr::null_mut(), info.0) };
    id
}

/// Whether the data set must not change: clients are paused, or a failover is in progress.
pub fn is_paused() -> bool {
    // SAFETY: the function takes nothing, and reads a state.
    unsafe { api!(RedisModule_AvoidReplicaTraffic)() != 0 }
}

/// Whether `id` is an open connection. Clients that run scripts or another module's calls have none.
pub fn is_connected(id: u64) -> bool {
    // SAFETY: with a null pointer the server only checks whether there is such a client.
    unsafe { api!(RedisModule_GetClientInfoById)(std::ptr::null_mut(), id) == raw::REDISMODULE_OK as c_int }
}
