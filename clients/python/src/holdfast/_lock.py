"""What a lock object is set to, and what it holds: the same for threads and for asyncio. No I/O."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Callable, ClassVar, Generic, NamedTuple, TypeVar, Union

from . import _flow as flows
from . import _line as lines
from ._core.step import Terms
from ._flow import Flow
from ._hold import Hold, State
from ._line import Kept
from ._owners import OWNERS
from ._shell import Home
from .errors import LockError, LockLost, NotGranted, NotHeld

FOREVER = math.inf
# The longest time that a lock is kept, in seconds: ten years.
_LONGEST = 315_360_000

logger = logging.getLogger("holdfast")

Name = Union[str, bytes, memoryview]
Number = Union[int, float]
OnLost = Callable[[LockLost], object]
L = TypeVar("L")


class IO(NamedTuple):
    """What the two kinds of client do each in their own way."""

    # The home of a client. Given a time in seconds: one of connections of its own, none of whose steps takes longer.
    home_of: Callable[[Any, float | None], Home]
    event: Callable[[], Any]
    # Calls a listener of the program's own, apart from whoever hears of the loss.
    call: Callable[[OnLost, LockLost], object]
    # Has given back what is held when nobody can reach it any more.
    keep: Callable[[Held], object]
    # The number of this thread, or task.
    actor: Callable[[], int]
    # Raises TypeError for a client of the other kind.
    fits: Callable[[Any], None]


class Held:
    """What one lock object has acquired, in one thread if that matters. It is collected with either of them."""

    __slots__ = ("__weakref__", "holds", "kept")

    def __init__(self) -> None:
        # Threads may share it: whoever takes one out names it, and does not go by its place.
        self.holds: list[Hold] = []
        # Whether somebody sees to it.
        self.kept = False


def _take_out(holds: list[Hold], hold: Hold) -> None:
    """Another thread may have been faster."""
    with contextlib.suppress(ValueError):
        holds.remove(hold)


class LockBase:
    """Settings and holds of a lock object, and what it does: the flows, which the two kinds of client run."""

    _io: ClassVar[IO]
    _several = False
    # What some kinds of lock do not know.
    keep: Number | None = None
    keep_uses = 1
    # For how many milliseconds what it gives back is kept; 0: it is not.
    _idle = 0
    # The same with its line, once it was used.
    _kept: Kept | None = None

    def __init__(
        self,
        client: Any,
        name: Any,
        timeout: Number | None = None,
        sleep: Number = 0.1,
        blocking: bool = True,
        blocking_timeout: Number | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        limit: int = 1,
        replicas: int = 0,
        ephemeral: bool = False,
        on_lost: OnLost | None = None,
        watched: Number | None = None,
        keep: Number | None = None,
        keep_uses: int = 1,
    ) -> None:
        """A lock named `name`; nothing is sent before it is acquired.

        timeout: seconds after which it is free again, whatever happens. None: watched, that is held for as long as this
            process lives and its connection to the server stands.
        sleep: accepted for redis-py's sake. Nothing here polls.
        blocking, blocking_timeout: what `acquire` does if it is not told otherwise: whether it waits, and for how many
            seconds (None: as long as it takes).
        thread_local: whether what one thread has acquired with this object is hidden from other threads.
        raise_on_release_error: whether leaving a `with` block raises if the lock was lost meanwhile.
        limit: how many may hold it at once. 0: any number of those who say so; see RWLock.
        replicas: how many replicas must have the grant before it counts.
        ephemeral: given back at once when the connection to the server ends, rather than when the lease runs out.
        watched: the lease of a watched lock, in seconds: for so long at most it is held when the process is gone, or
            hangs. None: the server's default, if there is no timeout.
        on_lost: called with a LockLost as soon as the lock is known to be lost, in a thread of its own (with asyncio: a
            task; there it may be a coroutine function). It may take its time, and what it raises is logged.
        keep: for so many seconds `release` keeps it at hand if nobody else wants it, and whoever takes it next by way
            of this client, on the same terms, asks the server nothing. It must be watched, and have limit 1.
        keep_uses: how often in a row it may be used here while others wait for it.
        """
        self._io.fits(client)
        self.redis = client
        self.name = name
        self.timeout = timeout
        self.sleep = sleep
        self.limit = _at_least("limit", limit, 0)
        self.replicas = _at_least("replicas", replicas, 0)
        self.ephemeral = ephemeral
        self.watched = watched
        self.keep = keep
        self.keep_uses = _at_least("keep_uses", keep_uses, 1)
        self._set(blocking, blocking_timeout, thread_local, raise_on_release_error, on_lost)
        encode = client.get_encoder().encode
        names = list(name) if self._several else [name]
        self._keys = tuple(bytes(encode(one)) for one in names)
        lease = _lease(timeout, watched)
        is_watched = lease is None or watched is not None
        self._idle = _idle(keep, timeout, limit, is_watched=is_watched)
        self._terms = Terms(lease, is_watched, ephemeral, replicas, limit, self._idle > 0)

    def _set(
        self,
        blocking: bool,
        blocking_timeout: Number | None,
        thread_local: bool,
        raise_on_release_error: bool,
        on_lost: OnLost | None,
    ) -> None:
        """What has to do with the caller, and not with the server."""
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.on_lost = on_lost
        self._local: Any = threading.local() if self.thread_local else SimpleNamespace()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} {self.name!r}>"

    @property
    def fence(self) -> int | None:
        """The fencing token of this hold: greater than that of every earlier one. None: not held."""
        newest = self._holds()[-1:]
        return newest[0].token if newest else None

    def check(self) -> None:
        """Raises LockLost if the lock is lost, or could be by now; NotHeld if it was not acquired.

        It sends nothing, unless this process has stood still, or heard nothing, for so long that only the server knows.
        """
        hold = self._current("check")
        if hold.doubtful:
            self._asked_whether_held(hold)
        hold.raise_if_lost()

    def _asked_whether_held(self, hold: Hold) -> None:
        """The server says whether it is held still."""
        raise NotImplementedError

    def _holds(self) -> list[Hold]:
        """What this object holds, for this thread if that matters; the newest last."""
        holds = self._held().holds
        # What failed to be given back may be given back again.
        while (newest := holds[-1:]) and newest[0].state is State.OVER and not newest[0].unheard:
            _take_out(holds, newest[0])
        return holds

    def _held(self) -> Held:
        local = self._local
        # Nothing yet, or what the parent of a fork held: that is the parent's.
        if getattr(local, "process", None) is not OWNERS.process:
            local.process, local.held = OWNERS.process, Held()
        held: Held = local.held
        return held

    def _current(self, verb: str) -> Hold:
        newest = self._holds()[-1:]
        if not newest:
            raise NotHeld(f"cannot {verb} lock {self.name!r}: it is not held here", self.name)
        return newest[0]

    def _new_hold(self, token: str | bytes | None, actor: int | None) -> Hold:
        if self._idle:
            return self._new_kept(token)
        number = OWNERS.number()
        owner = OWNERS.owner(number, actor) if token is None else bytes(self.redis.get_encoder().encode(token))
        return Hold(self.name, self._keys, self._terms, number, owner)

    def _new_kept(self, token: str | bytes | None) -> Hold:
        """One that goes on with what is at hand, or that is given a number when it asks.

        It names no actor: whoever uses it is not whoever took it.
        """
        if token is not None:
            raise ValueError(f"token must be None: a lock that is kept chooses its owner itself, got {token!r}")
        kept = self._kept
        if kept is None or not kept.line.home.is_usable:
            line = lines.line_of(self._home(), self._keys, self._terms)
            kept = self._kept = Kept(line, self._idle, self.keep_uses)
        hold = Hold(self.name, self._keys, self._terms, 0, b"")
        hold.kept = kept
        return hold

    def _is_at_hand(self, hold: Hold) -> bool:
        """Whether it is taken, without asking anybody."""
        if hold.kept is None or not hold.kept.line.take(hold, hold.kept):
            return False
        self._acquired(hold)
        return True

    def _is_put_back(self, hold: Hold) -> bool:
        """Whether it is given back, without asking anybody."""
        kept = hold.kept
        try:
            if kept is None or not kept.line.put_back(hold, kept):
                return False
        except BaseException:
            self._interrupted(hold)
            raise
        _take_out(self._held().holds, hold)
        return True

    # The flows of one lock. What is of several servers has others.

    def _home(self) -> Home:
        return self._io.home_of(self.redis, None)

    def _acquire(self, hold: Hold, wait: float) -> Flow[bool]:
        if hold.kept is not None:
            return (yield from lines.acquire(hold, hold.kept, wait))
        return (yield from flows.acquire(self._home(), hold, wait))

    def _release(self, hold: Hold) -> Flow[None]:
        yield from flows.release(hold) if hold.kept is None else lines.release(hold, hold.kept)

    def _renew(self, hold: Hold, lease: int) -> Flow[None]:
        yield from flows.renew(hold, lease)

    def _ask(self, hold: Hold) -> Flow[None]:
        yield from flows.ask_whether_held([hold])

    def _owned(self, hold: Hold) -> Flow[bool]:
        found = yield from flows.owners(self._home(), self._keys, self.name)
        return all(hold.owner in owners for owners in found)

    def _locked(self) -> Flow[bool]:
        return any((yield from flows.owners(self._home(), self._keys, self.name)))

    # What every lock does with them.

    def _acquiring(self, hold: Hold, wait: float) -> Flow[bool]:
        if not (yield from self._acquire(hold, wait)):
            return False
        self._acquired(hold)
        return True

    def _acquired(self, hold: Hold) -> None:
        held = self._held()
        if held.holds:
            self._forget_lost(held.holds)
        held.holds.append(hold)
        if not held.kept:
            self._io.keep(held)
            held.kept = True
        if self.on_lost is not None:
            self._call_when_lost(hold, self.on_lost)

    def _forget_lost(self, holds: list[Hold]) -> None:
        """Of those that were lost before, nobody is to be told any more."""
        for hold in [hold for hold in holds if hold.state is State.LOST]:
            _take_out(holds, hold)

    def _interrupted(self, hold: Hold) -> None:
        """An exception from outside ends the acquire, be it in the instant in which it was granted."""
        if hold.kept is not None:
            hold.kept.line.home.leave(hold.kept.line, hold)
        else:
            flows.abandon([hold])
        self._dropped(hold)

    def _releasing(self, hold: Hold) -> Flow[None]:
        try:
            yield from self._release(hold)
        except LockError:
            self._dropped(hold)
            raise
        self._dropped(hold)

    def _extending(self, additional_time: Number, replace_ttl: bool) -> Flow[None]:
        hold, _ = self._with_timeout("extend")
        # What is lost has no time left that could be counted.
        if hold.doubtful:
            yield from self._ask(hold)
        hold.raise_if_lost()
        left = 0 if replace_ttl else hold.left
        yield from self._renew(hold, left + milliseconds("additional_time", additional_time))

    def _reacquiring(self) -> Flow[None]:
        hold, timeout = self._with_timeout("reacquire")
        yield from self._renew(hold, milliseconds("timeout", timeout))

    def _owning(self) -> Flow[bool]:
        holds = self._holds()
        return bool(holds) and (yield from self._owned(holds[-1]))

    def _lost(self) -> Any:
        hold = self._current("watch")
        if hold.event is None:
            event = hold.event = self._io.event()
            hold.when_lost(lambda _: event.set())
        return hold.event

    def _call_when_lost(self, hold: Hold, listener: OnLost) -> None:
        hold.when_lost(functools.partial(self._io.call, listener))

    def _dropped(self, hold: Hold) -> None:
        _take_out(self._held().holds, hold)

    def _wait(self, blocking: bool | None, blocking_timeout: Number | None) -> float:
        """For how many seconds to wait."""
        if not (self.blocking if blocking is None else blocking):
            return 0
        timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return FOREVER if timeout is None else max(timeout, 0)

    def _not_granted(self) -> NotGranted:
        wait = self._wait(None, None)
        when = "at once" if wait == 0 else f"within {wait} s"
        return NotGranted(f"lock {self.name!r} was not granted {when}", self.name)

    def _with_timeout(self, verb: str) -> tuple[Hold, Number]:
        hold = self._current(verb)
        if self.timeout is None or self._terms.watchdog:
            raise LockError(f"cannot {verb} lock {self.name!r}: it has no timeout, and is renewed by the server")
        return hold, self.timeout

    def _release_failed(self, body: BaseException | None, error: Exception) -> bool:
        """Whether an error of the release on leaving a block is told by a warning: the error of the body goes first."""
        quiet = body is not None or (isinstance(error, LockError) and not self.raise_on_release_error)
        if quiet:
            logger.warning("on leaving its block, lock %r could not be given back: %s", self.name, error)
        return quiet


class SessionBase:
    """What Session is in both."""

    _io: ClassVar[IO]

    def __init__(self, client: Any) -> None:
        """That of `client`, and of all who share its connection pool. It begins with the first lock."""
        self._io.fits(client)
        self.redis = client


class Reentrant(LockBase):
    """Counts how often the holder has taken a lock again."""

    def _entered(self) -> bool:
        """Whether it is held, and now once more."""
        holds = self._holds()
        if not holds:
            return False
        if holds[-1].doubtful:
            self._asked_whether_held(holds[-1])
        if not holds[-1].held:
            # Whoever takes it anew has a hold of his own. Whoever had taken it before hears of the loss at his release.
            return False
        holds[-1].entries += 1
        return True

    def _forget_lost(self, holds: list[Hold]) -> None:
        """Those who are to be told are counted with the first of them."""
        lost = [hold for hold in holds if hold.state is State.LOST]
        for hold in lost[1:]:
            lost[0].entries += hold.entries + 1
            holds.remove(hold)

    def _left(self) -> bool:
        """Whether it is to be given back, and was not only taken again."""
        holds = self._holds()
        if not holds or holds[-1].entries == 0:
            return True
        holds[-1].entries -= 1
        return False


class SemaphoreBase(LockBase):
    """What Semaphore is in both."""

    def __init__(self, client: Any, name: Name, limit: int, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("keep"):
            raise ValueError(f"keep must be None: a permit of a semaphore is not kept, got {kwargs['keep']!r}")
        super().__init__(client, name, *args, limit=limit, **kwargs)


class LockAllBase(LockBase):
    """What LockAll is in both."""

    _several = True

    def __init__(self, client: Any, names: Iterable[Name], *args: Any, **kwargs: Any) -> None:
        super().__init__(client, distinct(names), *args, **kwargs)


class RWLockBase(Generic[L]):
    """What RWLock is in both."""

    _lock: Callable[..., L]

    def __init__(self, client: Any, name: Name, **settings: Any) -> None:
        """`settings` are those of Lock, but for `keep`."""
        if settings.get("keep"):
            raise ValueError(f"keep must be None: what has readers is not kept, got {settings['keep']!r}")
        self._make: Callable[..., L] = functools.partial(self._lock, client, name, **settings)

    def read(self) -> L:
        """A lock to read under."""
        return self._make(limit=0)

    def write(self) -> L:
        """A lock to write under."""
        return self._make()


def template(function: Callable[..., Any], name: str) -> Callable[..., str]:
    """Makes a lock's name of the arguments that a function is called with."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return name.format(**_flat(bound.arguments, signature))

    return named


