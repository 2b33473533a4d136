"""What a client of the basic profile decides, without I/O: docs/client-protocol.md in code. Times are in seconds."""

from __future__ import annotations

import binascii
import dataclasses
import enum
import math
import os
import time
from collections.abc import Iterable
from typing import Any

from redis.exceptions import AuthenticationError, ConnectionError, TimeoutError

from ._clock import COUNTS_SUSPEND, now
from .errors import (
    DeadlockError,
    LossReason,
    ModuleNotLoadedError,
    ServerTooOldError,
    WrongTypeError,
)

PROTOCOL = 4
DRIFT = 0.99
GRACE = 0.25
"""How much later than the caller's time an answer may come."""
WAIT_SILENCE = 2.0
SUPERSEDED_WITHIN = 1.0
LONGEST_WAIT = 3600.0
POLL_EVERY = 1.0
BATCH = 256
RENEW_AT = 0.25
"""When a hold is renewed, as a part of its lease."""
LEAST_SILENCE, LONGEST_SILENCE = 0.05, 1.0
"""How long a request without a wait may take."""

Name = str | bytes
Words = tuple[bytes | int, ...]


class Silence(TimeoutError):
    """A server owes a reply, and its time is over. The reply may still come."""


class NotSent(TimeoutError):
    """No connection was to be had in time: nothing was sent."""


def ms(seconds: float) -> int:
    """Whole milliseconds, rounded up, at least 1: 0 means *for ever* to the server."""
    return max(1, math.ceil(seconds * 1000 - 1e-6))


def silence(lease: float, patience: float | None = None) -> float:
    """How long a request without a wait may take, for a hold with this lease."""
    return min(max(lease / 8, LEAST_SILENCE), patience or LONGEST_SILENCE)


def encode(name: Name) -> bytes:
    """A name of a lock as the server has it."""
    return name.encode() if isinstance(name, str) else bytes(name)


