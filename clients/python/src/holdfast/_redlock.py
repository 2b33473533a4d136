"""A lock on a majority of independent servers: see docs/redlock.md. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Callable, cast

from redis.exceptions import ConnectionError, RedisError

from . import _flow as flows
from . import _requests as requests
from ._clock import now
from ._flow import Flow, Home, Part
from ._hold import Answer, Hold
from ._joint import Joint, Tally
from ._lock import OWNERS, LockBase, Name, Number, OnLost, milliseconds
from ._order import is_cluster, server_name
from ._requests import WAITING, Request, Terms
from ._session import SessionState
from ._votes import Vote, Words, ask_all, enough, majority, raise_refusal

# How long a server may take to answer, in seconds, if the program does not say otherwise.
SERVER_TIMEOUT = 0.5


def drift(lease: float) -> float:
    """By how many seconds a lease may end earlier than we believe, for clocks that run apart."""
    return lease * 0.01 + 0.002


class Majority(Joint):
    """Holds on several servers, which count for as long as they are a majority."""

    __slots__ = ("rounds",)

    # How often it was begun.
    rounds: int

    def certain_until(self, hold: Hold) -> float:
        return hold.until - drift(_lease(hold))


class RedLockBase(LockBase):
    """What RedLock is in both."""

    def __init__(
        self,
        clients: Iterable[Any],
        name: Name,
        timeout: Number | None = None,
        blocking: bool = True,
        blocking_timeout: Number | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        server_timeout: Number = SERVER_TIMEOUT,
        on_lost: OnLost | None = None,
        watched: Number | None = None,
    ) -> None:
        """A lock named `name` on the servers of `clients`, of which a majority must grant it.

        server_timeout: how many seconds a server may take to answer. One that takes longer is left out until it has
            answered in the background.

        The other settings are those of Lock.
        """
        self.clients = tuple(clients)
        for client in self.clients:
            self._io.fits(client)
        milliseconds("server_timeout", server_timeout)
        self.server_timeout = server_timeout
        self._ordered = _in_order(self.clients)
        super().__init__(
            self.clients[0],
            name,
            timeout,
            blocking=blocking,
            blocking_timeout=blocking_timeout,
            thread_local=thread_local,
            raise_on_release_error=raise_on_release_error,
            on_lost=on_lost,
            watched=watched,
        )

    def _new_hold(self, token: str | bytes | None, actor: int | None) -> Hold:
        if token is not None:
            raise ValueError(f"token must be None: a RedLock chooses its owners itself, got {token!r}")
        hold = Majority(self._terms, OWNERS.next())
        hold.parts = ()
        hold.rounds = 0
        return hold

    def _parts(self, hold: Hold) -> Sequence[Part]:
        return cast(Majority, hold).parts

    def _homes(self) -> list[Home]:
        return [self._io.home_of(client, self.server_timeout) for client in self._ordered]

    def _acquire(self, hold: Hold, wait: float) -> Flow[bool]:
        return acquire(self._homes(), cast(Majority, hold), wait, self.server_timeout)

    def _release(self, hold: Hold) -> Flow[None]:
        return release(cast(Majority, hold), len(self.clients), self.server_timeout)

    def _renew(self, hold: Hold, lease: int) -> Flow[None]:
        return renew(cast(Majority, hold), len(self.clients), lease, self.server_timeout)

    def _owned(self, hold: Hold) -> Flow[bool]:
        owners = {part.hold.owner for part in self._parts(hold)}
        found = yield from _owners(self._homes(), self._terms, self.server_timeout)
        return sum(bool(owners.intersection(one)) for one in found) >= majority(len(self.clients))

    def _locked(self) -> Flow[bool]:
        found = yield from _owners(self._homes(), self._terms, self.server_timeout)
        everyone = [owner for one in found for owner in one]
        return any(everyone.count(owner) >= majority(len(self.clients)) for owner in everyone)


def _in_order(clients: Sequence[Any]) -> list[Any]:
    if not clients:
        raise ValueError("clients must hold at least one client, got none")
    for client in clients:
        if is_cluster(client) or hasattr(client.connection_pool, "service_name"):
            raise TypeError(f"clients must be of single servers, neither of a cluster nor of Sentinels, got {client!r}")
    names = sorted(map(server_name, clients))
    for one, next_ in zip(names, names[1:]):
        if one == next_:
            raise ValueError(f"clients must be of different servers, got {one.decode()} twice")
    return sorted(clients, key=server_name)


# To take it.


def acquire(homes: Sequence[Home], hold: Majority, wait: float, patience: float) -> Flow[bool]:
    """Takes a majority, standing in line at the first server for at most `wait` seconds."""
    until = now() + wait
    first: Home | None = None
    while True:
        yield from enough(homes, patience)
        owner = OWNERS.next()
        hold.rounds += 1
        hold.parts = parts = [Part(home, Hold(hold.terms, owner)) for home in homes]
        for part in parts:
            part.home.book.enter(part.hold)
        try:
            # The one whose queue it could not jump goes first.
            head = yield from _head(sorted(parts, key=lambda part: part.home is not first), until, wait, patience)
            if wait <= 0 or head is not None:
                yield from _votes(parts, max(0, min(patience, until - now())), len(homes), patience)
                if (yield from _fence(hold, parts, len(homes), patience)):
                    return True
                refused = [part.home for part in parts if part is not head and _in_line(part.hold)]
                first = refused[0] if refused else None
            yield from _cancel(parts, patience)
        except BaseException:
            for part in parts:
                flows.give_up(part.home, part.hold)
            raise
        left = until - now()
        if left <= 0:
            return False
        yield parts[0].home.pause(min(left, random.uniform(0, patience)))  # noqa: S311


def _head(parts: Sequence[Part], until: float, wait: float, patience: float) -> Flow[Part | None]:
    """Stands in line at the first server that answers. None: not granted there in time."""
    for part in parts:
        left = until - now()
        if wait <= 0 or left <= 0:
            return None
        if part.home.suspect:
            continue
        [vote] = yield from ask_all([part], _acquire(left), patience)
        raise_refusal([vote])
        _heard(vote)
        if part.hold.answer is None:
            yield part.home.outcome(part.hold, left)
        if part.hold.answer is Answer.GRANTED:
            return part
        if part.hold.answer in (Answer.REFUSED, None):
            return None
        _refused(part.hold)
        flows.give_up(part.home, part.hold)
    return None


def _votes(parts: Sequence[Part], wait: float, servers: int, patience: float) -> Flow[None]:
    """Asks all who were not asked yet, and waits for a moment where there is a queue."""
    asked = [part for part in parts if part.hold.session is None and not part.home.suspect]
    votes = yield from ask_all(asked, _acquire(wait), patience)
    raise_refusal(votes)
    for vote in votes:
        _heard(vote)
    tally = Tally([part.hold for part in parts if part.hold.session is not None], majority(servers))
    if not tally.decided:
        yield parts[0].home.outcome(cast(Any, tally), wait)


def _acquire(wait: float) -> Callable[[Hold], Words]:
    def request(hold: Hold) -> Words:
        def words(session: SessionState) -> Request:
            hold.ask(session)
            return requests.acquire(hold.terms, hold.owner, wait, session.id)

        return words

    return request


def _heard(vote: Vote) -> None:
    """The reply to an ACQUIRE."""
    hold = vote.part.hold
    if vote.reply is None:
        hold.ended(Answer.REFUSED)
    elif isinstance(vote.reply, RedisError) or (vote.reply == WAITING and hold.session and hold.session.ended):
        hold.ended(Answer.AGAIN)
    elif vote.reply != WAITING:
        hold.granted(vote.reply, hold.asked, hold.terms.lease)


def _refused(hold: Hold) -> None:
    """An error that came as an event, and is the caller's."""
    if isinstance(hold.answer, Exception):
        raise hold.answer


