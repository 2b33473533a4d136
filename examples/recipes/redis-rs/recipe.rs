//! A lock with redis-rs and raw LOCK.* commands.  Usage: recipe PORT KEY
use std::env;
use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, Connection, RedisError, RedisResult};

/// A killed process blocks others for at most this long.
const LEASE: Duration = Duration::from_secs(10);
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
}

fn acquire<'a>(waits: &mut Link, short: &mut Link, key: &'a str, wait: Duration) -> Result<Hold<'a>, Box<dyn Error>> {
    let mut id = [0; 16]; // unique for each acquisition
    File::open("/dev/urandom")?.read_exact(&mut id)?;
    let owner: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let (began, mut has_broken) = (Instant::now(), false);
    while let Some(left) = wait.checked_sub(began.elapsed()) {
        let (lease, left, waited) = (ms(LEASE), ms(left), ms(began.elapsed())); // WAITED keeps the place in the queue
        let request = [key, &owner, "HOLDS", "1", "LEASE", &lease, "WAIT", &left, "WAITED", &waited];
        match waits.send("LOCK.ACQUIRE", &request) {
            Ok(Some(token)) => return Ok(Hold { key, owner, token: token.to_string(), broke: has_broken }),
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

/// Renews until `stop`. Returns whether the lock was held all the time.
fn renew(short: &mut Link, hold: &Hold, stop: &AtomicBool) -> bool {
    let mut certain = Instant::now() + LEASE;
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        match short.send("LOCK.RENEW", &[hold.key, &hold.owner, "TOKEN", &hold.token, "LEASE", &ms(LEASE)]) {
            Ok(Some(_)) => certain = sent + LEASE,
            Ok(None) => return false,
            Err(_) => {} // asked again while the lease is certain
        }
        if Instant::now() >= certain {
            return false;
        }
        thread::park_timeout(LEASE / 4);
    }
    true
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
        let was_held = timer.join().expect("the timer does not panic");
        work.map(|()| was_held)
    });
    release(&mut short, &hold)?;
    if !was_held? {
        return Err("the lock was lost".into());
    }
    println!("released");
    Ok(())
}
