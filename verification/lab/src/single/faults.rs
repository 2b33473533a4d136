//! The faults of one server.

use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use redis::{Cmd, Connection, RedisError};
use support::{Builder, Server, eventually};

use super::Trial;
use super::clients::Shared;
use crate::fuzz::copies::check_copies;

/// Long enough for a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// A fault that can be injected repeatedly.
pub trait Injector {
    /// Injects it once, and returns when the server replies again.
    fn inject(&mut self, server: &mut Server, shared: &Shared) -> Result<(), String>;

    /// A last check, when all clients have stopped.
    fn at_the_end(&mut self, _server: &Server) -> Result<(), String> {
        Ok(())
    }
}

impl<F: FnMut(&mut Server) -> Result<(), String>> Injector for F {
    fn inject(&mut self, server: &mut Server, _: &Shared) -> Result<(), String> {
        self(server)
    }
}

/// All faults.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial {
            name: "kill -9, AOF always",
            server: aof_always,
            may_lose: false,
            injector: |_| Box::new(kill_and_restart),
        },
        Trial {
            name: "kill -9, AOF everysec",
            server: aof_everysec,
            may_lose: true,
            injector: |_| Box::new(kill_and_restart),
        },
        Trial {
            name: "power lost, AOF everysec",
            server: aof_everysec,
            may_lose: true,
            injector: |server| Box::new(PowerLoss::watch(server)),
        },
        Trial {
            name: "SHUTDOWN and restart, RDB",
            server: Server::builder,
            may_lose: false,
            injector: |_| Box::new(shut_down_and_restart),
        },
        Trial { name: "DEBUG RELOAD", server: Server::builder, may_lose: false, injector: |_| Box::new(reload) },
        Trial {
            name: "BGREWRITEAOF, then kill -9",
            server: aof_always,
            may_lose: false,
            injector: |_| Box::new(rewrite_and_kill),
        },
        Trial {
            name: "full resynchronisation",
            server: || Server::builder().arg("repl-diskless-sync-delay", "0"),
            may_lose: false,
            injector: |server| Box::new(Resync::of(server)),
        },
        Trial {
            name: "MODULE UNLOAD and LOAD",
            server: Server::builder,
            may_lose: false,
            injector: |_| Box::new(Reload),
        },
    ]
}

fn aof_always() -> Builder {
    Server::builder().arg("appendonly", "yes").arg("appendfsync", "always")
}

fn aof_everysec() -> Builder {
    Server::builder().arg("appendonly", "yes").arg("appendfsync", "everysec")
}

fn kill_and_restart(server: &mut Server) -> Result<(), String> {
    server.kill9();
    server.restart();
    Ok(())
}

fn shut_down_and_restart(server: &mut Server) -> Result<(), String> {
    // The connection is closed instead of a reply.
    let _ = redis::cmd("SHUTDOWN").arg("SAVE").exec(&mut server.connect());
    server.wait_until_ended();
    server.restart();
    Ok(())
}

fn reload(server: &mut Server) -> Result<(), String> {
    redis::cmd("DEBUG").arg("RELOAD").exec(&mut server.connect()).map_err(notified)
}

/// The server is killed during the rewrite or after it, at random.
fn rewrite_and_kill(server: &mut Server) -> Result<(), String> {
    let mut connection = server.connect();
    redis::cmd("BGREWRITEAOF").exec(&mut connection).map_err(notified)?;
    if fastrand::bool() && !eventually(SOON, || !rewriting(&mut connection)) {
        return Err("the rewrite of the AOF did not end".into());
    }
    kill_and_restart(server)
}

fn rewriting(connection: &mut Connection) -> bool {
    let info: redis::RedisResult<redis::InfoDict> = redis::cmd("INFO").arg("persistence").query(connection);
    info.is_ok_and(|info| {
        info.get::<u8>("aof_rewrite_in_progress") == Some(1) || info.get::<u8>("aof_rewrite_scheduled") == Some(1)
    })
}

/// The module can't be unloaded while clients wait, while it has a timer, or if a connection's last command is one of its own.
/// So one attempt is made meanwhile, and another when the clients wait no more and their connections are closed.
struct Reload;

impl Injector for Reload {
    fn inject(&mut self, server: &mut Server, shared: &Shared) -> Result<(), String> {
        let mut connection = server.connect();
        if let Err(error) = unload().exec(&mut connection) {
            if !["blocked clients", "timer", "not possible"].iter().any(|reason| error.to_string().contains(reason)) {
                return Err(notified(error));
            }
            shared.no_waits.store(true, Ordering::Relaxed);
            let mut kill = redis::cmd("CLIENT");
            kill.arg("KILL").arg("TYPE").arg("normal");
            let unloaded = eventually(SOON, || {
                redis::pipe().add_command(kill.clone()).add_command(unload()).exec(&mut connection).is_ok()
            });
            shared.no_waits.store(false, Ordering::Relaxed);
            if !unloaded {
                return Err("the module could not be unloaded although no client waited".into());
            }
        }
        let path = support::module_path();
        redis::cmd("MODULE")
            .arg("LOAD")
            .arg(path.as_os_str().as_encoded_bytes())
            .exec(&mut connection)
            .map_err(notified)
    }
}

