"""The clock by which leases are counted. It goes on while the machine is suspended, where the platform has one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LOOK_AGAIN = 5.0
"""Timers of the system stand still while it is suspended, so no sleep is longer than this, in seconds."""


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _monotonic() -> float:
    # On macOS this clock goes on during suspend; Python's monotonic() is another one.
    return time.clock_gettime(time.CLOCK_MONOTONIC)


COUNTS_SUSPEND = sys.platform in ("linux", "darwin")
now: Callable[[], float] = (
    _boottime if sys.platform == "linux" else _monotonic if sys.platform == "darwin" else time.monotonic
)
