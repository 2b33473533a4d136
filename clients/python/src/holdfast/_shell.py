"""What both kinds of client share: a core for each server, who waits for which call, and who has which hold.

A shell moves bytes and wakes those who wait; what is to be done, the core says (`_core`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from redis.exceptions import ConnectionError, RedisError

from ._clock import millis
from ._core.core import Core
from ._core.resp import Failure, encode
from ._core.step import REQUESTS, SESSION, End, Ended, Lost, Move, Open, Outcome, Send, Settings
from ._hold import Hold
from ._order import is_cluster, slot_of
from ._owners import OWNERS
from ._redis import failed, let_go

if TYPE_CHECKING:
    from ._line import Line

logger = logging.getLogger("holdfast")

# How long an answer is waited for where the caller has given no time, in milliseconds.
PATIENCE = 5_000
# How much longer than its time a wait is left to a server whose answer is on its way, or to a machine that is busy.
_GRACE = 1_000
# So many holds are not worth looking at.
_MANY = 64
# So often a request follows when it is sent elsewhere.
HOPS = 8

# Host and port of a cluster's node; None: the one server.
Address = Optional[tuple[str, int]]


class Node:
    """One server."""

    # The pair of connections that there is, and the number of that which is being opened.
    link: Link | None = None
    opening: int | None = None
    # What went wrong last.
    failure: Exception | None = None
    # How often in a row no connection could be had.
    failures = 0

    def __init__(self, address: Address, core: Core) -> None:
        self.address = address
        self.core = core


class Link:
    """A pair of connections, whose wires the two kinds make."""

    # With threads: whether a caller reads the requests' connection.
    is_read = False

    def __init__(self, pair: int, session: Any, requests: Any) -> None:
        self.pair = pair
        self.requests = requests
        self.wires = {SESSION: session, REQUESTS: requests}

    def flush(self) -> None:
        """Sends what there is."""
        for wire in self.wires.values():
            if wire.out:
                wire.flush()

    def close(self) -> None:
        """Ends both connections."""
        for wire in self.wires.values():
            wire.close()

    def let_go(self) -> None:
        """Leaves them to the parent of a fork."""
        for wire in self.wires.values():
            if wire.descriptor >= 0:
                let_go(wire.descriptor)


def nobody() -> None:
    """Nobody is to be woken but who waits for the call."""


class Waiter:
    """Somebody who waits for something."""

    outcome: Outcome | None = None

    def __init__(self, wake: Callable[[], object] = nobody) -> None:
        self.wake = wake


class Pending(Waiter):
    """A call that somebody waits for."""

    # What had gone wrong at its server.
    failure: Exception | None = None

    def __init__(self, id_: int, node: Node, hold: Hold | None, wake: Callable[[], object] = nobody) -> None:
        super().__init__(wake)
        self.id = id_
        self.node = node
        # What an acquisition becomes.
        self.hold = hold
        self._first, self._pairs = node, node.core.pairs

    def follow(self) -> None:
        """Goes where the hold is that it is about: that may have moved to another server in this instant."""
        if self.hold is not None and self.hold.node is not None:
            self.node = self.hold.node

    @property
    def was_repeated(self) -> bool:
        """Whether it may have been sent more than once: over another pair, or to another server."""
        return self._first is not self.node or self.node.core.pairs > self._pairs

    def error(self, name: Any, owner: bytes = b"", token: int | None = None) -> Exception:
        """The error that says how it has ended."""
        return failed(self.outcome, self.failure, name, owner, token)


class Home:
    """All of one client. Keeps no reference to it, so that it can end with it. The two kinds add the I/O."""

    def __init__(self, anchor: Any) -> None:
        self.closed = False
        # With threads, whoever takes a step has it.
        self.mutex: Any = contextlib.nullcontext()
        self.nodes: dict[Address, Node] = {}
        self.calls: dict[int, Pending] = {}
        self.holds: dict[int, Hold] = {}
        # Of kept locks, by keys and terms; and when to look for those that are kept no more.
        self.lines: weakref.WeakValueDictionary[Any, Line] = weakref.WeakValueDictionary()
        self._many_holds = _MANY
        self._anchor = weakref.ref(anchor)
        self._in_cluster = is_cluster(anchor)
        # Of a cluster: what servers have said of slots since it was asked last; and whether it is to be asked again.
        self._moved: dict[int, Address] = {}
        self._in_doubt = False
        # A step has begun and not ended: an exception from outside ended it.
        self.stepping: Node | None = None

    # What the two kinds do each in their own way. A step is a value that is there, or an awaitable.

    # Step: the Node that serves a key.
    find: Callable[[bytes], Any]
    # Begins a call: what the core is to be told.
    begin: Callable[..., None]
    # Step: the Outcome of a call; None if there is none within so many seconds.
    wait: Callable[[Pending, float | None], Any]
    # Step: nothing. It ends when this one is woken, who is told by others of the program, or after so many seconds.
    wait_for: Callable[[Waiter, float | None], Any]
    # Step: nothing, for so many seconds.
    pause: Callable[[float], Any]
    # Nobody wants this call's answer any more, or this hold. In the background.
    drop: Callable[[Node, int], None]
    # This one wants no more of a kept lock. In the background.
    leave: Callable[[Line, Hold], None]
    # Runs a flow in the background.
    start: Callable[[Generator[Any, Any, None]], None]
    # Opens a pair in the background, then says so by `connected`.
    _open: Callable[[Node, int], None]
    # It may be to be woken earlier than it was.
    _set_timer: Callable[[Node], None]
    # Calls it then, or a little later, where steps are taken.
    call_at: Callable[[int, Callable[[], object]], None]

    # Its server did not answer a vote of a RedLock, and is asked in the background until it does.
    suspect = False

    # Servers.

    @property
    def anchor(self) -> Any:
        """The pool, or the client of a cluster."""
        anchor = self._anchor()
        if anchor is None:
            raise ReferenceError("the client of this lock is gone")
        return anchor

    def node(self, address: Address) -> Node:
        """The server at this address."""
        node = self.nodes.get(address)
        if node is None:
            # Of several who are the first to ask, one makes it.
            with self.mutex:
                node = self._node(address)
        return node

    def _node(self, address: Address) -> Node:
        """The same, for who has the mutex."""
        node = self.nodes.get(address)
        if node is None:
            settings = Settings(grace=_GRACE, seed=random.getrandbits(64))
            node = self.nodes[address] = Node(address, Core(settings, in_cluster=self._in_cluster))
        return node

    def address_of(self, key: bytes) -> Address:
        """Who serves this key, as far as is known."""
        if not self._in_cluster:
            return None
        slot = slot_of(key)
        if slot in self._moved:
            return self._moved[slot]
        node = self.anchor.get_node_from_key(key)
        return None if node is None else (str(node.host), int(node.port))

    def _redirected(self, error: str, asked: Address) -> Address:
        """Whom a server named instead: `MOVED slot host:port`, or `ASK`. None if that makes no sense here."""
        code, _, rest = error.partition(" ")
        slot, _, place = rest.partition(" ")
        host, _, port = place.rpartition(":")
        if code not in ("MOVED", "ASK") or not slot.isdigit() or not port.isdigit() or asked is None:
            return None
        # An empty host is the one that said so.
        address = (host or asked[0], int(port))
        if code == "MOVED":
            self._moved[int(slot)] = address
        return address

    def settings_of(self, address: Address) -> tuple[Any, dict[str, Any]]:
        """Class and settings of a connection to this server."""
        anchor = self.anchor
        if not self._in_cluster or address is None:
            return anchor.connection_class, dict(anchor.connection_kwargs)
        return cluster_settings(anchor, address)

    # Steps. With threads, whoever takes one has the mutex.

    def step(self, node: Node, what: Callable[..., None], *said: Any) -> None:
        """Tells a core what happens, and does what it says."""
        self.stepping = node
        core = node.core
        wakes_at = core.wakes_at
        core.step(millis(), what, *said)
        moves = self._perform(node)
        if core.wakes_at != wakes_at or what is Core.wake:
            self._set_timer(node)
        self.stepping = None
        for to, move in moves:
            self.step(to, Core.take_over, move.moved)

    def _perform(self, node: Node) -> list[tuple[Node, Move]]:
        """Does what its core says. What has to move, another one is to take."""
        outputs, has_sent = node.core.outputs, False
        moves: list[tuple[Node, Move]] = []
        while outputs:
            # What is interrupted is done once more: all but sending can be done twice, and then the pair ends.
            output = outputs[0]
            if isinstance(output, Send):
                if node.link is not None:
                    node.link.wires[output.channel].out += encode(output.words)
                    has_sent = True
            elif isinstance(output, Ended):
                self._ended(node, output.call, output.outcome)
            elif isinstance(output, Lost):
                hold = self.holds.get(output.hold)
                if hold is not None:
                    hold.lose(output.why)
                    if hold.kept is not None:
                        hold.kept.line.lost(hold)
                self.holds.pop(output.hold, None)
            elif isinstance(output, Open):
                node.opening = output.pair
                self._open(node, output.pair)
            elif isinstance(output, End):
                link, node.link, node.opening = node.link, None, None
                if link is not None:
                    link.close()
                self._moved.clear()
                self._in_doubt = True
            else:
                moves.append((self._move(node, output), output))
            outputs.popleft()
        if has_sent and node.link is not None:
            node.link.flush()
        return moves

    def _ended(self, node: Node, call: int, outcome: Outcome) -> None:
        pending = self.calls.get(call)
        if pending is None:
            return
        if pending.hold is not None and outcome.kind in ("granted", "renewed"):
            if outcome.kind == "granted":
                self.holds[pending.hold.id] = pending.hold
            pending.hold.granted(outcome.detail)
        elif pending.hold is not None and outcome.kind in ("released", "not held"):
            self.holds.pop(pending.hold.id, None)
        pending.outcome, pending.failure = outcome, node.failure
        self.calls.pop(call, None)
        pending.wake()

    def _move(self, node: Node, output: Move) -> Node:
        """Who has this now. If nobody knows, it is asked for once more where it was."""
        moved = output.moved
        address = self._redirected(output.error, node.address)
        if address is None:
            try:
                address = self.address_of(moved.claim.keys[0])
            except (RedisError, ReferenceError) as error:
                logger.debug("nobody knows who serves it: %s", error)
        to = node if address is None else self._node(address)
        for number, _ in moved.calls:
            if number in self.calls:
                self.calls[number].node = to
        hold = self.holds.get(moved.id)
        if hold is None and moved.id in self.calls:
            hold = self.calls[moved.id].hold
        if hold is not None:
            hold.node = to
        return to

    def recover(self) -> None:
        """An exception from outside ended a step: its core goes on as another one, which knows what this one knew."""
        node, self.stepping = self.stepping, None
        if node is None:
            return
        logger.debug("a step was interrupted")
        moves = self._perform(node)
        core, node.core = node.core, Core(node.core.settings, in_cluster=self._in_cluster)
        if node.link is not None:
            link, node.link = node.link, None
            link.close()
        node.opening = None
        self.stepping = node
        node.core.succeed(millis(), core)
        self.step(node, Core.wake)
        for to, move in moves:
            self.step(to, Core.take_over, move.moved)

    def connected(self, node: Node, pair: int, link: Any, failure: Exception | None, *, is_final: bool) -> None:
        """A pair is there, or can't be had; `is_final`: who has not been served yet is told so."""
        if node.opening == pair and self._in_cluster:
            self._reroute(node)
        if node.opening != pair:
            if link is not None:
                link.close()
            return
        node.opening, node.failure, node.link = None, failure, link
        if link is not None:
            node.failures = 0
            self.step(node, Core.opened, pair)
        else:
            node.failures += 1
            self.step(node, Core.unreachable if is_final else Core.pair_ended, pair)

    def _reroute(self, node: Node) -> None:
        """Lets go what other nodes of a cluster have by now."""
        for id_, key in node.core.all():
            try:
                address = self.address_of(key)
            except (RedisError, ReferenceError):
                return
            if address not in (None, node.address):
                self.step(node, Core.leave, id_)

    def broken(self, node: Node, pair: int, error: Exception | None) -> None:
        """One connection of a pair has ended."""
        node.failure = error or ConnectionError("Connection closed by server.")
        self.step(node, Core.pair_ended, pair)

    # Who wants to hear of a loss hears of it also when the server says nothing.

    def watch(self, hold: Hold) -> None:
        """Looks at a hold when it could be lost."""
        if hold.kept is not None:
            hold.kept.line.watch()
        else:
            self.call_at(hold.until, lambda: self._look(hold))

    def _look(self, hold: Hold) -> None:
        if hold.doubtful:
            self.ask_aside(hold, lambda: self.watch(hold))
        elif hold.held:
            self.watch(hold)

    def ask_aside(self, hold: Hold, then: Callable[[], object]) -> None:
        """Asks the server whether it is held still, and does not wait for that. No answer in a moment is a loss."""
        if hold.node is None:
            hold.lapse()
            return

        def heard() -> None:
            if pending.outcome is not None and pending.outcome.kind == "held":
                then()
            elif hold.held:
                hold.lose("disconnected")

        pending = Pending(OWNERS.number(), hold.node, hold, heard)
        self.calls[pending.id] = pending
        self.step(hold.node, Core.check, pending.id, hold.id, max(min(hold.lease // 4, PATIENCE), 1))

    @property
    def is_usable(self) -> bool:
        """Whether it can be used here."""
        return not self.closed

    @property
    def is_over(self) -> bool:
        """Whether it can be used nowhere any more."""
        return self.closed

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being given back."""
        return all(node.core.is_settled for node in list(self.nodes.values()))

    def forget_given_back(self) -> None:
        """Of what was kept, the core has given back what nobody has used in time, or somebody else wanted."""
        if len(self.holds) < self._many_holds:
            return
        for id_, hold in list(self.holds.items()):
            if hold.kept is not None and hold.kept.line.rest is hold and hold.until == 0:
                hold.kept.line.rest = None
                del self.holds[id_]
        self._many_holds = len(self.holds) * 2 + _MANY

    def clear_lines(self) -> None:
        """The program ends, or the loop. Of kept locks, what nobody uses is given back."""
        with self.mutex:
            for line in list(self.lines.values()):
                line.clear()

    def end_lines(self) -> None:
        """It is closed: whoever waits for a kept lock is told so."""
        with self.mutex:
            for line in list(self.lines.values()):
                line.end()

    def lose_all(self) -> None:
        """The program ends its session. Who holds is told."""
        for hold in list(self.holds.values()):
            hold.lose("closed")


def _end(homes: dict[float | None, list[Any]]) -> None:
    for those in homes.values():
        for home in those:
            home.end()


class Homes:
    """Of each client's pool, or client of a cluster, the homes by their limits: one, or one in each event loop."""

    def __init__(self, kind: Callable[[Any, float | None], Any]) -> None:
        self._kind = kind
        self._homes: weakref.WeakKeyDictionary[Any, dict[float | None, list[Any]]] = weakref.WeakKeyDictionary()
        self._mutex = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def of(self, client: Any, limit: float | None = None) -> Any:
        """That of a client; of those who share a pool, the same. With a limit, one of connections of its own."""
        anchor = client if is_cluster(client) else client.connection_pool
        for home in self._homes.get(anchor, {}).get(limit, ()):
            if home.is_usable:
                return home
        with self._mutex:
            homes = self._homes.get(anchor)
            if homes is None:
                homes = self._homes[anchor] = {}
                end: Any = weakref.finalize(anchor, _end, homes)
                end.atexit = False
            those = homes[limit] = [home for home in homes.get(limit, ()) if not home.is_over]
            # Another thread may have been here before.
            home = next((home for home in those if home.is_usable), None)
            if home is None:
                home = self._kind(anchor, limit)
                those.append(home)
        return home

    def those_of(self, client: Any) -> list[Any]:
        """All of a client that can be used here."""
        homes = self._homes.get(client if is_cluster(client) else client.connection_pool, {})
        return [home for those in list(homes.values()) for home in those if home.is_usable]

    def all(self) -> list[Any]:
        """All."""
        return [home for homes in list(self._homes.values()) for those in list(homes.values()) for home in those]

    def _after_fork(self) -> None:
        """In the child: starts afresh."""
        self._mutex = threading.Lock()
        homes = self.all()
        self._homes.clear()
        for home in homes:
            home.forget()


class Elsewhere(NamedTuple):
    """Where a plain request is to be sent next."""

    address: Address
    asking: bool


def elsewhere(home: Home, pending: Pending) -> Elsewhere | None:
    """Whether another server is to be asked, by this answer."""
    reply = None if pending.outcome is None else pending.outcome.detail
    if not isinstance(reply, Failure):
        return None
    address = home._redirected(reply.text, pending.node.address)
    return None if address is None else Elsewhere(address, reply.text.startswith("ASK"))


def cluster_settings(cluster: Any, address: tuple[str, int]) -> tuple[Any, dict[str, Any]]:
    """Class and settings of a connection to a node of a cluster, known to it or not: those of another one."""
    manager = cluster.nodes_manager
    nodes: Sequence[Any] = list(manager.nodes_cache.values()) or list(manager.startup_nodes.values())
    for node in nodes:
        if hasattr(node, "connection_kwargs"):
            return node.connection_class, {**node.connection_kwargs, "host": address[0], "port": address[1]}
    for node in nodes:
        pool = cluster.get_redis_connection(node).connection_pool
        return pool.connection_class, {**pool.connection_kwargs, "host": address[0], "port": address[1]}
    raise ConnectionError("no node of the cluster is known")
