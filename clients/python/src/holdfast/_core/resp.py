"""Requests as bytes, and replies out of bytes (RESP 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# How deep arrays may stand in one another.
_DEEPEST = 16


class Failure(NamedTuple):
    """An error reply: its code and words."""

    text: str


class Nonsense(Exception):
    """Bytes that are no reply."""


# An integer, bytes, None, a simple string as a `str`, a Failure, or a list of these.
Reply = Any


def encode(words: Sequence[bytes]) -> bytes:
    """A request as it is sent."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def take(data: bytes, at: int) -> tuple[Reply, int] | None:
    """The reply that begins at this place, and where it ends; None if it is not complete."""
    return _parse(data, at, _DEEPEST)


def _parse(data: bytes, at: int, deepest: int) -> tuple[Reply, int] | None:
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, text, end = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b":":
        return _number(text), end
    if kind == b"+":
        return text.decode(errors="replace"), end
    if kind == b"-":
        return Failure(text.decode(errors="replace")), end
    if kind not in (b"$", b"*"):
        raise Nonsense
    length = _number(text)
    if length == -1:
        return None, end
    if length < 0:
        raise Nonsense
    if kind == b"$":
        if len(data) < end + length + 2:
            return None
        if data[end + length : end + length + 2] != b"\r\n":
            raise Nonsense
        return data[end : end + length], end + length + 2
    if deepest == 0:
        raise Nonsense
    elements = []
    for _ in range(length):
        element = _parse(data, end, deepest - 1)
        if element is None:
            return None
        elements.append(element[0])
        end = element[1]
    return elements, end


def _number(text: bytes) -> int:
    if not text.lstrip(b"+-").isdigit() or len(text) > 20:
        raise Nonsense
    try:
        return int(text)
    except ValueError:
        raise Nonsense from None