def _flat(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """The arguments by name, those of **kwargs among them."""
    named: dict[str, Any] = {}
    for key, value in arguments.items():
        if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[key] = value
    return named


def distinct(names: Iterable[Name]) -> tuple[Name, ...]:
    """The names of several locks."""
    if isinstance(names, (str, bytes, memoryview)):
        raise TypeError(f"names must be several names, got the one name {names!r}")
    found = tuple(names)
    if not found:
        raise ValueError("names must hold at least one name, got none")
    return found


def milliseconds(what: str, seconds: Number) -> int:
    """A time as the server takes it."""
    milliseconds = int(seconds * 1000)
    if milliseconds < 1:
        raise ValueError(f"{what} must be at least 0.001 seconds, got {seconds!r}")
    return milliseconds


def _lease(timeout: Number | None, watched: Number | None) -> int | None:
    if watched is None:
        return milliseconds("timeout", timeout) if timeout else None
    if timeout:
        raise ValueError(f"timeout must be None where the lock is watched, got {timeout!r}")
    return milliseconds("watched", watched)


def _idle(keep: Number | None, timeout: Number | None, limit: int, *, is_watched: bool) -> int:
    """For how many milliseconds a lock is kept."""
    if not keep:
        return 0
    if not is_watched:
        raise ValueError(f"timeout must be None where the lock is kept, got {timeout!r}: what is kept is watched")
    if limit != 1:
        raise ValueError(f"limit must be 1 where the lock is kept, got {limit!r}")
    return milliseconds("keep", min(keep, _LONGEST))


def _at_least(what: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value!r}")
    return value
