//! The rules by which a run is judged, after every turn of the event loop. They are those of `docs/guarantees.md`, and
//! each stands below under its own name, as it is printed when it is broken.
//!
//! The judge believes what clients were *told*: a hold begins with the reply that grants it. It reads the keyspace with
//! its own eyes ([`crate::truth`]), and looks into the module's state only where a rule speaks of them.

use crate::asked::Asked;
use crate::lock::internal_errors;
use crate::redis::{Bytes, Happening, Node, REFUSALS, node, slot_of};
use crate::resp::Reply;
use crate::server::Role;
use crate::server::clock::Now;
use crate::server::replicas::Offsets;
use crate::state::pending::{OnBehalf, Ticket};
use crate::state::{self, Recipient, Stage, State};
use crate::truth::{self, Seen};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// Silence of so many ms is a calm: what is still undecided then will stay so.
pub const CALM: u64 = 300;

/// What has its own moment (a lease that runs out, a connection that ends) is dealt with so many ms later at most, if
/// nothing is in the way.
const SOON: u64 = 20;

/// Replicas are asked once more after so many ms.
const ASK_AGAIN: u64 = 100;

/// A replica is prompt that confirms within so many ms.
const PROMPT: u64 = 20;

/// Replicas have so many ms to confirm (`holdfast.replicas-timeout`).
const REPLICAS_TIMEOUT: u64 = 1000;

/// The server's cron comes by every so many ms.
const CRON: u64 = 100;

/// A hold is there as long as its holder was promised.
pub const KEPT: &str = "a hold stays until its owner releases it, its lease ends, another client breaks or overwrites the lock, or its ephemeral connection ends";
/// Hold counts: `HOLDS n` makes n.
pub const ASKED_FOR: &str = "an owner has no more holds than it requested";
/// Hold counts.
pub const COUNTED: &str = "of the holds that were delivered to an owner, only those that it releases end";
/// Ephemeral holds.
pub const EPHEMERAL: &str = "an ephemeral hold ends with its connection";
/// Mutual exclusion.
pub const LIMIT: &str = "never more holders than the limit, by the replies that clients got";
/// First come, first served.
pub const ORDER: &str = "no request is granted before one that has waited longer for the lock, here and elsewhere";
/// `NEW`.
pub const NO_RE_ENTRY: &str = "a request with NEW is never granted to an owner that holds already";
/// Fencing.
pub const TOKENS: &str = "a token is greater than all before it, and belongs to one owner";
/// Leases.
pub const LEASE: &str = "a lease never ends before its time";
/// Steps of the clock.
pub const STEPPED: &str = "a bound hold is never lost by a step of the clock: what was left of it stays left";
/// Watchdogs.
pub const WATCHED: &str = "the server renews watched holds as long as the connection lives";
/// Readers without heartbeats.
pub const ASKS_AGAIN: &str = "a session for which holds are renewed is answered in time to ask again";
/// Sessions.
pub const SESSIONS: &str = "a connection is a session from LOCK.SESSION on, and by nothing else";
/// Sessions that are replaced.
pub const REPLACED: &str = "a session that was replaced has ended";
/// Codes.
pub const CODES: &str = "a refusal of the module has a code of its own, which is none of the server's";
/// Confirmed deadlines.
pub const CONFIRMED: &str = "a bound hold ends at the deadline that its replicas have confirmed";
/// Confirmations.
pub const CONFIRMED_SOON: &str = "a request that waits for replicas is answered as soon as they have confirmed";
/// Waits.
pub const ENDS: &str = "every request has exactly one answer, every wait one end";
/// Lost wake-ups.
pub const FREE: &str = "with everything idle, no request waits for a lock that is free";
/// Time limits of waits.
pub const IN_TIME: &str = "a wait ends when its time is over";
/// Deadlocks.
pub const CYCLES: &str = "a request that closes a cycle of waits is refused";
/// Losses.
pub const TOLD: &str = "a session is notified of each hold that it loses, once";
/// `CONTENTION`.
pub const CONTENTION: &str = "a session that asked for it is notified of contention, once";
/// False alarms.
pub const TRUE_LOSS: &str = "a hold that was reported lost is lost";
/// Releases.
pub const GIVEN_BACK: &str = "a session is not notified of the loss of a hold that its owner released";
/// Grants that never arrive.
pub const UNHEARD: &str = "a grant to a waiter that is never delivered is revoked";
/// Rights.
pub const RIGHTS: &str = "no request is granted that its user may not make any more";
/// heartbeats.
pub const HEARTBEAT: &str =
    "every reply to LOCK.EVENTS … HEARTBEAT ends with one heartbeat, and no other reply has one";
/// Replicas.
pub const COPY: &str = "what the replicas are sent makes the same keyspace";
/// Refused writes.
pub const REFUSED: &str = "where the server would refuse a write, the module writes nothing";
/// The state of the module.
pub const STATE: &str = "every table agrees with every other";
/// Bounds.
pub const WORK: &str = "the work in one turn is bounded";
/// Broken invariants.
pub const INTERNAL: &str = "no internal error is counted: every invariant of the module holds";
/// Leaks.
pub const LEFT: &str = "nothing is left in any table when all clients are gone";

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule, in the words of this file.
    pub rule: &'static str,
    /// What broke it.
    pub what: String,
}

impl Violation {
    /// A rule that was broken.
    pub fn new(rule: &'static str, what: impl Into<String>) -> Self {
        Self { rule, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.rule, self.what)
    }
}

/// A lock and an owner.
type Hold = (i32, Bytes, Bytes);

/// A place in the order of everything that happened.
type Place = usize;

/// A hold, as its holder believes it.
#[derive(Clone, Debug)]
struct Belief {
    token: u64,
    /// When the request began that its holder was answered last: only what came later can have ended it.
    since: Place,
    /// When it was last seen in the keyspace, or `since`: only what came later can have ended it at once.
    seen: Place,
    /// Its lease ends no earlier, in Unix milliseconds.
    promised: u64,
    /// When it will end, as far as was seen.
    deadline: Option<u64>,
    /// When it was bound or renewed for its connection for the last time, as far as was seen, in Unix milliseconds.
    renewed: u64,
    limit: u32,
    /// What its owner was told that it was granted: where each request began, and to which count it raised the hold
    /// (`HOLDS`); `None`: by one.
    raises: Vec<(Place, Option<u64>)>,
    binding: Option<Binding>,
    /// With `REPLICAS`: the latest deadline that they can have confirmed; `None`: what it has at the end of this turn.
    known: Option<u64>,
    /// It was bound when the clock stepped for the last time: where its deadline is to be now, until it was seen.
    follows: Option<u64>,
    has_stepped: bool,
    doubts: Doubts,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    client: u64,
    /// When the request began that made it.
    at: Place,
    /// When its answer was heard: a session that has asked what is new before then may have asked before the binding was made.
    heard: Place,
    /// With `REPLICAS`: the deadline that they have confirmed at least.
    confirmed: Option<u64>,
    /// How long a renewal lasts.
    lease: u64,
    /// It was asked for on behalf of a session, which has to read for it.
    of_session: bool,
    watchdog: bool,
    ephemeral: bool,
    /// The same request was made with other terms: either may count.
    is_unsure: bool,
}

impl Binding {
    /// As this request makes it, if it is answered with success: asked and heard at these places.
    fn of(asked: &Asked, (at, heard): (Place, Place), ends: u64) -> Self {
        Self {
            client: asked.client,
            at,
            heard,
            confirmed: (asked.replicas > 0).then_some(ends),
            lease: asked.lease.unwrap_or(30_000),
            of_session: asked.is_of_session(),
            watchdog: asked.watchdog,
            ephemeral: asked.ephemeral,
            is_unsure: false,
        }
    }
}

/// Requests that may move a binding to another connection: until their answers are known, nobody can say.
type Doubts = BTreeMap<Place, Doubt>;

/// A request that may have moved a binding.
#[derive(Clone, Copy, Debug)]
struct Doubt {
    /// To which connection.
    client: u64,
    /// With `REPLICAS`: the deadline that they have confirmed at least.
    confirmed: Option<u64>,
}

impl Doubt {
    fn of(asked: &Asked, at: u64) -> Self {
        let confirmed = (asked.replicas > 0).then(|| at + asked.lease.unwrap_or(30_000));
        Self { client: asked.client, confirmed }
    }
}

impl Belief {
    /// The binding, as far as anybody can say.
    fn binding(&self) -> Option<Binding> {
        self.binding.map(|binding| Binding { is_unsure: binding.is_unsure || !self.doubts.is_empty(), ..binding })
    }
}

/// How many holds an owner has at least: what it was told of, less what it has asked to give back, in this order.
///
/// What had to wait was granted later than it was asked for, and a release may have been refused: then
/// it has more.
fn holds_at_least<'a>(raises: &[(Place, Option<u64>)], releases: impl Iterator<Item = &'a (Place, Cause)>) -> u64 {
    let Some((first, _)) = raises.first() else { return 0 };
    let releases = releases.filter(|(place, _)| place > first).filter_map(|(place, cause)| match cause {
        Cause::Own(asked, ..) => Some((*place, Err(asked.holds))),
        _ => None,
    });
    let mut changes: Vec<_> = raises.iter().map(|(place, to)| (*place, Ok(*to))).chain(releases).collect();
    changes.sort_by_key(|(place, _)| *place);
    changes.into_iter().fold(0, |holds: u64, (_, change)| match change {
        Ok(to) => to.map_or(holds + 1, |to| to.max(holds)),
        Err(to) => to.unwrap_or(holds.saturating_sub(1)).min(holds),
    })
}

/// Something that may end a hold.
#[derive(Clone, Debug)]
enum Cause {
    /// Its owner's own request, which began then, in Unix milliseconds.
    Own(Asked, i32, u64),
    /// The lock was broken.
    Forced(i32, Bytes),
    /// Another command has touched the key, or its expiry has removed it.
    Touched(i32, Bytes, bool),
    /// Another command has changed when the key expires.
    Prolonged(i32, Bytes),
    /// A database was emptied.
    Flushed(Option<i32>),
    /// Two databases were swapped: everything in them may be elsewhere.
    Swapped(i32, i32),
    /// A connection ended.
    Gone(u64),
    /// The server's role changed.
    Role,
}

impl Cause {
    /// Whether it gives back something of what this owner holds of this lock.
    fn releases(&self, key: &[u8], owner: &[u8]) -> bool {
        matches!(self, Self::Own(asked, ..) if asked.command.ends_with("release") && asked.concerns(key, owner))
    }
}

/// A request that was made and is not answered yet.
#[derive(Clone, Debug)]
struct Open {
    /// When it began, in the order of everything; `None`: it has not yet.
    began: Option<Place>,
    db: i32,
    /// When it began, in Unix milliseconds.
    at: u64,
    /// The same by the clock that does not step.
    steady: u64,
    /// What it runs: one thing, or those of a transaction.
    runs: Vec<Asked>,
    is_exec: bool,
}

/// When a request arrived.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    place: Place,
    /// Earlier by what it has waited elsewhere, in ms of the clock that does not step; `None`: nowhere.
    claimed: Option<u64>,
    steady: u64,
}

impl Arrival {
    fn of(place: Place, open: &Open, asked: &Asked) -> Self {
        let claimed = (asked.waited > 0).then(|| (open.steady + DAY).saturating_sub(asked.waited));
        Self { place, claimed, steady: open.steady + DAY }
    }

    /// Whether it was before another one that was granted in the turn that began there, for certain: it came before that
    /// grant, and what has waited elsewhere is reckoned in ms.
    fn is_before(&self, other: Self, turn: Place) -> bool {
        match (self.claimed, other.claimed) {
            (None, None) => self.place < other.place,
            _ => {
                let came_before = self.place <= turn || self.place < other.place;
                came_before && self.claimed.unwrap_or(self.steady) + 2 < other.claimed.unwrap_or(other.steady)
            }
        }
    }
}

/// So that a request that has waited elsewhere can have arrived before the run began.
const DAY: u64 = 24 * 60 * 60 * 1000;

impl Asked {
    /// Nobody can say which of several like it is meant: none of their terms counts.
    fn forget_terms(&mut self) {
        (self.is_unsure, self.new) = (true, false);
        (self.lease, self.limit, self.waited) = (Some(0), u32::MAX, DAY);
    }
}

/// A session's request that waits.
#[derive(Clone, Debug)]
struct Wait {
    open: Open,
    asked: Asked,
    /// Its keys that are not answered yet: a renewal of several is answered key by key.
    left: Vec<Bytes>,
    /// How many more requests like it may still have an answer of their own.
    repeats: usize,
    /// When the last request like it began.
    latest: Place,
    /// It has been answered, if all those were the same request.
    is_optional: bool,
}

impl Wait {
    /// Of this request, which began here: in a transaction, later than that.
    fn of(began: Place, open: &Open, asked: &Asked) -> Self {
        let (open, left) = (Open { began: Some(began), ..open.clone() }, asked.keys.clone());
        Self { open, asked: asked.clone(), left, repeats: 0, latest: began, is_optional: false }
    }
}

/// A connection as the judge knows it.
#[derive(Clone, Debug, Default)]
struct Connection {
    open: VecDeque<Open>,
    is_session: bool,
    /// It was one already when the locks were looked at last.
    was_session: bool,
    /// When its last `LOCK.EVENTS` began, in Unix milliseconds, and where.
    read_at: u64,
    read_place: Place,
    /// Within how many ms its next question is answered, as the last heartbeat said.
    promised: Option<u64>,
    /// Its client is not there any more.
    has_vanished: bool,
}

/// What an owner of a lock was told last: the token, and when it was asked.
#[derive(Clone, Copy, Debug)]
struct Told {
    token: u64,
    at: Place,
}

