//! One acquisition from the first request to the end of the hold: what it is at, and what each reply, event, end of a
//! connection and passing of time makes of it. No I/O, no clock of its own.
//!
//! Replies come on one connection and events on another, so either may be first. A session can end between a request and
//! its reply. What the state says after both is the same in either order.

use std::time::Instant;

use crate::error::{Error, Why, is_confirming};
use crate::terms::Ending;
use crate::wire::{News, Reply};

/// What one acquisition is at.
#[derive(Debug)]
pub(crate) struct State<S> {
    stage: Stage,
    token: Option<u64>,
    /// A renewal may have raised it to this.
    raising: Option<u64>,
    ending: Ending,
    /// The session on whose behalf it waits or holds; none once that has ended or the server let it go.
    session: Option<S>,
    /// The sessions under which the server may have, or may still get, a request for it that is not over.
    open: Vec<S>,
    /// Until when the lease can't have run out.
    sure_until: Option<Instant>,
    renewal: Option<Renewal>,
    /// Somebody is taking it to another session.
    carried: bool,
}

/// What one acquisition is at.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// The first request is on its way.
    Asking,
    /// In the server's queue.
    Waiting,
    /// Granted, and nothing to the contrary is known.
    Held,
    /// Not granted in time.
    NotGranted,
    /// Refused.
    Refused(Error),
    /// Granted, and ended.
    Lost(Why),
    /// Nobody wants it any more.
    GivenUp,
}

/// A renewal that waits for replicas.
#[derive(Clone, Debug)]
pub(crate) enum Renewal {
    Out,
    Confirmed,
    Refused(String),
}

/// What has to be said to another session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errand {
    AskAgain,
    /// Under this token; under whatever it has, if that is not certain.
    Renew(Option<u64>),
}

impl<S: Clone + PartialEq> State<S> {
    pub(crate) fn new(ending: Ending) -> Self {
        Self {
            stage: Stage::Asking,
            token: None,
            raising: None,
            ending,
            session: None,
            open: Vec::new(),
            sure_until: None,
            renewal: None,
            carried: false,
        }
    }

    pub(crate) fn stage(&self) -> &Stage {
        &self.stage
    }

    pub(crate) fn token(&self) -> Option<u64> {
        self.token
    }

    /// The token, if the server can have no other. An owner holds once, so it can be named without.
    pub(crate) fn certain_token(&self) -> Option<u64> {
        self.token.filter(|_| self.raising.is_none())
    }

    /// A renewal that raises the token to this one is about to be sent.
    pub(crate) fn raising(&mut self, fence: u64) {
        self.raising = Some(fence).filter(|fence| self.token != Some(*fence));
    }

    /// It has raised it.
    pub(crate) fn raised(&mut self, token: u64) {
        self.token = Some(token);
        self.raising = None;
    }

    pub(crate) fn session(&self) -> Option<&S> {
        self.session.as_ref()
    }

    pub(crate) fn open(&self) -> &[S] {
        &self.open
    }

    pub(crate) fn sure_until(&self) -> Option<Instant> {
        self.sure_until
    }

    /// A request for it is about to be sent; false: nobody wants it any more.
    pub(crate) fn ask(&mut self, session: &S) -> bool {
        if !matches!(self.stage, Stage::Asking | Stage::Waiting) {
            return false;
        }
        self.session = Some(session.clone());
        if !self.open.contains(session) {
            self.open.push(session.clone());
        }
        true
    }

    /// The request to this session did not take effect and never will.
    pub(crate) fn not_asked(&mut self, session: &S) {
        self.close(session);
        self.let_go(session);
    }

    /// Whether the request to this session took effect is not known.
    pub(crate) fn unheard(&mut self, session: &S) {
        if matches!(self.stage, Stage::Asking | Stage::Waiting) {
            self.let_go(session);
        }
    }

