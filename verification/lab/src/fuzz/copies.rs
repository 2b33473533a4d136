//! Whether replicas equal their primary, and whether servers have logged errors.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::{Connection, RedisResult, Value};
use support::{Server, eventually};

use super::mixed;

/// How long replicas may take to become equal when no requests are sent.
const SOON: Duration = Duration::from_secs(20);

/// The digest of the data, which leaves deadlines out, and the deadlines.
#[derive(PartialEq, Eq)]
struct Contents {
    digest: String,
    deadlines: BTreeMap<(u32, Vec<u8>), i64>,
}

/// Waits until every replica has the same data and deadlines as the primary. The error is the difference.
///
/// Locks expire meanwhile, so a comparison counts only if nothing was written during it.
pub fn check_copies(primary: &Server, replicas: &[Server]) -> Result<(), String> {
    for (number, replica) in replicas.iter().enumerate() {
        let mut last = String::from("primary and replica never had the same offset");
        let equal = eventually(SOON, || match compare(primary, replica) {
            Ok(Some(difference)) => {
                last = difference;
                last.is_empty()
            }
            Ok(None) => false,
            Err(error) => {
                last = error.to_string();
                false
            }
        });
        if !equal {
            return Err(format!("replica {number} differs from its primary: {last}"));
        }
    }
    Ok(())
}

/// The difference, empty if there is none. `None` if the two had different offsets.
fn compare(primary: &Server, replica: &Server) -> RedisResult<Option<String>> {
    let (mut primary, mut replica) = (connect(primary)?, connect(replica)?);
    let before = offset(&mut primary, "master_repl_offset")?;
    let ours = contents(&mut primary)?;
    let theirs = contents(&mut replica)?;
    let taken = offset(&mut replica, "slave_repl_offset")?;
    let after = offset(&mut primary, "master_repl_offset")?;
    if before != after || taken != before {
        return Ok(None);
    }
    Ok(Some(difference(&ours, &theirs)))
}

fn difference(ours: &Contents, theirs: &Contents) -> String {
    let odd: Vec<String> = ours
        .deadlines
        .iter()
        .filter(|(key, deadline)| theirs.deadlines.get(key) != Some(deadline))
        .map(|((database, key), deadline)| {
            let there = theirs.deadlines.get(&(*database, key.clone()));
            format!("{database}/{}: {deadline} against {there:?}", key.escape_ascii())
        })
        .collect();
    if ours == theirs {
        String::new()
    } else if !odd.is_empty() {
        format!("deadlines: {}", odd.join(", "))
    } else {
        format!(
            "digest {} with {} keys against {} with {}",
            ours.digest,
            ours.deadlines.len(),
            theirs.digest,
            theirs.deadlines.len()
        )
    }
}

fn connect(server: &Server) -> RedisResult<Connection> {
    let connection = server.client().get_connection()?;
    connection.set_read_timeout(Some(SOON))?;
    Ok(connection)
}

fn offset(connection: &mut Connection, name: &str) -> RedisResult<Option<i64>> {
    let info: redis::InfoDict = redis::cmd("INFO").arg("replication").query(connection)?;
    Ok(info.get(name))
}

fn contents(connection: &mut Connection) -> RedisResult<Contents> {
    let digest = redis::cmd("DEBUG").arg("DIGEST").query(connection)?;
    let mut deadlines = BTreeMap::new();
    for database in 0..=mixed::DATABASE {
        redis::cmd("SELECT").arg(database).exec(connection)?;
        let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection)?;
        for key in keys {
            let deadline = redis::cmd("PEXPIRETIME").arg(&key).query(connection)?;
            deadlines.insert((database, key), deadline);
        }
    }
    // A key that has expired and is not deleted yet: KEYS leaves it out, or PEXPIRETIME returns -2.
    deadlines.retain(|_, deadline| *deadline != -2);
    Ok(Contents { digest, deadlines })
}

