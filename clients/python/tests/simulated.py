"""Servers and clients in one thread and with a clock of their own, so that a thousand runs take seconds.

The clients run the flows of holdfast as they are; only what they do with a socket and a clock is played.
"""

import heapq
import itertools
from types import SimpleNamespace

from holdfast import _multilock
from holdfast._core.core import Core
from holdfast._core.step import FOREVER, Outcome

LEASE = 30.0


class World:
    """The time, and what is to happen when."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.agenda = []
        self.numbers = itertools.count()
        monkeypatch.setattr(_multilock, "now", lambda: self.now)

    def at(self, seconds, action):
        entry = [self.now + seconds, next(self.numbers), action]
        heapq.heappush(self.agenda, entry)
        return entry

    def run(self, until):
        """Goes on until nothing is to happen before `until`."""
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        self.now = until


class Server:
    """The rule of the module, for mutexes of several keys: one queue for all keys."""

    def __init__(self, world):
        self.world = world
        self.tokens = itertools.count(1)
        self.held = {}  # key: (owner, token, client)
        self.queue = []  # (keys, owner, client)

    def acquire(self, keys, owner, client, wait):
        if self._may(keys, self.queue):
            return self._grant(keys, owner, client)
        if not wait:
            return None
        entry = (keys, owner, client)
        self.queue.append(entry)
        if wait != float("inf"):
            self.world.at(wait, lambda: self._timeout(entry))
        return "WAITING"

    def _may(self, keys, ahead):
        return not any(key in self.held for key in keys) and not any(set(keys) & set(other[0]) for other in ahead)

    def _grant(self, keys, owner, client):
        token = next(self.tokens)
        self.held.update(dict.fromkeys(keys, (owner, token, client)))
        return token

    def _timeout(self, entry):
        if entry in self.queue:
            self.queue.remove(entry)
            entry[2].tell(self, entry[1], Outcome("not granted"))
            self._serve()

    def _serve(self):
        for entry in list(self.queue):
            if self._may(entry[0], self.queue[: self.queue.index(entry)]):
                self.queue.remove(entry)
                token = self._grant(*entry)
                entry[2].tell(self, entry[1], Outcome("granted", token))

    def release(self, owner, keys=None):
        for key, holder in list(self.held.items()):
            if holder[0] == owner and (keys is None or key in keys):
                del self.held[key]
        self._serve()

    def cancel(self, owner):
        self.queue = [entry for entry in self.queue if entry[1] != owner]
        self.release(owner)

    def gone(self, client):
        """Its connection ends; what it holds runs out a lease later."""
        self.queue = [entry for entry in self.queue if entry[2] is not client]
        self._serve()
        for owner in {holder[0] for holder in self.held.values() if holder[2] is client}:
            self.world.at(LEASE, lambda owner=owner: self.release(owner))


class Client:
    """A process: its homes at the servers, and one flow that it runs."""

    def __init__(self, world, servers, rng):
        self.world = world
        self.rng = rng
        self.homes = [Home(self, server) for server in servers]
        self.alive = True

    def delay(self):
        return self.rng.uniform(0.0001, 0.01)

    def tell(self, server, owner, outcome):
        home = next(home for home in self.homes if home.server is server)
        pending = home.waiting.get(owner)
        if pending is not None:
            self.world.at(self.delay(), lambda: self.alive and home.ended(pending, outcome))

    def run(self, flow, then=lambda outcome: None):
        self._step(flow, lambda: next(flow), then)

    def _step(self, flow, advance, then):
        if not self.alive:
            return
        try:
            step = advance()
        except StopIteration as end:
            then(end.value)
            return

        def go_on(value):
            self._step(flow, lambda: flow.send(value), then)

        step(go_on)

    def kill(self):
        self.alive = False
        for home in self.homes:
            home.server.gone(self)


class Home:
    """What a flow does at one server. A step is a function that is told how to go on."""

    def __init__(self, client, server):
        self.client = client
        self.server = server
        self.world = client.world
        self.node = SimpleNamespace(core=SimpleNamespace(pairs=1))
        # By owner, who has asked for a lock.
        self.waiting = {}

    def find(self, key):
        return lambda go_on: go_on(self.node)

    def begin(self, pending, what, *said):
        def heard():
            if self.client.alive:
                outcome = self._serve(pending, what, *said)
                if outcome is not None:
                    self.world.at(self.client.delay(), lambda: self.ended(pending, outcome))

        self.world.at(self.client.delay(), heard)

    def _serve(self, pending, what, *said):
        if what is Core.release:
            self.server.release(pending.hold.owner, pending.hold.keys)
            return Outcome("released")
        if what is Core.renew:
            return Outcome("renewed", pending.hold.token)
        assert what is Core.acquire
        _, keys, _, wait, owner = said
        self.waiting[owner] = pending
        wait = float("inf") if wait == FOREVER else max(wait, 0) / 1000
        token = self.server.acquire(keys, owner, self.client, wait)
        if token == "WAITING":
            return None
        return Outcome("not granted") if token is None else Outcome("granted", token)

    def ended(self, pending, outcome):
        if pending.outcome is None:
            if outcome.kind == "granted":
                pending.hold.granted(outcome.detail)
            pending.outcome = outcome
            pending.wake()

    def wait(self, pending, seconds):
        def step(go_on):
            if pending.outcome is not None:
                go_on(pending.outcome)
            else:
                pending.wake = lambda: go_on(pending.outcome)

        return step

    def drop(self, node, call):
        for owner, pending in self.waiting.items():
            if pending.id == call:
                self.world.at(self.client.delay(), lambda owner=owner: self.server.cancel(owner))