    /// A request for it was sent, and its session has ended without an answer: as good as a wait that has to be taken to
    /// another session. False: none was, or more is known.
    pub(crate) fn wait_on(&mut self) -> bool {
        let unheard = matches!(self.stage, Stage::Asking) && self.session.is_none() && !self.open.is_empty();
        if unheard {
            self.stage = Stage::Waiting;
        }
        unheard
    }

    /// The time is over, and nobody has it in a queue.
    pub(crate) fn timed_out(&mut self) {
        if matches!(self.stage, Stage::Asking | Stage::Waiting) {
            self.stage = Stage::NotGranted;
        }
    }

    /// The reply. The lease can't have run out before `sure_until`.
    pub(crate) fn replied(&mut self, session: &S, reply: Reply, sure_until: Instant) {
        if reply != Reply::Waiting {
            self.close(session);
        }
        if !matches!(self.stage, Stage::Asking | Stage::Waiting) {
            if let Reply::Granted(token) = reply {
                self.remember(token);
            }
            return;
        }
        match reply {
            Reply::Granted(token) => {
                self.hold(token, sure_until);
                self.mind_the_end();
            }
            Reply::NotGranted => self.stage = Stage::NotGranted,
            Reply::Waiting => self.stage = Stage::Waiting,
        }
    }

    /// The request was answered with an error that will not pass.
    pub(crate) fn refused(&mut self, error: Error) {
        if matches!(self.stage, Stage::Asking | Stage::Waiting) {
            self.stage = Stage::Refused(error);
        }
    }

    /// An event. The lease of a hold that begins or is let go can't have run out before `sure_until`. `refusal` makes an
    /// error of the server's words.
    pub(crate) fn told(&mut self, session: &S, news: News, sure_until: Instant, refusal: impl FnOnce(String) -> Error) {
        if matches!(news, News::Granted(_) | News::TimedOut | News::Refused(_)) {
            self.close(session);
        }
        match (news, &self.stage) {
            (News::Granted(token), Stage::NotGranted | Stage::Refused(_) | Stage::GivenUp) => self.remember(token),
            (_, Stage::NotGranted | Stage::Refused(_) | Stage::Lost(_)) => {}
            (News::Granted(token), Stage::Asking | Stage::Waiting) => self.hold(token, sure_until),
            (News::Granted(_), Stage::Held) => self.renewal_ends(Renewal::Confirmed),
            (News::TimedOut, Stage::Asking | Stage::Waiting) => self.stage = Stage::NotGranted,
            (News::Refused(words), Stage::Asking | Stage::Waiting) if is_to_be_asked_again(&words) => {
                // The reply of the request may still come, and says no more than that it was so.
                self.stage = Stage::Waiting;
                self.session = None;
            }
            (News::Refused(words), Stage::Asking | Stage::Waiting) => self.stage = Stage::Refused(refusal(words)),
            (News::Refused(words), Stage::Held) => self.renewal_ends(Renewal::Refused(words)),
            // An owner holds under one token. That of another hold says nothing of this one.
            (News::Lost(Some(token), _), _)
                if self.token.is_some_and(|own| own != token) && self.raising != Some(token) => {}
            (News::Lost(token, why), _) => {
                self.token = self.token.or(token);
                self.stage = Stage::Lost(why);
            }
            // It was taken to another session before: this one has nothing to say any more.
            (News::Untied(_), Stage::Held) if self.session.as_ref().is_some_and(|own| own != session) => {}
            (News::Untied(token), Stage::Asking | Stage::Waiting | Stage::Held) => {
                if let (Some(token), Stage::Asking | Stage::Waiting) = (token, &self.stage) {
                    self.hold(token, sure_until);
                }
                self.session = None;
                self.sure_until = self.sure_until.max(Some(sure_until));
            }
            (News::TimedOut, Stage::Held) | (_, Stage::GivenUp) => {}
        }
    }

    /// The session's connection has ended. A hold that ends with it is lost; another's lease can't have run out before
    /// `sure_until`, and has to be taken to another session, as a wait has.
    pub(crate) fn session_ended(&mut self, session: &S, sure_until: Option<Instant>) {
        if self.session.as_ref() != Some(session) {
            return;
        }
        self.session = None;
        self.sure_until = self.sure_until.max(sure_until);
        self.mind_the_end();
    }

