//! A master that is cut off from its replicas and has `min-replicas-to-write 1`: from the moment at which it refuses a client's
//! write, nobody gets a lock there any more, whatever ended the hold before him and however he waits. Those who wait get it at the
//! new master.

use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult, Value, cmd};
use tokio::runtime::{Builder, Runtime};

use crate::blow::Blow;
use crate::bound;
use crate::clock::{now, until};
use crate::engine::{Equipment, Result, Trouble};
use crate::load::dies_with_the_lab;
use crate::options::{Options, workspace};
use crate::report::Row;
use crate::session::{Way, field};
use crate::tally::Tally;
use crate::trio::{Return, Setting, Trio};

/// Longer than it takes until the master refuses: three seconds of silence, and the second in which that is noticed.
const LEASE: u64 = 10_000;
/// The lease of what the server renews. It is over soon after the last renewal.
const WATCHED: u64 = 3_000;
/// What lasts as long as it is needed.
const LONG: u64 = 300_000;
/// Longer than anything here should take.
const PATIENCE: Duration = Duration::from_secs(30);
/// For so many seconds after the last hold has ended the master could still grant something.
const LOOK_ON: u64 = 3;

/// What ends the hold that a waiter stands behind.
const ENDS: [&str; 3] = ["lease", "watchdog", "disconnect"];
/// How a waiter waits: blocked on a connection of its own, or by way of Holdfast's client, which has a session.
const BLOCKED: [&str; 2] = ["blocked-rust", "blocked-python"];
const SESSIONS: [&str; 2] = ["session-rust", "session-python"];

/// Half of the time on each server.
pub fn run(options: &Options) -> Vec<Row> {
    let options = Options { budget: options.budget / 2, ..options.clone() };
    vec![
        row("Master cut off, min-replicas-to-write 1", Equipment::default(), &options),
        row("Master cut off, min-replicas-to-write 1, Valkey 9.1", Equipment::valkey_9_1(), &options),
    ]
}

fn row(title: &str, equipment: Equipment, options: &Options) -> Row {
    let mut seen = Seen::default();
    if let Err(why) = cut_off_and_over(&mut seen, equipment, options) {
        seen.tally.broke_off(&why, Vec::new());
    }
    let Seen { tally, requests, waited, granted, refused_after, taken_over } = seen;
    let mut row = tally.row(title);
    row.requests += requests;
    row.note = format!(
        "{granted} grants of {waited} who waited at a master that refused; refusals began {:.1} s after the cut at the latest; \
         {taken_over} locks taken at the new master meanwhile",
        refused_after.as_secs_f64()
    );
    row
}

#[derive(Default)]
struct Seen {
    tally: Tally,
    requests: u64,
    waited: u64,
    /// What the master granted after it had begun to refuse.
    granted: u64,
    refused_after: Duration,
    taken_over: u64,
}

fn cut_off_and_over(seen: &mut Seen, equipment: Equipment, options: &Options) -> Result<()> {
    let begun = Instant::now();
    let mut trio = Trio::start(Setting { min_replicas: 1, equipment, ..Setting::default() }, options)?;
    loop {
        let before = begun.elapsed();
        seen.cut_off(&mut trio, options)?;
        seen.tally.crashes(trio.crashes());
        seen.tally.left_waiting(&trio.infos()?);
        eprintln!("refusing: {} masters cut off", seen.tally.runs);
        if begun.elapsed() + (begun.elapsed() - before) / 2 > options.budget {
            return Ok(());
        }
    }
}

