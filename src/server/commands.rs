//! Registers commands with the server, documents them, and receives their calls.

pub use super::grammar::{Access, Arg, Command, Docs, Keys};
use super::grammar::{Count, Kind};
use super::reply::{self, Replied};
use super::text::{TextRef, parse_number};
use super::{Ctx, main_thread};
use libc::c_int;
use redis_module::raw::{
    self, RedisModuleCommandArg, RedisModuleCommandInfo, RedisModuleCommandInfoVersion, RedisModuleCommandKeySpec,
    RedisModuleCtx, RedisModuleString,
};
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};

/// One call of a command.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The context of the call.
    pub ctx: Ctx<'a>,
    argv: &'a [*mut RedisModuleString],
}

impl<'a> Call<'a> {
    /// The number of arguments, including the command's name.
    pub fn count(self) -> usize {
        self.argv.len()
    }

    /// The argument at a position; 0 is the command's name.
    pub fn get(self, index: usize) -> Option<TextRef<'a>> {
        // SAFETY: the arguments are valid for the whole call.
        self.argv.get(index).and_then(|&arg| unsafe { TextRef::from_raw(arg) })
    }
}

impl Call<'_> {
    /// Whether the server only asks for the positions of the keys. A cluster of Redis 7.0 finds the keys of a command
    /// with a count of keys only in this way (`getkeys-api`). Newer servers use the key specification.
    fn is_key_position_request(self) -> bool {
        // SAFETY: the context is valid.
        unsafe { api!(RedisModule_IsKeysPositionRequest)(self.ctx.raw()) != 0 }
    }

    /// Reports the positions of the keys to the server: argument 1 is their count, and they follow it. Reports none if
    /// the count is invalid.
    fn report_counted_keys(self) {
        let count = self.get(1).and_then(|count| parse_number(count.bytes()));
        let count = count.and_then(|count| usize::try_from(count).ok());
        let keys = count.filter(|count| *count <= self.count().saturating_sub(2)).unwrap_or(0);
        for position in (2..).take(keys) {
            // SAFETY: the context is that of a request for key positions.
            unsafe { api!(RedisModule_KeyAtPos)(self.ctx.raw(), position) };
        }
    }
}

impl Access {
    fn bits(self) -> u64 {
        u64::from(match self {
            Self::Read => raw::REDISMODULE_CMD_KEY_RO | raw::REDISMODULE_CMD_KEY_ACCESS,
            Self::Update => {
                raw::REDISMODULE_CMD_KEY_RW | raw::REDISMODULE_CMD_KEY_ACCESS | raw::REDISMODULE_CMD_KEY_UPDATE
            }
            Self::Delete => {
                raw::REDISMODULE_CMD_KEY_RW | raw::REDISMODULE_CMD_KEY_ACCESS | raw::REDISMODULE_CMD_KEY_DELETE
            }
        })
    }
}

/// A command as a value, without its type: an entry of the list of all commands.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The command's name, in lower case.
    pub name: &'static CStr,
    /// The command's grammar and documentation.
    pub docs: Docs,
    /// Registers the command with the server; see [`register`].
    pub register: fn(Ctx, &str) -> bool,
}

impl Entry {
    /// The entry of a command.
    pub const fn of<C: Command>() -> Self {
        Self { name: C::NAME, docs: C::DOCS, register: register::<C> }
    }

    /// The command's syntax, on one line.
    pub fn syntax(&self) -> String {
        let name = self.name.to_string_lossy().to_uppercase();
        self.docs.args.iter().fold(name, |line, arg| format!("{line} {}", arg.syntax()))
    }
}

/// Registers a command with the server, in the ACL category `own_category` and those of [`Command::CATEGORIES`], where
/// the server supports them. Returns whether it succeeded.
pub fn register<C: Command>(ctx: Ctx, own_category: &str) -> bool {
    let (first, last) = match C::KEYS {
        Keys::First(_) => (1, 1),
        Keys::None | Keys::Counted(_) => (0, 0),
    };
    // SAFETY: the context is that of loading, the strings are static, and `enter` has the signature that the server
    // expects.
    unsafe {
        let created = api!(RedisModule_CreateCommand)(
            ctx.raw(),
            C::NAME.as_ptr(),
            Some(enter::<C>),
            C::FLAGS.as_ptr(),
            first,
            last,
            c_int::from(first != 0),
        );
        let command = api!(RedisModule_GetCommand)(ctx.raw(), C::NAME.as_ptr());
        if created != raw::REDISMODULE_OK as c_int || command.is_null() {
            return false;
        }
        if let Some(set) = newer_api!(RedisModule_SetCommandACLCategories) {
            // Redis 7.2 supports categories, but modules can't add any.
            let own = if newer_api!(RedisModule_AddACLCategory).is_some() { own_category } else { "" };
            let categories = CString::new(format!("{own} {}", C::CATEGORIES).trim()).unwrap_or_default();
            set(command, categories.as_ptr());
        }
        document::<C>(command)
    }
}

/// Whether this server puts commands of modules into ACL categories (Redis 7.2 and later, every Valkey).
pub fn have_categories() -> bool {
    newer_api!(RedisModule_SetCommandACLCategories).is_some()
}

/// Adds an ACL category, where the server can.
pub fn add_category(ctx: Ctx, name: &str) {
    if let (Some(add), Ok(name)) = (newer_api!(RedisModule_AddACLCategory), CString::new(name)) {
        // SAFETY: the context is that of loading.
        unsafe { add(ctx.raw(), name.as_ptr()) };
    }
}

