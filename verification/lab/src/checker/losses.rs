//! Whether sessions were notified of losses, and their clients stopped.

use super::{PATIENCE, Verdict, Violation};
use crate::history::{Fault, ForcedLock, History, Hold, Loss, Micros};

/// Checks the notifications of sessions.
pub(super) fn check(history: &History, verdict: &mut Verdict) {
    for hold in history.holds.iter().filter(|hold| hold.bound) {
        verdict.bound += 1;
        verdict.notified += u64::from(hold.notified.is_some());
        let faults = history.faults_of(&hold.grant.key);
        let forced_locks = history.forced_locks.iter().filter(|broken| broken.key == hold.grant.key);
        for broken in forced_locks.clone().filter(|broken| ends(broken, hold)) {
            if let Some(replied) = broken.replied {
                check_notification(hold, (broken.sent, replied), &faults, verdict);
            }
        }
        if let Some((at, Loss::Forced)) = hold.notified
            && !forced_locks.clone().any(|broken| broken.sent <= at && hold.grant.sent <= broken.done_by())
        {
            let Hold { grant, .. } = hold;
            let (key, owner) = (grant.key.clone(), grant.owner.clone());
            verdict.violations.push(Violation::SpuriousLossEvent { key, owner, at });
        }
    }
    check_writes(history, verdict);
}

/// Whether the force certainly ended this hold: it was held before, and not being released.
fn ends(broken: &ForcedLock, hold: &Hold) -> bool {
    let not_before = hold.ended.is_none_or(|ended| ended > broken.done_by() + PATIENCE);
    let is_notified_before = hold.notified.is_some_and(|(at, _)| at < broken.sent);
    hold.grant.replied < broken.sent && not_before && !is_notified_before
}

fn check_notification(hold: &Hold, (sent, replied): (Micros, Micros), faults: &[Fault], verdict: &mut Verdict) {
    let due = replied + PATIENCE;
    // No notification is possible while a server is down. The force may also have been on another server.
    if faults.iter().any(|fault| fault.touches(hold.grant.sent, due)) {
        return;
    }
    match hold.notified {
        Some((at, _)) if at <= due => {
            let within = at.saturating_sub(sent);
            verdict.notified_within = verdict.notified_within.max(Some(within));
        }
        notified => verdict.violations.push(Violation::LossNotNotified {
            key: hold.grant.key.clone(),
            owner: hold.grant.owner.clone(),
            at: replied,
            notified: notified.map(|(at, _)| at),
        }),
    }
}

fn check_writes(history: &History, verdict: &mut Verdict) {
    for write in &history.writes {
        let Hold { grant, notified, .. } = &history.holds[write.hold];
        if let Some((notified, _)) = *notified
            && notified < write.at
        {
            let (key, owner) = (grant.key.clone(), grant.owner.clone());
            verdict.violations.push(Violation::WroteAfterLoss { key, owner, notified, at: write.at });
        }
    }
}
