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
    NotLoaded,
    WrongType,
)
from ._locks import Lock, LockAll, MultiLock, RedLock, RLock, RWLock, Semaphore, Session, locked

__all__ = [
    "Cancelled",
    "Deadlock",
    "Lock",
    "LockAll",
    "LockError",
    "LockLost",
    "LockNotOwnedError",
    "MultiLock",
    "NoReplicas",
    "NotGranted",
    "NotHeld",
    "NotLoaded",
    "RLock",
    "RWLock",
    "RedLock",
    "Semaphore",
    "Session",
    "WrongType",
    "locked",
]
