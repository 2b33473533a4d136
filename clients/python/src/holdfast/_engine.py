"""The client of docs/client-protocol.md, for threads and for asyncio: coroutines that await only what _io.py has."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from . import _rules as rules
from ._io import Address, Source, Threads, run
from ._pool import LONGEST_PAUSE, RELEASE, RENEW, REST, Pool
from ._rules import BATCH, GRACE, LOOK_AGAIN, Grant, NotSent, Silence, State, Terms, Verdict, Words, judge, now, pack
from .errors import HoldfastError, LockLostError, LossReason, NotAcquiredError, NotHeldError, WrongTypeError

logger = logging.getLogger("holdfast")
Make = Callable[[], list[Words]]
Check = Callable[[list[Any]], bool]

# The name of the queue of waits that found no connection of their own (B30).
POLLS = object()
RELEASE_TIME = 5.0
EXIT_TIME = 1.0
# Renewals that are due within this time are sent together, in seconds.
TICK = 0.02


class Hooks:
    """Callbacks for metrics and logs. Override those that you need; they must not block.

    Times are in seconds. Exceptions are logged, with threads also SystemExit. The callback runs in the thread or task
    in which the event happened.
    """

    def acquired(self, name: Any, fence: int, waited: float) -> None:
        """A lock was acquired, `waited` seconds after it was asked for."""

    def lost(self, name: Any, fence: int, reason: LossReason) -> None:
        """A hold was lost."""

    def released(self, name: Any, fence: int, held: float) -> None:
        """A hold was released, after `held` seconds."""


class _Asked(NamedTuple):
    """An ACQUIRE that has no reply yet."""

    line: Any
    pool: Pool
    sent: float
    # When its connection is closed for its silence. Never for a wait: the next request takes over its place in the
    # queue.
    silent_at: float


# The parent's connections, in the child of a fork. They are never collected: closing one would remove it from the epoll
# instance that both processes share, and the parent would read nothing from it any more.
_of_parents: list[Any] = []


class Engine:
    """The state and the work of a Holdfast object."""

    def __init__(self, source: Source, io: Any, max_connections: int, hooks: Hooks | None) -> None:
        rules.check_integer("max_connections", max_connections, 3)
        self.io = io
        self.source = source
        self.hooks = hooks or Hooks()
        self.dropped: collections.deque[Any] = collections.deque()
        self._limit = max_connections
        self.is_closed = False
        self._start()
        _engines.add(self)

    def _start(self) -> None:
        self.actor = os.urandom(8).hex().encode()
        self.mutex = threading.Lock()
        self.grants: set[Grant] = set()
        # Acquisitions that were sent, and are neither held nor withdrawn.
        self._asking: set[Grant] = set()
        # The waits of this client under each key, the oldest first.
        self._lines: dict[Any, dict[Any, None]] = {}
        self._has_timer = False
        self._wake = self.io.event()
        self._alarm = math.inf
        self.router = _Router(self)

    def forked(self) -> None:
        """The child of a fork holds nothing. Its parent's connections are forgotten, not closed (B39)."""
        for grant in (*self.grants, *self._asking):
            grant.state, grant.reason = State.LOST, LossReason.FORKED
        _of_parents.append((self.router, self.grants))
        self._start()

    def enter(self) -> None:
        """Raises HoldfastError if this object is closed."""
        if self.is_closed:
            raise HoldfastError("this Holdfast object is closed")

    def new_pool(self, address: Address | None) -> Pool:
        """Makes the pool of a node."""

        async def open_line() -> Any:
            line = await self.io.open(self.source, address)
            try:
                if not pool.is_greeted:
                    await self._greet(pool, line)
            except BaseException:
                line.close()
                raise
            return line

        pool = Pool(self.io, open_line, self._limit)
        return pool

    async def _greet(self, pool: Pool, line: Any) -> None:
        """Checks that this client and the node's module have a protocol version in common (B26)."""
        line.start(pack([(b"LOCK.VERSION",)]), 1)
        [reply] = await line.wait(2.0)
        if isinstance(reply, ResponseError):
            if "unknown command" not in str(reply).lower():
                # The user has no right to ask, or the server can't answer now.
                return
            # A module without LOCK.VERSION has LOCK.ACQUIRE, and refuses the number of arguments.
            line.start(pack([(b"LOCK.ACQUIRE",)]), 1)
            [other] = await line.wait(2.0)
            if "unknown command" not in str(other).lower():
                rules.check_version(3, 3, "0.3 or older")
            raise rules.application_error(reply, None)
        if isinstance(reply, Exception):
            raise reply
        found = rules.as_map(reply)
        lowest, highest = found["protocol"][:2]
        rules.check_version(lowest, highest, found["version"].decode())
        pool.replicas_timeout = found["replicas-timeout"] / 1000
        pool.is_greeted = True

    # Acquire

    async def acquire(self, terms: Terms, wait: float | None, cancel: Any = None) -> Grant:
        """Acquires a lock. `wait`: in seconds; 0: does not wait, None: without a limit. Raises NotAcquiredError."""
        if wait is not None:
            rules.check_seconds("wait", wait)
        if cancel is not None and not isinstance(cancel, self.io.event):
            # With asyncio, an event of threading would block the event loop.
            raise TypeError(f"cancel must be an instance of {self.io.event!r}, got {cancel!r}")
        self.enter()
        self._start_timer()
        look_every = LOOK_AGAIN if cancel is None else GRACE
        grant = Grant(terms, self.io.event(), wait, cancel or self.io.event(), look_every)
        # Of this client's waits for one mutex, only the oldest is at the server (B31).
        is_queued_here = grant.waits and terms.limit == 1 and len(terms.keys) == 1
        try:
            async with self._turn(terms.keys[0], grant) if is_queued_here else contextlib.nullcontext(True) as is_mine:
                if is_mine:
                    await self._ask(grant)
            if grant.state is not State.WAITING:
                if grant.asked:
                    await self.io.background(lambda: self._read_older(grant))
                self._tell("acquired", terms.name, grant.token, now() - grant.began)
        except BaseException as error:
            # If it was interrupted after the reply, the server may hold the lock.
            grant.broke = grant.broke or (grant.sent > 0 and not grant.asked and not isinstance(error, Exception))
            await self._give_up(grant)
            raise
        finally:
            self._leave_slot(grant)
        if grant.state is State.WAITING:
            await self._give_up(grant)
            why = ": the wait was cancelled" if grant.cancel.is_set() else f" within {wait} s"
            said = "" if grant.error is None else f": {grant.error}"
            raise NotAcquiredError(f"lock {terms.name!r} was not acquired{why}{said}", terms.name) from grant.error
        return grant

    async def _ask(self, grant: Grant) -> None:
        """Sends ACQUIRE until the lock is granted, or the caller's time is over (B10 to B13)."""
        terms, key = grant.terms, grant.terms.keys[0]
        target: Pool | None = None
        hurried = False
        async with contextlib.AsyncExitStack() as poll:
            while not grant.cancel.is_set() and now() < (grant.over if grant.asked else grant.until):
                self.enter()
                asked, pool = None, target
                try:
                    if grant.ask_at <= now() < grant.until:
                        pool = pool or await self.router.pool(key, self._bound(grant))
                        is_asking = hurried and rules.is_ask(grant.error)
                        await self._send(grant, pool, poll, is_asking)
                    if not grant.asked:
                        await self.io.wait(grant.cancel, max(min(grant.ask_at, grant.until) - now(), 0.0))
                        continue
                    asked = grant.asked[-1]
                    pool = asked.pool
                    reply = await self._listen(grant, asked)
                except Exception as error:
                    reply = error
                    if asked is not None:
                        if isinstance(error, Silence) and now() < asked.silent_at:
                            continue
                        await self._broke(grant, asked)
                else:
                    grant.asked.remove(asked)
                await poll.aclose()
                reply = self._without_cluster(reply)
                was_hurried, hurried = hurried, False
                verdict, is_broken = judge(reply), rules.is_transport(reply)
                if asked is not None and verdict is Verdict.YES:
                    if await self._begin(grant, reply, asked) or not grant.waits:
                        return
                    grant.ask_at = now()
                    continue
                if asked is not None and not is_broken:
                    asked.pool.put(asked.line)
                if asked is not None and verdict is Verdict.NIL:
                    asked.pool.succeeded()
                    if not grant.waits:
                        return
                    # The wait at the server is over, perhaps early: by a limit there, or by CLIENT UNBLOCK.
                    grant.ask_at = now() + (rules.POLL_EVERY if grant.slot is None else TICK)
                    continue
                grant.error = rules.application_error(reply, terms.name)
                if self.is_closed or verdict is Verdict.FATAL:
                    raise grant.error
                if terms.owner and grant.broke:
                    raise ConnectionError(
                        f"{reply}. The lock may be held by {terms.owner!r} for a lease"
                    ) from grant.error
                # A redirect is followed, or a dead idle connection replaced, at once. The second in a row pauses.
                target = self.router.redirected(reply, key, pool) if verdict is Verdict.MOVED and pool else None
                is_cut = is_broken and not isinstance(reply, TimeoutError)
                was_idle = asked is not None and is_cut and not asked.line.is_fresh
                hurried = not was_hurried and (was_idle or target is not None)
                if hurried:
                    grant.ask_at = now()
                elif not grant.waits or terms.patience is not None:
                    raise grant.error
                else:
                    target, grant.ask_at = None, now() + self._pause(reply, key, pool, terms.lease)

    def _bound(self, grant: Grant) -> float:
        """How long the next step of an acquisition may take."""
        return min(grant.until + GRACE - now(), rules.LONGEST_SILENCE) if grant.waits else grant.terms.silence

    async def _send(self, grant: Grant, pool: Pool, poll: contextlib.AsyncExitStack, is_asking: bool) -> None:
        terms, was_sent = grant.terms, grant.sent > 0
        if grant.asked:
            # The last request is silent: the idle connections may be dead, too.
            self.router.doubt(grant.asked[-1].pool)
        if grant.waits and grant.slot is not pool:
            self._leave_slot(grant)
            grant.slot = pool if pool.take_slot(grant) else None
        if grant.waits and grant.slot is None and was_sent:
            # It has no connection of its own: one such request at a time (B30).
            await poll.enter_async_context(self._turn(POLLS, grant))
        if terms.owner is not None:
            # It is not repeated, so it is sent over a connection that has just answered.
            await self.command(pool, REST, lambda: [(b"LOCK.VERSION",)], self._bound(grant))
        line = await pool.get(REST, self._bound(grant), terms.lease / 16)
        try:
            sent = now()
            if grant.cancel.is_set() or sent >= grant.until:
                pool.put(line)
                return
            with self.mutex:
                # Either close() finds it, or it is not sent.
                self.enter()
                self._asking.add(grant)
                due = len(self._lines.get(POLLS, ()))
            wait = None
            if grant.slot is not None:
                wait = grant.until - sent
            elif grant.waits and was_sent:
                wait = min(rules.poll_wait(due), grant.until - sent)
            words = grant.acquisition(sent, wait)
            extra = pool.replicas_timeout if terms.replicas else 0.0
            silent_at = sent + extra + (terms.silence if wait is None else rules.WAIT_SILENCE)
            grant.asked.append(_Asked(line, pool, sent, silent_at if grant.slot is None else math.inf))
        except BaseException:
            await pool.discard(line)
            raise
        grant.sent, grant.over = sent, grant.until + GRACE
        # A request with NEW must not be repeated (B22).
        grant.ask_at = silent_at if grant.slot is not None and terms.owner is None else math.inf
        commands: list[Words] = [(b"ASKING",), words] if is_asking else [words]
        line.start(pack(commands), len(commands))

    async def _listen(self, grant: Grant, asked: _Asked) -> Any:
        """The reply to the newest request, which supersedes the older ones (B11). Raises Silence if there is none."""
        end = min(grant.ask_at, grant.until) if now() < grant.until else grant.over
        look_again = now() + (0.05 if len(grant.asked) > 1 else grant.look_every)
        try:
            reply = (await asked.line.wait(min(end, look_again, asked.silent_at) - now()))[-1]
        finally:
            # The server answers the older ones first. Once that was read, a release need not withdraw them (B18).
            for old in grant.asked[:-1]:
                await self._read_off(grant, old, 0.0, asked.sent + rules.SUPERSEDED_WITHIN)
        if not isinstance(reply, Exception) and not rules.answers_acquire(reply):
            raise ConnectionError(f"the server answered ACQUIRE with neither a token nor nil: {reply!r:.100}")
        return reply

    async def _read_off(self, grant: Grant, asked: _Asked, seconds: float, until: float = 0.0) -> Any:
        """Reads a pending reply, so that its connection can be used again. Closes it if there is none by `until`."""
        try:
            reply = (await asked.line.wait(seconds))[-1]
        except Exception as error:
            if not isinstance(error, Silence) or now() >= until:
                await self._broke(grant, asked)
            return None
        grant.asked.remove(asked)
        asked.pool.put(asked.line)
        return reply

    async def _read_rest(self, grant: Grant) -> list[Any]:
        return [await self._read_off(grant, asked, rules.SUPERSEDED_WITHIN) for asked in list(grant.asked)]

    async def _read_older(self, grant: Grant) -> None:
        """Reads the replies to the requests that the granted one has superseded."""
        for reply in await self._read_rest(grant):
            if judge(reply) is Verdict.YES and (reply[0] != grant.token or grant.state is not State.HELD):
                # A stale request was granted after the hold had ended (B20).
                self.lost(grant, LossReason.GONE)
                await self._withdraw(grant)

    async def _broke(self, grant: Grant, asked: _Asked) -> None:
        grant.asked.remove(asked)
        grant.broke = True
        await asked.pool.drop(asked.line)

    async def _begin(self, grant: Grant, reply: Any, asked: _Asked) -> bool:
        """Takes a grant, renewed first if too little of its lease is certain (B8). Returns whether it is held."""
        pool = asked.pool
        pool.succeeded()
        if grant.terms.ephemeral:
            pool.leave(asked.line)
            pool = grant.pool = Pool(self.io, None, 1)
        pool.put(asked.line)
        grant.granted(reply, asked.sent)
        if grant.left() < grant.lease / 2:
            is_renewed = False
            try:
                await self.io.sleep(min(TICK, grant.lease / 16))
                is_renewed = await self._renew([grant], pool) == [True]
            finally:
                if not is_renewed:
                    # Whatever ended this, the server may hold it.
                    grant.broke = True
                    if grant.pool is not None:
                        grant.pool.close()
                        grant.pool = None
            if not is_renewed:
                return False
        with self.mutex:
            # Either close() finds it, or it is not held.
            if not self.is_closed:
                grant.state = State.HELD
                self.grants.add(grant)
                self._asking.discard(grant)
        if grant.state is State.WAITING:
            try:
                await self.command(pool, RELEASE, grant.releases, rules.silence(grant.lease))
            finally:
                if grant.pool is not None:
                    grant.pool.close()
            raise HoldfastError("this Holdfast object is closed")
        self._schedule(grant, grant.due)
        return True

    @contextlib.asynccontextmanager
    async def _turn(self, key: Any, grant: Grant) -> AsyncIterator[bool]:
        """Waits for the earlier waits of this client under the same key. Yields whether they ended in time."""
        turn = self.io.event()
        try:
            with self.mutex:
                line = self._lines.setdefault(key, {})
                line[turn] = None
                is_mine = next(iter(line)) is turn
            while not is_mine and now() < grant.until and not grant.cancel.is_set():
                is_mine = await self.io.wait(turn, min(grant.until - now(), grant.look_every))
            yield is_mine
        finally:
            with self.mutex:
                line = self._lines.get(key, {})
                line.pop(turn, None)
                if line:
                    next(iter(line)).set()
                else:
                    self._lines.pop(key, None)

    def _leave_slot(self, grant: Grant) -> None:
        if grant.slot is not None:
            grant.slot.leave_slot(grant)
            grant.slot = None

    # Withdraw

    async def _give_up(self, grant: Grant) -> None:
        with self.mutex:
            self.grants.discard(grant)
        if grant.terms.owner is None and (grant.asked or grant.broke):
            await self.io.background(lambda: self._withdraw(grant))
            return
        # Never ALL: the application may use this owner again. The server ends a wait with its connection.
        for asked in list(grant.asked):
            await self._broke(grant, asked)
        self._withdrawn(grant)

    def _withdrawn(self, grant: Grant) -> None:
        with self.mutex:
            self._asking.discard(grant)

    async def _withdraw(self, grant: Grant) -> None:
        """Releases what the server grants to an acquisition, until nothing can be left (B20, B21)."""
        # A wait may be longer than a lease: RELEASE ALL is sent at least once.
        answers, end = 0, max(grant.sent + grant.lease, now() + rules.silence(grant.lease))
        try:
            while answers < (2 if grant.broke else 1) and (answers == 0 or now() < end):
                if answers:
                    # After close(), the second one is not sent.
                    self._withdrawn(grant)
                    await self.io.sleep(1.0)
                    if self.is_closed:
                        break
                await self._answer_release(grant, lambda: [grant.withdrawal()], end)
                # A token came: RELEASE ALL had overtaken the ACQUIRE.
                is_late = any(judge(reply) is Verdict.YES for reply in await self._read_rest(grant))
                answers = 0 if is_late else answers + 1
        except (ConnectionError, TimeoutError, OSError) as error:
            logger.debug("lock %r: an acquisition could not be withdrawn: %s", grant.terms.name, error)
        finally:
            # The server ends a wait with its connection.
            for asked in list(grant.asked):
                await self._broke(grant, asked)
            self._withdrawn(grant)

    # Commands

    def _without_cluster(self, reply: Any) -> Any:
        """The reply. A redirect of a client for one server becomes a fatal error: no repetition would end otherwise."""
        if self.source.is_cluster or judge(reply) is not Verdict.MOVED:
            return reply
        text = f"this server is a node of a cluster: give Holdfast a redis.RedisCluster (redirect: {reply})"
        return ResponseError(text)

    def _pause(self, error: Exception, key: bytes, pool: Pool | None, lease: float) -> float:
        """Notes what an error says about the node, and returns how long to pause."""
        verdict = judge(error)
        if pool is None:
            return min(TICK, lease / 16)
        if verdict is Verdict.MOVED:
            self.router.redirected(error, key, pool)
        elif verdict is Verdict.DEMOTED:
            self.router.doubt(pool)
        pool.failed()
        return pool.rest(lease)

    async def command(
        self,
        pool: Pool,
        priority: int,
        make: Make,
        seconds: float,
        grants: Sequence[Grant] = (),
        *,
        check: Check | None = None,
        again: bool = True,
        is_asking: bool = False,
    ) -> tuple[float, list[Any]]:
        """Sends a pipeline. Returns when it was sent, and the replies, with errors as elements.

        `again`: it may be sent again, so that a dead idle connection is replaced, once (B28). `grants`: those that it
        is about. `check`: whether these are replies to it; if not, the connection counts as broken. `is_asking`: an
        ASK redirect named this node.
        """
        end = now() + seconds
        for is_last in (False, True) if again else (True,):
            # A renewal has paused already, by its lease.
            line = await pool.get(priority, end - now(), 0.0 if priority == RENEW else LONGEST_PAUSE)
            sent = now()
            try:
                commands = make()
                if is_asking:
                    # ASKING is for the next command only.
                    commands = [words for command in commands for words in ((b"ASKING",), command)]
                line.start(pack(commands), len(commands))
                replies = await line.wait(end - now())
                if is_asking:
                    replies = replies[1::2]
                if check is not None and not check(replies):
                    raise ConnectionError(f"the server answered what is no reply to this request: {replies!r:.100}")
            except BaseException as error:
                for grant in grants:
                    grant.broke = True
                # That a task was cancelled says nothing about the node.
                await (pool.drop(line) if isinstance(error, Exception) else pool.discard(line))
                is_dead = isinstance(error, Exception) and not isinstance(error, TimeoutError) and not line.is_fresh
                if is_last or not is_dead:
                    raise
            else:
                pool.put(line)
                return sent, replies
        raise AssertionError

    async def answer(
        self, grant: Grant, priority: int, make: Make, end: float, again: bool = True, check: Check | None = None
    ) -> Any:
        """Sends a pipeline until its first reply is no passing error, or `end`. `again`: also after a lost reply."""
        key = grant.terms.keys[0]
        while True:
            pool = grant.pool
            try:
                pool = pool or await self.router.pool(key, max(end - now(), 0.05))
                seconds = max(min(end - now(), rules.silence(grant.lease)), 0.05)
                if not again:
                    # It is not repeated, so it is sent over a connection that has just answered.
                    await self.command(pool, priority, lambda: [(b"LOCK.VERSION",)], seconds)
                send = functools.partial(self.command, grants=[grant], check=check, again=again)
                _, [reply, *_] = await send(pool, priority, make, seconds)
                reply = self._without_cluster(reply)
                if rules.is_ask(reply) and grant.pool is None:
                    pool = self.router.redirected(reply, key, pool)
                    _, [reply, *_] = await send(pool, priority, make, seconds, is_asking=True)
            except Exception as error:
                reply = error
            verdict = judge(reply)
            if pool is not None and verdict in (Verdict.YES, Verdict.NIL):
                pool.succeeded()
                return reply
            if verdict is Verdict.FATAL:
                raise rules.application_error(reply, grant.terms.name)
            pause = self._pause(reply, key, pool, grant.lease)
            is_harmless = again or verdict is not Verdict.DEMOTED or isinstance(reply, NotSent)
            if now() >= end or grant.pool is not None or self.is_closed or not is_harmless:
                raise rules.application_error(reply, grant.terms.name)
            await self.io.sleep(pause)

    async def _answer_release(self, grant: Grant, make: Make, end: float) -> Any:
        return await self.answer(grant, RELEASE, make, end, check=lambda replies: all(map(grant.answers, replies)))

    async def ask(self, *words: bytes, again: bool = True) -> Any:
        """The reply to a command about the key `words[1]`. `again`: it may be repeated after a lost reply."""
        self.enter()
        return await self.answer(
            Grant(Terms((words[1],), words[1])), REST, lambda: [words], now() + RELEASE_TIME, again
        )

    # Renew

    def _start_timer(self) -> None:
        with self.mutex:
            if not self._has_timer:
                self._wake = self.io.event()
                if not self.io.spawn(self._run_timer):
                    raise RuntimeError("cannot start a thread for renewals")
                self._has_timer = True

    async def _run_timer(self) -> None:
        """The one timer for all holds, in a thread or task of its own."""
        try:
            while not self.is_closed:
                try:
                    await self._renew_due()
                except Exception:
                    # The application's logging may be what fails.
                    with contextlib.suppress(Exception):
                        logger.exception("renewals failed")
                    await self.io.sleep(0.1)
        except asyncio.CancelledError:
            # The event loop ends.
            self._has_timer = False
            await self.release_all(EXIT_TIME)
            raise

    async def _renew_due(self) -> None:
        self._wake.clear()
        due: list[Grant] = []
        if self._alarm <= now():
            with self.mutex:
                for grant in self.grants:
                    if grant.due <= now():
                        # While its renewal is under way, only its end by the clock is due.
                        grant.due = grant.certain
                        due.append(grant)
                self._alarm = max(min((grant.due for grant in self.grants), default=math.inf), now() + TICK)
        for grant in due:
            if grant.certain <= now():
                self.lost(grant, LossReason.EXPIRED)
        if due:
            # A program that only holds has to find the new primary, too (B40).
            await self.router.refresh()
        for pool, batch in self._batches(grant for grant in due if grant.state is State.HELD):
            # A silent node does not delay the others (B15).
            await self.io.background(functools.partial(self._renew, batch, pool))
        while self.dropped:
            logger.warning("lock %r: its hold was dropped without a release", self.dropped.popleft())
        await self.io.wait(self._wake, None if self._alarm == math.inf else min(self._alarm - now(), LOOK_AGAIN))

    def _schedule(self, grant: Grant, due: float) -> None:
        """Sets when the timer looks at a hold."""
        with self.mutex:
            grant.due = min(due, grant.certain)
            # A release leaves the alarm as it is, so that the next acquisition need not wake the timer.
            if grant.due < self._alarm:
                self._alarm = grant.due
                self._wake.set()

    def _batches(self, grants: Iterable[Grant]) -> Iterator[tuple[Pool, list[Grant]]]:
        """Holds of one node share a pipeline, but for those that wait for replicas: they would delay the others."""
        groups: dict[Any, list[Grant]] = {}
        for grant in grants:
            pool = grant.pool or self.router.known(grant.terms.keys[0])
            groups.setdefault((pool, grant if grant.terms.replicas else None), []).append(grant)
        for (pool, _), group in groups.items():
            for begin in range(0, len(group), BATCH):
                yield pool, group[begin : begin + BATCH]

    async def _renew(self, grants: Sequence[Grant], pool: Pool, is_asking: bool = False) -> list[Any]:
        """Renews holds of one node (B14).

        Returns, in any order, for each that was not released meanwhile: True if it was renewed, False if it is lost, or
        the error.
        """
        seconds = min(rules.silence(grant.lease) for grant in grants)
        seconds += pool.replicas_timeout if grants[0].terms.replicas else 0.0
        asked = [(grant, grant.token, grant.lease) for grant in grants]

        def make() -> list[Words]:
            # Once a release has begun, none is sent (B16).
            held = [grant for grant in grants if grant.state in (State.WAITING, State.HELD)]
            asked[:] = [(grant, grant.token, grant.lease) for grant in held]
            return [grant.renewal() for grant in held]

        def check(replies: list[Any]) -> bool:
            return all(grant.answers(reply, token) for (grant, token, _), reply in zip(asked, replies, strict=True))

        try:
            sent, replies = await self.command(pool, RENEW, make, seconds, grants, check=check, is_asking=is_asking)
        except Exception as error:
            sent, replies = 0.0, [error] * len(asked)
        found: list[Any] = []
        redirected: dict[Pool, list[Grant]] = {}
        for (grant, token, lease), reply in zip(asked, replies, strict=True):
            if rules.is_ask(reply) and grant.pool is None and not is_asking:
                target = self.router.redirected(reply, grant.terms.keys[0], pool)
                redirected.setdefault(target, []).append(grant)
            else:
                found.append(self._take_renewal(grant, token, lease, reply, sent, pool))
        for target, group in redirected.items():
            found += await self._renew(group, target, is_asking=True)
        return found

    def _take_renewal(self, grant: Grant, token: int, lease: float, reply: Any, sent: float, pool: Pool) -> Any:
        verdict = judge(reply)
        if verdict is Verdict.YES:
            pool.succeeded()
            grant.renewed(sent, lease)
            self._schedule(grant, grant.due)
            return True
        if verdict is Verdict.NIL and token != grant.token:
            # RedLock has raised the token meanwhile: nil says nothing about the new one.
            reply = NotSent()
        elif verdict is Verdict.NIL or rules.is_overwritten(reply):
            self.lost(grant, LossReason.GONE)
            return False
        if grant.pool is not None and rules.is_transport(reply) and not isinstance(reply, NotSent):
            self.lost(grant, LossReason.DISCONNECTED)
        again_at = now() + self._pause(reply, grant.terms.keys[0], pool, grant.lease)
        self._schedule(grant, again_at if grant.terms.renew else grant.certain)
        return reply

    async def renew(self, grant: Grant, lease: float | None) -> None:
        """Renews a hold for its caller, with a new lease if given. Raises LockLostError or NotHeldError."""
        self.must_hold(grant)
        former = grant.lease
        if lease is not None:
            rules.check_lease(lease)
            grant.lease = lease
            # A shorter lease ends earlier, even if the reply is lost.
            grant.certain = min(grant.certain, now() + lease * rules.DRIFT)
            self._schedule(grant, grant.due)
        while True:
            pool = grant.pool or await self.router.pool(grant.terms.keys[0], 1.0)
            [answer] = await self._renew([grant], pool) or [False]
            self.must_hold(grant)
            if answer is True:
                return
            if judge(answer) is Verdict.FATAL:
                # The server has refused the new lease: the timer goes on with the former one.
                grant.lease = former
                raise rules.application_error(answer, grant.terms.name)
            await self.io.sleep(pool.rest(grant.lease))

    async def raise_token(self, grant: Grant, fence: int, seconds: float) -> bool:
        """Renews a hold with a greater token. Returns whether it has just this token now. For RedLock."""
        pool = await self.router.pool(grant.terms.keys[0], seconds)
        lease, words = grant.lease, (*grant.renewal(), b"FENCE", fence)
        tokens = grant.token, fence

        def check(replies: list[Any]) -> bool:
            return all(grant.answers(reply, *tokens) for reply in replies)

        sent, [reply] = await self.command(pool, RENEW, lambda: [words], seconds, [grant], check=check)
        if judge(reply) is not Verdict.YES:
            return False
        # 2 ms are a part of the drift (docs/redlock.md). `certain` is never 0 meanwhile: the timer would end the hold.
        grant.token, grant.certain = int(reply), min(grant.certain, sent - 0.002 + lease * rules.DRIFT)
        grant.renewed(sent - 0.002, lease)
        return grant.token == fence

    def must_hold(self, grant: Grant) -> None:
        """Raises LockLostError if a loss is known, NotHeldError if the hold was released. Asks no server."""
        if grant.certain <= now():
            self.lost(grant, LossReason.EXPIRED)
        if grant.reason is not None:
            raise LockLostError(grant.terms.name, grant.token, grant.reason)
        if grant.state in (State.RELEASING, State.RELEASED):
            raise NotHeldError(f"lock {grant.terms.name!r} was released", grant.terms.name)

    async def check(self, grant: Grant) -> None:
        """Asks the server whether the lock is held (B9). Raises LockLostError if not."""
        self.must_hold(grant)
        for key in grant.terms.keys:
            try:
                info = await self.ask(b"LOCK.INFO", key, b"COUNT", b"5000")
            except WrongTypeError:
                info = None
            if not rules.holds(info, grant.owner, grant.token):
                self.lost(grant, LossReason.GONE)
        self.must_hold(grant)

    def lost(self, grant: Grant, reason: LossReason, of: State = State.HELD) -> None:
        """Ends a hold that is lost, and notifies its holder, once."""
        with self.mutex:
            if grant.state is not of:
                return
            grant.state, grant.reason = State.LOST, reason
            self.grants.discard(grant)
        # At the end of a program, the event loop of the tasks that wait for this may have ended.
        with contextlib.suppress(RuntimeError):
            grant.event.set()
        self._tell("lost", grant.terms.name, grant.token, reason)
        with contextlib.suppress(RuntimeError):
            if grant.listener is not None:
                grant.listener()
        # close() releases it over this connection.
        if grant.pool is not None and reason is not LossReason.CLOSED:
            grant.pool.close()

    def _tell(self, hook: str, *what: Any) -> None:
        try:
            getattr(self.hooks, hook)(*what)
        except self.io.callback_errors:
            logger.exception("a hook of the application failed: %s%r", hook, what)

    # Release

    async def release(self, grant: Grant, seconds: float = RELEASE_TIME) -> None:
        """Releases a hold. Raises LockLostError if it had been lost.

        If the server does not answer in time, the release goes on in the background (B19).
        """
        # First: an error must not leave a hold that is neither released nor renewed.
        rules.check_seconds("timeout", seconds)
        end = now() + seconds
        if grant.state is State.RELEASED:
            return
        if self.is_closed or grant.reason is LossReason.FORKED:
            self.must_hold(grant)
        self.enter()
        if grant.certain <= now():
            self.lost(grant, LossReason.EXPIRED)
        with self.mutex:
            self.grants.discard(grant)
            if grant.state is State.HELD:
                grant.state = State.RELEASING
        try:
            if not await self._release(grant, end):
                self.lost(grant, LossReason.GONE, State.RELEASING)
        except BaseException as error:
            is_fatal = isinstance(error, Exception) and judge(error) is Verdict.FATAL
            if grant.pool is not None:
                # The server releases it when its connection ends, whatever it answered.
                grant.pool.close()
                self.lost(grant, LossReason.DISCONNECTED, State.RELEASING)
            elif not is_fatal:
                # For as long as the server may hold it.
                end = max(grant.certain, now()) + grant.lease * (1 - rules.DRIFT)
                await self.io.background(functools.partial(self._release, grant, end))
            if is_fatal or grant.reason is None or not isinstance(error, Exception):
                raise
        if grant.reason is not None:
            raise LockLostError(grant.terms.name, grant.token, grant.reason)
        self._tell("released", grant.terms.name, grant.token, now() - grant.since)

    async def _release(self, grant: Grant, end: float) -> bool:
        """Whether this released the hold; if not, it had been lost."""

        def make() -> list[Words]:
            grant.attempts += 1
            grant.first_release = grant.first_release or now()
            return grant.releases()

        end = min(end, max(grant.certain, now()) + 1.0)
        try:
            reply = await self._answer_release(grant, make, end)
        except WrongTypeError:
            reply = None
        is_released = grant.is_released(reply)
        if is_released and grant.state is State.RELEASING:
            grant.state = State.RELEASED
        if grant.pool is not None:
            # The connection of an ephemeral hold returns to the node's pool.
            for line in grant.pool.take_idle():
                self.router.known(grant.terms.keys[0]).put(line)
            grant.pool.close()
        return is_released

    async def release_all(self, seconds: float) -> None:
        """Releases all holds, which their holders lose (B38). After close(), withdraws all acquisitions, too.

        Each acquisition then reads its reply, and releases what it was granted: until none is left (B20).
        """
        end = now() + seconds
        with self.mutex:
            ending = list(self.grants)
        for grant in ending:
            self.lost(grant, LossReason.CLOSED)
        while True:
            with self.mutex:
                ending += [grant for grant in self._asking if self.is_closed and grant.terms.owner is None]
            if not ending:
                return
            nodes: dict[Pool, list[Grant]] = {}
            for grant in ending:
                nodes.setdefault(self.router.known(grant.terms.keys[0]), []).append(grant)
            # A silent node does not delay the others.
            await self.io.gather([functools.partial(self._end_all, of_node, end) for of_node in nodes.values()])
            if now() >= end:
                return
            ending = []
            await self.io.sleep(TICK)

    async def _end_all(self, grants: list[Grant], end: float) -> None:
        """Releases or withdraws acquisitions of one node, once."""
        for pool, batch in self._batches(grants):
            words: list[Words] = []
            for grant in batch:
                words += [grant.withdrawal()] if grant.state is State.WAITING else grant.releases()
            try:
                await self.command(pool, RELEASE, words.copy, max(end - now(), 0.05))
            except Exception as error:
                logger.warning("%d locks could not be released, they end with their leases: %s", len(batch), error)
            finally:
                if batch[0].pool is not None:
                    pool.close()

    def close_at_exit(self) -> None:
        """Closes this at the end of the program. An event loop has ended then, and with it its connections."""
        engine = self
        if not isinstance(self.io, Threads):
            engine = Engine(self.source, Threads(), 3, self.hooks)
            engine.grants, engine.router.slots = self.grants, self.router.slots
            for grant in self.grants:
                grant.pool = None
        run(engine.close(EXIT_TIME))

    async def close(self, seconds: float = EXIT_TIME) -> None:
        """Releases all holds, withdraws all acquisitions, and closes the connections."""
        end = now() + seconds
        with self.mutex:
            if self.is_closed:
                return
            # From here on, nothing is added to `grants` and `_asking`.
            self.is_closed = True
        try:
            await self.release_all(seconds)
        finally:
            pools = self.router.all()
            lines = [line for pool in pools for line in pool.close()]
            self._wake.set()
        attempts = [attempt for pool in pools for attempt in list(pool.attempts)]
        await self.io.end(attempts, lines, max(end - now(), 0.05))


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    # At once: a second thread of the child could find its parent's connections.
    for engine in _engines:
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Router:
    """Which node serves a key: the only one (or the primary that Sentinels name), or a cluster's, by slots (B40)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pools: dict[Address | None, Pool] = {}
        self.slots: dict[int, Address] = {}
        self._is_doubtful = True
        self._reading: Any = None
        self._read_at = -math.inf

    def _at(self, address: Address | None) -> Pool:
        with self._engine.mutex:
            if address not in self._pools:
                self._pools[address] = self._engine.new_pool(address)
            return self._pools[address]

    def all(self) -> list[Pool]:
        """The pools of all nodes that were used."""
        return list(self._pools.values())

    def known(self, key: bytes) -> Pool:
        """The pool of the node that serves a key by the map as it was read last."""
        return self._at(self.slots[rules.slot_of(key)] if self._engine.source.is_cluster else None)

    async def pool(self, key: bytes, seconds: float) -> Pool:
        """The pool of the node that serves a key. While the map is read again, the former one counts (B24)."""
        slot, end, io = rules.slot_of(key), now() + seconds, self._engine.io
        while self._engine.source.is_cluster:
            done = await self.refresh(slot not in self.slots)
            if slot in self.slots:
                break
            await io.wait(done, max(end - now(), 0.0))
            if now() >= end:
                raise NotSent("no node of the cluster named the one that serves the slot in time")
            if slot not in self.slots:
                await io.sleep(min(0.1, max(end - now(), 0.0)))
        return self.known(key)

    async def refresh(self, is_needed: bool = False) -> Any:
        """Begins to read the map again if it may be wrong. Returns an event for the end of that, if it is read."""
        is_due = is_needed or (self._is_doubtful and now() - self._read_at > 0.1)
        done = self._reading
        if done is None and is_due and self._engine.source.is_cluster:
            done = self._reading = self._engine.io.event()
            await self._engine.io.background(functools.partial(self._read, done))
        return done

    def redirected(self, error: Any, key: bytes, pool: Pool) -> Pool:
        """The pool of the node that a redirect names."""
        address = next((one for one, its in list(self._pools.items()) if its is pool), None)
        if address is None:
            return pool
        host, _, port = str(error).split()[-1].rpartition(":")
        address = self._engine.source.remap((host or address[0], int(port)))
        if not rules.is_ask(error):
            self.slots[rules.slot_of(key)] = address
            self._is_doubtful = True
        return self._at(address)

    def doubt(self, pool: Pool) -> None:
        """The node may no longer be the primary (B41): closes its idle connections, and lets the map be read again."""
        pool.flush()
        self._is_doubtful = True

    async def _read(self, done: Any) -> None:
        try:
            used, found = filter(None, list(self._pools)), list(self.slots.values())
            # With asyncio, the application's client may only know the configured nodes.
            for address in dict.fromkeys([*used, *self._engine.source.addresses, *found]):
                try:
                    words: list[Words] = [(b"CLUSTER", b"SLOTS")]
                    _, [reply] = await self._engine.command(self._at(address), REST, words.copy, 1.0)
                except Exception as error:
                    logger.debug("%s:%d does not say who serves the slots: %s", *address, error)
                    continue
                if isinstance(reply, list) and reply:
                    self._take(reply, address)
                    return
        finally:
            self._read_at, self._reading = now(), None
            done.set()

    def _take(self, reply: list[Any], asked: Address) -> None:
        for first, last, node, *_ in reply:
            host = node[0].decode() if node[0] else asked[0]
            address = self._engine.source.remap((host, node[1]))
            self.slots.update(dict.fromkeys(range(first, last + 1), address))
        self._is_doubtful = False
