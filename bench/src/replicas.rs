//! 6. A confirmed grant: `REPLICAS 1`, compared with a client that sends `WAIT 1` after its grant.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::json;
use support::resp::{self, Request};

use crate::client::Client;
use crate::contenders::{Answer, Contender, Holdfast, Lock, Redisson};
use crate::figures::{micros, ratio};
use crate::report::{Findings, Table};
use crate::server::{Program, Running, With};
use crate::settings::{Scale, Settings};
use crate::stats::{Percentiles, Spread};

const LEASE: Duration = Duration::from_secs(30);
/// Clients that request at the same time, each its own lock.
const TOGETHER: [usize; 2] = [1, 50];

/// How a client learns that a replica has its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Confirmation {
    /// The server's reply confirms it.
    Replicas,
    /// `WAIT 1 1000`, sent in one packet with the request for the lock.
    WaitInOneWrite,
    /// `WAIT 1 1000`, sent after the grant.
    WaitAfterwards,
}

/// A line of the result.
#[derive(Serialize)]
struct Row {
    server: String,
    clients: usize,
    name: String,
    /// From the request to the confirmation.
    p50_us: Spread,
    p99_us: Spread,
    /// Microseconds of the primary's main thread for a grant and its release.
    cpu_us: Spread,
    p50_over_wait: Option<Spread>,
}

struct Participant {
    name: &'static str,
    contender: Box<dyn Contender>,
    way: Confirmation,
    times: Vec<Percentiles>,
    cpu: Vec<f64>,
}

/// Measures on each server.
pub fn run(settings: &Settings, programs: &[Program]) -> Result<Findings> {
    let mut rows = Vec::new();
    for program in programs {
        for clients in TOGETHER {
            rows.extend(measure(&settings.scale, program, clients).with_context(|| program.label.clone())?);
        }
    }
    Ok(Findings {
        section: "replicas",
        tables: rows.chunk_by(|a, b| a.server == b.server && a.clients == b.clients).map(table).collect(),
        goals: vec![],
        plots: vec![],
        data: json!({ "rounds": settings.scale.replica_rounds, "rows": rows }),
    })
}

fn measure(scale: &Scale, program: &Program, clients: usize) -> Result<Vec<Row>> {
    let mut primary = Running::start(program, With::Module)?;
    let _replica = primary.start_replica(program)?;
    let mut participants = participants(&mut primary)?;
    let mut connections = (0..clients).map(|_| Client::connect(primary.port())).collect::<Result<Vec<_>>>()?;
    for round in 0..scale.replica_rounds {
        for turn in 0..participants.len() {
            let turn = (turn + round) % participants.len();
            let participant = &mut participants[turn];
            participant
                .round(&mut primary, &mut connections, scale.replica_grants)
                .with_context(|| participant.name)?;
        }
    }
    let wait = participants.iter().find(|one| one.name == AFTERWARDS).map(Participant::p50);
    Ok(participants.iter().map(|one| one.row(program, clients, wait.as_deref())).collect())
}

const WAIT: &str = "WAIT 1 1000";
const AFTERWARDS: &str = "LOCK.ACQUIRE, then WAIT 1";

fn participants(primary: &mut Running) -> Result<Vec<Participant>> {
    let mut participants = Vec::new();
    let mut add = |name, contender: Box<dyn Contender>, way| {
        participants.push(Participant { name, contender, way, times: vec![], cpu: vec![] });
    };
    add("LOCK.ACQUIRE … REPLICAS 1", Box::new(Holdfast::REPLICAS), Confirmation::Replicas);
    add(AFTERWARDS, Box::new(Holdfast::PLAIN), Confirmation::WaitAfterwards);
    add("LOCK.ACQUIRE and WAIT 1 in one write", Box::new(Holdfast::PLAIN), Confirmation::WaitInOneWrite);
    add(
        "redisson: script and WAIT 1 in one write",
        Box::new(Redisson::load(&mut primary.control)?),
        Confirmation::WaitInOneWrite,
    );
    Ok(participants)
}

