//! One server: its session, and the task that keeps it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client};
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
            // A copy: to order may change it.
            let link = changes.borrow_and_update().clone();
            match link {
                Link::Up(session) => return Ok(session),
                Link::Failed(failure) => return Err(failure),
                // One may have been opened and lost before this task looked again, and the order taken with it.
                Link::Down => self.order(Order::Open),
            }
        }
    }

    /// A client of the server, as it is found now.
    pub(crate) async fn client(&self) -> Result<Client, Failure> {
        self.place.client().await
    }

    /// A connection that is no session's, and the server's address: whoever only looks needs no right to lock.
    pub(crate) async fn connect(&self) -> Result<(String, MultiplexedConnection), Failure> {
        let client = self.client().await?;
        let server = client.get_connection_info().addr().to_string();
        match client.get_multiplexed_async_connection_with_config(&self.config).await {
            Ok(connection) => Ok((server, connection)),
            Err(error) => Err(Failure { server, error }),
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

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use redis::Client;
    use tokio::sync::mpsc::UnboundedReceiver;

    use super::*;
    use crate::wire::Event;

    struct Nobody;

    impl Listener for Nobody {
        fn session_begins(self: Arc<Self>, _: &SessionRef) {}
        fn told(self: Arc<Self>, _: &SessionRef, _: Vec<Event>) {}
        fn session_ended(self: Arc<Self>, _: &SessionRef) {}
    }

    /// A node whose task is played by whoever has the other end of its orders.
    fn node() -> (Node, UnboundedReceiver<Order>) {
        let client = Client::open("redis://127.0.0.1:1").unwrap();
        let node = Node::new(Place::Fixed(client), AsyncConnectionConfig::new(), Weak::<Nobody>::new());
        let (sender, orders) = unbounded_channel();
        *node.orders.lock().unwrap() = Some(sender);
        (node, orders)
    }

    #[test]
    fn whoever_misses_a_session_that_was_opened_and_lost_orders_another() {
        let (node, mut orders) = node();
        let mut waiting = Box::pin(node.session());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        for _ in 0..3 {
            assert!(matches!(orders.try_recv(), Ok(Order::Open)));
            // The link was up in between, which nobody sees who did not look then.
            node.link.send_replace(Link::Down);
            assert!(waiting.as_mut().poll(&mut context).is_pending());
        }
        assert!(matches!(orders.try_recv(), Ok(Order::Open)));
        let error = std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into();
        node.link.send_replace(Link::Failed(Failure { server: "server".to_owned(), error }));
        assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Ready(Err(_))));
        drop(waiting);
        assert!(orders.try_recv().is_err(), "nobody needs one any more");
    }

    #[tokio::test]
    async fn whoever_waits_when_the_task_ends_with_its_runtime_begins_another() {
        let (node, orders) = node();
        let mut waiting = Box::pin(node.session());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(orders);
        node.link.send_replace(Link::Down);
        let outcome = tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("an attempt of his own");
        assert!(outcome.is_err(), "nobody listens there");
    }
}
