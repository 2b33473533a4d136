//! Large states beside the random requests: what one client can build to make other clients' commands slow.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use support::Raw;
use support::resp::Request;

use super::requests::DATABASES;

/// Keys of one request, if the server allows so many.
const KEYS: usize = 128;
/// Holders of one lock.
const HOLDERS: usize = 20_000;
/// Connections that wait for one lock.
const WAITERS: usize = 800;
/// The number of requests in one packet, low enough that they do not make a long event-loop iteration.
const AT_ONCE: usize = 20;
/// Between two checks of the state.
const PAUSE: Duration = Duration::from_millis(10);

/// Builds a state, and rebuilds it when other clients have destroyed it, until `stop` or until the server is gone.
///
/// Each round has another state. Its keys are among those of the random requests.
pub fn build(address: SocketAddr, round: u64, stop: &AtomicBool) -> io::Result<()> {
    let mut large_states = LargeStates { address, database: round as u32 % DATABASES, stop };
    match round % 4 {
        0 => large_states.long_request(),
        1 => large_states.many_holders(),
        2 => large_states.many_waiters("SHARED"),
        _ => large_states.many_waiters("LIMIT 1"),
    }
}

struct LargeStates<'a> {
    address: SocketAddr,
    database: u32,
    stop: &'a AtomicBool,
}

impl LargeStates<'_> {
    fn connect(&self) -> io::Result<Raw> {
        let mut raw = Raw::connect(self.address)?;
        self.run(&mut raw, &format!("SELECT {}", self.database))?;
        raw.read()?;
        Ok(raw)
    }

    fn run(&self, raw: &mut Raw, line: &str) -> io::Result<()> {
        raw.send_bytes(Request::typed(line).bytes())
    }

    fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Waits for many keys, one of which is contended.
    fn long_request(&mut self) -> io::Result<()> {
        while self.is_running() {
            let mut raw = self.connect()?;
            let names: Vec<String> = (1..KEYS).map(|key| format!("burden:{key}")).collect();
            self.run(&mut raw, &format!("LOCK.MACQUIRE {KEYS} lock:1 {} bearer WAIT 0 LEASE 20", names.join(" ")))?;
            while self.is_running() && raw.read_timeout(PAUSE)?.is_none() {}
            // Its holds expire with their leases.
            raw.close();
        }
        Ok(())
    }

    /// Adds holders to a lock, one after the other.
    fn many_holders(&mut self) -> io::Result<()> {
        let mut raw = self.connect()?;
        while self.is_running() {
            for first in (0..HOLDERS).step_by(AT_ONCE) {
                let acquire = |number| {
                    Request::typed(&format!("LOCK.ACQUIRE lock:9 holder-{number} SHARED LEASE 60000")).bytes().to_vec()
                };
                raw.send_bytes(&(first..first + AT_ONCE).flat_map(acquire).collect::<Vec<u8>>())?;
                for _ in 0..AT_ONCE {
                    raw.read()?;
                }
                if !self.is_running() {
                    break;
                }
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Waits for a lock over many connections. A client that gets a reply requests again.
    fn many_waiters(&mut self, limit: &str) -> io::Result<()> {
        let mut pace = Pacer { raw: self.connect()?, steps: 0 };
        let mut members: Vec<Raw> = Vec::new();
        while self.is_running() && members.len() < WAITERS {
            let mut raw = self.connect()?;
            self.ask(&mut raw, members.len(), limit)?;
            members.push(raw);
        }
        while self.is_running() {
            for (number, raw) in members.iter_mut().enumerate() {
                // Other clients may have killed it.
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
        self.run(raw, &format!("LOCK.ACQUIRE lock:8 member-{number} {limit} LEASE 30 WAIT 0"))
    }
}

/// Limits the number of connections that act in one event-loop iteration.
struct Pacer {
    raw: Raw,
    steps: usize,
}

impl Pacer {
    /// After a few steps, waits until the server has processed them.
    fn step(&mut self) -> io::Result<()> {
        self.steps += 1;
        if self.steps.is_multiple_of(AT_ONCE) {
            self.raw.send(&[b"PING"])?;
            self.raw.read()?;
        }
        Ok(())
    }
}
