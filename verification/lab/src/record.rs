//! The record format of clients in other languages.

use std::str::FromStr;

use crate::history::{Assurance, Epoch, Event, Grant, Limit, Loss, Micros, Outcome, Request};

/// Reads a line of a record: fields separated by tabs, `-` for unknown values.
///
/// ```text
/// G hold key owner limit token sent last_sent replied lease epoch assurance
/// N hold sent replied lease epoch assurance
/// E hold at
/// W hold at
/// S hold
/// T hold at expired|forced|changed|disconnected
/// Q sent allowed ended outcome
/// ```
///
/// `token_time` converts a token to the time on the monotonic clock at which it was issued.
pub fn parse(line: &str, token_time: impl Fn(u64) -> Micros) -> Result<Event, String> {
    let fields: Vec<&str> = line.split('\t').collect();
    let event = match fields.as_slice() {
        ["G", rest @ ..] => grant(rest, token_time),
        ["N", hold, sent, replied, lease, epoch, assurance] => renewed([hold, sent, replied, lease], epoch, assurance),
        ["E", hold, at] => pair(hold, at).map(|(hold, at)| Event::Ended { hold, at }),
        ["W", hold, at] => pair(hold, at).map(|(hold, at)| Event::Write { hold, at }),
        ["S", hold] => number(hold).map(|hold| Event::Bound { hold }),
        ["T", hold, at, why] => notified(hold, at, why),
        ["Q", sent, allowed, ended, outcome] => request(sent, allowed, ended, outcome),
        _ => None,
    };
    event.ok_or_else(|| format!("not a line of a record: {line:?}"))
}

fn grant(fields: &[&str], token_time: impl Fn(u64) -> Micros) -> Option<Event> {
    let [hold, key, owner, limit, token, sent, last_sent, replied, lease, epoch, assurance] = fields else {
        return None;
    };
    let token = number(token)?;
    Some(Event::Grant(Grant {
        hold: number(hold)?,
        key: (*key).to_owned(),
        owner: (*owner).to_owned(),
        limit: match *limit {
            "shared" => Limit::Shared,
            n => Limit::Of(number(n)?),
        },
        token,
        sent: number(sent)?,
        began: number::<Micros>(last_sent)?.max(token_time(token)),
        replied: number(replied)?,
        lease: number(lease)?,
        epoch: known(epoch),
        assurance: assured(assurance)?,
    }))
}

fn renewed(numbers: [&str; 4], epoch: &str, assurance: &str) -> Option<Event> {
    let [hold, sent, replied, lease] = numbers;
    Some(Event::Renewed {
        hold: number(hold)?,
        sent: number(sent)?,
        replied: number(replied)?,
        lease: number(lease)?,
        epoch: known(epoch),
        assurance: assured(assurance)?,
    })
}

fn notified(hold: &str, at: &str, why: &str) -> Option<Event> {
    let why = match why {
        "expired" => Loss::Expired,
        "forced" => Loss::Forced,
        "changed" | "unknown" => Loss::Changed,
        "disconnected" => Loss::Disconnected,
        _ => return None,
    };
    pair(hold, at).map(|(hold, at)| Event::LossNotified { hold, at, why })
}

fn request(sent: &str, allowed: &str, ended: &str, outcome: &str) -> Option<Event> {
    Some(Event::Request(Request {
        sent: number(sent)?,
        allowed: number(allowed)?,
        ended: match ended {
            "-" => None,
            at => Some(number(at)?),
        },
        outcome: match outcome {
            "granted" => Outcome::Granted,
            "refused" => Outcome::Refused,
            "failed" => Outcome::Failed,
            "unanswered" => Outcome::Unanswered,
            _ => return None,
        },
    }))
}

fn assured(word: &str) -> Option<Assurance> {
    match word {
        "plain" => Some(Assurance::Plain),
        "unconfirmed" => Some(Assurance::Unconfirmed),
        "confirmed" => Some(Assurance::Confirmed),
        "replicas" => Some(Assurance::Replicas),
        _ => None,
    }
}

fn known(epoch: &str) -> Epoch {
    (epoch != "-").then(|| epoch.to_owned())
}

fn pair(a: &str, b: &str) -> Option<(u64, u64)> {
    Some((number(a)?, number(b)?))
}

fn number<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}