fn unload() -> Cmd {
    let mut command = redis::cmd("MODULE");
    command.arg("UNLOAD").arg("holdfast");
    command
}

/// A replica that needs a full copy each time: the primary has a new replication id, and the link is cut.
struct Resync {
    replica: Server,
}

impl Resync {
    fn of(primary: &Server) -> Resync {
        let replica = Server::start();
        replica.replica_of(primary);
        Resync { replica }
    }
}

impl Injector for Resync {
    fn inject(&mut self, server: &mut Server, _: &Shared) -> Result<(), String> {
        let full = |server: &Server| server.info("stats", "sync_full");
        let before = full(server);
        let mut connection = server.connect();
        redis::cmd("DEBUG").arg("CHANGE-REPL-ID").exec(&mut connection).map_err(notified)?;
        redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("replica").exec(&mut connection).map_err(notified)?;
        let done = eventually(SOON, || {
            full(server) != before && self.replica.info("replication", "master_link_status").as_deref() == Some("up")
        });
        if done { Ok(()) } else { Err("the replica did not get a full copy".into()) }
    }

    fn at_the_end(&mut self, server: &Server) -> Result<(), String> {
        check_copies(server, std::slice::from_ref(&self.replica))
    }
}

/// A power failure: what was written to the AOF but may not be on disk is lost. `everysec` guarantees only what is older than two
/// seconds. Here everything of the last second is cut off.
struct PowerLoss {
    sizes: Arc<Mutex<VecDeque<(Instant, Sizes)>>>,
    over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

type Sizes = Vec<(PathBuf, u64)>;

const LOST: Duration = Duration::from_secs(1);

impl PowerLoss {
    fn watch(server: &Server) -> PowerLoss {
        let dir = server.dir().join("appendonlydir");
        let sizes = Arc::new(Mutex::new(VecDeque::new()));
        let over = Arc::new(AtomicBool::new(false));
        let watcher = thread::spawn({
            let (sizes, over) = (Arc::clone(&sizes), Arc::clone(&over));
            move || {
                while !over.load(Ordering::Relaxed) {
                    let now = (Instant::now(), sizes_in(&dir));
                    if let Ok(mut sizes) = sizes.lock() {
                        sizes.push_back(now);
                        while sizes.front().is_some_and(|(at, _)| at.elapsed() > 3 * LOST) {
                            sizes.pop_front();
                        }
                    }
                    thread::sleep(Duration::from_millis(10));
                }
            }
        });
        PowerLoss { sizes, over, watcher: Some(watcher) }
    }

    /// The file sizes a second before `at`.
    fn on_disk(&self, at: Instant) -> Result<Sizes, String> {
        let sizes = self.sizes.lock().map_err(|_| "the watcher of the AOF panicked")?;
        let old = sizes.iter().rev().find(|(seen, _)| *seen + LOST <= at).or(sizes.front());
        old.map(|(_, sizes)| sizes.clone()).ok_or_else(|| "no AOF was seen".into())
    }

    /// What survived a power failure is on disk, whatever the sizes were before.
    fn begin_with(&self, kept: Sizes) {
        if let (Ok(mut sizes), Some(long_ago)) = (self.sizes.lock(), Instant::now().checked_sub(LOST)) {
            sizes.clear();
            sizes.push_back((long_ago, kept));
        }
    }
}

impl Injector for PowerLoss {
    fn inject(&mut self, server: &mut Server, _: &Shared) -> Result<(), String> {
        server.kill9();
        let kept = self.on_disk(Instant::now())?;
        for (path, size) in &kept {
            cut(path, *size).map_err(|error| error.to_string())?;
        }
        self.begin_with(kept);
        server.restart();
        Ok(())
    }
}

impl Drop for PowerLoss {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

fn cut(path: &Path, size: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let size = size.min(file.metadata()?.len());
    file.set_len(size)
}

/// The files that the server appends to, with their sizes.
fn sizes_in(dir: &Path) -> Sizes {
    let Ok(files) = fs::read_dir(dir) else {
        return Sizes::new();
    };
    files
        .flatten()
        .filter(|file| file.file_name().to_string_lossy().ends_with(".incr.aof"))
        .filter_map(|file| Some((file.path(), file.metadata().ok()?.len())))
        .collect()
}

fn notified(error: RedisError) -> String {
    error.to_string()
}
