"""What can go wrong with a lock.

redis-py's LockError and LockNotOwnedError are the base classes, so that code which catches those goes on working.
Errors of the connection stay redis-py's own.
"""

from __future__ import annotations

import enum
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError, ResponseError


class LossReason(enum.Enum):
    """Why a hold ended although its holder did not release it."""

    # The lease may be over by this client's clock: it could not be renewed in time, or was not to be.
    EXPIRED = "expired"
    # The server says that the hold does not exist: it was forced, deleted, lost in a failover, or its lease ended.
    GONE = "gone"
    # The connection of an ephemeral hold broke.
    DISCONNECTED = "disconnected"
    # The client was closed, or its event loop ended.
    CLOSED = "closed"
    # This process is a child of the one that holds the lock.
    FORKED = "forked"


class HoldfastError(LockError):
    """The base of this package's errors. `lock_name` is the name or names of the lock."""

    def __init__(self, message: str, lock_name: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.lock_name = lock_name

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self)), self.__dict__.copy()


def _rebuild(cls: type[HoldfastError], message: str) -> HoldfastError:
    """An error that comes from another process."""
    return cls.__new__(cls, message)


class NotAcquiredError(HoldfastError):
    """The lock was not granted within the caller's time. `__cause__` is the last error, if there was one."""


class LockLostError(HoldfastError, LockNotOwnedError):
    """The lock was held and is not any more, although this holder did not release it. `reason` is a LossReason."""

    def __init__(self, lock_name: Any, fence: int | None, reason: LossReason) -> None:
        super().__init__(f"lock {lock_name!r} with token {fence} is lost: {reason.value}", lock_name)
        self.fence = fence
        self.reason = reason


class NotHeldError(HoldfastError, LockNotOwnedError):
    """The lock is used by an object, thread or task that does not hold it."""


class DeadlockError(HoldfastError):
    """Waiting for the lock would close a cycle of waits. The message names the keys."""


class WrongTypeError(HoldfastError, ResponseError):
    """The key holds something that is not a lock."""


class ModuleNotLoadedError(HoldfastError, ResponseError):
    """The server does not know the commands."""


class ServerTooOldError(HoldfastError, ResponseError):
    """The server's module speaks only older protocols than this client, or this client only older ones."""
