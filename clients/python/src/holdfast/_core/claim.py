"""What is asked for or held: one acquisition, from the call to its end."""

from __future__ import annotations

import enum
from typing import NamedTuple, Union

from .step import FOREVER, NO_WAIT, Terms, Wait


class Stage(enum.Enum):
    """How far it is."""

    # To be asked for in this session.
    NEW = 1
    # Asked for in this session.
    ASKED = 2
    # Some of several keys are left from another session: they are given back, then it is asked for again.
    CLEARING = 3
    HELD = 4
    # The server did not have it when it was given back. Why, is told on the other connection.
    GONE = 5


class Simple(enum.Enum):
    """What is sent for it."""

    ACQUIRE = 1
    RELEASE = 2
    CANCEL = 3


class Renewing(NamedTuple):
    """Or this: a renewal, with this lease."""

    lease: int


Kind = Union[Simple, Renewing]

# What goes first.
HOLDS, UNWANTED, ASKED_BEFORE, NEW = range(4)


class Hold:
    """A hold."""

    __slots__ = ("confirming", "known", "lasts", "lease", "left", "tied", "token", "until")

    def __init__(self, token: int, lease: int, until: int, known: int) -> None:
        self.token = token
        self.lease = lease
        # It lasts so long for certain, signs of life aside.
        self.until = until
        # How many `LOCK.NEXT` had been sent when its terms became known: later signs of life speak of it.
        self.known = known
        # Tied to the session that stands.
        self.tied = True
        # A renewal waits for its replicas.
        self.confirming = False
        # Of a renewal of several keys each is told of: how many are not yet, and how long the others last.
        self.left = 0
        self.lasts = FOREVER


class Renewal:
    """A renewal that the program has asked for."""

    __slots__ = ("call", "fence", "is_sent", "lease")

    def __init__(self, call: int, lease: int | None, fence: int | None) -> None:
        self.call = call
        self.lease = lease
        self.fence = fence
        self.is_sent = False


