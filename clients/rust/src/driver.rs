//! The task of a server: it opens connections as the core demands, reads replies, and runs the core's timer.
//!
//! It runs in the runtime of the first caller. When that runtime ends, it continues in the one of this crate.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use holdfast_core::{Channel, Input, Millis, Reply};
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep};

use crate::blocking;
use crate::clock;
use crate::error::refusal;
use crate::link::Link;
use crate::place::{Failure, Opened};
use crate::shared::Shared;

/// Starts a driver for every server that needs one, in the runtime that is here, or else in this crate's own. The caller
/// must not have the state locked: a runtime that ends drops a new driver immediately, and the drop locks the state.
pub(crate) fn drive(shared: &Arc<Shared>) {
    drive_in(shared, || Handle::try_current().ok().or_else(|| blocking::own().cloned()));
}

fn drive_in(shared: &Arc<Shared>, runtime: impl Fn() -> Option<Handle>) {
    let mut undriven = Vec::new();
    for (at, node) in shared.state().nodes.iter_mut().enumerate() {
        let is_needed = (node.wanted.is_some() || node.wakes_at.is_some()) && !node.core.has_ended();
        if is_needed
            && node.driven_in.is_none()
            && let Some(runtime) = runtime()
        {
            node.driven_in = Some(runtime.id());
            undriven.push((runtime, Driver { shared: shared.clone(), at }));
        }
    }
    for (runtime, driver) in undriven {
        runtime.spawn(driver.run());
    }
}

/// Reads the slot map of a cluster again, and hands over the claims that other nodes serve now. An attempt to connect
/// does not wait for it, and may end earlier: each silent node costs a timeout.
async fn follow_map(shared: Arc<Shared>, at: usize) {
    // If no node answers, the last map counts.
    let _ = shared.servers.ensure_known().await;
    shared.reroute(&mut shared.state(), at);
    drive(&shared);
}

/// Waits until all releases are done that no other runtime than this crate's carries out, but not for longer than
/// `EXIT_TIME`: the process may end right after.
pub(crate) fn wait_for_releases(shared: &Arc<Shared>) {
    let is_pending = |shared: &Shared| {
        shared.state().nodes.iter().any(|it| !it.core.is_settled() && it.driven_in.is_some_and(blocking::is_own))
    };
    if is_pending(shared) {
        let shared = shared.clone();
        blocking::wait_for(async move { shared.settled.wait(None, || !is_pending(&shared)).await }, EXIT_TIME);
    }
}

struct Driver {
    shared: Arc<Shared>,
    at: usize,
}

/// How long the end of a runtime, or of the last handle, waits for releases.
const EXIT_TIME: Duration = Duration::from_secs(2);
/// The longest time until this client reads its own clock again (ms).
const LOOK_AGAIN: Millis = 1_000;

type Opening = Pin<Box<dyn Future<Output = Result<Opened, Failure>> + Send>>;

/// The next action, after all replies that have arrived were read.
enum Next {
    Opened(u64, Result<Opened, Failure>),
    Due,
    Over,
}

impl Driver {
    async fn run(self) {
        let shared = &self.shared;
        let mut opening: Option<(u64, Opening)> = None;
        let mut following: Option<JoinHandle<()>> = None;
        let mut timer = pin!(sleep(Duration::ZERO));
        let mut set_to = None;
        loop {
            let mut next = |context: &mut Context<'_>| {
                let mut state = shared.state();
                shared.read(&mut state, self.at, context);
                let node = &state.nodes[self.at];
                if node.core.has_ended() {
                    return Poll::Ready(Next::Over);
                }
                let (wanted, wakes_at) = (node.wanted, node.wakes_at);
                drop(state);
                drive(shared);
                if opening.as_ref().map(|(pair, _)| *pair) != wanted {
                    opening = wanted.map(|pair| (pair, self.open()));
                    if shared.servers.is_cluster() && following.as_ref().is_none_or(JoinHandle::is_finished) {
                        following = Some(tokio::spawn(follow_map(shared.clone(), self.at)));
                    }
                }
                if let Some((pair, open)) = &mut opening
                    && let Poll::Ready(opened) = open.as_mut().poll(context)
                {
                    return Poll::Ready(Next::Opened(*pair, opened));
                }
                let Some(at) = wakes_at else { return Poll::Pending };
                // The runtime's clock stops while the machine sleeps, and this client's does not: it is read often.
                let at = at.min(clock::now().saturating_add(LOOK_AGAIN));
                if set_to.is_none_or(|before| at < before) {
                    set_to = Some(at);
                    timer.as_mut().reset(Instant::from_std(clock::instant(at)));
                }
                timer.as_mut().poll(context).map(|()| Next::Due)
            };
            match poll_fn(&mut next).await {
                Next::Over => return,
                Next::Opened(pair, opened) => {
                    opening = None;
                    self.opened(pair, opened);
                }
                Next::Due => {
                    set_to = None;
                    self.wake().await;
                }
            }
        }
    }

    fn open(&self) -> Opening {
        let shared = self.shared.clone();
        let place = shared.state().nodes[self.at].place.clone();
        Box::pin(async move { place.open(&shared.config).await })
    }

    fn opened(&self, pair: u64, opened: Result<Opened, Failure>) {
        let mut state = self.shared.state();
        if state.nodes[self.at].wanted != Some(pair) {
            return;
        }
        let node = &mut state.nodes[self.at];
        let input = match opened {
            Ok(opened) => {
                node.server.clone_from(&opened.server);
                (node.link, node.failure) = (Some(Link::new(pair, opened)), None);
                Input::Opened { pair }
            }
            Err(Failure { server, error }) => {
                let refusal = refusal(&error);
                (node.server, node.failure) = (server, Some(error));
                match refusal {
                    Some(error) => Input::Replied { pair, channel: Channel::Session, reply: Reply::Error(error) },
                    None => Input::Ended { pair },
                }
            }
        };
        node.wanted = None;
        self.shared.step(&mut state, self.at, input);
    }

    /// Wakes the core, whose deadline has passed. All replies that have arrived by now are read first: after the first
    /// yield the runtime has polled the sockets, and after the second one the connection's task has read them.
    async fn wake(&self) {
        yield_now().await;
        yield_now().await;
        poll_fn(|context| {
            let mut state = self.shared.state();
            self.shared.read(&mut state, self.at, context);
            let node = &mut state.nodes[self.at];
            if node.wakes_at.take_if(|at| *at <= clock::now()).is_some() {
                self.shared.step(&mut state, self.at, Input::Wake);
            }
            Poll::Ready(())
        })
        .await;
    }
}

/// The runtime ends, and both connections end with it; or no handle needs them any more. The program may end with the
/// runtime, so what was dropped is released before.
impl Drop for Driver {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let node = &mut state.nodes[self.at];
        node.driven_in = None;
        // A connection that is yet to be opened is opened by the next driver.
        if let Some(link) = node.link.take() {
            self.shared.step(&mut state, self.at, Input::Ended { pair: link.pair });
        }
        drop(state);
        drive_in(&self.shared, || blocking::own().cloned());
        wait_for_releases(&self.shared);
    }
}
