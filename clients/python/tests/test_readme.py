"""The examples of the documents run, each as a program of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio

from servers import Server, close_all

HERE = Path(__file__).parent.parent
EXAMPLES = [
    pytest.param(source, id=f"{file}-{number}")
    for file in ("README.md", "../../docs/clients/python.md", "../../README.md")
    for number, source in enumerate(re.findall(r"```python\n(.*?)```", (HERE / file).read_text(), re.DOTALL), 1)
]


@pytest.fixture(scope="module")
def three_servers():
    servers = [Server() for _ in range(3)]
    yield servers
    close_all(servers)


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(own_server, three_servers, source):
    # The default port belongs to the reader.
    program = source.replace(".Redis()", f".Redis(port={own_server.port})")
    program = program.replace(".Redis(db=", f".Redis(port={own_server.port}, db=")
    for number, one in enumerate(three_servers, 1):
        program = program.replace(f'.Redis(host="127.0.0.{number}")', f'.Redis(host="127.0.0.1", port={one.port})')
    assert program != source
    if not hasattr(redis.asyncio.Redis, "aclose"):
        program = program.replace(".aclose()", ".close()")
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_documents_have_examples():
    assert len(EXAMPLES) >= 8
