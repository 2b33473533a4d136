"""Which servers count for the beginning of a RedLock's hold: docs/redlock.md, step 4. No server, no clock."""

import time

import pytest

from holdfast._book import Book
from holdfast._flow import Part, Reply
from holdfast._hold import Hold
from holdfast._redlock import Majority, _fence
from holdfast._requests import Terms
from holdfast._session import SessionState

TERMS = Terms("a", (b"a",), lease=10_000)
SERVERS = 3


class Home:
    """A server that answers the renewal with `answer`, after `meanwhile` has happened."""

    suspect = False

    def __init__(self, answer, meanwhile=lambda: None):
        self.answer = answer
        self.meanwhile = meanwhile
        self.book = Book()
        self.session = SessionState()
        self.told = None
        self.given_back = False

    def post(self, key, request):
        self.told = request(self.session)
        return self

    def collect(self, post, seconds):
        self.meanwhile()
        return Reply(self.answer, self.session, False)

    def start(self, hold, flow):
        self.given_back = True


def part(home, token):
    hold = Hold(TERMS, b"me")
    hold.ask(home.session)
    if token is not None:
        hold.granted(token, time.monotonic(), TERMS.lease)
    return Part(home, hold)


def begins(hold, parts):
    """Runs the step, whose parts take no time."""
    flow = _fence(hold, parts, SERVERS, 1.0)
    try:
        value = None
        while True:
            value = flow.send(value)
    except StopIteration as end:
        return end.value


@pytest.fixture
def hold():
    hold = Majority(TERMS, b"me")
    hold.parts = ()
    return hold


def test_begins_when_a_majority_confirmed_the_greatest_token(hold):
    parts = [part(Home(7), 5), part(Home(7), 7), part(Home(None), None)]
    assert begins(hold, parts)
    assert hold.token == 7
    assert [home.told[-2:] for home, _ in parts[:2]] == [(b"FENCE", b"7")] * 2


@pytest.mark.parametrize("answer", [None, 9], ids=["not held", "granted anew"])
def test_an_answer_other_than_the_fence_does_not_count(hold, answer):
    assert not begins(hold, [part(Home(7), 7), part(Home(answer), 5), part(Home(None), None)])


def test_a_grant_after_the_fence_was_chosen_does_not_count(hold):
    late = part(Home(9), None)
    parts = [
        part(Home(7, lambda: late.hold.granted(9, time.monotonic(), TERMS.lease)), 7),
        part(Home(None), 5),
        late,
    ]
    assert not begins(hold, parts)
    assert late.hold.token == 9, "it was granted meanwhile"


def test_a_grant_after_the_fence_was_chosen_is_given_back_when_the_hold_begins(hold):
    late = part(Home(9), None)
    parts = [part(Home(7, lambda: late.hold.granted(9, time.monotonic(), TERMS.lease)), 7), part(Home(7), 5), late]
    assert begins(hold, parts)
    assert hold.token == 7
    assert late.home.told is None
    assert late.home.given_back
