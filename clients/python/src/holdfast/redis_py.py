"""redis-py's interface to locks of a Holdfast object: `client.lock("name", lock_class=lock_class(holdfast))`.

The signatures and their meaning are those of redis.lock.Lock and redis.asyncio.lock.Lock. The differences: a wait does
not poll; a lock without a timeout is renewed while the process lives; a lock has a fencing token.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any, ClassVar, Literal

from redis.exceptions import LockError

from . import Holdfast
from . import _rules as rules
from ._api import HoldfastBase
from ._engine import logger
from ._io import run
from ._rules import Grant, Terms
from .asyncio import Holdfast as AsyncHoldfast
from .errors import LossReason, NotAcquiredError, NotHeldError, WrongTypeError


@dataclasses.dataclass(eq=False, repr=False)
class _Base:
    """What Lock and AsyncLock share."""

    redis: Any
    name: rules.Name
    timeout: float | None = None
    sleep: float = 0.1
    blocking: bool = True
    blocking_timeout: float | None = None
    thread_local: bool = True
    raise_on_release_error: bool = True
    _holdfast: ClassVar[HoldfastBase[Any, Any, Any]]

    def __post_init__(self) -> None:
        self._engine = self._holdfast._engine
        if self.timeout:
            rules.check_lease(self.timeout, "timeout")
        self._terms = Terms((rules.encode(self.name),), self.name, self.timeout or 10.0, renew=not self.timeout)
        self.local: Any = threading.local() if self.thread_local else types.SimpleNamespace()
        self.local.token = self.local.grant = None

    @property
    def fence(self) -> int | None:
        """The fencing token; None: this object (or, with `thread_local`, this thread) does not hold the lock."""
        grant: Grant | None = getattr(self.local, "grant", None)
        return None if grant is None else grant.token

    async def _acquire(
        self, blocking: bool | None = None, timeout: float | None = None, token: str | bytes | None = None
    ) -> bool:
        wait: float | None = 0
        if self.blocking if blocking is None else blocking:
            wait = self.blocking_timeout if timeout is None else timeout
        terms = self._terms if token is None else dataclasses.replace(self._terms, owner=rules.encode(token))
        try:
            grant = await self._engine.acquire(terms, wait)
        except NotAcquiredError:
            return False
        self.local.token, self.local.grant = grant.owner, grant
        return True

    def _current(self, verb: str) -> Grant:
        grant: Grant | None = getattr(self.local, "grant", None)
        if grant is None:
            raise NotHeldError(f"cannot {verb} lock {self.name!r}: it is not held here", self.name)
        return grant

    async def _release(self) -> None:
        grant = self._current("release")
        # After an error of the connection, this object keeps the hold: the caller may release it again.
        try:
            await self._engine.release(grant)
        except LockError:
            self.local.token = self.local.grant = None
            raise
        self.local.token = self.local.grant = None

    async def _extend(self, verb: str, additional: float | None, replace: bool) -> Literal[True]:
        grant = self._current(verb)
        if self.timeout is None:
            raise LockError(f"cannot {verb} lock {self.name!r}: it has no timeout")
        lease = self.timeout if additional is None else additional
        rules.check_seconds("additional_time", lease)
        if not replace:
            lease += grant.remaining()
        await self._engine.renew(grant, lease)
        return True

    async def _holders(self) -> list[dict[str, Any]]:
        try:
            info = await self._holdfast._info(self.name)
        except WrongTypeError:
            return []
        return info["holders"] if info else []

    async def _locked(self) -> bool:
        return bool(await self._holders())

    async def _owned(self) -> bool:
        grant: Grant | None = getattr(self.local, "grant", None)
        if grant is None or grant.reason is LossReason.FORKED:
            return False
        return any(holder["owner"] == grant.owner for holder in await self._holders())

    async def _enter(self) -> None:
        if not await self._acquire():
            raise NotAcquiredError(f"lock {self.name!r} was not acquired in time", self.name)

    async def _exit(self, body: BaseException | None) -> None:
        """Releases at the end of a block. An error of the block has precedence over one of the release."""
        try:
            await self._release()
        except Exception as error:
            if body is None and (self.raise_on_release_error or not isinstance(error, LockError)):
                raise
            logger.warning("at the end of its block, lock %r could not be released: %s", self.name, error)


class Lock(_Base):
    """redis.lock.Lock's interface. Made by `lock_class`."""

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Returns False if it was not acquired in time. `sleep` has no effect. `token`: the owner, else a new one."""
        return run(self._acquire(blocking, blocking_timeout, token))

    def release(self) -> None:
        """Raises LockLostError if it had been lost, NotHeldError if it was not acquired."""
        run(self._release())

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Adds to what is left of the timeout, or (`replace_ttl`) sets it to `additional_time` seconds from now."""
        return run(self._extend("extend", additional_time, replace_ttl))

    def reacquire(self) -> Literal[True]:
        """Starts the timeout again."""
        return run(self._extend("reacquire", None, True))

    def locked(self) -> bool:
        """Whether the lock is held, by any client."""
        return run(self._locked())

    def owned(self) -> bool:
        """Whether this object holds the lock, according to the server."""
        return run(self._owned())

    def __enter__(self) -> Lock:
        run(self._enter())
        return self

    def __exit__(self, kind: Any, body: BaseException | None, trace: Any) -> None:
        run(self._exit(body))


class AsyncLock(_Base):
    """redis.asyncio.lock.Lock's interface. Made by `lock_class`."""

    async def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: str | bytes | None = None
    ) -> bool:
        """Returns False if it was not acquired in time. `token`: the owner, else a new one."""
        return await self._acquire(blocking, blocking_timeout, token)

    async def release(self) -> None:
        """Raises LockLostError if it had been lost, NotHeldError if it was not acquired."""
        await self._release()

    async def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Adds to what is left of the timeout, or (`replace_ttl`) sets it to `additional_time` seconds from now."""
        return await self._extend("extend", additional_time, replace_ttl)

    async def reacquire(self) -> Literal[True]:
        """Starts the timeout again."""
        return await self._extend("reacquire", None, True)

    async def locked(self) -> bool:
        """Whether the lock is held, by any client."""
        return await self._locked()

    async def owned(self) -> bool:
        """Whether this object holds the lock, according to the server."""
        return await self._owned()

    async def __aenter__(self) -> AsyncLock:
        await self._enter()
        return self

    async def __aexit__(self, kind: Any, body: BaseException | None, trace: Any) -> None:
        await self._exit(body)


def lock_class(holdfast: Holdfast | AsyncHoldfast) -> type[Any]:
    """Makes the class to pass to `client.lock(…, lock_class=…)`. Its locks use this Holdfast object."""
    if not isinstance(holdfast, HoldfastBase):
        raise TypeError(f"holdfast must be a Holdfast object, got {holdfast!r}")
    base = Lock if isinstance(holdfast, Holdfast) else AsyncLock
    return type(base.__name__, (base,), {"_holdfast": holdfast})
