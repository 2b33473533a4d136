#!/usr/bin/env python3
"""Latency of another client's GET while 2,000 connections send the most expensive commands that a client may: those of tests/attacks, repeatedly.

    bench/hostile.py [SECONDS]      60 s of each load, if not said; HOLDFAST_MODULE, HOLDFAST_SERVER as for the tests

A measurement, not a test. At first, each connection sends its next request when it has the answer to the last one, so the server has up to
2,000 requests to execute before a GET, whatever they are: the same number of connections that send only GET show how long that takes. Then
they send half as many requests of the worst inputs a second, so fewer of them precede a GET. The client that is measured is a
process of its own, sends one GET each 2 ms, and is scheduled before the others where that is allowed.
"""
from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import resource
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable
from collections import deque
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from resp import Server  # noqa: E402

CONNECTIONS = 2_000
LARGE, CROWD, KEYS = 12, 2_400, 128
PAUSE = 0.002


def request(*words: object) -> bytes:
    parts = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(it), it) for it in parts)


def attacks(number: int, choose: random.Random) -> bytes:
    """A random request."""
    keys = [f"attack:{choose.randrange(KEYS)}" for _ in range(KEYS)]
    large, owner = f"large:{choose.randrange(LARGE)}", f"owner:{number}"
    return choose.choice([
        # The maximum number of keys: granted, refused, renewed, released; and one too many.
        lambda: request("LOCK.MACQUIRE", KEYS, *dict.fromkeys(keys + [f"attack:{it}" for it in range(KEYS)]), owner, "LEASE", 1),
        lambda: request("LOCK.MACQUIRE", KEYS, *[f"attack:{it}" for it in range(KEYS)], owner, "WAIT", 20),
        lambda: request("LOCK.MRENEW", KEYS, *[f"attack:{it}" for it in range(KEYS)], owner),
        lambda: request("LOCK.MRELEASE", KEYS, *[f"attack:{it}" for it in range(KEYS)], owner, "ALL"),
        lambda: request("LOCK.MACQUIRE", KEYS + 1, *[f"attack:{it}" for it in range(KEYS + 1)], owner),
        # Locks with the maximum number of holders, read again after another client has written them.
        lambda: request("HSET", large, "holder:1", choose.randrange(1, 9)),
        lambda: request("LOCK.ACQUIRE", large, owner, "SHARED", "LEASE", 1),
        lambda: request("LOCK.RENEW", large, "holder:1"),
        lambda: request("LOCK.INFO", large),
        lambda: request("LOCK.INFO", large, "COUNT", 5000),
        # Long queues, and commands that read all of them.
        lambda: request("LOCK.ACQUIRE", f"hot:{choose.randrange(4)}", owner, "WAIT", 50, "LEASE", 1),
        lambda: request("LOCK.ACQUIRE", f"hot:{choose.randrange(4)}", owner, "SHARED", "WAIT", 50, "LEASE", 1),
        lambda: request("LOCK.WAITERS", "hot:0", "COUNT", 5000),
        lambda: request("LOCK.TOP", "COUNT", 1000),
        lambda: request("LOCK.FORCE", f"hot:{choose.randrange(4)}"),
        # Long names, and distant deadlines.
        lambda: request("LOCK.ACQUIRE", f"long:{number}", "o" * 4096, "LEASE", 1),
        lambda: request("LOCK.ACQUIRE", f"far:{number}", owner, "LEASE", 315360000000, "EPHEMERAL"),
        lambda: request("LOCK.SESSION"),
    ])()


def plain(number: int, choose: random.Random) -> bytes:
    return request("GET", f"plain:{choose.randrange(1000)}")


def load(port: int, ends: float, next_request: Callable[[int, random.Random], bytes], rate: float, count: object) -> None:
    """All connections, served by one thread, each with at most one pending request, and together at most `rate` requests a second. Data that
    ends with a newline counts as a reply: then the connection sends its next request in its turn."""
    choose = random.Random(1)
    poll = selectors.DefaultSelector()
    for number in range(CONNECTIONS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        poll.register(connection, selectors.EVENT_READ, number)
    idle, sent, begin = deque(poll.get_map().values()), 0, time.monotonic()
    while (now := time.monotonic()) < ends:
        while idle and sent < (now - begin) * rate:
            key = idle.popleft()
            key.fileobj.send(next_request(key.data, choose))
            sent += 1
        for key, _ in poll.select(0.001):
            with suppress(BlockingIOError):
                if key.fileobj.recv(1 << 18).endswith(b"\n"):
                    idle.append(key)
    count.value = sent


def measure(port: int, seconds: float, pid: int) -> tuple[list[float], list[float]]:
    """The latencies of GET in ms, and the processor time that the server used meanwhile."""
    with suppress(OSError):
        os.nice(-20)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line, times, used = request("GET", "plain:1"), [], []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            before, begin = server_time(pid), time.perf_counter()
            connection.sendall(line)
            connection.recv(4096)
            times.append((time.perf_counter() - begin) * 1e3)
            used.append((server_time(pid) - before) / 1e6)
            time.sleep(PAUSE)
    return times, used


def server_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def prepare(server: Server) -> None:
    ask = server.connect()
    for lock, holder in itertools.product(range(LARGE), range(0, CROWD, 100)):
        fields = " ".join(f"holder:{holder + it} 1" for it in range(100))
        ask(f"HSET large:{lock} #limit 5000 {fields}")
    for key in range(1000):
        ask(f"SET plain:{key} value")


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 60
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    print("| 2,000 connections send | requests/s | GET p50 | p99 | max | server's time meanwhile: p99 | max |\n|---|---|---|---|---|---|---|")
    row("GET", plain, math.inf, seconds)
    served = row("the worst inputs", attacks, math.inf, seconds)
    row("the worst inputs, half as many a second", attacks, served / 2, seconds)


def row(name: str, next_request: Callable[[int, random.Random], bytes], rate: float, seconds: float) -> float:
    """Measures one load and prints it. Returns the requests a second."""
    with Server() as server:
        prepare(server)
        count = multiprocessing.Value("Q", 0)
        senders = multiprocessing.Process(target=load, args=(server.port, time.monotonic() + seconds + 2, next_request, rate, count))
        senders.start()
        time.sleep(1)
        times, used = measure(server.port, seconds, server.process.pid)
        senders.join()
    at = lambda values, part: statistics.quantiles(values, n=100)[part - 1]
    figures = (at(times, 50), at(times, 99), max(times), at(used, 99), max(used))
    print(f"| {name} | {count.value / (seconds + 2):,.0f} | " + " | ".join(f"{it:.2f} ms" for it in figures) + " |", flush=True)
    return count.value / (seconds + 2)


if __name__ == "__main__":
    main()
