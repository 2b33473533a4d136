"""The thin client of docs/client-protocol.md, once for threads and asyncio: coroutines over the edge of _io.py."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import heapq
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from . import _rules as rules
from ._clock import LOOK_AGAIN, now
from ._io import Address, Source
from ._pool import LONGEST_PAUSE, RELEASE, RENEW, REST, Pool
from ._rules import BATCH, DRIFT, GRACE, Grant, NotSent, Silence, State, Terms, Verdict, Words, judge, pack
from .errors import HoldfastError, LockLostError, LossReason, WrongTypeError

logger = logging.getLogger("holdfast")

POLLS: Any = object()
"""The line of those that found no connection for a wait."""
RELEASE_TIME = 5.0
EXIT_TIME = 1.0


class Hooks:
    """What a program wants to be told, for metrics and logs. Override what you need; it must not block.

    Times are in seconds. Exceptions are logged. A call comes from the thread or task in which it happened.
    """

    def acquired(self, name: Any, fence: int, waited: float) -> None:
        """A lock was acquired, after so long."""

    def lost(self, name: Any, fence: int, reason: LossReason) -> None:
        """A hold was lost."""

    def released(self, name: Any, fence: int, held: float) -> None:
        """A hold was released, after so long."""


class _Asked:
    """An ACQUIRE whose reply has not come."""

    def __init__(self, line: Any, pool: Pool, sent: float) -> None:
        self.line, self.pool, self.sent = line, pool, sent
        self.silent_at = math.inf


class _Request:
    """One acquisition, until it is granted or given up."""

    def __init__(self, terms: Terms, wait: float | None, cancel: Any) -> None:
        self.terms = terms
        self.owner = terms.new_owner()
        self.began = now()
        self.waits = wait is None or wait > 0
        self.until = math.inf if wait is None else self.began + wait
        self.cancel = cancel
        self.asked: list[_Asked] = []
        self.sent: float | None = None
        self.broke = False
        self.slot: Pool | None = None
        self.error: Exception | None = None

    @property
    def is_cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()


class Engine:
    """All that a Holdfast object does."""

    def __init__(self, client: Any, io: Any, max_connections: int, hooks: Hooks | None) -> None:
        if max_connections < 3:
            raise ValueError(f"max_connections must be at least 3, got {max_connections!r}")
        self.io = io
        self.source = Source(client)
        self.hooks = hooks or Hooks()
        self.dropped: collections.deque[Any] = collections.deque()
        self._limit = max_connections
        self.is_closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self.mutex = threading.Lock()
        self.grants: set[Grant] = set()
        self._keepers: dict[Pool, _Keeper] = {}
        self._lines: dict[Any, collections.deque[Any]] = {}
        self.router = _Cluster(self) if self.source.is_cluster else _One(self)

    def enter(self) -> None:
        """Before anything is sent."""
        if os.getpid() != self._pid:
            # The child of a fork holds nothing. Its parent's connections are forgotten, not closed.
            self._start()
        if self.is_closed:
            raise HoldfastError("this Holdfast object is closed")

    def become_blocking(self, io: Any) -> None:
        """What is held stays held; everything else begins anew, with connections that block."""
        grants, self.io = self.grants, io
        self.source.become_blocking()
        self._start()
        self.grants = grants
        for grant in grants:
            grant.pool = None

    def new_pool(self, address: Address | None) -> Pool:
        """The connections to a node."""

        async def open_line() -> Any:
            line = await self.io.open(self.source, address)
            try:
                await self._greet(pool, line)
            except BaseException:
                line.close()
                raise
            return line

        pool = Pool(self.io, open_line, self._limit)
        return pool

    async def _greet(self, pool: Pool, line: Any) -> None:
        """Looks once whether this client and the node's module understand each other."""
        if pool.is_greeted:
            return
        line.start(pack((b"LOCK.VERSION",)), 1)
        [reply] = await line.wait(2.0)
        if isinstance(reply, ResponseError):
            if judge(reply) is not Verdict.FATAL or "unknown command" not in str(reply).lower():
                # It may not be asked, or cannot answer now.
                return
            # One that knows ACQUIRE complains about the number of its arguments.
            line.start(pack((b"LOCK.ACQUIRE",)), 1)
            [other] = await line.wait(2.0)
            if "unknown command" not in str(other).lower():
                rules.check_version(3, 3, "0.3 or older")
            raise rules.fatal(reply, None)
        if isinstance(reply, Exception):
            raise reply
        found = rules.as_map(reply)
        lowest, highest = found["protocol"][:2]
        rules.check_version(lowest, highest, found["version"].decode())
        pool.replicas_timeout = found["replicas-timeout"] / 1000
        pool.is_greeted = True

    def keeper(self, pool: Pool) -> _Keeper:
        """What renews the holds of a node."""
        with self.mutex:
            keeper = self._keepers.get(pool)
            if keeper is None:
                keeper = _Keeper(self, pool)
                if not self.io.spawn(keeper.run):
                    raise RuntimeError("cannot start a thread for renewals")
                self._keepers[pool] = keeper
        return keeper

    # Acquire

    async def acquire(
        self, terms: Terms, wait: float | None, cancel: Any = None
    ) -> tuple[Grant | None, Exception | None]:
        """The hold; or None, and the last error if there was one."""
        self.enter()
        request = _Request(terms, wait, cancel)
        turn = None
        try:
            if request.waits and terms.is_queued_here:
                turn = await self._line_up(terms.keys[0], request)
                grant = None if turn is None else await self._ask(request)
            else:
                grant = await self._ask(request)
        except BaseException:
            await self._give_up(request)
            raise
        finally:
            self._leave_slot(request)
            if turn is not None:
                self._leave_line(terms.keys[0], turn)
        if grant is None:
            await self._give_up(request)
        else:
            self._tell("acquired", terms.name, grant.token, now() - request.began)
        return grant, request.error

    async def _ask(self, request: _Request) -> Grant | None:
        terms, redirects, is_replaced, asking = request.terms, 0, False, False
        pool = None
        while not request.is_cancelled:
            if request.waits and request.until <= now():
                return None
            if not request.waits and request.sent is not None and not (is_replaced or redirects):
                return None
            fresh, polling = True, None
            try:
                if not asking:
                    pool = await self.router.pool(terms.keys[0], self._bound(request))
                assert pool is not None  # noqa: S101
                self.keeper(pool)
                wait = self._wait_for(request, pool)
                if request.waits and request.slot is None and request.sent is not None:
                    polling = await self._line_up(POLLS, request)
                    if polling is None:
                        return None
                fresh = await self._send(request, pool, wait, asking)
                asking = False
                reply, asked = await self._hear(request, wait)
            except Exception as error:
                if not rules.is_transport(error) or self.is_closed:
                    raise
                request.error = error
                self.router.doubt(pool)
                if terms.owner is not None and request.broke:
                    # A request with NEW must not be repeated.
                    raise ConnectionError(f"{error}. The lock may be held by {terms.owner!r} for a lease") from error
                if not fresh and not is_replaced and not isinstance(error, TimeoutError):
                    # It had died while it was idle.
                    is_replaced = True
                    continue
                if not request.waits or terms.patience is not None:
                    raise
                await self._rest(request, pool)
                continue
            finally:
                if polling is not None:
                    self._leave_line(POLLS, polling)
            is_replaced = False
            verdict = judge(reply)
            if verdict is Verdict.YES:
                grant = await self._begin(request, reply, asked)
                if grant is not None:
                    return grant
                if not request.waits:
                    return None
                continue
            asked.pool.put(asked.line)
            if verdict is Verdict.NIL:
                asked.pool.succeeded()
                if not request.waits:
                    return None
                # Its time at the server is over, which a limit there or CLIENT UNBLOCK may bring about early.
                if request.until > now():
                    pause = 0.02 if request.slot is not None else rules.POLL_EVERY
                    await self._sleep(request, min(pause, request.until - now()))
                continue
            request.error = reply
            if verdict is Verdict.FATAL:
                raise rules.fatal(reply, terms.name)
            if verdict is Verdict.MOVED:
                redirects += 1
                asking = rules.code_of(reply) == "ASK"
                pool = self.router.redirected(reply, terms.keys[0], asked.pool)
                if redirects < 2:
                    continue
            else:
                self._note(reply, terms.keys[0], asked.pool)
            if not request.waits or terms.patience is not None:
                raise reply
            await self._rest(request, pool)
        return None

    def _bound(self, request: _Request) -> float:
        """How long the next step may take."""
        if not request.waits:
            return request.terms.silence(0.0)
        return max(request.until + GRACE - now(), 0.0) if request.until < math.inf else rules.LONGEST_WAIT

    def _wait_for(self, request: _Request, pool: Pool) -> float | None:
        """The WAIT to ask with; None: without. A wait has a slot, or polls over the connections left free."""
        if not request.waits:
            return None
        if request.slot is not pool:
            self._leave_slot(request)
            if pool.take_slot():
                request.slot = pool
        if request.slot is not None:
            return request.until - now()
        return 0.1 if request.sent is not None else None

    async def _send(self, request: _Request, pool: Pool, wait: float | None, asking: bool = False) -> bool:
        """Whether the connection had received nothing before."""
        terms = request.terms
        if terms.owner is not None:
            # It is not repeated, so over a connection that has just answered.
            await self._command(pool, REST, [(b"LOCK.VERSION",)], min(self._bound(request), rules.LONGEST_SILENCE))
        line = await pool.get(REST, min(self._bound(request), rules.LONGEST_SILENCE), terms.lease / 16)
        is_fresh: bool = line.is_fresh
        sent = now()
        words = terms.acquire(request.owner, wait, sent - request.began if request.sent is not None else 0.0)
        asked = _Asked(line, pool, sent)
        extra = pool.replicas_timeout if terms.replicas else 0.0
        asked.silent_at = sent + (terms.silence(extra) if wait is None else rules.WAIT_SILENCE + extra)
        request.asked.append(asked)
        request.sent = sent
        try:
            line.start(pack((b"ASKING",), words) if asking else pack(words), 2 if asking else 1)
        except Exception:
            self._broke(request, asked)
            raise
        return is_fresh

    def _broke(self, request: _Request, asked: _Asked) -> None:
        request.asked.remove(asked)
        request.broke = True
        asked.pool.drop(asked.line)

    async def _hear(self, request: _Request, wait: float | None) -> tuple[Any, _Asked]:
        """The reply to the newest request. After a silence it is sent again, and takes over the place in the queue."""
        terms = request.terms
        while True:
            asked = request.asked[-1]
            extra = asked.pool.replicas_timeout if terms.replicas else 0.0
            over = math.inf if not request.waits else request.until + GRACE + extra
            try:
                return await self._listen(request, asked, min(asked.silent_at, over)), asked
            except Silence:
                if request.is_cancelled or now() >= over:
                    raise
                if wait is None or terms.patience is not None:
                    self._broke(request, asked)
                    raise
                if terms.owner is not None or request.until <= now():
                    # A request with NEW must not be repeated; nor is any sent once the time is over.
                    with contextlib.suppress(Silence):
                        return await self._listen(request, asked, min(over, now() + LOOK_AGAIN)), asked
                    continue
            except Exception:
                self._broke(request, asked)
                raise
            self.router.doubt(asked.pool)
            asked.pool.flush()
            try:
                pool = await self.router.pool(terms.keys[0], 1.0)
                wait = 0.1 if request.slot is None else request.until - now()
                await self._send(request, pool, wait)
            except Exception as error:
                # The older request is under way still: it may yet be answered.
                if not rules.is_transport(error):
                    raise
                asked.pool.failed()
                asked.silent_at = now() + asked.pool.rest(terms.lease)
                request.error = error
                continue
            await self._settle(request)

    async def _listen(self, request: _Request, asked: _Asked, until: float) -> Any:
        while True:
            slice_end = until if request.cancel is None else min(until, now() + GRACE)
            try:
                reply = (await asked.line.wait(max(slice_end - now(), 0.0)))[-1]
            except Silence:
                if request.is_cancelled or now() >= until:
                    raise
                continue
            request.asked.remove(asked)
            return reply

    async def _settle(self, request: _Request) -> None:
        """Reads the replies to older requests, which the newest one has superseded."""
        while len(request.asked) > 1:
            old, newest = request.asked[0], request.asked[-1]
            try:
                await old.line.wait(0.05)
            except Silence:
                if now() >= newest.sent + rules.SUPERSEDED_WITHIN:
                    self._broke(request, old)
                else:
                    with contextlib.suppress(Silence, RedisError, OSError):
                        await newest.line.wait(0.01)
            except (RedisError, OSError):
                self._broke(request, old)
            else:
                request.asked.remove(old)
                old.pool.put(old.line)

    async def _begin(self, request: _Request, reply: Any, asked: _Asked) -> Grant | None:
        """The hold, if enough of its lease is certain; else it is renewed first."""
        terms, pool, line = request.terms, asked.pool, asked.line
        grant = rules.granted(terms, request.owner, reply, asked.sent)
        grant.broke = request.broke
        grant.event = self.io.event()
        pool.succeeded()
        if terms.ephemeral:
            pool.leave(line)
            grant.pool = Pool.of_one(self.io, line)
        else:
            pool.put(line)
        if grant.remaining() < terms.lease / 2:
            await self.io.sleep(min(0.02, terms.lease / 16))
            [answer] = await self._renew_all([grant], grant.pool or pool)
            if answer is not True:
                request.broke = True
                if grant.pool is not None:
                    grant.pool.close()
                return None
        with self.mutex:
            self.grants.add(grant)
        self.keeper(pool).add(grant)
        return grant

    async def _rest(self, request: _Request, pool: Pool | None) -> None:
        """The pause after an error that may pass."""
        if pool is None:
            pause = request.terms.lease / 16
        else:
            pool.failed()
            pause = pool.rest(request.terms.lease)
        await self._sleep(request, min(pause, 1.0, max(request.until - now(), 0.0)))

    async def _sleep(self, request: _Request, seconds: float) -> None:
        if request.cancel is not None:
            await self.io.wait(request.cancel, seconds)
        else:
            await self.io.sleep(seconds)

    async def _line_up(self, key: Any, request: _Request) -> Any:
        """This caller's turn among those of this client that wait for the same. None: its time was over first."""
        turn = self.io.event()
        with self.mutex:
            line = self._lines.setdefault(key, collections.deque())
            line.append(turn)
            if line[0] is turn:
                return turn
        try:
            while not turn.is_set() and request.until > now() and not request.is_cancelled:
                left = min(request.until - now(), LOOK_AGAIN)
                await self.io.wait(turn, left if request.cancel is None else min(left, GRACE))
        except BaseException:
            self._leave_line(key, turn)
            raise
        if turn.is_set() and not request.is_cancelled:
            return turn
        self._leave_line(key, turn)
        return None

    def _leave_line(self, key: Any, turn: Any) -> None:
        with self.mutex:
            line = self._lines.get(key)
            if line is None or turn not in line:
                return
            line.remove(turn)
            if line:
                self.io.set(line[0])
            else:
                del self._lines[key]

    def _leave_slot(self, request: _Request) -> None:
        if request.slot is not None:
            request.slot.leave_slot()
            request.slot = None

    # Withdraw

    async def _give_up(self, request: _Request) -> None:
        if self.is_closed or request.sent is None or not (request.asked or request.broke):
            return
        if request.terms.owner is not None:
            # Others may use this owner: never ALL. The server forgets a wait with its connection.
            for asked in list(request.asked):
                self._broke(request, asked)
            return
        if not self.io.spawn(lambda: self._withdraw(request)):
            await self._withdraw(request)

    async def _withdraw(self, request: _Request) -> None:
        """Releases what may come of a request, until the server has said that nothing can, or a lease is over."""
        terms, answers = request.terms, 0
        end = (request.sent or now()) + terms.lease
        words, pool = terms.withdrawal(request.owner), None
        while now() < end and not self.is_closed:
            try:
                pool = await self.router.pool(terms.keys[0], 1.0)
                [reply] = await self._command(pool, RELEASE, [words], terms.silence(0.0))
            except Exception as error:
                reply = error
            verdict = judge(reply)
            if verdict not in (Verdict.YES, Verdict.NIL):
                if verdict is Verdict.FATAL and not rules.is_transport(reply):
                    logger.warning("lock %r: a request could not be withdrawn: %s", terms.name, reply)
                    return
                await self._pause(reply, terms, pool)
                continue
            answers += 1
            # A token under way: RELEASE ALL had overtaken the request.
            if await self._read_to_end(request):
                answers = 0
                continue
            if not request.broke or answers >= 2:
                return
            await self.io.sleep(1.0)

    async def _read_to_end(self, request: _Request) -> bool:
        """Whether one of the replies that were owed is a token."""
        found = False
        for asked in list(request.asked):
            try:
                reply = (await asked.line.wait(rules.SUPERSEDED_WITHIN))[-1]
            except (Silence, RedisError, OSError):
                self._broke(request, asked)
            else:
                request.asked.remove(asked)
                asked.pool.put(asked.line)
                found = found or judge(reply) is Verdict.YES
        return found

    def _note(self, error: Exception, key: bytes, pool: Pool) -> None:
        """What an error says about where a key is served."""
        verdict = judge(error)
        if verdict is Verdict.MOVED:
            self.router.redirected(error, key, pool)
        elif verdict is Verdict.DEMOTED or rules.is_transport(error):
            pool.flush()
            self.router.doubt(pool)
        pool.failed()

    async def _pause(self, error: Exception, terms: Terms, pool: Pool | None) -> None:
        """After an error that passes."""
        if pool is not None:
            self._note(error, terms.keys[0], pool)
        await self.io.sleep(0.02 if pool is None else pool.rest(terms.lease))

    def _abandon(self, pool: Pool, line: Any, error: BaseException) -> None:
        """The reply is not waited for. Of a cancelled task the connection stays good."""
        if not isinstance(error, asyncio.CancelledError) or not self.io.spawn(lambda: self._read_off(pool, line)):
            pool.drop(line)

    async def _read_off(self, pool: Pool, line: Any) -> None:
        try:
            await line.wait(1.0)
        except Exception:
            pool.drop(line)
        else:
            pool.put(line)

    # Commands

    async def _command(self, pool: Pool, priority: int, commands: Sequence[Words], seconds: float) -> list[Any]:
        """The replies to a pipeline, of which errors are elements. A connection that was dead is replaced once."""
        end = now() + seconds
        for is_last in (False, True):
            # The keeper has kept the pause of its holds' leases.
            line = await pool.get(priority, end - now(), 0.0 if priority == RENEW else LONGEST_PAUSE)
            was_fresh = line.is_fresh
            try:
                line.start(pack(*commands), len(commands))
                replies: list[Any] = await line.wait(end - now())
            except Exception as error:
                pool.drop(line)
                if is_last or was_fresh or isinstance(error, TimeoutError):
                    raise
                continue
            except BaseException as error:
                self._abandon(pool, line, error)
                raise
            pool.put(line)
            return replies
        raise AssertionError

    async def ask(self, words: Words, key: bytes, seconds: float = RELEASE_TIME, *, again: bool = True) -> Any:
        """The reply to a command, from the node that serves this key. `again`: it is harmless to repeat."""
        self.enter()
        end = now() + seconds
        while True:
            pool = await self.router.pool(key, end - now())
            try:
                [reply] = await self._command(pool, REST, [words], max(min(end - now(), rules.LONGEST_SILENCE), 0.05))
                verdict = judge(reply)
                if verdict in (Verdict.YES, Verdict.NIL):
                    pool.succeeded()
                    return reply
                if verdict is Verdict.FATAL:
                    raise rules.fatal(reply, key)
                error = reply
            except Exception as raised:
                if not rules.is_transport(raised):
                    raise
                error = raised
            self._note(error, key, pool)
            if now() >= end or not (again or isinstance(error, NotSent) or judge(error) is Verdict.MOVED):
                raise error
            await self.io.sleep(pool.rest(RELEASE_TIME))

    # Renew

    async def _renew_all(self, grants: Sequence[Grant], pool: Pool) -> list[Any]:
        """Of each: True if it was renewed, False if it is gone, or what went wrong."""
        terms = grants[0].terms
        seconds = min(rules.silence(grant.lease) for grant in grants)
        seconds += pool.replicas_timeout if terms.replicas else 0.0
        sent, tokens = now(), [grant.token for grant in grants]
        commands = [grant.terms.renewal(grant.owner, grant.token, grant.lease) for grant in grants]
        try:
            replies = await self._command(pool, RENEW, commands, seconds)
        except Exception as error:
            if not isinstance(error, NotSent):
                for grant in grants:
                    grant.broke = True
            return [error] * len(grants)
        found = zip(grants, replies, tokens, strict=True)
        return [self._judge_renewal(grant, reply, sent, token) for grant, reply, token in found]

    def _judge_renewal(self, grant: Grant, reply: Any, sent: float, token: int) -> Any:
        verdict = judge(reply)
        if verdict is Verdict.NIL and token != grant.token:
            return NotSent("its token was raised meanwhile")
        if verdict is Verdict.YES:
            grant.renewed_until(max(grant.certain, sent + grant.lease * DRIFT))
            return True
        if verdict is Verdict.NIL or rules.code_of(reply) == "WRONGTYPE":
            return False
        return reply

    async def renew(self, grant: Grant, lease: float | None) -> None:
        """By hand, also with another length. Raises LockLostError."""
        self.must_hold(grant)
        if lease is not None:
            grant.lease = lease
            # It may end earlier now.
            grant.certain = min(grant.certain, now() + lease * DRIFT)
        pool = grant.pool or await self.router.pool(grant.terms.keys[0], 1.0)
        while True:
            [answer] = await self._renew_all([grant], pool)
            if answer is True:
                grant.keeper.add(grant)
                return
            if answer is False:
                self.lost(grant, LossReason.GONE)
            self.must_hold(grant)
            assert isinstance(answer, Exception)  # noqa: S101
            if not rules.is_transport(answer) and judge(answer) is Verdict.FATAL:
                raise rules.fatal(answer, grant.terms.name)
            await self._pause(answer, grant.terms, pool)
            pool = grant.pool or await self.router.pool(grant.terms.keys[0], 1.0)

    async def raise_token(self, grant: Grant, fence: int, seconds: float) -> bool:
        """Whether the server holds it under just this token now, for a lease. For several independent servers."""
        pool = await self.router.pool(grant.terms.keys[0], seconds)
        words = (*grant.terms.renewal(grant.owner, grant.token, grant.lease), b"FENCE", fence)
        sent = now()
        [reply] = await self._command(pool, RENEW, [words], seconds)
        if judge(reply) is not Verdict.YES:
            return False
        grant.token = int(reply)
        grant.renewed_until(sent + grant.lease * DRIFT - 0.002)
        return grant.token == fence

    def must_hold(self, grant: Grant) -> None:
        """Raises LockLostError if it is lost, by what is known here."""
        if grant.pid != os.getpid():
            raise LockLostError(grant.terms.name, grant.token, LossReason.FORKED)
        if grant.state is State.HELD and grant.remaining() <= 0:
            self.lost(grant, LossReason.EXPIRED)
        if grant.state is State.LOST:
            assert grant.reason is not None  # noqa: S101
            raise LockLostError(grant.terms.name, grant.token, grant.reason)

    async def check(self, grant: Grant) -> None:
        """Asks the server, and lengthens nothing."""
        self.must_hold(grant)
        for key in grant.terms.keys:
            try:
                info = await self.ask((b"LOCK.INFO", key, b"COUNT", 5000), key)
            except WrongTypeError:
                info = None
            if not rules.holds(info, grant.owner, grant.token):
                self.lost(grant, LossReason.GONE)
        self.must_hold(grant)

    def lost(self, grant: Grant, reason: LossReason) -> None:
        """A hold is lost: its holder is told once."""
        with self.mutex:
            if not grant.lose(reason):
                return
            self.grants.discard(grant)
        self.io.set(grant.event)
        self._tell("lost", grant.terms.name, grant.token, reason)
        if grant.listener is not None:
            grant.listener()

    def _tell(self, hook: str, *what: Any) -> None:
        try:
            getattr(self.hooks, hook)(*what)
        except Exception:
            logger.exception("a hook of the application failed: %s%r", hook, what)

    # Release

    async def release(self, grant: Grant, seconds: float = RELEASE_TIME) -> None:
        """Raises LockLostError if it had been lost. What cannot be done in time goes on in the background."""
        terms = grant.terms
        if grant.state is State.RELEASED:
            return
        if self.is_closed:
            self.must_hold(grant)
        self.enter()
        loss = None
        try:
            self.must_hold(grant)
        except LockLostError as error:
            if error.reason is LossReason.FORKED:
                raise
            loss = error
        with self.mutex:
            self.grants.discard(grant)
            if grant.state is State.HELD:
                grant.state = State.RELEASING
        try:
            is_released = await self._release(grant, now() + seconds)
        except BaseException as error:
            if isinstance(error, Exception) and not rules.is_transport(error):
                raise
            if grant.pool is not None:
                grant.pool.close()
                grant.state, grant.reason = State.LOST, LossReason.DISCONNECTED
                raise loss or LockLostError(terms.name, grant.token, grant.reason) from error
            # It goes on, for as long as the server may hold it.
            end = max(grant.certain, now()) + grant.lease * (1 - DRIFT)
            self.io.spawn(lambda: self._release_quietly(grant, end))
            if loss is not None and isinstance(error, Exception):
                raise loss from error
            raise
        if loss is not None:
            raise loss
        if not is_released:
            grant.state, grant.reason = State.LOST, LossReason.GONE
            self.io.set(grant.event)
            self._tell("lost", terms.name, grant.token, grant.reason)
            raise LockLostError(terms.name, grant.token, LossReason.GONE)
        self._tell("released", terms.name, grant.token, now() - grant.since)

    async def _release_quietly(self, grant: Grant, end: float) -> None:
        try:
            await self._release(grant, end)
        except Exception as error:
            logger.warning("lock %r: could not be released, it ends with its lease: %s", grant.terms.name, error)

    async def _release(self, grant: Grant, end: float) -> bool:
        """Whether this released it; else it had been lost."""
        terms = grant.terms
        while grant.state is not State.RELEASED:
            pool = grant.pool or await self.router.pool(terms.keys[0], max(end - now(), 0.05))
            error: Exception
            try:
                line = await pool.get(RELEASE, max(min(end - now(), terms.silence(0.0)), 0.05), terms.lease / 16)
            except Exception as raised:
                if not rules.is_transport(raised) or grant.pool is not None:
                    raise
                error = raised
            else:
                commands = [terms.release(grant.owner, grant.token)]
                if grant.broke and terms.owner is None:
                    # A stale ACQUIRE may be in the queue still.
                    commands.append(terms.withdrawal(grant.owner))
                grant.attempts += 1
                grant.first_release = grant.first_release or now()
                was_fresh = line.is_fresh
                try:
                    line.start(pack(*commands), len(commands))
                    replies = await line.wait(max(min(end - now(), terms.silence(0.0)), 0.05))
                except BaseException as raised:
                    self._abandon(pool, line, raised)
                    grant.broke = True
                    if not isinstance(raised, Exception) or not rules.is_transport(raised):
                        raise
                    error = raised
                    if not was_fresh and grant.attempts == 1 and not isinstance(raised, TimeoutError):
                        continue
                else:
                    if grant.pool is not None:
                        grant.pool.leave(line)
                        (grant.keeper.pool if grant.keeper else pool).adopt(line)
                    else:
                        pool.put(line)
                    verdict = grant.judge_release(replies[0])
                    if verdict is Verdict.YES or verdict is Verdict.NIL:
                        pool.succeeded()
                        if verdict is Verdict.YES and grant.state is State.RELEASING:
                            grant.state = State.RELEASED
                        return verdict is Verdict.YES
                    if verdict is Verdict.FATAL:
                        raise rules.fatal(replies[0], terms.name)
                    error = replies[0]
            if now() >= min(end, max(grant.certain, grant.first_release) + 1.0) or self.is_closed or grant.pool:
                raise error
            await self._pause(error, terms, pool)
        return True

    async def release_all(self, grants: Iterable[Grant], seconds: float) -> None:
        """Of what is held: without a repetition. Those who hold it are told that it is lost: closed."""
        end = now() + seconds
        by_pool: dict[Pool, list[Grant]] = {}
        for grant in grants:
            self.lost(grant, LossReason.CLOSED)
            try:
                pool = grant.pool or await self.router.pool(grant.terms.keys[0], max(end - now(), 0.0))
            except Exception as error:
                logger.warning("lock %r could not be released, it ends with its lease: %s", grant.terms.name, error)
                continue
            by_pool.setdefault(pool, []).append(grant)
        for pool, group in by_pool.items():
            for begin in range(0, len(group), BATCH):
                batch = group[begin : begin + BATCH]
                words = [one.terms.release(one.owner, one.token) for one in batch]
                try:
                    await self._command(pool, RELEASE, words, max(end - now(), 0.05))
                except Exception as error:
                    logger.warning("%d locks could not be released, they end with their leases: %s", len(words), error)

    async def close(self, seconds: float = EXIT_TIME) -> None:
        """Releases what is held, and closes the connections."""
        if self.is_closed or os.getpid() != self._pid:
            return
        with self.mutex:
            grants = list(self.grants)
        await self.release_all(grants, seconds)
        self.is_closed = True
        for pool in self.router.all():
            pool.close()
        for keeper in list(self._keepers.values()):
            keeper.stop()
        await self.io.drain()

    @property
    def is_of_this_process(self) -> bool:
        """Not of a parent."""
        return os.getpid() == self._pid


