//! One window of a history of one lock, given to stateright's tester.
//!
//! The tester finds *one* order of operations that explains the history. The next window depends on the state after
//! this one, and there may be several. So each window ends with an operation of the checker's own, which records the
//! state and fails: the tester continues with the next order, until it has tried all. [`Search`] also refuses an order
//! that leads to a state that was already tried with the same operations.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

use crate::history::{Outcome, Request, Time};
use crate::spec::{Hold, Lock, Step};

/// A possible operation of a window.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its position in the history; none: the unreported end of a lease.
    pub place: Option<usize>,
    /// The operation.
    pub step: Step,
}

/// A state after an order of operations, and the operations that have already taken effect although their replies come
/// later.
pub type End = (Lock, Vec<usize>);

/// All ends of a window, and the most operations that could be explained.
pub struct Explored {
    /// The possible states.
    pub ends: HashSet<End>,
    /// The positions of the operations in the longest order.
    pub furthest: Vec<usize>,
}

/// Explores a window that begins with `lock` and ends at `cut`. Operations with a reply by then must have taken effect;
/// others may have.
pub fn explore(lock: &Lock, candidates: Vec<Candidate>, cut: Time) -> Explored {
    let window = Rc::new(Window::new(candidates, cut));
    let done = Bits::new(window.candidates.len());
    let mut tester = LinearizabilityTester::new(Search::new(lock.clone(), done, window.clone()));
    feed(&mut tester, &window);
    assert!(!tester.is_consistent(), "the last operation is always refused");
    let noted = window.noted.take();
    Explored { ends: noted.ends, furthest: window.places(&noted.furthest) }
}

/// Reports the starts and ends of operations to the tester, in the order of time.
fn feed(tester: &mut LinearizabilityTester<usize, Search>, window: &Window) {
    let mut moments: Vec<(Time, bool, usize)> = Vec::new();
    for (index, Candidate { step, .. }) in window.candidates.iter().enumerate() {
        moments.push((step.from, false, index));
        if window.must_have_happened(index) {
            moments.push((step.to, true, index));
        }
    }
    // An operation that ends when another one starts overlaps with it.
    moments.sort_unstable();
    let mut threads: Vec<Option<usize>> = Vec::new();
    for (_, ends, index) in moments {
        let wanted = ends.then_some(index);
        let thread = threads.iter().position(|busy| *busy == wanted).unwrap_or(threads.len());
        threads.resize(threads.len().max(thread + 1), None);
        threads[thread] = (!ends).then_some(index);
        let fed = if ends { tester.on_return(thread, ()) } else { tester.on_invoke(thread, Op::Step(index)) };
        fed.expect("a thread does one thing at a time");
    }
    tester.on_invret(usize::MAX, Op::Cut, ()).expect("the last operation");
    // An operation without a reply ends when all is over. (The tester would otherwise run it without asking whether it
    // can.)
    for thread in (0..threads.len()).filter(|thread| threads[*thread].is_some()) {
        tester.on_return(thread, ()).expect("it has begun");
    }
}

#[derive(Debug, Default)]
struct Window {
    candidates: Vec<Candidate>,
    /// Operations whose reply says that they changed nothing.
    nulls: Vec<usize>,
    cut: Time,
    tried: RefCell<HashSet<(Bits, Lock, usize)>>,
    noted: RefCell<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    ends: HashSet<End>,
    furthest: Bits,
}

impl Window {
    fn new(candidates: Vec<Candidate>, cut: Time) -> Self {
        let nulls = (0..candidates.len()).filter(|index| candidates[*index].step.outcome == Outcome::Null).collect();
        Self { candidates, nulls, cut, ..Self::default() }
    }

    fn must_have_happened(&self, index: usize) -> bool {
        let step = &self.candidates[index].step;
        step.to <= self.cut && step.outcome != Outcome::Unknown
    }

    /// The grant that a revocation revokes, if that has not taken effect yet: it comes first.
    fn given_by(&self, index: usize) -> Option<usize> {
        let is_revocation = matches!(self.candidates[index].step.request, Request::Revoke { .. });
        let given = self.candidates[index].place.and_then(|place| place.checked_sub(1));
        index.checked_sub(1).filter(|before| is_revocation && self.candidates[*before].place == given)
    }

    fn places(&self, done: &Bits) -> Vec<usize> {
        done.iter().filter_map(|index| self.candidates[index].place).collect()
    }
}

