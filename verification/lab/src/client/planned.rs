//! Chooses the requests of a client: the lock, its kind, and the duration of the hold.

use redis::Cmd;

use super::{Client, HoldTime, keyed};
use crate::history::Limit;

/// The next request of a client.
pub(super) struct PlannedRequest {
    pub(super) keys: Vec<String>,
    pub(super) owner: String,
    pub(super) limit: Limit,
    pub(super) lease: u64,
    pub(super) wait: Option<u64>,
}

impl Client {
    /// Chooses a request, for a new owner.
    pub(super) fn planned(&mut self) -> PlannedRequest {
        self.asked += 1;
        let (keys, limit) = self.choose_locks();
        let short = self.client_config.hold_time == HoldTime::Short;
        PlannedRequest {
            keys,
            owner: format!("{}-{}", self.client_config.name, self.asked),
            limit,
            lease: if short { self.rng.u64(400..1_500) } else { self.rng.u64(2_500..5_000) },
            wait: (self.rng.u8(..10) < 8).then(|| self.rng.u64(20..1_500)),
        }
    }

    fn choose_locks(&mut self) -> (Vec<String>, Limit) {
        let prefix = &self.client_config.prefix;
        if self.client_config.hold_time == HoldTime::Long {
            let key = format!("{prefix}long:{{{}}}", self.rng.u8(..6));
            return (vec![key], Limit::Of(1));
        }
        match self.rng.u8(..10) {
            0 => {
                let key = format!("{prefix}sem:{{{}}}", self.rng.u8(..2));
                (vec![key], Limit::Of(3))
            }
            1..=2 => {
                let key = format!("{prefix}rw:{{{}}}", self.rng.u8(..2));
                let writes = self.rng.u8(..3) == 0;
                (vec![key], if writes { Limit::Of(1) } else { Limit::Shared })
            }
            3 => (self.two_of_three(), Limit::Of(1)),
            _ => {
                let key = format!("{prefix}m:{{{}}}", self.rng.u8(..4));
                (vec![key], Limit::Of(1))
            }
        }
    }

    /// Two locks in random order, which would deadlock clients that acquire one after the other.
    fn two_of_three(&mut self) -> Vec<String> {
        let mut names = ["a", "b", "c"];
        self.rng.shuffle(&mut names);
        names[..2].iter().map(|name| format!("{}both:{{1}}:{name}", self.client_config.prefix)).collect()
    }

    /// The command of a request.
    pub(super) fn acquire_command(&self, planned: &PlannedRequest) -> Cmd {
        let mut command = keyed("LOCK.ACQUIRE", "LOCK.MACQUIRE", &planned.keys);
        command.arg(&planned.owner).arg("LEASE").arg(planned.lease);
        if let Some(wait) = planned.wait {
            command.arg("WAIT").arg(wait);
        }
        match planned.limit {
            Limit::Shared => command.arg("SHARED"),
            Limit::Of(1) => &mut command,
            Limit::Of(n) => command.arg("LIMIT").arg(n),
        };
        // A request that is repeated because its reply was lost must not count twice.
        command.arg("HOLDS").arg(1);
        self.ask_replicas(&mut command);
        command
    }
}
