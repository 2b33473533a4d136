"""The connections to one node: how many, who gets the next one, and the pause after a failure."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ConnectionError

from ._clock import now
from ._rules import NotSent

RENEW, RELEASE, REST = range(3)
"""Who goes first."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
RESERVED = 2
"""How many connections waits leave free."""
HANGING = 1.0
"""An attempt to connect that takes longer allows another one beside it."""


class _Ticket:
    """Stands for a caller that needs a connection."""

    def __init__(self, event: Any, paused_until: float) -> None:
        self.event = event
        self.paused_until = paused_until
        """When a connection may be opened for it at the latest, however long the node's pause is."""
        self.line: Any = None
        self.error: BaseException | None = None
        self.is_over = False


class Pool:
    """Connections (lines) to one node. `open_line` opens one, within its own limit of time."""

    def __init__(self, io: Any, open_line: Callable[[], Awaitable[Any]] | None, limit: int) -> None:
        self._io = io
        self._open_line = open_line
        self._limit = limit
        self._mutex = threading.Lock()
        self._idle: list[Any] = []
        self._lines: set[Any] = set()
        self._tickets: list[tuple[int, int, _Ticket]] = []
        self._numbers = itertools.count()
        self._opening = 0
        self._opening_since = 0.0
        self._is_outage = False
        self._pause = 0.0
        self._paused_until = 0.0
        self._waits = 0
        self.is_closed = False
        self.is_greeted = False
        """The server has said which protocols it speaks since the last outage: it may accept and close (B28)."""
        self.replicas_timeout = 1.0

    @classmethod
    def of_one(cls, io: Any, line: Any) -> Pool:
        """A pool of this connection only: an ephemeral hold's."""
        pool = cls(io, None, 0)
        pool._idle.append(line)
        pool._lines.add(line)
        return pool

    async def get(self, priority: int, seconds: float, pause: float = LONGEST_PAUSE) -> Any:
        """A connection. Raises NotSent if none was to be had in time, or why none can be opened.

        During an outage none is opened before the node's pause is over, or `pause` seconds have passed.
        """
        with self._mutex:
            if self.is_closed:
                raise ConnectionError("the connections of this client are closed")
            if self._idle:
                return self._idle.pop()
            if self._open_line is None and not self._lines:
                raise ConnectionError("the connection of this hold is gone")
            ticket = _Ticket(self._io.event(), now() + pause)
            heapq.heappush(self._tickets, (priority, next(self._numbers), ticket))
        try:
            end = now() + seconds
            while True:
                await self._open_if_allowed()
                left = self._pause_left(ticket)
                await self._io.wait(ticket.event, max(min(end - now(), left or seconds), 0.0))
                if ticket.event.is_set() or now() >= end:
                    break
        except BaseException:
            with self._mutex:
                ticket.is_over, line = True, ticket.line
            if line is not None:
                self.put(line)
            raise
        with self._mutex:
            ticket.is_over = True
        if ticket.line is not None:
            return ticket.line
        raise ticket.error or NotSent(f"no connection was to be had in {seconds:.3f} s")

    def put(self, line: Any) -> None:
        """Gives a connection back whose replies have all been read."""
        with self._mutex:
            ticket = None if line.is_spent else self._next_ticket()
            if ticket is not None:
                ticket.line = line
                self._io.set(ticket.event)
                return
            if not self.is_closed and not line.is_spent and line in self._lines:
                self._idle.append(line)
                return
            self._lines.discard(line)
        line.close()

    def drop(self, line: Any) -> None:
        """Closes a connection that broke or is silent, and the idle ones, which are no better."""
        with self._mutex:
            self._lines.discard(line)
            self._is_outage, self.is_greeted = True, False
        line.close()
        self.flush()
        # Who waits for a connection may open one now.
        if self._tickets:
            self._io.spawn(self._open_if_allowed)

    def leave(self, line: Any) -> None:
        """This connection is the pool's no more."""
        with self._mutex:
            self._lines.discard(line)

    def adopt(self, line: Any) -> None:
        """This connection is the pool's from now on, if there is room."""
        with self._mutex:
            if len(self._lines) < self._limit and not self.is_closed:
                self._lines.add(line)
        self.put(line)

    def flush(self) -> None:
        """Closes idle connections."""
        with self._mutex:
            idle, self._idle = self._idle, []
            self._lines.difference_update(idle)
        for line in idle:
            line.close()

    def close(self) -> None:
        """Closes all connections, also those in use, and fails the requests that wait for one."""
        with self._mutex:
            self.is_closed = True
            lines, self._lines, self._idle = self._lines, set(), []
        self._fail(ConnectionError("the connections of this client are closed"))
        for line in lines:
            line.close()

    def take_slot(self) -> bool:
        """Whether one more wait may have a connection."""
        with self._mutex:
            if self._waits >= max(self._limit - RESERVED, 1):
                return False
            self._waits += 1
            return True

    def leave_slot(self) -> None:
        """A wait needs its connection no more."""
        with self._mutex:
            self._waits -= 1

    def failed(self) -> None:
        """Doubles the pause, once for all who see the same failure."""
        with self._mutex:
            self._double_pause()

    def _double_pause(self) -> None:
        at = now()
        if at >= self._paused_until:
            self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            self._paused_until = at + self._pause * random.uniform(0.75, 1.25)  # noqa: S311

    def succeeded(self) -> None:
        """Sets the pause back."""
        if self._pause:
            with self._mutex:
                self._pause = self._paused_until = 0.0

    def rest(self, lease: float) -> float:
        """How long to pause before the next request of a hold with this lease."""
        return max(min(self._paused_until - now(), lease / 16, LONGEST_PAUSE), 0.001)

    def _next_ticket(self) -> _Ticket | None:
        while self._tickets:
            _, _, ticket = heapq.heappop(self._tickets)
            if not ticket.is_over:
                return ticket
        return None

    def _may_open(self) -> bool:
        wanted = [ticket for _, _, ticket in self._tickets if not ticket.is_over]
        if self._open_line is None or self.is_closed or self._opening >= len(wanted):
            return False
        if len(self._lines) + self._opening >= self._limit:
            return False
        if all(self._pause_left(ticket) for ticket in wanted):
            return False
        return not (self._is_outage and self._opening and now() - self._opening_since < HANGING)

    def _pause_left(self, ticket: _Ticket) -> float:
        """How long no connection may be opened for this one: requests that have not failed keep the pause, too."""
        return max(min(self._paused_until, ticket.paused_until) - now(), 0.0) if self._is_outage else 0.0

    async def _open_if_allowed(self) -> None:
        while True:
            with self._mutex:
                if not self._may_open():
                    return
                self._opening += 1
                self._opening_since = now()
            # Apart from the caller, so that its time is a bound. Without a thread to be had, here.
            if not self._io.spawn(self._open):
                await self._open()

    async def _open(self) -> None:
        assert self._open_line is not None  # noqa: S101
        try:
            line = await self._open_line()
        except BaseException as error:
            with self._mutex:
                self._opening -= 1
                self._is_outage, self.is_greeted = True, False
                self._double_pause()
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return
        with self._mutex:
            self._opening -= 1
            self._is_outage = False
            self._lines.add(line)
        self.put(line)
        await self._open_if_allowed()

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            while (ticket := self._next_ticket()) is not None:
                ticket.error = error
                self._io.set(ticket.event)
