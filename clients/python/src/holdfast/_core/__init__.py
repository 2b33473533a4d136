"""What a client of Holdfast decides, without sockets, threads and clock: `clients/core` in Python.

A `core.Core` stands for one client at one server. A *shell* (threads, asyncio) tells it each thing that happens, with
the time, and carries out what it says, in its order. Same inputs, same outputs: the core in Rust writes scripts of
steps, and `tests/test_core.py` plays them to this one. `clients/core/README.md` says what a shell has to do.

`pair` knows the connections, `claim` what is asked for or held, `core` puts the two together.
"""
