"""Requests to several servers at once, of which some may not answer. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

from redis.exceptions import ConnectionError, RedisError, ResponseError

from . import _flow as flows
from ._clock import now
from ._flow import TEMPORARY, Flow, Home, Part, Reply
from ._hold import Hold
from ._requests import Request, code, lock_error
from ._session import SessionState

logger = logging.getLogger("holdfast")


def majority(servers: int) -> int:
    """How many are enough, so that any two majorities share one."""
    return servers // 2 + 1


class Vote(NamedTuple):
    """What one server said: a reply, or the error instead."""

    part: Part
    reply: Any


Words = Callable[[SessionState], Request]


def ask_all(parts: Iterable[Part], request: Callable[[Hold], Words], seconds: float) -> Flow[list[Vote]]:
    """Asks all of them at once. Who does not answer in time is suspect."""
    posted: list[tuple[Part, Any]] = []
    votes = []
    try:
        for part in parts:
            posted.append((part, (yield part.home.post(part.hold.terms.keys[0], request(part.hold)))))
        # With threads, one that must be connected to first may have taken as long; the others are not to suffer for it.
        end = now() + seconds
        while posted:
            part, post = posted[0]
            try:
                reply: Reply = yield part.home.collect(post, max(end - now(), 0))
                votes.append(Vote(part, reply.value))
            except RedisError as error:
                votes.append(Vote(part, error))
                yield from _failed(part, error, seconds)
            posted.pop(0)
    finally:
        for part, post in posted:
            part.home.drop(post)
    return votes


def _failed(part: Part, error: RedisError, seconds: float) -> Flow[None]:
    """A server that can't answer is asked in the background until it can."""
    home, session = part.home, part.hold.session
    if session is not None and isinstance(error, ResponseError) and code(error) == "NOSESSION":
        home.end(session)
    elif isinstance(error, TEMPORARY) and not home.suspect:
        home.suspect = True
        home.start(None, _probe(home, seconds))
        yield home.disconnect()


def _probe(home: Home, seconds: float) -> Flow[None]:
    for pause in flows.pauses():
        yield home.pause(pause)
        try:
            yield home.collect((yield home.post(b"", lambda _: (b"PING",))), seconds)
        except TEMPORARY:
            continue
        except RedisError as error:
            logger.debug("an answer, though an error: %s", error)
        home.suspect = False
        return


def raise_refusal(votes: Iterable[Vote]) -> None:
    """An error that has to do with the request and not with the server is the caller's."""
    for vote in votes:
        error = vote.reply
        about_us = isinstance(error, ResponseError) and not isinstance(error, TEMPORARY)
        if about_us and code(error) not in ("NOSESSION", "CANCELLED"):
            raise lock_error(str(error), vote.part.hold.terms.name) or error


def enough(homes: Sequence[Home], patience: float) -> Flow[None]:
    """Raises ConnectionError if no majority of the servers can be asked, also not a moment later."""
    end = now() + patience
    while True:
        away = sum(home.suspect for home in homes)
        if len(homes) - away >= majority(len(homes)):
            return
        if now() >= end:
            raise ConnectionError(f"{away} of {len(homes)} servers do not answer: no majority is left")
        yield homes[0].pause(patience / 10)
