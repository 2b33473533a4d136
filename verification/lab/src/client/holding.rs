//! What a client does with a lock: as it should, or as clients do that die, sleep or only look on.

use std::ops::Range;
use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::time::sleep;

use super::{Client, Held, Pace, keyed, token};
use crate::clock::now;
use crate::history::{Event, Limit};
use crate::trace::trace;

impl Client {
    /// Holds, and gives back or not.
    pub(super) async fn hold(&mut self, mut held: Held) {
        let dice = self.rng.u8(..100);
        match (self.character.pace, dice) {
            (_, 0..=2) => self.forget(&held).await,
            (Pace::Short, 3..=5) => self.dawdle(held).await,
            (Pace::Short, 6..=12) => {
                self.work(&held, 2..30).await;
                if self.renew(&mut held).await {
                    self.work(&held, 2..30).await;
                    self.release(held).await;
                }
            }
            (Pace::Short, _) => {
                self.work(&held, 1..25).await;
                self.release(held).await;
            }
            (Pace::Long, _) => self.hold_long(held).await,
        }
    }

    async fn hold_long(&mut self, mut held: Held) {
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

    /// Works under the lock, and writes to the fenced store in the midst of it.
    async fn work(&mut self, held: &Held, millis: Range<u64>) {
        let before = self.rng.u64(millis.clone());
        sleep(Duration::from_millis(before / 2)).await;
        self.write(held);
        sleep(Duration::from_millis(before - before / 2)).await;
    }

    fn write(&mut self, held: &Held) {
        let at = now();
        for &hold in &held.holds {
            self.record.push(Event::Write { hold, at });
        }
    }

    /// A client that dies: it neither releases nor works on.
    async fn forget(&mut self, held: &Held) {
        self.write(held);
        self.session = None;
    }

    /// A client that sleeps through the end of its lease and then writes all the same.
    async fn dawdle(&mut self, held: Held) {
        let over = held.ends.saturating_sub(now()) + self.rng.u64(1_000..300_000);
        sleep(Duration::from_micros(over)).await;
        self.write(&held);
        self.release(held).await;
    }

    /// Renews, in either of two ways. False: the hold is lost (and that is written down).
    async fn renew(&mut self, held: &mut Held) -> bool {
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

    /// `RENEW`, or a re-entry, which renews as well. (A re-entry takes the lock anew if it was lost meanwhile; that
    /// grant is given up at once.)
    fn renewal(&mut self, held: &Held) -> Cmd {
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

    fn end(&mut self, held: &Held) {
        let at = now();
        for &hold in &held.holds {
            self.record.push(Event::Ended { hold, at });
        }
    }

    async fn release(&mut self, held: Held) {
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

/// The token of a renewal's reply: of several locks, only if all have it.
fn renewed_token(value: &Value) -> Option<u64> {
    match value {
        Value::Array(each) => {
            let tokens: Vec<_> = each.iter().map(token).collect();
            tokens.first().copied().flatten().filter(|first| tokens.iter().all(|token| *token == Some(*first)))
        }
        one => token(one),
    }
}
