"""Requests as bytes, and replies out of bytes (RESP 2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

# How deep arrays may stand in one another.
_DEEPEST = 16
_INTEGER, _SIMPLE, _ERROR, _BULK, _ARRAY = b":+-$*"


class Failure(NamedTuple):
    """An error reply: its code and words."""

    text: str


class Nonsense(Exception):
    """Bytes that are no reply."""


# An integer, bytes, None, a simple string as a `str`, a Failure, or a list of these.
Reply = Any


@functools.lru_cache(1024)
def _packed(word: bytes) -> bytes:
    """Most are the same in all requests."""
    return b"$%d\r\n%s\r\n" % (len(word), word)


def encode(words: Sequence[bytes]) -> bytes:
    """A request as it is sent."""
    return b"*%d\r\n%s" % (len(words), b"".join(map(_packed, words)))


def take(data: bytes, at: int, deepest: int = _DEEPEST) -> tuple[Reply, int] | None:
    """The reply that begins at this place, and where it ends; None if it is not complete."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, text, end = data[at], data[at + 1 : end], end + 2
    if kind == _INTEGER:
        return _number(text), end
    if kind == _SIMPLE:
        return text.decode(errors="replace"), end
    if kind == _ERROR:
        return Failure(text.decode(errors="replace")), end
    length = _number(text)
    if length == -1 and kind in (_BULK, _ARRAY):
        return None, end
    if length < 0:
        raise Nonsense
    if kind == _BULK:
        last = end + length
        if len(data) < last + 2:
            return None
        if data[last : last + 2] != b"\r\n":
            raise Nonsense
        return data[end:last], last + 2
    if kind != _ARRAY or deepest == 0:
        raise Nonsense
    elements = []
    for _ in range(length):
        element = take(data, end, deepest - 1)
        if element is None:
            return None
        elements.append(element[0])
        end = element[1]
    return elements, end


def _number(text: bytes) -> int:
    if len(text) > 20 or not (text.isdigit() or (text[:1] in (b"+", b"-") and text[1:].isdigit())):
        raise Nonsense
    return int(text)
