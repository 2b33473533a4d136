"""The one thread of a process that has callbacks called."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Callable

from .errors import LockLost

logger = logging.getLogger("holdfast")

# For how long one callback may keep the next one waiting.
_MOMENT = 0.01


class Aside:
    """Begins with the first call, and ends with the process."""

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        """Also in the child of a fork: its parent's thread is not there, and may have had the mutex."""
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[LockLost], object], LockLost]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, listener: Callable[[LockLost], object], error: LockLost) -> None:
        """Calls somebody who wants to hear of a loss: one after the other, in a thread that ends with the call.

        One that takes long keeps that thread, and those who come after it go on.
        """
        self._calls.put((listener, error))
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._calls,), name="holdfast", daemon=True)
                self._thread.start()

    def _run(self, calls: queue.SimpleQueue[tuple[Callable[[LockLost], object], LockLost]]) -> None:
        while True:
            thread = threading.Thread(target=_call, args=calls.get(), name="holdfast-on-lost", daemon=True)
            thread.start()
            thread.join(_MOMENT)


def _call(listener: Callable[[LockLost], object], error: LockLost) -> None:
    try:
        listener(error)
    except BaseException:
        # Also sys.exit(), which means nothing here.
        logger.exception("on_lost failed, which was told: %s", error)


ASIDE = Aside()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ASIDE.start_afresh)
