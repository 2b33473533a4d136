"""The driver of the Python client with threads: DRIVER.md says what it reads and writes."""

import gc
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "clients/python/src"))

import redis  # noqa: E402

import holdfast  # noqa: E402

printing = threading.Lock()


def say(**line):
    with printing:
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
        self.client, self.holds = None, {}

    def open(self, url):
        self.client, self.holds = redis.Redis.from_url(url), {}
        return {"outcome": "ok"}

    def acquire(self, hold, keys, wait=None, lease=None, watched=False, limit=1, shared=False, replicas=0, ephemeral=False):
        def tell(loss):
            say(lost=hold, reason=loss.reason)

        terms = {"timeout": lease / 1000 if lease else None, "replicas": replicas, "ephemeral": ephemeral}
        terms |= {"thread_local": False, "on_lost": tell}
        if watched and lease:
            terms |= {"timeout": None, "watched": lease / 1000}
        if len(keys) > 1:
            lock = holdfast.LockAll(self.client, keys, **terms)
        else:
            lock = holdfast.Lock(self.client, keys[0], limit=0 if shared else limit, **terms)
        if not lock.acquire(blocking=wait != 0, blocking_timeout=wait / 1000 if wait else None):
            return {"outcome": "not-granted"}
        self.holds[hold] = lock
        return {"outcome": "held", "fence": lock.fence}

    def release(self, hold):
        self.holds.pop(hold).release()
        return {"outcome": "released"}

    def renew(self, hold, lease):
        self.holds[hold].extend(lease / 1000, replace_ttl=True)
        return {"outcome": "renewed"}

    def check(self, hold):
        self.holds[hold].check()
        return {"outcome": "held"}

    def cancel(self, hold):
        return {"outcome": "ok"}

    def drop(self, hold):
        del self.holds[hold]
        gc.collect()
        return {"outcome": "ok"}

    def close(self):
        self.holds.clear()
        gc.collect()
        holdfast.Session(self.client).close()
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
