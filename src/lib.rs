//! Holdfast: distributed locks inside Redis and Valkey.
//!
//! The README and `docs/` define the contract with clients. [`lock`] defines what a lock is, [`keyspace`] how it is
//! stored. Everything unsafe is in [`server`].
#![deny(unsafe_code)]
// A panic takes the server down.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::panic
    )
)]

pub mod commands;
pub mod config;
pub mod confirming;
pub mod deadlocks;
pub mod event_loop;
pub mod holds;
pub mod info;
pub mod keyspace;
pub mod lock;
pub mod notices;
pub mod replies;
#[allow(unsafe_code)]
pub mod server;
pub mod serving;
pub mod state;
pub mod stats;
pub mod waiting;
pub mod watchdog;

#[cfg(not(test))]
use redis_module::alloc::RedisAlloc as Allocator;
use redis_module::{Context, RedisString, Status};
#[cfg(test)]
use std::alloc::System as Allocator;

use server::callbacks::Callbacks;
use server::commands::{add_category, exists, have_categories};
use server::{Ctx, TextRef};

/// The module's name: in `MODULE LIST`, as its section of `INFO`, and before its settings.
pub const NAME: &str = "holdfast";

/// The prefix of the module's command names.
const COMMANDS: &str = "lock.";

/// The version as `MODULE LIST` shows it, as one number: 10203 is 1.2.3.
const VERSION: i32 = number(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
    + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
    + number(env!("CARGO_PKG_VERSION_PATCH"));

const fn number(digits: &str) -> i32 {
    match i32::from_str_radix(digits, 10) {
        Ok(number) => number,
        Err(_) => 0,
    }
}

/// The ACL category of the module's commands, on servers where a module can add one.
const CATEGORY: &str = "lock";

/// Starts the module. Logs the reason and returns `false` if that fails.
fn start(ctx: Ctx, args: &[TextRef]) -> bool {
    server::callbacks::set(Callbacks {
        answer: event_loop::answer,
        gone: event_loop::gone,
        tick: event_loop::tick,
        ask_replicas: event_loop::ask_replicas,
        key_touched: event_loop::key_touched,
        after_touch: event_loop::after_touch,
        event: event_loop::event,
        info: info::fill,
    });
    add_category(ctx, CATEGORY);
    if !commands::ALL.iter().chain([&commands::FORMER]).all(|command| (command.register)(ctx, CATEGORY)) {
        ctx.warn("holdfast: the server refused a command of the module");
        return false;
    }
    if let Some(missing) = missing_command(ctx) {
        ctx.warn(&format!(
            "holdfast: this server has no command {missing}, which the module needs; rename-command must leave it as it is"
        ));
        return false;
    }
    if let Err(error) = config::start(ctx, args) {
        ctx.warn(&format!("holdfast: {error}"));
        return false;
    }
    server::events::subscribe(ctx);
    keyspace::listeners::start(ctx, NAME.as_bytes());
    even_out_frees(ctx);
    warn_of_eviction(ctx);
    warn_of_missing_categories(ctx);
    true
}

/// Returns a command that the module needs and that this server lacks (`rename-command`). Without it, what the module
/// replicates would be lost silently.
fn missing_command(ctx: Ctx) -> Option<String> {
    let needed = keyspace::listeners::REPLICATED.iter().chain(server::needed_commands(ctx));
    let missing = needed.copied().find(|name| !exists(ctx, name))?;
    Some(missing.to_string_lossy().into_owned())
}

/// Whether the module must stay loaded: unloading it would lose something, or the server would call code that is gone.
fn is_needed(ctx: Ctx) -> bool {
    if state::with(|state| state.are_in_use()) {
        ctx.warn("holdfast: not unloaded: INFO holdfast shows a waiting request, a bound hold, or a session");
        return true;
    }
    let connections = match server::clients::count_at_commands(ctx, COMMANDS) {
        Some(0) => return false,
        Some(count) => format!("{count} connections are"),
        None => "CLIENT LIST doesn't say which connections are".into(),
    };
    ctx.warn(&format!(
        "holdfast: not unloaded: {connections} blocked, in a transaction, or had {COMMANDS}* as their last command, which \
         the server might still use. Close them (CLIENT KILL TYPE normal), or send another command over each.",
    ));
    true
}

/// Makes libc's allocator merge freed memory at once, on servers built without jemalloc. Otherwise the end of many
/// locks becomes one long pause in the allocator.
fn even_out_frees(ctx: Ctx) {
    let [allocator] = ctx.server_info(c"memory", [c"mem_allocator"]);
    if allocator == "libc" && server::allocator::merge_at_once() {
        ctx.warn("holdfast: the server uses libc's allocator, which now merges what is freed at once (M_MXFAST 0)");
    }
}

/// Warns if the server may evict locks: an evicted lock is a lock held twice.
fn warn_of_eviction(ctx: Ctx) {
    let [policy] = ctx.server_info(c"memory", [c"maxmemory_policy"]);
    if policy != "noeviction" {
        ctx.warn(&format!(
            "holdfast: maxmemory-policy is {policy}: the server may evict locks when memory is short, and an evicted \
             lock is a lock held twice. Set maxmemory-policy noeviction."
        ));
    }
}

/// Warns on Redis 7.0: its ACL rules that name categories do not cover these commands, so a user meant to be restricted
/// could force-release locks.
fn warn_of_missing_categories(ctx: Ctx) {
    if !have_categories() {
        ctx.warn(
            "holdfast: this server puts commands of modules into no ACL category: +@all -@dangerous allows LOCK.FORCE, \
             +@all -@write allows LOCK.ACQUIRE. Give rights that name commands: +lock.acquire, -lock.force.",
        );
    }
}

fn load(context: &Context, args: &[RedisString]) -> Status {
    server::load(context, args, start)
}

fn unload(context: &Context) -> Status {
    server::unload(context, is_needed, event_loop::stop)
}

/// The symbols that the server looks up in the library.
mod entry {
    #![allow(missing_docs)]
    use super::{Allocator, NAME, VERSION, load, unload};
    use redis_module::redis_module;

    redis_module! {
        name: NAME,
        version: VERSION,
        allocator: (Allocator, Allocator),
        data_types: [],
        init: load,
        deinit: unload,
    }
}
