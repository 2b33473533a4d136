"""What the core does of a lock that is kept at hand, in small scripts of steps."""

from pathlib import Path

import pytest

from holdfast._core.core import Core
from holdfast._core.step import Ended, Outcome
from steps import played

SCRIPTS = sorted((Path(__file__).parents[2] / "core/steps").glob("*.txt"))
ALIVE = r"*6\r\n$5\r\nalive\r\n:0\r\n*0\r\n$-1\r\n$-1\r\n$16\r\n3750\x2030000\x20667\x201\r\n"
HELD = rf"""0 acquire 1 by a: keys k watchdog kept
5 opened 1
5 received 1 session $5\r\nrun:1\r\n*1\r\n{ALIVE}
9 received 1 requests :7\r\n
"""


def event(kind, owner="a:1", detail=r"$-1\r\n", key="k"):
    """One of the session's: its words from the kind on."""
    event = rf"*6\r\n${len(kind)}\r\n{kind}\r\n:0\r\n*1\r\n$1\r\n{key}\r\n${len(owner)}\r\n{owner}\r\n:7\r\n{detail}"
    return rf"received 1 session *2\r\n{event}{ALIVE}"


def does(script):
    """What it does, without its questions for events and what it is to be woken for."""
    lines = [line[2:] for line in played(script).splitlines() if line.startswith("> ")]
    return [line for line in lines if "LOCK.NEXT" not in line and "LOCK.OWNER" not in line]


def after(script, beginning=HELD):
    """What it does once it is held."""
    begun = does(beginning)
    done = does(beginning + script)
    assert done[: len(begun)] == begun
    return [line for line in done[len(begun) :] if not line.startswith("wake")]


GIVEN_BACK = "send 1 requests LOCK.RELEASE k a:1 ALL"


def test_it_asks_to_be_told_who_wants_it():
    [asked] = [line for line in does(HELD) if "ACQUIRE" in line]
    assert asked == "send 1 requests LOCK.ACQUIRE k a:1 HOLDS 1 LEASE 30000 WATCHDOG WANTED SESSION run:1"
    # Also over the next session.
    script = rf"10 ended 1|11 opened 2|12 received 2 session $5\r\nrun:2\r\n*1\r\n{ALIVE}"
    renewed = after(script.replace("|", "\n"))
    assert renewed[-1] == "send 2 requests LOCK.RENEW k a:1 TOKEN 7 LEASE 30000 WATCHDOG WANTED SESSION run:2"


def test_where_the_word_stands():
    script = HELD.replace("watchdog kept", "wait 50 watchdog ephemeral replicas 2 limit 3 kept")
    [asked] = [line for line in does(script) if "ACQUIRE" in line]
    assert asked.endswith("LIMIT 3 HOLDS 1 LEASE 30000 WATCHDOG EPHEMERAL REPLICAS 2 WANTED SESSION run:1")


def test_each_use_is_answered_at_once_and_nothing_is_sent():
    uses = "".join(f"{at} keep 1 for 5000\n{at} use {at} hold 1 most 1\n" for at in range(10, 20))
    assert after(uses) == [f"ended {at} held" for at in range(10, 20)]


def test_who_is_done_hands_it_to_the_next_one():
    assert after("10 use 2 hold 1 most 1") == ["ended 2 held"]


def test_wanted_while_it_lies_at_hand():
    assert after(f"10 keep 1 for 5000\n20 {event('wanted')}") == [GIVEN_BACK]
    assert after(f"10 keep 1 for 5000\n20 {event('wanted')}\n21 use 2 hold 1 most 9") == [
        GIVEN_BACK,
        "ended 2 not held",
    ]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_wanted_in_use(most):
    """So many uses in a row, the present one among them."""
    uses = "".join(f"{20 + number} use {20 + number} hold 1 most {most}\n" for number in range(most))
    done = [f"ended {20 + number} held" for number in range(most - 1)]
    assert after(f"10 {event('wanted')}\n{uses}") == [*done, f"ended {19 + most} not held", GIVEN_BACK]


def test_uses_before_somebody_wanted_it_do_not_count():
    uses = "".join(f"{at} use {at} hold 1 most 1\n" for at in range(10, 15))
    assert after(f"{uses}15 {event('wanted')}\n16 use 16 hold 1 most 1")[-2:] == ["ended 16 not held", GIVEN_BACK]


