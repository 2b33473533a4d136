"""Who waits and who holds: where an event finds the acquisition it is about. No I/O."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

from ._hold import Hold, State
from ._requests import KINDS, Event
from ._session import SessionState


class Book:
    """The acquisitions of one client, from before their first request until nothing more is to be heard of them."""

    def __init__(self) -> None:
        self._holds: dict[tuple[bytes, bytes], Hold] = {}

    def enter(self, hold: Hold) -> None:
        """From now on it hears its events."""
        for key in hold.terms.keys:
            self._holds[key, hold.owner] = hold

    @property
    def holds(self) -> list[Hold]:
        """All of them."""
        return list(dict.fromkeys(list(self._holds.values())))

    def leave(self, hold: Hold) -> None:
        """Nothing more is to be told to it."""
        for key in hold.terms.keys:
            if self._holds.get((key, hold.owner)) is hold:
                del self._holds[key, hold.owner]

    def tell(self, session: SessionState, reply: list[Any]) -> list[Hold]:
        """Hands out the events of a session. Those that are to be renewed elsewhere come back."""
        moved = []
        for event in [Event.parse(one) for one in reply if one[0] in KINDS]:
            hold = self._holds.get((event.keys[0], event.owner))
            if hold is None or hold.session is not session:
                continue
            if event.kind != b"untied":
                hold.hear(event)
            elif hold.doubt():
                moved.append(hold)
        return moved

    def session_ended(self, session: SessionState) -> list[Hold]:
        """A session is gone. Those that are to be renewed with another one come back."""
        holds = dict.fromkeys(hold for hold in list(self._holds.values()) if hold.session is session)
        if any(hold.held and not hold.terms.ephemeral for hold in holds):
            # Before a wait can hear of it.
            session.carried.begins()
        session.ended = True
        carried = [hold for hold in holds if hold.session_ended()]
        if not carried:
            session.carried.done()
        return carried

    def forget(self) -> None:
        """This is the child of a fork: nothing here is its own.

        Touches no hold: a thread that is not here may have had its mutex. Who looks for what it holds finds nothing.
        """
        self._holds.clear()

    @property
    def waiting(self) -> int:
        """How many have no answer yet."""
        return sum(hold.state is State.ASKED for hold in list(self._holds.values()))


def _owners() -> itertools.count[int]:
    return itertools.count(1)


class Owners:
    """Owners that nobody else uses, one for each acquisition. Whoever reads one knows which process it is."""

    def __init__(self) -> None:
        self._numbers = _owners()
        # The same object for as long as this is the same process.
        self.process = b""
        self.start()

    def start(self) -> None:
        """Begins anew, in the child of a fork too."""
        host = socket.gethostname().encode(errors="replace")[:255]
        self.process = b"%s:%d:%s:" % (host, os.getpid(), os.urandom(6).hex().encode())
        self._numbers = itertools.count(1)

    def next(self, actor: int | None = None) -> bytes:
        """The next one. All of an actor, a thread or task, are one to the server's search for deadlocks."""
        if actor is None:
            return b"%s%d" % (self.process, next(self._numbers))
        # No owner without an actor is called as an actor is: they would be one, too.
        return b"%st%d##%d" % (self.process, actor, next(self._numbers))
