"""The clock by which leases are counted: it goes on while the machine sleeps."""

from __future__ import annotations

import sys
import time
from typing import Callable

# No timer of the system's goes on then. So whoever has something to look at sleeps no longer than this, in seconds.
LOOK_AGAIN = 5.0


def _pick() -> Callable[[], float]:
    if sys.platform == "linux":
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # There it is this one that goes on, and Python's monotonic() is another.
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic


now: Callable[[], float] = _pick()


def millis() -> int:
    """The same in whole milliseconds."""
    return int(now() * 1000)
