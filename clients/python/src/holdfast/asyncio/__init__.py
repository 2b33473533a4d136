"""The locks of `holdfast`, for redis.asyncio: the same names, with `await`."""

from .. import errors
from ..errors import *  # noqa: F403
from ._locks import Lock, LockAll, MultiLock, RedLock, RLock, RWLock, Semaphore, Session, locked

__all__ = ["Lock", "LockAll", "MultiLock", "RLock", "RWLock", "RedLock", "Semaphore", "Session", "locked"]
__all__ += errors.__all__
