"""The errors of a lock.

redis-py's LockError and LockNotOwnedError are base classes, so that code which catches those needs no change. Errors of
the connection stay redis-py's own.
"""

from __future__ import annotations

import enum
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError, ResponseError


class LossReason(enum.Enum):
    """Why a hold ended although its holder did not release it."""

    # The lease may be over by this client's clock: no renewal succeeded in time, or none was wanted.
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
    """The base class of this package's errors. `lock_name` is the name, or the names, of the lock."""

    def __init__(self, message: str, lock_name: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.lock_name = lock_name

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self)), self.__dict__.copy()


def _rebuild(cls: type[HoldfastError], message: str) -> HoldfastError:
    """Unpickles an error. The constructors of the classes take different arguments."""
    return cls.__new__(cls, message)


class NotAcquiredError(HoldfastError):
    """The lock was not granted within the caller's time. `__cause__` is the last error, if there was one."""


class LockLostError(HoldfastError, LockNotOwnedError):
    """The lock is no longer held, although its holder did not release it. `reason` is a LossReason."""

    def __init__(self, lock_name: Any, fence: int | None, reason: LossReason) -> None:
        super().__init__(f"lock {lock_name!r} with token {fence} is lost: {reason.value}", lock_name)
        self.fence = fence
        self.reason = reason


class NotHeldError(HoldfastError, LockNotOwnedError):
    """The caller (an object, thread or task) does not hold the lock."""


class DeadlockError(HoldfastError):
    """Waiting for the lock would close a cycle of waits. The message names the keys."""


class WrongTypeError(HoldfastError, ResponseError):
    """The key holds something that is not a lock."""


class ModuleNotLoadedError(HoldfastError, ResponseError):
    """The server does not have the module."""


class ServerTooOldError(HoldfastError, ResponseError):
    """The server's module and this client have no protocol version in common. The message says which one is too old."""