class Claim:
    """One acquisition."""

    __slots__ = (
        "asked_before",
        "asking",
        "bound",
        "checks",
        "has_moved",
        "hold",
        "keys",
        "not_before",
        "owner",
        "pair",
        "refusal",
        "release",
        "renewal",
        "sent",
        "since",
        "stage",
        "terms",
        "wait",
        "wanted",
    )

    def __init__(self, owner: bytes, keys: tuple[bytes, ...], terms: Terms, wait: Wait, since: int) -> None:
        self.owner = owner
        self.keys = keys
        self.terms = terms
        self.wait = wait
        # When the program asked.
        self.since = since
        # Whether anybody wants it still. Nothing makes it wanted again.
        self.wanted = True
        self.stage = Stage.NEW
        # There if it is held.
        self.hold: Hold | None = None
        # The request that is on its way; its reply has not come.
        self.sent: Kind | None = None
        # The pair over which anything of it was sent last: only that session can wait for it or keep it alive.
        self.pair: int | None = None
        # It was asked for in a session that has ended, so it may be held.
        self.asked_before = False
        # What of giving it back the server refused last, and why.
        self.refusal: tuple[Kind, str] | None = None
        # The last thing that was said of it is that another server has it.
        self.has_moved = False
        # It is on its way to the server that is asked: the next request says that this is known.
        self.asking = False
        # Nothing is sent before.
        self.not_before = 0
        # When it must have been given back, or the session ends.
        self.bound: int | None = None
        # What the program has asked of the hold.
        self.renewal: Renewal | None = None
        self.checks: list[int] = []
        self.release: int | None = None

    def move(self, stage: Stage, hold: Hold | None = None) -> None:
        """It is as far as this."""
        self.stage, self.hold = stage, hold

    def set_adrift(self, until: int) -> None:
        """Its session has ended, or its server has it no more: of what was sent nothing comes any more."""
        self.sent, self.not_before = None, 0
        if self.stage is Stage.ASKED:
            self.stage, self.asked_before = Stage.NEW, True
        elif self.hold is not None:
            self.hold.until, self.hold.tied, self.hold.confirming = until, False, False
        if self.renewal is not None:
            self.renewal.is_sent = False

    def next(self, pair: int, until: int, now: int) -> Kind | None:
        """The request that is to be sent next over this pair. `until`: how long its hold is certain."""
        if self.sent is not None or now < self.not_before:
            return None
        if not self.wanted:
            if self.stage is Stage.GONE:
                return None
            is_refused = self.refusal is not None and self.refusal[0] is Simple.RELEASE
            # A wait can only be cancelled, and so can what the server does not let go now.
            cancel = self.pair == pair and (is_refused or self.stage is Stage.ASKED)
            return Simple.CANCEL if cancel else Simple.RELEASE
        if self.stage is Stage.NEW:
            return Simple.ACQUIRE
        if self.stage is Stage.CLEARING:
            return Simple.RELEASE
        hold = self.hold
        if hold is None or hold.confirming:
            return None
        # Taken along, because the program says so, or because it is in doubt.
        may_live = self.terms.watchdog or until > now
        is_due = self.renewal is not None or (may_live and (not hold.tied or until <= now))
        return Renewing(self._next_lease(hold, until, now)) if is_due else None

    def _next_lease(self, hold: Hold, until: int, now: int) -> int:
        """A lease that nobody renews is never made longer by taking it along."""
        if self.renewal is not None:
            return hold.lease if self.renewal.lease is None else self.renewal.lease
        return hold.lease if self.terms.watchdog else max(until - now, 1)

    def rank(self, until: int) -> tuple[int, int]:
        """Where it stands among those that have something to send: the least lease first, then by arrival."""
        if not self.wanted:
            return UNWANTED, 0
        if self.stage is Stage.HELD:
            return HOLDS, until
        return (ASKED_BEFORE, self.since) if self.asked_before else (NEW, 0)

    def words(self, kind: Kind, lease: int, session: bytes, now: int) -> tuple[bytes, ...]:
        """The request in words."""
        keys, owner = self.keys, self.owner
        if kind is Simple.CANCEL:
            return (b"LOCK.CANCEL", keys[0], owner, b"SESSION", session)
        verb = b"RENEW" if isinstance(kind, Renewing) else b"ACQUIRE" if kind is Simple.ACQUIRE else b"RELEASE"
        if len(keys) == 1:
            words = [b"LOCK." + verb, keys[0], owner]
        else:
            words = [b"LOCK.M" + verb, b"%d" % len(keys), *keys, owner]
        if kind is Simple.RELEASE:
            return (*words, b"ALL")
        if kind is Simple.ACQUIRE:
            self._add_wait(words, now)
            if self.terms.limit == 0:
                words.append(b"SHARED")
            elif self.terms.limit != 1:
                words += (b"LIMIT", b"%d" % self.terms.limit)
            words += (b"HOLDS", b"1")
        elif isinstance(kind, Renewing) and self.hold is not None:
            words += (b"TOKEN", b"%d" % self.hold.token)
            lease = kind.lease
        words += (b"LEASE", b"%d" % lease)
        if self.terms.watchdog:
            words.append(b"WATCHDOG")
        if self.terms.ephemeral:
            words.append(b"EPHEMERAL")
        if self.terms.replicas:
            words += (b"REPLICAS", b"%d" % self.terms.replicas)
        words += (b"SESSION", session)
        if isinstance(kind, Renewing) and self.renewal is not None and self.renewal.fence is not None:
            words += (b"FENCE", b"%d" % self.renewal.fence)
        return tuple(words)

    def _add_wait(self, words: list[bytes], now: int) -> None:
        if self.wait == NO_WAIT:
            return
        left = 0
        if self.wait != FOREVER:
            left = self.since + self.wait - now
            # A time that is over is no wait at all: `WAIT 0` is for ever.
            if left <= 0:
                return
        words += (b"WAIT", b"%d" % left)
        if self.asked_before and now > self.since:
            words += (b"WAITED", b"%d" % (now - self.since))


class Call:
    """A call that somebody waits for, and what it is about: the class of the input that began it."""

    __slots__ = ("about", "bound", "hold", "not_before", "words")

    def __init__(self, about: type, bound: int | None, hold: int = 0, words: tuple[bytes, ...] = ()) -> None:
        self.about = about
        self.bound = bound
        # Of a check, that of this hold.
        self.hold = hold
        # Of a plain request; nothing is sent before that time.
        self.words = words
        self.not_before = 0


class Moved(NamedTuple):
    """An acquisition or a hold on its way from one core to another, with the calls that wait for it."""

    # Its number, which it keeps.
    id: int
    claim: Claim
    calls: list[tuple[int, Call]]

    @property
    def key(self) -> bytes:
        """The key that says which server has it."""
        return self.claim.keys[0]
