"""What can go wrong with a lock.

redis-py's LockError and LockNotOwnedError are the base classes, so that code which catches those goes on working.
Errors of the connection stay redis-py's own.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import LockError, LockNotOwnedError, ResponseError

__all__ = [
    "Deadlock",
    "LockError",
    "LockLost",
    "LockNotOwnedError",
    "NoReplicas",
    "NotGranted",
    "NotHeld",
    "NotLoaded",
    "WrongType",
]


class _Named(LockError):
    """Knows which lock it is about, as redis-py's LockError does from version 5.1 on."""

    def __init__(self, message: str, lock_name: Any = None) -> None:
        super().__init__(message)
        # Before redis-py 5.1 they were what the error is made of.
        self.args = (message,)
        self.message = message
        self.lock_name = lock_name

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors go from one process to another, of a pool say."""
        return _made_again, (type(self), self.args), self.__dict__.copy()


def _made_again(cls: type[_Named], args: tuple[Any, ...]) -> _Named:
    return cls.__new__(cls, *args)


class NotGranted(_Named):
    """The lock was not granted in the time given."""


class Deadlock(_Named):
    """Waiting for the lock would never end: the message names the cycle of waits."""


class NoReplicas(_Named):
    """Fewer replicas than asked for confirmed the grant in time; it was taken back."""


class WrongType(_Named):
    """The key holds something that is no lock."""


class NotLoaded(_Named, ResponseError):
    """The server does not know the commands: the module Holdfast is not loaded there."""


class NotHeld(_Named, LockNotOwnedError):
    """This object does not hold the lock.

    A release raises it, too, that was asked again over another connection and did not find the lock: the first one gave
    it back, or it was lost before.
    """


class LockLost(NotHeld):
    """The lock was held, and is not any more, although nobody here gave it back.

    `reason` is `expired` (its lease ran out), `forced` (LOCK.FORCE), `changed` (another command deleted or overwrote
    it), `disconnected` (the connection that stands for this process was gone for too long), `closed` (the program has
    closed its session), `in doubt` (with asyncio: the loop stood still, and the server is being asked) or `unknown` (it
    was gone when it was given back, and it was not tied to the connection, so the
    server told nothing).
    """

    def __init__(self, lock_name: Any, owner: bytes, fence: int | None, reason: str) -> None:
        super().__init__(f"lock {lock_name!r} of owner {owner!r} is lost: {reason}", lock_name)
        self.owner = owner
        self.fence = fence
        self.reason = reason
