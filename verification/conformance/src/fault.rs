//! Faults between two messages of a client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use support::{Fate, Proxy};

/// A fault at a message between a client and its server, in either direction. Messages are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The fault.
    pub kind: Kind,
    /// The message.
    pub at: u64,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The connection is cut before the message.
    CutBefore,
    /// The connection is cut after the message.
    CutAfter,
    /// From this message on, the connection drops all bytes, and neither side is notified.
    Swallow,
    /// The message and all later ones are delayed.
    Delay,
    /// The program cancels all its waits before the message.
    Cancel,
    /// The program drops all its handles before the message.
    Drop,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}@{}", self.kind, self.at)
    }
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is not a fault; example: CutBefore@3");
        let (kind, at) = text.split_once('@').ok_or_else(wrong)?;
        let kind = Kind::ALL.into_iter().find(|it| format!("{it:?}") == kind).ok_or_else(wrong)?;
        Ok(Self { kind, at: at.parse().map_err(|_| wrong())? })
    }
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [Self::CutBefore, Self::CutAfter, Self::Swallow, Self::Delay, Self::Cancel, Self::Drop];
}

/// The delay of a message.
const LATE: Duration = Duration::from_millis(300);

/// Counts the messages of a client.
pub struct Watched {
    messages: Arc<AtomicU64>,
    reached: Receiver<()>,
}

impl Watched {
    /// Counts the messages of a client from now on, and injects the fault.
    pub fn begin(proxy: &Proxy, fault: Option<Fault>) -> Self {
        let messages = Arc::new(AtomicU64::new(0));
        let (sender, reached) = channel();
        let count = messages.clone();
        // The connection that drops bytes, and whether the delayed message was counted.
        let (mut silent, mut holds) = (None, false);
        proxy.rule_by_flow(move |connection, _, message| {
            if silent == Some(connection) {
                // Its close is dropped, too.
                return if message.is_empty() { Fate::Hold } else { Fate::Drop };
            }
            // The close of a connection is not a message.
            if message.is_empty() {
                return Fate::Pass;
            }
            if holds {
                // The proxy asks again when another rule is set. Then this rule's receiver is gone.
                return Fate::Hold;
            }
            let number = count.fetch_add(1, Ordering::SeqCst);
            match fault.filter(|it| it.at == number).map(|it| it.kind) {
                None => Fate::Pass,
                Some(Kind::CutBefore) => Fate::Cut,
                Some(Kind::CutAfter) => Fate::Last,
                Some(Kind::Swallow) => {
                    silent = Some(connection);
                    Fate::Drop
                }
                Some(Kind::Delay) => {
                    std::thread::sleep(LATE);
                    Fate::Pass
                }
                Some(Kind::Cancel | Kind::Drop) => {
                    holds = true;
                    // The receiver is gone once the scenario is over.
                    let _ = sender.send(());
                    Fate::Hold
                }
            }
        });
        Self { messages, reached }
    }

    /// The number of messages.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::SeqCst)
    }

    /// Completes when the program's own action is due.
    pub fn is_reached(&self) -> bool {
        self.reached.try_recv().is_ok()
    }
}
