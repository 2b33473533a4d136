"""A lock on a majority of independent servers: see docs/redlock.md. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Callable, cast

from redis.exceptions import ConnectionError

from . import _flow as flows
from ._clock import millis, now
from ._core.core import Core
from ._core.resp import Failure
from ._core.step import Outcome
from ._flow import Flow
from ._hold import Hold
from ._joint import Joint
from ._lock import LockBase, Name, Number, OnLost, milliseconds
from ._order import is_cluster, server_name
from ._owners import OWNERS
from ._redis import failed, refused
from ._shell import Home, Node, Pending, Waiter
from .errors import LockError

# How long a server may take to answer, in seconds, if the program does not say otherwise.
SERVER_TIMEOUT = 0.5


def majority(servers: int) -> int:
    """How many are enough, so that any two majorities share one."""
    return servers // 2 + 1


def drift(lease: float) -> float:
    """By how many seconds a lease may end earlier than we believe, for clocks that run apart."""
    return lease * 0.01 + 0.002


class Majority(Joint):
    """Holds on several servers, which count for as long as they are a majority."""

    # How often it was begun.
    rounds = 0

    def counts_until(self, part: Hold) -> int:
        return max(super().counts_until(part) - round(drift(part.lease / 1000) * 1000), 0)


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
        hold = Majority(self.name, self._terms, OWNERS.process)
        hold.keys = self._keys
        return hold

    def _homes(self) -> list[Home]:
        return [self._io.home_of(client, self.server_timeout) for client in self._ordered]

    def _acquire(self, hold: Hold, wait: float) -> Flow[bool]:
        return acquire(self._homes(), cast(Majority, hold), wait, self.server_timeout)

    def _release(self, hold: Hold) -> Flow[None]:
        return release(cast(Majority, hold), len(self.clients), self.server_timeout)

    def _renew(self, hold: Hold, lease: int) -> Flow[None]:
        return renew(cast(Majority, hold), len(self.clients), lease, self.server_timeout)

    def _ask(self, hold: Hold) -> Flow[None]:
        yield from flows.ask_whether_held(cast(Majority, hold).parts)
        hold.lapse()

    def _owned(self, hold: Hold) -> Flow[bool]:
        owners = {part.owner for part in cast(Majority, hold).parts}
        found = yield from self._owners()
        return sum(bool(owners.intersection(one)) for one in found) >= majority(len(self.clients))

    def _locked(self) -> Flow[bool]:
        found = yield from self._owners()
        everyone = [owner for one in found for owner in one]
        return any(everyone.count(owner) >= majority(len(self.clients)) for owner in everyone)

    def _owners(self) -> Flow[list[list[bytes]]]:
        """Who holds it, at each server that answers."""
        homes = self._homes()
        yield from enough(homes, self.server_timeout)
        ballot = Ballot([home for home in homes if not home.suspect], self.server_timeout)
        words = (b"LOCK.INFO", self._keys[0])
        asked = [(vote, vote.ask(Core.request, words, ballot.patience_ms)) for vote in ballot.votes]
        found = []
        for vote, (kind, reply) in (yield from answers(asked)):
            if kind != "answer":
                vote.suspect()
            elif isinstance(reply, Failure):
                raise refused(reply.text, self.name)
            else:
                found.append(flows.owners_in(reply))
        return found


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


def enough(homes: Sequence[Home], patience: float) -> Flow[None]:
    """Raises ConnectionError if no majority of the servers can be asked, also not a moment later."""
    end = now() + patience
    while True:
        away = sum(home.suspect for home in homes)
        if len(homes) - away >= majority(len(homes)):
            return
        if now() >= end:
            raise ConnectionError(f"{away} of {len(homes)} servers do not answer: no majority is left")
        yield homes[0].pause(patience / 10)


class Vote:
    """What one server is asked, and says."""

    def __init__(self, ballot: Ballot, home: Home, hold: Hold | None) -> None:
        self.home = home
        self._ballot = ballot
        self._hold = hold
        # Its only one: it is no cluster.
        self._node: Node = home.node(None)
        self.pending: Pending | None = None
        # What was asked behind it, over the same connection, because it took long.
        self._question: Pending | None = None
        self._asked_at = 0.0

    @property
    def hold(self) -> Hold:
        """What it is to become, or is."""
        assert self._hold is not None  # noqa: S101
        return self._hold

    @property
    def kind(self) -> str | None:
        """How the server has decided, if it has."""
        outcome = None if self.pending is None else self.pending.outcome
        return None if outcome is None else outcome.kind

    @property
    def is_granted(self) -> bool:
        """Whether it is held there, as far as is known."""
        return self.kind == "granted" and self.hold.held

    @property
    def is_open(self) -> bool:
        """Whether something may come of it yet."""
        return self.pending is not None and self.kind is None and not self.home.suspect

    def ask(self, what: Callable[..., None], *said: Any) -> Pending:
        """Asks its server, and does not wait for the answer."""
        pending = Pending(OWNERS.number(), self._node, self._hold)
        self.home.begin(pending, what, *said)
        return pending

    def cast(self, wait: float, *, with_question: bool = False) -> None:
        """Asks for the lock, standing in line for so long."""
        self._asked_at = now()
        what = self._acquire_with_question if with_question else Core.acquire
        self.pending = flows.ask_for(self.home, self._node, self.hold, wait, what)

    def _acquire_with_question(self, core: Core, call: int, *said: Any) -> None:
        """Asks something behind that, over the same connection: then its answer, or that it waits, came before."""
        core.acquire(call, *said)
        # Its number is greater, so it is sent behind it.
        self._question = Pending(OWNERS.number(), self._node, None)
        self.home.calls[self._question.id] = self._question
        core.request(self._question.id, (b"LOCK.OWNER",), self._ballot.patience_ms)

    def question(self, within: int) -> None:
        """Asks something behind its vote, within so many milliseconds: who does not answer that, either, is silent."""
        self._question = self.ask(Core.request, (b"LOCK.OWNER",), within)

    @property
    def is_questioned(self) -> bool:
        """Whether it owes that answer."""
        return self._question is not None and self._question.outcome is None

    def listen(self, seconds: float | None) -> Flow[None]:
        """Waits until its server has decided, or has said what was asked behind that."""
        asked = [one for one in (self._question, self.pending) if one is not None and one.outcome is None]
        if asked:
            yield self.home.wait(asked[0], seconds)

    @property
    def is_unheard(self) -> bool:
        """Whether its server has said nothing yet."""
        return self.is_open and not self._is_answered

    @property
    def _is_answered(self) -> bool:
        outcome = None if self._question is None else self._question.outcome
        return outcome is not None and outcome.kind == "answer"

    def judge(self) -> None:
        """One that says nothing is suspect: not who lets wait, but who does not answer what is asked behind that."""
        patience, silent = self._ballot.patience, now() - self._asked_at
        if not self.is_open or silent < patience / 2:
            return
        if self._question is None:
            self.question(self._ballot.patience_ms)
        elif self._is_answered:
            # It has answered what was asked before, too: it lets wait.
            self._question, self._asked_at = None, now()
        elif silent >= patience:
            self.suspect()

    def check(self) -> None:
        """Raises an error that has to do with the request and not with the server; else the server is suspect."""
        if self.kind in (None, "granted", "not granted"):
            return
        error = self.pending.error(self.hold.name, self.hold.owner) if self.pending is not None else None
        if self.kind == "refused" and isinstance(error, LockError):
            raise error
        self.suspect()

    def suspect(self) -> None:
        """It does not answer. It is asked in the background until it does; what it may grant is given back."""
        if self._hold is not None:
            flows.give_up(self._hold)
        if not self.home.suspect:
            self.home.suspect = True
            self.home.start(_probe(self.home, self._node, self._ballot.patience))


def _probe(home: Home, node: Node, patience: float) -> Flow[None]:
    try:
        for pause in flows.pauses():
            yield home.pause(pause)
            pending = flows.look(home, node, (b"LOCK.OWNER",), max(round(patience * 1000), 1))
            outcome = yield home.wait(pending, None)
            # An error is an answer, too.
            if outcome is not None and outcome.kind in ("answer", "closed"):
                return
    finally:
        home.suspect = False


class Ballot:
    """Requests to several servers at once, of which some may not answer."""

    def __init__(self, homes: Sequence[Home], patience: float, holds: Sequence[Hold] | None = None) -> None:
        self.patience = patience
        self.patience_ms = max(round(patience * 1000), 1)
        each: Sequence[Hold | None] = holds or [None] * len(homes)
        self.votes = [Vote(self, home, hold) for home, hold in zip(homes, each)]

    def head(self, first: Home | None, until: float, wait: float) -> Flow[Vote | None]:
        """Stands in line at the first server that answers. None: not granted there in time."""
        for vote in sorted(self.votes, key=lambda vote: vote.home is not first):
            left = until - now()
            if wait <= 0 or left <= 0:
                return None
            if vote.home.suspect:
                continue
            vote.cast(left)
            while vote.is_open and now() < until + self.patience:
                yield from vote.listen(self.patience / 2)
                vote.judge()
            vote.check()
            if vote.is_granted:
                return vote
            if vote.kind in (None, "not granted") and not vote.home.suspect:
                return None
        return None

    def others(self, wait: float) -> Flow[None]:
        """Asks all who were not asked yet, and waits for a moment where there is a queue."""
        for vote in self.votes:
            if vote.pending is None and not vote.home.suspect:
                vote.cast(wait, with_question=wait > 0)
        end = now() + self.patience / 2
        for vote in self.votes:
            while vote.is_unheard and now() < end:
                yield from vote.listen(end - now())
        # This process may have stood still. A server is silent only if it does not answer what is asked then, either.
        unheard = [vote for vote in self.votes if vote.is_unheard]
        for vote in unheard:
            vote.question(max(self.patience_ms // 2, 1))
        end = now() + self.patience / 2
        for vote in unheard:
            while vote.is_unheard and (vote.is_questioned or now() < end):
                # The core ends a question, once it has taken in what is there.
                yield from vote.listen(None if vote.is_questioned else end - now())
            if vote.is_unheard:
                vote.suspect()
        # With a moment for the answers.
        end = now() + wait + self.patience / 4
        while self._is_undecided and now() < end:
            yield from self._next(end - now())
        for vote in self.votes:
            vote.check()

    def _next(self, seconds: float) -> Flow[None]:
        """Waits until one more server of those that let wait has decided."""
        waiter = Waiter()

        def ended() -> None:
            waiter.outcome = Outcome("ended")
            waiter.wake()

        for vote in self.votes:
            if vote.pending is not None:
                vote.pending.wake = ended
        # Those that have decided before wake nobody any more.
        if self._is_undecided:
            yield self.votes[0].home.wait_for(waiter, seconds)

    @property
    def _is_undecided(self) -> bool:
        granted = sum(vote.is_granted for vote in self.votes)
        return granted < majority(len(self.votes)) and any(vote.is_open for vote in self.votes)

    def fence(self, hold: Majority) -> Flow[bool]:
        """Tells the greatest token to all who granted. Whether a majority has confirmed it, and in time."""
        granted = [vote for vote in self.votes if vote.is_granted]
        needed = majority(len(self.votes))
        if len(granted) < needed:
            return False
        fence = max(vote.hold.token or 0 for vote in granted)
        confirmed = yield from self.confirm(granted, None, fence)
        counts = sorted((hold.counts_until(part) for part in confirmed), reverse=True)
        if len(confirmed) < needed or counts[needed - 1] <= millis():
            return False
        for vote in self.votes:
            if vote.hold not in confirmed:
                flows.give_up(vote.hold)
        hold.begin(confirmed, needed, fence)
        for part in confirmed:
            if part.error is not None:
                hold.part_lost(part.error)
        return hold.held

    def confirm(self, votes: Sequence[Vote], lease: int | None, fence: int) -> Flow[list[Hold]]:
        """Begins the leases anew, under one token. Those where it is so now."""
        asked = [(vote, vote.ask(Core.renew, vote.hold.id, lease, fence, self.patience_ms)) for vote in votes]
        confirmed = []
        for vote, outcome in (yield from answers(asked)):
            kind = outcome.kind
            if kind == "renewed" and outcome.detail == fence:
                confirmed.append(vote.hold)
            elif kind == "refused":
                error = failed(outcome, None, vote.hold.name, vote.hold.owner, fence)
                if isinstance(error, LockError):
                    raise error
            elif kind == "unanswered":
                vote.suspect()
        return [part for part in confirmed if part.held]


def answers(asked: Sequence[tuple[Vote, Pending]]) -> Flow[list[tuple[Vote, Outcome]]]:
    """Waits for the outcome of each: each has its bound, and all have begun."""
    try:
        for vote, pending in asked:
            yield vote.home.wait(pending, None)
    except BaseException:
        for vote, pending in asked:
            vote.home.drop(pending.node, pending.id)
        raise
    return [(vote, pending.outcome or Outcome("unanswered")) for vote, pending in asked]


def acquire(homes: Sequence[Home], hold: Majority, wait: float, patience: float) -> Flow[bool]:
    """Takes a majority, standing in line at the first server for at most `wait` seconds."""
    until = now() + wait
    first: Home | None = None
    while True:
        yield from enough(homes, patience)
        number = OWNERS.number()
        hold.rounds += 1
        owner = OWNERS.owner(number)
        hold.parts = parts = [Hold(hold.name, hold.keys, hold.terms, OWNERS.number(), owner) for _ in homes]
        ballot = Ballot(homes, patience, parts)
        try:
            # The one whose queue it could not jump goes first.
            head = yield from ballot.head(first, until, wait)
            # Whose time is over in that queue asks the others all the same: what one server says is no majority.
            yield from ballot.others(max(0, min(patience, until - now())))
            if (yield from ballot.fence(hold)):
                return True
            in_line = [vote.home for vote in ballot.votes if vote is not head and vote.kind in (None, "not granted")]
            first = next((home for home in in_line if not home.suspect), None)
        except BaseException:
            for part in parts:
                flows.give_up(part)
            raise
        # What is asked next comes behind it.
        for part in parts:
            flows.give_up(part)
        left = until - now()
        if left <= 0:
            # Who is away has refused nothing.
            yield from enough(homes, 0)
            return False
        yield homes[0].pause(min(left, random.uniform(0, patience)))  # noqa: S311


def release(hold: Majority, servers: int, patience: float) -> Flow[None]:
    """Gives it back everywhere. Raises LockLost if it was lost before."""
    hold.over()
    ballot = Ballot([part.place[0] for part in hold.parts], patience, hold.parts)
    found = 0
    try:
        asked = []
        for vote in ballot.votes:
            if vote.home.suspect:
                found += 1
                flows.give_up(vote.hold)
            else:
                asked.append((vote, vote.ask(Core.release, vote.hold.id, ballot.patience_ms)))
        answered = yield from answers(asked)
    except BaseException:
        hold.unheard = True
        for part in hold.parts:
            flows.give_up(part)
        raise
    for vote, (kind, _) in answered:
        found += kind not in ("not held", "lost")
        if kind == "unanswered":
            vote.suspect()
    hold.raise_if_lost()
    if not hold.unheard and found < majority(servers):
        raise hold.lose("unknown")


def renew(hold: Majority, servers: int, lease: int, patience: float) -> Flow[None]:
    """Begins the lease anew. Raises LockLost if it is not held by a majority any more."""
    hold.raise_if_lost()
    held = [part for part in hold.parts if part.held and not part.place[0].suspect]
    ballot = Ballot([part.place[0] for part in held], patience, held)
    confirmed = yield from ballot.confirm(ballot.votes, lease, hold.token or 0)
    hold.raise_if_lost()
    if len(confirmed) < majority(servers):
        raise ConnectionError(f"{len(confirmed)} of {servers} servers have confirmed: that is no majority")
