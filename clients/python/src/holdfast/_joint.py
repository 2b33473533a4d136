"""A hold that consists of others, at several servers. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._core.step import Terms
from ._hold import Hold, State
from .errors import LockLost

if TYPE_CHECKING:
    from ._shell import Home


class Joint(Hold):
    """It is held for as long as enough of its parts are, and lost when too few are left."""

    needed = 0

    def __init__(self, name: Any, terms: Terms, owner: bytes, actor: int | None = None) -> None:
        super().__init__(name, (), terms, 0, owner)
        # Which thread or task asks, where that is told to the servers.
        self.actor = actor

    def begin(self, parts: Sequence[Hold], needed: int, token: int) -> None:
        """From now on it is held by these."""
        self.parts, self.needed, self.token = parts, needed, token
        # It may have been lost before, in an attempt that came to nothing.
        self.error = None
        self.state = State.HELD
        for part in parts:
            part.when_lost(self.part_lost)

    @property
    def homes(self) -> list[Home]:
        """Where its parts were asked for."""
        return [home for part in self.parts for home in part.homes]

    @property
    def until(self) -> int:
        """Until when so many are held for certain as are needed."""
        untils = sorted((self.counts_until(part) for part in self.parts), reverse=True)
        return untils[self.needed - 1] if self.needed else 0

    @property
    def lease(self) -> int:
        """The shortest of its parts'."""
        return min((part.lease for part in self.parts), default=0)

    def counts_until(self, part: Hold) -> int:
        """Until when a part counts."""
        return part.until if part.held else 0

    def over(self) -> None:
        super().over()
        for part in self.parts:
            part.over()

    def lapse(self) -> None:
        """What nobody renews has run out; else each of its parts asks its server."""
        if self.doubtful and not self.terms.watchdog:
            self.lose("expired")

    def part_lost(self, error: LockLost) -> None:
        if self.held and sum(part.held for part in self.parts) < self.needed:
            self.lose(error.reason)
