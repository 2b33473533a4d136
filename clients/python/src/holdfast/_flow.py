"""What is asked, and in which order: written once for threads and for asyncio.

A flow is a generator. It yields what its `Home` returns for each step that may take time: a value when the home is
blocking, an awaitable when it is not, and the runner hands the value (or throws the error) back in. Nothing in here
knows which of the two it is.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Callable, TypeVar

from redis.exceptions import ConnectionError

from ._core.core import Core
from ._core.step import FOREVER, NO_WAIT, Outcome
from ._hold import Hold
from ._owners import OWNERS
from ._redis import refused
from ._shell import HOPS, PATIENCE, Home, Node, Pending, elsewhere

T = TypeVar("T")
Flow = Generator[Any, Any, T]

# The longest wait that the server takes, in seconds: ten years.
_LONGEST = 315_360_000


def wait_of(seconds: float) -> int:
    """A wait as the core takes it."""
    if seconds <= 0:
        return NO_WAIT
    return FOREVER if seconds == math.inf else max(1, math.ceil(min(seconds, _LONGEST) * 1000))


def ask_for(home: Home, node: Node, hold: Hold, wait: float, what: Callable[..., None] = Core.acquire) -> Pending:
    """Asks for a lock, and does not wait for the answer. `what`: may tell the core more in the same step."""
    hold.home, hold.node = home, node
    pending = Pending(hold.id, node, hold)
    home.begin(pending, what, b"", hold.keys, hold.terms, wait_of(wait), hold.owner)
    return pending


def ask(hold: Hold, what: Callable[..., None], *said: Any) -> Pending:
    """Asks something about a hold, where it is."""
    home, node = hold.place
    pending = Pending(OWNERS.number(), node, hold)
    home.begin(pending, what, hold.id, *said)
    return pending


def look(home: Home, node: Node, words: tuple[bytes, ...], within: int = PATIENCE) -> Pending:
    """Sends a request that only looks."""
    pending = Pending(OWNERS.number(), node, None)
    home.begin(pending, Core.request, words, within)
    return pending


def _answer(home: Home, pending: Pending, seconds: float | None = None) -> Flow[Outcome | None]:
    """Waits for the outcome of a call; whoever is interrupted wants it no more."""
    try:
        outcome: Outcome | None = yield home.wait(pending, seconds)
    except BaseException:
        home.drop(pending.node, pending.id)
        raise
    return outcome


def acquire(home: Home, hold: Hold, wait: float) -> Flow[bool]:
    """Takes the lock, waiting for at most `wait` seconds. Whatever happens, it ends a moment after that."""
    try:
        node = yield home.find(hold.keys[0])
        pending = ask_for(home, node, hold, wait)
        outcome: Outcome | None = yield home.wait(pending, None if wait > 0 else PATIENCE / 1000)
    except BaseException:
        give_up(hold)
        raise
    if outcome is not None and outcome.kind == "granted":
        return True
    give_up(hold)
    if outcome is not None and outcome.kind == "not granted":
        return False
    raise pending.error(hold.name, hold.owner)


def give_up(hold: Hold) -> None:
    """Takes back what may have been asked for or granted, in the background."""
    hold.over()
    if hold.home is not None and hold.node is not None:
        hold.home.drop(hold.node, hold.id)


def abandon(holds: Iterable[Hold]) -> None:
    """Takes back, in the background, what nobody can reach any more."""
    for hold in holds:
        if hold.held and hold.kept is not None:
            hold.over()
            hold.kept.line.home.leave(hold.kept.line, hold)
        elif hold.held:
            for part in hold.parts or [hold]:
                give_up(part)
            hold.over()


def release(hold: Hold, within: int = PATIENCE) -> Flow[None]:
    """Gives the hold back. Raises LockLost if it was lost before."""
    hold.raise_if_lost()
    hold.over()
    try:
        pending = ask(hold, Core.release, within)
        outcome: Outcome = yield hold.place[0].wait(pending, None)
    except BaseException:
        hold.unheard = True
        give_up(hold)
        raise
    if outcome.kind == "lost":
        raise hold.lose(outcome.detail)
    # An earlier one that ended by an error may have given it back.
    if outcome.kind == "released" or (outcome.kind == "not held" and hold.unheard):
        return
    if outcome.kind == "not held":
        hold.raise_if_lost()
        # The first of two may have given it back: whether it was lost before, nobody can say.
        if not pending.was_repeated:
            raise hold.lose("unknown")
    hold.unheard = True
    raise pending.error(hold.name, hold.owner, hold.token)


def renew(hold: Hold, lease: int | None, within: int = PATIENCE) -> Flow[None]:
    """Begins the lease anew. Raises LockLost if it is not there any more."""
    hold.raise_if_lost()
    pending = ask(hold, Core.renew, lease, None, within)
    outcome = yield from _answer(hold.place[0], pending)
    if outcome is not None and outcome.kind == "renewed":
        return
    hold.raise_if_lost()
    if outcome is not None and outcome.kind in ("lost", "not held"):
        raise hold.lose(outcome.detail or "unknown")
    raise pending.error(hold.name, hold.owner, hold.token)


def ask_whether_held(holds: Iterable[Hold]) -> Flow[None]:
    """Asks the servers of those that could be lost by now. No answer in a moment is a loss."""
    for hold in holds:
        if hold.doubtful:
            pending = ask(hold, Core.check, min(hold.lease // 4, PATIENCE))
            outcome = yield from _answer(hold.place[0], pending)
            if hold.held and (outcome is None or outcome.kind != "held"):
                hold.lose("disconnected")


def request(home: Home, key: bytes, words: Sequence[bytes], name: Any) -> Flow[Any]:
    """Sends a request that only looks to whoever serves this key, and follows where that sends it."""
    node: Node = yield home.find(key)
    for _ in range(HOPS):
        pending = look(home, node, tuple(words))
        outcome = yield from _answer(home, pending)
        if outcome is None or outcome.kind != "answer":
            raise pending.error(name)
        other = elsewhere(home, pending)
        if other is None:
            if hasattr(outcome.detail, "text"):
                raise refused(outcome.detail.text, name)
            return outcome.detail
        node = home.node(other.address)
        if other.asking:
            # It goes before the request.
            look(home, node, (b"ASKING",))
    raise ConnectionError("every server names another one")


def owners(home: Home, keys: Sequence[bytes], name: Any) -> Flow[list[list[bytes]]]:
    """Who holds, for each key."""
    found = []
    for key in keys:
        info = yield from request(home, key, (b"LOCK.INFO", key), name)
        found.append(owners_in(info))
    return found


def owners_in(info: Any) -> list[bytes]:
    """Who holds a lock, from the reply to LOCK.INFO: a flat array of names and values."""
    if info is None:
        return []
    return [_map(holder)[b"owner"] for holder in _map(info)[b"holders"]]


def _map(reply: list[Any]) -> dict[bytes, Any]:
    return dict(zip(reply[::2], reply[1::2]))


def pauses(first: float = 0.02) -> Iterable[float]:
    """How long to wait before each further try: up to a second."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 2, 1.0)
