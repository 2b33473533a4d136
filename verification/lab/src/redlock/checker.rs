//! Checks the records of RedLock clients: holds do not overlap within their validity, and fencing tokens increase.

use serde_json::Value;

use crate::history::Micros;

/// The outcome of one request for the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The lock was acquired.
    Acquired(Hold),
    /// Not acquired. Some clients try several times for one request; this is the number of attempts.
    Failed(u64),
}

/// A hold, as its client recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Who held it.
    pub client: String,
    /// When it was requested.
    pub sent: Micros,
    /// When its client knew of it.
    pub granted: Micros,
    /// When its client released it or was notified of its loss, or when its validity ended.
    pub ended: Micros,
    /// The fencing token, if the algorithm has one.
    pub fence: Option<u64>,
    /// Whether its client was notified of its loss.
    pub lost: bool,
    /// Failed attempts before it.
    pub failed: u64,
}

/// The results.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// The number of grants.
    pub holds: u64,
    /// Failed attempts.
    pub failed: u64,
    /// Holds whose client was notified of their loss.
    pub lost: u64,
    /// The longest wait for a grant.
    pub worst_wait: Micros,
    /// Requests, each with all of its attempts.
    pub requests: u64,
    /// Violated guarantees, as text.
    pub wrong: Vec<String>,
}

impl Attempt {
    /// Reads a line of a contender: of a program with several clients, or of a program that is one client.
    ///
    /// ```text
    /// {"client": "py0", "sent": µs, "granted": µs, "ended": µs, "fence": n, "lost": false, "failed": n}
    /// {"client": "py0", "sent": µs, "failed": n}
    /// {"t_request": µs, "t_granted": µs, "t_until_valid": µs, "t_release": µs, "fence": n, "lost": null}
    /// {"t_request": µs, "t_failed": µs}
    /// ```
    ///
    /// All times are of the machine's monotonic clock. `failed` counts failed attempts before the grant. It, `fence` and `lost` may
    /// be left out.
    pub fn read(program: &str, line: &str) -> Result<Attempt, String> {
        let not_read = || format!("not a line of a contender: {line:?}");
        let value: Value = serde_json::from_str(line).map_err(|_| not_read())?;
        let number = |name: &str| value.get(name).and_then(Value::as_u64);
        let fence = number("fence");
        if let Some(sent) = number("t_request") {
            return match ["t_granted", "t_until_valid", "t_release"].map(number) {
                [Some(granted), Some(until), Some(release)] => {
                    let lost = value.get("lost").is_some_and(|why| !why.is_null());
                    let (client, ended) = (program.to_owned(), until.min(release));
                    Ok(Attempt::Acquired(Hold { client, sent, granted, ended, fence, lost, failed: 0 }))
                }
                _ => number("t_failed").map(|_| Attempt::Failed(1)).ok_or_else(not_read),
            };
        }
        let failed = number("failed").unwrap_or(0);
        let Some(granted) = number("granted") else {
            return if value.get("failed").is_some() { Ok(Attempt::Failed(failed.max(1))) } else { Err(not_read()) };
        };
        let client = value.get("client").and_then(Value::as_str).ok_or_else(not_read)?.to_owned();
        let lost = value.get("lost").and_then(Value::as_bool).unwrap_or(false);
        match (number("sent"), number("ended")) {
            (Some(sent), Some(ended)) => {
                Ok(Attempt::Acquired(Hold { client, sent, granted, ended, fence, lost, failed }))
            }
            _ => Err(not_read()),
        }
    }
}

/// Checks the records of all clients.
pub fn check(attempts: &[Attempt]) -> Verdict {
    let mut verdict = Verdict { requests: attempts.len() as u64, ..Verdict::default() };
    let mut holds: Vec<&Hold> = Vec::new();
    for attempt in attempts {
        match attempt {
            Attempt::Failed(tries) => verdict.failed += tries,
            Attempt::Acquired(hold) => {
                verdict.failed += hold.failed;
                verdict.lost += u64::from(hold.lost);
                verdict.worst_wait = verdict.worst_wait.max(hold.granted.saturating_sub(hold.sent));
                holds.push(hold);
            }
        }
    }
    verdict.holds = holds.len() as u64;
    holds.sort_by_key(|hold| hold.granted);
    if holds.is_empty() {
        verdict.wrong.push("the lock was never held".to_owned());
    }
    check_overlaps(&holds, &mut verdict);
    check_fences(&holds, &mut verdict);
    verdict
}

