"""Owners that nobody else uses, one for each acquisition."""

from __future__ import annotations

import itertools
import os
import socket


class Owners:
    """Whoever reads one knows which process it is."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # The same object for as long as this is the same process.
        self.process = b""
        self.start()

    def start(self) -> None:
        """Begins anew, in the child of a fork too."""
        host = socket.gethostname().encode(errors="replace")[:255]
        self.process = b"%s:%d:%s:" % (host, os.getpid(), os.urandom(6).hex().encode())

    def number(self) -> int:
        """The next number of a call."""
        return next(self._numbers)

    def owner(self, number: int, actor: int | None = None) -> bytes:
        """The owner of an acquisition. All of an actor, a thread or task, are one to the search for deadlocks."""
        if actor is None:
            return b"%s%d" % (self.process, number)
        # No owner without an actor is called as an actor is: they would be one, too.
        return b"%st%d##%d" % (self.process, actor, number)


OWNERS = Owners()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OWNERS.start)