def test_to_be_told_once_more_is_no_reason_to_begin_to_count_anew():
    script = f"10 {event('wanted')}\n11 use 2 hold 1 most 2\n12 {event('wanted')}\n13 use 3 hold 1 most 2"
    assert after(script) == ["ended 2 held", "ended 3 not held", GIVEN_BACK]


def test_wanted_and_nobody_here_is_next():
    assert after(f"10 {event('wanted')}\n11 keep 1 for 5000") == [GIVEN_BACK]


def test_wanted_before_its_reply_is_here():
    begun = HELD.replace(r"9 received 1 requests :7\r\n" + "\n", "")
    script = f"8 {event('wanted')}\n" + r"9 received 1 requests :7\r\n" + "\n10 keep 1 for 5000"
    assert after(script, begun)[-1] == GIVEN_BACK


def test_wanted_is_nothing_to_what_is_given_back_or_unknown():
    assert after(f"10 drop 1\n11 {event('wanted')}\n12 {event('wanted', 'b:1')}") == [GIVEN_BACK]


def test_its_time_is_over():
    script = "10 keep 1 for 5000\n5009 wake"
    assert after(script) == []
    assert after(f"{script}\n5010 wake") == [GIVEN_BACK]
    # In use, it has none.
    assert after("10 keep 1 for 5000\n20 use 2 hold 1 most 1\n5010 wake") == ["ended 2 held"]


def test_lost_while_it_lies_at_hand_and_in_use():
    lost = event("lost", detail=r"$6\r\nforced\r\n")
    told = ["lost 1 forced"]
    assert after(f"10 keep 1 for 5000\n20 {lost}\n21 use 2 hold 1 most 1") == [*told, "ended 2 not held"]
    assert after(f"20 {lost}\n21 keep 1 for 5000") == told


def test_what_is_in_doubt_is_given_back():
    assert after("10 keep 1 for 90000\n40000 use 2 hold 1 most 1")[:1] == ["ended 2 not held"]


def test_what_is_at_hand_is_taken_along():
    script = rf"10 keep 1 for 5000|11 ended 1|12 opened 2|12 received 2 session $5\r\nrun:2\r\n*1\r\n{ALIVE}"
    script += r"|13 received 2 requests :7\r\n|14 use 2 hold 1 most 1"
    assert after(script.replace("|", "\n"))[-1] == "ended 2 held"


def test_an_ephemeral_one_is_lost_with_its_session():
    begun = HELD.replace("watchdog kept", "watchdog ephemeral kept")
    script = "10 keep 1 for 5000\n11 ended 1\n12 use 2 hold 1 most 1"
    assert [line for line in after(script, begun) if line.startswith(("lost", "ended"))] == [
        "lost 1 disconnected",
        "ended 2 not held",
    ]


def test_close_gives_back_what_is_at_hand():
    assert after("10 keep 1 for 5000\n11 close 2 within 1000\n12 use 3 hold 1 most 1") == [
        GIVEN_BACK,
        "ended 3 not held",
    ]


def test_what_nobody_knows():
    assert after("10 keep 5 for 5000\n11 use 2 hold 5 most 1") == ["ended 2 not held"]


def at_once(core, at, what, *said):
    """As the shells do it: without a step, where the core says that nothing else is to be done."""
    if what is Core.keep and core.keeps_at_once(at, *said):
        return
    if what is Core.use and core.uses_at_once(at, said[1]):
        core.outputs.append(Ended(said[0], Outcome("held")))
        return
    core.step(at, what, *said)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_is_done_at_once_is_the_same(script):
    text = script.read_text()
    assert played(text, at_once) == played(text)


def test_what_is_done_at_once():
    done = []

    def step(core, at, what, *said):
        before = core._now
        at_once(core, at, what, *said)
        if what in (Core.keep, Core.use):
            done.append(core._now == before)

    uses = "".join(f"{at} keep 1 for 5000\n{at} use {at} hold 1 most 1\n" for at in range(10, 20))
    played(HELD + uses, step)
    # The first one sets the alarm.
    assert done == [False] + [True] * 19