/// The specification, and the operations of the window that have taken effect.
#[derive(Clone, Debug)]
struct Search {
    lock: Lock,
    done: Bits,
    /// Holds whose leases have ended since the last operation of a client.
    ended: Vec<(String, Hold)>,
    window: Rc<Window>,
}

#[derive(Clone, Debug)]
enum Op {
    Step(usize),
    Cut,
}

impl SequentialSpec for Search {
    type Op = Op;
    type Ret = ();

    fn invoke(&mut self, op: &Op) {
        self.is_valid_step(op, &());
    }

    fn is_valid_step(&mut self, op: &Op, (): &()) -> bool {
        match op {
            Op::Step(index) => self.step(*index),
            Op::Cut => {
                if self.first_null().is_none() && self.ended.is_empty() {
                    self.note();
                }
                false
            }
        }
    }
}

impl Search {
    fn new(lock: Lock, done: Bits, window: Rc<Window>) -> Self {
        Self { lock, done, ended: Vec::new(), window }
    }

    fn step(&mut self, index: usize) -> bool {
        let window = self.window.clone();
        let Candidate { step, place } = &window.candidates[index];
        if window.given_by(index).is_some_and(|given| !self.done.has(given)) {
            return false;
        }
        // An operation that changes nothing is taken as early as possible: every order that has it later has an
        // equivalent one.
        if self.first_null().is_some_and(|first| first != index) {
            return false;
        }
        match (place, &step.request) {
            (None, Request::Expire { owner, .. }) => {
                let hold = self.lock.holders.get(owner).cloned();
                self.ended.extend(hold.map(|hold| (owner.clone(), hold)));
            }
            // An unreported end of a lease comes as late as possible: if the operation gives the same result before it,
            // there is an equivalent order.
            _ if self.ended.iter().any(|hold| self.is_as_good_before(step, hold)) => return false,
            _ => self.ended.clear(),
        }
        if !carry_out(&mut self.lock, step) || self.lock.clock > window.cut {
            return false;
        }
        self.done.set(index);
        let mut noted = window.noted.borrow_mut();
        if self.done.len() > noted.furthest.len() {
            noted.furthest = self.done.clone();
        }
        window.tried.borrow_mut().insert((self.done.clone(), self.lock.clone(), self.ended.len()))
    }

    /// Whether an operation leads to the same state if a lease ends after it.
    fn is_as_good_before(&self, step: &Step, (owner, hold): &(String, Hold)) -> bool {
        let (mut now, mut before) = (self.lock.clone(), self.lock.clone());
        before.holders.insert(owner.clone(), hold.clone());
        let possible = carry_out(&mut now, step) & carry_out(&mut before, step);
        let same = before.holders.remove(owner).as_ref() == Some(hold);
        possible && same && now == before
    }

    /// The first operation that changes nothing and may come next.
    fn first_null(&self) -> Option<usize> {
        let window = &self.window;
        let left = |index: &usize| !self.done.has(*index);
        // No operation may be left that can only have come before it.
        let next_answer = (0..window.candidates.len()).filter(left).map(|index| window.candidates[index].step.to).min();
        window.nulls.iter().copied().filter(left).find(|index| {
            let step = &window.candidates[*index].step;
            step.from <= next_answer.unwrap_or(Time::MAX)
                && self.lock.clock.max(step.from) <= step.to
                && self.lock.may_answer_null(step)
        })
    }

    fn note(&self) {
        let early = self.done.iter().filter(|index| !self.window.must_have_happened(*index));
        let early = early.filter_map(|index| self.window.candidates[index].place).collect();
        let lock = Lock { clock: 0, ..self.lock.clone() };
        self.window.noted.borrow_mut().ends.insert((lock, early));
    }
}

/// Runs an operation that may have taken effect; false if it can't have.
fn carry_out(lock: &mut Lock, step: &Step) -> bool {
    if step.outcome != Outcome::Unknown {
        return lock.is_valid_step(step, &step.outcome);
    }
    let before = lock.clone();
    lock.invoke(step);
    // An operation without effect is the same as none.
    lock.clock <= step.to && Lock { clock: before.clock, ..lock.clone() } != before
}

/// A set of small numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(most: usize) -> Self {
        Self(vec![0; most.div_ceil(64)])
    }

    fn set(&mut self, bit: usize) {
        self.0[bit / 64] |= 1 << (bit % 64);
    }

    fn has(&self, bit: usize) -> bool {
        self.0[bit / 64] & 1 << (bit % 64) != 0
    }

    fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.0.len() * 64).filter(|bit| self.has(*bit))
    }
}
