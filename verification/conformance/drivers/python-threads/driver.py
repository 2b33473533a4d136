"""The driver of the Python client with threads: DRIVER.md says what it reads and writes."""

import gc
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "clients/python/src"))

import redis  # noqa: E402
import redis.sentinel  # noqa: E402

import holdfast  # noqa: E402
from holdfast.redlock import RedLock  # noqa: E402

printing = threading.Lock()


def say(**line):
    with printing:
        print(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}), flush=True)


def failure(error):
    # As it arrives in another process.
    error = pickle.loads(pickle.dumps(error))
    if isinstance(error, holdfast.LockLostError):
        return {"outcome": "lost", "reason": error.reason.value, "text": str(error)}
    if isinstance(error, holdfast.NotAcquiredError):
        return {"outcome": "not-granted", "text": str(error)}
    kinds = {
        holdfast.DeadlockError: "deadlock", holdfast.WrongTypeError: "wrong-type", holdfast.NotHeldError: "not-held",
        redis.exceptions.AuthenticationError: "server", redis.ConnectionError: "connection", redis.TimeoutError: "connection",
        holdfast.HoldfastError: "server", ValueError: "invalid", TypeError: "invalid",
    }
    kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), "server")
    if str(error).startswith(("UNCONFIRMED", "NOREPLICAS")):
        kind = "no-replicas"
    return {"outcome": kind, "text": f"{type(error).__name__}: {error}"}


def connect(url):
    parts = urlsplit(url)
    if parts.scheme == "redis+cluster":
        return redis.RedisCluster(parts.hostname, parts.port)
    if parts.scheme == "redis+sentinel":
        return redis.sentinel.Sentinel([(parts.hostname, parts.port)]).master_for(parts.path[1:])
    return redis.Redis.from_url(url)


class Driver(holdfast.Hooks):
    def __init__(self):
        self.url, self.clients, self.holds, self.fences = None, {}, {}, {}

    def lost(self, name, fence, reason):
        for hold, its in list(self.fences.items()):
            if its == fence:
                say(lost=hold, reason=reason.value)

    def open(self, url):
        self.close()
        self.url = url
        self.client(url)
        return {"outcome": "ok"}

    def client(self, url):
        if url not in self.clients:
            self.clients[url] = holdfast.Holdfast(connect(url), hooks=self)
        return self.clients[url]

    def acquire(self, hold, wait=None, **where_and_terms):
        lock = self.lock(**where_and_terms)
        held = lock.try_acquire() if wait == 0 else lock.acquire(None if wait is None else wait / 1000)
        if held is None:
            return {"outcome": "not-granted"}
        self.holds[hold], self.fences[hold] = held, held.fence
        return {"outcome": "held", "fence": held.fence}

    def lock(self, keys, majority=(), lease=None, watched=False, limit=1, shared=False, replicas=0, ephemeral=False):
        terms = {"renew": watched or not lease} | ({"lease": lease / 1000} if lease else {})
        if majority:
            return RedLock([self.client(url) for url in majority], keys[0], server_timeout=5, **terms)
        terms |= {"replicas": replicas, "ephemeral": ephemeral, "limit": limit, "shared": shared}
        return self.client(self.url).lock(keys if len(keys) > 1 else keys[0], **terms)

    def release(self, hold):
        self.holds.pop(hold).release()
        return {"outcome": "released"}

    def renew(self, hold, lease):
        self.holds[hold].renew(lease / 1000)
        return {"outcome": "renewed"}

    def check(self, hold):
        self.holds[hold].check()
        return {"outcome": "held"}

    def fork(self):
        child = os.fork()
        if child == 0:
            self.holds.clear()
            gc.collect()
            os._exit(0)
        return {"outcome": "ok" if os.waitpid(child, 0)[1] == 0 else "server"}

    def threads(self):
        return {"outcome": "ok", "count": threading.active_count()}

    def close(self):
        clients, self.clients, self.holds, self.fences = self.clients, {}, {}, {}
        for client in clients.values():
            client.close()
        return {"outcome": "ok"}

    def call(self, id, call, arguments):
        try:
            outcome = getattr(self, call)(**arguments)
        except Exception as error:
            outcome = failure(error)
        say(id=id, **outcome)


driver = Driver()
for text in sys.stdin:
    line = json.loads(text)
    call = (line.pop("id"), line.pop("call"), line)
    # What may take long runs beside the others.
    if call[1] in ("acquire", "release", "renew", "check"):
        threading.Thread(target=driver.call, args=call, daemon=True).start()
    else:
        driver.call(*call)
