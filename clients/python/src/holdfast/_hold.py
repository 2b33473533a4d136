"""One acquisition, from its first request to the end of the hold: its states, and who hears of them. No I/O.

Events and replies come from different threads and in any order. So every step is taken under a mutex, and whoever is to
be told is called after it.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import Any, Callable

from ._clock import now
from ._requests import FOREVER, Event, Terms, lock_error
from ._session import SessionState
from .errors import LockError, LockLost

logger = logging.getLogger("holdfast")

Wake = Callable[[], object]


class State(enum.Enum):
    """Where an acquisition stands."""

    ASKED = "asked"
    HELD = "held"
    # The session is gone, and the hold has not been renewed with another one yet.
    IN_DOUBT = "in doubt"
    LOST = "lost"
    # Given back or given up, at least by the word of the caller.
    OVER = "over"


class Answer(enum.Enum):
    """How a request ended; an error is the other possibility."""

    GRANTED = "granted"
    REFUSED = "refused"
    # To be asked once more: the session ended, or the key moved.
    AGAIN = "again"


class Hold:
    """One acquisition. Made before the first request, for an event may overtake the reply."""

    __slots__ = (
        "_alarm",
        "_deadline",
        "_listeners",
        "_lost_first",
        "_mutex",
        "_wake",
        "answer",
        "asked",
        "entries",
        "error",
        "event",
        "home",
        "known",
        "lease",
        "owner",
        "queued",
        "session",
        "state",
        "terms",
        "token",
        "unheard",
        "unsure",
    )

    def __init__(self, terms: Terms, owner: bytes) -> None:
        self.terms = terms
        self.owner = owner
        self.state = State.ASKED
        self.answer: Answer | LockError | None = None
        # By way of whom it was asked for.
        self.home: Any = None
        self.session: SessionState | None = None
        self.token: int | None = None
        self.error: LockLost | None = None
        # How often a re-entrant lock was taken again.
        self.entries = 0
        # What the holder looks at to see whether it is lost, of whichever kind; made when first asked for.
        self.event: Any = None
        # When the newest request that begins the lease was sent.
        self.asked = 0.0
        # The server's default lease then, in seconds.
        self.lease = 0.0
        # When the request was sent that took a place in a queue, if any has.
        self.queued = 0.0
        # When it was heard that it is granted, or renewed.
        self.known = 0.0
        # A release was sent whose answer nobody heard.
        self.unheard = False
        # A request was sent whose answer nobody heard.
        self.unsure = False
        self._deadline = FOREVER
        self._lost_first: Event | None = None
        self._mutex = threading.Lock()
        self._wake: Wake | None = None
        self._listeners: list[Callable[[LockLost], object]] = []
        self._alarm: Callable[[float], object] | None = None

    def __repr__(self) -> str:
        return f"<Hold of {self.terms.name!r} by {self.owner!r}: {self.state.value}>"

    @property
    def held(self) -> bool:
        """Whether it counts as held, be it in doubt."""
        return self.state in (State.HELD, State.IN_DOUBT)

    @property
    def in_doubt(self) -> bool:
        """Whether it is to be renewed with another session."""
        return self.state is State.IN_DOUBT

    @property
    def longest(self) -> float:
        """For how many seconds it lasts at most, if nobody renews it."""
        return self.lease if self.terms.lease is None else self.terms.lease / 1000

    @property
    def heard(self) -> bool:
        """Whether its session would be told of its loss: as long as it lives, it is."""
        return self.session is not None and not self.session.ended

    # What is told to it, by the reply to a request or by the session.

    def ask(self, session: SessionState) -> None:
        """The next request is sent, on behalf of this session."""
        with self._mutex:
            self.session = session
            self.answer = None
            self.asked = now()
            if not self.unsure:
                self.queued = self.asked
            self.lease = session.lease

    def granted(self, token: int, since: float, lease: int | None) -> None:
        """The server granted or renewed it, for so many milliseconds (None: its default), no earlier than `since`."""
        with self._mutex:
            if self.answer is not None or self.state in (State.LOST, State.OVER):
                return
            if self.session is not None and self.session.ended:
                # It hangs on nothing, and nobody would hear of its loss.
                wake = self._settle(Answer.AGAIN)
            else:
                self.state = State.HELD
                self.token = token
                self._deadline = since + (self.lease if lease is None else lease / 1000)
                self.known = now()
                wake = self._settle(Answer.GRANTED)
        wake()
        if self._lost_first is not None:
            self.hear(self._lost_first)
        self._set_alarm()

    def shortened(self, lease: int | None) -> None:
        """Its renewal for `lease` milliseconds was refused, but that lease may have begun: the earlier end counts."""
        if lease is not None:
            with self._mutex:
                self._deadline = min(self._deadline, self.asked + lease / 1000)
            self._set_alarm()

    def ended(self, answer: Answer | LockError) -> None:
        """The request ended without a grant."""
        with self._mutex:
            wake = self._settle(answer)
        wake()

    def hear(self, event: Event) -> None:
        """Takes an event of its session, about its owner and a key of it."""
        if event.kind == b"granted" and event.token is not None:
            # It lasts for so long at least, counted from when this was asked for. Servers of before don't say that.
            if event.detail and event.detail.isdigit() and self.session is not None:
                self.granted(event.token, self.session.seen, int(event.detail))
            else:
                self.granted(event.token, now(), self.terms.lease)
        elif event.kind == b"timeout":
            self.ended(Answer.REFUSED)
        elif event.kind == b"refused":
            # What is no error about locks says that it is to be asked elsewhere, or anew.
            self.ended(lock_error(event.detail or "", self.terms.name) or Answer.AGAIN)
        elif event.kind == b"lost" and self.state is State.ASKED:
            self._lost_first = event
        elif event.kind == b"lost" and (event.token is None or event.token >= (self.token or 0)):
            # One of a lower token was an earlier hold; a greater one is ours, told before the reply that raised it.
            self.lose(event.detail or "unknown")

    def session_ended(self) -> bool:
        """Its session is gone. True: it is in doubt now, and to be renewed with another one."""
        if self.state is State.ASKED:
            self.ended(Answer.AGAIN)
        elif self.terms.ephemeral:
            self.lose("disconnected")
        else:
            return self.doubt()
        return False

    def doubt(self) -> bool:
        """Nobody renews it any more, or hears of its loss, and it may live on until its lease runs out."""
        with self._mutex:
            if self.state is not State.HELD or self.session is None:
                return False
            self._deadline = self._certain
            self.state = State.IN_DOUBT
        self._set_alarm()
        return True

    def lose(self, reason: str) -> LockLost:
        """It is lost. Everybody who wants to know is told, once."""
        with self._mutex:
            if self.error is None:
                self.error = LockLost(self.terms.name, self.owner, self.token, reason)
            error = self.error
            listeners = self._listeners if self.held else []
            self._listeners = []
            self.state = State.LOST
            wake = self._settle(Answer.REFUSED)
        wake()
        self._set_alarm()
        for listener in listeners:
            self._tell(listener, error)
        return error

    def over(self) -> None:
        """The caller gives it back, or gives it up. It is renewed no more, and its loss told to nobody."""
        with self._mutex:
            if self.state is not State.LOST:
                self.state = State.OVER
        self._set_alarm()

    def closed(self) -> None:
        """The program ends its session. Who waits, and who holds, is told; there is nothing left to be given back."""
        if self.state is State.ASKED:
            self.ended(LockError(f"lock {self.terms.name!r} was not granted before its session was closed"))
        elif self.held:
            self.lose("closed")
        self.session = None

    # What the caller wants to know.

    def wait(self, wake: Wake) -> bool:
        """Will call `wake` when there is an answer. False: there is one already."""
        with self._mutex:
            if self.answer is not None:
                return False
            self._wake = wake
            return True

    @property
    def doubtful(self) -> bool:
        """Whether it could be lost by now, and the server knows better: this process stood still, or hears nothing."""
        return self._renewed and now() >= self._certain

    def check(self) -> None:
        """Raises LockLost if it is lost, or could be by now and nobody is there who knows better."""
        self.lapse()
        if self.error is not None:
            # Each `raise` of one exception adds to its traceback, which would grow with every look.
            raise self.error.with_traceback(None)

    def lapse(self) -> None:
        """Loses it if its lease could have run out. The alarm calls this, be it too early."""
        if self.held and now() >= self.until:
            self.lose("disconnected" if self.terms.watched else "expired")
        else:
            self._set_alarm()

    @property
    def until(self) -> float:
        """Until when it is held if nobody says otherwise: as long as it is renewed, for ever."""
        return FOREVER if self._renewed else self._deadline

    @property
    def rest(self) -> int | None:
        """What its lease is to be when it is taken along: all of it if it is watched, else what is left of it."""
        return self.terms.lease if self.terms.watched else max(1, int(self.left() * 1000))

    def left(self) -> float:
        """How many seconds of its lease are left for certain."""
        return self._certain - now()

    @property
    def _renewed(self) -> bool:
        return self.terms.watched and self.state is State.HELD

    @property
    def _certain(self) -> float:
        """Until when it is held for certain: by its last request, or by the server's last sign of life."""
        if not (self._renewed and self.session is not None):
            return self._deadline
        # If the default became shorter since it was asked for, it may have been before.
        lease = min(self.longest, self.session.lease) if self.terms.lease is None else self.longest
        return max(self._deadline - (self.longest - lease), self.session.renewed_until(self.known, lease))

    def when_lost(self, listener: Callable[[LockLost], object], alarm: Callable[[float], object]) -> None:
        """Calls `listener` when it is lost, or at once if it is.

        It is called by whoever hears of the loss, be it the reader of the session: it must not take long.
        `alarm(deadline)` is to call `lapse` at that time, instead of any earlier one; FOREVER: never.
        """
        with self._mutex:
            error = self.error
            if error is None:
                self._listeners.append(listener)
                self._alarm = alarm
        if error is not None:
            self._tell(listener, error)
        self._set_alarm()

    @property
    def alarm(self) -> float:
        """When to look whether it has lapsed; FOREVER: never."""
        return self.until if self.held else FOREVER

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm(self.alarm)

    def _settle(self, answer: Answer | LockError) -> Wake:
        if self.answer is None:
            self.answer = answer
        wake, self._wake = self._wake, None
        return wake or _nobody

    def _tell(self, listener: Callable[[LockLost], object], error: LockLost) -> None:
        try:
            listener(error)
        except Exception:
            logger.exception("a listener failed that was told: %s", error)


def _nobody() -> None:
    """Nobody waits."""
