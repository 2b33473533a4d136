"""Distributed locks inside Redis and Valkey, for programs with threads. `holdfast.asyncio` has the same for asyncio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from ._api import ElectionBase, HoldBase, HoldfastBase, LockBase, ReentrantBase
from ._api import Leader as Leader
from ._api import ReadWriteLock as ReadWriteLock
from ._engine import RELEASE_TIME
from ._engine import Hooks as Hooks
from ._io import Threads, run
from ._rules import Name
from .errors import DeadlockError as DeadlockError
from .errors import HoldfastError as HoldfastError
from .errors import LockLostError as LockLostError
from .errors import LossReason as LossReason
from .errors import ModuleNotLoadedError as ModuleNotLoadedError
from .errors import NotAcquiredError as NotAcquiredError
from .errors import NotHeldError as NotHeldError
from .errors import ServerTooOldError as ServerTooOldError
from .errors import WrongTypeError as WrongTypeError

__version__ = "0.4.0"


class Hold(HoldBase):
    """A lock that is held. As a context manager it is released at the end of the block."""

    lost: threading.Event

    def check(self) -> None:
        """Asks the server whether the lock is still held. Raises LockLostError if not. Does not renew it."""
        run(self._check())

    def renew(self, lease: float | None = None) -> None:
        """Renews the lease; `lease` is its new length in seconds. Raises LockLostError if the lock is lost."""
        run(self._renew(lease))

    def release(self, timeout: float = RELEASE_TIME) -> None:
        """Releases the lock. Raises LockLostError if it had been lost. A second call does nothing.

        If the server does not answer within `timeout` seconds, the error of the connection is raised, and the release
        goes on in the background until the lease is over.
        """
        run(self._release(timeout))

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        run(self._exit(error))


class Lock(LockBase[Hold]):
    """A lock to acquire. `with lock as hold:` waits for it without a time limit."""

    def acquire(self, wait: float | None = None, *, cancel: threading.Event | None = None) -> Hold:
        """Waits for the lock for at most `wait` seconds; None: without a limit. Raises NotAcquiredError.

        cancel: when another thread sets it, the wait ends within a quarter of a second.
        """
        return run(self._acquire(wait, cancel))

    def try_acquire(self) -> Hold | None:
        """Acquires the lock if it is free, else returns None. Never waits."""
        return run(self._try_acquire())

    def __enter__(self) -> Hold:
        return run(self._enter())

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        run(self._exit(error))


class ReentrantLock(ReentrantBase[Hold], Lock):
    """A lock that the thread which holds it may acquire again. It has to be released as often as it was acquired."""

    def release(self) -> None:
        """Undoes one `acquire`. Raises NotHeldError in a thread that does not hold it, LockLostError after a loss."""
        run(self._release())


class Election(ElectionBase):
    """A candidacy: it leads, or waits to lead, until it is closed."""

    def close(self) -> None:
        """Resigns: the next candidate leads at once."""
        run(self._close())

    def __enter__(self) -> Election:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Holdfast(HoldfastBase[Lock, ReentrantLock, Election]):
    """Locks over the application's client: redis.Redis, redis.RedisCluster, or that of a Sentinel. Make it once.

    It opens connections of its own, as that client does: at most `max_connections` to each server. `close` releases
    all holds.
    """

    _hold, _lock, _reentrant_lock, _election = Hold, Lock, ReentrantLock, Election

    def __init__(self, redis: Any, *, max_connections: int = 32, hooks: Hooks | None = None) -> None:
        super().__init__(redis, Threads(), max_connections, hooks)

    def leader(self, name: Name) -> Leader | None:
        """The leader now; None: there is none."""
        return run(self._leader(name))

    def observe(self, name: Name, every: float = 1.0) -> Iterator[Leader | None]:
        """Yields the leader now, and at each change. Asks the server every `every` seconds."""
        changes = self._observe(name, every)
        while True:
            yield run(changes.__anext__())  # type: ignore[arg-type]

    def info(self, name: Name) -> dict[str, Any] | None:
        """The state of a lock (LOCK.INFO); None: it is neither held nor waited for."""
        return run(self._info(name))

    def waiters(self, name: Name) -> list[dict[str, Any]]:
        """The requests that wait for a lock, in order (LOCK.WAITERS)."""
        return run(self._waiters(name))

    def force(self, name: Name) -> int:
        """Takes a lock from its holders (LOCK.FORCE). Returns how many lost it."""
        return run(self._force(name))

    def close(self) -> None:
        """Releases all holds, which their holders lose, and closes the connections."""
        run(self._close())

    def __enter__(self) -> Holdfast:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
