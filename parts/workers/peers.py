"""Heartbeats between workers, independent of TensorFlow: progress, and why they end.

They are UDP datagrams, at the port number of TensorFlow's TCP server. TensorFlow's own key-value store (its
coordination service) does not suffice: it is in task 0, so all calls hang if that is stopped; keys can't be
overwritten; and after the first lost peer, when it is needed, it refuses every call.

A datagram counts only if it belongs to this job, comes from a peer that knows this process, and is newer than earlier
ones. Each process has a random number that can't be guessed and that its peers' datagrams repeat, so a replayed
datagram of a worker's earlier process has no effect. With the job's secret datagrams are signed, too (HMAC, RFC 2104);
without it, whoever can read the job's network can forge them. Their contents are shown to people, and end a process
only if it has itself seen no progress.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import itertools
import json
import secrets
import select
import socket
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...engine.errors import visible

_MAX_BYTES = 4096  # of a datagram; ours are under 900, or 2900 if JSON has to escape each byte of a reason
_SIGNATURE_BYTES = 32  # SHA-256's
_LARGEST = 1 << 63  # bound of received numbers
_MAX_LINE = 400  # bytes of a sent reason, in UTF-8
_PROBE_SECONDS = 0.5
_MOST_PROBED = 8  # silent tasks to probe at a time


class Heard(NamedTuple):
    """The last datagram of a peer.

    Attributes:
      time: the time of arrival, by this process's monotonic clock.
      number: its number among the process's datagrams.
      step: the step that it last began, for people to read.
      beats: its progress, to compare (`parts.workers.watchdog`).
      arrived: how many of its steps have their data, to compare, as in `Watchdog`; -1 if unknown.
      end_reason: why it ends, if it does; empty if its work is done.
      lost: the worker that it blames, -1 for none.
    """

    time: float
    process: str
    number: int
    step: int
    beats: int
    arrived: int
    end_reason: str | None = None
    lost: int = -1


class Peers:
    """The channel to the other workers. One thread exchanges datagrams; any may read `heard`.

    Args:
      worker: this process's index among the workers.
      addresses: the addresses of all workers, host:port.
      secret: the job's, which signs datagrams; empty signs none.
      bind: the address of this host at which it listens; empty: all, or loopback's if all `addresses` are.

    Attributes:
      heard: the last valid datagram of each worker, by worker.
    """

    def __init__(
        self, worker: int, names: tuple[str, ...], addresses: tuple[str, ...], secret: bytes = b"", bind: str = ""
    ):
        self.worker = worker
        self._bind = bind
        self.heard: dict[int, Heard] = {}
        self._names = names
        self.addresses = addresses
        self._secret = secret
        self._others = [other for other in range(len(names)) if other != worker]
        self._job = zlib.crc32(" ".join(addresses).encode())  # rejects other jobs' datagrams
        self._process = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._greeted: dict[int, str] = {}  # each peer's process, until it knows ours
        self._ended: set[str] = set()  # peers' earlier processes
        self._state: dict = {"step": 0, "beats": 0, "arrived": -1}  # as last sent
        self._socket: socket.socket | None = None
        self._is_over = False
        self._flags = 0  # for resolving the others' addresses
        self._sockaddrs: dict[int, list[tuple]] = {}  # all of each host: some may be of networks without a route

    def open(self) -> None:
        """Binds the port, at the first of `_places` that this host has; raises `OSError` if it is in use."""
        for family, sockaddr in (places := self._places()):
            try:
                self._socket = socket.socket(family, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
                # On all interfaces the socket takes IPv4's datagrams as well, whose addresses it has in IPv6's form.
                if family == socket.AF_INET6 and not sockaddr[0]:
                    self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                    self._flags = socket.AI_V4MAPPED | socket.AI_ALL
                self._socket.bind(sockaddr)
                break
            except OSError as error:
                self.close()
                is_elsewhere = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not is_elsewhere or family == places[-1][0]:
                    raise
        self._find()

    def _places(self) -> list[tuple[int, tuple]]:
        """Returns where to listen, (family, address) each: at `bind`, or at loopback if all workers are there.

        Else on all interfaces, as TensorFlow's server does: the others may know this host by an address of any network,
        or by one that is mapped to it.
        """
        port = _split(self.addresses[self.worker])[1]
        if self._bind:
            return [(socket.AF_INET6 if ":" in self._bind else socket.AF_INET, (self._bind, port))]
        places: list[tuple[int, tuple]] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            found = [_resolve(*_split(address), family) for address in self.addresses]
            if all(found) and all(_is_loopback(sockaddr) for sockaddrs in found for sockaddr in sockaddrs):
                places.append((family, found[self.worker][0]))
        return places or [(socket.AF_INET6, ("", port)), (socket.AF_INET, ("", port))]

    def close(self) -> None:
        """Closes the socket, if it is open."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def _open_socket(self) -> socket.socket:
        assert self._socket  # between `open` and `close`
        return self._socket

    def called(self, worker: int) -> str:
        """Returns a worker's name and address, for messages."""
        return f"{self._names[worker]} ({self.addresses[worker]})"

    def send(self, step: int, beats: int, arrived: int, end_reason: str | None = None, lost: int = -1) -> None:
        """Sends this worker's state to all others. The next datagram replaces a lost one."""
        state: dict[str, object] = {"step": step, "beats": beats, "arrived": arrived}
        if end_reason is not None:
            # The cut may be within a character, the rest of which is dropped.
            line = end_reason.encode(errors="ignore")[:_MAX_LINE].decode(errors="ignore")
            state |= {"end_reason": line, "lost": lost}
        self._state = state
        for other in self._others:
            if other not in self._sockaddrs:
                self._find()  # a host's name may have become known
            self._send(other)

    def _send(self, other: int) -> None:
        process = self.heard[other].process if other in self.heard else self._greeted.get(other, "")
        header = {"job": self._job, "worker": self.worker, "process": self._process, "number": next(self._numbers)}
        data = json.dumps(header | {"to": process} | self._state, ensure_ascii=False).encode()
        for sockaddr in self._sockaddrs.get(other, ()):
            with contextlib.suppress(OSError):  # no process or route there, or the buffer is full
                self._open_socket.sendto(self._sign(data) + data, sockaddr)

    def _sign(self, data: bytes) -> bytes:
        return hmac.digest(self._secret, data, "sha256") if self._secret else b""

    def listen(self, seconds: float) -> None:
        """Receives datagrams for that time, or until `wake`."""
        end = time.monotonic() + seconds
        while not self._is_over and (left := end - time.monotonic()) > 0:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(self._open_socket, select.POLLIN)
            if not poll.poll(left * 1000):
                return
            with contextlib.suppress(Exception):  # any foreign datagram, or an error about an ended peer
                self._take(self._open_socket.recv(_MAX_BYTES))

    def wake(self) -> None:
        """Ends `listen`, in another thread, and later ones."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._open_socket.sendto(b"", self._open_socket.getsockname())

    def _take(self, datagram: bytes) -> None:
        data = datagram[_SIGNATURE_BYTES:] if self._secret else datagram
        # Without a secret both are empty.
        if not hmac.compare_digest(self._sign(data), datagram[: len(datagram) - len(data)]):
            return
        message = json.loads(data)
        worker, process = message["worker"], str(message["process"])
        if message["job"] != self._job or worker not in self._others or process in self._ended:
            return
        before = self.heard.get(worker)
        is_new = before is None or before.process != process
        if message["to"] != self._process:  # it does not know this process, or is an earlier process's
            if is_new and self._greeted.get(worker) != process:
                self._greeted[worker] = process
                self._send(worker)
            return
        number, step, beats, arrived = (int(message[name]) for name in ("number", "step", "beats", "arrived"))
        if max(number, step, beats, arrived) >= _LARGEST or (before and not is_new and number <= before.number):
            return
        end_reason = message.get("end_reason")
        line = None if end_reason is None else " ".join(visible(str(end_reason)[:_MAX_LINE]).split())
        lost = int(message.get("lost", -1))
        self.heard[worker] = Heard(time.monotonic(), process, number, step, beats, arrived, line, lost)
        if is_new:
            if before:
                self._ended.add(before.process)
            self._send(worker)

    def silent(self, seconds: float) -> dict[int, float]:
        """Returns the seconds since the last datagram of peers that are silent for longer, and did not end."""
        # Of a copy: the thread that listens may add a peer meanwhile.
        now = time.monotonic()
        return {
            worker: now - heard.time
            for worker, heard in list(self.heard.items())
            if heard.end_reason is None and now - heard.time > seconds
        }

    def never_heard(self) -> list[int]:
        """Returns the peers without any datagram so far: a firewall may let only TCP through."""
        return [other for other in self._others if other not in self.heard]

    def gone(self, among: list[int] | None = None) -> list[int]:
        """Returns the peers at whose address nothing listens, since their process has ended. A stopped one listens."""
        return [other for other in (self._others if among is None else among) if is_gone(self.addresses[other])]

    def _find(self) -> None:
        for other in self._others:
            if addresses := _resolve(*_split(self.addresses[other]), self._open_socket.family, self._flags):
                self._sockaddrs[other] = addresses


def _resolve(host: str, port: int, family: int, flags: int = 0) -> list[tuple]:
    """The addresses of a host; none while its name is unknown."""
    with contextlib.suppress(OSError):
        return [info[4] for info in socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM, flags=flags)]
    return []


def _is_loopback(sockaddr: tuple) -> bool:
    return ipaddress.ip_address(sockaddr[0].partition("%")[0]).is_loopback


def is_gone(address: str) -> bool:
    """Returns whether nothing listens at host:port, since the process has ended. A stopped process listens."""
    try:
        with socket.create_connection(_split(address), timeout=_PROBE_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # unknown
        return False


def is_silent(address: str, seconds: float) -> bool:
    """Returns whether a gRPC server at host:port, which sends first, sends nothing in time."""
    try:
        with socket.create_connection(_split(address), timeout=seconds) as sock:
            sock.recv(1)
    except ConnectionError:  # it has ended
        return False
    except OSError:  # time is over, or there is no route
        return True
    return False


class LastHeard:
    """The times at which tasks were last heard; probes silent ones.

    Args:
      addresses: host:port of each task's gRPC server, by its name.
    """

    def __init__(self, addresses: Mapping[str, str]):
        self._addresses = addresses
        self._at: dict[str, float] = {}

    def note(self, tasks: Iterable[str]) -> None:
        """Records that tasks are heard now. A task that never was is not probed."""
        self._at |= dict.fromkeys(tasks, time.monotonic())

    def silent(self, seconds: float) -> list[str]:
        """Returns the tasks that have been silent for about so long, and stay so when probed; see `is_silent`.

        Probes a few at a time, the longest silent first.
        """
        before = time.monotonic() - seconds / 2
        quiet = [task for task in self._addresses if self._at.get(task, before) < before]
        probed = sorted(quiet, key=self._at.__getitem__)[:_MOST_PROBED]
        silent = [task for task in probed if is_silent(self._addresses[task], seconds / 3)]
        self.note(task for task in probed if task not in silent)
        return silent


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
