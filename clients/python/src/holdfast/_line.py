"""The line of a kept lock: who in this process has it, and who is next. No I/O.

Whoever comes first asks the server, by an acquisition of his own. Those who come while he asks, or has the lock, wait
here, in the order in which they came. Whoever is done leaves the lock to the next one, or at hand for whoever comes
later; and where there is nothing to leave, the next one asks the server.

With threads, whoever changes a line has the mutex of its home.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Generator
from typing import Any, Callable, NamedTuple

from . import _flow as flows
from ._clock import millis, now
from ._core.core import Core
from ._core.step import Outcome, Terms
from ._hold import Hold, State
from ._owners import OWNERS
from ._redis import failed
from ._shell import Home, Pending, Waiter
from .errors import NotHeld

_GIVEN = Outcome("held")
# There is nothing to be given: he asks the server.
_ASKS = Outcome("not held")
_NOT_GRANTED = Outcome("not granted")
_CLOSED = Outcome("closed")


class Kept(NamedTuple):
    """How what a lock object gives back is kept."""

    line: Line
    # For so many milliseconds.
    idle: int
    # Used so often in a row, while others wait.
    most: int


class Turn(Waiter):
    """Somebody in the line."""

    def __init__(self, hold: Hold, most: int) -> None:
        super().__init__()
        self.hold = hold
        self.most = most


class Line:
    """That of one lock, or of several that are taken at once, of one client."""

    # Who has it, or asks for it.
    user: Hold | None = None
    # What the last one has left: it stands for what is held at the server, and is nobody's handle.
    rest: Hold | None = None
    # For how long it is to be kept; the core does not know yet.
    _idle: int | None = None
    _is_watched = False

    def __init__(self, home: Home) -> None:
        self.home = home
        self._waiting: collections.deque[Turn] = collections.deque()

    # What they do who come and go.

    def take(self, hold: Hold, kept: Kept) -> bool:
        """Somebody takes what lies at hand. False: nothing does; if nobody else is here, he is to ask the server."""
        home = self.home
        with home.mutex:
            if self.user is not None or home.closed:
                return False
            self.user, rest = hold, self.rest
            if rest is None or rest.node is None:
                return False
            if home.stepping is None and rest.node.core.uses_at_once(millis(), rest.id):
                hold.take_over(rest)
                home.holds[rest.id] = hold
                return True
            return self._use(hold, kept.most)

    def put_back(self, hold: Hold, kept: Kept) -> bool:
        """Somebody is done. False: he does not have it, or only the server knows."""
        home = self.home
        with home.mutex:
            rest, node = self.rest, hold.node
            if self.user is not hold or hold.state is not State.HELD or node is None:
                return False
            is_plain = rest is not None and rest.id == hold.id and not self._waiting and home.stepping is None
            if rest is not None and is_plain and node.core.keeps_at_once(millis(), hold.id, kept.idle):
                hold.state, rest.node = State.OVER, node
                home.holds[rest.id] = rest
                self.user = None
                return True
            if hold.doubtful:
                return False
            self.done(hold)
            return True

    def join(self, turn: Turn, *, waits: bool) -> None:
        """Somebody wants it."""
        with self.home.mutex:
            if self.home.closed:
                turn.outcome = _CLOSED
            elif self.user is turn.hold:
                turn.outcome = _ASKS
            elif self.user is None or waits:
                self._waiting.append(turn)
                self._tend()
            else:
                turn.outcome = _NOT_GRANTED

    def withdraw(self, turn: Turn) -> Outcome:
        """His time is over. What he was told in that instant counts."""
        with self.home.mutex:
            if turn.outcome is None:
                turn.outcome = _NOT_GRANTED
                self.done(turn.hold)
            return turn.outcome

    # With the mutex. Whatever is interrupted in here may be done once more.

    def done(self, hold: Hold, *, is_at_hand: bool = True) -> None:
        """He uses it no more, or wants it no more."""
        hold.over()
        if self.user is hold:
            self.rest = self._rest_of(hold) if is_at_hand else None
            self._idle = None if hold.kept is None else hold.kept.idle
            self.user = None
        elif self._waiting:
            self._waiting = collections.deque(turn for turn in self._waiting if turn.hold is not hold)
        self._tend()

    def lost(self, hold: Hold) -> None:
        """It is lost. Who uses it is told, and the next one need not wait until he is done."""
        self.rest = None
        if self.user is hold:
            self.user = None
            self._tend()

    def clear(self) -> None:
        """What nobody uses is given back, for the end comes."""
        if self.user is None and self.rest is not None:
            self._step(self.rest, Core.drop, self.rest.id)
            self.rest = None

    def end(self) -> None:
        """Its home is closed: nobody waits any more."""
        for turn in self._waiting:
            turn.outcome = turn.outcome or _CLOSED
            turn.wake()
        self._waiting.clear()

    def watch(self) -> None:
        """Whoever uses it hears of its loss also when the server says nothing. One look does for all of them."""
        user = self.user
        if user is not None and not self._is_watched:
            self._is_watched = True
            self.home.call_at(user.until, self._look)

    def _look(self) -> None:
        self._is_watched = False
        user = self.user
        if user is not None and user.doubtful:
            self.home.ask_aside(user, self.watch)
        elif user is not None and user.held:
            self.watch()

    def _tend(self) -> None:
        """The next one has it, if nobody does; or it is kept at hand."""
        while self._waiting:
            turn = self._waiting[0]
            if self.user is None and turn.outcome is None:
                self.user = turn.hold
            if turn.outcome is None and self.user is not turn.hold:
                return
            if turn.outcome is None:
                turn.outcome = _GIVEN if self._use(turn.hold, turn.most) else _ASKS
            turn.wake()
            self._waiting.popleft()
        if self.user is None and self.rest is not None and self._idle is not None:
            self._step(self.rest, Core.keep, self.rest.id, self._idle)
            self._idle = None
            self.home.forget_given_back()

    def _use(self, hold: Hold, most: int) -> bool:
        """Gives him what is left, if that is held for certain."""
        rest, holds = self.rest, self.home.holds
        if rest is None or rest.node is None:
            return False
        call = Pending(OWNERS.number(), rest.node, None)
        self.home.calls[call.id] = call
        self._step(rest, Core.use, call.id, rest.id, most)
        self._idle = None
        if call.outcome != _GIVEN:
            holds.pop(rest.id, None)
            self.rest = None
            return False
        hold.take_over(rest)
        holds[hold.id] = hold
        return True

    def _rest_of(self, hold: Hold) -> Hold | None:
        """What he leaves. Whether that is held still, the core knows."""
        rest = self.rest
        if hold.error is not None:
            return None
        # What he did not take yet is still there.
        if hold.token is not None and (rest is None or rest.id != hold.id):
            rest = Hold(hold.name, hold.keys, hold.terms, hold.id, hold.owner)
            rest.kept, rest.token, rest.state = hold.kept, hold.token, State.OVER
        if rest is not None and hold.token is not None:
            rest.home, rest.node = hold.home, hold.node
        if rest is not None:
            self.home.holds[rest.id] = rest
        return rest

    def _step(self, rest: Hold, what: Callable[..., None], *said: Any) -> None:
        home = self.home
        if home.stepping is not None:
            home.recover()
        if rest.node is not None:
            home.step(rest.node, what, *said)


def line_of(home: Home, keys: tuple[bytes, ...], terms: Terms) -> Line:
    """The one line of these. It is there for as long as anybody may use it, and while anything lies at hand."""
    with home.mutex:
        line: Line | None = home.lines.get((keys, terms))
        if line is None:
            line = home.lines[keys, terms] = Line(home)
        return line


def acquire(hold: Hold, kept: Kept, wait: float) -> Generator[Any, Any, bool]:
    """Takes a kept lock, waiting for at most `wait` seconds: in the line, and then in the server's queue."""
    line, turn, until = kept.line, Turn(hold, kept.most), now() + wait
    try:
        line.join(turn, waits=wait > 0)
        has_waited = turn.outcome is None
        if has_waited:
            yield line.home.wait_for(turn, None if wait == math.inf else wait)
        outcome = turn.outcome or line.withdraw(turn)
        left = until - now() if has_waited else wait
        granted = outcome is _GIVEN
        # Whose time is over does not begin to ask.
        if outcome is _ASKS and (left > 0 or not has_waited):
            hold.id = OWNERS.number()
            hold.owner = OWNERS.owner(hold.id)
            granted = yield from flows.acquire(line.home, hold, left)
    except BaseException:
        line.home.leave(line, hold)
        raise
    if not granted:
        with line.home.mutex:
            line.done(hold)
    if outcome is _CLOSED:
        raise failed(outcome, None, hold.name, hold.owner, None)
    return granted


def release(hold: Hold, kept: Kept) -> Generator[Any, Any, None]:
    """Gives it back to the server, which says whether it was held until now."""
    line = kept.line
    with line.home.mutex:
        # Somebody else may have it by now, whom this one does not speak for.
        if hold.state is State.OVER and not hold.unheard:
            raise NotHeld(f"cannot release lock {hold.name!r}: it is not held here", hold.name)
        hold.over()
    try:
        yield from flows.release(hold)
    finally:
        with line.home.mutex:
            line.done(hold, is_at_hand=False)
