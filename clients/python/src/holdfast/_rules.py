"""What a client of the basic profile decides, without I/O: docs/client-protocol.md in code. Times are in seconds."""

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
# How much later than the caller's time an answer may come.
GRACE = 0.25
WAIT_SILENCE = 2.0
SUPERSEDED_WITHIN = 1.0
LONGEST_WAIT = 3600.0
# How long a request waits at the server that found no connection for its wait, and how often it is sent.
POLL, POLL_EVERY = 0.1, 1.0
BATCH = 256
# When a hold is renewed, as a part of its lease.
RENEW_AT = 0.25
# How long a request without a wait may take.
LEAST_SILENCE, LONGEST_SILENCE = 0.05, 1.0
# What the server takes as a lease.
SHORTEST_LEASE, LONGEST_LEASE = 0.001, 315_360_000.0

Name = str | bytes
Words = tuple[bytes | int, ...]

COUNTS_SUSPEND = sys.platform in ("linux", "darwin")
# Of the monotonic clocks, those that go on while the machine is suspended. On macOS, Python's monotonic() does not.
now: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)
    if COUNTS_SUSPEND
    else time.monotonic
)
# Timers of the system stand still while it is suspended, so no sleep is longer than this.
LOOK_AGAIN = 5.0


class Silence(TimeoutError):
    """A server owes a reply, and its time is over. The reply may still come."""


class NotSent(TimeoutError):
    """There was no connection in time: nothing was sent."""


def ms(seconds: float) -> int:
    """Whole milliseconds, rounded up, at least 1: 0 means *for ever* to the server (B2)."""
    return max(1, math.ceil(seconds * 1000 - 1e-6))


def check_lease(lease: float) -> None:
    """Raises ValueError, also for NaN."""
    if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
        raise ValueError(f"lease must be between {SHORTEST_LEASE} and {LONGEST_LEASE:.0f} s, got {lease!r}")


def silence(lease: float, patience: float | None = None) -> float:
    """How long a request without a wait may take, for a hold with this lease (B23)."""
    return min(max(lease / 8, LEAST_SILENCE), patience or LONGEST_SILENCE)


def encode(name: Name) -> bytes:
    """A name of a lock as the server has it."""
    if not isinstance(name, (str, bytes, bytearray, memoryview)):
        # bytes(5) would be five zeros.
        raise TypeError(f"a name must be str or bytes, got {name!r}")
    return name.encode() if isinstance(name, str) else bytes(name)


def pack(commands: list[Words]) -> bytes:
    """Commands as they are sent."""
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
    """A map, which comes as a flat array. Unknown fields are the caller's to ignore (B4)."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=False)}


# What is to be done about a reply, or about an error that came instead of one. PASSING: again after the pause. MOVED:
# again at another node. DEMOTED: again after the pause, and the primary must be found anew; also if no reply came.
Verdict = enum.Enum("Verdict", "YES NIL PASSING MOVED DEMOTED FATAL")

# The table of errors. redis-py takes the first word of some away and has a class for them, later versions of more.
_PASSING = """LOADING BUSY TRYAGAIN MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN OOM UNCONFIRMED SUPERSEDED
    BusyLoadingError TryAgainError MasterDownError ClusterDownError OutOfMemoryError"""
_VERDICTS = {
    **dict.fromkeys(_PASSING.split(), Verdict.PASSING),
    **dict.fromkeys(("MOVED", "ASK", "MovedError", "AskError"), Verdict.MOVED),
    **dict.fromkeys(("READONLY", "UNBLOCKED", "ReadOnlyError"), Verdict.DEMOTED),
}
_PASSING_TEXTS = ("too many waiters", "being confirmed", "max number of clients")


def judge(reply: Any) -> Verdict:
    """What a reply, or each element of one, says."""
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
    """Whether an error came instead of a reply: whether the request was carried out is unknown."""
    is_reply = isinstance(error, (AuthenticationError, BusyLoadingError))
    # In Python 3.10, asyncio's TimeoutError is a class of its own.
    return isinstance(error, (ConnectionError, TimeoutError, OSError, asyncio.TimeoutError)) and not is_reply


def is_ask(error: Any) -> bool:
    """Whether this is a redirect for one request only."""
    return type(error).__name__ == "AskError" or str(error).startswith("ASK ")


def is_overwritten(error: Any) -> bool:
    """Whether the key holds something else than a lock: as nil to a renewal and a release."""
    return isinstance(error, Exception) and str(error).startswith("WRONGTYPE")


def fatal(reply: Exception, name: Any) -> Exception:
    """The error that the application gets."""
    text = str(reply)
    if isinstance(reply, HoldfastError):
        return reply
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
    """Whether this is nil, or the token and the waiting time. More elements are ignored."""
    is_grant = isinstance(reply, list) and len(reply) > 1 and all(isinstance(one, int) for one in reply[:2])
    return reply is None or is_grant


def holds(info: Any, owner: bytes, token: int | None) -> bool:
    """Whether this owner holds a lock under this token, or may hold it, by the reply to LOCK.INFO."""
    found = {"holders": [], "holder_count": 0, **(as_map(info) if info else {})}
    # The server may list fewer holders than there are.
    is_listed = any(one["owner"] == owner and one["token"] == token for one in map(as_map, found["holders"]))
    return is_listed or found["holder_count"] > len(found["holders"])


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a lock is asked for with."""

    keys: tuple[bytes, ...]
    name: Any
    lease: float = 10.0
    renew: bool = True
    ephemeral: bool = False
    replicas: int = 0
    # How many may hold it; 0: any number.
    limit: int = 1
    # What the owner begins with.
    prefix: bytes = b""
    # An owner that the application chose: asked for with NEW, and never released by ALL (B22).
    owner: bytes | None = None
    # How long a server may take to answer, of several that are asked: the first error ends the request.
    patience: float | None = None

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(f"name must be one name, or several different ones, got {self.name!r}")
        check_lease(self.lease)
        if len(self.keys) > 1 and self.limit != 1:
            raise ValueError("several names can only be locked as mutexes: neither limit nor shared")

    @property
    def silence(self) -> float:
        """How long a request without a wait may take."""
        return silence(self.lease, self.patience)


