//! Pings the server all the time, to measure its event-loop iterations.

use std::net::SocketAddr;
use std::time::Duration;
use std::{fs, io};

use redis::{Connection, Value};
use support::{Probe, Raw, Waited};

/// The bound for an iteration, unless `LAB_STEP_MS` sets another.
const BOUND: Duration = Duration::from_millis(5);
/// How many iterations may exceed the bound because of the machine: some kernels count time of other guests as the server's
/// own. A state that exceeds the bound does so each time.
const STOLEN: u64 = 2;
/// One more iteration may exceed the bound for each of this many pings.
const STOLEN_ONCE_IN: u64 = 4_000;

/// The most commands that one ping may wait for. All of them are read: many short commands may take longer together than one
/// iteration may.
const NOTED: i64 = 10_000;

/// The measured iterations.
#[derive(Default)]
pub struct Watch {
    /// The number of pings.
    pub pings: u64,
    /// The longest iteration in processor time of the server, and its commands.
    pub longest: (Duration, String),
    /// The iterations beyond the bound, and their commands.
    beyond: Vec<(Duration, String)>,
}

impl Watch {
    /// Adds the measurements of another round.
    pub fn add(&mut self, other: Watch) {
        self.pings += other.pings;
        self.longest = std::mem::take(&mut self.longest).max(other.longest);
        self.beyond.extend(other.beyond);
    }

    /// Pings until `is_over`, or until the server is gone, which other checks report.
    ///
    /// Only the server's own processor time counts: a busy machine delays a ping without adding to it. A ping may wait for several
    /// commands of an iteration. The slow log tells them apart.
    pub fn over(address: SocketAddr, server: u32, is_over: impl Fn(&Watch) -> bool) -> Watch {
        let mut watch = Watch::default();
        let Ok(probe) = Probe::connect(address, server) else { return watch };
        let Ok(log) = Raw::connect(address) else { return watch };
        // Other checks report that the server is gone.
        let _ = watch.look((probe, log), is_over);
        watch
    }

    fn look(&mut self, (mut probe, mut log): (Probe, Raw), is_over: impl Fn(&Watch) -> bool) -> io::Result<()> {
        let bound = bound();
        let mut stolen = stolen();
        while !is_over(self) {
            ask(&mut log, &[b"SLOWLOG", b"RESET"])?;
            let Waited { server: waited, .. } = probe.ping()?;
            let before = std::mem::replace(&mut stolen, self::stolen());
            let waited = waited.saturating_sub(stolen.saturating_sub(before));
            self.pings += 1;
            if waited <= self.longest.0.min(bound) {
                continue;
            }
            let noted = ask(&mut log, &[b"SLOWLOG", b"GET", NOTED.to_string().as_bytes()])?;
            let step = longest_step(waited, &commands(&noted));
            if step.0 > bound {
                self.beyond.push(step.clone());
            }
            self.longest = std::mem::take(&mut self.longest).max(step);
        }
        Ok(())
    }

    /// Whether more iterations exceeded the bound than the machine explains.
    fn is_violation(&self) -> bool {
        self.beyond.len() as u64 > STOLEN + self.pings / STOLEN_ONCE_IN
    }

    /// The violation of the bound, if there is one.
    pub fn verdict(&self, connection: &mut Connection) -> Option<String> {
        self.is_violation().then(|| {
            let mut slowest: Vec<_> = self.beyond.iter().collect();
            slowest.sort_unstable_by(|a, b| b.cmp(a));
            let shown: Vec<String> = slowest.iter().take(5).map(|(time, name)| format!("{name} {time:.1?}")).collect();
            format!(
                "{} of {} pings waited for an iteration of more than {:?} of the server's own time: {}; its latency monitor: {}",
                self.beyond.len(),
                self.pings,
                bound(),
                shown.join(", "),
                events(connection)
            )
        })
    }
}

/// The longest of the commands that took `waited` together, and its name. `commands` have their elapsed time, which is at least
/// the server's processor time.
fn longest_step(waited: Duration, commands: &[(Duration, String)]) -> (Duration, String) {
    let others = waited.saturating_sub(commands.iter().map(|(time, _)| time).sum());
    match commands.iter().max() {
        Some((time, name)) if *time >= others => (waited.min(*time), name.clone()),
        _ => (others, "not a command".into()),
    }
}

fn bound() -> Duration {
    let set = std::env::var("LAB_STEP_MS").ok().and_then(|text| text.parse().ok());
    set.map_or(BOUND, Duration::from_millis)
}

