"""What both flavours of the public API share: everything but `await`."""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

from . import _rules as rules
from ._engine import RELEASE_TIME, Engine, Hooks, logger
from ._rules import Grant, Name, State, Terms
from .errors import LockLostError, LossReason, NotAcquiredError, NotHeldError

HoldT = TypeVar("HoldT", bound="HoldBase")
LockT = TypeVar("LockT", bound="LockBase[Any]")
ReentrantT = TypeVar("ReentrantT", bound="ReentrantBase[Any]")
ElectionT = TypeVar("ElectionT", bound="ElectionBase")
ELECTION_LEASE = 5.0
_SEPARATOR = "#"


@dataclasses.dataclass(frozen=True)
class Leader:
    """Who leads: the value that it was elected with, and its term."""

    value: str
    fence: int


class HoldBase:
    """A lock that is held. See `fence`, `is_held`, `remaining`, `lost`."""

    def __init__(self, engine: Engine, grant: Grant) -> None:
        self._engine = engine
        self._grant = grant
        self._count = 1

    @property
    def name(self) -> Any:
        """The lock's name, or names."""
        return self._grant.terms.name

    @property
    def fence(self) -> int:
        """The fencing token: greater than that of every earlier hold. Send it along with each write."""
        return self._grant.token

    @property
    def owner(self) -> bytes:
        """What the server knows this hold by."""
        return self._grant.owner

    def is_held(self) -> bool:
        """Whether no other client can hold the lock, by the clock. Sends nothing.

        Of an ephemeral hold, only that nothing is known of a loss: guard by the fence.
        """
        return self._grant.remaining() > 0

    def remaining(self) -> float:
        """For how many seconds it is held for certain, if it is not renewed again; 0: not held."""
        return self._grant.remaining()

    def __del__(self) -> None:
        grant = self.__dict__.get("_grant")
        if grant is not None and grant.state is State.HELD and grant.terms.renew:
            # A finalizer takes no lock and logs nothing: the renewing thread does.
            self._engine.dropped.append(grant.terms.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name!r}, fence {self.fence}, {self._grant.state.name.lower()}>"


class LockBase(Generic[HoldT]):
    """What a lock is asked for with. It holds nothing itself, and may be used by any number of threads and tasks."""

    def __init__(self, client: HoldfastBase[Any, Any, Any], hold: type[HoldT], terms: Terms) -> None:
        self._client = client
        self._engine = client._engine
        self._hold = hold
        self._terms = terms
        self._entered: dict[Any, list[HoldT]] = {}

    @property
    def name(self) -> Any:
        """The lock's name, or names."""
        return self._terms.name

    async def _acquire(self, wait: float | None, cancel: Any) -> HoldT:
        grant, error = await self._engine.acquire(self._terms, wait, cancel)
        if grant is None:
            why = "it was cancelled" if cancel is not None and cancel.is_set() else f"not within {wait} s"
            said = "" if error is None else f": {error}"
            raise NotAcquiredError(f"lock {self.name!r} was not acquired, {why}{said}", self.name) from error
        return self._hold(self._engine, grant)

    async def _try_acquire(self) -> HoldT | None:
        grant, _ = await self._engine.acquire(self._terms, 0)
        return None if grant is None else self._hold(self._engine, grant)

    async def _enter(self) -> HoldT:
        hold = await self._acquire(None, None)
        self._entered.setdefault(self._engine.io.me(), []).append(hold)
        return hold

    def _left(self) -> HoldT:
        me = self._engine.io.me()
        if me not in self._entered:
            raise NotHeldError(f"lock {self.name!r} was entered by another thread or task", self.name)
        hold = self._entered[me].pop()
        if not self._entered[me]:
            del self._entered[me]
        return hold

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class ReentrantBase(LockBase[HoldT]):
    """Bound to a thread or task: the one that holds it may take it again. The count is kept here."""

    _mine: dict[Any, HoldT]

    def __init__(self, client: HoldfastBase[Any, Any, Any], hold: type[HoldT], terms: Terms) -> None:
        super().__init__(client, hold, terms)
        self._mine = {}

    async def _take(self, wait: float | None) -> HoldT | None:
        me = self._engine.io.me()
        hold = self._mine.get(me)
        if hold is not None:
            self._engine.must_hold(hold._grant)
            hold._count += 1
            return hold
        # All acquisitions of a thread are one actor to the search for deadlocks.
        actor = b"%s:%d##" % (self._client._actor, hash(me))
        terms = dataclasses.replace(self._terms, prefix=actor)
        grant, error = await self._engine.acquire(terms, wait)
        if grant is None:
            if wait == 0:
                return None
            raise NotAcquiredError(f"lock {self.name!r} was not acquired, not within {wait} s", self.name) from error
        hold = self._mine[me] = self._hold(self._engine, grant)
        return hold

    async def _release(self) -> None:
        me = self._engine.io.me()
        hold = self._mine.get(me)
        if hold is None:
            raise NotHeldError(f"lock {self.name!r} is not held by this thread or task", self.name)
        hold._count -= 1
        if hold._count == 0:
            del self._mine[me]
            await self._engine.release(hold._grant)


