//! Holdfast: distributed locks inside Redis and Valkey.
//!
//! The whole module on one screen. The contract with clients is in the README and in `docs/`; what a lock *is* stands
//! in [`lock`], how it lies in the keyspace in [`keyspace`], and everything unsafe in [`server`].
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

pub mod answering;
pub mod books;
pub mod commands;
pub mod config;
pub mod confirming;
pub mod holding;
pub mod info;
pub mod keyspace;
pub mod lock;
pub mod searching;
#[allow(unsafe_code)]
pub mod server;
pub mod serving;
pub mod stats;
pub mod turns;
pub mod undo;
pub mod waiting;
pub mod watchdog;

#[cfg(not(test))]
use redis_module::alloc::RedisAlloc as Allocator;
use redis_module::{Context, RedisString, Status};
#[cfg(test)]
use std::alloc::System as Allocator;

use server::callbacks::Callbacks;
use server::commands::{add_category, have_categories};
use server::{Ctx, TextRef};

/// The module's name: in `MODULE LIST`, of the section of `INFO`, before its settings.
pub const NAME: &str = "holdfast";

/// The ACL category of all its commands, where the server can make one.
const CATEGORY: &str = "lock";

/// Starts the module. What is wrong goes to the server's log.
fn start(ctx: Ctx, args: &[TextRef]) -> bool {
    server::callbacks::set(Callbacks {
        answer: answering::answer,
        gone: answering::gone,
        tick: turns::tick,
        ask: turns::ask,
        key_touched: turns::key_touched,
        after_touch: turns::after_touch,
        event: turns::event,
    });
    add_category(ctx, CATEGORY);
    if !commands::ALL.iter().all(|command| (command.register)(ctx, CATEGORY)) {
        ctx.warn("holdfast: the server refused a command of the module");
        return false;
    }
    if let Err(error) = config::start(ctx, args) {
        ctx.warn(&format!("holdfast: {error}"));
        return false;
    }
    server::info::register(ctx, info::fill);
    server::events::subscribe(ctx);
    keyspace::listeners::start(ctx, NAME.as_bytes());
    warn_of_eviction(ctx);
    warn_of_missing_categories(ctx);
    true
}

/// Stops the module: the server refuses to unload it while anybody waits or a hold is watched.
fn stop(ctx: Ctx) {
    turns::stop(ctx);
}

/// An evicted lock is a lock held twice.
fn warn_of_eviction(ctx: Ctx) {
    let [policy] = ctx.server_info(c"memory", [c"maxmemory_policy"]);
    if policy != "noeviction" {
        ctx.warn(&format!(
            "holdfast: maxmemory-policy is {policy}: the server may evict locks when memory is short, and an evicted \
             lock is a lock held twice. Set maxmemory-policy noeviction."
        ));
    }
}

/// Rights that go by category say nothing about these commands on Redis 7.0, where they would let anybody break locks.
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
    server::unload(context, stop)
}

/// What the server looks for in the library.
mod entry {
    #![allow(missing_docs)]
    use super::{Allocator, NAME, load, unload};
    use redis_module::redis_module;

    redis_module! {
        name: NAME,
        version: 100, // 0.1.0
        allocator: (Allocator, Allocator),
        data_types: [],
        init: load,
        deinit: unload,
    }
}