impl Seen {
    /// One master is cut off, and comes back.
    fn cut_off(&mut self, trio: &mut Trio, options: &Options) -> Result<()> {
        let number = self.tally.runs;
        let keys = keys(number);
        let old = trio.master_node();
        let mut at_old = trio.master()?;
        let mut holders = Holders::take(trio, &keys)?;
        let waiters = Waiters::start(trio, &keys, options)?;
        self.requests += 2 * keys.len() as u64;
        if !until(PATIENCE, || waiting(&mut at_old) == Some(keys.len() as u64)) {
            return Err(Trouble(format!("{:?} of {} wait", waiting(&mut at_old), keys.len())));
        }
        holders.renew(&keys)?;

        let struck = now();
        trio.strike(Blow::CutFromPeers)?;
        let refuses = || code(&say(&mut at_old, "LOCK.ACQUIRE probe prober LEASE 1")).as_deref() == Some("NOREPLICAS");
        if !until(PATIENCE, refuses) {
            return Err(Trouble("the master goes on taking writes".into()));
        }
        self.refused_after = self.refused_after.max(Duration::from_micros(now() - struck));
        let before = Written::of(&mut at_old)?;
        for key in keys.iter().filter(|key| !key.contains("watchdog")) {
            if say(&mut at_old, &format!("EXISTS {key}"))? != Value::Int(1) {
                return Err(Trouble(format!("{key} ended before the master refused: this shows nothing")));
            }
        }
        self.what_it_takes(&mut at_old, &keys[0]);
        drop(holders);

        trio.await_successor(old)?;
        self.take_over(&mut trio.master()?, &keys)?;
        // The keys' end is up to the server, and each of them could wake those who wait.
        let end = Instant::now() + PATIENCE;
        for key in &keys {
            let left = end.saturating_duration_since(Instant::now());
            if !until(left, || say(&mut at_old, &format!("EXISTS {key}")) == Ok(Value::Int(0))) {
                self.tally.violation(&format!("{key} does not end, or was granted, at the master that refuses"));
            }
        }
        let begin = uptime(&mut at_old)?;
        if !until(PATIENCE, || uptime(&mut at_old).is_ok_and(|now| now > begin + LOOK_ON)) {
            return Err(Trouble("the clock of the primary that was cut off does not advance".into()));
        }
        let after = Written::of(&mut at_old)?;
        self.granted += after.grants() - before.grants();
        self.waited += keys.len() as u64;
        if after != before {
            self.tally.violation(&format!("while it refused, the master went on from {before:?} to {after:?}"));
        }
        if let Ok((key, said)) = waiters.said.try_recv() {
            self.tally.violation(&format!("{key}, while its master was cut off: {said:?}"));
        }
        match waiting(&mut at_old) {
            Some(left) if left == keys.len() as u64 => {}
            left => self.tally.violation(&format!("{left:?} of {} still wait at the old master", keys.len())),
        }
        give_back(&mut trio.master()?, &keys)?;

        let back = if number.is_multiple_of(2) { Return::ByHand(0) } else { Return::BySentinels };
        trio.bring_back(old, Blow::CutFromPeers, back)?;
        trio.settle()?;
        self.tally.failover(now() - struck);
        self.tally.runs += 1;
        self.all_are_answered(&waiters, keys.len());
        Ok(())
    }

    /// What such a master refuses, and what it does all the same: as docs/operations.md has it.
    fn what_it_takes(&mut self, master: &mut Connection, key: &str) {
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
            let reply = say(master, &line);
            if code(&reply).as_deref() != Some("NOREPLICAS") {
                self.tally.violation(&format!("a master that refuses writes answers {line} with {reply:?}"));
            }
        }
        for line in taken {
            let reply = say(master, &line);
            if reply.is_err() {
                self.tally.violation(&format!("a master that refuses writes answers {line} with {reply:?}"));
            }
        }
    }

    /// Somebody takes every lock at the new master, as soon as the lease that it knows of is over.
    fn take_over(&mut self, master: &mut Connection, keys: &[String]) -> Result<()> {
        master.set_read_timeout(Some(PATIENCE))?;
        for key in keys {
            let reply = say(master, &format!("LOCK.ACQUIRE {key} successor LEASE {LONG} WAIT {}", 2 * LEASE));
            match reply {
                Ok(Value::Int(_)) => self.taken_over += 1,
                other => self.tally.violation(&format!("{key} can't be had at the new master: {other:?}")),
            }
        }
        self.requests += keys.len() as u64;
        Ok(())
    }

    /// Clients with a session have asked the new master and got the lock; those that block were told that they have to.
    fn all_are_answered(&mut self, waiters: &Waiters, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        for _ in 0..count {
            match waiters.said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((key, said)) => {
                    let is_session = SESSIONS.iter().any(|session| key.contains(session));
                    if is_session != said.is_ok() {
                        self.tally.violation(&format!("{key}, when its master was none any more: {said:?}"));
                    }
                }
                Err(_) => self.tally.violation("somebody who waited at the old master never heard of it"),
            }
        }
    }
}

/// A lock for each way to end a hold and each way to wait behind it.
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
    number(&info(connection, "server")?, "uptime_in_seconds").ok_or_else(|| Trouble("no uptime".into()))
}

fn give_back(master: &mut Connection, keys: &[String]) -> Result<()> {
    for key in keys {
        cmd("LOCK.RELEASE").arg(key).arg("successor").exec(master)?;
    }
    Ok(())
}

/// What the module has granted, renewed and released since it was loaded.
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
            number(&info, &format!("holdfast_{name}")).ok_or_else(|| Trouble(format!("INFO holdfast has no {name}")))
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