/// Whether the server has a command with this name: `rename-command` may have renamed or removed it.
pub fn exists(ctx: Ctx, name: &CStr) -> bool {
    // SAFETY: the format takes no arguments. The commands that the module checks need some, so the server runs none of
    // them, except `REPLCONF`, which does nothing without arguments. `errno` reports whether the command exists. The
    // module owns a reply, and frees it.
    unsafe {
        *libc::__errno_location() = 0;
        let reply = api!(RedisModule_Call)(ctx.raw(), name.as_ptr(), c"".as_ptr());
        let errno = *libc::__errno_location();
        if !reply.is_null() {
            api!(RedisModule_FreeCallReply)(reply);
        }
        errno != libc::ENOENT
    }
}

/// The error for a call from a thread that another module has started.
const OTHER_THREAD: &str = "ERR commands of this module can be called on the server's main thread only";

unsafe extern "C" fn enter<C: Command>(
    ctx: *mut RedisModuleCtx,
    argv: *mut *mut RedisModuleString,
    argc: c_int,
) -> c_int {
    let len = usize::try_from(argc).unwrap_or(0);
    // SAFETY: the server passes a context and `argc` strings, all valid for this call.
    let call = unsafe { Call { ctx: Ctx::from_raw(ctx), argv: std::slice::from_raw_parts(argv, len) } };
    if !main_thread::is_current() {
        let Replied { .. } = call.ctx.reply_error(OTHER_THREAD);
        return reply::OK;
    }
    if let Keys::Counted(_) = C::KEYS
        && call.is_key_position_request()
    {
        call.report_counted_keys();
        return reply::OK;
    }
    let Replied { .. } = call.ctx.reply_outcome(C::run(call));
    reply::OK
}

/// Sets the command's documentation, arity, key specifications and arguments. Returns whether the server accepted them.
///
/// # Safety
///
/// `command` must be a command of this module, and the server must be loading the module.
unsafe fn document<C: Command>(command: *mut raw::RedisModuleCommand) -> bool {
    let version = RedisModuleCommandInfoVersion {
        version: 1,
        sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
        sizeof_keyspec: size_of::<RedisModuleCommandKeySpec>(),
        sizeof_arg: size_of::<RedisModuleCommandArg>(),
    };
    let mut specs = key_specs(C::KEYS);
    let mut nested = Vec::new();
    let mut args = c_args(C::DOCS.args, &mut nested);
    let info = RedisModuleCommandInfo {
        version: &raw const version,
        summary: C::DOCS.summary.as_ptr(),
        complexity: C::DOCS.complexity.as_ptr(),
        since: C::SINCE.as_ptr(),
        history: null_mut(),
        tips: null(),
        arity: C::ARITY,
        key_specs: specs.as_mut_ptr(),
        args: args.as_mut_ptr(),
    };
    // SAFETY: the server copies all of it. The lists end with a zeroed element, and are valid until the call returns.
    unsafe { api!(RedisModule_SetCommandInfo)(command, &raw const info) == raw::REDISMODULE_OK as c_int }
}

fn key_specs(keys: Keys) -> Vec<RedisModuleCommandKeySpec> {
    // SAFETY: all zero is a valid specification: the one that ends the list. (The type contains only numbers, pointers,
    // and unions of these.)
    let end: RedisModuleCommandKeySpec = unsafe { std::mem::zeroed() };
    let mut spec = end;
    spec.begin_search_type = raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX;
    spec.bs.index.pos = 1;
    match keys {
        Keys::None => return vec![end],
        Keys::First(access) => {
            spec.flags = access.bits();
            spec.find_keys_type = raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_RANGE;
            spec.fk.range.lastkey = 0;
            spec.fk.range.keystep = 1;
            spec.fk.range.limit = 0;
        }
        Keys::Counted(access) => {
            spec.flags = access.bits();
            spec.find_keys_type = raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_KEYNUM;
            spec.fk.keynum.keynumidx = 0;
            spec.fk.keynum.firstkey = 1;
            spec.fk.keynum.keystep = 1;
        }
    }
    vec![spec, end]
}

/// Converts arguments to the server's form: a list that ends with a zeroed element. The result points to lists of
/// choices, which are moved into `nested`, so that they stay valid.
fn c_args(args: &[Arg], nested: &mut Vec<Vec<RedisModuleCommandArg>>) -> Vec<RedisModuleCommandArg> {
    // SAFETY: all zero is a valid argument: the one that ends the list. (The type contains only numbers and pointers.)
    let end: RedisModuleCommandArg = unsafe { std::mem::zeroed() };
    let mut list: Vec<_> = args
        .iter()
        .map(|arg| {
            let mut it = end;
            it.name = arg.name.as_ptr();
            it.key_spec_index = -1;
            it.token = arg.token.map_or(null(), CStr::as_ptr);
            it.flags = c_int::try_from(match arg.count {
                Count::One => raw::REDISMODULE_CMD_ARG_NONE,
                Count::AtMostOne => raw::REDISMODULE_CMD_ARG_OPTIONAL,
                Count::Several => raw::REDISMODULE_CMD_ARG_MULTIPLE,
                Count::AnyNumber => raw::REDISMODULE_CMD_ARG_OPTIONAL | raw::REDISMODULE_CMD_ARG_MULTIPLE,
            })
            .unwrap_or(0);
            it.type_ = match arg.kind {
                Kind::Key => {
                    it.key_spec_index = 0;
                    raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY
                }
                Kind::Text => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
                Kind::Integer => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
                Kind::Token => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PURE_TOKEN,
                Kind::OneOf(choices) => {
                    let mut choices = c_args(choices, nested);
                    it.subargs = choices.as_mut_ptr();
                    nested.push(choices);
                    raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_ONEOF
                }
            };
            it
        })
        .collect();
    list.push(end);
    list
}
