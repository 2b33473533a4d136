//! What is put between two messages of a client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use support::{Fate, Proxy};

/// Something that happens at a message between a client and its server, of either direction. They are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// Where.
    pub at: u64,
}

/// What can happen at a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its connection is cut in its place.
    CutBefore,
    /// Its connection is cut behind it.
    CutAfter,
    /// From it on, its connection hands on nothing, and neither side hears of that.
    Swallow,
    /// It comes late, and all behind it.
    Delay,
    /// The program gives up whatever it waits for, and then it comes.
    Cancel,
    /// The program forgets whatever it holds, so that nobody can reach it any more, and then it comes.
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
        let wrong = || format!("{text} is no fault: CutBefore@3");
        let (kind, at) = text.split_once('@').ok_or_else(wrong)?;
        let kind = Kind::ALL.into_iter().find(|it| format!("{it:?}") == kind).ok_or_else(wrong)?;
        Ok(Self { kind, at: at.parse().map_err(|_| wrong())? })
    }
}

impl Kind {
    /// All.
    pub const ALL: [Self; 6] = [Self::CutBefore, Self::CutAfter, Self::Swallow, Self::Delay, Self::Cancel, Self::Drop];
}

/// How late a message comes.
const LATE: Duration = Duration::from_millis(300);

/// The messages of a client, counted.
pub struct Watched {
    messages: Arc<AtomicU64>,
    reached: Receiver<()>,
}

impl Watched {
    /// Counts the messages of a client from now on, and puts the fault where it belongs.
    pub fn begin(proxy: &Proxy, fault: Option<Fault>) -> Self {
        let messages = Arc::new(AtomicU64::new(0));
        let (sender, reached) = channel();
        let count = messages.clone();
        // The connection that swallows, and whether the message that is held was counted.
        let (mut silent, mut holds) = (None, false);
        proxy.rule_by_flow(move |connection, _, message| {
            if silent == Some(connection) {
                // Nor does its end arrive.
                return if message.is_empty() { Fate::Hold } else { Fate::Drop };
            }
            // The end of a connection is no message.
            if message.is_empty() {
                return Fate::Pass;
            }
            if holds {
                // It is asked about again when another rule is set, and this one is gone then.
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
                    // Nobody listens any more where the scenario is over.
                    let _ = sender.send(());
                    Fate::Hold
                }
            }
        });
        Self { messages, reached }
    }

    /// How many messages there were.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::SeqCst)
    }

    /// Whether the message was reached at which the program does something: once.
    pub fn is_reached(&self) -> bool {
        self.reached.try_recv().is_ok()
    }
}
