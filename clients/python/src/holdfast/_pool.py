"""The connections to one node: how many, who gets the next one, and the pause after a failure."""

from __future__ import annotations

import bisect
import dataclasses
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ConnectionError

from ._rules import NotSent, now

# Priorities: the lowest is served first (B29).
RENEW, RELEASE, REST = range(3)
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
# How many connections waits leave free.
RESERVED = 2
# An attempt to connect that takes longer allows another one beside it.
HANGING = 1.0


@dataclasses.dataclass(eq=False)
class _Ticket:
    """A caller that waits for a connection."""

    priority: int
    event: Any
    # From when on a connection may be opened for it.
    open_at: float
    line: Any = None
    error: BaseException | None = None


class Pool:
    """Connections (lines) to one node. `open_line` opens one, within a time limit; None: they only come from `put`."""

    def __init__(self, io: Any, open_line: Callable[[], Awaitable[Any]] | None, limit: int) -> None:
        self._io = io
        self._open_line = open_line
        self._limit = limit
        self._mutex = threading.RLock()
        self._idle: list[Any] = []
        self._lines: set[Any] = set()
        self._tickets: list[_Ticket] = []
        self._opening = 0
        # The threads or tasks of the attempts to connect.
        self.attempts: set[Any] = set()
        self._opening_since = 0.0
        self._is_outage = False
        # Why the last attempt to connect failed.
        self._failure: Exception | None = None
        self._pause = self._paused_until = 0.0
        # The waits that have a connection of their own.
        self._waits: set[Any] = set()
        self._is_closed = False
        # The server has answered LOCK.VERSION since the last outage. One may accept connections and close them (B28).
        self.is_greeted = False
        self.replicas_timeout = 1.0

    async def get(self, priority: int, seconds: float, pause: float) -> Any:
        """Returns a connection. Raises NotSent if none is free in time, or the error of an attempt to connect.

        During an outage, none is opened before the node's pause is over or `pause` seconds have passed.
        """
        end = now() + seconds
        with self._mutex:
            if self._is_closed or (self._open_line is None and not self._lines):
                raise ConnectionError("this connection is closed")
            if self._idle:
                return self._idle.pop()
            open_at = min(self._paused_until, now() + pause) if self._is_outage else 0.0
            ticket = _Ticket(priority, self._io.event(), open_at)
            # Behind those of the same priority.
            bisect.insort(self._tickets, ticket, key=lambda one: one.priority)
        try:
            while not ticket.event.is_set() and now() < end:
                await self._open_if_allowed()
                look = ticket.open_at if now() < ticket.open_at else end
                await self._io.wait(ticket.event, max(min(look, end) - now(), 0.0))
        except BaseException:
            self._forget(ticket)
            if ticket.line is not None:
                self.put(ticket.line)
            raise
        self._forget(ticket)
        if ticket.line is None:
            why = f": {self._failure}" if self._is_outage and self._failure else ""
            raise ticket.error or NotSent(f"no connection within {seconds:.3f} s{why}")
        return ticket.line

    def _forget(self, ticket: _Ticket) -> None:
        with self._mutex:
            if ticket in self._tickets:
                self._tickets.remove(ticket)

    def put(self, line: Any) -> None:
        """Takes a connection whose replies have all been read, also one from outside the pool, if there is room."""
        with self._mutex:
            if not self._is_closed and not line.is_spent and len(self._lines | {line}) <= self._limit:
                self._lines.add(line)
                if self._tickets:
                    ticket = self._tickets.pop(0)
                    ticket.line = line
                    ticket.event.set()
                else:
                    self._idle.append(line)
                return
        self.leave(line)
        line.close()

    def leave(self, line: Any) -> None:
        """Takes a connection out of the pool, and leaves it open."""
        with self._mutex:
            self._lines.discard(line)

    async def drop(self, line: Any) -> None:
        """Closes a connection that broke or is silent, and the idle ones, which may be dead, too."""
        with self._mutex:
            self._is_outage, self.is_greeted = True, False
        self.flush()
        await self.discard(line)

    async def discard(self, line: Any) -> None:
        """Closes a connection, so that a waiting caller may open another one."""
        self.leave(line)
        line.close()
        await self._open_if_allowed()

    def flush(self) -> None:
        """Closes idle connections."""
        for line in self.take_idle():
            line.close()

    def take_idle(self) -> list[Any]:
        """Takes the idle connections out of the pool, and returns them."""
        with self._mutex:
            idle, self._idle = self._idle, []
            self._lines.difference_update(idle)
        return idle

    def close(self) -> set[Any]:
        """Closes all connections, also those in use, and returns them. Callers that wait for one get an error."""
        with self._mutex:
            self._is_closed = True
            lines, self._lines, self._idle = self._lines, set(), []
        self._fail(ConnectionError("this connection is closed"))
        for line in lines:
            line.close()
        return lines

    def take_slot(self, wait: Any) -> bool:
        """Whether this wait may have a connection of its own (B29). If so, `leave_slot` has to follow."""
        with self._mutex:
            is_free = len(self._waits) < self._limit - RESERVED
            if is_free:
                self._waits.add(wait)
            return is_free

    def leave_slot(self, wait: Any) -> None:
        """A wait no longer needs its connection."""
        with self._mutex:
            self._waits.discard(wait)

    def failed(self) -> None:
        """Doubles the pause, once for all requests that see the same failure (B27)."""
        with self._mutex:
            at = now()
            if at >= self._paused_until:
                self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
                self._paused_until = at + self._pause * random.uniform(0.75, 1.25)  # noqa: S311

    def succeeded(self) -> None:
        """Ends the pause: a request of the application has succeeded."""
        with self._mutex:
            self._pause = self._paused_until = 0.0

    def rest(self, lease: float) -> float:
        """How long to pause before the next request about a hold with this lease."""
        return max(min(self._paused_until - now(), lease / 16, LONGEST_PAUSE), 0.001)

    def _may_open(self) -> bool:
        due = [ticket for ticket in self._tickets if ticket.open_at <= now()]
        if self._open_line is None or self._is_closed or not due or len(self._lines) + self._opening >= self._limit:
            return False
        if self._opening and now() - self._opening_since >= HANGING:
            return True
        # During an outage, one attempt at a time, whose outcome all callers share (B28).
        return self._opening < (1 if self._is_outage else len(self._tickets))

    async def _open_if_allowed(self) -> None:
        while True:
            with self._mutex:
                if not self._may_open():
                    return
                self._opening += 1
                self._opening_since = now()
            # In the background, so that the caller's time limit holds.
            await self._io.background(self._open)

    async def _open(self) -> None:
        assert self._open_line is not None  # noqa: S101
        line: Any = None
        failure: Exception = ConnectionError("the attempt to connect was interrupted")
        me = self._io.me()
        self.attempts.add(me)
        try:
            if self._is_closed:
                raise ConnectionError("this connection is closed")
            line = await self._open_line()
        except Exception as error:
            failure = error
        finally:
            with self._mutex:
                self.attempts.discard(me)
                self._opening -= 1
                self._is_outage = line is None
            if line is None:
                self.is_greeted = False
                self._failure = failure
                self.failed()
                self._fail(failure)
        if line is not None:
            self.put(line)
            await self._open_if_allowed()

    def _fail(self, error: BaseException) -> None:
        with self._mutex:
            tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.error = error
            ticket.event.set()
