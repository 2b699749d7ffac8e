"""Reads the workers of a run from TF_CONFIG, and waits for the peers before TensorFlow starts. Host code.

TensorFlow's constructor of a multi-worker strategy waits for all tasks without end, and holds Python's lock meanwhile:
no thread and no signal handler runs. So the peers are awaited here, before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from absl import logging

from ..errors import UsageError
from . import listeners

_CURE = 'it looks like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_JOBS = {  # in the order of TensorFlow's ids; of a parameter server's cluster the coordinator, called chief, is first
    "multi_worker": ("chief", "worker"),
    "parameter_server": ("chief", "worker", "ps", "evaluator"),
}
_NEEDED = {"multi_worker": (), "parameter_server": ("chief", "worker", "ps")}
_ALONE = ("chief", "evaluator")  # types of which there is at most one task
_OTHERS = {
    "ps": "parameter servers belong to --strategy=parameter_server; use that, or leave ps out",
    "evaluator": "an evaluator is no part of --strategy=multi_worker; leave it out, and run --mode=eval by itself",
}
SECRET = "CRANKSHAFT_JOB_SECRET"  # an environment variable, the same for all workers of a job and unknown to others
_SECRET_CHARACTERS = 16
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 2.0  # for a host that does not answer at all
_LEFT_SECONDS = (
    10.0  # a task answers without a pause from its coming on, but for the moment in which TensorFlow takes over
)
# What an HTTP/2 server, as TensorFlow's, says first: a frame of settings, here without any (RFC 9113, 3.4 and 6.5). The
# first three bytes are its length. One that acknowledges settings, which no server begins with, says: not ready yet.
_READY, _STARTING = (bytes((0, 0, 0, 4, flags, 0, 0, 0, 0)) for flags in (0, 1))
_SAYS = {_READY[3:]: "ready", _STARTING[3:]: "starting"}


class ClusterError(Exception):
    """The cluster did not come together, and may when tried again: which task, what to look at. One line."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a run and which of them this process is.

    Attributes:
      addresses: (name, "host:port") of each task, in the order of TensorFlow's ids: the chief if there is one, then
        the workers. A name is "chief" or, for example, "worker 1".
      index: this task's index in `addresses`.
      secret: the job's, which authenticates the workers' datagrams; empty if there is none.
    """

    addresses: tuple[tuple[str, str], ...]
    index: int
    secret: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def task(self) -> str:
        return self.addresses[self.index][0]

    @property
    def address(self) -> str:
        return self.addresses[self.index][1]

    @property
    def is_chief(self) -> bool:
        """Whether this task writes and prints: the chief, or worker 0 where no task is called chief."""
        return self.index == 0

    @property
    def is_on_one_host(self) -> bool:
        """Whether all addresses are loopback's, so that every task is on this machine."""
        return all(_is_loopback(split(address)[0]) for _, address in self.addresses)

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def kind(self) -> str:
        """The task's type: chief, worker, ps, evaluator."""
        return self.task.split()[0]

    @property
    def task_id(self) -> int:
        """The task's index among those of its type."""
        return self.job(self.kind).index(self.address)

    def job(self, kind: str) -> tuple[str, ...]:
        """Returns the addresses of the tasks of a type, in their order."""
        return tuple(address for name, address in self.addresses if name.split()[0] == kind)

    @property
    def peers(self) -> tuple[tuple[str, str], ...]:
        """All others that this task works with; an evaluator, which only reads files, is not among them."""
        others = self.addresses[: self.index] + self.addresses[self.index + 1 :]
        return tuple(other for other in others if other[0] != "evaluator")


