"""Links of a given rate, delay and loss, for packets of real sockets: between hosts of one's own, or on the loopback.

    with Hosts(2, Link(bits_per_sec=1e9, delay_seconds=0.01)) as hosts:
        subprocess.run(hosts.command(0, "ping", hosts.addresses[1]))

Packets come out of TUN devices, and a relay, a process of its own, passes them on when their time has come. It ends
once `close` is called or the process that made it is gone, killed or not; devices end with it. Linux, host code.
`Hosts` takes root; `tc` alone would need netem for a delay, which kernels of small virtual machines lack.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import heapq
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .faults import machine
from .processes import Process

_TUN, _SET_INTERFACE, _SET_OFFLOAD = "/dev/net/tun", 0x400454CA, 0x400454D0  # linux/if_tun.h, as the next two
_IS_TUN, _NO_PACKET_INFORMATION, _HAS_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _TCP_SEGMENTS = 0x01, 0x02
_HEADER = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, kind, bytes of headers, of a segment, ...
_FRAME_BYTES = 38  # that Ethernet adds to each packet, the gap between two included
_BURST_BYTES, _QUEUE_BYTES = 1 << 17, 16 << 20  # of `tc`: whole segments pass, and sockets limit what waits
_PACKET_BYTES = 1 << 17
_SHARE = 0.97  # of Ethernet's rate is that of packets; the rest are frames
_NAME, _NETWORK = "eth0", "10.53.0."
_PREFIX = bytes(int(part) for part in _NETWORK.split(".")[:3])
_MARK = 1  # of packets that a relay has let through
_LOCAL, _MAIN = 255, 254  # tables of routes
_NEW, _DELETE = 32, 33  # rtnetlink(7): of a rule
_INTERFACE, _PRIORITY, _FIREWALL_MARK = 3, 6, 10  # linux/fib_rules.h
_SET_ADDRESS, _SET_MASK = 0x8916, 0x891C  # netdevice(7)
_MOST_WAITING_SECONDS = 1.0  # for a narrow loopback; what would wait longer is lost
_UDP_OR_TCP = (6, 17)
_FIRST_PORT = 12_000


class Link(NamedTuple):
    """What carries packets, in each direction.

    Attributes:
      bits_per_sec: with the headers of IP and TCP; between hosts with those of Ethernet too.
      delay_seconds: from one host to another; a round trip takes two.
      loss: the share of packets that don't arrive.
      ports: from and to these nothing passes on the loopback.
    """

    bits_per_sec: float = math.inf
    delay_seconds: float = 0.0
    loss: float = 0.0
    ports: tuple[int, ...] = ()


class _Relay(contextlib.AbstractContextManager):
    """The process that passes packets on: `work`, a function below, with some arguments."""

    def __init__(self, work: Callable, *arguments):
        words = [sys.executable, "-m", __name__, work.__name__, json.dumps(arguments)]
        root = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"no links: the relay ended with {self._process.wait()}")
        self._made = json.loads(line)

    def close(self) -> None:
        self._process.communicate()  # closes the pipe whose end ends it

    def __exit__(self, *_) -> None:
        self.close()


class Hosts(_Relay):
    """Hosts, network namespaces that links join, from the construction to the end of the context.

    Each host has a TUN device, in which `tc` has packets wait for their turn at the link's rate, so that sockets wait
    as they do for a card. TCP hands the device segments of up to 64 kB, as it does a card that splits them itself, so
    that the relay keeps up with 1 Gbit/s in less than half a core; windows, slow start and retransmissions are the
    kernel's own. The relay holds the namespaces; they end with it, as soon as the commands in them have ended.

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
        super().__init__(_join_hosts, count, link, seed)
        self.addresses = [_address(host) for host in range(count)]

    def command(self, host: int, *words: str) -> list[str]:
        """Returns the words of a command that runs `words` on a host."""
        return ["nsenter", f"--net=/proc/{self._process.pid}/fd/{self._made[host]}", *words]


def on_hosts(hosts: Hosts, workers: int, servers: int, command: Sequence[str]) -> list[Process]:
    """Returns the processes of a job: a coordinator, if it has servers, and each task on a host of its own."""
    jobs = [("worker", index) for index in range(workers)] + [("ps", index) for index in range(servers)]
    places = [*enumerate(jobs)]
    if servers:
        places.insert(0, (0, ("chief", 0)))
    cluster: dict[str, list[str]] = {}
    for port, (host, (job, _)) in enumerate(places, _FIRST_PORT):
        cluster.setdefault(job, []).append(f"{hosts.addresses[host]}:{port}")
    cores = sorted(os.sched_getaffinity(0))
    return [
        Process(
            hosts.command(host, *command),
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})},
            frozenset({cores[host % len(cores)]}),
            serves="chief" in cluster and job != "chief",
        )
        for host, (job, index) in places
    ]


class Loopback(_Relay):
    """Has what the loopback carries take a link, until it is closed. Of several at a time the first one alone does.

    Rules of this network (`lacks_loopback`) send what is sent here to a TUN device, if there is one; the relay returns
    what it lets through by a raw socket, whose mark the rules know. So this needs no module of the kernel for queues or
    filters, and no tool.
    """

    def __init__(self, link: Link):
        super().__init__(_disturb_loopback, link)


