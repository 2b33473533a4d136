"""The locks of a blocking client."""

from __future__ import annotations

import functools
import threading
from types import TracebackType
from typing import Any, Callable, Literal, TypeVar, cast

from redis.exceptions import RedisError

from ._aside import ASIDE
from ._hold import Hold
from ._home import actor, fits, home_of, homes_of, keep, run
from ._lock import (
    IO,
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
from ._multilock import MultiLockBase
from ._redlock import RedLockBase

_IO = IO(home_of, threading.Event, ASIDE.call, keep, actor, fits)

Self = TypeVar("Self", bound="Lock")
F = TypeVar("F", bound=Callable[..., Any])


class Lock(LockBase):
    """A lock with redis-py's signature: `client.lock("name", lock_class=holdfast.Lock)`."""

    _io = _IO

    def acquire(
        self,
        sleep: Number | None = None,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Takes the lock, waiting in the server's queue. False: not granted in time.

        `token` is an owner of one's own choice, which must be new for each acquisition. `sleep` comes first as in
        redis-py's Lock, and has nothing to do.
        """
        if isinstance(sleep, bool):
            raise TypeError(f"sleep must be a number, got {sleep!r}: it comes first, as in redis-py; name blocking=")
        return self._take(self._wait(blocking, blocking_timeout), token, None)

    def _take(self, wait: float, token: str | bytes | None, actor: int | None) -> bool:
        hold = self._new_hold(token, actor)
        try:
            return self._is_at_hand(hold) or run(self._acquiring(hold, wait))
        except BaseException:
            self._interrupted(hold)
            raise

    def release(self) -> None:
        """Gives the lock back. Raises LockLost if it was lost before, NotHeld if it was not acquired."""
        hold = self._current("release")
        if not self._is_put_back(hold):
            run(self._releasing(hold))

    def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:
        """Adds to the timeout, or sets it to `additional_time` from now. Raises LockLost if the lock is lost."""
        run(self._extending(additional_time, replace_ttl))
        return True

    def reacquire(self) -> Literal[True]:
        """Begins the timeout anew. Raises LockLost if the lock is lost."""
        run(self._reacquiring())
        return True

    def locked(self) -> bool:
        """Whether anybody holds it, by the server's word."""
        return run(self._locked())

    def owned(self) -> bool:
        """Whether this object holds it, by the server's word."""
        return run(self._owning())

    def _asked_whether_held(self, hold: Hold) -> None:
        run(self._ask(hold))

    @property
    def lost(self) -> threading.Event:
        """Is set as soon as this hold is known to be lost."""
        return cast(threading.Event, self._lost())

    def __enter__(self: Self) -> Self:
        # Whoever enters it here leaves it, too; so the server may know who it is.
        if not self._take(self._wait(None, None), None, self._io.actor()):
            raise self._not_granted()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        body: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except RedisError as error:
            if not self._release_failed(body, error):
                raise


class RLock(Reentrant, Lock):
    """A lock that the thread which holds it may take again. Only the outermost release gives it back.

    Taking it again asks the server nothing and does not prolong a timeout. If the lock was lost, it is asked for anew,
    and whoever took it before hears of the loss at his release.
    """

    def __init__(self, client: Any, name: Name, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, **kwargs)
        # Whatever it was told: it is the thread that may take it again.
        self.thread_local = True
        self._local = threading.local()

    def _take(self, wait: float, token: str | bytes | None, actor: int | None) -> bool:
        return self._entered() or super()._take(wait, token, actor)

    def release(self) -> None:
        """Gives back what the newest acquire took."""
        if self._left():
            super().release()


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
    """The connection that stands for this process at a client's servers. `with` closes it at the end of the block."""

    _io = _IO

    def close(self) -> None:
        """Gives back all locks that were acquired by way of this client, and ends the connection.

        Whoever still holds one is told that it is lost; whoever waits gets a LockError. A lock that is acquired later
        begins another session.
        """
        for home in homes_of(self.redis):
            home.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def locked(client: Any, name: str, **settings: Any) -> Callable[[F], F]:
    """Runs a function under a lock, whose name may hold the function's arguments: `@locked(client, "order:{id}")`.

    `settings` are those of Lock.
    """

    def decorate(function: F) -> F:
        named = template(function, name)

        @functools.wraps(function)
        def under_lock(*args: Any, **kwargs: Any) -> Any:
            with Lock(client, named(*args, **kwargs), **settings):
                return function(*args, **kwargs)

        return cast(F, under_lock)

    return decorate
