"""What is known of a session: the connection that stands for this process at one server. No I/O."""

from __future__ import annotations

import threading
from typing import Any, Callable

from . import _requests as requests
from ._requests import FOREVER, Request

# Silence for less than this, in seconds, says nothing.
_MOMENT = 0.2
# What every watched hold has left of its lease when the server is there: it renews them every third.
_SURE = 2 / 3


class Carried:
    """Whether the holds of a session that ended are still on their way to another one. Waits let them go first."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # Who is to be called when they are there. None: nothing is on its way.
        self._wakes: list[Callable[[], object]] | None = None

    def begins(self) -> None:
        """They are about to be taken along."""
        self._wakes = []

    def wait(self, wake: Callable[[], object]) -> bool:
        """Will call `wake` when it is a wait's turn. False: it is already."""
        with self._mutex:
            if self._wakes is None:
                return False
            self._wakes.append(wake)
            return True

    def done(self) -> None:
        """They have been asked for, or never will be."""
        with self._mutex:
            wakes, self._wakes = self._wakes or [], None
        for wake in wakes:
            wake()


class SessionState:
    """A session as the holds see it."""

    def __init__(self, limit: float | None = None) -> None:
        self.id = b""
        # In how many seconds its silence is to be noticed at the latest, where that is sooner than the leases need it.
        self._limit = limit
        # The lease of a request that names none, and in how many seconds the server answers a LOCK.NEXT at the latest,
        # as it said last.
        self.lease = 0.0
        self._pace = 0.0
        # When that was asked for: the server was there after this time. And how much of its lease every hold has left
        # since then that is renewed for this session, and that was known when it was asked for.
        self.seen = 0.0
        self._sure = _SURE
        # Whether it gives a wait that is asked for again the place that it had.
        self.takes_waited = False
        self.ended = False
        self.carried = Carried()

    def begins(self, id_: bytes, ids: list[bytes]) -> None:
        """The server has said who it is, and ended those before it, which `ids` lists: from now on it is this one."""
        self.id = id_
        ids[:] = [id_]

    def question(self) -> Request:
        """Asks for the next events. The server says as often as the leases need it that there are none."""
        return requests.next_events(FOREVER if self._limit is None else self._limit / 2)

    @property
    def patience(self) -> float:
        """A server that is silent for so long is gone. Then a sixth of the lease is left to find another one."""
        return max(_MOMENT, min(3 * self._pace, FOREVER if self._limit is None else self._limit))

    def answered(self, asked: float, reply: list[Any]) -> list[Any]:
        """Takes the reply to what was asked at that time. The events in it."""
        self.seen = asked
        events = []
        for event in reply:
            if event[0] == b"alive":
                # Later versions of the server say more behind these; one of before says less.
                pace, lease, *more = event[5].split()
                self._pace, self.lease = int(pace) / 1000, int(lease) / 1000
                self._sure = int(more[0]) / 1000 if more else _SURE
                self.takes_waited = bool(more)
            else:
                events.append(event)
        return events

    def renewed_until(self, known: float, lease: float) -> float:
        """Until when a watched hold of this lease lives for certain, by the server's word; it was known since then."""
        return self.seen + lease * self._sure if known <= self.seen else float("-inf")