class ElectionBase:
    """A candidacy: it leads, or waits to lead, until it is closed."""

    def __init__(
        self,
        client: HoldfastBase[Any, Any, Any],
        terms: Terms,
        on_elected: Callable[[Any], Any],
        on_lost: Callable[[LossReason], Any] | None,
        hold: Any,
    ) -> None:
        self._engine = client._engine
        self._terms = terms
        self._on_elected, self._on_lost = on_elected, on_lost
        self._make = hold
        self._stop = self._engine.io.event()
        self._ended = self._engine.io.event()
        self._grant: Grant | None = None

    @property
    def is_leader(self) -> bool:
        """Whether no other candidate can lead, by the clock."""
        return self._grant is not None and self._grant.remaining() > 0

    @property
    def fence(self) -> int | None:
        """The term, if it leads."""
        return self._grant.token if self._grant is not None and self.is_leader else None

    async def _campaign(self) -> None:
        engine, io = self._engine, self._engine.io
        try:
            while not self._stop.is_set() and not engine.is_closed:
                try:
                    grant, _ = await engine.acquire(self._terms, None, self._stop)
                except Exception as error:
                    if engine.is_closed:
                        return
                    logger.warning("election %r: %s", self._terms.name, error)
                    await io.wait(self._stop, 1.0)
                    continue
                if grant is None:
                    continue
                self._grant = grant
                try:
                    await self._lead(grant)
                finally:
                    self._grant = None
        finally:
            io.set(self._ended)

    async def _lead(self, grant: Grant) -> None:
        io = self._engine.io
        hold = self._make(self._engine, grant)
        await self._call(self._on_elected, hold)
        while grant.state is State.HELD and not self._stop.is_set():
            await io.wait(grant.event, 0.1)
        reason = hold._grant.reason
        if grant.state is State.HELD:
            try:
                await self._engine.release(grant)
            except LockLostError as error:
                reason = error.reason
            except Exception as error:
                logger.warning("election %r: %s", self._terms.name, error)
        if reason is not None and self._on_lost is not None:
            await self._call(self._on_lost, reason)

    async def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            await self._engine.io.call(function, *args)
        except Exception:
            logger.exception("election %r: a callback failed", self._terms.name)

    async def _close(self) -> None:
        self._engine.io.set(self._stop)
        await self._engine.io.wait(self._ended, RELEASE_TIME)


class ReadWriteLock(Generic[LockT]):
    """Any number of readers, or one writer, first come, first served."""

    def __init__(self, read: LockT, write: LockT) -> None:
        self.read = read
        self.write = write