/// Whether the server runs, and has logged no error after the first `seen` bytes of its log.
pub fn quiet_log(server: &Server, seen: usize) -> Result<(), String> {
    let alive: RedisResult<Value> =
        connect(server).and_then(|mut connection| redis::cmd("PING").query(&mut connection));
    let log = server.log();
    if let Err(error) = alive {
        let notified = last_words(&log).join("\n");
        return Err(format!("the server on {} is gone ({error}); its log says:\n{notified}", server.addr()));
    }
    match log.get(seen..).unwrap_or(&log).lines().find(|line| is_complaint(line)) {
        Some(line) => Err(format!("in the log of the server on {}: {line}", server.addr())),
        None => Ok(()),
    }
}

/// The beginning of a crash report, or the end of the log.
fn last_words(log: &str) -> Vec<&str> {
    const LINES: usize = 60;
    let lines: Vec<&str> = log.lines().collect();
    let report = lines.iter().position(|line| line.contains("BUG REPORT START") || line.contains("AddressSanitizer"));
    let from = report.unwrap_or(lines.len().saturating_sub(LINES));
    lines.into_iter().skip(from).take(LINES).collect()
}

/// Whether a line has the level *warning*. Random data sometimes looks like HTTP to the server, which logs that.
fn is_complaint(line: &str) -> bool {
    let warning = line.split(' ').any(|word| word == "#") || line.contains("CRITICAL") || line.contains("panicked");
    warning && !line.contains("Possible SECURITY ATTACK")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_errors_are_found() {
        assert!(is_complaint("1:M 20 Nov 2026 10:00:00.000 # === REDIS BUG REPORT START"));
        assert!(is_complaint("thread '<unnamed>' panicked at src/x.rs"));
        assert!(is_complaint("1:S 20 Nov 2026 10:00:00.000 * == CRITICAL == This replica is sending an error"));
        assert!(!is_complaint("1:M 20 Nov 2026 10:00:00.000 * Ready to accept connections"));
    }

    #[test]
    fn different_deadline_is_a_difference() {
        let contents =
            |deadline| Contents { digest: "same".into(), deadlines: BTreeMap::from([((0, b"k".to_vec()), deadline)]) };
        assert_eq!(difference(&contents(5), &contents(5)), "");
        assert!(difference(&contents(5), &contents(6)).contains("0/k: 5 against Some(6)"));
    }

    /// A primary and a replica that accepts writes, so that differences can be injected.
    fn pair() -> (Server, Server) {
        let primary = Server::builder().without_module().start();
        let replica = Server::builder().without_module().arg("replica-read-only", "no").start();
        replica.replica_of(&primary);
        redis::cmd("HSET").arg("lock").arg("owner").arg(1).exec(&mut primary.connect()).unwrap();
        redis::cmd("PEXPIRE").arg("lock").arg(60_000).exec(&mut primary.connect()).unwrap();
        primary.wait_for_replica(&replica);
        (primary, replica)
    }

    fn seen(primary: &Server, replica: &Server) -> String {
        let mut found = None;
        eventually(SOON, || {
            found = compare(primary, replica).unwrap();
            found.is_some()
        });
        found.unwrap()
    }

    #[test]
    fn injected_differences_are_found() {
        let (primary, replica) = pair();
        assert_eq!(seen(&primary, &replica), "");
        redis::cmd("PEXPIRE").arg("lock").arg(50_000).exec(&mut replica.connect()).unwrap();
        assert!(seen(&primary, &replica).contains("deadlines"));
        let (primary, replica) = pair();
        redis::cmd("HINCRBY").arg("lock").arg("owner").arg(1).exec(&mut replica.connect()).unwrap();
        assert!(seen(&primary, &replica).contains("digest"));
    }

    #[test]
    fn log_error_and_crashed_server_are_found() {
        let mut server = Server::builder().without_module().start();
        let seen = server.log().len();
        quiet_log(&server, seen).unwrap();
        redis::cmd("DEBUG").arg("LOG").arg("injected").exec(&mut server.connect()).unwrap();
        assert!(quiet_log(&server, seen).unwrap_err().contains("injected"));
        server.kill9();
        assert!(quiet_log(&server, seen).unwrap_err().contains("is gone"));
    }
}
