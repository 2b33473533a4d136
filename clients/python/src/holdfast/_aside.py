"""The one thread of a process that does what nobody waits for: it looks at holds in time, and has callbacks called."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import queue
import threading
from typing import Any, Callable

from ._clock import LOOK_AGAIN, now
from ._hold import Hold
from ._requests import FOREVER
from .errors import LockLost

logger = logging.getLogger("holdfast")

# For how long one callback may keep the next one waiting.
_MOMENT = 0.01


class Aside:
    """Begins with the first task, and ends with the process."""

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        """Also in the child of a fork: its parent's thread is not there, and may have had the mutex."""
        self._mutex = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Only that thread looks at these. When to look at whom; of one that is in there twice, the time here counts.
        self._due: list[tuple[float, int, Hold]] = []
        self._times: dict[Hold, float] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        """Whoever may have to `do` something where no thread can be started, calls this before."""
        if self._thread is None:
            with self._mutex:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="holdfast", daemon=True)
                    thread.start()
                    self._thread = thread

    def do(self, task: Callable[[], object]) -> None:
        """Has it done by the thread. It must not take long."""
        self._tasks.put(task)
        self.start()

    def watch(self, hold: Hold) -> None:
        """Sees to it that a hold lapses in time. To be said again when its deadline is another one."""
        self.do(lambda: self._watch(hold))

    def call(self, listener: Callable[[LockLost], object], error: LockLost) -> None:
        """Calls somebody who wants to hear of a loss: one after the other, in a thread that ends with the call.

        One that takes long keeps that thread, and those who come after it go on.
        """

        def call() -> None:
            thread = threading.Thread(target=_call, args=(listener, error), name="holdfast-on-lost", daemon=True)
            thread.start()
            thread.join(_MOMENT)

        self.do(call)

    def _run(self) -> None:
        while True:
            wait = None
            if self._due:
                wait = max(0, min(self._due[0][0] - now(), LOOK_AGAIN))
            with contextlib.suppress(queue.Empty):
                self._safely(self._tasks.get(timeout=wait))
            self._look()

    def _safely(self, task: Callable[[], Any]) -> None:
        try:
            task()
        except Exception:
            logger.exception("something failed that was to be done aside")

    def _watch(self, hold: Hold) -> None:
        deadline = hold.alarm
        if deadline == FOREVER:
            self._times.pop(hold, None)
        elif self._times.get(hold) != deadline:
            self._times[hold] = deadline
            heapq.heappush(self._due, (deadline, next(self._numbers), hold))
        if len(self._due) > 2 * len(self._times) + 64:
            # Most of them are over, long before their time.
            self._due = [(deadline, next(self._numbers), hold) for hold, deadline in self._times.items()]
            heapq.heapify(self._due)

    def _look(self) -> None:
        while self._due and self._due[0][0] <= now():
            deadline, _, hold = heapq.heappop(self._due)
            if self._times.get(hold) == deadline:
                del self._times[hold]
                self._safely(hold.lapse)


def _call(listener: Callable[[LockLost], object], error: LockLost) -> None:
    try:
        listener(error)
    except BaseException:
        # Also sys.exit(), which means nothing here.
        logger.exception("on_lost failed, which was told: %s", error)


ASIDE = Aside()
