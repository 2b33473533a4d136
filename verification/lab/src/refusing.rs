//! A primary that is cut off from its replicas, with `min-replicas-to-write 1`. From the moment at which it refuses a client's write,
//! it grants no lock, whatever ended the hold before and however a client waits. The waiters get the locks at the new primary.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value, cmd};
use support::resp;
use tokio::runtime::{Builder, Runtime};

use crate::bound;
use crate::clock::{now, until};
use crate::engine::{Equipment, LabError, Result};
use crate::load::dies_with_the_lab;
use crate::options::{Options, workspace};
use crate::primary_fault::PrimaryFault;
use crate::report::Row;
use crate::session::{Discovery, field};
use crate::tally::Tally;
use crate::trio::{Demotion, Setting, Trio};

/// Longer than it takes until the primary refuses writes: three seconds of silence, and a second to notice it.
const LEASE: u64 = 10_000;
/// The lease of watched locks, which expire soon after the last renewal.
const WATCHED: u64 = 3_000;
/// How long one read of the holders' events waits: so much later, at the latest, their session ends after they are dropped.
const READ_MS: u64 = 100;
/// A lease that does not end during the test.
const LONG: u64 = 300_000;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the primary is observed after the last hold has ended, in seconds.
const OBSERVATION_SECONDS: u64 = 3;

/// What ends the hold that a waiter waits for.
const ENDS: [&str; 3] = ["lease", "watchdog", "disconnect"];
/// How a waiter waits: blocked on its own connection, or with Holdfast's client, which has a session.
const BLOCKED: [&str; 2] = ["blocked-rust", "blocked-python"];
const SESSIONS: [&str; 2] = ["session-rust", "session-python"];

/// Half of the time on each server.
pub fn run(options: &Options) -> Vec<Row> {
    let options = Options { budget: options.budget / 2, ..options.clone() };
    vec![
        row("Primary cut off, min-replicas-to-write 1", Equipment::default(), &options),
        row("Primary cut off, min-replicas-to-write 1, Valkey 9.1", Equipment::valkey_9_1(), &options),
    ]
}

fn row(title: &str, equipment: Equipment, options: &Options) -> Row {
    let mut seen = Results::default();
    if let Err(why) = repeat_cuts(&mut seen, equipment, options) {
        seen.tally.broke_off(&why, Vec::new());
    }
    let Results { tally, requests, waited, granted, refused_after, taken_over } = seen;
    let mut row = tally.row(title);
    row.requests += requests;
    row.note = format!(
        "{granted} grants of {waited} who waited at a primary that refused; refusals began {:.1} s after the cut at the latest; \
         {taken_over} locks taken at the new primary meanwhile",
        refused_after.as_secs_f64()
    );
    row
}

#[derive(Default)]
struct Results {
    tally: Tally,
    requests: u64,
    waited: u64,
    /// The primary's grants after it began to refuse writes.
    granted: u64,
    refused_after: Duration,
    taken_over: u64,
}

fn repeat_cuts(seen: &mut Results, equipment: Equipment, options: &Options) -> Result<()> {
    let begun = Instant::now();
    let mut trio = Trio::start(Setting { min_replicas: 1, equipment, ..Setting::default() }, options)?;
    loop {
        let before = begun.elapsed();
        seen.cut_off(&mut trio, options)?;
        seen.tally.crashes(trio.crashes());
        seen.tally.left_waiting(&trio.infos()?);
        eprintln!("refusing: {} primaries cut off", seen.tally.runs);
        if begun.elapsed() + (begun.elapsed() - before) / 2 > options.budget {
            return Ok(());
        }
    }
}

