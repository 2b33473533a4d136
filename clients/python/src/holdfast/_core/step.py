"""What the core tells a shell, and the words that both use.

Times are whole milliseconds, rounded down, by a clock that only goes forward, also while the machine sleeps. Calls have
numbers, each used once; a hold has that of the call that acquired it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Union

if TYPE_CHECKING:
    from .claim import Moved

# How long a request waits in the server's queue, in milliseconds: not at all, at most so long, or as long as it takes.
Wait = int
NO_WAIT = -1
FOREVER = 2**64 - 1

# The two connections of a pair: the one that hears the events, and is the session; and that of the requests.
SESSION = "session"
REQUESTS = "requests"


class Settings(NamedTuple):
    """What a shell may set."""

    # Without a sign of the server for so long, while something is owed, the session ends.
    limit: int = 10_000
    # How much longer than its time a wait is left to the server, whose answer comes a round trip later.
    grace: int = 100
    # How many requests may be unanswered at once.
    unanswered: int = 256
    # Makes the pauses random.
    seed: int = 1


class Terms(NamedTuple):
    """The terms of a hold."""

    # How long it lasts; None: the server's default lease.
    lease: int | None = None
    # The server renews it while the client reads its events.
    watchdog: bool = False
    # It is given back when the session ends.
    ephemeral: bool = False
    # So many replicas must have confirmed it; 0: none.
    replicas: int = 0
    # How many may hold at once; 0: any number of readers.
    limit: int = 1
    # It may be kept at hand when nobody uses it: the server tells when somebody else waits for it.
    kept: bool = False


class Outcome(NamedTuple):
    """How a call has ended.

    `granted` and `renewed` (the token), `not granted`, `refused` (the server's error), `unanswered` (it could not be
    asked, or has not answered, in the time that there was), `closed`, `released`, `not held`, `lost` (why), `held`,
    `answer` (the reply of a plain request).
    """

    kind: str
    detail: Any = None


class Open(NamedTuple):
    """Open both connections of a new pair."""

    pair: int


class End(NamedTuple):
    """End both; tell nothing more of them."""

    pair: int


class Send(NamedTuple):
    """Send one request: these words, as `encode` writes them."""

    pair: int
    channel: str
    words: tuple[bytes, ...]


class Ended(NamedTuple):
    """A call has ended."""

    call: int
    outcome: Outcome


class Lost(NamedTuple):
    """A hold is lost: `expired`, `forced`, `changed`, or `disconnected`."""

    hold: int
    why: str


class Move(NamedTuple):
    """Another server has it: that which the error names, or else whoever knows. Its core is to take it."""

    moved: Moved
    error: str


Output = Union[Open, End, Send, Ended, Lost, Move]
