"""Which servers count for the beginning of a RedLock's hold: docs/redlock.md, step 4. No server, no clock."""

from types import SimpleNamespace

import pytest

from holdfast import _redlock
from holdfast._clock import millis
from holdfast._core.core import Core
from holdfast._core.step import Outcome, Terms
from holdfast._hold import Hold
from holdfast._redlock import Ballot, Majority, release

TERMS = Terms(lease=10_000)
SERVERS = 3


class Server:
    """Grants with this token, and answers the renewal with `answer`, after `meanwhile` has happened."""

    suspect = False

    def __init__(self, token, answer, meanwhile=lambda: None):
        self.token, self.answer, self.meanwhile = token, answer, meanwhile
        core = SimpleNamespace(pairs=1, held_until=lambda _: millis() + 10_000, lease=lambda _: 10_000)
        self.only = SimpleNamespace(core=core)
        self.pending = self.told = None
        self.given_back = False
        self.asked, self.dropped = [], []

    def node(self, address):
        return self.only

    def wait(self, pending, seconds):
        return pending.outcome

    def watch(self, hold):
        pass

    def begin(self, pending, what, *said):
        self.asked.append(pending.id)
        if what is Core.acquire:
            self.pending = pending
            if self.token is not None:
                self.grant(self.token)
        elif what is Core.renew:
            self.told = said
            self.meanwhile()
            pending.outcome = Outcome("renewed", self.answer) if self.answer else Outcome("not held")

    def grant(self, token):
        self.pending.outcome = Outcome("granted", token)
        self.pending.hold.granted(token)

    def drop(self, node, call):
        assert node is self.only
        self.given_back = True
        self.dropped.append(call)


def begins(hold, servers):
    """Runs the step, whose parts take no time."""
    parts = [Hold("a", (b"a",), TERMS, number, b"me") for number, _ in enumerate(servers)]
    ballot = Ballot(servers, 1.0, parts)
    for vote in ballot.votes:
        vote.cast(1)
    flow = ballot.fence(hold)
    try:
        while True:
            next(flow)
    except StopIteration as end:
        return end.value


@pytest.fixture
def hold():
    return Majority("a", TERMS, b"me")


def test_begins_when_a_majority_confirmed_the_greatest_token(hold):
    servers = [Server(5, 7), Server(7, 7), Server(None, None)]
    assert begins(hold, servers)
    assert hold.token == 7
    assert [fence for _, _, fence, _ in (server.told for server in servers[:2])] == [7, 7]


@pytest.mark.parametrize("answer", [None, 9], ids=["not held", "granted anew"])
def test_an_answer_other_than_the_fence_does_not_count(hold, answer):
    assert not begins(hold, [Server(7, 7), Server(5, answer), Server(None, None)])


def test_a_grant_after_the_fence_was_chosen_does_not_count(hold):
    late = Server(None, 9)
    assert not begins(hold, [Server(7, 7, lambda: late.grant(9)), Server(5, None), late])
    assert late.pending.hold.token == 9, "it was granted meanwhile"


def test_a_grant_after_the_fence_was_chosen_is_given_back_when_the_hold_begins(hold):
    late = Server(None, 9)
    assert begins(hold, [Server(7, 7, lambda: late.grant(9)), Server(5, 7), late])
    assert hold.token == 7
    assert late.told is None
    assert late.given_back


def test_whoever_is_interrupted_wants_no_answer_any_more_from_those_he_asked(hold):
    servers = [Server(None, None) for _ in range(3)]
    hold.parts = [Hold("a", (b"a",), TERMS, number, b"me") for number, _ in enumerate(servers)]
    for part, one in zip(hold.parts, servers):
        part.home, part.node = one, one.only
    # The first one is not asked, so those asked are others than those who hold.
    servers[0].suspect = True
    flow = release(hold, 3, 1.0)
    next(flow)
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())
    assert [set(one.asked) - set(one.dropped) for one in servers] == [set()] * 3
    assert [len(one.asked) for one in servers] == [0, 1, 1]


def test_whose_question_got_lost_is_waited_for_all_the_same(monkeypatch):
    """Its connection broke: the question is not asked again, and the request is."""

    time = 0.0
    monkeypatch.setattr(_redlock, "now", lambda: time)

    class Broken(Server):
        def __init__(self):
            super().__init__(None, None)
            self.calls = {}

        def begin(self, pending, what, *said):
            def request(call, *_):
                self.calls[call].outcome = Outcome("unanswered")

            self.pending = self.calls[pending.id] = pending
            core = SimpleNamespace(acquire=lambda *_: None, request=request)
            request(pending.id) if what is Core.request else what(core, pending.id, *said)

        def wait(self, pending, seconds):
            nonlocal time
            assert pending.outcome is None, "what has ended is not waited for"
            time += seconds

        def start(self, flow):
            flow.close()

    one, part = Broken(), Hold("a", (b"a",), TERMS, 1, b"me")
    for _ in Ballot([one], 1.0, [part]).others(1):
        pass
    assert time == 1
    assert one.suspect
