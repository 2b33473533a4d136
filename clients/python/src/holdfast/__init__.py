"""Distributed locks inside Redis and Valkey: queued, fenced, watched by the server. See README.md.

The same names with `await` are in `holdfast.asyncio`.
"""

from ._locks import Lock, LockAll, MultiLock, RedLock, RLock, RWLock, Semaphore, Session, locked
from .errors import (
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

__version__ = "0.2.0"

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