fn check_overlaps(holds: &[&Hold], verdict: &mut Verdict) {
    let mut longest: Option<&Hold> = None;
    for hold in holds {
        if let Some(other) = longest.filter(|other| hold.granted < other.ended) {
            let beside = hold.ended.min(other.ended).saturating_sub(hold.granted);
            verdict.wrong.push(format!(
                "{} held it together with {} from {} µs on for {beside} µs",
                hold.client, other.client, hold.granted
            ));
        }
        if longest.is_none_or(|other| other.ended < hold.ended) {
            longest = Some(hold);
        }
    }
}

fn check_fences(holds: &[&Hold], verdict: &mut Verdict) {
    let mut highest: Option<(u64, &str)> = None;
    for hold in holds {
        let Some(fence) = hold.fence else { continue };
        if let Some((before, whose)) = highest.filter(|(before, _)| fence <= *before) {
            let client = &hold.client;
            verdict.wrong.push(format!("{client} got token {fence} after {whose} got {before}"));
        }
        highest = highest.max(Some((fence, &hold.client)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(client: &str, granted: Micros, ended: Micros, fence: u64) -> Attempt {
        let line = format!(
            r#"{{"client":"{client}","sent":{},"granted":{granted},"ended":{ended},"fence":{fence},"failed":1}}"#,
            granted - 5
        );
        Attempt::read("program", &line).expect("a line")
    }

    #[test]
    fn both_record_formats_are_read() {
        let line = r#"{"t_request":5,"t_granted":10,"fence":1,"t_until_valid":30,"t_release":20,"lost":null}"#;
        let Attempt::Acquired(hold) = Attempt::read("rust-0", line).expect("a line") else { panic!("not a hold") };
        assert_eq!((hold.client.as_str(), hold.granted, hold.ended, hold.lost), ("rust-0", 10, 20, false));
        let failed = Attempt::read("rust-0", r#"{"t_request":5,"t_failed":10,"why":"not granted"}"#);
        assert_eq!(failed, Ok(Attempt::Failed(1)));
    }

    fn wrong(attempts: &[Attempt]) -> Vec<String> {
        check(attempts).wrong
    }

    #[test]
    fn sequential_holds_are_accepted() {
        let verdict = check(&[hold("b", 20, 30, 2), hold("a", 10, 20, 1), Attempt::Failed(3)]);
        assert_eq!(verdict.wrong, [""; 0]);
        assert_eq!((verdict.holds, verdict.failed, verdict.requests, verdict.worst_wait), (2, 5, 3, 5));
    }

    #[test]
    fn overlap_of_a_microsecond_is_found() {
        assert_eq!(wrong(&[hold("a", 10, 21, 1), hold("b", 20, 30, 2)]).len(), 1);
        // Also with a hold that is not the previous one.
        assert_eq!(wrong(&[hold("a", 10, 100, 1), hold("b", 20, 30, 2), hold("c", 40, 50, 3)]).len(), 2);
    }

    #[test]
    fn decreasing_or_repeated_fence_is_found() {
        assert_eq!(wrong(&[hold("a", 10, 20, 5), hold("b", 20, 30, 4)]).len(), 1);
        assert_eq!(wrong(&[hold("a", 10, 20, 5), hold("b", 20, 30, 5)]).len(), 1);
        assert_eq!(wrong(&[hold("a", 10, 20, 5), hold("b", 20, 30, 4), hold("c", 40, 50, 5)]).len(), 2);
    }

    #[test]
    fn run_without_grants_fails() {
        assert_eq!(wrong(&[Attempt::Failed(1)]).len(), 1);
    }

    #[test]
    fn invalid_record_is_refused() {
        for line in [
            "",
            "{}",
            "[1]",
            r#"{"client":"a","granted":3}"#,
            r#"{"granted":3,"sent":1,"ended":5}"#,
            r#"{"t_request":3}"#,
        ] {
            assert!(Attempt::read("program", line).is_err(), "{line}");
        }
    }
}