impl Results {
    /// Cuts one primary off, and reconnects it.
    fn cut_off(&mut self, trio: &mut Trio, options: &Options) -> Result<()> {
        let number = self.tally.runs;
        let keys = keys(number);
        let old = trio.primary_node();
        let mut at_old = trio.primary()?;
        let mut holders = Holders::take(trio, &keys)?;
        let waiters = Waiters::start(trio, &keys, options)?;
        self.requests += 2 * keys.len() as u64;
        if !until(PATIENCE, || waiting(&mut at_old) == Some(keys.len() as u64)) {
            return Err(LabError(format!("{:?} of {} wait", waiting(&mut at_old), keys.len())));
        }
        holders.renew(&keys)?;

        let injected = now();
        trio.inject(PrimaryFault::CutFromPeers)?;
        let refuses = || code(&say(&mut at_old, "LOCK.ACQUIRE probe prober LEASE 1")).as_deref() == Some("NOREPLICAS");
        if !until(PATIENCE, refuses) {
            return Err(LabError("the primary still accepts writes".into()));
        }
        self.refused_after = self.refused_after.max(Duration::from_micros(now() - injected));
        let before = Written::of(&mut at_old)?;
        for key in &keys {
            if say(&mut at_old, &format!("HEXISTS {key} holder"))? != Value::Int(1) {
                return Err(LabError(format!("{key} ended before the primary refused writes, so nothing was tested")));
            }
        }
        self.check_commands(&mut at_old, &keys[0]);
        drop(holders);

        trio.await_successor(old)?;
        self.take_over(&mut trio.primary()?, &keys)?;
        // The server ends the keys, and each end could wake the waiters.
        let end = Instant::now() + PATIENCE;
        for key in &keys {
            let left = end.saturating_duration_since(Instant::now());
            if !until(left, || say(&mut at_old, &format!("EXISTS {key}")) == Ok(Value::Int(0))) {
                self.tally
                    .violation(&format!("{key} does not end, or was granted, at the primary that refuses writes"));
            }
        }
        let begin = uptime(&mut at_old)?;
        if !until(PATIENCE, || uptime(&mut at_old).is_ok_and(|now| now > begin + OBSERVATION_SECONDS)) {
            return Err(LabError("the clock of the primary that was cut off does not advance".into()));
        }
        let after = Written::of(&mut at_old)?;
        self.granted += after.grants() - before.grants();
        self.waited += keys.len() as u64;
        if after != before {
            self.tally.violation(&format!("while it refused writes, the primary went from {before:?} to {after:?}"));
        }
        if let Ok((key, result)) = waiters.results.try_recv() {
            self.tally.violation(&format!("{key}, while its primary was cut off: {result:?}"));
        }
        match waiting(&mut at_old) {
            Some(left) if left == keys.len() as u64 => {}
            left => self.tally.violation(&format!("{left:?} of {} still wait at the old primary", keys.len())),
        }
        release_all(&mut trio.primary()?, &keys)?;

        let back = if number.is_multiple_of(2) { Demotion::ByHand(0) } else { Demotion::BySentinels };
        trio.bring_back(old, PrimaryFault::CutFromPeers, back)?;
        trio.settle()?;
        self.tally.failover(now() - injected);
        self.tally.runs += 1;
        self.all_are_answered(&waiters, keys.len());
        Ok(())
    }

    /// Checks which commands such a primary refuses, and which it executes, against docs/operations.md.
    fn check_commands(&mut self, primary: &mut Connection, key: &str) {
        let refused = [
            format!("LOCK.ACQUIRE {key} other WAIT 0"),
            format!("LOCK.ACQUIRE {key} holder"),
            format!("LOCK.RENEW {key} holder"),
            format!("LOCK.RELEASE {key} holder"),
            format!("LOCK.FORCE {key}"),
            format!("LOCK.MACQUIRE 1 {key} other"),
            format!("LOCK.MRENEW 1 {key} holder"),
            format!("LOCK.MRELEASE 1 {key} holder"),
            format!("DEL {key}"),
        ];
        let taken = [
            format!("LOCK.INFO {key}"),
            format!("LOCK.WAITERS {key}"),
            "LOCK.TOP".to_owned(),
            "LOCK.SESSION".to_owned(),
            "LOCK.EVENTS".to_owned(),
            "LOCK.VERSION".to_owned(),
        ];
        self.requests += (refused.len() + taken.len()) as u64;
        for line in refused {
            let reply = say(primary, &line);
            if code(&reply).as_deref() != Some("NOREPLICAS") {
                self.tally.violation(&format!("a primary that refuses writes replies to {line} with {reply:?}"));
            }
        }
        for line in taken {
            let reply = say(primary, &line);
            if reply.is_err() {
                self.tally.violation(&format!("a primary that refuses writes replies to {line} with {reply:?}"));
            }
        }
    }

