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

T = TypeVar("T")
Step = Coroutine[Any, Any, T]

_WAITS_FORGET = sys.version_info < (3, 12)
_TIMEOUTS_FORGET = sys.version_info < (3, 11, 3)
# How long a step that was cancelled may go on before it is cancelled once more, in seconds.
_AGAIN = 0.01


def heeded(step: Step[T]) -> Step[T]:
    """What comes of a step of redis-py's, unless it is cancelled. A task of its own where that could be forgotten."""
    return _heed(step) if _WAITS_FORGET else step


def heeded_request(request: Step[T], *, quick: bool) -> Step[T]:
    """The same for a request. A task would cost as much as the rest of it, so a quick one has none if it can be seen.

    Quick is what waits for the server by nothing that forgets, unless something goes wrong.
    """
    return _counted(request) if quick and _WAITS_FORGET and not _TIMEOUTS_FORGET else heeded(request)


async def _counted(step: Step[T]) -> T:
    """Python 3.11 counts how often a task was asked to end, so that it is seen when somebody forgot it after all."""
    task: Any = asyncio.current_task()
    before = task.cancelling()
    try:
        result = await step
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def _heed(step: Step[T]) -> T:
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
    try:
        await waiter
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_AGAIN)
        if not task.cancelled():
            # What came of it is not asked for any more.
            task.exception()
        raise
    result: T = task.result()
    return result