class HoldfastBase(Generic[LockT, ReentrantT, ElectionT]):
    """Made once from the application's Redis client, and closed explicitly."""

    _classes: tuple[type[HoldBase], type[LockT], type[ReentrantT], type[ElectionT]]

    def __init__(self, client: Any, io: Any, max_connections: int, hooks: Hooks | None, close: Any) -> None:
        self._engine = Engine(client, io, max_connections, hooks)
        self._actor = os.urandom(8).hex().encode()
        self._at_exit = _AtExit(self._engine, close)
        atexit.register(self._at_exit)

    def lock(
        self,
        name: Name | Sequence[Name],
        *,
        lease: float = 10.0,
        renew: bool = True,
        ephemeral: bool = False,
        replicas: int = 0,
        limit: int = 1,
        shared: bool = False,
    ) -> LockT:
        """A lock of this name, or of several names at once: all or none.

        lease: in seconds. renew: renewed for as long as this process lives; False: it ends after `lease`, unless
            `Hold.renew` is called.
        ephemeral: the server releases it as soon as it sees that the connection has ended.
        replicas: so many must confirm the grant and each renewal.
        limit: so many may hold it. shared: any number may.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit!r}")
        terms = _terms(name, lease, renew, ephemeral, replicas, 0 if shared else limit)
        return self._classes[1](self, self._classes[0], terms)

    def semaphore(self, name: Name, limit: int, **terms: Any) -> LockT:
        """A lock that `limit` holders may have at once. The terms are those of `lock`."""
        return self.lock(name, limit=limit, **terms)

    def read_write_lock(self, name: Name, **terms: Any) -> ReadWriteLock[LockT]:
        """`read` is for any number of holders, `write` for one. The terms are those of `lock`."""
        return ReadWriteLock(self.lock(name, shared=True, **terms), self.lock(name, **terms))

    def reentrant_lock(
        self, name: Name | Sequence[Name], *, lease: float = 10.0, renew: bool = True, replicas: int = 0
    ) -> ReentrantT:
        """A lock that the thread or task which holds it may take again."""
        return self._classes[2](self, self._classes[0], _terms(name, lease, renew, False, replicas, 1))

    def elect(
        self,
        name: Name,
        on_elected: Callable[[Any], Any],
        on_lost: Callable[[LossReason], Any] | None = None,
        *,
        value: str = "",
        lease: float = ELECTION_LEASE,
        ephemeral: bool = False,
        replicas: int = 0,
    ) -> ElectionT:
        """Stands as a candidate, in a thread or task of its own, which calls the callbacks. The fence is the term.

        on_elected gets the hold. A normal exit hands over at once; a killed leader is replaced when its lease is over.
        """
        terms = _terms(name, lease, True, ephemeral, replicas, 1)
        escaped = value.replace("%", "%25").replace(_SEPARATOR, "%23")
        terms = dataclasses.replace(terms, prefix=f"{escaped}{_SEPARATOR}".encode() if value else b"")
        election = self._classes[3](self, terms, on_elected, on_lost, self._classes[0])
        self._engine.enter()
        if not self._engine.io.spawn(election._campaign):
            raise RuntimeError("cannot start a thread for the election")
        return election

    async def _info(self, name: Name) -> dict[str, Any] | None:
        key = rules.encode(name)
        reply = await self._engine.ask((b"LOCK.INFO", key), key)
        if reply is None:
            return None
        info = rules.as_map(reply)
        info["holders"] = [rules.as_map(holder) for holder in info["holders"]]
        return info

    async def _waiters(self, name: Name) -> list[dict[str, Any]]:
        key = rules.encode(name)
        return [rules.as_map(one) for one in await self._engine.ask((b"LOCK.WAITERS", key), key)]

    async def _force(self, name: Name) -> int:
        key = rules.encode(name)
        return int(await self._engine.ask((b"LOCK.FORCE", key), key, again=False))

    async def _leader(self, name: Name) -> Leader | None:
        info = await self._info(name)
        for holder in info["holders"] if info else ():
            escaped, _, _ = holder["owner"].decode(errors="replace").rpartition(_SEPARATOR)
            return Leader(escaped.replace("%23", _SEPARATOR).replace("%25", "%"), holder["token"])
        return None

    async def _observe(self, name: Name, every: float) -> AsyncIterator[Leader | None]:
        before: Any = self
        while True:
            leader = await self._leader(name)
            if leader != before:
                before = leader
                yield leader
            await self._engine.io.sleep(every)

    async def _close(self) -> None:
        atexit.unregister(self._at_exit)
        await self._engine.close()


def _terms(name: Name | Sequence[Name], lease: float, renew: bool, ephemeral: bool, replicas: int, limit: int) -> Terms:
    names = (name,) if isinstance(name, (str, bytes)) else tuple(name)
    shown = names[0] if len(names) == 1 else names
    return Terms(tuple(map(rules.encode, names)), shown, lease, renew, ephemeral, replicas, limit)


class _AtExit:
    """A normal exit of the program releases what it holds."""

    def __init__(self, engine: Engine, close: Callable[[Engine], None]) -> None:
        self._engine = weakref.ref(engine)
        self._close = close

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None and engine.is_of_this_process and not engine.is_closed and engine.grants:
            self._close(engine)