/// The judge.
#[derive(Debug, Default)]
pub struct Judge {
    connections: BTreeMap<u64, Connection>,
    beliefs: BTreeMap<Hold, Belief>,
    waits: Vec<Wait>,
    /// Requests of clients that will never hear their answers.
    silent: Vec<(i32, Asked)>,
    /// Those whose clients have not heard yet that they wait, and may never hear it.
    unheard: Vec<Wait>,
    place: Place,
    /// That at which the turn began.
    turn: Place,
    /// What ends holds at once, and what may end them later: when the server takes writes again.
    causes: Vec<(Place, Cause)>,
    lasting: Vec<(Place, Cause)>,
    /// The owners of tokens that were ever seen, and when they were first.
    tokens: BTreeMap<u64, (Bytes, Place)>,
    /// The tokens of each hold that anybody was told of.
    newest: BTreeMap<Hold, Told>,
    /// All tokens that were handed to the network, whether or not anybody was there to hear them.
    sent: BTreeSet<u64>,
    /// Those that were seen in the keyspace for the first time in this turn.
    begun: Vec<(Hold, u64)>,
    /// Tokens that went to those who waited, and their owners; and who has asked for anything in this turn.
    queued: BTreeMap<u64, Bytes>,
    asked_now: BTreeSet<Bytes>,
    /// What `FENCE` named: those tokens come from other servers.
    fences: BTreeSet<u64>,
    /// The newest token that each key carries.
    carried: BTreeMap<(i32, Bytes), u64>,
    /// Holds that their owner gave back.
    given_back: BTreeSet<(Hold, u64)>,
    /// Some client took nothing from the network for a while, or the server was a replica: then nobody can say which
    /// grants were heard of.
    is_muddled: bool,
    /// How often a session has asked to be told that somebody waits for a key and owner, and how often it was.
    contended: BTreeMap<(u64, Bytes, Bytes), (usize, usize)>,
    /// Databases have changed places: those who wait stay where they are, and what is held goes.
    has_swapped: bool,
    /// Losses that a session is to be told, and those that it was: how often.
    owed: BTreeSet<(u64, Bytes, Bytes, u64)>,
    told_lost: BTreeMap<(u64, Bytes, Bytes, u64), usize>,
    /// Holds whose lease has run out: when the clock is set back, those that nobody has removed are there again.
    run_out: BTreeMap<Hold, Belief>,
    /// When an owner that believed to hold was last seen to hold nothing there, and under which token it had.
    ended: BTreeMap<Hold, (Place, u64)>,
    /// Holds that were told lost where nothing may be written.
    ending: Vec<(i32, Bytes, Bytes, u64)>,
    /// Keys, owners and tokens of holds that had yet to follow a step of the clock when the role changed: they stay as they are.
    unfollowed: BTreeSet<(Bytes, Bytes, u64)>,
    /// The latest time of day before the clock was set back, and how often it was; and whether it was ever set.
    set_back: u64,
    steps_back: usize,
    has_stepped: bool,
    /// What had happened when it stepped for the last time.
    stepped_at: Place,
    /// What was asked since the clock stepped for the last time, or not answered by then.
    asked_since: Vec<Asked>,
    /// It stepped where nothing could be written: then deadlines may be those that were asked for, and not those that are.
    is_rough: bool,
    /// For how many holds their owners have asked at most, whatever became of it: one by one, and the greatest `HOLDS`.
    asked_for: BTreeMap<(Bytes, Bytes), (u64, u64)>,
    /// Which connections anybody has asked to bind a hold to.
    asked_bindings: BTreeMap<Hold, BTreeMap<u64, usize>>,
    /// Holds that a session was told it is bound to no more, and how often one of that owner and key.
    unbound: BTreeMap<(u64, Bytes, Bytes, u64), Place>,
    times_unbound: BTreeMap<(u64, Bytes, Bytes), usize>,
    /// Keys written by hand, of which the module promises less.
    by_hand: BTreeSet<(i32, Bytes)>,
    /// Keys whose expiry was changed by hand, in any database: no watchdog comes earlier because of that.
    prolonged: BTreeSet<Bytes>,
    /// The replies of this turn.
    spoken: Vec<(u64, Open, Reply)>,
    /// What was told in this turn: when it was asked, what, for which of its keys, and the answer.
    heard: Vec<(Place, Open, Asked, Vec<Bytes>, Reply)>,
    /// The losses that were told in this turn: session, database, key, owner, token.
    lost: Vec<(u64, i32, Bytes, Bytes, u64)>,
    /// The bindings that ended, as was told in this turn; and those of them behind which a grant of the same hold was read.
    loosened: Vec<(u64, i32, Bytes, Bytes, u64, Bytes)>,
    bound_again: BTreeSet<(u64, i32, Bytes, Bytes, u64)>,
    /// The heartbeats of this turn: of which session, what it said, and when it had asked.
    sure: Vec<(u64, String, (Place, u64))>,
    /// Requests that were answered in this turn, and the tokens that they were answered with.
    told: Vec<(i32, Asked)>,
    answered: Vec<(Bytes, u64)>,
    /// Grants of this turn, for the rule of order.
    granted: Vec<(Arrival, i32, Asked, usize, u64)>,
    /// Owners that have renewed something: their holds may have become endless at any time.
    renewed: BTreeSet<Bytes>,
    /// Owners that have waited by several requests at once, or asked for one lock by what they have `WAITED` while they
    /// waited for another: what closes a cycle may be the grant of one of them.
    divided: BTreeSet<Bytes>,
    /// Locks that owners asked for while they may have waited for them: a request may have the place of an earlier one.
    asked_again: BTreeSet<Hold>,
    /// Owners that have released all but a count that they named, or renewed with `REPLICAS`: that keeps what they were
    /// not told of, also if the renewal is not confirmed or its reply is lost.
    claimants: BTreeSet<Bytes>,
    /// When the turn began (monotonic, µs), and whether writes were refused then.
    before: (u64, bool),
    /// Something has disturbed the renewals: a pause, a step of the clock, a long turn, refused writes, another role.
    is_disturbed: bool,
    /// When no replica confirmed promptly for the last time, and when any confirmed at all (monotonic, µs).
    slow_at: u64,
    confirms_at: u64,
    /// Answers that wait for replicas, and since when (monotonic, µs).
    confirming: BTreeMap<Ticket, u64>,
    /// Since when somebody has waited for a lock that is free (monotonic, µs).
    free_since: Option<u64>,
    /// When the last turn ended (monotonic, µs).
    slept_at: u64,
    requests: usize,
    /// Connections that ended in this turn.
    gone: Vec<u64>,
    /// The end of the last turn that was long, or in which anything arrived or was carried out (monotonic, µs).
    busy_until: u64,
}

impl Judge {
    /// Before a run.
    pub fn new() -> Self {
        Self::default()
    }

    /// A client sends a request.
    pub fn asked(&mut self, client: u64, argv: &[Bytes]) {
        let asked = Asked::read(client, argv);
        for key in asked.keys.iter().filter(|_| asked.contention) {
            self.contended.entry((asked.client, key.clone(), asked.owner.clone())).or_default().0 += 1;
        }
        let connection = self.connections.entry(client).or_default();
        let is_exec = asked.command == "exec";
        connection.open.push_back(Open { began: None, db: 0, at: 0, steady: 0, runs: vec![asked.clone()], is_exec });
        if matches!(asked.command.as_str(), "renew" | "mrenew") {
            self.renewed.insert(asked.owner);
        }
        self.requests += 1;
    }

    /// A client is gone: nobody believes anything there any more.
    pub fn vanished(&mut self, client: u64) {
        if node(|node| node.clients.contains_key(&client)) {
            self.connections.entry(client).or_default().has_vanished = true;
        }
    }

    /// Bytes were handed to the network, whether or not anybody is there to read them.
    pub fn sent(&mut self, reply: &Reply) {
        reply.tokens(&mut self.sent);
    }

    /// A client takes nothing from the network.
    pub fn deaf(&mut self) {
        self.is_muddled = true;
    }

    /// Other replicas, which have all that was written until now.
    pub fn replicas_changed(&mut self) {
        // What the others were asked for, these are asked for once more, but later.
        self.confirming.values_mut().for_each(|since| *since = node(|node| node.clock.mono) + ASK_AGAIN * 1000);
        for belief in self.beliefs.values_mut() {
            let deadline = belief.deadline.unwrap_or(u64::MAX);
            belief.known = belief.known.map(|known| known.max(deadline));
        }
    }

    /// The time of day steps by so many ms: what is granted later lasts as long, but by another time.
    pub fn stepped(&mut self, ms: i64) {
        let open = self.connections.values_mut().flat_map(|it| it.open.iter_mut());
        let waits = self.waits.iter_mut().chain(&mut self.unheard);
        for open in open.chain(waits.map(|wait| &mut wait.open)) {
            open.at = open.at.saturating_add_signed(ms.min(0));
        }
        let undecided: Vec<Asked> = self.undecided().map(|(.., asked)| asked.clone()).collect();
        self.asked_since = undecided.into_iter().chain(self.silent.iter().map(|(_, asked)| asked.clone())).collect();
        self.is_rough |= self.before.1 || node(|node| is_refusing(node) || node.is_paused());
        let before = node(|node| node.millis()).saturating_add_signed(-ms);
        // What is bound goes along.
        for ((db, key, owner), belief) in &mut self.beliefs {
            // What was over where nothing could be written ends as soon as anything can.
            if belief.follows.is_some_and(|at| at < before) {
                (belief.follows, belief.deadline) = (Some(0), Some(0));
                continue;
            }
            if state::with(|state| state.bindings.client_of(*db, key, owner).is_some()) {
                let moved = |at: u64| at.saturating_add_signed(ms);
                (belief.promised, belief.renewed) = (moved(belief.promised), moved(belief.renewed));
                (belief.deadline, belief.known) = (belief.deadline.map(moved), belief.known.map(moved));
                if let Some(binding) = &mut belief.binding {
                    binding.confirmed = binding.confirmed.map(moved);
                }
                (belief.follows, belief.has_stepped) = (belief.deadline, true);
            }
        }
        if ms < 0 {
            // What had run out and was not removed yet is there again.
            let was_over = |it: &Belief| it.follows.is_none() && it.deadline.is_some_and(|at| at < before);
            let over = self.beliefs.iter().filter(|(_, it)| was_over(it));
            self.run_out.extend(over.map(|(hold, it)| (hold.clone(), it.clone())));
            self.owed.clear();
            self.steps_back += 1;
            self.set_back = self.set_back.max(node(|node| node.millis()) + ms.unsigned_abs());
        }
        // The server's timers may stand still until its cron has come by three times.
        self.busy_until = node(|node| node.clock.mono) + CALM * 1000;
        self.is_disturbed = true;
        self.has_stepped = true;
        self.stepped_at = self.place;
    }

    /// Whether a connection waits for no answer.
    pub fn is_idle(&self, client: u64) -> bool {
        self.connections.get(&client).is_none_or(|it| it.open.is_empty())
    }

    /// Whether anybody has used it as a session.
    pub fn is_session(&self, client: u64) -> bool {
        self.connections.get(&client).is_some_and(|it| it.is_session)
    }

    /// Only a session reads events, and what is renewed is a session's.
    fn is_a_session_by_its_command_alone(
        &mut self,
        client: u64,
        asked: &Asked,
        reply: &Reply,
    ) -> Result<(), Violation> {
        let is_refused = matches!(reply, Reply::Error(error) if error.starts_with("NOSESSION"));
        let is_error = matches!(reply, Reply::Error(_));
        let connection = self.connections.entry(client).or_default();
        if asked.command == "session" && !is_error {
            connection.is_session = true;
        }
        let needs = asked.command == "events" || asked.watchdog || asked.contention;
        let is_wrong =
            if asked.over_session { is_refused && !asked.of_session } else { needs && !asked.of_session && !is_error };
        if is_wrong {
            return Err(Violation::new(SESSIONS, format!("{asked:?} was answered {reply:?}")));
        }
        Ok(())
    }

    /// A turn of the event loop is about to begin.
    ///
    /// # Errors
    ///
    /// The rule by which something should have happened before.
    pub fn before_turn(&mut self) -> Result<(), Violation> {
        self.turn = self.place;
        self.soon()?;
        node(|node| {
            let now = node.clock.mono;
            let is_prompt = |it: &crate::redis::Replica| it.delay.is_some_and(|delay| delay <= PROMPT);
            if !node.replicas.iter().any(is_prompt) {
                self.slow_at = now;
            }
            if node.replicas.iter().any(|it| it.delay.is_some() || !it.confirms_at.is_empty()) {
                self.confirms_at = u64::MAX;
            } else if self.confirms_at == u64::MAX {
                // They can have confirmed what was there until now.
                self.confirms_at = now;
                for belief in self.beliefs.values_mut() {
                    let deadline = belief.deadline.unwrap_or(u64::MAX);
                    belief.known = belief.known.map(|known| known.max(deadline));
                }
            }
        });
        node(|node| {
            node.writes = 0;
            node.look_ups = 0;
            node.reconfigured = false;
            self.before = (node.clock.mono, is_refusing(node));
            let is_unowned = node.slots.as_ref().is_some_and(|slots| !slots.unowned.is_empty());
            self.is_disturbed |= node.is_paused() || is_refusing(node) || node.role == Role::Replica || is_unowned;
        });
        Ok(())
    }

