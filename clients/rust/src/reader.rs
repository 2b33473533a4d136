//! The task that reads from a server's session.
//!
//! It opens the session's connections when somebody needs them, asks `LOCK.NEXT` on one of them in a loop, and says what it
//! hears to whoever listens. When one of the two ends, or can't be trusted, both do, and the session with them; the next one
//! is opened when somebody needs it, and whatever waits or is held needs it.

use std::pin::Pin;
use std::sync::{Arc, Weak};

use redis::AsyncConnectionConfig;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use crate::place::{Failure, Place};
use crate::session::{self, Opened, SessionRef};
use crate::wire::Event;

/// Who is told what a session hears.
pub(crate) trait Listener: Send + Sync {
    /// A session was opened, and is about to be read from.
    fn session_begins(self: Arc<Self>, session: &SessionRef);

    /// The server says so.
    fn told(self: Arc<Self>, session: &SessionRef, events: Vec<Event>);

    /// Its connection has ended: what waits or is held there has to be taken to another one.
    fn session_ended(self: Arc<Self>, session: &SessionRef);
}

/// What the task is asked to do.
pub(crate) enum Order {
    /// Somebody needs a session.
    Open,
    /// This one is of no use any more: its server does not know it, or has become a replica.
    Leave(SessionRef),
    /// This is to be done where there is a runtime.
    Do(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// Whether there is a session.
#[derive(Clone, Debug)]
pub(crate) enum Link {
    Down,
    Up(SessionRef),
    /// The last attempt to open one failed.
    Failed(Failure),
}

/// The task.
pub(crate) struct Task {
    pub(crate) place: Arc<Place>,
    pub(crate) config: AsyncConnectionConfig,
    pub(crate) link: Arc<watch::Sender<Link>>,
    pub(crate) listener: Weak<dyn Listener>,
    pub(crate) orders: UnboundedReceiver<Order>,
}

/// The runtime may end before those who need a session: then the next one of them finds none.
impl Drop for Task {
    fn drop(&mut self) {
        self.link.send_modify(|link| {
            // First, so that whoever orders another one hears that nobody takes orders here.
            self.orders.close();
            if let Link::Up(session) = link {
                session.end();
            }
            *link = Link::Down;
        });
    }
}

/// Why a session is not read from any more.
enum End {
    /// Its connection is gone, or of no use.
    Ended,
    /// Nobody is left who could need it.
    Closed,
}

impl Task {
    /// Runs until everybody who could need a session is gone.
    pub(crate) async fn run(mut self) {
        // Whose end the server may not have seen: nothing that is on its way on their behalf is to come to anything.
        let mut replaced = Vec::new();
        while let Some(order) = self.orders.recv().await {
            match order {
                Order::Open => {}
                // That one has ended already.
                Order::Leave(_) => continue,
                Order::Do(errand) => {
                    tokio::spawn(errand);
                    continue;
                }
            }
            let opened = match session::open(&self.place, &self.config, &replaced).await {
                Ok(opened) => opened,
                Err(failure) => {
                    self.answer_the_others();
                    self.link.send_replace(Link::Failed(failure));
                    continue;
                }
            };
            replaced.clear();
            if let Some(listener) = self.listener.upgrade() {
                listener.session_begins(&opened.session);
            }
            self.link.send_replace(Link::Up(opened.session.clone()));
            let end = self.serve(&opened).await;
            self.link.send_replace(Link::Down);
            opened.session.end();
            match end {
                End::Closed => return,
                End::Ended => {
                    if let Some(listener) = self.listener.upgrade() {
                        listener.session_ended(&opened.session);
                    }
                    replaced.push(opened.session.clone());
                }
            }
        }
    }

    /// Hears what there is to hear until one of the connections ends, or is of no use.
    async fn serve(&mut self, opened: &Opened) -> End {
        let session = &opened.session;
        let mut fails = std::pin::pin!(session.requests().fails(|| session.takes_writes()));
        // The same question stays when an order comes in between.
        let mut answer = Box::pin(opened.next());
        loop {
            let events = tokio::select! {
                events = &mut answer => events,
                () = &mut fails => return End::Ended,
                order = self.orders.recv() => match order {
                    None => return End::Closed,
                    Some(Order::Leave(left)) if left == opened.session => return End::Ended,
                    Some(Order::Open | Order::Leave(_)) => continue,
                    Some(Order::Do(errand)) => {
                        tokio::spawn(errand);
                        continue;
                    }
                },
            };
            let Ok(events) = events else { return End::Ended };
            if let Some(listener) = self.listener.upgrade() {
                listener.told(&opened.session, events);
            }
            answer = Box::pin(opened.next());
        }
    }

    /// Those who asked while an attempt was under way: it was theirs too.
    fn answer_the_others(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            if let Order::Do(errand) = order {
                tokio::spawn(errand);
            }
        }
    }
}
