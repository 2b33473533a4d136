"""The driver of the Python client with asyncio: DRIVER.md says what it reads and writes."""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "clients/python/src"))

import redis.asyncio  # noqa: E402

import holdfast.asyncio as holdfast  # noqa: E402


def say(**line):
    print(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}), flush=True)


def failure(error):
    if isinstance(error, holdfast.LockLost) and error.reason == "in doubt":
        return {"outcome": "in-doubt", "text": str(error)}
    if isinstance(error, holdfast.LockLost):
        return {"outcome": "lost", "reason": error.reason}
    kinds = {
        holdfast.Deadlock: "deadlock", holdfast.NoReplicas: "no-replicas", holdfast.WrongType: "wrong-type",
        holdfast.NotHeld: "not-held", redis.ConnectionError: "connection", redis.TimeoutError: "connection",
        ValueError: "invalid",
    }
    kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), "server")
    return {"outcome": kind, "text": f"{type(error).__name__}: {error}"}


class Driver:
    def __init__(self):
        self.client, self.holds, self.running = None, {}, {}

    async def open(self, url):
        self.client, self.holds, self.running = redis.asyncio.Redis.from_url(url), {}, {}
        return {"outcome": "ok"}

    async def acquire(self, hold, keys, wait=None, lease=None, watched=False, limit=1, shared=False, replicas=0, ephemeral=False):
        def tell(loss):
            say(lost=hold, reason=loss.reason)

        self.running[hold] = asyncio.current_task()
        terms = {"timeout": lease / 1000 if lease else None, "replicas": replicas, "ephemeral": ephemeral}
        terms |= {"thread_local": False, "on_lost": tell}
        if watched and lease:
            terms |= {"timeout": None, "watched": lease / 1000}
        if len(keys) > 1:
            lock = holdfast.LockAll(self.client, keys, **terms)
        else:
            lock = holdfast.Lock(self.client, keys[0], limit=0 if shared else limit, **terms)
        try:
            granted = await lock.acquire(blocking=wait != 0, blocking_timeout=wait / 1000 if wait else None)
        finally:
            del self.running[hold]
        if not granted:
            return {"outcome": "not-granted"}
        self.holds[hold] = lock
        return {"outcome": "held", "fence": lock.fence}

    async def release(self, hold):
        await self.holds.pop(hold).release()
        return {"outcome": "released"}

    async def renew(self, hold, lease):
        await self.holds[hold].extend(lease / 1000, replace_ttl=True)
        return {"outcome": "renewed"}

    async def check(self, hold):
        self.holds[hold].check()
        return {"outcome": "held"}

    async def cancel(self, hold):
        if hold in self.running:
            self.running[hold].cancel()
        return {"outcome": "ok"}

    async def drop(self, hold):
        del self.holds[hold]
        gc.collect()
        return {"outcome": "ok"}

    async def close(self):
        for task in list(self.running.values()):
            task.cancel()
        self.holds.clear()
        gc.collect()
        await holdfast.Session(self.client).close()
        return {"outcome": "ok"}

    async def call(self, id, call, arguments):
        try:
            outcome = await getattr(self, call)(**arguments)
        except asyncio.CancelledError:
            outcome = {"outcome": "cancelled"}
        except Exception as error:
            outcome = failure(error)
        say(id=id, **outcome)


async def main():
    driver, calls = Driver(), set()
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while text := await stdin.readline():
        line = json.loads(text)
        call = asyncio.create_task(driver.call(line.pop("id"), line.pop("call"), line))
        calls.add(call)
        call.add_done_callback(calls.discard)


asyncio.run(main())
