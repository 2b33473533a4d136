"""The states of a hold, without a server."""

import itertools
import time

import pytest
import redis

from holdfast import LockLost, NoReplicas, WrongType
from holdfast import _requests as requests
from holdfast._book import Book, Owners
from holdfast._clock import now
from holdfast._hold import Answer, Hold, State
from holdfast._requests import FOREVER, Event, Terms
from holdfast._session import SessionState

OWNER = b"me"


def make(**settings):
    book, session = Book(), SessionState()
    session.id = b"run:1"
    session.answered(now(), [alive(3750, 30000)])
    hold = Hold(Terms("a", (b"a",), **settings), OWNER)
    book.enter(hold)
    hold.ask(session)
    return book, session, hold


def alive(pace, lease, more=b" 667 1"):
    return [b"alive", 0, [], None, None, b"%d %d" % (pace, lease) + more]


def event(kind, token=None, detail=None, keys=(b"a",), owner=OWNER):
    return [kind.encode(), 0, list(keys), owner, token, detail]


def held(**settings):
    book, session, hold = make(**settings)
    hold.granted(7, hold.asked, hold.terms.lease)
    return book, session, hold


def listen(hold):
    told, alarms = [], []
    hold.when_lost(told.append, alarms.append)
    return told, alarms


def test_granted_by_the_reply():
    _, _, hold = held()
    assert (hold.state, hold.answer, hold.token) == (State.HELD, Answer.GRANTED, 7)


def test_granted_by_an_event_that_overtakes_the_reply():
    book, session, hold = make()
    book.tell(session, [event("granted", 7)])
    assert not hold.wait(pytest.fail)
    assert (hold.state, hold.token) == (State.HELD, 7)


def test_an_event_wakes_who_waits_once():
    book, session, hold = make()
    woken = []
    assert hold.wait(lambda: woken.append(1))
    book.tell(session, [event("timeout"), event("timeout")])
    assert (woken, hold.answer) == ([1], Answer.REFUSED)


@pytest.mark.parametrize(
    ("detail", "answer"),
    [
        (b"NOREPLICAS x", NoReplicas),
        (b"UNCONFIRMED x", NoReplicas),
        (b"WRONGTYPE x", WrongType),
        (b"MOVED", Answer.AGAIN),
        (b"UNBLOCKED x", Answer.AGAIN),
        (b"ERR another request of this owner for 'a' is being confirmed; until then", Answer.AGAIN),
    ],
)
def test_refused(detail, answer):
    book, session, hold = make()
    book.tell(session, [event("refused", detail=detail)])
    assert hold.answer is answer or isinstance(hold.answer, answer)


def test_of_a_renewal_that_was_refused_the_earlier_end_counts():
    _, _, hold = held(lease=1000)
    end = hold.until
    hold.shortened(2000)
    assert hold.until == end
    hold.shortened(500)
    assert hold.until == hold.asked + 0.5


def test_lost_before_the_reply_was_read():
    book, session, hold = make()
    book.tell(session, [event("lost", 7, b"forced")])
    hold.granted(7, hold.asked, None)
    with pytest.raises(LockLost, match="forced"):
        hold.check()


def test_lost_is_told_once():
    book, session, hold = held()
    told, _ = listen(hold)
    book.tell(session, [event("lost", 7, b"forced"), event("lost", 7, b"expired")])
    assert [lost.reason for lost in told] == ["forced"]
    late, _ = listen(hold)
    assert late == told


def test_looking_at_it_again_and_again_after_its_loss_costs_no_memory():
    _, _, hold = held()
    hold.lose("forced")
    lengths = set()
    for _ in range(3):
        with pytest.raises(LockLost) as raised:
            hold.check()
        lengths.add(len(raised.traceback))
    assert len(lengths) == 1


def test_another_hold_of_the_same_name_is_not_lost():
    book, session, hold = held()
    book.tell(session, [event("lost", 6, b"expired"), event("lost", 7, b"expired", owner=b"other")])
    hold.check()


