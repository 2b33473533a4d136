"""The locks of an asyncio client."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Iterable
from types import TracebackType
from typing import Any, Callable, Literal, TypeVar, cast

from redis.exceptions import RedisError

from .. import _flow as flows
from .._hold import Hold
from .._lock import LockBase, Name, Number, Reentrant, distinct, milliseconds, template
from ..errors import LockError, LockLost
from ._guard import WhileHeld
from ._home import alarm, home_of, run

Self = TypeVar("Self", bound="Lock")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


class Lock(LockBase):
    """A lock with redis-py's signature: `client.lock("name", lock_class=holdfast.asyncio.Lock)`.

    What it holds belongs to the object, whichever task asks: take an object for each task.
    """

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
        sleep: Number | None = None,
    ) -> bool:
        """Takes the lock, waiting in the server's queue. False: not granted in time.

        When it is cancelled, nothing stays behind. `token` is an owner of one's own choice, which must be new for each
        acquisition. `sleep` has nothing to do.
        """
        home, hold = home_of(self.redis), self._new_hold(token)
        try:
            granted = await run(flows.acquire(home, hold, self._wait(blocking, blocking_timeout)))
        except asyncio.CancelledError:
            await home.settled(hold)
            raise
        if granted:
            self._taken(hold, alarm)
        return granted

    async def release(self) -> None:
        """Gives the lock back. Raises LockLost if it was lost before, NotHeld if it was not acquired.

        When it is cancelled, the lock is given back in the background; calling it once more is harmless.
        """
        home, hold = home_of(self.redis), self._current("release")
        try:
            await run(flows.release(home, hold))
        except LockError:
            self._dropped(hold)
            raise
        except asyncio.CancelledError:
            await home.settled(hold)
            raise
        self._dropped(hold)

    async def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:
        """Adds to the timeout, or sets it to `additional_time` from now. Raises LockLost if the lock is lost."""
        hold, _ = self._with_timeout("extend")
        await run(flows.renew(home_of(self.redis), hold, self._lease(hold, additional_time, replace_ttl)))
        return True

    async def reacquire(self) -> Literal[True]:
        """Begins the timeout anew. Raises LockLost if the lock is lost."""
        hold, timeout = self._with_timeout("reacquire")
        await run(flows.renew(home_of(self.redis), hold, milliseconds("timeout", timeout)))
        return True

    async def locked(self) -> bool:
        """Whether anybody holds it, by the server's word."""
        return any(await run(flows.owners(home_of(self.redis), self._terms)))

    async def owned(self) -> bool:
        """Whether this object holds it, by the server's word."""
        holds = self._holds()
        if not holds:
            return False
        found = await run(flows.owners(home_of(self.redis), self._terms))
        return all(holds[-1].owner in owners for owners in found)

    @property
    def lost(self) -> asyncio.Event:
        """Is set as soon as this hold is known to be lost."""
        hold = self._current("watch")
        if hold.event is None:
            event = hold.event = asyncio.Event()
            hold.when_lost(lambda _: event.set(), alarm(hold))
        return cast(asyncio.Event, hold.event)

    def while_held(self: Self) -> WhileHeld[Self]:
        """`async with lock.while_held():` cancels the block when the lock is lost, and raises LockLost."""
        return WhileHeld(self)

    def call_when_lost(self, listener: Callable[[LockLost], object]) -> None:
        """Calls `listener` when this hold is lost, or at once if it is."""
        hold = self._current("watch")
        hold.when_lost(listener, alarm(hold))

    async def __aenter__(self: Self) -> Self:
        if not await self.acquire():
            raise self._not_granted()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        body: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.release()
        except RedisError as error:
            if not self._release_failed(body, error):
                raise


class RLock(Reentrant, Lock):
    """A lock that the task which holds it may take again. Only the outermost release gives it back.

    Taking it again asks the server nothing and does not prolong a timeout; if the lock is lost, it raises LockLost.
    """

    def __init__(self, client: Any, name: Name, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, **kwargs)
        self._tasks: weakref.WeakKeyDictionary[Any, list[Hold]] = weakref.WeakKeyDictionary()

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
        sleep: Number | None = None,
    ) -> bool:
        """Takes the lock, or takes it once more."""
        if self._entered():
            return True
        return await super().acquire(blocking, blocking_timeout, token)

    async def release(self) -> None:
        """Gives back what the newest acquire took."""
        if self._left():
            await super().release()

    def _all_holds(self) -> list[Hold]:
        return self._tasks.setdefault(asyncio.current_task(), [])


class Semaphore(Lock):
    """A lock that `limit` owners may hold at once. Each acquire takes a permit, with a lease and a fence of its own."""

    def __init__(self, client: Any, name: Name, limit: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, limit=limit, **kwargs)


class LockAll(Lock):
    """Several locks, taken at once: all or none, and none while it waits. In a cluster, of one slot."""

    _several = True

    def __init__(self, client: Any, names: Iterable[Name], *args: Any, **kwargs: Any) -> None:
        super().__init__(client, distinct(names), *args, **kwargs)


class RWLock:
    """A lock that any number of readers may hold at once, or one writer. Who came first goes first, of either kind."""

    def __init__(self, client: Any, name: Name, **settings: Any) -> None:
        """`settings` are those of Lock."""
        self._make: Callable[..., Lock] = functools.partial(Lock, client, name, **settings)

    def read(self) -> Lock:
        """A lock to read under."""
        return self._make(limit=0)

    def write(self) -> Lock:
        """A lock to write under."""
        return self._make()


def locked(client: Any, name: str, **settings: Any) -> Callable[[F], F]:
    """Runs a coroutine function under a lock, whose name may hold its arguments: `@locked(client, "order:{id}")`.

    When the lock is lost, the function is cancelled and LockLost raised. `settings` are those of Lock.
    """

    def decorate(function: F) -> F:
        named = template(function, name)

        @functools.wraps(function)
        async def under_lock(*args: Any, **kwargs: Any) -> Any:
            async with Lock(client, named(*args, **kwargs), **settings).while_held():
                return await function(*args, **kwargs)

        return cast(F, under_lock)

    return decorate