    /// A renewal succeeded: the hold is this session's.
    pub(crate) fn renewed(&mut self, session: &S, sure_until: Instant) {
        if matches!(self.stage, Stage::Held) {
            self.session = Some(session.clone());
            self.sure_until = self.sure_until.max(Some(sure_until));
        }
    }

    /// A renewal with a lease of one's own: what the old one promised counts no more.
    pub(crate) fn leased_anew(&mut self, sure_until: Instant) {
        if matches!(self.stage, Stage::Held) {
            self.sure_until = Some(sure_until);
        }
    }

    /// The lease may run out already then.
    pub(crate) fn ends_by(&mut self, end: Instant) {
        self.sure_until = self.sure_until.map(|until| until.min(end));
    }

    /// The hold is known to have ended.
    pub(crate) fn lost(&mut self, why: Why) {
        if matches!(self.stage, Stage::Held | Stage::GivenUp) {
            self.stage = Stage::Lost(why);
        }
    }

    /// Nobody wants it any more. A reason that comes later is still taken in.
    pub(crate) fn give_up(&mut self) {
        if matches!(self.stage, Stage::Asking | Stage::Waiting | Stage::Held) {
            self.stage = Stage::GivenUp;
        }
    }

    /// A renewal is sent that replicas have to confirm.
    pub(crate) fn renewal_out(&mut self) {
        self.renewal = Some(Renewal::Out);
    }

    /// What that renewal is at.
    pub(crate) fn renewal(&self) -> Option<&Renewal> {
        self.renewal.as_ref()
    }

    /// What has to be said to another session, for somebody who begins to see to it: nobody else does then.
    pub(crate) fn begin_carrying(&mut self) -> bool {
        let adrift = self.errand().is_some();
        adrift && !std::mem::replace(&mut self.carried, true)
    }

    /// What has to be said to another session. None ends the carrying.
    pub(crate) fn next_errand(&mut self) -> Option<Errand> {
        let errand = self.errand();
        self.carried = errand.is_some();
        errand
    }

    fn errand(&self) -> Option<Errand> {
        match (&self.stage, &self.session, self.token) {
            (Stage::Waiting, None, _) => Some(Errand::AskAgain),
            (Stage::Held, None, Some(_)) => Some(Errand::Renew(self.certain_token())),
            _ => None,
        }
    }

    fn hold(&mut self, token: u64, sure_until: Instant) {
        self.stage = Stage::Held;
        self.token = Some(token);
        self.sure_until = Some(sure_until);
    }

    /// A grant that nobody waits for any more is to be given back: the request, which would have been cancelled, is over.
    fn remember(&mut self, token: u64) {
        self.token.get_or_insert(token);
    }

    fn close(&mut self, session: &S) {
        self.open.retain(|other| other != session);
    }

    fn let_go(&mut self, session: &S) {
        if self.session.as_ref() == Some(session) {
            self.session = None;
        }
    }

    /// A hold that ends with its session's connection does not outlive it.
    fn mind_the_end(&mut self) {
        if self.session.is_none() && self.ending == Ending::Released && matches!(self.stage, Stage::Held) {
            self.stage = Stage::Lost(Why::Disconnected);
        }
    }

    fn renewal_ends(&mut self, end: Renewal) {
        if self.renewal.is_some() {
            self.renewal = Some(end);
        }
    }
}

