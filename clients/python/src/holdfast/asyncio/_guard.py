"""Stops a block of code when its lock is lost."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Generic, TypeVar

from ..errors import LockError, LockLost

L = TypeVar("L", bound=Any)


class WhileHeld(Generic[L]):
    """A block that runs while a lock is held, and is cancelled when it is lost; then it raises LockLost.

    It takes the lock and gives it back, unless the lock object holds it already.
    """

    def __init__(self, lock: L) -> None:
        self._lock = lock
        self._taken = False
        self._task: asyncio.Task[Any] | None = None
        self._lost: LockLost | None = None
        self._cancelled = False
        self._cancelled_before = 0

    async def __aenter__(self) -> L:
        if self._lock.fence is None:
            await self._lock.__aenter__()
            self._taken = True
        self._lock._stop_when_lost(self._stop)
        if self._lost is not None:
            await self._drop()
            raise self._lost
        self._task = asyncio.current_task()
        self._cancelled_before = _count(self._task, "cancelling")
        return self._lock

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        body: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        # Our own cancellation is taken back; is there another one?
        ours = self._cancelled and _count(task, "uncancel") <= self._cancelled_before
        if self._lost is not None and (body is None or (ours and isinstance(body, asyncio.CancelledError))):
            await self._drop()
            raise self._lost from body
        if self._taken:
            await self._lock.__aexit__(kind, body, traceback)

    async def _drop(self) -> None:
        """Forgets what is lost."""
        if self._taken:
            with contextlib.suppress(LockError):
                await self._lock.release()

    def _stop(self, lost: LockLost) -> None:
        self._lost = lost
        if self._task is not None:
            # The task that hears of it by check() is to end by its LockLost, and not by what it awaits next: it is
            # cancelled only while it awaits something in the block.
            self._task.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancelled = self._task.cancel()


def _count(task: asyncio.Task[Any] | None, method: str) -> int:
    """How many cancellations a task has been asked for. Before Python 3.11 nobody counts."""
    return int(getattr(task, method, int)())
