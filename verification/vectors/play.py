"""Plays the vectors of this folder to a driver. A fake server checks the requests, and sends the replies in the vector.

python3 play.py DRIVER-FOLDER [VECTOR ...]     README.md says what the lines of a vector mean
"""

import concurrent.futures
import itertools
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOON = 30
"""Timeout for everything that is expected, in seconds, on a busy machine."""
VERSION = {"protocol": [4, 4], "version": "0.4.0", "replicas-timeout": 1000}


class Mismatch(Exception):
    """The client differs from the vector."""


def pack(value):
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, str):
        data = value.encode()
        return b"$%d\r\n%s\r\n" % (len(data), data)
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(pack, value))
    if "error" in value:
        return b"-" + value["error"].encode() + b"\r\n"
    return pack([part for pair in value.items() for part in pair])


class Server:
    """A server that queues every request except those of a handshake."""

    def __init__(self, version):
        self.version, self.requests, self.is_over, self.sockets = version, queue.Queue(), False, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            self.sockets.append(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        stream = connection.makefile("rb")
        try:
            while head := stream.readline():
                lengths = range(int(head[1:]))
                words = [stream.read(int(stream.readline()[1:]) + 2)[:-2].decode() for _ in lengths]
                verb = words[0].upper()
                if verb == "LOCK.VERSION":
                    connection.sendall(pack(self.version))
                elif not verb.startswith("LOCK."):
                    connection.sendall(pack({"error": "ERR unknown command 'HELLO'"}) if verb == "HELLO" else b"+OK\r\n")
                elif self.is_over:
                    connection.sendall(pack(1))
                else:
                    self.requests.put((time.monotonic(), connection, words))
        except (OSError, ValueError):
            pass


class Play:
    def __init__(self, folder, command, head):
        self.server = Server(head.get("version", VERSION))
        self.names, self.connections, self.last, self.held_back = {}, {}, None, []
        # When this player last acted, and a time no later than when the previous request was sent.
        self.acted = self.not_sent_before = time.monotonic()
        self.numbers, self.calls, self.ended, self.losses, self.lines = itertools.count(1), {}, {}, {}, queue.Queue()
        pipe = subprocess.PIPE
        self.driver = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        threading.Thread(target=self.listen, daemon=True).start()
        self.call({"call": "open", "url": f"redis://127.0.0.1:{self.server.listener.getsockname()[1]}/"})
        # Some drivers build their program first.
        self.hear(lambda: 1 in self.ended, "open", 300)

    def listen(self):
        for line in self.driver.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def call(self, step):
        number = next(self.numbers)
        self.calls[f"{step['call']} {step.get('hold', '')}".strip()] = number
        self.driver.stdin.write(json.dumps({"id": number, **step}) + "\n")

    def hear(self, is_there, what, seconds=SOON):
        end = time.monotonic() + seconds
        while not is_there():
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                raise Mismatch(f"{what}: not within {seconds} s") from None
            if line is None:
                raise Mismatch(f"{what}: the driver has ended")
            if "lost" in line:
                self.losses[line["lost"]] = line
            else:
                self.ended[line["id"]] = line

    def ends(self, step):
        number = self.calls[step["ends"]]
        self.hear(lambda: number in self.ended, step["ends"])
        self.compare(self.ended[number], step, step["ends"])

    def expect_loss(self, step):
        self.hear(lambda: step["lost"] in self.losses, f"loss of {step['lost']}")
        self.compare(self.losses[step["lost"]], step, f"loss of {step['lost']}")

    def compare(self, line, step, what):
        for field in ("outcome", "reason", "fence"):
            if field in step and str(line.get(field)) not in str(step[field]).split("|"):
                raise Mismatch(f"{what}: {field} is {line.get(field)}, not {step[field]}: {line}")
        for name in step.get("names", ()):
            if name not in line.get("text", ""):
                raise Mismatch(f"{what}: {line.get('text')!r} does not name {name!r}")

    def reads(self, step):
        what = " ".join(step["reads"])
        try:
            at, connection, words = self.server.requests.get(timeout=SOON)
        except queue.Empty:
            while not self.lines.empty():
                self.losses[len(self.losses)] = self.lines.get()
            said = list(self.ended.values())[1:] + list(self.losses.values())
            raise Mismatch(f"{what}: not sent within {SOON} s; the driver said {said}") from None
        said = " ".join(words)
        after = step.get("after", 0) / 1000
        if at - self.not_sent_before < after:
            waited = (at - self.not_sent_before) * 1000
            raise Mismatch(f"{said}: {waited:.0f} ms after the previous request, not {step['after']}")
        # A busy machine may have read this one late.
        self.not_sent_before = min(at, max(self.acted, self.not_sent_before + after))
        expected = step["reads"]
        if len(words) < len(expected) or not all(map(self.fits, words, expected)):
            raise Mismatch(f"{said}: not {what}")
        self.options(words[len(expected) :], step.get("options", {}), said)
        name = step.get("over")
        if name in self.connections and self.connections[name] is not connection:
            raise Mismatch(f"{said}: not over connection {name}")
        if name and name not in self.connections and connection in self.connections.values():
            raise Mismatch(f"{said}: over a connection that is in use")
        self.last = connection
        if name:
            self.connections[name] = connection

    def fits(self, word, expected):
        if not expected.startswith("$"):
            return word == expected
        if expected not in self.names and word in self.names.values():
            raise Mismatch(f"{expected} equals another name: {word}")
        return self.names.setdefault(expected, word) == word

    def options(self, words, expected, said):
        left, words = dict(expected), iter(words)
        for name in words:
            if name not in left:
                raise Mismatch(f"{said}: unexpected option {name}")
            value = left.pop(name)
            if value is None:
                continue
            number = int(next(words))
            if value == "any":
                continue
            least, most = value if isinstance(value, list) else (value, value)
            if not least <= number <= most:
                raise Mismatch(f"{said}: {name} {number}, not {value}")
        if left and not all(isinstance(value, str) for value in left.values()):
            raise Mismatch(f"{said}: without {', '.join(left)}")

    def fill(self, value):
        if isinstance(value, str):
            return self.names.get(value, value)
        if isinstance(value, list):
            return [self.fill(one) for one in value]
        return {name: self.fill(one) for name, one in value.items()} if isinstance(value, dict) else value

    def step(self, step):
        of = self.connections.get(step.get("over"), self.last)
        if step.keys() & {"call", "answers", "cuts"}:
            self.acted = time.monotonic()
        if "call" in step:
            self.call(step)
        elif "reads" in step:
            self.reads(step)
        elif "answers" in step:
            of.sendall(pack(self.fill(step["answers"])))
        elif "cuts" in step:
            of.shutdown(socket.SHUT_RDWR)
        elif "waits" in step:
            time.sleep(step["waits"] / 1000)
        elif "quiet" in step:
            try:
                words = self.server.requests.get(timeout=step["quiet"] / 1000)[2]
            except queue.Empty:
                return
            raise Mismatch(f"{' '.join(words)}: no request was expected")
        elif "ends" in step:
            self.ends(step)
        elif "lost" in step:
            self.expect_loss(step)
        else:
            raise ValueError(f"unknown step {step}")

    def close(self):
        self.server.is_over = True
        self.driver.stdin.close()
        try:
            self.driver.wait(SOON)
        except subprocess.TimeoutExpired:
            self.driver.kill()
        self.driver.wait()
        self.server.listener.close()
        for one in self.server.sockets:
            one.close()


def manifest(folder):
    """The command, the profile, the missing features, and the known failures. Parses this much of YAML without a library."""
    text = (folder / "driver.yaml").read_text()
    command = json.loads(re.search(r"^command: (.*)$", text, re.MULTILINE)[1])
    lacks = re.search(r"^lacks:\n((?:  .*\n)*)", text, re.MULTILINE)
    profile = re.search(r"^profile: (.*)$", text, re.MULTILINE)[1]
    command = [word.replace("{python}", sys.executable) for word in command]
    fails = re.findall(r"^  vectors/([\w-]+): (.*)$", text, re.MULTILINE)
    return command, profile, re.findall(r"^  ([\w-]+):", lacks[1], re.MULTILINE) if lacks else [], dict(fails)


def run(folder, file):
    """None: passed. Otherwise the mismatch, or in brackets why the vector was left out."""
    head, *steps = map(json.loads, file.read_text().splitlines())
    command, profile, lacks, fails = manifest(folder)
    if head["format"] != 1:
        return "its format is not 1"
    missing = set(head.get("needs", ())) & set(lacks)
    if missing or head.get("profile", profile) != profile:
        return f"(left out: the client has no {', '.join(missing) or head['profile']})"
    wrong = played(Play(folder, command, head), steps)
    if file.stem in fails:
        return f"(failed, as known: {fails[file.stem]})" if wrong else "passed, but the manifest lists it as failing"
    return wrong


def played(play, steps):
    try:
        for number, step in enumerate(steps, 2):
            try:
                play.step(step)
            except Mismatch as wrong:
                return f"line {number}: {wrong}"
    finally:
        play.close()
    return None


def main():
    folder, chosen = Path(sys.argv[1]).resolve(), sys.argv[2:]
    files = [file for file in sorted(HERE.glob("*.jsonl")) if not chosen or file.stem in chosen]
    failed, began = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = {threads.submit(run, folder, file): file for file in files}
        for done in concurrent.futures.as_completed(results):
            said = done.result()
            failed += said is not None and not said.startswith("(")
            print(f"{folder.name}: {results[done].stem}: {said or 'passed'}", flush=True)
    print(f"{folder.name}: {len(files)} vectors in {time.monotonic() - began:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
