"""The core does at each step what the one in Rust does, whose tests play the same scripts."""

from pathlib import Path

import pytest

from holdfast._core.core import Core
from holdfast._core.step import Move, Settings
from steps import played, read, written

SCRIPTS = sorted((Path(__file__).parents[2] / "core/steps").glob("*.txt"))
ALIVE = r"*1\r\n*6\r\n$5\r\nalive\r\n:0\r\n*0\r\n$-1\r\n$-1\r\n$16\r\n3750\x2030000\x20667\x201\r\n"


def parts(script):
    """Each life of a file alone, so that the first step that differs is found at once."""
    part = []
    for line in script.splitlines():
        if line.startswith("settings") and any(not one.startswith("#") for one in part):
            yield part
            part = []
        part.append(line)
    yield part


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_core_does_what_the_scripts_say(script):
    for part in parts(script.read_text()):
        assert played("\n".join(part)).splitlines() == part


def test_there_are_scripts():
    assert len(SCRIPTS) > 10
    lives = next(script for script in SCRIPTS if script.stem == "lives").read_text()
    assert lives.count("\nsettings") > 200


class Cluster:
    """Two cores of a cluster, one for each of its nodes: what has to leave one goes to the other."""

    def __init__(self):
        self.cores = [Core(Settings(), in_cluster=True) for _ in range(2)]

    def step(self, at, line):
        return self.told(at, *read(line))

    def told(self, at, now, *what):
        core, done = self.cores[at], []
        core.step(now, *what)
        while core.outputs:
            output = core.outputs.popleft()
            done.append(f"{at} {written(output)}")
            if isinstance(output, Move):
                done += self.told(1 - at, now, Core.take_over, output.moved)
        return done

    def open(self, at, now):
        self.step(at, f"{now} opened 1")
        self.step(at, rf"{now} received 1 session $5\r\nrun:{at}\r\n{ALIVE}")


# As in clients/core/tests/steps.rs: `take` can't be read from text.


def test_what_another_node_serves_goes_on_there_with_those_who_wait_for_it():
    cluster = Cluster()
    cluster.step(0, "0 acquire 1 by a## keys k wait 5000 lease 9000 watchdog")
    cluster.open(0, 5)
    assert cluster.step(0, r"9 received 1 requests -MOVED\x207\x20b:1\r\n") == ["0 moved 1 MOVED 7 b:1", "1 open 1"]
    cluster.open(1, 20)
    assert cluster.step(1, r"30 received 1 requests :7\r\n") == ["1 ended 1 granted 7"]
    assert cluster.step(1, "40 release 2 hold 1 within 1000") == ["1 send 1 requests LOCK.RELEASE k a##1 ALL"]
    assert cluster.step(1, r"50 received 1 requests -ASK\x207\x20a:1\r\n") == [
        "1 moved 1 ASK 7 a:1",
        "0 send 1 requests ASKING",
        "0 send 1 requests LOCK.RELEASE k a##1 ALL",
    ]
    assert not cluster.cores[0].is_settled
    assert cluster.cores[1].is_settled
    assert cluster.step(0, r"60 received 1 requests +OK\r\n:0\r\n") == ["0 ended 2 released"]


def test_nodes_that_name_each_other_are_asked_at_their_leisure():
    cluster = Cluster()
    cluster.step(0, "0 acquire 1 by a## keys k wait forever watchdog")
    cluster.open(0, 5)
    cluster.step(0, r"9 received 1 requests -MOVED\x207\x20b:1\r\n")
    cluster.open(1, 20)
    assert cluster.step(1, r"30 received 1 requests -MOVED\x207\x20a:1\r\n") == ["1 moved 1 MOVED 7 a:1"]
    words = "LOCK.ACQUIRE k a##1 WAIT 0 WAITED 130 HOLDS 1 LEASE 30000 WATCHDOG SESSION run:0"
    assert cluster.step(0, "130 wake") == [f"0 send 1 requests {words}"]


def test_who_has_left_is_not_answered_where_he_was():
    cluster = Cluster()
    cluster.step(0, "0 acquire 1 by a## keys k wait forever lease 9000 watchdog")
    cluster.open(0, 5)
    cluster.open(1, 6)
    assert cluster.step(0, "10 leave 1")[0] == "0 moved 1 MOVED"
    assert cluster.step(0, r"11 received 1 requests :7\r\n") == []
