//! One server: its session, and the task that keeps it.

use std::sync::{Arc, Mutex, PoisonError};

use redis::AsyncConnectionConfig;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::servers::Place;
use crate::session::{Failure, Link, Order, SessionRef, Task};
use crate::shared::{Returned, Shared};

pub(crate) struct Node {
    place: Arc<Place>,
    config: AsyncConnectionConfig,
    link: Arc<watch::Sender<Link>>,
    orders: Mutex<Option<UnboundedSender<Order>>>,
}

impl Node {
    pub(crate) fn new(place: Place, config: AsyncConnectionConfig) -> Self {
        Self {
            place: Arc::new(place),
            config,
            link: Arc::new(watch::Sender::new(Link::Down)),
            orders: Mutex::new(None),
        }
    }

    /// The session, opened if there is none; fails if one attempt does.
    pub(crate) async fn session(&self, shared: &Arc<Shared>) -> Result<SessionRef, Failure> {
        if let Link::Up(session) = &*self.link.borrow() {
            return Ok(session.clone());
        }
        let mut changes = self.link.subscribe();
        if let Link::Up(session) = &*changes.borrow_and_update() {
            return Ok(session.clone());
        }
        self.order(shared, Order::Open);
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
    pub(crate) async fn leave(&self, shared: &Arc<Shared>, session: &SessionRef) {
        let mut changes = self.link.subscribe();
        self.order(shared, Order::Leave(session.clone()));
        while self.has(session) {
            let _ = changes.changed().await;
        }
    }

    /// Has this given back, by whatever session the node has.
    pub(crate) fn give_back(&self, shared: &Arc<Shared>, returned: Returned) {
        self.order(shared, Order::GiveBack(returned));
    }

    fn order(&self, shared: &Arc<Shared>, order: Order) {
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
            shared: Arc::downgrade(shared),
            orders: receiver,
        };
        runtime.spawn(task.run());
        // The task has just been given the other end.
        let _ = sender.send(order);
        *orders = Some(sender);
    }
}
