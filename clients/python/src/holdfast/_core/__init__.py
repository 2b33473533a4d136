"""What a client of Holdfast decides, without sockets, threads and clock: `clients/core` in Python.

A `Core` stands for one client at one server. A *shell* (threads, asyncio) tells it each thing that happens, with the
time, and carries out what it says, in its order. Same inputs, same outputs: the core in Rust writes scripts of steps,
and `tests/test_core.py` plays them to this one. `clients/core/README.md` says what a shell has to do.

`pair` knows the connections, `claim` what is asked for or held, `core` puts the two together.
"""

from .claim import Moved
from .core import Core
from .resp import Failure, Nonsense, Reply, encode, take
from .step import (
    FOREVER,
    NO_WAIT,
    Acquire,
    Check,
    Close,
    Drop,
    End,
    Ended,
    Input,
    Leave,
    Lost,
    Move,
    Open,
    Opened,
    Outcome,
    Output,
    PairEnded,
    Received,
    Release,
    Renew,
    Request,
    Send,
    Settings,
    Take,
    Terms,
    Unreachable,
    Wait,
    Wake,
    WakeAt,
)

__all__ = [
    "FOREVER",
    "NO_WAIT",
    "Acquire",
    "Check",
    "Close",
    "Core",
    "Drop",
    "End",
    "Ended",
    "Failure",
    "Input",
    "Leave",
    "Lost",
    "Move",
    "Moved",
    "Nonsense",
    "Open",
    "Opened",
    "Outcome",
    "Output",
    "PairEnded",
    "Received",
    "Release",
    "Renew",
    "Reply",
    "Request",
    "Send",
    "Settings",
    "Take",
    "Terms",
    "Unreachable",
    "Wait",
    "Wake",
    "WakeAt",
    "encode",
    "take",
]
