"""Distributed locks inside Redis and Valkey: queued, fenced, watched by the server. See README.md.

The same names with `await` are in `holdfast.asyncio`.
"""

from . import errors
from ._locks import Lock, LockAll, MultiLock, RedLock, RLock, RWLock, Semaphore, Session, locked
from .errors import *  # noqa: F403

__version__ = "0.3.0"

__all__ = ["Lock", "LockAll", "MultiLock", "RLock", "RWLock", "RedLock", "Semaphore", "Session", "locked"]
__all__ += errors.__all__