def test_events_of_another_session_do_not_count():
    book, _, hold = held()
    book.tell(SessionState(), [event("lost", 7, b"expired")])
    hold.check()


def test_one_of_several_keys_is_lost():
    book, session = Book(), SessionState()
    hold = Hold(Terms(("a", "b"), (b"a", b"b"), several=True), OWNER)
    book.enter(hold)
    hold.ask(session)
    book.tell(session, [event("granted", 7, keys=(b"a", b"b"))])
    book.tell(session, [event("lost", 7, b"forced", keys=(b"b",))])
    assert hold.state is State.LOST


def test_what_was_given_back_is_not_lost():
    book, session, hold = held()
    told, alarms = listen(hold)
    hold.over()
    book.tell(session, [event("lost", 7, b"forced")])
    assert told == []
    assert alarms[-1] == FOREVER


def test_what_was_given_up_is_not_granted():
    book, session, hold = make()
    hold.over()
    book.tell(session, [event("granted", 7)])
    assert hold.state is State.OVER


def test_a_session_that_ends():
    book, session, hold = make()
    assert book.session_ended(session) == []
    assert hold.answer is Answer.AGAIN
    book, session, hold = held(ephemeral=True)
    assert book.session_ended(session) == []
    assert hold.error.reason == "disconnected"
    book, session, hold = held(lease=10_000)
    end = hold.until
    # Its loss would be told to nobody: it is taken along, for what is left of its time.
    assert book.session_ended(session) == [hold]
    assert (hold.state, hold.until) == (State.IN_DOUBT, end)
    assert 8000 < hold.rest <= 10_000
    book, session, hold = held()
    assert book.session_ended(session) == [hold]
    assert hold.state is State.IN_DOUBT
    hold.check()


def test_a_grant_on_behalf_of_a_session_that_has_ended_is_asked_for_again():
    _, session, hold = make()
    session.ended = True
    hold.granted(7, hold.asked, None)
    assert hold.answer is Answer.AGAIN
    _, session, hold = make(lease=1000)
    session.ended = True
    hold.granted(7, hold.asked, 1000)
    assert hold.answer is Answer.AGAIN


def test_doubt_ends_with_the_lease_or_with_a_renewal():
    book, session, hold = make()
    session.answered(now(), [alive(10, 20)])
    hold.ask(session)
    hold.granted(7, hold.asked, None)
    told, alarms = listen(hold)
    book.session_ended(session)
    assert alarms[-1] == pytest.approx(now() + 0.02, abs=0.02)
    other = SessionState()
    other.answered(now(), [alive(10, 10)])
    hold.ask(other)
    hold.granted(7, hold.asked, None)
    assert alarms[-1] == FOREVER
    book.session_ended(other)
    time.sleep(0.02)
    hold.lapse()
    assert [lost.reason for lost in told] == ["disconnected"]


def test_untied_is_doubt():
    book, session, hold = held()
    assert book.tell(session, [event("untied", 7, b"moved")]) == [hold]
    assert hold.state is State.IN_DOUBT


def test_a_lease_runs_out_by_the_clock():
    _, _, hold = held(lease=10)
    told, alarms = listen(hold)
    assert alarms == [pytest.approx(hold.asked + 0.01)]
    hold.lapse()
    assert told == []
    time.sleep(0.011)
    hold.lapse()
    assert [lost.reason for lost in told] == ["expired"]


def test_what_a_sign_of_life_is_worth():
    session = SessionState()
    session.answered(100.0, [alive(3750, 30000, b"")])
    # Servers of before renew every third.
    assert session.renewed_until(99, 30) == 120
    assert session.renewed_until(100, 30) == 120
    # It says nothing of those that it was not known to be about.
    assert session.renewed_until(101, 30) == -FOREVER
    session.answered(200.0, [alive(3750, 30000, b" 900 1")])
    assert session.renewed_until(101, 30) == 227