def from_environment(environment: Mapping[str, str], strategy: str = "multi_worker") -> Cluster:
    """Reads the cluster that TF_CONFIG describes (https://www.tensorflow.org/guide/distributed_training#TF_CONFIG).

    Args:
      environment: the process's variables.
      strategy: multi_worker, or parameter_server, which has more types of task.

    Raises:
      UsageError: on any mistake in it.
    """
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        raise UsageError(
            f"TF_CONFIG is not set, and --strategy={strategy} learns from it who the workers are; "
            f"`crankshaft local --workers=2{' --ps=2' if strategy == 'parameter_server' else ''} -- ...` starts "
            "them on this machine and sets it"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG={_short(text)} is not JSON ({error}); {_CURE}") from None
    if not isinstance(found, dict):
        raise UsageError(f"TF_CONFIG={_short(text)} is not an object; {_CURE}")
    known = _JOBS[strategy]
    jobs = _jobs(found, strategy)
    kind, index = _task(found, jobs, known)
    addresses = [
        (job if job in _ALONE else f"{job} {number}", address)
        for job in known
        for number, address in enumerate(jobs.get(job, ()))
    ]
    _check_addresses(addresses)
    before = known[: known.index(kind)]
    number = index + sum(len(jobs.get(job, ())) for job in before)
    return Cluster(tuple(addresses), number, _secret(environment.get(SECRET, "")))


def _secret(given: str) -> bytes:
    if given and len(given) < _SECRET_CHARACTERS:
        raise UsageError(
            f"{SECRET} has {len(given)} characters, which can be guessed; give all workers the same "
            f"{_SECRET_CHARACTERS} or more, by chance, or leave it out"
        )
    return given.encode(errors="surrogateescape")


def _jobs(found: dict, strategy: str) -> dict[str, list[str]]:
    if "cluster" not in found:
        raise UsageError(f"TF_CONFIG has no cluster, only {_names(found)}; {_CURE}")
    jobs = found["cluster"]
    if not isinstance(jobs, dict):
        raise UsageError(f"TF_CONFIG's cluster={_short(jobs)} is not an object of task types; {_CURE}")
    for job, addresses in jobs.items():
        if job not in (known := _JOBS[strategy]):
            cure = _OTHERS.get(job, f"use {', '.join(known)}")
            raise UsageError(f"TF_CONFIG's cluster has the task type {job!r}; {cure}")
        if not isinstance(addresses, list):
            raise UsageError(f"TF_CONFIG's cluster has {job}={_short(addresses)}, which is not a list; {_CURE}")
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    if not jobs:
        raise UsageError(f"TF_CONFIG's cluster is empty; {_CURE}")
    if len(jobs.get("chief", ())) > 1:
        raise UsageError(f"TF_CONFIG's cluster has {len(jobs['chief'])} chiefs; list one, and the others as workers")
    if len(jobs.get("evaluator", ())) > 1:
        raise UsageError(f"TF_CONFIG's cluster has {len(jobs['evaluator'])} evaluators; list one")
    for job in _NEEDED[strategy]:
        if job not in jobs:
            raise UsageError(
                f"TF_CONFIG's cluster has no {job}, only {_names(jobs)}; --strategy={strategy} needs one chief (the "
                "coordinator), and worker and ps of one or more"
            )
    return jobs


def _task(found: dict, jobs: dict[str, list[str]], known: tuple[str, ...]) -> tuple[str, int]:
    """Returns (task type, index within it) of this process."""
    task = found.get("task")
    if not isinstance(task, dict):
        what = f"task={_short(task)}, which is not an object" if "task" in found else "no task"
        raise UsageError(f"TF_CONFIG has {what}: it says which of the cluster's tasks this process is; {_CURE}")
    kind, index = task.get("type"), task.get("index")
    if kind not in known:
        use = f"use {' or '.join(known)}"
        cure = _OTHERS.get(kind, use) if isinstance(kind, str) else use
        raise UsageError(f"TF_CONFIG's task has type={_short(kind)}; {cure}")
    if kind not in jobs:
        raise UsageError(f"TF_CONFIG's task is a {kind}, but its cluster has only {_names(jobs)}; add {kind} to it")
    last = len(jobs[kind]) - 1
    use = "use index 0" if last == 0 else f"use 0 to {last}"
    if "index" not in task:
        raise UsageError(f"TF_CONFIG's task has no index; {use}")
    if not isinstance(index, int) or isinstance(index, bool):
        raise UsageError(f"TF_CONFIG's task has index={_short(index)}, which is not an integer; {use}")
    if not 0 <= index <= last:
        raise UsageError(f"TF_CONFIG's task has index={index}, and its cluster {last + 1} of {kind}; {use}")
    return kind, index


def _check_addresses(addresses: list[tuple[str, str]]) -> None:
    owners: dict[str, str] = {}
    for name, address in addresses:
        if not isinstance(address, str):
            raise UsageError(f"TF_CONFIG's {name} is {_short(address)}; write its address as 'host:port'")
        host, port = split(address) or ("", 0)
        if not host:
            raise UsageError(f"TF_CONFIG's {name} is {address!r}; write its address as 'host:port', without a scheme")
        if not 1 <= port <= 65535:
            raise UsageError(f"TF_CONFIG's {name} is {address!r}, whose port is out of range; use 1 to 65535")
        if address in owners:
            raise UsageError(f"TF_CONFIG's {owners[address]} and {name} are both {address}; give each its own port")
        owners[address] = name


def split(address: str) -> tuple[str, int] | None:
    """Returns (host, port) of "host:port" or "[IPv6]:port"; None if it is neither."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/\[\]]+)):(\d{1,9})", address, flags=re.ASCII)
    return (found[1] or found[2], int(found[3])) if found else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bindable(cluster: Cluster) -> None:
    """Tries to listen at this task's own address; warns if the host that it names is not this one.

    A container's port may be mapped, or a name be the cluster's, and peers still reach this process by it. TensorFlow's
    server listens at the port on all interfaces, whatever the host's name; that is what is tried. A port that an
    earlier process has just left (TIME_WAIT) is free.

    Raises:
      UsageError: its port is one that this user may not have.
      ClusterError: its port is in use; it may be free a moment later.
    """
    if elsewhere := _why_elsewhere(split(cluster.address)[0]):
        logging.warning(
            "TF_CONFIG's %s, this process, is at %s, %s; unless the others reach this process there (a mapped port, a "
            "cluster's name), correct the task's index or its address",
            cluster.task,
            cluster.address,
            elsewhere,
        )
    _listen(cluster).close()


def _why_elsewhere(host: str) -> str:
    """Returns why a host seems not to be this one; empty if it is."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"a host that is not known here ({error.strerror})"
    if any(_is_local(family, where) for family, _, _, _, where in found):
        return ""
    return f"which is not this host ({socket.gethostname()})"


def _is_local(family: int, where: tuple) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(where)  # port 0: any free one
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


@contextlib.contextmanager
def _explained(cluster: Cluster):
    """Explains why this task's port can't be listened at."""
    try:
        yield
    except PermissionError:
        raise UsageError(
            f"TF_CONFIG's {cluster.task}, this process, is at {cluster.address}, a port that only root may use; "
            "use one from 1024 on"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"TF_CONFIG's {cluster.task}, this process, is at {cluster.address}, and that port is in use "
            f"({os.strerror(error.errno)}); end the process that has it, or use another port"
        ) from None


def _listen(cluster: Cluster) -> socket.socket:
    with _explained(cluster):
        return listeners.listen(split(cluster.address)[1], only_here=cluster.is_on_one_host)


@contextlib.contextmanager
def keep_others_out(cluster: Cluster):
    """Keeps other hosts from the server that TensorFlow starts within, if the whole cluster is on this one."""
    with contextlib.ExitStack() as stack:
        if cluster.is_on_one_host:
            with _explained(cluster):
                stack.enter_context(listeners.closed_to_other_hosts(split(cluster.address)[1]))
        yield


class Meeting:
    """Answers, within, whoever asks at this task's address whether it has come, and waits for its peers.

    Each comes twice: as it starts, and once it is ready for TensorFlow's server, which answers for it from then on.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._greeting = _STARTING
        self._seen: dict[tuple[str, str], float] = {}  # by peer, when it answered last

    def __enter__(self) -> Meeting:
        self._listener = _listen(self._cluster)
        self._thread = threading.Thread(target=self._greet, name="meeting", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._thread.join()
        self._listener.close()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                with self._listener.accept()[0] as caller, contextlib.suppress(OSError):
                    caller.send(self._greeting)

    def wait(self, timeout_seconds: float, *, ready: bool = False) -> None:
        """Waits until every peer answers at its address; `ready` says that this task is, and waits until they are.

        Raises:
          ClusterError: names the peers that have not come within `timeout_seconds`.
        """
        if ready:
            self._greeting = _READY
        end = time.monotonic() + timeout_seconds
        peers = self._cluster.peers
        while True:
            said = {peer: answers(peer[1], _patience(end)) for peer in peers}
            here = [peer for peer in peers if said[peer] == "ready" or (said[peer] and not ready)]
            if len(here) == len(peers):
                return
            now = time.monotonic()
            self._seen |= {peer: now for peer in peers if said[peer]}
            seen = self._seen
            if left := [peer for peer in peers if now - seen.get(peer, now) > _LEFT_SECONDS]:
                raise ClusterError(_missing(left, f"came, and has not answered for {_LEFT_SECONDS:g} s"))
            if now >= end:
                # Others give up at the same moment: only where all came once is a peer that left to blame.
                missing = [peer for peer in peers if peer not in seen or (said[peer] and peer not in here)]
                what = "did not come" if missing else "came, left, and did not come back"
                away = missing or [peer for peer in peers if peer not in here]
                raise ClusterError(_missing(away, f"{what} within --cluster_timeout_seconds={timeout_seconds:g}"))
            time.sleep(_POLL_SECONDS)


def _missing(peers: Sequence[tuple[str, str]], what: str) -> str:
    """Returns the line on peers, (name, address) each, that are missing."""
    cure = f"start {'it' if len(peers) == 1 else 'them'}, or look at the output there"
    if any(answers(address, _POLL_SECONDS) is None for _, address in peers):
        cure = "it is stopped, or another program has the port"
    return f"{' and '.join(f'{name} ({address})' for name, address in peers)} {what}; {cure}"


def answers(address: str, patience: float = _CONNECT_SECONDS) -> str | None:
    """Returns what a task at an address says within so many seconds: "ready" or "starting".

    "": nothing listens there. None: something does, and says nothing like it, as a process that is stopped, whose
    kernel goes on to take callers.
    """
    try:
        with socket.create_connection(split(address), timeout=patience) as sock:
            # A caller may be given the very port that it calls as its own, and so reach itself.
            if sock.getsockname() == sock.getpeername():
                return ""
            with contextlib.suppress(OSError):
                return _SAYS.get(sock.recv(9, socket.MSG_WAITALL)[3:])
            return None
    except OSError:
        return ""


class Presence:
    """Observes whether a task has not answered for so many seconds, from the start on.

    Time in which this process did not observe it, as it was stopped itself, does not count.
    """

    def __init__(self, address: str, timeout_seconds: float):
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._away_seconds, self._asked = 0.0, time.monotonic()

    def is_gone(self) -> bool:
        here, now = answers(self._address), time.monotonic()
        self._away_seconds = 0.0 if here else self._away_seconds + min(now - self._asked, 2 * _CONNECT_SECONDS)
        self._asked = now
        return self._away_seconds > self._timeout_seconds


def _patience(end: float) -> float:
    """Returns the seconds for one call, up to `end` by the monotonic clock."""
    return min(_CONNECT_SECONDS, max(end - time.monotonic(), _POLL_SECONDS))


@contextlib.contextmanager
def limited(timeout_seconds: float):
    """Ends this process with exit code 1 if the body takes over `timeout_seconds`, with its stacks on standard error.

    Within `process.without_start_up_noise` a line stands in place of the stacks.

    For the making of the strategy: a peer that came and died a moment later would be awaited for ever, with Python's
    lock held. faulthandler's thread needs no lock. Must not nest with other uses of `dump_traceback_later`.
    """
    faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _short(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _names(found: Mapping) -> str:
    return ", ".join(sorted(found)) or "nothing"