class _Keeper:
    """Renews the holds of one node when they are due, and tells of those whose time is over."""

    def __init__(self, engine: Engine, pool: Pool) -> None:
        self.engine = engine
        self.pool = pool
        self._due: list[tuple[float, int, Grant]] = []
        self._numbers = itertools.count()
        self._wake = engine.io.event()
        self._asleep_until = -math.inf
        self._is_stopped = False
        self._mutex = threading.Lock()

    def add(self, grant: Grant) -> None:
        """From any thread."""
        grant.keeper = self
        with self._mutex:
            grant.entry = (grant.due, next(self._numbers), grant)
            heapq.heappush(self._due, grant.entry)
            if len(self._due) > 2 * len(self.engine.grants) + 1024:
                # Most of them were released.
                self._due = [one for one in self._due if self._counts(one)]
                heapq.heapify(self._due)
            is_early = grant.due < self._asleep_until
        if is_early:
            self.engine.io.set(self._wake)

    def stop(self) -> None:
        """It ends."""
        self._is_stopped = True
        self.engine.io.set(self._wake)

    def _counts(self, entry: tuple[float, int, Grant]) -> bool:
        return entry[2].state is State.HELD and entry[2].entry is entry and entry[2].keeper is self

    async def run(self) -> None:
        """In a thread or task of its own."""
        engine = self.engine
        try:
            while not self._is_stopped:
                try:
                    await self._turn()
                except Exception:
                    logger.exception("renewals failed")
                    await engine.io.sleep(0.1)
        except asyncio.CancelledError:
            # The loop ends.
            if not self._is_stopped:
                engine._keepers.pop(self.pool, None)
                await engine.release_all([one for one in list(engine.grants) if one.keeper is self], EXIT_TIME)
            raise

    async def _turn(self) -> None:
        due, seconds = self._next()
        if due:
            try:
                await self._keep(due)
            except Exception:
                for grant in due:
                    self.add(grant)
                raise
        else:
            await self.engine.io.wait(self._wake, seconds)
        while self.engine.dropped:
            logger.warning("lock %r: its hold was dropped without a release", self.engine.dropped.popleft())

    def _next(self) -> tuple[list[Grant], float | None]:
        """What is due now, or how long to sleep."""
        due: list[Grant] = []
        with self._mutex:
            self._wake.clear()
            at = now()
            # What was released stays in its place until then: the next one need not wake this.
            while self._due and len(due) < BATCH and self._due[0][0] <= at:
                entry = heapq.heappop(self._due)
                if self._counts(entry):
                    due.append(entry[2])
            self._asleep_until = -math.inf if due else self._due[0][0] if self._due else math.inf
            seconds = min(self._asleep_until - at, LOOK_AGAIN) if self._due else None
        return due, seconds

    async def _keep(self, due: Sequence[Grant]) -> None:
        groups: dict[Any, list[Grant]] = {}
        for grant in due:
            if grant.certain <= now():
                self.engine.lost(grant, LossReason.EXPIRED)
                continue
            home = self.engine.router.known(grant.terms.keys[0])
            if grant.pool is None and home is not None and home is not self.pool:
                # Its slot is served by another node now.
                self.engine.keeper(home).add(grant)
                continue
            # A renewal that waits for replicas would hold up those behind it.
            groups.setdefault((grant.pool, grant if grant.terms.replicas else None), []).append(grant)
        rest = list(groups.items())
        while rest:
            (pool, _), group = rest.pop()
            work = functools.partial(self._renew, group, pool or self.pool)
            if not rest or not self.engine.io.spawn(work):
                await work()

    async def _renew(self, group: Sequence[Grant], pool: Pool) -> None:
        answers = await self.engine._renew_all(group, pool)
        for grant, answer in zip(group, answers, strict=True):
            self._take(grant, answer)

    def _take(self, grant: Grant, answer: Any) -> None:
        engine = self.engine
        if answer is False:
            engine.lost(grant, LossReason.GONE)
        elif grant.pool is not None and rules.is_transport(answer) and not isinstance(answer, NotSent):
            engine.lost(grant, LossReason.DISCONNECTED)
        elif answer is not True:
            engine._note(answer, grant.terms.keys[0], self.pool)
            grant.next_renewal = now() + self.pool.rest(grant.lease)
        if grant.state is State.HELD:
            self.add(grant)


