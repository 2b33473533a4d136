"""What is known of a session: the connection that stands for this process at one server. No I/O."""

from __future__ import annotations

from typing import Any

# The server's own default, for where CONFIG GET is forbidden.
_LEASE = 30.0


class SessionState:
    """A session as the holds see it."""

    def __init__(self, limit: float | None = None) -> None:
        self.id = b""
        # In how many seconds its silence is to be noticed at the latest, where that is sooner than the lease needs it.
        self._limit = limit
        # The lease of watched holds, in seconds: the server's default.
        self.lease = _LEASE
        # The server was there after this time.
        self.seen = 0.0
        self.ended = False

    def read_lease(self, reply: Any) -> None:
        """Takes the reply to CONFIG GET holdfast.default-lease: a map, or with RESP2 a flat array."""
        values = list(reply.values()) if isinstance(reply, dict) else reply[1::2]
        if values:
            self.lease = int(values[0]) / 1000

    @property
    def beat(self) -> float:
        """How long LOCK.NEXT waits while there is nothing to tell."""
        beat = self.lease / 6 if self._limit is None else min(self.lease / 6, self._limit / 2)
        return max(beat, 0.1)

    @property
    def patience(self) -> float:
        """A server that is silent for so long is gone. Then a sixth of the lease is left to find another one."""
        return 2 * self.beat

    def watched_until(self, asked: float) -> float:
        """Until when a watched hold lives for certain if nobody renews it from now on.

        It was renewed no earlier than a third of the lease before the server was last seen; and if it is younger than
        that, it has its first lease.
        """
        return max(asked + self.lease, self.seen + self.lease * 2 / 3)