def test_a_watched_hold_is_certain_by_its_request_or_by_the_last_sign_of_life():
    _, session, hold = held()
    assert hold.left() == pytest.approx(30, abs=1)
    assert hold.until == FOREVER
    session.answered(now() + 15, [alive(3750, 30000, b" 800 1")])
    assert hold.left() == pytest.approx(15 + 24, abs=1)
    # If the default became shorter, it may have been before it was asked for.
    session.answered(now() + 15, [alive(3750, 10000, b" 800 1")])
    assert hold.left() == pytest.approx(15 + 8, abs=1)
    assert not hold.doubtful
    _, session, hold = held()
    session.seen -= 100
    hold._deadline -= 100
    assert hold.doubtful
    hold.check()


def test_a_grant_says_for_how_long_since_it_was_asked_for():
    book, session, hold = make(lease=60_000)
    session.answered(hold.asked - 7, [alive(3750, 30000)])
    book.tell(session, [event("granted", 7, b"59000")])
    assert hold.until == pytest.approx(hold.asked - 7 + 59)


def test_a_sign_of_life_is_no_event():
    session = SessionState()
    told = event("timeout")
    assert session.answered(1.0, [told]) == [told]
    assert session.answered(2.0, [alive(2000, 16000, b"")]) == []
    # It stands behind events, and says more in later versions.
    assert session.answered(2.0, [told, alive(1000, 8000, b" 667 1 of a later version")]) == [told]
    assert (session.seen, session.lease, session.patience) == (2.0, 8, 3)
    assert session.answered(3.0, []) == []
    assert (session.seen, session.lease, session.patience) == (3.0, 8, 3)


@pytest.mark.parametrize(
    ("limit", "pace", "question", "patience"),
    [
        (None, 3750, b"LOCK.NEXT WAIT 0 ALIVE", 11.25),
        (None, 10, b"LOCK.NEXT WAIT 0 ALIVE", 0.2),
        (1, 3750, b"LOCK.NEXT WAIT 500 ALIVE", 1),
        (1, 100, b"LOCK.NEXT WAIT 500 ALIVE", pytest.approx(0.3)),
    ],
)
def test_how_long_a_server_may_be_silent(limit, pace, question, patience):
    session = SessionState(limit)
    session.answered(1.0, [alive(pace, 30000)])
    assert (b" ".join(session.question()), session.patience) == (question, patience)


ACQUIRE = {
    (): b"LOCK.ACQUIRE a me HOLDS 1 WATCHDOG SESSION s",
    (("lease", 5),): b"LOCK.ACQUIRE a me HOLDS 1 LEASE 5 SESSION s",
    (("lease", 5), ("watched", True)): b"LOCK.ACQUIRE a me HOLDS 1 LEASE 5 WATCHDOG SESSION s",
    (("limit", 3), ("ephemeral", True)): b"LOCK.ACQUIRE a me LIMIT 3 HOLDS 1 WATCHDOG EPHEMERAL SESSION s",
    (("limit", 0), ("replicas", 2)): b"LOCK.ACQUIRE a me SHARED HOLDS 1 WATCHDOG REPLICAS 2 SESSION s",
}


@pytest.mark.parametrize("settings", ACQUIRE)
def test_what_acquire_says(settings):
    terms = Terms("a", (b"a",), **dict(settings))
    assert b" ".join(requests.acquire(terms, OWNER, 0, b"s")) == ACQUIRE[settings]
    # A time that is over is none: WAIT 0 means for ever.
    for wait, words in (
        (-1, b""),
        (0.0004, b" WAIT 1"),
        (2.5, b" WAIT 2500"),
        (9e9, b" WAIT 315360000000"),
        (FOREVER, b" WAIT 0"),
    ):
        assert b" ".join(requests.acquire(terms, OWNER, wait, b"s")) == ACQUIRE[settings] + words