def pack(*commands: Words) -> bytes:
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
    """A map, which comes as a flat array. Unknown fields are the caller's to ignore."""
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=False)}


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a lock is asked for with."""

    keys: tuple[bytes, ...]
    name: Any
    lease: float = 10.0
    renew: bool = True
    ephemeral: bool = False
    replicas: int = 0
    limit: int = 1
    """How many may hold it; 0: any number."""
    prefix: bytes = b""
    """What the owner begins with."""
    owner: bytes | None = None
    """An owner that the application chose: asked for with NEW, and never released by ALL."""
    patience: float | None = None
    """How long a server may take to answer, of several that are asked: the first error ends the request."""

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(f"name must be one name, or several different ones, got {self.name!r}")
        if self.lease < 0.001:
            raise ValueError(f"lease must be at least 0.001 s, got {self.lease!r}")
        if self.limit < 0:
            raise ValueError(f"limit must be at least 1, got {self.limit!r}")
        if len(self.keys) > 1 and self.limit != 1:
            raise ValueError("several names can only be locked as mutexes: neither limit nor shared")

    @property
    def is_queued_here(self) -> bool:
        """Whether only one wait of this client is at the server."""
        return self.limit == 1 and len(self.keys) == 1

    def new_owner(self) -> bytes:
        """Unique for each acquisition, also after a fork."""
        return self.owner or self.prefix + os.urandom(16).hex().encode()

    def _head(self, verb: bytes, owner: bytes) -> Words:
        if len(self.keys) == 1:
            return (b"LOCK." + verb, self.keys[0], owner)
        return (b"LOCK.M" + verb, len(self.keys), *self.keys, owner)

    def _replicas(self) -> Words:
        return (b"REPLICAS", self.replicas) if self.replicas else ()

    def acquire(self, owner: bytes, wait: float | None, waited: float) -> Words:
        """`wait` None: not at all."""
        words = (*self._head(b"ACQUIRE", owner), *((b"NEW",) if self.owner else (b"HOLDS", 1)))
        words += (b"LEASE", ms(self.lease))
        if wait is not None:
            words += (b"WAIT", ms(min(wait, LONGEST_WAIT)))
            if waited > 0.001:
                words += (b"WAITED", ms(waited))
        if self.limit != 1:
            words += (b"LIMIT", self.limit) if self.limit else (b"SHARED",)
        if self.ephemeral:
            words += (b"EPHEMERAL",)
        return (*words, *self._replicas(), b"WITHWAITED")

    def renewal(self, owner: bytes, token: int, lease: float) -> Words:
        """For the hold under this token."""
        return (*self._head(b"RENEW", owner), b"TOKEN", token, b"LEASE", ms(lease), *self._replicas())

    def release(self, owner: bytes, token: int) -> Words:
        """Of the hold under this token."""
        return (*self._head(b"RELEASE", owner), b"TOKEN", token)

    def withdrawal(self, owner: bytes) -> Words:
        """Of whatever the owner holds or waits for."""
        return (*self._head(b"RELEASE", owner), b"ALL")

    def silence(self, replicas_timeout: float) -> float:
        """How long a request without a wait may take."""
        return silence(self.lease, self.patience) + (replicas_timeout if self.replicas else 0.0)


class Verdict(enum.Enum):
    """What a reply means."""

    YES = enum.auto()
    NIL = enum.auto()
    PASSING = enum.auto()
    """Again after the pause."""
    MOVED = enum.auto()
    """Another node."""
    DEMOTED = enum.auto()
    """Again after the pause; the primary must be found anew."""
    FATAL = enum.auto()


_CODES = {
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "TryAgainError": "TRYAGAIN",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "AskError": "ASK",
}
_PASSING = frozenset(
    "LOADING BUSY TRYAGAIN MASTERDOWN MISCONF NOREPLICAS CLUSTERDOWN OOM UNCONFIRMED SUPERSEDED".split()  # noqa: SIM905
)


def code_of(error: BaseException) -> str:
    """The first word of an error reply. redis-py takes some of them away."""
    return _CODES.get(type(error).__name__) or str(error).partition(" ")[0]


def judge(reply: Any) -> Verdict:
    """What a reply, or each element of one, says."""
    if reply is None or (isinstance(reply, list) and None in reply):
        return Verdict.NIL
    if not isinstance(reply, Exception):
        return Verdict.YES
    code, text = code_of(reply), str(reply)
    if code in ("MOVED", "ASK"):
        return Verdict.MOVED
    if code in ("READONLY", "UNBLOCKED"):
        return Verdict.DEMOTED
    if code in _PASSING or "too many waiters" in text or "being confirmed" in text or "max number of clients" in text:
        return Verdict.PASSING
    return Verdict.FATAL


def fatal(reply: Exception, name: Any) -> Exception:
    """The error that the application gets."""
    text = str(reply)
    if "unknown command" in text.lower() and "LOCK." in text.upper():
        return ModuleNotLoadedError(
            f"the module Holdfast is not loaded in this server, which says: {text}. Load it by MODULE LOAD"
            " /path/to/libholdfast.so, or for good by a line loadmodule /path/to/libholdfast.so in redis.conf",
            name,
        )
    kind = {"DEADLOCK": DeadlockError, "WRONGTYPE": WrongTypeError}.get(code_of(reply))
    return kind(f"lock {name!r}: {text}", name) if kind else reply


def check_version(lowest: int, highest: int, version: str) -> None:
    """Raises ServerTooOldError if the server and this client share no protocol."""
    if highest < PROTOCOL or lowest > PROTOCOL:
        old = "the server's module is too old" if highest < PROTOCOL else "this client is too old"
        raise ServerTooOldError(
            f"{old}: the module is version {version} and speaks protocol {lowest} to {highest}, this client {PROTOCOL}"
        )


class State(enum.Enum):
    """Of a hold."""

    HELD = enum.auto()
    RELEASING = enum.auto()
    RELEASED = enum.auto()
    LOST = enum.auto()


class Grant:
    """A hold, from the reply that granted it: state, token, and until when it is certain."""

    __slots__ = (
        "attempts", "broke", "certain", "entry", "event", "first_release", "keeper", "lease", "listener",
        "next_renewal", "owner", "pid", "pool", "reason", "since", "state", "terms", "token", "wall",
    )  # fmt: skip

    def __init__(self, terms: Terms, owner: bytes, token: int, certain: float) -> None:
        self.terms = terms
        self.owner = owner
        self.token = token
        self.lease = terms.lease
        self.since = now()
        self.state = State.HELD
        self.reason: LossReason | None = None
        self.broke = False
        """Whether a connection broke during this acquisition."""
        self.attempts = 0
        self.first_release = 0.0
        self.pid = os.getpid()
        self.pool: Any = None
        """The connection of an ephemeral hold."""
        self.keeper: Any = None
        self.entry: Any = None
        self.event: Any = None
        self.listener: Any = None
        self.certain = self.wall = self.next_renewal = 0.0
        self.renewed_until(certain)

    def renewed_until(self, certain: float) -> None:
        """The server holds it for a lease that ends then at the earliest."""
        self.certain = certain
        self.next_renewal = certain - self.lease * (DRIFT - RENEW_AT) if self.terms.renew else math.inf
        if not COUNTS_SUSPEND:
            self.wall = time.time() + certain - now()

    @property
    def due(self) -> float:
        """When something is to be done about it: a renewal, or its end by the clock."""
        return min(self.next_renewal, self.certain)

    def remaining(self) -> float:
        """How long no other client can hold it, for certain; 0: it is not held."""
        left = self.certain - now()
        if not COUNTS_SUSPEND:
            left = min(left, self.wall - time.time())
        return max(left, 0.0) if self.state is State.HELD and self.pid == os.getpid() else 0.0

    def lose(self, reason: LossReason) -> bool:
        """Whether this is news."""
        if self.state is not State.HELD:
            return False
        self.state, self.reason = State.LOST, reason
        return True

    def judge_release(self, reply: Any) -> Verdict:
        """Whether it was released (YES) or had been lost (NIL), by the reply to RELEASE with the token."""
        verdict = judge(reply)
        if isinstance(reply, Exception) and code_of(reply) == "WRONGTYPE":
            # Overwritten.
            return Verdict.NIL
        if verdict is Verdict.NIL and self.attempts > 1 and self.first_release < self.certain:
            return Verdict.YES
        return verdict


def granted(terms: Terms, owner: bytes, reply: Any, sent: float) -> Grant:
    """What the reply to an ACQUIRE gives, by the clock rule. Elements that later versions append are ignored."""
    token, waited = reply[:2]
    return Grant(terms, owner, token, sent + waited / 1000 + terms.lease * DRIFT)


def holds(info: Any, owner: bytes, token: int | None) -> bool:
    """Whether this owner holds a lock (under this token, if one is named), by the reply to LOCK.INFO."""
    holders: Iterable[Any] = () if info is None else map(as_map, as_map(info)["holders"])
    return any(one["owner"] == owner and token in (None, one["token"]) for one in holders)


def is_transport(error: BaseException) -> bool:
    """Whether an error came instead of a reply, and may pass."""
    return isinstance(error, (ConnectionError, TimeoutError, OSError)) and not isinstance(error, AuthenticationError)


def is_passing(error: BaseException) -> bool:
    """Whether a reply says that it may be asked again."""
    return judge(error) in (Verdict.PASSING, Verdict.DEMOTED)
