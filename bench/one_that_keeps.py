"""A process that uses locks in Python, with the client of this project or redis-py's own. Called by the bench program.

usage: one_that_keeps.py NAME PORT NUMBER PROCESSES LOCKS OWN MILLISECONDS
"""

import json
import pathlib
import random
import sys
import time

import redis

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "clients" / "python" / "src"))
import holdfast  # noqa: E402


class Ours:
    """A lock of this project with redis-py's method names."""

    def __init__(self, lock):
        self.lock = lock

    def acquire(self):
        self.hold = self.lock.acquire()

    def release(self):
        self.hold.release()


def main():
    name, *numbers = sys.argv[1:]
    port, number, processes, locks, own, window = map(int, numbers)
    client = redis.Redis(port=port)
    locks = holdfast.Holdfast(client)
    make = {
        "Python": lambda key: Ours(locks.lock(key)),
        "redis-py Lock": lambda key: client.lock(key, timeout=60),
    }[name]
    every = [make(f"kept:{lock}") for lock in range(locks)]
    first = make("first")
    first.acquire()
    first.release()

    def chosen():
        if locks == 1:
            return every[0]
        process = number
        if random.randrange(100) >= own:
            process = (number + 1 + random.randrange(processes - 1)) % processes
        return every[random.randrange(locks // processes) * processes + process]

    print("ready", flush=True)
    sys.stdin.readline()
    times = []
    clock = time.perf_counter
    end = clock() + window / 1000
    now = clock()
    while now < end:
        lock = chosen()
        since = clock()
        lock.acquire()
        lock.release()
        now = clock()
        times.append((now - since) * 1e6)
    times.sort()
    p50, p99 = (times[min(int(share * len(times)), len(times) - 1)] for share in (0.5, 0.99))
    print(json.dumps({"uses": len(times), "p50": p50, "p99": p99}), flush=True)
    # Until its input ends: nothing is released meanwhile.
    sys.stdin.readline()


if __name__ == "__main__":
    main()
