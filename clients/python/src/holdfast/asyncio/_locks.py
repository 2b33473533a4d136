"""The locks of an asyncio client."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Callable, Literal, TypeVar, cast

from redis.exceptions import RedisError

from .._flow import Flow
from .._hold import Hold
from .._lock import (
    IO,
    Held,
    LockAllBase,
    LockBase,
    Name,
    Number,
    Reentrant,
    RWLockBase,
    SemaphoreBase,
    SessionBase,
    template,
)
from .._multilock import MultiLockBase
from .._redlock import RedLockBase
from ..errors import LockLost
from ._guard import WhileHeld
from ._home import Home, actor, call, close, fits, home_of, keep, run

_IO = IO(home_of, asyncio.Event, call, keep, actor, fits)

Self = TypeVar("Self", bound="Lock")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
T = TypeVar("T")


class Lock(LockBase):
    """A lock with redis-py's signature: `client.lock("name", lock_class=holdfast.asyncio.Lock)`.

    What it holds belongs to the object, whichever task asks: take an object for each task.
    """

    _io = _IO

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
        return await self._take(self._wait(blocking, blocking_timeout), token, None)

    async def _take(self, wait: float, token: str | bytes | None, actor: int | None) -> bool:
        hold = self._new_hold(token, actor)
        try:
            if not self._is_at_hand(hold):
                return await self._cancellable(hold, self._acquiring(hold, wait))
            await cast(Home, hold.home).let_others()
            return True
        except BaseException:
            self._interrupted(hold)
            raise

    async def release(self) -> None:
        """Gives the lock back. Raises LockLost if it was lost before, NotHeld if it was not acquired.

        When it is cancelled, the lock is given back in the background; calling it once more is harmless.
        """
        hold = self._current("release")
        if not self._is_put_back(hold):
            await self._cancellable(hold, self._releasing(hold))

    async def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:
        """Adds to the timeout, or sets it to `additional_time` from now. Raises LockLost if the lock is lost."""
        await run(self._extending(additional_time, replace_ttl))
        return True

    async def reacquire(self) -> Literal[True]:
        """Begins the timeout anew. Raises LockLost if the lock is lost."""
        await run(self._reacquiring())
        return True

    async def locked(self) -> bool:
        """Whether anybody holds it, by the server's word."""
        return await run(self._locked())

    async def owned(self) -> bool:
        """Whether this object holds it, by the server's word."""
        return await run(self._owning())

    def _asked_whether_held(self, hold: Hold) -> None:
        """Nobody can wait here: until the server has answered, it is not said to be held."""
        for part in hold.parts or [hold]:
            if part.doubtful and part.home is not None:
                part.home.ask_aside(part, lambda: None)
        hold.lapse()
        # Of one that nobody renews no answer is needed.
        hold.raise_if_lost()
        raise LockLost(self.name, hold.owner, hold.token, "in doubt")

    @property
    def lost(self) -> asyncio.Event:
        """Is set as soon as this hold is known to be lost."""
        return cast(asyncio.Event, self._lost())

    def while_held(self: Self) -> WhileHeld[Self]:
        """`async with lock.while_held():` cancels the block when the lock is lost, and raises LockLost."""
        return WhileHeld(self)

    def call_when_lost(self, listener: Callable[[LockLost], object]) -> None:
        """Calls `listener` when this hold is lost, or at once if it is, as `on_lost`: in a task of its own."""
        self._call_when_lost(self._current("watch"), listener)

    def _stop_when_lost(self, stop: Callable[[LockLost], object]) -> None:
        """Calls it at once, from whatever task hears of the loss."""
        hold = self._current("watch")
        hold.when_lost(stop)

    async def _cancellable(self, hold: Hold, flow: Flow[T]) -> T:
        """Runs a flow. When cancelled, what it gave up is taken back before the caller hears of it, or soon after."""
        try:
            return await run(flow)
        except asyncio.CancelledError:
            for home in hold.homes:
                await cast(Home, home).settle()
            raise

    async def __aenter__(self: Self) -> Self:
        # Whoever enters it here leaves it, too; so the server may know who it is.
        if not await self._take(self._wait(None, None), None, self._io.actor()):
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

    Taking it again asks the server nothing and does not prolong a timeout. If the lock was lost, it is asked for anew,
    and whoever took it before hears of the loss at his release.
    """

    def __init__(self, client: Any, name: Name, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, **kwargs)
        self._tasks: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()

    async def _take(self, wait: float, token: str | bytes | None, actor: int | None) -> bool:
        return self._entered() or await super()._take(wait, token, actor)

    async def release(self) -> None:
        """Gives back what the newest acquire took."""
        if self._left():
            await super().release()

    def _held(self) -> Held:
        return self._tasks.setdefault(asyncio.current_task(), Held())


class Semaphore(SemaphoreBase, Lock):
    """A lock that `limit` owners may hold at once. Each acquire takes a permit, with a lease and a fence of its own."""


class LockAll(LockAllBase, Lock):
    """Several locks, taken at once: all or none, and none while it waits. In a cluster, of one slot."""


class RWLock(RWLockBase[Lock]):
    """A lock that any number of readers may hold at once, or one writer. Who came first goes first, of either kind."""

    _lock = Lock


class MultiLock(MultiLockBase, Lock):
    """Locks on different servers, slots or databases, taken together: all or none."""


class RedLock(RedLockBase, Lock):
    """A lock on a majority of independent servers, which know nothing of each other."""


class Session(SessionBase):
    """The connection that stands for this process at a client's servers. `async with` closes it at the block's end."""

    _io = _IO

    async def close(self) -> None:
        """Gives back all locks that were acquired by way of this client, and ends the connection.

        Whoever still holds one is told that it is lost; whoever waits gets a LockError. A lock that is acquired later
        begins another session.
        """
        await close(self.redis)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


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