impl Participant {
    fn round(&mut self, primary: &mut Running, clients: &mut [Client], grants: usize) -> Result<()> {
        let locks: Vec<_> =
            (0..clients.len()).map(|number| Lock::new(format!("lock:{number}"), number, LEASE)).collect();
        let acquires: Vec<_> = locks.iter().map(|lock| self.acquire(lock)).collect();
        let wait = Request::typed(WAIT);
        let mut times = Vec::with_capacity(grants);
        let cpu = primary.control.server_cpu()?;
        while times.len() < grants {
            let start = Instant::now();
            for (client, acquire) in clients.iter_mut().zip(&acquires) {
                client.send(acquire)?;
            }
            if self.way == Confirmation::WaitAfterwards {
                for client in &mut *clients {
                    self.read_grant(client)?;
                    client.send(wait.bytes())?;
                }
            }
            for client in &mut *clients {
                self.read_certainty(client)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            for (client, lock) in clients.iter_mut().zip(&locks) {
                self.contender.check_released(&client.ask(&self.contender.release(lock))?)?;
            }
        }
        self.cpu.push((primary.control.server_cpu()? - cpu) * 1e6 / times.len() as f64);
        self.times.push(Percentiles::of(&mut times));
        Ok(())
    }

    fn acquire(&self, lock: &Lock) -> Vec<u8> {
        let acquire = self.contender.acquire(lock);
        match self.way {
            Confirmation::Replicas | Confirmation::WaitAfterwards => acquire.bytes().to_vec(),
            Confirmation::WaitInOneWrite => [acquire.bytes(), Request::typed(WAIT).bytes()].concat(),
        }
    }

    fn read_grant(&self, client: &mut Client) -> Result<()> {
        match self.contender.answer(&client.read()?)? {
            Answer::Granted => Ok(()),
            Answer::Busy(_) => bail!("a free lock was refused"),
        }
    }

    fn read_certainty(&self, client: &mut Client) -> Result<()> {
        if self.way != Confirmation::WaitAfterwards {
            self.read_grant(client)?;
        }
        if self.way != Confirmation::Replicas && resp::int(&client.read()?)? < 1 {
            bail!("no replica confirmed");
        }
        Ok(())
    }

    fn p50(&self) -> Vec<f64> {
        self.times.iter().map(|times| times.p50).collect()
    }

    fn row(&self, program: &Program, clients: usize, wait: Option<&[f64]>) -> Row {
        Row {
            server: program.label.clone(),
            clients,
            name: self.name.to_owned(),
            p50_us: Spread::of(&self.p50()),
            p99_us: Spread::of(&self.times.iter().map(|times| times.p99).collect::<Vec<_>>()),
            cpu_us: Spread::of(&self.cpu),
            p50_over_wait: wait.filter(|_| self.name != AFTERWARDS).map(|wait| Spread::of_ratios(&self.p50(), wait)),
        }
    }
}

fn table(rows: &[Row]) -> Table {
    let title = rows.first().map_or_else(String::new, |row| match row.clients {
        1 => format!("A grant that a replica has: {}, one client", row.server),
        clients => format!("A grant that a replica has: {}, {clients} clients at once", row.server),
    });
    let note =
        "From the request to the reply that says that one replica has the lock; primary and replica on one machine.";
    let mut table = Table::new(title, note, &["how", "p50", "p99", "primary's CPU", "p50 / ACQUIRE, then WAIT"]);
    for row in rows {
        table.row(vec![
            row.name.clone(),
            micros(row.p50_us.median),
            micros(row.p99_us.median),
            micros(row.cpu_us.median),
            row.p50_over_wait.as_ref().map_or_else(|| "1".to_owned(), ratio),
        ]);
    }
    table
}
