//! The clients of the soak that work in other processes, in Python, and what they tell its ledgers.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::AbortHandle;

use super::{LOCKS, PERMITS, Scene, WAIT};
use crate::clock::until;
use crate::load::dies_with_the_lab;
use crate::options::{Options, workspace};

/// Programs at work, and who listens to their clients.
pub struct Others {
    programs: Vec<Child>,
    listens: AbortHandle,
}

impl Others {
    /// Starts so many programs, every other one with threads and the rest with tasks, of so many clients each. To be called
    /// inside a runtime.
    pub fn start(
        scene: &Arc<Scene>,
        server: (SocketAddr, &Path),
        options: &Options,
        programs: usize,
        clients: usize,
    ) -> std::io::Result<Others> {
        let (address, folder) = server;
        let ledger = folder.join("ledger");
        let _ = std::fs::remove_file(&ledger);
        let listener = UnixListener::bind(&ledger)?;
        let listens = tokio::spawn(listen(Arc::clone(scene), listener)).abort_handle();
        let mut others = Others { programs: Vec::new(), listens };
        for number in 0..programs {
            let kind = if number % 2 == 0 { "threads" } else { "tasks" };
            let mut command = Command::new(&options.python);
            command
                .arg(workspace().join("verification/lab/clients/soak.py"))
                .args([kind, &address.to_string()])
                .arg(&ledger)
                .args([clients, LOCKS, PERMITS].map(|count| count.to_string()))
                .arg(WAIT.as_secs().to_string())
                .arg((options.seed + number as u64).to_string())
                .env("PYTHONPATH", workspace().join("clients/python/src"))
                .stdin(Stdio::piped());
            dies_with_the_lab(&mut command);
            others.programs.push(command.spawn()?);
        }
        Ok(others)
    }

    /// What one that runs threads, and one that runs tasks, has of memory, in bytes.
    pub fn memory(&self) -> Vec<u64> {
        self.programs.iter().take(2).map(|program| resident(&program.id().to_string())).collect()
    }

    /// Closing its input tells a program to stop.
    pub fn stop(&mut self) {
        for program in &mut self.programs {
            drop(program.stdin.take());
        }
    }

    /// Whether all end within `limit`, with success.
    pub fn end(mut self, limit: Duration) -> bool {
        self.stop();
        let ended = until(limit, || self.programs.iter_mut().all(|program| matches!(program.try_wait(), Ok(Some(_)))));
        let mut well = ended;
        for program in &mut self.programs {
            let _ = program.kill();
            well &= program.wait().is_ok_and(|status| status.success());
        }
        self.listens.abort();
        well
    }
}

/// The memory that a process has in use, in bytes; `self` is this one.
pub fn resident(process: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|size| size.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

async fn listen(scene: Arc<Scene>, listener: UnixListener) {
    while let Ok((line, _)) = listener.accept().await {
        tokio::spawn(hear(Arc::clone(&scene), line));
    }
}

/// Each line is answered once the ledger has it: the client goes on only then.
async fn hear(scene: Arc<Scene>, mut line: UnixStream) {
    let (reader, mut writer) = line.split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(text)) = lines.next_line().await {
        take_in(&scene, &text);
        if writer.write_all(b"\n").await.is_err() {
            break;
        }
    }
}

fn take_in(scene: &Scene, text: &str) {
    let known = |number: &str| number.parse().ok().filter(|number| *number < LOCKS);
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["granted", number, token] => match (known(number), token.parse()) {
            (Some(number), Ok(token)) => scene.granted(number, token),
            _ => scene.failed(&text),
        },
        ["gives", number] => match known(number) {
            Some(number) => scene.gives_back(number),
            None => scene.failed(&text),
        },
        ["none"] => scene.timed_out(),
        _ => scene.failed(&text),
    }
}
