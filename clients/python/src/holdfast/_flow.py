"""What is asked, and in which order: written once for threads and for asyncio.

A flow is a generator. It yields what its `Home` returns for each step that may take time: a value when the home is
blocking, an awaitable when it is not, and the runner hands the value (or throws the error) back in. Nothing in here
knows which of the two it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Callable, NamedTuple, Protocol, TypeVar

from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from . import _requests as requests
from ._book import Book
from ._clock import now
from ._hold import Answer, Hold, Wake
from ._requests import WAITING, Request, Terms, code, lock_error
from ._session import SessionState
from .errors import LockError, LockLost, WrongType

logger = logging.getLogger("holdfast")

T = TypeVar("T")
Flow = Generator[Any, Any, T]

# What may be better a moment later, when the server is back or the cluster has found its new shape.
TEMPORARY = (
    ConnectionError,
    TimeoutError,
    ClusterDownError,
    TryAgainError,
    ReadOnlyError,
    RedisClusterException,
)
# How often a request is sent on before its error is the caller's: over the pauses, some four seconds.
_REDIRECTIONS = 12
# For how many seconds an answer is waited for where the caller has given no time.
PATIENCE = 5.0
# The same for one who waits as long as it takes, be it among a thousand others who ask at the same time.
_CROWD = 60.0
# The server ends a wait by its own clock. A client that hears nothing for this long after that gives up.
_GRACE = 2.0
# For how long a session lives on that something can't be taken back from.
_TAKE_BACK = 10.0
# How long it may take until the reason of a loss is heard: it is told in another connection than the reply.
_REASON = 0.5


# How many requests of a client are under way to a server at once: a thousand tasks need no thousand connections.
UNDER_WAY = 32
# How many go in one write, and have no answer yet.
_UNANSWERED = 256


class Node(NamedTuple):
    """Where a request goes: a server and its session, by way of a gate, and whether to say ASKING first."""

    server: Any
    session: SessionState
    gate: Any
    asking: bool


class Waitable(Protocol):
    """A hold that waits for its answer, or several."""

    def wait(self, wake: Wake) -> bool:
        """Will call `wake` when there is an answer. False: there is one already."""


class Home(Protocol):
    """The I/O of one client. What may take time returns a step, to be yielded."""

    book: Book
    # It did not answer in time, and is asked in the background until it does.
    suspect: bool

    def find(self, key: bytes, redirection: AskError | None, seconds: float) -> Any:
        """Step: the Node that serves a key, with an open session. TimeoutError: not within this time."""

    def send(self, node: Node, request: Request, seconds: float) -> Any:
        """Step: the reply, and how often the request was sent. TimeoutError: none within this time."""

    def send_all(self, node: Node, batch: Sequence[Request], seconds: float) -> Any:
        """Step: the reply to each, a ResponseError too. They go in one write, once. TimeoutError: as for `send`."""

    def learn(self, error: Exception, seconds: float) -> Any:
        """Step: looks again who serves what, if that takes no longer. True: another try may go elsewhere."""

    def post(self, key: bytes, request: Callable[[SessionState], Request]) -> Any:
        """Step: sends a request and does not wait for the reply. What goes wrong is told by `collect`."""

    def collect(self, posted: Any, seconds: float) -> Any:
        """Step: the Reply to what was posted, for which it waits so long."""

    def drop(self, posted: Any) -> None:
        """Nobody will collect it."""

    def disconnect(self) -> Any:
        """Step: closes the connections over which nobody asks right now."""

    def outcome(self, hold: Waitable, seconds: float) -> Any:
        """Step: returns when the hold has an answer, or the time is over."""

    def pause(self, seconds: float) -> Any:
        """Step."""

    def end(self, session: SessionState) -> None:
        """A session is of no use any more."""

    def start(self, hold: Hold | None, flow: Flow[None]) -> None:
        """Runs a flow in the background, for a hold that was given up or for many."""


class Part(NamedTuple):
    """A hold, and where it is."""

    home: Home
    hold: Hold


class Reply(NamedTuple):
    """What came back, and whether the request may have been heard more than once."""

    value: Any
    session: SessionState
    repeated: bool


def ask(
    home: Home,
    terms: Terms,
    request: Callable[[SessionState], Request],
    seconds: float | None = None,
    hold: Hold | None = None,
) -> Flow[Reply]:
    """Sends a request to where its keys are served, on behalf of the session there. Ends within this time.

    `hold` is told if it may have been heard although nobody knows.
    """
    until = now() + (PATIENCE if seconds is None else seconds)
    redirection: AskError | None = None
    repeated = False
    last: Exception = ConnectionError("nothing was sent")
    for pause in itertools.islice(pauses(0.002), _REDIRECTIONS):
        try:
            node = yield from _find(home, terms.keys[0], redirection, until)
            redirection = None
            value, sent = yield home.send(node, request(node.session), until - now())
            return Reply(value, node.session, repeated or sent > 1)
        except MovedError as error:
            last = error
            yield home.learn(error, until - now())
        except AskError as error:
            last = redirection = error
        except ResponseError as error:
            last = error
            if code(error) == "NOSESSION":
                home.end(node.session)
            elif not isinstance(error, (ClusterDownError, TryAgainError)) and not requests.is_confirming(error):
                raise lock_error(str(error), terms.name) or error from None
            yield home.pause(pause)
        except (ConnectionError, TimeoutError) as error:
            last, repeated = error, True
            if hold is not None:
                hold.unsure = True
            if now() >= until or not (yield home.learn(error, until - now())):
                raise
            yield home.pause(pause)
        if now() >= until:
            break
    raise last


def _find(home: Home, key: bytes, redirection: AskError | None, until: float) -> Flow[Node]:
    try:
        node: Node = yield home.find(key, redirection, until - now())
    except ConnectionError:
        # A session whose opening was cut off says nothing about the next one.
        node = yield home.find(key, redirection, until - now())
    return node


def acquire(home: Home, hold: Hold, wait: float) -> Flow[bool]:
    """Takes the lock, waiting for at most `wait` seconds. Whatever happens, it ends a moment after that."""
    until = now() + wait
    end = until + (_GRACE if wait else PATIENCE)
    waits = pauses()
    placed = False
    try:
        hold.home = home
        home.book.enter(hold)
        while True:
            left = until - now() if placed else wait
            try:
                yield from _request(home, hold, max(left, 0), min(end - now(), _CROWD))
            except TEMPORARY:
                # It has left the queue with its session. It is worth another one for as long as there is time.
                if not placed or left <= 0:
                    raise
                yield home.pause(min(next(waits), left))
                continue
            placed = True
            # What became of it, nobody knows before it is answered.
            hold.unsure = hold.answer is None or hold.answer is Answer.AGAIN
            if hold.answer is None:
                yield home.outcome(hold, end - now())
            if hold.answer is Answer.GRANTED:
                return True
            if hold.answer is Answer.REFUSED:
                hold.over()
                home.book.leave(hold)
                return False
            if hold.answer is None:
                give_up(home, hold)
                return False
            if isinstance(hold.answer, LockError):
                raise hold.answer
            if hold.session is not None and hold.session.ended:
                # It is asked for again. A hold that comes too late is lost; a wait only waits.
                yield home.outcome(hold.session.carried, max(until - now(), 0))
    except (LockError, ResponseError) as error:
        if isinstance(hold.answer, LockError) or not (hold.unsure or isinstance(error, TEMPORARY)):
            # An answer, and the first: there is nothing to take back.
            hold.over()
            home.book.leave(hold)
        else:
            give_up(home, hold)
        raise
    except BaseException:
        give_up(home, hold)
        raise


def _request(home: Home, hold: Hold, wait: float, seconds: float) -> Flow[None]:
    """One request for the lock; the answer is the hold's, if there is one yet."""

    def request(session: SessionState) -> Request:
        hold.ask(session)
        # Another session may have had it in the queue: it keeps its place.
        waited = hold.asked - hold.queued if hold.unsure and session.takes_waited else 0
        return requests.acquire(hold.terms, hold.owner, wait, session.id, waited)

    reply: Reply = yield from ask(home, hold.terms, request, seconds, hold)
    if reply.value is None:
        hold.ended(Answer.REFUSED)
    elif reply.value != WAITING:
        hold.granted(reply.value, hold.asked, hold.terms.lease)
    elif reply.session.ended:
        hold.ended(Answer.AGAIN)


