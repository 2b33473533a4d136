"""What is sent and what comes back, as values. No I/O."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

from redis.exceptions import ResponseError

from .errors import Cancelled, Deadlock, LockError, NoReplicas, NotLoaded, WrongType

# Bytes from the start: redis-py takes longer to encode a word than to send it.
Request = tuple[bytes, ...]

# The longest wait that the server takes, in seconds: ten years.
_LONGEST = 315_360_000
WAITING = b"WAITING"
# A sign of life at once.
ALIVE: Request = (b"LOCK.NEXT", b"ALIVE")
FOREVER = float("inf")

_ERRORS: dict[str, Callable[[str, Any], LockError]] = {
    "CANCELLED": Cancelled,
    "DEADLOCK": Deadlock,
    "NOREPLICAS": NoReplicas,
    "UNCONFIRMED": NoReplicas,
    "WRONGTYPE": WrongType,
}


class Terms:
    """What an acquisition asks for. The same for every acquisition of one lock object."""

    __slots__ = ("ephemeral", "keys", "lease", "name", "options", "replicas", "several", "watched")

    def __init__(
        self,
        name: Any,
        keys: tuple[bytes, ...],
        *,
        several: bool = False,
        lease: int | None = None,
        watched: bool = False,
        limit: int = 1,
        replicas: int = 0,
        ephemeral: bool = False,
    ) -> None:
        self.name = name
        self.keys = keys
        self.several = several
        # In milliseconds; None: the server's default.
        self.lease = lease
        # Whether the server renews the lease for as long as this process is there.
        self.watched = watched or lease is None
        self.replicas = replicas
        self.ephemeral = ephemeral
        which = () if limit == 1 else ("LIMIT", limit) if limit else ("SHARED",)
        self.options = (*words(*which, "HOLDS", 1), *self.terms(lease))

    def terms(self, lease: int | None) -> Request:
        """How long a hold is to last, and what it hangs on. No lease: the server's default."""
        return words(
            *(() if lease is None else ("LEASE", lease)),
            *(("WATCHDOG",) if self.watched else ()),
            *(("EPHEMERAL",) if self.ephemeral else ()),
            *(("REPLICAS", self.replicas) if self.replicas else ()),
        )

    def head(self, verb: bytes, owner: bytes) -> Request:
        """The command, its keys and the owner."""
        if self.several:
            return (b"LOCK.M" + verb, b"%d" % len(self.keys), *self.keys, owner)
        return (b"LOCK." + verb, self.keys[0], owner)


def words(*arguments: str | int) -> Request:
    """Arguments as they are sent."""
    return tuple(str(argument).encode() for argument in arguments)


def acquire(terms: Terms, owner: bytes, wait: float, session: bytes, waited: float = 0) -> Request:
    """Takes the lock. HOLDS 1 makes a repetition harmless. A wait that is over is sent as none: WAIT 0 is for ever.

    One that was begun at another session `waited` seconds ago keeps its place.
    """
    request = (*terms.head(b"ACQUIRE", owner), *terms.options, b"SESSION", session)
    if wait <= 0:
        return request
    request = (*request, b"WAIT", b"%d" % (0 if wait == FOREVER else max(1, math.ceil(min(wait, _LONGEST) * 1000))))
    return (*request, b"WAITED", b"%d" % (waited * 1000)) if waited else request


def release(terms: Terms, owner: bytes, token: int) -> Request:
    """Gives back this very hold, and no later one of the same owner."""
    return (*terms.head(b"RELEASE", owner), b"TOKEN", b"%d" % token, b"ALL")


def abandon(terms: Terms, owner: bytes) -> Request:
    """Gives back whatever this owner holds."""
    return (*terms.head(b"RELEASE", owner), b"ALL")


def renew(terms: Terms, owner: bytes, token: int, lease: int | None, session: bytes) -> Request:
    """Begins the lease anew and ties the hold to this session."""
    return (*terms.head(b"RENEW", owner), b"TOKEN", b"%d" % token, *terms.terms(lease), b"SESSION", session)


def fence(terms: Terms, owner: bytes, token: int, lease: int | None, session: bytes, fence: int) -> Request:
    """As renew, and raises the token to `fence`: every later one of that server is greater."""
    return (*renew(terms, owner, token, lease, session), b"FENCE", b"%d" % fence)


def cancel(terms: Terms, owner: bytes, session: bytes) -> Request:
    """From the reply on, this owner neither waits nor holds nor will be granted on behalf of this session."""
    return (b"LOCK.CANCEL", terms.keys[0], owner, b"SESSION", session)


def pack(request: Request) -> bytes:
    """As it is written to the network."""
    return b"*%d\r\n" % len(request) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in request])


def begin(ids: list[bytes]) -> Request:
    """The first words of a session. It ends those of before, lest a broken connection is seen minutes later."""
    return (b"LOCK.OWNER", b"REPLACES", *ids) if ids else (b"LOCK.OWNER",)


def next_events(wait: float) -> Request:
    """The events of this connection's session, once there are any; or a sign of life, after `wait` at the latest."""
    return words("LOCK.NEXT", "WAIT", 0 if wait == FOREVER else max(1, int(wait * 1000)), "ALIVE")


def held(reply: Any) -> bool:
    """Whether a RELEASE or RENEW found the hold: of several keys, each of them."""
    return all(one is not None for one in reply) if isinstance(reply, list) else reply is not None


def owners(info: Any) -> list[bytes]:
    """Who holds a lock, from the reply to LOCK.INFO: a map, or with RESP2 a flat array."""
    if info is None:
        return []
    return [_map(holder)[b"owner"] for holder in _map(info)[b"holders"]]


def _map(reply: Any) -> dict[bytes, Any]:
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2]))


# Of which kinds events are known here. Later versions of the server have more.
KINDS = (b"granted", b"timeout", b"refused", b"lost", b"untied")


class Event(NamedTuple):
    """One element of the reply to LOCK.NEXT."""

    kind: bytes
    keys: tuple[bytes, ...]
    owner: bytes
    token: int | None
    detail: str | None

    @classmethod
    def parse(cls, reply: list[Any]) -> Event:
        # Later versions of the server may append more, and put a number where there were words.
        kind, _db, keys, owner, token, detail = reply[:6]
        if isinstance(detail, bytes):
            detail = detail.decode(errors="replace")
        return cls(kind, tuple(keys), owner, token, None if detail is None else str(detail))


def code(error: ResponseError | str) -> str:
    """The first word of an error of the server."""
    return str(error).partition(" ")[0]


def is_confirming(error: ResponseError) -> bool:
    """Whether an earlier request of this owner is still under way: of a session, say, whose end is not seen yet."""
    # Some versions of redis-py leave the code out.
    return "another request of this owner for " in str(error)[:40]


def advised(error: ResponseError) -> ResponseError:
    """The error of a server that a session can't be opened at, with advice where there is some."""
    if "unknown command" not in str(error).lower():
        return error
    return NotLoaded(
        f"the module Holdfast is not loaded in this server, which says: {error}. Load it by MODULE LOAD"
        " /path/to/libholdfast.so, or for good by a line loadmodule /path/to/libholdfast.so in redis.conf"
    )


def lock_error(words: str, name: Any) -> LockError | None:
    """The type of an error that is about locks; none if it is not."""
    kind = _ERRORS.get(code(words))
    return kind(f"lock {name!r}: {words}", name) if kind else None
