"""Hosts of one's own: network namespaces that links of a given rate, latency and loss join. Linux, as root; host code.

    with Hosts(2, Link(bits_per_sec=1e9, delay_seconds=0.01)) as hosts:
        subprocess.run(hosts.command(0, "ping", hosts.addresses[1]))

Each host has a TUN device, in which `tc` has packets wait for their turn at the link's rate, so that sockets wait as
they do for a card. A relay, a process of its own, passes packets on by their destination: after the delay, and no
faster than the sender's and the receiver's links carry them. TCP hands the device segments of up to 64 kB, as it does a
card that splits them itself, so that the relay keeps up with 1 Gbit/s in less than half a core; windows, slow start and
retransmissions are the kernel's own. The relay holds all namespaces. It ends once `Hosts` is closed or its process is
gone, killed or not; the namespaces do too, as soon as the commands in them have ended.

`tc` alone would need netem for a delay, which kernels of small virtual machines lack.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import io
import json
import math
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .faults import machine

_TUN, _SET_INTERFACE, _SET_OFFLOAD = "/dev/net/tun", 0x400454CA, 0x400454D0  # linux/if_tun.h, as the next two
_IS_TUN, _NO_PACKET_INFORMATION, _HAS_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _TCP_SEGMENTS = 0x01, 0x02
_HEADER = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, kind, bytes of headers, of a segment, ...
_FRAME_BYTES = 38  # that Ethernet adds to each packet, the gap between two included
_BURST_BYTES, _QUEUE_BYTES = 1 << 17, 16 << 20  # of `tc`: whole segments pass, and sockets limit what waits
_SHARE = 0.97  # of Ethernet's rate is that of packets; the rest are frames
_NAME, _NETWORK = "eth0", "10.53.0."


class Link(NamedTuple):
    """What carries a host's packets, in each direction.

    Attributes:
      bits_per_sec: with the headers of Ethernet, IP and TCP.
      delay_seconds: from one host to another; a round trip takes two.
      loss: the share of packets that don't arrive.
    """

    bits_per_sec: float = math.inf
    delay_seconds: float = 0.0
    loss: float = 0.0


class Hosts(contextlib.AbstractContextManager):
    """Hosts, from the construction to the end of the context.

    Args:
      count: of them.
      link: of each.
      seed: of what is lost.

    Attributes:
      addresses: of the hosts; each also has a 127.0.0.1 of its own.

    Raises:
      SystemExit: they can't be made.
    """

    def __init__(self, count: int, link: Link, seed: int = 0):
        self.addresses = [_address(host) for host in range(count)]
        words = [sys.executable, "-m", __name__, json.dumps([count, link, seed])]
        root = Path(__file__).resolve().parents[1]
        self._relay = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout
        if not (spaces := self._relay.stdout.readline()):
            raise SystemExit(f"no hosts: the relay ended with {self._relay.wait()}")
        self._spaces = [f"/proc/{self._relay.pid}/fd/{space}" for space in json.loads(spaces)]

    def command(self, host: int, *words: str) -> list[str]:
        """Returns the words of a command that runs `words` on a host."""
        return ["nsenter", f"--net={self._spaces[host]}", *words]

    def __exit__(self, *_) -> None:
        self._relay.communicate()  # closes the pipe whose end ends it


def _address(host: int) -> str:
    return f"{_NETWORK}{host + 1}"


def _host(host: int, link: Link) -> tuple[int, int]:
    """Returns the file descriptors of a new namespace and its device. Leaves this process in it."""
    if lacks := machine.unshare(machine.NEW_NETWORK):
        raise SystemExit(lacks)
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IS_TUN | _NO_PACKET_INFORMATION | _HAS_HEADER
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", _NAME.encode(), flags))
    fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUMS | _TCP_SEGMENTS)
    lacks = (
        machine.run("ip", "link", "set", "lo", "up")
        or machine.run("ip", "address", "add", f"{_address(host)}/24", "dev", _NAME)
        or machine.run("ip", "link", "set", _NAME, "up")
    )
    if not lacks and link.bits_per_sec < math.inf:
        queue = ("rate", f"{_SHARE * link.bits_per_sec:.0f}", "burst", _BURST_BYTES, "limit", _QUEUE_BYTES)
        lacks = machine.run("tc", "qdisc", "replace", "dev", _NAME, "root", "tbf", *queue)
    if lacks:
        raise SystemExit(lacks)
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


class _Wire:
    """The packets on their way.

    Args:
      count: of hosts.
      link: of each.
      seed: of what is lost.
    """

    def __init__(self, count: int, link: Link, seed: int):
        self._link = link
        self._random = random.Random(seed)
        self._out, self._in = [0.0] * count, [0.0] * count  # when each direction of a link is free again
        self._due: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, and what
        self._number = 0

    def send(self, host: int, packet: bytes, now: float) -> None:
        """Takes a packet, headed by what it is."""
        to = packet[_HEADER.size + 19] - 1  # the last byte of IPv4's destination
        if packet[_HEADER.size + 16 : _HEADER.size + 19] != _PREFIX or not 0 <= to < len(self._out):
            return
        size, _, _, headers, segment, *_ = len(packet) - _HEADER.size, *_HEADER.unpack_from(packet)
        segments = math.ceil((size - headers) / segment) if segment else 1
        seconds = 8 * (size + (segments - 1) * headers + segments * _FRAME_BYTES) / self._link.bits_per_sec
        self._out[host] = sent = max(now, self._out[host]) + seconds
        if self._random.random() < self._link.loss:
            return
        self._in[to] = received = max(sent, self._in[to] + seconds)
        self._number += 1
        heapq.heappush(self._due, (received + self._link.delay_seconds, self._number, to, packet))

    def arrived(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yields the packets whose time has come, and to whom they go."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2:]

    def wait(self, now: float) -> float | None:
        """Returns the seconds until a packet arrives; None if none is on its way."""
        return max(0.0, self._due[0][0] - now) if self._due else None


_PREFIX = bytes(int(part) for part in _NETWORK.split(".")[:3])


def _relay(end: io.FileIO, count: int, link: Link, seed: int) -> None:
    """Makes the hosts, prints the descriptors of their namespaces, and passes packets on until `end` can be read."""
    made = [_host(host, link) for host in range(count)]
    devices = [device for _, device in made]
    with contextlib.suppress(PermissionError):  # a link does not wait for a core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    wire = _Wire(count, link, seed)
    print(json.dumps([space for space, _ in made]), flush=True)
    while end not in (ready := select.select([end, *devices], [], [], wire.wait(time.monotonic()))[0]):
        now = time.monotonic()
        for device in ready:
            with contextlib.suppress(BlockingIOError):
                wire.send(devices.index(device), os.read(device, 1 << 17), now)
        for to, packet in wire.arrived(now):
            with contextlib.suppress(OSError):  # its queue is full, or it is down: lost
                os.write(devices[to], packet)


def _main() -> None:
    count, link, seed = json.loads(sys.argv[1])
    with open(0, "rb", buffering=0) as standard_input:
        _relay(standard_input, count, Link(*link), seed)


if __name__ == "__main__":
    _main()