def give_up(home: Home, hold: Hold) -> None:
    """Takes back what may have been asked for or granted, in the background."""
    hold.over()
    if hold.session is None:
        # Nothing was ever sent.
        home.book.leave(hold)
    else:
        home.start(hold, _cancel(home, hold, hold.session))


def abandon(holds: Iterable[Hold]) -> None:
    """Takes back, in the background, what nobody can reach any more."""
    for hold in holds:
        if hold.held:
            hold.over()
            parts: Sequence[Part] = getattr(hold, "parts", None) or [Part(hold.home, hold)]
            for part in parts:
                give_up(part.home, part.hold)


def close(home: Home) -> Flow[None]:
    """Gives back and gives up all there is, as far as the server answers. Then its sessions may end."""
    asked = [(hold, hold.session) for hold in home.book.holds if hold.session is not None]
    for hold, _ in asked:
        # First they hear of it: the next one has it as soon as the server does.
        hold.closed()
        home.book.leave(hold)
    for hold, session in asked:
        try:
            yield from _cancel_once(home, hold, session)
        except TEMPORARY as error:
            logger.debug("the rest runs out: %s", error)
            return
        except RedisError as error:
            logger.debug("it runs out: %s", error)


def _cancel(home: Home, hold: Hold, session: SessionState) -> Flow[None]:
    """Takes back what may have been asked for or granted: says so until it is answered, or ends the session.

    With the session, all that it stands for is no more: nothing is granted or renewed on behalf of it. What was granted
    before then runs out.
    """
    until = now() + _TAKE_BACK
    try:
        for pause in pauses():
            try:
                yield from _cancel_once(home, hold, session)
                return
            except WrongType:
                # Another command has overwritten it.
                return
            except RedisError as error:
                logger.debug("not taken back yet: %s", error)
                if now() >= until:
                    if session.ended:
                        return
                    home.end(session)
                    until = now() + hold.longest
            yield home.pause(pause)
    finally:
        home.book.leave(hold)


