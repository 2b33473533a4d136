"""A pair of connections: the session that hears events, and the one that carries requests."""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence
from typing import NamedTuple

from .claim import Renewing, Simple
from .resp import Reply


class Stage(enum.Enum):
    """How far it is."""

    OPENING = 1
    # It is there, and has said who it is and whom it replaces.
    GREETING = 2
    STANDING = 3


class Sent(NamedTuple):
    """A request without a reply; without a kind: a plain one."""

    id: int
    kind: Simple | Renewing | None
    at: int


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

    def __init__(self, number: int, now: int) -> None:
        self.number = number
        self.stage = Stage.OPENING
        # What `LOCK.OWNER` said.
        self.id: bytes | None = None
        # What has arrived of a reply, on each connection.
        self.arrived: dict[str, bytes] = {}
        # The requests without a reply, oldest first.
        self.unanswered: collections.deque[Sent] = collections.deque()
        # When the server last gave a sign on the request connection, or nothing was owed yet.
        self.heard = now
        # When the last `LOCK.NEXT` was sent, and by when it is answered.
        self.asked = now
        self.promised = now
        # When the next one is sent, if not at once.
        self.asks_at: int | None = None
        self.default_lease = 0
        # The newest sign of life.
        self.alive: Alive | None = None
        # The server takes writes, as it said last.
        self.takes_writes = True
        # What is still to be taken along from before.
        self.carried: set[int] = set()

    def deadline(self, limit: int) -> int:
        """When it is given up if nothing more is heard of the server."""
        session = self.promised + limit
        if not self.unanswered or not self.takes_writes:
            return session
        return min(session, self.heard + limit)

    def hear_alive(self, detail: str, number: int, now: int) -> bool:
        """Reads what `LOCK.NEXT` says of the session itself. False: it makes no sense."""
        # Later versions say more behind these.
        words = detail.split(" ")[:4]
        if len(words) < 4 or not all(word.isascii() and word.isdigit() for word in words):
            return False
        pace, lease, sure, writes = map(int, words)
        self.default_lease = lease
        self.alive = Alive(self.asked, number, sure)
        if not self.takes_writes and writes != 0:
            self.heard = now
        self.takes_writes = writes != 0
        self.promised = now + pace
        return True


def greeting(replaced: Sequence[bytes]) -> tuple[bytes, ...]:
    """The first words of a session."""
    return (b"LOCK.OWNER", b"REPLACES", *replaced) if replaced else (b"LOCK.OWNER",)


# The first question is answered at once, and says what the default lease is.
FIRST_QUESTION = (b"LOCK.NEXT", b"ALIVE")
QUESTION = (b"LOCK.NEXT", b"WAIT", b"0", b"ALIVE")


class Event(NamedTuple):
    """An event of a session."""

    kind: str
    keys: list[Reply]
    owner: bytes
    token: int | None
    detail: str

    @classmethod
    def read(cls, reply: Reply) -> Event | None:
        """Reads one; fields that later versions append are left out. None: it makes no sense."""
        if not isinstance(reply, list) or len(reply) < 6:
            return None
        kind, _, keys, owner, token, detail = reply[:6]
        name = _text(kind)
        if name is None or not isinstance(keys, list):
            return None
        owner = owner if isinstance(owner, bytes) else b""
        token = token if isinstance(token, int) and token >= 0 else None
        return cls(name, keys, owner, token, _text(detail) or "")


def _text(reply: Reply) -> str | None:
    if isinstance(reply, bytes):
        return reply.decode(errors="replace")
    return reply if isinstance(reply, str) else None


class Advice(enum.Enum):
    """What an error asks for."""

    # To ask again after a pause.
    AGAIN = 1
    # To begin another session.
    END = 2
    # It is the answer.
    TELL = 3


_ADVICE = {
    **dict.fromkeys(("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"), Advice.AGAIN),
    **dict.fromkeys(("READONLY", "NOSESSION", "UNBLOCKED"), Advice.END),
}


def advice_of(error: str) -> Advice:
    """What this error asks for."""
    return _ADVICE.get(error.split(" ", 1)[0], Advice.TELL)
