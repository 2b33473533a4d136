"""redis-py's own tests of its Lock, as modules. clients/python/run-tests fetches them from its source distribution."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import redis

POLLS = "counts the sleeps of polling; nothing here polls"
NO_EXPIRY = "wants a key without expiry; a watched lock has a lease that the server renews"


def load(path, **conftest):
    """The module at this path of redis-py's source distribution. `conftest`: what it imports from its conftest."""
    folder = os.environ.get("REDIS_PY_SOURCE")
    if not folder:
        pytest.skip("REDIS_PY_SOURCE is not set: run-tests fetches redis-py's tests", allow_module_level=True)
    package = "redis_py_" + path.replace("/", "_").removesuffix(".py")
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = []
    sys.modules[f"{package}.conftest"] = types.ModuleType("conftest")
    vars(sys.modules[f"{package}.conftest"]).update(conftest)
    spec = importlib.util.spec_from_file_location(f"{package}.tests", Path(folder, path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def left_out(reason):
    """A skipped test, in the place of one of redis-py's."""

    @pytest.mark.skip(reason=reason)
    def test(self):
        raise AssertionError("this is left out")

    return test


def owner(fields):
    """The owner, which redis-py's tests read as the token. They expect one at most."""
    owners = [field for field in fields if not field.startswith(b"#")]
    return owners[0] if owners else None


def is_hash(error):
    return isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)
