"""Distributed locks inside Redis and Valkey, for programs with asyncio. `holdfast` has the same for threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ._api import ElectionBase, HoldBase, HoldfastBase, LockBase, ReentrantBase
from ._api import Leader as Leader
from ._api import ReadWriteLock as ReadWriteLock
from ._engine import RELEASE_TIME
from ._engine import Hooks as Hooks
from ._io import Tasks
from ._rules import Name


class Hold(HoldBase):
    """A lock that is held. As a context manager it is released at the end of the block."""

    lost: asyncio.Event

    async def check(self) -> None:
        """Asks the server whether the lock is still held. Raises LockLostError if not. Does not renew it."""
        await self._check()

    async def renew(self, lease: float | None = None) -> None:
        """Renews the lease; `lease` is its new length in seconds. Raises LockLostError if the lock is lost."""
        await self._renew(lease)

    async def release(self, timeout: float = RELEASE_TIME) -> None:
        """Releases the lock. Raises LockLostError if it had been lost. A second call does nothing.

        If the server does not answer within `timeout` seconds, or if the caller is cancelled, the release goes on in
        the background until the lease is over.
        """
        await self._release(timeout)

    async def __aenter__(self) -> Hold:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._exit(error)


class Lock(LockBase[Hold]):
    """A lock to acquire. `async with lock as hold:` waits for it without a time limit."""

    async def acquire(self, wait: float | None = None, *, cancel: asyncio.Event | None = None) -> Hold:
        """Waits for the lock for at most `wait` seconds; None: without a limit. Raises NotAcquiredError.

        A cancelled call ends at once, and its request is withdrawn in the background. `cancel`: an event that ends the
        wait within a quarter of a second.
        """
        return await self._acquire(wait, cancel)

    async def try_acquire(self) -> Hold | None:
        """Acquires the lock if it is free, else returns None. Never waits."""
        return await self._try_acquire()

    async def __aenter__(self) -> Hold:
        return await self._enter()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._exit(error)


class ReentrantLock(ReentrantBase[Hold], Lock):
    """A lock that the task which holds it may acquire again. It has to be released as often as it was acquired."""

    async def release(self) -> None:
        """Undoes one `acquire`. Raises NotHeldError in a task that does not hold it, LockLostError after a loss."""
        await self._release()


class Election(ElectionBase):
    """A candidacy: it leads, or waits to lead, until it is closed."""

    async def close(self) -> None:
        """Resigns: the next candidate leads at once."""
        await self._close()

    async def __aenter__(self) -> Election:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Holdfast(HoldfastBase[Lock, ReentrantLock, Election]):
    """Locks over the application's client: redis.asyncio.Redis, RedisCluster, or that of a Sentinel. Make it once.

    It belongs to the event loop in which it is used first. It opens connections of its own, as that client does: at
    most `max_connections` to each server. `close` releases all holds.
    """

    _hold, _lock, _reentrant_lock, _election = Hold, Lock, ReentrantLock, Election

    def __init__(self, redis: Any, *, max_connections: int = 32, hooks: Hooks | None = None) -> None:
        super().__init__(redis, Tasks(), max_connections, hooks)

    async def leader(self, name: Name) -> Leader | None:
        """The leader now; None: there is none."""
        return await self._leader(name)

    def observe(self, name: Name, every: float = 1.0) -> AsyncIterator[Leader | None]:
        """Yields the leader now, and at each change. Asks the server every `every` seconds."""
        return self._observe(name, every)

    async def info(self, name: Name) -> dict[str, Any] | None:
        """The state of a lock (LOCK.INFO); None: it is neither held nor waited for."""
        return await self._info(name)

    async def waiters(self, name: Name) -> list[dict[str, Any]]:
        """The requests that wait for a lock, in order (LOCK.WAITERS)."""
        return await self._waiters(name)

    async def force(self, name: Name) -> int:
        """Takes a lock from its holders (LOCK.FORCE). Returns how many lost it."""
        return await self._force(name)

    async def close(self) -> None:
        """Releases all holds, which their holders lose, and closes the connections."""
        await self._close()

    async def __aenter__(self) -> Holdfast:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
