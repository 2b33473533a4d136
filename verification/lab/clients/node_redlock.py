"""node-redlock's algorithm with several servers, as contenders of the lab: parallel attempts and a random delay.

usage: node_redlock.py HOST:PORT,... KEY CLIENTS LEASE-MS SEED

Runs until its standard input is closed, then prints a line of JSON for each request (verification/lab/src/redlock/checker.rs).
"""

import asyncio
import json
import random
import sys
import time

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

# The defaults of node-redlock.
DRIFT_FACTOR = 0.01
RETRY_DELAY = 0.2
RETRY_JITTER = 0.1
# The same as in the other contenders.
PATIENCE = 2.0
# The same as in the other contenders.
SERVER_TIMEOUT = 0.5

RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
FAILED = (redis.RedisError, OSError, asyncio.TimeoutError)


def now():
    return time.monotonic_ns() // 1000


class Client:
    def __init__(self, number, addresses, key, lease, rng, stop):
        self.name = f"node{number}"
        self.number = number
        self.key = key
        self.lease = lease
        self.rng = rng
        self.stop = stop
        self.turns = []
        self.servers = [
            redis.asyncio.Redis(
                host=host,
                port=int(port),
                socket_timeout=SERVER_TIMEOUT,
                socket_connect_timeout=SERVER_TIMEOUT,
                retry=Retry(NoBackoff(), 0),
            )
            for host, port in (at.rsplit(":", 1) for at in addresses)
        ]

    async def run(self):
        while not self.stop.is_set():
            await self.turn()
            await asyncio.sleep(self.rng.uniform(0, 0.03))
        for server in self.servers:
            await server.aclose()

    async def turn(self):
        sent = now()
        failed = 0
        while True:
            value = f"{self.name}:{self.rng.getrandbits(80):020x}"
            began = now()
            votes = await asyncio.gather(*(self.vote(server, value) for server in self.servers))
            drift = round(DRIFT_FACTOR * self.lease) + 2
            until = began + (self.lease - drift) * 1000
            granted = now()
            if sum(votes) > len(self.servers) // 2 and granted < until:
                await self.hold(sent, granted, until, failed)
                await self.release(value)
                return
            failed += 1
            await self.release(value)
            if now() - sent > PATIENCE * 1e6 or self.stop.is_set():
                self.turns.append({"client": self.name, "sent": sent, "failed": failed})
                return
            await asyncio.sleep(RETRY_DELAY + self.rng.uniform(-RETRY_JITTER, RETRY_JITTER))

    async def hold(self, sent, granted, until, failed):
        await asyncio.sleep(self.time_to_hold())
        ended = min(now(), until)
        self.turns.append({"client": self.name, "sent": sent, "granted": granted, "ended": ended, "failed": failed})

    def time_to_hold(self):
        """Like the other contenders: half of the clients like those in Rust, half like those in Python."""
        if self.number % 2:
            return 0.025
        return self.rng.uniform(0.005, 0.05) if self.rng.random() < 0.95 else self.lease / 1000 * 1.2

    async def vote(self, server, value):
        try:
            return bool(await server.set(self.key, value, nx=True, px=self.lease))
        except FAILED:
            return False

    async def release(self, value):
        await asyncio.gather(*(self.give_back(server, value) for server in self.servers))

    async def give_back(self, server, value):
        try:
            await server.eval(RELEASE, 1, self.key, value)
        except FAILED:
            pass


async def main():
    addresses, key, clients, lease, seed = sys.argv[1:]
    stop = asyncio.Event()
    everyone = [
        Client(number, addresses.split(","), key, int(lease), random.Random(f"{seed}-{number}"), stop)
        for number in range(int(clients))
    ]
    work = [asyncio.create_task(client.run()) for client in everyone]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    stop.set()
    await asyncio.gather(*work)
    for client in everyone:
        for turn in client.turns:
            print(json.dumps(turn))


asyncio.run(main())