def _in_line(hold: Hold) -> bool:
    """Whether somebody else has it there."""
    return hold.session is not None and hold.answer in (None, Answer.REFUSED)


def _fence(hold: Majority, parts: Sequence[Part], servers: int, patience: float) -> Flow[bool]:
    """Tells the greatest token to all who granted. Whether a majority has confirmed it, and in time."""
    granted = [part for part in parts if part.hold.answer is Answer.GRANTED and part.hold.held]
    for part in parts:
        _refused(part.hold)
    if len(granted) < majority(servers):
        return False
    fence = max(part.hold.token or 0 for part in granted)
    confirmed = yield from _confirm(granted, hold.terms.lease, fence, patience)
    ends = sorted((part.hold.asked + _lease(part.hold) - drift(_lease(part.hold)) for part in confirmed), reverse=True)
    if len(confirmed) < majority(servers) or ends[majority(servers) - 1] <= now():
        return False
    for part in parts:
        if part not in confirmed:
            flows.give_up(part.home, part.hold)
    hold.begin(confirmed, majority(servers), fence)
    return hold.held


def _confirm(parts: Sequence[Part], lease: int | None, fence: int, patience: float) -> Flow[list[Part]]:
    """Begins the leases anew, under one token. Those where it is so now."""

    def request(hold: Hold) -> Words:
        token = hold.token or 0

        def words(session: SessionState) -> Request:
            hold.ask(session)
            return requests.fence(hold.terms, hold.owner, token, lease, session.id, fence)

        return words

    votes = yield from ask_all(parts, request, patience)
    raise_refusal(votes)
    for part, reply in votes:
        if reply is None:
            part.hold.lose("expired" if part.hold.left() <= 0 else "unknown")
        elif reply == fence:
            part.hold.granted(fence, part.hold.asked, lease)
    return [part for part, reply in votes if reply == fence and part.hold.answer is Answer.GRANTED]