/// Whether a wait ended because another server has the key now, or because an earlier request of the same owner is not over
/// yet: then it is to be asked for again.
fn is_to_be_asked_again(words: &str) -> bool {
    let (code, rest) = words.split_once(' ').unwrap_or((words, ""));
    matches!(code, "MOVED" | "UNBLOCKED") || code == "ERR" && is_confirming(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Keys;
    use proptest::prelude::*;
    use std::time::Duration;

    const TOKEN: u64 = 7;

    fn new() -> State<u32> {
        State::new(Ending::LeaseRuns)
    }

    fn refusal(words: String) -> Error {
        crate::error::refused_in_words("server", &Keys::from_iter(["a"]), words)
    }

    fn tell(state: &mut State<u32>, news: News) {
        state.told(&1, news, Instant::now(), refusal);
    }

    fn reply(state: &mut State<u32>, session: u32, reply: Reply) {
        state.replied(&session, reply, Instant::now());
    }

    #[test]
    fn a_grant_that_overtakes_the_reply_counts() {
        let mut state = new();
        assert!(state.ask(&1));
        assert_eq!(state.open(), [1]);
        tell(&mut state, News::Granted(TOKEN));
        reply(&mut state, 1, Reply::Waiting);
        assert!(matches!(state.stage(), Stage::Held), "{state:?}");
        assert_eq!(state.token(), Some(TOKEN));
        assert!(state.open().is_empty(), "that request is over");
    }

    #[test]
    fn the_session_that_a_hold_was_taken_from_unties_nothing() {
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        state.session_ended(&1, None);
        state.renewed(&2, Instant::now());
        tell(&mut state, News::Untied(Some(TOKEN)));
        assert_eq!(state.session(), Some(&2));
        state.told(&2, News::Untied(Some(TOKEN)), Instant::now(), refusal);
        assert_eq!(state.next_errand(), Some(Errand::Renew(Some(TOKEN))), "taken by somebody else: taken back");
    }

    #[test]
    fn of_a_renewal_that_failed_the_earlier_end_counts() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut state = new();
        state.ask(&1);
        state.replied(&1, Reply::Granted(TOKEN), now + second);
        state.ends_by(now + 2 * second);
        assert_eq!(state.sure_until(), Some(now + second));
        state.ends_by(now);
        assert_eq!(state.sure_until(), Some(now));
    }

    #[test]
    fn a_loss_that_overtakes_the_grant_counts() {
        let mut state = new();
        state.ask(&1);
        tell(&mut state, News::Lost(Some(TOKEN), Why::Forced));
        reply(&mut state, 1, Reply::Granted(TOKEN));
        assert!(matches!(state.stage(), Stage::Lost(Why::Forced)), "{state:?}");
    }

    #[test]
    fn what_waits_or_holds_is_taken_to_the_next_session() {
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Waiting);
        assert!(!state.begin_carrying());
        state.session_ended(&1, None);
        assert!(state.begin_carrying());
        assert!(!state.begin_carrying(), "one is enough");
        assert_eq!(state.next_errand(), Some(Errand::AskAgain));
        assert!(state.ask(&2));
        reply(&mut state, 2, Reply::Granted(TOKEN));
        assert_eq!(state.next_errand(), None);
        state.session_ended(&2, None);
        assert!(state.begin_carrying());
        assert_eq!(state.next_errand(), Some(Errand::Renew(Some(TOKEN))));
        state.renewed(&3, Instant::now());
        assert_eq!(state.next_errand(), None);
        assert_eq!(state.session(), Some(&3));
    }

    #[test]
    fn a_reply_of_a_session_that_ended_meanwhile_is_taken_along() {
        for (answer, errand) in
            [(Reply::Waiting, Errand::AskAgain), (Reply::Granted(TOKEN), Errand::Renew(Some(TOKEN)))]
        {
            let mut state = new();
            state.ask(&1);
            state.session_ended(&1, None);
            reply(&mut state, 1, answer);
            assert!(state.begin_carrying());
            assert_eq!(state.next_errand(), Some(errand));
        }
    }

    #[test]
    fn a_hold_that_ends_with_its_connection_is_lost_with_it() {
        let mut state = State::new(Ending::Released);
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        state.session_ended(&1, None);
        assert!(matches!(state.stage(), Stage::Lost(Why::Disconnected)), "{state:?}");
        let mut late = State::new(Ending::Released);
        late.ask(&1);
        late.session_ended(&1, None);
        reply(&mut late, 1, Reply::Granted(TOKEN));
        assert!(matches!(late.stage(), Stage::Lost(Why::Disconnected)), "{late:?}");
    }

    #[test]
    fn a_wait_that_is_sent_elsewhere_goes_on_there() {
        let confirming = "ERR another request of this owner for 'a' is being confirmed; until then only LOCK.CANCEL";
        for words in ["MOVED", "MOVED 12 127.0.0.1:7000", "UNBLOCKED instance state changed", confirming] {
            let mut state = new();
            state.ask(&1);
            tell(&mut state, News::Refused(words.to_owned()));
            reply(&mut state, 1, Reply::Waiting);
            assert!(state.begin_carrying(), "{words}");
            assert_eq!(state.next_errand(), Some(Errand::AskAgain), "{words}");
        }
        let mut state = new();
        state.ask(&1);
        tell(&mut state, News::Refused("WRONGTYPE no".to_owned()));
        assert!(matches!(state.stage(), Stage::Refused(Error::WrongType { .. })), "{state:?}");
    }

    #[test]
    fn nothing_is_asked_for_what_nobody_wants() {
        let mut state = new();
        state.ask(&1);
        state.give_up();
        assert!(!state.ask(&2));
        state.session_ended(&1, None);
        assert!(!state.begin_carrying());
        assert_eq!(state.open(), [1], "a request may be on its way");
        reply(&mut state, 1, Reply::Granted(TOKEN));
        assert!(matches!(state.stage(), Stage::GivenUp), "{state:?}");
    }

    #[test]
    fn why_it_was_lost_is_heard_after_it_was_given_up() {
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        state.give_up();
        state.lost(Why::Expired);
        assert!(matches!(state.stage(), Stage::Lost(Why::Expired)), "{state:?}");
    }

    #[test]
    fn a_loss_under_another_token_is_none_of_ours() {
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        tell(&mut state, News::Lost(Some(TOKEN - 1), Why::Forced));
        assert!(matches!(state.stage(), Stage::Held), "{state:?}");
    }

    #[test]
    fn while_its_token_is_raised_it_may_be_lost_under_either() {
        for lost in [TOKEN, TOKEN + 5] {
            let mut state = new();
            state.ask(&1);
            reply(&mut state, 1, Reply::Granted(TOKEN));
            state.raising(TOKEN + 5);
            assert_eq!(state.certain_token(), None);
            tell(&mut state, News::Lost(Some(TOKEN + 1), Why::Forced));
            assert!(matches!(state.stage(), Stage::Held), "{state:?}");
            tell(&mut state, News::Lost(Some(lost), Why::Forced));
            assert!(matches!(state.stage(), Stage::Lost(Why::Forced)), "{state:?}");
        }
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        state.raising(TOKEN + 5);
        state.raised(TOKEN + 5);
        assert_eq!((state.token(), state.certain_token()), (Some(TOKEN + 5), Some(TOKEN + 5)));
        tell(&mut state, News::Lost(Some(TOKEN), Why::Forced));
        assert!(matches!(state.stage(), Stage::Held), "{state:?}");
    }

    #[test]
    fn a_renewal_hears_its_own_end_only() {
        let mut state = new();
        state.ask(&1);
        reply(&mut state, 1, Reply::Granted(TOKEN));
        tell(&mut state, News::Granted(TOKEN));
        assert!(state.renewal().is_none());
        state.renewal_out();
        assert!(matches!(state.renewal(), Some(Renewal::Out)));
        tell(&mut state, News::Refused("UNCONFIRMED 0 of 1".to_owned()));
        assert!(matches!(state.renewal(), Some(Renewal::Refused(_))));
        assert!(matches!(state.stage(), Stage::Held), "{state:?}");
    }

    /// What can happen to an acquisition on one session, as the server tells it.
    #[derive(Clone, Debug)]
    enum Step {
        Reply(Reply),
        Tell(News),
    }

    fn histories() -> impl Strategy<Value = (Reply, Vec<News>)> {
        let lost = prop_oneof![Just(Why::Expired), Just(Why::Forced), Just(Why::Changed)]
            .prop_map(|why| News::Lost(Some(TOKEN), why));
        let after = prop::option::of(lost).prop_map(|lost| lost.into_iter().collect::<Vec<_>>());
        prop_oneof![
            after.clone().prop_map(|after| (Reply::Granted(TOKEN), after)),
            after.prop_map(|after| (Reply::Waiting, [vec![News::Granted(TOKEN)], after].concat())),
            Just((Reply::Waiting, vec![News::TimedOut])),
            Just((Reply::Waiting, vec![News::Refused("WRONGTYPE no".to_owned())])),
            Just((Reply::Waiting, Vec::new())),
            Just((Reply::NotGranted, Vec::new())),
        ]
    }

    proptest! {
        /// The end is the same wherever among the events the reply is read.
        #[test]
        fn the_order_of_reply_and_events_does_not_matter((answer, news) in histories(), at in 0usize..4) {
            let run = |at: usize| {
                let mut steps: Vec<Step> = news.iter().cloned().map(Step::Tell).collect();
                steps.insert(at.min(steps.len()), Step::Reply(answer));
                let mut state = new();
                state.ask(&1);
                for step in steps {
                    match step {
                        Step::Reply(answer) => reply(&mut state, 1, answer),
                        Step::Tell(news) => tell(&mut state, news),
                    }
                }
                (format!("{:?}", state.stage()), state.errand())
            };
            prop_assert_eq!(run(at), run(0));
        }

        /// Whenever the session ends, a wait or a hold ends up somewhere: lost, over, or on its way to the next session.
        #[test]
        fn nothing_is_left_behind_when_a_session_ends((answer, news) in histories(), at in 0usize..5) {
            let mut state = new();
            state.ask(&1);
            let steps = std::iter::once(Step::Reply(answer)).chain(news.into_iter().map(Step::Tell));
            for (index, step) in steps.enumerate() {
                if index == at {
                    break;
                }
                match step {
                    Step::Reply(answer) => reply(&mut state, 1, answer),
                    Step::Tell(news) => tell(&mut state, news),
                }
            }
            state.session_ended(&1, None);
            match state.stage().clone() {
                Stage::Waiting => prop_assert_eq!(state.next_errand(), Some(Errand::AskAgain)),
                Stage::Held => prop_assert_eq!(state.next_errand(), Some(Errand::Renew(Some(TOKEN)))),
                // Its own request is still out, and tells.
                Stage::Asking => prop_assert_eq!(at, 0),
                _ => prop_assert_eq!(state.next_errand(), None),
            }
        }
    }

    proptest! {
        /// Whoever gives up at any point can give back what was granted: he knows the token, or cancels the request.
        #[test]
        fn nothing_is_left_behind_by_whoever_gives_up((answer, news) in histories(), at in 0usize..4) {
            let granted = matches!(answer, Reply::Granted(_)) || news.iter().any(|news| matches!(news, News::Granted(_)));
            let mut state = new();
            state.ask(&1);
            let steps = std::iter::once(Step::Reply(answer)).chain(news.into_iter().map(Step::Tell));
            for (index, step) in steps.enumerate() {
                if index == at {
                    state.give_up();
                }
                match step {
                    Step::Reply(answer) => reply(&mut state, 1, answer),
                    Step::Tell(news) => tell(&mut state, news),
                }
            }
            prop_assert!(!granted || state.token() == Some(TOKEN) || state.open() == [1], "{:?}", state);
        }
    }

    #[test]
    fn the_lease_is_counted_from_the_latest_promise() {
        let now = Instant::now();
        let mut state = new();
        state.ask(&1);
        state.replied(&1, Reply::Granted(TOKEN), now);
        state.renewed(&1, now + Duration::from_secs(2));
        state.renewed(&1, now + Duration::from_secs(1));
        assert_eq!(state.sure_until(), Some(now + Duration::from_secs(2)));
        state.leased_anew(now + Duration::from_secs(1));
        assert_eq!(state.sure_until(), Some(now + Duration::from_secs(1)));
    }
}
