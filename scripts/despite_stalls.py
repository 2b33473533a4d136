#!/usr/bin/env python3
"""Tests, on machines that others use as well.

    scripts/despite_stalls.py cargo test [ARGUMENT...] -- [ARGUMENT...]
    scripts/despite_stalls.py PYTHON -m pytest [ARGUMENT...]

Many tests hold short leases. A machine that stands still for longer than such a lease makes them fail, as it makes a client
lose its lock. So if it did stand still, those that failed are run again, one at a time, at most three times; that is told. Tests
that fail while it did not stand still have failed, and so have more than a few.
"""
from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Union

# More than these do not fail because of the machine.
MOST = 12
ROUNDS = 3
# Seconds that a thread of ours slept beyond what it asked for; and the share of the processors' time that others used.
GAP = 0.2
STOLEN = 0.01


class Stalls:
    """For how long the machine stood still between `with` and its end, in seconds."""

    def __enter__(self) -> Stalls:
        self.gap = 0.0
        self._before = processors()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._note_gaps, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        stolen, total = (after - before for before, after in zip(self._before, processors()))
        self.stolen = stolen / max(total, 1)

    def _note_gaps(self) -> None:
        pause = 0.01
        while True:
            before = time.monotonic()
            if self._over.wait(pause):
                return
            self.gap = max(self.gap, time.monotonic() - before - pause)

    def __bool__(self) -> bool:
        return self.gap >= GAP or self.stolen >= STOLEN

    def __str__(self) -> str:
        return f"for {self.gap * 1000:.0f} ms at once, and others used {self.stolen:.1%} of its processors"


def processors() -> tuple[int, int]:
    """The time that others have used the processors, and all of their time, in the same unit; see proc(5)."""
    with open("/proc/stat", encoding="ascii") as stat:
        times = [int(word) for word in stat.readline().split()[1:9]]
    return times[7], sum(times)


class CargoTest:
    """Programs of tests written in Rust."""

    FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
    BEGUN = re.compile(r"^running \d+ tests?$", re.MULTILINE)
    ENDED = re.compile(r"^test result: ", re.MULTILINE)

    @classmethod
    def failures(cls, output: str) -> list[str]:
        """The tests that failed; none if a test program did not come to its end, which is nobody's fault but its own."""
        ended = len(cls.BEGUN.findall(output)) == len(cls.ENDED.findall(output))
        return sorted(set(cls.FAILED.findall(output))) if ended else []

    @staticmethod
    def again(names: Sequence[str]) -> list[str]:
        """The arguments of the test programs to run these alone."""
        return ["--exact", "--test-threads=1", *names]


class PyTest:
    """Tests written in Python."""

    FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
    ENDED = re.compile(r"^\d+ failed.* in \S+s|^\d+ passed.* in \S+s", re.MULTILINE)

    @classmethod
    def failures(cls, output: str) -> list[str]:
        """The same."""
        return sorted(set(cls.FAILED.findall(output))) if cls.ENDED.search(output) else []

    @staticmethod
    def again(names: Sequence[str]) -> list[str]:
        """The same."""
        return ["-q", "-rfEs", *names]


Tool = Union[type[CargoTest], type[PyTest]]


def despite_stalls(
    tool: Tool, run: Callable[[Sequence[str]], tuple[int, str]], arguments: Sequence[str], say: Callable[[str], None]
) -> tuple[int, str, list[str]]:
    """Runs tests with `run`, which takes arguments and returns the status and the output. Returns the status, the output of
    the first run, and the tests that have failed in the end."""
    with Stalls() as stalls:
        status, first = run(arguments)
    failed = tool.failures(first) if status else []
    for _ in range(ROUNDS):
        if status == 0 or not stalls or not 0 < len(failed) <= MOST:
            break
        say(f"the machine stood still {stalls}; again, one at a time: {' '.join(failed)}")
        with Stalls() as stalls:
            status, output = run(tool.again(failed))
        failed = tool.failures(output) if status else []
    return status, first, failed


def main() -> int:
    tool: Tool = CargoTest if sys.argv[1] == "cargo" else PyTest
    words = sys.argv[1:]
    # What follows belongs to the test program, and is another when tests are run again.
    split = words.index("--" if tool is CargoTest else "pytest") + 1

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        process = subprocess.Popen([*words[:split], *arguments], stdout=subprocess.PIPE, text=True, errors="replace")
        assert process.stdout
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
        return process.wait(), "".join(lines)

    def say(text: str) -> None:
        print(f"test: {text}", file=sys.stderr, flush=True)

    return despite_stalls(tool, run, words[split:], say)[0]


if __name__ == "__main__":
    sys.exit(main())
