//! A server whose wall clock can be stepped.
//!
//! libfaketime provides the clock. It does not work with Debian's redis-server, whose jemalloc reads the time before libfaketime
//! is ready. The Valkey of `scripts/servers` uses libc's malloc. It loads modules with `RTLD_DEEPBIND`, which bypasses libfaketime,
//! so a small preloaded library removes that flag: server and module share one clock.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Builder, Server};

use crate::options::workspace;

const SERVER: &str = ".servers/valkey-9.1/valkey-server";
/// A library that is preloaded first.
const SHALLOW_BINDING: &str = "\
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlopen(const char *file, int mode) {
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, \"dlopen\");
    return next(file, mode & ~RTLD_DEEPBIND);
}
";

/// The clock of one server.
pub struct SteppedClock(PathBuf);

impl SteppedClock {
    /// A server, not started yet, with its own clock. `number` distinguishes servers in one folder.
    pub fn server(dir: &Path, number: usize) -> io::Result<(Builder, SteppedClock)> {
        let (program, library) = (workspace().join(SERVER), libfaketime());
        let Some(library) = library.filter(|_| program.exists()) else {
            return Err(io::Error::other("needs Debian's libfaketime and `scripts/servers valkey-9.1`"));
        };
        let (clock, wrapper) = (dir.join(format!("clock-{number}")), dir.join(format!("server-{number}")));
        let script = format!(
            "#!/bin/sh\nexport LD_PRELOAD='{}:{}' FAKETIME_TIMESTAMP_FILE='{}' FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1\nexec '{}' \"$@\"\n",
            shallow_binding(dir)?.display(),
            library.display(),
            clock.display(),
            program.display()
        );
        fs::write(&clock, "+0\n")?;
        fs::write(&wrapper, script)?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
        Ok((Server::builder().program(wrapper), SteppedClock(clock)))
    }

    /// Sets the clock this many seconds ahead of the machine's.
    pub fn set(&self, seconds: i64) -> io::Result<()> {
        // Written to another file and renamed, because the server may read it at any moment.
        let aside = self.0.with_extension("new");
        fs::write(&aside, format!("{seconds:+}\n"))?;
        fs::rename(&aside, &self.0)
    }
}

/// The library of Debian's package, on any processor.
fn libfaketime() -> Option<PathBuf> {
    fs::read_dir("/usr/lib")
        .ok()?
        .flatten()
        .map(|entry| entry.path().join("faketime/libfaketime.so.1"))
        .find(|path| path.exists())
}

/// Compiled with the compiler that the build of the module needs, too.
fn shallow_binding(dir: &Path) -> io::Result<PathBuf> {
    let (source, library) = (dir.join("binding.c"), dir.join("binding.so"));
    fs::write(&source, SHALLOW_BINDING)?;
    let status = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status()?;
    if status.success() { Ok(library) } else { Err(io::Error::other("gcc failed")) }
}

/// A temporary folder, deleted on drop.
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// A new folder.
    pub fn new() -> io::Result<TempDir> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("holdfast-clock-{}-{number}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(TempDir(path))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