    /// What has its own moment is not overslept.
    fn soon(&mut self) -> Result<(), Violation> {
        let is_still = node(|node| {
            let is_waiting = is_refusing(node) || node.is_paused() || node.clients.values().any(|it| it.is_deaf);
            is_waiting || node.role == Role::Replica || node.slots.is_some()
        });
        if self.is_disturbed || is_still {
            return Ok(());
        }
        self.unconfirmed_holds_end()?;
        self.confirmed_soon()?;
        let now = node(|node| node.clock.mono);
        let has_slept = now > self.slept_at + SOON * 1000;
        if has_slept {
            self.ephemeral_holds_end()?;
        }
        if !has_slept && self.free_since.is_none() {
            return Ok(());
        }
        match nobody_waits_for_what_is_free(SOON) {
            Ok(()) => self.free_since = None,
            Err(violation) if now > *self.free_since.get_or_insert(self.slept_at) + SOON * 1000 => {
                return Err(violation);
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Clients that are blocked until replicas have confirmed: where enough of them confirm promptly, no longer than that.
    fn confirmed_soon(&mut self) -> Result<(), Violation> {
        if state::with(|state| state.confirmations.is_empty()) {
            self.confirming.clear();
            return Ok(());
        }
        let (now, prompt) = node(|node| {
            let is_prompt = |it: &&crate::redis::Replica| it.delay.is_some_and(|delay| delay <= PROMPT);
            (node.clock.mono, node.replicas.iter().filter(is_prompt).count() as u64)
        });
        let waiting = |(id, it): (&u64, &crate::redis::Client)| match &it.state {
            crate::redis::client::State::Blocked(block) => Some((*id, block.ticket)),
            _ => None,
        };
        let blocked: Vec<(u64, Ticket)> = node(|node| node.clients.iter().filter_map(waiting).collect());
        let of = |ticket| {
            state::with(|state| matches!(state.pending.get(ticket)?.stage, Stage::Confirming(_)).then_some(()))
        };
        let blocked: Vec<(u64, Ticket)> = blocked.into_iter().filter(|(_, ticket)| of(*ticket).is_some()).collect();
        self.confirming.retain(|ticket, _| blocked.iter().any(|(_, it)| it == ticket));
        for (client, ticket) in blocked {
            let since = *self.confirming.entry(ticket).or_insert(now);
            let here = self.connections.get(&client).filter(|it| !it.has_vanished);
            let asked = here.and_then(|it| it.open.front()?.runs.first());
            if let Some(asked) = asked.filter(|it| (1..=prompt).contains(&it.replicas))
                && since + (PROMPT + SOON) * 1000 < now
            {
                return Err(Violation::new(CONFIRMED_SOON, format!("client {client} still waits: {asked:?}")));
            }
        }
        Ok(())
    }

    /// A bound hold with `REPLICAS` ends at the deadline that they have confirmed.
    fn unconfirmed_holds_end(&self) -> Result<(), Violation> {
        if self.confirms_at == u64::MAX {
            return Ok(()); // They confirm.
        }
        let now = node(|node| node.millis());
        let is_over = |belief: &Belief| {
            // (A client that is gone leaves what the key says.)
            let is_connected = |binding: &Binding| !binding.is_unsure && self.connections.contains_key(&binding.client);
            let confirmed = belief.binding().filter(is_connected).and_then(|binding| binding.confirmed);
            confirmed.is_some() && belief.known.is_some_and(|known| known.saturating_add(SOON) < now)
        };
        for (hold, belief) in self.beliefs.iter().filter(|(_, belief)| is_over(belief)) {
            let (db, key, owner) = hold;
            // A request that nobody has heard the answer of may have bound it without replicas.
            let bindings = |asked: &Asked| asked.binds() && asked.concerns(key, owner);
            if self.silent.iter().any(|(_, asked)| bindings(asked))
                || self.undecided().any(|(.., asked)| bindings(asked))
            {
                continue;
            }
            let seen = node(|node| truth::read(node, *db, key));
            let is_there = seen.of(owner).is_some_and(|holder| holder.token == Some(belief.token));
            if is_there && !self.by_hand.contains(&(*db, key.clone())) {
                return Err(Violation::new(CONFIRMED, format!("{}: {belief:?}", show(hold))));
            }
        }
        Ok(())
    }

    /// Puts down in which order requests began and other things happened.
    fn note(&mut self) {
        for happening in node(|node| std::mem::take(&mut node.log)) {
            self.place += 1;
            let place = self.place;
            // Of what was granted and not heard of yet, a part may be revoked after the release.
            let unheard = match &happening {
                Happening::Begun { commands, .. } if releases(commands) => self.unheard_requests(),
                _ => BTreeSet::new(),
            };
            let (causes, lasting) = (&mut self.causes, &mut self.lasting);
            let mut cause = |cause| causes.push((place, cause));
            match happening {
                Happening::Begun { client, db, at, steady, is_session, commands } => {
                    // (It may have arrived long before, behind one that had to wait.)
                    self.busy_until = self.busy_until.max(node(|node| node.clock.mono));
                    let over_session = |argv: &Vec<Bytes>| is_session && !argv[0].eq_ignore_ascii_case(b"eval");
                    let read =
                        |argv: &Vec<Bytes>| Asked { over_session: over_session(argv), ..Asked::read(client, argv) };
                    let runs: Vec<Asked> = commands.iter().map(read).collect();
                    for (place, asked) in (place..).zip(&runs) {
                        let own = || (place, Cause::Own(asked.clone(), db, at));
                        match asked.command.as_str() {
                            "force" => {
                                causes.extend(asked.keys.iter().map(|key| (place, Cause::Forced(db, key.clone()))));
                            }
                            _ if asked.command.ends_with("release") && unheard.contains(&asked.owner) => {
                                lasting.push(own());
                            }
                            "release" | "mrelease" | "renew" | "mrenew" => causes.push(own()),
                            _ => {}
                        }
                    }
                    self.place += runs.len();
                    self.asked_now.extend(runs.iter().map(|asked| asked.owner.clone()));
                    self.asked_since.extend_from_slice(&runs);
                    self.fences.extend(runs.iter().filter_map(|asked| asked.fence));
                    // What its owner gives back before the loss was noticed, he is not told to have lost.
                    for asked in runs.iter().filter(|asked| asked.command.ends_with("release")) {
                        // Who names a count keeps it, also of what it was not told of.
                        if asked.holds.is_some_and(|holds| holds > 0) {
                            self.claimants.insert(asked.owner.clone());
                        }
                        self.owed.retain(|(_, key, owner, _)| !asked.concerns(key, owner));
                    }
                    let renewals = runs.iter().filter(|asked| asked.command.ends_with("renew") && asked.replicas > 0);
                    self.claimants.extend(renewals.map(|asked| asked.owner.clone()));
                    for asked in runs.iter().filter(|asked| asked.command.ends_with("acquire")) {
                        self.note_asked_again(db, asked);
                        // (What was granted at once, ahead of others, by what it has `WAITED`, is not in the queue.)
                        let is_elsewhere =
                            |key: &crate::lock::LockKey| asked.keys.iter().all(|name| name[..] != *key.name);
                        let owner = asked.owner.as_slice().into();
                        let is_divided = state::with(|state| {
                            let waits = || state.queue.of_actor(&owner, 100);
                            let is_another = |it: &crate::lock::Waiter<_>| it.keys.iter().all(is_elsewhere);
                            waits().nth(1).is_some() || asked.waited > 0 && waits().any(is_another)
                        });
                        if is_divided {
                            self.divided.insert(asked.owner.clone());
                        }
                        for key in &asked.keys {
                            let (ones, most) = self.asked_for.entry((key.clone(), asked.owner.clone())).or_default();
                            match asked.holds {
                                None => *ones += 1,
                                Some(holds) => *most = holds.max(*most),
                            }
                        }
                    }
                    // Whose bindings these move, only those know who hear the answer.
                    for (place, asked) in (place..).zip(&runs).filter(|(_, asked)| asked.binds()) {
                        let doubt = (place, Doubt::of(asked, at));
                        for key in &asked.keys {
                            let hold = (db, key.clone(), asked.owner.clone());
                            *self.asked_bindings.entry(hold).or_default().entry(asked.client).or_default() += 1;
                            let belief = self.beliefs.get_mut(&(db, key.clone(), asked.owner.clone()));
                            let belief = belief
                                .filter(|belief| belief.binding.is_some_and(|binding| binding.client != asked.client));
                            belief.into_iter().for_each(|belief| belief.doubts.extend([doubt]));
                        }
                    }
                    let connection = self.connections.entry(client).or_default();
                    let has_vanished = connection.has_vanished;
                    if runs.iter().any(|asked| asked.command == "events") {
                        (connection.read_at, connection.read_place) = (at, place);
                    }
                    if let Some(open) = connection.open.iter_mut().find(|open| open.began.is_none()) {
                        (open.began, open.db, open.at, open.steady) = (Some(place), db, at, steady);
                        if open.is_exec || commands.is_empty() {
                            open.runs = runs;
                        } else {
                            let begun = open.runs.iter_mut().zip(&runs);
                            begun.for_each(|(asked, run)| asked.over_session = run.over_session);
                        }
                        if has_vanished {
                            self.silent.extend(open.runs.iter().map(|asked| (db, asked.clone())));
                        }
                        let waits = |asked: &Asked| asked.of_session && (asked.wait.is_some() || asked.replicas > 0);
                        let of_session = (place..).zip(&open.runs).filter(|(_, asked)| waits(asked));
                        self.unheard.extend(of_session.map(|(at, asked)| Wait::of(at, open, asked)));
                    }
                }
                Happening::Touched { db, key, expired } => {
                    if !expired {
                        self.by_hand.insert((db, key.clone()));
                    } else if self.has_stepped {
                        // Timers that were set before come late by as much as the clock was set forward.
                        self.busy_until = self.busy_until.max(node(|node| node.clock.mono));
                    }
                    cause(Cause::Touched(db, key, expired));
                }
                Happening::Prolonged { db, key } => {
                    self.prolonged.insert(key.clone());
                    cause(Cause::Prolonged(db, key));
                }
                Happening::Flushed(db) => cause(Cause::Flushed(db)),
                Happening::Swapped(one, other) => {
                    cause(Cause::Swapped(one, other));
                    self.has_swapped = true;
                    self.swap(one, other);
                }
                Happening::Gone(client, unsent) => {
                    lasting.push((place, Cause::Gone(client)));
                    self.gone.push(client);
                    self.never_sent(unsent);
                }
                Happening::RoleChanged => {
                    lasting.push((place, Cause::Role));
                    self.is_muddled = true;
                    // Bindings end with it, and keys that have not followed the clock yet stay as they are.
                    for ((_, key, owner), belief) in &mut self.beliefs {
                        belief.binding = None;
                        if belief.follows.take().is_some() {
                            self.unfollowed.insert((key.clone(), owner.clone(), belief.token));
                            (belief.promised, belief.deadline) = (0, Some(0));
                        }
                    }
                }
                Happening::Unblocked(_) => {}
            }
        }
    }

    /// A connection has ended to which this was written, and never sent: what it grants stands, as if it had been.
    fn never_sent(&mut self, mut written: Bytes) {
        while let Some(reply) = Reply::take(&mut written) {
            reply.tokens(&mut self.sent);
        }
    }

    /// An owner asks for locks. If another request of it for one of them may still wait, this one may take over its place.
    fn note_asked_again(&mut self, db: i32, asked: &Asked) {
        for key in &asked.keys {
            let is_like = |it: &Asked| it.command.ends_with("acquire") && it.concerns(key, &asked.owner);
            let is_open = self.undecided().any(|(_, open, it)| open.db == db && is_like(it));
            let of_key = (db, key.clone(), asked.owner.clone());
            if is_open || self.silent.iter().any(|(on, it)| *on == db && is_like(it)) {
                self.asked_again.insert(of_key);
            } else {
                self.asked_again.remove(&of_key);
            }
        }
    }

    /// Owners that have asked for something, and were not told yet what became of it, or never will be.
    fn unheard_requests(&self) -> BTreeSet<Bytes> {
        let silent = self.silent.iter().map(|(_, asked)| asked);
        let all = self.undecided().map(|(.., asked)| asked).chain(silent);
        all.map(|asked| asked.owner.clone()).filter(|owner| !owner.is_empty()).collect()
    }

    /// When the server's role changed for the last time.
    fn role_changed(&self) -> Place {
        self.lasting.iter().rfind(|(_, cause)| matches!(cause, Cause::Role)).map_or(0, |(place, _)| *place)
    }

    /// Two databases have changed places: what is believed of their locks goes along.
    fn swap(&mut self, one: i32, other: i32) {
        let moved = |db: i32| {
            if db == one {
                other
            } else if db == other {
                one
            } else {
                db
            }
        };
        fn swap<V>(map: &mut BTreeMap<Hold, V>, moved: impl Fn(i32) -> i32) {
            *map =
                std::mem::take(map).into_iter().map(|((db, key, owner), it)| ((moved(db), key, owner), it)).collect();
        }
        swap(&mut self.beliefs, moved);
        swap(&mut self.run_out, moved);
        swap(&mut self.ended, moved);
        swap(&mut self.newest, moved);
        swap(&mut self.asked_bindings, moved);
        for (_, cause) in &mut self.lasting {
            if let Cause::Own(_, db, _) = cause {
                *db = moved(*db);
            }
        }
        // Who waits in one of them stays there, and may now come to move the binding of another hold of his: of the one that came.
        let may_bind = |(_, open, asked): &(Place, &Open, &Asked)| {
            asked.binds() && asked.wait.is_some() && [one, other].contains(&open.db)
        };
        let waits: Vec<(Place, Doubt, i32, Asked)> = self
            .undecided()
            .filter(may_bind)
            .map(|(at, open, asked)| (at, Doubt::of(asked, open.at), open.db, asked.clone()))
            .collect();
        for (place, doubt, db, asked) in waits {
            for key in &asked.keys {
                let belief = self.beliefs.get_mut(&(db, key.clone(), asked.owner.clone()));
                let belief =
                    belief.filter(|belief| belief.binding.is_some_and(|binding| binding.client != asked.client));
                belief.into_iter().for_each(|belief| belief.doubts.extend([(place, doubt)]));
            }
        }
        self.by_hand = std::mem::take(&mut self.by_hand).into_iter().map(|(db, key)| (moved(db), key)).collect();
        self.carried.clear();
    }

    /// A client is told something: put down until the turn is over, when all that was told in it is taken in the order in
    /// which it was asked.
    pub fn hears(&mut self, client: u64, reply: &Reply) -> Result<(), Violation> {
        self.note();
        let Some(open) = self.connections.get_mut(&client).and_then(|it| it.open.pop_front()) else {
            return match reply {
                // Said to a blocked client whose connection ends with it.
                Reply::Error(error) if error.starts_with("UNBLOCKED") => Ok(()),
                _ => Err(Violation::new(ENDS, format!("client {client} was told {reply:?} without having asked"))),
            };
        };
        self.spoken.push((client, open, reply.clone()));
        Ok(())
    }

    /// A session waits for the end of a request.
    fn waits_for(&mut self, open: &Open, asked: &Asked, is_optional: bool) {
        let renews = asked.command.contains("renew");
        let is_same = |wait: &&mut Wait| {
            let it = &wait.asked;
            wait.open.db == open.db
                && (it.client, &it.owner) == (asked.client, &asked.owner)
                && if renews { it.keys == asked.keys } else { are_the_same(&it.keys, &asked.keys) }
                // A renewal is repeated on the same terms, by either command if it names one lock.
                && (!renews || *it == Asked { command: it.command.clone(), ..asked.clone() })
                && renews == it.command.contains("renew")
        };
        match self.waits.iter_mut().find(is_same) {
            Some(known) => {
                // It may be the same request, or a new one, and the end of the first is not read yet.
                let flags = |it: &Asked| (it.watchdog, it.ephemeral, it.contention, it.replicas);
                let is_unsure = known.asked.is_unsure || flags(&known.asked) != flags(asked);
                let replicas = known.asked.replicas.max(asked.replicas);
                let lease = |it: &Asked| it.lease.unwrap_or(30_000);
                let lease = Some(lease(&known.asked).min(lease(asked)));
                let limit = known.asked.limit.max(asked.limit);
                // What it has waited is what the first of them said, whichever that was.
                let waited = known.asked.waited.max(asked.waited);
                let new = known.asked.new && asked.new;
                let holds = if known.asked.holds == asked.holds { asked.holds } else { Some(0) };
                // What is granted may be the last of them, long after the first was asked for.
                let wait = asked.wait.or((!renews).then_some(0));
                let (watchdog, ephemeral) =
                    (known.asked.watchdog || asked.watchdog, known.asked.ephemeral || asked.ephemeral);
                let terms = Asked { is_unsure, lease, limit, waited, new, holds, wait, replicas, ..asked.clone() };
                known.asked = Asked { watchdog, ephemeral, ..terms };
                known.repeats += 1;
                // A client that heard late that it waits may have asked first.
                known.latest = known.latest.max(open.began.unwrap_or(0));
                if open.began < known.open.began {
                    known.open = open.clone();
                }
            }
            None => {
                self.waits.push(Wait { is_optional, ..Wait::of(open.began.unwrap_or(0), open, asked) });
            }
        }
    }

    /// A session reads an event, as the answer to `next`.
    fn reads(&mut self, session: u64, event: &[Reply], next: &Open) -> Result<(), Violation> {
        let [kind, db, keys, owner, token, detail, ..] = event else {
            return Err(Violation::new(ENDS, format!("an event is {event:?}")));
        };
        let db = db.number().unwrap_or(0) as i32;
        let keys: Vec<Bytes> = keys.elements().iter().map(|key| key.bytes().to_vec()).collect();
        let owner = owner.bytes().to_vec();
        match kind.bytes() {
            b"heartbeat" => {
                let asked = (next.began.unwrap_or(0), next.at);
                let said = String::from_utf8_lossy(detail.bytes()).into_owned();
                let next = said.split(' ').next().and_then(|next| next.parse().ok());
                self.connections.get_mut(&session).into_iter().for_each(|it| it.promised = next);
                self.sure.push((session, said, asked));
            }
            b"lost" => {
                let key = keys.first().cloned().unwrap_or_default();
                self.lost.push((session, db, key, owner, token.number().unwrap_or(0)));
            }
            b"unbound" => {
                for key in keys {
                    let why = detail.bytes().to_vec();
                    self.loosened.push((session, db, key, owner.clone(), token.number().unwrap_or(0), why));
                }
            }
            b"contended" => {
                let key = keys.first().cloned().unwrap_or_default();
                let (asked, told) = self.contended.entry((session, key, owner)).or_default();
                *told += 1;
                if told > asked {
                    return Err(Violation::new(CONTENTION, format!("session {session} was told {event:?}")));
                }
            }
            what => {
                // Only a renewal can find that its owner does not hold the lock. (If none is left, another end was taken for its.)
                let renews = |wait: &Wait| {
                    let it = &wait.asked;
                    let is_its = it.command.contains("renew") && it.client == session && it.owner == owner;
                    is_its && wait.open.db == db && keys.iter().any(|key| wait.left.contains(key))
                };
                let is_of_renewal =
                    detail.bytes().starts_with(b"NOTHELD") && self.waits.iter().chain(&self.unheard).any(renews);
                let fits = |wait: &Wait| {
                    let it = &wait.asked;
                    let is_left = || keys.iter().any(|key| wait.left.contains(key));
                    // (No renewal times out.)
                    let keys_fit = match it.command.contains("renew") {
                        // (It is refused as a whole, unless its owner does not hold one of the locks.)
                        true if what == b"refused" && !detail.bytes().starts_with(b"NOTHELD") => it.keys == keys,
                        true => what != b"timeout" && is_left(),
                        false => !is_of_renewal && are_the_same(&it.keys, &keys),
                    };
                    wait.open.db == db && it.client == session && it.owner == owner && keys_fit
                };
                let unheard = self.unheard.iter().filter(|wait| fits(wait)).count();
                let is_known = self.waits.iter().any(fits);
                if !is_known && let Some(at) = self.unheard.iter().position(fits) {
                    let wait = self.unheard.remove(at);
                    // Of several that may be meant, each may have ended otherwise.
                    self.waits.push(Wait { is_optional: wait.is_optional || unheard > 1, ..wait });
                }
                // Which of several like it ended, nobody can say.
                if unheard > usize::from(!is_known)
                    && let Some(wait) = self.waits.iter_mut().find(|wait| fits(wait))
                {
                    wait.asked.forget_terms();
                    self.unheard.iter_mut().filter(|wait| fits(wait)).for_each(|wait| wait.asked.forget_terms());
                }
                // Only one that asked for replicas can have had too few of them. And rather one that has to end than one that
                // may have been a repetition.
                let lacks_replicas = String::from_utf8_lossy(detail.bytes()).contains(" replicas confirmed ");
                let rank = |wait: &Wait| (lacks_replicas && wait.asked.replicas == 0, wait.is_optional);
                let fitting = self.waits.iter().enumerate().filter(|(_, wait)| fits(wait));
                let Some((at, _)) = fitting.min_by_key(|(_, wait)| rank(wait)) else {
                    return Err(Violation::new(ENDS, format!("session {session} was told {event:?} for no wait")));
                };
                // Requests like it whose clients have not heard yet that they wait may have been repetitions.
                self.unheard.iter_mut().filter(|wait| fits(wait)).for_each(|wait| wait.is_optional = true);
                // Which of several ended, nobody can say.
                let others = self.waits.iter_mut().enumerate().filter(|(other, wait)| *other != at && fits(wait));
                let (mut like, mut replicas): (Vec<Place>, u64) = (Vec::new(), 0);
                let mut kinds: BTreeSet<bool> = BTreeSet::new();
                for (_, wait) in others {
                    kinds.insert(wait.asked.command.contains("renew"));
                    wait.is_optional = true;
                    like.extend(wait.open.began);
                    replicas = replicas.max(wait.asked.replicas);
                }
                kinds.extend(
                    self.unheard.iter().filter(|wait| fits(wait)).map(|wait| wait.asked.command.contains("renew")),
                );
                let Wait { mut open, mut asked, mut left, repeats, .. } = self.waits[at].clone();
                if !like.is_empty() {
                    asked.forget_terms();
                    asked.replicas = asked.replicas.max(replicas);
                }
                left.retain(|key| !keys.contains(key));
                if repeats == 0 && left.is_empty() && what != b"granted" {
                    self.moved_no_binding(open.began.unwrap_or(0), &asked, &keys);
                }
                if repeats > 0 {
                    self.waits[at].repeats = repeats - 1;
                    self.waits[at].is_optional = true;
                } else if !left.is_empty() {
                    self.waits[at].left = left;
                } else if kinds.contains(&!asked.command.contains("renew")) {
                    // Or it was the end of a request of the other kind, and this one has not ended yet.
                    self.waits[at].is_optional = true;
                } else {
                    self.waits.remove(at);
                }
                if what == b"granted" {
                    // What was unbound before this was read is bound again.
                    let granted = token.number().unwrap_or(0);
                    let is_it = |(to, on, key, who, of, _): &&(u64, i32, Bytes, Bytes, u64, Bytes)| {
                        (*to, *on, who, *of) == (session, db, &owner, granted) && keys.contains(key)
                    };
                    let again = self.loosened.iter().filter(is_it);
                    let again = again.map(|(to, on, key, who, of, _)| (*to, *on, key.clone(), who.clone(), *of));
                    self.bound_again.extend(again);
                    // It lasts for so long from when this was asked.
                    let lasts = String::from_utf8_lossy(detail.bytes()).parse::<u64>();
                    let Ok(lasts) = lasts else { return Err(Violation::new(LEASE, format!("a grant is {event:?}"))) };
                    let least = open.at + asked.lease.unwrap_or(30_000);
                    // (If it may be the end of another one like it, or of one that was given up since, nobody can say of which.)
                    // (Its owner may have asked for another lease since.)
                    let leases = |(at, cause): &(Place, Cause)| match cause {
                        Cause::Own(by, ..) => {
                            *at > open.began.unwrap_or(0) && keys.iter().any(|key| by.concerns(key, &owner))
                        }
                        _ => false,
                    };
                    let is_plain = asked.command.ends_with("acquire") && asked.replicas == 0 && !asked.is_unsure;
                    let is_plain = is_plain && !self.causes.iter().chain(&self.lasting).any(leases);
                    // (What its owner was granted with REPLICAS ends when they say, also if this has re-entered it.)
                    let asks_replicas = |it: &Asked| it.replicas > 0 && keys.iter().any(|key| it.concerns(key, &owner));
                    let is_confirmed = |key: &Bytes| {
                        let belief = self.beliefs.get(&(db, key.clone(), owner.clone()));
                        belief.is_some_and(|it| it.binding.is_some_and(|binding| binding.confirmed.is_some()))
                    };
                    let is_plain = is_plain
                        && !keys.iter().any(is_confirmed)
                        && !self.heard.iter().any(|(_, _, it, ..)| asks_replicas(it))
                        && !self.undecided().any(|(.., it)| asks_replicas(it))
                        && !self.silent.iter().any(|(_, it)| asks_replicas(it));
                    if is_plain && !self.is_disturbed && next.at + lasts + 2 < least {
                        let what = format!("{event:?} after {} lasts until {}, not {least}", next.at, next.at + lasts);
                        return Err(Violation::new(LEASE, what));
                    }
                    // (A step of the clock may have come between the grant and its reading.)
                    if lasts > 0 && !self.is_disturbed {
                        open.at = open.at.max((next.at + lasts).saturating_sub(asked.lease.unwrap_or(30_000)));
                    }
                    // It may have been the answer to any of those like it.
                    like.extend(self.unheard.iter().filter(|wait| fits(wait)).filter_map(|wait| wait.open.began));
                    let place = like.into_iter().chain(open.began).min().unwrap_or(0);
                    self.heard.push((place, open, asked, keys, token.clone()));
                }
            }
        }
        Ok(())
    }

    /// A heartbeat promises that what is renewed for the session lasts: so many thousandths of its lease from when it
    /// asked.
    fn is_sure(&mut self, session: u64, said: &str, (began, asked): (Place, u64)) {
        let Some(sure) = said.split(' ').nth(2).and_then(|sure| sure.parse::<u64>().ok()) else { return };
        let open = self.connections.values().flat_map(|it| it.open.iter()).filter(|open| open.began.is_some());
        let unheard: Vec<&Asked> = open.flat_map(|it| &it.runs).chain(self.silent.iter().map(|(_, it)| it)).collect();
        for ((_, key, owner), belief) in &mut self.beliefs {
            // A request whose answer is not heard yet may have given it another lease.
            let is_its = |binding: &Binding| binding.client == session && binding.watchdog && !binding.is_unsure;
            let is_known = !unheard.iter().any(|asked| asked.concerns(key, owner));
            // It may have been said before the hold was renewed last; and, to somebody who hears late, before others changed its expiry.
            let is_current = belief.since < began && !(self.is_muddled && self.prolonged.contains(key));
            if let Some(binding) = belief.binding().filter(is_its).filter(|_| is_known && is_current) {
                belief.promised = belief.promised.max(asked + binding.lease * sure / 1000);
            }
        }
    }

    /// Takes in what was told in this turn, in the order in which it was asked; events at the end.
    fn take_in(&mut self) -> Result<(), Violation> {
        let mut spoken = std::mem::take(&mut self.spoken);
        let reads = |open: &Open| open.runs.iter().any(|asked| asked.command == "events");
        spoken.sort_by_key(|(_, open, _)| (reads(open), open.began));
        for (client, open, reply) in spoken {
            // Not there any more: it has ended already, and this was told late.
            let began = open.began.unwrap_or(0);
            let is_its = |wait: &Wait| wait.open.began.is_some_and(|at| (began..began + open.runs.len()).contains(&at));
            let unheard: Vec<Wait> = self.unheard.extract_if(.., |wait| is_its(wait)).collect();
            let replies = if open.is_exec { reply.elements() } else { std::slice::from_ref(&reply) };
            for (place, (asked, reply)) in (began..).zip(open.runs.iter().zip(replies)) {
                says_what_it_may(asked, reply)?;
                self.is_a_session_by_its_command_alone(client, asked, reply)?;
                match (asked.command.as_str(), reply) {
                    ("events", Reply::Array(events)) => {
                        let kind = |event: &Reply| event.elements().first().map(|kind| kind.bytes().to_vec());
                        let signs = events.iter().filter(|event| kind(event).as_deref() == Some(b"heartbeat")).count();
                        let is_last = events.last().and_then(kind).as_deref() == Some(b"heartbeat");
                        if signs != usize::from(asked.heartbeat) || is_last != asked.heartbeat {
                            return Err(Violation::new(HEARTBEAT, format!("{events:?}")));
                        }
                        for event in events {
                            self.reads(client, event.elements(), &open)?;
                        }
                    }
                    ("events", Reply::Null) if asked.heartbeat => return Err(Violation::new(HEARTBEAT, "null")),
                    (_, Reply::Line(line)) if line == "WAITING" => {
                        if let Some(unheard) = unheard.iter().find(|wait| wait.open.began == Some(place)) {
                            self.waits_for(&unheard.open, &unheard.asked, unheard.is_optional);
                        }
                    }
                    _ => self.heard.push((place, open.clone(), asked.clone(), asked.keys.clone(), reply.clone())),
                }
            }
        }
        let mut heard = std::mem::take(&mut self.heard);
        heard.sort_by_key(|(place, ..)| *place);
        self.told = heard.iter().map(|(_, open, asked, ..)| (open.db, asked.clone())).collect();
        for (place, open, asked, keys, reply) in heard {
            match (asked.command.as_str(), reply) {
                ("acquire" | "macquire", Reply::Integer(token)) => {
                    let is_new =
                        |key: &&Bytes| !self.beliefs.contains_key(&(open.db, (*key).clone(), asked.owner.clone()));
                    let new = keys.iter().filter(is_new).cloned().collect();
                    if asked.new && self.tokens.get(&(token as u64)).is_some_and(|(_, seen)| *seen < place) {
                        return Err(Violation::new(NO_RE_ENTRY, format!("{token} was there before {asked:?}")));
                    }
                    keys.iter().for_each(|key| self.believe(place, &open, &asked, key, token as u64));
                    self.answered.push((asked.owner.clone(), token as u64));
                    let arrival = Arrival::of(place, &open, &asked);
                    self.granted.push((arrival, open.db, Asked { keys: new, ..asked }, keys.len(), token as u64));
                }
                ("renew" | "mrenew", Reply::Integer(token)) => {
                    keys.iter().for_each(|key| self.believe(place, &open, &asked, key, token as u64));
                }
                ("mrenew", Reply::Array(tokens)) => {
                    for (key, token) in keys.iter().zip(tokens) {
                        match token.number() {
                            Some(token) => self.believe(place, &open, &asked, key, token),
                            None => self.moved_no_binding(place, &asked, std::slice::from_ref(key)),
                        }
                    }
                }
                // It was redirected after the replicas had confirmed it: it has bound what it asked for.
                ("acquire" | "macquire" | "renew" | "mrenew", Reply::Error(error))
                    if error.starts_with("MOVED") && asked.replicas > 0 && asked.binds() =>
                {
                    self.silent.push((open.db, asked));
                }
                ("acquire" | "macquire" | "renew" | "mrenew", Reply::Null | Reply::Error(_)) => {
                    self.moved_no_binding(place, &asked, &keys);
                }
                ("release", Reply::Integer(0)) if asked.lease.is_some() => {
                    let hold = (open.db, keys[0].clone(), asked.owner.clone());
                    let ends = open.at + asked.lease.unwrap_or(0);
                    let belief = self.beliefs.get_mut(&hold).filter(|it| it.since < place);
                    belief.into_iter().for_each(|it| (it.promised, it.deadline) = (ends, Some(ends)));
                }
                _ => {}
            }
        }
        let role = self.role_changed();
        let bound_again = std::mem::take(&mut self.bound_again);
        for (session, db, key, owner, token, why) in std::mem::take(&mut self.loosened) {
            let is_bound_again = bound_again.contains(&(session, db, key.clone(), owner.clone(), token));
            let loss = (session, key.clone(), owner.clone(), token);
            self.owed.remove(&loss);
            // Each time, it was bound by another request.
            let times = self.times_unbound.entry((session, key.clone(), owner.clone())).or_default();
            *times += 1;
            let of_hold = self.asked_bindings.iter().filter(|((_, name, who), _)| (name, who) == (&key, &owner));
            if *times > of_hold.filter_map(|(_, askers)| askers.get(&session)).sum() {
                return Err(Violation::new(TOLD, format!("unbound {times} times: {loss:?}")));
            }
            self.unbound.insert(loss, self.place);
            // A later binding is not meant, nor is a later hold.
            let is_raised = |it: u64| it == token || self.fences.contains(&it);
            let is_meant = |it: &Belief| is_raised(it.token) && (why != b"replica" || it.since < role);
            let loosens = |it: &mut Belief| {
                let is_meant = is_meant(it);
                match &mut it.binding {
                    // Its session may have bound it again before it read this; by which of several requests, nobody may know.
                    Some(binding) if binding.client == session && (why == b"taken" || is_meant && is_bound_again) => {
                        binding.is_unsure = true;
                    }
                    Some(binding) if binding.client == session && is_meant => it.binding = None,
                    _ => {}
                }
            };
            self.beliefs.entry((db, key, owner)).and_modify(loosens);
        }
        for (session, said, asked) in std::mem::take(&mut self.sure) {
            self.is_sure(session, &said, asked);
        }
        for (session, db, key, owner, token) in std::mem::take(&mut self.lost) {
            let loss = (session, key.clone(), owner.clone(), token);
            // It names the database in which the loss was, and that may have been swapped since.
            let were_swapped = self.causes.iter().any(|(_, cause)| matches!(cause, Cause::Swapped(..)));
            let by_hand = self.by_hand.iter().any(|(on, it)| *it == key && (*on == db || were_swapped));
            // (A lease that has run out goes on when the clock is set back, and may run out again.)
            let times = self.told_lost.entry(loss.clone()).or_default();
            *times += 1;
            if *times > 1 + self.steps_back && !by_hand {
                return Err(Violation::new(TOLD, format!("told twice: {loss:?}")));
            }
            let is_fenced = |it: u64| self.fences.contains(&it);
            self.owed.retain(|it| *it != loss && !(is_fenced(token) && (&it.1, &it.2) == (&loss.1, &loss.2)));
            if !by_hand && self.given_back.contains(&((db, key.clone(), owner.clone()), token)) {
                return Err(Violation::new(GIVEN_BACK, format!("{loss:?}")));
            }
            let seen = node(|node| truth::read(node, db, &key));
            if !by_hand && let Some(holder) = seen.of(&owner).filter(|holder| holder.token == Some(token)) {
                // A lease that was over before the clock was set back; one that ends as soon as anything may be written.
                // (Removing the expiry by hand brings back what the key still lists.)
                let was_over = match holder.deadline {
                    Some(at) => at < self.set_back,
                    None => self.prolonged.contains(&key),
                };
                let was_over = was_over || self.unfollowed.contains(&(key.clone(), owner.clone(), token));
                if !was_over && node(|node| is_refusing(node) || node.is_paused()) {
                    self.ending.push((db, key.clone(), owner.clone(), token));
                } else if !was_over {
                    return Err(Violation::new(TRUE_LOSS, format!("{loss:?} is still there: {seen:?}")));
                }
            }
            let is_it = |(on, name, who): &Hold| (*on == db || were_swapped) && (name, who) == (&key, &owner);
            self.beliefs.retain(|hold, it| !is_it(hold) || it.token != token);
        }
        Ok(())
    }

    /// Requests, whose answers are not heard yet, that bind the same hold to another connection: later ones, and those that
    /// have to wait, which may be granted later.
    fn bound_later(&self, place: Place, asked: &Asked, key: &[u8]) -> Doubts {
        let binds = |it: &Asked| it.binds() && it.client != asked.client && it.concerns(key, &asked.owner);
        let may_be_later = |at: Place, it: &Asked| at > place || at < place && it.wait.is_some();
        let later = self.undecided().filter(|(at, _, it)| may_be_later(*at, it) && binds(it));
        // A wait may be that of an earlier request like it, and of the last.
        let repeated = self.waits.iter().filter(|wait| wait.latest > place && binds(&wait.asked));
        let repeated = repeated.map(|wait| (wait.latest, Doubt::of(&wait.asked, wait.open.at)));
        later.map(|(at, open, it)| (at, Doubt::of(it, open.at))).chain(repeated).collect()
    }

    /// Whether another connection was told in this turn of a request that waited: it may have been granted after this one,
    /// though it was asked before.
    fn is_bound_with(&self, asked: &Asked, key: &[u8]) -> bool {
        let binds = |it: &Asked| it.binds() && it.client != asked.client && it.concerns(key, &asked.owner);
        self.told.iter().any(|(_, it)| it.wait.is_some() && binds(it))
    }

    /// Requests that have begun, and of which nobody has heard yet what became of them; and where they began.
    fn undecided(&self) -> impl Iterator<Item = (Place, &Open, &Asked)> {
        let open = self.connections.values().flat_map(|it| &it.open);
        let open = open.filter_map(|open| Some((open.began?, open)));
        let open = open.flat_map(|(at, open)| (at..).zip(&open.runs).map(move |(at, asked)| (at, open, asked)));
        let waits = self.waits.iter().chain(&self.unheard);
        open.chain(waits.map(|wait| (wait.open.began.unwrap_or(0), &wait.open, &wait.asked)))
    }

    /// In which database a hold is that was asked for then in this one: they may have been swapped since.
    fn db_of(&self, (asked, db): (Place, i32), key: &[u8], owner: &[u8], token: u64) -> i32 {
        let is_there = |db: &i32| {
            let seen = node(|node| truth::read(node, *db, key));
            let is_it = |it: u64| it == token || self.fences.contains(&it);
            seen.of(owner).and_then(|holder| holder.token).is_some_and(is_it)
        };
        let later = |(at, _): &&(Place, Cause)| *at > asked;
        let other = |(_, cause): &(Place, Cause)| match cause {
            Cause::Swapped(one, two) if *one == db => Some(*two),
            Cause::Swapped(one, two) if *two == db => Some(*one),
            _ => None,
        };
        let mut others =
            self.causes.iter().filter(later).filter_map(other).filter(|other| !is_there(&db) && is_there(other));
        others.next().unwrap_or(db)
    }

    /// How long a request lasts at least that names no lease: a renewal by the lease of what binds the hold, as far as anybody
    /// can say.
    fn default_lease(&self, hold: &Hold, asked: &Asked) -> u64 {
        let binding = self.beliefs.get(hold).and_then(Belief::binding);
        match binding {
            Some(binding) if asked.command.contains("renew") && binding.is_unsure => 0,
            Some(binding) if asked.command.contains("renew") => binding.lease.min(30_000),
            _ => 30_000,
        }
    }

    /// An owner believes from now on that it holds.
    fn believe(&mut self, place: Place, open: &Open, asked: &Asked, key: &[u8], token: u64) {
        let hold = (self.db_of((place, open.db), key, &asked.owner, token), key.to_vec(), asked.owner.clone());
        // Old news of a hold that was seen to have ended since. (What had to wait was granted later than it was asked; but never
        // under the token of a hold that had ended by then.)
        let is_old = |(ended, of): &(Place, u64)| *ended > place && (asked.wait.is_none() || *of == token);
        if self.ended.get(&hold).is_some_and(is_old) {
            return;
        }
        let ends = open.at + asked.lease.unwrap_or_else(|| self.default_lease(&hold, asked));
        if let Some(newer) = self.beliefs.get_mut(&hold).filter(|it| it.token > token) {
            // Old news of a hold that has ended since; or of this one, bound before its token was raised.
            let was_unbound = newer.binding.is_none_or(|binding| binding.at < place);
            if was_unbound && asked.binds() && self.fences.contains(&newer.token) {
                let heard = self.place;
                newer.binding = Some(Binding { is_unsure: true, ..Binding::of(asked, (place, heard), ends) });
            }
            return;
        }
        let is_raised = |it: &&Belief| it.token == token || asked.fence == Some(token);
        let is_again = |_: &&Belief| self.set_back > 0;
        let known = self.beliefs.get(&hold).or_else(|| self.run_out.get(&hold).filter(is_again));
        let mut before = known.filter(is_raised).cloned();
        if let Some(before) = &mut before {
            let since = before.since;
            let since = |(at, _): &&(Place, Cause)| *at > since;
            let later = self.causes.iter().rev().take_while(since).chain(self.lasting.iter().rev().take_while(since));
            let later = later.filter(|(at, _)| *at < place);
            // (In any database, if they were swapped since.)
            let later: Vec<&Cause> = later.map(|(_, cause)| cause).collect();
            let were_swapped = later.iter().any(|cause| matches!(cause, Cause::Swapped(..)));
            let here = |db: i32| db == open.db || were_swapped;
            let shortens = |cause: &&Cause| match cause {
                Cause::Own(by, db, _) => here(*db) && by.concerns(key, &asked.owner),
                Cause::Touched(db, touched, _) | Cause::Prolonged(db, touched) => here(*db) && touched == key,
                _ => false,
            };
            if later.iter().any(shortens) {
                (before.promised, before.deadline) = (0, None);
                // Replicas may have confirmed what it was in between.
                let shortest = |cause: &&&Cause| match cause {
                    Cause::Own(by, _, at) if by.command.contains("renew") => Some(at + by.lease.unwrap_or(30_000)),
                    Cause::Own(by, _, at) => Some(at + by.lease?),
                    _ => Some(0),
                };
                let shortest = later.iter().filter(|cause| shortens(cause)).filter_map(|it| shortest(&it)).min();
                if let Some(Binding { confirmed: Some(confirmed), .. }) = &mut before.binding {
                    *confirmed = shortest.map_or(*confirmed, |shortest| shortest.min(*confirmed));
                }
            }
        }
        if let Some(before) = before.as_mut().filter(|before| before.token != token) {
            // If others have written the key since, it may be another hold whose token was raised, and bound to nobody.
            let by_hand = |(at, cause): &(Place, Cause)| match cause {
                Cause::Touched(_, touched, expired) => *at > before.since && touched == key && !expired,
                _ => false,
            };
            let is_another = self.causes.iter().any(by_hand);
            // So it may be if it ended, and a request that nobody heard the answer of has asked for the lock anew.
            let ends = |cause: &Cause| match cause {
                Cause::Forced(_, ended) | Cause::Touched(_, ended, _) => ended == key,
                Cause::Flushed(_) => true,
                Cause::Own(by, ..) => !by.command.contains("renew") && by.concerns(key, &asked.owner),
                _ => false,
            };
            let ended = self.causes.iter().chain(&self.lasting).filter(|(at, it)| *at > before.since && ends(it));
            let ended = ended.map(|(at, _)| *at).min();
            let acquires = |it: &Asked| it.command.ends_with("acquire") && it.concerns(key, &asked.owner);
            let is_asked_anew = ended.is_some_and(|ended| {
                self.undecided().any(|(at, _, it)| at > ended && acquires(it))
                    || self.silent.iter().any(|(_, it)| acquires(it))
            });
            before.binding.iter_mut().for_each(|binding| binding.is_unsure |= is_another || is_asked_anew);
        }
        if before.is_some() {
            self.renewed.insert(asked.owner.clone());
        }
        let lease = asked.lease.unwrap_or(30_000);
        let renews = asked.command.contains("renew");
        let promised = match &before {
            // It was asked before what was told already: what it promised is that no more.
            Some(before) if before.since > place => before.promised,
            Some(before) if !renews || asked.lease.is_none() => before.promised.max(ends),
            _ => ends,
        };
        let bound = asked.binds() || asked.is_unsure;
        // Bindings end when the role changes, and it may have been granted afterwards.
        // A request of another connection whose answer is not heard yet may have moved it.
        let is_unsure = asked.is_unsure || self.role_changed() > place || self.is_bound_with(asked, key);
        let mut doubts = self.bound_later(place, asked, key);
        let binding = Binding { is_unsure, ..Binding::of(asked, (place, self.place), ends) };
        // A token that another request has raised: it is the same hold, unless that has ended unseen.
        let is_raised_since = |it: &&Belief| before.is_none() && it.token < token && self.fences.contains(&token);
        let binding_before = self.beliefs.get(&hold).filter(is_raised_since).and_then(|it| it.binding);
        let binding_before = binding_before.map(|binding| Binding { is_unsure: true, ..binding });
        let old_binding = before.as_ref().and_then(|it| it.binding).or(binding_before);
        let mut raises = before.as_mut().map_or_else(Vec::new, |it| std::mem::take(&mut it.raises));
        // To which count one was raised that had to wait depends on when that was.
        if !renews && !asked.is_unsure && (asked.holds.is_none() || asked.wait.is_none()) {
            raises.push((place, asked.holds));
            raises.sort_by_key(|(place, _)| *place);
        }
        let since = place.max(before.as_ref().map_or(0, |it| it.since));
        let limit = before.as_ref().map_or(u32::MAX, |it| it.limit).min(if renews { u32::MAX } else { asked.limit });
        let known = before.as_ref().and_then(|it| it.deadline);
        let sets = renews && asked.lease.is_some();
        let deadline = if sets { Some(ends) } else { Some(known.map_or(ends, |known| known.max(ends))) };
        // (A binding of a request that had to wait, and was heard of afterwards, may have been made after that.)
        let has_ended = |old: &Binding| {
            let role = self.role_changed();
            (old.at..place).contains(&role) && !(old.is_unsure && old.heard > role)
        };
        let same = old_binding.filter(|old| old.client == binding.client && !has_ended(old));
        let both = |old: Binding| {
            let (watchdog, ephemeral) = (binding.watchdog || old.watchdog, binding.ephemeral || old.ephemeral);
            // Whether it had a flag is not known any better for a request that does not name it.
            let keeps = old.watchdog && !binding.watchdog || old.ephemeral && !binding.ephemeral;
            let is_unsure = binding.is_unsure || old.is_unsure && keeps;
            Binding { watchdog, ephemeral, is_unsure, ..binding }
        };
        let flagless = !asked.watchdog && !asked.ephemeral;
        // (What had to wait may have been granted before another lease was asked for.)
        let is_older = |old: &Binding| asked.wait.is_some() && old.at > place && old.lease != lease;
        let both = |old: Binding| {
            let both = both(old);
            Binding {
                lease: if flagless { old.lease } else { lease },
                is_unsure: both.is_unsure || is_older(&old),
                ..both
            }
        };
        let shortened = |old: Binding| Binding { confirmed: old.confirmed.map(|at| at.min(ends)), ..old };
        let waited = self.told.iter().any(|(_, it)| it.wait.is_some() && it.binds() && it.concerns(key, &asked.owner));
        let binding =
            Binding { is_unsure: is_unsure || waited && old_binding.is_some_and(|old| old.is_unsure), ..binding };
        let binding = match old_binding {
            _ if asked.unbind => None,
            _ if !bound => old_binding.map(shortened),
            // A request without flags leaves the binding of its session as it is.
            Some(old) if same.is_some() && flagless && asked.replicas == 0 => Some(shortened(old)),
            // (What had to wait may have been granted behind what was asked for later.)
            Some(old) if old.at > place && old.client != binding.client => {
                Some(Binding { is_unsure: old.is_unsure || asked.wait.is_some(), ..old })
            }
            _ => Some(same.map_or(binding, both)),
        };
        // Old news of a hold that has ended since. (What had to wait may be newer than what was asked for later.)
        let is_news = self.newest.get(&hold).is_none_or(|it| it.at <= place || it.token < token);
        if !is_news && !self.beliefs.contains_key(&hold) {
            return;
        }
        if is_news {
            self.newest.insert(hold.clone(), Told { token, at: place });
        }
        let of_binding = (asked.client, key.to_vec(), asked.owner.clone(), token);
        if self.unbound.get(&of_binding).is_some_and(|at| *at <= place) {
            self.unbound.remove(&of_binding);
        }
        doubts.extend(self.beliefs.get(&hold).into_iter().flat_map(|it| it.doubts.clone()));
        // One without flags leaves a binding of its session as it is, also one that the judge can't be sure of.
        let is_its = |doubt: &&Doubt| {
            binding.is_some_and(|binding| binding.client == doubt.client && !binding.watchdog && !binding.ephemeral)
        };
        let confirmed =
            doubts.values().filter(is_its).find_map(|doubt| doubt.confirmed).filter(|_| asked.replicas == 0);
        let binding = match confirmed {
            Some(confirmed) => {
                binding.map(|binding| Binding { confirmed: Some(confirmed), is_unsure: true, ..binding })
            }
            None => binding,
        };
        // What its owner asked for before this was heard may have shortened it, and counts until replicas confirm something later.
        let shortens = |(later, cause): &(Place, Cause)| match cause {
            Cause::Own(by, _, at) if *later > place && by.concerns(key, &asked.owner) => {
                Some(at + by.lease.or_else(|| by.command.contains("renew").then_some(30_000))?)
            }
            _ => None,
        };
        let shortest = self.causes.iter().chain(&self.lasting).filter_map(shortens).min();
        let binding = binding.map(|binding| Binding {
            confirmed: binding.confirmed.map(|at| shortest.map_or(at, |it| it.min(at))),
            ..binding
        });
        doubts.retain(|at, doubt| *at != place && binding.is_some_and(|binding| binding.client != doubt.client));
        // Of a request that has asked for replicas, they have what it was given; of others, only what they had before.
        let known = before.as_ref().and_then(|it| it.known).filter(|_| asked.replicas == 0);
        let seen = place;
        let renewed = before.as_ref().map_or(0, |it| it.renewed).max(if bound { open.at } else { 0 });
        // Whatever it was said to move in the other of two databases that were swapped, it has moved here.
        self.moved_no_binding(place, asked, std::slice::from_ref(&hold.1));
        self.beliefs.insert(
            hold,
            Belief {
                token,
                since,
                seen,
                promised,
                deadline,
                renewed,
                limit,
                raises,
                binding,
                known,
                follows: None,
                has_stepped: before.as_ref().is_some_and(|it| it.has_stepped),
                doubts,
            },
        );
    }

    /// The turn is over: all rules but those for a calm.
    pub fn after_turn(&mut self) -> Result<(), Violation> {
        let errors: Vec<&str> = internal_errors::kinds().collect();
        if !errors.is_empty() {
            return Err(Violation::new(INTERNAL, errors.join("; ")));
        }
        let is_idle = self.requests == 0 && node(|node| node.writes == 0 && node.log.is_empty());
        if is_idle && self.spoken.is_empty() {
            self.slept_at = node(|node| node.clock.mono);
            return self.bounded();
        }
        self.slept_at = node(|node| node.clock.mono);
        self.note();
        self.take_in()?;
        for client in std::mem::take(&mut self.gone) {
            let left = self.waits.iter().filter(|wait| wait.asked.client == client);
            self.silent.extend(left.map(|wait| (wait.open.db, wait.asked.clone())));
            self.waits.retain(|wait| wait.asked.client != client);
            let open = self.connections.remove(&client).map(|it| it.open).unwrap_or_default();
            let begun = open.iter().filter(|open| open.began.is_some());
            self.silent.extend(begun.flat_map(|open| open.runs.iter().map(|asked| (open.db, asked.clone()))));
        }
        let (began, was_refusing) = self.before;
        let now = node(|node| node.clock.mono);
        let is_long = now - began > 5_000;
        self.is_disturbed |= is_long;
        if is_long || self.requests > 0 {
            self.busy_until = self.busy_until.max(now);
        }
        self.written_while_refused(was_refusing)?;
        self.kept()?;
        self.within_limits()?;
        self.in_order()?;
        self.tokens_grow()?;
        self.within_rights()?;
        self.asked_now.clear();
        // Those that were told and gone again within a turn.
        for (owner, token) in std::mem::take(&mut self.answered) {
            self.tokens.entry(token).or_insert((owner, self.place));
        }
        self.copied()?;
        self.bounded()?;
        self.told_who_waits()?;
        books_agree()
    }

    /// Nobody waits for a lock whose holder has yet to be told so.
    fn told_who_waits(&self) -> Result<(), Violation> {
        if self.has_swapped {
            return Ok(());
        }
        let untold = state::with(|state| {
            let is_untold = |key: &&crate::lock::LockKey| state.bindings.asks(key.db, &key.name);
            state.queue.iter().flat_map(|waiter| waiter.keys.iter()).find(is_untold).cloned()
        });
        untold.map_or(Ok(()), |key| Err(Violation::new(CONTENTION, format!("somebody waits for {key:?}"))))
    }

    /// A request that was refused has moved no binding of these keys.
    fn moved_no_binding(&mut self, place: Place, asked: &Asked, keys: &[Bytes]) {
        for ((_, key, owner), belief) in &mut self.beliefs {
            if asked.owner == *owner && keys.contains(key) {
                belief.doubts.remove(&place);
            }
        }
    }

    fn kept(&mut self) -> Result<(), Violation> {
        let (role, now, mono) = node(|node| (node.role, node.millis(), node.clock.mono));
        let confirms = mono <= self.confirms_at;
        let (mut ended, mut run_out) = (Vec::new(), Vec::new());
        let undecided = self.undecided().filter(|(_, _, it)| it.replicas > 0 || it.ephemeral);
        let undecided = undecided.map(|(at, open, it)| (at, open.at, it.clone()));
        let undecided: Vec<(Place, u64, Asked)> = undecided.collect();
        let unheard: Vec<Asked> = self.undecided().map(|(.., asked)| asked.clone()).filter(Asked::binds).collect();
        let is_still = node(|node| is_refusing(node) || node.is_paused()) || self.before.1;
        let lags = |(db, key, owner): &Hold| {
            state::with(|state| {
                let is_bound = state.bindings.client_of(*db, key, owner).is_some();
                state.bindings.lags_of(*db, key, owner) || is_bound && state.seems_stepped(Now::read())
            })
        };
        for (hold, belief) in &mut self.beliefs {
            let (db, key, owner) = hold;
            let bound = belief.binding();
            let seen = node(|node| truth::read(node, *db, key));
            let (since, last) = (belief.since, belief.seen);
            let causes = || {
                let at_once = self.causes.iter().rev().take_while(move |(place, _)| *place > last);
                let later = self.lasting.iter().rev().take_while(move |(place, _)| *place > since);
                at_once.chain(later)
            };
            // A greater token is that of a request that is yet to be answered: which is of another hold, unless `FENCE` has named
            // it. What its lease has ended by then is over, and must not take the deadline of the other one for its own.
            let was_over = belief.deadline.is_some_and(|at| at < now);
            let is_its = |token: u64| {
                token == belief.token || token > belief.token && (!was_over || self.fences.contains(&token))
            };
            let holder = seen.of(owner).filter(|holder| holder.token.is_none_or(is_its));
            // Of an expiry that was changed by hand, replicas may have confirmed any value that it had in between.
            let may_be_any = self.prolonged.contains(key);
            // A bound hold with REPLICAS ends by what they have confirmed, whatever was written since.
            // (So does one that a request has bound whose answer is not heard yet: no earlier than it asked for, nor than
            // was promised before.)
            let has_bound = |(began, at, it): &(Place, u64, Asked)| {
                let promised = if since < *began { belief.promised } else { 0 };
                let confirmed = promised.max(at + it.lease.unwrap_or(30_000));
                // (What its owner asked for since may have shortened it, and counts until they confirm something later.)
                let shortens = |(place, cause): &(Place, Cause)| match cause {
                    Cause::Own(by, on, at) if place > began && on == db && by.concerns(key, owner) => {
                        Some(at + by.lease.or_else(|| by.command.contains("renew").then_some(30_000))?)
                    }
                    _ => None,
                };
                let shortest = self.causes.iter().chain(&self.lasting).filter_map(shortens).min();
                let confirmed = shortest.map_or(confirmed, |at| at.min(confirmed));
                it.replicas > 0 && it.binds() && it.concerns(key, owner) && (confirmed < now || may_be_any)
            };
            // (Or one that may have been answered as another like it.)
            let may_have_bound = |(began, doubt): (&Place, &Doubt)| {
                let promised = if since < *began { belief.promised } else { 0 };
                doubt.confirmed.is_some_and(|at| promised.max(at) < now || may_be_any)
            };
            let is_unconfirmed =
                belief.binding.is_some_and(|binding| binding.confirmed.is_some_and(|at| at < now || may_be_any))
                    || undecided.iter().any(has_bound)
                    || belief.doubts.iter().any(may_have_bound);
            // An expiry that was changed in this turn may be over already.
            let prolongs = |(_, cause): &(Place, Cause)| match cause {
                Cause::Prolonged(on, prolonged) => on == db && prolonged == key,
                _ => false,
            };
            let is_over = belief.deadline.is_some_and(|at| at < now) || is_unconfirmed || causes().any(prolongs);
            let has_asked = |client: u64| {
                let of_hold = self.asked_bindings.iter().filter(|((_, name, who), _)| (name, who) == (key, owner));
                of_hold.flat_map(|(_, askers)| askers.keys()).any(|asker| *asker == client)
            };
            // What others have written is not counted; nor in which database each gave back, if they were swapped.
            let counts = !self.by_hand.iter().any(|(_, it)| it == key);
            let least = || {
                let all = self.causes.iter().chain(&self.lasting);
                if counts {
                    holds_at_least(&belief.raises, all.filter(|(_, cause)| cause.releases(key, owner)))
                } else {
                    0
                }
            };
            let gone = |(_, cause): &&(Place, Cause)| match cause {
                Cause::Own(asked, on, _) => {
                    // Of what it was told of, each hold is released by itself; a renewal may have shortened the lease,
                    // and so may a release that names one.
                    let shortens = !asked.command.ends_with("release") || asked.lease.is_some();
                    let gives_all = shortens || least() == 0;
                    // One that was raised goes by its old name, too.
                    let is_named =
                        |token: u64| token == belief.token || self.fences.iter().any(|fence| *fence >= token);
                    on == db && asked.concerns(key, owner) && asked.token.is_none_or(is_named) && gives_all
                }
                Cause::Forced(on, forced) => on == db && forced == key,
                Cause::Touched(on, touched, expired) => on == db && touched == key && (!expired || is_over),
                Cause::Prolonged(..) => false,
                Cause::Flushed(on) => on.is_none_or(|on| on == *db),
                Cause::Swapped(one, other) => one == db || other == db,
                Cause::Gone(client) => {
                    let ends = |binding: Binding| {
                        binding.is_unsure && has_asked(*client) || binding.ephemeral && binding.client == *client
                    };
                    let by_hand = self.by_hand.contains(&(*db, key.clone()));
                    // By a request whose answer nobody heard, its owner may have bound it to that connection.
                    let silent = self.silent.iter().map(|(_, asked)| asked);
                    let unheard = silent
                        .chain(undecided.iter().map(|(.., asked)| asked))
                        .any(|asked| asked.ephemeral && asked.client == *client && asked.concerns(key, owner));
                    by_hand || unheard || bound.is_some_and(ends)
                }
                Cause::Role => true,
            };
            if let Some(holder) = holder.filter(|it| it.token == Some(belief.token))
                && holder.holds < belief.raises.iter().map(|(_, to)| to.unwrap_or(1)).sum()
                && holder.holds < least()
            {
                let what = format!("{}: {} of {} holds", show(hold), holder.holds, least());
                return Err(Violation::new(COUNTED, what));
            }
            if let Some(holder) = holder.filter(|it| it.holds > 1 && counts) {
                let (ones, most) = self.asked_for.get(&(key.clone(), owner.clone())).copied().unwrap_or_default();
                if holder.holds > ones + most {
                    return Err(Violation::new(ASKED_FOR, format!("{}: {} holds", show(hold), holder.holds)));
                }
            }
            if let Some(holder) = holder {
                let owns = |(_, cause): &(Place, Cause)| match cause {
                    Cause::Own(asked, on, _) => on == db && asked.concerns(key, owner),
                    Cause::Touched(on, touched, _) | Cause::Prolonged(on, touched) => on == db && touched == key,
                    Cause::Flushed(_) | Cause::Swapped(..) | Cause::Role => true,
                    Cause::Forced(..) | Cause::Gone(_) => false,
                };
                // A renewal that has raised the token has ended nothing, whether or not its reply is read.
                let raises = |cause: &Cause| match cause {
                    Cause::Own(by, ..) => by.fence.is_some() && by.fence == holder.token,
                    _ => false,
                };
                let raised = causes().filter(|(_, cause)| raises(cause)).map(|(at, _)| *at).min();
                let is_before = |at: Place| raised.is_none_or(|raised| at < raised);
                let mut ends = causes().filter(gone).filter(|(at, cause)| is_before(*at) && !raises(cause));
                if holder.token.is_some_and(|token| token > belief.token) && ends.next().is_some() {
                    ended.push(hold.clone());
                    continue;
                }
                // (One that is over by now is ended as soon as anything may be written.)
                let lags = lags(hold) || belief.follows.is_some_and(|at| is_still || at < now);
                if let Some(at) = holder.deadline.filter(|at| *at < belief.promised && !lags) {
                    if !causes().any(owns) {
                        let what = format!("{}: until {at}, promised {}", show(hold), belief.promised);
                        let rule = if belief.has_stepped { STEPPED } else { LEASE };
                        return Err(Violation::new(rule, what));
                    }
                    belief.promised = at;
                }
                if let Some(at) = belief.follows.take_if(|_| !lags)
                    && holder.deadline.is_some_and(|later| later > at)
                    && bound.is_some_and(|binding| !binding.watchdog && !binding.is_unsure)
                    && !causes().any(owns)
                    && !may_be_any
                    && !self.is_rough
                    && !self.asked_since.iter().any(|asked| asked.concerns(key, owner))
                {
                    let what = format!("{}: until {:?}, and not {at}", show(hold), holder.deadline);
                    return Err(Violation::new(STEPPED, what));
                }
                if lags {
                    continue;
                }
                // The key of one whose grant was heard only after a step may not have followed before its lease was over. Then it
                // is bound no more, and ends as soon as anything may be written, whatever its key says.
                let heard_late = |binding: Binding| {
                    (binding.at..binding.heard).contains(&self.stepped_at)
                        && self.connections.contains_key(&binding.client)
                };
                let is_bound = || state::with(|state| state.bindings.client_of(*db, key, owner).is_some());
                if !bound.is_some_and(heard_late) || is_bound() {
                    belief.deadline = holder.deadline;
                }
                if confirms || belief.known.is_none() {
                    belief.known = Some(belief.known.unwrap_or(0).max(holder.deadline.unwrap_or(u64::MAX)));
                }
                // A request that nobody has heard the answer of may have given it a shorter lease.
                let shortest = |binding: Binding| {
                    let asked =
                        self.silent.iter().map(|(_, asked)| asked).filter(|asked| asked.binds()).chain(&unheard);
                    let asked = asked.filter(|asked| asked.client == binding.client && asked.concerns(key, owner));
                    asked.map(|asked| asked.lease.unwrap_or(30_000)).chain([binding.lease]).min()
                };
                let lease = belief.binding.and_then(shortest).unwrap_or(0);
                let renewed = holder.deadline.unwrap_or(0).saturating_sub(lease);
                belief.renewed = belief.renewed.max(renewed.min(now));
                if let Some(Binding { confirmed: Some(confirmed), .. }) = &mut belief.binding {
                    *confirmed = (*confirmed).min(holder.deadline.unwrap_or(u64::MAX));
                }
                // What was written by hand may not be known again.
                if holder.token == Some(belief.token) && !self.by_hand.contains(&(*db, key.clone())) {
                    belief.seen = self.place;
                }
                continue;
            }
            let found: Vec<&Cause> = causes().filter(gone).map(|(_, cause)| cause).collect();
            // Where nothing may be written, its key can't follow the clock yet.
            if lags(hold) {
                continue;
            }
            // What another node may serve is not written anew here, and what others have written is left as it is.
            let may_be_left = node(|node| node.slots.is_some()) || may_be_any;
            if found.is_empty() && belief.has_stepped && may_be_left {
                ended.push(hold.clone());
                continue;
            }
            if found.is_empty() && !is_over {
                let what = format!("{} under {}: {seen:?}", show(hold), belief.token);
                let rule = if belief.has_stepped { STEPPED } else { KEPT };
                return Err(Violation::new(rule, what));
            }
            // Where replicas have confirmed promptly for a lease, each renewal counts.
            let is_confirmed_in_time =
                |binding: Binding| binding.lease >= 400 && mono > self.slow_at + (binding.lease + CALM) * 1000;
            let watched = bound.filter(|binding| {
                let is_connected =
                    binding.watchdog && !binding.is_unsure && self.connections.contains_key(&binding.client);
                is_connected && (binding.confirmed.is_none() || is_confirmed_in_time(*binding))
            });
            // What a session holds is renewed only if it has read since the last renewal, and in time.
            let was_due = |binding: Binding| {
                let reader = self.connections.get(&binding.client).filter(|it| it.read_place > binding.heard);
                let read_at = reader.map_or(0, |it| it.read_at);
                let end = belief.deadline.unwrap_or(u64::MAX);
                // (A request of its own that waits for replicas binds it anew when they have confirmed, which nobody has heard yet.)
                let bindings_anew =
                    |it: &Asked| it.replicas > 0 && it.client == binding.client && it.concerns(key, owner);
                let is_known = !unheard.iter().any(bindings_anew);
                !binding.of_session || is_known && read_at > belief.renewed + 2 && read_at + 5 < end
            };
            // (What this node does not serve, it does not renew.)
            let is_served =
                |node: &mut Node| node.slots.as_ref().is_none_or(|slots| slots.refusal(slot_of(key), false).is_none());
            let is_left_alone = !self.is_disturbed && !self.prolonged.contains(key) && node(is_served);
            let by_its_lease = found.iter().all(|cause| matches!(cause, Cause::Touched(.., true)));
            if by_its_lease && watched.is_some_and(was_due) && is_left_alone {
                return Err(Violation::new(WATCHED, format!("{} ended by its lease", show(hold))));
            }
            if is_over {
                run_out.push(hold.clone());
            }
            let gives_back = |cause: &&Cause| match cause {
                Cause::Own(asked, ..) => asked.lease.is_none(),
                _ => false,
            };
            // (Of what had run out before the clock was set back, its session was told the loss then, and may read it later.)
            let had_run_out = self.run_out.get(hold).is_some_and(|it| it.token == belief.token);
            if !found.is_empty() && !is_over && !had_run_out && found.iter().all(gives_back) {
                self.given_back.insert((hold.clone(), belief.token));
            }
            let others_end =
                found.iter().all(|cause| matches!(cause, Cause::Forced(..) | Cause::Touched(..) | Cause::Flushed(_)));
            if let Some(binding) = bound.filter(|binding| !binding.is_unsure)
                && others_end
                && role == Role::Master
                // (What another node serves is unbound, and not lost.)
                && !node(|node| node.slots.as_ref().is_some_and(|slots| slots.elsewhere.contains(&slot_of(key))))
                && self.connections.get(&binding.client).is_some_and(|it| it.was_session && !it.has_vanished)
            {
                let loss = (binding.client, key.clone(), owner.clone(), belief.token);
                // A request whose answer is not heard yet may have bound it to another connection.
                let silent = self.silent.iter().map(|(_, asked)| asked).filter(|asked| asked.binds());
                let is_sure = !silent.chain(&unheard).any(|asked| asked.concerns(key, owner));
                if is_sure && !self.told_lost.contains_key(&loss) && !self.unbound.contains_key(&loss) {
                    self.owed.insert(loss);
                }
            }
            ended.push(hold.clone());
        }
        let run_out = run_out.into_iter().filter_map(|hold| Some((hold.clone(), self.beliefs.get(&hold)?.clone())));
        self.run_out.extend(run_out);
        for hold in ended {
            let belief = self.beliefs.remove(&hold);
            if let Some(Belief { token, .. }) = belief
                && node(|node| truth::read(node, hold.0, &hold.1)).of(&hold.2).is_none()
            {
                self.ended.insert(hold, (self.place, token));
            }
        }
        self.connections.values_mut().for_each(|it| it.was_session = it.is_session);
        Ok(())
    }

    fn within_limits(&self) -> Result<(), Violation> {
        let mut locks: BTreeMap<(i32, &Bytes), Vec<(&Bytes, &Belief)>> = BTreeMap::new();
        for ((db, key, owner), belief) in &self.beliefs {
            locks.entry((*db, key)).or_default().push((owner, belief));
        }
        for ((db, key), holders) in locks {
            let limit = holders.iter().map(|(_, it)| it.limit).min().unwrap_or(u32::MAX);
            if holders.len() > limit as usize && !self.by_hand.contains(&(db, key.clone())) {
                let owners: Vec<String> = holders.iter().map(|(owner, _)| owner.escape_ascii().to_string()).collect();
                return Err(Violation::new(LIMIT, format!("{} is held by {owners:?}", key.escape_ascii())));
            }
        }
        Ok(())
    }

    fn in_order(&mut self) -> Result<(), Violation> {
        let granted = std::mem::take(&mut self.granted);
        if granted.is_empty() {
            return Ok(());
        }
        let waiting = self.waiting();
        let mut first: BTreeMap<u64, Place> = BTreeMap::new();
        for (Arrival { place, .. }, .., token) in &granted {
            first.entry(*token).and_modify(|it| *it = (*it).min(*place)).or_insert(*place);
        }
        let claimed = granted.iter().filter(|(arrival, ..)| arrival.claimed.is_some());
        let claims: BTreeSet<u64> = claimed.map(|(.., token)| *token).collect();
        for (arrival, db, asked, several, token) in granted {
            let place = arrival.place;
            // Some of several that the owner had already make a re-entry of the whole.
            if asked.keys.len() < several {
                continue;
            }
            // A token that was seen in an earlier turn is a re-entry's, or that of a grant which was judged then.
            // Of those of this turn, the first under a token was the grant.
            // (Which of several that was, nobody can say if one of them has waited elsewhere.)
            // One that `FENCE` named is a re-entry's, too.
            let is_known = self.tokens.contains_key(&token) || self.fences.contains(&token);
            let is_new = !is_known && first.get(&token) == Some(&place);
            let is_new = is_new && (arrival.claimed.is_some() || !claims.contains(&token));
            // A grant to the same owner whose event is not read yet makes it a re-entry.
            let again = |wait: &Wait| {
                wait.asked.owner == asked.owner && wait.asked.keys.iter().any(|key| asked.keys.contains(key))
            };
            // So does a request of the same owner that is granted and not answered yet.
            let owners = |it: &Asked| it.owner == asked.owner && it.keys.iter().any(|key| asked.keys.contains(key));
            let mut open = self.connections.values().flat_map(|it| it.open.iter());
            if self.silent.iter().any(|(on, asked)| *on == db && owners(asked)) {
                continue;
            }
            if open.any(|open| open.began.is_some_and(|at| at < place) && open.runs.iter().any(owners)) {
                continue;
            }
            // In any database: they may have been swapped since.
            let by_hand = |key: &Bytes| self.by_hand.iter().any(|(_, it)| it == key);
            if self.waits.iter().any(again) || asked.keys.iter().any(by_hand) {
                continue;
            }
            // One that took over the place of an earlier one stands there.
            let of_key = |key: &Bytes| self.asked_again.contains(&(db, key.clone(), asked.owner.clone()));
            if asked.keys.iter().any(of_key) {
                continue;
            }
            // What ended in the turn in which it was granted may have been told later.
            let held = |key: &Bytes| node(|node| truth::read(node, db, key).of(&asked.owner)?.token);
            let is_there = |key: &Bytes| held(key) == Some(token);
            let is_of_now = place > self.turn || asked.keys.iter().any(is_there);
            let turn = if is_of_now { self.turn } else { 0 };
            for (_, on, waits) in waiting.iter().filter(|(other, ..)| is_new && other.is_before(arrival, turn)) {
                let common = waits.keys.iter().any(|key| asked.keys.contains(key));
                if *on == db && common && waits.owner != asked.owner {
                    return Err(Violation::new(ORDER, format!("{asked:?} before {waits:?}")));
                }
            }
        }
        Ok(())
    }

    /// Requests that stand in the queue, with the place at which each began, under the limit that it has there.
    fn waiting(&self) -> Vec<(Arrival, i32, Asked)> {
        type Queued = (u64, bool, Bytes, i32, Vec<Bytes>);
        let queued: BTreeMap<Queued, u32> = state::with(|state| {
            let one = |waiter: &crate::lock::Waiter<state::Asker>| {
                let keys = waiter.keys.iter().map(|key| key.name.to_vec()).collect();
                let limit = match waiter.demand.limit.number() {
                    0 => u32::MAX,
                    limit => limit,
                };
                let of_session = waiter.asker.on_behalf == OnBehalf::Session;
                ((waiter.asker.client, of_session, waiter.owner.to_vec(), waiter.keys[0].db, keys), limit)
            };
            state.queue.iter().map(one).collect()
        });
        // Of a request that was repeated, and whose asker has not heard of it, nobody can say which one is in the queue.
        let is_like = |one: &Asked, other: &Asked| {
            (one.client, &one.owner, &one.keys) == (other.client, &other.owner, &other.keys)
        };
        let is_sure = |wait: &&Wait| !self.unheard.iter().any(|other| is_like(&wait.asked, &other.asked));
        // Of several like it, nobody can say when the one that stands in the queue arrived: not before the last of them.
        let is_clear = |wait: &Wait| wait.repeats == 0 && !wait.is_optional;
        let of_session = |wait: &Wait| match is_clear(wait) {
            true => Some(Arrival::of(wait.latest, &wait.open, &wait.asked)),
            false if wait.asked.waited == 0 => {
                Some(Arrival { place: wait.latest, claimed: None, steady: u64::MAX - DAY })
            }
            false => None,
        };
        let sessions = self.waits.iter().filter(is_sure);
        let sessions = sessions.filter_map(|wait| Some((of_session(wait)?, &wait.open, &wait.asked)));
        let last = |it: &'_ Connection| it.open.iter().rfind(|open| open.began.is_some()).cloned();
        let here = self.connections.values().filter(|it| !it.has_vanished);
        let blocked: Vec<Open> = here.filter_map(last).filter(|open| !open.is_exec).collect();
        let blocked = blocked.iter().filter_map(|open| {
            let asked = open.runs.first().filter(|asked| !asked.of_session)?;
            Some((Arrival::of(open.began?, open, asked), open, asked))
        });
        let role = self.role_changed();
        let acquires = sessions.chain(blocked).filter(|(arrival, ..)| arrival.place > role);
        let acquires = acquires.filter(|(_, _, asked)| asked.command.ends_with("acquire"));
        let queued = |(arrival, open, asked): (Arrival, &Open, &Asked)| {
            let of_wait = (asked.client, asked.of_session, asked.owner.clone(), open.db, asked.keys.clone());
            let limit = *queued.get(&of_wait)?;
            // One that took over the place of an earlier one has that, whatever it says.
            let of_key = |key: &Bytes| self.asked_again.contains(&(open.db, key.clone(), asked.owner.clone()));
            let is_again = asked.keys.iter().any(of_key);
            let arrival = Arrival { claimed: arrival.claimed.filter(|_| !is_again), ..arrival };
            Some((arrival, open.db, Asked { limit, ..asked.clone() }))
        };
        acquires.filter_map(queued).collect()
    }

    fn tokens_grow(&mut self) -> Result<(), Violation> {
        let greatest = self.tokens.last_key_value().map_or(0, |(token, _)| *token);
        self.begun.clear();
        let mut carried = BTreeMap::new();
        let mut seen: Vec<(Hold, u64)> = Vec::new();
        let mut older = None;
        node(|node| {
            let keys = (0..).zip(&node.dbs).flat_map(|(db, keys)| keys.keys().map(move |key| (db, key)));
            for (db, key) in keys.filter(|(db, key)| !self.by_hand.contains(&(*db, (*key).clone()))) {
                let Seen::Lock(lock) = truth::read(node, db, key) else { continue };
                let newest = lock.holders.iter().filter_map(|it| it.token).max();
                if newest > lock.fence {
                    older = Some((db, key.clone(), newest, lock.fence));
                }
                carried.extend(lock.fence.map(|fence| ((db, key.clone()), fence)));
                let tokens = lock.holders.into_iter().filter_map(|it| Some((it.owner, it.token?)));
                let tokens = tokens.filter(|(owner, token)| self.tokens.get(token).map(|(of, _)| of) != Some(owner));
                seen.extend(tokens.map(|(owner, token)| ((db, key.clone(), owner), token)));
            }
        });
        if let Some((db, key, newest, fence)) = older {
            let what = format!("{} in {db} carries {fence:?}, and a holder has {newest:?}", key.escape_ascii());
            return Err(Violation::new(TOKENS, what));
        }
        for (key, before) in &self.carried {
            // (What is written anew after a step of the clock carries the tokens of those who hold.)
            if let Some(now) = carried.get(key).filter(|now| *now < before && !self.has_stepped) {
                let what = format!("{} carries {now} after {before}", key.1.escape_ascii());
                return Err(Violation::new(TOKENS, what));
            }
        }
        self.carried = carried;
        for (hold, token) in seen.into_iter().filter(|(_, token)| !self.fences.contains(token)) {
            match self.tokens.get(&token) {
                Some((of, _)) if *of != hold.2 => {
                    let what = format!("{token} of {} is given to {}", of.escape_ascii(), hold.2.escape_ascii());
                    return Err(Violation::new(TOKENS, what));
                }
                // (A lease that was over before anybody saw it may go on when the clock is set back.)
                None if token <= greatest && !self.has_stepped => {
                    return Err(Violation::new(TOKENS, format!("{} gets {token} after {greatest}", show(&hold))));
                }
                _ => {
                    self.tokens.insert(token, (hold.2.clone(), self.place));
                    if !self.asked_now.contains(&hold.2) {
                        self.queued.insert(token, hold.2.clone());
                    }
                    self.begun.push((hold, token));
                }
            };
        }
        Ok(())
    }

    /// What was granted in this turn, its user may acquire: asked only if no right has changed in it.
    fn within_rights(&self) -> Result<(), Violation> {
        for ((db, key, owner), _) in self.begun.iter().filter(|_| node(|node| !node.reconfigured)) {
            let of_it =
                |on: i32, asked: &Asked| on == *db && asked.command.ends_with("acquire") && asked.concerns(key, owner);
            let undecided = self.undecided().map(|(_, open, asked)| (open.db, asked));
            let others = self.told.iter().chain(&self.silent).map(|(db, asked)| (*db, asked));
            let all = undecided.chain(others);
            let mut askers = all.filter(|(on, asked)| of_it(*on, asked)).peekable();
            let may = |client: u64| {
                let argv = [b"lock.acquire".to_vec(), key.clone(), owner.clone()];
                node(|node| {
                    let user = node.clients.get(&client).map(|it| &it.user);
                    user.and_then(|user| node.users.get(user)).is_none_or(|user| node.may_run(user, &argv))
                })
            };
            if askers.peek().is_some() && askers.all(|(_, asked)| asked.command == "acquire" && !may(asked.client)) {
                return Err(Violation::new(RIGHTS, show(&(*db, key.clone(), owner.clone()))));
            }
        }
        Ok(())
    }

    fn copied(&self) -> Result<(), Violation> {
        node(|node| {
            let sorted = |entry: &crate::redis::Entry| {
                let mut entry = entry.clone();
                if let crate::redis::Value::Hash(hash) = &mut entry.value {
                    hash.sort();
                }
                entry
            };
            for (db, (ours, theirs)) in node.dbs.iter().zip(node.stream.copy()).enumerate() {
                // Mostly the fields stand in the same order.
                if ours == theirs {
                    continue;
                }
                for key in ours.keys().chain(theirs.keys()) {
                    let (ours, theirs) = (ours.get(key).map(sorted), theirs.get(key).map(sorted));
                    if ours != theirs && node.role == Role::Master && !node.was_replica {
                        let what = format!("{} in {db}: {ours:?} here, {theirs:?} there", key.escape_ascii());
                        return Err(Violation::new(COPY, what));
                    }
                }
            }
            Ok(())
        })
    }

    fn written_while_refused(&self, was_refusing: bool) -> Result<(), Violation> {
        node(|node| {
            let is_refusing = is_refusing(node);
            if was_refusing && is_refusing && !node.reconfigured && node.writes > 0 {
                return Err(Violation::new(REFUSED, format!("{} writes", node.writes)));
            }
            Ok(())
        })
    }

    /// Look-ups and writes, counted: so many for each request, waiter and binding that there is.
    fn bounded(&mut self) -> Result<(), Violation> {
        const EACH: usize = 40;
        let (waiters, bindings) = state::with(|state| (state.queue.len(), state.bindings.len()));
        let most = (std::mem::take(&mut self.requests) + waiters + bindings + 10) * EACH;
        let done = node(|node| node.look_ups + node.writes);
        if done > most {
            return Err(Violation::new(WORK, format!("{done} look-ups and writes, {most} are allowed")));
        }
        let jobs = node(|node| node.most_jobs);
        if jobs > 1 {
            return Err(Violation::new(WORK, format!("{jobs} jobs behind one command, where one does all")));
        }
        Ok(())
    }

    /// Nothing has arrived for a while: the rules about what must have happened by now.
    pub fn calm(&mut self) -> Result<(), Violation> {
        if node(|node| node.clock.mono) < self.busy_until + CALM * 1000 {
            return Ok(());
        }
        // Nothing else moves.
        in_time()?;
        self.read_in_time()?;
        if node(|node| is_refusing(node) || node.is_paused() || node.clients.values().any(|it| it.is_deaf)) {
            return Ok(());
        }
        let lags = state::with(|state| state.bindings.any_lags() || state.seems_stepped(Now::read()));
        if node(|node| node.role == Role::Master) && lags {
            return Err(Violation::new(STEPPED, "a key has yet to follow"));
        }
        self.all_answered()?;
        if crate::redis::turn::wakes_at() > node(|node| node.clock.mono) {
            self.answers_are_sent()?;
        }
        if node(|node| node.role == Role::Replica) {
            return nobody_waits_on_a_replica();
        }
        self.ephemeral_holds_end()?;
        self.losses_are_told()?;
        self.lost_holds_end()?;
        self.nobody_holds_unheard()?;
        // After a step of the clock, a lease that has run out is seen by the server's cron at the latest.
        nobody_waits_for_what_is_free(if self.is_disturbed { 250 } else { 50 })?;
        self.no_cycles()
    }

    /// An ephemeral hold ends with its connection.
    fn ephemeral_holds_end(&self) -> Result<(), Violation> {
        let ended = |binding: &Binding| {
            binding.ephemeral && !binding.is_unsure && !self.connections.contains_key(&binding.client)
        };
        for (hold, belief) in self.beliefs.iter().filter(|(_, belief)| belief.binding().as_ref().is_some_and(ended)) {
            let (db, key, owner) = hold;
            let seen = node(|node| truth::read(node, *db, key));
            let is_there = seen.of(owner).is_some_and(|holder| holder.token == Some(belief.token));
            // Where others have asked for a binding, too, a grant that nobody has heard of yet may have moved it.
            // (In any database: a waiter stays in its own when they are swapped.)
            let of_hold = self.asked_bindings.iter().filter(|((_, name, who), _)| (name, who) == (key, owner));
            let alone = of_hold.flat_map(|(_, askers)| askers.keys()).collect::<BTreeSet<_>>().len() == 1;
            if is_there
                && alone
                && !self.by_hand.contains(&(*db, key.clone()))
                // (While a slot moves, only its expiry ends it.)
                && !self.prolonged.contains(key)
            {
                return Err(Violation::new(EPHEMERAL, format!("{}: {belief:?}", show(hold))));
            }
        }
        Ok(())
    }

    /// What a session has lost lies in its event queue by now.
    pub fn losses_are_told(&self) -> Result<(), Violation> {
        let is_here = |client: &u64| self.connections.get(client).is_some_and(|it| !it.has_vanished);
        let is_noted = |client: u64| state::with(|state| state.sessions.unread(client) > 0);
        // What was renamed and renamed back is there again.
        let is_there = |key: &Bytes, owner: &Bytes, token: u64| {
            let under = |db: i32| node(|node| truth::read(node, db, key).of(owner).and_then(|it| it.token));
            (0..node(|node| node.dbs.len()) as i32).any(|db| under(db) == Some(token))
        };
        let is_lost = |(_, key, owner, token): &(u64, Bytes, Bytes, u64)| !is_there(key, owner, *token);
        match self.owed.iter().find(|loss| is_here(&loss.0) && !is_noted(loss.0) && is_lost(loss)) {
            Some(loss) => Err(Violation::new(TOLD, format!("not told yet: {loss:?}"))),
            None => Ok(()),
        }
    }

    /// What was told lost where nothing could be written has ended by now.
    fn lost_holds_end(&mut self) -> Result<(), Violation> {
        for (db, key, owner, token) in std::mem::take(&mut self.ending) {
            let seen = node(|node| truth::read(node, db, &key));
            let is_brought_back = self.prolonged.contains(&key);
            let is_it = |holder: &truth::Holder| {
                holder.token == Some(token) && holder.deadline.map_or(!is_brought_back, |at| at >= self.set_back)
            };
            if !self.by_hand.contains(&(db, key.clone())) && seen.of(&owner).is_some_and(is_it) {
                return Err(Violation::new(TRUE_LOSS, format!("{} is still there: {seen:?}", show(&(db, key, owner)))));
            }
        }
        Ok(())
    }

    /// No undelivered grant to a waiter holds a lock.
    fn nobody_holds_unheard(&self) -> Result<(), Violation> {
        if self.is_muddled || !self.fences.is_empty() || state::with(|state| !state.confirmations.is_empty()) {
            return Ok(());
        }
        let unheard = self.queued.iter().filter(|(token, _)| !self.sent.contains(token));
        let unheard = unheard.filter(|(_, owner)| !self.claimants.contains(*owner));
        for (token, owner) in unheard {
            let open = self.connections.values().flat_map(|it| &it.open).flat_map(|open| &open.runs);
            let waits = self.waits.iter().chain(&self.unheard).map(|wait| &wait.asked);
            if open.chain(waits).any(|asked| asked.owner == *owner) {
                continue;
            }
            let held = node(|node| {
                let mut keys = (0..).zip(&node.dbs).flat_map(|(db, keys)| keys.keys().map(move |key| (db, key)));
                keys.find(|(db, key)| {
                    let seen = truth::read(node, *db, key);
                    let is_held = seen.of(owner).is_some_and(|holder| holder.token == Some(*token));
                    is_held && !self.by_hand.contains(&(*db, (*key).clone()))
                })
                .map(|(db, key)| (db, key.clone(), owner.clone()))
            });
            if let Some(hold) = held {
                return Err(Violation::new(UNHEARD, format!("{} under {token}", show(&hold))));
            }
        }
        Ok(())
    }

    /// LOCK.EVENTS is answered when its time is over.
    fn read_in_time(&self) -> Result<(), Violation> {
        // When the clock is set back, a reader waits longer by so much.
        if self.is_disturbed {
            return Ok(());
        }
        let now = node(|node| node.millis());
        for (id, connection) in self.connections.iter().filter(|(_, it)| !it.has_vanished) {
            let is_deaf = node(|node| node.clients.get(id).is_none_or(|it| it.is_deaf));
            let Some(open) = connection.open.front().filter(|open| open.began.is_some() && !is_deaf) else { continue };
            let Some(asked) = open.runs.first().filter(|asked| asked.command == "events") else { continue };
            // A heartbeat comes every ten seconds at least.
            let pace = asked.heartbeat.then(|| connection.promised.unwrap_or(10_000));
            // Or an eighth of the shortest lease that is renewed for it.
            let is_its = |binding: &Binding| {
                binding.client == *id && binding.watchdog && !binding.is_unsure && Some(binding.heard) < open.began
            };
            let renewed =
                self.beliefs.values().filter_map(Belief::binding).filter(is_its).map(|binding| binding.lease).min();
            let eighth = renewed.map(|lease| (lease / 8).clamp(10, 10_000));
            if eighth.is_some_and(|eighth| open.at + eighth + CALM < now) {
                return Err(Violation::new(ASKS_AGAIN, format!("client {id} still reads: {asked:?}")));
            }
            let wait = asked.wait.filter(|wait| *wait > 0).into_iter().chain(pace).min();
            if wait.is_some_and(|wait| open.at + wait + CALM < now) {
                return Err(Violation::new(IN_TIME, format!("client {id} still reads: {asked:?}")));
            }
        }
        Ok(())
    }

    /// A request without an answer is in a queue, or waits for replicas, or has its event in a event queue.
    fn all_answered(&self) -> Result<(), Violation> {
        let is_kept = |wait: &Wait| {
            let it = &wait.asked;
            state::with(|state| {
                let is_it = |waiter: &crate::lock::Waiter<state::Asker>| {
                    waiter.asker.client == it.client
                        && *waiter.owner == *it.owner
                        && waiter.asker.on_behalf == OnBehalf::Session
                };
                state.queue.iter().any(is_it)
                    || !state.confirmations.is_empty()
                    || state.sessions.unread(it.client) > 0
                    || self.connections.get(&it.client).is_none_or(|it| it.has_vanished)
            })
        };
        if let Some(wait) = self.waits.iter().find(|wait| !wait.is_optional && !is_kept(wait)) {
            return Err(Violation::new(ENDS, format!("nobody will ever answer {:?}", wait.asked)));
        }
        for (id, connection) in &self.connections {
            let is_ready = node(|node| {
                let it = node.clients.get(id);
                it.is_some_and(|it| it.state == crate::redis::client::State::Ready && it.input.is_empty())
            });
            if is_ready && !connection.has_vanished && !connection.open.is_empty() {
                let what = format!("nobody will ever answer {:?} of client {id}", connection.open[0].runs);
                return Err(Violation::new(ENDS, what));
            }
        }
        Ok(())
    }

    /// No client is still blocked whose answer is there, and no reader whose event queue is not empty.
    fn answers_are_sent(&self) -> Result<(), Violation> {
        let blocked: Vec<(u64, crate::redis::Block)> = node(|node| {
            let of = |(id, it): (&u64, &crate::redis::Client)| match &it.state {
                crate::redis::client::State::Blocked(block) if !block.is_answered => Some((*id, block.clone())),
                _ => None,
            };
            node.clients.iter().filter_map(of).collect()
        });
        let is_late = |(client, block): &&(u64, crate::redis::Block)| {
            // Whom the server might have redirected is answered when its cron has come by.
            let may_be_redirected = block.keys.iter().flatten().any(|key| !node(|node| node.serves(0, key)));
            let waits_for_cron = |at: u64| may_be_redirected && node(|node| node.millis()) <= at + CRON;
            state::with(|state| match state.pending.get(block.ticket).map(|pending| &pending.stage) {
                Some(Stage::Ending(end)) => !waits_for_cron(end.at.millis()),
                Some(Stage::Reading(..)) => state.sessions.unread(*client) > 0,
                _ => false,
            })
        };
        match blocked.iter().find(is_late) {
            Some((client, _)) => Err(Violation::new(ENDS, format!("the answer to client {client} is not sent"))),
            None => Ok(()),
        }
    }

    fn no_cycles(&self) -> Result<(), Violation> {
        let waits = self.waiting();
        let alone = |owner: &Bytes| waits.iter().filter(|(_, _, it)| it.owner == *owner).count() == 1;
        // Who waits for whom, where that is certain: for a mutex of somebody who will not give it up by himself.
        // In one database: others are not looked into.
        // (And since when it was: what replicas have yet to confirm is not renewed before.)
        let mut edges: BTreeMap<(i32, &Bytes), BTreeMap<Bytes, Place>> = BTreeMap::new();
        let mut began: BTreeMap<(i32, &Bytes), Place> = BTreeMap::new();
        for (arrival, db, asked) in waits.iter().filter(|(_, _, it)| it.limit == 1 && alone(&it.owner)) {
            if self.renewed.contains(&asked.owner) || self.divided.contains(&asked.owner) {
                continue;
            }
            for key in &asked.keys {
                let seen = node(|node| truth::read(node, *db, key));
                // Only holders of mutexes are followed.
                if !matches!(&seen, Seen::Lock(lock) if lock.limit == 1) {
                    continue;
                }
                for holder in seen.holders().iter().filter(|it| it.owner != asked.owner) {
                    let hold = (*db, key.clone(), holder.owner.clone());
                    let is_connected = |binding: Binding| {
                        binding.watchdog && !binding.is_unsure && self.connections.contains_key(&binding.client)
                    };
                    let binding = self.beliefs.get(&hold).and_then(Belief::binding);
                    let watched = binding.is_some_and(is_connected);
                    // (One whose expiry was taken away was not followed when the others began to wait.)
                    let long = holder.deadline.is_none() && !self.prolonged.contains(key);
                    let since = binding
                        .filter(|binding| !long && binding.confirmed.is_some())
                        .map_or(0, |binding| binding.heard);
                    if (watched || long) && !self.by_hand.contains(&(*db, key.clone())) {
                        let to = edges.entry((*db, &asked.owner)).or_default();
                        to.entry(holder.owner.clone()).and_modify(|it| *it = since.min(*it)).or_insert(since);
                        began.insert((*db, &asked.owner), arrival.place);
                    }
                }
            }
        }
        // Each cycle is looked for from the wait that began last, and would have closed it.
        for start in edges.keys() {
            let mut seen = BTreeSet::new();
            let last = began[start];
            let mut todo: Vec<&Bytes> = vec![start.1];
            while let Some(owner) = todo.pop() {
                let was_there = |(_, since): &(&Bytes, &Place)| began[&(start.0, owner)] <= last && **since < last;
                let ways = edges.get(&(start.0, owner)).into_iter().flatten();
                for (next, _) in ways.filter(was_there) {
                    if next == start.1 {
                        return Err(Violation::new(CYCLES, format!("{edges:?}")));
                    }
                    if seen.insert(next) {
                        todo.push(next);
                    }
                }
            }
        }
        Ok(())
    }

    /// All clients are gone.
    pub fn nothing_is_left(&self) -> Result<(), Violation> {
        let handles = node(|node| node.handles);
        // What was asked of replicas before the clock was set back is given up later by as much (`docs/guarantees.md`): then only
        // what they have confirmed, or what is over, is too much.
        let (now, offsets) = node(|node| {
            let confirmed = node.replicas.iter().map(|it| it.confirmed).collect();
            (node.millis(), Offsets { written: node.stream.offset(), confirmed })
        });
        let lasts_longer = now < self.set_back + REPLICAS_TIMEOUT;
        let left = state::with(|state| {
            let (sessions, waits, unread) = state.sessions.sizes();
            let confirmations = match lasts_longer {
                true => state.confirmations.settled(&offsets, now, usize::MAX).len(),
                false => state.confirmations.len(),
            };
            [
                ("waiters", state.queue.len()),
                ("bindings", state.bindings.len()),
                ("confirmations", confirmations),
                ("undelivered grants", state.undelivered.len()),
                ("sessions", sessions),
                ("waits of sessions", waits),
                ("unread events", unread),
                ("time limits", state.pending.timeouts.len()),
                ("answers that are owed", state.pending.len()),
                ("lease timers", usize::from(state.lease_timers.first().is_some())),
                ("work", usize::from(state.has_work())),
            ]
        });
        match left.iter().find(|(_, count)| *count > 0) {
            Some((what, count)) => Err(Violation::new(LEFT, format!("{what}: {count}"))),
            None if handles != 0 => Err(Violation::new(LEFT, format!("{handles} blocked clients not freed"))),
            None => Ok(()),
        }
    }
}

/// What a reply says by itself.
fn says_what_it_may(asked: &Asked, reply: &Reply) -> Result<(), Violation> {
    let detail = |event: &Reply| event.elements().get(5).map(|it| String::from_utf8_lossy(it.bytes()).into_owned());
    let refusals: Vec<String> = match reply {
        Reply::Error(error) => vec![error.clone()],
        Reply::Array(events) if asked.command == "events" => events.iter().filter_map(detail).collect(),
        _ => Vec::new(),
    };
    let is_code = |code: Option<&str>| REFUSALS.iter().any(|its| its.split(' ').next() == code);
    for refusal in refusals.iter().filter(|it| is_code(it.split(' ').next())) {
        if !REFUSALS.contains(&refusal.as_str()) {
            return Err(Violation::new(CODES, format!("{asked:?} is answered {refusal}")));
        }
    }
    let is_here = |client: &&u64| node(|node| node.clients.contains_key(client));
    match asked.replaces.iter().find(is_here).filter(|_| matches!(reply, Reply::Bulk(_))) {
        Some(client) => Err(Violation::new(REPLACED, format!("client {client} is still there"))),
        None => Ok(()),
    }
}

/// Whether these are the same keys, in whatever order.
fn are_the_same(some: &[Bytes], others: &[Bytes]) -> bool {
    some.len() == others.len() && some.iter().all(|key| others.contains(key))
}

/// Whether any of these commands gives something back.
fn releases(commands: &[Vec<Bytes>]) -> bool {
    let is_release = |word: &Bytes| word.to_ascii_lowercase().ends_with(b"release");
    commands.iter().flatten().any(is_release)
}

fn is_refusing(node: &Node) -> bool {
    let is_down = node.slots.as_ref().is_some_and(|slots| slots.is_down);
    node.role == Role::Master && (is_down || node.refuses_writes().is_some())
}

/// Every table agrees with every other, as far as they show it.
fn books_agree() -> Result<(), Violation> {
    state::with(|state| {
        for waiter in state.queue.iter() {
            let pending = state.pending.get(waiter.asker.ticket);
            let agrees = pending.is_some_and(|pending| match (&pending.stage, &pending.to) {
                (Stage::Waiting(id), Recipient::Blocked { client, .. } | Recipient::Session { client, .. }) => {
                    *id == waiter.id && *client == waiter.asker.client
                }
                _ => false,
            });
            if !agrees {
                return Err(Violation::new(STATE, format!("{waiter:?} is owed {pending:?}")));
            }
            let limit = |state: &State| {
                waiter.until.is_none_or(|at| state.pending.timeouts.contains(&(at, waiter.asker.ticket)))
            };
            if !limit(state) {
                return Err(Violation::new(STATE, format!("the end of the wait of {waiter:?} is not noted")));
            }
        }
        Ok(())
    })
}

/// A wait ends when its time is over.
fn in_time() -> Result<(), Violation> {
    let now = node(|node| node.millis());
    let late = state::with(|state| {
        let is_late = |until: &u64| until + CALM < now;
        state.queue.iter().find(|waiter| waiter.until.as_ref().is_some_and(is_late)).map(|waiter| format!("{waiter:?}"))
    });
    late.map_or(Ok(()), |waiter| Err(Violation::new(IN_TIME, waiter)))
}

/// A replica grants nothing: sessions that waited have been told so.
fn nobody_waits_on_a_replica() -> Result<(), Violation> {
    let waits = state::with(|state| {
        let of_session = |waiter: &&crate::lock::Waiter<state::Asker>| waiter.asker.on_behalf == OnBehalf::Session;
        state.queue.iter().find(of_session).map(|waiter| format!("{waiter:?}"))
    });
    waits.map_or(Ok(()), |waiter| Err(Violation::new(ENDS, format!("on a replica, {waiter}"))))
}

/// With everything idle, nobody waits for a lock that is free.
fn nobody_waits_for_what_is_free(late: u64) -> Result<(), Violation> {
    let waiters: Vec<(Bytes, u32, i32, Vec<Bytes>)> = state::with(|state| {
        let one = |waiter: &crate::lock::Waiter<state::Asker>| {
            let limit = match waiter.demand.limit.number() {
                0 => u32::MAX,
                limit => limit,
            };
            let keys = waiter.keys.iter().map(|key| key.name.to_vec()).collect();
            (waiter.owner.to_vec(), limit, waiter.keys[0].db, keys)
        };
        state.queue.iter().map(one).collect()
    });
    let mut ahead: BTreeSet<(i32, Bytes)> = BTreeSet::new();
    for (owner, limit, db, keys) in waiters {
        let can = keys.iter().all(|key| {
            let is_here = node(|node| node.serves(db, key));
            let seen = node(|node| truth::read_at(node, db, key, node.millis() - late));
            let is_first = !ahead.contains(&(db, key.clone()));
            // What replicas have yet to confirm is waited for by its owner, wherever that stands.
            let awaits = state::with(|state| state.awaits_replicas(db, key, &owner));
            is_here
                && !awaits
                && match &seen {
                    Seen::NotALock => is_first,
                    // A re-entry, wherever it stands.
                    Seen::Lock(_) if seen.of(&owner).is_some() => true,
                    Seen::Lock(lock) => is_first && (lock.holders.len() as u64) < u64::from(limit.min(lock.limit)),
                }
        });
        if can {
            let keys: Vec<String> = keys.iter().map(|key| key.escape_ascii().to_string()).collect();
            return Err(Violation::new(FREE, format!("{} waits for {keys:?}", owner.escape_ascii())));
        }
        ahead.extend(keys.into_iter().map(|key| (db, key)));
    }
    Ok(())
}

fn show((db, key, owner): &Hold) -> String {
    format!("{} of {} in {db}", key.escape_ascii(), owner.escape_ascii())
}
