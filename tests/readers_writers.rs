//! Crowds of readers, writers and holders of permits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redis::Value;
use support::{Random, Raw, Server};

use crate::speak::{Reply, Speak, encode, setting};

/// One stay inside, and the way there. Times are Unix time in µs, by the clock that the server uses too.
#[derive(Clone, Copy, Debug)]
struct Stay {
    writer: bool,
    /// Before the request was sent.
    asked: i64,
    /// The server has executed the request by now: it is granted or waits.
    queued: i64,
    /// The grant; also the server's clock at the moment of it.
    token: i64,
    /// From here on it was surely inside…
    entered: i64,
    /// …until here.
    left: i64,
    /// By now the server has surely executed the release.
    released: i64,
}

fn micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    i64::try_from(since.as_micros()).expect("before the year 292,000")
}

#[test]
fn writers_exclude_all_and_readers_overlap() {
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 6));
    let server = Server::start();
    let mut random = Random::new();
    let end = Instant::now() + duration;
    let mut stays: Vec<Stay> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|who| {
                let (connection, random, writer) = (server.raw(), random.fork(), who % 4 == 0);
                scope.spawn(move || visit(connection, random, who, writer, end))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a visitor saw nothing wrong")).collect()
    });
    stays.sort_by_key(|stay| stay.token);
    let writers = stays.iter().filter(|stay| stay.writer).count();
    println!("{} stays, {writers} of them writers", stays.len());
    assert!(writers > 20 && stays.len() - writers > 20, "there was no crowd");

    writers_are_alone(&stays);
    let together = most_readers(&stays);
    println!("at most {together} readers at once");
    assert!(together >= 2, "readers never overlapped");
    nobody_is_passed(&stays);
    writers_wait_for_those_ahead_only(&stays);
}

fn visit(mut connection: Raw, mut random: Random, who: usize, writer: bool, end: Instant) -> Vec<Stay> {
    let words = if writer { "LIMIT 1" } else { "SHARED" };
    let request = format!("LOCK.ACQUIRE key owner:{who} LEASE 600000 {words} WAIT 0");
    let mut stays = Vec::new();
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
        assert_eq!(connection.say(&format!("LOCK.RELEASE key owner:{who} TOKEN {token}")), Value::Int(1));
        stays.push(Stay { writer, asked, queued, token, entered, left, released: micros() });
    }
    stays
}

/// In order of grants: a request after a writer is granted when it has left, and the other way round.
fn writers_are_alone(stays: &[Stay]) {
    let (mut last_writer, mut last_reader) = (0, 0);
    for stay in stays {
        assert!(stay.entered >= last_writer, "{stay:?} overlaps a writer");
        if stay.writer {
            assert!(stay.entered >= last_reader, "{stay:?} overlaps a reader");
            last_writer = last_writer.max(stay.left);
        } else {
            last_reader = last_reader.max(stay.left);
        }
    }
}

/// How many readers were inside at once, at most.
fn most_readers(stays: &[Stay]) -> i32 {
    let readers = stays.iter().filter(|stay| !stay.writer);
    let mut steps: Vec<(i64, i32)> = readers.flat_map(|stay| [(stay.entered, 1), (stay.left, -1)]).collect();
    steps.sort_unstable();
    let inside = steps.iter().scan(0, |inside, (_, step)| {
        *inside += step;
        Some(*inside)
    });
    inside.max().unwrap_or(0)
}

/// Who asked when another already waited got in after it.
fn nobody_is_passed(stays: &[Stay]) {
    let mut latest_asked = 0;
    for stay in stays {
        // Granted before this one, but asked after it was in the queue?
        assert!(latest_asked <= stay.queued, "{stay:?} was passed by one who asked at {latest_asked}");
        latest_asked = latest_asked.max(stay.asked);
    }
}

/// A writer is granted at once or, by the server's clock, not after those with smaller tokens have released.
fn writers_wait_for_those_ahead_only(stays: &[Stay]) {
    let (mut ahead_released, mut longest) = (0, 0);
    for stay in stays {
        if stay.writer {
            assert!(
                stay.token <= stay.queued.max(ahead_released),
                "{stay:?} waited {} µs longer than those ahead of it held",
                stay.token - ahead_released
            );
            longest = longest.max(stay.token - stay.asked);
        }
        ahead_released = ahead_released.max(stay.released);
    }
    println!("longest wait of a writer: {longest} µs, never longer than those ahead of it held");
}

#[test]
fn semaphore_of_five_admits_at_most_five() {
    const CONNECTIONS: usize = 100;
    let duration = Duration::from_secs(setting("HOLDFAST_STRESS_SECONDS", 5));
    let server = Server::start();
    let (inside, most, stays) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut random = Random::new();
    let end = Instant::now() + duration;
    thread::scope(|scope| {
        for who in 0..CONNECTIONS {
            let (mut connection, mut random) = (server.raw(), random.fork());
            let (inside, most, stays) = (&inside, &most, &stays);
            scope.spawn(move || {
                while Instant::now() < end {
                    let request = format!("LOCK.ACQUIRE key owner:{who} LEASE 600000 LIMIT 5 WAIT 0");
                    let token = connection.say(&request).token();
                    let now_inside = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now_inside <= 5, "{now_inside} are inside");
                    most.fetch_max(now_inside, Ordering::SeqCst);
                    stays.fetch_add(1, Ordering::SeqCst);
                    thread::sleep(Duration::from_micros(random.index(2000) as u64));
                    inside.fetch_sub(1, Ordering::SeqCst);
                    let left = connection.say(&format!("LOCK.RELEASE key owner:{who} TOKEN {token}"));
                    assert_eq!(left, Value::Int(1));
                }
            });
        }
    });
    println!("{stays:?} stays of {CONNECTIONS} connections, at most {most:?} at once");
    assert_eq!(most.into_inner(), 5);
    assert_eq!(server.raw().say("DBSIZE"), Value::Int(0));
}
