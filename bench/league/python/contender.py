"""The Python part of the league: uses locks with redis-py as league.py requests on standard input.

    contender.py redis-py LEAGUE ENDPOINT
"""
from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import redis

LEASE = 10  # seconds: the documentation leaves the choice to the user
Unlock = Callable[[], None]


class Client:
    """One client, with its own connection. It has no tokens and no read-write locks."""

    def __init__(self) -> None:
        host, port = sys.argv[3].split(":")
        self.redis = redis.Redis(host, int(port))

    def lock(self, key: str) -> tuple[int, Unlock]:
        lock = self.redis.lock(key, timeout=LEASE)
        lock.acquire()
        return 0, lock.release


class Driver:
    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.unlocks: dict[str, Unlock] = {}

    def open(self, count: int) -> None:
        while len(self.clients) < count:
            self.clients.append(Client())

    def obey(self, line: str) -> None:
        verb, *words = line.split()
        numbers = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value.isdigit()}
        self.open(numbers.get("clients", 1))
        if verb == "run":
            self.run(numbers, words[-1])
        elif verb == "lock":
            try:
                token, self.unlocks[words[0]] = self.clients[0].lock(words[0])
            except Exception as why:  # noqa: BLE001  # the league reports every error
                say("failed", why)
            else:
                say("held", time.monotonic_ns(), token)
        elif verb == "unlock":
            try:
                self.unlocks[words[0]]()
            except Exception as why:  # noqa: BLE001
                say("failed", why)
            else:
                say("released")
        elif verb == "wait":
            for client in self.clients:
                threading.Thread(target=client.lock, args=(words[0],), daemon=True).start()
            say("waiting")
        else:
            sys.exit(f"contender.py: unknown request {line!r}")

    def run(self, numbers: dict[str, int], path: str) -> None:
        stop = threading.Event()
        count = threading.Lock()
        inside = [0] * numbers["keys"]
        samples: list[tuple[int, ...]] = []
        overlaps = failures = 0

        def work(number: int) -> None:
            nonlocal overlaps, failures
            key = number % numbers["keys"]
            name = f"league:{numbers['round']}:{key}"
            while not stop.is_set():
                asked = time.monotonic_ns()
                try:
                    token, unlock = self.clients[number].lock(name)
                    granted = time.monotonic_ns()
                    with count:
                        inside[key] += 1
                        overlaps += inside[key] > 1
                    with count:
                        inside[key] -= 1
                    releasing = time.monotonic_ns()
                    unlock()
                except Exception as why:  # noqa: BLE001
                    print("contender.py:", why, file=sys.stderr)
                    with count:
                        failures += 1
                    continue
                samples.append((number, key, 0, asked, granted, releasing, time.monotonic_ns(), token))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(numbers["clients"])]
        for thread in threads:
            thread.start()
        time.sleep(numbers["warm"] / 1000)
        say("begin", time.monotonic_ns())
        time.sleep(numbers["ms"] / 1000)
        say("end", time.monotonic_ns())
        stop.set()
        for thread in threads:
            thread.join()
        with open(path, "w") as file:
            file.writelines(" ".join(map(str, sample)) + "\n" for sample in samples)
        say("done", overlaps, failures)


def say(*words: object) -> None:
    print(*words, flush=True)


driver = Driver()
say("ready")
for request in sys.stdin:
    driver.obey(request)
