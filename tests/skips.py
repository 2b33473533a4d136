#!/usr/bin/env python3
"""Checks that each skipped test is on the list of tests that may be skipped, tests/skips.txt.

    tests/skips.py PLACES FILE         prints the skipped tests in FILE (lines `test<TAB>why`); fails if one is not on the list for PLACES
    tests/skips.py --server COMMAND    prints the place for a server, such as redis-7.0; COMMAND prints the server's version
    tests/skips.py --test              tests this script
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).resolve().parent / "skips.txt"


class Entry(NamedTuple):
    places: list[str]
    test: str
    why: str

    def allows(self, places: str, test: str, why: str) -> bool:
        here = any(fnmatchcase(place, pattern) for place in places.split() for pattern in self.places)
        # Brackets are part of a test's name, and not a pattern.
        return here and fnmatchcase(test, self.test.replace("[", "[[]")) and why == self.why


def entries(text: str) -> list[Entry]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    rows = [[field.strip() for field in line.split("|")] for line in lines]
    if wrong := [line for line, row in zip(lines, rows) if len(row) != 3 or not all(row)]:
        sys.exit(f"skips: {LIST.name} has lines that are not `places | test | why`: {wrong}")
    return [Entry(places.split(), test, why) for places, test, why in rows]


def read(path: Path) -> dict[str, str]:
    """The skipped tests, each with the reason."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("\t", 1) for line in lines)


def unlisted(places: str, skipped: Mapping[str, str], allowed: Iterable[Entry]) -> list[str]:
    """The skipped tests that may not be skipped there."""
    return sorted(test for test, why in skipped.items() if not any(it.allows(places, test, why) for it in allowed))


def server(command: Sequence[str]) -> str:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.match(r"(\w+) server v=(\d+\.\d+)", text)
    return f"{match[1].lower()}-{match[2]}" if match else sys.exit(f"skips: {command} prints no version: {text}")


ALLOWED = entries("# a comment\n\nredis-7.* valkey-8.* | a::one | no such fields\npython3.9-* | tests/t.py::two[*] | too old\n")


class Skips(unittest.TestCase):
    def unlisted(self, place, **skipped):
        return unlisted(place, {test.replace("__", "::"): why for test, why in skipped.items()}, ALLOWED)

    def test_listed_skip_passes_at_its_places(self):
        for place in ("redis-7.0", "valkey-8.1"):
            self.assertEqual(self.unlisted(place, a__one="no such fields"), [])
        self.assertEqual(self.unlisted("redis-8.0", a__one="no such fields"), ["a::one"])

    def test_unlisted_test_or_reason_fails(self):
        self.assertEqual(self.unlisted("redis-7.0", a__other="no such fields"), ["a::other"])
        self.assertEqual(self.unlisted("redis-7.0", a__one="it is late"), ["a::one"])

    def test_brackets_are_part_of_name(self):
        for place, expected in (("python3.9-7.0.1", []), ("python3.11-8.1.0", ["tests/t.py::two[x]"])):
            self.assertEqual(unlisted(place, {"tests/t.py::two[x]": "too old"}, ALLOWED), expected)

    def test_list_can_be_read(self):
        self.assertTrue(entries(LIST.read_text()))
        with self.assertRaises(SystemExit):
            entries("redis-7.0 | no reason")

    def test_new_skip_fails(self):
        with tempfile.NamedTemporaryFile("w", suffix="skips") as file:
            file.write("nobody::knows::this\tno reason\n")
            file.flush()
            done = subprocess.run([sys.executable, __file__, "redis-7.0", file.name], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("nobody::knows::this was skipped on redis-7.0", done.stderr)
        done = subprocess.run([sys.executable, __file__, "redis-7.0", os.devnull], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)


def main() -> int:
    if sys.argv[1:] == ["--test"]:
        return not unittest.main(argv=sys.argv[:1], exit=False).result.wasSuccessful()
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
