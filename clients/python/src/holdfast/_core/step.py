"""What a shell tells the core, and what the core tells the shell.

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


class Acquire(NamedTuple):
    """The program wants a lock, or several at once. The owner is `by` and the number of the call behind it."""

    call: int
    by: bytes
    keys: tuple[bytes, ...]
    terms: Terms
    wait: Wait
    # Instead of it, an owner of the caller's own choice.
    owner: bytes | None = None


class Release(NamedTuple):
    """It gives a hold back, and wants to know whether it still had it."""

    call: int
    hold: int
    within: int


class Renew(NamedTuple):
    """It renews a hold: for this lease, or as before; with a token that is at least `fence`."""

    call: int
    hold: int
    lease: int | None
    fence: int | None
    within: int


class Check(NamedTuple):
    """It asks whether a hold is certain."""

    call: int
    hold: int
    within: int


class Request(NamedTuple):
    """Any other request."""

    call: int
    words: tuple[bytes, ...]
    within: int


class Drop(NamedTuple):
    """Nobody wants this call's answer any more, or this hold."""

    call: int


class Close(NamedTuple):
    """All is given back, and the session ends."""

    call: int
    within: int


class Opened(NamedTuple):
    """Both connections of a pair are there, with user and database."""

    pair: int


class Received(NamedTuple):
    """Bytes have arrived."""

    pair: int
    channel: str
    data: bytes


class PairEnded(NamedTuple):
    """One connection of a pair has ended, or could not be opened."""

    pair: int


class Unreachable(NamedTuple):
    """A pair could not be opened, and what was not sent yet is not to wait until one can be."""

    pair: int


class Leave(NamedTuple):
    """In a cluster: another server has what this acquisition or hold is about."""

    id: int


class Take(NamedTuple):
    """What had to leave another core goes on here."""

    moved: Moved


class Wake(NamedTuple):
    """It is as late as `WakeAt` said; all that can be read has been read and told."""


Input = Union[
    Acquire, Release, Renew, Check, Request, Drop, Close, Opened, Received, PairEnded, Unreachable, Leave, Take, Wake
]


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


class WakeAt(NamedTuple):
    """Tell `Wake` then; it replaces the one before."""

    at: int


Output = Union[Open, End, Send, Ended, Lost, Move, WakeAt]