def _cancel_once(home: Home, hold: Hold, session: SessionState) -> Flow[None]:
    if not session.ended:
        node: Node = yield home.find(hold.terms.keys[0], None, PATIENCE)
        try:
            yield home.send(node, requests.cancel(hold.terms, hold.owner, session.id), PATIENCE)
            return
        except ResponseError as error:
            if code(error) != "NOSESSION" and not isinstance(error, AskError):
                raise
    # With its session went the wait, and every request that may still be on its way; what was granted did not. Where
    # the key has moved to another server, that one has no request by this session: there is only a hold to release.
    yield from ask(home, hold.terms, lambda _: requests.abandon(hold.terms, hold.owner))


def release(home: Home, hold: Hold) -> Flow[None]:
    """Gives the hold back. Raises LockLost if it was lost before."""
    if hold.session is None and hold.error is not None:
        # It was given back when its session was closed.
        raise hold.error
    hold.over()
    token = hold.token or 0
    try:
        reply: Reply = yield from ask(home, hold.terms, lambda _: requests.release(hold.terms, hold.owner, token))
        gone = not requests.held(reply.value)
        if gone and not reply.repeated and not hold.unheard and hold.error is None and hold.heard:
            hold.answer = None
            yield home.outcome(hold, _REASON)
    except WrongType as error:
        home.book.leave(hold)
        raise hold.lose("changed") from error
    except BaseException:
        hold.unheard = True
        give_up(home, hold)
        raise
    home.book.leave(hold)
    if hold.error is not None:
        raise hold.error
    # One that may have been sent twice does not find what the first one gave back.
    if gone and not reply.repeated and not hold.unheard:
        raise hold.lose("expired" if hold.left() <= 0 else "unknown")