    /// Another client acquires every lock at the new primary, as soon as the lease that it knows has expired.
    fn take_over(&mut self, primary: &mut Connection, keys: &[String]) -> Result<()> {
        primary.set_read_timeout(Some(PATIENCE))?;
        for key in keys {
            let reply = say(primary, &format!("LOCK.ACQUIRE {key} successor LEASE {LONG} WAIT {}", 2 * LEASE));
            match reply {
                Ok(Value::Int(_)) => self.taken_over += 1,
                other => self.tally.violation(&format!("{key} can't be acquired at the new primary: {other:?}")),
            }
        }
        self.requests += keys.len() as u64;
        Ok(())
    }

    /// Clients with a session have requested the lock at the new primary and got it. Blocked ones got an error.
    fn all_are_answered(&mut self, waiters: &Waiters, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..count {
            match waiters.results.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((key, result)) => {
                    let is_session = SESSIONS.iter().any(|session| key.contains(session));
                    if is_session != result.is_ok() {
                        self.tally.violation(&format!("{key}, after its primary was demoted: {result:?}"));
                    }
                }
                Err(_) => self.tally.violation("a waiter at the old primary got no reply"),
            }
        }
    }
}

/// A lock for each way to end a hold and each way to wait for it.
fn keys(number: u64) -> Vec<String> {
    let waiters = || BLOCKED.into_iter().chain(SESSIONS);
    ENDS.iter().flat_map(|end| waiters().map(move |waiter| format!("{number}:{end}:{waiter}"))).collect()
}

fn say(connection: &mut Connection, line: &str) -> RedisResult<Value> {
    let mut words = line.split(' ');
    cmd(words.next().unwrap_or_default()).arg(words.collect::<Vec<_>>()).query(connection)
}

fn code(reply: &RedisResult<Value>) -> Option<String> {
    reply.as_ref().err()?.code().map(str::to_owned)
}

fn info(connection: &mut Connection, section: &str) -> RedisResult<String> {
    cmd("INFO").arg(section).query(connection)
}

fn number(info: &str, name: &str) -> Option<u64> {
    field(info, name)?.parse().ok()
}

fn waiting(connection: &mut Connection) -> Option<u64> {
    number(&info(connection, "holdfast").ok()?, "holdfast_waiters")
}

fn uptime(connection: &mut Connection) -> Result<u64> {
    number(&info(connection, "server")?, "uptime_in_seconds").ok_or_else(|| LabError("no uptime".into()))
}

fn release_all(primary: &mut Connection, keys: &[String]) -> Result<()> {
    for key in keys {
        cmd("LOCK.RELEASE").arg(key).arg("successor").exec(primary)?;
    }
    Ok(())
}

/// The module's counters of grants, renewals and releases.
#[derive(Debug, PartialEq, Eq)]
struct Written {
    at_once: u64,
    queued: u64,
    renewals: u64,
    watchdog_renewals: u64,
    releases: u64,
}

impl Written {
    fn of(connection: &mut Connection) -> Result<Written> {
        let info = info(connection, "holdfast")?;
        let count = |name: &str| {
            number(&info, &format!("holdfast_{name}")).ok_or_else(|| LabError(format!("INFO holdfast has no {name}")))
        };
        Ok(Written {
            at_once: count("grants_at_once")?,
            queued: count("grants_queued")?,
            renewals: count("renewals")?,
            watchdog_renewals: count("watchdog_renewals")?,
            releases: count("releases")?,
        })
    }

    fn grants(&self) -> u64 {
        self.at_once + self.queued
    }
}

/// The holders of the locks: one session. Dropping it disconnects them.
struct Holders {
    /// For requests on behalf of the session, whose own connection is blocked most of the time.
    connection: Connection,
    is_dropped: Arc<AtomicBool>,
    /// Reads the session's events and has its connection.
    reader: Option<JoinHandle<()>>,
}

