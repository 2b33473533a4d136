"""The locks of `holdfast`, for redis.asyncio: the same names, with `await`."""

from ..errors import (
    Cancelled,
    Deadlock,
    LockError,
    LockLost,
    LockNotOwnedError,
    NoReplicas,
    NotGranted,
    NotHeld,
    WrongType,
)
from ._locks import Lock, LockAll, RLock, RWLock, Semaphore, locked

__all__ = [
    "Cancelled",
    "Deadlock",
    "Lock",
    "LockAll",
    "LockError",
    "LockLost",
    "LockNotOwnedError",
    "NoReplicas",
    "NotGranted",
    "NotHeld",
    "RLock",
    "RWLock",
    "Semaphore",
    "WrongType",
    "locked",
]
