"""A lock on a majority of independent servers, which know nothing of each other: docs/redlock.md."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from redis.exceptions import ConnectionError

from . import _rules as rules
from ._api import HoldfastBase
from ._clock import now
from ._engine import RELEASE_TIME, Engine, logger
from ._io import run
from ._rules import Grant, Terms
from .errors import HoldfastError, LockLostError, LossReason, NotAcquiredError

SERVER_TIMEOUT = 0.5
SUSPECT_FOR = 1.0


def majority(servers: int) -> int:
    """How many are enough, so that any two majorities share one."""
    return servers // 2 + 1


class _Hold:
    """Held at a majority of servers. A server counts while its own hold is certain."""

    def __init__(self, lock: _RedLock, parts: dict[Engine, Grant], fence: int) -> None:
        self._lock = lock
        self._parts = parts
        self._io = lock._io
        self.name = lock.name
        self.fence = fence
        """The fencing token: greater than that of every earlier hold of a majority."""
        self._event = self._io.event()
        self._is_over = False
        for grant in parts.values():
            grant.listener = self._look
        self._look()

    def remaining(self) -> float:
        """For how many seconds a majority holds it for certain; 0: not held."""
        left = sorted((grant.remaining() for grant in self._parts.values()), reverse=True)
        needed = majority(len(self._lock._engines))
        return left[needed - 1] if len(left) >= needed and not self._is_over else 0.0

    def is_held(self) -> bool:
        """Whether no other client can hold the lock, by the clock. Sends nothing."""
        return self.remaining() > 0

    def _look(self) -> None:
        if self.remaining() <= 0 and not self._is_over:
            self._io.set(self._event)

    def _must_hold(self) -> None:
        if self.remaining() <= 0:
            self._io.set(self._event)
            reasons = [grant.reason for grant in self._parts.values() if grant.reason is not None]
            raise LockLostError(self.name, self.fence, reasons[0] if reasons else LossReason.EXPIRED)

    async def _each(self, verb: str, *args: Any) -> list[Any]:
        calls = [functools.partial(getattr(engine, verb), grant, *args) for engine, grant in self._parts.items()]
        found: list[Any] = await self._io.gather(calls)
        return found

    async def _check(self) -> None:
        self._must_hold()
        await self._each("check")
        self._must_hold()

    async def _renew(self, lease: float | None) -> None:
        self._must_hold()
        await self._each("renew", lease)
        self._must_hold()

    async def _release(self, timeout: float) -> None:
        if self._is_over:
            return
        was_held = self.is_held()
        self._is_over = True
        found = await self._each("release", timeout)
        released = sum(one is None for one in found)
        gone = sum(isinstance(one, LockLostError) for one in found)
        if not was_held or gone > len(self._lock._engines) - majority(len(self._lock._engines)):
            raise LockLostError(self.name, self.fence, LossReason.GONE)
        if released < majority(len(self._lock._engines)):
            raise next(one for one in found if one is not None)


class _RedLock:
    """What a RedLock is in both flavours."""

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
        engines = [one._engine for one in holdfasts]
        if not engines or any(engine.source.is_cluster for engine in engines):
            raise ValueError("holdfasts must be of single servers, at least one, none of them a cluster")
        names = [engine.source.server_name for engine in engines]
        if len(set(names)) < len(names):
            raise ValueError(f"holdfasts must be of different servers, got {names!r}")
        self.name = name
        self._engines = sorted(engines, key=lambda engine: engine.source.server_name)
        self._io = self._engines[0].io
        self._terms = Terms((rules.encode(name),), name, lease, renew, patience=server_timeout)
        self._server_timeout = server_timeout
        self._suspect: dict[Engine, float] = {}

    async def _acquire(self, wait: float | None) -> tuple[dict[Engine, Grant], int] | None:
        until = now() + (rules.LONGEST_WAIT * 24 * 365 if wait is None else wait)
        first = 0
        while True:
            parts: dict[Engine, Grant] = {}
            errors: list[Exception] = []
            try:
                fence = await self._round(parts, errors, first, until)
            except BaseException:
                self._io.spawn(functools.partial(self._give_back, dict(parts)))
                raise
            if fence is not None:
                return parts, fence
            await self._give_back(parts)
            if now() >= until or wait == 0:
                if len(errors) > len(self._engines) - majority(len(self._engines)):
                    raise ConnectionError(
                        f"{len(errors)} of {len(self._engines)} servers do not answer: no majority is left"
                    ) from errors[0]
                return None
            await self._io.sleep(min(random.uniform(0, self._server_timeout), max(until - now(), 0)))  # noqa: S311

    async def _round(self, parts: dict[Engine, Grant], errors: list[Exception], first: int, until: float) -> int | None:
        # The queue: at the first server of the order that answers.
        asked: set[Engine] = set()
        for engine in self._engines:
            left = until - now()
            if left <= 0 or self._suspect.get(engine, 0.0) > now():
                continue
            asked.add(engine)
            [result] = await self._vote([engine], left, parts, errors)
            if not isinstance(result, Exception):
                break
        # The votes: all others at once, each with a moment to wait where there is a queue.
        left = max(min(self._server_timeout, until - now()), 0.0)
        others = [one for one in self._engines if one not in asked]
        suspects = [one for one in others if self._suspect.get(one, 0.0) > now()]
        errors.extend(ConnectionError("a server does not answer") for _ in suspects)
        await self._vote([one for one in others if one not in suspects], left, parts, errors)
        if len(parts) < majority(len(self._engines)):
            return None
        # The fence: the greatest token, told to all that have granted.
        fence = max(grant.token for grant in parts.values())
        calls = [
            functools.partial(engine.raise_token, grant, fence, self._server_timeout) for engine, grant in parts.items()
        ]
        confirmed = await self._io.gather(calls)
        counting = {
            engine: grant
            for (engine, grant), is_confirmed in zip(parts.items(), confirmed, strict=True)
            if is_confirmed is True and grant.remaining() > 0
        }
        return fence if len(counting) >= majority(len(self._engines)) else None

    async def _vote(
        self, engines: Sequence[Engine], wait: float, parts: dict[Engine, Grant], errors: list[Exception]
    ) -> list[Any]:
        results: list[Any] = await self._io.gather(
            [functools.partial(one.acquire, self._terms, wait) for one in engines]
        )
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, HoldfastError) or (
                isinstance(result, Exception) and not rules.is_transport(result) and not rules.is_passing(result)
            ):
                raise result
            if isinstance(result, Exception):
                self._suspect[engine] = now() + SUSPECT_FOR
                errors.append(result)
            elif result[0] is not None:
                parts[engine] = result[0]
        return results

    async def _give_back(self, parts: dict[Engine, Grant]) -> None:
        calls = [functools.partial(one.release, grant, self._server_timeout) for one, grant in parts.items()]
        for result in await self._io.gather(calls):
            if isinstance(result, Exception):
                logger.debug("lock %r: at one of its servers: %s", self.name, result)

    def _not_acquired(self, wait: float | None) -> NotAcquiredError:
        return NotAcquiredError(f"lock {self.name!r} was not acquired, not within {wait} s", self.name)


class RedHold(_Hold):
    """Held at a majority of servers. As a context manager it is released at the end of the block."""

    @property
    def lost(self) -> threading.Event:
        """Set when no majority holds it any more."""
        event: threading.Event = self._event
        return event

    def check(self) -> None:
        """Asks the servers. Raises LockLostError."""
        run(self._check())

    def renew(self, lease: float | None = None) -> None:
        """Begins the lease anew. Raises LockLostError."""
        run(self._renew(lease))

    def release(self, timeout: float = RELEASE_TIME) -> None:
        """Releases the lock at all servers. Raises LockLostError if it had been lost."""
        run(self._release(timeout))

    def __enter__(self) -> RedHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except Exception:
            if error is None:
                raise


class RedLock(_RedLock):
    """A lock on a majority of independent servers, for threads."""

    def acquire(self, wait: float | None = None) -> RedHold:
        """Waits for at most `wait` seconds. Raises NotAcquiredError, or ConnectionError if no majority answers."""
        found = run(self._acquire(wait))
        if found is None:
            raise self._not_acquired(wait)
        return RedHold(self, *found)

    def try_acquire(self) -> RedHold | None:
        """The lock if a majority grants it at once, else None."""
        found = run(self._acquire(0))
        return None if found is None else RedHold(self, *found)


class AsyncRedHold(_Hold):
    """Held at a majority of servers. As a context manager it is released at the end of the block."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when no majority holds it any more."""
        event: asyncio.Event = self._event
        return event

    async def check(self) -> None:
        """Asks the servers. Raises LockLostError."""
        await self._check()

    async def renew(self, lease: float | None = None) -> None:
        """Begins the lease anew. Raises LockLostError."""
        await self._renew(lease)

    async def release(self, timeout: float = RELEASE_TIME) -> None:
        """Releases the lock at all servers. Raises LockLostError if it had been lost."""
        await self._release(timeout)

    async def __aenter__(self) -> AsyncRedHold:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except Exception:
            if error is None:
                raise


class AsyncRedLock(_RedLock):
    """A lock on a majority of independent servers, for asyncio."""

    async def acquire(self, wait: float | None = None) -> AsyncRedHold:
        """Waits for at most `wait` seconds. Raises NotAcquiredError, or ConnectionError if no majority answers."""
        found = await self._acquire(wait)
        if found is None:
            raise self._not_acquired(wait)
        return AsyncRedHold(self, *found)

    async def try_acquire(self) -> AsyncRedHold | None:
        """The lock if a majority grants it at once, else None."""
        found = await self._acquire(0)
        return None if found is None else AsyncRedHold(self, *found)
