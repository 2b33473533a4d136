#!/usr/bin/env python3
"""Whether what tests have skipped is on the list of what they may skip, tests/skips.txt. Prints it.

    scripts/skips.py PLACES FILE         what was skipped there, a line `test<TAB>why` each: fails if one is not on the list
    scripts/skips.py --server COMMAND    the place that a server is, such as redis-7.0: COMMAND prints its version
"""
from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).resolve().parent.parent / "tests" / "skips.txt"


class Entry(NamedTuple):
    places: list[str]
    test: str
    why: str

    def allows(self, places: str, test: str, why: str) -> bool:
        here = any(fnmatchcase(place, pattern) for place in places.split() for pattern in self.places)
        # Brackets are part of a test's name here, and no pattern.
        return here and fnmatchcase(test, self.test.replace("[", "[[]")) and why == self.why


def entries(text: str) -> list[Entry]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    rows = [[field.strip() for field in line.split("|")] for line in lines]
    if wrong := [line for line, row in zip(lines, rows) if len(row) != 3 or not all(row)]:
        sys.exit(f"skips: {LIST.name} has lines that are not `places | test | why`: {wrong}")
    return [Entry(places.split(), test, why) for places, test, why in rows]


def read(path: Path) -> dict[str, str]:
    """What was skipped, and why."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("\t", 1) for line in lines)


def unlisted(places: str, skipped: Mapping[str, str], allowed: Iterable[Entry]) -> list[str]:
    """Those that may not be skipped there."""
    return sorted(test for test, why in skipped.items() if not any(it.allows(places, test, why) for it in allowed))


def server(command: Sequence[str]) -> str:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.match(r"(\w+) server v=(\d+\.\d+)", text)
    return f"{match[1].lower()}-{match[2]}" if match else sys.exit(f"skips: {command} prints no version: {text}")


def main() -> int:
    if sys.argv[1] == "--server":
        print(server(sys.argv[2:]))
        return 0
    where, file = sys.argv[1], Path(sys.argv[2])
    skipped = read(file)
    for test, why in sorted(skipped.items()):
        print(f"    {test}: {why}", file=sys.stderr)
    new = unlisted(where, skipped, entries(LIST.read_text()))
    for test in new:
        print(f"skips: FAILED: {test} was skipped on {where}, and is not on the list tests/skips.txt", file=sys.stderr)
    print(f"skips: {len(skipped)} on {where}, {len(new)} of them not on the list", file=sys.stderr)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
