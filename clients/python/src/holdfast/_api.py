"""What the public APIs for threads and for asyncio share: everything but `await`."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from . import _rules as rules
from ._engine import RELEASE_TIME, Engine, Hooks, logger
from ._io import Source
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
    """A leader: the value that it was elected with, and its term."""

    value: str
    fence: int


class HoldBase:
    """A lock that is held. See `fence`, `is_held`, `remaining`, `lost`."""

    # An event: set when the hold is lost.
    lost: Any

    def __init__(self, engine: Engine, grant: Grant) -> None:
        self._engine = engine
        self._grant = grant
        self.lost = grant.event
        # The lock's name, or names.
        self.name = grant.terms.name
        # The fencing token: greater than that of every earlier hold. Send it along with each write.
        self.fence = grant.token
        # The owner in whose name the server holds it.
        self.owner = grant.owner

    def is_held(self) -> bool:
        """Whether no other client can hold the lock, by the clock. Sends nothing.

        Of an ephemeral hold, it says only that no loss is known: guard by the fence.
        """
        return self.remaining() > 0

    def remaining(self) -> float:
        """For how many seconds it is certainly held, if it is not renewed again; 0: it is not held."""
        return self._grant.remaining()

    async def _check(self) -> None:
        await self._engine.check(self._grant)

    async def _renew(self, lease: float | None) -> None:
        await self._engine.renew(self._grant, lease)

    async def _release(self, timeout: float) -> None:
        await self._engine.release(self._grant, timeout)

    async def _exit(self, error: BaseException | None) -> None:
        """Releases at the end of a block. An error of the block has precedence over one of the release."""
        try:
            await self._release(RELEASE_TIME)
        except Exception as failure:
            if error is None:
                raise
            error.__context__ = error.__context__ or failure

    def __del__(self) -> None:
        grant = self.__dict__.get("_grant")
        if grant is not None and grant.terms.renew and grant.remaining() > 0:
            # A finalizer must take no lock, and logging does: the timer logs it.
            self._engine.dropped.append(grant.terms.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name!r}, fence {self.fence}, {self.remaining():.3f} s left>"


class LockBase(Generic[HoldT]):
    """A lock to acquire. It is not held by this object, which any number of threads and tasks may use."""

    def __init__(self, engine: Engine, hold: type[HoldT], terms: Terms) -> None:
        self._engine = engine
        self._hold = hold
        self._terms = terms
        # The lock's name, or names.
        self.name = terms.name
        # The holds of each thread or task that this object will release, the newest one last.
        self._mine: dict[Any, list[HoldT]] = {}

    async def _acquire(self, wait: float | None, cancel: Any = None) -> HoldT:
        return self._hold(self._engine, await self._engine.acquire(self._terms, wait, cancel))

    async def _try_acquire(self) -> HoldT | None:
        try:
            return await self._acquire(0)
        except NotAcquiredError:
            return None

    async def _enter(self) -> HoldT:
        hold = await self._acquire(None)
        self._mine.setdefault(self._engine.io.me(), []).append(hold)
        return hold

    def _leave(self) -> HoldT:
        me = self._engine.io.me()
        if me not in self._mine:
            raise NotHeldError(f"lock {self.name!r} is not held by this thread or task", self.name)
        hold = self._mine[me].pop()
        if not self._mine[me]:
            del self._mine[me]
        return hold

    async def _exit(self, error: BaseException | None) -> None:
        await self._leave()._exit(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class ReentrantBase(LockBase[HoldT]):
    """A lock whose holder is a thread or task, which may acquire it again. The client counts that (B3)."""

    async def _acquire(self, wait: float | None, cancel: Any = None) -> HoldT:
        me = self._engine.io.me()
        grant = self._mine[me][0]._grant if me in self._mine else None
        if grant and (grant.state in (State.RELEASING, State.RELEASED) or grant.reason is LossReason.FORKED):
            # It was released by the hold itself, or the parent of this process holds it.
            del self._mine[me]
        if me in self._mine:
            hold = self._mine[me][0]
            self._engine.must_hold(hold._grant)
        else:
            # To the server's search for deadlocks, all acquisitions of a thread or task are one actor's.
            terms = dataclasses.replace(self._terms, prefix=b"%s:%d##" % (self._engine.actor, hash(me)))
            hold = self._hold(self._engine, await self._engine.acquire(terms, wait, cancel))
        self._mine.setdefault(me, []).append(hold)
        return hold

    async def _enter(self) -> HoldT:
        return await self._acquire(None)

    async def _release(self) -> None:
        await self._exit(None)

    async def _exit(self, error: BaseException | None) -> None:
        hold = self._leave()
        if self._engine.io.me() not in self._mine:
            await hold._exit(error)


class ElectionBase:
    """A candidacy: it leads, or waits to lead, until it is closed."""

    def __init__(
        self,
        engine: Engine,
        terms: Terms,
        on_elected: Callable[[Any], Any],
        on_lost: Callable[[LossReason], Any] | None,
        hold: type[HoldBase],
    ) -> None:
        self._engine = engine
        self._terms = terms
        self._on_elected, self._on_lost = on_elected, on_lost
        self._hold = hold
        self._stop, self._ended = engine.io.event(), engine.io.event()
        # A new one for each term: set when the term is lost, and when the candidacy ends.
        self._wake = engine.io.event()
        self._grant: Grant | None = None
        # The thread or task that calls the callbacks.
        self._campaigner: Any = None
        engine.enter()
        if not engine.io.spawn(self._campaign):
            raise RuntimeError("cannot start a thread for the election")

    @property
    def is_leader(self) -> bool:
        """Whether it leads: by the clock, no other candidate can."""
        return self._grant is not None and self._grant.remaining() > 0

    @property
    def fence(self) -> int | None:
        """The term, if it leads."""
        return self._grant.token if self._grant is not None and self.is_leader else None

    async def _campaign(self) -> None:
        self._campaigner = self._engine.io.me()
        try:
            while not self._stop.is_set() and not self._engine.is_closed:
                try:
                    self._grant = await self._engine.acquire(self._terms, None, self._stop)
                    await self._lead(self._grant)
                except Exception as error:
                    if not self._stop.is_set() and not self._engine.is_closed:
                        # The application's logging may be what fails.
                        with contextlib.suppress(Exception):
                            logger.warning("election %r: %s", self._terms.name, error)
                        await self._engine.io.wait(self._stop, 1.0)
        finally:
            self._ended.set()

    async def _lead(self, grant: Grant) -> None:
        wake = self._wake = self._engine.io.event()
        grant.listener = wake.set
        # The reference lasts as long as the term: a hold that is dropped is logged.
        hold = self._hold(self._engine, grant)
        try:
            await self._call(self._on_elected, hold)
            while grant.state is State.HELD and not self._stop.is_set():
                # The application may also end the term by releasing the hold, which sets no event.
                await self._engine.io.wait(wake, 0.1)
        finally:
            # Whatever ended the term: the timer would renew the hold for ever.
            if grant.state is State.HELD:
                with contextlib.suppress(LockLostError):
                    await hold._release(RELEASE_TIME)
        if grant.reason is not None and self._on_lost is not None:
            await self._call(self._on_lost, grant.reason)

    async def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            result = function(*args)
            if inspect.isawaitable(result):
                await result
        except self._engine.io.callback_errors as error:
            if not isinstance(error, Exception) and self._engine.io.is_cancelled():
                raise
            logger.exception("election %r: a callback failed", self._terms.name)

    async def _close(self) -> None:
        self._stop.set()
        self._wake.set()
        # A callback may call this: it can't wait for its own end.
        if self._engine.io.me() != self._campaigner:
            await self._engine.io.wait(self._ended, RELEASE_TIME)


class ReadWriteLock(Generic[LockT]):
    """A lock for any number of readers, or one writer, first come, first served."""

    def __init__(self, read: LockT, write: LockT) -> None:
        self.read = read
        self.write = write


class HoldfastBase(Generic[LockT, ReentrantT, ElectionT]):
    """What both Holdfast classes share."""

    _hold: type[HoldBase]
    _lock: type[LockT]
    _reentrant_lock: type[ReentrantT]
    _election: type[ElectionT]

    def __init__(self, client: Any, io: Any, max_connections: int, hooks: Hooks | None) -> None:
        if not isinstance(client, io.clients):
            allowed = " or ".join(map(_class_name, io.clients))
            raise TypeError(f"redis must be a {allowed}, got a {_class_name(type(client))}")
        self._engine = Engine(Source(client), io, max_connections, hooks)
        self._at_exit = functools.partial(_release_at_exit, weakref.ref(self._engine))
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

        lease: in seconds. renew: the client renews it while this process lives; False: it ends after `lease`, unless
            `Hold.renew` is called.
        ephemeral: the server releases it as soon as it sees that the connection has ended.
        replicas: how many replicas must confirm the grant and each renewal.
        limit: how many may hold it. shared: any number may.
        """
        rules.check_integer("limit", limit, 1)
        if shared and limit != 1:
            raise ValueError(f"shared=True allows any number of holders and takes no limit, got limit={limit!r}")
        terms = _terms(name, lease, renew, ephemeral, replicas, 0 if shared else limit)
        return self._lock(self._engine, self._hold, terms)

    def semaphore(self, name: Name, limit: int, **terms: Any) -> LockT:
        """A lock that `limit` holders may hold at once. The terms are those of `lock`."""
        return self.lock(name, limit=limit, **terms)

    def read_write_lock(self, name: Name, **terms: Any) -> ReadWriteLock[LockT]:
        """A lock that any number of readers, or one writer, may hold. The terms are those of `lock`."""
        return ReadWriteLock(self.lock(name, shared=True, **terms), self.lock(name, **terms))

    def reentrant_lock(
        self, name: Name | Sequence[Name], *, lease: float = 10.0, renew: bool = True, replicas: int = 0
    ) -> ReentrantT:
        """A lock that the thread or task which holds it may acquire again."""
        terms = _terms(name, lease, renew, replicas=replicas)
        return self._reentrant_lock(self._engine, self._hold, terms)

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
        """Starts a candidacy, in a thread or task of its own, which calls the callbacks. The fence is the term.

        on_elected gets the hold. It has to return before on_lost is called, and before close() hands over. A normal
        exit hands over at once; a killed leader is replaced when its lease is over.
        """
        if not callable(on_elected) or not (on_lost is None or callable(on_lost)):
            raise TypeError(f"on_elected and on_lost must be callable, got {on_elected!r} and {on_lost!r}")
        if not isinstance(value, str):
            raise TypeError(f"value must be a str, got {value!r}")
        escaped = value.replace("%", "%25").replace(_SEPARATOR, "%23")
        prefix = f"{escaped}{_SEPARATOR}".encode() if value else b""
        terms = _terms(name, lease, True, ephemeral, replicas, prefix=prefix)
        return self._election(self._engine, terms, on_elected, on_lost, self._hold)

    async def _info(self, name: Name) -> dict[str, Any] | None:
        reply = await self._engine.ask(b"LOCK.INFO", rules.encode(name))
        if reply is None:
            return None
        info = rules.as_map(reply)
        info["holders"] = [rules.as_map(holder) for holder in info["holders"]]
        return info

    async def _waiters(self, name: Name) -> list[dict[str, Any]]:
        return [rules.as_map(one) for one in await self._engine.ask(b"LOCK.WAITERS", rules.encode(name))]

    async def _force(self, name: Name) -> int:
        return int(await self._engine.ask(b"LOCK.FORCE", rules.encode(name), again=False))

    async def _leader(self, name: Name) -> Leader | None:
        info = await self._info(name)
        for holder in info["holders"] if info else ():
            escaped, _, _ = holder["owner"].decode(errors="replace").rpartition(_SEPARATOR)
            return Leader(escaped.replace("%23", _SEPARATOR).replace("%25", "%"), holder["token"])
        return None

    async def _observe(self, name: Name, every: float) -> AsyncIterator[Leader | None]:
        rules.check_seconds("every", every)
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


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _terms(name: Name | Sequence[Name], *terms: Any, **more: Any) -> Terms:
    is_one = isinstance(name, (str, bytes, bytearray, memoryview)) or not isinstance(name, Iterable)
    names: tuple[Any, ...] = (name,) if is_one else tuple(name)
    return Terms(tuple(map(rules.encode, names)), names[0] if len(names) == 1 else names, *terms, **more)


def _release_at_exit(engine: weakref.ref[Engine]) -> None:
    """A normal exit of the program releases what it holds (B38)."""
    found = engine()
    if found is not None and not found.is_closed and found.grants:
        found.close_at_exit()
