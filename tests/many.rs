//! Ten thousand clients wait for one lock.

use std::io;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::Value;
use support::{Random, Raw, Server, skip, until};

use crate::common::{array, map, text, token};
use crate::waiter::{Commands, SOON, assert_held, count_waiters, until_no_waiters};

const MANY: usize = 10_000;
const FEW: usize = 100;
/// The most entries that `LOCK.WAITERS` returns here.
const SHOWN: usize = 5_000;
/// Open files of server and test besides the connections.
const OTHERS: u64 = 300;
const HAND_OFFS: usize = 2000;
/// Hand-offs at a stretch. Their holders queue again afterwards.
const STRETCH: usize = 50;

/// Raises the limit on open files of this process, and so of the servers that it starts. Returns false if it stays too low.
pub(crate) fn may_open_files(connections: usize) -> bool {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: the call fills the structure, which is read only if it succeeds.
    let mut limit = unsafe {
        match libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) {
            0 => limit.assume_init(),
            _ => panic!("getrlimit: {}", io::Error::last_os_error()),
        }
    };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the structure outlives the call.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(result, 0, "setrlimit: {}", io::Error::last_os_error());
    if limit.rlim_max < connections as u64 + OTHERS {
        skip(&format!("only {} files may be open at once", limit.rlim_max));
        return false;
    }
    true
}

/// One process has too few files for two tests of this kind at once.
static PLACE: Mutex<()> = Mutex::new(());

/// A server with many idle clients.
pub(crate) struct Clients {
    pub(crate) server: Server,
    pub(crate) control: Raw,
    pub(crate) members: Vec<Raw>,
    // Dropped last: the connections are closed before the next test opens its own.
    _place: MutexGuard<'static, ()>,
}

impl Clients {
    pub(crate) fn open() -> Option<Self> {
        let place = PLACE.lock().unwrap_or_else(PoisonError::into_inner);
        if !may_open_files(MANY) {
            return None;
        }
        let server = Server::builder()
            .arg("maxclients", &(MANY as u64 + OTHERS / 2).to_string())
            .arg("tcp-backlog", "511")
            .start();
        let control = server.raw();
        let members = (0..MANY).map(|_| server.raw()).collect();
        Some(Self { server, control, members, _place: place })
    }

    /// `owner-number` sends a request, which waits.
    fn send_request(&mut self, number: usize) {
        let line = format!("LOCK.ACQUIRE key owner-{number} LEASE 3600000 WAIT 0");
        self.members[number].send_lines(&[&line]);
    }

    /// Sends all of these requests, in no particular order, and waits until `waiting` are queued.
    fn request_all(&mut self, numbers: impl IntoIterator<Item = usize>, waiting: usize) {
        for number in numbers {
            self.send_request(number);
        }
        until(SOON, "all of them wait", || count_waiters(&mut self.control, "key") == waiting as i64);
    }

    /// The numbers of the owners at the head of the queue, at most `count` or as many as the server shows.
    fn queue(&mut self, count: usize) -> Vec<usize> {
        let reply = self.control.run(&format!("LOCK.WAITERS key COUNT {count}"));
        let number = |waiter: &Value| {
            let owner = text(&map(waiter)[b"owner".as_slice()]);
            owner.trim_start_matches("owner-").parse().expect("an owner of this test")
        };
        array(&reply).iter().map(number).collect()
    }

    /// `from` releases the lock, and `to` is granted it.
    fn hand_over(&mut self, from: usize, to: usize) -> i64 {
        assert_eq!(self.control.run(&format!("LOCK.RELEASE key owner-{from}")), Value::Int(1));
        token(&self.members[to].read().expect("the wait ends"))
    }

    /// `HAND_OFFS` hand-offs with a constant queue, from `holder` on. Returns the last holder.
    fn hand_offs(&mut self, mut holder: usize, waiting: usize) -> usize {
        for _ in 0..HAND_OFFS / STRETCH {
            let mut former = Vec::new();
            for number in self.queue(STRETCH) {
                self.hand_over(holder, number);
                former.push(std::mem::replace(&mut holder, number));
            }
            self.request_all(former, waiting);
        }
        holder
    }
}

#[test]
fn ten_thousand_waiters_are_served_in_order() {
    let Some(mut clients) = Clients::open() else { return };
    clients.request_all(0..1, 0);
    token(&clients.members[0].read().expect("it is free"));
    clients.request_all(1..=FEW, FEW);
    let holder = clients.hand_offs(0, FEW);
    clients.request_all(FEW + 1..MANY, MANY - 1);
    let holder = clients.hand_offs(holder, MANY - 1);

    // And the rest of the queue, in order.
    let mut tokens = Vec::new();
    let mut order = vec![holder];
    while tokens.len() < MANY - 1 {
        order.drain(..order.len() - 1);
        order.extend(clients.queue(MANY));
        assert_eq!(order.len() - 1, SHOWN.min(MANY - 1 - tokens.len()));
        tokens.extend(order.windows(2).map(|pair| clients.hand_over(pair[0], pair[1])));
    }
    assert!(tokens.is_sorted_by(|earlier, later| earlier < later));
    until_no_waiters(&clients.server);
}

#[test]
fn ten_thousand_waiters_leave_from_any_position() {
    let Some(mut clients) = Clients::open() else { return };
    let control = "LOCK.ACQUIRE key control LEASE 3600000";
    clients.control.get_token(control);
    clients.request_all(0..MANY, MANY);
    let order = clients.queue(MANY);
    let behind = (0..MANY).filter(|number| !order.contains(number)).collect::<Vec<_>>();
    let mut random = Random::new();
    // Half of the clients disconnect. The others keep their order.
    let mut members: Vec<Option<Raw>> = std::mem::take(&mut clients.members).into_iter().map(Some).collect();
    let (gone, left): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|_| random.chance(50));
    let (gone_behind, left_behind): (Vec<usize>, Vec<usize>) = behind.into_iter().partition(|_| random.chance(50));
    let (gone, all_left) = ([gone, gone_behind].concat(), (left.len() + left_behind.len()) as i64);
    for raw in gone.iter().filter_map(|&number| members[number].take()) {
        if random.chance(50) { raw.reset() } else { raw.close() }
    }
    until(SOON, "the closed connections have left the queue", || {
        count_waiters(&mut clients.control, "key") == all_left
    });
    let shown = clients.queue(MANY);
    assert_eq!(shown[..left.len()], left, "in their order");
    assert!(shown[left.len()..].iter().all(|number| left_behind.contains(number)));
    assert_held(&mut clients.control, "key", "control");
    drop(members);
    until_no_waiters(&clients.server);
    clients.control.run_ok("LOCK.RELEASE key control");
    assert_eq!(clients.control.run("EXISTS key"), Value::Int(0));
    clients.control.get_token(control);
}
