"""What is peculiar to redis-py and the same for both of its kinds of client."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from redis import ConnectionPool
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)

# Until 5.2 a pool had to be told the command.
_NAMED = inspect.signature(ConnectionPool.get_connection).parameters["command_name"].default is inspect.Parameter.empty
POOL_ARGUMENTS = ("LOCK",) if _NAMED else ()

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


def session_settings(
    settings: Mapping[str, Any], no_retry: Any, *, cluster: bool = False, limit: float | None = None
) -> dict[str, Any]:
    """The settings of a connection of our own, made of those of the application's connections.

    The library repeats nothing on it and does not connect again by itself: this is done here, in the open.
    """
    ours = {name: value for name, value in settings.items() if name not in _OF_THE_POOL}
    if cluster:
        # The cluster's own, which only says READONLY for reading from replicas.
        ours.pop("redis_connect_func", None)
    ours.update(
        retry=no_retry,
        health_check_interval=0,
        socket_timeout=limit or settings.get("socket_timeout") or _HANDSHAKE,
    )
    # A socket with a path takes none.
    if "path" not in settings:
        ours["socket_connect_timeout"] = limit or settings.get("socket_connect_timeout") or _HANDSHAKE
    return ours


def broken(error: BaseException) -> ConnectionError | None:
    """The error of a request whose connection redis-py has closed under it, and which it tells in words of its own.

    It does so when a cluster's client reads the topology anew. None: it is another error.
    """
    if isinstance(error, (ConnectionError, TimeoutError, ClusterDownError, RedisClusterException)):
        return None
    if isinstance(error, (AttributeError, RuntimeError, ValueError, RedisError)):
        return ConnectionError(f"the connection was closed meanwhile: {error}")
    return None


def again(retry: Any, failures: int) -> float | None:
    """After how many seconds redis-py repeats a request that failed so often. None: no more."""
    # It has no other way to ask, and sleeps for longer than the caller has time.
    most = 0 if retry is None else retry._retries
    return None if 0 <= most < failures else float(retry._backoff.compute(failures))


def let_go(descriptor: int) -> None:
    """Lets go of a connection that belongs to the parent of a fork, without a word to the server.

    The number stays taken, so that whoever still holds it here closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
