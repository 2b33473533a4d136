"""Locks at several servers, slots or databases, taken together. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import cast

from redis.exceptions import RedisError

from . import _flow as flows
from ._clock import now
from ._flow import Flow, Part
from ._hold import Hold
from ._joint import Joint
from ._lock import OWNERS, LockBase, Number, OnLost
from ._order import place
from ._requests import FOREVER, Terms
from .errors import LockError, LockLost

logger = logging.getLogger("holdfast")


class MultiLockBase(LockBase):
    """What MultiLock is in both."""

    def __init__(
        self,
        locks: Iterable[LockBase],
        blocking: bool = True,
        blocking_timeout: Number | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        on_lost: OnLost | None = None,
    ) -> None:
        """All of `locks`, or none. They say where, which, and for how long; they are not taken one by one.

        The other settings are those of Lock.
        """
        self.locks = tuple(locks)
        self._groups = _groups(self.locks)
        for lock in self.locks:
            if lock._io is not self._io:
                raise TypeError(f"locks must be of the same kind, with threads or with asyncio, got {lock!r}")
        first = self.locks[0]
        self.name = tuple(lock.name for lock in self.locks)
        self.timeout = first.timeout
        self._terms = Terms(self.name, (), lease=first._terms.lease, watched=first._terms.watched)
        self._set(blocking, blocking_timeout, thread_local, raise_on_release_error, on_lost)

    @property
    def fence(self) -> int | None:
        """None while it is not held. Tokens of different servers can't be compared: see `fences`."""
        return super().fence

    @property
    def fences(self) -> tuple[int, ...]:
        """The fencing token of each lock, in the order in which they were named; empty: not held."""
        holds = self._holds()
        if not holds:
            return ()
        parts = self._parts(holds[-1])
        return tuple(
            next(part.hold.token or 0 for part, group in zip(parts, self._groups) if lock in group)
            for lock in self.locks
        )

    def _new_hold(self, token: str | bytes | None, actor: int | None) -> Hold:
        if token is not None:
            raise ValueError(f"token must be None: a MultiLock chooses its owners itself, got {token!r}")
        joint = Joint(self._terms, OWNERS.next())
        joint.parts = ()
        joint.actor = actor
        return joint

    def _parts(self, hold: Hold) -> Sequence[Part]:
        return cast(Joint, hold).parts

    def _new_parts(self, actor: int | None) -> list[Part]:
        owner = OWNERS.next(actor)
        return [Part(self._io.home_of(group[0].redis, None), Hold(_terms(group), owner)) for group in self._groups]

    def _acquire(self, hold: Hold, wait: float) -> Flow[bool]:
        joint = cast(Joint, hold)
        until = now() + wait
        while True:
            joint.parts = parts = self._new_parts(joint.actor)
            try:
                granted = yield from _take(parts, until if wait else None)
            except LockLost as lost:
                # What was taken first was lost while it was waited for the last.
                logger.debug("once more: %s", lost)
                if now() >= until:
                    return False
                continue
            if granted:
                joint.begin(parts, len(parts), max(part.hold.token or 0 for part in parts))
            return granted

    def _release(self, hold: Hold) -> Flow[None]:
        joint = cast(Joint, hold)
        joint.over()
        joint.unheard = False
        failed: list[Part] = []
        rest = list(joint.parts)
        try:
            errors = yield from _give_back(rest, failed)
        except BaseException:
            joint.unheard = True
            raise
        finally:
            # What may be given back once more.
            joint.parts = [*rest, *failed]
        if joint.error is not None:
            raise joint.error
        for error in sorted(errors, key=lambda error: not isinstance(error, LockError)):
            joint.unheard = bool(failed)
            raise error

    def _renew(self, hold: Hold, lease: int) -> Flow[None]:
        for part in self._parts(hold):
            yield from flows.renew(part.home, part.hold, lease)

    def _owned(self, hold: Hold) -> Flow[bool]:
        for part in self._parts(hold):
            found = yield from flows.owners(part.home, part.hold.terms)
            if not all(part.hold.owner in owners for owners in found):
                return False
        return True

    def _locked(self) -> Flow[bool]:
        for part in self._new_parts(None):
            if any((yield from flows.owners(part.home, part.hold.terms))):
                return True
        return False


def _groups(locks: Sequence[LockBase]) -> list[list[LockBase]]:
    """Those of one place together, in the order of the places."""
    if not locks:
        raise ValueError("locks must hold at least one lock, got none")
    first = locks[0]
    groups: dict[tuple[bytes, int], list[LockBase]] = {}
    for lock in locks:
        if not isinstance(lock, LockBase) or hasattr(lock, "locks") or hasattr(lock, "clients"):
            raise TypeError(f"locks must be locks of one server each, got {lock!r}")
        if lock.limit != 1:
            raise ValueError(f"locks must be mutexes, with limit=1, got limit={lock.limit!r} of {lock!r}")
        terms = (lock.timeout, lock.watched, lock.replicas, lock.ephemeral)
        if terms != (first.timeout, first.watched, first.replicas, first.ephemeral):
            raise ValueError(
                f"locks must have the same timeout, watched, replicas and ephemeral; {lock!r} and {first!r} differ"
            )
        places = {place(lock.redis, key) for key in lock._terms.keys}
        if len(places) > 1:
            raise ValueError(f"{lock!r} has keys of several slots: name each in a lock of its own")
        groups.setdefault(places.pop(), []).append(lock)
    for where, group in groups.items():
        keys = [key for lock in group for key in lock._terms.keys]
        if len(set(keys)) < len(keys):
            raise ValueError(f"locks must differ, got one twice among {group!r} at {where!r}")
    return [groups[where] for where in sorted(groups)]


def _terms(group: Sequence[LockBase]) -> Terms:
    one = group[0]._terms
    return Terms(
        tuple(lock.name for lock in group),
        tuple(key for lock in group for key in lock._terms.keys),
        several=True,
        lease=one.lease,
        watched=one.watched,
        replicas=one.replicas,
        ephemeral=one.ephemeral,
    )


def _take(parts: Sequence[Part], until: float | None) -> Flow[bool]:
    """Takes them one after the other, each waiting for what is left of the time. None: nobody waits."""
    taken: list[Part] = []
    try:
        for part in parts:
            left = 0 if until is None else FOREVER if until == FOREVER else max(until - now(), 0)
            if not (yield from flows.acquire(part.home, part.hold, left)):
                yield from _give_back(taken, [])
                return False
            taken.append(part)
        yield from _begin_together(parts)
    except BaseException:
        for part in reversed(taken):
            flows.give_up(part.home, part.hold)
        raise
    return True


def _begin_together(parts: Sequence[Part]) -> Flow[None]:
    """What was taken first is still there, and its time begins anew. Raises LockLost if it is not.

    Its server is asked: the last one's grant may be here before the first one's word of a loss.
    """
    for part in parts[:-1]:
        part.hold.check()
        yield from flows.renew(part.home, part.hold, part.hold.terms.lease)


def _give_back(rest: list[Part], failed: list[Part]) -> Flow[list[RedisError]]:
    """Gives them back, the last one first. `rest`: those that it did not come to, when it was cancelled."""
    errors: list[RedisError] = []
    try:
        while rest:
            part = rest[-1]
            try:
                yield from flows.release(part.home, part.hold)
            except LockError as error:
                errors.append(error)
            except RedisError as error:
                errors.append(error)
                failed.append(part)
            rest.pop()
    except BaseException:
        for part in reversed(rest[:-1]):
            part.hold.unheard = True
            flows.give_up(part.home, part.hold)
        raise
    return errors