class _One:
    """One server, or the primary that Sentinels name: new connections find it."""

    def __init__(self, engine: Engine) -> None:
        self._pool = engine.new_pool(None)

    async def pool(self, key: bytes, seconds: float) -> Pool:
        """The connections to the node that serves a key."""
        return self._pool

    def known(self, key: bytes) -> Pool | None:
        """The same, if it is known without a question."""
        return self._pool

    def all(self) -> list[Pool]:
        """All that were used."""
        return [self._pool]

    def redirected(self, error: Any, key: bytes, pool: Pool) -> Pool:
        """Where a redirect leads."""
        return pool

    def doubt(self, pool: Pool | None) -> None:
        """Something went wrong there: it may not be the primary any more."""


class _Cluster(_One):
    """The nodes of a cluster, by slots."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pools: dict[Address, Pool] = {}
        self._slots: dict[int, Address] = {}
        self._is_doubtful = True
        self._refreshing: Any = None
        self._refreshed = -math.inf

    def _at(self, address: Address) -> Pool:
        with self._engine.mutex:
            if address not in self._pools:
                self._pools[address] = self._engine.new_pool(address)
            return self._pools[address]

    async def pool(self, key: bytes, seconds: float) -> Pool:
        slot, end = rules.slot_of(key), now() + seconds
        while slot not in self._slots:
            done = await self._refresh()
            if not await self._engine.io.wait(done, max(end - now(), 0.0)) or now() >= end:
                raise NotSent("no node of the cluster said in time who serves the slot")
            if slot not in self._slots:
                await self._engine.io.sleep(min(0.1, max(end - now(), 0.0)))
        if self._is_doubtful and now() - self._refreshed > 0.1:
            # What is known is used meanwhile.
            await self._refresh()
        return self._at(self._slots[slot])

    def known(self, key: bytes) -> Pool | None:
        address = self._slots.get(rules.slot_of(key))
        return self._pools.get(address) if address else None

    def all(self) -> list[Pool]:
        return list(self._pools.values())

    def redirected(self, error: Any, key: bytes, pool: Pool) -> Pool:
        address = next((one for one, its in self._pools.items() if its is pool), ("", 0))
        host, _, port = str(error).split()[-1].rpartition(":")
        address = self._engine.source.remap((host or address[0], int(port)))
        if rules.code_of(error) == "MOVED":
            self._slots[rules.slot_of(key)] = address
            self._is_doubtful = True
        return self._at(address)

    def doubt(self, pool: Pool | None) -> None:
        # It is read again before the next request.
        self._is_doubtful = True

    async def _refresh(self) -> Any:
        """An event for when the map has been read again. One at a time."""
        with self._engine.mutex:
            if self._refreshing is not None:
                return self._refreshing
            done = self._refreshing = self._engine.io.event()
        if not self._engine.io.spawn(lambda: self._read(done)):
            await self._read(done)
        return done

    async def _read(self, done: Any) -> None:
        try:
            for address in dict.fromkeys([*self._pools, *self._engine.source.addresses]):
                try:
                    [reply] = await self._engine._command(self._at(address), REST, [(b"CLUSTER", b"SLOTS")], 1.0)
                except Exception as error:
                    logger.debug("%s:%d does not say who serves the slots: %s", *address, error)
                    continue
                if isinstance(reply, list) and reply:
                    self._take(reply, address)
                    return
        finally:
            self._refreshed = now()
            self._refreshing = None
            self._engine.io.set(done)

    def _take(self, reply: list[Any], asked: Address) -> None:
        slots: dict[int, Address] = {}
        for first, last, node, *_ in reply:
            host = node[0].decode() if node[0] else asked[0]
            address = self._engine.source.remap((host, node[1]))
            slots.update(dict.fromkeys(range(first, last + 1), address))
        self._slots = slots
        self._is_doubtful = False
