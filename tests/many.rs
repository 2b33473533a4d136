//! Ten thousand clients wait for one lock.

use std::io;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Value;
use support::{Random, Raw, Server, skip, until};

use crate::common::{array, info_number, map, text, token};
use crate::waiter::{SOON, Speak, Tell, assert_held, blocked_clients, count_waiters, figure, until_nobody_waits};

const MANY: usize = 10_000;
const FEW: usize = 100;
/// As many as `LOCK.WAITERS` shows at most.
const SHOWN: usize = 5_000;
/// Files that a server and a test have open besides their connections.
const OTHERS: u64 = 300;
const HAND_OFFS: usize = 2000;
/// So many hand-offs are measured at a stretch; those who had the lock queue again in between.
const STRETCH: usize = 50;

/// Lets this process, and the servers that it starts, have as many files open as it may. False if that is too few for so
/// many connections.
pub(crate) fn may_open_files(connections: usize) -> bool {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: the structure is there to be filled, and is read only if it has been.
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

/// A process has not enough files for two crowds.
static PLACE: Mutex<()> = Mutex::new(());

/// A server with as many clients as there may be, none of which has asked for anything.
pub(crate) struct Crowd {
    pub(crate) server: Server,
    pub(crate) control: Raw,
    pub(crate) members: Vec<Raw>,
    // Dropped last: the files are closed when the next crowd comes.
    _place: MutexGuard<'static, ()>,
}

impl Crowd {
    pub(crate) fn gather() -> Option<Self> {
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

    /// `owner-number` asks for the lock, and waits.
    fn asks(&mut self, number: usize) {
        let line = format!("LOCK.ACQUIRE key owner-{number} LEASE 3600000 WAIT 0");
        self.members[number].tell(&[&line]);
    }

    /// All of these do, in whatever order the server finds their requests, until `waiting` are in the queue.
    fn ask(&mut self, numbers: impl IntoIterator<Item = usize>, waiting: usize) {
        for number in numbers {
            self.asks(number);
        }
        until(SOON, "all of them wait", || count_waiters(&mut self.control, "key") == waiting as i64);
    }

    /// The first `count` in the queue, or as many of them as are shown, as the numbers of their owners.
    fn queue(&mut self, count: usize) -> Vec<usize> {
        let reply = self.control.say(&format!("LOCK.WAITERS key COUNT {count}"));
        let number = |waiter: &Value| {
            let owner = text(&map(waiter)[b"owner".as_slice()]);
            owner.trim_start_matches("owner-").parse().expect("one of ours")
        };
        array(&reply).iter().map(number).collect()
    }

    /// `from` gives the lock back, `to` has it.
    fn hands_over(&mut self, from: usize, to: usize) -> i64 {
        assert_eq!(self.control.say(&format!("LOCK.RELEASE key owner-{from}")), Value::Int(1));
        token(&self.members[to].read().expect("the wait ends"))
    }

    /// The server's CPU time so far, in microseconds.
    fn cpu(&mut self) -> f64 {
        let info = text(&self.control.say("INFO cpu"));
        let field = |name: &str| -> f64 {
            let value = info.lines().find_map(|line| line.strip_prefix(name)).expect("INFO cpu has it");
            value.trim().parse().expect("seconds")
        };
        1e6 * (field("used_cpu_user:") + field("used_cpu_sys:"))
    }

    /// The server's CPU time for a hand-off, with as many waiting as do now and `holder` holding; and the next holder.
    fn cpu_per_hand_off(&mut self, mut holder: usize, waiting: usize) -> (f64, usize) {
        let mut used = Vec::new();
        for _ in 0..HAND_OFFS / STRETCH {
            let next = self.queue(STRETCH);
            let mut former = Vec::new();
            let begin = self.cpu();
            for number in next {
                self.hands_over(holder, number);
                former.push(std::mem::replace(&mut holder, number));
            }
            used.push((self.cpu() - begin) / STRETCH as f64);
            self.ask(former, waiting);
        }
        used.sort_by(f64::total_cmp);
        (used[used.len() / 2], holder)
    }

    /// The server's memory without what it counts as its clients' own (buffers, which it makes smaller by and by),
    /// when nothing about it changes any more.
    fn memory(&self) -> i64 {
        let mut before = i64::MAX;
        until(SOON * 2, "memory has settled", || {
            // The server looks at each of its clients once a second.
            std::thread::sleep(Duration::from_millis(1200));
            let now = self.memory_now();
            (now - std::mem::replace(&mut before, now)).abs() < 64 << 10
        });
        before
    }

    fn memory_now(&self) -> i64 {
        let of = |field| info_number(&self.server, "memory", field);
        of("used_memory") - of("mem_clients_normal")
    }
}

#[test]
fn ten_thousand_cost_no_more_at_a_hand_off_than_a_hundred() {
    let Some(mut crowd) = Crowd::gather() else { return };
    crowd.ask(0..1, 0);
    token(&crowd.members[0].read().expect("it is free"));
    crowd.ask(1..=FEW, FEW);
    let (few, holder) = crowd.cpu_per_hand_off(0, FEW);
    crowd.ask(FEW + 1..MANY, MANY - 1);
    let (many, holder) = crowd.cpu_per_hand_off(holder, MANY - 1);
    figure(format_args!("server CPU per hand-off: {few:.1} µs with {FEW} waiting, {many:.1} µs with {MANY}"));

    // And to the last one in their order.
    let mut tokens = Vec::new();
    let mut order = vec![holder];
    while tokens.len() < MANY - 1 {
        order.drain(..order.len() - 1);
        order.extend(crowd.queue(MANY));
        assert_eq!(order.len() - 1, SHOWN.min(MANY - 1 - tokens.len()));
        tokens.extend(order.windows(2).map(|pair| crowd.hands_over(pair[0], pair[1])));
    }
    assert!(tokens.is_sorted_by(|earlier, later| earlier < later));
    until_nobody_waits(&crowd.server);
}

#[test]
fn ten_thousand_leave_from_everywhere() {
    let Some(mut crowd) = Crowd::gather() else { return };
    let control = "LOCK.ACQUIRE key control LEASE 3600000";
    crowd.control.take(control);
    crowd.ask(0..MANY, MANY);
    let order = crowd.queue(MANY);
    let behind = (0..MANY).filter(|number| !order.contains(number)).collect::<Vec<_>>();
    let mut random = Random::new();
    // Half of them go, and the others don't notice.
    let mut members: Vec<Option<Raw>> = std::mem::take(&mut crowd.members).into_iter().map(Some).collect();
    let begin = crowd.cpu();
    let (gone, left): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|_| random.chance(50));
    let (gone_behind, left_behind): (Vec<usize>, Vec<usize>) = behind.into_iter().partition(|_| random.chance(50));
    let (gone, all_left) = ([gone, gone_behind].concat(), (left.len() + left_behind.len()) as i64);
    for raw in gone.iter().filter_map(|&number| members[number].take()) {
        if random.chance(50) { raw.reset() } else { raw.close() }
    }
    until(SOON, "those who went have left the queue", || count_waiters(&mut crowd.control, "key") == all_left);
    let used = crowd.cpu() - begin;
    figure(format_args!("server CPU for each of {} that leave: {:.1} µs", gone.len(), used / gone.len() as f64));
    let shown = crowd.queue(MANY);
    assert_eq!(shown[..left.len()], left, "in their order");
    assert!(shown[left.len()..].iter().all(|number| left_behind.contains(number)));
    assert_held(&mut crowd.control, "key", "control");
    drop(members);
    until_nobody_waits(&crowd.server);
    crowd.control.order("LOCK.RELEASE key control");
    assert_eq!(crowd.control.say("EXISTS key"), Value::Int(0));
    crowd.control.take(control);
}

/// The server's memory when all of them wait, and by how much for each it is more than when all were only connected.
fn memory_of_waiters(crowd: &mut Crowd, wait: impl Fn(usize) -> String) -> (i64, i64) {
    let connected = crowd.memory();
    for (number, member) in crowd.members.iter_mut().enumerate() {
        member.tell(&[&wait(number)]);
    }
    until(SOON, "all of them wait", || blocked_clients(&crowd.server) == MANY as i64);
    let waiting = crowd.memory();
    (waiting, (waiting - connected) / MANY as i64)
}

/// What a server keeps for each client that a module blocks (Redis 7.0: two clients that are none, with a buffer of
/// 16 kB each) it keeps for a while after that, for the next one: so what is gone at once with the waits is the
/// module's.
#[test]
fn ten_thousand_in_memory() {
    let Some(mut crowd) = Crowd::gather() else { return };
    let (_, blpop) = memory_of_waiters(&mut crowd, |_| "BLPOP key-of-a-list 0".to_owned());
    drop(crowd);
    let Some(mut crowd) = Crowd::gather() else { return };
    crowd.control.take("LOCK.ACQUIRE key control LEASE 3600000");
    let (waiting, all) = memory_of_waiters(&mut crowd, |number| format!("LOCK.ACQUIRE key owner-{number:05} WAIT 0"));
    crowd.control.order("SET key no-lock");
    until(SOON, "all of them are told", || blocked_clients(&crowd.server) == 0);
    let gone = (waiting - crowd.memory_now()) / MANY as i64;
    figure(format_args!(
        "memory per waiter: {all} bytes, of which {gone} are gone with the wait; the others the server keeps for the \
         next client that a module blocks (a waiting BLPOP has {blpop})"
    ));
}
