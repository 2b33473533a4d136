"""Distributed locks inside Redis and Valkey, for programs with asyncio. `holdfast` has the same for threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ._api import ElectionBase, HoldBase, HoldfastBase, LockBase, ReentrantBase
from ._api import Leader as Leader
from ._api import ReadWriteLock as ReadWriteLock
from ._engine import EXIT_TIME, RELEASE_TIME, Engine
from ._engine import Hooks as Hooks
from ._io import Tasks, Threads, run
from ._rules import Name


class Hold(HoldBase):
    """A lock that is held. As a context manager it is released at the end of the block."""

    lost: asyncio.Event

    async def check(self) -> None:
        """Asks the server whether the lock is held still. Raises LockLostError. Lengthens nothing."""
        await self._check()

    async def renew(self, lease: float | None = None) -> None:
        """Begins the lease anew, with this length in seconds from now on if one is given. Raises LockLostError."""
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
    """What a lock is asked for with. `async with lock as hold:` waits for as long as it takes."""

    async def acquire(self, wait: float | None = None, *, cancel: asyncio.Event | None = None) -> Hold:
        """Waits for the lock for at most `wait` seconds, None: as long as it takes. Raises NotAcquiredError.

        A cancelled call ends at once and leaves nothing behind. `cancel`: an event that ends it, too.
        """
        return await self._acquire(wait, cancel)

    async def try_acquire(self) -> Hold | None:
        """The lock if it is free, else None. Never waits."""
        return await self._try_acquire()

    async def __aenter__(self) -> Hold:
        return await self._enter()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._exit(error)


class ReentrantLock(ReentrantBase[Hold], Lock):
    """A lock that the task which holds it may take again; it is released as often as it was taken."""

    async def release(self) -> None:
        """Releases it once. Raises NotHeldError in a task that does not hold it, LockLostError after a loss."""
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
    """Made once from the application's client: redis.asyncio.Redis, RedisCluster, or that of a Sentinel.

    It belongs to the event loop that runs when it is used first. It opens connections of its own, as that client does:
    at most `max_connections` to each server. `close` releases what is held.
    """

    _classes = (Hold, Lock, ReentrantLock, Election)

    def __init__(self, redis: Any, *, max_connections: int = 32, hooks: Hooks | None = None) -> None:
        super().__init__(redis, Tasks(), max_connections, hooks, _release_at_exit)

    async def leader(self, name: Name) -> Leader | None:
        """Who leads now."""
        return await self._leader(name)

    def observe(self, name: Name, every: float = 1.0) -> AsyncIterator[Leader | None]:
        """Who leads, now and at each change, looked at every so many seconds."""
        return self._observe(name, every)

    async def info(self, name: Name) -> dict[str, Any] | None:
        """What the server says of a lock (LOCK.INFO); None: it is neither held nor waited for."""
        return await self._info(name)

    async def waiters(self, name: Name) -> list[dict[str, Any]]:
        """Who waits for a lock, in order (LOCK.WAITERS)."""
        return await self._waiters(name)

    async def force(self, name: Name) -> int:
        """Breaks a lock (LOCK.FORCE). How many holders lost it."""
        return await self._force(name)

    async def close(self) -> None:
        """Releases what is held, for whose holders it is lost then, and closes the connections."""
        await self._close()

    async def __aenter__(self) -> Holdfast:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _release_at_exit(engine: Engine) -> None:
    # The loop of its connections has ended, and none can look up a name any more: over new ones, which block.
    blocking = Engine(engine.source, Threads(), 3, engine.hooks)
    blocking.adopt(engine)
    run(blocking.close(EXIT_TIME))
