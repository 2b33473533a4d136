"""The decisions of a client of the basic profile (docs/client-protocol.md), without I/O. Times are in seconds."""

from __future__ import annotations

import asyncio
import binascii
import dataclasses
import enum
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, TimeoutError

from .errors import DeadlockError, HoldfastError, LossReason, ModuleNotLoadedError, ServerTooOldError, WrongTypeError

PROTOCOL = 4
DRIFT = 0.99
# For how long after the caller's time a reply still counts (B13).
GRACE = 0.25
WAIT_SILENCE = 2.0
SUPERSEDED_WITHIN = 1.0
LONGEST_WAIT = 3600.0
# How often a request is sent for a wait without a connection of its own.
POLL_EVERY = 1.0
BATCH = 256
# When a hold is renewed, as a part of its lease.
RENEW_AT = 0.25
# How often an ephemeral hold is renewed at least, in seconds: a server may close idle connections (B33).
RENEW_EPHEMERAL = 2.0
# How long a request without a wait may take.
LEAST_SILENCE, LONGEST_SILENCE = 0.05, 1.0
# What the server takes as a lease.
SHORTEST_LEASE, LONGEST_LEASE = 0.001, 315_360_000.0

Name = str | bytes
Words = tuple[bytes | int, ...]

COUNTS_SUSPEND = sys.platform in ("linux", "darwin")
# A monotonic clock that goes on while the machine is suspended, if there is one. On macOS, time.monotonic() stops.
now: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)
    if COUNTS_SUSPEND
    else time.monotonic
)
# The system's timers do not run while the machine is suspended: the timer of the holds looks at the clock this often.
LOOK_AGAIN = 5.0


class Silence(TimeoutError):
    """No reply came in time. It may still come."""


class NotSent(TimeoutError):
    """No connection was free in time: nothing was sent."""


def ms(seconds: float) -> int:
    """Whole milliseconds, rounded up, at least 1: 0 means *for ever* to the server (B2)."""
    return max(1, math.ceil(seconds * 1000 - 1e-6))


def check_lease(lease: float, argument: str = "lease") -> None:
    """Raises ValueError if this is no number, or if the server would refuse it as a lease."""
    if not isinstance(lease, (int, float)) or not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
        raise ValueError(f"{argument} must be between {SHORTEST_LEASE} and {LONGEST_LEASE:.0f} s, got {lease!r}")


def check_seconds(argument: str, value: float) -> None:
    """Raises ValueError if this is no number, or NaN."""
    if not isinstance(value, (int, float)) or not value <= math.inf:
        raise ValueError(f"{argument} must be a number of seconds, got {value!r}")


def check_integer(argument: str, value: int, least: int) -> None:
    """Raises ValueError if this is no integer of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{argument} must be an integer of at least {least}, got {value!r}")


def silence(lease: float, patience: float | None = None) -> float:
    """How long a request without a wait may take, for a hold with this lease (B23), or at most `patience`."""
    return min(max(lease / 8, LEAST_SILENCE), patience or LONGEST_SILENCE)


def poll_wait(due: int) -> float:
    """How long a request waits at the server whose wait has no connection of its own, if so many are due (B30)."""
    return max(0.005, min(0.1, 1 / due))


def encode(name: Name) -> bytes:
    """The key of a lock with this name."""
    if not isinstance(name, (str, bytes, bytearray, memoryview)):
        # bytes(5) would be five zeros.
        raise TypeError(f"a name must be str or bytes, got {name!r}")
    return name.encode() if isinstance(name, str) else bytes(name)


def pack(commands: list[Words]) -> bytes:
    """Commands in the format of the protocol (RESP)."""
    out = bytearray()
    for words in commands:
        out += b"*%d\r\n" % len(words)
        for word in words:
            data = b"%d" % word if isinstance(word, int) else word
            out += b"$%d\r\n%s\r\n" % (len(data), data)
    return bytes(out)


def slot_of(key: bytes) -> int:
    """The key's slot in a cluster."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1) if begin >= 0 else -1
    return binascii.crc_hqx(key[begin + 1 : end] if end > begin + 1 else key, 0) % 16384


