"""The common part of the drivers of the Python client. DRIVER.md describes their input and output."""

import json
import pickle
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "clients/python/src"))

import redis  # noqa: E402

import holdfast  # noqa: E402

printing = threading.Lock()


def say(**line):
    with printing:
        print(json.dumps({**line, "at": time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}), flush=True)


def failure(error):
    # As another process would receive the error.
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


class BaseDriver(holdfast.Hooks):
    """The clients and holds of a driver. A subclass names the client's classes, and makes the calls."""

    Client = RedLock = connect = None

    def __init__(self):
        self.url, self.clients, self.holds, self.fences = None, {}, {}, {}

    def lost(self, name, fence, reason):
        for hold, its in list(self.fences.items()):
            if its == fence:
                say(lost=hold, reason=reason.value)

    def client(self, url):
        if url not in self.clients:
            self.clients[url] = self.Client(self.connect(url), hooks=self)
        return self.clients[url]

    def lock(self, keys, majority=(), lease=None, watched=False, limit=1, shared=False, replicas=0, ephemeral=False):
        terms = {"renew": watched or not lease} | ({"lease": lease / 1000} if lease else {})
        if majority:
            return self.RedLock([self.client(url) for url in majority], keys[0], server_timeout=5, **terms)
        terms |= {"replicas": replicas, "ephemeral": ephemeral, "limit": limit, "shared": shared}
        return self.client(self.url).lock(keys if len(keys) > 1 else keys[0], **terms)

    def outcome_of(self, hold, held):
        if held is None:
            return {"outcome": "not-granted"}
        self.holds[hold], self.fences[hold] = held, held.fence
        return {"outcome": "held", "fence": held.fence}

    def forget_all(self):
        """Forgets all clients and holds. Returns the clients, for the caller to close."""
        clients, self.clients, self.holds, self.fences = self.clients, {}, {}, {}
        return clients.values()
