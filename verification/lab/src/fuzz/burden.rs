//! Large states beside the random requests, which run into them: what one client can build that makes others' steps long.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use support::Raw;
use support::resp::Request;

use super::requests::DATABASES;

/// Keys of one request, if the server lets a request have so many.
const KEYS: usize = 128;
/// Holders of one lock.
const HOLDERS: usize = 20_000;
/// Connections that wait for one lock.
const CROWD: usize = 800;
/// So few requests go to the server at a time that they are no long step together.
const AT_ONCE: usize = 20;
/// Between two looks at what has become of the state.
const PAUSE: Duration = Duration::from_millis(10);

/// Builds a state, and builds it again when the others have torn it down, until it is told to stop or the server is gone.
///
/// Each round has another state. The keys are among those that the requests name.
pub fn bear(address: SocketAddr, round: u64, stop: &AtomicBool) -> io::Result<()> {
    let mut burden = Burden { address, database: round as u32 % DATABASES, stop };
    match round % 4 {
        0 => burden.long_request(),
        1 => burden.many_holders(),
        2 => burden.crowd("SHARED"),
        _ => burden.crowd("LIMIT 1"),
    }
}

struct Burden<'a> {
    address: SocketAddr,
    database: u32,
    stop: &'a AtomicBool,
}

impl Burden<'_> {
    fn connect(&self) -> io::Result<Raw> {
        let mut raw = Raw::connect(self.address)?;
        self.tell(&mut raw, &format!("SELECT {}", self.database))?;
        raw.read()?;
        Ok(raw)
    }

    fn tell(&self, raw: &mut Raw, line: &str) -> io::Result<()> {
        raw.send_bytes(Request::typed(line).bytes())
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Waits for many keys, one of which the others fight for.
    fn long_request(&mut self) -> io::Result<()> {
        while self.goes_on() {
            let mut raw = self.connect()?;
            let names: Vec<String> = (1..KEYS).map(|key| format!("burden:{key}")).collect();
            self.tell(&mut raw, &format!("LOCK.MACQUIRE {KEYS} lock:1 {} bearer WAIT 0 LEASE 20", names.join(" ")))?;
            while self.goes_on() && raw.read_timeout(PAUSE)?.is_none() {}
            // What it has goes with its lease.
            raw.close();
        }
        Ok(())
    }

    /// Fills a lock with holders, one after the other.
    fn many_holders(&mut self) -> io::Result<()> {
        let mut raw = self.connect()?;
        while self.goes_on() {
            for first in (0..HOLDERS).step_by(AT_ONCE) {
                let acquire = |number| {
                    Request::typed(&format!("LOCK.ACQUIRE lock:9 holder-{number} SHARED LEASE 60000")).bytes().to_vec()
                };
                raw.send_bytes(&(first..first + AT_ONCE).flat_map(acquire).collect::<Vec<u8>>())?;
                for _ in 0..AT_ONCE {
                    raw.read()?;
                }
                if !self.goes_on() {
                    break;
                }
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Waits for a lock on many connections; a client that is answered asks again.
    fn crowd(&mut self, limit: &str) -> io::Result<()> {
        let mut pace = Pace { raw: self.connect()?, steps: 0 };
        let mut members: Vec<Raw> = Vec::new();
        while self.goes_on() && members.len() < CROWD {
            let mut raw = self.connect()?;
            self.ask(&mut raw, members.len(), limit)?;
            members.push(raw);
        }
        while self.goes_on() {
            for (number, raw) in members.iter_mut().enumerate() {
                // Others may have killed it.
                match raw.read_timeout(Duration::ZERO) {
                    Ok(None) => continue,
                    Ok(Some(_)) => {}
                    Err(_) => *raw = self.connect()?,
                }
                self.ask(raw, number, limit)?;
                pace.step()?;
            }
            thread::sleep(PAUSE);
        }
        members.into_iter().try_for_each(|raw| {
            raw.close();
            pace.step()
        })
    }

    fn ask(&self, raw: &mut Raw, number: usize, limit: &str) -> io::Result<()> {
        self.tell(raw, &format!("LOCK.ACQUIRE lock:8 member-{number} {limit} LEASE 30 WAIT 0"))
    }
}

/// Keeps what many connections do at the same time from becoming one long turn of the server.
struct Pace {
    raw: Raw,
    steps: usize,
}

impl Pace {
    /// After a few steps the server must have heard of them before the next one is taken.
    fn step(&mut self) -> io::Result<()> {
        self.steps += 1;
        if self.steps.is_multiple_of(AT_ONCE) {
            self.raw.send(&[b"PING"])?;
            self.raw.read()?;
        }
        Ok(())
    }
}
