//! Whether clients with sessions heard of what they lost, and stopped.

use super::{PATIENCE, Verdict, Violation};
use crate::history::{Break, Fault, History, Hold, Loss, Micros};

/// Judges what sessions were told.
pub(super) fn check(history: &History, verdict: &mut Verdict) {
    for hold in history.holds.iter().filter(|hold| hold.bound) {
        verdict.bound += 1;
        verdict.told += u64::from(hold.told.is_some());
        let faults = history.faults_of(&hold.grant.key);
        let breaks = history.breaks.iter().filter(|broken| broken.key == hold.grant.key);
        for broken in breaks.clone().filter(|broken| ends(broken, hold)) {
            if let Some(replied) = broken.replied {
                check_told(hold, (broken.sent, replied), &faults, verdict);
            }
        }
        if let Some((at, Loss::Forced)) = hold.told
            && !breaks.clone().any(|broken| broken.sent <= at && hold.grant.sent <= broken.done_by())
        {
            let Hold { grant, .. } = hold;
            let (key, owner) = (grant.key.clone(), grant.owner.clone());
            verdict.violations.push(Violation::ToldOfNothing { key, owner, at });
        }
    }
    check_writes(history, verdict);
}

/// Whether the break ended this hold for certain: it was known to be held before, and was not being released.
fn ends(broken: &Break, hold: &Hold) -> bool {
    let not_before = hold.ended.is_none_or(|ended| ended > broken.done_by() + PATIENCE);
    let told_before = hold.told.is_some_and(|(at, _)| at < broken.sent);
    hold.grant.replied < broken.sent && not_before && !told_before
}

fn check_told(hold: &Hold, (sent, replied): (Micros, Micros), faults: &[Fault], verdict: &mut Verdict) {
    let due = replied + PATIENCE;
    // While a server is away nobody can tell; and it may be another one that broke it.
    if faults.iter().any(|fault| fault.touches(hold.grant.sent, due)) {
        return;
    }
    match hold.told {
        Some((at, _)) if at <= due => {
            let within = at.saturating_sub(sent);
            verdict.told_within = verdict.told_within.max(Some(within));
        }
        told => verdict.violations.push(Violation::LossNotTold {
            key: hold.grant.key.clone(),
            owner: hold.grant.owner.clone(),
            at: replied,
            told: told.map(|(at, _)| at),
        }),
    }
}

fn check_writes(history: &History, verdict: &mut Verdict) {
    for write in &history.writes {
        let Hold { grant, told, .. } = &history.holds[write.hold];
        if let Some((told, _)) = *told
            && told < write.at
        {
            let (key, owner) = (grant.key.clone(), grant.owner.clone());
            verdict.violations.push(Violation::WroteAfterTold { key, owner, told, at: write.at });
        }
    }
}