@pytest.mark.parametrize("words", [(b"PING",), (b"LOCK.RELEASE", b"", b"a\r\n\0b", b"\xff" * 300, b"12")])
def test_requests_are_packed_as_redis_py_does_it(words):
    assert requests.pack(words) == b"".join(redis.Connection().pack_command(*words))


def test_what_the_others_say():
    one, two = Terms("a", (b"a",)), Terms(("a", "b"), (b"a", b"b"), several=True)
    leased = Terms(("a", "b"), (b"a", b"b"), several=True, lease=5)
    for request, words in (
        (requests.acquire(two, OWNER, 0, b"s"), b"LOCK.MACQUIRE 2 a b me HOLDS 1 WATCHDOG SESSION s"),
        (requests.release(one, OWNER, 7), b"LOCK.RELEASE a me TOKEN 7 ALL"),
        (requests.release(two, OWNER, 7), b"LOCK.MRELEASE 2 a b me TOKEN 7 ALL"),
        (requests.abandon(one, OWNER), b"LOCK.RELEASE a me ALL"),
        (requests.renew(one, OWNER, 7, None, b"s"), b"LOCK.RENEW a me TOKEN 7 WATCHDOG SESSION s"),
        (requests.renew(leased, OWNER, 7, 9, b"s"), b"LOCK.MRENEW 2 a b me TOKEN 7 LEASE 9 SESSION s"),
        (requests.cancel(two, OWNER, b"s"), b"LOCK.CANCEL a me SESSION s"),
        (requests.next_events(0.25), b"LOCK.NEXT WAIT 250 ALIVE"),
        (requests.next_events(FOREVER), b"LOCK.NEXT WAIT 0 ALIVE"),
    ):
        assert b" ".join(request) == words


@pytest.mark.parametrize(("reply", "held_"), [(0, True), (None, False), ([0, 0], True), ([0, None], False)])
def test_whether_a_reply_found_the_hold(reply, held_):
    assert requests.held(reply) is held_


def test_an_event_as_it_comes():
    assert Event.parse(event("lost", 7, b"forced")) == (b"lost", (b"a",), OWNER, 7, "forced")
    assert Event.parse(event("timeout")) == (b"timeout", (b"a",), OWNER, None, None)
    assert Event.parse([*event("granted", 7, b"29990"), b"more"]) == (b"granted", (b"a",), OWNER, 7, "29990")


def test_what_later_versions_of_the_server_say_is_ignored():
    book, session, hold = make(lease=60_000)
    session.answered(hold.asked, [alive(3750, 30000)])
    book.tell(session, [[b"of a later version", 0, []], [*event("granted", 7), "more"], event("granted", 8)])
    assert (hold.state, hold.token) == (State.HELD, 7)
    book.tell(session, [[b"lost", 0, [b"a"], OWNER, 7, 12, None, None]])
    assert hold.error.reason == "12"


def test_owners_are_never_used_twice():
    one, two = Owners(), Owners()
    owners = {owners.next(actor) for owners in (one, two) for actor in (None, 1, 2) for _ in range(1000)}
    assert len(owners) == 6000
    assert all(len(owner) <= 512 and not owner.startswith(b"#") for owner in owners)


def test_every_order_of_the_last_events_ends_well():
    """Reply, loss, and the end of the session come in any order; it is lost, and told once, or asked for again."""
    for order in itertools.permutations(["reply", "lost", "ended"]):
        book, session, hold = make()
        told, _ = listen(hold)
        for step in order:
            if step == "reply":
                hold.granted(7, hold.asked, None)
            elif step == "lost" and not session.ended:
                book.tell(session, [event("lost", 7, b"forced")])
            elif step == "ended":
                book.session_ended(session)
        assert len(told) <= 1
        assert (hold.state is State.LOST) == bool(told) or hold.answer is Answer.AGAIN