def as_map(reply: Any) -> dict[str, Any]:
    """A map, which RESP2 sends as a flat array. The caller ignores unknown fields (B4)."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=False)}


# What to do after a reply, or after an error in place of one. PASSING: repeat after the pause. MOVED: repeat at another
# node. DEMOTED: find the primary anew, and repeat after the pause; also if no reply came.
Verdict = enum.Enum("Verdict", "YES NIL PASSING MOVED DEMOTED FATAL")

# redis-py has a class for some error codes, and takes the code out of the message; later versions do so for more codes.
_PASSING = """LOADING BUSY TRYAGAIN MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN OOM UNCONFIRMED SUPERSEDED
    BusyLoadingError TryAgainError MasterDownError ClusterDownError OutOfMemoryError"""
_VERDICTS = {
    **dict.fromkeys(_PASSING.split(), Verdict.PASSING),
    **dict.fromkeys(("MOVED", "ASK", "MovedError", "AskError"), Verdict.MOVED),
    **dict.fromkeys(("READONLY", "UNBLOCKED", "ReadOnlyError"), Verdict.DEMOTED),
}
_PASSING_TEXTS = ("too many waiters", "being confirmed", "max number of clients")


def judge(reply: Any) -> Verdict:
    """The verdict on a reply, or on an error in place of one. An array is nil if one of its elements is."""
    if reply is None or (isinstance(reply, list) and None in reply):
        return Verdict.NIL
    if not isinstance(reply, BaseException):
        return Verdict.YES
    text = str(reply)
    verdict = _VERDICTS.get(type(reply).__name__) or _VERDICTS.get(text.partition(" ")[0])
    if verdict is None and any(words in text for words in _PASSING_TEXTS):
        verdict = Verdict.PASSING
    return verdict or (Verdict.DEMOTED if is_transport(reply) else Verdict.FATAL)


def is_transport(error: Any) -> bool:
    """Whether this error is no error reply: the connection broke, or no reply came in time."""
    is_reply = isinstance(error, (AuthenticationError, BusyLoadingError))
    # In Python 3.10, asyncio's TimeoutError is a class of its own.
    return isinstance(error, (ConnectionError, TimeoutError, OSError, asyncio.TimeoutError)) and not is_reply


def is_ask(error: Any) -> bool:
    """Whether this is a redirect for one request only."""
    return type(error).__name__ == "AskError" or str(error).startswith("ASK ")


def is_overwritten(error: Any) -> bool:
    """Whether the key holds something that is not a lock. A renewal and a release take that as nil."""
    return isinstance(error, Exception) and str(error).startswith("WRONGTYPE")


def application_error(reply: Exception, name: Any) -> Exception:
    """The error to raise to the application."""
    text = str(reply)
    if isinstance(reply, HoldfastError):
        return reply
    if isinstance(reply, (Silence, NotSent)):
        return TimeoutError(text)
    if "unknown command" in text.lower() and "LOCK." in text.upper():
        return ModuleNotLoadedError(
            f"the module Holdfast is not loaded in this server, which says: {text}. Load it by MODULE LOAD"
            " /path/to/libholdfast.so, or for good by a line loadmodule /path/to/libholdfast.so in redis.conf",
            name,
        )
    kind = {"DEADLOCK": DeadlockError, "WRONGTYPE": WrongTypeError}.get(text.partition(" ")[0])
    return kind(f"lock {name!r}: {text}", name) if kind else reply


def check_version(lowest: int, highest: int, version: str) -> None:
    """Raises ServerTooOldError if the server and this client share no protocol (B26)."""
    if not lowest <= PROTOCOL <= highest:
        old = "the server's module is too old" if highest < PROTOCOL else "this client is too old"
        raise ServerTooOldError(
            f"{old}: the module is version {version} and speaks protocol {lowest} to {highest}, this client {PROTOCOL}"
        )


def answers_acquire(reply: Any) -> bool:
    """Whether this is a reply to ACQUIRE: nil, or the token and the time waited. More elements are ignored."""
    is_grant = isinstance(reply, list) and len(reply) > 1 and all(isinstance(one, int) for one in reply[:2])
    return reply is None or is_grant


def holds(info: Any, owner: bytes, token: int | None) -> bool:
    """Whether this owner holds a lock under this token, by a reply to LOCK.INFO. True if not all holders are listed."""
    found = {"holders": [], "holder_count": 0, **(as_map(info) if info else {})}
    is_listed = any(one["owner"] == owner and one["token"] == token for one in map(as_map, found["holders"]))
    return is_listed or found["holder_count"] > len(found["holders"])


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms of a lock."""

    keys: tuple[bytes, ...]
    name: Any
    lease: float = 10.0
    renew: bool = True
    ephemeral: bool = False
    replicas: int = 0
    # How many may hold it; 0: any number.
    limit: int = 1
    # The first part of the owner.
    prefix: bytes = b""
    # An owner that the application chose: acquired with NEW, and never released with ALL (B22).
    owner: bytes | None = None
    # For RedLock: how long a server may take to answer. The first error ends the acquisition at that server.
    patience: float | None = None

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(f"name must be one name, or several different ones, got {self.name!r}")
        check_lease(self.lease)
        check_integer("replicas", self.replicas, 0)
        if len(self.keys) > 1 and self.limit != 1:
            raise ValueError("several names can't be combined with limit or shared")

    @property
    def silence(self) -> float:
        """How long a request without a wait may take."""
        return silence(self.lease, self.patience)


State = enum.Enum("State", "WAITING HELD RELEASING RELEASED LOST")


