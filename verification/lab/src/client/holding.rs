//! What a client does with a lock: what it should, or what clients do that crash or pause.

use std::ops::Range;
use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::time::sleep;

use super::{ActiveHold, Client, HoldTime, keyed, token};
use crate::clock::now;
use crate::history::{Event, Limit};
use crate::trace::trace;

impl Client {
    /// Holds the lock, and releases it or not.
    pub(super) async fn hold(&mut self, mut held: ActiveHold) {
        let dice = self.rng.u8(..100);
        match (self.client_config.hold_time, dice) {
            (_, 0..=2) => self.abandon(&held).await,
            (HoldTime::Short, 3..=5) => self.overstay_lease(held).await,
            (HoldTime::Short, 6..=12) => {
                self.work(&held, 2..30).await;
                if self.renew(&mut held).await {
                    self.work(&held, 2..30).await;
                    self.release(held).await;
                }
            }
            (HoldTime::Short, _) => {
                self.work(&held, 1..25).await;
                self.release(held).await;
            }
            (HoldTime::Long, _) => self.hold_long(held).await,
        }
    }

    async fn hold_long(&mut self, mut held: ActiveHold) {
        let until = now() + self.rng.u64(500_000..4_500_000);
        while now() < until && !self.stopped() {
            let before_end = held.ends.saturating_sub(now()) / 2_000;
            self.work(&held, 1..before_end.clamp(2, 600)).await;
            if self.rng.u8(..4) == 0 && !self.renew(&mut held).await {
                return;
            }
            if now() >= held.ends {
                break;
            }
        }
        self.release(held).await;
    }

    /// Holds the lock for a while, and writes to the fenced store meanwhile.
    async fn work(&mut self, held: &ActiveHold, millis: Range<u64>) {
        let before = self.rng.u64(millis.clone());
        sleep(Duration::from_millis(before / 2)).await;
        self.write(held);
        sleep(Duration::from_millis(before - before / 2)).await;
    }

    fn write(&mut self, held: &ActiveHold) {
        let at = now();
        for &hold in &held.holds {
            self.record.push(Event::Write { hold, at });
        }
    }

    /// A client that crashes: it neither releases nor uses the lock.
    async fn abandon(&mut self, held: &ActiveHold) {
        self.write(held);
        self.session = None;
    }

    /// A client that pauses past the end of its lease and then writes.
    async fn overstay_lease(&mut self, held: ActiveHold) {
        let over = held.ends.saturating_sub(now()) + self.rng.u64(1_000..300_000);
        sleep(Duration::from_micros(over)).await;
        self.write(&held);
        self.release(held).await;
    }

    /// Renews, in one of two ways. Returns false if the hold is lost, which is recorded.
    async fn renew(&mut self, held: &mut ActiveHold) -> bool {
        loop {
            let command = self.renewal(held);
            let Some(reply) = self.request(&held.keys[0], command, None).await else {
                if now() >= held.ends || self.stopped() {
                    return now() < held.ends;
                }
                continue;
            };
            if renewed_token(&reply.value) != Some(held.token) {
                self.end(held);
                return false;
            }
            let Some(assurance) = self.assurance(&held.keys[0]).await else {
                continue;
            };
            held.ends = held.ends.max(reply.sent + held.lease * 1_000);
            for &hold in &held.holds {
                self.record.push(Event::Renewed {
                    hold,
                    sent: reply.sent,
                    replied: reply.replied.max(now()),
                    lease: held.lease * 1_000,
                    epoch: reply.epoch.clone(),
                    assurance,
                });
            }
            return true;
        }
    }

    /// `RENEW`, or a re-entry, which also renews. (If the lock was lost meanwhile, the request acquires it again. That
    /// grant is released immediately.)
    fn renewal(&mut self, held: &ActiveHold) -> Cmd {
        let mut command = if held.keys.len() == 1 && self.rng.u8(..3) == 0 {
            let mut command = cmd("LOCK.ACQUIRE");
            command.arg(&held.keys[0]).arg(&held.owner);
            match held.limit {
                Limit::Shared => command.arg("SHARED"),
                Limit::Of(n) => command.arg("LIMIT").arg(n),
            };
            command.arg("HOLDS").arg(2);
            command
        } else {
            let mut command = keyed("LOCK.RENEW", "LOCK.MRENEW", &held.keys);
            command.arg(&held.owner).arg("TOKEN").arg(held.token);
            command
        };
        command.arg("LEASE").arg(held.lease);
        self.ask_replicas(&mut command);
        command
    }

    fn end(&mut self, held: &ActiveHold) {
        let at = now();
        for &hold in &held.holds {
            self.record.push(Event::Ended { hold, at });
        }
    }

    async fn release(&mut self, held: ActiveHold) {
        self.end(&held);
        trace(|| format!("{} gives {:?} back", held.owner, held.keys));
        for _ in 0..2 {
            let mut command = keyed("LOCK.RELEASE", "LOCK.MRELEASE", &held.keys);
            command.arg(&held.owner).arg("TOKEN").arg(held.token).arg("ALL");
            if self.request(&held.keys[0], command, None).await.is_some() {
                return;
            }
        }
    }
}

/// The token in a renewal's reply. For several locks, all of them must have it.
fn renewed_token(value: &Value) -> Option<u64> {
    match value {
        Value::Array(each) => {
            let tokens: Vec<_> = each.iter().map(token).collect();
            tokens.first().copied().flatten().filter(|first| tokens.iter().all(|token| *token == Some(*first)))
        }
        one => token(one),
    }
}
