"""Steps of a core as text, as `clients/core/src/text.rs` has them."""

import re

from holdfast._core.core import Core
from holdfast._core.resp import Failure
from holdfast._core.step import FOREVER, NO_WAIT, End, Ended, Lost, Move, Open, Send, Settings, Terms

OPTIONS = ("wait", "lease", "watchdog", "ephemeral", "replicas", "limit", "kept")
ESCAPES = {"0": b"", "r": b"\r", "n": b"\n", "t": b"\t"}
SPECIAL = {0x0D: "\\r", 0x0A: "\\n", 0x09: "\\t", 0x5C: "\\\\", 0x27: "\\'", 0x22: '\\"'}


def played(script, step=Core.step):
    """Plays a script, and writes it down again with what the core really does."""
    core = Core(Settings())
    lines = []
    for line in script.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        if line.startswith("settings"):
            core = Core(Settings(*map(int, line.split()[2::2])))
        elif line and not line.startswith("#"):
            at, what, *said = read(line)
            told = None if what is Core.wake else core.wakes_at
            step(core, at, what, *said)
            while core.outputs:
                lines.append(f"> {written(core.outputs.popleft())}")
            if core.wakes_at not in (None, told):
                lines.append(f"> wake {core.wakes_at}")
    return "\n".join(lines) + "\n"


def read(line):
    """When it happens, what, and what is told of it."""
    at, what, *rest = line.split()
    if what == "wake":
        return int(at), Core.wake
    number = int(rest[0])
    if what in EVENTS:
        return int(at), EVENTS[what], number
    if what == "received":
        return int(at), Core.received, number, rest[1], unescaped(rest[2])
    named = dict(zip(rest[1::2], rest[2::2]))
    if what == "close":
        return int(at), Core.close, number, int(named["within"])
    if what == "request":
        return int(at), Core.request, number, tuple(map(unescaped, rest[3:])), int(rest[2])
    if what == "release":
        return int(at), Core.release, number, int(rest[2]), int(rest[4])
    if what == "check":
        return int(at), Core.check, number, int(rest[2]), int(rest[4])
    if what == "renew":
        lease, fence = (None if name not in named else int(named[name]) for name in ("lease", "fence"))
        return int(at), Core.renew, number, int(rest[2]), lease, fence, int(rest[4])
    if what == "keep":
        return int(at), Core.keep, number, int(named["for"])
    if what == "use":
        return int(at), Core.use, number, int(rest[2]), int(rest[4])
    assert what == "acquire", line
    return int(at), Core.acquire, number, *acquired(rest)


EVENTS = {
    "opened": Core.opened,
    "ended": Core.pair_ended,
    "unreachable": Core.unreachable,
    "leave": Core.leave,
    "drop": Core.drop,
}


def acquired(rest):
    words = rest[4:]
    end = next((place for place, word in enumerate(words) if word in OPTIONS), len(words))
    options = words[end:]

    def value(name, otherwise):
        return int(options[options.index(name) + 1]) if name in options else otherwise

    wait = FOREVER if options[:2] == ["wait", "forever"] else value("wait", NO_WAIT)
    terms = Terms(
        value("lease", None),
        "watchdog" in options,
        "ephemeral" in options,
        value("replicas", 0),
        value("limit", 1),
        "kept" in options,
    )
    return unescaped(rest[2]), tuple(map(unescaped, words[:end])), terms, wait


def unescaped(word):
    def byte(found):
        if found[1] is not None:
            return chr(int(found[1], 16))
        return ESCAPES.get(found[2], found[2].encode()).decode("latin-1")

    return re.sub(r"\\(?:x(..)|(.))", byte, word).encode("latin-1")


def escaped(word):
    if not word:
        return "\\0"
    return "".join(SPECIAL.get(byte) or (chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}") for byte in word)


def written(output):
    """What the core does."""
    if isinstance(output, Open):
        return f"open {output.pair}"
    if isinstance(output, End):
        return f"end {output.pair}"
    if isinstance(output, Send):
        return " ".join([f"send {output.pair} {output.channel}", *map(escaped, output.words)])
    if isinstance(output, Lost):
        return f"lost {output.hold} {output.why}"
    if isinstance(output, Move):
        return f"moved {output.moved.id} {output.error}"
    assert isinstance(output, Ended)
    kind, detail = output.outcome
    if kind == "answer":
        detail = reply(detail)
    return f"ended {output.call} {kind}" + ("" if detail is None else f" {detail}")


def reply(value):
    if value is None:
        return "null"
    if isinstance(value, Failure):
        return f"-{value.text}"
    if isinstance(value, str):
        return f"+{value}"
    if isinstance(value, bytes):
        return f'"{escaped(value)}"'
    if isinstance(value, list):
        return "[" + " ".join(map(reply, value)) + "]"
    return str(value)
