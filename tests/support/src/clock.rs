//! Clocks that a test steps.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::environment::{in_containers, server_program, workspace};
use crate::server::Builder;

/// The clock of one server, set by a preloaded library.
pub struct Clock {
    offset: File,
    /// The directory of the library and the offset.
    dir: PathBuf,
}

impl Drop for Clock {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Clock {
    /// A clock for the server of this builder. `None` in a container, where the library is missing.
    #[track_caller]
    pub fn of(builder: Builder) -> Option<(Builder, Self)> {
        if in_containers() {
            return None;
        }
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("holdfast-clock-{}-{number}", process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        let path = |name: &str| dir.join(name);
        let (library, offset, wrapper) = (path("clock_step.so"), path("offset"), path("server"));
        let source = workspace().join("tests/clock_steps/clock_step.c");
        let built = Command::new("gcc").args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
        assert!(built.expect("gcc, which the build of the module needs, too").success());
        fs::write(&offset, 0_i64.to_ne_bytes()).expect("written");
        let (program, preload, step) = (server_program(), library.display(), offset.display());
        let script =
            format!("#!/bin/sh\nCLOCK_STEP='{step}' LD_PRELOAD='{preload}' exec '{}' \"$@\"\n", program.display());
        fs::write(&wrapper, script).expect("written");
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).expect("the wrapper is executable");
        let offset = File::options().write(true).open(offset).expect("the offset file exists");
        Some((builder.program(wrapper), Self { offset, dir }))
    }

    /// Sets the server's clock this many ms ahead of the machine's.
    pub fn set(&self, ms: i64) {
        self.offset.write_all_at(&(ms * 1000).to_ne_bytes(), 0).expect("written");
    }
}
