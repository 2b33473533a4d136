//! A small Redis: the behaviour of a server that the module can observe, on the data in [`crate::node`]. [`event_loop`]
//! defines the order in which it calls the module.

pub mod commands;
pub mod event_loop;

pub use crate::node::*;

use crate::server::callbacks::Callbacks;
use crate::server::calls::context;
use crate::server::{TextRef, main_thread};

/// Starts another server of this generation with the module loaded; in a cluster if there are slots.
pub fn start(generation: Generation, slots: Option<Slots>) {
    main_thread::forget_all();
    crate::lock::internal_errors::forget();
    node(|node| {
        *node = Node::new(generation);
        node.slots = slots;
    });
    crate::server::callbacks::set(Callbacks {
        answer: crate::event_loop::answer,
        gone: crate::event_loop::gone,
        tick: crate::event_loop::tick,
        ask_replicas: crate::event_loop::ask_replicas,
        key_touched: crate::event_loop::key_touched,
        after_touch: crate::event_loop::after_touch,
        event: crate::event_loop::event,
        info: crate::info::fill,
    });
    let ctx = context(0, 0);
    let registered = crate::commands::ALL.iter().all(|command| (command.register)(ctx, "lock"));
    assert!(registered && crate::config::start(ctx, &[] as &[TextRef]).is_ok());
    crate::keyspace::listeners::start(ctx, b"holdfast");
}
