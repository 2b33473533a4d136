//! A server's directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process, thread};

/// Where a server keeps its files. A private directory is deleted at the end, unless the test failed.
#[derive(Debug)]
pub(crate) enum Dir {
    Private(PathBuf),
    Given(PathBuf),
}

impl Dir {
    /// A new empty directory.
    pub(crate) fn private() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("holdfast-{}-{number}", process::id()));
        // A directory that an earlier process with this id may have left.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("can't make {}: {error}", path.display()));
        Self::Private(path)
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Private(path) | Self::Given(path) => path,
        }
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        match self {
            Self::Private(path) if thread::panicking() => eprintln!("kept: {}", path.display()),
            Self::Private(path) => drop(fs::remove_dir_all(path)),
            Self::Given(_) => {}
        }
    }
}
