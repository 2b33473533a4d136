"""What is peculiar to redis-py and the same for both of its kinds of client."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import redis.connection
from redis import ConnectionPool
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)

from ._requests import Request, pack

# Until 5.2 a pool had to be told the command.
_NAMED = inspect.signature(ConnectionPool.get_connection).parameters["command_name"].default is inspect.Parameter.empty
POOL_ARGUMENTS = ("LOCK",) if _NAMED else ()

# That of a client with a cache; from redis-py 5.1 on.
_CACHING: tuple[type[Any], ...] = tuple(filter(None, [getattr(redis.connection, "CacheProxyConnection", None)]))

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
    if limit is not None:
        ours["socket_connect_timeout"] = limit
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


def connected(pool: Any) -> Any:
    """A connection of a pool; one that redis-py closed while it was made is broken like any other."""
    try:
        return pool.get_connection(*POOL_ARGUMENTS)
    except ResponseError:
        raise
    except BaseException as error:
        if (instead := broken(error)) is not None:
            raise instead from error
        raise


def say(connection: Any, request: Request) -> None:
    """Sends a request over a blocking connection."""
    if isinstance(connection, _CACHING):
        # From what it sends it knows whether it may keep the reply. Of a packed one it would take the command before.
        connection.send_command(*request)
    else:
        connection.send_packed_command([pack(request)])


def let_go(descriptor: int) -> None:
    """Lets go of a connection that belongs to the parent of a fork, without a word to the server.

    The number stays taken, so that whoever still holds it here closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
