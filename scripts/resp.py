"""A server with the module on a port that the system chooses, and connections to it: what scripts here need of Redis."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Refused(Exception):
    """An error that the server replied."""


class Connection:
    """A connection that sends a command and reads its reply."""

    text = staticmethod(bytes.decode)  # what becomes of a reply's bytes

    def __init__(self, port: int, limit: float = 60) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=limit)
        self.file = self.socket.makefile("rb")

    def __call__(self, line: str) -> object:
        self.send(line)
        return self.read()

    def send(self, line: str) -> None:
        self.send_words(*line.split())

    def send_words(self, *words: object) -> None:
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        request = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
        self.socket.sendall(request)

    def read(self) -> object:
        line = self.file.readline()
        if not line:
            raise ConnectionError("the server has closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise Refused(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if int(rest) < 0 else self.text(self.file.read(int(rest) + 2)[:-2])
        if kind == b"*":
            return None if int(rest) < 0 else [self.read() for _ in range(int(rest))]
        return self.text(rest)

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def until(what: str, seconds: float, holds: Callable[[], object]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def module() -> str:
    """The path of the module: built, if HOLDFAST_MODULE does not name one."""
    return subprocess.run([ROOT / "scripts/build"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class Server:
    """A server with the module; it ends with the `with` block."""

    def __init__(self, *settings: str, program: list[str] | None = None) -> None:
        self.settings = settings
        self.program = program or [os.environ.get("HOLDFAST_SERVER", "redis-server")]

    def __enter__(self) -> Server:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        self.port = free_port()
        self.start()
        return self

    def start(self) -> None:
        """Starts it, or starts it again after it was killed."""
        common = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", "", "--loadmodule", module()]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*self.program, *common, *self.settings], stdout=log, stderr=log)
        try:
            until("the server answers", 20, self.answers)
        except BaseException:
            self.__exit__()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"the server has ended:\n{(self.folder / 'log').read_text()}")
        try:
            return self.connect()("PING") == "PONG"
        except (OSError, Refused):
            return False

    def connect(self) -> Connection:
        return Connection(self.port)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
