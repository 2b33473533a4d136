"""What is told of a hold, and how requests begin; what a step that was interrupted leaves. No server."""

import gc
import itertools
import sys
import tracemalloc

import pytest

from holdfast import LockLost, errors
from holdfast._core.core import Core
from holdfast._core.resp import encode
from holdfast._core.step import Ended, Settings, Terms
from holdfast._flow import FOREVER, NO_WAIT, owners_in, wait_of
from holdfast._hold import Hold, State
from holdfast._owners import Owners
from holdfast._redis import failed, refused
from steps import read


@pytest.fixture
def hold():
    return Hold("a", (b"a",), Terms(), 1, b"me")


def test_lost_is_told_once(hold):
    told = []
    hold.granted(7)
    hold.when_lost(told.append)
    hold.lose("forced")
    hold.lose("expired")
    assert [(error.reason, error.fence, error.owner) for error in told] == [("forced", 7, b"me")]
    assert hold.state is State.LOST
    # Who comes later is told at once.
    hold.when_lost(told.append)
    assert told[1] is told[0]


def test_what_was_given_back_is_not_lost(hold):
    told = []
    hold.granted(7)
    hold.when_lost(told.append)
    hold.over()
    hold.lose("forced")
    assert told == []


def test_a_listener_that_fails_harms_nobody(hold, caplog):
    told = []
    hold.granted(7)
    hold.when_lost(lambda error: 1 / 0)
    hold.when_lost(told.append)
    hold.lose("forced")
    assert len(told) == 1
    assert "a listener failed" in caplog.text


def test_looking_at_it_again_and_again_after_its_loss_costs_no_memory(hold):
    hold.granted(7)
    hold.lose("expired")

    def look():
        for _ in range(1000):
            with pytest.raises(LockLost):
                hold.raise_if_lost()

    look()
    gc.collect()
    tracemalloc.start()
    look()
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 50_000


@pytest.mark.parametrize(
    ("seconds", "wait"),
    [(-1, NO_WAIT), (0, NO_WAIT), (0.0004, 1), (2.5, 2500), (9e9, 315_360_000_000), (float("inf"), FOREVER)],
)
def test_a_time_that_is_over_is_no_wait_at_all(seconds, wait):
    assert wait_of(seconds) == wait


@pytest.mark.parametrize("words", [(b"PING",), (b"LOCK.RELEASE", b"", b"a\r\n\0b", b"\xff" * 300, b"12")])
def test_requests_are_packed_as_redis_py_does_it(words):
    import redis

    assert encode(words) == b"".join(redis.Connection().pack_command(*words))


def test_errors_of_the_server_keep_their_words():
    for words, kind in (
        ("DEADLOCK a waits for b", errors.Deadlock),
        ("NOREPLICAS 0 of 1", errors.NoReplicas),
        ("UNCONFIRMED 0 of 1", errors.NoReplicas),
        ("WRONGTYPE Operation", errors.WrongType),
        ("ERR unknown command 'LOCK.OWNER'", errors.NotLoaded),
    ):
        error = refused(words, "a")
        assert type(error) is kind
        assert words in str(error)
    assert "no answer in time" in str(failed(None, None, "a", b"me", None))


def test_who_holds():
    assert owners_in(None) == []
    assert owners_in([b"token", 7, b"holders", [[b"owner", b"x", b"holds", 1], [b"owner", b"y"]]]) == [b"x", b"y"]


def test_owners_are_never_used_twice():
    one, two = Owners(), Owners()
    numbers = itertools.count(1)
    found = {owners.owner(next(numbers), actor) for owners in (one, two) for actor in (None, 1, 2) for _ in range(1000)}
    assert len(found) == 6000
    assert all(len(owner) <= 512 and not owner.startswith(b"#") for owner in found)


ALIVE = r"*1\r\n*6\r\n$5\r\nalive\r\n:0\r\n*0\r\n$-1\r\n$-1\r\n$16\r\n3750\x2030000\x20667\x201\r\n"
STEPS = [
    "0 acquire 1 by a## keys k watchdog",
    "0 acquire 2 by a## keys l wait forever watchdog",
    "1 opened 1",
    rf"2 received 1 session $5\r\nrun:1\r\n{ALIVE}",
    r"3 received 1 requests :7\r\n+WAITING\r\n",
    "4 renew 3 hold 1 within 1000",
    r"5 received 1 requests :7\r\n",
    "6 release 4 hold 1 within 1000",
    r"7 received 1 requests :0\r\n",
]


class Interrupted(Exception):
    pass


def interrupted_at(core, line, now, *what):
    """Takes a step, in which an exception comes from outside at its so manieth line. False: it has fewer."""
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if "_core" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        core.step(now, *what)
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("place", range(len(STEPS)))
def test_a_step_that_is_interrupted_at_any_line(place):
    """Another core goes on with what is known: nobody waits for ever, and nothing is left that nobody wants."""
    for line in itertools.count(1):
        core, done = Core(Settings()), []
        for step in STEPS[:place]:
            core.step(*read(step))
            done += core.outputs
            core.outputs.clear()
        now, *what = read(STEPS[place])
        if not interrupted_at(core, line, now, *what):
            assert line > 5
            return
        done += core.outputs
        after = Core(Settings())
        after.succeed(now, core)
        # Whoever was interrupted wants no more of what he asked for; all others go on at another pair.
        after.step(now, Core.drop, 3)
        after.step(now, Core.drop, 1)
        after.step(9, *read("9 wake")[1:])
        pair = after.pairs
        after.step(10, *read(f"10 opened {pair}")[1:])
        after.step(11, *read(rf"11 received {pair} session $5\r\nrun:2\r\n{ALIVE}")[1:])
        asked = [one for one in after.outputs if getattr(one, "channel", "") == "requests"]
        assert all(one.words[0] in (b"LOCK.RELEASE", b"LOCK.ACQUIRE") for one in asked), asked
        replies = b"".join(b":0\r\n" if one.words[0] == b"LOCK.RELEASE" else b"+WAITING\r\n" for one in asked)
        text = "".join(f"\\x{byte:02x}" for byte in replies)
        if asked:
            after.step(12, *read(f"12 received {pair} requests {text}")[1:])
        done += after.outputs
        after.outputs.clear()
        assert after.is_settled, f"line {line} of {STEPS[place]}"
        # Within its time each call has ended, but for the one that waits.
        for now in (13, 1100, 2200, 11_000, 23_000):
            after.step(now, *read(f"{now} wake")[1:])
        done += after.outputs
        ended = {one.call for one in done if isinstance(one, Ended)}
        if place > 6:
            assert 3 in ended
        waits = place > 1 or (place == 1 and 2 in after._claims)
        assert not after._calls or (waits and set(after._calls) == {2}), (
            f"line {line} of {STEPS[place]}: {after._calls}"
        )
