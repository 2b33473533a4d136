"""Locks at several servers, slots or databases, taken together. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import cast

from redis.exceptions import RedisError

from . import _flow as flows
from ._clock import now
from ._flow import Flow
from ._hold import Hold
from ._joint import Joint
from ._lock import FOREVER, LockBase, Number, OnLost
from ._order import place
from ._owners import OWNERS
from ._shell import Home
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
        self._terms = first._terms
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
        parts = cast(Joint, holds[-1]).parts
        return tuple(
            next(part.token or 0 for part, group in zip(parts, self._groups) if lock in group) for lock in self.locks
        )

    def _new_hold(self, token: str | bytes | None, actor: int | None) -> Hold:
        if token is not None:
            raise ValueError(f"token must be None: a MultiLock chooses its owners itself, got {token!r}")
        return Joint(self.name, self._terms, OWNERS.process, actor)

    def _new_parts(self, actor: int | None) -> list[tuple[Home, Hold]]:
        parts = []
        for group in self._groups:
            number = OWNERS.number()
            keys = tuple(key for lock in group for key in lock._keys)
            hold = Hold(tuple(lock.name for lock in group), keys, self._terms, number, OWNERS.owner(number, actor))
            parts.append((self._io.home_of(group[0].redis, None), hold))
        return parts

    def _acquire(self, hold: Hold, wait: float) -> Flow[bool]:
        joint = cast(Joint, hold)
        until = now() + wait
        while True:
            parts = self._new_parts(joint.actor)
            joint.parts = [part for _, part in parts]
            try:
                granted = yield from _take(parts, until if wait else None)
            except LockLost as lost:
                # What was taken first was lost while it was waited for the last.
                logger.debug("once more: %s", lost)
                if now() >= until:
                    return False
                continue
            if granted:
                joint.begin(joint.parts, len(parts), max(part.token or 0 for part in joint.parts))
                # One may have been lost before it was listened to.
                for part in joint.parts:
                    if part.error is not None:
                        joint.lose(part.error.reason)
            return granted

    def _release(self, hold: Hold) -> Flow[None]:
        joint = cast(Joint, hold)
        joint.over()
        joint.unheard = False
        failed: list[Hold] = []
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
        for part in cast(Joint, hold).parts:
            yield from flows.renew(part, lease)

    def _ask(self, hold: Hold) -> Flow[None]:
        yield from flows.ask_whether_held(cast(Joint, hold).parts)

    def _owned(self, hold: Hold) -> Flow[bool]:
        for part in cast(Joint, hold).parts:
            found = yield from flows.owners(part.place[0], part.keys, self.name)
            if not all(part.owner in owners for owners in found):
                return False
        return True

    def _locked(self) -> Flow[bool]:
        for home, part in self._new_parts(None):
            if any((yield from flows.owners(home, part.keys, self.name))):
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
        if lock.keep:
            raise ValueError(f"locks must not be kept one by one, got keep={lock.keep!r} of {lock!r}")
        terms = (lock.timeout, lock.watched, lock.replicas, lock.ephemeral)
        if terms != (first.timeout, first.watched, first.replicas, first.ephemeral):
            raise ValueError(
                f"locks must have the same timeout, watched, replicas and ephemeral; {lock!r} and {first!r} differ"
            )
        places = {place(lock.redis, key) for key in lock._keys}
        if len(places) > 1:
            raise ValueError(f"{lock!r} has keys of several slots: name each in a lock of its own")
        groups.setdefault(places.pop(), []).append(lock)
    for where, group in groups.items():
        keys = [key for lock in group for key in lock._keys]
        if len(set(keys)) < len(keys):
            raise ValueError(f"locks must differ, got one twice among {group!r} at {where!r}")
    return [groups[where] for where in sorted(groups)]


def _take(parts: Sequence[tuple[Home, Hold]], until: float | None) -> Flow[bool]:
    """Takes them one after the other, each waiting for what is left of the time. None: nobody waits."""
    taken: list[Hold] = []
    try:
        for home, hold in parts:
            left = 0 if until is None else FOREVER if until == FOREVER else max(until - now(), 0)
            if not (yield from flows.acquire(home, hold, left)):
                yield from _give_back(taken, [])
                return False
            taken.append(hold)
        # What was taken first is still there, and its time begins anew. Its server is asked: the last one's grant may
        # be here before the first one's word of a loss.
        for hold in taken[:-1]:
            yield from flows.renew(hold, None)
        taken[-1].raise_if_lost()
    except BaseException:
        for hold in reversed(taken):
            flows.give_up(hold)
        raise
    return True


def _give_back(rest: list[Hold], failed: list[Hold]) -> Flow[list[RedisError]]:
    """Gives them back, the last one first. `rest`: those that it did not come to, when it was cancelled."""
    errors: list[RedisError] = []
    try:
        while rest:
            hold = rest[-1]
            try:
                yield from flows.release(hold)
            except LockError as error:
                errors.append(error)
            except RedisError as error:
                errors.append(error)
                failed.append(hold)
            rest.pop()
    except BaseException:
        for hold in reversed(rest[:-1]):
            hold.unheard = True
            flows.give_up(hold)
        raise
    return errors
