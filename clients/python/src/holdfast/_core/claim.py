"""What is asked for or held: one acquisition, from the call to its end."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .step import FOREVER, NO_WAIT, Terms, Wait

# How far it is: to be asked for in this session; asked for in it; some of several keys are left from another session
# (they are given back, then it is asked for again); held; the server did not have it when it was given back (why, is
# told on the other connection).
Stage = Literal["new", "asked", "clearing", "held", "gone"]
# What is sent for it.
Kind = Literal["acquire", "renew", "release", "cancel"]

# What goes first.
HOLDS, UNWANTED, ASKED_BEFORE, NEW = range(4)

_VERBS = {"acquire": b"ACQUIRE", "renew": b"RENEW", "release": b"RELEASE"}


class Hold:
    """A hold."""

    # Tied to the session that stands.
    tied = True
    # A renewal waits for its replicas.
    confirming = False
    # Of a renewal of several keys each is told of: how many are not yet, and how long the others last.
    left = 0
    lasts = FOREVER

    def __init__(self, token: int, lease: int, until: int, known: int) -> None:
        self.token = token
        self.lease = lease
        # It lasts so long for certain, signs of life aside.
        self.until = until
        # How many `LOCK.NEXT` had been sent when its terms became known: later signs of life speak of it.
        self.known = known


class Renewal:
    """A renewal that the program has asked for."""

    is_sent = False

    def __init__(self, call: int, lease: int | None, fence: int | None) -> None:
        self.call = call
        self.lease = lease
        self.fence = fence


class Claim:
    """One acquisition."""

    # Whether anybody wants it still. Nothing makes it wanted again.
    wanted = True
    stage: Stage = "new"
    # There if it is held.
    hold: Hold | None = None
    # The request that is on its way; its reply has not come.
    sent: Kind | None = None
    # The pair over which anything of it was sent last: only that session can wait for it or keep it alive.
    pair: int | None = None
    # It was asked for in a session that has ended, so it may be held.
    asked_before = False
    # What of giving it back the server refused last, and why.
    refusal: tuple[Kind, str] | None = None
    # The last thing that was said of it is that another server has it.
    has_moved = False
    # It is on its way to the server that is asked: the next request says that this is known.
    asking = False
    # Nothing is sent before.
    not_before = 0
    # When it must have been given back, or the session ends.
    bound: int | None = None
    # What the program has asked of the hold.
    renewal: Renewal | None = None
    checks: tuple[int, ...] = ()
    release: int | None = None
    # Somebody else waits for it, and how often in a row it was used since that is known.
    called = False
    uses = 0
    # Nobody uses it, and until then it is kept at hand.
    idle: int | None = None

    def __init__(self, owner: bytes, keys: tuple[bytes, ...], terms: Terms, wait: Wait, since: int) -> None:
        self.owner = owner
        self.keys = keys
        self.terms = terms
        self.wait = wait
        # When the program asked.
        self.since = since

    @property
    def calls(self) -> list[int]:
        """Those that are to hear of the hold."""
        renewal = None if self.renewal is None else self.renewal.call
        return [call for call in (*self.checks, self.release, renewal) if call is not None]

    def set_adrift(self, until: int) -> None:
        """Its session has ended, or its server has it no more: of what was sent nothing comes any more."""
        self.sent, self.not_before = None, 0
        if self.stage == "asked":
            self.stage, self.asked_before = "new", True
        elif self.hold is not None:
            self.hold.until, self.hold.tied, self.hold.confirming = until, False, False
        if self.renewal is not None:
            self.renewal.is_sent = False

    def next(self, pair: int, until: int, now: int) -> Kind | None:
        """The request that is to be sent next over this pair. `until`: how long its hold is certain."""
        stage, hold = self.stage, self.hold
        if self.sent is not None or now < self.not_before:
            return None
        if not self.wanted:
            if stage == "gone":
                return None
            is_refused = self.refusal is not None and self.refusal[0] == "release"
            # A wait can only be cancelled, and so can what the server does not let go now.
            return "cancel" if self.pair == pair and (is_refused or stage == "asked") else "release"
        if stage == "new":
            return "acquire"
        if stage == "clearing":
            return "release"
        if hold is None or hold.confirming:
            return None
        # Taken along, because the program says so, or because it is in doubt.
        may_live = self.terms.watchdog or until > now
        is_due = self.renewal is not None or (may_live and (not hold.tied or until <= now))
        return "renew" if is_due else None

    def next_lease(self, hold: Hold, until: int, now: int) -> int:
        """Of a renewal. A lease that nobody renews is never made longer by taking it along."""
        if self.renewal is not None:
            return hold.lease if self.renewal.lease is None else self.renewal.lease
        return hold.lease if self.terms.watchdog else max(until - now, 1)

    def rank(self, until: int) -> tuple[int, int]:
        """Where it stands among those that have something to send: the least lease first, then by arrival."""
        if not self.wanted:
            return UNWANTED, 0
        if self.stage == "held":
            return HOLDS, until
        return (ASKED_BEFORE, self.since) if self.asked_before else (NEW, 0)

    def words(self, kind: Kind, lease: int, session: bytes, now: int) -> tuple[bytes, ...]:
        """The request in words."""
        keys, owner, terms = self.keys, self.owner, self.terms
        if kind == "cancel":
            return b"LOCK.CANCEL", keys[0], owner, b"SESSION", session
        if len(keys) == 1:
            words = [b"LOCK." + _VERBS[kind], keys[0], owner]
        else:
            words = [b"LOCK.M" + _VERBS[kind], b"%d" % len(keys), *keys, owner]
        if kind == "release":
            return (*words, b"ALL")
        if kind == "acquire":
            self._add_wait(words, now)
            if terms.limit == 0:
                words.append(b"SHARED")
            elif terms.limit != 1:
                words += (b"LIMIT", b"%d" % terms.limit)
            words += (b"HOLDS", b"1")
        elif self.hold is not None:
            words += (b"TOKEN", b"%d" % self.hold.token)
        words += (b"LEASE", b"%d" % lease)
        if terms.watchdog:
            words.append(b"WATCHDOG")
        if terms.ephemeral:
            words.append(b"EPHEMERAL")
        if terms.replicas:
            words += (b"REPLICAS", b"%d" % terms.replicas)
        if terms.kept:
            words.append(b"WANTED")
        words += (b"SESSION", session)
        if kind == "renew" and self.renewal is not None and self.renewal.fence is not None:
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
    """A call that somebody waits for, and what it is about."""

    # Of a plain request: nothing is sent before; and once more, if its session ends before it is answered.
    not_before = 0
    again = False

    def __init__(self, about: str, bound: int | None, hold: int = 0, words: tuple[bytes, ...] = ()) -> None:
        self.about = about
        self.bound = bound
        # Of a check, that of this hold.
        self.hold = hold
        # Of a plain request.
        self.words = words


class Moved(NamedTuple):
    """An acquisition or a hold on its way from one core to another, with the calls that wait for it."""

    # Its number, which it keeps.
    id: int
    claim: Claim
    calls: list[tuple[int, Call]]
