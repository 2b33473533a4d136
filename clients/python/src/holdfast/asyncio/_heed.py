"""Cancellation that is heard, whatever redis-py makes of it.

Before Python 3.12, `asyncio.wait_for` forgets that it was cancelled if what it waits for is done in the same moment.
redis-py sends each request by it as soon as there is a `socket_timeout`, which version 8 has without being told. Who
gave up waiting for a lock would then go on waiting for it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

from .._flow import Flow

T = TypeVar("T")

# How long a step that was cancelled may go on before it is cancelled once more, in seconds.
_AGAIN = 0.01


def heeding(flow: Flow[T]) -> Flow[T]:
    """The same flow, of which no step goes on when it is cancelled."""
    return flow if sys.version_info >= (3, 12) else _heeding(flow)


async def heeded(step: Awaitable[T]) -> T:
    """What comes of a step, unless it is cancelled."""
    result: T = await (step if sys.version_info >= (3, 12) else _heed(step))
    return result


def _heeding(flow: Flow[T]) -> Flow[T]:
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = flow.send(value) if error is None else flow.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value, error = (yield _heed(step) if hasattr(step, "__await__") else step), None
        except BaseException as raised:
            error = raised


async def _heed(step: Awaitable[Any]) -> Any:
    task: Any = asyncio.ensure_future(step)
    # Whoever waits for it here would complain, too, if the loop were closed before its end.
    task._log_destroy_pending = False
    waiter = task.get_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
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
    return task.result()