/// How long other guests of the host have used this machine's processors, which counts as time of the running process. Zero
/// if the system does not report it.
fn stolen() -> Duration {
    stolen_by(&fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// The eighth number of the first line, in hundredths of a second.
fn stolen_by(stat: &str) -> Duration {
    let hundredths: Option<u64> = stat.split_whitespace().nth(8).and_then(|number| number.parse().ok());
    Duration::from_millis(10 * hundredths.unwrap_or(0))
}

fn ask(raw: &mut Raw, command: &[&[u8]]) -> io::Result<Value> {
    raw.send(command)?;
    raw.read()
}

/// Makes the server record slow commands and other latencies.
pub fn note_slow_steps(connection: &mut Connection) {
    let (entries, millis) = (NOTED.to_string(), bound().as_millis().max(1).to_string());
    let settings =
        [("slowlog-log-slower-than", "0"), ("slowlog-max-len", &entries[..]), ("latency-monitor-threshold", &millis)];
    for (name, value) in settings {
        redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec(connection).expect("CONFIG SET");
    }
}

/// The commands in the slow log, with their elapsed time.
fn commands(log: &Value) -> Vec<(Duration, String)> {
    let Value::Array(entries) = log else { return Vec::new() };
    entries.iter().filter_map(name_and_time).collect()
}

/// Other latencies, and their maximum.
fn events(connection: &mut Connection) -> String {
    let events: Vec<(String, i64, i64, i64)> =
        redis::cmd("LATENCY").arg("LATEST").query(connection).unwrap_or_default();
    let shown: Vec<String> = events.iter().map(|(name, _, _, most)| format!("{name} {most} ms")).collect();
    if shown.is_empty() { "nothing".into() } else { shown.join(", ") }
}

fn name_and_time(entry: &Value) -> Option<(Duration, String)> {
    let Value::Array(entry) = entry else { return None };
    let [_, _, Value::Int(micros), Value::Array(words), ..] = &entry[..] else { return None };
    let Some(Value::BulkString(name)) = words.first() else { return None };
    Some((Duration::from_micros(u64::try_from(*micros).ok()?), String::from_utf8_lossy(name).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Instant;
    use support::{Server, eventually};

    /// A server without the module.
    fn server() -> Server {
        let server = Server::builder().without_module().start();
        note_slow_steps(&mut server.connect());
        server
    }

    #[test]
    fn stolen_processor_time_is_read() {
        let stat = "cpu  57 1 22 900 9 0 3 42 0 0\ncpu0 30 0 11 450 4 0 1 21 0 0\n";
        assert_eq!(stolen_by(stat), Duration::from_millis(420));
        assert_eq!(stolen_by("cpu 57 1 22 900\n"), Duration::ZERO);
    }

    #[test]
    fn several_long_commands_are_counted_separately() {
        let [two, three, ten] = [2, 3, 10].map(Duration::from_millis);
        let commands = |times: &[Duration]| times.iter().map(|time| (*time, format!("{time:?}"))).collect::<Vec<_>>();
        assert_eq!(longest_step(ten, &commands(&[two, three, two])), (three, "3ms".into()));
        assert_eq!(longest_step(ten, &commands(&[two, two])), (Duration::from_millis(6), "not a command".into()));
        assert_eq!(longest_step(ten, &[]).0, ten);
        // The machine paused the server during a command.
        assert_eq!(longest_step(two, &commands(&[ten])), (two, "10ms".into()));
    }

    #[test]
    fn injected_long_commands_are_found() {
        const BUSY: &str = "local sum = 0 for i = 1, 5000000 do sum = sum + i % 7 end return sum";
        let (server, end) = (server(), Instant::now() + Duration::from_secs(20));
        let is_over = |watch: &Watch| watch.is_violation() || Instant::now() > end;
        let watch = thread::scope(|scope| {
            let watch = scope.spawn(|| Watch::over(server.addr(), server.pid(), is_over));
            // A ping need not wait at the beginning of each.
            while !watch.is_finished() {
                redis::cmd("EVAL").arg(BUSY).arg(0).exec(&mut server.connect()).unwrap();
            }
            watch.join().unwrap()
        });
        let verdict = watch.verdict(&mut server.connect()).unwrap();
        assert!(verdict.to_lowercase().contains("eval"), "{verdict}");
    }

    /// A server that is paused, or sleeps, uses no processor time.
    #[test]
    fn paused_server_is_no_violation() {
        let (server, stop) = (server(), AtomicBool::new(false));
        let watch = thread::scope(|scope| {
            let watch = scope.spawn(|| Watch::over(server.addr(), server.pid(), |_| stop.load(Ordering::Relaxed)));
            for _ in 0..=STOLEN {
                server.stop();
                eventually(Duration::from_millis(50), || false);
                server.cont();
                redis::cmd("PING").exec(&mut server.connect()).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            watch.join().unwrap()
        });
        assert!(watch.pings > 0);
        assert_eq!(watch.verdict(&mut server.connect()), None);
    }
}
