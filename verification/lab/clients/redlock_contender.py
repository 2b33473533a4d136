"""Holdfast's RedLock in Python, as contenders of the lab: half of the clients with threads, half with asyncio.

usage: redlock_contender.py HOST:PORT,... KEY CLIENTS LEASE-MS SEED

Runs until its standard input is closed, then prints a line of JSON for each request: the client, the times of request, grant and
end (microseconds of the monotonic clock), the fencing token, whether the hold was lost, and the number of failed attempts.
"""

import asyncio
import json
import random
import sys
import threading
import time

import redis
import redis.asyncio

import holdfast
import holdfast.asyncio
from holdfast.redlock import AsyncRedLock, RedLock

# The timeout of each request, in seconds.
PATIENCE = 2.0


def now():
    return time.monotonic_ns() // 1000


class Client:
    """A client and its record."""

    def __init__(self, number, addresses, key, lease, seed, stop):
        self.name = f"py{number}"
        self.addresses = [at.rsplit(":", 1) for at in addresses]
        self.key = key
        self.lease = lease / 1000
        self.rng = random.Random(f"{seed}-{number}")
        self.stop = stop
        self.turns = []

    def failed(self, sent):
        self.turns.append({"client": self.name, "sent": sent, "failed": 1})

    def held(self, hold, sent, granted, certain):
        """Records a hold just before its release. `certain`: until when it was held at least."""
        lost = hold.lost.is_set()
        self.turns.append(
            {
                "client": self.name,
                "sent": sent,
                "granted": granted,
                "ended": min(now(), certain),
                "fence": hold.fence,
                "lost": lost,
                "failed": 0,
            }
        )

    def time_to_hold(self):
        """Mostly short, sometimes longer than the lease, so that the hold expires."""
        return self.rng.uniform(0.005, 0.05) if self.rng.random() < 0.98 else self.lease * 1.2

    def terms(self):
        return {"lease": self.lease, "renew": False}

    def run(self):
        servers = [holdfast.Holdfast(redis.Redis(host=host, port=int(port))) for host, port in self.addresses]
        while not self.stop.is_set():
            sent = now()
            try:
                hold = RedLock(servers, self.key, **self.terms()).acquire(PATIENCE)
                granted = now()
                certain = granted + int(hold.remaining() * 1e6)
                time.sleep(self.time_to_hold())
                self.held(hold, sent, granted, certain)
                hold.release()
            except holdfast.LockLostError:
                pass
            except (redis.RedisError, OSError):
                self.failed(sent)
            time.sleep(self.rng.uniform(0, 0.03))

    async def run_in_loop(self):
        servers = [
            holdfast.asyncio.Holdfast(redis.asyncio.Redis(host=host, port=int(port))) for host, port in self.addresses
        ]
        while not self.stop.is_set():
            sent = now()
            try:
                hold = await AsyncRedLock(servers, self.key, **self.terms()).acquire(PATIENCE)
                granted = now()
                certain = granted + int(hold.remaining() * 1e6)
                await asyncio.sleep(self.time_to_hold())
                self.held(hold, sent, granted, certain)
                await hold.release()
            except holdfast.LockLostError:
                pass
            except (redis.RedisError, OSError):
                self.failed(sent)
            await asyncio.sleep(self.rng.uniform(0, 0.03))


async def all_of(clients):
    await asyncio.gather(*(client.run_in_loop() for client in clients))


def main():
    addresses, key, count, lease, seed = sys.argv[1:]
    stop = threading.Event()
    clients = [Client(number, addresses.split(","), key, int(lease), seed, stop) for number in range(int(count))]
    work = [threading.Thread(target=client.run) for client in clients[::2]]
    work.append(threading.Thread(target=lambda: asyncio.run(all_of(clients[1::2]))))
    for thread in work:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in work:
        thread.join()
    for client in clients:
        for turn in client.turns:
            print(json.dumps(turn))
    sys.stdout.flush()


main()
