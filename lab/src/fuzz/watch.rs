//! Somebody else on the server, who pings all the time: no step of the server may keep it waiting for long.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Connection, Value};
use support::{Bystander, Waited};

/// How long a step may take, if `LAB_STEP_MS` does not say otherwise.
const BOUND: Duration = Duration::from_millis(5);
/// Steps beyond the bound that are put down to the machine: where it has been stopped in the middle of the server's work,
/// some kernels count that as the server's own time. A state that breaks the bound does so each time it is met.
const STOLEN: usize = 2;

/// What was seen of the server's steps.
#[derive(Default)]
pub struct Watch {
    /// How many pings were answered.
    pub pings: u64,
    /// The most processor time of the server that one of them waited for.
    pub longest: Duration,
    /// How many waited for more than the bound.
    pub beyond: usize,
}

impl Watch {
    /// Adds what was seen at another time.
    pub fn add(&mut self, other: Watch) {
        self.pings += other.pings;
        self.longest = self.longest.max(other.longest);
        self.beyond += other.beyond;
    }

    /// Pings until it is told to stop, or until the server is gone, which others tell.
    ///
    /// What counts is the server's own time: a machine that stops everybody makes a ping late, but not long. The senders send
    /// a few requests at a time, so that what a ping waits for is one long step or a few short ones.
    pub fn over(address: SocketAddr, server: u32, stop: &AtomicBool) -> Watch {
        let mut watch = Watch::default();
        let Ok(mut bystander) = Bystander::connect(address, server) else { return watch };
        let bound = bound();
        while !stop.load(Ordering::Relaxed) {
            let Ok(Waited { server: step, .. }) = bystander.ping() else { break };
            watch.pings += 1;
            watch.longest = watch.longest.max(step);
            watch.beyond += usize::from(step > bound);
        }
        watch
    }

    /// Why the bound does not hold, if it does not.
    pub fn verdict(&self, connection: &mut Connection) -> Option<String> {
        (self.beyond > STOLEN).then(|| {
            format!(
                "{} of {} pings waited for more than {:?} of the server's own time, one for {:?}; its slow log says: {}; its latency monitor: {}",
                self.beyond,
                self.pings,
                bound(),
                self.longest,
                slowest(connection),
                events(connection)
            )
        })
    }
}

fn bound() -> Duration {
    let set = std::env::var("LAB_STEP_MS").ok().and_then(|text| text.parse().ok());
    set.map_or(BOUND, Duration::from_millis)
}

/// Has the server note which commands and which other events are slow.
pub fn note_slow_steps(connection: &mut Connection) {
    let (micros, millis) = (bound().as_micros().to_string(), bound().as_millis().max(1).to_string());
    let settings =
        [("slowlog-log-slower-than", &micros[..]), ("slowlog-max-len", "100"), ("latency-monitor-threshold", &millis)];
    for (name, value) in settings {
        redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(connection).expect("CONFIG SET");
    }
}

/// The slowest commands that were noted, by name. None: it was a timer, or the end of a connection.
fn slowest(connection: &mut Connection) -> String {
    let entries: Vec<Vec<Value>> = redis::cmd("SLOWLOG").arg("GET").arg(100).query(connection).unwrap_or_default();
    let mut slow: Vec<(i64, String)> = entries.iter().filter_map(|entry| name_and_time(entry)).collect();
    slow.sort_unstable();
    slow.dedup_by(|a, b| a.1 == b.1);
    let told: Vec<String> = slow.iter().rev().take(5).map(|(time, name)| format!("{name} {time} µs")).collect();
    if told.is_empty() { "nothing".into() } else { told.join(", ") }
}

/// What else took long, and how long at most.
fn events(connection: &mut Connection) -> String {
    let events: Vec<(String, i64, i64, i64)> =
        redis::cmd("LATENCY").arg("LATEST").query(connection).unwrap_or_default();
    let told: Vec<String> = events.iter().map(|(name, _, _, most)| format!("{name} {most} ms")).collect();
    if told.is_empty() { "nothing".into() } else { told.join(", ") }
}

fn name_and_time(entry: &[Value]) -> Option<(i64, String)> {
    let [_, _, Value::Int(time), Value::Array(words), ..] = entry else { return None };
    let Some(Value::BulkString(name)) = words.first() else { return None };
    Some((*time, String::from_utf8_lossy(name).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use support::{Server, eventually};

    /// What a watch sees while `work` is done to a plain server.
    fn watched(work: impl FnOnce(&Server)) -> (Watch, Server) {
        let server = Server::builder().without_module().start();
        note_slow_steps(&mut server.connect());
        let stop = AtomicBool::new(false);
        let watch = thread::scope(|scope| {
            let watch = scope.spawn(|| Watch::over(server.addr(), server.pid(), &stop));
            work(&server);
            stop.store(true, Ordering::Relaxed);
            watch.join().unwrap()
        });
        (watch, server)
    }

    #[test]
    fn planted_steps_are_found() {
        const BUSY: &str = "local sum = 0 for i = 1, 5000000 do sum = sum + i % 7 end return sum";
        let (watch, server) = watched(|server| {
            // Many: a ping need not lie there when each of them begins.
            for _ in 0..10 * STOLEN {
                redis::cmd("EVAL").arg(BUSY).arg(0).exec(&mut server.connect()).unwrap();
            }
        });
        let verdict = watch.verdict(&mut server.connect()).unwrap();
        assert!(verdict.to_lowercase().contains("eval"), "{verdict}");
    }

    /// A server that the machine stops, or that only sleeps, has done nothing.
    #[test]
    fn a_server_that_is_stopped_is_not_blamed() {
        let (watch, server) = watched(|server| {
            for _ in 0..=STOLEN {
                server.stop();
                eventually(Duration::from_millis(50), || false);
                server.cont();
                redis::cmd("PING").exec(&mut server.connect()).unwrap();
            }
        });
        assert!(watch.pings > 0);
        assert_eq!(watch.verdict(&mut server.connect()), None);
    }
}
