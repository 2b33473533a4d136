//! A lock with redis-rs and raw LOCK.* commands.  Usage: recipe PORT KEY
use std::env;
use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, Connection, RedisError, RedisResult};

/// A killed process blocks others for at most this long.
const LEASE: Duration = Duration::from_secs(10);
/// A lease counts for this long, from before its request was sent: two clocks may differ by 1 %.
const SURE: Duration = Duration::from_millis(9_900);
const PAUSE: Duration = Duration::from_millis(100);

/// One connection, opened again when it broke. A synchronous `Connection` of redis-rs never repeats a command.
struct Link {
    client: Client,
    timeout: Option<Duration>,
    connection: Option<Connection>,
}

impl Link {
    fn new(client: &Client, timeout: Option<Duration>) -> Self {
        Self { client: client.clone(), timeout, connection: None }
    }

    fn send(&mut self, command: &str, args: &[&str]) -> RedisResult<Option<i64>> {
        if self.connection.is_none() {
            let connection = self.client.get_connection_with_timeout(Duration::from_secs(1))?;
            connection.set_read_timeout(self.timeout)?;
            self.connection = Some(connection);
        }
        let connection = self.connection.as_mut().expect("it was opened above");
        let reply = redis::cmd(command).arg(args).query(connection);
        if reply.as_ref().is_err_and(broke) {
            self.connection = None;
        }
        reply
    }
}

fn broke(error: &RedisError) -> bool {
    error.is_io_error() || error.is_timeout() || error.is_connection_dropped() || error.is_connection_refusal()
}

fn ms(time: Duration) -> String {
    (time.as_millis() + 1).to_string()
}

struct Hold<'a> {
    key: &'a str,
    owner: String,
    token: String,
    broke: bool,
    /// Until then no other client can hold the lock.
    certain: Mutex<Instant>,
}

impl Hold<'_> {
    fn is_held(&self) -> bool {
        Instant::now() < *self.certain.lock().expect("no thread panics with it")
    }

    fn renew(&self, short: &mut Link) -> RedisResult<()> {
        let sent = Instant::now();
        let renewed = short.send("LOCK.RENEW", &[self.key, &self.owner, "TOKEN", &self.token, "LEASE", &ms(LEASE)])?;
        let sure = renewed.map_or(Duration::ZERO, |_| SURE); // nil: lost
        *self.certain.lock().expect("no thread panics with it") = sent + sure;
        Ok(())
    }
}

fn acquire<'a>(waits: &mut Link, short: &mut Link, key: &'a str, wait: Duration) -> Result<Hold<'a>, Box<dyn Error>> {
    let mut id = [0; 16]; // unique for each acquisition
    File::open("/dev/urandom")?.read_exact(&mut id)?;
    let owner: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let (began, mut has_broken) = (Instant::now(), false);
    while let Some(left) = wait.checked_sub(began.elapsed()) {
        let sent = Instant::now();
        let (lease, left, waited) = (ms(LEASE), ms(left), ms(began.elapsed())); // WAITED keeps the place in the queue
        let request = [key, &owner, "HOLDS", "1", "LEASE", &lease, "WAIT", &left, "WAITED", &waited];
        let hold = waits.send("LOCK.ACQUIRE", &request).and_then(|token| {
            let Some(token) = token else { return Ok(None) };
            let (owner, token, certain) = (owner.clone(), token.to_string(), Mutex::new(sent + SURE));
            let hold = Hold { key, owner, token, broke: has_broken, certain };
            if sent.elapsed() > SURE / 2 {
                hold.renew(short)?; // the lease began during the wait, but it is not known when
            }
            Ok(Some(hold))
        });
        match hold {
            Ok(Some(hold)) if hold.is_held() => return Ok(hold),
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) if broke(&error) => has_broken = true,
            Err(error) => return Err(error.into()),
        }
        thread::sleep(PAUSE);
    }
    if has_broken {
        short.send("LOCK.RELEASE", &[key, &owner, "ALL"])?; // a request may still be on its way
    }
    Err(format!("{key} was not acquired within {wait:?}").into())
}

/// Renews until `stop`.
fn renew(short: &mut Link, hold: &Hold, stop: &AtomicBool) {
    let mut pause = LEASE / 4;
    while hold.is_held() {
        thread::park_timeout(pause);
        if stop.load(Ordering::Relaxed) {
            return;
        }
        // After an error it is asked again while the lease is certain.
        pause = if hold.renew(short).is_ok() { LEASE / 4 } else { PAUSE };
    }
}

fn release(short: &mut Link, hold: &Hold) -> Result<(), Box<dyn Error>> {
    let (began, mut has_broken, mut is_first) = (Instant::now(), hold.broke, true);
    while began.elapsed() < LEASE {
        let named = short.send("LOCK.RELEASE", &[hold.key, &hold.owner, "TOKEN", &hold.token]);
        let released = named.and_then(|released| {
            // A request that was sent twice may still be in the queue.
            if has_broken {
                short.send("LOCK.RELEASE", &[hold.key, &hold.owner, "ALL"]).map(|_| released)
            } else {
                Ok(released)
            }
        });
        match released {
            Ok(None) if is_first => return Err(format!("{} had been lost", hold.key).into()),
            Ok(_) => return Ok(()), // nil to a repetition: the first reply was lost
            Err(error) if broke(&error) => (has_broken, is_first) = (true, false),
            Err(error) => return Err(error.into()),
        }
        thread::sleep(PAUSE);
    }
    Ok(()) // the lease has ended
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().collect();
    let [_, port, key] = arguments.as_slice() else { return Err("usage: recipe PORT KEY".into()) };
    let client = Client::open(format!("redis://127.0.0.1:{port}/"))?;
    let timeout = Some(LEASE / 8);
    let (mut waits, mut short, mut renewing) =
        (Link::new(&client, None), Link::new(&client, timeout), Link::new(&client, timeout));
    let hold = acquire(&mut waits, &mut short, key, Duration::from_secs(30))?;
    println!("held {}", hold.token);
    let (stop, inside) = (AtomicBool::new(false), format!("inside:{key}"));
    let was_held = thread::scope(|scope| -> Result<bool, Box<dyn Error>> {
        let timer = scope.spawn(|| renew(&mut renewing, &hold, &stop));
        let work = (|| {
            if short.send("INCR", &[&inside])? != Some(1) {
                return Err("two processes hold the lock".into());
            }
            thread::sleep(LEASE / 2); // the work
            short.send("DECR", &[&inside])?;
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        timer.thread().unpark();
        timer.join().expect("the timer does not panic");
        work.map(|()| hold.is_held())
    });
    release(&mut short, &hold)?;
    if !was_held? {
        return Err("the lock was lost".into());
    }
    println!("released");
    Ok(())
}