impl Holders {
    fn take(trio: &Trio, keys: &[String]) -> Result<Holders> {
        let mut connection = trio.primary()?;
        let mut session = trio.primary()?;
        let id = resp::session_id(&say(&mut session, "LOCK.SESSION")?)?;
        let is_dropped = Arc::new(AtomicBool::new(false));
        let reader = thread::spawn({
            let is_dropped = Arc::clone(&is_dropped);
            let read = format!("LOCK.EVENTS WAIT {READ_MS}");
            // The server renews watched holds only for a session that reads.
            move || while !is_dropped.load(Ordering::Relaxed) && say(&mut session, &read).is_ok() {}
        });
        for key in keys {
            let how = match key.split(':').nth(1) {
                Some("watchdog") => format!("LEASE {WATCHED} WATCHDOG"),
                Some("disconnect") => format!("LEASE {LEASE} EPHEMERAL"),
                _ => format!("LEASE {LEASE}"),
            };
            match say(&mut connection, &format!("LOCK.ACQUIRE {key} holder {how} SESSION {id}"))? {
                Value::Int(_) => {}
                other => return Err(LabError(format!("{key} was free, yet: {other:?}"))),
            }
        }
        Ok(Holders { connection, is_dropped, reader: Some(reader) })
    }

    /// Renews the leases that the server does not renew, because programs need a while to start.
    fn renew(&mut self, keys: &[String]) -> Result<()> {
        for key in keys.iter().filter(|key| !key.contains("watchdog")) {
            say(&mut self.connection, &format!("LOCK.RENEW {key} holder LEASE {LEASE}"))?;
        }
        Ok(())
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        self.is_dropped.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// A waiter's result: it got the lock, or an error.
type WaitResult = std::result::Result<(), String>;

/// All waiters. Dropping it ends them.
struct Waiters {
    results: Receiver<(String, WaitResult)>,
    python: Child,
    runtime: Option<Runtime>,
}

impl Waiters {
    fn start(trio: &Trio, keys: &[String], options: &Options) -> Result<Waiters> {
        let of = |kind: &str| keys.iter().filter(|key| key.ends_with(kind)).cloned().collect::<Vec<_>>();
        let (sender, results) = channel();
        for key in of("blocked-rust") {
            let connection = trio.primary()?;
            let sender = sender.clone();
            thread::spawn(move || sender.send((key.clone(), block(connection, &key))));
        }
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let discovery = trio.discovery();
        let locks = {
            let _inside = runtime.enter();
            bound::locks(&discovery).map_err(|why| LabError(why.to_string()))?
        };
        for key in of("session-rust") {
            let (locks, sender) = (locks.clone(), sender.clone());
            runtime.spawn(async move {
                let lock = locks.lock(&key).lease(Duration::from_millis(LONG)).wait_forever();
                let result = match lock.acquire().await {
                    Ok(Some(guard)) => {
                        let _ = guard.release().await;
                        Ok(())
                    }
                    other => Err(format!("{other:?}")),
                };
                sender.send((key, result))
            });
        }
        let python = python(&discovery, &[of("blocked-python"), of("session-python")].concat(), sender, options)?;
        Ok(Waiters { results, python, runtime: Some(runtime) })
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        let _ = self.python.kill();
        let _ = self.python.wait();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Waits like a client without a session, for as long as the connection lasts.
fn block(mut connection: Connection, key: &str) -> WaitResult {
    let reply = connection
        .set_read_timeout(None)
        .and_then(|()| say(&mut connection, &format!("LOCK.ACQUIRE {key} waiter LEASE {LONG} WAIT 0")));
    match reply {
        Ok(Value::Int(_)) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(why) => Err(why.to_string()),
    }
}

/// The same in Python: it prints a line with the result for each lock.
fn python(
    discovery: &Discovery,
    keys: &[String],
    sender: Sender<(String, WaitResult)>,
    options: &Options,
) -> Result<Child> {
    let Discovery::Sentinels(addresses) = discovery else {
        return Err(LabError("a trio has Sentinels".into()));
    };
    let mut command = Command::new(&options.python);
    command
        .arg(workspace().join("verification/lab/clients/waiters.py"))
        .arg(addresses.join(","))
        .args(keys)
        .env("PYTHONPATH", workspace().join("clients/python/src"))
        .stdout(Stdio::piped());
    dies_with_the_lab(&mut command);
    let mut child = command.spawn().map_err(|why| LabError(format!("{}: {why}", options.python.display())))?;
    let output = child.stdout.take();
    thread::spawn(move || {
        use std::io::{BufRead, BufReader};
        for line in
            output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(std::result::Result::ok)
        {
            let (key, result) = line.split_once('\t').unwrap_or((&line, "no tab"));
            let result = if result == "granted" { Ok(()) } else { Err(result.to_owned()) };
            if sender.send((key.to_owned(), result)).is_err() {
                return;
            }
        }
    });
    Ok(child)
}
