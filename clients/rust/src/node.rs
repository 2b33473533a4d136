//! One server: its session, and the task that keeps it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use redis::AsyncConnectionConfig;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::place::{Failure, Place};
use crate::reader::{Link, Listener, Order, Task};
use crate::session::SessionRef;

pub(crate) struct Node {
    place: Arc<Place>,
    config: AsyncConnectionConfig,
    listener: Weak<dyn Listener>,
    link: Arc<watch::Sender<Link>>,
    orders: Mutex<Option<UnboundedSender<Order>>>,
}

impl Node {
    pub(crate) fn new(place: Place, config: AsyncConnectionConfig, listener: Weak<dyn Listener>) -> Self {
        Self {
            place: Arc::new(place),
            config,
            listener,
            link: Arc::new(watch::Sender::new(Link::Down)),
            orders: Mutex::new(None),
        }
    }

    /// The session, opened if there is none; fails if one attempt does.
    pub(crate) async fn session(&self) -> Result<SessionRef, Failure> {
        if let Link::Up(session) = &*self.link.borrow() {
            return Ok(session.clone());
        }
        let mut changes = self.link.subscribe();
        if let Link::Up(session) = &*changes.borrow_and_update() {
            return Ok(session.clone());
        }
        self.order(Order::Open);
        loop {
            // The sender is this node's, which lives.
            let _ = changes.changed().await;
            match &*changes.borrow_and_update() {
                Link::Up(session) => return Ok(session.clone()),
                Link::Failed(failure) => return Err(failure.clone()),
                Link::Down => {}
            }
        }
    }

    /// Whether this session is the one that there is.
    pub(crate) fn has(&self, session: &SessionRef) -> bool {
        matches!(&*self.link.borrow(), Link::Up(current) if current == session)
    }

    /// This session is of no use any more. Returns when it is not the node's any more.
    pub(crate) async fn leave(&self, session: &SessionRef) {
        let mut changes = self.link.subscribe();
        self.order(Order::Leave(session.clone()));
        while self.has(session) {
            let _ = changes.changed().await;
        }
    }

    /// Does this, where there is a runtime: never waits, and needs none around it.
    pub(crate) fn spawn(&self, errand: impl Future<Output = ()> + Send + 'static) {
        self.order(Order::Do(Box::pin(errand)));
    }

    fn order(&self, order: Order) {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let order = match orders.as_ref() {
            Some(sender) => match sender.send(order) {
                Ok(()) => return,
                // The task went with its runtime, and the session with it.
                Err(refused) => refused.0,
            },
            None => order,
        };
        let Ok(runtime) = Handle::try_current() else { return };
        let (sender, receiver) = unbounded_channel();
        self.link.send_replace(Link::Down);
        let task = Task {
            place: self.place.clone(),
            config: self.config.clone(),
            link: self.link.clone(),
            listener: self.listener.clone(),
            orders: receiver,
        };
        runtime.spawn(task.run());
        // The task has just been given the other end.
        let _ = sender.send(order);
        *orders = Some(sender);
    }
}
