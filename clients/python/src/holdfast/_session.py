"""What is known of a session: the connection that stands for this process at one server. No I/O."""

from __future__ import annotations

from typing import Any

from . import _requests as requests
from ._requests import FOREVER, Request

# Silence for less than this, in seconds, says nothing.
_MOMENT = 0.2


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
        # The server was there after this time.
        self.seen = 0.0
        self.ended = False

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
                pace, lease = event[5].split()
                self._pace, self.lease = int(pace) / 1000, int(lease) / 1000
            else:
                events.append(event)
        return events

    def watched_until(self, asked: float, lease: float) -> float:
        """Until when a watched hold lives for certain if nobody renews it from now on.

        It was renewed no earlier than a third of the lease before the server was last seen; and if it is younger than
        that, it has its first lease. That is the server's default, as it was when it was asked for; if it became
        shorter since, it may have been before.
        """
        lease = min(lease, self.lease)
        return max(asked + lease, self.seen + lease * 2 / 3)
