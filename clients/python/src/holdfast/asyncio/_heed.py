"""Cancellation that is heard, whatever redis-py makes of it.

Before Python 3.12, `asyncio.wait_for` forgets that it was cancelled if what it waits for is done in the same moment.
redis-py connects and sends by it as soon as there is a `socket_timeout`, which version 8 has without being told. Who
gave up waiting for a lock would then go on waiting for it. Before Python 3.11.3, what redis-py limits every reply with
(the package async-timeout) forgets it, too, if its time is over in that moment.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from redis.exceptions import TimeoutError

T = TypeVar("T")
Step = Coroutine[Any, Any, T]

_WAITS_FORGET = sys.version_info < (3, 12)
# How long a step that was cancelled may go on before it is cancelled once more, in seconds.
_AGAIN = 0.01


def heeded(step: Step[T]) -> Step[T]:
    """What comes of a step of redis-py's, unless it is cancelled. A task of its own where that could be forgotten."""
    return within(None, step) if _WAITS_FORGET else step


async def within(seconds: float | None, step: Step[T]) -> T:
    """What comes of a step within this time, else TimeoutError. In a task of its own, which ends before this does."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    async def aside() -> T:
        try:
            return await step
        finally:
            # A turn of the loop before anybody hears that the task is done.
            wake()

    def done(_: asyncio.Future[T]) -> None:
        # Where it was cancelled before it had begun.
        step.close()
        wake()

    task: Any = loop.create_task(aside())
    # Whoever waits for it here would complain, too, if the loop were closed before its end.
    task._log_destroy_pending = False
    task.add_done_callback(done)
    timer = None if seconds is None else loop.call_later(max(seconds, 0), wake)
    try:
        await waiter
        if not task.done():
            await _ended(task)
            raise TimeoutError(f"not within {seconds:.3f} s")
    except asyncio.CancelledError:
        await _ended(task)
        raise
    finally:
        if timer is not None:
            timer.cancel()
    result: T = task.result()
    return result


async def _ended(task: asyncio.Task[Any]) -> None:
    """Ends it, however often it must be told."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN)
    if not task.cancelled():
        # What came of it is not asked for any more.
        task.exception()
