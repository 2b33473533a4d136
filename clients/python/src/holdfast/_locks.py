"""The locks of a blocking client."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Callable, Literal, TypeVar, cast

from redis.exceptions import RedisError

from . import _flow as flows
from ._home import Home, alarm, home_of, run
from ._lock import LockBase, Name, Number, Reentrant, distinct, milliseconds, template
from .errors import LockError

Self = TypeVar("Self", bound="Lock")
F = TypeVar("F", bound=Callable[..., Any])


class Lock(LockBase):
    """A lock with redis-py's signature: `client.lock("name", lock_class=holdfast.Lock)`."""

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
        sleep: Number | None = None,
    ) -> bool:
        """Takes the lock, waiting in the server's queue. False: not granted in time.

        `token` is an owner of one's own choice, which must be new for each acquisition. `sleep` has nothing to do.
        """
        hold = self._new_hold(token)
        if not run(flows.acquire(self._home, hold, self._wait(blocking, blocking_timeout))):
            return False
        self._taken(hold, alarm)
        return True

    def release(self) -> None:
        """Gives the lock back. Raises LockLost if it was lost before, NotHeld if it was not acquired."""
        hold = self._current("release")
        try:
            run(flows.release(self._home, hold))
        except LockError:
            self._dropped(hold)
            raise
        self._dropped(hold)

    def extend(self, additional_time: Number, replace_ttl: bool = False) -> Literal[True]:
        """Adds to the timeout, or sets it to `additional_time` from now. Raises LockLost if the lock is lost."""
        hold, _ = self._with_timeout("extend")
        run(flows.renew(self._home, hold, self._lease(hold, additional_time, replace_ttl)))
        return True

    def reacquire(self) -> Literal[True]:
        """Begins the timeout anew. Raises LockLost if the lock is lost."""
        hold, timeout = self._with_timeout("reacquire")
        run(flows.renew(self._home, hold, milliseconds("timeout", timeout)))
        return True

    def locked(self) -> bool:
        """Whether anybody holds it, by the server's word."""
        return any(run(flows.owners(self._home, self._terms)))

    def owned(self) -> bool:
        """Whether this object holds it, by the server's word."""
        holds = self._holds()
        return bool(holds) and all(holds[-1].owner in found for found in run(flows.owners(self._home, self._terms)))

    @property
    def lost(self) -> threading.Event:
        """Is set as soon as this hold is known to be lost."""
        hold = self._current("watch")
        if hold.event is None:
            event = hold.event = threading.Event()
            hold.when_lost(lambda _: event.set(), alarm(hold))
        return cast(threading.Event, hold.event)

    def __enter__(self: Self) -> Self:
        if not self.acquire():
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

    @property
    def _home(self) -> Home:
        return home_of(self.redis)


class RLock(Reentrant, Lock):
    """A lock that the thread which holds it may take again. Only the outermost release gives it back.

    Taking it again asks the server nothing and does not prolong a timeout; if the lock is lost, it raises LockLost.
    """

    def __init__(self, client: Any, name: Name, *args: Any, **kwargs: Any) -> None:
        super().__init__(client, name, *args, **kwargs)
        # Whatever it was told: it is the thread that may take it again.
        self.thread_local = True
        self._local = threading.local()

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: Number | None = None,
        token: str | bytes | None = None,
        sleep: Number | None = None,
    ) -> bool:
        """Takes the lock, or takes it once more."""
        if self._entered():
            return True
        return super().acquire(blocking, blocking_timeout, token)

    def release(self) -> None:
        """Gives back what the newest acquire took."""
        if self._left():
            super().release()


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
