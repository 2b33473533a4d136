"""The driver of the Python client with asyncio. DRIVER.md describes its input and output."""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python-threads"))

from python_driver import BaseDriver, failure, say  # noqa: E402

import redis.asyncio  # noqa: E402

import holdfast.asyncio  # noqa: E402
from holdfast.redlock import AsyncRedLock  # noqa: E402


class Driver(BaseDriver):
    Client, RedLock = holdfast.asyncio.Holdfast, AsyncRedLock

    def __init__(self):
        super().__init__()
        self.running = {}

    @staticmethod
    def connect(url):
        parts = urlsplit(url)
        if parts.scheme == "redis+cluster":
            return redis.asyncio.RedisCluster(parts.hostname, parts.port)
        if parts.scheme == "redis+sentinel":
            return redis.asyncio.Sentinel([(parts.hostname, parts.port)]).master_for(parts.path[1:])
        return redis.asyncio.Redis.from_url(url)

    async def open(self, url):
        await self.close()
        self.url = url
        self.client(url)
        return {"outcome": "ok"}

    async def acquire(self, hold, wait=None, **where_and_terms):
        self.running[hold] = asyncio.current_task()
        lock = self.lock(**where_and_terms)
        try:
            held = await (lock.try_acquire() if wait == 0 else lock.acquire(None if wait is None else wait / 1000))
        finally:
            del self.running[hold]
        return self.outcome_of(hold, held)

    async def release(self, hold):
        await self.holds.pop(hold).release()
        return {"outcome": "released"}

    async def renew(self, hold, lease):
        await self.holds[hold].renew(lease / 1000)
        return {"outcome": "renewed"}

    async def check(self, hold):
        await self.holds[hold].check()
        return {"outcome": "held"}

    async def cancel(self, hold):
        if hold in self.running:
            self.running[hold].cancel()
        return {"outcome": "ok"}

    async def fork(self):
        child = os.fork()
        if child == 0:
            os._exit(0)
        return {"outcome": "ok" if os.waitpid(child, 0)[1] == 0 else "server"}

    async def block(self, time_):
        time.sleep(time_ / 1000)
        return {"outcome": "ok"}

    async def threads(self):
        return {"outcome": "ok", "count": threading.active_count() + len(asyncio.all_tasks())}

    async def close(self):
        for client in self.forget_all():
            await client.close()
        return {"outcome": "ok"}

    async def call(self, id, call, arguments):
        try:
            if call == "block":
                arguments = {"time_": arguments["time"]}
            outcome = await getattr(self, call)(**arguments)
        except asyncio.CancelledError:
            outcome = {"outcome": "cancelled"}
        except Exception as error:
            outcome = failure(error)
        say(id=id, **outcome)


async def main():
    driver, tasks, loop = Driver(), set(), asyncio.get_running_loop()
    lines = asyncio.Queue()

    def read():
        for text in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, text)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    while (text := await lines.get()) is not None:
        line = json.loads(text)
        task = asyncio.create_task(driver.call(line.pop("id"), line.pop("call"), line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())
