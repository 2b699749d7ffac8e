"""A loopback that can be slow, lossy or cut, by a relay through which its packets go. Linux, host code.

Rules of this network send what is sent here to a TUN device, if there is one: `relay`, a process of its own, makes it,
and returns what it lets through by a raw socket, whose mark the rules know. As the device ends with its process, so
does the disturbance. This needs no module of the kernel for queues or filters, and no tool.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import io
import json
import math
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import machine

_MARK = 1
_LOCAL, _MAIN = 255, 254  # tables of routes
_NEW, _DELETE = 32, 33  # rtnetlink(7): of a rule
_INTERFACE, _PRIORITY, _FIREWALL_MARK = 3, 6, 10  # linux/fib_rules.h
_SET_INTERFACE, _SET_ADDRESS, _SET_MASK = 0x400454CA, 0x8916, 0x891C  # linux/if_tun.h, netdevice(7)
_IS_TUN, _NO_PACKET_INFORMATION = 0x0001, 0x1000
_PACKET_BYTES = 65536
_MOST_WAITING_SECONDS = 1.0  # for a narrow link; what would wait longer is lost
_UDP_OR_TCP = (6, 17)


class Disturbance(NamedTuple):
    """What happens to packets.

    Attributes:
      delay_seconds: of each.
      bits_per_sec: that pass.
      loss: the share that is lost.
      ports: from and to these nothing passes.
    """

    delay_seconds: float = 0.0
    bits_per_sec: float = math.inf
    loss: float = 0.0
    ports: tuple[int, ...] = ()


@functools.cache
def lacks() -> str:
    """Returns why the loopback can't be disturbed; empty if it can."""
    if reason := machine.enter():
        return reason
    try:
        Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1", encoding="ascii")
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        _change(_NEW, 1, _LOCAL, {_FIREWALL_MARK: struct.pack("=I", _MARK)})
        _change(_NEW, 2, _MAIN, {_INTERFACE: b"lo\0"})  # sent here; this table is empty while there is no device
        _change(_NEW, 3, _LOCAL)
        _change(_DELETE, 0, _LOCAL)
    except OSError as error:
        return f"{error.filename or 'rules of routes'}: {error.strerror}"
    return ""


def _change(kind: int, priority: int, table: int, attributes: dict[int, bytes] | None = None) -> None:
    """Adds or deletes a rule that looks routes up in a table."""
    body = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, table, 0, 0, 1, 0)
    for number, value in {_PRIORITY: struct.pack("=I", priority), **(attributes or {})}.items():
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    wants_answer, creates = 0x5, 0x600 if kind == _NEW else 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), kind, wants_answer | creates, 1, 0) + body)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error:
        raise OSError(-error, os.strerror(-error))


class Relay:
    """Disturbs what the loopback carries, until it is closed. Of several at a time the first one alone does."""

    def __init__(self, disturbance: Disturbance):
        words = [sys.executable, "-m", __name__, json.dumps(disturbance)]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout
        self._process.stdout.readline()  # it has begun

    def close(self) -> None:
        self._process.communicate()


class _Wire:
    """The packets on their way."""

    def __init__(self, disturbance: Disturbance):
        self._disturbance, self._random = disturbance, random.Random(0)
        self._due = collections.deque[tuple[float, bytes]]()
        self._free = 0.0  # when all that was sent before has passed

    def send(self, packet: bytes, now: float) -> None:
        disturbance = self._disturbance
        if disturbance.ports and packet[9] in _UDP_OR_TCP:
            ports = struct.unpack_from(">HH", packet, 4 * (packet[0] & 15))
            if not set(ports).isdisjoint(disturbance.ports):
                return
        if self._free - now > _MOST_WAITING_SECONDS or self._random.random() < disturbance.loss:
            return
        self._free = max(now, self._free) + 8 * len(packet) / disturbance.bits_per_sec
        self._due.append((self._free + disturbance.delay_seconds, packet))

    def arrived(self, now: float) -> Iterable[bytes]:
        while self._due and self._due[0][0] <= now:
            yield self._due.popleft()[1]

    def wait(self, now: float) -> float | None:
        """Returns the seconds until a packet arrives; None if none is on its way."""
        return max(0.0, self._due[0][0] - now) if self._due else None


def relay(disturbance: Disturbance, end: io.FileIO) -> None:
    """Passes packets on until there is something to read from `end`."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", b"relay%d", _IS_TUN | _NO_PACKET_INFORMATION)  # the kernel puts a number
    name = fcntl.ioctl(device, _SET_INTERFACE, wanted)[:16]
    out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
    machine.set_up(name)
    for request, address in ((_SET_ADDRESS, "127.0.0.2"), (_SET_MASK, "255.0.0.0")):  # which bring the route
        fcntl.ioctl(out, request, struct.pack("=16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address)))
    with contextlib.suppress(PermissionError):  # a link does not wait for a core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("begun", flush=True)
    wire = _Wire(disturbance)
    while end not in (ready := select.select([end, device], [], [], wire.wait(time.monotonic()))[0]):
        now = time.monotonic()
        if ready:
            with contextlib.suppress(BlockingIOError):
                wire.send(os.read(device, _PACKET_BYTES), now)
        for packet in wire.arrived(now):
            with contextlib.suppress(OSError):  # nobody takes it: lost
                out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))


if __name__ == "__main__":
    with open(0, "rb", buffering=0) as standard_input:
        relay(Disturbance(*json.loads(sys.argv[1])), standard_input)