@dataclasses.dataclass(eq=False, slots=True)
class Grant:
    """One acquisition, from the call until it is released or lost: its state, and until when it is certain."""

    terms: Terms
    # Set when the hold is lost.
    event: Any = None
    wait: float | None = None
    # Set when the caller gives up. It is checked every `look_every` seconds.
    cancel: Any = None
    look_every: float = LOOK_AGAIN
    owner: bytes = b""
    state: State = State.WAITING
    began: float = dataclasses.field(default_factory=now)
    # When the caller's time is over.
    until: float = math.inf
    # Until when a reply is waited for (B13).
    over: float = math.inf
    # The requests that have no reply yet.
    asked: list[Any] = dataclasses.field(default_factory=list)
    # When to send the next ACQUIRE.
    ask_at: float = 0.0
    # When the last ACQUIRE was sent; 0: none was.
    sent: float = 0.0
    # Whether the server may have a request of this owner that the client knows no reply to: a connection broke.
    broke: bool = False
    # The pool in which this wait has a connection of its own (B29).
    slot: Any = None
    error: Exception | None = None
    token: int = 0
    lease: float = 0.0
    since: float = 0.0
    certain: float = 0.0
    wall: float = 0.0
    # When the timer looks at the hold: to renew it, or because it ends by the clock.
    due: float = 0.0
    # An ephemeral hold: a pool that has only its connection.
    pool: Any = None
    reason: LossReason | None = None
    attempts: int = 0
    first_release: float = 0.0
    listener: Any = None

    def __post_init__(self) -> None:
        # From the operating system, so that it is unique after a fork, too (B1).
        self.owner = self.terms.owner or self.terms.prefix + os.urandom(16).hex().encode()
        self.lease = self.terms.lease
        if self.waits and self.wait is not None:
            self.until = self.began + self.wait

    @property
    def waits(self) -> bool:
        """Whether it may wait at all."""
        return self.wait is None or self.wait > 0

    def _command(self, verb: bytes, *words: bytes | int) -> Words:
        keys = self.terms.keys
        if len(keys) == 1:
            return (b"LOCK." + verb, keys[0], self.owner, *words)
        return (b"LOCK.M" + verb, len(keys), *keys, self.owner, *words)

    def _replicas(self) -> Words:
        return (b"REPLICAS", self.terms.replicas) if self.terms.replicas else ()

    def acquisition(self, sent: float, wait: float | None) -> Words:
        """The ACQUIRE to send now. `wait` None: the server answers at once."""
        terms = self.terms
        words: list[bytes | int] = [b"NEW"] if terms.owner else [b"HOLDS", 1]
        words += [b"LEASE", ms(terms.lease)]
        if wait is not None:
            words += [b"WAIT", ms(min(wait, LONGEST_WAIT))]
            words += [b"WAITED", ms(sent - self.began)] if self.sent else []
        if terms.limit != 1:
            words += [b"LIMIT", terms.limit] if terms.limit else [b"SHARED"]
        words += [b"EPHEMERAL"] if terms.ephemeral else []
        return self._command(b"ACQUIRE", *words, *self._replicas(), b"WITHWAITED")

    def renewal(self) -> Words:
        """The RENEW to send now."""
        return self._command(b"RENEW", b"TOKEN", self.token, b"LEASE", ms(self.lease), *self._replicas())

    def withdrawal(self) -> Words:
        """The RELEASE that ends all requests of this owner, and what they were granted."""
        return self._command(b"RELEASE", b"ALL")

    def releases(self) -> list[Words]:
        """The commands that release the hold, with ALL if a stale ACQUIRE may still be in the queue (B18)."""
        by_token = self._command(b"RELEASE", b"TOKEN", self.token)
        return [by_token, self.withdrawal()] if (self.broke or self.asked) and not self.terms.owner else [by_token]

    def answers(self, reply: Any, *tokens: int) -> bool:
        """Whether this is a reply to RELEASE, or to RENEW with one of these tokens.

        That is an error, or a number or nil for each key.
        """
        elements = [reply] if len(self.terms.keys) == 1 else reply
        if isinstance(reply, Exception):
            return True
        if not isinstance(elements, list) or len(elements) != len(self.terms.keys):
            return False
        return all(one is None or (isinstance(one, int) and (not tokens or one in tokens)) for one in elements)

    def granted(self, reply: Any, sent: float) -> None:
        """Takes the token and the lease from a reply to ACQUIRE."""
        self.token, waited = reply[:2]
        self.since = now()
        self.renewed(sent + waited / 1000, self.lease)

    def renewed(self, began: float, lease: float) -> None:
        """Counts this lease, which began at `began` at the earliest (B6)."""
        # `self.lease` may have changed since the request was sent: the shorter one counts.
        lease = min(lease, self.lease)
        self.certain = max(self.certain, began + lease * DRIFT)
        self.due = self.certain
        if self.terms.renew:
            every = lease * RENEW_AT
            self.due = min(self.due, began + (min(every, RENEW_EPHEMERAL) if self.terms.ephemeral else every))
        if not COUNTS_SUSPEND:
            self.wall = time.time() + self.certain - now()

    def left(self) -> float:
        """For how long the server certainly still holds it, in any state."""
        left = self.certain - now()
        return left if COUNTS_SUSPEND else min(left, self.wall - time.time())

    def remaining(self) -> float:
        """For how long no other client can hold the lock; 0: it is not held."""
        return max(self.left(), 0.0) if self.state is State.HELD else 0.0

    def is_released(self, reply: Any) -> bool:
        """Whether the reply to RELEASE with the token means released; if not, the hold had been lost (B17)."""
        return judge(reply) is Verdict.YES or (self.attempts > 1 and self.first_release < self.certain)
