"""A pair of connections: the session that hears events, and the one that carries requests."""

from __future__ import annotations

import collections
from typing import Literal, NamedTuple

from .claim import Kind
from .resp import Reply


class Sent(NamedTuple):
    """A request without a reply; without a kind: a plain one."""

    id: int
    kind: Kind | None
    at: int
    # Of a renewal.
    lease: int = 0


class Alive(NamedTuple):
    """A sign of life.

    What is renewed for the session has so many thousandths of its lease left since `asked`, if it was known before the
    `LOCK.NEXT` of that number.
    """

    asked: int
    next: int
    sure: int


class Pair:
    """A pair of connections."""

    # `greeting`: it is there, and has said who it is and whom it replaces.
    stage: Literal["opening", "greeting", "standing"] = "opening"
    # What `LOCK.OWNER` said.
    id: bytes | None = None
    # When the next `LOCK.NEXT` is sent, if not at once.
    asks_at: int | None = None
    # The newest sign of life.
    alive: Alive | None = None
    # The server takes writes, as it said last.
    takes_writes = True

    def __init__(self, number: int, now: int) -> None:
        self.number = number
        # What has arrived of a reply, on each connection.
        self.arrived: dict[str, bytes] = {}
        # The requests without a reply, oldest first.
        self.unanswered: collections.deque[Sent] = collections.deque()
        # When the server last gave a sign on the request connection, or nothing was owed yet.
        self.heard = now
        # When the last `LOCK.NEXT` was sent, and by when it is answered.
        self.asked = self.promised = now
        # What is still to be taken along from before.
        self.carried: set[int] = set()

    def deadline(self, limit: int) -> int:
        """When it is given up if nothing more is heard of the server."""
        session = self.promised + limit
        if not self.unanswered or not self.takes_writes:
            return session
        return min(session, self.heard + limit)

    def hear_alive(self, detail: str, number: int, now: int) -> int | None:
        """Reads what `LOCK.NEXT` says of the session itself: the default lease. None: it makes no sense."""
        # Later versions say more behind these.
        words = detail.split(" ")[:4]
        if len(words) < 4 or not all(word.isascii() and word.isdigit() for word in words):
            return None
        pace, lease, sure, writes = map(int, words)
        self.alive = Alive(self.asked, number, sure)
        if not self.takes_writes and writes != 0:
            self.heard = now
        self.takes_writes = writes != 0
        self.promised = now + pace
        return lease


class Event(NamedTuple):
    """An event of a session."""

    kind: str
    keys: list[Reply]
    owner: bytes
    token: int | None
    detail: str


def event_of(reply: Reply) -> Event | None:
    """Reads an event; fields that later versions append are left out. None: it makes no sense."""
    if not isinstance(reply, list) or len(reply) < 6:
        return None
    kind, _, keys, owner, token, detail = reply[:6]
    name = _text(kind)
    if name is None or not isinstance(keys, list):
        return None
    owner = owner if isinstance(owner, bytes) else b""
    return Event(name, keys, owner, token if isinstance(token, int) and token >= 0 else None, _text(detail) or "")


def _text(reply: Reply) -> str | None:
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return reply if isinstance(reply, str) else None


_AGAIN = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN")


def advice_of(error: str) -> Literal["again", "end", "tell"]:
    """What this error asks for: to ask again after a pause, to begin another session; or it is the answer."""
    code = error.split(" ", 1)[0]
    return "again" if code in _AGAIN else "end" if code in ("READONLY", "NOSESSION", "UNBLOCKED") else "tell"
