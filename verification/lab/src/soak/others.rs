//! The soak's clients in Python processes, and their reports to the ledgers.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::AbortHandle;

use super::{LOCKS, PERMITS, Shared, WAIT};
use crate::clock::until;
use crate::load::dies_with_the_lab;
use crate::options::{Options, workspace};

/// The running programs, and the listener for their clients.
pub struct Others {
    programs: Vec<Child>,
    listens: AbortHandle,
}

impl Others {
    /// Starts the programs, alternately with threads and with tasks, with this many clients each. Must be called inside a runtime.
    pub fn start(
        shared: &Arc<Shared>,
        server: (SocketAddr, &Path),
        options: &Options,
        programs: usize,
        clients: usize,
    ) -> std::io::Result<Others> {
        let (address, folder) = server;
        let ledger = folder.join("ledger");
        let _ = std::fs::remove_file(&ledger);
        let listener = UnixListener::bind(&ledger)?;
        let listens = tokio::spawn(listen(Arc::clone(shared), listener)).abort_handle();
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

    /// The memory of a process with threads, and of one with tasks, in bytes.
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

/// The memory of a process in bytes; `self` is this one.
pub fn resident(process: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|size| size.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

async fn listen(shared: Arc<Shared>, listener: UnixListener) {
    while let Ok((line, _)) = listener.accept().await {
        tokio::spawn(serve_client(Arc::clone(&shared), line));
    }
}

/// Each line gets a reply once the ledger has it: the client continues only then.
async fn serve_client(shared: Arc<Shared>, mut line: UnixStream) {
    let (reader, mut writer) = line.split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(text)) = lines.next_line().await {
        handle_line(&shared, &text);
        if writer.write_all(b"\n").await.is_err() {
            break;
        }
    }
}

fn handle_line(shared: &Shared, text: &str) {
    let known = |number: &str| number.parse().ok().filter(|number| *number < LOCKS);
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["granted", number, token] => match (known(number), token.parse()) {
            (Some(number), Ok(token)) => shared.granted(number, token),
            _ => shared.failed(&text),
        },
        ["gives", number] => match known(number) {
            Some(number) => shared.releases(number),
            None => shared.failed(&text),
        },
        ["none"] => shared.timed_out(),
        _ => shared.failed(&text),
    }
}
