//! Many readers, writers and holders of permits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redis::Value;
use support::{Random, Raw, Server};

use crate::lines::{Commands, Reply, encode, setting};

/// One hold, and the wait before it. Unix times in µs, by the clock that the server uses too.
#[derive(Clone, Copy, Debug)]
struct Visit {
    writer: bool,
    /// Before the request was sent.
    asked: i64,
    /// The server has executed the request by now.
    queued: i64,
    /// The grant, by the server's clock.
    token: i64,
    /// From here on the client held the lock…
    entered: i64,
    /// …until here.
    left: i64,
    /// The server has executed the release by now.
    released: i64,
}

fn micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    i64::try_from(since.as_micros()).expect("before the year 292,000")
}

#[test]
fn writers_exclude_all_and_readers_overlap() {
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 3));
    let server = Server::start();
    let mut random = Random::new();
    let end = Instant::now() + duration;
    let mut visits: Vec<Visit> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|who| {
                let (connection, random, writer) = (server.raw(), random.fork(), who % 4 == 0);
                scope.spawn(move || visit(connection, random, who, writer, end))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a visitor saw nothing wrong")).collect()
    });
    visits.sort_by_key(|visit| visit.token);
    let writers = visits.iter().filter(|visit| visit.writer).count();
    println!("{} visits, {writers} of them writers", visits.len());
    assert!(writers > 20 && visits.len() - writers > 20, "too few visits");

    assert_writers_are_alone(&visits);
    let together = most_readers(&visits);
    println!("at most {together} readers at once");
    assert!(together >= 2, "readers never overlapped");
    assert_fifo(&visits);
    assert_writers_wait_only_for_earlier_holders(&visits);
}

fn visit(mut connection: Raw, mut random: Random, who: usize, writer: bool, end: Instant) -> Vec<Visit> {
    let words = if writer { "LIMIT 1" } else { "SHARED" };
    let request = format!("LOCK.ACQUIRE key owner:{who} LEASE 600000 {words} WAIT 0");
    let mut visits = Vec::new();
    while Instant::now() < end {
        thread::sleep(Duration::from_micros(random.index(6000) as u64));
        let asked = micros();
        connection.send_bytes(&[encode("PING"), encode(&request)].concat()).expect("request sent");
        connection.read().expect("PONG");
        let queued = micros();
        let token = connection.read().expect("nobody waits for ever").token();
        let entered = micros();
        thread::sleep(Duration::from_micros(random.index(2000) as u64));
        let left = micros();
        assert_eq!(connection.run(&format!("LOCK.RELEASE key owner:{who} TOKEN {token}")), Value::Int(1));
        visits.push(Visit { writer, asked, queued, token, entered, left, released: micros() });
    }
    visits
}

/// A writer overlaps no other holder. `visits` are in order of grants.
fn assert_writers_are_alone(visits: &[Visit]) {
    let (mut last_writer, mut last_reader) = (0, 0);
    for visit in visits {
        assert!(visit.entered >= last_writer, "{visit:?} overlaps a writer");
        if visit.writer {
            assert!(visit.entered >= last_reader, "{visit:?} overlaps a reader");
            last_writer = last_writer.max(visit.left);
        } else {
            last_reader = last_reader.max(visit.left);
        }
    }
}

/// The largest number of concurrent readers.
fn most_readers(visits: &[Visit]) -> i32 {
    let readers = visits.iter().filter(|visit| !visit.writer);
    let mut steps: Vec<(i64, i32)> = readers.flat_map(|visit| [(visit.entered, 1), (visit.left, -1)]).collect();
    steps.sort_unstable();
    let inside = steps.iter().scan(0, |inside, (_, step)| {
        *inside += step;
        Some(*inside)
    });
    inside.max().unwrap_or(0)
}

/// No request is granted after a later one.
fn assert_fifo(visits: &[Visit]) {
    let mut latest_asked = 0;
    for visit in visits {
        // Granted before this one, but sent after this one was queued?
        assert!(latest_asked <= visit.queued, "{visit:?} was granted after a request that was sent at {latest_asked}");
        latest_asked = latest_asked.max(visit.asked);
    }
}

/// By the server's clock, a writer is granted immediately, or when the holders with smaller tokens have released.
fn assert_writers_wait_only_for_earlier_holders(visits: &[Visit]) {
    let (mut ahead_released, mut longest) = (0, 0);
    for visit in visits {
        if visit.writer {
            assert!(
                visit.token <= visit.queued.max(ahead_released),
                "{visit:?} waited {} µs longer than those ahead of it held",
                visit.token - ahead_released
            );
            longest = longest.max(visit.token - visit.asked);
        }
        ahead_released = ahead_released.max(visit.released);
    }
    println!("longest wait of a writer: {longest} µs, never longer than those ahead of it held");
}

#[test]
fn semaphore_of_five_admits_at_most_five() {
    const CONNECTIONS: usize = 100;
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 3));
    let server = Server::start();
    let (inside, most, visits) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut random = Random::new();
    let end = Instant::now() + duration;
    thread::scope(|scope| {
        for who in 0..CONNECTIONS {
            let (mut connection, mut random) = (server.raw(), random.fork());
            let (inside, most, visits) = (&inside, &most, &visits);
            scope.spawn(move || {
                while Instant::now() < end {
                    let request = format!("LOCK.ACQUIRE key owner:{who} LEASE 600000 LIMIT 5 WAIT 0");
                    let token = connection.run(&request).token();
                    let now_inside = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now_inside <= 5, "{now_inside} are inside");
                    most.fetch_max(now_inside, Ordering::SeqCst);
                    visits.fetch_add(1, Ordering::SeqCst);
                    thread::sleep(Duration::from_micros(random.index(2000) as u64));
                    inside.fetch_sub(1, Ordering::SeqCst);
                    let left = connection.run(&format!("LOCK.RELEASE key owner:{who} TOKEN {token}"));
                    assert_eq!(left, Value::Int(1));
                }
            });
        }
    });
    println!("{visits:?} visits of {CONNECTIONS} connections, at most {most:?} at once");
    assert_eq!(most.into_inner(), 5);
    assert_eq!(server.raw().run("DBSIZE"), Value::Int(0));
}
