"""Makes the network of its namespace unreliable: drops, delays and so reorders outgoing packets.

usage: bad_network.py LOSS-PERCENT DELAY-MS JITTER-MS SEED

Does what `tc netem` does, for kernels without it: the firewall passes each outgoing packet to this program, which decides later.
Prints "ready" when it has begun. Runs until its standard input is closed, and then restores the network.
"""

import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

NETLINK_NETFILTER = 12
QUEUE = 3 << 8
PACKET, VERDICT, CONFIG = 0, 1, 2
DROP, ACCEPT = 0, 1
HEADER = struct.Struct("=IHHII")
RULE = ["OUTPUT", "-o", "eth0", "-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass"]


def attribute(kind, payload):
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + bytes(-size % 4)


class Queue:
    """The kernel's queue of packets that wait for a verdict."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind((0, 0))
        bind, family, only_headers = 1, socket.AF_INET, 1
        self.send(CONFIG, attribute(1, struct.pack("!BxH", bind, family)))
        self.send(CONFIG, attribute(2, struct.pack("!IB", 0, only_headers)))
        self.send(CONFIG, attribute(3, struct.pack("!I", 20_000)))

    def send(self, kind, attributes):
        body = struct.pack("!BBH", socket.AF_INET, 0, 0) + attributes
        request = 1
        self.socket.send(HEADER.pack(HEADER.size + len(body), QUEUE | kind, request, 0, 0) + body)

    def packets(self):
        """The numbers of the packets that have arrived."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:  # More came than the buffer holds: those are lost, as on a bad network.
            return
        while len(data) >= HEADER.size:
            size, kind, *_ = HEADER.unpack_from(data)
            if kind == QUEUE | PACKET:
                yield self.number(data[HEADER.size + 4 : size])
            data = data[(size + 3) & ~3 :]

    @staticmethod
    def number(attributes):
        while True:
            size, kind = struct.unpack_from("=HH", attributes)
            if kind & 0x7FFF == 1:
                return struct.unpack_from("!I", attributes, 4)[0]
            attributes = attributes[(size + 3) & ~3 :]

    def verdict(self, number, verdict):
        self.send(VERDICT, attribute(2, struct.pack("!II", verdict, number)))


def work(queue, loss, delay, jitter, rng):
    due = []
    while True:
        pause = max(0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([queue.socket, sys.stdin], [], [], pause)
        if sys.stdin in ready:
            break
        if queue.socket in ready:
            for number in queue.packets():
                if rng.random() < loss:
                    queue.verdict(number, DROP)
                else:
                    heapq.heappush(due, (time.monotonic() + delay + rng.uniform(-jitter, jitter), number))
        while due and due[0][0] <= time.monotonic():
            queue.verdict(heapq.heappop(due)[1], ACCEPT)
    for _, number in due:
        queue.verdict(number, ACCEPT)


def main():
    loss, delay, jitter = (float(word) for word in sys.argv[1:4])
    queue = Queue()
    subprocess.run(["iptables", "-w", "-A", *RULE], check=True)
    try:
        print("ready", flush=True)
        work(queue, loss / 100, delay / 1000, jitter / 1000, random.Random(sys.argv[4]))
    finally:
        subprocess.run(["iptables", "-w", "-D", *RULE], check=True)


if __name__ == "__main__":
    os.nice(-5) if os.geteuid() == 0 else None
    main()
