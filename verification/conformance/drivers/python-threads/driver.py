"""The driver of the Python client with threads. DRIVER.md describes its input and output."""

import gc
import json
import os
import sys
import threading
from urllib.parse import urlsplit

sys.dont_write_bytecode = True

from python_driver import BaseDriver, failure, say  # noqa: E402

import redis  # noqa: E402
import redis.sentinel  # noqa: E402

import holdfast  # noqa: E402
from holdfast.redlock import RedLock  # noqa: E402


class Driver(BaseDriver):
    Client, RedLock = holdfast.Holdfast, RedLock

    @staticmethod
    def connect(url):
        parts = urlsplit(url)
        if parts.scheme == "redis+cluster":
            return redis.RedisCluster(parts.hostname, parts.port)
        if parts.scheme == "redis+sentinel":
            return redis.sentinel.Sentinel([(parts.hostname, parts.port)]).master_for(parts.path[1:])
        return redis.Redis.from_url(url)

    def open(self, url):
        self.close()
        self.url = url
        self.client(url)
        return {"outcome": "ok"}

    def acquire(self, hold, wait=None, **where_and_terms):
        lock = self.lock(**where_and_terms)
        return self.outcome_of(hold, lock.try_acquire() if wait == 0 else lock.acquire(None if wait is None else wait / 1000))

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
        for client in self.forget_all():
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
    # Calls that may block run in threads of their own.
    if call[1] in ("acquire", "release", "renew", "check"):
        threading.Thread(target=driver.call, args=call, daemon=True).start()
    else:
        driver.call(*call)
