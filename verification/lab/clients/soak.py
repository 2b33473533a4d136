"""Clients of the soak in Python. All clients of this process share one object of Holdfast's own client.

usage: soak.py threads|tasks HOST:PORT LEDGER CLIENTS LOCKS PERMITS WAIT SEED

LEDGER is the Unix socket of the checker (verification/lab/src/soak/others.rs). Each client reports a grant before it continues,
and a release before it releases. Runs until the standard input is closed.
"""

import asyncio
import random
import socket
import sys
import threading

import holdfast
import holdfast.asyncio
import redis
import redis.asyncio

# As in verification/lab/src/soak.rs, in seconds.
PAUSE = 0.2, 2.0
HOLD = 0.001, 0.02


class Choices:
    """The random choices of a client."""

    def __init__(self, seed, locks, permits):
        self.rng = random.Random(seed)
        self.locks = locks
        self.permits = permits

    def pause(self):
        return self.rng.uniform(*PAUSE)

    def hold(self):
        return self.rng.uniform(*HOLD)

    def lock(self):
        number = self.rng.randrange(self.locks)
        return number, f"soak:{number}", self.permits if number % 5 == 0 else 1


def work(locks, ledger, choices, wait, stop):
    """The loop of a thread."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(ledger)

        def tell(*words):
            line.sendall((" ".join(map(str, words)) + "\n").encode())
            if not line.recv(1):
                raise SystemExit("the ledger has gone")

        while not stop.wait(choices.pause()):
            number, key, limit = choices.lock()
            try:
                hold = locks.lock(key, limit=limit).acquire(wait)
                tell("granted", number, hold.fence)
                stop.wait(choices.hold())
                tell("gives", number)
                hold.release()
            except holdfast.NotAcquiredError:
                tell("none")
            except (redis.RedisError, OSError) as why:
                tell("failed", repr(why))


async def work_as_task(locks, ledger, choices, wait, stop):
    answers, line = await asyncio.open_unix_connection(ledger)

    async def tell(*words):
        line.write((" ".join(map(str, words)) + "\n").encode())
        if not await answers.read(1):
            raise SystemExit("the ledger has gone")

    while not stop.is_set():
        await asyncio.sleep(choices.pause())
        number, key, limit = choices.lock()
        try:
            hold = await locks.lock(key, limit=limit).acquire(wait)
            await tell("granted", number, hold.fence)
            await asyncio.sleep(choices.hold())
            await tell("gives", number)
            await hold.release()
        except holdfast.NotAcquiredError:
            await tell("none")
        except (redis.RedisError, OSError) as why:
            await tell("failed", repr(why))
    line.close()


def run_threads(address, ledger, choices, wait):
    locks = holdfast.Holdfast(redis.Redis(*address))
    stop = threading.Event()
    workers = [threading.Thread(target=work, args=(locks, ledger, own, wait, stop)) for own in choices]
    for worker in workers:
        worker.start()
    sys.stdin.read()
    stop.set()
    for worker in workers:
        worker.join()


async def run_tasks(address, ledger, choices, wait):
    client = redis.asyncio.Redis(host=address[0], port=address[1])
    locks = holdfast.asyncio.Holdfast(client)
    stop = asyncio.Event()
    tasks = [asyncio.create_task(work_as_task(locks, ledger, own, wait, stop)) for own in choices]
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*tasks)
    await locks.close()
    await client.aclose()


def main():
    kind, address, ledger, *numbers = sys.argv[1:]
    clients, locks, permits, wait, seed = map(int, numbers)
    host, port = address.rsplit(":", 1)
    choices = [Choices(f"{seed}-{number}", locks, permits) for number in range(clients)]
    if kind == "threads":
        run_threads((host, int(port)), ledger, choices, wait)
    else:
        asyncio.run(run_tasks((host, int(port)), ledger, choices, wait))


main()
