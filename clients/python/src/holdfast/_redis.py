"""What is peculiar to redis-py and the same for both of its kinds of client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable

from redis._parsers.base import BaseParser
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError

from ._core.step import Outcome
from .errors import Deadlock, LockError, LockLost, NoReplicas, NotHeld, NotLoaded, WrongType

# What a server says of locks.
_ERRORS: dict[str, Callable[[str, Any], LockError]] = {
    "DEADLOCK": Deadlock,
    "NOREPLICAS": NoReplicas,
    "UNCONFIRMED": NoReplicas,
    "WRONGTYPE": WrongType,
}

# A handshake that takes longer has failed, where the application set no limit of its own.
_HANDSHAKE = 5.0
# What a pool hands to its connections so that they report to it, or repeat commands.
_OF_THE_POOL = (
    "event_dispatcher",
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
    "retry_on_error",
    "retry_on_timeout",
)


def own_settings(settings: Mapping[str, Any], no_retry: Any, *, cluster: bool, limit: float | None) -> dict[str, Any]:
    """The settings of a connection of our own, made of those of the application's connections.

    The library only connects it and logs in: replies are read here, in the older protocol.
    """
    ours = {name: value for name, value in settings.items() if name not in _OF_THE_POOL}
    if cluster:
        # The cluster's own, which only says READONLY for reading from replicas.
        ours.pop("redis_connect_func", None)
    ours.update(
        retry=no_retry,
        health_check_interval=0,
        protocol=2,
        socket_timeout=limit or settings.get("socket_timeout") or _HANDSHAKE,
    )
    # A socket with a path takes none.
    if "path" not in settings:
        ours["socket_connect_timeout"] = limit or settings.get("socket_connect_timeout") or _HANDSHAKE
    return ours


def is_final(retry: Any, failures: int, error: Exception) -> bool:
    """Whether redis-py would not try again after so many failures, of which this is the last."""
    if isinstance(error, AuthenticationError) or not isinstance(error, (ConnectionError, TimeoutError, OSError)):
        return True
    # It has no other way to ask.
    most = 0 if retry is None else retry._retries
    return 0 <= most < failures


def refused(words: str, name: Any) -> RedisError:
    """The error that a server has said, as redis-py has it, or as one about locks."""
    kind = _ERRORS.get(words.partition(" ")[0])
    if kind is not None:
        return kind(f"lock {name!r}: {words}", name)
    if "unknown command" in words.lower():
        return NotLoaded(
            f"the module Holdfast is not loaded in this server, which says: {words}. Load it by MODULE LOAD"
            " /path/to/libholdfast.so, or for good by a line loadmodule /path/to/libholdfast.so in redis.conf"
        )
    error: RedisError = BaseParser.parse_error(words)  # type: ignore[no-untyped-call]
    return error


def failed(outcome: Outcome | None, failure: Exception | None, name: Any, owner: bytes, token: int | None) -> Exception:
    """The error that says how a call has ended; `failure`: what had gone wrong at its server."""
    kind, detail = ("unanswered", "") if outcome is None else (outcome.kind, str(outcome.detail))
    if kind == "refused":
        return refused(detail, name)
    if kind == "lost":
        return LockLost(name, owner, token, detail)
    if kind == "not held":
        return NotHeld(f"lock {name!r} of owner {owner!r} is not held", name)
    if kind == "closed":
        return LockError(f"lock {name!r}: its session was closed")
    if failure is not None and outcome is not None:
        return failure.with_traceback(None)
    return TimeoutError(f"lock {name!r}: no answer in time")


def let_go(descriptor: int) -> None:
    """Lets go of a connection that belongs to the parent of a fork, without a word to the server.

    The number stays taken, so that whoever still holds it here closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
