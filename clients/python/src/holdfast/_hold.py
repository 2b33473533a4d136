"""One acquisition, from its request to the end of the hold: what was told of it, and who hears of its loss. No I/O."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from ._clock import millis
from ._core.step import Terms
from .errors import LockLost, NotHeld

if TYPE_CHECKING:
    from ._line import Kept
    from ._shell import Home, Node

logger = logging.getLogger("holdfast")

Listener = Callable[[LockLost], object]


class State(enum.Enum):
    """Where an acquisition stands."""

    ASKED = "asked"
    HELD = "held"
    LOST = "lost"
    # Given back or given up, at least by the word of the caller.
    OVER = "over"


class Hold:
    """One acquisition. Its number is that of the core's."""

    state = State.ASKED
    # Where it was asked for.
    home: Home | None = None
    node: Node | None = None
    token: int | None = None
    error: LockLost | None = None
    # How often a re-entrant lock was taken again.
    entries = 0
    # What the holder looks at to see whether it is lost, of whichever kind; made when first asked for.
    event: Any = None
    # A release was sent whose answer nobody heard.
    unheard = False
    # How it is kept when it is given back.
    kept: Kept | None = None
    # What it consists of, at several servers.
    parts: Sequence[Hold] = ()

    def __init__(self, name: Any, keys: tuple[bytes, ...], terms: Terms, id_: int, owner: bytes) -> None:
        self.name = name
        self.keys = keys
        self.terms = terms
        self.id = id_
        self.owner = owner
        self._listeners: list[Listener] = []
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<Hold of {self.name!r} by {self.owner!r}: {self.state.value}>"

    @property
    def held(self) -> bool:
        """Whether it counts as held, be it in doubt."""
        return self.state is State.HELD

    @property
    def homes(self) -> list[Home]:
        """Where it was asked for."""
        return [] if self.home is None else [self.home]

    @property
    def place(self) -> tuple[Home, Node]:
        """Where it was asked for."""
        if self.home is None or self.node is None:
            raise NotHeld(f"lock {self.name!r} was not asked for", self.name)
        return self.home, self.node

    @property
    def until(self) -> int:
        """Until when it is held for certain, as far as is known now; 0: it is not."""
        until = None if self.node is None else self.node.core.held_until(self.id)
        return until or 0

    @property
    def lease(self) -> int:
        """Its lease, as far as is known."""
        return 0 if self.node is None else self.node.core.lease(self.id) or 0

    @property
    def left(self) -> int:
        """How many milliseconds of its lease are left for certain."""
        return max(self.until - millis(), 0)

    @property
    def doubtful(self) -> bool:
        """Whether it could be lost by now, and the server may know better: we stood still, or hear nothing."""
        return self.held and self.until <= millis()

    def granted(self, token: int) -> None:
        """The server has granted or renewed it."""
        self.token = token
        if self.state is State.ASKED:
            self.state = State.HELD

    def take_over(self, rest: Hold) -> None:
        """It goes on with what another one has left."""
        self.id, self.owner = rest.id, rest.owner
        self.home, self.node = rest.home, rest.node
        self.state = State.HELD
        # It comes last: who has none has taken nothing, if he is interrupted here.
        self.token = rest.token

    def lose(self, reason: str) -> LockLost:
        """It is lost. Everybody who wants to know is told, once."""
        with self._mutex:
            if self.error is None:
                self.error = LockLost(self.name, self.owner, self.token, reason)
            error = self.error
            listeners = self._listeners if self.held else []
            self._listeners = []
            self.state = State.LOST
        for listener in listeners:
            _tell(listener, error)
        return error

    def over(self) -> None:
        """The caller gives it back, or gives it up. Its loss is told to nobody."""
        if self.state is not State.LOST:
            self.state = State.OVER

    def raise_if_lost(self) -> None:
        """Raises LockLost if it is known to be lost."""
        if self.error is not None:
            # Each `raise` of one exception adds to its traceback, which would grow with every look.
            raise self.error.with_traceback(None)

    def when_lost(self, listener: Listener) -> None:
        """Calls `listener` when it is lost, or at once if it is. It must not take long."""
        with self._mutex:
            error = self.error
            if error is None:
                self._listeners.append(listener)
        if error is not None:
            _tell(listener, error)
        elif self.homes:
            self.homes[0].watch(self)

    def lapse(self) -> None:
        """It could have run out by now, and no server can be asked."""


def _tell(listener: Listener, error: LockLost) -> None:
    try:
        listener(error)
    except Exception:
        logger.exception("a listener failed that was told: %s", error)
