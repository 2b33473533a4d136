"""Distributed locks inside Redis and Valkey: queued, fenced, watched by the server. See README.md.

The same names with `await` are in `holdfast.asyncio`.
"""

from ._locks import Lock, LockAll, RLock, RWLock, Semaphore, locked
from .errors import (
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

__version__ = "0.1.0"

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