/// Who holds what the others wait for. Dropping it is a disconnect.
struct Holders {
    connection: Connection,
}

impl Holders {
    fn take(trio: &Trio, keys: &[String]) -> Result<Holders> {
        let mut connection = trio.master()?;
        say(&mut connection, "LOCK.SESSION")?;
        for key in keys {
            let how = match key.split(':').nth(1) {
                Some("watchdog") => format!("LEASE {WATCHED} WATCHDOG"),
                Some("disconnect") => format!("LEASE {LEASE} EPHEMERAL"),
                _ => format!("LEASE {LEASE}"),
            };
            match say(&mut connection, &format!("LOCK.ACQUIRE {key} holder {how}"))? {
                Value::Int(_) => {}
                other => return Err(Trouble(format!("{key} was free, yet: {other:?}"))),
            }
        }
        Ok(Holders { connection })
    }

    /// Their leases begin anew: programs need a while to start.
    fn renew(&mut self, keys: &[String]) -> Result<()> {
        say(&mut self.connection, "LOCK.EVENTS")?;
        for key in keys {
            let lease = if key.contains("watchdog") { WATCHED } else { LEASE };
            say(&mut self.connection, &format!("LOCK.RENEW {key} holder LEASE {lease}"))?;
        }
        Ok(())
    }
}

/// What a waiter reports: that it got the lock, or what it was told in place of that.
type Said = std::result::Result<(), String>;

/// All who wait, until this is dropped.
struct Waiters {
    said: Receiver<(String, Said)>,
    python: Child,
    runtime: Option<Runtime>,
}

impl Waiters {
    fn start(trio: &Trio, keys: &[String], options: &Options) -> Result<Waiters> {
        let of = |kind: &str| keys.iter().filter(|key| key.ends_with(kind)).cloned().collect::<Vec<_>>();
        let (tell, said) = channel();
        for key in of("blocked-rust") {
            let connection = trio.master()?;
            let tell = tell.clone();
            thread::spawn(move || tell.send((key.clone(), block(connection, &key))));
        }
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let way = trio.way();
        let locks = {
            let _inside = runtime.enter();
            bound::locks(&way).map_err(|why| Trouble(why.to_string()))?
        };
        for key in of("session-rust") {
            let (locks, tell) = (locks.clone(), tell.clone());
            runtime.spawn(async move {
                let lock = locks.lock(&key).lease(Duration::from_millis(LONG)).wait_forever();
                let said = match lock.acquire().await {
                    Ok(Some(guard)) => {
                        let _ = guard.release().await;
                        Ok(())
                    }
                    other => Err(format!("{other:?}")),
                };
                tell.send((key, said))
            });
        }
        let python = python(&way, &[of("blocked-python"), of("session-python")].concat(), tell, options)?;
        Ok(Waiters { said, python, runtime: Some(runtime) })
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

/// Waits as clients do that know no sessions, for as long as the connection lasts.
fn block(mut connection: Connection, key: &str) -> Said {
    let reply = connection
        .set_read_timeout(None)
        .and_then(|()| say(&mut connection, &format!("LOCK.ACQUIRE {key} waiter LEASE {LONG} WAIT 0")));
    match reply {
        Ok(Value::Int(_)) => Ok(()),
        Ok(other) => Err(format!("{other:?}")),
        Err(why) => Err(why.to_string()),
    }
}

/// The same from Python: it prints a line for each lock, with what it was told of it.
fn python(way: &Way, keys: &[String], tell: Sender<(String, Said)>, options: &Options) -> Result<Child> {
    let Way::Sentinels(addresses) = way else {
        return Err(Trouble("a trio has Sentinels".into()));
    };
    let mut command = Command::new(&options.python);
    command
        .arg(workspace().join("verification/lab/clients/waiters.py"))
        .arg(addresses.join(","))
        .args(keys)
        .env("PYTHONPATH", workspace().join("clients/python/src"))
        .stdout(Stdio::piped());
    dies_with_the_lab(&mut command);
    let mut child = command.spawn().map_err(|why| Trouble(format!("{}: {why}", options.python.display())))?;
    let output = child.stdout.take();
    thread::spawn(move || {
        use std::io::{BufRead, BufReader};
        for line in
            output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(std::result::Result::ok)
        {
            let (key, said) = line.split_once('\t').unwrap_or((&line, "no tab"));
            let said = if said == "granted" { Ok(()) } else { Err(said.to_owned()) };
            if tell.send((key.to_owned(), said)).is_err() {
                return;
            }
        }
    });
    Ok(child)
}
