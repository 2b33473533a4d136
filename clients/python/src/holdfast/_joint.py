"""A hold that consists of others, at several servers. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._flow import Part
from ._hold import Answer, Hold, State, Wake
from .errors import LockLost

_NEVER = float("-inf")


class Joint(Hold):
    """It is held for as long as enough of its parts are, and lost when too few are left."""

    __slots__ = ("_needed", "actor", "parts")

    # Which thread or task asks, where that is told to the servers.
    actor: int | None

    # Of what was asked for, also where it was given up.
    parts: Sequence[Part]

    def begin(self, parts: Sequence[Part], needed: int, token: int) -> None:
        """From now on it is held by these."""
        with self._mutex:
            self.parts = parts
            self._needed = needed
            self.token = token
            # It may have been lost before, in an attempt that came to nothing.
            self.error = None
            self.state = State.HELD
        for part in parts:
            part.hold.when_lost(_not_alone, self._look)
        self._look()

    def over(self) -> None:
        super().over()
        for part in self.parts:
            part.hold.over()

    @property
    def doubtful(self) -> bool:
        """Whether too few of its parts are held for certain, and their servers know better."""
        doubtful = [part.hold.doubtful for part in self.parts if part.hold.held]
        return self.held and any(doubtful) and doubtful.count(False) < self._needed

    @property
    def _renewed(self) -> bool:
        # Its parts are.
        return False

    def certain_until(self, hold: Hold) -> float:
        """Until when a part counts."""
        return hold.until

    def _look(self, _: float = 0) -> None:
        """A part has another deadline, or is lost."""
        if not self.held:
            return
        untils = [self.certain_until(part.hold) if part.hold.held else _NEVER for part in self.parts]
        self._deadline = sorted(untils, reverse=True)[self._needed - 1]
        if self._deadline == _NEVER:
            errors = [part.hold.error for part in self.parts if part.hold.error is not None]
            self.lose(errors[-1].reason if errors else "unknown")
        else:
            self._set_alarm()


class Tally:
    """Waits for the answers to several requests: until so many are granted, or none is open any more."""

    def __init__(self, holds: Iterable[Hold], needed: int) -> None:
        self._holds = list(holds)
        self._needed = needed
        self._wake: Wake = _nobody

    @property
    def decided(self) -> bool:
        """Whether there is nothing to wait for."""
        answers = [hold.answer for hold in self._holds]
        return None not in answers or answers.count(Answer.GRANTED) >= self._needed

    def wait(self, wake: Wake) -> bool:
        """As a hold's."""
        self._wake = wake
        for hold in self._holds:
            hold.wait(self._answered)
        return not self.decided

    def _answered(self) -> None:
        if self.decided:
            self._wake()


def _not_alone(_: LockLost) -> None:
    """The loss of a part is looked at together with the others."""


def _nobody() -> None:
    """Nobody waits yet."""
