"""Servers and clients in one thread and with a clock of their own, so that a thousand runs take seconds.

The clients run the flows of holdfast as they are; only what they do with a socket and a clock is played.
"""

import heapq
import itertools

from holdfast import _flow as flows
from holdfast import _hold, _multilock
from holdfast._book import Book
from holdfast._session import SessionState

LEASE = 30.0


class World:
    """The time, and what is to happen when."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.agenda = []
        self.numbers = itertools.count()
        for module in (flows, _hold, _multilock):
            monkeypatch.setattr(module, "now", lambda: self.now)

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
        return flows.WAITING

    def _may(self, keys, ahead):
        return not any(key in self.held for key in keys) and not any(set(keys) & set(other[0]) for other in ahead)

    def _grant(self, keys, owner, client):
        token = next(self.tokens)
        self.held.update(dict.fromkeys(keys, (owner, token, client)))
        return token

    def _timeout(self, entry):
        if entry in self.queue:
            self.queue.remove(entry)
            entry[2].tell(self, [b"timeout", 0, list(entry[0]), entry[1], None, None])
            self._serve()

    def _serve(self):
        for entry in list(self.queue):
            if self._may(entry[0], self.queue[: self.queue.index(entry)]):
                self.queue.remove(entry)
                token = self._grant(*entry)
                entry[2].tell(self, [b"granted", 0, list(entry[0]), entry[1], token, None])

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

    def tell(self, server, event):
        home = next(home for home in self.homes if home.server is server)
        self.world.at(self.delay(), lambda: self.alive and home.book.tell(home.session, [event]))

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
        self.book = Book()
        self.session = SessionState()
        alive = [b"alive", 0, [], None, None, b"3750 30000 667 1"]
        self.session.answered(self.world.now, [alive])

    def find(self, key, redirection, seconds):
        return lambda go_on: go_on(flows.Node(self, self.session, None, asking=False))

    def send(self, node, request, seconds):
        def step(go_on):
            def heard():
                if not self.client.alive:
                    return
                reply = self._serve(request)
                self.world.at(self.client.delay(), lambda: go_on((reply, 1)))

            self.world.at(self.client.delay(), heard)

        return step

    def _serve(self, request):
        verb = request[0].removeprefix(b"LOCK.") if hasattr(bytes, "removeprefix") else request[0][5:]
        if verb == b"CANCEL":
            self.server.cancel(request[2])
            return 1
        keys, owner = request[2 : 2 + int(request[1])], request[2 + int(request[1])]
        if verb == b"MRELEASE":
            self.server.release(owner, keys)
            return [0] * len(keys)
        if verb == b"MRENEW":
            return [1] * len(keys)
        assert verb == b"MACQUIRE", request
        wait = 0
        if b"WAIT" in request:
            wait = int(request[request.index(b"WAIT") + 1]) / 1000 or float("inf")
        return self.server.acquire(keys, owner, self.client, wait)

    def outcome(self, hold, seconds):
        def step(go_on):
            once = []

            def wake():
                if not once:
                    once.append(True)
                    self.world.at(0, lambda: go_on(None))

            if not hold.wait(wake):
                wake()
            elif seconds != float("inf"):
                self.world.at(seconds, wake)

        return step

    def pause(self, seconds):
        return lambda go_on: self.world.at(seconds, lambda: go_on(None))

    def start(self, hold, flow):
        self.client.run(flow)