# -- The relay --------------------------------------------------------------------------------------------------------


class _Wire:
    """The packets on their way.

    Args:
      count: of hosts.
      link: of each.
      seed: of what is lost.
      most_seconds: what would wait longer for the rate is lost.
    """

    def __init__(self, count: int, link: Link, seed: int = 0, most_seconds: float = math.inf):
        self._link, self._most_seconds = link, most_seconds
        self._random = random.Random(seed)
        self._out, self._in = [0.0] * count, [0.0] * count  # when each direction of a link is free again
        self._due: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, and what
        self._number = 0

    def send(self, sender: int, to: int, packet: bytes, size: int, now: float) -> None:
        """Takes a packet, of `size` bytes on the link."""
        if self._out[sender] - now > self._most_seconds:
            return
        seconds = 8 * size / self._link.bits_per_sec
        self._out[sender] = sent = max(now, self._out[sender]) + seconds
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


def _relay(
    end: io.FileIO,
    wire: _Wire,
    devices: Sequence[int],
    route: Callable[[bytes], tuple[int, int] | None],
    deliver: Callable[[int, bytes], object],
    made: Sequence[int] = (),
) -> None:
    """Prints `made`, and passes packets on until `end` can be read.

    Args:
      end: a pipe.
      wire: what they take.
      devices: of each host.
      route: returns to whom a packet goes and its bytes on the link; None: nowhere.
      deliver: hands a packet to a host.
      made: what the process that waits for the relay needs.
    """
    with contextlib.suppress(PermissionError):  # a link does not wait for a core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps(made), flush=True)
    while end not in (ready := select.select([end, *devices], [], [], wire.wait(time.monotonic()))[0]):
        now = time.monotonic()
        for device in ready:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(device, _PACKET_BYTES)
                if place := route(packet):
                    wire.send(devices.index(device), place[0], packet, place[1], now)
        for to, packet in wire.arrived(now):
            with contextlib.suppress(OSError):  # nobody takes it, or its queue is full: lost
                deliver(to, packet)


def _open_device(name: str, flags: int) -> tuple[int, bytes]:
    """Makes a TUN device; returns its descriptor, and its name, in which the kernel puts a number for %d."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", name.encode(), _IS_TUN | _NO_PACKET_INFORMATION | flags)
    return device, fcntl.ioctl(device, _SET_INTERFACE, wanted)[:16]


# -- Between hosts ----------------------------------------------------------------------------------------------------


def _address(host: int) -> str:
    return f"{_NETWORK}{host + 1}"


def _host(host: int, link: Link) -> tuple[int, int]:
    """Returns the file descriptors of a new namespace and its device. Leaves this process in it."""
    if lacks := machine.unshare(machine.NEW_NETWORK):
        raise SystemExit(lacks)
    device, _ = _open_device(_NAME, _HAS_HEADER)
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


def _join_hosts(end: io.FileIO, count: int, link: Sequence, seed: int) -> None:
    """Makes hosts, and relays their packets, each headed by what it is."""
    hosts = [_host(host, Link(*link)) for host in range(count)]
    spaces, devices = zip(*hosts, strict=True)

    def route(packet: bytes) -> tuple[int, int] | None:
        to = packet[_HEADER.size + 19] - 1  # the last byte of IPv4's destination
        if packet[_HEADER.size + 16 : _HEADER.size + 19] != _PREFIX or not 0 <= to < count:
            return None
        size, _, _, headers, segment, *_ = len(packet) - _HEADER.size, *_HEADER.unpack_from(packet)
        segments = math.ceil((size - headers) / segment) if segment else 1
        return to, size + (segments - 1) * headers + segments * _FRAME_BYTES

    wire = _Wire(count, Link(*link), seed)
    _relay(end, wire, devices, route, lambda to, packet: os.write(devices[to], packet), spaces)


# -- On the loopback --------------------------------------------------------------------------------------------------


@functools.cache
def lacks_loopback() -> str:
    """Gives this process a network whose loopback can be disturbed. Returns why it can't; empty if it can."""
    if reason := machine.enter():
        return reason
    try:
        Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1", encoding="ascii")
        os.close(os.open(_TUN, os.O_RDWR))
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


def _disturb_loopback(end: io.FileIO, link: Sequence) -> None:
    """Makes the device, and relays what the rules send to it."""
    device, name = _open_device("relay%d", 0)
    out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
    machine.set_up(name)
    for request, address in ((_SET_ADDRESS, "127.0.0.2"), (_SET_MASK, "255.0.0.0")):  # which bring the route
        fcntl.ioctl(out, request, struct.pack("=16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address)))
    closed = frozenset(Link(*link).ports)

    def route(packet: bytes) -> tuple[int, int] | None:
        if packet[9] in _UDP_OR_TCP and not closed.isdisjoint(struct.unpack_from(">HH", packet, 4 * (packet[0] & 15))):
            return None
        return 0, len(packet)

    wire = _Wire(1, Link(*link), most_seconds=_MOST_WAITING_SECONDS)
    _relay(end, wire, [device], route, lambda _, packet: out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0)))


if __name__ == "__main__":
    with open(0, "rb", buffering=0) as standard_input:
        {each.__name__: each for each in (_join_hosts, _disturb_loopback)}[sys.argv[1]](
            standard_input, *json.loads(sys.argv[2])
        )
