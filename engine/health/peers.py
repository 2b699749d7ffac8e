"""What workers tell each other beside TensorFlow: that they are alive, how far they are, why they end. Host code.

UDP datagrams, at the number of the port at which TensorFlow's server has TCP. TensorFlow's own key-value store
(its coordination service) will not do: it lives in task 0, so all calls hang when that one is stopped; keys cannot be
overwritten; and after the first lost peer, when it is to be asked, it refuses every call.

Like TensorFlow's servers, this trusts its network. What arrives is shown to people, and ends a process only where that
process has itself seen no progress.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
import zlib
from typing import NamedTuple

_MAX_BYTES = 4096  # of a datagram; ours are under 700, or 2700 if JSON has to escape each byte of a farewell
_MAX_LINE = 400  # bytes of a farewell that travel, in UTF-8
_PROBE_SECONDS = 0.5


class Heard(NamedTuple):
    """The last that a peer told.

    Attributes:
      time: when it came, by this process's monotonic clock.
      step: the step that it last began, for people to read.
      beats, arrived: how far it is, to compare (`engine.health.watchdog`); arrived is -1 where it is not known.
      farewell: why it ends, if it does; empty if it has done its part.
      lost: the worker that it blames, -1 for none.
    """

    time: float
    step: int
    beats: int
    arrived: int
    farewell: str | None = None
    lost: int = -1


class Peers:
    """The channel to the other workers. One thread exchanges; any may read `heard`.

    Args:
      worker: this process's place among the workers.
      names: of all workers, as messages call them.
      addresses: of all workers, host:port.
    """

    def __init__(self, worker: int, names: tuple[str, ...], addresses: tuple[str, ...]):
        self.worker = worker
        self.heard: dict[int, Heard] = {}
        self._names = names
        self._addresses = addresses
        self._others = [other for other in range(len(names)) if other != worker]
        self._job = zlib.crc32(" ".join(addresses).encode())  # another job's datagrams are not ours
        self._socket: socket.socket | None = None
        self._where: dict[int, tuple] = {}

    def open(self) -> None:
        """Binds the port; an `OSError` if another program has it."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.setblocking(False)
        try:
            self._socket.bind(("", _split(self._addresses[self.worker])[1]))
        except OSError:
            self.close()
            raise
        self._find()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def called(self, worker: int) -> str:
        return f"{self._names[worker]} ({self._addresses[worker]})"

    def tell(self, step: int, beats: int, arrived: int, farewell: str | None = None, lost: int = -1) -> None:
        """Sends this worker's state to all others. What is lost on the way is told again the next time."""
        message = {"job": self._job, "worker": self.worker, "step": step, "beats": beats, "arrived": arrived}
        if farewell is not None:
            line = farewell.encode(errors="ignore")[:_MAX_LINE].decode(errors="ignore")
            message |= {"farewell": line, "lost": lost}
        data = json.dumps(message, ensure_ascii=False).encode()
        for other in self._others:
            if other not in self._where:
                self._find()  # a host whose name was not known yet
            if other in self._where:
                with contextlib.suppress(OSError):  # nobody there (yet, or any more), or no room in the buffer
                    self._socket.sendto(data, self._where[other])

    def listen(self, seconds: float) -> None:
        """Takes in what comes within that time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(left * 1000):
                return
            with contextlib.suppress(Exception):  # not ours, of whatever kind, or told that a peer is gone
                self._take(json.loads(self._socket.recv(_MAX_BYTES)))

    def _take(self, message: dict) -> None:
        worker = message["worker"]
        if message["job"] != self._job or worker not in self._others:
            return
        before = self.heard.get(worker)
        farewell, lost = message.get("farewell"), int(message.get("lost", -1))
        if farewell is None and before:  # a datagram may overtake another
            farewell, lost = before.farewell, before.lost
        state = (int(message[name]) for name in ("step", "beats", "arrived"))
        self.heard[worker] = Heard(time.monotonic(), *state, farewell and " ".join(str(farewell).split()), lost)

    def silent(self, seconds: float) -> dict[int, float]:
        """The peers that were heard of once, and not for so many seconds, without a farewell; since how many."""
        now = time.monotonic()
        return {
            worker: now - heard.time
            for worker, heard in list(self.heard.items())
            if heard.farewell is None and now - heard.time > seconds
        }

    def unheard(self) -> list[int]:
        """The peers of which nothing has come, ever: a firewall may let TCP through alone."""
        return [other for other in self._others if other not in self.heard]

    def gone(self, among: list[int] | None = None) -> list[int]:
        """The peers at whose address nobody listens any more: their process has ended. A stopped one listens still."""
        return [other for other in (self._others if among is None else among) if is_gone(self._addresses[other])]

    def _find(self) -> None:
        for other in self._others:
            host, port = _split(self._addresses[other])
            with contextlib.suppress(OSError):
                flags = socket.AI_V4MAPPED | socket.AI_ALL if self._socket.family == socket.AF_INET6 else 0
                found = socket.getaddrinfo(host, port, self._socket.family, socket.SOCK_DGRAM, flags=flags)
                self._where[other] = found[0][4]


def is_gone(address: str) -> bool:
    """Whether nobody listens at host:port: the process there has ended. A stopped one listens still."""
    try:
        with socket.create_connection(_split(address), timeout=_PROBE_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # no way to say
        return False


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
