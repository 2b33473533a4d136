//! Commands as the server knows them.

use super::Ctx;
pub use super::grammar::{Access, Arg, Command, Docs, Keys};
use super::text::TextRef;
use crate::node::{Positions, Registered, node};
use std::ffi::CStr;
use std::marker::PhantomData;

/// One call of a command.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The context it runs in.
    pub ctx: Ctx<'a>,
    pub(crate) argv: &'a [Vec<u8>],
}

impl<'a> Call<'a> {
    /// How many arguments there are, the command's name included.
    pub fn count(self) -> usize {
        self.argv.len()
    }

    /// The argument at a position; 0 is the command's name.
    pub fn get(self, index: usize) -> Option<TextRef<'a>> {
        self.argv.get(index).map(|arg| TextRef(arg))
    }
}

/// A command in a list of commands of any type.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name, in lower case.
    pub name: &'static CStr,
    /// Its grammar and documentation.
    pub docs: Docs,
    /// Registers it with the server; see [`register`].
    pub register: fn(Ctx, &str) -> bool,
}

impl Entry {
    /// The entry of a command.
    pub const fn of<C: Command>() -> Self {
        Self { name: C::NAME, docs: C::DOCS, register: register::<C> }
    }

    /// Its line of syntax.
    pub fn syntax(&self) -> String {
        let name = self.name.to_string_lossy().to_uppercase();
        self.docs.args.iter().fold(name, |line, arg| format!("{line} {}", arg.syntax()))
    }
}

/// Registers a command with the server.
pub fn register<C: Command>(_: Ctx, _: &str) -> bool {
    let registered = Registered {
        run: |client, db, place, argv| {
            let ctx = Ctx { client, db, place, lifetime: PhantomData };
            let _ = ctx.reply_outcome(C::run(Call { ctx, argv }));
        },
        writes: C::FLAGS.to_bytes().split(|byte| *byte == b' ').any(|flag| flag == b"write"),
        keys: match C::KEYS {
            Keys::None => Positions::None,
            Keys::First(_) => Positions::First,
            Keys::Counted(_) => Positions::Counted,
        },
        arity: C::ARITY,
    };
    node(|node| node.commands.insert(C::NAME.to_bytes().to_vec(), registered));
    true
}

/// Whether the server knows a command.
pub fn exists(_: Ctx, name: &CStr) -> bool {
    // No field has an expiry of its own here.
    name != c"HPEXPIRE" && !node(|node| node.renamed.contains(&name.to_bytes().to_ascii_lowercase()))
}
