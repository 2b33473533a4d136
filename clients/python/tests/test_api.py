"""What is promised of names, signatures and the package."""

import importlib.metadata
import inspect
from pathlib import Path

import pytest
import redis.asyncio.lock
import redis.lock

import holdfast
import holdfast.asyncio

BOTH = pytest.mark.parametrize(
    ("ours", "theirs"),
    [(holdfast.Lock, redis.lock.Lock), (holdfast.asyncio.Lock, redis.asyncio.lock.Lock)],
    ids=["threads", "asyncio"],
)


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def test_threads_and_asyncio_have_the_same_names():
    assert holdfast.asyncio.__all__ == holdfast.__all__
    for name in holdfast.__all__:
        one, other = getattr(holdfast, name), getattr(holdfast.asyncio, name)
        if not inspect.isclass(one) or issubclass(one, Exception):
            continue
        assert inspect.signature(one) == inspect.signature(other), name
        # A block that is stopped, there is only with tasks.
        assert public(other) - public(one) <= {"while_held", "call_when_lost"}, name
        assert public(one) <= public(other), name


@BOTH
def test_a_lock_is_made_as_that_of_redis_py(ours, theirs):
    theirs = list(inspect.signature(theirs).parameters.values())[2:]
    ours = list(inspect.signature(ours).parameters.values())[2:]
    assert [(one.name, one.default) for one in ours[: len(theirs)]] == [(one.name, one.default) for one in theirs]
    assert {one.name: one.default for one in ours if one.kind is one.KEYWORD_ONLY} == {
        "limit": 1,
        "replicas": 0,
        "ephemeral": False,
        "on_lost": None,
        "watched": None,
        "keep": None,
        "keep_uses": 1,
    }


@BOTH
def test_a_lock_takes_what_that_of_redis_py_takes(ours, theirs):
    for name in ("acquire", "release", "extend", "reacquire", "locked", "owned"):
        known = inspect.signature(getattr(ours, name)).parameters
        wanted = inspect.signature(getattr(theirs, name)).parameters
        assert [one for one in known if one in wanted] == list(wanted), name


def test_errors_are_those_of_redis_py():
    assert holdfast.LockError is redis.exceptions.LockError
    assert holdfast.LockNotOwnedError is redis.exceptions.LockNotOwnedError
    errors = [one for one in vars(holdfast).values() if inspect.isclass(one) and issubclass(one, Exception)]
    assert all(issubclass(one, redis.exceptions.LockError) for one in errors)
    assert issubclass(holdfast.LockLost, redis.exceptions.LockNotOwnedError)


def test_the_package_is_typed_and_needs_only_redis_py():
    assert Path(holdfast.__file__).with_name("py.typed").exists()
    assert importlib.metadata.requires("holdfast") == ["redis>=5"]