def _lease(hold: Hold) -> float:
    """In seconds: its own, or the server's default."""
    if hold.terms.lease is not None:
        return hold.terms.lease / 1000
    return hold.lease


# To give it back.


def release(hold: Majority, servers: int, patience: float) -> Flow[None]:
    """Gives it back everywhere. Raises LockLost if it was lost before."""
    hold.over()
    try:
        found = yield from _cancel(hold.parts, patience)
    except BaseException:
        hold.unheard = True
        for part in hold.parts:
            flows.give_up(part.home, part.hold)
        raise
    if hold.error is not None:
        raise hold.error
    if not hold.unheard and found < majority(servers):
        raise hold.lose("expired" if hold.left() <= 0 else "unknown")


def _cancel(parts: Sequence[Part], patience: float) -> Flow[int]:
    """Takes back what was asked for, in the background where it takes long. How many may have been held."""
    asked, found = [], 0
    for part in parts:
        part.hold.over()
        if part.hold.session is None or part.home.suspect:
            found += 1
            flows.give_up(part.home, part.hold)
        else:
            asked.append(part)
    votes = yield from ask_all(asked, _cancel_one, patience)
    for part, reply in votes:
        if isinstance(reply, RedisError):
            flows.give_up(part.home, part.hold)
        else:
            part.home.book.leave(part.hold)
    return found + sum(isinstance(reply, RedisError) or bool(reply) for _, reply in votes)


def _cancel_one(hold: Hold) -> Words:
    # By way of whichever session: it is about the one that the hold hangs on.
    session = hold.session
    return lambda current: requests.cancel(hold.terms, hold.owner, (session or current).id)


def renew(hold: Majority, servers: int, lease: int, patience: float) -> Flow[None]:
    """Begins the lease anew. Raises LockLost if it is not held by a majority any more."""
    hold.check()
    held = [part for part in hold.parts if part.hold.held and not part.home.suspect]
    confirmed = yield from _confirm(held, lease, hold.token or 0, patience)
    hold.check()
    if len(confirmed) < majority(servers):
        raise ConnectionError(f"{len(confirmed)} of {servers} servers have confirmed: that is no majority")


def _owners(homes: Sequence[Home], terms: Terms, patience: float) -> Flow[list[list[bytes]]]:
    """Who holds it, at each server that answers."""
    yield from enough(homes, patience)
    parts = [Part(home, Hold(terms, b"")) for home in homes if not home.suspect]
    votes = yield from ask_all(parts, lambda hold: lambda _: (b"LOCK.INFO", hold.terms.keys[0]), patience)
    raise_refusal(votes)
    return [requests.owners(reply) for _, reply in votes if not isinstance(reply, RedisError)]