State = enum.Enum("State", "WAITING HELD RELEASING RELEASED LOST")


@dataclasses.dataclass(eq=False, slots=True)
class Grant:
    """One acquisition, from the call until it is released or lost: its state, and until when it is certain."""

    terms: Terms
    # Set when it is lost.
    event: Any = None
    wait: float | None = None
    # Set when the caller gives up, and how often that is to be looked for.
    cancel: Any = None
    look_every: float = LOOK_AGAIN
    owner: bytes = b""
    state: State = State.WAITING
    began: float = dataclasses.field(default_factory=now)
    pid: int = dataclasses.field(default_factory=os.getpid)
    # When the caller's time is over.
    until: float = math.inf
    # When no reply is waited for any more (B13).
    over: float = math.inf
    # The requests whose replies have not come.
    asked: list[Any] = dataclasses.field(default_factory=list)
    # When it is to be asked for the next time.
    ask_at: float = 0.0
    # When it was asked for the last time.
    sent: float = 0.0
    # Whether a connection broke under one of its requests.
    broke: bool = False
    slot: Any = None
    error: Exception | None = None
    token: int = 0
    lease: float = 0.0
    since: float = 0.0
    certain: float = 0.0
    wall: float = 0.0
    # When something is to be done about it: a renewal, or its end by the clock.
    due: float = 0.0
    # The connection of an ephemeral hold.
    pool: Any = None
    reason: LossReason | None = None
    attempts: int = 0
    first_release: float = 0.0
    listener: Any = None

    def __post_init__(self) -> None:
        # Unique for each acquisition, also after a fork (B1).
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
        """The ACQUIRE to send now. `wait` None: it is answered at once."""
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
        """What releases all that may come of any request of it."""
        return self._command(b"RELEASE", b"ALL")

    def releases(self) -> list[Words]:
        """What releases it. A stale ACQUIRE may be in the queue still, if its reply was not read (B18)."""
        by_token = self._command(b"RELEASE", b"TOKEN", self.token)
        return [by_token, self.withdrawal()] if (self.broke or self.asked) and not self.terms.owner else [by_token]

    def answers(self, reply: Any, *tokens: int) -> bool:
        """Whether this is a reply to RELEASE, or to RENEW with one of these tokens: a number or nil for each key."""
        elements = [reply] if len(self.terms.keys) == 1 else reply
        if isinstance(reply, Exception):
            return True
        if not isinstance(elements, list) or len(elements) != len(self.terms.keys):
            return False
        return all(one is None or (isinstance(one, int) and (not tokens or one in tokens)) for one in elements)

    def granted(self, reply: Any, sent: float) -> None:
        """What the reply to an ACQUIRE gives, by the clock rule. More elements are ignored."""
        self.token, waited = reply[:2]
        self.since = now()
        self.renewed(sent + waited / 1000, self.lease)

    def renewed(self, began: float, lease: float) -> None:
        """The server holds it for this lease, which began then at the earliest (B6)."""
        # The lease may have been changed since this one was sent: the shorter one counts.
        lease = min(lease, self.lease)
        self.certain = max(self.certain, began + lease * DRIFT)
        self.due = min(self.certain, began + lease * RENEW_AT if self.terms.renew else math.inf)
        if not COUNTS_SUSPEND:
            self.wall = time.time() + self.certain - now()

    def left(self) -> float:
        """How long the server holds it still, for certain."""
        left = self.certain - now()
        return left if COUNTS_SUSPEND else min(left, self.wall - time.time())

    def remaining(self) -> float:
        """How long no other client can hold it, for certain; 0: it is not held."""
        return max(self.left(), 0.0) if self.state is State.HELD and self.pid == os.getpid() else 0.0

    def is_released(self, reply: Any) -> bool:
        """By the reply to RELEASE with the token; else it had been lost (B17)."""
        return judge(reply) is Verdict.YES or (self.attempts > 1 and self.first_release < self.certain)
