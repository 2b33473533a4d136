//! Judges what the clients of a RedLock wrote down: nobody held beside another within their validity, and fences only grew.

use serde_json::Value;

use crate::history::Micros;

/// What came of one attempt to have the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It was held.
    Held(Hold),
    /// It was not granted. Some clients try several times within one attempt: so many.
    Failed(u64),
}

/// A hold, as its client knew it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Who held it.
    pub client: String,
    /// When it was asked for.
    pub sent: Micros,
    /// When its client knew that it holds.
    pub granted: Micros,
    /// When its client gave it back, or knew that it was lost, or when its validity was over.
    pub ended: Micros,
    /// The fencing token; none where the way knows none.
    pub fence: Option<u64>,
    /// Whether its client was told that it is lost.
    pub lost: bool,
    /// Tries before it that were in vain.
    pub failed: u64,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// How often it was granted.
    pub holds: u64,
    /// Tries in vain.
    pub failed: u64,
    /// Holds whose client was told that it is lost.
    pub lost: u64,
    /// The longest that a client waited for its grant.
    pub worst_wait: Micros,
    /// Attempts, each with all of its tries.
    pub requests: u64,
    /// Broken promises, in words.
    pub wrong: Vec<String>,
}

impl Turn {
    /// Reads a line of a contender: one of a program with several clients, or one of a program that is one client.
    ///
    /// ```text
    /// {"client": "py0", "sent": µs, "granted": µs, "ended": µs, "fence": n, "lost": false, "failed": n}
    /// {"client": "py0", "sent": µs, "failed": n}
    /// {"t_request": µs, "t_granted": µs, "t_until_valid": µs, "t_release": µs, "fence": n, "lost": null}
    /// {"t_request": µs, "t_failed": µs}
    /// ```
    ///
    /// All times are of the machine's monotonic clock. `failed` counts tries in vain before the grant; it, `fence` and
    /// `lost` may be left out.
    pub fn read(program: &str, line: &str) -> Result<Turn, String> {
        let not_read = || format!("not a line of a contender: {line:?}");
        let value: Value = serde_json::from_str(line).map_err(|_| not_read())?;
        let number = |name: &str| value.get(name).and_then(Value::as_u64);
        let fence = number("fence");
        if let Some(sent) = number("t_request") {
            return match ["t_granted", "t_until_valid", "t_release"].map(number) {
                [Some(granted), Some(until), Some(release)] => {
                    let lost = value.get("lost").is_some_and(|why| !why.is_null());
                    let (client, ended) = (program.to_owned(), until.min(release));
                    Ok(Turn::Held(Hold { client, sent, granted, ended, fence, lost, failed: 0 }))
                }
                _ => number("t_failed").map(|_| Turn::Failed(1)).ok_or_else(not_read),
            };
        }
        let failed = number("failed").unwrap_or(0);
        let Some(granted) = number("granted") else {
            return if value.get("failed").is_some() { Ok(Turn::Failed(failed.max(1))) } else { Err(not_read()) };
        };
        let client = value.get("client").and_then(Value::as_str).ok_or_else(not_read)?.to_owned();
        let lost = value.get("lost").and_then(Value::as_bool).unwrap_or(false);
        match (number("sent"), number("ended")) {
            (Some(sent), Some(ended)) => Ok(Turn::Held(Hold { client, sent, granted, ended, fence, lost, failed })),
            _ => Err(not_read()),
        }
    }
}

/// Judges what all clients wrote down.
pub fn check(turns: &[Turn]) -> Verdict {
    let mut verdict = Verdict { requests: turns.len() as u64, ..Verdict::default() };
    let mut holds: Vec<&Hold> = Vec::new();
    for turn in turns {
        match turn {
            Turn::Failed(tries) => verdict.failed += tries,
            Turn::Held(hold) => {
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
        verdict.wrong.push("nobody ever held the lock".to_owned());
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
                "{} held it beside {} from {} µs on for {beside} µs",
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
            verdict.wrong.push(format!("{client} got the fence {fence} after {whose} had got {before}"));
        }
        highest = highest.max(Some((fence, &hold.client)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(client: &str, granted: Micros, ended: Micros, fence: u64) -> Turn {
        let line = format!(
            r#"{{"client":"{client}","sent":{},"granted":{granted},"ended":{ended},"fence":{fence},"failed":1}}"#,
            granted - 5
        );
        Turn::read("program", &line).expect("a line")
    }

    #[test]
    fn both_record_formats_are_read() {
        let line = r#"{"t_request":5,"t_granted":10,"fence":1,"t_until_valid":30,"t_release":20,"lost":null}"#;
        let Turn::Held(hold) = Turn::read("rust-0", line).expect("a line") else { panic!("no hold") };
        assert_eq!((hold.client.as_str(), hold.granted, hold.ended, hold.lost), ("rust-0", 10, 20, false));
        let failed = Turn::read("rust-0", r#"{"t_request":5,"t_failed":10,"why":"not granted"}"#);
        assert_eq!(failed, Ok(Turn::Failed(1)));
    }

    fn wrong(turns: &[Turn]) -> Vec<String> {
        check(turns).wrong
    }

    #[test]
    fn sequential_holds_are_accepted() {
        let verdict = check(&[hold("b", 20, 30, 2), hold("a", 10, 20, 1), Turn::Failed(3)]);
        assert_eq!(verdict.wrong, [""; 0]);
        assert_eq!((verdict.holds, verdict.failed, verdict.requests, verdict.worst_wait), (2, 5, 3, 5));
    }

    #[test]
    fn overlap_of_a_microsecond_is_found() {
        assert_eq!(wrong(&[hold("a", 10, 21, 1), hold("b", 20, 30, 2)]).len(), 1);
        // Also with one that is not the last before it.
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
        assert_eq!(wrong(&[Turn::Failed(1)]).len(), 1);
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
            assert!(Turn::read("program", line).is_err(), "{line}");
        }
    }
}
