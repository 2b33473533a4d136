"""The driver of the Python client with asyncio: DRIVER.md says what it reads and writes."""

import asyncio
import gc
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "clients/python/src"))

import redis.asyncio  # noqa: E402

import holdfast.asyncio as holdfast  # noqa: E402


printing = threading.Lock()


def say(**line):
    with printing:
        print(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}), flush=True)


def failure(error):
    # As it arrives in another process.
    error = pickle.loads(pickle.dumps(error))
    if isinstance(error, holdfast.LockLost) and error.reason == "in doubt":
        return {"outcome": "in-doubt", "text": str(error)}
    if isinstance(error, holdfast.LockLost):
        return {"outcome": "lost", "reason": error.reason, "text": str(error)}
    kinds = {
        holdfast.Deadlock: "deadlock", holdfast.NoReplicas: "no-replicas", holdfast.WrongType: "wrong-type",
        holdfast.NotHeld: "not-held", redis.ConnectionError: "connection", redis.TimeoutError: "connection",
        holdfast.LockError: "server", ValueError: "invalid", TypeError: "invalid",
    }
    kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), "server")
    return {"outcome": kind, "text": f"{type(error).__name__}: {error}"}


def connect(url):
    parts = urlsplit(url)
    if parts.scheme == "redis+cluster":
        return redis.asyncio.RedisCluster(parts.hostname, parts.port)
    if parts.scheme == "redis+sentinel":
        return redis.asyncio.Sentinel([(parts.hostname, parts.port)]).master_for(parts.path[1:])
    return redis.asyncio.Redis.from_url(url)


class Driver:
    def __init__(self):
        self.url, self.clients, self.holds, self.running = None, {}, {}, {}

    async def open(self, url):
        self.url, self.clients, self.holds, self.running = url, {}, {}, {}
        self.client(url)
        return {"outcome": "ok"}

    def client(self, url):
        if url not in self.clients:
            self.clients[url] = connect(url)
        return self.clients[url]

    async def acquire(self, hold, wait=None, callback=None, **where_and_terms):
        async def tell(loss):
            say(lost=hold, reason=loss.reason)
            if callback == "throws":
                raise RuntimeError("thrown by a callback, as it was told to")
            if callback == "exits":
                sys.exit(1)
            if callback == "blocks":
                await asyncio.sleep(3600)
            if callback == "locks":
                async with holdfast.Lock(self.client(self.url), "of-a-callback"):
                    pass

        self.running[hold] = asyncio.current_task()
        lock = self.lock(tell, **where_and_terms)
        try:
            granted = await lock.acquire(blocking=wait != 0, blocking_timeout=wait / 1000 if wait else None)
        finally:
            del self.running[hold]
        if not granted:
            return {"outcome": "not-granted"}
        self.holds[hold] = lock
        return {"outcome": "held", "fence": lock.fence}

    def lock(
        self, tell, keys, at=(), majority=(), lease=None, watched=False, limit=1, shared=False, replicas=0, ephemeral=False,
        keep=None, keep_uses=None
    ):
        told = {"thread_local": False, "on_lost": tell}
        terms = {"timeout": None if watched or not lease else lease / 1000}
        if watched and lease:
            terms["watched"] = lease / 1000
        if keep is not None:
            terms["keep"] = keep / 1000
        if keep_uses is not None:
            terms["keep_uses"] = keep_uses
        if majority:
            return holdfast.RedLock([self.client(url) for url in majority], keys[0], server_timeout=5, **terms, **told)
        terms |= {"replicas": replicas, "ephemeral": ephemeral}
        if at:
            return holdfast.MultiLock([holdfast.Lock(self.client(url), key, **terms) for url, key in zip(at, keys)], **told)
        if len(keys) > 1:
            return holdfast.LockAll(self.client(self.url), keys, **terms, **told)
        return holdfast.Lock(self.client(self.url), keys[0], limit=0 if shared else limit, **terms, **told)

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

    async def fork(self):
        child = os.fork()
        if child == 0:
            self.holds.clear()
            gc.collect()
            os._exit(0)
        return {"outcome": "ok" if os.waitpid(child, 0)[1] == 0 else "server"}

    async def block(self, **how_long):
        time.sleep(how_long["time"] / 1000)
        return {"outcome": "ok"}

    async def threads(self):
        tasks = sum(len(asyncio.all_tasks(it.loop)) for it in runtimes)
        return {"outcome": "ok", "count": threading.active_count() + tasks}

    async def close(self):
        for task in list(self.running.values()):
            task.cancel()
        self.holds.clear()
        gc.collect()
        for client in self.clients.values():
            await holdfast.Session(client).close()
            await client.aclose()
        return {"outcome": "ok"}

    async def call(self, id, call, arguments):
        try:
            outcome = await getattr(self, call)(**arguments)
        except asyncio.CancelledError:
            outcome = {"outcome": "cancelled"}
        except Exception as error:
            outcome = failure(error)
        say(id=id, **outcome)


class Runtime(threading.Thread):
    """An event loop in a thread of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.start()
        self.begun.wait()

    def run(self):
        asyncio.run(self.main())

    async def main(self):
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.begun.set()
        await self.over.wait()

    def end(self):
        self.loop.call_soon_threadsafe(self.over.set)
        self.join()


# All calls run in the last one.
driver, runtimes = Driver(), [Runtime()]
for text in sys.stdin:
    line = json.loads(text)
    id, call = line.pop("id"), line.pop("call")
    if call == "runtime":
        if line["is"] == "another":
            runtimes.append(Runtime())
        else:
            runtimes.pop(0).end()
        say(id=id, outcome="ok")
    else:
        asyncio.run_coroutine_threadsafe(driver.call(id, call, line), runtimes[-1].loop)
for runtime in runtimes:
    runtime.end()
