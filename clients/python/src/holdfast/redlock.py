"""RedLock: a lock on a majority of independent servers. docs/redlock.md describes it."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError

from . import Hold, Holdfast, Lock
from . import _rules as rules
from ._api import HoldBase, HoldfastBase, HoldT, LockBase
from ._engine import Engine, logger
from ._rules import Grant, Terms, Verdict, judge, now
from .asyncio import Hold as AsyncHold
from .asyncio import Holdfast as AsyncHoldfast
from .asyncio import Lock as AsyncLock
from .errors import LockLostError, LossReason, NotAcquiredError

SERVER_TIMEOUT = 0.5
# For how long a server that did not answer is not asked again, in seconds.
SUSPECT_FOR = 1.0


def majority(servers: int) -> int:
    """How many of so many servers are a majority: any two majorities have a server in common."""
    return servers // 2 + 1


async def _each(parts: dict[Engine, Grant], verb: str, *args: Any) -> list[Any]:
    """Calls a method of the engines with their grants, all at once. Returns the results, with errors as elements."""
    calls = [functools.partial(getattr(engine, verb), grant, *args) for engine, grant in parts.items()]
    found: list[Any] = await next(iter(parts)).io.gather(calls) if parts else []
    return found


class _Hold(HoldBase):
    """A lock that is held at a majority of servers. A server counts while its own hold is certain."""

    def __init__(self, lock: _RedLock[Any], parts: dict[Engine, Grant], fence: int) -> None:
        self._lock = lock
        self._parts = parts
        self._is_over = False
        self.name = lock.name
        self.fence = fence
        self.lost = lock._io.event()
        for grant in parts.values():
            grant.listener = self._look
        self._look()

    def remaining(self) -> float:
        """For how many seconds it is certainly held at a majority; 0: it is not held."""
        left = sorted((grant.remaining() for grant in self._parts.values()), reverse=True)
        needed = self._lock.needed
        return left[needed - 1] if len(left) >= needed and not self._is_over else 0.0

    def _look(self) -> None:
        if self.remaining() <= 0 and not self._is_over:
            self.lost.set()

    async def _each_while_held(self, verb: str, *args: Any) -> None:
        self._must_hold()
        found = await _each(self._parts, verb, *args)
        self._must_hold()
        if found.count(None) < self._lock.needed:
            # It is held, so what keeps a majority from confirming that is not a loss.
            raise next(one for one in found if one is not None and not isinstance(one, LockLostError))

    def _must_hold(self) -> None:
        self._look()
        if not self.is_held():
            reasons = [grant.reason for grant in self._parts.values() if grant.reason is not None]
            raise LockLostError(self.name, self.fence, reasons[0] if reasons else LossReason.EXPIRED)

    async def _check(self) -> None:
        await self._each_while_held("check")

    async def _renew(self, lease: float | None) -> None:
        await self._each_while_held("renew", lease)

    async def _release(self, timeout: float) -> None:
        rules.check_seconds("timeout", timeout)
        if self._is_over:
            return
        was_held, self._is_over = self.is_held(), True
        found = await _each(self._parts, "release", timeout)
        gone = sum(isinstance(one, LockLostError) for one in found)
        if not was_held or gone > len(self._lock.engines) - self._lock.needed:
            raise LockLostError(self.name, self.fence, LossReason.GONE)
        if found.count(None) < self._lock.needed:
            raise next(one for one in found if one is not None)


class _RedLock(LockBase[HoldT]):
    """What RedLock and AsyncRedLock share."""

    _kind: Any
    _holdfast: Any

    def __init__(
        self,
        holdfasts: Sequence[HoldfastBase[Any, Any, Any]],
        name: rules.Name,
        *,
        lease: float = 10.0,
        renew: bool = True,
        server_timeout: float = SERVER_TIMEOUT,
    ) -> None:
        """A lock on the servers of these Holdfast objects, of which a majority must grant it.

        server_timeout: how many seconds a server may take to answer. The other terms are those of `Holdfast.lock`.
        """
        holdfasts = list(holdfasts)
        for one in holdfasts:
            if not isinstance(one, self._holdfast):
                raise TypeError(f"holdfasts must be instances of {self._holdfast!r}, got {one!r}")
        rules.check_lease(server_timeout, "server_timeout")
        engines = [one._engine for one in holdfasts]
        if not engines or any(engine.source.is_cluster for engine in engines):
            raise ValueError("holdfasts must be at least one, and none of a cluster")
        names = [engine.source.server_name for engine in engines]
        if len(set(names)) < len(names):
            raise ValueError(f"holdfasts must be of different servers, got {names!r}")
        self.engines = sorted(engines, key=lambda engine: engine.source.server_name)
        self.needed = majority(len(engines))
        terms = Terms((rules.encode(name),), name, lease, renew, patience=server_timeout)
        super().__init__(self.engines[0], self._kind, terms)
        self._io = self._engine.io
        self._server_timeout = server_timeout
        self._suspect: dict[Engine, float] = {}

    async def _acquire(self, wait: float | None, cancel: Any = None) -> HoldT:
        if wait is not None:
            rules.check_seconds("wait", wait)
        until = math.inf if wait is None else now() + wait
        while cancel is None or not cancel.is_set():
            parts: dict[Engine, Grant] = {}
            errors: list[Exception] = []
            try:
                fence = await self._round(parts, errors, until, cancel)
            except BaseException:
                await self._io.background(functools.partial(self._release_parts, dict(parts)))
                raise
            if fence is not None:
                hold: HoldT = self._kind(self, parts, fence)
                return hold
            await self._release_parts(parts)
            if now() >= until:
                if len(errors) > len(self.engines) - self.needed:
                    raise ConnectionError(
                        f"{len(errors)} of {len(self.engines)} servers did not answer: no majority is left"
                    ) from errors[0]
                break
            await self._io.sleep(min(random.uniform(0, self._server_timeout), max(until - now(), 0)))  # noqa: S311
        why = ": the wait was cancelled" if cancel is not None and cancel.is_set() else f" within {wait} s"
        raise NotAcquiredError(f"lock {self.name!r} was not acquired{why}", self.name)

    async def _round(
        self, parts: dict[Engine, Grant], errors: list[Exception], until: float, cancel: Any
    ) -> int | None:
        """One attempt. Returns the fence if a majority has confirmed it; None: there was no majority."""
        # The queue: at the first server of the order that answers.
        others = [engine for engine in self.engines if self._suspect.get(engine, 0.0) <= now()]
        errors.extend(ConnectionError("a server did not answer") for _ in range(len(self.engines) - len(others)))
        while others and now() < until:
            wait = None if until == math.inf else until - now()
            if await self._vote(others.pop(0), wait, parts, errors, cancel):
                break
        # The votes: all others at once, each with a short wait in its queue.
        wait = max(min(self._server_timeout, until - now()), 0.0)
        votes = [functools.partial(self._vote, engine, wait, parts, errors, cancel) for engine in others]
        for result in await self._io.gather(votes):
            if isinstance(result, Exception):
                raise result
        if len(parts) < self.needed:
            return None
        # The fence: the greatest token, which is sent to all that have granted.
        fence = max(grant.token for grant in parts.values())
        found = await _each(parts, "raise_token", fence, self._server_timeout)
        confirmed = zip(parts.values(), found, strict=True)
        counting = [grant for grant, is_confirmed in confirmed if is_confirmed is True and grant.remaining() > 0]
        return fence if len(counting) >= self.needed else None

    async def _vote(
        self, engine: Engine, wait: float | None, parts: dict[Engine, Grant], errors: list[Exception], cancel: Any
    ) -> bool:
        """Asks one server. Returns whether it answered; if it granted, `parts` has the grant."""
        try:
            parts[engine] = await engine.acquire(self._terms, wait, cancel)
        except NotAcquiredError:
            return True
        except Exception as error:
            if judge(error) is Verdict.FATAL:
                raise
            self._suspect[engine] = now() + SUSPECT_FOR
            errors.append(error)
            return False
        return True

    async def _release_parts(self, parts: dict[Engine, Grant]) -> None:
        for result in await _each(parts, "release", self._server_timeout):
            if isinstance(result, Exception):
                logger.debug("lock %r: the release at one of its servers failed: %s", self.name, result)


class RedHold(_Hold, Hold):
    """A lock that is held at a majority of servers. As a context manager it is released at the end of the block."""


class RedLock(_RedLock[Hold], Lock):
    """A lock on a majority of independent servers, for threads. Raises ConnectionError if no majority answers."""

    _kind, _holdfast = RedHold, Holdfast


class AsyncRedHold(_Hold, AsyncHold):
    """A lock that is held at a majority of servers. As a context manager it is released at the end of the block."""


class AsyncRedLock(_RedLock[AsyncHold], AsyncLock):
    """A lock on a majority of independent servers, for asyncio. Raises ConnectionError if no majority answers."""

    _kind, _holdfast = AsyncRedHold, AsyncHoldfast