def renew(home: Home, hold: Hold, lease: int | None) -> Flow[None]:
    """Begins the lease anew, and ties the hold to the session of today. Raises LockLost if it is not there any more."""
    token = hold.token or 0

    def request(session: SessionState) -> Request:
        hold.ask(session)
        return requests.renew(hold.terms, hold.owner, token, lease, session.id)

    hold.answer = Answer.AGAIN
    while hold.answer is Answer.AGAIN:
        try:
            reply: Reply = yield from ask(home, hold.terms, request)
        except WrongType as error:
            raise hold.lose("changed") from error
        if reply.value == WAITING:
            yield home.outcome(hold, min(hold.left(), PATIENCE))
            if hold.answer is None:
                raise TimeoutError(f"no answer within {PATIENCE} s")
        elif requests.held(reply.value):
            hold.granted(token, hold.asked, lease)
        elif hold.held:
            hold.lose("expired" if hold.left() <= 0 else "disconnected" if hold.in_doubt else "unknown")
    if isinstance(hold.answer, LockError):
        # Too few replicas have confirmed, say. Nothing of it is taken back.
        hold.shortened(lease)
        raise hold.answer
    if hold.error is not None:
        raise hold.error


def ask_whether_held(parts: Iterable[Part]) -> Flow[None]:
    """Asks the servers of those that could be lost by now."""
    for part in parts:
        if not part.hold.doubtful:
            continue
        try:
            yield from renew(part.home, part.hold, part.hold.terms.lease)
        except LockLost as lost:
            logger.debug("the server says so: %s", lost)
        except RedisError as error:
            logger.debug("nobody knows better: %s", error)
            if part.hold.doubtful:
                part.hold.lose("disconnected")


def carry(home: Home, session: SessionState, holds: list[Hold]) -> Flow[None]:
    """Takes holds along from a session, each until it has an answer or could be lost by now."""
    try:
        for pause in pauses():
            # After a stall, those who have the least time left must not wait for the others.
            holds.sort(key=Hold.left)
            try:
                yield from _renew_all(home, session, holds)
            except RedisError as error:
                logger.debug("not taken along yet: %s", error)
            for hold in holds:
                hold.lapse()
            holds = [hold for hold in holds if hold.in_doubt]
            if not holds:
                return
            yield home.pause(pause)
    finally:
        session.carried.done()


def _renew_all(home: Home, session: SessionState, holds: list[Hold]) -> Flow[None]:
    """One try for each: first all that can be in few writes, then, one after the other, what needs more than that."""
    until = now() + PATIENCE
    servers: dict[SessionState, tuple[Node, list[Hold]]] = {}
    for hold in holds:
        node = yield from _find(home, hold.terms.keys[0], None, until)
        servers.setdefault(node.session, (node, []))[1].append(hold)
    left: list[Hold] = []
    for node, there in servers.values():
        for first in range(0, len(there), _UNANSWERED):
            left += yield from _renew_some(home, node, there[first : first + _UNANSWERED])
    # Those below may be confirmed late: the waits need not wait for that.
    session.carried.done()
    for hold in left:
        try:
            yield from renew(home, hold, hold.rest)
        except TEMPORARY:
            raise
        except RedisError as error:
            logger.debug("not taken along: %s", error)


def _renew_some(home: Home, node: Node, holds: list[Hold]) -> Flow[list[Hold]]:
    """Renews holds in one write. Those whose renewal was not granted at once."""
    for hold in holds:
        hold.ask(node.session)
    leases = [hold.rest for hold in holds]
    batch = [
        requests.renew(hold.terms, hold.owner, hold.token or 0, lease, node.session.id)
        for hold, lease in zip(holds, leases)
    ]
    asked = now()
    replies = yield home.send_all(node, batch, PATIENCE)
    left = []
    for hold, lease, reply in zip(holds, leases, replies):
        if isinstance(reply, ResponseError) or reply == WAITING or not requests.held(reply):
            left.append(hold)
        else:
            # It may have been asked for once more by its holder meanwhile.
            hold.granted(hold.token or 0, min(asked, hold.asked), lease)
    return left


def owners(home: Home, terms: Terms) -> Flow[list[list[bytes]]]:
    """Who holds, for each key."""
    found = []
    for key in terms.keys:
        found.append((yield from _owners(home, Terms(terms.name, (key,)))))
    return found


def _owners(home: Home, terms: Terms) -> Flow[list[bytes]]:
    reply: Reply = yield from ask(home, terms, lambda _: (b"LOCK.INFO", terms.keys[0]))
    return requests.owners(reply.value)


def pauses(first: float = 0.02) -> Iterator[float]:
    """How long to wait before each further try: up to a second."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 2, 1.0)
